"""A server of the embedded model for tests with the clients that people use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_process import running_server

from planish.model.sources.resolve import DEFAULT_MODEL, resolve_model


@pytest.fixture(scope="session")
def base_url(tmp_path_factory) -> Iterator[str]:
    """The URL that OpenAI's clients take."""
    # The server also has the embedded model under its own name.
    directory = resolve_model(DEFAULT_MODEL)
    data = tmp_path_factory.mktemp("server")
    with running_server(data, directory) as server:
        yield f"{server.url}/v1"


@pytest.fixture(autouse=True)
def environment(monkeypatch, base_url) -> None:
    """What the clients read: no other server and no remote service is asked."""
    monkeypatch.setenv("OPENAI_BASE_URL", base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "tml-any")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
