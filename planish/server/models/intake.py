"""Which requests a model accepts, and the numbers that it gives them.

A rejected request has used up its number, because the client continues with the next one. The
journal records it as "refused", so that a replay knows of it: after a rejected forward_backward the
next optim_step must fail. A request whose number was skipped, because the model stopped waiting for
it, is rejected as too late.

Some clients restart their numbers. logits-sdk makes a training client from a checkpoint in two
steps. It creates a model and loads the weights as request 1. Then it wraps the model into a new
client, whose first request is number 1 again. The server accepts a restart only in this case: the
only request of the model so far is a load_weights with number 1, and a different request with
number 1 arrives. `RESTART_OFFSET` is added to the numbers of the second client, so that they stay
unique. The model skips all numbers in between, and the database records the skip.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planish.errors import StorageError
from planish.server.durable import journal
from planish.server.durable.checkpoints import (
    CheckpointCatalog,
    check_is_not_private,
    check_name_is_not_private,
)
from planish.server.durable.records import ModelRow, SamplerRow, select, update_row, upsert
from planish.server.durable.store import Store, Transaction
from planish.server.intake import Intake
from planish.server.models.model import ModelActor
from planish.server.request import (
    Request,
    TransactionHook,
    encode_operation,
    encoded_request,
    run_uncancelled,
)
from planish.server.results import Accepted, BadRequest, Failed, Gone, ServerError
from planish.server.samplers import Samplers
from planish.server.sessions import Sessions
from planish.server.settings import ServerSettings
from planish.service import (
    ForwardBackward,
    LoadWeights,
    Operation,
    PublishSampler,
    SaveWeights,
    SaveWeightsForSampler,
)
from planish.wire.operations import operation_kind

RESTART_OFFSET = 1 << 61
"""Added to the sequence numbers of a client that restarted them."""
_MAX_SEQ = 2**62
"""The highest number that a client may use. Above it, the sum of the number and RESTART_OFFSET may
not fit into the 64-bit integers of the database.
"""


@dataclass(frozen=True)
class OperationCheck:
    """Finds operations that are already known to fail."""

    _store: Store
    _checkpoints: CheckpointCatalog
    _settings: ServerSettings

    async def check(self, model: ModelActor, operation: Operation[Any]) -> None:
        """Raise BadRequest, NotFound or UserError if the operation is already known to fail."""
        match operation:
            case ForwardBackward(forward_only=False):
                size = model.adapter.state.cost.bytes
                limit = self._settings.max_gradient_request_bytes
                if size > limit:
                    raise BadRequest(
                        f"model_id={model.id!r}: the data of one gradient have {size:,} bytes, and "
                        f"may have {limit:,}. The next optim_step will fail; after it, send less "
                        "data for each step"
                    )
            case SaveWeights(name=name) | SaveWeightsForSampler(name=name):
                check_name_is_not_private(name)
            case LoadWeights(path=path):
                check_is_not_private(path)
                await self._checkpoints.readable_row(model.tenant, path)
            case PublishSampler(sampler_id=sampler_id):
                if await self._store.read(select, SamplerRow, "id = ?", [sampler_id]):
                    raise BadRequest(
                        f"sampling_session_id={sampler_id!r} has already been used; continue with "
                        "the next sequence number"
                    )
            case _:
                pass


@dataclass(eq=False)
class ModelIntake:
    """Takes the requests of one model."""

    model: ModelActor
    _intake: Intake
    _operation_check: OperationCheck
    _sessions: Sessions
    _samplers: Samplers
    _store: Store
    _missing_request_timeout: float
    _unload_seq: int | None
    """Requests from this number on are rejected, because the model is being unloaded."""
    arriving: dict[int, asyncio.Task[Any]] = field(default_factory=dict[int, asyncio.Task[Any]])
    """Requests being checked and journaled, by number."""
    _missing_since: tuple[int, float] | None = None
    """The missing number, and since when the model waits for it."""

    def submit(self, seq_id: int, operation: Operation[Any]) -> Awaitable[Accepted]:
        """Journal and queue an operation, which runs once all lower numbers have run.

        A repeated request, with the same number and operation, returns the same request id. Raise
        BadRequest if another operation has used this number. Raise BadRequest, NotFound or
        UserError if the operation is invalid; its number is then used up. Raise Gone if the model
        is being unloaded.

        The work continues even if the caller is cancelled, because every journaled request must
        also be queued.
        """
        return asyncio.shield(asyncio.create_task(self._submit(seq_id, operation)))

    async def _submit(self, seq_id: int, operation: Operation[Any]) -> Accepted:
        if not 1 <= seq_id <= _MAX_SEQ:
            raise BadRequest(f"seq_id={seq_id}: the requests of a model are numbered from 1")
        model = self.model
        seq = await self._stored_seq(seq_id, operation)
        try:
            request = await encoded_request(model.tenant, model.id, seq, operation)
        except ValueError as error:
            await self._use_up_seq(seq, error, operation_kind(operation))
            raise
        if not await self._is_repeated(request):
            await self._arrive(seq, self._check_and_journal(request, operation))
        return Accepted(request.row.id, model.id)

    async def reject(self, seq_id: int, error: Exception, kind: str) -> None:
        """Use up the number of a request whose body could not be read. `kind` is the kind of the
        request, as in `Done.kind`.
        """
        seq = self._offset_seq(seq_id)
        if 1 <= seq <= _MAX_SEQ:
            await run_uncancelled(self._use_up_seq(seq, error, kind))

    async def unload(self, request: Request) -> None:
        """Journal and queue the unloading of the model, after everything accepted before."""
        previous = self._unload_seq
        self._unload_seq = self._unused_seq if previous is None else previous
        request.row = replace(request.row, seq=self._unload_seq)
        try:
            await run_uncancelled(self._journal(request))
        except (ServerError, StorageError):
            self._unload_seq = previous
            raise

    @property
    def _unused_seq(self) -> int:
        """A number above every number that was used."""
        return max([self.model.queue.unused_seq, *(seq + 1 for seq in self.arriving)])

    def _offset_seq(self, seq_id: int) -> int:
        has_restarted = self.model.queue.skipped_below >= RESTART_OFFSET
        return seq_id + RESTART_OFFSET if has_restarted else seq_id

    async def _stored_seq(self, seq_id: int, operation: Operation[Any]) -> int:
        """Return the number under which the request is stored (the top of this file says why it may
        differ from the client's).
        """
        if seq_id == 1 and (self._unused_seq == 2 or isinstance(operation, LoadWeights)):
            first_row = await self._store.read(journal.request_row, f"{self.model.id}:1")
            if first_row is None or first_row.digest == encode_operation(operation, 1).digest:
                return seq_id
            if first_row.kind == "load_weights" and self._unused_seq == 2:
                skipped_below = RESTART_OFFSET + 1
                await self._store.write(
                    update_row, ModelRow, self.model.id, skipped_below=skipped_below
                )
                self.model.skip_below(skipped_below)
        return self._offset_seq(seq_id)

    async def _arrive(self, seq: int, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which accepts a request, while the present task is in `arriving`."""
        task = asyncio.current_task()
        assert task is not None
        self.arriving[seq] = task
        try:
            await work
        finally:
            del self.arriving[seq]

    async def _is_repeated(self, request: Request) -> bool:
        """Return whether this request was accepted before. Raise BadRequest or Gone if its number
        cannot be used.
        """
        seq = request.row.seq
        while (arriving := self.arriving.get(seq)) is not None:
            await asyncio.wait([arriving])
        if self._unload_seq is not None and seq >= self._unload_seq:
            raise Gone(f"model_id={self.model.id!r} is being unloaded and takes no more requests")
        if not self.model.queue.is_used(seq):
            return False
        if await self._intake.was_accepted(request.row):
            return True
        if seq < self.model.queue.skipped_below:
            raise BadRequest(
                f"seq_id={seq} of {self.model.id!r} came too late and was skipped; "
                "continue with the next sequence number"
            )
        raise Gone(
            f"seq_id={seq} of {self.model.id!r} was answered long ago, and its result was removed"
        )

    async def _check_and_journal(self, request: Request, operation: Operation[Any]) -> None:
        seq, sampler = request.row.seq, None
        try:
            await self._operation_check.check(self.model, operation)
        except (ValueError, ServerError) as error:
            await self._journal_rejected(seq, error, request.row.kind)
            raise
        if isinstance(operation, PublishSampler):
            sampler = _sampler_row(self.model.row, seq, operation)
        await self._journal(request, sampler)

    async def expire_missing_request(self) -> None:
        """If a number has been missing for too long, fail the requests that wait for it."""
        model, now, timeout = self.model, time.monotonic(), self._missing_request_timeout
        if not model.queue.is_blocked:
            self._missing_since = None
        elif self._missing_since is None or self._missing_since[0] != model.queue.next_seq:
            self._missing_since = (model.queue.next_seq, now)
        elif now - self._missing_since[1] >= timeout:
            message = (
                f"seq_id={model.queue.next_seq} of {model.id!r} did not arrive within {timeout:g} "
                "seconds, so the requests after it were not run; continue with the next sequence "
                "number, or create a new client"
            )
            self._missing_since = None
            waiting = [
                item
                for item in model.queue.skip_missing()
                if isinstance(item, Request) and item.row.is_unanswered
            ]
            await self._reject_queued(waiting, Failed(message, "user"))
            model.worker.wake()

    async def _reject_queued(self, requests: Sequence[Request], failure: Failed) -> None:
        """Journal the rejection of queued requests, which will never run. The worker then answers
        each with `failure`.
        """
        skipped_below = self.model.queue.skipped_below

        def record(transaction: Transaction) -> None:
            update_row(transaction, ModelRow, self.model.id, skipped_below=skipped_below)
            for request in requests:
                journal.write_answer(transaction, request.row, failure, time.time())

        for request in requests:
            request.row = replace(
                request.row,
                state="refused",
                message=failure.message,
                category=failure.category,
                error_class=failure.error_class,
            )
        self.model.skip_below(skipped_below)
        await self._store.write_with_retries(record)

    async def _use_up_seq(self, seq: int, error: Exception, kind: str) -> None:
        """Journal a rejected request. Do nothing if its number is used already, or if the model is
        unloaded before this number. The present task must not be cancelled.
        """
        is_late = self._unload_seq is not None and seq >= self._unload_seq
        if not (is_late or self.model.queue.is_used(seq) or seq in self.arriving):
            await self._arrive(seq, self._journal_rejected(seq, error, kind))

    async def _journal_rejected(self, seq: int, error: Exception, kind: str) -> None:
        await self._journal(Request.rejected(self.model.tenant, self.model.id, seq, kind, error))

    async def _journal(self, request: Request, sampler: SamplerRow | None = None) -> None:
        """Write a request to disk, together with the sampler that it publishes, and queue it."""
        transaction_hook: TransactionHook | None = (
            None if sampler is None else lambda transaction: upsert(transaction, sampler)
        )
        if await self._intake.accept(request, transaction_hook):
            if sampler is not None:
                self._samplers.add(sampler, self.model.adapter)
            self.model.enqueue(request)
            if sampler is not None:
                self._sessions.close_members_if_ended(sampler.session)


def _sampler_row(model: ModelRow, seq: int, operation: PublishSampler) -> SamplerRow:
    now = time.time()
    return SamplerRow(
        id=operation.sampler_id,
        tenant=model.tenant,
        session=model.session,
        base_model=model.base_model,
        model_path=None,
        model=model.id,
        seq=seq,
        source=None,
        memory_bytes=model.sampling_bytes,
        created=now,
        used=now,
    )
