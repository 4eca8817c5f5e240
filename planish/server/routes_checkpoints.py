"""Training runs and checkpoints: what there is, and what becomes of it."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from planish.errors import UserError
from planish.server.answers import SessionSpec, TrainingRun
from planish.server.exchange import Exchange, answered, endpoint, nothing, paged
from planish.server.external_weights import shown_checkpoint, shown_path, stored_path
from planish.types import LONGEST_TTL_SECONDS, Checkpoint
from planish.wire.models import refuse_access_token
from planish.wire.records import weights_info_to_json

_KNOWN_COPIES = 1000


async def training_runs(exchange: Exchange) -> Response:
    exchange.check_scope()
    limit, offset = exchange.window(20)
    page = await exchange.core.training_runs(exchange.tenant, limit, offset)
    return answered(paged("training_runs", page, lambda run: _run(exchange, run)))


async def training_run(exchange: Exchange) -> Response:
    exchange.check_scope()
    return answered(
        _run(exchange, await exchange.core.training_run(exchange.tenant, exchange.path("run_id")))
    )


async def run_checkpoints(exchange: Exchange) -> Response:
    page = await exchange.core.checkpoints(exchange.tenant, exchange.path("run_id"))
    return answered({"checkpoints": [_checkpoint(exchange, item) for item in page.items]})


async def checkpoints(exchange: Exchange) -> Response:
    limit, offset = exchange.window(100)
    page = await exchange.core.checkpoints(exchange.tenant, None, limit, offset)
    return answered(paged("checkpoints", page, lambda item: _checkpoint(exchange, item)))


async def delete_checkpoint(exchange: Exchange) -> Response:
    await exchange.core.delete_checkpoint(exchange.tenant, checkpoint_path(exchange))
    return nothing()


async def publish(exchange: Exchange) -> Response:
    await exchange.core.set_public(exchange.tenant, checkpoint_path(exchange), True)
    return nothing()


async def unpublish(exchange: Exchange) -> Response:
    kind = exchange.path("checkpoint_id")
    if "/" not in kind:  # the path ends with the name of a checkpoint, which is publish
        path = stored_path(f"tinker://{exchange.path('run_id')}/{kind}/publish")
        await exchange.core.delete_checkpoint(exchange.tenant, path)
        return nothing()
    await exchange.core.set_public(exchange.tenant, checkpoint_path(exchange), False)
    return nothing()


async def set_ttl(exchange: Exchange) -> Response:
    async with exchange.fields() as fields:
        ttl = fields.optional(
            lambda name: fields.integer(name, 1, LONGEST_TTL_SECONDS), "ttl_seconds"
        )
    await exchange.core.set_ttl(exchange.tenant, checkpoint_path(exchange), ttl)
    return nothing()


async def weights_info(exchange: Exchange) -> Response:
    async with exchange.fields() as fields:
        path = stored_path(fields.text("tinker_path"))
    return answered(
        weights_info_to_json(await exchange.core.checkpoint_info(exchange.tenant, path))
    )


async def copy_weights(exchange: Exchange) -> Response:
    """Into the run `model_seq_id` of a session, or, as the SDK asks, into a project: a new session
    then, since all of a key is one project here.
    """
    async with exchange.fields() as fields:
        source = stored_path(fields.text("source_path"))
        ttl = fields.optional(
            lambda name: fields.integer(name, 1, LONGEST_TTL_SECONDS), "ttl_seconds"
        )
        session_id = fields.optional(fields.identifier, "session_id")
        number = fields.optional(lambda name: fields.integer(name, low=0), "model_seq_id", 0)
        refuse_access_token(fields, exchange.request.headers.get("x-tinker-weights-access-token"))
        if session_id is None:
            fields.text("destination_project_id")
    if session_id is None:
        session_id = await _copy_session(exchange)
    path = await exchange.core.copy_checkpoint(exchange.tenant, source, session_id, number, ttl)
    return answered({"tinker_path": shown_path(path)})


async def _copy_session(exchange: Exchange) -> str:
    """The session that owns a copy; a repetition of the request gets the same one, and with it the
    same copy.
    """
    copies, key = exchange.state.copies, exchange.request.headers.get("x-idempotency-key")
    known = copies.get((exchange.tenant, key))
    if known is not None:
        return known
    session_id = await exchange.core.create_session(
        exchange.tenant, SessionSpec(tags=["copy_weights"])
    )
    if key is not None:
        copies[exchange.tenant, key] = session_id
        if len(copies) > _KNOWN_COPIES:
            copies.pop(next(iter(copies)))
    return session_id


def checkpoint_path(exchange: Exchange) -> str:
    """The stored path of the checkpoint that the URL names."""
    run_id, checkpoint_id = exchange.path("run_id"), exchange.path("checkpoint_id")
    if checkpoint_id.count("/") != 1:
        raise UserError(
            f"checkpoint id {checkpoint_id[:100]!r}: give weights/NAME, sampler_weights/NAME or external_weights/NAME"
        )
    return stored_path(f"tinker://{run_id}/{checkpoint_id}")


def _checkpoint(exchange: Exchange, checkpoint: Checkpoint) -> dict[str, Any]:
    """External weights are a sampler's to clients that know no third type."""
    fields = shown_checkpoint(checkpoint)
    is_unknown = fields["checkpoint_type"] == "external" and not exchange.knows_external
    return {**fields, "checkpoint_type": "sampler"} if is_unknown else fields


def _run(exchange: Exchange, run: TrainingRun) -> dict[str, Any]:
    last, sampler = run.last_checkpoint, run.last_sampler_checkpoint
    return {
        "training_run_id": run.training_run_id,
        "base_model": run.base_model,
        "model_owner": run.model_owner,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": run.lora_rank,
        "last_request_time": run.last_request_time.isoformat(),
        "last_checkpoint": None if last is None else _checkpoint(exchange, last),
        "last_sampler_checkpoint": None if sampler is None else _checkpoint(exchange, sampler),
        "user_metadata": dict(run.user_metadata) or None,
    }


_RUN = "/training_runs/{run_id}"
CHECKPOINT = _RUN + "/checkpoints/{checkpoint_id:path}"

ROUTES = [
    endpoint("/training_runs", training_runs, "GET"),
    endpoint(_RUN, training_run, "GET"),
    endpoint(_RUN + "/checkpoints", run_checkpoints, "GET"),
    endpoint("/checkpoints", checkpoints, "GET"),
    # Ids hold a slash, so these come before the one that ends with an id.
    endpoint(CHECKPOINT + "/publish", publish, "POST"),
    endpoint(CHECKPOINT + "/publish", unpublish, "DELETE"),
    endpoint(CHECKPOINT + "/ttl", set_ttl, "PUT"),
    endpoint(CHECKPOINT, delete_checkpoint, "DELETE"),
    endpoint("/weights_info", weights_info),
    endpoint("/copy_weights", copy_weights),
]
