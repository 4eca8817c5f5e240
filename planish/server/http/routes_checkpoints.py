"""Training runs, checkpoints and tokenizers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planish.errors import UserError
from planish.server.durable.checkpoint_search import (
    CHECKPOINT_TYPES,
    CheckpointSearch,
    base_models_of,
    search_checkpoints,
)
from planish.server.durable.checkpoints import is_external, shown_path, stored_path
from planish.server.http.context import (
    Json,
    RequestContext,
    check_search_scope,
    endpoint,
    page_to_json,
)
from planish.server.results import NoSuchBaseModel, Page, TrainingRun
from planish.types import LONGEST_TTL_SECONDS, Checkpoint, CheckpointPath
from planish.wire.fields import Fields
from planish.wire.models import reject_access_token
from planish.wire.records import checkpoint_to_json, time_from_json, weights_info_to_json


async def training_runs(context: RequestContext) -> Json:
    """List the tenant's training runs."""
    context.check_scope()
    limit, offset = context.limit_and_offset(20)
    page = await context.server.runs.page(context.tenant, limit, offset)
    return page_to_json("training_runs", page, lambda run: _run_to_json(context, run))


async def training_run(context: RequestContext) -> Json:
    """Describe one training run."""
    context.check_scope()
    return _run_to_json(
        context,
        await context.server.runs.run(context.tenant, context.path_parameter("run_id")),
    )


async def run_checkpoints(context: RequestContext) -> Json:
    """List the checkpoints of a run. The SDK asks for all checkpoints, and gets as many as fit into
    a page.
    """
    run_id, offset = context.path_parameter("run_id"), context.query_integer("offset", 0, 0, 2**53)
    page = await context.server.runs.list_checkpoints(context.tenant, run_id, None, offset)
    return await _page_of_checkpoints(context, page)


async def checkpoints(context: RequestContext) -> Json:
    """List the tenant's checkpoints."""
    limit, offset = context.limit_and_offset(100)
    page = await context.server.runs.list_checkpoints(context.tenant, None, limit, offset)
    return await _page_of_checkpoints(context, page)


async def _page_of_checkpoints(context: RequestContext, page: Page[Checkpoint]) -> Json:
    runs = {_run_of(checkpoint) for checkpoint in page.items}
    base_models = await context.server.store.read(base_models_of, runs)
    return page_to_json(
        "checkpoints", page, lambda item: _listed_checkpoint(context, item, base_models)
    )


def _listed_checkpoint(
    context: RequestContext, checkpoint: Checkpoint, base_models: Mapping[str, str]
) -> dict[str, Any]:
    """Return the JSON of a checkpoint with its base model, which SDK 0.39 and later read."""
    base_model = base_models.get(_run_of(checkpoint))
    return {**_checkpoint_to_json(context, checkpoint), "base_model": base_model}


def _run_of(checkpoint: Checkpoint) -> str:
    return CheckpointPath.parse(checkpoint.tinker_path).run_id


async def search(context: RequestContext) -> Json:
    """Search among the tenant's checkpoints, newest first, page by page."""
    async with context.fields() as fields:
        query = _search_of(fields)
    found = await context.server.store.read(search_checkpoints, context.tenant.name, query)
    last = found.last
    return {
        "checkpoints": [
            _listed_checkpoint(context, one, found.base_models) for one in found.checkpoints
        ],
        "next_cursor": None
        if last is None
        else {
            "last_created_at": last.time.isoformat(),
            "last_checkpoint_uuid": last.tinker_path,
        },
    }


def _search_of(fields: Fields) -> CheckpointSearch:
    with fields:
        check_search_scope(fields, "checkpoints")
        cursor = fields.optional(fields.object, "cursor")
        return CheckpointSearch(
            fields.optional(fields.strings, "user_metadata", {}),
            fields.optional(lambda name: _checkpoint_type(fields, name), "checkpoint_type"),
            fields.optional(fields.texts, "base_models"),
            fields.optional(lambda name: fields.integer(name, 1, 200), "limit", 50),
            None
            if cursor is None
            else (
                time_from_json(cursor, "last_created_at").timestamp(),
                cursor.text("last_checkpoint_uuid"),
            ),
        )


def _checkpoint_type(fields: Fields, name: str) -> str:
    kind = fields.text(name)
    if kind not in CHECKPOINT_TYPES:
        raise UserError(
            f"{name}={kind[:40]!r} is unknown; give one of {', '.join(CHECKPOINT_TYPES)}"
        )
    return kind


async def delete_checkpoint(context: RequestContext) -> None:
    """Delete a checkpoint."""
    await context.server.checkpoints.delete(context.tenant, checkpoint_path(context))


async def publish(context: RequestContext) -> None:
    """Make a checkpoint public."""
    await context.server.checkpoints.set_public(context.tenant, checkpoint_path(context), True)


async def unpublish(context: RequestContext) -> None:
    """Make a checkpoint private again. This route also gets the requests that delete a checkpoint
    whose name is "publish".
    """
    kind = context.path_parameter("checkpoint_id")
    # DELETE .../weights/NAME/publish makes the checkpoint NAME private. In DELETE
    # .../weights/publish, "publish" is the name of the checkpoint to delete.
    if "/" not in kind:
        path = stored_path(f"tinker://{context.path_parameter('run_id')}/{kind}/publish")
        await context.server.checkpoints.delete(context.tenant, path)
        return
    await context.server.checkpoints.set_public(context.tenant, checkpoint_path(context), False)


async def set_ttl(context: RequestContext) -> None:
    """Set when a checkpoint expires."""
    async with context.fields() as fields:
        ttl = _ttl_seconds(fields)
    await context.server.checkpoints.set_ttl(context.tenant, checkpoint_path(context), ttl)


