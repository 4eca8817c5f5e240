"""Calls to the engine from the event loop. Slow calls run in threads, and their results are
awaited.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from planish.engine.constraints.cache import CHECK_TIMEOUT_SECONDS, timeout_error
from planish.engine.engine import HostedEngine
from planish.errors import CheckpointError, EngineClosedError, UnknownModelError
from planish.fleet.link import ReplicaLostError
from planish.server.results import stopping
from planish.service import (
    AdapterBytes,
    CheckpointInfo,
    CreateModel,
    CreateSampler,
    LoadWeights,
    Operation,
    Sample,
)
from planish.types import (
    GetServerCapabilitiesResponse,
    LoraConfig,
    ModelInput,
    SamplingParams,
)

R = TypeVar("R")

_log = logging.getLogger(__name__)

WARMUP_SAMPLE = Sample(
    "nobody", ModelInput.from_ints([0]), 1, SamplingParams(max_tokens=1, stop="\n")
)
"""Checking this sample loads a base model and its tokenizer."""

_NUM_SUBMIT_THREADS = 4
_NUM_LOAD_THREADS = 8


class EngineThreads:
    """The threads in which slow calls of the engine run. There are two pools, so that a call that
    loads a model or reads a disk cannot delay the submission of other operations.
    """

    def __init__(self, note_error: Callable[[Exception], None]) -> None:
        """`note_error` is called with each error that a call raises."""
        self._note_error = note_error
        self._submitting = ThreadPoolExecutor(
            _NUM_SUBMIT_THREADS, thread_name_prefix="planish-submit"
        )
        self._loading = ThreadPoolExecutor(_NUM_LOAD_THREADS, thread_name_prefix="planish-load")

    async def run(self, work: Callable[[], R]) -> R:
        """Return `work()`, which loads a model, or reads or writes files of the data directory."""
        return await self._run_in_pool(self._loading, work)

    async def submit(self, work: Callable[[], R]) -> R:
        """Return `work()`, which queues an operation and does not wait for the disk."""
        return await self._run_in_pool(self._submitting, work)

    def close(self) -> None:
        """Take no more calls."""
        self._submitting.shutdown(wait=False)
        self._loading.shutdown(wait=False)

    async def _run_in_pool(self, threads: Executor, work: Callable[[], R]) -> R:
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work)
        except Exception as error:
            if str(error).startswith("cannot schedule new futures"):
                raise EngineClosedError("the server is stopping") from error
            self._note_error(error)
            raise


class EngineCheckpoints:
    """Calls of the engine that read and write the files of checkpoints."""

    def __init__(self, engine: HostedEngine, threads: EngineThreads) -> None:
        self._engine, self._administration = engine, engine.administration
        self._threads = threads

    async def info(self, path: str) -> CheckpointInfo:
        """Return a checkpoint's base model, LoRA configuration and description."""
        return await self._threads.run(lambda: self._engine.checkpoint_info(path))

    async def paths(self) -> list[str]:
        """Return the paths of all checkpoints on disk, including damaged ones and the private
        copies that the server makes for itself.
        """
        return await self._threads.run(self._administration.checkpoint_paths)

    async def exists(self, path: str) -> bool:
        """Return whether there is such a checkpoint."""
        try:
            await self.info(path)
        except CheckpointError:
            return False
        return True

    async def copy(self, source: str, destination: str, ttl_seconds: int | None = None) -> None:
        """Copy a checkpoint, and replace any checkpoint at `destination`."""
        await self._threads.run(
            lambda: self._administration.copy_checkpoint(
                source, destination, ttl_seconds, overwrite=True
            )
        )

    async def copy_without_metadata(self, source: str, destination: str) -> None:
        """Make a private copy of a checkpoint for the server. The copy has no metadata, because
        metadata may be large and cannot be shared by hard links.
        """
        await self._threads.run(
            lambda: self._administration.copy_checkpoint(
                source, destination, overwrite=True, keep_metadata=False
            )
        )

    async def set_ttl(self, path: str, ttl_seconds: int | None) -> None:
        """Set the time to live of a checkpoint."""
        await self._threads.run(lambda: self._administration.set_checkpoint_ttl(path, ttl_seconds))

    async def files(self, path: str) -> Mapping[str, Path]:
        """Return the files of a checkpoint by name."""
        return await self._threads.run(lambda: self._administration.checkpoint_files(path))

    async def clear_leftovers(self) -> None:
        """Delete files of interrupted writes."""
        await self._threads.run(self._administration.clear_leftovers)

    async def delete(self, path: str) -> None:
        """Delete a checkpoint, if it exists."""

        def delete() -> None:
            try:
                self._engine.delete_checkpoint(path)
            except CheckpointError:
                return

        await self._threads.run(delete)


