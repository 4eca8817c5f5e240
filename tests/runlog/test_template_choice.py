"""A model that planish does not know by name or by its files is used with its chat template."""

import pytest

from planish.errors import UnknownModelError
from planish.runlog.checkpoints import choose_renderer
from planish.testing import save_byte_tokenizer
from planish.tokenizer import load_tokenizer


def test_the_tokenizer_of_a_remote_server_names_the_renderer(tmp_path):
    """A client of a server has the tokenizer's files, and neither weights nor config.json."""
    tokenizer = load_tokenizer(save_byte_tokenizer(tmp_path))
    assert choose_renderer(None, "team/unknown", tokenizer).name == "template"
    assert choose_renderer("qwen3_instruct", "team/unknown", tokenizer).name == "qwen3_instruct"
    tokenizer.chat_template = None
    with pytest.raises(UnknownModelError, match="has no config"):
        choose_renderer(None, "team/unknown", tokenizer)
