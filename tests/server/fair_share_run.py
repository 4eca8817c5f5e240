"""Measure what one tenant at all of its bounds leaves to another.

    python tests/server/fair_share_run.py --seconds 30 --record fair_share.json

The modest tenant samples and trains all the time, in a process of its own, first alone. Then the
greedy tenant reaches every bound of a tenant and stays there: sessions, models, samplers, bytes on
disk, queued requests and their bytes, rejected requests in the journal, and connections. The modest
tenant must get at least as many sampled tokens and training steps as the greedy one, less 10% for
the variation of the measurement. The share that it keeps of what it had alone is reported too, per
second of the server's processor time, because the programs of both tenants use processors as well.
The settings are small, so that the bounds are reached soon.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from server_client import RANK, adam, record, sample
from server_process import BASE_MODEL, ServerProcess, running_server
from wire_client import RequestRejected, RetryingClient, ServerUnreachable, WireClient

from planish.server.results import Done
from planish.service import CreateModel, CreateSampler, ForwardBackward, SaveWeights
from planish.testing import tiny_model
from planish.types import Datum, LoraConfig, ModelInput

SETTINGS = {
    "max_sessions": 40,
    "max_models": 8,
    "max_samplers": 16,
    "max_storage_bytes": 3 << 20,
    "max_queued_requests": 40,
    "max_queued_bytes": 40 << 10,
    "max_rejected_request_bytes": 32 << 10,
}
_OPEN_FILES = 1024
_POLLS, _CONNECTIONS = 32, 300
"""Answers that the greedy tenant waits for, and connections that it holds open besides. The bound
of a tenant is 288 connections.
"""
_SAMPLES, _SEQUENCES, _TOKENS = 24, 16, 64
"""Sample requests of the modest tenant in flight, the sequences of each, and their tokens. They are
more sequences than the engine takes at once.
"""
_MODELS, _STEPS = 3, 3
"""Models that the modest tenant trains, and the steps of each in flight."""
_PAUSE_SECONDS = 0.1
FAIR = 0.9


def create_model_operation(session: str, number: int) -> CreateModel:
    return CreateModel(f"{session}:train:{number}", base_model=BASE_MODEL, lora=LoraConfig(RANK, 1))


def gradient_operation(model_id: str) -> ForwardBackward:
    tokens = ModelInput.from_ints(range(128))
    inputs = {"target_tokens": np.arange(128), "weights": np.ones(128, np.float32)}
    return ForwardBackward(model_id, [Datum(tokens, inputs)] * 8, "cross_entropy")


async def run_modest_tenant(url: str) -> None:
    """Sample and train until the input ends, with as much work in flight as the server can use.
    After each line of input, print the tokens and steps per second since the line before.
    """
    wire = WireClient(url, "modest-key")
    patient, done = RetryingClient(wire), Counter[str]()
    session = await patient.call("create_session")
    for number in range(_MODELS):
        accepted = await patient.call("create_model", create_model_operation(session, number))
        assert isinstance(await patient.answer(accepted.request_id), Done)
    sampler = await patient.call(
        "create_sampler", CreateSampler(f"{session}:sample:0", BASE_MODEL, None)
    )

    async def sample_on(first: int) -> None:
        for number in range(first, 1 << 30, _SAMPLES):
            operation = sample(sampler, n=_SEQUENCES, max_tokens=_TOKENS, seed=number, stop=[])
            accepted = await patient.call("submit_sample", number, operation)
            assert isinstance(await patient.answer(accepted.request_id), Done)
            done["tokens"] += _SEQUENCES * _TOKENS

    async def train(model: int) -> None:
        model_id = f"{session}:train:{model}"
        ahead: list[str] = []
        for number in range(1, 1 << 30, 2):
            await patient.call("submit_training", number, gradient_operation(model_id))
            accepted = await patient.call("submit_training", number + 1, adam(model_id))
            ahead.append(accepted.request_id)
            if len(ahead) == _STEPS:
                assert isinstance(await patient.answer(ahead.pop(0)), Done)
                done["steps"] += 1

    work = (*map(sample_on, range(_SAMPLES)), *map(train, range(_MODELS)))
    tasks = [asyncio.create_task(each) for each in work]
    began = time.monotonic()
    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        for task in tasks:
            if task.done():
                task.result()
        seconds = time.monotonic() - began
        print(json.dumps({kind: done[kind] / seconds for kind in ("tokens", "steps")}), flush=True)
        done.clear()
        began = time.monotonic()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await wire.close()


class GreedyTenant:
    """The tenant at all of its bounds."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self._wire = WireClient(url, "greedy-key")
        self.bounds = Counter[str]()
        """How often each bound rejected a request."""
        self.done = Counter[str]()
        """Sampled tokens and training steps."""
        self._pending: list[str] = []
        self._number = 0

    async def fill(self) -> None:
        """Open and store as much as is allowed."""
        sessions = [await self._wire.create_session()]
        await self._until_bound(
            "max_sessions", lambda _: self._append(sessions, self._wire.create_session())
        )
        session = sessions[0]
        self._models: list[str] = []
        await self._until_bound("max_models", lambda n: self._create(session, n))
        self._samplers: list[str] = []
        await self._until_bound(
            "max_samplers",
            lambda n: self._append(
                self._samplers,
                self._wire.create_sampler(CreateSampler(f"{session}:sample:{n}", BASE_MODEL, None)),
            ),
        )
        self._seqs = dict.fromkeys(self._models, 0)
        for number in range(1000):
            answer = await self._save(f"{number}")
            if not isinstance(answer, Done):
                assert "max_storage_bytes" in answer.message, answer
                self.bounds["max_storage_bytes"] += 1
                return

    async def _append(self, found: list[str], work: Awaitable[str]) -> None:
        found.append(await work)

    async def _create(self, session: str, number: int) -> None:
        accepted = await self._wire.create_model(create_model_operation(session, number))
        assert isinstance(await RetryingClient(self._wire).answer(accepted.request_id), Done)
        self._models.append(f"{session}:train:{number}")

    async def _save(self, name: str) -> Any:
        model_id = self._models[0]
        self._seqs[model_id] += 1
        accepted = await self._wire.submit_training(
            self._seqs[model_id], SaveWeights(model_id, name)
        )
        return await RetryingClient(self._wire).answer(accepted.request_id)

    async def _until_bound(self, bound: str, make: Callable[[int], Awaitable[None]]) -> None:
        for number in range(1000):
            try:
                await make(number)
            except RequestRejected as error:
                if bound not in str(error):
                    raise
                self.bounds[bound] += 1
                return
        raise AssertionError(f"{bound} was not reached")

    async def run(self) -> None:
        """Stay at the bounds until cancelled."""
        work: list[Coroutine[Any, Any, None]] = [
            *(self._submit() for _ in range(4)),
            *(self._poll() for _ in range(_POLLS)),
            *(self._train(model_id) for model_id in self._models[1:]),
            *(self._connect() for _ in range(_CONNECTIONS)),
            self._reject(self._models[0]),
        ]
        tasks = [asyncio.create_task(each) for each in work]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._wire.close()

    async def _call_or_count(self, work: Awaitable[Any]) -> Any:
        """Return the result of a call; None after it was rejected, which is counted."""
        try:
            return await work
        except RequestRejected as error:
            names = [name for name in SETTINGS if name in str(error)]
            self.bounds[names[0] if names else str(error.status)] += 1
        except ServerUnreachable:
            self.bounds["closed connection"] += 1
        await asyncio.sleep(_PAUSE_SECONDS)

    async def _submit(self) -> None:
        while True:
            # Small prompts reach the bound of the requests, large ones that of their bytes.
            size = 400 if int(time.monotonic() / 4) % 2 else 8
            prompt = bytes(random.choices(range(97, 123), k=size))
            sampler = random.choice(self._samplers)
            number, self._number = self._number, self._number + 1
            operation = sample(sampler, prompt, n=_SEQUENCES, max_tokens=_TOKENS, stop=[])
            accepted = await self._call_or_count(self._wire.submit_sample(number, operation))
            if accepted is not None:
                self._pending.append(accepted.request_id)

    async def _poll(self) -> None:
        while True:
            if not self._pending:
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            request_id = self._pending.pop(0)
            while not isinstance(await self._call_or_count(self._wire.result(request_id)), Done):
                pass
            self.done["tokens"] += _SEQUENCES * _TOKENS

    async def _connect(self) -> None:
        """Hold a connection open that has sent a key."""
        head = "GET /api/v1/get_server_capabilities HTTP/1.1", "host: a", "x-api-key: greedy-key"
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write("\r\n".join([*head, "", ""]).encode())
                if b" 503 " in await reader.readline():
                    self.bounds["connections"] += 1
                else:
                    await reader.read()
                writer.close()
            await asyncio.sleep(1.0)

    async def _train(self, model_id: str) -> None:
        for number in range(1, 1 << 30):
            make = gradient_operation(model_id) if number % 2 else adam(model_id)
            accepted = None
            while accepted is None:
                accepted = await self._call_or_count(self._wire.submit_training(number, make))
            if number % 2 == 0:
                while not isinstance(
                    await self._call_or_count(self._wire.result(accepted.request_id)), Done
                ):
                    pass
                self.done["steps"] += 1

    async def _reject(self, model_id: str) -> None:
        while True:
            body = {"model_id": model_id, "seq_id": self._seqs[model_id] + 1, "adam_params": "x"}
            with suppress(RequestRejected, ServerUnreachable):
                await self._wire._send("POST", "/optim_step", orjson.dumps(body))
            self._seqs[model_id] += 1
            self.bounds["rejected requests"] += 1
            await asyncio.sleep(_PAUSE_SECONDS / 10)


