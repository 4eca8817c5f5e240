"""The log of accepted requests. A request is journaled before it is acknowledged, it is answered
once, and its result can be read until the result expires.

Unanswered requests are kept in memory. Their decoded operations are kept too, up to
`request_memory_bytes`. Beyond this limit, an operation is read from the journal when its turn
comes. Each answer is on disk before it is sent. Otherwise a crash could lose an answer that a
client has seen, and the request could fail when it runs again.

Operations and results are stored in the encoding of the wire protocol (planish/wire/operations.py).
An operation has the same encoding whether it arrived as JSON or as protobuf, so a repeated request
has the same digest. A seed that the server chose is part of the stored body, but not of the digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import sqlite3
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from planish.errors import DamagedFileError, StorageError, is_out_of_memory, shortened
from planish.server.durable import journal
from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.crash_points import crash_point
from planish.server.durable.failed_requests import FailedRequests
from planish.server.durable.journal import RequestRow
from planish.server.durable.records import update_row
from planish.server.durable.retries import DiskFaults, retry_briefly
from planish.server.durable.store import BODIES, DATABASE, Store, Transaction
from planish.server.metrics import Counters
from planish.server.results import (
    OUT_OF_MEMORY,
    BadRequest,
    Category,
    Done,
    Failed,
    Gone,
    NotFound,
    Outcome,
    Tenant,
    TooManyRequests,
    TryAgain,
    Unavailable,
)
from planish.server.settings import ServerSettings, TenantSettings
from planish.service import CreateModel, ForwardBackward, Operation, Sample
from planish.wire.client_errors import error_class_name
from planish.wire.operations import (
    operation_from_bytes,
    operation_kind,
    operation_to_bytes,
    result_to_bytes,
)
from planish.wire.sampling import target_count

R = TypeVar("R")

_MAX_INLINE_TOKENS = 4096
"""Requests with more tokens than this are encoded in a thread."""
_RETRY_SECONDS = 10.0
_UNRESTORED_POLL_SECONDS = 0.5
"""How long a poll waits if the request is in the journal, but not in memory yet. This happens while
the server restores the requests of an earlier process.
"""
_ANSWER_OVERHEAD_BYTES = 500
"""Estimated memory of an answer in addition to its content."""


_log = logging.getLogger(__name__)

TransactionHook = Callable[[Transaction], None]
"""A function that adds further changes to the transaction that writes a request or an answer."""
SettledState = Literal["done", "failed", "refused"]


@dataclass(eq=False)
class QueuedRequest:
    """A request that is unanswered, or whose answer is not on disk yet."""

    row: RequestRow
    operation: Operation[Any] | None
    answer: asyncio.Future[Done | Failed] = field(default_factory=asyncio.Future)
    """Done when the answer may be sent to the client."""
    journaled: asyncio.Future[None] = field(default_factory=asyncio.Future)
    """Done when the request is in the journal. It has an exception if that failed."""
    num_input_tokens: int = 0
    """The number of input tokens of the operation (see `input_token_count`)."""
    num_sequences: int = 0
    """The number of sequences that a sample request generates. It is 0 for other requests, and for
    a request of an earlier process until its operation is read.
    """
    answer_written: asyncio.Future[None] | None = None
    """Done when the answer is on disk."""

    @property
    def id(self) -> str:
        """The id of the request."""
        return self.row.id

    @property
    def seq(self) -> int:
        """The sequence number of the request."""
        return self.row.seq

    @property
    def is_rejected(self) -> bool:
        """Whether the request was rejected when it arrived. In this case, the row was inserted with
        the error message.
        """
        return self.row.state == "refused" and self.row.digest is None

    def set_counts(self, operation: Operation[Any]) -> None:
        """Set `num_input_tokens` and `num_sequences` from the operation."""
        self.num_input_tokens = input_token_count(operation)
        self.num_sequences = operation.num_samples if isinstance(operation, Sample) else 0


def input_token_count(operation: Operation[Any]) -> int:
    """Return the number of input tokens of an operation. Sampled tokens are not counted, because
    their number is not known in advance.
    """
    match operation:
        case ForwardBackward():
            return operation.num_tokens
        case Sample():
            return operation.prompt.length
    return 0


@dataclass(eq=False)
class RequestLog:
    """Accepts and answers requests. It keeps the unanswered requests and a cache of recent
    answers.
    """

    _store: Store
    _settings: ServerSettings
    _limits: TenantLimits
    _counters: Counters
    _crash_guard: CrashGuard
    failed_requests: FailedRequests
    disk_faults: DiskFaults = field(default_factory=DiskFaults)
    operation_bytes: int = 0
    """The size of the journaled bodies of all requests whose decoded operation is in memory."""
    recent_answer_bytes: int = 0
    """The estimated memory of the recent answers."""
    _active: dict[str, QueuedRequest] = field(default_factory=dict)
    _recent_answers: OrderedDict[str, tuple[str, Done | Failed]] = field(
        default_factory=OrderedDict
    )
    """The tenant and the answer of recent requests, by request id. All these answers are on
    disk.
    """
    _disk_was_full: bool = False
    """Whether the last request was rejected for lack of disk space."""

    def queued_counts(self) -> Counter[tuple[str, str]]:
        """Return the number of unanswered requests, by (kind, tenant)."""
        open_rows = [
            request.row for request in self._active.values() if request.answer_written is None
        ]
        return Counter((row.kind, row.tenant) for row in open_rows)

    async def encode(self, operation: Operation[Any], seq: int) -> JournalEntry:
        """Encode an operation for the journal. Raise ValueError if it is invalid."""
        # Datums without tokens take time too, so every ForwardBackward is encoded in a thread.
        if not isinstance(operation, ForwardBackward):
            num_targets = target_count(operation) if isinstance(operation, Sample) else 0
            if input_token_count(operation) + num_targets <= _MAX_INLINE_TOKENS:
                return encode_request(operation, seq)

        def encode() -> JournalEntry:
            input_token_count(operation)  # caches the count, so the event loop need not count
            return encode_request(operation, seq)

        return await asyncio.to_thread(encode)

    async def was_accepted(self, request_id: str, digest: bytes) -> bool:
        """Return whether the same request was accepted before. Raise BadRequest if a different
        request has this id, or if the earlier request was rejected.
        """
        active = self._active.get(request_id)
        if active is not None:
            _check_same_request(active.row, digest)
            await asyncio.shield(active.journaled)
            return True
        row = await self._store.read(journal.request_row, request_id)
        if row is not None:
            _check_same_request(row, digest)
        return row is not None

    async def accept(
        self, row: RequestRow, entry: JournalEntry, transaction_hook: TransactionHook | None = None
    ) -> QueuedRequest | None:
        """Journal a request. Return None if the same request was journaled before. `transaction_hook` is
        called in the same transaction.

        Raise BadRequest if a different request has this id. Raise TooManyRequests or Unavailable,
        before anything is written, if the tenant's limits or the disk allow no new request.
        """
        is_rejected = row.state == "refused"
        if is_rejected:
            await self.failed_requests.check(row.tenant)
        active = self._active.get(row.id)
        if active is not None:
            _check_same_request(active.row, row.digest)
            await asyncio.shield(active.journaled)
            return None
        self.check_capacity(row.tenant, len(entry.body))
        request = QueuedRequest(row, entry.operation)
        request.set_counts(entry.operation)
        self._active[row.id] = request
        self._limits.add_request(row.tenant, row.body_bytes)
        try:
            existing_row = await self._store.write(
                insert_request, row, entry.body, transaction_hook
            )
        except BaseException as error:
            self._drop(request)
            request.journaled.set_exception(
                error
                if isinstance(error, Exception)
                else Unavailable("the request was cancelled; send it again")
            )
            # asyncio would log the exception if no caller waits for `journaled`. So read it.
            request.journaled.exception()
            raise
        if existing_row is not None:
            self._drop(request)
            request.journaled.set_result(None)
            _check_same_request(existing_row, row.digest)
            return None
        if is_rejected:
            self.failed_requests.add(row.tenant, row.message)
        self._limits.use_tokens(row.tenant, request.num_input_tokens)
        self._counters.accepted_requests[row.kind] += 1
        self._keep_operation(request)
        request.journaled.set_result(None)
        crash_point("before acknowledging")
        return request

    def restore(self, row: RequestRow) -> QueuedRequest:
        """Put an unanswered request of an earlier process into memory, and return it as a
        QueuedRequest.
        """
        request = QueuedRequest(row, None)
        request.journaled.set_result(None)
        self._active[row.id] = request
        self._limits.add_request(row.tenant, row.body_bytes)
        return request

    async def operation(self, request: QueuedRequest) -> Operation[Any]:
        """Return the operation of a request, from memory or from the journal. If the disk fails,
        wait until it works.
        """
        if request.operation is not None:
            return request.operation

        async def read() -> Operation[Any]:
            async with self._crash_guard.reading(request.id):
                return await retry_briefly(lambda: self.read_operation(request.row), request.id)

        return await self.disk_faults.retry_until_fixed(read, request.row.owner)

    async def read_operation(self, row: RequestRow) -> Operation[Any]:
        """Read the operation of a row from the journal. Raise DamagedFileError if the stored body
        is missing or was altered.
        """

        def read(connection: sqlite3.Connection) -> Operation[Any]:
            stored = journal.stored_body(connection, row.id)
            location = DATABASE if stored.file is None else f"{BODIES}/{stored.file}"
            try:
                content = self._store.read_body(stored)
            except FileNotFoundError:
                raise _damaged_request(row, location, "is missing") from None
            if not is_unaltered(row.kind, content, row.digest):
                raise _damaged_request(row, location, "was altered")
            return operation_from_bytes(row.kind, content)

        return await self._store.read(read)

    def release_operation(self, request: QueuedRequest) -> None:
        """Drop the decoded operation of a request, once the operation is submitted or not
        needed.
        """
        if request.operation is not None:
            self.operation_bytes -= request.row.body_bytes
            request.operation = None

    async def set_state(self, request: QueuedRequest, state: str) -> None:
        """Set the state of a request. The state is on disk when this returns."""
        await self._store.write_with_retries(update_row, RequestRow, request.id, state=state)
        request.row = request.row.with_state(state)

    def settle(
        self,
        request: QueuedRequest,
        answer: Done | Failed,
        transaction_hook: TransactionHook | None = None,
        state: SettledState | None = None,
    ) -> asyncio.Future[None]:
        """Write the answer of a request to disk, and send it once it is there. `transaction_hook` is
        called in the same transaction. The returned future is done when the answer is on disk. Only
        the first answer of a request counts. By default, `state` is "done" for a result and
        "failed" for a failure.
        """
        if request.answer_written is not None:
            return request.answer_written
        crash_point("before recording a result")
        self.release_operation(request)
        self._limits.remove_request(request.row.tenant, request.row.body_bytes)
        if isinstance(answer, Failed) and not request.is_rejected:
            self.failed_requests.add(request.row.tenant, answer.message)
        request.row = request.row.with_state(
            state or ("done" if isinstance(answer, Done) else "failed")
        )
        row = request.row
        self._counters.answered_requests[row.kind, row.state] += 1
        written = self._store.write_with_retries(
            journal.write_answer, row, answer, time.time(), transaction_hook
        )
        request.answer_written = asyncio.ensure_future(
            self._send_when_written(request, answer, written)
        )
        return request.answer_written

    async def outcome(self, tenant: Tenant, request_id: str, seconds: float) -> Outcome:
        """Wait up to `seconds` for the answer. Return the answer, or TryAgain if there is none yet.
        Raise NotFound if there is no such request, and Gone if its result has expired.
        """
        request = self._active.get(request_id)
        if request is not None and request.row.tenant == tenant.name:
            if not request.answer.done():
                await asyncio.wait([request.answer], timeout=seconds)
            return request.answer.result() if request.answer.done() else TryAgain()
        recent = self._recent_answers.get(request_id)
        if recent is not None and recent[0] == tenant.name:
            self._recent_answers.move_to_end(request_id)
            return recent[1]
        stored = await self._store.read(self._stored_answer, tenant.name, request_id)
        if isinstance(stored, TryAgain):
            await asyncio.sleep(min(seconds, _UNRESTORED_POLL_SECONDS))
        return stored

    def active(self, request_id: str) -> QueuedRequest | None:
        """Return a request that is in memory; None if the request is unknown or its answer is on
        disk.
        """
        return self._active.get(request_id)

    def _stored_answer(
        self, connection: sqlite3.Connection, tenant: str, request_id: str
    ) -> Outcome:
        row = journal.request_row(connection, request_id)
        if row is None and journal.is_owner(connection, tenant, request_id.rpartition(":")[0]):
            raise _expired_result(request_id)
        if row is None or row.tenant != tenant:
            raise NotFound(f"request_id={request_id[:200]!r}: there is no such request")
        match row.state:
            case "done":
                result = journal.stored_result(connection, request_id)
                if result is None:
                    raise _expired_result(request_id)
                try:
                    return done_from_bytes(row.kind, self._store.read_body(result))
                except FileNotFoundError:  # the result expired after the row was read
                    raise _expired_result(request_id) from None
            case "failed" | "refused":
                return row.failure
        return TryAgain()  # the recovery has not put the request into memory yet

    async def _send_when_written(
        self, request: QueuedRequest, answer: Done | Failed, written: asyncio.Future[None]
    ) -> None:
        try:
            await written
        except StorageError:  # the process is ending, and the next start runs the request again
            _log.warning("the answer of %s is not on disk", request.id)
            return
        request.answer.set_result(answer)
        if self._active.get(request.id) is request:
            del self._active[request.id]
        self._recent_answers[request.id] = (request.row.tenant, answer)
        self.recent_answer_bytes += _answer_bytes(answer)
        while (
            self.recent_answer_bytes > self._settings.result_memory_bytes
            and len(self._recent_answers) > 1
        ):
            _, (_, oldest) = self._recent_answers.popitem(last=False)
            self.recent_answer_bytes -= _answer_bytes(oldest)

    def check_capacity(self, tenant: str, size: int) -> None:
        """Raise an error if a request of `size` bytes cannot be accepted: TooManyRequests because
        of the tenant's limits, Unavailable because of the disk.
        """
        self._limits.check(tenant, size)
        self.check_disk(size)

    def check_disk(self, size: int) -> None:
        """Raise Unavailable if the disk has no space for `size` bytes, or if the last write failed
        because of the disk or memory.
        """
        is_full = self.disk_is_full(size)
        is_reported = self._store.is_failing or self.disk_faults.are_widespread
        if is_full and not self._disk_was_full and not is_reported:
            free, directory = self._store.free_bytes(), self._store.directory
            _log.error(
                "no new work is accepted until there is space: %s bytes are free in %s%s, and the "
                "server keeps %s bytes free (min_free_disk_bytes)",
                f"{free:,}",
                directory,
                "" if directory.is_dir() else " (the directory is missing; restore it)",
                f"{self._settings.min_free_disk_bytes:,}",
            )
        self._disk_was_full = is_full
        if self.lacks_memory:
            raise Unavailable(OUT_OF_MEMORY, _RETRY_SECONDS)
        if is_full:
            raise Unavailable(
                "the server's disk is full or broken. Until that ends, the server "
                "accepts no new work; it keeps the requests that it has accepted",
                _RETRY_SECONDS,
            )

    def disk_is_full(self, size: int = 0) -> bool:
        """Return whether a request of `size` bytes must be rejected, because the disk is full or
        broken. This reads the disk.
        """
        return (
            self._store.is_failing
            or self.disk_faults.are_widespread
            or self._store.free_bytes() < self._settings.min_free_disk_bytes + size
        )

    @property
    def lacks_memory(self) -> bool:
        """Whether the last write to the database failed because of a lack of memory."""
        return self._store.lacks_memory

    def _keep_operation(self, request: QueuedRequest) -> None:
        if self.operation_bytes + request.row.body_bytes > self._settings.request_memory_bytes:
            request.operation = None
        else:
            self.operation_bytes += request.row.body_bytes

    def _drop(self, request: QueuedRequest) -> None:
        del self._active[request.id]
        self._limits.remove_request(request.row.tenant, request.row.body_bytes)


def _check_same_request(row: RequestRow, digest: bytes | None) -> None:
    if row.state == "refused" and row.digest is None:
        raise BadRequest(row.message or "the request with this number was rejected")
    if row.digest != digest:
        raise BadRequest(
            f"seq_id={row.seq} has already been used by a different request of {row.owner!r}; "
            "continue with the next sequence number"
        )


def _damaged_request(row: RequestRow, location: str, problem: str) -> DamagedFileError:
    return DamagedFileError(
        f"the data of request {row.id} {problem} ({location} in the server's data directory; a "
        "backup may have it)"
    )


def _expired_result(request_id: str) -> Gone:
    return Gone(f"request_id={request_id!r}: its result has expired and was removed")


def _answer_bytes(answer: Done | Failed) -> int:
    return _ANSWER_OVERHEAD_BYTES + len(
        answer.content if isinstance(answer, Done) else answer.message
    )


_SEED_BITS = 62
_SEEDED_KINDS = ("create_model", "sample")
"""Kinds whose stored bodies may contain a seed from the server. Their digests do not include it."""


@dataclass(frozen=True)
class JournalEntry:
    """One request, encoded for the journal."""

    kind: str
    body: bytes
    digest: bytes
    operation: Operation[Any]
    """The operation with the seed that it will run with."""


def encode_request(operation: Operation[Any], seq_id: int) -> JournalEntry:
    """Encode a request. The time is proportional to its size, so encode large requests in a
    thread.
    """
    kind, body = operation_kind(operation), _encode_operation(operation, seq_id)
    digest = _digest(kind, body)
    seeded = _with_seed(operation)
    if seeded is not operation:
        body = _encode_operation(seeded, seq_id)
    return JournalEntry(kind, body, digest, seeded)


def is_unaltered(kind: str, body: bytes, digest: bytes | None) -> bool:
    """Return whether a body still has the digest of its journal row. A body that may contain a seed
    from the server cannot be checked, and counts as unchanged.
    """
    return kind in _SEEDED_KINDS or digest is None or _digest(kind, body) == digest


def _digest(kind: str, body: bytes) -> bytes:
    return hashlib.blake2b(kind.encode() + body, digest_size=16).digest()


def _with_seed(operation: Operation[Any]) -> Operation[Any]:
    """Return the operation with a random seed if it needs a seed and has none. The seed is
    journaled. So if the request runs again after a crash, it samples the same tokens, or
    initializes the adapter with the same weights.
    """
    match operation:
        case Sample(sampling_params=params) if params.seed is None:
            return replace(
                operation, sampling_params=replace(params, seed=secrets.randbits(_SEED_BITS))
            )
        case CreateModel(lora=lora, from_path=None) if lora.seed is None:
            return replace(operation, lora=replace(lora, seed=secrets.randbits(_SEED_BITS)))
    return operation


def _encode_operation(operation: Operation[Any], seq_id: int) -> bytes:
    # A seq_id can exceed the 32 bits of the protobuf field. The row stores the real number, so the
    # message always contains 1.
    return operation_to_bytes(operation, 1 if isinstance(operation, ForwardBackward) else seq_id)


def done_from_result(operation: Operation[Any], result: Any) -> Done:
    """Encode the result of an operation."""
    return done_from_bytes(operation_kind(operation), result_to_bytes(operation, result))


def done_from_bytes(kind: str, content: bytes) -> Done:
    """Return the Done for the encoded result of a request of this kind."""
    media = "protobuf" if kind in ("forward", "forward_backward", "sample") else "json"
    return Done("save_weights_for_sampler" if kind == "publish_sampler" else kind, media, content)


def insert_request(
    transaction: Transaction,
    row: RequestRow,
    body: bytes,
    transaction_hook: Callable[[Transaction], None] | None = None,
) -> RequestRow | None:
    """Journal a new or rejected request with its body, and call `transaction_hook` in the same
    transaction. If the id is taken, write nothing and return the row that has this id. Otherwise
    return None.
    """
    if row.message is not None:
        row = replace(row, message=shortened(row.message))
    finished = row.accepted if row.state == "refused" else None
    stored = transaction.store_body(body)
    values = [*vars(row).values(), finished, stored.inline, stored.file]
    inserted = transaction.execute(
        f"INSERT INTO requests ({', '.join(vars(row))}, finished, body, body_file) "
        f"VALUES ({', '.join('?' * len(values))}) ON CONFLICT (id) DO NOTHING",
        values,
    )
    if not inserted.rowcount:
        transaction.drop_file(stored.file)
        return journal.request_row(transaction, row.id)
    if transaction_hook is not None:
        transaction_hook(transaction)
    return None


def new_request_row(tenant: Tenant, owner: str, seq: int, entry: JournalEntry) -> RequestRow:
    """Return the row of a request that is about to be journaled."""
    return RequestRow(
        id=f"{owner}:{seq}",
        tenant=tenant.name,
        kind=entry.kind,
        owner=owner,
        seq=seq,
        state="accepted",
        digest=entry.digest,
        accepted=time.time(),
        body_bytes=len(entry.body),
    )


async def run_uncancelled(work: Coroutine[Any, Any, R]) -> R:
    """Await `work`, which continues even if the caller is cancelled. Otherwise a cancellation could
    leave a request in the journal that is never queued.
    """
    return await asyncio.shield(asyncio.create_task(work))


def failed_from_error(error: Exception) -> Failed:
    """Return the answer that reports an error to the client."""
    category: Category = "user" if isinstance(error, ValueError) else "server"
    message = str(error)
    if is_out_of_memory(error):
        message = f"{OUT_OF_MEMORY} ({message})" if message else OUT_OF_MEMORY
    message = "\n".join([message or type(error).__name__, *getattr(error, "__notes__", ())])
    return Failed(message, category, error_class_name(error))


_MINUTE = 60.0
_BUSY_SECONDS = 1.0


@dataclass
class _TenantUsage:
    """The unanswered requests and the token budget of one tenant."""

    num_requests: int = 0
    body_bytes: int = 0
    token_budget: float = 0.0
    """Tokens that may be used now. The number is negative after the tenant exceeded its limit."""
    updated: float = 0.0
    """The time of the clock at which `token_budget` was last updated."""


class TenantLimits:
    """Limits the unanswered requests, their bytes, and the tokens per minute of each tenant."""

    def __init__(
        self, settings: TenantSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`settings` contains the limits. `clock` returns seconds."""
        self._settings = settings
        self._clock = clock
        self._usage_by_tenant: dict[str, _TenantUsage] = {}

    def check(self, tenant: str, size: int) -> None:
        """Raise TooManyRequests if a request of `size` bytes cannot be accepted now."""
        usage, settings = self._usage(tenant), self._settings
        if usage.num_requests >= settings.max_queued_requests:
            raise TooManyRequests(
                f"{usage.num_requests:,} requests of this tenant are unanswered, which is the "
                "limit (max_queued_requests); wait until some are answered",
                _BUSY_SECONDS,
            )
        if usage.num_requests and usage.body_bytes + size > settings.max_queued_bytes:
            raise TooManyRequests(
                f"the unanswered requests of this tenant have {usage.body_bytes:,} bytes, and the "
                f"limit is {settings.max_queued_bytes:,} (max_queued_bytes); wait until some are "
                "answered",
                _BUSY_SECONDS,
            )
        if usage.token_budget < 0:
            rate = settings.max_tokens_per_minute
            raise TooManyRequests(
                f"this tenant may use {rate:,} tokens per minute (max_tokens_per_minute), and has "
                "used more; wait",
                _MINUTE * -usage.token_budget / rate,
            )

    def add_request(self, tenant: str, size: int) -> None:
        """Count an accepted request."""
        usage = self._usage(tenant)
        usage.num_requests += 1
        usage.body_bytes += size

    def remove_request(self, tenant: str, size: int) -> None:
        """Count a request as answered."""
        usage = self._usage(tenant)
        usage.num_requests -= 1
        usage.body_bytes -= size

    def use_tokens(self, tenant: str, tokens: int) -> None:
        """Subtract `tokens` from the token budget of the tenant."""
        self._usage(tenant).token_budget -= tokens

    def unanswered_by_tenant(self) -> dict[str, int]:
        """Return the number of unanswered requests, by tenant."""
        return {
            tenant: usage.num_requests
            for tenant, usage in self._usage_by_tenant.items()
            if usage.num_requests
        }

    def _usage(self, tenant: str) -> _TenantUsage:
        now, rate = self._clock(), self._settings.max_tokens_per_minute
        usage = self._usage_by_tenant.setdefault(
            tenant, _TenantUsage(token_budget=rate, updated=now)
        )
        usage.token_budget = min(rate, usage.token_budget + rate * (now - usage.updated) / _MINUTE)
        usage.updated = now
        return usage
