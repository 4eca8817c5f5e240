"""`RemoteEngine`: `Service` on an engine in another process."""

import itertools
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from planish.errors import EngineClosedError, UnsupportedError, UserError
from planish.fleet.accepted import AcceptedSamples
from planish.fleet.futures import RemoteFuture
from planish.fleet.host import Submission
from planish.fleet.link import Link, Outcome, ReplicaLostError, StreamedToken
from planish.fleet.releases import ReleaseQueue
from planish.processes.background import BackgroundThread, wait_for_saves
from planish.service import (
    CheckpointInfo,
    CreateModel,
    DeferredForwardBackward,
    Operation,
    ReleaseSampler,
    Sample,
    SamplerInfo,
    SaveWeights,
    SaveWeightsForSampler,
    UnloadModel,
)
from planish.types import Checkpoint, GetServerCapabilitiesResponse

R = TypeVar("R")

SAVES = (SaveWeights, SaveWeightsForSampler)
"""The operations that a program waits for when it ends."""


@dataclass(frozen=True)
class _Call:
    """A submitted operation without a result."""

    operation: Operation[Any]
    future: RemoteFuture[Any]
    on_token: Callable[..., None] | None


class RemoteEngine:
    """An engine in another process. If the process ends, all operations fail with
    ReplicaLostError.
    """

    def __init__(
        self,
        link: Link,
        on_lost: Callable[[ReplicaLostError], None] = lambda _: None,
        describe_loss: Callable[[Operation[Any], ReplicaLostError], str] = lambda _, error: str(
            error
        ),
    ) -> None:
        """Use the host at the other end of `link`.

        `on_lost` is called once when the process has ended, before unfinished operations fail. It
        runs in the thread that delivers results. `describe_loss` returns the error message of an
        unfinished operation.
        """
        self._link = link
        self._calls = _Calls(link, on_lost, describe_loss)
        self._ids = itertools.count()
        self._is_closed = False
        self._models: set[str] = set()
        """The ids of the training models that are not unloaded."""
        self._samplers: dict[str, SamplerInfo] = {}
        """The samplers that are not released."""
        self._accepted = AcceptedSamples()
        self._releases = ReleaseQueue(self)
        weakref.finalize(self, _end, link, self._releases).atexit = False

    @property
    def is_lost(self) -> bool:
        """Whether the process has ended."""
        return self._calls.is_lost

    def submit(self, operation: Operation[R]) -> Future[R]:
        """Queue an operation. See `Service.submit`."""
        self._check_open()
        if isinstance(operation, UnloadModel | ReleaseSampler):
            return self._release(operation)
        self._check_known(operation)
        if isinstance(operation, CreateModel):
            self._models.add(operation.model_id)
        try:
            future, info = self._submit(operation)
        except BaseException:
            if isinstance(operation, CreateModel):
                self._models.discard(operation.model_id)
            raise
        if info is not None:
            self._samplers[info.sampler_id] = info
        return future

    def _submit(self, operation: Operation[Any]) -> tuple[Future[Any], SamplerInfo | None]:
        call_id = next(self._ids)
        future: RemoteFuture[Any] = RemoteFuture(partial(self._cancel, call_id))
        submission, on_token = _submission(call_id, operation)
        self._calls.add(call_id, _Call(operation, future, on_token))
        try:
            info = self._send(submission)
        except BaseException:
            self._calls.pop(call_id)
            raise
        if isinstance(operation, DeferredForwardBackward):
            operation.data.add_done_callback(partial(self._provide, call_id))
        return future, info

    def _send(self, submission: Submission) -> SamplerInfo | None:
        """Send an operation, and return the info of the sampler that it creates. Do not wait for an
        answer to a sample that the engine is known to accept.
        """
        operation = submission.operation
        sampler = self._samplers.get(getattr(operation, "sampler_id", ""))
        if not isinstance(operation, Sample) or sampler is None:
            return self._link.request("submit", submission)
        if not self._accepted.covers(operation, sampler.base_model):
            self._link.request("submit", submission)
            self._accepted.add(operation, sampler.base_model)
            return None
        self._link.send("submit_accepted", submission)
        # A loss from now on fails the operation. An earlier one may have failed all others already.
        if self.is_lost and self._calls.pop(submission.call_id):
            raise ReplicaLostError("the replica was ended")
        return None

    def capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the available base models."""
        return self.call("capabilities")

    def sampler_info(self, sampler_id: str) -> SamplerInfo:
        """Return a sampler's base model and checkpoint. Available after `close` too."""
        info = self._samplers.get(sampler_id)
        if info is None:
            raise unknown_id("sampler", sampler_id)
        return info

    def tokenizer_directory(self, base_model: str) -> Path:
        """Return the directory with the base model's tokenizer files."""
        return self.call("tokenizer_directory", base_model)

    def checkpoints(self, run_id: str | None = None) -> list[Checkpoint]:
        """Return saved checkpoints, newest first."""
        return self.call("checkpoints", run_id)

    def checkpoint_info(self, path: str) -> CheckpointInfo:
        """Return the base model and adapter shape of the checkpoint at a tinker:// path."""
        return self.call("checkpoint_info", path)

    def delete_checkpoint(self, path: str) -> None:
        """Delete the checkpoint at a tinker:// path."""
        self.call("delete_checkpoint", path)

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the engine, and return its result."""
        self._check_open()
        return self._link.request("call", name, *args)

    def close(self, finish: bool = True) -> None:
        """Close the engine, and end its process. See `Service.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with suppress(ReplicaLostError):
                # A cancellation is answered after everything that was sent before.
                self._link.request("cancel", next(self._ids))
                if finish:
                    # The data of deferred operations are provided by other threads meanwhile.
                    self._link.request("close", True)
                self._link.request("close", False)
        finally:
            _end(self._link, self._releases)
            self._calls.wait_until_lost(
                EngineClosedError(
                    "the engine was closed before this operation was done; make a new ServiceClient"
                )
            )

    def _release(self, operation: UnloadModel | ReleaseSampler) -> Future[Any]:
        """Queue an operation that frees a model or sampler, without waiting for the engine.

        Finalizers of clients call this, in any thread and while any lock may be held.
        """
        if isinstance(operation, UnloadModel):
            if operation.model_id not in self._models:
                raise unknown_id("model", operation.model_id)
            self._models.discard(operation.model_id)
        elif self._samplers.pop(operation.sampler_id, None) is None:
            raise unknown_id("sampler", operation.sampler_id)
        return self._releases.put(operation)

    def run_release(self, operation: Operation[Any]) -> Future[Any]:
        """Submit a release. The thread of the releases calls this."""
        return self._submit(operation)[0]

    def _check_known(self, operation: Operation[Any]) -> None:
        """Raise UserError if the operation names a model or sampler that does not exist.

        The engine may not have run the release of a model or sampler yet, and would accept the
        operation.
        """
        model_id = getattr(operation, "model_id", None)
        if model_id is not None and not isinstance(operation, CreateModel):
            if model_id not in self._models:
                raise unknown_id("model", model_id)
        elif isinstance(operation, Sample) and operation.sampler_id not in self._samplers:
            raise unknown_id("sampler", operation.sampler_id)

    def _cancel(self, call_id: int) -> bool:
        try:
            return self._link.request("cancel", call_id)
        except ReplicaLostError:
            return False

    def _provide(self, call_id: int, data: Future[Any]) -> None:
        try:
            value: Any = data.result()
        except BaseException as error:
            value = error
        # If the process has ended, the operation has failed already.
        with suppress(ReplicaLostError):
            try:
                self._link.request("provide", call_id, value)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                self._link.request("provide", call_id, UserError(f"{value!r}: {error}"))

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine is closed; make a new ServiceClient")


class _Calls:
    """The submitted operations without results, and the thread that delivers results."""

    def __init__(
        self,
        link: Link,
        on_lost: Callable[[ReplicaLostError], None],
        describe_loss: Callable[[Operation[Any], ReplicaLostError], str],
    ) -> None:
        self._link = link
        self._on_lost = on_lost
        self._describe_loss = describe_loss
        self._open_calls: dict[int, _Call] = {}
        self._closed_error: EngineClosedError | None = None
        self.is_lost = False
        self._thread = BackgroundThread(
            self._deliver, "planish-results", stop=self._stop_at_exit, exit_seconds=60.0
        )

    def add(self, call_id: int, call: _Call) -> None:
        """Register an operation before it is sent."""
        self._open_calls[call_id] = call

    def pop(self, call_id: int) -> _Call | None:
        """Remove an operation, and return it if it had no result."""
        return self._open_calls.pop(call_id, None)

    def wait_until_lost(self, error: EngineClosedError) -> None:
        """Wait until the process has ended. Operations without a result fail with `error`."""
        self._closed_error = error
        if not self._thread.is_current:
            self._thread.join()

    def _stop_at_exit(self) -> None:
        saves = [
            call.future
            for call in list(self._open_calls.values())
            if isinstance(call.operation, SAVES)
        ]
        try:
            wait_for_saves(saves)
        finally:
            # The end of the process is no loss any more.
            self._closed_error = EngineClosedError(
                "the program ended before this operation was done"
            )
            self._link.end()

    def _deliver(self) -> None:
        try:
            while True:
                for event in self._link.poll():
                    if isinstance(event, StreamedToken):
                        self._deliver_token(event)
                    else:
                        self._deliver_outcome(event)
        except ReplicaLostError as error:
            self.is_lost = True
            if self._closed_error is None:
                self._on_lost(error)
            self._fail_all(error)

    def _deliver_token(self, event: StreamedToken) -> None:
        call = self._open_calls.get(event.call_id)
        if call is None or call.on_token is None:
            return
        try:
            call.on_token(event.token)
        except BaseException as error:
            self.pop(event.call_id)
            call.future.set_exception(error)
            with suppress(ReplicaLostError):
                self._link.request("cancel", event.call_id)

    def _deliver_outcome(self, outcome: Outcome) -> None:
        call = self.pop(outcome.call_id)
        if call is None or call.future.done():
            return
        if outcome.is_cancelled:
            call.future.cancel_here()
        elif outcome.error is not None:
            call.future.set_exception(outcome.error)
        else:
            call.future.set_result(outcome.value)

    def _fail_all(self, error: ReplicaLostError) -> None:
        for call_id in list(self._open_calls):
            call = self.pop(call_id)
            if call is not None and not call.future.done():
                call.future.set_exception(
                    ReplicaLostError(self._describe_loss(call.operation, error))
                    if self._closed_error is None
                    else EngineClosedError(str(self._closed_error))
                )


def _submission(
    call_id: int, operation: Operation[Any]
) -> tuple[Submission, Callable[..., None] | None]:
    """Return what is sent for an operation, and the callback that stays here."""
    if isinstance(operation, DeferredForwardBackward):
        sent = replace(operation, data=None)  # pyright: ignore[reportArgumentType]
        return Submission(call_id, sent, is_preparing=operation.data.running()), None
    if not isinstance(operation, Sample):
        return Submission(call_id, operation), None
    if operation.stop_gate is not None:
        try:
            pickle.dumps(operation.stop_gate)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UnsupportedError(
                f"stop_gate: an engine in another process cannot run this function ({error}); "
                "give a function that can be pickled, or use an engine in this process"
            ) from error
    on_token = operation.on_token
    if on_token is None:
        return Submission(call_id, operation), None
    return Submission(call_id, replace(operation, on_token=None), streams_tokens=True), on_token


def unknown_id(kind: str, identifier: str) -> UserError:
    """Return the error for the id of a `kind` ("model" or "sampler") that does not exist."""
    end = "it was unloaded; create one" if kind == "model" else "it was released; create one"
    return UserError(f"{kind}_id={identifier!r}: there is no such {kind}, or {end}")


def _end(link: Link, releases: ReleaseQueue) -> None:
    """End the process and the thread of releases."""
    releases.stop()
    link.end()
