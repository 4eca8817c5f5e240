"""The last stage of every request: its answer is written to disk, and then sent.

Each answer is on disk before it is sent. Otherwise a crash could lose an answer that a client has
seen, and the request could fail when it runs again. A result can be read until it expires.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from planish.errors import StorageError
from planish.server.durable import journal
from planish.server.durable.crash_points import crash_point
from planish.server.durable.failed_requests import FailedRequests
from planish.server.durable.request_log import RequestLog
from planish.server.durable.store import Store
from planish.server.metrics import Counters
from planish.server.request import Request, SettledState, TransactionHook, done_from_bytes
from planish.server.results import Done, Failed, Gone, NotFound, Outcome, Tenant, TryAgain

_UNRESTORED_POLL_SECONDS = 0.5
"""How long a poll waits if the request is in the journal, but not in memory yet. This happens while
the server restores the requests of an earlier process.
"""
_ANSWER_OVERHEAD_BYTES = 500
"""Estimated memory of an answer in addition to its content."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Settlement:
    """Answers the requests of all models and samplers, and keeps a cache of recent answers."""

    _store: Store
    _request_log: RequestLog
    _counters: Counters
    _failed_requests: FailedRequests
    _memory_bytes: int
    """The memory for recent answers."""
    recent_answer_bytes: int = 0
    """The estimated memory of the recent answers."""
    _recent_answers: OrderedDict[str, tuple[str, Done | Failed]] = field(
        default_factory=OrderedDict[str, tuple[str, Done | Failed]]
    )
    """The tenant and the answer of recent requests, by request id. All these answers are on
    disk.
    """

    def settle(
        self,
        request: Request,
        answer: Done | Failed,
        transaction_hook: TransactionHook | None = None,
        state: SettledState | None = None,
    ) -> asyncio.Future[None]:
        """Write the answer of a request to disk, and send it once it is there. `transaction_hook`
        is called in the same transaction. The returned future is done when the answer is on disk.
        Only the first answer of a request counts. By default, `state` is "done" for a result and
        "failed" for a failure.
        """
        if request.answer_written is not None:
            return request.answer_written
        crash_point("before recording a result")
        self._request_log.note_answered(request)
        if isinstance(answer, Failed) and not request.row.was_rejected_on_arrival:
            self._failed_requests.add(request.row.tenant, answer.message)
        request.row = request.row.with_state(
            state or ("done" if isinstance(answer, Done) else "failed")
        )
        row = request.row
        self._counters.answered_requests[row.kind, row.state] += 1
        if isinstance(answer, Done) and row.kind in ("forward", "forward_backward"):
            self._counters.trained_tokens[row.tenant] += request.num_input_tokens
        written = self._store.write_with_retries(
            journal.write_answer, row, answer, time.time(), transaction_hook, request.begun
        )
        request.answer_written = asyncio.ensure_future(
            self._send_when_written(request, answer, written)
        )
        return request.answer_written

    async def _send_when_written(
        self, request: Request, answer: Done | Failed, written: asyncio.Future[None]
    ) -> None:
        try:
            await written
        except StorageError:  # the process is ending, and the next start runs the request again
            _log.warning("the answer of %s is not on disk", request.id)
            return
        request.answer.set_result(answer)
        self._request_log.remove(request)
        self._recent_answers[request.id] = (request.row.tenant, answer)
        self.recent_answer_bytes += _answer_bytes(answer)
        while self.recent_answer_bytes > self._memory_bytes and len(self._recent_answers) > 1:
            _, (_, oldest) = self._recent_answers.popitem(last=False)
            self.recent_answer_bytes -= _answer_bytes(oldest)

    async def outcome(self, tenant: Tenant, request_id: str, seconds: float) -> Outcome:
        """Wait up to `seconds` for the answer. Return the answer, or TryAgain if there is none yet.
        Raise NotFound if there is no such request, and Gone if its result has expired.
        """
        request = self._request_log.active.get(request_id)
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
            case _:
                return TryAgain()  # the recovery has not put the request into memory yet


def _expired_result(request_id: str) -> Gone:
    return Gone(f"request_id={request_id!r}: its result has expired and was removed")


def _answer_bytes(answer: Done | Failed) -> int:
    return _ANSWER_OVERHEAD_BYTES + len(
        answer.content if isinstance(answer, Done) else answer.message
    )