def cpu_seconds(server: ServerProcess) -> float:
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(server: ServerProcess, seconds: float) -> dict[str, Any]:
    watch = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--modest", server.url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert watch.stdin is not None
    assert watch.stdout is not None

    async def rates() -> dict[str, float]:
        assert watch.stdin is not None
        assert watch.stdout is not None
        watch.stdin.write(b"now\n")
        return json.loads(await watch.stdout.readline())

    assert await watch.stdout.readline() == b"ready\n"

    async def measured() -> tuple[dict[str, float], float]:
        """Return the rates of the modest tenant, and the processors that the server used."""
        await rates()
        spent = cpu_seconds(server)
        await asyncio.sleep(seconds)
        return await rates(), (cpu_seconds(server) - spent) / seconds

    alone, alone_processors = await measured()
    greedy = GreedyTenant(server.url)
    await greedy.fill()
    running = asyncio.create_task(greedy.run())
    await asyncio.sleep(10)  # until its queue is full
    greedy.done.clear()
    beside, processors = await measured()
    if running.done():
        running.result()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    watch.stdin.close()
    await watch.wait()
    share = {kind: (beside[kind] / processors) / (alone[kind] / alone_processors) for kind in alone}
    return {
        "alone": {**rounded(alone), "processors": round(alone_processors, 2)},
        "beside the greedy tenant": {**rounded(beside), "processors": round(processors, 2)},
        "share of what the modest tenant had alone": rounded(share),
        "the greedy tenant": rounded({kind: greedy.done[kind] / seconds for kind in alone}),
        "rejections of the greedy tenant": dict(greedy.bounds),
    }


