"""`planish serve` as a process: what it writes, what it measures, and how it stops."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from server_process import (
    BASE_MODEL,
    COMMAND,
    SLOW_ENGINE,
    START_TIMEOUT,
    ServerProcess,
    free_port,
    running_server,
    wait_until,
)
from starlette.applications import Starlette

from planish.server import serve
from planish.server.garbage import GarbageCollector
from planish.server.http import access

pytestmark = pytest.mark.slow

ALICE, READER = "tml-alices-key", "tml-key-of-prometheus"
get = partial(httpx.get, timeout=60)


class Caller:
    """The calls of one session; paths are those below /api/v1."""

    def __init__(self, url: str, key: str = ALICE) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", headers={"x-api-key": key}, timeout=60)
        self.session = self.post(
            "/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        )["session_id"]
        body = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        self.sampler = self.post("/create_sampling_session", body)["sampling_session_id"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def post(self, path: str, body: Any) -> Any:
        answer = self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def sample(self, seq_id: int, max_tokens: int, num_samples: int = 1) -> str:
        """The id of the request."""
        params = {"max_tokens": max_tokens, "seed": 1, "stop": []}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        body = {
            "sampling_session_id": self.sampler,
            "seq_id": seq_id,
            "prompt": prompt,
            "num_samples": num_samples,
        }
        return self.post("/asample", {**body, "sampling_params": params})["request_id"]

    def result(self, request_id: str) -> Any:
        while (
            answer := self._http.post("/retrieve_future", json={"request_id": request_id})
        ).status_code == 408:
            pass
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def caller(server: ServerProcess) -> Iterator[Caller]:
    with Caller(server.url) as caller:
        yield caller


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"alice {ALICE}\nmetrics {READER}\n")
    return path


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, keys: Path
) -> Iterator[ServerProcess]:
    data = tmp_path_factory.mktemp("data")
    with running_server(
        data, model_dir, "--api-key-file", str(keys), "--log-level", "debug"
    ) as server:
        yield server


def records(server: ServerProcess) -> list[dict[str, Any]]:
    """What the server has logged so far; every line is a JSON object."""
    return [json.loads(line) for line in server.output]


def logged(server: ServerProcess, path: str) -> dict[str, Any]:
    """The newest record of a request, which may come a moment after its answer."""

    def found() -> list[dict[str, Any]]:
        requests = [record for record in records(server) if record["logger"] == "planish.access"]
        return [request for request in requests if path in request["message"]]

    wait_until(found)
    return found()[-1]


def metrics(server: ServerProcess, key: str = READER) -> dict[tuple[str, tuple[str, ...]], float]:
    """Samples of the page by name and values of labels."""
    page = get(f"{server.url}/metrics", headers={"authorization": f"Bearer {key}"})
    assert page.status_code == 200, page.text
    assert page.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(page.text)
    return {
        (s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples
    }


def test_every_log_line_is_json_without_a_key(server: ServerProcess, caller: Caller):
    caller.result(caller.sample(0, max_tokens=4))
    get(f"{server.url}/api/v1/training_runs", headers={"x-api-key": "tml-a-key-nobody-knows"})
    assert logged(server, "/api/v1/training_runs")["status"] == 401
    for record in records(server):
        assert {"time", "level", "logger", "message"} <= record.keys()
    said = "\n".join(server.output)
    assert not any(key in said for key in (ALICE, READER, "nobody-knows"))


def test_a_request_is_logged_by_its_route(server: ServerProcess, caller: Caller):
    get(f"{server.url}/api/v1/samplers/{caller.sampler}", headers={"x-api-key": ALICE})
    record = logged(server, "/samplers/")
    assert record["message"] == "GET /api/v1/samplers/{sampler_id} 200"
    assert record["level"] == "info"
    assert record["tenant"] == "alice"
    assert record["milliseconds"] > 0
    assert caller.sampler not in json.dumps(record)


def test_repeated_client_calls_are_logged_at_debug(server: ServerProcess):
    assert get(f"{server.url}/healthz").json() == {"status": "ok"}
    assert logged(server, "/healthz")["level"] == "debug"


def test_readiness_follows_the_state_of_the_server(tmp_path: Path, model_dir: Path):
    with running_server(
        tmp_path / "data", model_dir, environment={"PLANISH_HOME": "/proc/nowhere"}
    ) as server:
        said = set()
        while (answer := get(f"{server.url}/readyz")).status_code == 503:
            said.add(answer.json()["status"])
        assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
        assert said <= {"loading"}
        server.wait_for_line("loaded in")
        records(server)  # each is an object, of kernels too
    with running_server(
        tmp_path / "data", model_dir, "--set", "min_free_disk_bytes=1000TiB"
    ) as server:
        while (answer := get(f"{server.url}/readyz")).json() == {"status": "loading"}:
            pass
        assert (answer.status_code, answer.json()) == (503, {"status": "disk full"})
        assert get(f"{server.url}/healthz").status_code == 200


def test_metrics_count_requests_and_tokens(server: ServerProcess, caller: Caller):
    before = metrics(server)
    caller.result(caller.sample(0, max_tokens=7, num_samples=3))
    after = metrics(server)

    def grown(name: str, *labels: str) -> float:
        return after[name, labels] - before.get((name, labels), 0)

    assert 3 <= grown("planish_sampled_tokens_total", "alice") <= 21
    assert grown("planish_prompt_tokens_total", "alice") == 3
    assert grown("planish_requests_answered_total", "sample", "done") == 1
    assert grown("planish_batch_sequences_count") == 1
    assert grown("planish_http_request_seconds_count", "POST", "/api/v1/asample", "200") == 1
    assert after["planish_resident_bytes", ()] > 50 << 20
    assert after["planish_database_bytes", ()] > 0


def test_unknown_paths_are_one_route(server: ServerProcess):
    for path in ("/one", "/another"):
        assert get(server.url + path).status_code == 404
    found = metrics(server)
    assert found["planish_http_request_seconds_count", ("any", "none", "404")] >= 2
    assert not any("one" in labels or "/one" in labels for _, labels in found)
    httpx.request("INVENTED", f"{server.url}/api/v1/asample", timeout=60)
    assert not any("INVENTED" in labels for _, labels in metrics(server))


def test_metrics_need_the_metrics_key(server: ServerProcess):
    for headers in (
        {},
        {"x-api-key": ALICE},
        {"authorization": f"Bearer {ALICE}"},
        {"authorization": f"Basic {READER}"},
    ):
        assert get(f"{server.url}/metrics", headers=headers).status_code == 401
    assert get(f"{server.url}/metrics", headers={"x-api-key": READER}).status_code == 200


def test_a_signal_lets_running_requests_finish(tmp_path: Path, model_dir: Path):
    with running_server(tmp_path / "data", model_dir) as server, Caller(server.url) as caller:
        request = caller.sample(0, max_tokens=100)
        assert server.stop(signal.SIGTERM) == 0
    with closing(sqlite3.connect(tmp_path / "data" / "server.db")) as database:
        assert database.execute(
            "SELECT state FROM requests WHERE id = ?", [request]
        ).fetchone() == ("done",)


async def test_a_signal_during_the_start_stops_the_server_gracefully(monkeypatch):
    async def started(server: uvicorn.Server, sockets: object) -> None:
        server.handle_exit(signal.SIGTERM, None)
        server.started = True

    stopped: list[object] = []

    async def shutdown(server: uvicorn.Server, sockets: object) -> None:
        stopped.append(sockets)

    async def drain(http: object) -> None:
        stopped.append(http)

    monkeypatch.setattr(serve, "drain", drain)
    monkeypatch.setattr(uvicorn.Server, "startup", started)
    monkeypatch.setattr(uvicorn.Server, "shutdown", shutdown)
    app: Any = Starlette()
    app.state.http = SimpleNamespace(stopping=asyncio.Event())
    unused: Any = None
    settings = SimpleNamespace(engine_stall_timeout=900.0)
    prepared: Any = SimpleNamespace(options=SimpleNamespace(settings=settings))
    server = serve._UvicornServer(app, unused, prepared, unused)
    server.handle_exit(signal.SIGTERM, None)  # before there is a loop
    server.should_exit = False

    await server.startup(["socket"])  # pyright: ignore[reportArgumentType]
    await asyncio.sleep(0)
    assert stopped == [app.state.http, ["socket"]]
    assert server.was_ready
    assert app.state.http.stopping.is_set()


@pytest.mark.parametrize(("is_busy", "seconds"), [(False, 30.0), (True, 300.0)])
def test_a_full_garbage_collection_waits_for_large_bodies(monkeypatch, is_busy, seconds):
    """A collection during the decoding of eight bodies held the interpreter lock for 200 ms."""
    now, collections = [0.0], []
    monkeypatch.setattr(gc, "collect", lambda: collections.append(now[0]))
    monkeypatch.setattr(gc, "get_count", lambda: (5, 5, 1))
    collector = GarbageCollector(clock=lambda: now[0])
    for second in range(int(2 * seconds) + 1):
        now[0] = float(second)
        collector.tick(is_busy)
    assert collections == [seconds, 2 * seconds]


def test_an_idle_server_collects_no_garbage(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("nothing was allocated"))
    monkeypatch.setattr(gc, "get_count", lambda: (5, 5, 0))
    collector = GarbageCollector(clock=lambda: now[0])
    now[0] = 1e6
    collector.tick(is_busy=False)


def wait_for(url: str) -> None:
    """Wait until a server answers."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if get(f"{url}/readyz").status_code == 200:
                return
        time.sleep(0.1)
    raise TimeoutError(f"{url} does not answer")


