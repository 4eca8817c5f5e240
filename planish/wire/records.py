"""Checkpoints, base models and samplers as JSON, and back. Times are in ISO 8601 with a time
zone.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Any

from planish.errors import UserError
from planish.service import CheckpointInfo, SamplerInfo
from planish.types import (
    Checkpoint,
    CheckpointType,
    GetServerCapabilitiesResponse,
    LoraConfig,
    SupportedModel,
)
from planish.wire.fields import Fields
from planish.wire.models import LORA_SWITCHES

_CHECKPOINT_TYPES: dict[str, CheckpointType] = {
    "training": "training",
    "sampler": "sampler",
    "external": "sampler",
}


def checkpoint_to_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint as JSON."""
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "checkpoint_type": checkpoint.checkpoint_type,
        "time": checkpoint.time.isoformat(),
        "tinker_path": checkpoint.tinker_path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires_at is None else checkpoint.expires_at.isoformat(),
    }


def checkpoint_from_json(fields: Fields) -> Checkpoint:
    """Read a checkpoint. External weights become a sampler checkpoint, because planish's own types
    have no third kind.
    """
    kind = fields.text("checkpoint_type")
    if kind not in _CHECKPOINT_TYPES:
        raise UserError(f"checkpoint_type={kind[:40]!r} is unknown")
    return Checkpoint(
        checkpoint_id=fields.text("checkpoint_id"),
        checkpoint_type=_CHECKPOINT_TYPES[kind],
        time=time_from_json(fields, "time"),
        tinker_path=fields.text("tinker_path"),
        size_bytes=fields.optional(fields.integer, "size_bytes"),
        public=fields.optional(fields.boolean, "public", False),
        user_metadata=fields.optional(fields.strings, "user_metadata"),
        expires_at=fields.optional(lambda name: time_from_json(fields, name), "expires_at"),
    )


def weights_info_to_json(info: CheckpointInfo) -> dict[str, Any]:
    """Return a checkpoint's base model, LoRA configuration and description as JSON."""
    return {
        "base_model": info.base_model,
        "is_lora": True,
        "lora_rank": info.lora.rank,
        **{name: getattr(info.lora, name) for name in LORA_SWITCHES},
        "optimizer_config": {"type": "adamw"},
        "checkpoint": checkpoint_to_json(info.checkpoint),
    }


def lora_from_weights_info(fields: Fields) -> LoraConfig:
    """Read the LoRA configuration of a checkpoint's adapter."""
    switches = {name: fields.optional(fields.boolean, name, True) for name in LORA_SWITCHES}
    return LoraConfig(fields.integer("lora_rank"), **switches)


def capabilities_to_json(capabilities: GetServerCapabilitiesResponse) -> dict[str, Any]:
    """Return the base models of a server as JSON."""
    return {"supported_models": [asdict(model) for model in capabilities.supported_models]}


def capabilities_from_json(fields: Fields) -> GetServerCapabilitiesResponse:
    """Read the base models of a server."""
    return GetServerCapabilitiesResponse(
        [
            SupportedModel(
                model.text("model_name"),
                model.optional(model.integer, "max_context_length"),
                model.optional(model.boolean, "trainable", True),
                model.optional(model.boolean, "sampleable", True),
                model.optional(model.integer, "vocab_size"),
            )
            for model in fields.objects("supported_models")
        ]
    )


def sampler_info_to_json(info: SamplerInfo) -> dict[str, Any]:
    """Return a sampler's id, base model and checkpoint as JSON."""
    fields = {"sampler_id": info.sampler_id, "base_model": info.base_model}
    return fields if info.model_path is None else {**fields, "model_path": info.model_path}


def sampler_info_from_json(fields: Fields) -> SamplerInfo:
    """Read a sampler's id, base model and checkpoint."""
    return SamplerInfo(
        fields.text("sampler_id"),
        fields.text("base_model"),
        fields.optional(fields.text, "model_path"),
    )


def time_from_json(fields: Fields, name: str) -> datetime:
    """Read a time with a time zone."""
    text = fields.text(name)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise UserError(
            f"{fields.path(name)}={text[:40]!r} is not a time in ISO 8601 with a time zone"
        )
    return time
