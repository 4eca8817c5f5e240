"""Let every file call of a server fail in turn, and check that nothing acknowledged is lost.

    python tests/server/disk_fault_run.py --record disk_faults.json

A client creates a model, trains, samples, saves, loads and deletes, while the server takes
snapshots and moves adapters out of memory. In case number n of an error, the nth file call below
the data directory fails, counted from the start of the process. After a failed fsync, the data is
lost even if a later fsync succeeds, as on Linux. The errors:

    EIO      one call fails
    ENOSPC   one call fails; only calls that may need space count
    full     from the nth such call on, every such call fails with ENOSPC
    memory   the nth write of the journal or of a checkpoint raises MemoryError

A full disk has space again after two seconds: in a third of the cases while the server runs, in a
third after it was killed, and in a third after it was killed and started on the full disk. Each
error of a full disk must say that the disk is full and what to do.

Rejected calls (503) are repeated with the same number, and failed requests with a new one. Then the
power fails, the disk forgets what was not synced, and the server starts again without a fault. All
answers must be what they were. Losses, samples, and the weights and optimizer state at the end must
equal those of a run without faults, bit for bit. A server may end by itself with an error.

    python tests/server/disk_fault_run.py --every-call --record every_call.json

With --every-call, one server makes many steps, each of them with one fault: forward_backward,
optim_step and a save, during which the nth file call fails. n grows by one with every step, until a
step ends before its nth call. After every 20 steps the power fails. Each step's metrics and the
bits of each save must equal those of a run without faults. One more error is possible here:

    allocation   the nth allocation of --allocation-kib or more by malloc and its relatives, in the
                 server's process, returns no memory
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import hashlib
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crash_history import CrashModel, cancel_and_wait, delete, outcome_facts
from crash_run import SETTINGS
from disk_shim import compiler
from faulty_machine import FaultClient, Machine
from server_client import adam, gradient, record, sample, sampled_bits, state
from wire_client import RequestRejected, WireClient

from planish.server.results import Done, Failed
from planish.service import LoadWeights, PublishSampler
from planish.testing import tiny_model
from planish.wire.sampling import sample_response_from_message

KEY = "tml-faults"


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
        return _NEVER if self.error == "full" else 1

    def __str__(self) -> str:
        return f"{self.error} at {self.number}"


ERRORS = ("EIO", "ENOSPC", "full", "memory")
CALL_ERRORS = ("EIO", "ENOSPC", "allocation")
_STEPS_PER_LIFE = 20
_STEPS_BEYOND = 3
"""Steps that must end before their nth call, since the number of calls varies."""
_MAX_CALLS = 600
_FULL_SECONDS = 1.0
_NEVER = 1 << 40
"""The number of a call that no script reaches."""


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
    unclear: list[str] = field(default_factory=list)
    """Errors that do not say that the disk is full and what to do."""


class Script(FaultClient):
    """What the client does."""

    def __init__(self, wire: WireClient) -> None:
        super().__init__(wire)
        self._samples = 0

    async def run(self) -> str:
        """Run the script, and return the path of the last save."""
        client = self.client
        await client.begin()
        model = await self.create(1)
        for seed in range(2):
            await self._step(model, seed)
        await self._sample(model, "early")
        path = await self.save(model, "middle")
        await self._step(model, 2)
        await self.done(model, lambda: LoadWeights(model.model_id, path, with_optimizer=True))
        await self._step(model, 3)
        await self._sample(model, "late")
        await delete(client, path)
        await client.check_answers()
        return await self.save(model, "last")

    async def check(self, path: str) -> None:
        """Check that everything is still there."""
        await self.client.check_answers()
        assert await self.client.call("checkpoints") == [path]

    async def _step(self, model: CrashModel, seed: int) -> None:
        async def attempt() -> list[Any] | Failed:
            sent = await model.send(gradient(model.model_id, seed), adam(model.model_id))
            first, second = [await self.client.answer(accepted) for accepted in sent]
            if isinstance(second, Failed):
                return second
            assert isinstance(first, Done), f"step {seed} was made without its gradient: {first}"
            return [outcome_facts(first), outcome_facts(second)]

        self.facts[f"step {seed}"] = await self.until_done(f"step {seed}", attempt)

    async def _sample(self, model: CrashModel, what: str) -> None:
        async def attempt() -> Any:
            sampler = f"{self.client.session}:sample:{self._samples}"
            number, self._samples = self._samples, self._samples + 1
            published = await model.do(PublishSampler(model.model_id, sampler))
            if isinstance(published, Failed):
                return published
            answer = await self.client.answer(
                await self.client.call("submit_sample", number, sample(sampler, seed=7))
            )
            if isinstance(answer, Failed):
                return answer
            return sampled_bits(sample_response_from_message(answer.content))

        self.facts[f"sample {what}"] = await self.until_done(f"sample {what}", attempt)


async def run_case(machine: Machine, fault: Fault | None) -> Case:
    """Run the script with one fault, and check what is left after a power loss."""
    wire = WireClient(machine.url, KEY)
    script, shim = Script(wire), machine.shim
    memory_error_at = None
    if fault is not None and fault.error == "memory":
        memory_error_at = fault.number
    elif fault is not None:
        shim.fail(fault.number, fault.errno, fault.count)
    freeing: list[asyncio.Task[None]] = []
    if fault is not None and fault.error == "full":
        machine.heals_at_end = False
        freeing.append(asyncio.create_task(free_space(machine, fault.number)))
    try:
        path = await machine.run(script.run(), memory_error_at)
        failed_call = shim.fields.failed_call.decode() if shim.fields.failed else ""
        calls = shim.fields.calls
        await cancel_and_wait(*freeing)
        shim.heal()
        machine.lose_power()
        await machine.run(script.check(path))
    finally:
        await cancel_and_wait(*freeing)
        await wire.close()
    states = state(machine.data_dir, path)
    case = Case(script.facts, states, failed_call, machine.stops, script.failures, calls)
    if fault is not None and fault.errno == errno.ENOSPC and failed_call:
        messages = {*script.messages, *script.client.wire.rejections}
        case.unclear = sorted(message for message in messages if not is_clear(message, fault.error))
    return case


async def free_space(machine: Machine, number: int) -> None:
    """Wait until the disk is full, and let it have space again later."""
    while not machine.shim.fields.failed:
        await asyncio.sleep(0.05)
    await asyncio.sleep(_FULL_SECONDS)
    if number % 3:
        machine.kill()
    if number % 3 == 2:  # the server starts on the full disk
        await asyncio.sleep(_FULL_SECONDS)
    machine.shim.heal()


def is_clear(message: str, error: str) -> bool:
    """Return whether a message names the cause and the remedy of a fault."""
    match error:
        case "ENOSPC" | "full":
            says_cause = re.search(r"disk is full|No space left on device", message)
            says_remedy = re.search("free space|the operator|accepts no new work", message)
            return bool(says_cause and says_remedy)
        case "allocation":
            return "memory" in message
    return bool(message)


def new_machine(model_dir: Path, directory: Path, seed: int = 0) -> Machine:
    return Machine(model_dir, directory, SETTINGS, {KEY: "one"}, seed)


async def run_and_check(
    model_dir: Path, directory: Path, fault: Fault, expected: Case
) -> Case | str:
    """Return what happened with a fault, or what is wrong, with the end of the server's log."""
    machine = new_machine(model_dir, directory, fault.number)
    try:
        case = await run_case(machine, fault)
    except (AssertionError, RequestRejected, TimeoutError, OSError) as error:
        return (
            f"{fault} ({machine.shim.fields.failed_call.decode()}): {error!r}\n{machine.log_end()}"
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for name in expected.facts:
        if case.facts[name] != expected.facts[name]:
            return f"{fault} ({case.failed_call}): {name} differs"
    if case.state != expected.state:
        return f"{fault} ({case.failed_call}): the last state differs"
    return case


async def campaign(
    directory: Path, errors: list[str], numbers: range, samples: int | None, seed: int
) -> dict[str, Any]:
    """Try each error at each of `numbers`, as far as the script makes so many calls, or at
    `samples` of them.
    """
    model_dir = tiny_model(directory / "model")
    expected = await run_case(new_machine(model_dir, directory / "calm"), None)
    start_time = time.monotonic()
    failures: list[str] = []
    counts: dict[str, Counter[str]] = {}
    for error in errors:
        calls = counts.setdefault(error, Counter())
        last = 120
        if error != "memory":
            fault_free = await run_case(
                new_machine(model_dir, directory / f"calm {error}"), Fault(error, _NEVER)
            )
            last = fault_free.calls
        tries = [number for number in numbers if number <= last]
        if samples is not None:
            tries = sorted(random.Random(seed).sample(tries, samples))
        print(f"{error}: {len(tries)} of {last} calls", flush=True)
        for number in tries:
            case = await run_and_check(
                model_dir, directory / "case", Fault(error, number), expected
            )
            if isinstance(case, str):
                failures.append(case)
                print(case, flush=True)
                continue
            if case.unclear:
                failures.append(f"{Fault(error, number)} ({case.failed_call}): {case.unclear}")
                print(failures[-1], flush=True)
            calls["cases"] += 1
            calls["with a failed request"] += case.failures > 0
            calls["in which the server ended"] += case.stops > 0
            if case.failed_call:
                calls[f"call {case.failed_call}"] += 1
        print(error, dict(calls), f"{time.monotonic() - start_time:.0f} s", flush=True)
    return {
        "faults": {error: dict(calls) for error, calls in counts.items()},
        "wrong": failures,
        "seconds": round(time.monotonic() - start_time),
    }


class Steps(Script):
    """A client that makes a step and a save again and again, with one fault in each."""

    def __init__(
        self, wire: WireClient, machine: Machine, error: str | None, allocation_bytes: int
    ) -> None:
        super().__init__(wire)
        self._machine = machine
        self._allocation_bytes = allocation_bytes
        self._error = error
        self._model: CrashModel | None = None
        self._path = ""
        self.digests: dict[int, str] = {}
        """The digest of each step's save."""
        self.calls = Counter[str]()
        self.steps = 0
        self.beyond = 0
        """Steps one after another in which no call failed."""

    @property
    def is_done(self) -> bool:
        return self._error is not None and self.beyond >= _STEPS_BEYOND

    async def make_steps(self, last: int) -> None:
        """Check the earlier answers, and make steps up to number `last`, or until all calls of a
        step have failed once.
        """
        if self._model is None:
            await self.client.begin()
            self._model = await self.create(1)
        await self.client.check_answers()
        while self.steps < last and not self.is_done:
            self.steps += 1
            await self._faulty_step(self._model, self.steps)

    async def _faulty_step(self, model: CrashModel, number: int) -> None:
        shim = self._machine.shim
        if self._error == "allocation":
            shim.fail_allocation(number, self._allocation_bytes)
        elif self._error is not None:
            shim.fail(number, Fault(self._error, number).errno)
        await self._step(model, number)
        path = await self.save(model, f"step-{number}")
        failed_call = shim.fields.failed_call.decode() if shim.fields.failed else ""
        if shim.fields.failed_allocations:
            failed_call = "allocation"
        shim.heal()
        shim.fields.failed = shim.fields.failed_allocations = 0
        saved = state(self._machine.data_dir, path)
        digest = hashlib.sha256()
        for name in sorted(saved):
            digest.update(name.encode() + saved[name])
        self.digests[number] = digest.hexdigest()
        if self._path:
            await delete(self.client, self._path)
        self._path = path
        self.calls[failed_call or "none"] += 1
        self.beyond = 0 if failed_call else self.beyond + 1


async def run_steps(
    machine: Machine, error: str | None, steps: int, allocation_bytes: int = 0
) -> Steps:
    """Make steps with a fault in each, with a power loss after every life of the server."""
    wire = WireClient(machine.url, KEY)
    script = Steps(wire, machine, error, allocation_bytes)
    try:
        while script.steps < steps and not script.is_done:
            await machine.run(script.make_steps(min(steps, script.steps + _STEPS_PER_LIFE)))
            machine.lose_power()
    finally:
        await wire.close()
    return script


async def every_call(
    directory: Path, errors: list[str], limit: int, allocation_bytes: int
) -> dict[str, Any]:
    """Let each call of a step fail once with each error."""
    model_dir = tiny_model(directory / "model")
    fault_free: Steps | None = None
    found: dict[str, Any] = {}
    failures: list[str] = []
    for error in errors:
        start_time, machine = time.monotonic(), new_machine(model_dir, directory / error, 1)
        machine.may_crash = error == "allocation"
        try:
            script = await run_steps(machine, error, limit, allocation_bytes)
        except (AssertionError, RequestRejected, TimeoutError, OSError) as failure:
            failures.append(
                f"{error} ({machine.shim.fields.failed_call.decode()}): {failure!r}\n"
                f"{machine.log_end()}"
            )
            print(failures[-1], flush=True)
            continue
        finally:
            shutil.rmtree(directory / error, ignore_errors=True)
        if fault_free is None or fault_free.steps < script.steps:
            fault_free = await run_steps(
                new_machine(model_dir, directory / f"calm {error}"), None, script.steps
            )
        for number in range(1, script.steps + 1):
            step = f"step {number}"
            if script.facts[step] != fault_free.facts[step]:
                failures.append(f"{error} at {number}: the metrics differ")
            if script.digests[number] != fault_free.digests[number]:
                failures.append(f"{error} at {number}: the saved state differs")
        unclear = sorted(
            message
            for message in {*script.messages, *script.client.wire.rejections}
            if not is_clear(message, error)
        )
        failures += [f"{error}: unclear: {message}" for message in unclear]
        found[error] = {
            "steps": script.steps,
            "all calls of a step failed once": script.is_done,
            "failed calls": dict(script.calls),
            "failed requests": script.failures,
            "ends of the server": machine.stops,
            "power losses": machine.power_losses,
            "seconds": round(time.monotonic() - start_time),
        }
        print(error, found[error], flush=True)
    return {"errors": found, "wrong": failures}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices = sorted({*ERRORS, *CALL_ERRORS})
    parser.add_argument("--error", action="append", choices=choices, help="may be repeated")
    parser.add_argument("--every-call", action="store_true", help="many faults in one process")
    parser.add_argument("--allocation-kib", type=int, default=16, help="the least size that fails")
    parser.add_argument("--first", type=int, default=1, help="the first call that fails")
    parser.add_argument("--last", type=int, default=1_000_000, help="the last call that fails")
    parser.add_argument("--step", type=int, default=1, help="try every STEPth call")
    parser.add_argument("--samples", type=int, help="try only so many of these calls")
    parser.add_argument("--seed", type=int, default=0, help="chooses the calls of --samples")
    parser.add_argument("--record", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    if compiler() is None:
        parser.error("this run needs a C compiler (cc or gcc)")
    known: tuple[str, ...] = CALL_ERRORS if arguments.every_call else ERRORS
    errors: list[str] = arguments.error or list(known)
    if unknown := set(errors) - set(known):
        parser.error(f"--error {unknown.pop()}: give one of {', '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="planish-faults-") as name:
        directory = Path(name)
        if arguments.every_call:
            limit = min(arguments.last, _MAX_CALLS)
            work = every_call(directory, errors, limit, arguments.allocation_kib << 10)
        else:
            numbers = range(arguments.first, arguments.last + 1, arguments.step)
            work = campaign(directory, errors, numbers, arguments.samples, arguments.seed)
        result = asyncio.run(work)
    record(result, arguments.record)
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
