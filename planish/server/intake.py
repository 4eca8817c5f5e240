"""The first stage of every request: limits, disk space and the journal.

A request is journaled before it is acknowledged. So the server answers it even after a crash.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from planish.errors import shortened
from planish.server.durable import journal
from planish.server.durable.failed_requests import FailedRequests
from planish.server.durable.journal import RequestRow
from planish.server.durable.request_log import RequestLog
from planish.server.durable.store import Store, Transaction
from planish.server.metrics import Counters
from planish.server.request import Request, TransactionHook, check_same_request
from planish.server.results import OUT_OF_MEMORY, Unavailable
from planish.server.tenant_limits import TenantLimits

_RETRY_SECONDS = 10.0

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Intake:
    """Accepts the requests of all models and samplers."""

    _store: Store
    _request_log: RequestLog
    _tenant_limits: TenantLimits
    _counters: Counters
    _failed_requests: FailedRequests
    _min_free_disk_bytes: int
    _disk_was_full: bool = False
    """Whether the last request was rejected for lack of disk space."""

    async def was_accepted(self, new_row: RequestRow) -> bool:
        """Return whether the same request was accepted before. Raise BadRequest if a different
        request has this id, or if the earlier request was rejected.
        """
        active = self._request_log.active.get(new_row.id)
        if active is not None:
            check_same_request(active.row, new_row.digest)
            await asyncio.shield(active.journaled)
            return True
        row = await self._store.read(journal.request_row, new_row.id)
        if row is not None:
            check_same_request(row, new_row.digest)
        return row is not None

    async def accept(
        self, request: Request, transaction_hook: TransactionHook | None = None
    ) -> bool:
        """Journal a request. Return False if the same request was journaled before.
        `transaction_hook` is called in the same transaction.

        Raise BadRequest if a different request has this id. Before anything is written, raise
        TooManyRequests if the tenant's limits allow no new request (`RequestLog.add` checks them),
        or Unavailable if the disk does not.
        """
        row = request.row
        never_runs = row.state == "refused"
        if never_runs:
            await self._failed_requests.check(row.tenant)
        active = self._request_log.active.get(row.id)
        if active is not None:
            check_same_request(active.row, row.digest)
            await asyncio.shield(active.journaled)
            return False
        self.check_disk(row.body_bytes)
        self._request_log.add(request)
        try:
            existing_row = await self._store.write(
                insert_request, row, request.body, transaction_hook
            )
        except BaseException as error:
            self._request_log.discard(request)
            request.journaled.set_exception(
                error
                if isinstance(error, Exception)
                else Unavailable("the request was cancelled; send it again")
            )
            # asyncio would log the exception if no caller waits for `journaled`. So read it.
            request.journaled.exception()
            raise
        request.body = b""
        request.journaled.set_result(None)
        if existing_row is not None:
            self._request_log.discard(request)
            check_same_request(existing_row, row.digest)
            return False
        if never_runs:
            self._failed_requests.add(row.tenant, row.message)
        self._counters.accepted_requests[row.kind] += 1
        return True

    def check_capacity(self, tenant: str, size: int) -> None:
        """Raise an error if a request of `size` bytes cannot be accepted: TooManyRequests because
        of the tenant's limits, Unavailable because of the disk.
        """
        self._tenant_limits.check(tenant, size)
        self.check_disk(size)

    def check_disk(self, size: int) -> None:
        """Raise Unavailable if the disk has no space for `size` bytes, or if the last write failed
        because of the disk or memory.
        """
        is_full = self.disk_is_full(size)
        is_reported = self._store.is_failing or self._request_log.disk_faults.are_widespread
        if is_full and not self._disk_was_full and not is_reported:
            free, directory = self._store.free_bytes(), self._store.directory
            _log.error(
                "no new work is accepted until there is space: %s bytes are free in %s%s, and the "
                "server keeps %s bytes free (min_free_disk_bytes)",
                f"{free:,}",
                directory,
                "" if directory.is_dir() else " (the directory is missing; restore it)",
                f"{self._min_free_disk_bytes:,}",
            )
        self._disk_was_full = is_full
        if self._store.lacks_memory:
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
            or self._request_log.disk_faults.are_widespread
            or self._store.free_bytes() < self._min_free_disk_bytes + size
        )

    @property
    def lacks_memory(self) -> bool:
        """Whether the last write to the database failed because of a lack of memory."""
        return self._store.lacks_memory


def insert_request(
    transaction: Transaction,
    row: RequestRow,
    body: bytes,
    transaction_hook: TransactionHook | None = None,
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
