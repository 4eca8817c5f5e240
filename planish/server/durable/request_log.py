"""The unanswered requests of a server, in memory.

Their decoded operations are kept too, up to `request_memory_bytes`. Beyond this limit, an operation
is read from the journal when its turn comes.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from planish.errors import DamagedFileError
from planish.server.durable import journal
from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.database import BODIES, DATABASE
from planish.server.durable.journal import RequestRow
from planish.server.durable.records import update_row
from planish.server.durable.retries import DiskFaults, retry_briefly
from planish.server.durable.store import Store
from planish.server.request import Request, is_unaltered
from planish.server.settings import MemorySettings
from planish.server.tenant_limits import TenantLimits
from planish.service import Operation
from planish.wire.operations import operation_from_bytes


@dataclass(eq=False)
class RequestLog:
    """The unanswered requests of all models and samplers."""

    _store: Store
    _settings: MemorySettings
    _tenant_limits: TenantLimits
    _crash_guard: CrashGuard
    disk_faults: DiskFaults = field(default_factory=DiskFaults)
    operation_bytes: int = 0
    """The size of the journaled bodies of all requests whose decoded operation is in memory."""
    active: dict[str, Request] = field(default_factory=dict[str, Request])
    """The requests that are unanswered, or whose answer is not on disk yet, by id."""

    @property
    def is_failing(self) -> bool:
        """Whether the last write to the journal failed because of the disk or memory."""
        return self._store.is_failing

    def queued_counts(self) -> Counter[tuple[str, str]]:
        """Return the number of unanswered requests, by (kind, tenant)."""
        open_rows = [
            request.row for request in self.active.values() if request.answer_written is None
        ]
        return Counter((row.kind, row.tenant) for row in open_rows)

    def add(self, request: Request) -> None:
        """Count a request that is about to be journaled against the limits of its tenant, and add
        it. Raise TooManyRequests, and add nothing, if these limits allow no new request.
        """
        row = request.row
        self._tenant_limits.check(row.tenant, row.body_bytes)
        self.active[row.id] = request
        self._tenant_limits.add_request(row.tenant, row.body_bytes)
        self._tenant_limits.use_tokens(row.tenant, request.num_input_tokens)
        if self.operation_bytes + row.body_bytes > self._settings.request_memory_bytes:
            request.operation = None
        elif request.operation is not None:
            self.operation_bytes += row.body_bytes

    def discard(self, request: Request) -> None:
        """Undo `add`, because the request is not in the journal."""
        del self.active[request.id]
        self.release_operation(request)
        self._tenant_limits.remove_request(request.row.tenant, request.row.body_bytes)
        self._tenant_limits.use_tokens(request.row.tenant, -request.num_input_tokens)

    def restore(self, row: RequestRow) -> Request:
        """Put an unanswered request of an earlier process into memory."""
        request = Request(row, None)
        request.journaled.set_result(None)
        self.active[row.id] = request
        self._tenant_limits.add_request(row.tenant, row.body_bytes)
        return request

    def note_answered(self, request: Request) -> None:
        """Count a request as answered. It stays in `active` until its answer is on disk."""
        self.release_operation(request)
        self._tenant_limits.remove_request(request.row.tenant, request.row.body_bytes)

    def remove(self, request: Request) -> None:
        """Remove a request whose answer is on disk."""
        if self.active.get(request.id) is request:
            del self.active[request.id]

    async def operation(self, request: Request) -> Operation[Any]:
        """Return the operation of a request, from memory or from the journal. If the disk fails,
        wait until it works.
        """
        if request.operation is not None:
            return request.operation

        async def read() -> Operation[Any]:
            async with self._crash_guard.reading(request.id):
                return await retry_briefly(lambda: self.read_operation(request.row), request.id)

        operation = await self.disk_faults.retry_until_fixed(read, request.row.owner)
        request.set_counts(operation)
        return operation

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

    def release_operation(self, request: Request) -> None:
        """Drop the decoded operation of a request, once the operation is submitted or not
        needed.
        """
        if request.operation is not None:
            self.operation_bytes -= request.row.body_bytes
            request.operation = None

    async def rows_after(self, model_id: str, seq: int) -> list[RequestRow]:
        """Return the rows of a model's requests with numbers above `seq`, in order."""
        return await self._store.read(journal.requests_of_model, model_id, seq)

    async def set_state(self, request: Request, state: str) -> None:
        """Set the state of a request. The state is on disk when this returns."""
        await self._store.write_with_retries(update_row, RequestRow, request.id, state=state)
        request.row = request.row.with_state(state)


def _damaged_request(row: RequestRow, location: str, problem: str) -> DamagedFileError:
    return DamagedFileError(
        f"the data of request {row.id} {problem} ({location} in the server's data directory; a "
        "backup may have it)"
    )
