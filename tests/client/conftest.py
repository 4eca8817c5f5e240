from collections.abc import Iterator
from pathlib import Path

import pytest

from planish import ServiceClient
from planish.testing import tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def service_client(model_dir, tmp_path) -> Iterator[ServiceClient]:
    client = ServiceClient(models={"tiny": str(model_dir)}, data_dir=tmp_path / "data", dtype="float32")
    yield client
    client._close(finish=False)
