"""A request that crashes the server is found and abandoned, and other tenants notice only a
pause.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_history import CrashClient
from crash_server import POISON, CrashServer, Start
from server_client import adam, gradient, sample
from server_process import free_port
from wire_client import WireClient

from planish.server.results import Done, Failed
from planish.server.settings import ServerSettings
from planish.service import ForwardBackward, SaveWeights
from planish.types import Datum, ModelInput

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KEYS = {"tml-crash-one": "one", "tml-crash-two": "two"}
MOST_ENDS = 5


def poison(model_id: str) -> ForwardBackward:
    tokens = [*POISON, 1, 2, 3]
    inputs = {"target_tokens": tokens, "weights": np.ones(len(tokens), np.float32)}
    return ForwardBackward(model_id, [Datum(ModelInput.from_ints(tokens), inputs)], "cross_entropy")


class Machine:
    """Restarts the server when it dies, like systemd."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.ends = 0
        self.server: CrashServer | None = None

    async def run(self) -> None:
        while True:
            self.server = CrashServer(self.start)
            status = await self.server.died()
            assert status in (-signal.SIGTERM, -signal.SIGKILL), (
                f"the server ended by itself, with status {status}"
            )
            self.ends += 1

    async def end(self, sig: int = signal.SIGKILL) -> None:
        """One end that is not the request's doing; the next start follows."""
        assert self.server is not None
        before = self.ends
        self.server.kill(sig)
        while self.ends == before:
            await asyncio.sleep(0.01)
        self.ends = before


@asynccontextmanager
async def served(
    model_dir: Path, data_dir: Path, has_poison: bool
) -> AsyncIterator[tuple[Machine, list[CrashClient]]]:
    """Two tenants at a machine."""
    machine = Machine(
        Start(model_dir, data_dir, ServerSettings(), free_port(), KEYS, has_poison=has_poison)
    )
    wires = [WireClient(f"http://127.0.0.1:{machine.start.port}", key) for key in KEYS]
    running = asyncio.create_task(machine.run())
    try:
        async with asyncio.timeout(280):
            yield machine, [CrashClient(wire) for wire in wires]
        if running.done():
            running.result()
    finally:
        running.cancel()
        if machine.server is not None:
            machine.server.kill()
            await machine.server.died()
        await asyncio.gather(*(wire.close() for wire in wires))


async def work_of_another(client: CrashClient) -> dict[str, Any]:
    """What the other tenant does meanwhile, and what came of it, to the bit."""
    await client.begin()
    model = await client.create(1)
    base = await client.sampler(100, None)
    for seed in range(12):
        await model.step(seed)
        await client.sample(f"step {seed}", base)
    await client.sample("end", await model.publish(0))
    return client.history.facts


def undisturbed(model_dir: Path, data_dir: Path) -> dict[str, Any]:
    async def scenario() -> dict[str, Any]:
        async with served(model_dir, data_dir, has_poison=False) as (_, (_, other)):
            return await work_of_another(other)

    return asyncio.run(scenario())


def both(
    model_dir: Path, data_dir: Path, attack: Callable[[Machine, CrashClient], Awaitable[None]]
) -> tuple[dict[str, Any], int]:
    """Return what the other tenant saw during an attack, and how often the server crashed."""

    async def scenario() -> tuple[dict[str, Any], int]:
        async with served(model_dir, data_dir, has_poison=True) as (machine, (attacker, other)):
            facts, _ = await asyncio.gather(work_of_another(other), attack(machine, attacker))
            return facts, machine.ends

    return asyncio.run(scenario())


def test_a_gradient_that_crashes_the_server_fails_and_everything_else_continues(
    model_dir, tmp_path
):
    async def attack(machine: Machine, client: CrashClient) -> None:
        await client.begin()
        model = await client.create(2)
        await model.step(0)
        sent = await model.send(
            gradient(model.model_id, 1), poison(model.model_id), adam(model.model_id)
        )
        part, killing, step = [await client.answer(each) for each in sent]
        assert isinstance(part, Done)
        assert isinstance(killing, Failed)
        assert killing.category == "server"
        assert sent[1].request_id in killing.message
        assert "Send less data" in killing.message
        assert isinstance(step, Failed), "a step with a part of its gradient missing"
        await model.step(2)
        found = machine.ends
        await machine.end()
        await model.step(3)
        await client.check_answers()
        assert machine.ends == found

    facts, ends = both(model_dir, tmp_path / "poisoned", attack)
    assert facts == undisturbed(model_dir, tmp_path / "calm")
    assert ends == MOST_ENDS


def test_a_sample_that_crashes_the_server_fails_among_others(model_dir, tmp_path):
    async def attack(machine: Machine, client: CrashClient) -> None:
        await client.begin()
        base = await client.sampler(0, None)
        asked = [
            await client.call(
                "submit_sample", seq, sample(base, n=1, max_tokens=200, seed=seq, stop=[])
            )
            for seq in range(20)
        ]
        killing = await client.call("submit_sample", 20, sample(base, bytes(POISON)))
        answer = await client.answer(killing)
        assert isinstance(answer, Failed)
        assert answer.category == "server"
        assert killing.request_id in answer.message
        assert all([isinstance(await client.answer(each), Done) for each in asked])

    facts, ends = both(model_dir, tmp_path / "poisoned", attack)
    assert facts == undisturbed(model_dir, tmp_path / "calm")
    assert MOST_ENDS <= ends <= MOST_ENDS + 1


async def test_a_model_whose_replay_crashes_the_server_is_rejected_and_its_checkpoint_stays(
    model_dir, tmp_path
):
    async with served(model_dir, tmp_path / "data", has_poison=False) as (
        machine,
        (client, other),
    ):
        await client.begin()
        model = await client.create(2)
        path = await model.save("before")
        for operation in (poison(model.model_id), adam(model.model_id)):
            assert isinstance(await model.do(operation), Done)
        # as if it had less memory than before
        machine.start = replace(machine.start, has_poison=True)
        await machine.end()
        work = asyncio.create_task(work_of_another(other))
        refused = await model.do(gradient(model.model_id, 1))
        assert isinstance(refused, Failed)
        assert refused.category == "server"
        assert f"{model.model_id}:2 and nothing else" in refused.message
        assert "from a checkpoint" in refused.message
        await work
        assert machine.ends <= MOST_ENDS
        again = await client.create(3, base_model=None, from_path=path, with_optimizer=True)
        await again.step(1)
        assert isinstance(await model.do(SaveWeights(model.model_id, "never")), Failed)
        # Whoever starts it again with more memory has the model back.
        machine.start = replace(machine.start, has_poison=False)
        await machine.end(signal.SIGTERM)
        assert isinstance(await model.do(gradient(model.model_id, 2)), Done)
