"""The engine thread, which owns the device and interleaves training and sampling.

The thread works in turns. A turn is one micro-batch (or another operation) of one training model,
or one step of one base model's sampler. While both training and sampling have work, each gets half
of the time. Within each of the two sides, the models share the time equally.

Only the engine thread changes adapters, samplers and the queues of operations. Other threads submit
operations through `put`, which never blocks and may be called from a finalizer.

Every operation's future is completed in any case: with a result, with an error, or with
EngineClosedError when the thread ends.
"""

import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, Literal

from planish.engine.base_models import BaseModel
from planish.engine.fairness import FairShare
from planish.engine.release_memory import clear_frames
from planish.engine.sampler_sessions import SamplerSessions
from planish.engine.training_models import (
    QueuedDeferredForwardBackward,
    QueuedOperation,
    QueuedPublish,
    QueuedSampling,
    QueuedSave,
    QueuedTraining,
    TrainingModel,
)
from planish.engine.training_operations import TrainingOperations
from planish.engine.training_queues import TrainingQueues
from planish.errors import EngineClosedError, PlanishError
from planish.model.layers.linear import before_each_matmul
from planish.processes.background import BackgroundThread, wait_for_saves
from planish.processes.threads import short_switch_interval

Side = Literal["sampling", "training"]


@dataclass(frozen=True)
class _Wake:
    """An inbox item that wakes the thread, because the data of a queued operation may be ready."""


@dataclass(frozen=True)
class _Stop:
    """An inbox item that asks the thread to end."""

    finish: bool
    """Whether the thread completes all queued operations before it ends."""


