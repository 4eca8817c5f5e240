"""The models of transformers that planish runs with their vision tower."""

from __future__ import annotations

from typing import Any

from planish.model.inspection.modules import VisionModules

VISION_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""The model types with images. They have Qwen's image processor and RoPE positions of images."""


def is_vision_type(model_type: object) -> bool:
    """Return whether models of this type run with their vision tower."""
    return model_type in VISION_MODEL_TYPES


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
