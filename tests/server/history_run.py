"""Generated histories: seeded programs of several clients on a machine that fails by a seeded
schedule, checked against a model of the contract.

    python tests/server/history_run.py --histories 20 --seed 1 --record histories.json
    python tests/server/history_run.py --histories 1 --seed 7     # one history again

The seed of a history chooses the programs and the faults. Each of the clients is a tenant with
several models. Its program trains, samples, saves, replaces, loads, copies, lists, deletes, repeats
requests, reuses numbers and tries to read the other tenant's checkpoints, in random order. Until
the faults of the schedule are used up, the server is killed, loses its power (power_loss.py), is
stopped for a while (SIGSTOP), sees its clock jump by up to two hours, and has failing file calls
(EIO and ENOSPC).

`Contract` says what must be true: the checkpoints that a tenant lists, the number of optimizer
steps in each of them, and that a sampler gives the same tokens for the same seed whenever it is
asked. Every answer must stay what it was. Losses, samples and checkpoints must equal those of the
same programs without faults, bit for bit. The order of events depends on the machine's speed, so a
failing seed may need several runs to fail again.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from crash_history import CrashModel, cancel_and_wait, delete, outcome_facts, run_concurrently
from crash_run import CALM, KEYS, SETTINGS
from disk_shim import compiler
from faulty_machine import FaultClient, Machine
from server_client import adam, gradient, record, sample, sampled_bits, state
from wire_client import RequestRejected, WireClient

from planish.server.results import Accepted, Done, Failed
from planish.service import (
    CreateSampler,
    ForwardBackward,
    LoadWeights,
    PublishSampler,
    SaveWeightsForSampler,
)
from planish.testing import tiny_model
from planish.types import Datum, ModelInput
from planish.wire.sampling import sample_response_from_message

JUMP_NANOSECONDS = 2 * 3600 * 10**9
"""Below `result_retention` and `session_timeout`, so that a jump has no effect."""


@dataclass
class Contract:
    """What must be true of one client, whatever the machine does."""

    steps: dict[int, int] = field(default_factory=dict)
    """The optimizer steps of each model, by its number in the program."""
    saved: dict[str, int] = field(default_factory=dict)
    """For each training checkpoint that exists, its optimizer steps."""
    for_samplers: set[str] = field(default_factory=set)
    """The checkpoints without optimizer state that exist."""
    sampled: dict[tuple[str, int], Any] = field(default_factory=dict)
    """The first answer of each sampler to each seed."""

    @property
    def listed(self) -> set[str]:
        return {*self.saved, *self.for_samplers}

    def check_sample(self, sampler: str, seed: int, answer: Any) -> None:
        assert self.sampled.setdefault((sampler, seed), answer) == answer, (
            f"{sampler} gave another sample for seed {seed}"
        )


class Program(FaultClient):
    """One client's program, which the same seed makes again."""

    def __init__(self, wire: WireClient, seed: int, length: int) -> None:
        super().__init__(wire, offset=seed)
        self.contract = Contract()
        self._rng = random.Random(seed)
        self._length = length
        self._open: list[CrashModel] = []
        self._names = self._numbers = 0
        self._samplers: list[str] = []
        self._sequences: Counter[str] = Counter()
        self._last: tuple[CrashModel, int, Accepted] | None = None
        self.other: Program | None = None
        """Another tenant, whose checkpoints this one must not see."""

    async def run(self) -> list[str]:
        """Run the program, and return the paths of the models' last states."""
        await self.client.begin()
        await self._new_model()
        actions = {
            self._train: 8,
            self._train_two: 2,
            self._fail: 2,
            self._publish: 4,
            self._sample: 4,
            self._save: 3,
            self._replace: 1,
            self._save_for_sampler: 1,
            self._load: 2,
            self._new_model: 1,
            self._continue_from: 1,
            self._sampler_of: 1,
            self._delete: 1,
            self._repeat: 2,
            self._reuse_number: 1,
            self._look_at_other: 1,
            self._list: 2,
        }
        for action in self._rng.choices(list(actions), list(actions.values()), k=self._length):
            await action()
        return [await self._save_as(model, f"last-{model.number}") for model in self._open]

    async def check(self) -> None:
        """Check that nothing of the finished program is lost or changed."""
        await self.client.check_answers()
        await self._list()

    # What a program does.

    async def _new_model(self) -> None:
        if len(self._open) < 3:
            await self._opened(0)

    async def _continue_from(self) -> None:
        if self.contract.saved and len(self._open) < 3:
            path = self._rng.choice(sorted(self.contract.saved, key=_name))
            with_optimizer = self._rng.random() < 0.7
            steps = self.contract.saved[path] if with_optimizer else 0
            options = {"base_model": None, "from_path": path, "with_optimizer": with_optimizer}
            await self._opened(steps, **options)

    async def _opened(self, steps: int, **options: Any) -> None:
        number = len(self._open)
        self._open.append(await self.create(number, **options))
        self.contract.steps[number] = steps

    async def _train(self) -> None:
        await self._step(self._rng.choice(self._open), *self._step_choice())

    async def _train_two(self) -> None:
        first = self._step_choice()
        if len(self._open) > 1:
            both = self._rng.sample(self._open, 2)
            second = self._step_choice()
            await run_concurrently(self._step(both[0], *first), self._step(both[1], *second))

    def _step_choice(self) -> tuple[int, int]:
        self._numbers += 1
        return self._numbers, self._rng.randint(1, 3)

    async def _step(self, model: CrashModel, number: int, parts: int) -> None:
        operations = [gradient(model.model_id, 100 * number + part) for part in range(parts)]
        what = f"step {number} of model {model.number}"

        async def attempt() -> list[Any] | Failed:
            sent = await model.send(*operations, adam(model.model_id))
            answers = [await self.client.answer(accepted) for accepted in sent]
            self._last = (model, model.seq, sent[-1])
            if isinstance(answers[-1], Failed):
                return answers[-1]
            assert all(isinstance(answer, Done) for answer in answers), f"{what} lacks a gradient"
            return [outcome_facts(answer) for answer in answers]

        self.client.history.note(what, await self.until_done(what, attempt))
        self.contract.steps[model.number] += 1

    async def _fail(self) -> None:
        model, (number, _) = self._rng.choice(self._open), self._step_choice()
        data = [Datum(ModelInput.from_ints([99999]), {"target_tokens": [1], "weights": [1.0]})]
        bad = ForwardBackward(model.model_id, data, "cross_entropy")
        operations = [gradient(model.model_id, number), bad, adam(model.model_id)]
        answers = [await self.client.answer(sent) for sent in await model.send(*operations)]
        assert all(isinstance(answer, Failed) for answer in answers[1:]), answers

    async def _publish(self) -> None:
        model = self._rng.choice(self._open)

        async def attempt() -> str | Failed:
            name = self._sampler_id()
            answer = await model.do(PublishSampler(model.model_id, name))
            return answer if isinstance(answer, Failed) else name

        self._samplers.append(await self.until_done("publish", attempt))
        await self._sample_from(len(self._samplers) - 1, 1)

    async def _sampler_of(self) -> None:
        if self.contract.listed:
            path = self._rng.choice(sorted(self.contract.listed, key=_name))
            name = self._sampler_id()
            await self.client.call("create_sampler", CreateSampler(name, None, path))
            self._samplers.append(name)
            await self._sample_from(len(self._samplers) - 1, 1)

    def _sampler_id(self) -> str:
        self._names += 1
        return f"{self.client.session}:sample:{self._names}"

    async def _sample(self) -> None:
        if self._samplers:
            index = self._rng.randrange(len(self._samplers))
            await self._sample_from(index, self._rng.randint(1, 3))

    async def _sample_from(self, index: int, seed: int) -> None:
        sampler = self._samplers[index]

        async def attempt() -> Any:
            self._sequences[sampler] += 1
            operation = sample(sampler, seed=seed)
            accepted = await self.client.call(
                "submit_sample", self._sequences[sampler] - 1, operation
            )
            answer = await self.client.answer(accepted)
            if isinstance(answer, Failed):
                return answer
            return sampled_bits(sample_response_from_message(answer.content))

        differing = await self.until_done(f"sample of {sampler}", attempt)
        self.contract.check_sample(sampler, seed, differing)
        self.client.history.note(f"sample of {index} with seed {seed}", differing)

    async def _save(self) -> None:
        self._numbers += 1
        await self._save_as(self._rng.choice(self._open), f"saved-{self._numbers}")

    async def _save_as(self, model: CrashModel, name: str, **options: Any) -> str:
        path = await self.save(model, name, **options)
        self.contract.saved[path] = self.contract.steps[model.number]
        return path

    async def _replace(self) -> None:
        model = self._rng.choice(self._open)
        await self._save_as(model, f"replaced-{model.number}", overwrite=True, ttl_seconds=10**6)

    async def _save_for_sampler(self) -> None:
        model = self._rng.choice(self._open)
        self._numbers += 1
        name = f"weights-{self._numbers}"
        await self.done(model, lambda: SaveWeightsForSampler(model.model_id, name))
        self.contract.for_samplers.add(f"tinker://{model.model_id}/sampler_weights/{name}")

    async def _load(self) -> None:
        if self.contract.saved:
            model = self._rng.choice(self._open)
            path = self._rng.choice(sorted(self.contract.saved, key=_name))
            await self.done(model, lambda: LoadWeights(model.model_id, path, with_optimizer=True))
            self.contract.steps[model.number] = self.contract.saved[path]

    async def _delete(self) -> None:
        if self.contract.listed:
            path = self._rng.choice(sorted(self.contract.listed, key=_name))
            await delete(self.client, path)
            self.contract.saved.pop(path, None)
            self.contract.for_samplers.discard(path)

    async def _repeat(self) -> None:
        """Send an answered request once more."""
        if self._last is not None:
            model, number, accepted = self._last
            again = await self.client.call("submit_training", number, adam(model.model_id))
            assert again.request_id == accepted.request_id

    async def _reuse_number(self) -> None:
        """Send another request under a used number."""
        if self._last is not None:
            model, number, _ = self._last
            other = adam(model.model_id, 0.5)
            assert await self._status("submit_training", number, other) == 400

    async def _look_at_other(self) -> None:
        if self.other is not None and self.other.contract.listed:
            path = sorted(self.other.contract.listed, key=_name)[0]
            reader = CreateSampler(self._sampler_id(), None, path)
            assert await self._status("create_sampler", reader) in (400, 404)

    async def _status(self, method: str, *arguments: Any) -> int:
        """Return the HTTP status of a call; 200 if it succeeds."""
        try:
            await self.client.call(method, *arguments)
        except RequestRejected as error:
            return error.status
        return 200

    async def _list(self) -> None:
        differing = set(await self.client.call("checkpoints"))
        assert differing == self.contract.listed, (
            f"lost: {self.contract.listed - differing}, unexpected: {differing - self.contract.listed}"
        )


