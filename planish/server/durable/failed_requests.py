"""The size limit for each tenant's rejected and failed requests in the journal.

Each rejected or failed request has a row with an error message. The row is kept for
`result_retention`, or longer if a replay of its model needs it. A tenant can send any number of
invalid requests, so the rows of one tenant have a limit: `max_rejected_request_bytes`. The size of
a row is ROW_BYTES plus the length of its message. When the rows reach the limit, the server deletes
the oldest rows early, until the rest takes three quarters of the limit.

A replay needs few of these rows. A failed forward_backward makes the next optim_step fail, and a
failed optim_step clears the gradient. So only the first of several failed forward_backward requests
matters, and a failed optim_step matters only if there is a gradient. Failed requests of all other
kinds have no effect on the model.

A model waits for missing sequence numbers, but not for numbers below `skipped_below` in its row. So the
deletion also raises `skipped_below` above the numbers of the deleted requests.
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
_TARGET_FRACTION = 0.75
"""The size of the rows after a deletion, as a fraction of the limit."""
_RETRY_SECONDS = 5.0
"""If the rows still reach the limit after a deletion, the next deletion waits for this long."""


@dataclass(frozen=True)
class AnsweredRow:
    """The columns of a request's row that decide whether a replay of the model needs the row."""

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
    """Tracks and limits the size of each tenant's rejected and failed requests in the journal."""

    _store: Store
    _settings: TenantSettings
    _bytes: Counter[str] = field(default_factory=Counter[str])
    _full_since: dict[str, float] = field(default_factory=dict[str, float])
    """The tenants whose rows still reached the limit after the last deletion. The value is the time
    of this deletion, in seconds of the monotonic clock.
    """

    async def load_sizes(self) -> None:
        """Read the sizes of the rows of earlier processes from the database."""
        self._bytes = Counter(await self._store.read(_failed_bytes_by_tenant))

    def add(self, tenant: str, message: str | None) -> None:
        """Add the size of one row: a request was rejected, or failed, with this message."""
        self._bytes[tenant] += ROW_BYTES + len((message or "").encode())

    async def check(self, tenant: str) -> None:
        """Delete the tenant's oldest rows if its rows reach the limit. Raise TooManyRequests if the
        rows that a replay needs still reach the limit.
        """
        limit = self._settings.max_rejected_request_bytes
        if self._bytes[tenant] < limit:
            return
        if time.monotonic() - self._full_since.get(tenant, -_RETRY_SECONDS) >= _RETRY_SECONDS:
            await self._trim(tenant)
        if self._bytes[tenant] >= limit:
            raise TooManyRequests(
                f"the rejected and failed requests of this tenant take {self._bytes[tenant]:,} "
                f"bytes in the server's journal, and may take {limit:,} "
                "(max_rejected_request_bytes); unload some models, or wait until the server has "
                "saved them",
                _RETRY_SECONDS,
            )

    async def trim(self) -> None:
        """Delete the oldest rows of every tenant whose rows reach the limit."""
        for tenant, size in list(self._bytes.items()):
            if size >= self._settings.max_rejected_request_bytes:
                await self._trim(tenant)

    async def _trim(self, tenant: str) -> None:
        limit = self._settings.max_rejected_request_bytes
        rows = await self._store.read(_redundant_failed_rows, tenant)
        self._bytes[tenant] = await self._store.write(
            _delete_rows, tenant, rows, int(_TARGET_FRACTION * limit)
        )
        self._full_since.pop(tenant, None)
        if self._bytes[tenant] >= limit:
            self._full_since[tenant] = time.monotonic()


def _failed_bytes_by_tenant(source: Source) -> dict[str, int]:
    query = (
        f"SELECT tenant, SUM({ROW_BYTES} + {_MESSAGE_BYTES}) FROM requests "
        f"WHERE {_IS_FAILED} GROUP BY tenant"
    )
    return dict(source.execute(query).fetchall())


def _failed_bytes(source: Source, tenant: str) -> int:
    query = (
        f"SELECT COALESCE(SUM({ROW_BYTES} + {_MESSAGE_BYTES}), 0) FROM requests "
        f"WHERE {_IS_FAILED} AND tenant = ?"
    )
    return source.execute(query, [tenant]).fetchone()[0]


