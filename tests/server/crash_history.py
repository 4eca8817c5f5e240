"""What clients do in a crash test, what they are told, and whether that is consistent.

Each client is a tenant with a session and several models. It runs a fixed script over HTTP:
pipelined and out of order, with failures, checkpoints, loads and samplers. It retries what was not
answered, as the SDK does, and remembers every answer. The history on a server that is killed again
and again must equal the history on a server that is not: the same metrics, losses and samples, bit
for bit, and the same weights and optimizer state at the end.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from server_client import BASE, RANK, adam, gradient, sample, sampled_bits
from wire_client import RequestRejected, RetryingClient, WireClient

from planish.server.results import Accepted, Done, Failed
from planish.service import (
    CreateModel,
    CreateSampler,
    ForwardBackward,
    LoadWeights,
    Operation,
    PublishSampler,
    SaveWeights,
    SaveWeightsForSampler,
)
from planish.types import Datum, LoraConfig, ModelInput
from planish.wire.sampling import sample_response_from_message
from planish.wire.training import output_from_message

R = TypeVar("R")


async def run_concurrently(*works: Coroutine[Any, Any, R]) -> list[R]:
    """Run coroutines at once, and return their results. If one fails or the caller is cancelled,
    cancel the others and wait until they have ended.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until they have ended. Their errors are read, so that asyncio does not
    log them.
    """
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class History:
    """One client's answers by request, without session ids, so that two histories can be
    compared.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, Done | Failed] = field(default_factory=dict)
    """By request id."""

    def note(self, question: str, fact: Any) -> None:
        """Record an answer. A repeated request must have the same answer."""
        assert self.facts.setdefault(question, fact) == fact, (
            f"{question} was {self.facts[question]}, is {fact}"
        )


class CrashClient:
    """One session, which survives any number of crashes of the server."""

    def __init__(self, wire: WireClient) -> None:
        self.history = History()
        self.wire = RetryingClient(wire)
        self.session = ""
        self._samples = 0

    async def call(self, method: str, *args: Any) -> Any:
        """Retry a call until the server lives long enough to answer."""
        return await self.wire.call(method, *args)

    async def answer(self, accepted: Accepted) -> Done | Failed:
        outcome = await self.wire.answer(accepted.request_id)
        known = self.history.answers.setdefault(accepted.request_id, outcome)
        assert known == outcome, f"{accepted.request_id} was {known}, is {outcome}"
        return outcome

    async def begin(self) -> None:
        self.session = await self.call("create_session")

    async def create(self, number: int, **options: Any) -> CrashModel:
        model_id = f"{self.session}:train:{number}"
        operation = CreateModel(
            model_id, **{"base_model": BASE, "lora": LoraConfig(RANK, number), **options}
        )
        answer = await self.answer(await self.call("create_model", operation))
        assert isinstance(answer, Done), answer
        return CrashModel(self, model_id, number)

    async def sampler(self, number: int, path: str | None) -> str:
        sampler_id = f"{self.session}:sample:{number}"
        return await self.call(
            "create_sampler", CreateSampler(sampler_id, None if path else BASE, path)
        )

    async def sample(self, what: str, sampler_id: str) -> None:
        """Sample with a fixed seed, which is compared, and with the server's seed, which must not
        change in a retry.
        """
        seeded = await self.call(
            "submit_sample", self._samples, sample(sampler_id, seed=self._samples)
        )
        free = await self.call("submit_sample", self._samples + 1, sample(sampler_id, n=1))
        self._samples += 2
        answer = await self.answer(seeded)
        assert isinstance(answer, Done), answer
        self.history.note(
            f"{what} drew", sampled_bits(sample_response_from_message(answer.content))
        )
        assert isinstance(await self.answer(free), Done)

    async def other_session(self) -> None:
        """A session with a model and samplers, which ends while requests are running."""
        session, self.session = self.session, await self.call("create_session")
        model = await self.create(900)
        await model.step(900)
        await self.sample("other session", await model.publish(0))
        await model.send(gradient(model.model_id, 901), adam(model.model_id))
        await self.call("finish_session", self.session)
        self.session = session

    async def short_model(self, number: int) -> None:
        """A model that is unloaded while its last step is queued. The step still runs."""
        model = await self.create(number)
        sent = await model.send(gradient(model.model_id, number), adam(model.model_id))
        unloading = await self.call("unload_model", model.model_id)
        model.note("last step", await self.answer(sent[-1]))
        model.note("unloading", await self.answer(unloading))

    async def check_answers(self) -> None:
        """Read all answers again; they must be unchanged."""
        for request_id in list(self.history.answers):
            await self.answer(Accepted(request_id))


