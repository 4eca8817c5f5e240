"""Training runs. Every model that a tenant created is a run, whether it is open or closed."""

from __future__ import annotations

import sqlite3
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from planish.server.durable.checkpoints import IS_UNEXPIRED, CheckpointCatalog
from planish.server.durable.records import (
    PAGE_BYTES,
    ModelRow,
    item_bytes,
    select_key_page,
    utc_time,
)
from planish.server.durable.store import Store
from planish.server.models.catalog import Models
from planish.server.results import NotFound, Page, Tenant, TrainingRun
from planish.types import Checkpoint


@dataclass(frozen=True)
class TrainingRuns:
    """Lists the runs of tenants and the checkpoints in them."""

    _store: Store
    _models: Models
    _checkpoints: CheckpointCatalog

    async def page(self, tenant: Tenant, limit: int, offset: int) -> Page[TrainingRun]:
        """Return a page of the tenant's runs, newest first. A page ends early when the metadata of
        its runs exceed PAGE_BYTES. `Page.limit` is then the number of runs on the page.
        """
        run_ids, total = await self._store.read(
            select_key_page, ModelRow, tenant.name, limit, offset
        )
        runs, size = list[TrainingRun](), 0
        for run_id in run_ids:
            with suppress(NotFound):  # the run was removed meanwhile
                run = await self.run(tenant, run_id)
                newest = (run.last_checkpoint, run.last_sampler_checkpoint)
                metadata = [
                    run.user_metadata,
                    *(checkpoint.user_metadata or {} for checkpoint in newest if checkpoint),
                ]
                size += item_bytes(
                    *(text for mapping in metadata for text in chain(*mapping.items()))
                )
                if runs and size > PAGE_BYTES:
                    return Page(runs, offset, len(runs), total)
                runs.append(run)
        return Page(runs, offset, limit, total)

    async def run(self, tenant: Tenant, run_id: str) -> TrainingRun:
        """Return one run. Raise NotFound if the tenant has no run with this id."""
        row = await self._models.row(tenant, run_id)
        last_request = await self._store.read(_last_request_time, run_id)
        newest = await self._checkpoints.newest_by_type(run_id)
        return TrainingRun(
            training_run_id=row.id,
            base_model=row.base_model,
            model_owner=row.tenant,
            lora_rank=row.rank,
            last_request_time=utc_time(max(row.used, last_request)),
            user_metadata=row.metadata,
            last_checkpoint=newest.get("training"),
            last_sampler_checkpoint=newest.get("sampler"),
        )

    async def base_models(self, tenant: Tenant) -> dict[str, str]:
        """Return the base models of the tenant's runs, by the id of the run."""
        query = "SELECT id, base_model FROM models WHERE tenant = ?"
        return await self._store.read(lambda db: dict(db.execute(query, [tenant.name]).fetchall()))

    async def list_checkpoints(
        self, tenant: Tenant, run_id: str | None = None, limit: int | None = None, offset: int = 0
    ) -> Page[Checkpoint]:
        """Return a page of the tenant's checkpoints, newest first. `run_id` selects the checkpoints
        of one run. Raise NotFound if the tenant has no run with this id.
        """
        if run_id is not None:
            await self._models.row(tenant, run_id)
        return await self._checkpoints.page(tenant, run_id, limit, offset)

    async def size_of_session(self, tenant: Tenant, session_id: str) -> tuple[int, int]:
        """Return the number of checkpoints of a session's runs, and their total size in bytes."""
        query = (
            "SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM checkpoints WHERE tenant = ? "
            f"AND {IS_UNEXPIRED} AND run IN (SELECT id FROM models WHERE session = ?)"
        )
        values = [tenant.name, time.time(), session_id]
        number, size = await self._store.read(lambda db: db.execute(query, values).fetchone())
        return number, size


def _last_request_time(db: sqlite3.Connection, owner: str) -> float:
    query = "SELECT COALESCE(MAX(accepted), 0) FROM requests WHERE owner = ?"
    return db.execute(query, [owner]).fetchone()[0]
