"""External weights: adapters saved for other programs, in PEFT's layout.

A sampler checkpoint of planish has that layout already, so external weights NAME are the sampler
checkpoint `external:NAME`, shown under the kind and path that clients know. No other checkpoint may
have such a name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planish.errors import UserError
from planish.server.age_files import metadata_of
from planish.service import SaveWeightsForSampler
from planish.types import Checkpoint, CheckpointPath
from planish.wire.fields import Fields
from planish.wire.records import checkpoint_to_json
from planish.wire.training import place_from_json

_PREFIX = "external:"
_SHOWN, _STORED = "/external_weights/", f"/sampler_weights/{_PREFIX}"


def stored_path(path: str) -> str:
    """The path under which a checkpoint is kept, from the one that clients use."""
    stored = path.replace(_SHOWN, _STORED, 1)
    parsed = CheckpointPath.parse(stored)
    if stored == path:
        check_name_is_free(parsed.name)
    return str(parsed)


def shown_path(path: str) -> str:
    """The inverse of `stored_path`."""
    return path.replace(_STORED, _SHOWN, 1)


def is_external(path: str) -> bool:
    """Whether the checkpoint that is kept under `path` is external weights."""
    return _STORED in path


def check_name_is_free(name: str) -> None:
    """UserError for a name that is kept for external weights."""
    if name.startswith(_PREFIX):
        raise UserError(
            f"path={name[:200]!r}: names that begin with {_PREFIX!r} are those of external weights"
        )


def shown_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """The JSON of a checkpoint as clients know it."""
    fields = checkpoint_to_json(replace(checkpoint, tinker_path=shown_path(checkpoint.tinker_path)))
    if not is_external(checkpoint.tinker_path):
        return fields
    path = fields["tinker_path"]
    return {
        **fields,
        "checkpoint_type": "external",
        "checkpoint_id": path.removeprefix("tinker://").partition("/")[2],
    }


def save_weights_external_from_json(fields: Fields) -> SaveWeightsForSampler:
    with fields:
        place = place_from_json(fields)
        fields.skip("type")
        metadata = metadata_of(fields.optional(fields.array, "age_encryption_recipients", []))
        ttl = fields.optional(fields.integer, "ttl_seconds")
        return SaveWeightsForSampler(
            place.model_id, _PREFIX + fields.text("path"), ttl, user_metadata=metadata
        )
