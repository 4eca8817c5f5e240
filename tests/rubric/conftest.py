import pytest

from planish.testing import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model")))
