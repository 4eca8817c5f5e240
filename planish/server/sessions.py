"""Sessions. The models and samplers of a client belong to the client's session, and are closed when
the session ends. Named checkpoints are kept.

A session ends when its client asks for it, or when the client has sent no request for
`session_timeout`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from planish.errors import EngineClosedError, StorageError
from planish.server.durable.crash_points import crash_point
from planish.server.durable.quotas import check_sessions, row_bytes
from planish.server.durable.records import (
    ModelRow,
    SamplerRow,
    SessionRow,
    count,
    delete_row,
    select,
    select_key_page,
    select_keys,
    to_json_text,
    update_row,
    update_rows,
    upsert,
    utc_time,
)
from planish.server.durable.store import Store, Transaction
from planish.server.results import (
    Gone,
    KeyReused,
    NotFound,
    Page,
    SessionRecord,
    SessionSpec,
    Tenant,
)
from planish.server.settings import TenantSettings

SESSION_ENDED = "its session ended"

_SUSPENSION_SECONDS = 300.0
"""The server checks for stale sessions every 30 seconds. If more time than this passed between two
checks, the process or its machine was suspended.
"""
_RECONNECT_SECONDS = 600.0
"""After a start or a suspension, no session counts as stale for this long. In this time, clients
can reconnect.
"""
AHEAD_SECONDS = 60.0
"""A time further in the future than this comes from a clock that was wrong, and is replaced by the
present time.
"""

_MAX_DETAIL_CHARACTERS = 1000
"""The maximum length, in characters, of a client's reason for ending its session. The rest is cut
off.
"""

_log = logging.getLogger(__name__)


class SessionMembers:
    """Closes the models and samplers of ended sessions in the background."""

    def __init__(
        self, close_functions: Callable[[str], Sequence[Callable[[], Awaitable[None]]]]
    ) -> None:
        """`close_functions(session_id)` returns the functions that close the session's models and
        samplers, one function each.
        """
        self._close_functions = close_functions
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self, session_id: str) -> None:
        """Close the models and samplers of a session. Each model first runs the requests that it
        has accepted.
        """
        task = asyncio.create_task(self._close_all(session_id), name=f"end of session {session_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait_until_closed(self) -> None:
        """Wait until the models and samplers of all ended sessions are closed."""
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        """Stop closing models and samplers; the next start resumes it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _close_all(self, session_id: str) -> None:
        for close in self._close_functions(session_id):
            try:
                await close()
            except EngineClosedError:
                return
            except Exception:
                _log.exception(
                    "a part of session %s could not be removed; the next start tries again",
                    session_id,
                )