_ANSWERED_ROW_COLUMNS = (
    f"id, kind, seq, state, finished, {ROW_BYTES} + COALESCE({_MESSAGE_BYTES}, 0)"
)


def _redundant_failed_rows(source: Source, tenant: str) -> list[tuple[str, AnsweredRow]]:
    """Return (owner, row) for each failed row that no replay needs, oldest first. Rows of one model
    keep the order of `redundant_rows`, because the server must delete them in this order.
    """
    unneeded = source.execute(
        f"SELECT owner, {_ANSWERED_ROW_COLUMNS} FROM requests "
        f"WHERE {_IS_FAILED} AND tenant = ? AND {journal.IS_REDUNDANT}",
        [tenant],
    )
    aged_rows: list[tuple[float, str, AnsweredRow]] = []
    for owner, *columns in unneeded.fetchall():
        row = AnsweredRow(*columns)
        aged_rows.append((row.finished or 0.0, owner, row))
    models = source.execute(
        "SELECT id, COALESCE(snapshot_seq, -1), skipped_below FROM models "
        "WHERE tenant = ? AND closed IS NULL",
        [tenant],
    )
    for model, snapshot, skipped_below in models.fetchall():
        later_rows = source.execute(
            f"SELECT {_ANSWERED_ROW_COLUMNS} FROM requests WHERE owner = ? AND seq > ? "
            "ORDER BY seq",
            [model, snapshot],
        )
        finished = 0.0
        for row in redundant_rows(
            [AnsweredRow(*each) for each in later_rows], snapshot + 1, skipped_below
        ):
            finished = max(finished, row.finished or 0.0)
            aged_rows.append((finished, model, row))
    aged_rows.sort(key=lambda one: one[0])
    return [(owner, row) for _, owner, row in aged_rows]


def redundant_rows(
    rows: Sequence[AnsweredRow], next_seq: int, skipped_below: int
) -> Iterator[AnsweredRow]:
    """Yield the failed rows of one model that a replay does not need. The server may stop deleting
    rows at any point in this order: a replay still restores the same model.

    `rows` are the model's requests from number `next_seq` on, in the order of their numbers. The
    search ends at the first request that may still run: one without an answer, or a missing number
    of at least `skipped_below`.
    """
    has_gradient = False
    pending_failure: AnsweredRow | None = None
    """The forward_backward that makes the next optim_step fail."""
    for row in rows:
        if row.finished is None or row.seq > max(next_seq, skipped_below):
            return
        next_seq = row.seq + 1
        if row.kind == "forward_backward" and not row.has_failed:
            has_gradient = True
        elif row.kind == "forward_backward" and pending_failure is None:
            pending_failure = row
        elif row.kind == "forward_backward":
            yield row
        elif row.kind == "optim_step":
            if row.has_failed and pending_failure is not None:
                # The failed optim_step clears the gradient, so the failed part has no effect.
                yield pending_failure
            if row.has_failed and not has_gradient:
                yield row
            has_gradient, pending_failure = False, None
        elif row.kind == "load_weights" and not row.has_failed:
            # The engine decides whether a load keeps a pending gradient. So keep the failed
            # forward_backward before the load, and a failed optim_step after it.
            has_gradient, pending_failure = True, None
        elif row.has_failed and row.kind not in ("create_model", "unload_model"):
            yield row


def _delete_rows(
    transaction: Transaction, tenant: str, rows: list[tuple[str, AnsweredRow]], limit: int
) -> int:
    """Delete the first of `rows`, until the tenant's failed rows take at most `limit` bytes. Return
    the size of the tenant's remaining failed rows in bytes.
    """
    excess = _failed_bytes(transaction, tenant) - limit
    ids: list[str] = []
    skipped_by_owner: defaultdict[str, int] = defaultdict(int)
    for owner, row in rows:
        if excess <= 0:
            break
        excess -= row.bytes
        ids.append(row.id)
        skipped_by_owner[owner] = max(skipped_by_owner[owner], row.seq + 1)
    ids_json = orjson.dumps(ids).decode()
    journal.delete_requests(transaction, "id IN (SELECT value FROM json_each(?))", [ids_json])
    for owner, skipped_below in skipped_by_owner.items():
        transaction.execute(
            "UPDATE models SET skipped_below = MAX(skipped_below, ?) WHERE id = ? AND closed IS NULL",
            [skipped_below, owner],
        )
    return _failed_bytes(transaction, tenant)
