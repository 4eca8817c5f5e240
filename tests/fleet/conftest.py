import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planish import ServiceClient, TrainingClient
from planish.fleet.remote_engine import RemoteEngine
from planish.fleet.start import start_process
from planish.testing import tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("questions")
    rows = [{"question": f"What is {n} + 2?", "answer": f"#### {n + 2}"} for n in range(32)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.fixture(scope="module")
def process_engine(model_dir, tmp_path_factory) -> Iterator[RemoteEngine]:
    engine = start_process(
        {"tiny": str(model_dir)}, tmp_path_factory.mktemp("data"), {"dtype": "float32"}
    )
    yield engine
    engine.close(finish=False)


@pytest.fixture
def shared_service(process_engine):
    """The service of the tests of clients. A module may replace it."""
    return process_engine


@pytest.fixture
def make_client(shared_service) -> Callable[[], ServiceClient]:
    return lambda: ServiceClient(service=shared_service)


@pytest.fixture
def service_client(make_client) -> ServiceClient:
    return make_client()


@pytest.fixture
def another_client(make_client) -> ServiceClient:
    return make_client()


@pytest.fixture
def training_client(service_client) -> TrainingClient:
    return service_client.create_lora_training_client("tiny", rank=4, seed=1)
