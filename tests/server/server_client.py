"""Uses a Server as the routes do, on a real engine with a tiny model, and compares what it leaves
on disk.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import load_file

from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.server.results import Accepted, Done, Failed, SessionSpec, Tenant, TryAgain
from planish.server.server import Server
from planish.server.settings import ServerSettings
from planish.service import (
    CreateModel,
    CreateSampler,
    ForwardBackward,
    Operation,
    OptimStep,
    PublishSampler,
    Sample,
    SaveWeights,
)
from planish.types import AdamParams, Datum, LoraConfig, ModelInput, SampleResponse, SamplingParams
from planish.wire.sampling import sample_response_from_message

BASE = "tiny"
TENANT = Tenant("everybody")
RANK = 4
POLL_SECONDS = 20.0


def make_core(
    model_dir: Path,
    data_dir: Path,
    settings: ServerSettings | None = None,
    **engine_settings: Any,
) -> Server:
    engine = Engine(
        {BASE: str(model_dir)},
        data_dir / "checkpoints",
        EngineSettings(deterministic=True, device="cpu", **engine_settings),
    )
    return Server(engine, data_dir, [BASE], settings)


@asynccontextmanager
async def running(
    model_dir: Path,
    data_dir: Path,
    settings: ServerSettings | None = None,
    **engine_settings: Any,
) -> AsyncIterator[Server]:
    server = make_core(model_dir, data_dir, settings, **engine_settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(20)


async def submit_training(
    server: Server, tenant: Tenant, seq_id: int, operation: Operation[Any]
) -> Accepted:
    return await server.models.submit(tenant, operation.model_id, seq_id, operation)  # type: ignore[attr-defined]


@dataclass
class Client:
    """One session of one tenant."""

    server: Server
    session_id: str
    tenant: Tenant = TENANT
    samplers: int = 0
    models: int = 0

    @classmethod
    async def start(cls, server: Server, tenant: Tenant = TENANT) -> Client:
        return cls(
            server, await server.sessions.create(tenant, SessionSpec(sdk_version="test")), tenant
        )

    async def answer(self, request_id: str) -> Done | Failed:
        while isinstance(
            outcome := await self.server.settlement.outcome(self.tenant, request_id, POLL_SECONDS),
            TryAgain,
        ):
            pass
        return outcome

    async def done(self, request_id: str) -> bytes:
        answer = await self.answer(request_id)
        assert isinstance(answer, Done), answer
        return answer.content

    async def model(self, seed: int | None = 1, **options: Any) -> Model:
        model_id = f"{self.session_id}:train:{self.models}"
        self.models += 1
        accepted = await self.server.models.create(
            self.tenant,
            CreateModel(
                model_id, **{"base_model": BASE, "lora": LoraConfig(RANK, seed), **options}
            ),
        )
        await self.done(accepted.request_id)
        return Model(self, model_id)

    async def sampler(self, base_model: str | None = BASE, model_path: str | None = None) -> str:
        sampler_id = self.new_sampler_id()
        return await self.server.samplers.create(
            self.tenant, CreateSampler(sampler_id, base_model, model_path)
        )

    def new_sampler_id(self) -> str:
        self.samplers += 1
        return f"{self.session_id}:sample:{self.samplers - 1}"

    async def sample(self, sampler_id: str, seq_id: int = 0, **options: Any) -> SampleResponse:
        accepted = await self.server.sampling.submit(
            self.tenant, seq_id, sample(sampler_id, **options)
        )
        return sample_response_from_message(
            await self.done(accepted.request_id), accepted.sample_sequence_ids
        )


@dataclass
class Model:
    """One model of a client, which numbers its requests."""

    client: Client
    model_id: str
    seq: int = 0
    pending: list[str] = field(default_factory=list)

    async def submit(self, operation: Operation[Any], seq: int | None = None) -> str:
        if seq is None:
            self.seq += 1
            seq = self.seq
        accepted = await submit_training(self.client.server, self.client.tenant, seq, operation)
        return accepted.request_id

    async def run(self, operation: Operation[Any]) -> bytes:
        return await self.client.done(await self.submit(operation))

    async def step(self, seed: int = 0) -> dict[str, float]:
        """Send forward_backward and optim_step together; return the metrics of the second."""
        first, second = (
            await self.submit(gradient(self.model_id, seed)),
            await self.submit(adam(self.model_id)),
        )
        await self.client.done(first)
        return orjson.loads(await self.client.done(second))["metrics"]

    async def publish(self) -> str:
        sampler_id = self.client.new_sampler_id()
        assert (
            orjson.loads(await self.run(PublishSampler(self.model_id, sampler_id)))[
                "sampling_session_id"
            ]
            == sampler_id
        )
        return sampler_id

    async def save(self, name: str, **options: Any) -> str:
        return orjson.loads(await self.run(SaveWeights(self.model_id, name, **options)))["path"]


def gradient(model_id: str, seed: int = 0, forward_only: bool = False) -> ForwardBackward:
    random = np.random.default_rng(seed)
    data = []
    for length in random.integers(4, 24, size=3):
        tokens = random.integers(0, 256, size=length)
        inputs = {
            "target_tokens": random.integers(0, 256, size=length),
            "weights": np.ones(length, np.float32),
        }
        data.append(Datum(ModelInput.from_ints(tokens), inputs))
    return ForwardBackward(model_id, data, "cross_entropy", forward_only=forward_only)


def adam(model_id: str, learning_rate: float = 1e-2) -> OptimStep:
    return OptimStep(model_id, AdamParams(learning_rate))


def sample(
    sampler_id: str, prompt: bytes = b"hello", n: int = 2, max_tokens: int = 8, **params: Any
) -> Sample:
    return Sample(
        sampler_id, ModelInput.from_ints(list(prompt)), n, SamplingParams(max_tokens, **params)
    )


def sampled_bits(response: SampleResponse) -> list[tuple[list[int], bytes]]:
    """Return the tokens and the bits of their logprobs."""
    return [(sequence.tokens, sequence.logprobs_np.tobytes()) for sequence in response.sequences]


def state(data_dir: Path, path: str) -> dict[str, bytes]:
    """Return the bits of every tensor of a training checkpoint."""
    directory = data_dir / "checkpoints" / path.removeprefix("tinker://")
    files = [
        load_file(directory / name)
        for name in ("adapter_model.safetensors", "optimizer.safetensors")
    ]
    return {name: tensor.tobytes() for file in files for name, tensor in file.items()}


def change_database(data_dir: Path, statement: str, values: Sequence[Any] = ()) -> None:
    """Run one SQL statement on the database of a server that has stopped."""
    with closing(sqlite3.connect(data_dir / "server.db")) as connection, connection:
        connection.execute(statement, values)


def run(work: Any) -> Any:
    return asyncio.run(work)


def record(result: dict[str, Any], path: Path | None) -> None:
    """Print the result of a long run as JSON, and write it to `path` if there is one."""
    text = json.dumps(result, indent=2)
    print(text)
    if path is not None:
        path.write_text(text + "\n")
