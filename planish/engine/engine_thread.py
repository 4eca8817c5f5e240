"""The engine thread, which owns the device and interleaves training and sampling.

The thread works in turns. A turn is one micro-batch (or another operation) of one training model,
or one step of one base model's sampler. While both training and sampling have work, each gets half
of the time. Within each of the two sides, the models share the time equally.

Only the engine thread may access the state below. Other threads submit jobs through `put`, which
never blocks and may be called from a finalizer.

Every job's future is completed in any case: with a result, with an error, or with
EngineClosedError when the thread ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, Literal

import torch

from planish.engine.base_models import BaseModel
from planish.engine.fairness import FairShare
from planish.engine.operations import TrainingOperations
from planish.engine.release_memory import let_go
from planish.engine.training_models import Job, SamplerHandle, Tenant
from planish.errors import EngineClosedError, PlanishError, UserError
from planish.model.kernels.cpp.threads import short_switch_interval
from planish.model.linear import before_each_matmul
from planish.model.lora import LoraWeights
from planish.processes.background import BackgroundThread, wait_for_saves
from planish.service import (
    CreateModel,
    CreateSampler,
    ForwardBackward,
    ForwardBackwardLater,
    ReleaseSampler,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
)

Side = Literal["sampling", "training"]

_CANCELLED = "its creation was cancelled; create another one"


@dataclass(frozen=True)
class _Wake:
    """An inbox item that wakes the thread, because data of a waiting job may be available."""


@dataclass(frozen=True)
class _Stop:
    """An inbox item that asks the thread to end."""

    finish: bool
    """Whether all queued jobs are to be completed first."""


class DeviceOwner:
    """The engine thread, its inbox of jobs, and the state of what it runs."""

    def __init__(self, operations: TrainingOperations, on_end: Callable[[], None]) -> None:
        """Create the engine thread.

        `on_end` is called in the engine thread after its last turn.
        """
        self._operations = operations
        self._on_end = on_end
        self._inbox: SimpleQueue[Job | _Wake | _Stop] = SimpleQueue()
        self._ended = threading.Event()
        self._saves: set[Future[Any]] = set()
        """The futures of checkpoints that are not written yet."""
        self._fault: BaseException | None = None
        """The exception that ended the thread, if it was not closed."""
        self._is_aborted = False
        """Whether the work in progress must stop at its next matmul."""
        self._stop: _Stop | None = None
        self._tenants: list[Tenant] = []
        """The training models whose queues are not empty."""
        self._bases: list[BaseModel] = []
        """The base models that were sampled from."""
        self._handles: list[SamplerHandle] = []
        self._sides: FairShare[Side] = FairShare()
        self._training: FairShare[Tenant] = FairShare()
        self._sampling: FairShare[BaseModel] = FairShare()
        self._thread = BackgroundThread(
            short_switch_interval()(self._run), "planish-engine", stop=self._stop_at_exit
        )

    def put(self, job: Job) -> None:
        """Queue a job.

        Raise EngineClosedError if the thread has ended or belongs to a parent process.
        """
        is_here = self._thread.is_alive()
        if self._ended.is_set():
            raise self._closed()
        if not is_here:
            raise EngineClosedError(
                "the engine is in the process that this one was forked from; sample and train there, or make a ServiceClient here"
            )
        if isinstance(job.operation, (SaveWeights, SaveWeightsForSampler)):
            self._saves.add(job.future)
            job.future.add_done_callback(self._saves.discard)
        self._inbox.put(job)
        if self._ended.is_set():
            self._refuse_inbox()

    def stop(self, finish: bool) -> None:
        """Ask the thread to end, without waiting for it.

        With `finish`, the thread first completes all queued jobs, including jobs whose data are
        still being prepared. Otherwise it ends at the next matmul of the work in progress.
        """
        self._is_aborted = self._is_aborted or not finish
        self._inbox.put(_Stop(finish))

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
        """Wait for checkpoints that are being saved, then stop without doing other jobs."""
        try:
            wait_for_saves(list(self._saves))
        finally:
            self.stop(finish=False)

    # The methods below run in the engine thread.

    def _run(self) -> None:
        before_each_matmul.set(self._check_abort)
        try:
            while True:
                self._receive()
                if self._is_over():
                    break
                if self._has_work():
                    self._turn()
        except BaseException as error:
            # Errors of jobs are caught elsewhere. This exception is a fault of the loop itself, so
            # its state cannot be trusted any more.
            let_go(error)
            self._fault = error
        finally:
            self._end()

    def _check_abort(self) -> None:
        """Raise the error of a closed engine if the work in progress must stop."""
        if self._is_aborted:
            raise self._closed()

    def _receive(self) -> None:
        """Take all items from the inbox, and wait for one if there is no work."""
        block = not self._has_work() and (self._stop is None or self._awaits_data())
        if block:
            # No model has waiting work, so the time used so far is irrelevant.
            self._sides, self._training, self._sampling = FairShare(), FairShare(), FairShare()
        while True:
            try:
                item = self._inbox.get(block)
            except Empty:
                return
            block = False
            if isinstance(item, Job):
                self._accept(item)
            elif isinstance(item, _Stop) and (self._stop is None or not item.finish):
                self._stop = item

    def _is_over(self) -> bool:
        """Return whether the thread was asked to stop and has nothing left to finish."""
        if self._stop is None:
            return False
        # The order of the two checks matters: data that arrive between them become work, which
        # the second check finds.
        return not (self._stop.finish and (self._awaits_data() or self._has_work()))

    def _awaits_data(self) -> bool:
        """Return whether the next job of any training model waits for data being prepared."""
        return any(tenant.awaits_data for tenant in self._tenants)

    def _has_work(self) -> bool:
        """Return whether a training model or a sampler can take a turn now."""
        return any(tenant.is_ready for tenant in self._tenants) or any(
            base.sampler.busy for base in self._bases
        )

    def _turn(self) -> None:
        """Let one training model or one sampler take a turn, and charge its time."""
        ready = [tenant for tenant in self._tenants if tenant.is_ready]
        busy = [base for base in self._bases if base.sampler.busy]
        waiting: list[Side] = [*(["sampling"] if busy else []), *(["training"] if ready else [])]  # type: ignore[list-item]
        side = self._sides.pick(waiting)
        start = perf_counter()
        is_alone = len(ready) + len(busy) == 1
        if side == "training":
            tenant = self._training.pick(ready)
            self._train(tenant)
            self._finish_turn(tenant.base, is_alone)
            self._training.charge(tenant, perf_counter() - start)
        else:
            base = self._sampling.pick(busy)
            self._sample(base)
            self._finish_turn(base, is_alone)
            self._sampling.charge(base, perf_counter() - start)
        self._sides.charge(side, perf_counter() - start)
        self._forget_unused()

    def _finish_turn(self, base: BaseModel, is_alone: bool) -> None:
        """Wait for the device if other models have work.

        A GPU still computes when a turn's launches are done. Without the wait, that time would be
        charged to the next turn.
        """
        if not is_alone:
            base.settle()

    def _accept(self, job: Job) -> None:
        """Append a training job to its model's queue, or start a sampling job."""
        if job.tenant is not None:
            if not job.tenant.queue:
                self._tenants.append(job.tenant)
            job.tenant.queue.append(job)
            if isinstance(job.operation, ForwardBackwardLater):
                job.operation.data.add_done_callback(lambda _: self._inbox.put(_Wake()))
            return
        try:
            self._accept_sampling(job)
        except Exception as error:
            job.fail(error)

    def _accept_sampling(self, job: Job) -> None:
        """Start a request, or create or release a sampler."""
        handle = job.handle
        assert handle is not None
        if handle not in self._handles:
            self._handles.append(handle)
        if isinstance(job.operation, Sample):
            self._start_sample(job, handle)
        elif isinstance(job.operation, ReleaseSampler):
            handle.is_released = True
            self._forget_unused()
            job.future.set_result(None)
        elif isinstance(job.operation, CreateSampler):
            self._create_sampler(job, handle)

    def _create_sampler(self, job: Job, handle: SamplerHandle) -> None:
        """Load the weights of a sampler, and start the requests that waited for it."""
        loaded = job.loaded
        try:
            if not job.future.set_running_or_notify_cancel():
                handle.failure = _CANCELLED
                return
            if loaded is not None:
                base, master = handle.base, loaded.state["master"]
                handle.weights = LoraWeights(loaded.layout, master, base.dtype, base.device)
            handle.version = loaded.version if loaded is not None else "base"
        except BaseException as error:
            handle.failure = str(error)
            raise
        finally:
            self._settle(handle)
        job.future.set_result(handle.sampler_id)

    def _start_sample(self, job: Job, handle: SamplerHandle) -> None:
        """Submit a request to the sampler, or let it wait until the sampler is ready.

        Raise UserError if the creation of the sampler has failed.
        """
        if handle.failure is not None:
            raise UserError(f"sampler_id={handle.sampler_id!r}: {handle.failure}")
        if handle.version is None:
            handle.waiting.append(job)
            return
        assert isinstance(job.operation, Sample)
        if handle.base not in self._bases:
            self._bases.append(handle.base)
        handle.base.sampler.submit(job.operation, handle.weights, handle.version, job.future)
        handle.running.add(job.future)
        job.future.add_done_callback(handle.running.discard)

    def _settle(self, handle: SamplerHandle) -> None:
        """Start the requests that waited for this sampler, or fail them if its creation failed."""
        if handle not in self._handles:
            self._handles.append(handle)
        waiting, handle.waiting = handle.waiting, []
        for job in waiting:
            try:
                self._start_sample(job, handle)
            except Exception as error:
                job.fail(error)

    def _train(self, tenant: Tenant) -> None:
        """Do one piece (for instance a micro-batch) of the training model's first job."""
        job = tenant.queue[0]
        tenant.base.make_current()
        if self._advance(tenant, job):
            return
        tenant.work = None
        tenant.queue.popleft()
        if not tenant.queue:
            self._tenants.remove(tenant)
        if job.handle is not None:
            self._settle(job.handle)

    def _advance(self, tenant: Tenant, job: Job) -> bool:
        """Do one piece of the job, and return whether the job needs another turn."""
        try:
            if tenant.work is None:
                if not job.future.set_running_or_notify_cancel():
                    self._cancelled(tenant, job)
                    return False
                tenant.work = self._operations.start(tenant, job)
            next(tenant.work)
        except StopIteration:
            return False
        except BaseException as error:
            _prepared(error, tenant.base)
            job.fail(error)
            if not isinstance(error, Exception):
                raise
            _check_device(error, tenant.base)
            return False
        return True

    def _cancelled(self, tenant: Tenant, job: Job) -> None:
        """Record that a queued job was cancelled.

        If it was a forward_backward, the next optim_step is rejected, because its gradient would
        lack the cancelled part.
        """
        if job.handle is not None:
            job.handle.failure = _CANCELLED
        if isinstance(job.operation, CreateModel):
            tenant.failure = _CANCELLED
        is_part = isinstance(job.operation, ForwardBackward) and not job.operation.forward_only
        if tenant.adapter is not None and (
            is_part or isinstance(job.operation, ForwardBackwardLater)
        ):
            tenant.adapter.refuse_step(UserError("it was cancelled"))

    def _sample(self, base: BaseModel) -> None:
        """Run one step of the base model's sampler; an exception fails all of its requests."""
        try:
            base.make_current()
            base.sampler.step()
        except Exception as error:
            _prepared(error, base)
            base.sampler.fail(error)
            _check_device(error, base)

    def _forget_unused(self) -> None:
        """Free the weights and cached prefixes of released samplers without open requests."""
        for handle in [handle for handle in self._handles if handle.is_unused]:
            self._handles.remove(handle)
            if not any(
                h.version == handle.version and h.base is handle.base for h in self._handles
            ):
                handle.base.sampler.forget(handle.version)
            handle.weights = None

    def _end(self) -> None:
        """Fail all jobs that are left and release all tensors."""
        self._ended.set()
        error = self._closed()
        for tenant in self._tenants:
            if tenant.work is not None:
                tenant.work.close()
            _fail_all(tenant.queue, error)
        for handle in self._handles:
            _fail_all(handle.waiting, error)
        self._refuse_inbox()
        for base in self._bases:
            base.sampler.fail(error)
        # Tensors must be released here: not while the thread shuts down, and not by another thread
        # that drops the last reference to this object.
        self._tenants, self._bases, self._handles = [], [], []
        self._sides, self._training, self._sampling = FairShare(), FairShare(), FairShare()
        self._on_end()

    def _refuse_inbox(self) -> None:
        """Fail all jobs in the inbox."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except Empty:
                return
            if isinstance(item, Job):
                item.fail(self._closed())

    def _closed(self) -> PlanishError:
        """Return the error for jobs that the thread can no longer do."""
        if self._fault is None:
            return EngineClosedError(
                "the engine was closed before this was done; make a new ServiceClient"
            )
        if isinstance(self._fault, EngineClosedError):  # Its message already names the remedy.
            return EngineClosedError(str(self._fault))
        error = EngineClosedError(
            f"the engine stopped at a fault of its own ({self._fault!r}); make a new ServiceClient"
        )
        error.__cause__ = self._fault
        return error


def _prepared(error: BaseException, base: BaseModel) -> None:
    """Prepare an exception for the job's future.

    The frames of its traceback release their tensors, so that keeping the exception does not keep
    the memory. An out-of-memory error gets a note that names the settings to lower.
    """
    let_go(error)
    if _lacks_memory(error):
        error.add_note(
            f"The memory of {base.device} is full: lower micro_batch_tokens (now {base.trainer.settings.micro_batch_tokens:,}) for training, "
            f"kv_cache_bytes (now {base.sampler.settings.kv_cache_bytes:,}) or max_batch (now {base.sampler.settings.max_batch:,}) for sampling"
        )


def _check_device(error: Exception, base: BaseModel) -> None:
    """Raise EngineClosedError if this process can no longer use the device after `error`.

    All later work on the device would fail in the same way.
    """
    if not isinstance(error, PlanishError) and base.is_lost():
        raise EngineClosedError(
            f"{base.device} does nothing more for this process, after this error: {error}; start the program again"
        ) from error


def _lacks_memory(error: BaseException) -> bool:
    """Return whether a GPU or main memory ran out.

    For main memory torch raises a plain RuntimeError, so its message is searched.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(
        error
    )


def _fail_all(jobs: Sequence[Job], error: Exception) -> None:
    """Fail all of these jobs with `error`."""
    for job in jobs:
        job.fail(error)
