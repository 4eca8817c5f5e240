"""`EngineHost`: an engine that is used by a program in another process."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from planish.engine.constraints.grammar import Grammar
from planish.engine.engine import Engine
from planish.engine.memory import DeviceMemory
from planish.engine.replication import CompileConstraint, CreateVersionSampler, ExportedWeights
from planish.engine.settings import EngineSettings, choose_device
from planish.errors import PlanishError
from planish.fleet.link import (
    EngineMemory,
    EngineOptions,
    EngineStatus,
    Event,
    Outcome,
    StreamedToken,
    transportable,
)
from planish.processes.memory import resident_bytes
from planish.service import (
    CreateSampler,
    DeferredForwardBackward,
    Operation,
    PublishSampler,
    Sample,
    SampledToken,
    SamplerInfo,
)
from planish.types import Datum


@dataclass(frozen=True)
class Submission:
    """An operation without the parts that stay in the caller's process."""

    call_id: int
    """The number of the operation. Each number is used once."""
    operation: Operation[Any]
    """A `Sample` has no `on_token`, and the `data` of a `DeferredForwardBackward` is None."""
    streams_tokens: bool = False
    is_preparing: bool = False
    """Whether the data of a `DeferredForwardBackward` are being prepared."""


def new_engine(options: EngineOptions) -> Engine:
    """Start an engine in this process. Raise UserError for an invalid option."""
    settings = EngineSettings(**dict(options.settings))
    if options.adapter_bytes is None:
        return Engine(options.models, options.data_dir, settings)
    directories = [Path(path) for path in (options.models or {}).values()]
    memory = DeviceMemory(settings, directories, options.adapter_bytes)
    engine = Engine(options.models, options.data_dir, settings, memory, only_these_models=True)
    engine.administration.keep_expired_checkpoints()
    return engine


class EngineHost:
    """An engine, the futures of its operations, and the events for the caller."""

    def __init__(self, options: EngineOptions) -> None:
        """Start the engine. Raise UserError for an invalid option, or if the device is too small for
        the base models.
        """
        self._engine = new_engine(options)
        device = choose_device(dict(options.settings).get("device", "auto"))
        self._memory = EngineMemory(
            str(device), self._engine.check_memory(list(options.models or {}))
        )
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="planish-export")
        self._futures: dict[int, Future[Any]] = {}
        """The futures of unfinished operations by call id."""
        self._data: dict[int, Future[Sequence[Datum]]] = {}
        """The data of deferred operations that are not provided yet, by call id."""

    def poll(self) -> list[Event]:
        """Wait for the next event, and return all events that are there."""
        events = [self._events.get()]
        while True:
            try:
                events.append(self._events.get_nowait())
            except Empty:
                return events

    def submit(self, submission: Submission) -> SamplerInfo | None:
        """Submit an operation to the engine. Return the info of the sampler that it creates, if it
        creates one.
        """
        call_id, operation = submission.call_id, submission.operation
        if isinstance(operation, Sample) and submission.streams_tokens:
            operation = replace(operation, on_token=partial(self._stream, call_id))
        if isinstance(operation, DeferredForwardBackward):
            data: Future[Sequence[Datum]] = Future()
            if submission.is_preparing:
                data.set_running_or_notify_cancel()
            operation = replace(operation, data=data)
            self._data[call_id] = data
        future: Future[Any] = (
            self._engine.prepare_constraint(operation.sample, operation.base_model)
            if isinstance(operation, CompileConstraint)
            else self._engine.submit(operation)
        )
        self._futures[call_id] = future
        future.add_done_callback(partial(self._report, call_id))
        if isinstance(operation, PublishSampler | CreateSampler | CreateVersionSampler):
            return self._engine.sampler_info(operation.sampler_id)
        return None

    def submit_accepted(self, submission: Submission) -> None:
        """Submit an operation whose caller does not wait. An error is the operation's outcome."""
        try:
            self.submit(submission)
        except BaseException as error:
            self._events.put(Outcome(submission.call_id, error=transportable(error)))

    def provide(self, call_id: int, data: Sequence[Datum] | BaseException) -> None:
        """Provide the data of a `DeferredForwardBackward`, or the error of their preparation."""
        future = self._data.pop(call_id)
        if isinstance(data, BaseException):
            future.set_exception(data)
        else:
            future.set_result(data)

    def cancel(self, call_id: int) -> bool:
        """Cancel an operation, and return whether that was possible."""
        future = self._futures.get(call_id)
        return future is not None and future.cancel()

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the engine, such as "checkpoints" or "administration.adapter_bytes", and
        return its result.
        """
        return attrgetter(name)(self._engine)(*args)

    def memory(self) -> EngineMemory:
        """Return the memory of the base models that this engine was started with."""
        return self._memory

    def close(self, finish: bool) -> None:
        """Close the engine."""
        self._engine.close(finish)

    def ping(self) -> EngineStatus:
        """Return the status, from which the caller learns that this process answers."""
        return EngineStatus(
            self._engine.progress(), *self._engine.administration.preemptions(), resident_bytes()
        )

    def _stream(self, call_id: int, token: SampledToken) -> None:
        self._events.put(StreamedToken(call_id, token))

    def _report(self, call_id: int, future: Future[Any]) -> None:
        self._futures.pop(call_id, None)
        if future.cancelled():
            outcome = Outcome(call_id, is_cancelled=True)
        elif (error := future.exception()) is not None:
            outcome = Outcome(call_id, error=transportable(error))
        elif isinstance(value := future.result(), Grammar):
            outcome = Outcome(call_id)  # A compiled constraint stays in this process.
        else:
            outcome = Outcome(call_id, value)
        if isinstance(outcome.value, ExportedWeights):
            # Hashing takes long, and this method runs in the engine thread.
            self._threads.submit(self._report_version, call_id, outcome)
        else:
            self._events.put(outcome)

    def _report_version(self, call_id: int, outcome: Outcome) -> None:
        """Name exported weights, and report the version instead of the weights."""
        try:
            version = outcome.value.version()
        except Exception as error:
            self._events.put(Outcome(call_id, error=transportable(error)))
        else:
            self._events.put(Outcome(call_id, version))


class RequestHandler:
    """Answers the requests of a `Link` in the engine's process. The first request is "start"."""

    def __init__(self) -> None:
        self._host: EngineHost | None = None

    @property
    def host(self) -> EngineHost:
        """The host. Raise PlanishError if it is not started."""
        if self._host is None:
            raise PlanishError("the engine is not started")
        return self._host

    def answer(self, name: str, *args: Any) -> tuple[Any, BaseException | None]:
        """Start the host, or call a method of the host. Return the result, or None and the error."""
        try:
            if name == "start":
                self._host = EngineHost(*args)
                return None, None
            return getattr(self.host, name)(*args), None
        except BaseException as error:
            return None, transportable(error)
