import json

import pytest
from ledger_service import LedgerService

from planish.renderers import get_renderer
from planish.runlog import model_renderer
from planish.testing import save_byte_tokenizer
from planish.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def renderer(tokenizer):
    return get_renderer("qwen3_instruct", tokenizer)


@pytest.fixture
def service(tokenizer):
    return LedgerService(tokenizer)


@pytest.fixture(autouse=True)
def names_of_models(monkeypatch, tokenizer):
    """Make the model "tiny" and its renderer known, as a run learns them from a service."""
    known = {
        ("tiny", None): get_renderer("qwen3_instruct", tokenizer),
        ("tiny", "qwen3"): get_renderer("qwen3", tokenizer),
    }
    monkeypatch.setattr(model_renderer, "_RENDERERS", known)


def say(number):
    return {
        "messages": [
            {"role": "user", "content": f"Say {number}."},
            {"role": "assistant", "content": f"It is {number}."},
        ]
    }


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """A file of 13 conversations."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(json.dumps(say(number)) + "\n" for number in range(13)))
    return path
