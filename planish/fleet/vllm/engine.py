"""`VllmEngine`: an engine that trains and scores, and whose samples come from vLLM.

Each sampler exists twice: in the engine, with the exact weights, and as an adapter on the vLLM
servers. Requests for which vLLM would not give planish's results are answered by the engine.
"""

import asyncio
import logging
import os
import secrets
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from planish.engine.engine import Engine
from planish.engine.replication import (
    AdapterVersion,
    CreateVersionSampler,
    ExportedWeights,
    ExportWeights,
)
from planish.engine.settings import EngineSettings
from planish.errors import EngineClosedError, UserError
from planish.fleet.futures import done_future
from planish.fleet.remote_engine import unknown_id
from planish.fleet.vllm.model import PublishedAdapter, VllmModel
from planish.fleet.vllm.options import VllmSampler
from planish.fleet.vllm.process import check_installed
from planish.fleet.vllm.request_thread import RequestThread
from planish.fleet.vllm.requests import engine_options
from planish.fleet.vllm.server import VllmServer, start_server
from planish.model.layers.lora import LoraLayout
from planish.service import (
    CreateModel,
    CreateSampler,
    Operation,
    PublishSampler,
    ReleaseSampler,
    Sample,
)
from planish.types import LoraConfig, ModelInput, SampleResponse, SamplingParams

R = TypeVar("R")

_log = logging.getLogger(__name__)

_TEST_UPDATE = 0.004
"""The standard deviation of the weight updates of the adapter that tests vLLM. Those of base models
are about 0.03, so the adapter changes logprobs by far more than the tolerance.
"""