@dataclass
class CrashModel:
    client: CrashClient
    model_id: str
    number: int
    seq: int = 0

    async def send(self, *operations: Operation[Any]) -> list[Accepted]:
        """Send requests together, the last one first."""
        numbered = [(self.seq + 1 + index, operation) for index, operation in enumerate(operations)]
        self.seq += len(operations)
        sent = await run_concurrently(
            *(
                self.client.call("submit_training", seq, operation)
                for seq, operation in reversed(numbered)
            )
        )
        return sent[::-1]

    async def do(self, operation: Operation[Any]) -> Done | Failed:
        return await self.client.answer((await self.send(operation))[0])

    async def step(self, seed: int) -> None:
        """Send two parts of a gradient, a forward, and the step that applies the parts."""
        operations = [
            gradient(self.model_id, seed),
            gradient(self.model_id, seed + 1000, forward_only=True),
            gradient(self.model_id, seed + 2000),
            adam(self.model_id),
        ]
        for index, accepted in enumerate(await self.send(*operations)):
            self.note(f"step {seed} part {index}", await self.client.answer(accepted))

    async def bad_step(self, seed: int) -> None:
        """Send a part that cannot be computed. Neither it nor the step after it may have an
        effect.
        """
        data = [Datum(ModelInput.from_ints([99999]), {"target_tokens": [1], "weights": [1.0]})]
        bad = ForwardBackward(self.model_id, data, "cross_entropy")
        for index, accepted in enumerate(
            await self.send(gradient(self.model_id, seed), bad, adam(self.model_id))
        ):
            self.note(f"bad step {seed} part {index}", await self.client.answer(accepted))

    async def publish(self, number: int) -> str:
        sampler_id = f"{self.client.session}:sample:{number}"
        assert isinstance(await self.do(PublishSampler(self.model_id, sampler_id)), Done)
        return sampler_id

    async def save(self, name: str) -> str:
        answer = await self.do(SaveWeights(self.model_id, name))
        assert isinstance(answer, Done), answer
        return orjson.loads(answer.content)["path"]

    def note(self, question: str, answer: Done | Failed) -> None:
        self.client.history.note(f"model {self.number} {question}", outcome_facts(answer))


def outcome_facts(answer: Done | Failed) -> Any:
    """Return what an answer says, without ids."""
    match answer:
        case Failed():
            return answer.category
        case Done(media="protobuf"):
            output = output_from_message(answer.content)
            bits = [
                {name: value.to_numpy().tobytes() for name, value in datum.items()}
                for datum in output.loss_fn_outputs
            ]
            return hashlib.sha256(repr(bits).encode()).hexdigest(), sorted(output.metrics.items())
    fields = orjson.loads(answer.content)
    return fields.get("type", fields)


async def delete(client: CrashClient, path: str) -> None:
    """Delete a checkpoint. If it is gone in a retry, the call that a crash left unanswered has
    deleted it.
    """
    with suppress(RequestRejected):
        await client.call("delete_checkpoint", path)
    assert path not in await client.call("checkpoints")


async def script(client: CrashClient, offset: int) -> list[str]:
    """Run the script of a client, and return the paths of the final states of its models."""
    await client.begin()
    model = await client.create(offset)
    base = await client.sampler(100, None)
    for seed in range(3):
        await model.step(offset + seed)
        await client.sample(f"version {seed}", await model.publish(seed))
    await client.sample("base", base)
    path = await model.save("middle")
    taken = await model.do(SaveWeights(model.model_id, "middle"))
    assert isinstance(taken, Failed), taken
    await model.bad_step(offset + 10)
    other = await client.create(offset + 50, base_model=None, from_path=path, with_optimizer=True)
    await run_concurrently(model.step(offset + 20), other.step(offset + 30))
    saved = await client.sampler(101, path)
    await client.sample("saved", saved)
    await run_concurrently(client.other_session(), client.short_model(offset + 60))
    model.note("load", await model.do(LoadWeights(model.model_id, path, with_optimizer=True)))
    await delete(client, path)
    await model.step(offset + 40)
    assert isinstance(await model.do(SaveWeightsForSampler(model.model_id, "weights")), Done)
    for overwrite in range(2):
        replaced = SaveWeights(
            model.model_id, "again", ttl_seconds=3600 + overwrite, overwrite=True
        )
        assert isinstance(await model.do(replaced), Done)
    for number in range(3):
        await client.sample(f"version {number} later", f"{client.session}:sample:{number}")
    await client.sample("saved later", saved)
    await client.check_answers()
    last = [await model.save("last"), await other.save("last")]
    found = {path.rpartition("/")[2] for path in await client.call("checkpoints")}
    client.history.note("checkpoints", found)
    return last
