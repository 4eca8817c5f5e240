"""Let every file call of a server fail in turn, and check that nothing acknowledged is lost.

    python tests/server/disk_fault_run.py --record disk_faults.json

A client creates a model, trains, samples, saves, loads and deletes, while the server takes
snapshots and moves adapters out of memory. In case number n of an error, the nth file call below
the data directory fails, counted from the start of the process. After a failed fsync, the data is
lost even if a later fsync succeeds, as on Linux. The errors:

    EIO      one call fails
    ENOSPC   one call fails; reads do not count
    full     12 calls in a row fail with ENOSPC
    memory   the nth write of the journal or of a checkpoint raises MemoryError

Rejected calls (503) are repeated with the same number, and failed requests with a new one. Then the
power fails, the disk forgets what was not synced, and the server starts again without a fault. All
answers must be what they were. Losses, samples, and the weights and optimizer state at the end must
equal those of a run without faults, bit for bit. A server may end by itself with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from crash_history import CrashClient, CrashModel, told
from crash_run import SETTINGS
from crash_server import CrashServer, Start, free_port
from disk_shim import Shim, compiler
from power_loss import LOSSES, Disk
from server_client import BASE, RANK, adam, drawn, gradient, sample, state
from wire_client import Refused, WireClient

from planish.server.results import Done, Failed
from planish.service import CreateModel, LoadWeights, PublishSampler, SaveWeights
from planish.testing import tiny_model
from planish.types import LoraConfig
from planish.wire.sampling import sample_response_from_message

KEY = "tml-faults"
TRIES = 6
ENDS = range(1, 100)
"""Statuses with which a server may end by itself. A signal is not among them."""


@dataclass(frozen=True)
class Fault:
    """What fails, and when."""

    error: str
    number: int

    @property
    def errno(self) -> int:
        return errno.EIO if self.error == "EIO" else errno.ENOSPC

    @property
    def count(self) -> int:
        return 12 if self.error == "full" else 1

    def __str__(self) -> str:
        return f"{self.error} at {self.number}"


ERRORS = ("EIO", "ENOSPC", "full", "memory")


@dataclass
class Case:
    """What happened with one fault."""

    facts: dict[str, Any] = field(default_factory=dict)
    state: dict[str, bytes] = field(default_factory=dict)
    failed_call: str = ""
    """Empty if the server made fewer calls than the number of the fault."""
    stops: int = 0
    """How often the server ended by itself."""
    failures: int = 0
    """Requests that failed."""
    calls: int = 0


class FaultClient:
    """A client that sends what failed again, with a new number."""

    def __init__(self, wire: WireClient) -> None:
        self._client = CrashClient(wire)
        self._models = 0
        self._samples = 0
        self.failures = 0

    @property
    def facts(self) -> dict[str, Any]:
        return self._client.history.facts

    async def run(self) -> str:
        """Run the script, and return the path of the last save."""
        client = self._client
        await client.begin()
        model = await self._until_done("creation", self._create)
        for seed in range(2):
            await self._step(model, seed)
        await self._draw(model, "early")
        path = await self._save(model, "middle")
        await self._step(model, 2)
        await self._done(model, lambda: LoadWeights(model.model_id, path, with_optimizer=True))
        await self._step(model, 3)
        await self._draw(model, "late")
        await client.call("delete_checkpoint", path)
        assert path not in await client.call("checkpoints")
        await client.check_answers()
        return await self._save(model, "last")

    async def check(self, path: str) -> None:
        """Check that everything is still there."""
        await self._client.check_answers()
        assert await self._client.call("checkpoints") == [path]

    async def _until_done(self, what: str, attempt: Callable[[], Awaitable[Any]]) -> Any:
        for _ in range(TRIES):
            result = await attempt()
            if not isinstance(result, Failed):
                return result
            self.failures += 1
            assert result.message, what
        raise AssertionError(f"{what} failed {TRIES} times, at last: {result.message}")

    async def _create(self) -> CrashModel | Failed:
        model_id = f"{self._client.session}:train:{self._models}"
        self._models += 1
        operation = CreateModel(model_id, base_model=BASE, lora=LoraConfig(RANK, 1))
        answer = await self._client.answer(await self._client.call("create_model", operation))
        return answer if isinstance(answer, Failed) else CrashModel(self._client, model_id, 0)

    async def _done(self, model: CrashModel, make: Callable[[], Any]) -> bytes:
        answer = await self._until_done(repr(make()), lambda: model.do(make()))
        return answer.content

    async def _step(self, model: CrashModel, seed: int) -> None:
        async def attempt() -> list[Any] | Failed:
            sent = await model.send(gradient(model.model_id, seed), adam(model.model_id))
            first, second = [await self._client.answer(accepted) for accepted in sent]
            if isinstance(second, Failed):
                return second
            assert isinstance(first, Done), f"step {seed} was made without its gradient: {first}"
            return [told(first), told(second)]

        self.facts[f"step {seed}"] = await self._until_done(f"step {seed}", attempt)

    async def _save(self, model: CrashModel, name: str) -> str:
        answer = await self._done(model, lambda: SaveWeights(model.model_id, name))
        return orjson.loads(answer)["path"]

    async def _draw(self, model: CrashModel, what: str) -> None:
        async def attempt() -> Any:
            sampler = f"{self._client.session}:sample:{self._samples}"
            number, self._samples = self._samples, self._samples + 1
            published = await model.do(PublishSampler(model.model_id, sampler))
            if isinstance(published, Failed):
                return published
            operation = sample(sampler, seed=7)
            answer = await self._client.answer(
                await self._client.call("submit_sample", number, operation)
            )
            if isinstance(answer, Failed):
                return answer
            return drawn(sample_response_from_message(answer.content))

        self.facts[f"sample {what}"] = await self._until_done(f"sample {what}", attempt)


async def play(model_dir: Path, directory: Path, fault: Fault | None, seed: int) -> Case:
    """Run the script with one fault, and check what is left after a power loss."""
    data_dir = directory / "data"
    data_dir.mkdir(parents=True)
    shim, disk, chance = Shim(directory / "shim", data_dir), Disk(data_dir), random.Random(seed)
    log = directory / "server.log"
    start = Start(model_dir, data_dir, SETTINGS, free_port(), {KEY: "one"}, log=log)
    case, server, is_ended = Case(), None, False
    wire = WireClient(f"http://127.0.0.1:{start.port}", KEY)
    client = FaultClient(wire)

    async def serve(fault: Fault | None) -> None:
        nonlocal server
        while not is_ended:
            shim.begin_log()
            in_memory = fault is not None and fault.error == "memory"
            server = CrashServer(
                replace(
                    start,
                    shim=shim.files,
                    memory_error_at=fault.number if fault is not None and in_memory else None,
                )
            )
            status = await server.died()
            disk.replay(shim.log)
            fault = None
            if not is_ended:
                case.stops += 1
                assert status in ENDS, f"the server ended with status {status}"
                assert "rror" in log.read_text(), "the server ended without a word"

    async def with_server(work: Awaitable[Any], fault: Fault | None) -> Any:
        nonlocal is_ended
        is_ended = False
        serving, working = asyncio.create_task(serve(fault)), asyncio.ensure_future(work)
        try:
            async with asyncio.timeout(120):
                await asyncio.wait([serving, working], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            return working.result()
        finally:
            is_ended = True
            working.cancel()
            if server is not None:
                server.kill()
            await asyncio.wait([serving])

    try:
        if fault is not None and fault.error != "memory":
            shim.fail(fault.number, fault.errno, fault.count)
        path = await with_server(client.run(), fault)
        case.calls, case.failures = shim.fields.calls, client.failures
        case.failed_call = shim.fields.failed_call.decode() if shim.fields.failed else ""
        shim.heal()
        disk.lose_power(chance.choice(LOSSES), chance)
        await with_server(client.check(path), None)
    finally:
        await wire.close()
    case.facts, case.state = client.facts, state(data_dir, path)
    return case


async def tried(
    model_dir: Path, directory: Path, fault: Fault, expected: Case, log_characters: int = 0
) -> Case | str:
    """Return what happened with a fault, or what is wrong, with the end of the server's log."""
    try:
        case = await play(model_dir, directory, fault, fault.number)
    except (AssertionError, Refused, TimeoutError, OSError) as error:
        log = (directory / "server.log").read_text()[-log_characters:] if log_characters else ""
        return f"{fault}: {error!r}\n{log}"
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for name in expected.facts:
        if case.facts[name] != expected.facts[name]:
            return f"{fault} ({case.failed_call}): {name} differs"
    if case.state != expected.state:
        return f"{fault} ({case.failed_call}): the last state differs"
    return case