class EngineThread:
    """The engine thread, its inbox of operations, and the state of what it runs."""

    def __init__(self, operations: TrainingOperations, on_end: Callable[[], None]) -> None:
        """Create the engine thread.

        `on_end` is called in the engine thread after its last turn.
        """
        self._on_end = on_end
        self._inbox: SimpleQueue[QueuedOperation | _Wake | _Stop] = SimpleQueue()
        self._has_ended = threading.Event()
        self._pending_saves: set[Future[Any]] = set()
        """The futures of checkpoints that are not written yet."""
        self._fatal_error: BaseException | None = None
        """The exception that ended the thread; None while it runs or after a normal stop."""
        self._progress = 0
        self._is_idle = True
        """Whether the thread waits for an operation."""
        self._is_aborted = False
        """Whether the work in progress must stop at its next matmul."""
        self._stop_request: _Stop | None = None
        self._training_queues = TrainingQueues(operations)
        self._sampler_sessions = SamplerSessions()
        self._side_shares: FairShare[Side] = FairShare()
        self._training_shares: FairShare[TrainingModel] = FairShare()
        self._sampling_shares: FairShare[BaseModel] = FairShare()
        self._thread = BackgroundThread(
            short_switch_interval()(self._run), "planish-engine", stop=self._stop_at_exit
        )

    def put(self, queued: QueuedOperation) -> None:
        """Queue an operation.

        Raise EngineClosedError if the thread has ended or belongs to a parent process.
        """
        is_alive = self._thread.is_alive()
        if self._has_ended.is_set():
            raise self._closed_error()
        if not is_alive:
            raise EngineClosedError(
                "the engine runs in the parent process; sample and train there, or make a "
                "ServiceClient in this process"
            )
        if isinstance(queued, QueuedSave):
            self._pending_saves.add(queued.future)
            queued.future.add_done_callback(self._pending_saves.discard)
        self._inbox.put(queued)
        if self._has_ended.is_set():
            self._reject_inbox()

    def stop(self, finish: bool) -> None:
        """Ask the thread to end, without waiting for it.

        With `finish`, the thread first completes all queued operations, also those whose data are
        still being prepared. Otherwise it ends at the next matmul of the work in progress.
        """
        self._is_aborted = self._is_aborted or not finish
        self._inbox.put(_Stop(finish))

    def progress(self) -> int | None:
        """Return a number that grows with each turn and each matmul; None while there is no work.

        If it stays the same for long, the thread hangs.
        """
        return None if self._is_idle or not self._thread.is_alive() else self._progress

    def stack(self) -> str:
        """Return the stack of the thread, for the log of a thread that hangs."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        frame = frames.get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "it has ended"

    def close(self, finish: bool) -> None:
        """Call `stop` and wait until the thread has ended."""
        self.stop(finish)
        if self._thread.is_current:
            return
        try:
            self._thread.join()
        except BaseException:
            # After Ctrl-C, for instance, the caller no longer waits, so the thread should end soon.
            self.stop(finish=False)
            raise

    def _stop_at_exit(self) -> None:
        """Wait for checkpoints that are being saved, then stop without running other operations."""
        try:
            wait_for_saves(list(self._pending_saves))
        finally:
            self.stop(finish=False)

    # The methods below run in the engine thread.

    def _run(self) -> None:
        before_each_matmul.set(self._check_abort)
        try:
            while True:
                self._receive()
                if self._should_end():
                    break
                if self._has_work():
                    self._run_turn()
        except BaseException as error:
            # Errors of operations are caught elsewhere. This exception is a fault of the loop
            # itself, so its state cannot be trusted any more.
            clear_frames(error)
            self._fatal_error = error
        finally:
            self._shut_down()

    def _check_abort(self) -> None:
        """Count the progress. Raise the error of a closed engine if the work must stop."""
        self._progress += 1
        if self._is_aborted:
            raise self._closed_error()

    def _receive(self) -> None:
        """Take all items from the inbox, and wait for one if there is no work."""
        block = not self._has_work() and (
            self._stop_request is None or self._training_queues.await_data
        )
        if block:
            # No model has work, so the time that each model used so far does not matter.
            self._reset_shares()
        while True:
            self._progress += 1
            self._is_idle = block
            try:
                item = self._inbox.get(block)
            except Empty:
                return
            finally:
                self._is_idle = False
            block = False
            if isinstance(item, QueuedOperation):
                self._accept(item)
            elif isinstance(item, _Stop) and (self._stop_request is None or not item.finish):
                self._stop_request = item

    def _should_end(self) -> bool:
        """Return whether the thread was asked to stop and has nothing left to finish."""
        if self._stop_request is None:
            return False
        # `await_data` must be read first. In the other order, data could become ready between the
        # two. Then both would be False, and the thread would end without running the operation that
        # needs these data.
        return not (
            self._stop_request.finish and (self._training_queues.await_data or self._has_work())
        )

    def _has_work(self) -> bool:
        """Return whether a training model or a sampler can take a turn now."""
        return bool(
            self._training_queues.ready_models() or self._sampler_sessions.busy_base_models()
        )

    def _reset_shares(self) -> None:
        """Reset the used time of training, of sampling and of every model to 0."""
        self._side_shares, self._training_shares = FairShare(), FairShare()
        self._sampling_shares = FairShare()

    def _run_turn(self) -> None:
        """Let one training model or one sampler take a turn, and charge its time."""
        ready_models = self._training_queues.ready_models()
        busy_base_models = self._sampler_sessions.busy_base_models()
        sides: list[Side] = []
        if busy_base_models:
            sides.append("sampling")
        if ready_models:
            sides.append("training")
        side = self._side_shares.pick(sides)
        start = perf_counter()
        is_alone = len(ready_models) + len(busy_base_models) == 1
        if not is_alone:
            # The last tokens of a sampler would otherwise wait for the turns of others.
            self._sampler_sessions.finish_steps()
        if side == "training":
            model = self._training_shares.pick(ready_models)
            finished = self._training_queues.run_turn(model)
            if isinstance(finished, QueuedPublish):
                self._sampler_sessions.start_waiting_requests(finished.session)
            self._wait_for_device(model.base, is_alone)
            self._training_shares.charge(model, perf_counter() - start)
        else:
            base = self._sampling_shares.pick(busy_base_models)
            self._sampler_sessions.run_turn(base)
            self._wait_for_device(base, is_alone)
            self._sampling_shares.charge(base, perf_counter() - start)
        self._side_shares.charge(side, perf_counter() - start)
        self._sampler_sessions.drop_unused()

    def _wait_for_device(self, base: BaseModel, is_alone: bool) -> None:
        """Wait for the device if other models have work.

        Kernel launches on a GPU are asynchronous, so the GPU may still compute when a turn ends.
        Without the wait, the rest of the computation would be charged to the next turn.
        """
        if not is_alone:
            base.synchronize()

    def _accept(self, queued: QueuedOperation) -> None:
        """Append an operation to its model's queue, or start an operation on a sampler."""
        if isinstance(queued, QueuedTraining):
            self._training_queues.append(queued)
            if isinstance(queued, QueuedDeferredForwardBackward):
                queued.operation.data.add_done_callback(lambda _: self._inbox.put(_Wake()))
            return
        assert isinstance(queued, QueuedSampling)
        try:
            self._sampler_sessions.accept(queued)
        except Exception as error:
            queued.fail(error)

    def _shut_down(self) -> None:
        """Fail all operations that are left and release all tensors."""
        self._has_ended.set()
        error = self._closed_error()
        self._training_queues.close(error)
        self._reject_inbox()
        self._sampler_sessions.close(error)
        # Drop the references to all tensors here. Otherwise the tensors would be freed while the
        # thread shuts down, or later in any other thread that drops the last reference to this
        # object.
        self._reset_shares()
        self._on_end()

    def _reject_inbox(self) -> None:
        """Fail all operations in the inbox."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except Empty:
                return
            if isinstance(item, QueuedOperation):
                item.fail(self._closed_error())

    def _closed_error(self) -> PlanishError:
        """Return the error for operations that the thread can no longer run."""
        if self._fatal_error is None:
            return EngineClosedError(
                "the engine was closed before this operation was done; make a new ServiceClient"
            )
        if isinstance(
            self._fatal_error, EngineClosedError
        ):  # Its message already names the remedy.
            return EngineClosedError(str(self._fatal_error))
        error = EngineClosedError(
            f"the engine stopped because of an internal error ({self._fatal_error!r}); make a new "
            "ServiceClient"
        )
        error.__cause__ = self._fatal_error
        return error
