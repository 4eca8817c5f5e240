import json

import pytest
from fake_service import FakeService

from planish import ServiceClient
from planish.testing import save_byte_tokenizer, tiny_model
from planish.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def service(tokenizer):
    return FakeService(tokenizer)


@pytest.fixture(scope="session")
def sums_dataset(tmp_path_factory):
    """A directory with train.jsonl (26 sums) and test.jsonl (5), in GSM8K's form."""
    directory = tmp_path_factory.mktemp("sums")
    for split, count in (("train", 26), ("test", 5)):
        rows = [
            {
                "question": f"What is {n} + 2?",
                "answer": f"{n} + 2 = <<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}",
            }
            for n in range(count)
        ]
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """The path of a tiny random model. Its renderer is chatml over bytes."""
    return str(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def engine(tmp_path):
    """A service client with an engine in this process."""
    with ServiceClient(data_dir=tmp_path / "data") as client:
        yield client
