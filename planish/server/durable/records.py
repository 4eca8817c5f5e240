"""The rows of sessions, models, samplers, checkpoints and requests. Times are seconds since
1970.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, Self, TypeVar

from planish.server.durable.store import Transaction
from planish.server.results import SessionSpec
from planish.types import Checkpoint, CheckpointPath, LoraConfig

Source = Transaction | sqlite3.Connection


@dataclass(frozen=True)
class Record:
    """One row of a table. The fields are the columns, and the first one is the key. Mappings and
    configs are stored as JSON.
    """

    table: ClassVar[str]
    """The name of the table."""

    @classmethod
    def columns(cls) -> str:
        """Return the names of the columns, separated by commas."""
        return ", ".join(field.name for field in fields(cls))

    @classmethod
    def from_row(cls, row: sqlite3.Row) -> Self:
        """Return the record for one row of a query result."""
        return cls(**{key: row[key] for key in row.keys()})  # noqa: SIM118  (a Row iterates over values)

    def values(self) -> list[Any]:
        """Return the values in the order of the columns."""
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True)
class SessionRow(Record):
    """A session."""

    table = "sessions"
    id: str
    tenant: str
    spec: str
    """The `SessionSpec` as JSON."""
    created: float
    used: float
    """When the session was last used."""
    ended: float | None = None
    """When the session ended; None while it is open."""
    reason: str | None = None
    """Why the session ended; None while it is open."""
    bytes: int = 0
    """Estimated size of the row."""


@dataclass(frozen=True)
class ModelRow(Record):
    """A training model, or a run that contains only copied checkpoints."""

    table = "models"
    id: str
    tenant: str
    session: str
    base_model: str
    lora: str
    """The `LoraConfig` as JSON."""
    user_metadata: str
    training_bytes: int
    """Memory of the adapter and its optimizer state, in bytes."""
    sampling_bytes: int
    """Memory of one version of the adapter's weights for sampling, in bytes."""
    created: float
    used: float
    skipped_below: int = 0
    """The model no longer waits for a missing request with a sequence number below this one."""
    snapshot_seq: int | None = None
    """The sequence number of the last request that the snapshot includes."""
    snapshot: str | None = None
    """The path of the snapshot."""
    arch: str | None = None
    """The architecture; None until the model is created."""
    closed: str | None = None
    """Why the model takes no more requests; None while it is open."""
    bytes: int = 0
    """Estimated size of the row and of the client's texts in the manifest of a snapshot."""

    @property
    def last_snapshot(self) -> int:
        """The sequence number of the last request in the last snapshot; -1 without a snapshot."""
        return -1 if self.snapshot_seq is None else self.snapshot_seq

    @property
    def rank(self) -> int:
        """The LoRA rank."""
        return self.lora_config.rank

    @property
    def lora_config(self) -> LoraConfig:
        """The LoRA configuration."""
        return LoraConfig(**json.loads(self.lora))

    @property
    def metadata(self) -> dict[str, str]:
        """The client's metadata."""
        return json.loads(self.user_metadata)


@dataclass(frozen=True)
class SamplerRow(Record):
    """A sampler."""

    table = "samplers"
    id: str
    tenant: str
    session: str
    base_model: str
    model_path: str | None
    """The checkpoint that the client named; None if it named only a base model."""
    model: str | None
    """The model that published this sampler without a name; None for all other samplers."""
    seq: int | None
    """The sequence number of the request of `model` that published this sampler."""
    source: str | None
    """The private checkpoint of the sampler's weights. None for a sampler of a base model, and for
    a published sampler until its weights are saved.
    """
    memory_bytes: int
    """Memory of the adapter's weights in bytes; 0 for a sampler of a base model (no adapter)."""
    created: float
    used: float
    bytes: int = 0
    """Size of the weights on disk; 0 for a sampler of a base model, and for a published sampler
    until its weights are saved.
    """
    closed: str | None = None
    """Why the sampler is closed; None while it is open."""


@dataclass(frozen=True)
class CheckpointRow(Record):
    """A named checkpoint."""

    table = "checkpoints"
    path: str
    tenant: str
    run: str
    """The id of the run that the checkpoint belongs to."""
    bytes: int
    """Size of the checkpoint on disk."""
    created: float
    """When the checkpoint was saved."""
    expires: float | None
    """When the checkpoint expires; None if it never expires."""
    user_metadata: str
    public: int = 0
    alias: str | None = None
    """A further name under which OpenAI clients find the checkpoint. Only an adapter that the
    operator has loaded has one.
    """

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, tenant: str) -> Self:
        """Return the row of a tenant's checkpoint."""
        run = CheckpointPath.parse(checkpoint.tinker_path).run_id
        expires = checkpoint.expires_at.timestamp() if checkpoint.expires_at else None
        metadata = json.dumps(checkpoint.user_metadata or {})
        created = checkpoint.time.timestamp()
        return cls(
            checkpoint.tinker_path,
            tenant,
            run,
            checkpoint.size_bytes or 0,
            created,
            expires,
            metadata,
        )

    @property
    def checkpoint(self) -> Checkpoint:
        """The `Checkpoint` that clients get."""
        path = CheckpointPath.parse(self.path)
        return Checkpoint(
            checkpoint_id=path.checkpoint_id,
            checkpoint_type=path.checkpoint_type,
            time=utc_time(self.created),
            tinker_path=self.path,
            size_bytes=self.bytes,
            public=bool(self.public),
            user_metadata=json.loads(self.user_metadata) or None,
            expires_at=None if self.expires is None else utc_time(self.expires),
        )


