"""Endpoints for client settings, sessions, heartbeats, telemetry, the list of base models, and the
search for sessions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any

from planish.errors import UnsupportedError, UserError
from planish.server.durable.records import PAGE_BYTES, item_bytes
from planish.server.http.budgets import MAX_TELEMETRY_BODY, MIB
from planish.server.http.context import (
    PROJECT,
    Json,
    RequestContext,
    check_search_scope,
    endpoint,
    page_to_json,
)
from planish.server.results import SessionRecord, SessionSpec
from planish.service import MAX_METADATA
from planish.wire.fields import Fields
from planish.wire.records import capabilities_to_json, time_from_json

_FINISH_REASONS = ("success", "errored", "interrupted")


async def client_config(context: RequestContext) -> Json:
    """Answer with settings for the SDK. With these settings, the SDK sends one forward_backward
    call as one request if possible, so that the engine computes each shared prefix only once. The
    SDK sends a larger call in several chunks, one after the other.
    """
    async with context.fields() as fields:
        fields.optional(fields.text, "sdk_version")
    return {
        "planish_wire": 1,
        "parallel_fwdbwd_chunks": False,
        "fwdbwd_max_chunk_len": 1_000_000,
        "fwdbwd_max_chunk_bytes_count": 128 * MIB,
        "fwdbwd_dispatch_bytes_semaphore_size": 256 * MIB,
        "proto_compress_fwdbwd": not context.is_local,
        # On a slow machine a sample may wait for hours. The client must not give up.
        "sample_enable_stuck_detection": False,
    }


async def dynamic_config(context: RequestContext) -> Json:
    """Answer with the settings that the SDK requests again every 300 seconds."""
    return {
        "refresh_interval_sec": 300,
        "sample_cancel_enabled": True,
        "sample_cancel_max_batch_size": 64,
    }


async def create_session(context: RequestContext) -> Json:
    """Create a session."""
    async with context.fields() as fields:
        project, spec = fields.optional(fields.text, "project_id"), _session_spec(fields)
    session_id = await context.open_server.sessions.create(
        context.tenant, spec, context.idempotency_key
    )
    answer = {"type": "create_session", "session_id": session_id}
    if project is not None:
        answer["warning_message"] = (
            f"project_id={project[:100]!r} is ignored: this server has no projects"
        )
    return answer


async def heartbeat(context: RequestContext) -> Json:
    """Keep a session open."""
    async with context.fields() as fields:
        session_id = fields.identifier("session_id")
    await context.server.sessions.touch(context.tenant, session_id)
    return {"type": "session_heartbeat"}


async def finish(context: RequestContext) -> None:
    """End a session."""
    async with context.fields() as fields:
        reason = fields.object("reason").text("type")
        detail = fields.optional(fields.text, "detail")
    if reason not in _FINISH_REASONS:
        raise UserError(f"reason.type={reason[:40]!r}: give one of {', '.join(_FINISH_REASONS)}")
    await context.server.sessions.finish(
        context.tenant, context.path_parameter("session_id"), reason, detail
    )


async def sessions(context: RequestContext) -> Json:
    """List the tenant's sessions."""
    context.check_scope()
    limit, offset = context.limit_and_offset(20)
    page = await context.server.sessions.page(context.tenant, limit, offset)
    return page_to_json("sessions", page, str)


async def session(context: RequestContext) -> Json:
    """Describe one session."""
    context.check_scope()
    return _session_to_json(
        await context.server.sessions.record(context.tenant, context.path_parameter("session_id"))
    )


async def telemetry(context: RequestContext) -> Json:
    """Accept and discard the telemetry of clients."""
    async with context.body(MAX_TELEMETRY_BODY):
        return {"status": "accepted"}


async def capabilities(context: RequestContext) -> Json:
    """List the base models."""
    return capabilities_to_json(context.server.engine.capabilities())


def _session_spec(fields: Fields) -> SessionSpec:
    tags = fields.optional(fields.texts, "tags", [])
    metadata = fields.optional(fields.strings, "user_metadata", {})
    version = fields.optional(fields.text, "sdk_version", "")
    name = fields.optional(fields.text, "display_name")
    size = sum(map(len, (*tags, *metadata, *metadata.values(), version, name or "")))
    if size > MAX_METADATA:
        raise UserError(
            f"tags, user_metadata, sdk_version and display_name have {size:,} characters; give at "
            f"most {MAX_METADATA:,}"
        )
    return SessionSpec(tags, metadata, version, name)


def _session_to_json(record: SessionRecord) -> dict[str, object]:
    return {
        "training_run_ids": list(record.training_run_ids),
        "sampler_ids": list(record.sampler_ids),
        "user_metadata": dict(record.spec.user_metadata) or None,
        "display_name": record.spec.display_name,
    }


