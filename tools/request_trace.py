"""Count how often a served forward_backward moves from one file of the server to another.

    python tools/request_trace.py

The request is traced from its arrival until the engine has it. A move is a call of a function in
another file of planish/server than the call before. The helpers of tests/server start the server,
in this process, with a tiny random model. Other work of the server, such as the cleanup once per
second, may run in between. So the smallest of five requests counts.
"""

import asyncio
import sys
import tempfile
import threading
from collections import Counter
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "server")]

from server_client import BASE, gradient, running  # noqa: E402

import planish.server  # noqa: E402
from planish.server.http.app import create_app  # noqa: E402
from planish.service import CreateModel, ForwardBackward, Operation  # noqa: E402
from planish.testing import tiny_model  # noqa: E402
from planish.types import LoraConfig  # noqa: E402
from planish.wire.operations import post_request_for  # noqa: E402

SERVER = Path(planish.server.__file__).parent


class Trace:
    """A profile function that records the server's files in the order of their calls."""

    def __init__(self) -> None:
        self.is_recording = False
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not self.is_recording:
            return
        path = Path(frame.f_code.co_filename)
        if SERVER in path.parents:
            self.files.append(path.relative_to(SERVER).as_posix())
        elif path.match("planish/engine/engine.py") and frame.f_code.co_name == "submit":
            self.is_recording = not isinstance(frame.f_locals["operation"], ForwardBackward)


async def send(client: httpx.AsyncClient, operation: Operation[Any], seq_id: int) -> None:
    """Send an operation, and wait for its result."""
    request = post_request_for(operation, seq_id)
    headers = {"Content-Type": request.media_type}
    accepted = await client.post(request.path, content=request.content, headers=headers)
    body = {"request_id": accepted.raise_for_status().json()["request_id"]}
    while (await client.post("/retrieve_future", json=body)).status_code == 408:
        pass


def moves(files: list[str]) -> int:
    """Return the number of moves between files."""
    return sum(1 for _ in groupby(files)) - 1


async def traced_files(trace: Trace, directory: Path) -> list[str]:
    """Return the server's file of each call that a later forward_backward makes."""
    async with running(tiny_model(directory / "model"), directory / "data") as server:
        transport = httpx.ASGITransport(create_app(server))
        url = "http://127.0.0.1/api/v1"
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            created = await client.post("/create_session", json={"tags": []})
            model_id = f"{created.json()['session_id']}:train:0"
            await send(client, CreateModel(model_id, BASE, LoraConfig(4)), 0)
            await send(client, gradient(model_id, 1), 1)
            traced: list[list[str]] = []
            for seq_id in range(2, 7):
                trace.files, trace.is_recording = [], True
                await send(client, gradient(model_id, seq_id), seq_id)
                traced.append(trace.files)
    return min(traced, key=moves)


def main() -> None:
    """Print the numbers of calls and moves, and the files that are entered most."""
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    with tempfile.TemporaryDirectory() as directory:
        calls = asyncio.run(traced_files(trace, Path(directory)))
    sys.setprofile(None)
    threading.setprofile(None)
    entered = [file for file, _ in groupby(calls)]
    print(f"{len(calls)} calls in {len(set(calls))} files, {len(entered) - 1} moves between files")
    for file, count in Counter(entered).most_common():
        print(f"{count:>4} entries into {file}")


if __name__ == "__main__":
    main()
