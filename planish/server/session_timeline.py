"""The timeline of a session: when each of its requests arrived, began and was answered.

The timeline has the requests that are in the journal. The server removes rows of samples, and of
training requests that a snapshot includes, `result_retention` after their answers. Requests of
OpenAI clients, which keep their connection open, are not journaled.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, replace

from planish.server.durable.links import LinkSigner
from planish.server.durable.records import ModelRow, Record, SamplerRow, select, select_keys
from planish.server.durable.request_log import RequestLog
from planish.server.durable.store import Store
from planish.server.results import NotFound, Tenant
from planish.server.sessions import Sessions

MAX_REQUESTS = 100_000
"""The maximum number of requests in a timeline; older ones are left out."""
_LINK_PREFIX = "timeline:"


@dataclass(frozen=True)
class TimedRequest(Record):
    """One request. Times are seconds since 1970."""

    table = "requests"
    id: str
    kind: str
    owner: str
    """The id of the model or sampler."""
    seq: int
    state: str
    accepted: float
    begun: float | None
    """When its turn came; None if it still waits, or never ran."""
    finished: float | None
    """When it was answered; None if it has no answer yet."""
    body_bytes: int
    result_bytes: int
    message: str | None


@dataclass(frozen=True)
class SessionTimeline:
    """The requests of a session, by the time of their arrival."""

    session_id: str
    owners: list[str]
    """The ids of the session's models and samplers, in the order of their creation."""
    requests: list[TimedRequest]
    num_left_out: int
    """The number of older requests that are not in `requests`."""


@dataclass(frozen=True)
class Timelines:
    """Reads the timelines of sessions."""

    _store: Store
    _sessions: Sessions
    _request_log: RequestLog
    _links: LinkSigner

    async def token(self, tenant: Tenant, session_id: str, seconds: float) -> str:
        """Return a token with which anybody can read the timeline of one session for `seconds`.
        Raise NotFound if the tenant has no such session.
        """
        await self._sessions.record(tenant, session_id)
        return self._links.token(_LINK_PREFIX + session_id, tenant.name, seconds)

    async def session_of_token(self, token: str) -> str:
        """Return the session of a token. Raise NotFound for an invalid or expired token, for one of
        something else, and if the session has been removed.
        """
        path, tenant = self._links.verify(token)
        if not path.startswith(_LINK_PREFIX):
            raise NotFound("this link is not one of a timeline")
        session_id = path.removeprefix(_LINK_PREFIX)
        await self._sessions.record(Tenant(tenant), session_id)
        return session_id

    async def read(self, session_id: str, limit: int = MAX_REQUESTS) -> SessionTimeline:
        """Return the timeline of a session with its newest `limit` requests. The caller has checked
        that the reader may see the session.
        """
        begun = {
            request.id: request.begun
            for request in self._request_log.active.values()
            if request.begun is not None
        }
        timeline = await self._store.read(_read, session_id, limit)
        requests = [
            request
            if request.begun is not None or request.id not in begun
            else replace(request, begun=begun[request.id])
            for request in timeline.requests
        ]
        return SessionTimeline(session_id, timeline.owners, requests, timeline.num_left_out)


def _read(db: sqlite3.Connection, session_id: str, limit: int) -> SessionTimeline:
    of_session = "session = ? ORDER BY created"
    owners = [
        owner
        for record in (ModelRow, SamplerRow)
        for owner in select_keys(db, record, of_session, [session_id])
    ]
    found = (
        "owner IN (SELECT id FROM models WHERE session = ?1 "
        "UNION ALL SELECT id FROM samplers WHERE session = ?1)"
    )
    query = f"SELECT COUNT(*) FROM requests WHERE {found}"
    total = db.execute(query, [session_id]).fetchone()[0]
    newest = f"{found} ORDER BY accepted DESC, seq DESC LIMIT ?2"
    requests = select(db, TimedRequest, newest, [session_id, limit])[::-1]
    return SessionTimeline(session_id, owners, requests, total - len(requests))
