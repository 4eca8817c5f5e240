"""The models of transformers that planish runs with their vision tower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planish.model.inspection.modules import VisionModules

VISION_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""The model types with images. They have Qwen's image processor and RoPE positions of images."""


def is_vision_type(model_type: object) -> bool:
    """Return whether models of this type run with their vision tower."""
    return model_type in VISION_MODEL_TYPES


def may_read_images(directory: Path) -> bool:
    """Return whether the model in a directory reads images. A directory without config.json, such as
    a copy of a tokenizer, may be of such a model.
    """
    config = directory / "config.json"
    if not config.is_file():
        return True
    try:
        return is_vision_type(json.loads(config.read_text("utf-8")).get("model_type"))
    except (ValueError, AttributeError):  # the model cannot be loaded either
        return False


def vision_modules(config: Any) -> VisionModules | None:
    """Return the vision tower of a config of transformers; None for a model without images."""
    if not is_vision_type(config.model_type):
        return None
    vision = config.vision_config
    return VisionModules(
        image_token=config.image_token_id,
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        hidden_size=getattr(vision, "embed_dim", vision.hidden_size),
    )


def auto_class(has_vision: bool) -> Any:
    """Return transformers' class that creates and loads models with or without a vision tower."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
