"""The rows of sessions, models, samplers and checkpoints. Times are seconds since 1970."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, Self, TypeVar

from planish.server.durable.store import Transaction
from planish.server.results import SessionSpec
from planish.types import Checkpoint, CheckpointPath, LoraConfig

Source = Transaction | sqlite3.Connection


@dataclass(frozen=True)
class Record:
    """One row; fields are columns. Mappings and configs are JSON there."""

    @classmethod
    def columns(cls) -> str:
        return ", ".join(field.name for field in fields(cls))

    @classmethod
    def of(cls, row: sqlite3.Row) -> Self:
        return cls(**{key: row[key] for key in row.keys()})  # noqa: SIM118  (a RequestRow iterates over values)

    def values(self) -> list[Any]:
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True)
class SessionRow(Record):
    id: str
    tenant: str
    spec: str
    created: float
    seen: float
    ended: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class ModelRow(Record):
    id: str
    tenant: str
    session: str
    base_model: str
    lora: str
    user_metadata: str
    training_bytes: int
    """In memory: the adapter with what trains it,"""
    sampling_bytes: int
    """and one version of its weights."""
    created: float
    used: float
    passed: int = 0
    """Missing numbers below this are not waited for."""
    snapshot_seq: int | None = None
    """The snapshot is of the weights after this request."""
    snapshot: str | None = None
    """Its path."""
    arch: str | None = None
    """Known once the model was created."""
    closed: str | None = None
    """Why it takes no more requests."""

    @property
    def rank(self) -> int:
        return self.lora_config.rank

    @property
    def lora_config(self) -> LoraConfig:
        return LoraConfig(**json.loads(self.lora))

    @property
    def metadata(self) -> dict[str, str]:
        return json.loads(self.user_metadata)


@dataclass(frozen=True)
class SamplerRow(Record):
    id: str
    tenant: str
    session: str
    base_model: str
    model_path: str | None
    """The checkpoint that it was asked for by."""
    model: str | None
    """The model whose weights it has, if it was published without a name,"""
    seq: int | None
    """by the request of this number."""
    source: str | None
    """A private checkpoint of its weights. None: it has none, or they are not saved yet."""
    memory_bytes: int
    """0 for a sampler of a base model, which is in memory anyway."""
    created: float
    used: float
    bytes: int = 0
    """On disk, of a published one."""
    closed: str | None = None


@dataclass(frozen=True)
class CheckpointRow(Record):
    path: str
    tenant: str
    run: str
    bytes: int
    made: float
    expires: float | None
    user_metadata: str
    public: int = 0

    @classmethod
    def made_of(cls, checkpoint: Checkpoint, tenant: str) -> Self:
        run = CheckpointPath.parse(checkpoint.tinker_path).run_id
        expires = checkpoint.expires_at.timestamp() if checkpoint.expires_at else None
        metadata = json.dumps(checkpoint.user_metadata or {})
        made = checkpoint.time.timestamp()
        return cls(
            checkpoint.tinker_path, tenant, run, checkpoint.size_bytes or 0, made, expires, metadata
        )

    @property
    def checkpoint(self) -> Checkpoint:
        path = CheckpointPath.parse(self.path)
        return Checkpoint(
            checkpoint_id=path.checkpoint_id,
            checkpoint_type=path.checkpoint_type,
            time=moment(self.made),
            tinker_path=self.path,
            size_bytes=self.bytes,
            public=bool(self.public),
            user_metadata=json.loads(self.user_metadata) or None,
            expires_at=None if self.expires is None else moment(self.expires),
        )


RecordT = TypeVar("RecordT", bound=Record)

_TABLES: dict[type[Record], str] = {
    SessionRow: "sessions",
    ModelRow: "models",
    SamplerRow: "samplers",
    CheckpointRow: "checkpoints",
}


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def text_of(value: LoraConfig | SessionSpec | Mapping[str, str]) -> str:
    """The JSON of a column."""
    return json.dumps(dict(value) if isinstance(value, Mapping) else asdict(value))


def put(transaction: Transaction, record: Record) -> None:
    """Insert a row, or replace the one of its key."""
    places = ", ".join("?" * len(fields(record)))
    table = _TABLES[type(record)]
    transaction.execute(
        f"INSERT OR REPLACE INTO {table} ({record.columns()}) VALUES ({places})", record.values()
    )


def put_checkpoint(transaction: Transaction, row: CheckpointRow) -> None:
    """One that takes the place of another stays published if that was."""
    before = select(transaction, CheckpointRow, "path = ?", [row.path])
    put(transaction, replace(row, public=before[0].public) if before else row)


def change(transaction: Transaction, kind: type[Record], key: str, **columns: Any) -> None:
    names = ", ".join(f"{name} = ?" for name in columns)
    transaction.execute(
        f"UPDATE {_TABLES[kind]} SET {names} WHERE {_key(kind)} = ?", [*columns.values(), key]
    )


def change_each(
    transaction: Transaction, kind: type[Record], column: str, values: Iterable[tuple[float, str]]
) -> None:
    """Set one column of many rows; `values` are (value, key)."""
    for pair in values:
        transaction.execute(f"UPDATE {_TABLES[kind]} SET {column} = ? WHERE {_key(kind)} = ?", pair)


def remove(transaction: Transaction, kind: type[Record], key: str) -> None:
    transaction.execute(f"DELETE FROM {_TABLES[kind]} WHERE {_key(kind)} = ?", (key,))


def select(
    source: Source, kind: type[RecordT], where: str, values: Sequence[Any] = ()
) -> list[RecordT]:
    """`where` may end with an order and a limit."""
    found = source.execute(f"SELECT {kind.columns()} FROM {_TABLES[kind]} WHERE {where}", values)
    return [kind.of(row) for row in found]


def count(source: Source, kind: type[Record], where: str, values: Sequence[Any] = ()) -> int:
    return source.execute(f"SELECT COUNT(*) FROM {_TABLES[kind]} WHERE {where}", values).fetchone()[
        0
    ]


def _key(kind: type[Record]) -> str:
    return fields(kind)[0].name
