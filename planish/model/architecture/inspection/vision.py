"""The models that planish runs with their vision tower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planish.errors import UnsupportedError
from planish.model.architecture.inspection.vision_config import TYPES_WITH_OWN_DECODER, VisionConfig

_GEMMA4_MODEL_TYPES = ("gemma4", "gemma4_unified")
VISION_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", *_GEMMA4_MODEL_TYPES)
"""The model types with images whose layers transformers' code computes."""
TOWERS = r".*\b(visual|vision_tower|embed_vision|audio_tower|embed_audio)\..*"
"""The names of modules outside of the text model, as a pattern for PEFT."""


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
    tower, token = (getattr(config, name, None) for name in ("vision_config", "image_token_id"))
    if not is_vision_type(config.model_type) or tower is None or token is None:
        return None
    vision = config.vision_config
    if config.model_type in _GEMMA4_MODEL_TYPES:
        return _gemma4(config, vision, config.text_config)
    return VisionConfig(
        image_token=config.image_token_id,
        patch_size=vision.patch_size,
        temporal_patch_size=vision.temporal_patch_size,
        merge_size=vision.spatial_merge_size,
        hidden_size=getattr(vision, "embed_dim", vision.hidden_size),
        mrope_section=tuple(config.text_config.rope_parameters["mrope_section"]),
    )


def _gemma4(config: Any, vision: Any, text: Any) -> VisionConfig:
    has_own_inputs = bool(getattr(text, "hidden_size_per_layer_input", 0))
    if has_own_inputs and text.pad_token_id is None:
        raise UnsupportedError(
            "pad_token_id is missing in text_config, and the tokens of images get its inputs per "
            "layer; copy config.json from the model again"
        )
    is_two_way = text.use_bidirectional_attention == "vision"
    return VisionConfig(
        image_token=config.image_token_id,
        patch_size=vision.patch_size,
        temporal_patch_size=1,
        merge_size=vision.pooling_kernel_size,
        # The unified models have no layers, only a projection of patches.
        hidden_size=getattr(vision, "hidden_size", None) or vision.mm_embed_dim,
        processor=config.model_type,
        two_way_layers=tuple(
            layer
            for layer, kind in enumerate(text.layer_types)
            if is_two_way and kind == "sliding_attention"
        ),
        per_layer_token=text.pad_token_id if has_own_inputs else None,
    )


def auto_class(is_multimodal: bool) -> Any:
    """Return transformers' class that creates and loads models with or without a vision tower."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