class VllmEngine(Engine):
    """An engine whose samples come from vLLM."""

    def __init__(
        self,
        sampler: VllmSampler,
        models: Mapping[str, str] | None = None,
        data_dir: str | Path | None = None,
        settings: EngineSettings | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        """Create an engine. `sampler` describes vLLM; the other arguments are those of `Engine`.
        vLLM is started when a base model is used. Raise UserError if it is not installed.
        """
        if settings is not None and settings.quantize is not None:
            raise UserError(
                f"quantize={settings.quantize!r} is for the engine's own sampler, because vLLM "
                "quantizes otherwise; leave it out, or use sampler='engine'"
            )
        if settings is not None and settings.num_shards > 1:
            raise UserError(
                f"tensor_parallel={settings.tensor_parallel} divides the engine's own sampler too; "
                "leave it out, or use sampler='engine'"
            )
        if not sampler.urls:
            check_installed(sampler.python)
        super().__init__(models, data_dir, settings, *args, **options)
        self._vllm = sampler
        self._directory = tempfile.TemporaryDirectory(prefix="planish-vllm-")
        self._vllm_models: dict[str, VllmModel] = {}
        self._tested: set[tuple[str, LoraConfig]] = set()
        self._published: dict[str, Future[PublishedAdapter | None]] = {}
        """The adapter of each sampler; None for the base model."""
        self.engine_samples: Counter[str] = Counter()
        """The number of requests that the engine has answered, by the options that vLLM lacks."""
        self._start_lock, self._order = threading.Lock(), threading.Lock()
        self._requests = RequestThread()
        self._end_requests = weakref.finalize(self, self._requests.end)

    def submit(self, operation: Operation[R]) -> Future[R]:
        """Queue an operation. See `Engine.submit`. The first use of a base model starts vLLM."""
        self._check_open()
        future: Future[Any]
        match operation:
            case CreateModel():
                self._test_adapters(operation)
                future = super().submit(operation)
            case CreateSampler():
                future = self._create_sampler(operation)
            case PublishSampler():
                with self._order:  # no other operation of the model comes between the two
                    created = super().submit(operation)
                    exported = super().submit(ExportWeights(operation.model_id))
                future = self._add_sampler(operation.sampler_id, created, exported)
            case ReleaseSampler():
                future = self._release(operation)
            case Sample():
                future = self._sample(operation)
            case _:
                with self._order:
                    future = super().submit(operation)
        return future

    def close(self, finish: bool = True) -> None:
        """Close the engine, and end the vLLM servers that it has started. See `Engine.close`."""
        if self._is_closed:
            return
        self._is_closed = not finish
        try:
            self._requests.end_tasks(finish)
        finally:
            super().close(finish)
            for model in self._vllm_models.values():
                self._end_servers(model)
            self._end_requests()
            self._directory.cleanup()

    def _create_sampler(self, operation: CreateSampler) -> Future[str]:
        created = super().submit(operation)
        try:
            self._vllm_model(self.sampler_info(operation.sampler_id).base_model)
            version: Future[AdapterVersion] | None = None
            if operation.model_path is not None:
                version = done_future(
                    self.preparation.read_checkpoint(operation.model_path, operation.base_model)
                )
        except BaseException:
            super().submit(ReleaseSampler(operation.sampler_id))
            raise
        return self._add_sampler(operation.sampler_id, created, version)

    def _add_sampler(
        self,
        sampler_id: str,
        created: Future[str],
        weights: Future[Any] | None,
    ) -> Future[str]:
        """Publish a sampler. The result is its id."""
        published = self._requests.start(self._publish(sampler_id, created, weights))
        self._published[sampler_id] = published

        async def wait() -> str:
            await asyncio.shield(asyncio.wrap_future(published))
            return sampler_id

        return self._requests.start(wait())

    async def _publish(
        self,
        sampler_id: str,
        created: Future[str],
        weights: Future[Any] | None,
    ) -> PublishedAdapter | None:
        try:
            await asyncio.wrap_future(created)
            model = self._model_of(sampler_id)
            if weights is None:
                return None
            version = await asyncio.wrap_future(weights)
            if isinstance(version, ExportedWeights):
                version = await asyncio.to_thread(version.version)
            return await model.publish(version, sampler_id)
        except BaseException:
            self._published.pop(sampler_id, None)
            self._release_in_engine(sampler_id)
            raise

    def _release(self, operation: ReleaseSampler) -> Future[None]:
        published = self._published.pop(operation.sampler_id, None)
        if published is None:  # raises UserError for an unknown sampler
            return super().submit(operation)

        async def release() -> None:
            try:
                adapter = await asyncio.wrap_future(published)
            except Exception:  # `_publish` has released the sampler
                return
            if adapter is not None:
                await self._model_of(operation.sampler_id).drop(adapter)
            self._release_in_engine(operation.sampler_id)

        return self._requests.start(release())

    def _release_in_engine(self, sampler_id: str) -> None:
        with suppress(UserError, EngineClosedError):
            super().submit(ReleaseSampler(sampler_id))

    def _sample(self, operation: Sample) -> Future[SampleResponse]:
        self.check_sample(self.sampler_info(operation.sampler_id).base_model, operation)
        names = engine_options(operation)
        published = self._published.get(operation.sampler_id)
        if published is None:
            raise unknown_id("sampler", operation.sampler_id)
        if names:
            for name in names:
                if not self.engine_samples[name] and not operation.prompt_only:
                    _log.warning(
                        "requests with %s are sampled by the engine, because vLLM would not give "
                        "planish's results",
                        name,
                    )
                self.engine_samples[name] += 1
            return super().submit(operation)

        async def sample() -> SampleResponse:
            adapter = await asyncio.shield(asyncio.wrap_future(published))
            return await self._model_of(operation.sampler_id).sample(operation, adapter)

        return self._requests.start(sample())

    def _model_of(self, sampler_id: str) -> VllmModel:
        return self._vllm_models[self.sampler_info(sampler_id).base_model]

    def _vllm_model(self, base_model: str) -> VllmModel:
        """Return the vLLM servers of a base model. Start them if needed, which takes a minute."""
        with self._start_lock:
            if base_model not in self._vllm_models:
                self._vllm_models[base_model] = self._start_model(base_model)
            return self._vllm_models[base_model]

    def _start_model(self, base_model: str) -> VllmModel:
        base = self._base_models.get(base_model)
        key = os.environ.get("VLLM_API_KEY", "")
        if self._vllm.urls:
            servers = [VllmServer(url, key) for url in self._vllm.urls]
        else:
            servers = [
                start_server(
                    self._vllm, base.directory, str(base.backend.dtype), Path(self._directory.name)
                )
            ]
        directory = self._vllm.adapter_dir or Path(self._directory.name)
        sampler_id = f"vllm-base:{secrets.token_hex(8)}"
        model = VllmModel(base, servers, directory, self._vllm, self._score, sampler_id)
        try:
            super().submit(CreateSampler(sampler_id, base_model)).result()
            self._requests.start(model.start()).result()
        except BaseException:
            self._end_servers(model)
            self._release_in_engine(sampler_id)
            raise
        return model

    def _end_servers(self, model: VllmModel) -> None:
        self._requests.start(model.close()).result()
        for server in model.servers:
            if server.process is not None:
                server.process.end()

    def _test_adapters(self, operation: CreateModel) -> None:
        """Raise UserError unless vLLM computes adapters of the shape of a new model as planish
        does. A random adapter shows it; a new one would not, because its update is 0.
        """
        base_model, lora = operation.base_model, operation.lora
        if operation.from_path is not None:
            info = self.checkpoint_info(operation.from_path)
            base_model, lora = base_model or info.base_model, info.lora
        assert base_model is not None
        shape = LoraConfig(lora.rank, 0, lora.train_unembed, lora.train_mlp, lora.train_attn)
        model = self._vllm_model(base_model)
        if (base_model, shape) in self._tested:
            return
        base = self._base_models.get(base_model)
        base.check_rank(lora.rank)
        size = LoraLayout(base.config, shape).size
        std = (_TEST_UPDATE * lora.rank**0.5 / LoraLayout.ALPHA) ** 0.5
        vector = torch.randn(size, generator=torch.Generator().manual_seed(0)) * std
        version = AdapterVersion.from_vector(
            base_model, base.fingerprint, shape, vector.to(base.backend.dtype)
        )
        sampler_id = f"vllm-test:{secrets.token_hex(8)}"
        self.preparation.add_version(version)
        super().submit(CreateVersionSampler(sampler_id, version.name)).result()
        self.preparation.drop_version(version.name)

        async def test() -> None:
            await model.drop(await model.publish(version, sampler_id))

        try:
            self._requests.start(test()).result()
        except UserError as error:
            raise UserError(
                f"vLLM cannot sample from adapters with rank={lora.rank}, "
                f"train_unembed={lora.train_unembed}, train_mlp={lora.train_mlp}, "
                f"train_attn={lora.train_attn} on {base_model}: {error}. Train other parts (such "
                "as train_unembed=False), set PLANISH_VLLM_ARGUMENTS='--max-lora-rank 256' for a "
                "rank above 64, or use sampler='engine'"
            ) from error
        finally:
            self._release_in_engine(sampler_id)
        self._tested.add((base_model, shape))

    async def _score(
        self, sampler_id: str, prompt: list[int], tokens: list[int], temperature: float
    ) -> list[float]:
        """Return the logprobs that the engine computes for tokens after a prompt."""
        params = SamplingParams(max_tokens=1, temperature=temperature, stop=[])
        operation = Sample(
            sampler_id, ModelInput.from_ints(prompt), 1, params, logprob_token_ids=tokens
        )
        response = await asyncio.wrap_future(super().submit(operation))
        scores = response.sequences[0].topk_logprobs_np
        assert scores is not None
        return scores.logprobs[0].tolist()
