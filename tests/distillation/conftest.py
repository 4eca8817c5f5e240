import json

import pytest

from planish import ServiceClient
from planish.testing import save_byte_tokenizer, tiny_model
from planish.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Three random models of one shape and one tokenizer: a student, and two teachers."""
    return [
        str(tiny_model(tmp_path_factory.mktemp(f"model{seed}"), seed=seed, tied=False))
        for seed in range(3)
    ]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def client(tmp_path):
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as client:
        yield client


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    """A file of 12 questions."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(12)))
    return path


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """A file of 10 conversations."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = [{"prompt": f"Say {n}.", "completion": f"It is {n}."} for n in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