class Sessions:
    """The open sessions of a server."""

    def __init__(
        self,
        store: Store,
        settings: TenantSettings,
        check_disk: Callable[[int], None],
        members: SessionMembers,
    ) -> None:
        """`check_disk(size)` raises Unavailable if the disk has no space for `size` bytes."""
        self._store = store
        self._settings = settings
        self._check_disk = check_disk
        self.members = members
        self._open_rows: dict[str, SessionRow] = {}
        self._last_seen: dict[str, float] = {}
        """The times of last requests that are not on disk yet, by session id."""
        self._creation_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by session id. A caller holds the lock while it creates the session."""
        self._last_check = self._running_since = time.monotonic()

    def add(self, row: SessionRow) -> None:
        """Add an open session."""
        self._open_rows[row.id] = replace(row, spec="")  # `spec` is only read from the database

    async def create(
        self, tenant: Tenant, spec: SessionSpec, idempotency_key: str | None = None
    ) -> str:
        """Create a session, and return its id. Raise BadRequest if the tenant has `max_sessions`
        open sessions.

        Calls with the same key return the same session, also after a restart. Raise KeyReused if
        they do not have the same `spec`.
        """
        session_id = new_session_id(tenant, idempotency_key)
        async with self._creation_locks.setdefault(session_id, asyncio.Lock()):
            await self._create(tenant, session_id, to_json_text(spec), idempotency_key is not None)
        return session_id

    async def _create(self, tenant: Tenant, session_id: str, spec: str, may_exist: bool) -> None:
        if may_exist:
            rows = await self._store.read(select, SessionRow, "id = ?", [session_id])
            if rows:
                _check_same_spec(rows[0], spec)
                await self.touch(tenant, session_id)
                return
        now = time.time()
        row = SessionRow(session_id, tenant.name, spec, now, now, bytes=row_bytes(spec))
        self._check_disk(row.bytes)

        def insert(transaction: Transaction) -> None:
            check_sessions(transaction, tenant.name, self._settings)
            self._insert(transaction, row)

        await self._store.write(insert)
        self.add(row)

    def insert_ended(
        self,
        transaction: Transaction,
        tenant: Tenant,
        session_id: str,
        spec: SessionSpec,
        reason: str,
    ) -> None:
        """Insert a session that has ended, for a run that nobody uses through a session. Raise
        KeyReused if there is a session with this id.
        """
        text, now = to_json_text(spec), time.time()
        row = SessionRow(
            session_id, tenant.name, text, now, now, ended=now, reason=reason, bytes=row_bytes(text)
        )
        self._insert(transaction, row)

    def _insert(self, transaction: Transaction, row: SessionRow) -> None:
        """Insert a row. If the tenant then has too many sessions, delete its oldest ended ones. Raise
        KeyReused if there is a session with this id.
        """
        if select(transaction, SessionRow, "id = ?", [row.id]):
            raise KeyReused
        upsert(transaction, row)
        total = count(transaction, SessionRow, "tenant = ?", [row.tenant])
        if total > self._settings.max_sessions:
            where = "tenant = ? AND ended IS NOT NULL ORDER BY created LIMIT ?"
            delete_sessions(transaction, where, [row.tenant, total - self._settings.max_sessions])

    async def touch(self, tenant: Tenant, session_id: str) -> SessionRow:
        """Note that the client sent a request, and return its open session. Raise NotFound if the
        tenant has no such session, and Gone if the session has ended.
        """
        row = self._open_rows.get(session_id)
        if row is None:
            row = await self._row(tenant, session_id)
            raise Gone(
                f"session_id={session_id!r} has ended ({row.reason}); create a new ServiceClient"
            )
        if row.tenant != tenant.name:
            raise _not_found(session_id)
        self._last_seen[session_id] = time.time()
        return row

    async def finish(
        self, tenant: Tenant, session_id: str, reason: str, detail: str | None
    ) -> None:
        """End a session at its client's request. `reason` is success, errored or interrupted.
        Finishing an ended session does nothing.
        """
        try:
            await self.touch(tenant, session_id)
        except Gone:
            return
        await self.end(
            session_id, f"{reason}: {detail[:_MAX_DETAIL_CHARACTERS]}" if detail else reason
        )

    async def end(self, session_id: str, reason: str) -> None:
        """End a session. The server accepts no further work for it."""
        if self._open_rows.pop(session_id, None) is None:
            return
        now = time.time()
        await self._store.write_with_retries(
            update_row, SessionRow, session_id, ended=now, reason=reason
        )
        crash_point("session ended before cleaning")
        self.members.close(session_id)

    def close_members_if_ended(self, session_id: str) -> None:
        """Clear a session if it ended while one of its models or samplers was being created."""
        if session_id not in self._open_rows:
            self.members.close(session_id)

    async def stop(self) -> None:
        """Stop clearing ended sessions; the next start resumes it. Write the times of the last
        requests to disk.
        """
        await self.members.stop()
        with suppress(StorageError):  # do not wait for a full disk
            await self._store.write(self._take_last_seen())

    @property
    def open_count(self) -> int:
        """The number of open sessions."""
        return len(self._open_rows)

    def is_open(self, session_id: str) -> bool:
        """Return whether a session is open."""
        return session_id in self._open_rows

    def stale_session_ids(self, oldest: float) -> list[str]:
        """Return the ids of the sessions whose clients sent nothing after `oldest`. Shortly after a
        start or a suspension of the server, return none.
        """
        monotonic_now, now = time.monotonic(), time.time()
        if monotonic_now - self._last_check > _SUSPENSION_SECONDS:
            self._running_since = monotonic_now
        self._last_check = monotonic_now
        for row in list(self._open_rows.values()):
            if max(row.used, self._last_seen.get(row.id, 0)) > now + AHEAD_SECONDS:
                self._last_seen[row.id] = now
                self._open_rows[row.id] = replace(row, used=now)
        if monotonic_now - self._running_since < min(now - oldest, _RECONNECT_SECONDS):
            return []
        return [
            row.id
            for row in self._open_rows.values()
            if max(row.used, self._last_seen.get(row.id, 0)) < oldest
        ]

    async def write_last_seen(self) -> None:
        """Write the time of each session's last request to disk, for the next start."""
        await self._store.write_with_retries(self._take_last_seen())

    def _take_last_seen(self) -> Callable[[Transaction], None]:
        seen, self._last_seen = self._last_seen, {}
        for session_id, last_seen in seen.items():
            if session_id in self._open_rows:
                self._open_rows[session_id] = replace(self._open_rows[session_id], used=last_seen)
        pairs = [(last_seen, session_id) for session_id, last_seen in seen.items()]
        return lambda transaction: update_rows(transaction, SessionRow, "used", pairs)

    async def page(self, tenant: Tenant, limit: int, offset: int) -> Page[str]:
        """Return a page of the tenant's session ids, newest first."""
        session_ids, total = await self._store.read(
            select_key_page, SessionRow, tenant.name, limit, offset
        )
        return Page(session_ids, offset, limit, total)

    async def record(self, tenant: Tenant, session_id: str) -> SessionRecord:
        """Return a session, open or ended. Raise NotFound if the tenant has no such session."""
        row = await self._row(tenant, session_id)
        models, samplers = await self._store.read(
            lambda db: (
                select_keys(db, ModelRow, "session = ? ORDER BY created", [session_id]),
                select_keys(db, SamplerRow, "session = ? ORDER BY created", [session_id]),
            )
        )
        ended = None if row.ended is None else utc_time(row.ended)
        return SessionRecord(
            session_id,
            SessionSpec(**json.loads(row.spec)),
            models,
            samplers,
            utc_time(row.created),
            ended,
        )

    async def _row(self, tenant: Tenant, session_id: str) -> SessionRow:
        rows = await self._store.read(
            select, SessionRow, "id = ? AND tenant = ?", [session_id, tenant.name]
        )
        if not rows:
            raise _not_found(session_id)
        return rows[0]


