"""A server with its console on a socket, and clients of two tenants."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from http_thread import serving_app

from planish import AdamParams, Datum, ModelInput, ServiceClient
from planish.console.server_app import console_routes
from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.server.http.app import create_app
from planish.server.openai.models import OpenAIModels
from planish.server.server import Server
from planish.server.settings import HttpSettings

KEYS = {
    "tml-alice-key": "alice",
    "tml-bob-key": "bob",
    "tml-operator-key": "operator",
    "tml-metrics-key": "metrics",
}


@dataclass
class ServedConsole:
    """A server with a console."""

    url: str
    server: Server
    clients: ExitStack

    def browser(self, key: str | None = None) -> httpx2.Client:
        """Return a client of the console, logged in with a key."""
        client = httpx2.Client(base_url=f"{self.url}/console", timeout=60)
        self.clients.enter_context(client)
        if key is not None:
            answer = client.post(
                "/api/login", json={"key": key}, headers={"X-Planish-Console": "1"}
            )
            assert answer.status_code == 200, answer.text
        return client


@contextmanager
def serving_console(
    model: Path, data_dir: Path, keys: Mapping[str, str] | None = None, **settings: Any
) -> Iterator[ServedConsole]:
    """Serve a tiny model with a console."""
    engine = Engine({"tiny": str(model)}, data_dir, EngineSettings(device="cpu"))
    server = Server(engine, data_dir, ["tiny"])
    http = HttpSettings(tenants_by_key=keys, **settings)
    models = OpenAIModels(server, {"tiny": model})
    app = create_app(server, http, console_routes(server, http, models))
    with serving_app(app) as url, ExitStack() as clients:
        yield ServedConsole(url, server, clients)


def train(url: str, key: str | None, steps: int, **metadata: str) -> str:
    """Train a model for some steps, save a checkpoint, and return the id of the run."""
    with ServiceClient(base_url=url, api_key=key) as service:
        client = service.create_lora_training_client("tiny", rank=4, user_metadata=metadata)
        tokens = np.arange(8) % 7
        inputs = {"target_tokens": tokens, "weights": np.ones(8, np.float32)}
        data = [Datum(ModelInput.from_ints(tokens.tolist()), inputs)]
        for _ in range(steps):
            client.forward_backward(data, "cross_entropy")
            client.optim_step(AdamParams(learning_rate=1e-3)).result()
        client.save_state("kept").result()
        return client.model_id