def rounded(rates: Mapping[str, float]) -> dict[str, float]:
    return {kind: round(rate, 2) for kind, rate in rates.items()}


def main() -> int:
    if sys.argv[1:2] == ["--modest"]:
        asyncio.run(run_modest_tenant(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30, help="of each of two measurements")
    parser.add_argument("--record", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="planish-share-") as name:
        directory = Path(name)
        keys = directory / "keys"
        keys.write_text("modest modest-key\ngreedy greedy-key\n")
        options = [part for each in SETTINGS.items() for part in ("--set", "{}={}".format(*each))]
        limit = (
            f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({_OPEN_FILES},) * 2); "
        )
        with running_server(
            directory / "data",
            tiny_model(directory / "model"),
            *("--api-key-file", str(keys), "--poll-seconds", "5", *options),
            prelude=limit,
        ) as server:
            result = asyncio.run(measure(server, arguments.seconds))
            traced = [line for line in server.output if "Traceback" in line]
    reached = result["rejections of the greedy tenant"]
    missed = [name for name in (*SETTINGS, "connections") if not reached.get(name)]
    # The rows of rejected requests are deleted at their bound, so they reject nothing.
    result["bounds that were not reached"] = [
        name for name in missed if name != "max_rejected_request_bytes"
    ]
    result["tracebacks"] = traced
    record(result, arguments.record)
    ours, theirs = result["beside the greedy tenant"], result["the greedy tenant"]
    is_fair = all(ours[kind] >= FAIR * theirs[kind] for kind in theirs)
    return 0 if is_fair and not result["bounds that were not reached"] and not traced else 1


if __name__ == "__main__":
    sys.exit(main())