async def weights_info(context: RequestContext) -> Json:
    """Answer with the contents of a checkpoint: its base model, LoRA rank and trained layers."""
    async with context.fields() as fields:
        path = stored_path(fields.text("tinker_path"))
    return weights_info_to_json(await context.server.checkpoints.info(context.tenant, path))


async def copy_weights(context: RequestContext) -> Json:
    """Copy a checkpoint into the run `model_seq_id` of a session. The SDK names a destination
    project instead of a session. This server has no projects, so it makes a run with a session of
    its own.
    """
    async with context.fields() as fields:
        source = stored_path(fields.text("source_path"))
        ttl = _ttl_seconds(fields)
        session_id = fields.optional(fields.identifier, "session_id")
        number = fields.optional(lambda name: fields.integer(name, low=0), "model_seq_id", 0)
        reject_access_token(fields, context.request.headers.get("x-tinker-weights-access-token"))
        if session_id is None:
            fields.text("destination_project_id")
    runs = context.server.stored_runs
    path = (
        await runs.copy_alone(context.tenant, source, ttl, context.idempotency_key)
        if session_id is None
        else await runs.copy(context.tenant, source, session_id, number, ttl)
    )
    return {"tinker_path": shown_path(path)}


def _ttl_seconds(fields: Fields) -> int | None:
    return fields.optional(lambda name: fields.integer(name, 1, LONGEST_TTL_SECONDS), "ttl_seconds")


def checkpoint_path(context: RequestContext) -> str:
    """Return the stored path of the checkpoint in the URL."""
    run_id = context.path_parameter("run_id")
    checkpoint_id = context.path_parameter("checkpoint_id")
    if checkpoint_id.count("/") != 1:
        raise UserError(
            f"checkpoint id {checkpoint_id[:100]!r}: give weights/NAME, sampler_weights/NAME or "
            "external_weights/NAME"
        )
    return stored_path(f"tinker://{run_id}/{checkpoint_id}")


def _checkpoint_to_json(context: RequestContext, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the JSON of a checkpoint. Older clients do not know the type "external", so they get
    "sampler" instead.
    """
    fields = checkpoint_for_client(checkpoint)
    is_unknown = fields["checkpoint_type"] == "external" and not context.supports_external
    return {**fields, "checkpoint_type": "sampler"} if is_unknown else fields


def checkpoint_for_client(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the JSON of a checkpoint with the kind and path that clients know."""
    fields = checkpoint_to_json(replace(checkpoint, tinker_path=shown_path(checkpoint.tinker_path)))
    if not is_external(checkpoint.tinker_path):
        return fields
    path = fields["tinker_path"]
    return {
        **fields,
        "checkpoint_type": "external",
        "checkpoint_id": path.removeprefix("tinker://").partition("/")[2],
    }


def _run_to_json(context: RequestContext, run: TrainingRun) -> dict[str, Any]:
    last, sampler = run.last_checkpoint, run.last_sampler_checkpoint
    return {
        "training_run_id": run.training_run_id,
        "base_model": run.base_model,
        "model_owner": run.model_owner,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": run.lora_rank,
        "last_request_time": run.last_request_time.isoformat(),
        "last_checkpoint": None if last is None else _checkpoint_to_json(context, last),
        "last_sampler_checkpoint": None
        if sampler is None
        else _checkpoint_to_json(context, sampler),
        "user_metadata": dict(run.user_metadata) or None,
    }


_RUN_PATH = "/training_runs/{run_id}"
CHECKPOINT_PATH = _RUN_PATH + "/checkpoints/{checkpoint_id:path}"


async def tokenizer(context: RequestContext) -> Json:
    """Answer with the files of a base model's tokenizer, by name. This is for planish's own client;
    the official SDK loads tokenizers from the Hugging Face hub.
    """
    name = context.request.query_params.get("base_model", "")
    directory = context.state.settings.tokenizer_directories.get(name)
    if directory is None:
        raise NoSuchBaseModel(
            f"base_model={name[:100]!r}: give one of "
            f"{', '.join(context.state.settings.tokenizer_directories)}"
        )
    return {"base_model": name, "files": await asyncio.to_thread(tokenizer_files, directory)}


def tokenizer_files(directory: Path) -> dict[str, str]:
    """Return the text of each tokenizer file in `directory`, by file name."""
    found = {
        path.name: path
        for pattern in _TOKENIZER_FILES
        for path in directory.glob(pattern)
        if path.is_file()
    }
    return {name: path.read_text(encoding="utf-8") for name, path in sorted(found.items())}


_TOKENIZER_FILES = (
    "config.json",  # transformers reads the kind of tokenizer from this file
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)


ROUTES = [
    endpoint("/training_runs", training_runs, "GET"),
    endpoint(_RUN_PATH, training_run, "GET"),
    endpoint(_RUN_PATH + "/checkpoints", run_checkpoints, "GET"),
    endpoint("/checkpoints", checkpoints, "GET"),
    endpoint("/checkpoints/search", search),
    # A checkpoint id contains a slash, so the DELETE route of CHECKPOINT_PATH matches /publish too.
    # Starlette takes the first match, so the routes of /publish come first.
    endpoint(CHECKPOINT_PATH + "/publish", publish, "POST"),
    endpoint(CHECKPOINT_PATH + "/publish", unpublish, "DELETE"),
    endpoint(CHECKPOINT_PATH + "/ttl", set_ttl, "PUT"),
    endpoint(CHECKPOINT_PATH, delete_checkpoint, "DELETE"),
    endpoint("/weights_info", weights_info),
    endpoint("/copy_weights", copy_weights),
    endpoint("/tokenizer", tokenizer, "GET"),
]
