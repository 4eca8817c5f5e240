"""The vLLM servers of one base model, and the adapters that they serve.

A version of an adapter is published when every server in use lists it and has answered a probe:
tokens that the server samples have the logprobs that planish computes, within a tolerance. The
probes use a temperature other than 1, so they also find a server that returns logprobs of another
temperature. Samples of a lost server are sampled again on another one.
"""

import asyncio
import logging
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from planish.detokenizer import Detokenizer
from planish.engine.base_models import BaseModel
from planish.engine.checkpoints.files import write_tensors
from planish.engine.replication import AdapterVersion
from planish.engine.sampling.stopping import StopCondition
from planish.errors import UserError
from planish.fleet.vllm.options import VllmSampler
from planish.fleet.vllm.requests import ended_sample, request_options, sampled_sequence
from planish.fleet.vllm.server import (
    Completion,
    MissingAdapterError,
    ServerLostError,
    VllmServer,
)
from planish.fleet.vllm.server_set import ServerSet
from planish.model.layers.lora import LoraLayout
from planish.service import Sample
from planish.types import SampleResponse

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
_MAX_LOSSES = 5
"""A request fails after so many servers were lost while they sampled it. It may be the cause."""

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
    locks: dict[VllmServer, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """Held while a server loads the adapter."""


class VllmModel:
    """The vLLM servers of one base model. All methods run in one event loop."""

    def __init__(
        self,
        base: BaseModel,
        servers: Sequence[VllmServer],
        adapter_dir: Path,
        options: VllmSampler,
        score: Score,
        sampler_id: str,
    ) -> None:
        """`base`: the same base model in the engine, of which `sampler_id` is a sampler.
        `adapter_dir`: a directory that the servers can read.
        """
        self.servers = servers
        self._set = ServerSet(servers, self._prepare, options.silent_seconds, options.stall_seconds)
        self._base = base
        self._adapter_dir = adapter_dir
        self._tolerance = options.tolerance
        self._score = score
        self._base_sampler_id = sampler_id
        self._adapters: dict[str, PublishedAdapter] = {}
        self._detokenizer = Detokenizer.of_tokenizer(base.tokenizer)
        self._probes = [base.tokenizer.encode(text) for text in _PROBE_TEXTS]

    async def start(self) -> None:
        """Wait for all servers, and compare their base model with that of the engine."""
        await self._set.start()

    async def close(self) -> None:
        """Close the connections to all servers."""
        await self._set.stop()
        for server in self.servers:
            await server.close()

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
            with suppress(UserError, ServerLostError):  # it was not loaded, or the server is lost
                await server.unload(adapter.name)
        await asyncio.to_thread(shutil.rmtree, adapter.directory, ignore_errors=True)

    async def sample(self, operation: Sample, adapter: PublishedAdapter | None) -> SampleResponse:
        """Sample from a published adapter, or from the base model if `adapter` is None. If the
        server is lost meanwhile, sample on another one. Raise ServerLostError if all are lost.
        """
        if adapter is not None:
            adapter.num_uses += 1
        try:
            completions = await self._complete(operation, adapter)
        finally:
            if adapter is not None:
                await self.drop(adapter)
        request_id = secrets.token_hex(8)
        return SampleResponse(
            [
                sampled_sequence(completion, f"{operation.sampler_id}:{request_id}:{index}")
                for index, completion in enumerate(completions)
            ]
        )

    async def _complete(
        self, operation: Sample, adapter: PublishedAdapter | None
    ) -> list[Completion]:
        prompt = operation.prompt.to_ints()
        for _ in range(_MAX_LOSSES):
            server = min(self._set.ready(), key=lambda server: server.num_open)
            options = request_options(operation, self._base.config, server)
            name = server.base_name if adapter is None else adapter.name
            server.num_open += operation.num_samples
            try:
                try:
                    completions = await server.complete(name, prompt, **options)
                except MissingAdapterError:
                    if adapter is None:
                        raise
                    await self._load(adapter, server, operation.sampler_id)
                    completions = await server.complete(name, prompt, **options)
                if not options.get("stop"):
                    return completions
                stop = StopCondition.from_params(operation.sampling_params, (), self._detokenizer)
                endings = [
                    ended_sample(server, name, prompt, options, completion, stop)
                    for completion in completions
                ]
                return list(await asyncio.gather(*endings))
            except ServerLostError as error:
                _log.warning("a request is sampled again: %s", error)
            finally:
                server.num_open -= operation.num_samples
        raise UserError(
            f"the request is not sampled again: {_MAX_LOSSES} vLLM servers were lost while they "
            "sampled it; send fewer or shorter sequences in one request"
        )

    async def _prepare(self, server: VllmServer) -> None:
        """Wait for a server, and compare its base model with that of the engine."""
        await server.wait_until_ready()
        await self._probe(server, server.base_name, self._base_sampler_id)

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
        loads = [self._load(adapter, server, sampler_id) for server in self._set.ready()]
        outcomes = await asyncio.gather(*loads, return_exceptions=True)
        gaps: list[float] = []
        for outcome in outcomes:
            if not isinstance(outcome, BaseException):
                gaps.append(outcome)
            elif not isinstance(outcome, ServerLostError):
                raise outcome
        if not gaps:  # all servers were lost meanwhile
            raise ServerLostError("\n".join(map(str, outcomes)))
        _log.info(
            "published %s to vLLM in %.1f s; the mean difference of logprobs is %.2g",
            adapter.name,
            time.monotonic() - begun,
            max(gaps),
        )

    async def _load(self, adapter: PublishedAdapter, server: VllmServer, sampler_id: str) -> float:
        """Load an adapter on a server, unless it is there. Return the result of the probe."""
        async with adapter.locks[server]:
            if not await server.has_adapter(adapter.name):
                try:
                    await server.load(adapter.name, adapter.directory)
                except UserError:
                    # The answer to the same request may be lost with its connection.
                    if not await server.has_adapter(adapter.name):
                        raise
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
