"""The rows of requests in the journal. The functions that take a transaction are called through
`Store.write` or `Store.write_with_retries`, and the others through `Store.read` too.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from planish.server.durable.records import Record, Source, select, update_row
from planish.server.durable.store import StoredBody, Transaction
from planish.server.results import Category, Done, Failed

_REPLAYED_KINDS = (
    "create_model",
    "load_weights",
    "forward_backward",
    "optim_step",
    "publish_sampler",
)
"""Kinds of requests that change a model or publish its weights. A replay of the model runs these
requests again.
"""
IS_REDUNDANT = (
    "(kind = 'sample' OR NOT EXISTS (SELECT 1 FROM models WHERE models.id = owner"
    " AND closed IS NULL AND requests.seq > COALESCE(snapshot_seq, -1)))"
)
"""The condition in SQL for requests that no replay needs."""


@dataclass(frozen=True)
class RequestRow(Record):
    """A request without its body and its result."""

    table = "requests"
    id: str
    tenant: str
    kind: str
    owner: str
    """The id of the request's model or sampler. (`Sample.owner` is the tenant.)"""
    seq: int
    state: str
    """accepted, started, done, failed or refused. The top of schema.py explains the states."""
    digest: bytes | None
    """None if the request was rejected before its body was decoded."""
    accepted: float
    body_bytes: int = 0
    message: str | None = None
    category: Category | None = None
    error_class: str | None = None

    @property
    def is_unanswered(self) -> bool:
        """Whether the request has no answer."""
        return self.state in ("accepted", "started")

    @property
    def is_replayed(self) -> bool:
        """Whether a replay of the model runs this request again."""
        return self.state == "done" and self.kind in _REPLAYED_KINDS

    @property
    def was_rejected_on_arrival(self) -> bool:
        """Whether the request was rejected before it was queued. Its row was inserted with the
        error message.
        """
        return self.state == "refused" and self.digest is None

    @property
    def failure(self) -> Failed:
        """The answer of a failed or rejected request."""
        return Failed(self.message or "", self.category or "unknown", self.error_class)

    def with_state(self, state: str) -> Self:
        """Return the row with another state."""
        return replace(self, state=state)


def write_answer(
    transaction: Transaction,
    answered_row: RequestRow,
    answer: Done | Failed,
    now: float,
    transaction_hook: Callable[[Transaction], None] | None = None,
    begun: float | None = None,
) -> None:
    """Write an answer and the state of `answered_row`, and call `transaction_hook` in the same
    transaction. The request's body is removed, unless a replay may need it. `begun` is when the
    request's turn came; None if it never ran.
    """
    columns: dict[str, Any]
    match answer:
        case Done(content=content):
            stored = transaction.store_body(content)
            columns = {
                "result": stored.inline,
                "result_file": stored.file,
                "result_bytes": len(content),
            }
        case Failed(message, category, error_class):
            columns = {"message": message, "category": category, "error_class": error_class}
    update_row(
        transaction,
        RequestRow,
        answered_row.id,
        state=answered_row.state,
        begun=begun,
        finished=now,
        **columns,
    )
    if not answered_row.is_replayed:
        drop_bodies(transaction, "id = ?", (answered_row.id,))
    if transaction_hook is not None:
        transaction_hook(transaction)


def request_row(source: Source, request_id: str) -> RequestRow | None:
    """Return the row of a request; None if there is no such request."""
    rows = select(source, RequestRow, "id = ?", [request_id])
    return rows[0] if rows else None


def is_owner(connection: sqlite3.Connection, tenant: str, owner: str) -> bool:
    """Return whether the tenant ever had a model or a sampler with this id."""
    query = (
        "SELECT EXISTS (SELECT 1 FROM models WHERE id = ?1 AND tenant = ?2"
        " UNION SELECT 1 FROM samplers WHERE id = ?1 AND tenant = ?2)"
    )
    return bool(connection.execute(query, (owner, tenant)).fetchone()[0])


def stored_body(connection: sqlite3.Connection, request_id: str) -> StoredBody:
    """Return where the body of a request is stored."""
    return StoredBody(
        *connection.execute(
            "SELECT body, body_file FROM requests WHERE id = ?", (request_id,)
        ).fetchone()
    )


def stored_result(connection: sqlite3.Connection, request_id: str) -> StoredBody | None:
    """Return where the result of a request is stored; None if the result was removed."""
    row = connection.execute(
        "SELECT result, result_file FROM requests WHERE id = ?", (request_id,)
    ).fetchone()
    return None if row is None or row[0] is row[1] is None else StoredBody(*row)


def requests_of_model(source: Source, model_id: str, after: int) -> list[RequestRow]:
    """Return a model's requests with numbers above `after`, in order."""
    return select(source, RequestRow, "owner = ? AND seq > ? ORDER BY seq", [model_id, after])


def unanswered_requests(source: Source) -> list[RequestRow]:
    """Return the unanswered requests in the order of their arrival."""
    return select(source, RequestRow, "finished IS NULL ORDER BY accepted, seq")


def drop_bodies(transaction: Transaction, where: str, values: Sequence[Any]) -> None:
    """Remove the bodies of the selected requests."""
    where = f"{where} AND (body IS NOT NULL OR body_file IS NOT NULL)"
    _drop_files(transaction, "body_file", where, values)
    transaction.execute(f"UPDATE requests SET body = NULL, body_file = NULL WHERE {where}", values)


def delete_requests(transaction: Transaction, where: str, values: Sequence[Any]) -> int:
    """Delete the selected rows with their bodies and results. Return the number of deleted rows."""
    _drop_files(transaction, "body_file, result_file", where, values)
    return transaction.execute(f"DELETE FROM requests WHERE {where}", values).rowcount


def drop_results(transaction: Transaction, where: str, values: Sequence[Any]) -> None:
    """Remove the results of the selected requests."""
    _drop_files(transaction, "result_file", where, values)
    transaction.execute(
        f"UPDATE requests SET result = NULL, result_file = NULL, result_bytes = 0 WHERE {where}",
        values,
    )


def _drop_files(transaction: Transaction, columns: str, where: str, values: Sequence[Any]) -> None:
    """Drop the files that `columns` of the selected requests name."""
    for row in transaction.execute(f"SELECT {columns} FROM requests WHERE {where}", values):
        for file in row:
            transaction.drop_file(file)
