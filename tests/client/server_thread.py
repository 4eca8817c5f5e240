"""A server in a thread of this process, on a real socket, with the engine, journal and routes that
`planish serve` has, and with a network in front of it that can be made to fail.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from http_thread import serving_app
from starlette.responses import Response

from planish.engine.engine import Engine, HostedEngine
from planish.engine.settings import EngineSettings
from planish.server.http import routes_sampling
from planish.server.http.app import create_app
from planish.server.server import Server
from planish.server.settings import HttpSettings

Fault = str | Response | None
"""LOST, BROKEN, another answer, or None where all is well."""
LOST, BROKEN = "lost", "broken"


class ConnectionFailure(Exception):
    """Raised after the beginning of a response, so that the connection is closed."""


@dataclass
class Network:
    """A network between the clients and the application. `fault` decides what happens to a request
    by its path.
    """

    app: Any
    fault: Callable[[str], Fault] = lambda path: None
    paths: list[str] = field(default_factory=list)
    """Asked for so far."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.paths.append(scope["path"])
        fault = self.fault(scope["path"])
        if fault is None:
            await self.app(scope, receive, send)
        elif isinstance(fault, Response):
            await fault(scope, receive, send)
        elif fault == LOST:
            await self._lose(scope, receive, send)
        else:
            await self._break(scope, receive, send)

    async def _lose(self, scope: Any, receive: Any, send: Any) -> None:
        """Let the server do the request, and drop its response."""

        async def swallow(message: Any) -> None: ...

        await self.app(scope, receive, swallow)
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]}
        )
        raise ConnectionFailure

    async def _break(self, scope: Any, receive: Any, send: Any) -> None:
        """Deliver only the first piece of a response."""
        sent = 0

        async def begin(message: Any) -> None:
            nonlocal sent
            sent += 1
            if sent <= 2:
                await send(
                    {**message, "more_body": True}
                    if message["type"] == "http.response.body"
                    else message
                )

        await self.app(scope, receive, begin)
        raise ConnectionFailure


@dataclass(frozen=True)
class ServerThread:
    url: str
    network: Network
    server: Server


@contextmanager
def serving(
    data: Path,
    models: Mapping[str, Path],
    keys: Mapping[str, str] | None = None,
    port: int = 0,
    engine: HostedEngine | None = None,
) -> Iterator[ServerThread]:
    """Run a server during the block, and shut it down in order. By default, the engine is one in
    this process.
    """
    engine = engine or Engine(
        {name: str(path) for name, path in models.items()}, data, EngineSettings(dtype="float32")
    )
    server = Server(engine, data, list(models))
    settings = HttpSettings(tokenizer_directories=models, tenants_by_key=keys)
    app = create_app(server, settings, other_routes=routes_sampling.PLANISH_ROUTES)
    network = Network(app)
    with serving_app(network, port, lifespan="on") as url:
        try:
            yield ServerThread(url, network, server)
        finally:
            app.state.http.ending.set()
