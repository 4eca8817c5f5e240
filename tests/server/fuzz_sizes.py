"""Fuzz the sizes and counts of a server in a process of its own, with limited memory: python
tests/server/fuzz_sizes.py [--requests 100000] [--seed 1] [--connections 8] [--memory-mib 3072]
[--minutes M]

One tenant sends every request of both wires and of /v1 with one value blown up, value by value, and
then with pairs of values. A second tenant, in another process, sends heartbeats and samples; their
latency is measured before and during the run. The server must live, and answer no 5xx but a
503 with a Retry-After.

The server's memory is limited by a memory cgroup (v2, or v1) where this user may create one, and by
RLIMIT_DATA elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from full_requests import API, FullRequest, Ids, full_requests
from fuzz import FUZZING, WITNESS, Tenant, tenant
from fuzz_connection import Answer, Connection, NoResponse, RawRequest
from oversized_bodies import MAX_BODY_BYTES, body_fields, oversized_body
from server_process import BASE_MODEL, ServerProcess, running_server

from planish.server.http.keys import OPERATOR_KEY_NAME
from planish.testing import tiny_model

_OPTIONS = (
    *("--poll-seconds", "0.2", "--kv-cache-gib", "0.2", "--prefix-cache-gib", "0.1"),
    *("--set", "adapter_memory_bytes=256MiB", "--set", "max_queued_requests=2000"),
    # Requests with a blown-up sequence number wait for a missing request, by default for ten
    # minutes. They count as queued requests for that long, and a full queue stops the fuzzer.
    *("--set", "missing_request_timeout=20"),
)
_SIZES = (100, 1_000, 10_000, 100_000, 1_000_000, MAX_BODY_BYTES)
_WEIGHTS = (20, 30, 30, 14, 5, 1)
IDLE_SECONDS = 20.0
_BUSY = (503, 529)
"""The statuses of a busy server; 529 is that of the Messages API."""
MAX_ERROR = 1 << 16
"""An error must not send back what it was sent."""
_ROUND = 500
"""Requests with the same session and models. A blown-up request may use them up."""


@dataclass
class Report:
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    fields: set[tuple[str, str]] = field(default_factory=set)
    """Places that were blown up: the request's name, and the path of the value."""
    slowest: float = 0.0
    slowest_shot: str = ""
    peak_bytes: int = 0
    """The largest resident memory of the server that was seen."""
    idle: dict[str, list[float]] = field(default_factory=dict)
    busy: dict[str, list[float]] = field(default_factory=dict)
    """Latencies of the second tenant in seconds, by kind of request."""

    @property
    def requests(self) -> int:
        return sum(self.statuses.values()) - self.statuses["reconnected"]

    def latencies(self) -> list[str]:
        """Return a line for each kind of request of the second tenant."""
        lines = []
        for kind, idle in self.idle.items():
            before, during = percentile(idle, 99), percentile(self.busy[kind], 99)
            median = percentile(idle, 50), percentile(self.busy[kind], 50)
            lines.append(
                f"{kind}: median {median[0] * 1e3:.1f} -> {median[1] * 1e3:.1f} ms, "
                f"p99 {before * 1e3:.1f} -> {during * 1e3:.1f} ms, {during / before:.1f} times "
                f"({len(idle)} and {len(self.busy[kind])} requests)"
            )
        return lines


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


@contextmanager
def memory_limit(limit: int) -> Iterator[tuple[str, str]]:
    """Yield how memory is limited, and Python code by which a process limits itself."""
    v2, v1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
    is_v2 = (v2 / "cgroup.controllers").exists()
    group = (v2 if is_v2 else v1) / f"planish-fuzz-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(limit))
    except OSError:
        with suppress(OSError):
            group.rmdir()
        code = f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({limit}, -1)); "
        yield "RLIMIT_DATA", code
        return
    try:
        code = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (-1, -1)); "
        code += f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); "
        yield f"a memory cgroup ({'v2' if is_v2 else 'v1'})", code
    finally:
        for _ in range(50):  # the group is busy until the process is gone
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


_OWN_MEMORY = 3 << 30
"""Limit of the memory of this program, so that a mistake here does not take the whole machine."""


