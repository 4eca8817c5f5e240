"""Upkeep of the checkpoints that clients saved: deletion of expired and excess checkpoints, and
comparison of the catalog's rows with the files.

An expired checkpoint is deleted when the server has run for `expiry_delay` since it expired
(expiry_clock.py).
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass

from planish.errors import CheckpointError, DamagedFileError, StorageError
from planish.server.durable.checkpoints import STORED_DIRECTORY, CheckpointCatalog
from planish.server.durable.expiry_clock import ExpiryClock
from planish.server.durable.records import CheckpointRow, delete_row, select, update_row
from planish.server.durable.store import Store, Transaction
from planish.server.engine_client import EngineClient
from planish.server.settings import ServerSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointMaintenance:
    """Deletes checkpoints that nobody may keep, and corrects rows that differ from the files."""

    _catalog: CheckpointCatalog
    _engine: EngineClient
    _store: Store
    _settings: ServerSettings
    _expiry_clock: ExpiryClock

    async def remove_expired(self) -> None:
        """Delete the checkpoints that expired at least `expiry_delay` of uptime ago."""
        expired_before = self._expiry_clock.before(self._settings.expiry_delay)
        expired = await self._store.read(select, CheckpointRow, "expires <= ?", [expired_before])
        deletions: list[Awaitable[None]] = []
        for row in expired:
            async with self._catalog.lock(row.path):
                # The tenant may have replaced the checkpoint, or let it live longer, meanwhile.
                if [current.expires for current in await self._catalog.rows(row.path)] == [
                    row.expires
                ]:
                    deletions.append(await self._catalog.delete_files_and_row(row))
        # Wait only after all deletions, because on a full disk the writes need the freed space.
        await asyncio.gather(*deletions)

    async def remove_excess(self) -> None:
        """Delete the oldest checkpoints of each run and kind beyond `max_checkpoints_per_run`.
        Published checkpoints are kept and count.
        """
        ranked = (
            "SELECT path, public, ROW_NUMBER() OVER (PARTITION BY run, CASE "
            f"WHEN instr(path, '{STORED_DIRECTORY}') THEN 2 "
            "WHEN instr(path, '/sampler_weights/') THEN 1 ELSE 0 END "
            "ORDER BY created DESC, path DESC) AS rank FROM checkpoints"
        )
        excess = await self._store.read(
            select,
            CheckpointRow,
            f"path IN (SELECT path FROM ({ranked}) WHERE rank > ? AND NOT public)",
            [self._settings.max_checkpoints_per_run],
        )
        for row in excess:
            async with self._catalog.lock(row.path):
                # The tenant may have saved or published the checkpoint again meanwhile.
                unchanged = [
                    current
                    for current in await self._catalog.rows(row.path)
                    if current.created == row.created and not current.public
                ]
                deletions = [
                    await self._catalog.delete_files_and_row(current) for current in unchanged
                ]
            await asyncio.gather(*deletions)
            for current in unchanged:
                _log.info(
                    "deleted %s of %s, because its run has at least %d newer checkpoints "
                    "(max_checkpoints_per_run)",
                    current.path,
                    current.tenant,
                    self._settings.max_checkpoints_per_run,
                )

    async def reconcile(self) -> None:
        """Remove the rows of checkpoints that are not on disk. The server calls this at its start,
        because a crash may have interrupted a deletion. The method lists directories and reads no
        manifests, so a damaged file cannot prevent the start. `verify` reads the manifests later.
        """
        on_disk = set(await self._engine.checkpoints.paths())
        query = "SELECT path, tenant, expires FROM checkpoints"
        rows = await self._store.read(lambda db: db.execute(query).fetchall())
        missing_paths, now = list[str](), time.time()
        for path, tenant, expires in rows:
            # A crash during the replacement of a checkpoint may leave the old one under a temporary
            # name. Reading the checkpoint in `_exists` restores its name.
            if path in on_disk or await self._exists(path):
                continue
            missing_paths.append(path)
            if expires is None or expires > now:
                _log.warning("%s of %s is no longer on disk", path, tenant)

        def record(transaction: Transaction) -> None:
            for path in missing_paths:
                delete_row(transaction, CheckpointRow, path)

        if missing_paths:
            with suppress(StorageError):  # on a full disk, the next start removes the rows
                await self._store.write(record)

    async def verify(self) -> None:
        """Read the manifests of all checkpoints one after another. Log damaged manifests. Correct
        rows that differ from their manifest, because a crash may have interrupted `set_ttl`. The
        server runs this in the background after its start.

        A damaged checkpoint stays in the catalog, because the operator may restore its files.
        """

        def read_next(connection: sqlite3.Connection, after: str) -> list[sqlite3.Row]:
            query = "SELECT path FROM checkpoints WHERE path > ? ORDER BY path LIMIT 100"
            return connection.execute(query, [after]).fetchall()

        last = ""
        while rows := await self._store.read(read_next, last):
            for row in rows:
                last = row["path"]
                await self._verify(last)

    async def _verify(self, path: str) -> None:
        async with self._catalog.lock(path):
            try:
                checkpoint = (await self._engine.checkpoints.info(path)).checkpoint
            except CheckpointError:  # the checkpoint was deleted or has expired
                return
            except (DamagedFileError, OSError) as error:
                _log.error(
                    "%s cannot be read: %s. Restore the file from a backup, or delete the "
                    "checkpoint",
                    path,
                    error,
                )
                return
            expires = None if checkpoint.expires_at is None else checkpoint.expires_at.timestamp()
            columns = {"expires": expires, "bytes": checkpoint.size_bytes or 0}
            [row] = await self._store.read(select, CheckpointRow, "path = ?", [path]) or [None]
            if row is not None and columns != {"expires": row.expires, "bytes": row.bytes}:
                self._store.write_in_background(update_row, CheckpointRow, path, **columns)

    async def _exists(self, path: str) -> bool:
        """Return whether the checkpoint is on disk, damaged or not."""
        try:
            return await self._engine.checkpoints.exists(path)
        except (DamagedFileError, OSError):
            return True