class EngineClient:
    """Calls the engine from the event loop. Slow calls run in threads."""

    def __init__(self, engine: HostedEngine, data_dir: Path, base_models: Sequence[str]) -> None:
        """Clients can use only `base_models`. Errors of this class name files relative to
        `data_dir`, because most errors reach clients, and clients must not learn where the server
        stores its data.
        """
        self.base_models = tuple(base_models)
        engine.administration.keep_expired_checkpoints()
        self._engine, self._administration = engine, engine.administration
        self.threads = EngineThreads(self._note_error)
        self.checkpoints = EngineCheckpoints(engine, self.threads)
        self.checks_inline = engine.checks_inline
        """Whether the event loop may call `check_sample_inline`."""
        self._data_dir_pattern = re.compile(rf"{re.escape(str(data_dir))}(/|(?![\w.-]))")
        self.fault: str | None = None
        """The error that stopped the engine; None while the engine works."""
        self.is_healthy = False
        """Whether clients may send requests, and the engine works."""
        self._is_closed = False

    def accept_requests(self, accepts: bool) -> None:
        """Let clients send requests from now on, or no more. The server calls this at the end of
        its start, and at the beginning of its stop.
        """
        self.is_healthy = accepts and self.fault is None

    def check_open(self) -> None:
        """Raise Unavailable if clients may not send requests, or the engine has failed."""
        if not self.is_healthy:
            raise stopping()

    def check_base_model(self, name: str) -> None:
        """Raise UnknownModelError for a base model that is not served. This check keeps a client
        from starting a download with an arbitrary name.
        """
        if name not in self.base_models:
            raise UnknownModelError(
                f"base_model={name[:200]!r} is not served here; this server has "
                f"{', '.join(self.base_models)}"
            )

    async def load_base_models(self) -> None:
        """Load all base models."""
        for name in self.base_models:
            with suppress(Exception):  # only requests of this base model will fail
                await self.check_sample(name, WARMUP_SAMPLE)

    async def submit(self, operation: Operation[R]) -> asyncio.Future[R]:
        """Queue an operation. Errors of the submission are raised here, and later errors by the
        future.
        """
        compiled = await self._compiled_constraint(operation)
        is_slow = isinstance(operation, CreateModel | CreateSampler | LoadWeights)
        run = self.threads.run if is_slow else self.threads.submit
        future = await run(lambda: self._engine.submit(operation))
        del compiled  # Kept until here, so that the submission finds it compiled.
        future.add_done_callback(self._note_outcome)
        return asyncio.wrap_future(future)

    async def perform(self, operation: Operation[R]) -> R:
        """Queue an operation, and wait for its result."""
        return await (await self.submit(operation))

    def check_sample_inline(self, base_model: str, operation: Sample) -> None:
        """Raise ValueError if the sample request is invalid for every sampler of the base model.
        The check runs in the calling thread.
        """
        self._engine.check_sample(base_model, operation)

    async def check_sample(self, base_model: str, operation: Sample) -> None:
        """Raise ValueError if the sample request is invalid for every sampler of the base model.
        The check runs in another thread, and loads the base model if necessary. No thread waits
        for the compilation of a constraint, so that the constraints of one tenant do not delay the
        requests of others. If this call is cancelled, the compilation is ended.
        """
        compiled = await self._compiled_constraint(operation, base_model)
        await self.threads.run(lambda: self._engine.check_sample(base_model, operation))
        del compiled  # Kept until here, so that the check finds it compiled.

    async def adapter_bytes(self, base_model: str, lora: LoraConfig) -> AdapterBytes:
        """Return the memory that an adapter takes for training and for sampling."""
        return await self.threads.run(lambda: self._administration.adapter_bytes(base_model, lora))

    async def weights_fingerprint(self, base_model: str) -> str:
        """Return a hash of a base model's weight files."""
        return await self.threads.run(lambda: self._administration.weights_fingerprint(base_model))

    def preemptions(self) -> tuple[int, int]:
        """Return the number of preemptions of samples so far, and the number of preempted samples
        that wait for memory.
        """
        return self._administration.preemptions()

    async def tokenizer_directory(self, base_model: str) -> Path:
        """Return the directory of a base model's tokenizer."""
        return await self.threads.run(lambda: self._engine.tokenizer_directory(base_model))

    def capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the base models that are served."""
        models = self._engine.capabilities().supported_models
        return GetServerCapabilitiesResponse(
            [model for model in models if model.model_name in self.base_models]
        )

    async def close(self) -> None:
        """Close the engine. Unfinished operations end with EngineClosedError."""
        self._is_closed = True
        await self.threads.run(lambda: self._engine.close(finish=False))
        self.threads.close()

    def fail(self, fault: str) -> None:
        """Record that the engine has failed, and log the fault. Only the first fault counts."""
        if self.fault is None:
            self.fault, self.is_healthy = fault, False
            _log.critical(
                "the engine failed, and nothing runs until the server is restarted: %s", fault
            )

    def _note_outcome(self, future: Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._note_error(error)

    def _note_error(self, error: BaseException) -> None:
        self._hide_directory(error)
        is_fault = isinstance(error, EngineClosedError) and not isinstance(error, ReplicaLostError)
        if is_fault and not self._is_closed:
            self.fail(str(error))

    async def _compiled_constraint(
        self, operation: Operation[Any], base_model: str | None = None
    ) -> Any:
        """Return the compiled constraint of a sample request, and None for other operations. The
        constraint stays compiled while the caller keeps it.
        """
        if not isinstance(operation, Sample) or operation.sampling_params.constraint is None:
            return None
        future = await self.threads.run(
            lambda: self._engine.prepare_constraint(operation, base_model)
        )
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), CHECK_TIMEOUT_SECONDS)
        except TimeoutError:
            raise timeout_error(operation.sampling_params.constraint) from None

    def _hide_directory(self, error: BaseException) -> None:
        def hidden(value: Any) -> Any:
            if not isinstance(value, str):
                return value
            return self._data_dir_pattern.sub(
                lambda found: "" if found[1] else "the server's data directory", value
            )

        error.args = tuple(map(hidden, error.args))
        if isinstance(error, OSError) and error.filename is not None:
            error.filename, error.filename2 = hidden(error.filename), hidden(error.filename2)


class DeviceClock:
    """Divides the time of one device among requests. Each request is charged for a period that ends
    when the request ends. The period begins at the submission of the request, or at the end of the
    previous request if that is later.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._last_end = clock()

    def now(self) -> float:
        """Return the current time."""
        return self._clock()

    def charge(self, submitted: float) -> float:
        """Return the charge, in seconds, of a request that ends now. `submitted` is the time of its
        submission. The charges of all requests add up to at most the time that has passed.
        """
        now = self._clock()
        seconds = now - max(submitted, self._last_end)
        self._last_end = now
        return seconds
