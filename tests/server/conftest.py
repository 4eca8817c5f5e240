from pathlib import Path

import pytest

from planish.testing import tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data_dir(tmp_path) -> Path:
    return tmp_path / "data"
