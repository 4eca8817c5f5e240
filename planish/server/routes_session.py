"""What a client does first and last: its settings, its session, heartbeats, telemetry, and what the
server has to offer.
"""

from __future__ import annotations

from starlette.responses import Response

from planish.errors import UserError
from planish.server.answers import SessionRecord, SessionSpec
from planish.server.exchange import MIB, Exchange, answered, endpoint, nothing, paged
from planish.wire.fields import Fields
from planish.wire.records import capabilities_to_json

_MAX_SPEC = 65_536
"""Characters that a client says of itself."""
_FINISH_REASONS = ("success", "errored", "interrupted")


async def client_config(exchange: Exchange) -> Response:
    """One call of the user is one request, so a batch's shared prefixes are computed once; and its
    chunks keep their order.
    """
    async with exchange.fields() as fields:
        fields.optional(fields.text, "sdk_version")
    return answered(
        {
            "planish_wire": 1,
            "parallel_fwdbwd_chunks": False,
            "fwdbwd_max_chunk_len": 1_000_000,
            "fwdbwd_max_chunk_bytes_count": 128 * MIB,
            "fwdbwd_dispatch_bytes_semaphore_size": 256 * MIB,
            "proto_compress_fwdbwd": not exchange.is_local,
            # Samples wait their turn here, for hours if a machine is slow; that is no reason to
            # give up.
            "sample_enable_stuck_detection": False,
        }
    )


async def dynamic_config(exchange: Exchange) -> Response:
    return answered(
        {
            "refresh_interval_sec": 300,
            "sample_cancel_enabled": True,
            "sample_cancel_max_batch_size": 64,
        }
    )


async def create_session(exchange: Exchange) -> Response:
    async with exchange.fields() as fields:
        project, spec = fields.optional(fields.text, "project_id"), _spec(fields)
    session_id = await exchange.core.create_session(exchange.tenant, spec)
    answer = {"type": "create_session", "session_id": session_id}
    if project is not None:
        answer["warning_message"] = (
            f"project_id={project[:100]!r} has no meaning here: this server has no projects"
        )
    return answered(answer)


async def heartbeat(exchange: Exchange) -> Response:
    async with exchange.fields() as fields:
        session_id = fields.identifier("session_id")
    await exchange.core.heartbeat(exchange.tenant, session_id)
    return answered({"type": "session_heartbeat"})


async def finish(exchange: Exchange) -> Response:
    async with exchange.fields() as fields:
        reason = fields.object("reason").text("type")
        detail = fields.optional(fields.text, "detail")
    if reason not in _FINISH_REASONS:
        raise UserError(f"reason.type={reason[:40]!r}: give one of {', '.join(_FINISH_REASONS)}")
    await exchange.core.finish_session(exchange.tenant, exchange.path("session_id"), reason, detail)
    return nothing()


async def sessions(exchange: Exchange) -> Response:
    exchange.check_scope()
    limit, offset = exchange.window(20)
    page = await exchange.core.sessions(exchange.tenant, limit, offset)
    return answered(paged("sessions", page, str))


async def session(exchange: Exchange) -> Response:
    exchange.check_scope()
    return answered(
        _session(await exchange.core.session(exchange.tenant, exchange.path("session_id")))
    )


async def telemetry(exchange: Exchange) -> Response:
    """What clients report of themselves is not kept."""
    async with exchange.body(16 * MIB):
        return answered({"status": "accepted"})


async def capabilities(exchange: Exchange) -> Response:
    return answered(capabilities_to_json(exchange.core.capabilities()))


def _spec(fields: Fields) -> SessionSpec:
    tags = fields.optional(fields.array, "tags", [])
    if not all(isinstance(tag, str) for tag in tags):
        raise UserError("tags holds something that is no string")
    metadata = fields.optional(fields.strings, "user_metadata", {})
    size = sum(map(len, (*tags, *metadata, *metadata.values())))
    if size > _MAX_SPEC:
        raise UserError(
            f"tags and user_metadata have {size:,} characters; give at most {_MAX_SPEC:,}"
        )
    return SessionSpec(
        tags,
        metadata,
        fields.optional(fields.text, "sdk_version", ""),
        fields.optional(fields.text, "display_name"),
    )


def _session(record: SessionRecord) -> dict[str, object]:
    return {
        "training_run_ids": list(record.training_run_ids),
        "sampler_ids": list(record.sampler_ids),
        "user_metadata": dict(record.spec.user_metadata) or None,
        "display_name": record.spec.display_name,
    }


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
]
