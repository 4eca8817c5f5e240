"""The vLLM servers of one base model, and the adapters that they serve.

A version of an adapter is published when every server lists it and has answered a probe: tokens
that the server samples have the logprobs that planish computes, within a tolerance. The probes use
a temperature other than 1, so they also find a server that returns logprobs of another temperature.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from planish.engine.base_models import BaseModel
from planish.engine.checkpoints.files import write_tensors
from planish.engine.replication import AdapterVersion
from planish.errors import ContextLengthError, EngineClosedError, UserError
from planish.fleet.vllm.server import Completion, MissingAdapterError, VllmServer
from planish.model.layers.lora import LoraLayout
from planish.service import Sample
from planish.types import SampledSequence, SampleResponse, SamplingParams

_log = logging.getLogger(__name__)

PROBE_TEMPERATURE = 0.8
_PROBE_TEXTS = (
    "The capital of France is",
    "def mean(numbers):\n    return sum(numbers) /",
    "Question: What is 17 + 25?\nAnswer:",
    "Once upon a time, in a small village by the sea, there lived an old",
)
_PROBE_SAMPLES = 4
"""The number of samples, of one token each, of each text."""
_MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one."""

Score = Callable[[str, list[int], list[int], float], Awaitable[list[float]]]
"""Returns planish's logprobs of tokens after a prompt: (sampler id, prompt, tokens, temperature)."""


