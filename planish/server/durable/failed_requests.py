"""The bound on one tenant's rejected and failed requests in the journal.

Each of them has a row with an error message. A row is kept for `result_retention`, and longer if a
replay of its model needs it. A tenant can send invalid requests for ever, so their rows have a
bound: `rejected_request_bytes` per tenant, where a row counts as ROW_BYTES and its message. Beyond
the bound, the server deletes the oldest rows before their time, down to three quarters of it.

A replay needs few of these rows. A failed forward_backward makes the next optim_step fail, and a
failed optim_step clears the gradient. So of several failures in a row at most one has an effect,
and other kinds have none. The model's row in the database records up to which sequence number the
deleted requests have used up their numbers.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import orjson

from planish.server.durable import journal
from planish.server.durable.quotas import ROW_BYTES
from planish.server.durable.records import Source
from planish.server.durable.store import Store, Transaction
from planish.server.results import TooManyRequests
from planish.server.settings import TenantSettings

_MESSAGE_BYTES = "LENGTH(CAST(message AS BLOB))"
_IS_FAILED = "state IN ('failed', 'refused')"
_KEPT = 0.75
"""The part of the bound that is left after rows were deleted."""
_RETRY_SECONDS = 5.0
"""After a deletion that did not suffice, the next attempt is made this much later."""


@dataclass(frozen=True)
class AnsweredRow:
    """What decides whether a replay of a model needs the row of one of its requests."""

    id: str
    kind: str
    seq: int
    state: str
    finished: float | None
    """When the request was answered; None if it has no answer."""
    bytes: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether the request failed or was rejected."""
        return self.finished is not None and self.state != "done"


@dataclass
class FailedRequests:
    """The size of each tenant's rejected and failed requests in the journal, and its bound."""

    _store: Store
    _settings: TenantSettings
    _bytes: Counter[str] = field(default_factory=Counter)
    _full: dict[str, float] = field(default_factory=dict)
    """When the rows of a tenant were last found to exceed the bound although a replay needs all of
    them, in seconds of the monotonic clock.
    """

    async def begin(self) -> None:
        """Read the sizes of the rows that an earlier process left."""
        self._bytes = Counter(await self._store.read(_sizes))

    def add(self, tenant: str, message: str | None) -> None:
        """Count the row of a request that was rejected or failed with this message."""
        self._bytes[tenant] += ROW_BYTES + len((message or "").encode())

    async def check(self, tenant: str) -> None:
        """Delete the tenant's oldest rows if they reach the bound. Raise TooManyRequests if a
        replay needs so many of the rows that they still reach it.
        """
        limit = self._settings.rejected_request_bytes
        if self._bytes[tenant] < limit:
            return
        if time.monotonic() - self._full.get(tenant, -_RETRY_SECONDS) >= _RETRY_SECONDS:
            await self._trim(tenant)
        if self._bytes[tenant] >= limit:
            raise TooManyRequests(
                f"the rejected and failed requests of this tenant take {self._bytes[tenant]:,} "
                f"bytes in the server's journal, and may take {limit:,} (rejected_request_bytes); "
                "unload some models, or wait until the server has saved them",
                _RETRY_SECONDS,
            )

    async def trim(self) -> None:
        """Delete the oldest rows of every tenant that reaches the bound."""
        for tenant, size in list(self._bytes.items()):
            if size >= self._settings.rejected_request_bytes:
                await self._trim(tenant)

    async def _trim(self, tenant: str) -> None:
        limit = self._settings.rejected_request_bytes
        rows = await self._store.read(_removable, tenant)
        self._bytes[tenant] = await self._store.write(_remove, tenant, rows, int(_KEPT * limit))
        self._full.pop(tenant, None)
        if self._bytes[tenant] >= limit:
            self._full[tenant] = time.monotonic()


def _sizes(source: Source) -> dict[str, int]:
    query = (
        f"SELECT tenant, SUM({ROW_BYTES} + {_MESSAGE_BYTES}) FROM requests "
        f"WHERE {_IS_FAILED} GROUP BY tenant"
    )
    return dict(source.execute(query).fetchall())


