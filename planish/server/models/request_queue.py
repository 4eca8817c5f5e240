"""The requests of one model: which requests are accepted, in which order they run, and what is
unfinished.

A rejected request has used up its number, because the client continues with the next one. The
journal records it as refused, so that a replay knows of it: after a refused forward_backward the
next optim_step must fail.

A request may be taken from the queue when all lower numbers were taken. A missing number blocks
the later requests until the model stops waiting for it. From then on the number is skipped, and a
request that arrives with this number is rejected as too late.

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
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from planish.errors import StorageError
from planish.server.durable import journal
from planish.server.durable.checkpoints import check_is_not_private, check_name_is_not_private
from planish.server.durable.journal import RequestRow
from planish.server.durable.records import ModelRow, SamplerRow, select, update_row, upsert
from planish.server.durable.request_log import (
    JournalEntry,
    QueuedRequest,
    TransactionHook,
    encode_request,
    new_request_row,
    run_uncancelled,
)
from planish.server.durable.store import Transaction
from planish.server.results import Accepted, BadRequest, Failed, Gone, ServerError
from planish.server.services import Services
from planish.service import (
    ForwardBackward,
    LoadWeights,
    Operation,
    PublishSampler,
    SaveWeights,
    SaveWeightsForSampler,
    UnloadModel,
)
from planish.wire.client_errors import error_class_name
from planish.wire.operations import operation_kind

if TYPE_CHECKING:
    from planish.server.models.model import ModelActor

R = TypeVar("R")
T = TypeVar("T")

RESTART_OFFSET = 1 << 61
"""Added to the sequence numbers of a client that restarted them."""

QueueItem = QueuedRequest | RequestRow
"""A request to run, or the row of an answered request whose effect must be repeated."""
_MAX_SEQ = 2**62
"""The highest number that a client may use. Above it, the sum of the number and RESTART_OFFSET may
not fit into the 64-bit integers of the database.
"""


class RequestQueue(Generic[T]):
    """Items in the order of their sequence numbers, whatever the order of arrival."""

    def __init__(self, next_seq: int, skipped_below: int = 0) -> None:
        """`next_seq` is the first number that was not taken yet. Missing numbers below
        `skipped_below` are skipped.
        """
        self.next_seq = next_seq
        self.skipped_below = skipped_below
        self._items: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, seq: int, item: T) -> None:
        """Add an item whose number is neither taken nor in the queue."""
        assert seq >= self.next_seq, seq
        assert seq not in self._items, seq
        self._items[seq] = item

    def is_used(self, seq: int) -> bool:
        """Return whether a request with this number arrived, or the number was skipped."""
        return seq < max(self.next_seq, self.skipped_below) or seq in self._items

    @property
    def is_ready(self) -> bool:
        """Whether the next item can be taken."""
        self._skip_missing_seqs()
        return self.next_seq in self._items

    @property
    def is_blocked(self) -> bool:
        """Whether items wait for a missing lower number."""
        return bool(self._items) and not self.is_ready

    @property
    def unused_seq(self) -> int:
        """A number above every number that was used."""
        return max([self.next_seq, self.skipped_below, *(seq + 1 for seq in self._items)])

    def take(self) -> T | None:
        """Remove and return the next item; None if its number is missing."""
        if not self.is_ready:
            return None
        item = self._items.pop(self.next_seq)
        self.next_seq += 1
        return item

    def peek(self) -> T | None:
        """Return the item that `take` would return."""
        return self._items[self.next_seq] if self.is_ready else None

    def skip_missing(self) -> list[T]:
        """Skip every missing number, and return the waiting items in order. All of them are ready
        afterwards.
        """
        self.skipped_below = self.unused_seq
        return [self._items[seq] for seq in sorted(self._items)]

    def _skip_missing_seqs(self) -> None:
        if self.next_seq < self.skipped_below and self.next_seq not in self._items:
            self.next_seq = min(
                [self.skipped_below, *(seq for seq in self._items if seq >= self.next_seq)]
            )


@dataclass(eq=False)
class InFlight:
    """The unfinished work of one model: requests in the engine, and answers and samplers that are
    being written to disk. Each is listed by its sequence number.
    """

    running: dict[int, QueuedRequest] = field(default_factory=dict)
    """Requests that left the queue and have no answer yet."""
    unwritten_answers: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """Answers that are not on disk yet."""
    unsaved_samplers: dict[int, asyncio.Task[Any]] = field(default_factory=dict)
    """Published samplers whose weights are not on disk yet."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def notify(self) -> None:
        """Wake everyone who waits for a change."""
        self._changed.set()

    async def wait_for_change(self) -> None:
        """Wait for the next `notify`."""
        self._changed.clear()
        await self._changed.wait()

    async def wait_below(self, limit: int) -> None:
        """Wait until fewer than `limit` requests run in the engine."""
        while len(self.running) >= limit:
            await self.wait_for_change()

    async def wait_until_idle(self) -> None:
        """Wait until no request runs in the engine."""
        await self.wait_below(1)

    async def wait_for_earlier(self, seq: int) -> None:
        """Wait until no request below `seq` runs in the engine.

        Answers must reach the disk in the order of the requests. Otherwise a crash could keep the
        answer of an optim_step and lose the answer of the forward_backward before it. The
        forward_backward would then run again, and could fail.
        """
        while any(number < seq for number in self.running):
            await self.wait_for_change()

    async def wait_until_durable(self, seq: int) -> None:
        """Wait until the answers and samplers of all requests up to `seq` are on disk."""
        while any(number <= seq for number in (*self.running, *self.unsaved_samplers)):
            await self.wait_for_change()
        await asyncio.gather(
            *(written for number, written in self.unwritten_answers.items() if number <= seq)
        )


