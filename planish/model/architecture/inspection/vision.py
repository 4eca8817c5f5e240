"""The models that planish runs with their vision tower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planish.model.architecture.inspection.vision_config import TYPES_WITH_OWN_DECODER, VisionConfig

VISION_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""The model types with images whose layers transformers' code computes. They have Qwen's image
processor and RoPE positions of images.
"""

TEXT_ONLY_MODEL_TYPES = ("gemma4",)
"""The model types with towers of which planish runs the text model alone, by the code of
transformers.
"""
TOWERS = r".*\b(visual|vision_tower|embed_vision|audio_tower|embed_audio)\..*"
"""The names of modules outside of the text model, as a pattern for PEFT."""


def is_multimodal_type(model_type: object) -> bool:
    """Return whether transformers' code computes the text model of a model of this type, which also
    has a vision tower.
    """
    return is_vision_type(model_type) or model_type in TEXT_ONLY_MODEL_TYPES


def is_vision_type(model_type: object) -> bool:
    """Return whether transformers' code computes the layers of a model of this type with images."""
    return model_type in VISION_MODEL_TYPES


def may_read_images(directory: Path) -> bool:
    """Return whether the model in a directory reads images. A directory without config.json, such as
    a copy of a tokenizer, may be of such a model.
    """
    config = directory / "config.json"
    if not config.is_file():
        return True
    try:
        model_type = json.loads(config.read_text("utf-8")).get("model_type")
        return is_vision_type(model_type) or model_type in TYPES_WITH_OWN_DECODER
    except (ValueError, AttributeError):  # the model cannot be loaded either
        return False


def vision_modules(config: Any) -> VisionConfig | None:
    """Return the vision tower of a config of transformers; None for a model without images."""
    if not is_vision_type(config.model_type):
        return None
    vision = config.vision_config
    return VisionConfig(
        image_token=config.image_token_id,
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        hidden_size=getattr(vision, "embed_dim", vision.hidden_size),
        mrope_section=tuple(config.text_config.rope_parameters["mrope_section"]),
    )


def auto_class(is_multimodal: bool) -> Any:
    """Return transformers' class that creates and loads models with or without a vision tower."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