RecordT = TypeVar("RecordT", bound=Record)


def utc_time(seconds: float) -> datetime:
    """Return the UTC time for `seconds` since 1970."""
    return datetime.fromtimestamp(seconds, UTC)


def to_json_text(value: LoraConfig | SessionSpec | Mapping[str, str]) -> str:
    """Return the JSON that a column stores for `value`."""
    fields = dict(value) if isinstance(value, Mapping) else asdict(value)
    return json.dumps(fields, ensure_ascii=False)


def upsert(transaction: Transaction, record: Record) -> None:
    """Insert a row, or replace the row with the same key."""
    placeholders = ", ".join("?" * len(fields(record)))
    transaction.execute(
        f"INSERT OR REPLACE INTO {record.table} ({record.columns()}) VALUES ({placeholders})",
        record.values(),
    )


def upsert_checkpoint(transaction: Transaction, row: CheckpointRow) -> None:
    """Insert or replace the row of a checkpoint. A path keeps its alias, and one that was public
    before stays public. Another checkpoint with the alias of a new row loses the alias.
    """
    existing = select(transaction, CheckpointRow, "path = ?", [row.path])
    if existing:
        row = replace(row, public=existing[0].public, alias=existing[0].alias)
    elif row.alias is not None:
        transaction.execute("UPDATE checkpoints SET alias = NULL WHERE alias = ?", [row.alias])
    upsert(transaction, row)


def update_row(
    transaction: Transaction, record_type: type[Record], key: str, **columns: Any
) -> None:
    """Set columns of one row."""
    names = ", ".join(f"{name} = ?" for name in columns)
    transaction.execute(
        f"UPDATE {record_type.table} SET {names} WHERE {_key_column(record_type)} = ?",
        [*columns.values(), key],
    )


def update_rows(
    transaction: Transaction,
    record_type: type[Record],
    column: str,
    values: Iterable[tuple[float, str]],
) -> None:
    """Set one column of many rows. `values` are pairs (value, key)."""
    for pair in values:
        transaction.execute(
            f"UPDATE {record_type.table} SET {column} = ? WHERE {_key_column(record_type)} = ?",
            pair,
        )


def delete_row(transaction: Transaction, record_type: type[Record], key: str) -> None:
    """Delete one row."""
    transaction.execute(
        f"DELETE FROM {record_type.table} WHERE {_key_column(record_type)} = ?", (key,)
    )


def select(
    source: Source,
    record_type: type[RecordT],
    where: str,
    values: Sequence[Any] = (),
    omit: str | None = None,
) -> list[RecordT]:
    """Return the selected records. `where` may end with an order and a limit. The column named
    `omit` is not read, and the records have an empty string there.
    """
    columns = record_type.columns()
    if omit is not None:
        columns = columns.replace(omit, f"'' AS {omit}")
    rows = source.execute(f"SELECT {columns} FROM {record_type.table} WHERE {where}", values)
    return [record_type.from_row(row) for row in rows]


PAGE_BYTES = 8 << 20
"""The maximum size of the texts on one page of a list, in bytes. A page of 1,000 items could
otherwise be much larger, because each item has metadata.
"""
_ITEM_OVERHEAD_BYTES = 512


def item_bytes(*texts: str) -> int:
    """Return the number of bytes that an item with these texts adds to a page."""
    return _ITEM_OVERHEAD_BYTES + sum(map(len, texts))


def select_checkpoint_page(
    source: Source, where: str, values: Sequence[Any]
) -> tuple[list[CheckpointRow], bool]:
    """Return the selected checkpoints, and whether the list was cut off because its texts exceed
    PAGE_BYTES. The first selected checkpoint is always in the list, whatever its size.
    """
    columns = CheckpointRow.columns()
    # The cursor reads row by row, so rows after the cut are never in memory.
    cursor = source.execute(f"SELECT {columns} FROM checkpoints WHERE {where}", values)
    records, size = list[CheckpointRow](), 0
    for row in cursor:
        record = CheckpointRow.from_row(row)
        size += item_bytes(record.path, record.user_metadata)
        if records and size > PAGE_BYTES:
            cursor.close()
            return records, True
        records.append(record)
    return records, False


def select_keys(
    source: Source, record_type: type[Record], where: str, values: Sequence[Any] = ()
) -> list[str]:
    """Return the keys of the selected records. `where` may end with an order and a limit."""
    rows = source.execute(
        f"SELECT {_key_column(record_type)} FROM {record_type.table} WHERE {where}", values
    )
    return [row[0] for row in rows]


def select_key_page(
    source: Source, record_type: type[Record], tenant: str, limit: int, offset: int
) -> tuple[list[str], int]:
    """Return the keys on a page of a tenant's records, newest first, and the number of all its
    records.
    """
    newest_first = "tenant = ? ORDER BY created DESC LIMIT ? OFFSET ?"
    keys = select_keys(source, record_type, newest_first, [tenant, limit, offset])
    return keys, count(source, record_type, "tenant = ?", [tenant])


def count(source: Source, record_type: type[Record], where: str, values: Sequence[Any] = ()) -> int:
    """Return the number of selected records."""
    return source.execute(
        f"SELECT COUNT(*) FROM {record_type.table} WHERE {where}", values
    ).fetchone()[0]


def _key_column(record_type: type[Record]) -> str:
    return fields(record_type)[0].name
