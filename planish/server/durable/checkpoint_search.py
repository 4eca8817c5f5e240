"""Searches among the checkpoints of a tenant."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planish.server.durable.checkpoints import IS_UNEXPIRED, STORED_DIRECTORY
from planish.server.durable.records import PAGE_BYTES, CheckpointRow, Source, item_bytes
from planish.types import Checkpoint

MAX_SCANNED = 1000
"""The maximum number of checkpoints whose metadata one search reads. The search for the next page
continues after the last of these checkpoints.
"""
_IS_OF_TYPE = {
    "training": "instr(path, '/weights/')",
    "sampler": f"instr(path, '/sampler_weights/') AND NOT instr(path, '{STORED_DIRECTORY}')",
    "external": f"instr(path, '{STORED_DIRECTORY}')",
}
CHECKPOINT_TYPES = tuple(_IS_OF_TYPE)
"""The types that a search may name."""


@dataclass(frozen=True)
class CheckpointSearch:
    """Which checkpoints are searched."""

    metadata: Mapping[str, str]
    """Keys and values that the metadata of a checkpoint must have."""
    checkpoint_type: str | None
    """One of CHECKPOINT_TYPES; None for all."""
    base_models: Sequence[str] | None
    """The names of base models; None for all."""
    limit: int
    """The maximum number of checkpoints on a page."""
    after: tuple[float, str] | None
    """The creation time and the stored path of the last checkpoint that the previous page read;
    None for the first page.
    """

    def matches(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint has the metadata."""
        metadata = checkpoint.user_metadata or {}
        return all(metadata.get(key) == value for key, value in self.metadata.items())


@dataclass(frozen=True)
class FoundCheckpoints:
    """One page of a search, newest first."""

    checkpoints: Sequence[Checkpoint]
    base_models: Mapping[str, str]
    """The base models of the checkpoints, by the ids of their runs."""
    last: Checkpoint | None
    """The last checkpoint that was read; None if there are no further ones."""


def search_checkpoints(db: Source, tenant: str, search: CheckpointSearch) -> FoundCheckpoints:
    """Return the checkpoints of a tenant that match. A page ends early after MAX_SCANNED
    checkpoints, or when the metadata of its checkpoints exceed PAGE_BYTES.
    """
    where, values = _condition(tenant, search)
    columns = CheckpointRow.columns()
    cursor = db.execute(
        f"SELECT {columns} FROM checkpoints WHERE {where} ORDER BY created DESC, path", values
    )
    rows: list[CheckpointRow] = []
    last: CheckpointRow | None = None
    num_scanned = size = 0
    for values_of_row in cursor:
        row = CheckpointRow.from_row(values_of_row)
        is_found = search.matches(row.checkpoint)
        if (
            num_scanned == MAX_SCANNED
            or size > PAGE_BYTES
            or (is_found and len(rows) == search.limit)
        ):
            break
        last, num_scanned = row, num_scanned + 1
        if is_found:
            rows.append(row)
            size += item_bytes(row.path, row.user_metadata)
    else:
        last = None
    cursor.close()
    return FoundCheckpoints(
        [row.checkpoint for row in rows],
        base_models_of(db, (row.run for row in rows)),
        None if last is None else last.checkpoint,
    )


def _condition(tenant: str, search: CheckpointSearch) -> tuple[str, list[Any]]:
    conditions, values = [f"tenant = ? AND {IS_UNEXPIRED}"], [tenant, time.time()]
    if search.checkpoint_type is not None:
        conditions.append(_IS_OF_TYPE[search.checkpoint_type])
    if search.base_models is not None:
        conditions.append(
            "run IN (SELECT id FROM models WHERE base_model IN (SELECT value FROM json_each(?)))"
        )
        values.append(json.dumps(search.base_models))
    if search.after is not None:
        created, path = search.after
        conditions.append("(created < ? OR (created = ? AND path > ?))")
        values += [created, created, path]
    return " AND ".join(conditions), values


def base_models_of(db: Source, runs: Iterable[str]) -> dict[str, str]:
    """Return the base models of runs, by the ids of the runs."""
    query = "SELECT id, base_model FROM models WHERE id IN (SELECT value FROM json_each(?))"
    return dict(db.execute(query, [json.dumps(sorted(set(runs)))]).fetchall())
