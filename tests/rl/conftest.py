import pytest
from digest_service import FakeService

from planish.testing import save_byte_tokenizer
from planish.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def service(tokenizer):
    return FakeService(tokenizer)
