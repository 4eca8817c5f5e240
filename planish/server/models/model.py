"""A training model on the server: one actor that owns the model's requests and its state.

A request is checked, numbered, journaled and queued by `ModelIntake` (intake.py). A worker, which
runs while there is something to do, keeps the model's adapter in memory and gives each request its
turn in the order of the numbers. A few requests are in the engine at once, so that the device does
not wait for the event loop. Requests that read or write a named checkpoint wait until all earlier
requests are answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from planish.errors import EngineClosedError, UserError
from planish.fleet.link import ReplicaLostError
from planish.server.durable.checkpoints import private_copy_path
from planish.server.durable.journal import RequestRow
from planish.server.durable.records import ModelRow
from planish.server.durable.request_log import RequestLog
from planish.server.durable.retries import retry_until_memory_suffices
from planish.server.models import submission
from planish.server.models.adapter import ModelAdapter
from planish.server.models.lost_requests import LostRequests
from planish.server.models.request_queue import InFlight, QueueItem, Worker
from planish.server.models.step_metrics import StepMetrics
from planish.server.models.submission import RequestSubmitter, SubmittedRequest
from planish.server.request import (
    Request,
    SettledState,
    TransactionHook,
    done_from_result,
    failed_from_error,
)
from planish.server.results import Abandoned, Done, Failed, Tenant
from planish.server.scheduling import AdapterCache, CacheEntry
from planish.server.settle import Settlement
from planish.server.turn import Turns
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

_log = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 3
"""The maximum number of requests of one model that are in the engine at once."""
_MAX_PINNED_SECONDS = 10.0
"""After this time a model leaves memory if another adapter waits for memory."""


class ModelActor:
    """The queue of one training model and its worker. Only this class and its `adapter` write the
    model's state.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        request_log: RequestLog,
        cache: AdapterCache,
        turns: Turns,
        submitter: RequestSubmitter,
        settlement: Settlement,
        forget: Callable[[str], object],
    ) -> None:
        """Open a model. `forget` is called with its id when it is closed."""
        self.id, self.tenant = adapter.id, Tenant(adapter.row.tenant)
        self.adapter = adapter
        self.queue = adapter.queue
        self.in_flight: InFlight = adapter.in_flight
        self.worker = Worker(
            f"model {self.id}", self.queue, self.in_flight, turns.stopping, self._run_requests
        )
        self._step_metrics = StepMetrics(adapter.id)
        self._request_log, self._cache, self._forget = request_log, cache, forget
        self._turns, self._submitter, self._settlement = turns, submitter, settlement
        self._lost = LostRequests(adapter, turns, request_log)

    @property
    def row(self) -> ModelRow:
        """The model's row. `user_metadata` is empty here, because only the database keeps it."""
        return self.adapter.row

    # Taking requests.

    def enqueue(self, request: Request) -> None:
        """Queue a journaled request. If the model was closed or the number was skipped while the
        request was journaled, reject it.
        """
        seq = request.row.seq
        if self.adapter.row.closed is None and not self.queue.is_used(seq):
            self.queue.add(seq, request)
            self.worker.wake()
        else:
            reason = self.row.closed or "the server no longer waits for this request's number"
            message = f"{request.id} came too late for model_id={self.id!r}: {reason}"
            self._settle(request, Failed(message, "user"), state="refused")

    def skip_below(self, seq: int) -> None:
        """Skip all missing numbers below `seq`. The caller records `seq` in the database."""
        self.queue.skipped_below = seq
        self.adapter.row = replace(self.row, skipped_below=seq)

    # The worker.

    async def _run_requests(self) -> None:
        """Load the adapter, and run the requests in the queue. If this fails, answer all of them
        with the error.
        """
        cache, adapter = self._cache, self.adapter
        try:
            if not cache.is_ready(adapter):
                # A lasting fault of the disk must delay the requests, and not fail them.
                await self._request_log.disk_faults.retry_until_fixed(
                    lambda: cache.load(adapter), self.id
                )
            async with cache.pinned(adapter) as entry:
                await self._run_queue(entry)
        except EngineClosedError:
            raise
        except Exception as error:
            if not isinstance(error, (UserError, Abandoned)):
                _log.exception("%s cannot continue", self.id)
            await self._fail_all_requests(error)

    async def _run_queue(self, entry: CacheEntry) -> None:
        """Run requests until the queue is empty, or the model should leave memory. `entry` is the
        entry of the adapter in the cache.
        """
        loaded_since = time.monotonic()
        adapter, in_flight = self.adapter, self.in_flight
        while not self._turns.stopping.is_set() and adapter.row.closed is None:
            if self._lost.items:
                await self._lost.restore()
            is_time_up = time.monotonic() - loaded_since > _MAX_PINNED_SECONDS
            must_leave = entry.must_leave or (is_time_up and self._cache.is_waiting)
            item = None if must_leave else self.queue.take()
            if item is not None:
                await in_flight.wait_below(_MAX_IN_FLIGHT)
                await self._run_item(item)
            elif must_leave or not (
                in_flight.running or in_flight.unsaved_samplers or adapter.is_snapshotting
            ):
                break
            else:
                await in_flight.wait_for_change()
        await in_flight.wait_until_idle()
        has_lost_work = adapter.state.has_lost_work and not self._request_log.is_failing
        if self._lost.items or has_lost_work:
            await self._lost.restore()

    async def _run_item(self, item: QueueItem) -> None:
        """Run one item of the queue. If a request raises an error, answer it with this error, then
        raise. A request that EngineClosedError interrupts stays unanswered.
        """
        try:
            match item:
                case RequestRow():
                    await self.in_flight.wait_until_idle()
                    await self.adapter.replay(item)
                case Request(row=RequestRow(state="refused") as row):
                    await self.in_flight.wait_until_idle()
                    self._settle(item, row.failure, state="refused")
                    await self.adapter.replay(row)
                case Request(row=RequestRow(kind="unload_model")):
                    await self.in_flight.wait_until_idle()
                    await self.close("it was unloaded")
                    self._settle(item, done_from_result(UnloadModel(self.id), None))
                case Request():
                    await self._submit_or_fail(item)
        except ReplicaLostError:
            self._lost.note(item)
        except Exception as error:
            if isinstance(item, Request) and not isinstance(error, EngineClosedError):
                self._settle(item, failed_from_error(error), state="refused")
            raise

    async def _submit_or_fail(self, request: Request) -> None:
        try:
            await self._submit(request)
        except EngineClosedError:
            raise
        except Exception as error:  # the engine has not run the request
            failure = failed_from_error(error)
            await self.adapter.replay_failure(request.row, failure)
            await self.in_flight.wait_until_idle()
            if request.seq == 0:
                await self.close(f"the model could not be created ({error})")
            self._settle(request, failure)

    async def _submit(self, request: Request) -> None:
        """Give a request to the engine when it has its turn. Some operations, such as create and
        load, have completed when this returns.
        """
        if request.num_lost_replicas:
            self._lost.check(request)
        operation = request.operation or await self._request_log.operation(request)
        if isinstance(operation, ForwardBackward | OptimStep):
            await self._submit_training(request, operation)
            return
        await self._turns.take(request, num_slots=0)
        match operation:
            case CreateModel() | LoadWeights():
                await self._submit_load(request, operation)
            case SaveWeights() | SaveWeightsForSampler():
                await self.in_flight.wait_until_idle()
                submitted, lock = await self._submitter.submit_save(request, operation)
                self._answer_when_done(submitted).add_done_callback(lambda _: lock.release())
            case PublishSampler():
                await self._submit_publication(request, operation)
            case _:
                pass

    async def _submit_training(
        self, request: Request, operation: ForwardBackward | OptimStep
    ) -> None:
        tokens_ahead = sum(earlier.num_input_tokens for earlier in self.in_flight.running.values())
        slot = await self._turns.take(request, 1, tokens_ahead)
        try:
            submitted = await self._submitter.submit_training(request, operation)
        except BaseException:
            slot.release()
            raise
        submitted.future.add_done_callback(lambda _: slot.release())
        self.adapter.state.note_gradient(operation)
        self._answer_when_done(submitted)
        await self.adapter.save_due_snapshot()

    async def _submit_load(self, request: Request, operation: CreateModel | LoadWeights) -> None:
        """Create the model, or load a checkpoint into it, while no other request runs."""
        await self.in_flight.wait_until_idle()
        source = submission.loaded_checkpoint(operation)
        if source is not None:
            copy_path = private_copy_path(self.id, request.seq, source)
            self.adapter.private_checkpoints.paths.add(copy_path)
        submitted = await self._submitter.submit_load(request, operation)
        if isinstance(operation, CreateModel):
            arch = submitted.future.result().model_data.arch
            self.adapter.row = replace(self.row, arch=arch)
        self._answer_when_done(submitted)
        await self.in_flight.wait_until_idle()
        if isinstance(operation, LoadWeights) and submitted.future.exception() is None:
            self.adapter.state.has_gradient = False

    async def _submit_publication(self, request: Request, operation: PublishSampler) -> None:
        submitted_at = self._submitter.clock.now()
        future, sampler = await self.adapter.publications.publish(request.seq, operation)
        mark_ready = partial(self.adapter.publications.note_published, sampler)
        submitted = SubmittedRequest(request, operation, future, submitted_at, mark_ready)
        self._answer_when_done(submitted)

    # Answers.

    def _answer_when_done(self, submitted: SubmittedRequest) -> asyncio.Task[None]:
        """Answer a submitted request once the engine has its result."""
        seq = submitted.request.seq
        self.adapter.state.last_seq = seq
        self.in_flight.running[seq] = submitted.request
        return self.adapter.spawn(self._answer(submitted))

    async def _answer(self, submitted: SubmittedRequest) -> None:
        request, transaction_hook, result = submitted.request, None, None
        try:
            result = await submitted.future
            answer: Done | Failed = await retry_until_memory_suffices(
                lambda: submission.encode_result(submitted.operation, result), request.id
            )
            if submitted.make_transaction_hook is not None:
                transaction_hook = await retry_until_memory_suffices(
                    submitted.make_transaction_hook, request.id
                )
        except ReplicaLostError:
            self._lost.note(request)
            return
        except EngineClosedError:
            # A snapshot must not include this unanswered request.
            self.adapter.note_lost_work()
            self.in_flight.running.pop(request.seq, None)
            self.in_flight.notify()
            return
        except Exception as error:
            answer = failed_from_error(error)
        seconds = self._submitter.clock.charge(submitted.submitted_at)
        self.adapter.state.add_cost(submitted.operation, seconds, request.row.body_bytes)
        await self.in_flight.wait_for_earlier(request.seq)
        if self._lost.precede(request.seq):
            self._lost.note(request)
            return
        if isinstance(answer, Done) and transaction_hook is None:
            transaction_hook = self._step_metrics.note(submitted.operation, result, seconds)
        self._settle(request, answer, transaction_hook)

    def _settle(
        self,
        request: Request,
        answer: Done | Failed,
        transaction_hook: TransactionHook | None = None,
        state: SettledState | None = None,
    ) -> None:
        """Answer a request, and remember the answer until it is on disk."""
        if isinstance(answer, Failed):
            self.adapter.publications.note_failed(request.seq, answer.message)
        self._turns.end(request)
        answer_written = self._settlement.settle(request, answer, transaction_hook, state)
        unwritten_answers = self.in_flight.unwritten_answers
        unwritten_answers[request.seq] = answer_written
        answer_written.add_done_callback(lambda _: unwritten_answers.pop(request.seq, None))
        self.in_flight.running.pop(request.seq, None)
        self.in_flight.notify()

    async def _fail_all_requests(self, error: Exception) -> None:
        """Answer all running and ready requests with an error. The next load restores the model
        from its snapshot and the journal.
        """
        await self.adapter.remove_from_engine()
        self._cache.discard(self.adapter)
        failure = failed_from_error(error)
        self._reject_all((*self.in_flight.running.values(), *iter(self.queue.take, None)), failure)

    def _reject_all(self, items: Iterable[QueueItem], failure: Failed) -> None:
        for item in items:
            if isinstance(item, Request):
                self._settle(item, failure, state="refused")

    # Closing.

    async def close_when_idle(self, reason: str) -> None:
        """Close the model after all requests accepted so far have run."""
        await self.worker.wait()
        await self.close(reason)

    async def close(self, reason: str) -> None:
        """Take no more requests, and delete everything from which the model could be restored. Call
        this only while no request of the model is in the engine.
        """
        await self.adapter.close(reason)
        self.worker.is_closed = True
        self._forget(self.id)
        failure = Failed(f"model_id={self.id!r} is closed: {reason}", "user")
        self._reject_all(self.queue.skip_missing(), failure)
        await self.adapter.delete()
        self._cache.discard(self.adapter)

    async def stop(self) -> None:
        """Take a final snapshot if the adapter is in memory."""
        if self._cache.is_loaded(self.adapter):
            await self.adapter.save_snapshot()