async def campaign(
    directory: Path, errors: list[str], first: int, last: int, step: int
) -> dict[str, Any]:
    """Try every `step`th number of each error."""
    model_dir = tiny_model(directory / "model")
    expected = await play(model_dir, directory / "calm", None, 0)
    begun = time.monotonic()
    wrong: list[str] = []
    counts: dict[str, Counter[str]] = {}
    for error in errors:
        calls = counts.setdefault(error, Counter())
        limit = min(last, 120 if error == "memory" else expected.calls)
        for number in range(first, limit + 1, step):
            case = await tried(model_dir, directory / "case", Fault(error, number), expected, 3000)
            if isinstance(case, str):
                wrong.append(case)
                print(case, flush=True)
                continue
            calls["cases"] += 1
            calls["with a failed request"] += case.failures > 0
            calls["in which the server ended"] += case.stops > 0
            if case.failed_call:
                calls[f"call {case.failed_call}"] += 1
        print(error, dict(calls), f"{time.monotonic() - begun:.0f} s", flush=True)
    return {
        "faults": {error: dict(calls) for error, calls in counts.items()},
        "wrong": wrong,
        "seconds": round(time.monotonic() - begun),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--error", action="append", choices=ERRORS, help="may be repeated")
    parser.add_argument("--first", type=int, default=1, help="the first call that fails")
    parser.add_argument("--last", type=int, default=1_000_000, help="the last call that fails")
    parser.add_argument("--step", type=int, default=1, help="try every STEPth call")
    parser.add_argument("--record", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    if compiler() is None:
        parser.error("this run needs a C compiler (cc or gcc)")
    with tempfile.TemporaryDirectory(prefix="planish-faults-") as directory:
        result = asyncio.run(
            campaign(
                Path(directory),
                arguments.error or list(ERRORS),
                arguments.first,
                arguments.last,
                arguments.step,
            )
        )
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.record is not None:
        arguments.record.write_text(text + "\n")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
