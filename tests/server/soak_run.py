"""Mixed traffic of several tenants for some minutes, and the memory, files, database and threads
that the server uses.

    python tests/server/soak_run.py --minutes 8 --record soak_run.json

Every tenant runs episodes over HTTP: a session with a model that is trained, sampled from, saved,
loaded, deleted and unloaded. The settings are small (results expire within half a minute, unnamed
samplers may take a few MB), so that everything that grows must be cleaned up many times. After a
warm-up of a third of the time, nothing may be larger at the end than at the beginning.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sqlite3
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean

from crash_server import CrashServer, Start
from server_client import BASE, RANK, adam, gradient, record, sample
from server_process import free_port
from wire_client import RetryingClient, WireClient

from planish.server.results import Accepted, Done
from planish.server.settings import ServerSettings
from planish.service import (
    CreateModel,
    CreateSampler,
    LoadWeights,
    Operation,
    PublishSampler,
    SaveWeights,
)
from planish.testing import tiny_model
from planish.types import LoraConfig

SETTINGS = ServerSettings(
    max_replay_seconds=1.0,
    adapter_idle_timeout=5.0,
    adapter_memory_bytes=4_000_000,
    result_retention=30.0,
    expiry_delay=10.0,
    result_memory_bytes=1 << 20,
    max_unnamed_sampler_bytes=4_000_000,
)
_EVERY_SECONDS = 5.0
_STEPS = 4
_GROWTH = 1.05
_SLACK = {
    "resident_bytes": 8 << 20,
    "files": 60,
    "database_bytes": 4 << 20,
    "rows": 400,
    "body_bytes": 1 << 20,
    "checkpoint_bytes": 2 << 20,
    "open_files": 20,
    "threads": 8,
}
"""How much each value may grow by chance."""


@dataclass(frozen=True)
class ServerUsage:
    """The state of the server at one moment."""

    seconds: float
    resident_bytes: int
    files: int
    database_bytes: int
    rows: int
    """Rows of requests in the database."""
    body_bytes: int
    """Bodies of requests and results, in the database and in files."""
    checkpoint_bytes: int
    open_files: int
    threads: int


def measure_usage(pid: int, data_dir: Path, start_time: float) -> ServerUsage:
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    sizes: dict[Path, int] = {}
    for folder, _, names in os.walk(data_dir):  # which passes over what is removed meanwhile
        for path in (Path(folder, name) for name in names):
            with suppress(FileNotFoundError):
                sizes[path] = path.stat().st_size
    database = sqlite3.connect(f"file:{data_dir / 'server.db'}?mode=ro", uri=True)
    query = (
        "SELECT COUNT(*), SUM(COALESCE(LENGTH(body), 0) + COALESCE(LENGTH(result), 0)) FROM "
        "requests"
    )
    rows, inline = database.execute(query).fetchone()
    database.close()
    return ServerUsage(
        seconds=round(time.monotonic() - start_time, 1),
        resident_bytes=int(status["VmRSS"].split()[0]) * 1024,
        files=len(sizes),
        database_bytes=sum(
            size for path, size in sizes.items() if path.name.startswith("server.db")
        ),
        rows=rows,
        body_bytes=(inline or 0)
        + sum(size for path, size in sizes.items() if path.parent.name == "bodies"),
        checkpoint_bytes=sum(size for path, size in sizes.items() if "checkpoints" in path.parts),
        open_files=len(list((process / "fd").iterdir())),
        threads=int(status["Threads"]),
    )


class Tenant:
    """One key, which runs episodes until it is stopped."""

    def __init__(self, url: str, key: str, number: int) -> None:
        self.wire = WireClient(url, key)
        self.number = number
        self.episodes = self.requests = 0
        self._patient = RetryingClient(self.wire)

    async def play(self, until: float) -> None:
        while time.monotonic() < until:
            await self._episode()
            self.episodes += 1

    async def _episode(self) -> None:
        session = await self._patient.call("create_session")
        model_id = f"{session}:train:0"
        await self._answered(
            "create_model", CreateModel(model_id, BASE, LoraConfig(RANK, self.episodes))
        )
        base = await self._patient.call(
            "create_sampler", CreateSampler(f"{session}:sample:0", BASE)
        )
        model = _Counted(model_id)
        for step in range(_STEPS):
            operations = [gradient(model_id, step), gradient(model_id, step + 50), adam(model_id)]
            await asyncio.gather(*(self._train(model, operation) for operation in operations))
            published = f"{session}:sample:{step + 1}"
            await self._train(model, PublishSampler(model_id, published))
            await self._sample(published, 6)
        await self._sample(base, 3)
        await self._train(model, gradient(model_id, 7, forward_only=True))
        answer = await self._train(model, SaveWeights(model_id, "kept", ttl_seconds=20))
        path = json.loads(answer.content)["path"]
        await self._train(model, LoadWeights(model_id, path, with_optimizer=True))
        await self._patient.call(
            "create_sampler", CreateSampler(f"{session}:sample:90", None, path)
        )
        await self._sample(f"{session}:sample:90", 2)
        if self.episodes % 2:
            await self._patient.call("delete_checkpoint", path)
            await self._answered("unload_model", model_id)
        await self._patient.call("finish_session", session)

    async def _train(self, model: _Counted, operation: Operation[object]) -> Done:
        model.seq += 1
        return await self._answered("submit_training", model.seq, operation)

    async def _sample(self, sampler_id: str, count: int) -> None:
        """Send several samples with a common prefix, and cancel one."""
        prompts = [b"what is " * 12 + bytes([65 + index]) for index in range(count)]
        drawing = (
            self._answered("submit_sample", index, sample(sampler_id, prompt, n=4, max_tokens=12))
            for index, prompt in enumerate(prompts)
        )
        given_up = await self._patient.call(
            "submit_sample", 1000, sample(sampler_id, n=1, max_tokens=400)
        )
        await asyncio.gather(*drawing)
        await self._patient.call("cancel", given_up.request_id)
        await self._patient.answer(given_up.request_id)

    async def _answered(self, method: str, *args: object) -> Done:
        accepted: Accepted = await self._patient.call(method, *args)
        answer = await self._patient.answer(accepted.request_id)
        assert isinstance(answer, Done), answer
        self.requests += 1
        return answer


@dataclass
class _Counted:
    model_id: str
    seq: int = 0


async def soak(directory: Path, minutes: float, tenants: int) -> tuple[list[ServerUsage], int, int]:
    """Return the observations, and the numbers of episodes and requests."""
    data_dir, keys = (
        directory / "data",
        {f"tml-soak-{number}": f"tenant{number}" for number in range(tenants)},
    )
    start = Start(tiny_model(directory / "model"), data_dir, SETTINGS, free_port(), keys)
    server = CrashServer(start)
    start_time = time.monotonic()
    clients = [
        Tenant(f"http://127.0.0.1:{start.port}", key, number) for number, key in enumerate(keys)
    ]
    usages: list[ServerUsage] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            usages.append(await asyncio.to_thread(measure_usage, server.pid, data_dir, start_time))
            print(json.dumps(asdict(usages[-1])), flush=True)

    try:
        async with asyncio.TaskGroup() as tasks:
            # an error of one, or of the watch, is the end of all
            watching = tasks.create_task(watch())
            await asyncio.gather(*(client.play(start_time + 60 * minutes) for client in clients))
            watching.cancel()
    finally:
        for client in clients:
            await client.wire.close()
        server.kill()
        await server.died()
    return (
        usages,
        sum(client.episodes for client in clients),
        sum(client.requests for client in clients),
    )


def growth(usages: list[ServerUsage]) -> dict[str, dict[str, float]]:
    """Return the mean of each value in the second and in the last third."""
    third = len(usages) // 3
    middle, last = usages[third : 2 * third], usages[2 * third :]
    return {
        field.name: {
            "second third": round(mean(getattr(usage, field.name) for usage in middle)),
            "last third": round(mean(getattr(usage, field.name) for usage in last)),
            "most": max(getattr(usage, field.name) for usage in usages),
        }
        for field in fields(ServerUsage)
        if field.name != "seconds"
    }


def growing_values(found: dict[str, dict[str, float]]) -> list[str]:
    """Return what is larger in the last third than in the second, beyond chance."""
    return [
        name
        for name, sizes in found.items()
        if sizes["last third"] > sizes["second third"] * _GROWTH + _SLACK[name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--tenants", type=int, default=4)
    parser.add_argument("--record", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="planish-soak-") as directory:
        usages, episodes, requests = asyncio.run(
            soak(Path(directory), arguments.minutes, arguments.tenants)
        )
    found = growth(usages)
    result = {
        "minutes": arguments.minutes,
        "episodes": episodes,
        "requests": requests,
        "found": found,
    }
    result["grown"] = growing_values(found)
    record(result, arguments.record)
    return 1 if result["grown"] else 0


if __name__ == "__main__":
    sys.exit(main())
