"""Sessions: everything that one client made belongs to one, and goes with it, apart from
checkpoints that have a name.

A session ends when its client says so, or when nothing was heard of it for a long time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from planish.errors import EngineClosedError, StorageError
from planish.server.durable.records import (
    ModelRow,
    SamplerRow,
    SessionRow,
    change,
    change_each,
    count,
    moment,
    put,
    select,
    text_of,
)
from planish.server.durable.store import Store, Transaction, crash_point
from planish.server.models.model import Model
from planish.server.models.training import Training
from planish.server.results import Gone, NotFound, Page, SessionRecord, SessionSpec, Tenant
from planish.server.samplers import Samplers

ENDED = "its session ended"

_AWAY_SECONDS = 300.0
"""Between two looks at who is stale, which are half a minute apart: after more, the server or its
machine was stopped meanwhile.
"""
_RETURN_SECONDS = 600.0
"""For clients to be heard of again, after a time in which they could not be."""

_log = logging.getLogger(__name__)


class Sessions:
    def __init__(self, store: Store, training: Training, samplers: Samplers) -> None:
        self._store = store
        self._training = training
        self._samplers = samplers
        self._open: dict[str, SessionRow] = {}
        self._seen: dict[str, float] = {}
        """When each was heard of last, as far as it is not written down."""
        self._clearing: set[asyncio.Task[None]] = set()
        self._looked = self._returned = time.time()

    def add(self, row: SessionRow) -> None:
        self._open[row.id] = replace(row, spec="")  # which only the database has to know

    async def create(self, tenant: Tenant, spec: SessionSpec) -> str:
        now = time.time()
        row = SessionRow(secrets.token_hex(8), tenant.name, text_of(spec), now, now)
        await self._store.write(lambda transaction: put(transaction, row))
        self.add(row)
        return row.id

    async def touch(self, tenant: Tenant, session_id: str) -> SessionRow:
        """The open session, of which something was heard now. NotFound; Gone if it has ended."""
        row = self._open.get(session_id)
        if row is None:
            row = await self._row(tenant, session_id)
            raise Gone(
                f"session_id={session_id!r} has ended ({row.reason}); create a new ServiceClient"
            )
        if row.tenant != tenant.name:
            raise _not_found(session_id)
        self._seen[session_id] = time.time()
        return row

    async def end(self, session_id: str, reason: str) -> None:
        """Take nothing more for it."""
        if self._open.pop(session_id, None) is None:
            return
        now = time.time()
        await self._store.keep(
            lambda transaction: change(
                transaction, SessionRow, session_id, ended=now, reason=reason
            )
        )
        crash_point("session ended before cleaning")
        self.clear(session_id)

    def clear_if_ended(self, session_id: str) -> None:
        """After something was made for a session, which may have ended in that moment."""
        if session_id not in self._open:
            self.clear(session_id)

    def clear(self, session_id: str) -> None:
        """In the background: do what was accepted for a session that has ended, and remove what
        belongs to it.
        """
        task = asyncio.create_task(self._clear(session_id), name=f"end of session {session_id}")
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)

    async def cleared(self) -> None:
        """Wait until that is done for all."""
        await asyncio.gather(*self._clearing)

    async def stop(self) -> None:
        """Leave it to the next start."""
        for task in self._clearing:
            task.cancel()
        await asyncio.gather(*self._clearing, return_exceptions=True)
        with suppress(StorageError):  # a full disk is not waited for
            await self._store.write(self._take_seen())

    async def _clear(self, session_id: str) -> None:
        models = [model for model in self._training.all() if model.row.session == session_id]
        samplers = [
            sampler for sampler in self._samplers.all() if sampler.row.session == session_id
        ]
        closings = [
            *(partial(self._close_model, model) for model in models),
            *(partial(self._samplers.close, sampler, ENDED) for sampler in samplers),
        ]
        for close in closings:
            try:
                await close()
            except EngineClosedError:
                return
            except Exception:
                _log.exception(
                    "a part of session %s could not be removed; it is tried again at the next start",
                    session_id,
                )

    async def _close_model(self, model: Model) -> None:
        while model.worker is not None:
            await asyncio.wait([model.worker])
        await self._training.close(model, ENDED)

    @property
    def open_count(self) -> int:
        return len(self._open)

    def is_open(self, session_id: str) -> bool:
        return session_id in self._open

    def stale(self, seconds: float) -> list[str]:
        """Those of which nothing was heard for so long, while they could be."""
        now = time.time()
        if now - self._looked > _AWAY_SECONDS:
            self._returned = now
        self._looked = now
        if now - self._returned < min(seconds, _RETURN_SECONDS):
            return []
        oldest = now - seconds
        return [
            row.id
            for row in self._open.values()
            if max(row.seen, self._seen.get(row.id, 0)) < oldest
        ]

    async def write_seen(self) -> None:
        """When each was heard of last, for the next start."""
        await self._store.keep(self._take_seen())

    def _take_seen(self) -> Callable[[Transaction], None]:
        seen, self._seen = self._seen, {}
        for session_id, when in seen.items():
            if session_id in self._open:
                self._open[session_id] = replace(self._open[session_id], seen=when)
        pairs = [(when, session_id) for session_id, when in seen.items()]
        return lambda transaction: change_each(transaction, SessionRow, "seen", pairs)

    async def page(self, tenant: Tenant, limit: int, offset: int) -> Page[str]:
        where = "tenant = ?"
        rows, total = await self._store.read(
            lambda db: (
                select(
                    db,
                    SessionRow,
                    f"{where} ORDER BY created DESC LIMIT ? OFFSET ?",
                    [tenant.name, limit, offset],
                ),
                count(db, SessionRow, where, [tenant.name]),
            )
        )
        return Page([row.id for row in rows], offset, limit, total)

    async def record(self, tenant: Tenant, session_id: str) -> SessionRecord:
        row = await self._row(tenant, session_id)
        models, samplers = await self._store.read(
            lambda db: (
                select(db, ModelRow, "session = ? ORDER BY created", [session_id]),
                select(db, SamplerRow, "session = ? ORDER BY created", [session_id]),
            )
        )
        ended = None if row.ended is None else moment(row.ended)
        return SessionRecord(
            session_id, _spec(row), _ids(models), _ids(samplers), moment(row.created), ended
        )

    async def _row(self, tenant: Tenant, session_id: str) -> SessionRow:
        rows = await self._store.read(
            lambda db: select(db, SessionRow, "id = ? AND tenant = ?", [session_id, tenant.name])
        )
        if not rows:
            raise _not_found(session_id)
        return rows[0]


def _spec(row: SessionRow) -> SessionSpec:
    return SessionSpec(**json.loads(row.spec))


def _ids(rows: Sequence[ModelRow | SamplerRow]) -> list[str]:
    return [row.id for row in rows]


def _not_found(session_id: str) -> NotFound:
    return NotFound(f"session_id={session_id[:200]!r}: there is no such session")