def delete_sessions(transaction: Transaction, where: str, values: Sequence[Any]) -> None:
    """Delete the selected sessions, except sessions with an open model or sampler. The closed
    samplers of a deleted session, and its runs without checkpoints, are deleted too. `where` is an
    SQL condition, which may end with an order and a limit.
    """
    has_open_member = " OR ".join(
        f"EXISTS (SELECT 1 FROM {table} WHERE session = sessions.id AND closed IS NULL)"
        for table in ("models", "samplers")
    )
    query = f"SELECT id FROM sessions WHERE NOT ({has_open_member}) AND {where}"
    for row in transaction.execute(query, values).fetchall():
        transaction.execute("DELETE FROM samplers WHERE session = ?", [row[0]])
        without_checkpoints = (
            "models WHERE session = ? AND NOT EXISTS "
            "(SELECT 1 FROM checkpoints WHERE run = models.id)"
        )
        steps = f"DELETE FROM steps WHERE model IN (SELECT id FROM {without_checkpoints})"
        for statement in (steps, f"DELETE FROM {without_checkpoints}"):
            transaction.execute(statement, [row[0]])
        delete_row(transaction, SessionRow, row[0])


def new_session_id(tenant: Tenant, idempotency_key: str | None) -> str:
    """Return the id of a new session. Requests with the same key get the same id."""
    if idempotency_key is None:
        return secrets.token_hex(8)
    return hashlib.blake2b(f"{tenant.name}\0{idempotency_key}".encode(), digest_size=8).hexdigest()


def _check_same_spec(row: SessionRow, spec: str) -> None:
    """Raise KeyReused if the session in `row` was created with another spec."""
    if row.spec != spec:
        raise KeyReused


def _not_found(session_id: str) -> NotFound:
    return NotFound(f"session_id={session_id[:200]!r}: there is no such session")