def _size(source: Source, tenant: str) -> int:
    query = (
        f"SELECT COALESCE(SUM({ROW_BYTES} + {_MESSAGE_BYTES}), 0) FROM requests "
        f"WHERE {_IS_FAILED} AND tenant = ?"
    )
    return source.execute(query, [tenant]).fetchone()[0]


_COLUMNS = f"id, kind, seq, state, finished, {ROW_BYTES} + COALESCE({_MESSAGE_BYTES}, 0)"


def _removable(source: Source, tenant: str) -> list[tuple[str, AnsweredRow]]:
    """Return the failed rows that no replay needs, with their owners, in the order in which they
    may be deleted: the oldest first, and those of one model in the order of `redundant`.
    """
    unneeded = source.execute(
        f"SELECT owner, {_COLUMNS} FROM requests "
        f"WHERE {_IS_FAILED} AND tenant = ? AND {journal.NOT_NEEDED}",
        [tenant],
    )
    found: list[tuple[float, str, AnsweredRow]] = []
    for owner, *columns in unneeded.fetchall():
        row = AnsweredRow(*columns)
        found.append((row.finished or 0.0, owner, row))
    models = source.execute(
        "SELECT id, COALESCE(snapshot_seq, -1), passed FROM models "
        "WHERE tenant = ? AND closed IS NULL",
        [tenant],
    )
    for model, snapshot, passed in models.fetchall():
        after = source.execute(
            f"SELECT {_COLUMNS} FROM requests WHERE owner = ? AND seq > ? ORDER BY seq",
            [model, snapshot],
        )
        age = 0.0
        for row in redundant([AnsweredRow(*each) for each in after], snapshot + 1, passed):
            age = max(age, row.finished or 0.0)
            found.append((age, model, row))
    found.sort(key=lambda one: one[0])
    return [(owner, row) for _, owner, row in found]


def redundant(rows: Sequence[AnsweredRow], next_seq: int, passed: int) -> Iterator[AnsweredRow]:
    """Yield the failed rows of one model without which a replay does the same. They may be deleted
    in this order: a replay does the same after every deletion.

    `rows` are the requests from number `next_seq` on, in the order of their numbers. Missing
    numbers below `passed` are skipped. The first other number without an answer ends the search,
    because its request may still run.
    """
    has_gradient = False
    failed_part: AnsweredRow | None = None
    """The forward_backward that makes the next optim_step fail."""
    for row in rows:
        if row.finished is None or row.seq > max(next_seq, passed):
            return
        next_seq = row.seq + 1
        if row.kind == "forward_backward" and not row.has_failed:
            has_gradient = True
        elif row.kind == "forward_backward" and failed_part is None:
            failed_part = row
        elif row.kind == "forward_backward":
            yield row
        elif row.kind == "optim_step":
            if row.has_failed and failed_part is not None:
                yield failed_part  # the failed optim_step clears the gradient without it
            if row.has_failed and not has_gradient:
                yield row
            has_gradient, failed_part = False, None
        elif row.kind == "load_weights" and not row.has_failed:
            # The engine decides what becomes of a pending gradient. So keep the rows before, and
            # the next failure too.
            has_gradient, failed_part = True, None
        elif row.has_failed and row.kind not in ("create_model", "unload_model"):
            yield row


def _remove(
    transaction: Transaction, tenant: str, rows: list[tuple[str, AnsweredRow]], limit: int
) -> int:
    """Delete rows, from the first on, until the tenant's rows have at most `limit` bytes. Return
    what is left, in bytes.
    """
    excess = _size(transaction, tenant) - limit
    chosen: list[str] = []
    used: defaultdict[str, int] = defaultdict(int)
    for owner, row in rows:
        if excess <= 0:
            break
        excess -= row.bytes
        chosen.append(row.id)
        used[owner] = max(used[owner], row.seq + 1)
    ids = orjson.dumps(chosen).decode()
    journal.delete(transaction, "id IN (SELECT value FROM json_each(?))", [ids])
    for owner, passed in used.items():
        transaction.execute(
            "UPDATE models SET passed = MAX(passed, ?) WHERE id = ? AND closed IS NULL",
            [passed, owner],
        )
    return _size(transaction, tenant)