def _name(path: str) -> str:
    """Return what two runs of a program have in common of a checkpoint's path."""
    return path.rpartition("/")[2]


async def inject_faults(machine: Machine, seed: int, max_faults: int, counts: Counter[str]) -> None:
    """Let the machine fail `max_faults` times."""
    rng = random.Random(seed)
    kinds = {"kill": 4, "power loss": 4, "pause": 1, "clock jump": 1, "disk fault": 3}
    for _ in range(max_faults):
        await asyncio.sleep(rng.uniform(0.02, 0.4))
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        counts[kind] += 1
        match kind:
            case "kill" | "power loss":
                machine.kill(with_power_loss=kind == "power loss")
            case "pause":
                await machine.pause(rng.uniform(0.05, 1.0))
            case "clock jump":
                offset = rng.randint(-JUMP_NANOSECONDS, JUMP_NANOSECONDS)
                machine.shim.fields.clock_offset = offset
            case "disk fault":
                error = rng.choice([errno.EIO, errno.ENOSPC])
                call, number = rng.randint(1, 60), rng.choice([1, 1, 1, 6])
                machine.note(f"{errno.errorcode[error]} in {number} calls, {call} calls from now")
                machine.shim.fail(call, error, number)
    machine.shim.heal()


@dataclass
class Outcome:
    """What is left of a history."""

    facts: list[dict[str, Any]]
    states: list[dict[str, bytes]]
    counts: Counter[str]


