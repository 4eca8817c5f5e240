"""The rows of requests: what may be asked of them, and what is written. Each function belongs into
a transaction or a read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from planish.server.answers import Category, Done, Failed
from planish.server.store import StoredBody, Transaction

_COLUMNS = "id, tenant, kind, owner, seq, state, digest, accepted, body_bytes, message, category, error_class"


_REPLAYED = ("create_model", "load_weights", "forward_backward", "optim_step", "publish_sampler")
"""Kinds of requests that change a model or what comes of it: done again to bring it back."""


@dataclass(frozen=True)
class Row:
    """A request without its body and its result."""

    id: str
    tenant: str
    kind: str
    owner: str
    """The model or sampler that it is about."""
    seq: int
    state: str
    digest: bytes | None
    """None: it was refused before its body was understood."""
    accepted: float
    body_bytes: int = 0
    message: str | None = None
    category: Category | None = None
    error_class: str | None = None

    @classmethod
    def of(cls, found: sqlite3.Row) -> Self:
        return cls(*found)

    @property
    def is_to_do(self) -> bool:
        return self.state in ("accepted", "started")

    @property
    def is_replayed(self) -> bool:
        """Whether it is done again, from its body, to bring a model back."""
        return self.state == "done" and self.kind in _REPLAYED

    def with_state(self, state: str) -> Self:
        return replace(self, state=state)


def insert(
    transaction: Transaction,
    new: Row,
    content: bytes,
    also: Callable[[Transaction], None] | None = None,
) -> Row | None:
    """Journal a request. If its id is taken, nothing is written, and the answer is the row that has
    it.
    """
    found = row(transaction, new.id)
    if found is not None:
        return found
    stored = transaction.store(content)
    transaction.execute(
        f"INSERT INTO requests ({_COLUMNS}, body, body_file) VALUES ({'?, ' * 12} ?, ?)",
        (
            *(
                new.id,
                new.tenant,
                new.kind,
                new.owner,
                new.seq,
                new.state,
                new.digest,
                new.accepted,
                new.body_bytes,
            ),
            *(new.message, new.category, new.error_class, stored.inline, stored.file),
        ),
    )
    if not new.is_to_do:
        transaction.execute("UPDATE requests SET finished = accepted WHERE id = ?", (new.id,))
    if also is not None:
        also(transaction)
    return None


def mark(transaction: Transaction, request_id: str, state: str) -> None:
    transaction.execute("UPDATE requests SET state = ? WHERE id = ?", (state, request_id))


def finish(
    transaction: Transaction,
    done: Row,
    answer: Done | Failed,
    now: float,
    also: Callable[[Transaction], None] | None = None,
) -> None:
    """Write an answer down. The body goes, unless it may be needed to bring a model back."""
    match answer:
        case Done(content=content):
            stored = transaction.store(content)
            transaction.execute(
                "UPDATE requests SET state = ?, finished = ?, result = ?, result_file = ?, result_bytes = ? WHERE id = ?",
                (done.state, now, stored.inline, stored.file, len(content), done.id),
            )
        case Failed():
            transaction.execute(
                "UPDATE requests SET state = ?, finished = ?, message = ?, category = ?, error_class = ? WHERE id = ?",
                (done.state, now, answer.message, answer.category, answer.error_class, done.id),
            )
    if not done.is_replayed:
        drop_bodies(transaction, "id = ?", (done.id,))
    if also is not None:
        also(transaction)


def row(source: Transaction | sqlite3.Connection, request_id: str) -> Row | None:
    found = source.execute(
        f"SELECT {_COLUMNS} FROM requests WHERE id = ?", (request_id,)
    ).fetchone()
    return None if found is None else Row.of(found)


def is_owner(connection: sqlite3.Connection, tenant: str, owner: str) -> bool:
    """Whether the tenant ever had a model or a sampler of this id."""
    query = "SELECT EXISTS (SELECT 1 FROM models WHERE id = ?1 AND tenant = ?2 UNION SELECT 1 FROM samplers WHERE id = ?1 AND tenant = ?2)"
    return bool(connection.execute(query, (owner, tenant)).fetchone()[0])


def body(connection: sqlite3.Connection, request_id: str) -> StoredBody:
    return StoredBody(
        *connection.execute(
            "SELECT body, body_file FROM requests WHERE id = ?", (request_id,)
        ).fetchone()
    )


def result(connection: sqlite3.Connection, request_id: str) -> StoredBody | None:
    """None: it was removed."""
    found = connection.execute(
        "SELECT result, result_file FROM requests WHERE id = ?", (request_id,)
    ).fetchone()
    return None if found is None or found[0] is found[1] is None else StoredBody(*found)


def of_model(connection: sqlite3.Connection, model_id: str, after: int) -> list[Row]:
    """The requests with higher numbers, in order."""
    query = f"SELECT {_COLUMNS} FROM requests WHERE owner = ? AND seq > ? ORDER BY seq"
    return [Row.of(found) for found in connection.execute(query, (model_id, after))]


def to_do(connection: sqlite3.Connection) -> list[Row]:
    """What was accepted and not answered, in the order in which it came."""
    query = f"SELECT {_COLUMNS} FROM requests WHERE finished IS NULL ORDER BY accepted, seq"
    return [Row.of(found) for found in connection.execute(query)]


def drop_bodies(transaction: Transaction, where: str, values: Sequence[Any]) -> None:
    where = f"{where} AND (body IS NOT NULL OR body_file IS NOT NULL)"
    for found in transaction.execute(
        f"SELECT body_file FROM requests WHERE {where}", values
    ).fetchall():
        transaction.drop(found[0])
    transaction.execute(f"UPDATE requests SET body = NULL, body_file = NULL WHERE {where}", values)


def delete(transaction: Transaction, where: str, values: Sequence[Any]) -> int:
    """Remove rows with all that they hold; answers how many."""
    for found in transaction.execute(
        f"SELECT body_file, result_file FROM requests WHERE {where}", values
    ).fetchall():
        transaction.drop(found[0])
        transaction.drop(found[1])
    return transaction.execute(f"DELETE FROM requests WHERE {where}", values).rowcount


def drop_results(transaction: Transaction, where: str, values: Sequence[Any]) -> None:
    for found in transaction.execute(
        f"SELECT result_file FROM requests WHERE {where}", values
    ).fetchall():
        transaction.drop(found[0])
    transaction.execute(
        f"UPDATE requests SET result = NULL, result_file = NULL, result_bytes = 0 WHERE {where}",
        values,
    )