def fuzz(
    directory: Path,
    count: int,
    seed: int,
    connections: int = 8,
    memory: int = 3072 << 20,
    seconds: float = math.inf,
    idle_seconds: float = IDLE_SECONDS,
) -> Report:
    """Send `count` requests, or fewer if `seconds` have passed. Return what was answered, and how
    long the second tenant waited.
    """
    keys = directory / "keys"
    # The operator may also load adapters.
    keys.write_text(f"{OPERATOR_KEY_NAME} {FUZZING}\nwitness {WITNESS}\n")
    data = directory / "data"
    data.mkdir(0o700)
    report = Report()
    source = random.Random(seed)
    options = ("--api-key-file", str(keys), "--adapter-dir", str(data), *_OPTIONS)
    with memory_limit(memory) as (how, prelude):
        model = tiny_model(directory / "model")
        with running_server(data, model, *options, prelude=prelude) as server:
            print(f"memory is limited to {memory >> 20} MiB by {how}", flush=True)
            with tenant(server, WITNESS) as witness:
                report.idle = _watched(server, witness, idle_seconds)
                watch = _watch(server, witness)
                # Clients are on other machines, so they yield the cores to the server. The priority is
                # that of one thread, because programs that this thread starts later inherit its own.
                yielding = ThreadPoolExecutor(1, "", os.setpriority, (os.PRIO_PROCESS, 0, 19))
                try:
                    with yielding as threads:
                        threads.submit(
                            _all_rounds, server, source, count, connections, seconds, report
                        ).result()
                finally:
                    report.busy = _stopped(watch)
            if server.process.poll() is None and (status := server.stop()) != 0:
                report.faults.append(f"exit status {status}: " + "\n".join(server.output[-20:]))
            report.faults += [line[-2000:] for line in server.output if "Traceback" in line]
    return report


def _all_rounds(
    server: ServerProcess,
    source: random.Random,
    count: int,
    connections: int,
    seconds: float,
    report: Report,
) -> None:
    plan = _plan(source)
    began = time.monotonic()
    while report.requests < count and time.monotonic() < began + seconds:
        before = report.requests
        try:
            with tenant(server, FUZZING) as fuzzing:
                left = min(_ROUND, count - report.requests)
                asyncio.run(_fire(server, _ids(fuzzing), plan, source, left, connections, report))
        except (AssertionError, httpx.HTTPError) as error:
            # A full queue of the fuzzing tenant is no fault: wait until it drains.
            if server.process.poll() is None and "429" in str(error):
                report.statuses["429 before a round"] += 1
                time.sleep(1.0)
            else:
                report.faults.append(f"the next round could not begin: {error}"[:2000])
        if server.process.poll() is not None:
            said = "\n".join(server.output[-20:])
            report.faults.insert(0, f"the server ended, {server.process.returncode}: {said}")
            return
        report.peak_bytes = max(report.peak_bytes, _resident(server.process.pid))
        if before // 5000 != report.requests // 5000 or report.faults[:1]:
            print(
                f"{report.requests} requests in {time.monotonic() - began:.0f} s, slowest "
                f"{report.slowest:.1f} s ({report.slowest_shot}), {report.peak_bytes >> 20} MiB, "
                f"{len(report.faults)} faults {report.faults[:2]}",
                flush=True,
            )
        if len(report.faults) > 20:
            return


def _ids(fuzzing: Tenant) -> Ids:
    known = fuzzing.known
    numbers = {known.models[0]: fuzzing.seq_id}
    return Ids(
        BASE_MODEL, known.sessions[0], known.models[0], known.samplers[0], known.paths[0],
        known.requests[0], numbers,
    )  # fmt: skip


