import pytest

from planish.testing import save_byte_tokenizer
from planish.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))
