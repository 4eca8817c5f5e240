from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_thread import ServerThread, serving

from planish import ServiceClient
from planish.testing import tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(model_dir, tmp_path_factory) -> Iterator[ServerThread]:
    with serving(tmp_path_factory.mktemp("server"), {"tiny": model_dir}) as server:
        yield server


@pytest.fixture(scope="session")
def server_url(server) -> str:
    return server.url


@pytest.fixture
def embedded_client(model_dir, tmp_path) -> Iterator[ServiceClient]:
    """A client with an engine in this process."""
    client = ServiceClient(
        models={"tiny": str(model_dir)}, data_dir=tmp_path / "data", dtype="float32"
    )
    yield client
    client._close(finish=False)


@pytest.fixture
def remote_client(server_url, tmp_path, monkeypatch) -> Iterator[ServiceClient]:
    """A client of a server."""
    monkeypatch.setenv("PLANISH_HOME", str(tmp_path / "cache"))
    client = ServiceClient(base_url=server_url)
    yield client
    client._close(finish=False)


@pytest.fixture(params=["near", "far"])
def service_client(request) -> ServiceClient:
    """A client of either kind. Tests of clients must pass for both."""
    return request.getfixturevalue(
        "embedded_client" if request.param == "near" else "remote_client"
    )


@pytest.fixture
def make_client(request, service_client, model_dir, tmp_path) -> Callable[[], ServiceClient]:
    """Return a function that makes further clients, which see the checkpoints of the first one."""
    if request.node.callspec.params["service_client"] == "far":
        url = request.getfixturevalue("server_url")
        return lambda: ServiceClient(base_url=url)
    return lambda: ServiceClient(
        models={"tiny": str(model_dir)}, data_dir=tmp_path / "data", dtype="float32"
    )


@pytest.fixture
def another_client(make_client) -> Iterator[ServiceClient]:
    client = make_client()
    yield client
    client._close(finish=False)
