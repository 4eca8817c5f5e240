"""planish's own OpenAI-compatible endpoint on a real socket, in a thread of this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from http_thread import serving_app

from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.server.http import routes_sampling
from planish.server.http.app import create_app
from planish.server.openai import routes
from planish.server.openai.models import OpenAIModels
from planish.server.server import Server
from planish.server.settings import HttpSettings


@contextmanager
def serving(data: Path, name: str, model: str) -> Iterator[str]:
    """Run a server during the block and yield its URL."""
    models = {name: Path(model)}
    engine = Engine({name: model}, data, EngineSettings(dtype="float32", deterministic=True))
    server = Server(engine, data, list(models))
    more = [*routes_sampling.PLANISH_ROUTES, *routes.routes(OpenAIModels(server, models))]
    app = create_app(server, HttpSettings(tokenizer_directories=models), more)
    with serving_app(app, lifespan="on") as url:
        try:
            yield url
        finally:
            app.state.http.ending.set()
