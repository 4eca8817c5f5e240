"""The config of a vision tower, and of the way in which a text model reads its features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planish.errors import UnsupportedError
from planish.model.hf_config.json_fields import positive_int


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower of a model with images."""

    image_token: int
    """The token that stands for a part of an image."""
    patch_size: int
    """The width and height of a patch in pixels."""
    temporal_patch_size: int
    merge_size: int
    """The number of patches in each direction that form one token."""
    hidden_size: int
    """The number of hidden features of a patch in the tower."""
    mrope_section: tuple[int, ...] = ()
    """The numbers of RoPE frequencies that rotate by time, height and width (mRoPE). Empty: an
    image's tokens have consecutive positions, as text has.
    """
    num_weights: int = 0
    """An estimate of the number of the tower's weights; 0 if `HFModules.weight_shapes` has them."""


TYPES_WITH_OWN_DECODER = ("qwen3_5", "qwen3_5_moe")
"""The model types with images whose text model has its own decoder (model/decoder.py)."""
_QWEN3_5 = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
_QWEN3_5_TOKENS = {"image_token_id": 248056}


def read_vision_config(fields: Mapping[str, Any]) -> VisionConfig | None:
    """Return the vision tower in the config.json of a multimodal model that has its own decoder.

    Returns None for a model whose images planish does not read. Raises UnsupportedError if the
    decoder cannot read the tower's features, and DamagedFileError for a field of a wrong kind.
    """
    vision = fields.get("vision_config")
    if fields.get("model_type") not in TYPES_WITH_OWN_DECODER or not isinstance(vision, dict):
        return None
    vision = _QWEN3_5 | vision
    width, inner = positive_int(vision, "hidden_size"), positive_int(vision, "intermediate_size")
    merged = width * positive_int(vision, "spatial_merge_size") ** 2
    text = fields.get("text_config", {})
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    section = tuple(rope.get("mrope_section") or (11, 11, 10))
    if len(section) != 3 or not all(isinstance(size, int) and size >= 0 for size in section):
        raise UnsupportedError(f"mrope_section is {section}; give three numbers of frequencies")
    return VisionConfig(
        image_token=positive_int({**_QWEN3_5_TOKENS, **fields}, "image_token_id"),
        patch_size=positive_int(vision, "patch_size"),
        temporal_patch_size=positive_int(vision, "temporal_patch_size"),
        merge_size=positive_int(vision, "spatial_merge_size"),
        hidden_size=width,
        mrope_section=section,
        num_weights=positive_int(vision, "depth") * (4 * width**2 + 2 * width * inner)
        + merged * (merged + positive_int(vision, "out_hidden_size")),
    )
