import pytest

from planish.renderers import get_renderer
from planish.testing import save_byte_tokenizer
from planish.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def renderer(tmp_path_factory):
    return get_renderer(
        "qwen3_instruct", load_tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    )