def test_a_log_that_nobody_reads_does_not_stop_the_server(tmp_path: Path, model_dir: Path):
    """A pipe holds 64 KiB, about 300 lines. The event loop waited for ever for its reader."""
    command = [sys.executable, "-c", COMMAND, "--port", str(free_port()), "--data-dir"]
    command += [str(tmp_path / "data"), "--model", f"{BASE_MODEL}={model_dir}"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    reader, writer = os.pipe()
    with subprocess.Popen(command, stderr=writer, env=environment) as process:
        os.close(writer)
        try:
            url = f"http://127.0.0.1:{command[4]}"
            wait_for(url)
            with httpx.Client(base_url=url, timeout=60) as client:
                for _ in range(1000):
                    assert client.get("/no-such-page").status_code == 404
            process.terminate()
            assert process.wait(240) == 0
        finally:
            process.kill()
            os.close(reader)


def test_dropped_lines_of_the_log_are_counted(monkeypatch):
    monkeypatch.setattr(access.BackgroundHandler, "MAX_LINES", 3)
    reader, writer = os.pipe()
    logger = logging.getLogger("planish.access")
    handler = access.BackgroundHandler(writer)
    logger.addHandler(handler)
    try:
        for _ in range(3):
            logger.error("x" * 100_000)  # more than the pipe holds
        for _ in range(100):
            logger.error("dropped")
        with open(reader, "rb", buffering=0) as lines:
            found = b""
            while b"were dropped" not in found:
                found += lines.read(1 << 20) or b""
    finally:
        logger.removeHandler(handler)
    assert re.search(rb"\d+ lines of the log were dropped", found)
    assert found.count(b"\ndropped\n") < 100


LOG_UNTIL_THE_END = """
import atexit, logging, sys, time

atexit.register(lambda: log.error("logged after the threads of planish were stopped"))
from planish.server import serve
from planish.server.garbage import GarbageCollector
from planish.server.http.access import BackgroundHandler, set_up_logging

BackgroundHandler._STALL_SECONDS = 300.0  # the reader may be paused
set_up_logging("text", "info")
log = logging.getLogger("planish.example")
for number in range(3000):
    log.info("line %d %s", number, "x" * 200)
if "fault" in sys.argv:
    serve._end_process_after(0)
    time.sleep(600)
sys.exit(7)
"""


@pytest.mark.parametrize("end", ["exit", "fault"])
def test_no_line_of_the_log_is_lost_at_the_end_of_the_process(end):
    """Its reader is slow: 4 KiB each 10 ms."""
    command = [sys.executable, "-c", LOG_UNTIL_THE_END, end]
    with subprocess.Popen(command, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stderr is not None
        found = b""
        while piece := process.stderr.read(4096):
            found += piece
            time.sleep(0.01)
        assert process.wait(240) == (7 if end == "exit" else serve.ENGINE_FAULT_STATUS)
    lines = [line for line in found.decode().splitlines() if " line " in line]
    assert len(lines) == 3000
    assert "line 2999 " in lines[-1]
    assert ("logged after the threads" in found.decode()) == (end == "exit")


def test_the_log_survives_a_lack_of_memory(monkeypatch):
    monkeypatch.setattr(access.BackgroundHandler, "_STALL_SECONDS", 60.0)
    reader, writer = os.pipe()
    handler = access.BackgroundHandler(writer)
    write, failures = handler._write, [MemoryError(), MemoryError()]

    def fail_twice(line: str) -> None:
        if failures:
            raise failures.pop()
        write(line)

    monkeypatch.setattr(handler, "_write", fail_twice)
    for message in ("a", "b", "c"):
        handler.emit(logging.makeLogRecord({"msg": message}))
    handler.flush()
    handler.flush()  # also what the thread logs
    os.close(writer)
    with open(reader) as lines:
        assert lines.read().startswith("c\n2 lines of the log were dropped")


LOG_IN_A_SIGNAL_HANDLER = """
import logging, os, signal, time
from planish.server.http.access import BackgroundHandler

log = logging.getLogger("example")
log.addHandler(BackgroundHandler(os.open(os.devnull, os.O_WRONLY)))
log.propagate = False
signal.signal(signal.SIGALRM, lambda *_: log.error("a signal"))
signal.setitimer(signal.ITIMER_REAL, 5e-4, 5e-4)
end = time.monotonic() + 2
while time.monotonic() < end:
    log.error("a line")
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_a_signal_handler_logs_while_its_thread_logs():
    """SIGTERM is logged. A signal during another log call made the event loop wait for itself."""
    subprocess.run([sys.executable, "-c", LOG_IN_A_SIGNAL_HANDLER], check=True, timeout=300)


def test_a_second_signal_ends_the_server_at_once(tmp_path: Path, model_dir: Path):
    with (
        running_server(
            tmp_path / "data", model_dir, "--max-batch", "1", prelude=SLOW_ENGINE
        ) as server,
        Caller(server.url) as caller,
    ):
        for number in range(20):
            caller.sample(number, max_tokens=2000)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_line("stopping")
        begun = time.monotonic()
        assert server.stop(signal.SIGTERM) == -signal.SIGTERM
        assert time.monotonic() - begun < 25
        server.wait_for_line("because of a second signal")
