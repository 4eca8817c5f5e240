"""Two thousand requests for samples, on as many connections, at once: all are accepted, and all are
answered.
"""

from __future__ import annotations

import asyncio
import resource
import time
from pathlib import Path

import httpx
import orjson
import pytest
from fuzz_connection import Answer, Connection, RawRequest
from server_process import BASE_MODEL, ServerProcess, running_server

from planish.wire.sampling import sample_response_from_message

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COUNT = 2000
JSON = (b"content-type", b"application/json")


def test_two_thousand_concurrent_samples_are_answered(tmp_path: Path, model_dir: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * COUNT)), hard))
    with running_server(tmp_path / "data", model_dir) as server:
        began = time.monotonic()
        accepted = asyncio.run(_everyone(server, _sampler(server)))
        print(
            f"\n{COUNT} accepted within {max(accepted):.1f} s, all answered after "
            f"{time.monotonic() - began:.1f} s"
        )
        assert len(accepted) == COUNT
        assert server.stop() == 0


def _sampler(server: ServerProcess) -> str:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        session = http.post("/api/v1/create_session", json={"tags": [], "sdk_version": "1"}).json()[
            "session_id"
        ]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        return http.post("/api/v1/create_sampling_session", json=body).json()["sampling_session_id"]


async def _everyone(server: ServerProcess, sampler: str) -> list[float]:
    """Return the seconds until each request was accepted."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        pending = [
            tasks.create_task(_one(server.url, sampler, number, began)) for number in range(COUNT)
        ]
    return [task.result() for task in pending]


async def _one(url: str, sampler: str, number: int, began: float) -> float:
    connection = Connection(url, "tml-anything")
    body = {
        "sampling_session_id": sampler,
        "seq_id": number,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, number % 200]}]},
        "sampling_params": {"max_tokens": 2, "seed": number, "stop": []},
    }
    answer = await _posted(connection, b"/api/v1/asample", body)
    assert answer.status == 200, answer.body
    seconds = time.monotonic() - began
    request = {"request_id": orjson.loads(answer.body)["request_id"]}
    while (answer := await _posted(connection, b"/api/v1/retrieve_future", request)).status == 408:
        pass
    assert answer.status == 200, answer.body
    assert len(sample_response_from_message(answer.body).sequences[0].tokens) == 2
    await connection.close()
    return seconds


async def _posted(connection: Connection, path: bytes, body: dict[str, object]) -> Answer:
    answer = await connection.send(
        RawRequest("POST", path, (JSON, (b"accept", b"application/x-protobuf")), orjson.dumps(body))
    )
    assert answer is not None
    return answer