_MAX_SCANNED = 1000
"""The maximum number of sessions that one search request reads. The request for the next page
continues after the last of these sessions.
"""
_SCAN_BLOCK = 200


@dataclass(frozen=True)
class SessionQuery:
    """A search among sessions."""

    session_id: str | None
    words: tuple[str, ...]
    """Lower-case words. The display name must contain all of them, in upper or lower case."""
    metadata: dict[str, str]
    states: tuple[str, ...]
    limit: int
    after: datetime | None
    """The creation time of the last session on the previous page; None for the first page."""
    after_id: str
    """The id of the last session on the previous page; empty for the first page."""

    def matches(self, record: SessionRecord) -> bool:
        """Return whether a session matches. If the query has both an id and words, a session that
        matches only one of the two is returned as well.
        """
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


async def search(context: RequestContext) -> Json:
    """Search among sessions, newest first, page by page."""
    async with context.fields() as fields:
        query = _session_query(fields)
    found: list[SessionRecord] = []
    last: SessionRecord | None = None
    scanned = size = 0
    async for record in _scan_sessions(context, query):
        scanned += 1
        last = record
        if query.matches(record):
            found.append(record)
            size += item_bytes(*chain(*record.spec.user_metadata.items()))
        if len(found) == query.limit or scanned == _MAX_SCANNED or size > PAGE_BYTES:
            break
    else:
        last = None
    cursor = (
        None
        if last is None
        else {"last_created_at": last.created.isoformat(), "last_session_id": last.session_id}
    )
    return {
        "sessions": [await _session_summary(context, record) for record in found],
        "next_cursor": cursor,
    }


async def _scan_sessions(
    context: RequestContext, query: SessionQuery
) -> AsyncIterator[SessionRecord]:
    """Yield the tenant's sessions, newest first, beginning after the last session of the previous
    page.
    """
    offset, passed = 0, query.after is None
    while ids := (await context.server.sessions.page(context.tenant, _SCAN_BLOCK, offset)).items:
        offset += len(ids)
        for session_id in ids:
            record = await context.server.sessions.record(context.tenant, session_id)
            if query.after is not None and not passed:
                passed = session_id == query.after_id or record.created < query.after
                if session_id == query.after_id or not passed:
                    continue
            yield record


async def _session_summary(context: RequestContext, record: SessionRecord) -> dict[str, Any]:
    number, size = await context.server.runs.size_of_session(context.tenant, record.session_id)
    return {
        "session_id": record.session_id,
        "created_at": record.created.isoformat(),
        "owner": context.tenant.name,
        "project_id": PROJECT,
        "status": {"type": "active"} if record.ended is None else None,
        "checkpoints_count": number,
        "checkpoint_storage_bytes": size,
        "display_name": record.spec.display_name,
        "user_metadata": dict(record.spec.user_metadata) or None,
    }


def _session_query(fields: Fields) -> SessionQuery:
    with fields:
        check_search_scope(fields, "sessions")
        cursor = fields.optional(fields.object, "cursor")
        return SessionQuery(
            fields.optional(fields.text, "session_id"),
            tuple(fields.optional(fields.text, "display_name", "").lower().split()),
            fields.optional(fields.strings, "user_metadata", {}),
            tuple(_session_state(state) for state in fields.objects("statuses"))
            if fields.has("statuses")
            else (),
            fields.optional(lambda name: fields.integer(name, 1, 200), "limit", 50),
            None if cursor is None else time_from_json(cursor, "last_created_at"),
            "" if cursor is None else cursor.text("last_session_id"),
        )


def _session_state(fields: Fields) -> str:
    with fields:
        kind = fields.text("type")
        if fields.optional(fields.array, "reasons"):
            raise UnsupportedError(
                "statuses: sessions cannot be searched by why they ended; leave `reasons` out"
            )
    if kind not in ("active", "client_finished", "cancelled", "failed"):
        raise UserError(f"statuses: type={kind[:40]!r} is unknown")
    return kind


ROUTES = [
    endpoint("/client/config", client_config),
    endpoint("/client/dynamic_config", dynamic_config),
    endpoint("/create_session", create_session),
    endpoint("/session_heartbeat", heartbeat),
    endpoint("/sessions/{session_id}/finish", finish),
    endpoint("/sessions", sessions, "GET"),
    endpoint("/sessions/{session_id}", session, "GET"),
    endpoint("/telemetry", telemetry),
    endpoint("/get_server_capabilities", capabilities, "GET"),
    endpoint("/sessions/search", search),
]
