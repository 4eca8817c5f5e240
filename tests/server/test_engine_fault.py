"""A fault of the engine ends `planish serve`, and the next process finishes its requests."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from server_process import BASE_MODEL, running_server, start_server, wait_until

from planish.engine.engine import Engine
from planish.engine.engine_thread import EngineThread
from planish.errors import EngineClosedError
from planish.processes.stall_watch import StallWatch
from planish.server.engine_client import EngineClient
from planish.server.serve import ENGINE_FAULT_STATUS, notify
from planish.service import CreateModel, ForwardBackward, UnloadModel
from planish.tensors import TensorData
from planish.types import Datum, ModelInput

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


HANGING = FAULTY.replace(
    'raise AssertionError("an injected fault")', "import time; time.sleep(3600)"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "options", "logged"),
    [
        (FAULTY, (), "an injected fault"),
        (HANGING, ("--set", "engine_stall_timeout=3"), "time.sleep(3600)"),
    ],
    ids=["exception", "hang"],
)
def test_an_engine_fault_ends_the_process_and_a_restart_answers_its_requests(
    tmp_path: Path, model_dir: Path, code: str, options: tuple[str, ...], logged: str
):
    (tmp_path / "preload").mkdir()
    (tmp_path / "preload" / "faulty.py").write_text(code)
    fault, data = tmp_path / "fault", tmp_path / "data"
    environment = {"FAULT": str(fault), "PLANISH_HOME": "/proc/nowhere"}
    prelude = f"import sys; sys.path.insert(0, {str(tmp_path / 'preload')!r}); import faulty; "
    server = start_server(data, model_dir, *options, environment=environment, prelude=prelude)
    try:
        with httpx.Client(base_url=server.url, timeout=300) as http:
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
            # A load is no progress of the engine.
            wait_until(lambda: http.get("/readyz").status_code == 200)
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
            assert server.wait() == ENGINE_FAULT_STATUS
    finally:
        server.process.kill()
    assert any("engine failed" in line and logged in line for line in server.output)
    levels = [json.loads(line)["level"] for line in server.output if "engine failed" in line]
    assert levels == ["critical", "critical"]
    with running_server(data, model_dir) as again, httpx.Client(base_url=again.url) as http:
        while (
            answer := http.post("/api/v1/retrieve_future", json={"request_id": request}, timeout=60)
        ).status_code == 408:
            pass
        assert answer.status_code == 200, answer.text
        assert answer.json()["sequences"]


def test_an_engine_without_progress_is_stalled_after_the_timeout():
    now = 0.0
    watch = StallWatch(60.0, lambda: now)

    def seconds_until_stalled(progress: Callable[[], int | None], most: int) -> int | None:
        nonlocal now
        for second in range(most):
            now += 1.0
            if watch.is_stalled(progress()):
                return second
        return None

    assert seconds_until_stalled(lambda: None, 1000) is None  # no work
    assert seconds_until_stalled(lambda: int(now) // 50, 1000) is None  # slow
    assert seconds_until_stalled(lambda: 7, 1000) == 60
    watch.is_stalled(8)
    now += 3600.0  # the process was stopped
    assert not watch.is_stalled(8)
    assert seconds_until_stalled(lambda: 8, 100) == 54


def test_each_matmul_of_a_long_operation_is_progress(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    """An operation that takes longer than the timeout, with progress, is left alone."""
    now, looked, is_watched = 0.0, threading.Semaphore(0), False
    check = EngineThread._check_abort

    def slow(self: EngineThread) -> None:
        nonlocal now
        if is_watched:
            now += 0.05
            assert looked.acquire(timeout=60)
        check(self)

    monkeypatch.setattr(EngineThread, "_check_abort", slow)
    engine = Engine({BASE_MODEL: str(model_dir)}, tmp_path)
    try:
        engine.submit(CreateModel("m", BASE_MODEL)).result()
        is_watched = True
        datum = Datum(
            ModelInput.from_ints([1, 2]),
            {
                "target_tokens": TensorData([2, 3], "int64"),
                "weights": TensorData([1, 1], "float32"),
            },
        )
        watch = StallWatch(0.5, lambda: now)
        future = engine.submit(ForwardBackward("m", [datum], "cross_entropy"))
        while not future.done():
            assert not watch.is_stalled(engine.progress())
            looked.release()
            time.sleep(0.002)
        future.result()
        assert now > 0.5
        wait_until(lambda: "inbox" in engine.thread_stack())
        assert engine.progress() is None
    finally:
        is_watched = False
        looked.release()
        engine.close()


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


async def test_a_fault_is_noted_when_a_submission_meets_it(tmp_path: Path):
    class Faulty:
        administration = SimpleNamespace(keep_expired_checkpoints=lambda: None)
        checks_inline = True

        def submit(self, operation: object) -> object:
            raise EngineClosedError("a fault while nothing ran")

    service: Any = Faulty()
    client = EngineClient(service, tmp_path, [])
    with pytest.raises(EngineClosedError):
        await client.submit(UnloadModel("m"))
    assert client.fault == "a fault while nothing ran"
