"""planish's own OpenAI-compatible endpoint on a real socket, in a thread of this process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.server.http import routes_sampling
from planish.server.http.app import create_app
from planish.server.openai import routes
from planish.server.server import Server
from planish.server.settings import HttpSettings


@contextmanager
def serving(data: Path, name: str, model: str) -> Iterator[str]:
    """Run a server during the block and yield its URL."""
    models = {name: Path(model)}
    engine = Engine({name: model}, data, EngineSettings(dtype="float32", deterministic=True))
    server = Server(engine, data, list(models))
    more = [*routes_sampling.PLANISH_ROUTES, *routes.routes(server, models)]
    app = create_app(server, HttpSettings(tokenizer_directories=models), more)
    http_server = uvicorn.Server(
        uvicorn.Config(app, lifespan="on", log_level="critical", timeout_graceful_shutdown=5)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=http_server.run, args=([listener],), daemon=True)
        thread.start()
        while not http_server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            app.state.http.stopping.set()
            http_server.should_exit = True
            thread.join(30)
