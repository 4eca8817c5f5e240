"""The files of the server that a training request passes on its way to the engine."""

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
from server_client import BASE, gradient, running

import planish.server
from planish.server.http.app import create_app
from planish.service import CreateModel, ForwardBackward, Operation
from planish.types import LoraConfig
from planish.wire.operations import post_request_for

SERVER = Path(planish.server.__file__).parent
FILES = {
    "http/routes_training.py",
    "http/context.py",
    "sessions.py",
    "models/request_queue.py",
    "models/model.py",
    "durable/request_log.py",
    "durable/store.py",
    "scheduling.py",
    "engine_client.py",
}
"""docs/architecture.md says what the request does in each of these files."""


class PassedFiles:
    """Records the files of the server whose functions are called while `is_recording` is true."""

    def __init__(self) -> None:
        self.is_recording = False
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not self.is_recording or SERVER not in path.parents:
            return
        if frame.f_code.co_name == "submit" and path.name == "engine_client.py":
            is_gradient = isinstance(frame.f_locals["operation"], ForwardBackward)
            self.is_recording = not is_gradient
        self.files.add(path.relative_to(SERVER).as_posix())


@pytest.fixture
def passed():
    """The profile function of this thread, and of all threads that start during the test."""
    function = PassedFiles()
    threading.setprofile(function)
    sys.setprofile(function)
    yield function
    sys.setprofile(None)
    threading.setprofile(None)


async def send(client: httpx.AsyncClient, operation: Operation[Any], seq_id: int = 0) -> None:
    """Send an operation, and wait for its result."""
    request = post_request_for(operation, seq_id)
    headers = {"Content-Type": request.media_type}
    sent = await client.post(request.path, content=request.content, headers=headers)
    body = {"request_id": sent.raise_for_status().json()["request_id"]}
    while (await client.post("/retrieve_future", json=body)).status_code == 408:
        pass


def test_a_forward_backward_passes_nine_files(passed, model_dir, data_dir):
    async def scenario() -> None:
        async with running(model_dir, data_dir) as server:
            transport = httpx.ASGITransport(create_app(server))
            url = "http://127.0.0.1/api/v1"
            async with httpx.AsyncClient(transport=transport, base_url=url) as client:
                created = await client.post("/create_session", json={"tags": []})
                model_id = f"{created.json()['session_id']}:train:0"
                await send(client, CreateModel(model_id, BASE, LoraConfig(4)))
                await send(client, gradient(model_id, 1), 1)
                passed.is_recording = True
                await send(client, gradient(model_id, 2), 2)
                assert not passed.is_recording

    asyncio.run(scenario())
    # The cleanup runs once per second, beside all requests, and reads the clock.
    assert passed.files - {"maintenance.py", "durable/expiry_clock.py"} == FILES