def _plan(source: random.Random) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Yield the index of a request, the indices of its blown-up values, and a size: first every
    value with every size, then pairs.
    """
    for size in _SIZES[:5]:
        for index, request in enumerate(
            full_requests(Ids("b", "s", "m", "p", "tinker://a/weights/b", "r"))
        ):
            for place in range(len(body_fields(request.body))):
                yield index, (place,), size
    while True:
        size = source.choices(_SIZES, _WEIGHTS)[0]
        pair = (source.randrange(10**6), source.randrange(10**6))
        yield source.randrange(10**6), pair, source.randint(size // 2, size)


async def _fire(
    server: ServerProcess,
    ids: Ids,
    plan: Iterator[tuple[int, tuple[int, ...], int]],
    source: random.Random,
    count: int,
    connections: int,
    report: Report,
) -> None:
    left = iter(range(count))

    async def shoot() -> None:
        connection = Connection(server.url, FUZZING)
        for _ in left:
            index, chosen, size = next(plan)
            known = full_requests(ids)
            request = known[index % len(known)]
            found = body_fields(request.body)
            names = [found[one % len(found)].path for one in chosen]
            report.fields |= {(request.name, name) for name in names}
            body, is_packed = oversized_body(request, source, chosen, size)
            await _send(
                connection,
                _shot(request, body, is_packed),
                f"{request.name}: {names}, {size}",
                report,
            )
        await connection.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(connections):
            tasks.create_task(shoot())


def _shot(request: FullRequest, body: bytes, is_packed: bool) -> RawRequest:
    headers = [(b"content-type", request.content_type.encode())]
    if is_packed:
        headers.append((b"content-encoding", b"zstd"))
    return RawRequest(request.method, request.path.encode(), tuple(headers), body)


async def _send(connection: Connection, shot: RawRequest, what: str, report: Report) -> None:
    try:
        try:
            answer = await connection.send(shot)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            # The server closed the connection while this program was busy for longer than the
            # keep-alive timeout. Clients open another one then.
            report.statuses["reconnected"] += 1
            answer = await connection.send(shot)
    except (NoResponse, OSError, EOFError, ValueError) as error:
        report.statuses[type(error).__name__] += 1
        report.faults.append(f"{type(error).__name__} {error}: {what}")
        return
    assert answer is not None
    report.statuses[str(answer.status)] += 1
    if answer.seconds > report.slowest:
        report.slowest, report.slowest_shot = answer.seconds, what
    if (fault := _fault(answer)) is not None:
        report.faults.append(f"{fault}: {what}")


def _fault(answer: Answer) -> str | None:
    """Return what must not be in an answer. A busy server says when to come again."""
    if answer.status >= 500 and not (answer.status in _BUSY and _is_documented(answer.body)):
        return f"{answer.status} {answer.body[:300]!r}"
    if len(answer.body) > MAX_ERROR and answer.status >= 400:
        return f"{answer.status} with {len(answer.body)} bytes, beginning {answer.body[:100]!r}"
    return None


def _is_documented(body: bytes) -> bool:
    with suppress(ValueError, KeyError, TypeError):
        content = json.loads(body)
        text = content["detail"] if "detail" in content else content["error"]["message"]
        return "again" in text
    return False


def _resident(pid: int) -> int:
    with suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def _watch(server: ServerProcess, witness: Tenant) -> subprocess.Popen[str]:
    """Start a process that sends the second tenant's requests until its input ends."""
    known = witness.known
    arguments = (server.url, known.sessions[0], known.samplers[0])
    process = subprocess.Popen(
        [sys.executable, __file__, "--watch", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _stopped(watch: subprocess.Popen[str]) -> dict[str, list[float]]:
    said, _ = watch.communicate("stop\n", timeout=300)
    return json.loads(said)


def _watched(server: ServerProcess, witness: Tenant, seconds: float) -> dict[str, list[float]]:
    watch = _watch(server, witness)
    time.sleep(seconds)
    return _stopped(watch)


async def watch(url: str, session: str, sampler: str) -> None:
    """Send heartbeats and samples until the input has a line; print the latencies."""
    latencies: dict[str, list[float]] = {"heartbeat": [], "sample of 16 tokens": []}
    number = random.randrange(10**9)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    connection = Connection(url, WITNESS)

    async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = ((b"content-type", b"application/json"),)
        shot = RawRequest("POST", f"{API}{path}".encode(), headers, json.dumps(body).encode())
        answer = await connection.send(shot)
        while answer is not None and answer.status in (408, 503):
            answer = await connection.send(shot)
        assert answer is not None
        assert answer.status == 200, answer
        return json.loads(answer.body)

    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        number += 1
        began = time.monotonic()
        await post("/session_heartbeat", {"session_id": session})
        middle = time.monotonic()
        sample = {
            "sampling_session_id": sampler, "seq_id": number, "prompt": prompt, "num_samples": 1,
            "sampling_params": {"max_tokens": 16, "seed": number, "stop": []},
        }  # fmt: skip
        accepted = await post("/asample", sample)
        await post("/retrieve_future", {"request_id": accepted["request_id"]})
        latencies["heartbeat"].append(middle - began)
        latencies["sample of 16 tokens"].append(time.monotonic() - middle)
        await asyncio.sleep(0.05)
    print(json.dumps(latencies))


def main() -> int:
    if sys.argv[1:2] == ["--watch"]:
        asyncio.run(watch(*sys.argv[2:]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--memory-mib", type=int, default=3072)
    parser.add_argument("--minutes", type=float, default=math.inf)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (_OWN_MEMORY, resource.RLIM_INFINITY))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        report = fuzz(
            Path(directory),
            options.requests,
            options.seed,
            options.connections,
            options.memory_mib << 20,
            options.minutes * 60,
        )
    seconds = time.monotonic() - began
    print(
        f"{report.requests} requests in {seconds:.0f} s on {os.cpu_count()} cores; "
        f"{len(report.fields)} values; peak {report.peak_bytes >> 20} MiB; slowest "
        f"{report.slowest:.1f} s ({report.slowest_shot})"
    )
    print("statuses:", dict(sorted(report.statuses.items())))
    print("second tenant:", *report.latencies(), sep="\n  ")
    print(f"{len(report.faults)} faults", *report.faults[:50], sep="\n")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
