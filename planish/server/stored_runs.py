"""Training runs without a model: each holds one checkpoint that was copied or imported.

The id of such a run has the form of a model's id, `{session}:train:{n}`. A client may name the
session and the number. If it does not, the run gets a session of its own. This session is written
together with the checkpoint, and has ended from the beginning, because no client uses it. So a copy
or import that fails leaves no session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from planish.errors import UserError
from planish.server.durable.checkpoints import CheckpointCatalog
from planish.server.durable.quotas import row_bytes
from planish.server.durable.records import (
    ModelRow,
    SessionRow,
    select,
    to_json_text,
    upsert,
    upsert_checkpoint,
)
from planish.server.durable.store import Store, Transaction
from planish.server.engine_client import EngineClient
from planish.server.intake import Intake
from planish.server.request import run_uncancelled
from planish.server.results import KeyReused, SessionSpec, Tenant
from planish.server.sessions import Sessions, new_session_id
from planish.types import CheckpointPath
from planish.wire.models import IdParts, session_id_of

_OWN_SESSION_REASON = "it only holds a stored checkpoint"


class StoredRuns:
    """Creates the runs that hold copied or imported checkpoints."""

    def __init__(
        self,
        store: Store,
        engine: EngineClient,
        sessions: Sessions,
        checkpoints: CheckpointCatalog,
        intake: Intake,
        run_lock: Callable[[str], asyncio.Lock],
    ) -> None:
        """`intake` checks the tenants' limits. `run_lock` returns the lock of a run's id."""
        self._store, self._engine, self._sessions = store, engine, sessions
        self._checkpoints, self._intake = checkpoints, intake
        self._run_lock = run_lock

    async def copy(
        self,
        tenant: Tenant,
        source: str,
        session_id: str,
        model_seq_id: int,
        ttl_seconds: int | None,
    ) -> str:
        """Copy a checkpoint into a new run of a session, and return the path of the copy. A
        repeated request returns the path of the first copy.
        """
        self._engine.check_open()
        await self._sessions.touch(tenant, session_id)
        run_id = IdParts(session_id, model_seq_id).model_id
        row = await self._checkpoints.readable_row(tenant, source)
        copying = self._copy(tenant, row.path, run_id, ttl_seconds, has_own_session=False)
        return await run_uncancelled(copying)

    async def copy_alone(
        self, tenant: Tenant, source: str, ttl_seconds: int | None, idempotency_key: str | None
    ) -> str:
        """Copy a checkpoint into a new run with a session of its own, and return the path of the
        copy. A request with the same key returns the path of the first copy. Raise KeyReused if it
        asks for another copy.
        """
        self._engine.check_open()
        row = await self._checkpoints.readable_row(tenant, source)
        run_id = IdParts(new_session_id(tenant, idempotency_key), 0).model_id
        copying = self._copy(tenant, row.path, run_id, ttl_seconds, has_own_session=True)
        return await run_uncancelled(copying)

    async def _copy(
        self,
        tenant: Tenant,
        source: str,
        run_id: str,
        ttl_seconds: int | None,
        has_own_session: bool,
    ) -> str:
        """Copy a checkpoint into the run `run_id`, unless the run already contains this copy."""
        source_path = CheckpointPath.parse(source)
        path = str(CheckpointPath(run_id, source_path.checkpoint_type, source_path.name))
        ttl_note = "" if ttl_seconds is None else f", with ttl_seconds={ttl_seconds}"
        closed_reason = f"it holds a copy of {source}{ttl_note}"
        # Without this lock, two sources with the same name could both be copied to `path`. The
        # files could then be from one source, and the rows from the other.
        async with self._run_lock(run_id):
            if await self._is_copied(run_id, closed_reason, has_own_session):
                return path
            await self._checkpoints.check_quota(tenant)
            self._intake.check_capacity(tenant.name, 0)
            await self._engine.checkpoints.copy(source, path, ttl_seconds)
            await self.record(
                tenant,
                path,
                closed_reason,
                SessionSpec(["copy_weights"]) if has_own_session else None,
            )
        return path

    async def record(
        self,
        tenant: Tenant,
        path: str,
        closed_reason: str,
        own_session: SessionSpec | None,
        alias: str | None = None,
    ) -> None:
        """Record a run with the checkpoint at `path`, whose files were just written. With
        `own_session`, record the run's own session too. With `alias`, all tenants may read the
        checkpoint under this name, and a checkpoint that had the name before loses it.
        """
        run_id = CheckpointPath.parse(path).run_id
        # Describe the new files: the owner of a copy's source may overwrite the source at any time.
        info = await self._engine.checkpoints.info(path)
        checkpoint_row = replace(
            await self._checkpoints.row_from_files(tenant, path),
            public=int(alias is not None),
            alias=alias,
        )
        metadata = to_json_text(info.checkpoint.user_metadata or {})
        run = ModelRow(
            id=run_id,
            tenant=tenant.name,
            session=session_id_of(run_id),
            base_model=info.base_model,
            lora=to_json_text(info.lora),
            user_metadata=metadata,
            training_bytes=0,
            sampling_bytes=0,
            created=checkpoint_row.created,
            used=checkpoint_row.created,
            closed=closed_reason,
            bytes=row_bytes(metadata),
        )

        def write(transaction: Transaction) -> None:
            if own_session is not None:
                self._sessions.insert_ended(
                    transaction, tenant, run.session, own_session, _OWN_SESSION_REASON
                )
            upsert(transaction, run)
            upsert_checkpoint(transaction, checkpoint_row)

        await self._store.write(write)

    async def _is_copied(self, run_id: str, closed_reason: str, has_own_session: bool) -> bool:
        """Return whether the run already contains this copy. If something else uses the id of the
        run, raise KeyReused for a run with a session of its own, and UserError for another run.
        """
        runs, sessions = await self._store.read(
            lambda db: (
                select(db, ModelRow, "id = ?", [run_id]),
                select(db, SessionRow, "id = ?", [session_id_of(run_id)]),
            )
        )
        if runs and runs[0].closed == closed_reason:
            return True
        if has_own_session and (runs or sessions):
            raise KeyReused
        if runs:
            raise UserError(
                f"model_seq_id: {run_id!r} is already used by another model or by a copy of "
                "another checkpoint or with another ttl_seconds; continue with the next sequence "
                "number"
            )
        return False
