"""Constraint processes and the crash guard: the end of a constraint process is no crash of the
server.
"""

from __future__ import annotations

import os
import select
import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from server_process import BASE_MODEL, ServerProcess, free_port, running_server, wait_until

from planish import ModelInput, SampledSequence, SamplingParams, ServiceClient
from planish.server.durable.store import DATABASE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KEYS = {"one": "tml-key-of-one", "two": "tml-key-of-two"}
WAIT = 300.0
_LARGE_LIMITS = (
    "from planish.engine.constraints import cache, worker; "
    "cache.GrammarCache.__init__.__defaults__ = "
    "(worker.ProcessLimits(memory_bytes=1 << 30, compile_seconds=600.0),); "
)
"""Limits with which a large `multipleOf` compiles for a while."""
_PARAMS = SamplingParams(max_tokens=1500, seed=1, stop=[])


@contextmanager
def watching_server(
    directory: Path, model: Path, port: int, prelude: str = ""
) -> Iterator[ServerProcess]:
    """Run a server whose crash guard records the running requests, because an earlier process on
    the same data was killed.
    """
    keys = directory / "keys"
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    options = ("--port", str(port), "--api-key-file", str(keys))
    if not (directory / "data").exists():
        with running_server(directory / "data", model, *options) as first:
            first.stop(signal.SIGKILL)
    with running_server(directory / "data", model, *options, prelude=prelude) as server:
        yield server


def complete(server: ServerProcess, **options: object) -> httpx.Response:
    """Send a completion of the first tenant."""
    body = {"model": BASE_MODEL, "prompt": "A number: ", "max_tokens": 8, **options}
    headers = {"authorization": f"Bearer {KEYS['one']}"}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=WAIT)


def assert_constraints_work(server: ServerProcess) -> None:
    answer = complete(server, guided_choice=["yes", "no"])
    assert answer.json()["choices"][0]["text"] in ("yes", "no")


def children(pid: int) -> list[int]:
    """The processes that the threads of a process have started and that have not ended."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found += [int(word) for word in path.read_text().split()]
    return [child for child in found if not has_ended(child)]


def has_ended(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def templates(server: ServerProcess) -> list[int]:
    """The template processes of the server."""
    return [
        pid
        for pid in children(server.process.pid)
        if b"constraints/worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def constraint_processes(server: ServerProcess) -> list[int]:
    return [pid for template in templates(server) for pid in children(template)]


def suspects(directory: Path) -> list[tuple[str, int]]:
    """The keys that were running at crashes, and the numbers of these crashes."""
    with closing(sqlite3.connect(directory / "data" / DATABASE, timeout=60)) as database:
        query = "SELECT id, crashes FROM crash_guard WHERE crashes > 0"
        return database.execute(query).fetchall()


def sequences(answers: list[SampledSequence]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


@pytest.fixture(scope="module")
def expected(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The second tenant's sample on a server without faults."""
    directory = tmp_path_factory.mktemp("calm")
    with (
        running_server(directory / "data", model_dir) as server,
        ServiceClient(base_url=server.url) as service,
    ):
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        response = sampler.sample(ModelInput.from_ints([5, 6]), 4, _PARAMS).result(WAIT)
        return sequences(response.sequences)


@pytest.mark.parametrize("kills_template", [False, True])
def test_a_killed_constraint_process_makes_no_sample_a_suspect(
    model_dir: Path, tmp_path: Path, kills_template: bool, expected: list[list[int]]
):
    port = free_port()
    with (
        watching_server(tmp_path, model_dir, port, _LARGE_LIMITS) as server,
        ServiceClient(base_url=server.url, api_key=KEYS["two"]) as service,
        ThreadPoolExecutor(1) as threads,
    ):
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        compiling = threads.submit(
            complete, server, guided_json={"type": "integer", "multipleOf": 9999991}
        )
        wait_until(lambda: constraint_processes(server))
        sample = sampler.sample(ModelInput.from_ints([5, 6]), 4, _PARAMS)
        victims = templates(server) if kills_template else constraint_processes(server)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        failed = compiling.result()
        assert failed.status_code == 400, failed.text
        assert sequences(sample.result(WAIT).sequences) == expected
        assert suspects(tmp_path) == []
        # The next constraint starts another process.
        assert_constraints_work(server)
        assert server.process.poll() is None
        assert server.stop() == 0


def test_a_killed_server_leaves_no_process_and_no_suspect(
    model_dir: Path, tmp_path: Path, expected: list[list[int]]
):
    """The server is killed while it compiles a constraint of one tenant and runs a sample of
    another one.
    """
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    options = ("--port", str(free_port()), "--api-key-file", str(keys))
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))
        with running_server(
            tmp_path / "data", model_dir, *options, prelude=_LARGE_LIMITS
        ) as server:
            service = stack.enter_context(ServiceClient(base_url=server.url, api_key=KEYS["two"]))
            sampler = service.create_sampling_client(base_model=BASE_MODEL)
            sample = sampler.sample(ModelInput.from_ints([5, 6]), 4, _PARAMS)
            compiling = threads.submit(
                complete, server, guided_json={"type": "integer", "multipleOf": 9999991}
            )
            wait_until(lambda: constraint_processes(server))
            handles = [
                os.pidfd_open(pid) for pid in (*templates(server), *constraint_processes(server))
            ]
            assert len(handles) == 2
            server.stop(signal.SIGKILL)
        for handle in handles:
            # The handle of a process can be read when the process has ended.
            assert select.select([handle], [], [], WAIT)[0] == [handle]
            os.close(handle)
        with pytest.raises(httpx.TransportError):
            compiling.result()
        restarted = stack.enter_context(running_server(tmp_path / "data", model_dir, *options))
        assert suspects(tmp_path) == []
        assert sequences(sample.result(WAIT).sequences) == expected
        assert_constraints_work(restarted)
        assert restarted.stop() == 0