@dataclass(eq=False)
class RequestIntake:
    """Decides which requests one model takes, and under which numbers."""

    _model: ModelActor
    _services: Services
    _unload_seq: int | None
    """Requests from this number on are rejected, because the model is being unloaded."""
    arriving: dict[int, asyncio.Task[Any]] = field(default_factory=dict)
    """Requests being checked and journaled, by number."""
    _missing_since: tuple[int, float] | None = None
    """The missing number, and since when the model waits for it."""

    async def submit(self, seq_id: int, operation: Operation[Any]) -> Accepted:
        """Journal and queue an operation, which runs once all lower numbers have run.

        A repeated request, with the same number and operation, returns the same request id. Raise
        BadRequest if another operation has used this number. Raise BadRequest, NotFound or
        UserError if the operation is invalid; its number is then used up. Raise Gone if the model
        or its session has ended.
        """
        if not 1 <= seq_id <= _MAX_SEQ:
            raise BadRequest(f"seq_id={seq_id}: the requests of a model are numbered from 1")
        await self._services.sessions.touch(self._model.tenant, self._model.row.session)
        seq = await self._stored_seq(seq_id, operation)
        accepted = Accepted(f"{self._model.id}:{seq}", self._model.id)
        try:
            entry = await self._services.request_log.encode(operation, seq)
        except ValueError as error:
            await self._use_up_seq(seq, error, operation_kind(operation))
            raise
        if not await self._is_repeated(seq, accepted.request_id, entry.digest):
            await self._run_arrival(seq, self._check_and_journal(seq, operation, entry))
        return accepted

    async def reject(self, seq_id: int, error: Exception, kind: str) -> None:
        """Use up the number of a request whose body could not be read. `kind` is the kind of the
        request, as in `Done.kind`.
        """
        seq = (
            seq_id + RESTART_OFFSET if self._model.queue.skipped_below >= RESTART_OFFSET else seq_id
        )
        if 1 <= seq <= _MAX_SEQ:
            await self._use_up_seq(seq, error, kind)

    async def unload(self, request_id: str, entry: JournalEntry) -> None:
        """Journal and queue the unloading of the model, after everything accepted before."""
        previous = self._unload_seq
        self._unload_seq = self._unused_seq if previous is None else previous
        row = replace(
            new_request_row(self._model.tenant, self._model.id, self._unload_seq, entry),
            id=request_id,
        )
        try:
            await run_uncancelled(self._journal(row, entry))
        except (ServerError, StorageError):
            self._unload_seq = previous
            raise

    @property
    def _unused_seq(self) -> int:
        """A number above every number that was used."""
        return max([self._model.queue.unused_seq, *(seq + 1 for seq in self.arriving)])

    async def _stored_seq(self, seq_id: int, operation: Operation[Any]) -> int:
        """Return the number under which the request is stored (the top of this file says why it may
        differ from the client's).
        """
        if seq_id == 1 and (self._unused_seq == 2 or isinstance(operation, LoadWeights)):
            first_row = await self._services.store.read(journal.request_row, f"{self._model.id}:1")
            if first_row is None or first_row.digest == encode_request(operation, 1).digest:
                return seq_id
            if first_row.kind == "load_weights" and self._unused_seq == 2:
                skipped_below = RESTART_OFFSET + 1
                await self._services.store.write(
                    update_row, ModelRow, self._model.id, skipped_below=skipped_below
                )
                self._model.skip_below(skipped_below)
        return (
            seq_id + RESTART_OFFSET if self._model.queue.skipped_below >= RESTART_OFFSET else seq_id
        )

    async def _run_arrival(self, seq: int, work: Coroutine[Any, Any, R]) -> R:
        """Run `work`, which accepts a request, and return its result. `work` continues even if the
        caller is cancelled, because every journaled request must also be queued.
        """
        task = asyncio.create_task(work)
        self.arriving[seq] = task
        task.add_done_callback(lambda _: self.arriving.pop(seq))
        return await asyncio.shield(task)

    async def _is_repeated(self, seq: int, request_id: str, digest: bytes) -> bool:
        """Return whether this request was accepted before. Raise BadRequest or Gone if its number
        cannot be used.
        """
        while (arriving := self.arriving.get(seq)) is not None:
            await asyncio.wait([arriving])
        if self._unload_seq is not None and seq >= self._unload_seq:
            raise Gone(f"model_id={self._model.id!r} is being unloaded and takes no more requests")
        if not self._model.queue.is_used(seq):
            return False
        if await self._services.request_log.was_accepted(request_id, digest):
            return True
        if seq < self._model.queue.skipped_below:
            raise BadRequest(
                f"seq_id={seq} of {self._model.id!r} came too late and was skipped; "
                "continue with the next sequence number"
            )
        raise Gone(
            f"seq_id={seq} of {self._model.id!r} was answered long ago, and its result was removed"
        )

    async def _check_and_journal(
        self, seq: int, operation: Operation[Any], entry: JournalEntry
    ) -> None:
        try:
            await self._check_operation(operation)
        except (ValueError, ServerError) as error:
            await self._journal_rejected(seq, error, entry.kind)
            raise
        sampler = (
            self._sampler_row(seq, operation) if isinstance(operation, PublishSampler) else None
        )
        await self._journal(
            new_request_row(self._model.tenant, self._model.id, seq, entry), entry, sampler
        )

    async def _check_operation(self, operation: Operation[Any]) -> None:
        """Raise BadRequest, NotFound or UserError if the operation is already known to fail."""
        limit = self._services.settings.max_gradient_request_bytes
        match operation:
            case ForwardBackward(forward_only=False) if self._model.adapter.cost.bytes > limit:
                raise BadRequest(
                    f"model_id={self._model.id!r}: the data of one gradient have "
                    f"{self._model.adapter.cost.bytes:,} bytes, and may have {limit:,}. The next "
                    "optim_step will fail; after it, send less data for each step"
                )
            case SaveWeights(name=name) | SaveWeightsForSampler(name=name):
                check_name_is_not_private(name)
            case LoadWeights(path=path):
                check_is_not_private(path)
                await self._services.checkpoints.readable_row(self._model.tenant, path)
            case PublishSampler(sampler_id=sampler_id):
                if await self._services.store.read(select, SamplerRow, "id = ?", [sampler_id]):
                    raise BadRequest(
                        f"sampling_session_id={sampler_id!r} has already been used; continue with "
                        "the next sequence number"
                    )

    async def expire_missing_request(self) -> None:
        """If a number has been missing for too long, fail the requests that wait for it."""
        now, timeout = time.monotonic(), self._services.settings.missing_request_timeout
        if not self._model.queue.is_blocked:
            self._missing_since = None
        elif self._missing_since is None or self._missing_since[0] != self._model.queue.next_seq:
            self._missing_since = (self._model.queue.next_seq, now)
        elif now - self._missing_since[1] >= timeout:
            message = (
                f"seq_id={self._model.queue.next_seq} of {self._model.id!r} did not arrive within "
                f"{timeout:g} seconds, so the requests after it were not run; continue with the "
                "next sequence number, or create a new client"
            )
            self._missing_since = None
            waiting = [
                item
                for item in self._model.queue.skip_missing()
                if isinstance(item, QueuedRequest) and item.row.is_unanswered
            ]
            await self._refuse(waiting, Failed(message, "user"))
            self._model.wake()

    async def _refuse(self, requests: Sequence[QueuedRequest], failure: Failed) -> None:
        """Record that queued requests will never run. The worker then answers each with
        `failure`.
        """
        skipped_below = self._model.queue.skipped_below

        def refuse(transaction: Transaction) -> None:
            update_row(transaction, ModelRow, self._model.id, skipped_below=skipped_below)
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
        self._model.skip_below(skipped_below)
        await self._services.store.write_with_retries(refuse)

    async def _use_up_seq(self, seq: int, error: Exception, kind: str) -> None:
        """Journal a rejected request. Do nothing if its number is used already, or if the model is
        unloaded before this number.
        """
        is_late = self._unload_seq is not None and seq >= self._unload_seq
        if not (is_late or self._model.queue.is_used(seq) or seq in self.arriving):
            await self._run_arrival(seq, self._journal_rejected(seq, error, kind))

    async def _journal_rejected(self, seq: int, error: Exception, kind: str) -> None:
        row = RequestRow(
            id=f"{self._model.id}:{seq}",
            tenant=self._model.row.tenant,
            kind=kind,
            owner=self._model.id,
            seq=seq,
            state="refused",
            digest=None,
            accepted=time.time(),
            message=str(error),
            category="user",
            error_class=error_class_name(error),
        )
        await self._journal(row, JournalEntry(kind, b"", b"", UnloadModel(self._model.id)))

    async def _journal(
        self, row: RequestRow, entry: JournalEntry, sampler: SamplerRow | None = None
    ) -> None:
        """Write a request to disk, together with the sampler that it publishes, and queue it."""
        transaction_hook: TransactionHook | None = (
            None if sampler is None else lambda transaction: upsert(transaction, sampler)
        )
        request = await self._services.request_log.accept(row, entry, transaction_hook)
        if request is not None:
            if sampler is not None:
                self._services.samplers.add(sampler, self._model)
            self._model.enqueue(request)
            if sampler is not None:
                self._services.sessions.close_members_if_ended(sampler.session)

    def _sampler_row(self, seq: int, operation: PublishSampler) -> SamplerRow:
        now = time.time()
        return SamplerRow(
            id=operation.sampler_id,
            tenant=self._model.row.tenant,
            session=self._model.row.session,
            base_model=self._model.row.base_model,
            model_path=None,
            model=self._model.id,
            seq=seq,
            source=None,
            memory_bytes=self._model.row.sampling_bytes,
            created=now,
            used=now,
        )
