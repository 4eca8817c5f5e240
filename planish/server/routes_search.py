"""Search among one's sessions, newest first, page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from starlette.responses import Response

from planish.errors import UnsupportedError, UserError
from planish.server.answers import SessionRecord
from planish.server.exchange import Exchange, answered, endpoint
from planish.wire.fields import Fields
from planish.wire.records import time_from_json

_SCANNED = 1000
"""Sessions that one request looks at; the next page goes on from there."""
_BLOCK = 200


@dataclass(frozen=True)
class Query:
    session_id: str | None
    words: tuple[str, ...]
    """Each is in the display name, in lower case."""
    metadata: dict[str, str]
    states: tuple[str, ...]
    limit: int
    after: datetime | None
    """Only sessions that are older than this, or as old and listed after `after_id`."""
    after_id: str

    def matches(self, record: SessionRecord) -> bool:
        """Where both an id and words are given, one of them is enough."""
        metadata = record.spec.user_metadata
        if any(metadata.get(key) != value for key, value in self.metadata.items()):
            return False
        if (
            self.states
            and ("active" if record.ended is None else "client_finished") not in self.states
        ):
            return False
        if self.session_id is None and not self.words:
            return True
        name = (record.spec.display_name or "").lower()
        by_name = bool(self.words) and all(word in name for word in self.words)
        return by_name or record.session_id == self.session_id


async def search(exchange: Exchange) -> Response:
    async with exchange.fields() as fields:
        query = _query(fields)
    found: list[SessionRecord] = []
    last: SessionRecord | None = None
    scanned = 0
    async for record in _sessions(exchange, query):
        scanned += 1
        last = record
        if query.matches(record):
            found.append(record)
        if len(found) == query.limit or scanned == _SCANNED:
            break
    else:
        last = None
    cursor = (
        None
        if last is None
        else {"last_created_at": last.created.isoformat(), "last_session_id": last.session_id}
    )
    return answered(
        {"sessions": [await _summary(exchange, record) for record in found], "next_cursor": cursor}
    )


async def _sessions(exchange: Exchange, query: Query) -> AsyncIterator[SessionRecord]:
    """The tenant's sessions from the place on where the last page ended."""
    offset, passed = 0, query.after is None
    while ids := (await exchange.core.sessions(exchange.tenant, _BLOCK, offset)).items:
        offset += len(ids)
        for session_id in ids:
            record = await exchange.core.session(exchange.tenant, session_id)
            if query.after is not None and not passed:
                passed = session_id == query.after_id or record.created < query.after
                if session_id == query.after_id or not passed:
                    continue
            yield record


async def _summary(exchange: Exchange, record: SessionRecord) -> dict[str, Any]:
    pages = [
        await exchange.core.checkpoints(exchange.tenant, run) for run in record.training_run_ids
    ]
    return {
        "session_id": record.session_id,
        "created_at": record.created.isoformat(),
        "owner": exchange.tenant.name,
        "project_id": "default",
        "status": {"type": "active"} if record.ended is None else None,
        "checkpoints_count": sum(page.total for page in pages),
        "checkpoint_storage_bytes": sum(
            item.size_bytes or 0 for page in pages for item in page.items
        ),
        "display_name": record.spec.display_name,
        "user_metadata": dict(record.spec.user_metadata) or None,
    }


def _query(fields: Fields) -> Query:
    with fields:
        owner = fields.optional(fields.object, "owner")
        if owner is not None and owner.text("type") not in ("own", "accessible"):
            raise UnsupportedError("owner: sessions of other keys are not searched; leave it out")
        fields.skip("project_ids")  # all sessions of a key are in its one project
        cursor = fields.optional(fields.object, "cursor")
        return Query(
            fields.optional(fields.text, "session_id"),
            tuple(fields.optional(fields.text, "display_name", "").lower().split()),
            fields.optional(fields.strings, "user_metadata", {}),
            tuple(_state(state) for state in fields.objects("statuses"))
            if fields.has("statuses")
            else (),
            fields.optional(lambda name: fields.integer(name, 1, 200), "limit", 50),
            None if cursor is None else time_from_json(cursor, "last_created_at"),
            "" if cursor is None else cursor.text("last_session_id"),
        )


def _state(fields: Fields) -> str:
    with fields:
        kind = fields.text("type")
        if fields.optional(fields.array, "reasons"):
            raise UnsupportedError(
                "statuses: sessions are not searched by the reason of their end; leave `reasons` out"
            )
    if kind not in ("active", "client_finished", "cancelled", "failed"):
        raise UserError(f"statuses: type={kind[:40]!r} is unknown")
    return kind


ROUTES = [endpoint("/sessions/search", search)]
