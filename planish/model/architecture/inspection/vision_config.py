"""The config of a vision tower, and of the way in which a text model reads its features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

from planish.errors import DamagedFileError, UnsupportedError


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
    processor: Literal["qwen", "gemma3", "gemma4", "gemma4_unified"] = "qwen"
    """The kind of the image processor."""
    image_size: int | None = None
    """The width and height to which every image is resized (Gemma 3). None: the number of an image's
    tokens depends on its size.
    """
    two_way_layers: tuple[int, ...] = ()
    """The decoder layers in which an image's tokens also attend to later tokens of the image: all
    of Gemma 3, and those with a window in the larger models of Gemma 4.
    """
    per_layer_token: int | None = None
    """The token whose inputs per layer the tokens of an image get (Gemma 4 E2B and E4B). None: the
    layers have no inputs of their own.
    """
    num_weights: int = 0
    """An estimate of the number of the tower's weights; 0 if `HFModules.weight_shapes` has them."""


TYPES_WITH_OWN_DECODER = ("qwen3_5", "qwen3_5_moe", "gemma3")
"""The model types with images whose text model has its own decoder (decoder/decoder.py)."""
_QWEN3_5 = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
_SIGLIP = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "patch_size": 16,
    "image_size": 224,
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
    if fields["model_type"] == "gemma3":
        return _gemma3(fields, vision)
    vision = _QWEN3_5 | vision
    width, inner = _positive(vision, "hidden_size"), _positive(vision, "intermediate_size")
    merged = width * _positive(vision, "spatial_merge_size") ** 2
    text = fields.get("text_config", {})
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    section = tuple(rope.get("mrope_section") or (11, 11, 10))
    if len(section) != 3 or not all(isinstance(size, int) and size >= 0 for size in section):
        raise UnsupportedError(f"mrope_section is {section}; give three numbers of frequencies")
    return VisionConfig(
        image_token=_positive({**_QWEN3_5_TOKENS, **fields}, "image_token_id"),
        patch_size=_positive(vision, "patch_size"),
        temporal_patch_size=_positive(vision, "temporal_patch_size"),
        merge_size=_positive(vision, "spatial_merge_size"),
        hidden_size=width,
        mrope_section=section,
        num_weights=_positive(vision, "depth") * (4 * width**2 + 2 * width * inner)
        + merged * (merged + _positive(vision, "out_hidden_size")),
    )


def _gemma3(fields: Mapping[str, Any], vision: Mapping[str, Any]) -> VisionConfig:
    vision, text = {**_SIGLIP, **vision}, fields.get("text_config") or {}
    # Published configs call this field image_token_index.
    token = fields.get("image_token_id", fields.get("image_token_index", 262144))
    num_tokens = _positive({"mm_tokens_per_image": 256, **fields}, "mm_tokens_per_image")
    patch_size, image_size = (_positive(vision, f"{part}_size") for part in ("patch", "image"))
    side = isqrt(num_tokens)
    merge_size = image_size // patch_size // side
    if side**2 != num_tokens or merge_size * side * patch_size != image_size:
        raise UnsupportedError(
            f"mm_tokens_per_image is {num_tokens}; planish supports only square numbers that divide "
            f"an image of {image_size} pixels in patches of {patch_size}"
        )
    width, inner = _positive(vision, "hidden_size"), _positive(vision, "intermediate_size")
    num_layers = _positive({"num_hidden_layers": 26, **text}, "num_hidden_layers")
    return VisionConfig(
        image_token=_positive({"image_token_id": token}, "image_token_id"),
        patch_size=patch_size,
        temporal_patch_size=1,
        merge_size=merge_size,
        hidden_size=width,
        processor="gemma3",
        image_size=image_size,
        two_way_layers=tuple(range(num_layers)),
        num_weights=_positive(vision, "num_hidden_layers") * (4 * width**2 + 2 * width * inner),
    )


def _positive(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DamagedFileError(f"{name} is {value!r}; it must be a positive integer")
    return value
