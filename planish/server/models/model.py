"""A training model on the server: one actor that owns the model's requests and its state.

A request is checked, journaled and queued by `intake.submit` (request_queue.py). A worker, which
runs while there is something to do, pins the model's adapter in memory and submits the requests to
the engine in the order of their numbers. A few requests are in the engine at once, so that the
device does not wait for the event loop. Requests that read or write a named checkpoint wait until
all earlier requests are answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from planish.errors import EngineClosedError, UserError
from planish.server.durable.checkpoints import is_superseded, private_copy_path
from planish.server.durable.crash_points import crash_point
from planish.server.durable.journal import RequestRow
from planish.server.durable.records import ModelRow
from planish.server.durable.request_log import (
    QueuedRequest,
    SettledState,
    TransactionHook,
    done_from_result,
    failed_from_error,
    input_token_count,
)
from planish.server.durable.retries import retry_until_memory_suffices
from planish.server.models import replay, steps
from planish.server.models.replay import AdapterState, ReplayCost
from planish.server.models.request_queue import InFlight, QueueItem, RequestIntake, RequestQueue
from planish.server.results import Abandoned, Done, Failed, Tenant
from planish.server.services import Services
from planish.service import (
    CreateModel,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    PublishSampler,
    SaveWeights,
    SaveWeightsForSampler,
    UnloadModel,
)
from planish.types import SaveWeightsForSamplerResponse, SaveWeightsResponse

R = TypeVar("R")

_log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 3
"""The maximum number of requests of one model that are in the engine at once."""
_MAX_PINNED_SECONDS = 10.0
"""After this time a model leaves memory if another adapter waits for memory."""


class ModelActor:
    """One training model, in memory or not. Only this class writes the model's state.

    A model implements `CachedAdapter` (scheduling.py): the adapter cache calls its `load` and
    `unload`.
    """

    def __init__(
        self,
        services: Services,
        row: ModelRow,
        queue: RequestQueue[QueueItem],
        unload_seq: int | None = None,
    ) -> None:
        """Open a model. `unload_seq` is the number of its unload request, if there is one."""
        self.row = row
        """The model's row. `user_metadata` is empty here, because only the database keeps it."""
        self.queue = queue
        self.in_flight = InFlight()
        self.adapter = AdapterState()
        self.private_paths: set[str] = set()
        """Private checkpoints (checkpoints.py) from which the server restores this model."""
        self.worker: asyncio.Task[None] | None = None
        self.is_snapshotting = False
        self._services = services
        services.sessions.models[row.id] = self
        self.intake = RequestIntake(self, services, unload_seq)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def id(self) -> str:
        """The id of the model."""
        return self.row.id

    @property
    def tenant(self) -> Tenant:
        """The owner of the model."""
        return Tenant(self.row.tenant)

    # Taking requests. `intake` checks and journals them first.

    def enqueue(self, request: QueuedRequest) -> None:
        """Queue a journaled request. If the model was closed or the number was skipped while the
        request was journaled, reject it.
        """
        if self.row.closed is None and not self.queue.is_used(request.seq):
            self.queue.add(request.seq, request)
            self.wake()
        else:
            reason = self.row.closed or "the server no longer waits for this request's number"
            failed = Failed(
                f"{request.id} came too late for model_id={self.id!r}: {reason}", "user"
            )
            self._settle(request, failed, state="refused")

    def skip_below(self, seq: int) -> None:
        """Skip all missing numbers below `seq`. The caller records `seq` in the database."""
        self.queue.skipped_below = seq
        self.row = replace(self.row, skipped_below=seq)

    # The worker.

    def wake(self) -> None:
        """Start the worker if the queue has something for it."""
        self.in_flight.notify()
        if (
            self.worker is None
            and self.row.closed is None
            and self.queue.is_ready
            and not self._services.stopping.is_set()
        ):
            self.worker = asyncio.create_task(self._run_worker(), name=f"model {self.id}")

    async def wait_for_worker(self) -> None:
        """Wait until the worker has ended."""
        while self.worker is not None:
            await asyncio.wait([self.worker])

    async def _run_worker(self) -> None:
        try:
            if not self._services.adapter_cache.is_ready(self):
                await self._services.request_log.disk_faults.retry_until_fixed(
                    self._load_adapter, self.id
                )
            async with self._services.adapter_cache.pinned(self):
                await self._run_queue()
        except EngineClosedError:
            return
        except Exception as error:
            if not isinstance(error, (UserError, Abandoned)):
                _log.exception("%s cannot continue", self.id)
            await self._fail_all_requests(error)
        finally:
            self.worker = None
        self.wake()

    async def _run_queue(self) -> None:
        """Run requests until the queue is empty, or the model should leave memory."""
        pinned_since = time.monotonic()
        while not self._services.stopping.is_set() and self.row.closed is None:
            is_time_up = time.monotonic() - pinned_since > _MAX_PINNED_SECONDS
            must_unpin = is_time_up and self._services.adapter_cache.is_waiting
            item = None if must_unpin else self.queue.take()
            if item is not None:
                await self.in_flight.wait_below(_MAX_IN_FLIGHT)
                await self._run_item(item)
            elif must_unpin or not (
                self.in_flight.running or self.in_flight.unsaved_samplers or self.is_snapshotting
            ):
                break
            else:
                await self.in_flight.wait_for_change()
        await self.in_flight.wait_until_idle()
        if self.adapter.has_lost_work and not self._services.store.is_failing:
            await self._unload_from_engine()
            await self._services.request_log.disk_faults.retry_until_fixed(self._restore, self.id)

    async def _load_adapter(self) -> None:
        async with self._services.adapter_cache.pinned(self):
            pass

    async def _run_item(self, item: QueueItem) -> None:
        """Run one item of the queue. If a request raises an error, answer it with this error, then
        raise. A request that EngineClosedError interrupts stays unanswered.
        """
        try:
            match item:
                case RequestRow():
                    await self.in_flight.wait_until_idle()
                    await self._replay_request(item)
                case QueuedRequest(row=RequestRow(state="refused") as row):
                    await self.in_flight.wait_until_idle()
                    self._settle(item, row.failure, state="refused")
                    await self._replay_request(row)
                case QueuedRequest(row=RequestRow(kind="unload_model")):
                    await self.in_flight.wait_until_idle()
                    await self.close("it was unloaded")
                    self._settle(item, done_from_result(UnloadModel(self.id), None))
                case QueuedRequest():
                    await self._submit_or_fail(item)
        except Exception as error:
            if isinstance(item, QueuedRequest) and not isinstance(error, EngineClosedError):
                self._settle(item, failed_from_error(error), state="refused")
            raise

    async def _submit_or_fail(self, request: QueuedRequest) -> None:
        try:
            await self._submit(request)
        except EngineClosedError:
            raise
        except Exception as error:  # the engine has not run the request
            failure = failed_from_error(error)
            await replay.repeat_failure(self._services.engine, request.row, failure, self.adapter)
            self.adapter.last_seq = request.seq
            await self.in_flight.wait_until_idle()
            if request.seq == 0:
                await self.close(f"the model could not be created ({error})")
            self._settle(request, failure)

    async def _submit(self, request: QueuedRequest) -> None:
        """Give a request to the engine. Some operations, such as create and load, have completed
        when this returns.
        """
        operation = await self._services.request_log.operation(request)
        if isinstance(operation, ForwardBackward | OptimStep):
            await self._submit_training(request, operation)
            return
        await self._services.crash_guard.enter(request.id)
        match operation:
            case CreateModel() | LoadWeights():
                await self._submit_load(request, operation)
            case SaveWeights() | SaveWeightsForSampler():
                await self.in_flight.wait_until_idle()
                submitted, lock = await steps.submit_save(self._services, request, operation)
                self._answer_when_done(submitted).add_done_callback(lambda _: lock.release())
            case PublishSampler():
                await self._submit_sampler_creation(request, operation)

    async def _submit_training(
        self, request: QueuedRequest, operation: ForwardBackward | OptimStep
    ) -> None:
        tokens_ahead = sum(earlier.num_input_tokens for earlier in self.in_flight.running.values())
        lease = await self._services.training_queue.acquire_slots(
            self.tenant.name, 1, input_token_count(operation), tokens_ahead
        )
        try:
            if not self._services.crash_guard.is_inactive:
                await self._services.crash_guard.enter(request.id)
            crash_point("before running")
            submitted_at = self._services.clock.now()
            future = await self._services.engine.submit(operation)
        except BaseException:
            lease.release()
            raise
        future.add_done_callback(lambda _: lease.release())
        self._services.request_log.release_operation(request)
        self.adapter.note_gradient(operation)
        self._answer_when_done(steps.SubmittedRequest(request, operation, future, submitted_at))
        is_due = self.adapter.cost.exceeds(self._services.settings)
        if is_due and self._can_snapshot and not self.is_snapshotting:
            await self.begin_snapshot()

    async def _submit_load(
        self, request: QueuedRequest, operation: CreateModel | LoadWeights
    ) -> None:
        """Create the model, or load a checkpoint into it, while no other request runs."""
        await self.in_flight.wait_until_idle()
        source = steps.loaded_checkpoint(operation)
        if source is not None:
            self.private_paths.add(private_copy_path(self.id, request.seq, source))
        submitted = await steps.submit_load(self._services, request, operation)
        if isinstance(operation, CreateModel):
            self.row = replace(self.row, arch=submitted.future.result().model_data.arch)
        self._answer_when_done(submitted)
        await self.in_flight.wait_until_idle()
        if isinstance(operation, LoadWeights) and submitted.future.exception() is None:
            self.adapter.has_gradient = False

    # Published samplers.

    async def _submit_sampler_creation(
        self, request: QueuedRequest, operation: PublishSampler
    ) -> None:
        samplers = self._services.samplers
        sampler = samplers.get(operation.sampler_id)
        if sampler is None:
            raise UserError(
                f"sampling_session_id={operation.sampler_id!r} was closed before it was created; "
                "create another one"
            )
        submitted_at = self._services.clock.now()
        future = await self._start_sampler_creation(request.seq, operation)

        async def mark_sampler_ready() -> None:
            await samplers.note_published(sampler)

        self._answer_when_done(
            steps.SubmittedRequest(request, operation, future, submitted_at, mark_sampler_ready)
        )

    async def _start_sampler_creation(
        self, seq: int, operation: PublishSampler
    ) -> asyncio.Future[str]:
        publication, save = await steps.submit_publication(self._services.engine, seq, operation)
        self._record_when_saved(seq, operation, save)
        return publication

    def _record_when_saved(
        self,
        seq: int,
        operation: PublishSampler,
        save: asyncio.Future[SaveWeightsForSamplerResponse],
    ) -> None:
        """Record in the background where the weights of a published sampler were saved."""
        sampler = self._services.samplers.get(operation.sampler_id)

        async def record() -> None:
            try:
                is_saved = await steps.record_published_save(self._services, sampler, save)
                self.adapter.has_lost_work = self.adapter.has_lost_work or not is_saved
            finally:
                # If the model was restored meanwhile, a newer save has replaced this one.
                if self.in_flight.unsaved_samplers[seq] is task:
                    del self.in_flight.unsaved_samplers[seq]
                self.in_flight.notify()

        self.in_flight.unsaved_samplers[seq] = task = self._spawn(record())

    # Answers.

    def _answer_when_done(self, submitted: steps.SubmittedRequest) -> asyncio.Task[None]:
        """Answer a submitted request once the engine has its result."""
        seq = submitted.request.seq
        self.adapter.last_seq = seq
        self.in_flight.running[seq] = submitted.request
        return self._spawn(self._answer(submitted))

    async def _answer(self, submitted: steps.SubmittedRequest) -> None:
        request, transaction_hook, counters = submitted.request, None, self._services.counters
        try:
            result = await submitted.future
            counters.trained_tokens[request.row.tenant] += input_token_count(submitted.operation)
            answer: Done | Failed = await retry_until_memory_suffices(
                lambda: steps.encode_result(submitted.operation, result), request.id
            )
            if submitted.make_transaction_hook is not None:
                transaction_hook = await retry_until_memory_suffices(
                    submitted.make_transaction_hook, request.id
                )
        except EngineClosedError:
            self.adapter.has_lost_work = True  # a snapshot must not include this unanswered request
            self.in_flight.running.pop(request.seq, None)
            self.in_flight.notify()
            return
        except Exception as error:
            answer = failed_from_error(error)
        seconds = self._services.clock.charge(submitted.submitted_at)
        self.adapter.add_cost(submitted.operation, seconds, request.row.body_bytes)
        await self.in_flight.wait_for_earlier(request.seq)
        self._settle(request, answer, transaction_hook)

    def _settle(
        self,
        request: QueuedRequest,
        answer: Done | Failed,
        transaction_hook: TransactionHook | None = None,
        state: SettledState | None = None,
    ) -> None:
        """Answer a request, and remember the answer until it is on disk."""
        if isinstance(answer, Failed):
            self._services.samplers.note_failed_request(self.id, request.seq, answer.message)
        self._services.crash_guard.leave(request.id)
        answer_written = self._services.request_log.settle(request, answer, transaction_hook, state)
        unwritten_answers = self.in_flight.unwritten_answers
        unwritten_answers[request.seq] = answer_written
        answer_written.add_done_callback(lambda _: unwritten_answers.pop(request.seq, None))
        self.in_flight.running.pop(request.seq, None)
        self.in_flight.notify()

    async def _fail_all_requests(self, error: Exception) -> None:
        """Answer all running and ready requests with an error. The next load restores the model
        from its snapshot and the journal.
        """
        await self._unload_from_engine()
        self._services.adapter_cache.discard(self)
        failure = failed_from_error(error)
        for item in (*self.in_flight.running.values(), *iter(self.queue.take, None)):
            if isinstance(item, QueuedRequest):
                self._settle(item, failure, state="refused")

    # Memory: what the adapter cache calls.

    @property
    def memory_bytes(self) -> int:
        """Memory of the adapter with its optimizer state."""
        return self.row.training_bytes

    @property
    def is_evictable(self) -> bool:
        """Always true, because the model can be restored from its snapshot and the journal."""
        return True

    async def load(self) -> None:
        """Bring the adapter back into memory: load the snapshot, then replay. Raise UserError if
        the model was closed, and DamagedFileError if a file was altered or removed.
        """
        if self.row.closed is not None:
            raise UserError(
                f"model_id={self.id!r} is closed, and its unnamed samplers were lost with it"
            )
        await self._restore()
        if self.row.closed is not None:  # the model was closed during the load
            await self._unload_from_engine()
            raise UserError(f"model_id={self.id!r} is closed: {self.row.closed}")

    async def unload(self) -> None:
        """Take a snapshot if one is due, and free the adapter's memory."""
        if self.row.closed is None:
            await self.save_snapshot()
            await self._unload_from_engine()

    async def close_when_idle(self, reason: str) -> None:
        """Close the model after all requests accepted so far have run."""
        await self.wait_for_worker()
        await self.close(reason)

    async def close(self, reason: str) -> None:
        """Take no more requests, and delete everything from which the model could be restored. Call
        this only while no request of the model is in the engine.
        """
        while self.in_flight.unsaved_samplers or self.is_snapshotting:
            await self.in_flight.wait_for_change()
        self.row = replace(self.row, closed=reason, snapshot=None, snapshot_seq=None)
        self._services.sessions.models.pop(self.id, None)
        failure = Failed(f"model_id={self.id!r} is closed: {reason}", "user")
        for item in self.queue.skip_missing():
            if isinstance(item, QueuedRequest):
                self._settle(item, failure, state="refused")
        await replay.record_closing(self._services.store, self.row)
        crash_point("model closed before cleaning")
        await self._unload_from_engine()
        self._services.adapter_cache.discard(self)
        await self._delete_private_checkpoints(list(self.private_paths))

    async def _unload_from_engine(self) -> None:
        """Remove the model from the engine, if it is there."""
        self.adapter = self.adapter.unloaded()
        with suppress(UserError, EngineClosedError):
            await self._services.engine.perform(UnloadModel(self.id))
            crash_point("unloaded")

    async def _restore(self) -> None:
        """Restore the adapter to its state after the last dequeued request. If a file is damaged or
        missing, raise DamagedFileError and leave the adapter unloaded. The snapshot and the journal
        do not change, so a later load succeeds once the file is restored.
        """
        # Wait for running snapshots. A snapshot that is recorded during the replay would delete the
        # snapshot from which the replay began.
        while self.is_snapshotting:
            await self.in_flight.wait_for_change()
        # The replay reads the answered requests from the database, so all answers must be there.
        await asyncio.gather(*self.in_flight.unwritten_answers.values())
        self.adapter = self.adapter.unloaded()
        try:
            await replay.restore(
                self._services, self.row, self.queue.next_seq, self.adapter, self._recreate_sampler
            )
        except BaseException:
            await self._unload_from_engine()
            raise

    async def _replay_request(self, row: RequestRow) -> None:
        """Repeat the effect of an answered request."""
        await replay.repeat(self._services, row, self.adapter, self._recreate_sampler)

    async def _recreate_sampler(self, seq: int, operation: PublishSampler) -> None:
        """Publish a sampler again, unless its weights are on disk or it was closed. A sampler that
        is in memory has these weights and may have running samples, so only its save is repeated.
        """
        samplers = self._services.samplers
        sampler = samplers.get(operation.sampler_id)
        if sampler is None or sampler.row.source is not None:
            return
        if self._services.adapter_cache.is_loaded(sampler):
            self._record_when_saved(
                seq,
                operation,
                await steps.submit_published_save(self._services.engine, seq, operation),
            )
        else:
            await (await self._start_sampler_creation(seq, operation))
            await samplers.note_published(sampler)

    # Snapshots.

    @property
    def _can_snapshot(self) -> bool:
        return self.row.closed is None and self.adapter.can_be_saved

    async def save_snapshot(self) -> bool:
        """Take a snapshot if the adapter has changed since the last one. Take none if the model is
        closed, a gradient is pending or work was lost. Return whether the last snapshot is up to
        date.
        """
        while self.is_snapshotting:
            await self.in_flight.wait_for_change()
        adapter = self.adapter
        has_unsaved_changes = (
            adapter.cost.num_changes > 0 and adapter.last_seq > self.row.last_snapshot
        )
        if has_unsaved_changes and self._can_snapshot:
            return await (await self.begin_snapshot())
        return not has_unsaved_changes

    async def begin_snapshot(self) -> asyncio.Task[bool]:
        """Queue a snapshot after the last operation in the engine. The returned task ends with
        False if the snapshot failed. A failure is logged and loses nothing.
        """
        crash_point("before snapshot")
        self.is_snapshotting, self.adapter.cost = True, ReplayCost()
        adapter, seq = self.adapter, self.adapter.last_seq
        save = await replay.submit_snapshot(self._services.engine, self.id, seq)
        return self._spawn(self._finish_snapshot(adapter, seq, save))

    async def _finish_snapshot(
        self, adapter: AdapterState, seq: int, save: asyncio.Future[SaveWeightsResponse]
    ) -> bool:
        """Record a snapshot that was submitted after request `seq`, when the model's state was
        `adapter`. The model may have another state by now, because it was freed meanwhile.
        """
        try:
            path = (await save).path
            self.private_paths.add(path)
            await self.in_flight.wait_until_durable(seq)
            if adapter.has_lost_work or self.adapter.has_lost_work:
                return False
            await replay.record_snapshot(self._services, self.row, seq, path)
            self.row = replace(self.row, snapshot=path, snapshot_seq=seq)
            await self._delete_private_checkpoints(
                [p for p in self.private_paths if is_superseded(p, seq)]
            )
        except Exception as error:
            if not isinstance(error, EngineClosedError):
                _log.exception(
                    "the snapshot of %s failed; everything since the last one stays in the journal",
                    self.id,
                )
            return False
        finally:
            self.is_snapshotting = False
            self.in_flight.notify()
        return True

    async def _delete_private_checkpoints(self, paths: Sequence[str]) -> None:
        for path in paths:
            await self._services.engine.delete_checkpoint(path)
            self.private_paths.discard(path)

    def _spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Run `work` in a task. The event loop has only weak references to tasks, so keep one here
        until the task ends.
        """
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
