import json

import pytest

from planish.testing import save_byte_tokenizer, tiny_model
from planish.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def sums(tmp_path):
    """12 sums in GSM8K's form."""
    rows = [
        {"question": f"What is {n} + 2?", "answer": f"{n} + 2 = {n + 2}\n#### {n + 2}"}
        for n in range(12)
    ]
    return write_rows(tmp_path / "sums.jsonl", rows)


@pytest.fixture
def capitals(tmp_path):
    rows = [
        {"question": "The capital of France?", "choices": ["Rome", "Paris", "Oslo"], "answer": "B"},
        {"question": "The capital of Norway?", "choices": ["Rome", "Paris", "Oslo"], "answer": 2},
    ]
    return write_rows(tmp_path / "capitals.jsonl", rows)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
