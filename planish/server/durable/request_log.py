"""Accepted requests: journaled before they are acknowledged, answered once, and readable until they
have aged.

A request that is not answered is in memory, with its operation as long as there is room for it;
otherwise the operation is read from the journal when its turn comes. A result is given out when it
is there and written down behind that: after a crash the request is done again, with the same
result. A failure is written down first, since what failed once may not fail again.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from planish.errors import DamagedFileError, StorageError
from planish.server.durable import journal
from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.journal import (
    JournalEntry,
    RequestRow,
    done_of,
    entry,
    is_as_written,
    operation_of,
)
from planish.server.durable.store import BODIES, DATABASE, Store, Transaction, crash_point
from planish.server.metrics import Counters
from planish.server.results import (
    BadRequest,
    Category,
    Done,
    Failed,
    Gone,
    NotFound,
    Outcome,
    TooManyRequests,
    TryAgain,
    Unavailable,
)
from planish.server.settings import ServerSettings
from planish.service import ForwardBackward, Operation, Sample
from planish.wire.client_errors import name_of
from planish.wire.sampling import targets_of

_INLINE_TOKENS = 4096
_RETRY_SECONDS = 10.0
_UNKNOWN_SECONDS = 0.5
"""A client waits so long for what this process has not heard of yet."""
_ANSWER_BYTES = 500
"""That an answer takes in memory beside its content."""

_log = logging.getLogger(__name__)

Also = Callable[[Transaction], None]
"""What is written in the same transaction."""
SettledState = Literal["done", "failed", "refused"]


@dataclass(eq=False)
class Request:
    """One request that is not answered yet, or whose answer is not on disk yet."""

    row: RequestRow
    operation: Operation[Any] | None
    answer: asyncio.Future[Done | Failed]
    acknowledged: asyncio.Future[None]
    tokens: int = 0
    sequences: int = 0
    """That a sample draws; 0 for what an earlier process took, until it is read."""
    written: asyncio.Future[None] | None = None
    """Its answer is on disk."""

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def seq(self) -> int:
        return self.row.seq

    def measure(self, operation: Operation[Any]) -> None:
        self.tokens = token_count(operation)
        self.sequences = operation.num_samples if isinstance(operation, Sample) else 0


def token_count(operation: Operation[Any]) -> int:
    """Tokens that are known to be computed for an operation."""
    match operation:
        case ForwardBackward():
            return sum(datum.model_input.length for datum in operation.data)
        case Sample():
            return operation.prompt.length
    return 0


class RequestLog:
    def __init__(
        self,
        store: Store,
        settings: ServerSettings,
        limits: TenantLimits,
        counters: Counters,
        under_way: CrashGuard,
    ) -> None:
        self._store = store
        self._under_way = under_way
        self._settings = settings
        self._limits = limits
        self._counters = counters
        self._active: dict[str, Request] = {}
        self._operation_bytes = 0
        self._recent: OrderedDict[str, tuple[str, Done | Failed]] = OrderedDict()
        """Answers on disk that were given last, with their tenants."""
        self._recent_bytes = 0
        self._was_full = False
        """Whether the last request was refused for want of space."""

    @property
    def unanswered(self) -> int:
        return sum(not request.answer.done() for request in self._active.values())

    def queued(self) -> Counter[tuple[str, str]]:
        """RequestLog that are not answered, by kind and tenant."""
        open_rows = [request.row for request in self._active.values() if request.written is None]
        return Counter((row.kind, row.tenant) for row in open_rows)

    @property
    def operation_bytes(self) -> int:
        """Of requests that are kept decoded."""
        return self._operation_bytes

    @property
    def recent_bytes(self) -> int:
        """Of answers that are kept in memory."""
        return self._recent_bytes

    async def encoded(self, operation: Operation[Any], seq: int) -> JournalEntry:
        asked = targets_of(operation) if isinstance(operation, Sample) else 0
        if token_count(operation) + asked <= _INLINE_TOKENS:
            return entry(operation, seq)
        return await asyncio.to_thread(entry, operation, seq)

    async def repeats(self, request_id: str, digest: bytes) -> bool:
        """Whether this very request came before, and is not forgotten. BadRequest if it was another
        one, or was refused.
        """
        active = self._active.get(request_id)
        if active is not None:
            _check_same(active.row, digest)
            await asyncio.shield(active.acknowledged)
            return True
        row = await self._store.read(lambda connection: journal.row(connection, request_id))
        if row is not None:
            _check_same(row, digest)
        return row is not None

    async def accept(
        self, row: RequestRow, journaled: JournalEntry, also: Also | None = None
    ) -> Request | None:
        """Journal a request; None if its id was there already, for the same request (BadRequest:
        for another).

        Raises TooManyRequests and Unavailable before anything is written.
        """
        known = self._active.get(row.id)
        if known is not None:
            _check_same(known.row, row.digest)
            await asyncio.shield(known.acknowledged)
            return None
        self.check_room(row.tenant, len(journaled.body))
        loop = asyncio.get_running_loop()
        request = Request(row, journaled.operation, loop.create_future(), loop.create_future())
        request.measure(journaled.operation)
        self._active[row.id] = request
        self._limits.enter(row.tenant, row.body_bytes)
        try:
            found = await self._store.write(
                lambda transaction: journal.insert(transaction, row, journaled.body, also)
            )
        except BaseException as error:
            self._drop(request)
            request.acknowledged.set_exception(
                error
                if isinstance(error, Exception)
                else Unavailable("it was given up; send it again")
            )
            request.acknowledged.exception()  # nobody has to ask for it
            raise
        if found is not None:
            self._drop(request)
            request.acknowledged.set_result(None)
            _check_same(found, row.digest)
            return None
        self._limits.use(row.tenant, request.tokens)
        self._counters.accepted[row.kind] += 1
        self._keep_operation(request)
        request.acknowledged.set_result(None)
        crash_point("before acknowledging")
        return request

    def restore(self, row: RequestRow) -> Request:
        """An unanswered request of an earlier process."""
        loop = asyncio.get_running_loop()
        request = Request(row, None, loop.create_future(), loop.create_future())
        request.acknowledged.set_result(None)
        self._active[row.id] = request
        self._limits.enter(row.tenant, row.body_bytes)
        return request

    async def operation(self, request: Request) -> Operation[Any]:
        """What is to be done, from memory or from the journal."""
        if request.operation is not None:
            return request.operation
        async with self._under_way.reading(request.id):
            return await self.journaled_operation(request.row)

    async def journaled_operation(self, row: RequestRow) -> Operation[Any]:
        """What a row asks for. DamagedFileError if that is not what was written."""

        def read(connection: sqlite3.Connection) -> Operation[Any]:
            stored = journal.body(connection, row.id)
            place = DATABASE if stored.file is None else f"{BODIES}/{stored.file}"
            try:
                content = self._store.body(stored)
            except FileNotFoundError:
                raise _damaged_request(row, place, "is missing") from None
            if not is_as_written(row.kind, content, row.digest):
                raise _damaged_request(row, place, "is not what was written")
            return operation_of(row.kind, content)

        return await self._store.read(read)

    def release_operation(self, request: Request) -> None:
        """It is with the engine now."""
        if request.operation is not None:
            self._operation_bytes -= request.row.body_bytes
            request.operation = None

    async def mark(self, request: Request, state: str) -> None:
        """Write down how far it is, before what comes next is done."""
        await self._store.keep(lambda transaction: journal.mark(transaction, request.id, state))
        request.row = request.row.with_state(state)

    def settle(
        self,
        request: Request,
        answer: Done | Failed,
        also: Also | None = None,
        state: SettledState | None = None,
    ) -> asyncio.Future[None]:
        """Give the answer out, and write it down as soon as the disk takes it, which ends the
        future. The first answer counts.

        A failure, and with `also` what the answer names, is in the database first. `state`: "done"
        or "failed" by default.
        """
        if request.written is not None:
            return request.written
        crash_point("before recording a result")
        self.release_operation(request)
        self._limits.leave(request.row.tenant, request.row.body_bytes)
        request.row = request.row.with_state(
            state or ("done" if isinstance(answer, Done) else "failed")
        )
        row = request.row
        self._counters.answered[row.kind, row.state] += 1
        if also is None and isinstance(answer, Done):
            request.answer.set_result(answer)
        written = self._store.keep(
            lambda transaction: journal.finish(transaction, row, answer, time.time(), also)
        )
        request.written = asyncio.ensure_future(self._written(request, answer, written))
        return request.written

    async def outcome(self, tenant: str, request_id: str, seconds: float) -> Outcome:
        """Wait for the answer. NotFound if there is no such request; Gone if it was answered so
        long ago that it is forgotten.
        """
        request = self._active.get(request_id)
        if request is not None and request.row.tenant == tenant:
            if not request.answer.done():
                await asyncio.wait([request.answer], timeout=seconds)
            return request.answer.result() if request.answer.done() else TryAgain()
        found = self._recent.get(request_id)
        if found is not None and found[0] == tenant:
            self._recent.move_to_end(request_id)
            return found[1]
        stored = await self._store.read(
            lambda connection: self._stored_answer(connection, tenant, request_id)
        )
        if isinstance(stored, TryAgain):
            await asyncio.sleep(min(seconds, _UNKNOWN_SECONDS))
        return stored

    def active(self, request_id: str) -> Request | None:
        return self._active.get(request_id)

    def _stored_answer(
        self, connection: sqlite3.Connection, tenant: str, request_id: str
    ) -> Outcome:
        row = journal.row(connection, request_id)
        if row is None and journal.is_owner(connection, tenant, request_id.rpartition(":")[0]):
            raise _aged(request_id)
        if row is None or row.tenant != tenant:
            raise NotFound(f"request_id={request_id[:200]!r}: there is no such request")
        match row.state:
            case "done":
                result = journal.result(connection, request_id)
                if result is None:
                    raise _aged(request_id)
                try:
                    return done_of(row.kind, self._store.body(result))
                except FileNotFoundError:  # it aged between the two looks
                    raise _aged(request_id) from None
            case "failed" | "refused":
                return Failed(row.message or "", row.category or "unknown", row.error_class)
        return TryAgain()  # between the journal and memory, at a start

    async def _written(
        self, request: Request, answer: Done | Failed, written: asyncio.Future[None]
    ) -> None:
        try:
            await written
        except StorageError:  # at the end of the process: it is done again at the next start
            _log.warning("the answer of %s is not on disk", request.id)
            return
        if not request.answer.done():
            request.answer.set_result(answer)
        if self._active.get(request.id) is request:
            del self._active[request.id]
        self._recent[request.id] = (request.row.tenant, answer)
        self._recent_bytes += _answer_bytes(answer)
        while self._recent_bytes > self._settings.result_memory_bytes and len(self._recent) > 1:
            _, (_, old) = self._recent.popitem(last=False)
            self._recent_bytes -= _answer_bytes(old)

    def check_room(self, tenant: str, size: int) -> None:
        """TooManyRequests or Unavailable if nothing more can be taken now."""
        self._limits.check(tenant, size)
        is_full = self.disk_is_full(size)
        if is_full and not self._was_full and not self._store.is_refused:
            free, directory = self._store.free_bytes(), self._store.directory
            _log.error(
                "nothing new is taken until there is space: %s bytes are free in %s%s, of which %s are left alone (reserve_bytes)",
                f"{free:,}",
                directory,
                "" if directory.is_dir() else " (which is not there any more; put it back)",
                f"{self._settings.reserve_bytes:,}",
            )
        self._was_full = is_full
        if is_full:
            raise Unavailable(
                "the server's disk is full or refuses to be written, and no new work is taken until it does again; what was accepted is kept",
                _RETRY_SECONDS,
            )

    def disk_is_full(self, size: int = 0) -> bool:
        """Whether a request of so many bytes is refused for want of space."""
        return (
            self._store.is_refused or self._store.free_bytes() < self._settings.reserve_bytes + size
        )

    def _keep_operation(self, request: Request) -> None:
        if self._operation_bytes + request.row.body_bytes > self._settings.request_memory_bytes:
            request.operation = None
        else:
            self._operation_bytes += request.row.body_bytes

    def _drop(self, request: Request) -> None:
        del self._active[request.id]
        self._limits.leave(request.row.tenant, request.row.body_bytes)


def _check_same(row: RequestRow, digest: bytes | None) -> None:
    if row.state == "refused" and row.digest is None:
        raise BadRequest(row.message or "this number was refused")
    if row.digest != digest:
        raise BadRequest(
            f"seq_id={row.seq}: another request of {row.owner!r} had this number; count on, and use each number once"
        )


def _damaged_request(row: RequestRow, place: str, how: str) -> DamagedFileError:
    return DamagedFileError(
        f"the data of request {row.id} {how} ({place} in the server's data directory, which a backup may have)"
    )


def _aged(request_id: str) -> Gone:
    return Gone(f"request_id={request_id!r}: its result has aged and was removed")


def _answer_bytes(answer: Done | Failed) -> int:
    return _ANSWER_BYTES + len(answer.content if isinstance(answer, Done) else answer.message)


def failure(error: Exception) -> Failed:
    """What a client is told of an error."""
    category: Category = "user" if isinstance(error, ValueError) else "server"
    said = "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
    return Failed(said, category, name_of(error))


_MINUTE = 60.0
_BUSY_SECONDS = 1.0


@dataclass
class _Account:
    requests: int = 0
    bytes: int = 0
    tokens: float = 0.0
    """That may be used now; below 0, a debt."""
    filled: float = 0.0


class TenantLimits:
    def __init__(
        self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def check(self, tenant: str, size: int) -> None:
        """TooManyRequests if a request of `size` bytes cannot be taken now."""
        account, settings = self._account(tenant), self._settings
        if account.requests >= settings.max_queued_requests:
            raise TooManyRequests(
                f"{account.requests} requests of this key are not done yet, and no more may be; wait for some of them",
                _BUSY_SECONDS,
            )
        if account.requests and account.bytes + size > settings.max_queued_bytes:
            raise TooManyRequests(
                f"requests of this key that are not done yet have {account.bytes:,} bytes; wait for some of them",
                _BUSY_SECONDS,
            )
        if account.tokens < 0:
            rate = settings.tokens_per_minute
            raise TooManyRequests(
                f"this key may use {rate:,} tokens a minute, and has used more; wait",
                _MINUTE * -account.tokens / rate,
            )

    def enter(self, tenant: str, size: int) -> None:
        """A request was accepted."""
        account = self._account(tenant)
        account.requests += 1
        account.bytes += size

    def leave(self, tenant: str, size: int) -> None:
        """It is done."""
        account = self._account(tenant)
        account.requests -= 1
        account.bytes -= size

    def use(self, tenant: str, tokens: int) -> None:
        """Tokens were computed for the tenant."""
        self._account(tenant).tokens -= tokens

    def queued(self) -> dict[str, int]:
        """RequestLog that are not done, by tenant."""
        return {
            tenant: account.requests
            for tenant, account in self._accounts.items()
            if account.requests
        }

    def _account(self, tenant: str) -> _Account:
        now, rate = self._clock(), self._settings.tokens_per_minute
        account = self._accounts.setdefault(tenant, _Account(tokens=rate, filled=now))
        account.tokens = min(rate, account.tokens + rate * (now - account.filled) / _MINUTE)
        account.filled = now
        return account