async def run_history(
    model_dir: Path,
    directory: Path,
    seed: int,
    length: int,
    faults: int,
    ignores_syncs: bool = False,
) -> Outcome:
    """Run the programs of a history with up to this many faults. AssertionError or Refused if the
    contract is broken. With `ignores_syncs`, no sync has an effect.
    """
    machine = Machine(model_dir, directory, SETTINGS if faults else CALM, KEYS, seed)
    machine.shim.fields.ignores_syncs = ignores_syncs
    wires = [WireClient(machine.url, key) for key in KEYS]
    programs = [Program(wire, 2 * seed + index, length) for index, wire in enumerate(wires)]
    programs[0].other, programs[1].other = programs[1], programs[0]
    counts: Counter[str] = Counter()

    async def work() -> list[list[str]]:
        failing = asyncio.create_task(inject_faults(machine, seed, faults, counts))
        try:
            return await run_concurrently(*(program.run() for program in programs))
        finally:
            await cancel_and_wait(failing)
            machine.shim.heal()

    try:
        paths = await machine.run(work())
        if faults:
            machine.lose_power()
            counts["power loss"] += 1
        await machine.run(asyncio.wait_for(run_concurrently(*(p.check() for p in programs)), 170))
    except BaseException:
        kept = Path(tempfile.mkdtemp(prefix=f"planish-history-{seed}-"))
        shutil.copytree(directory, kept, dirs_exist_ok=True)
        print(f"{machine.log_end()}\nthe whole log and the data are in {kept}", file=sys.stderr)
        raise
    finally:
        await asyncio.gather(*(wire.close() for wire in wires))
    states = []
    for program, own in zip(programs, paths, strict=True):
        for path in sorted(program.contract.saved, key=_name):
            content = state(machine.data_dir, path)
            steps = int(np.frombuffer(content["step"], np.int64)[0])
            expected = program.contract.saved[path]
            assert steps == expected, f"{path} has {steps} optimizer steps, must have {expected}"
        states += [state(machine.data_dir, path) for path in own]
    counts["stops of the server"] = machine.stops
    counts["failed requests"] = sum(program.failures for program in programs)
    counts["answers"] = sum(len(program.client.history.answers) for program in programs)
    return Outcome([program.facts for program in programs], states, counts)


