"""A fault of the engine ends `planish serve`, and the next process finishes its requests."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import BASE_MODEL, running_server, start_server

from planish.errors import EngineClosedError
from planish.server.engine_client import EngineClient
from planish.server.serve import ENGINE_FAULT, notify
from planish.service import UnloadModel

FAULTY = """
import os
from planish.engine.engine_thread import EngineThread
turn = EngineThread._run_turn
def broken(self):
    if os.path.exists(os.environ["FAULT"]):
        raise AssertionError("an injected fault")
    turn(self)
EngineThread._run_turn = broken
"""


def post(http: httpx.Client, path: str, body: object) -> dict[str, str]:
    answer = http.post(f"/api/v1{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
def test_an_engine_fault_ends_the_process_and_a_restart_answers_its_requests(
    tmp_path: Path, model_dir: Path
):
    (tmp_path / "preload").mkdir()
    (tmp_path / "preload" / "faulty.py").write_text(FAULTY)
    fault, data = tmp_path / "fault", tmp_path / "data"
    environment = {"FAULT": str(fault), "PLANISH_HOME": "/proc/nowhere"}
    prelude = f"import sys; sys.path.insert(0, {str(tmp_path / 'preload')!r}); import faulty; "
    server = start_server(data, model_dir, environment=environment, prelude=prelude)
    try:
        with httpx.Client(base_url=server.url, timeout=30) as http:
            session = post(http, "/create_session", {"tags": [], "sdk_version": "0.38.0"})
            sampler = post(
                http,
                "/create_sampling_session",
                {
                    "session_id": session["session_id"],
                    "sampling_session_seq_id": 0,
                    "base_model": BASE_MODEL,
                },
            )["sampling_session_id"]
            fault.touch()
            request = post(
                http,
                "/asample",
                {
                    "sampling_session_id": sampler,
                    "seq_id": 0,
                    "num_samples": 1,
                    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
                    "sampling_params": {"max_tokens": 8, "seed": 1, "stop": []},
                },
            )["request_id"]
            assert server.process.wait(60) == ENGINE_FAULT
    finally:
        server.process.kill()
    levels = [json.loads(line)["level"] for line in server.output if "engine failed" in line]
    assert levels == ["critical", "critical"]
    with running_server(data, model_dir) as again, httpx.Client(base_url=again.url) as http:
        while (
            answer := http.post("/api/v1/retrieve_future", json={"request_id": request}, timeout=60)
        ).status_code == 408:
            pass
        assert answer.status_code == 200, answer.text
        assert answer.json()["sequences"]


def test_systemd_is_told_the_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(address))
        monkeypatch.setenv("NOTIFY_SOCKET", str(address))
        notify("READY=1")
        assert receiver.recv(100) == b"READY=1"
    notify("READY=1")  # nobody listens any more
    monkeypatch.setenv("NOTIFY_SOCKET", "not an address")
    notify("READY=1")


def test_a_fault_is_noted_when_a_submission_meets_it(tmp_path: Path):
    class Faulty:
        def submit(self, operation: object) -> object:
            raise EngineClosedError("a fault while nothing ran")

    async def scenario() -> None:
        service: Any = Faulty()
        client = EngineClient(service, tmp_path)
        with pytest.raises(EngineClosedError):
            await client.submit(UnloadModel("m"))
        assert client.fault == "a fault while nothing ran"

    asyncio.run(scenario())
