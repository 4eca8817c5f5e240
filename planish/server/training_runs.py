"""Training runs as clients list them: every model that a tenant made, in memory or not, open or
closed.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from planish.errors import UserError
from planish.server.durable.checkpoints import CheckpointCatalog
from planish.server.durable.records import (
    ModelRow,
    count,
    moment,
    put,
    put_checkpoint,
    select,
    text_of,
)
from planish.server.durable.request_log import RequestLog
from planish.server.durable.store import Store, Transaction
from planish.server.engine_client import EngineClient
from planish.server.results import Failed, Page, Tenant, TrainingRun
from planish.server.submission import Submission
from planish.types import CheckpointPath, GetInfoResponse, ModelData
from planish.wire.models import SessionPlace

_CREATION_SECONDS = 40.0


@dataclass(frozen=True)
class _Found:
    row: ModelRow
    last_request: float | None


class TrainingRuns:
    def __init__(
        self,
        engine: EngineClient,
        store: Store,
        requests: RequestLog,
        catalog: CheckpointCatalog,
        submission: Submission,
    ) -> None:
        self._engine = engine
        self._store = store
        self._requests = requests
        self._catalog = catalog
        self._submission = submission

    async def info(self, tenant: Tenant, model_id: str) -> GetInfoResponse:
        """Waits for the model's creation. UserError if that failed."""
        row = await self._submission.model_row(tenant, model_id)
        if row.arch is None:
            outcome = await self._requests.outcome(tenant.name, f"{model_id}:0", _CREATION_SECONDS)
            if isinstance(outcome, Failed):
                raise UserError(f"model_id={model_id!r} could not be created: {outcome.message}")
            model = await self._submission.model(tenant, model_id)
            row = model.row
        directory = await self._engine.tokenizer_directory(row.base_model)
        data = ModelData(row.arch or "", row.base_model, str(directory))
        return GetInfoResponse(model_id, data, True, row.rank)

    async def page(self, tenant: Tenant, limit: int, offset: int) -> Page[TrainingRun]:
        where = "tenant = ?"
        found, total = await self._store.read(
            lambda db: (
                _with_last(
                    db,
                    f"{where} ORDER BY created DESC LIMIT ? OFFSET ?",
                    [tenant.name, limit, offset],
                ),
                count(db, ModelRow, where, [tenant.name]),
            )
        )
        return Page([await self._run(item) for item in found], offset, limit, total)

    async def run(self, tenant: Tenant, run_id: str) -> TrainingRun:
        row = await self._submission.model_row(tenant, run_id)
        return await self._run(
            (await self._store.read(lambda db: _with_last(db, "id = ?", [row.id])))[0]
        )

    async def copy_checkpoint(
        self, tenant: Tenant, source: str, place: SessionPlace, ttl_seconds: int | None
    ) -> str:
        """Into a run of its own, which stands for a model that was never made."""
        row = await self._catalog.readable(tenant, source)
        named = CheckpointPath.parse(row.path)
        path = str(CheckpointPath(place.model_id, named.checkpoint_type, named.name))
        why_closed = f"it holds a copy of {row.path}"
        if await self._is_copied(place.model_id, why_closed):
            return path
        await self._catalog.check_quota(tenant)
        self._requests.check_room(tenant.name, 0)
        info = await self._engine.checkpoint_info(row.path)
        await self._engine.copy_checkpoint(row.path, path, ttl_seconds)
        copied = await self._catalog.saved(tenant, path)
        now = copied.made
        run = ModelRow(
            id=place.model_id,
            tenant=tenant.name,
            session=place.session_id,
            base_model=info.base_model,
            lora=text_of(info.lora),
            user_metadata=text_of(info.checkpoint.user_metadata or {}),
            training_bytes=0,
            sampling_bytes=0,
            created=now,
            used=now,
            closed=why_closed,
        )

        def record(transaction: Transaction) -> None:
            put(transaction, run)
            put_checkpoint(transaction, copied)

        await self._store.write(record)
        return path

    async def _is_copied(self, run_id: str, why_closed: str) -> bool:
        """UserError if there is such a run for something else."""
        runs = await self._store.read(lambda db: select(db, ModelRow, "id = ?", [run_id]))
        if runs and runs[0].closed != why_closed:
            raise UserError(f"model_seq_id: {run_id!r} is in use for another model; count on")
        return bool(runs)

    async def _run(self, found: _Found) -> TrainingRun:
        row, newest = found.row, await self._catalog.newest(found.row.id)
        return TrainingRun(
            training_run_id=row.id,
            base_model=row.base_model,
            model_owner=row.tenant,
            lora_rank=row.rank,
            last_request_time=moment(max(row.used, found.last_request or 0)),
            user_metadata=row.metadata,
            last_checkpoint=newest.get("training"),
            last_sampler_checkpoint=newest.get("sampler"),
        )


def _with_last(db: sqlite3.Connection, where: str, values: list[object]) -> list[_Found]:
    last = "SELECT MAX(accepted) FROM requests WHERE owner = ?"
    return [
        _Found(row, db.execute(last, [row.id]).fetchone()[0])
        for row in select(db, ModelRow, where, values)
    ]