def differences(observed: Outcome, expected: Outcome) -> list[str]:
    """Return what differs from the same programs without faults."""
    differing = []
    for index, (ours, theirs) in enumerate(zip(observed.facts, expected.facts, strict=True)):
        differing += [
            f"client {index}: {name}"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
    for index, (mine, other) in enumerate(zip(observed.states, expected.states, strict=True)):
        if mine != other:
            differing.append(f"state {index}")
    return differing


async def check_history(
    model_dir: Path, directory: Path, seed: int, length: int, faults: int
) -> Counter[str]:
    """Run one history with and without faults, and return its counts. Raises AssertionError if
    something is wrong.
    """
    expected = await run_history(model_dir, directory / "calm", seed, length, 0)
    observed = await run_history(model_dir, directory / "faulty", seed, length, faults)
    differing = differences(observed, expected)
    assert not differing, "\n".join(differing[:20])
    return observed.counts


async def campaign(
    directory: Path, number: int, seed: int, length: int, faults: int
) -> dict[str, Any]:
    model_dir = tiny_model(directory / "model")
    start_time, total = time.monotonic(), Counter[str]()
    for each in range(seed, seed + number):
        place = directory / f"history {each}"
        try:
            counts = await check_history(model_dir, place, each, length, faults)
        except BaseException:
            print(
                f"failed; again: python tests/server/history_run.py --histories 1 --seed {each} "
                f"--length {length} --faults {faults}",
                flush=True,
            )
            raise
        total += counts
        print(f"history {each}: {dict(counts)}", flush=True)
        shutil.rmtree(place)
    seconds = round(time.monotonic() - start_time)
    return {"histories": number, "seed": seed, "seconds": seconds, "counts": dict(total)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--histories", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--length", type=int, default=40, help="actions of each client")
    parser.add_argument("--faults", type=int, default=30, help="the most faults of a history")
    parser.add_argument("--record", type=Path, help="a JSON file for the result")
    arguments = parser.parse_args()
    if compiler() is None:
        parser.error("this run needs a C compiler (cc or gcc)")
    with tempfile.TemporaryDirectory(prefix="planish-histories-") as directory:
        result = asyncio.run(
            campaign(
                Path(directory),
                arguments.histories,
                arguments.seed,
                arguments.length,
                arguments.faults,
            )
        )
    record(result, arguments.record)


if __name__ == "__main__":
    main()