@dataclass(eq=False)
class PublishedAdapter:
    """One version of an adapter on the vLLM servers."""

    name: str
    """The name of the version on the servers, which no other version ever has."""
    directory: Path
    """The files of the adapter. vLLM may read them again as long as the adapter is in use."""
    num_uses: int = 0
    """The number of samplers and of running requests that need the adapter."""
    published: asyncio.Future[None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the adapter is loaded."""


class VllmModel:
    """The vLLM servers of one base model. All methods run in one event loop."""

    def __init__(
        self,
        base: BaseModel,
        servers: Sequence[VllmServer],
        adapter_dir: Path,
        tolerance: float,
        score: Score,
    ) -> None:
        """`base`: the same base model in the engine. `adapter_dir`: a directory that the servers
        can read. `tolerance`: see `VllmSampler`.
        """
        self.servers = servers
        self._base = base
        self._adapter_dir = adapter_dir
        self._tolerance = tolerance
        self._score = score
        self._adapters: dict[str, PublishedAdapter] = {}
        self._probes = [base.tokenizer.encode(text) for text in _PROBE_TEXTS]

    async def wait_until_ready(self, sampler_id: str) -> None:
        """Wait for all servers, and compare their base model with that of the engine, of which
        `sampler_id` is a sampler.
        """
        for server in self.servers:
            await server.wait_until_ready()
            await self._probe(server, server.base_name, sampler_id)

    async def publish(self, version: AdapterVersion, sampler_id: str) -> PublishedAdapter:
        """Load a version on all servers, unless it is there, and probe it. `sampler_id` is a
        sampler of the engine with the same weights. The caller must `drop` the adapter.
        """
        adapter = self._adapters.get(version.name)
        if adapter is None:
            name = f"planish-{version.name[:32]}-{secrets.token_hex(4)}"
            adapter = PublishedAdapter(name, self._adapter_dir / name)
            self._adapters[version.name] = adapter
            adapter.published = asyncio.ensure_future(self._publish(adapter, version, sampler_id))
        adapter.num_uses += 1
        assert adapter.published is not None
        try:
            await asyncio.shield(adapter.published)
        except BaseException:
            if self._adapters.get(version.name) is adapter and adapter.published.done():
                del self._adapters[version.name]
            await self.drop(adapter)
            raise
        return adapter

    async def drop(self, adapter: PublishedAdapter) -> None:
        """Count one use less. After the last one, unload the adapter and delete its files."""
        adapter.num_uses -= 1
        if adapter.num_uses:
            return
        for key in [key for key, value in self._adapters.items() if value is adapter]:
            del self._adapters[key]
        for server in self.servers:
            with suppress(UserError, EngineClosedError):  # it was not loaded, or the server is gone
                await server.unload(adapter.name)
        await asyncio.to_thread(shutil.rmtree, adapter.directory, ignore_errors=True)

    async def sample(self, operation: Sample, adapter: PublishedAdapter | None) -> SampleResponse:
        """Sample from a published adapter, or from the base model if `adapter` is None."""
        server = min(self.servers, key=lambda server: server.num_open)
        prompt = operation.prompt.to_ints()
        options = self._request_options(operation, prompt, server)
        server.num_open += operation.num_samples
        if adapter is not None:
            adapter.num_uses += 1
        try:
            if adapter is None:
                completions = await server.complete(server.base_name, prompt, **options)
            else:
                try:
                    completions = await server.complete(adapter.name, prompt, **options)
                except MissingAdapterError:
                    await self._load(adapter, server, operation.sampler_id)
                    completions = await server.complete(adapter.name, prompt, **options)
        finally:
            server.num_open -= operation.num_samples
            if adapter is not None:
                await self.drop(adapter)
        request_id = secrets.token_hex(8)
        return SampleResponse(
            [
                _sequence(completion, f"{operation.sampler_id}:{request_id}:{index}")
                for index, completion in enumerate(completions)
            ]
        )

    async def _publish(
        self, adapter: PublishedAdapter, version: AdapterVersion, sampler_id: str
    ) -> None:
        begun = time.monotonic()
        layout = LoraLayout(self._base.config, version.lora)
        adapter.directory.mkdir(parents=True)
        await asyncio.to_thread(
            write_tensors,
            adapter.directory,
            layout,
            {"master": version.vector()},
            version.base_model,
            False,
        )
        loads = [self._load(adapter, server, sampler_id) for server in self.servers]
        gaps = await asyncio.gather(*loads)
        _log.info(
            "published %s to vLLM in %.1f s; the mean difference of logprobs is %.2g",
            adapter.name,
            time.monotonic() - begun,
            max(gaps),
        )

    async def _load(self, adapter: PublishedAdapter, server: VllmServer, sampler_id: str) -> float:
        """Load an adapter on a server, unless it is there. Return the result of the probe."""
        async with adapter.lock:
            if not await server.has_adapter(adapter.name):
                await server.load(adapter.name, adapter.directory)
                if not await server.has_adapter(adapter.name):
                    raise UserError(
                        f"{server.url} does not list the adapter {adapter.name} after it was loaded"
                    )
            return await self._probe(server, adapter.name, sampler_id)

    async def _probe(self, server: VllmServer, name: str, sampler_id: str) -> float:
        """Compare logprobs of sampled tokens with those of planish. Return the mean absolute
        difference in nats. Raise UserError if it is above the tolerance.
        """
        probes = [self._gaps(server, name, sampler_id, prompt) for prompt in self._probes]
        gaps = [gap for part in await asyncio.gather(*probes) for gap in part]
        gap = float(np.mean(gaps))
        if not gap <= self._tolerance:
            raise UserError(
                f"{server.url} does not sample from the weights of planish: the logprobs of "
                f"{len(gaps)} tokens of {name} differ by {gap:.3g} on average, and by up to "
                f"{max(gaps):.3g}, which is more than the tolerance {self._tolerance:g}. A server "
                "that was not started by planish needs the same weights and dtype, and "
                "--logprobs-mode processed_logprobs. If vLLM computes this model with another "
                "precision, raise PLANISH_VLLM_TOLERANCE, or use sampler='engine'"
            )
        return gap

    async def _gaps(
        self, server: VllmServer, name: str, sampler_id: str, prompt: list[int]
    ) -> list[float]:
        """Return the absolute difference of the logprobs of each sampled token."""
        completions = await server.complete(
            name, prompt, n=_PROBE_SAMPLES, max_tokens=1, temperature=PROBE_TEMPERATURE
        )
        tokens = [int(completion.tokens[0]) for completion in completions]
        distinct = sorted(set(tokens))
        scores = await self._score(sampler_id, prompt, distinct, PROBE_TEMPERATURE)
        expected = dict(zip(distinct, scores, strict=True))
        return [
            abs(float(completion.logprobs[0]) - expected[token])
            for completion, token in zip(completions, tokens, strict=True)
        ]

    def _request_options(
        self, operation: Sample, prompt: list[int], server: VllmServer
    ) -> dict[str, Any]:
        params, config = operation.sampling_params, self._base.config
        room = min(config.max_context, server.max_context) - len(prompt)
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if not 0 < max_tokens <= room:
            raise ContextLengthError(
                f"This model's maximum context length is {server.max_context} tokens on the vLLM "
                f"server {server.url}. The prompt's {len(prompt)} tokens leave {room}, but "
                f"max_tokens is {max_tokens}"
            )
        stop = config.eos_token_ids if params.stop is None else params.stop
        return {
            "n": operation.num_samples,
            "max_tokens": max_tokens,
            "temperature": params.temperature,
            "seed": None if params.seed is None else _vllm_seed(params.seed),
            "stop_token_ids": [*stop, *params.stop_token_ids],
            "ignore_eos": True,  # only `stop_token_ids` end a sample
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }


def _vllm_seed(seed: int) -> int:
    """Return a seed for vLLM, which adds the index of a sample to it. So seeds that follow each
    other must not remain neighbours.
    """
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:7])


def _sequence(completion: Completion, sequence_id: str) -> SampledSequence:
    if completion.finish_reason not in ("stop", "length"):
        raise UserError(f"vLLM has ended a sample with {completion.finish_reason!r}")
    return SampledSequence(
        "stop" if completion.finish_reason == "stop" else "length",
        sequence_id,
        completion.tokens,
        completion.logprobs,
    )


_VLLM_PARAMS = ("max_tokens", "seed", "stop", "temperature", "stop_token_ids")
"""The fields of SamplingParams with the same meaning in vLLM."""
_VLLM_FIELDS = (
    "sampler_id", "prompt", "num_samples", "sampling_params", "cache_owner",
    "record_stability_info", "prompt_logprobs_last_n",
)  # fmt: skip
"""The fields of Sample that need nothing of vLLM, or that vLLM has."""


def engine_options(operation: Sample) -> list[str]:
    """Return the options of a request for which vLLM would not give planish's results."""
    params, defaults = operation.sampling_params, SamplingParams()
    names = [
        name.name
        for name in fields(params)
        if name.name not in _VLLM_PARAMS
        and getattr(params, name.name) != getattr(defaults, name.name)
    ]
    names += [
        name.name
        for name in fields(operation)
        if name.name not in _VLLM_FIELDS
        and getattr(operation, name.name) not in (None, False, 0, ())
    ]
    if operation.prompt.images:
        names.append("images")
    stop = params.stop or ()
    if isinstance(stop, str) or any(isinstance(item, str) for item in stop):
        names.append("stop strings")
    if 0 < params.temperature < _MIN_TEMPERATURE:
        names.append(f"temperature below {_MIN_TEMPERATURE:g}")
    if params.temperature == 0 and operation.num_samples > 1:
        names.append("num_samples above 1 at temperature 0")
    return names
