"""The files of the server that a request passes on its way to the engine."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
from server_client import BASE, gradient, running

import planish.server
from planish.server.http.app import create_app
from planish.service import CreateModel, ForwardBackward, Operation, Sample
from planish.types import LoraConfig
from planish.wire.operations import post_request_for

SERVER = Path(planish.server.__file__).parent
SHARED = {
    "http/context.py",
    "http/origins.py",
    "sessions.py",
    "request.py",
    "intake.py",
    "tenant_limits.py",
    "durable/request_log.py",
    "durable/store.py",
    "turn.py",
    "scheduling.py",
    "engine_client.py",
}
TRAINING = SHARED | {
    "http/routes_training.py",
    "models/catalog.py",
    "models/intake.py",
    "models/model.py",
    "models/request_queue.py",
    "models/submission.py",
}
SAMPLING = SHARED | {
    "http/routes_sampling.py",
    "samplers.py",
    "sampling.py",
    "durable/retries.py",
    "durable/crash_guard.py",
}
"""docs/architecture.md says what a request does in each of these files."""


class PassedFiles:
    """Records the files of the server whose functions are called while `is_recording` is true."""

    def __init__(self) -> None:
        self.is_recording = False
        self.calls: list[tuple[int, str]] = []
        """The thread and the file of each call."""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event != "call" or not self.is_recording or SERVER not in path.parents:
            return
        if frame.f_code.co_name == "submit" and path.name == "engine_client.py":
            is_last = isinstance(frame.f_locals["operation"], ForwardBackward | Sample)
            self.is_recording = not is_last
        if not is_cleanup(frame):
            self.calls.append((threading.get_ident(), path.relative_to(SERVER).as_posix()))

    @property
    def num_moves(self) -> int:
        """How often a call of this thread was in another file than the call before. The store's
        thread may work at the same moment.
        """
        own = [file for thread, file in self.calls if thread == threading.get_ident()]
        return sum(1 for _ in groupby(own)) - 1


def is_cleanup(frame: FrameType | None) -> bool:
    """Return whether the cleanup makes a call. It runs once per second, beside all requests."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("server/maintenance.py"):
            return True
        frame = frame.f_back
    return False


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
    await wait(client, await client.post(request.path, content=request.content, headers=headers))


async def wait(client: httpx.AsyncClient, accepted: httpx.Response) -> None:
    body = {"request_id": accepted.raise_for_status().json()["request_id"]}
    while (await client.post("/retrieve_future", json=body)).status_code == 408:
        pass


@asynccontextmanager
async def session(model_dir: Path, data_dir: Path) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """Yield a client of a new server, and the ID of its session."""
    async with running(model_dir, data_dir) as server:
        transport = httpx.ASGITransport(create_app(server))
        url = "http://127.0.0.1/api/v1"
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            created = await client.post("/create_session", json={"tags": []})
            yield client, created.json()["session_id"]


def files_of(passed: PassedFiles) -> set[str]:
    return {file for _, file in passed.calls} - {
        "durable/crash_points.py"
    }  # only tests arm a crash point


def test_a_forward_backward_passes_these_files(passed, model_dir, data_dir):
    async def scenario() -> None:
        async with session(model_dir, data_dir) as (client, session_id):
            model_id = f"{session_id}:train:0"
            await send(client, CreateModel(model_id, BASE, LoraConfig(4)))
            await send(client, gradient(model_id, 1), 1)
            passed.is_recording = True
            await send(client, gradient(model_id, 2), 2)
            assert not passed.is_recording

    asyncio.run(scenario())
    assert files_of(passed) == TRAINING
    assert passed.num_moves < 36  # 29 (tools/request_trace.py)


def test_a_sample_passes_these_files(passed, model_dir, data_dir):
    async def scenario() -> None:
        async with session(model_dir, data_dir) as (client, session_id):
            body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE}
            created = await client.post("/create_sampling_session", json=body)
            sample = {
                "sampling_session_id": created.json()["sampling_session_id"],
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
                "sampling_params": {"max_tokens": 3},
                "num_samples": 1,
            }
            await wait(client, await client.post("/asample", json={**sample, "seq_id": 0}))
            passed.is_recording = True
            await wait(client, await client.post("/asample", json={**sample, "seq_id": 1}))
            assert not passed.is_recording

    asyncio.run(scenario())
    assert files_of(passed) == SAMPLING
