"""Tiny random models with images for tests (see testing.py)."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from planish.testing import (
    DELTA_NETS,
    DTYPES,
    EOS_TOKEN_ID,
    GEMMA4_TEXT,
    NUM_TOKENS,
    TINY_SIZES,
    has_field,
    randomize,
    save_byte_tokenizer,
)

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Control tokens of Qwen's models with images, with the ids after WORD_TOKENS. Only a tiny model with
images has them.
"""
GEMMA3_TOKENS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
"""Control tokens of Gemma 3 with images, with the ids after WORD_TOKENS."""
GEMMA4_TOKENS = ("<|image>", "<image|>", "<|image|>")
"""Control tokens of Gemma 4 with images, with the ids after WORD_TOKENS."""


def tiny_vision_model(
    path: str | Path, model_type: str = "qwen3_vl", *, seed: int = 0, dtype: str = "float32"
) -> Path:
    """Write a random model with images, as a Hugging Face directory, and return its path.

    `model_type`: "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
    "gemma3", "gemma4" (like E2B), "gemma4_moe" (like 26B-A4B) or "gemma4_unified" (like 12B). A
    token of an image has 16 x 16 pixels. Gemma 3 resizes each image to 3 x 3 tokens, and Gemma 4 to
    about 70 tokens of 12 x 12 pixels.
    """
    if model_type.startswith("gemma4"):
        return _tiny_gemma4(Path(path), model_type, seed, dtype)
    if model_type == "gemma3":
        return _tiny_gemma3(Path(path), seed, dtype)
    first = NUM_TOKENS
    start, end, image, video = range(first, first + len(VISION_TOKENS))
    mrope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    mrope |= {"mrope_section": [2, 3, 3]}
    sizes = TINY_SIZES | {"vocab_size": first + 6, "rope_parameters": mrope}
    vision = {"depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2}
    vision |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
    if model_type.startswith("qwen3_5"):
        mrope |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        sizes |= DELTA_NETS | {"shared_expert_intermediate_size": 32}
        sizes["layer_types"] = ["linear_attention", "full_attention"]
        vision |= {"num_position_embeddings": 64}
    elif model_type.startswith("qwen3_vl"):
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    elif model_type == "qwen2_5_vl":
        vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
    else:
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    defaults = AutoConfig.for_model(model_type)
    text = {key: value for key, value in sizes.items() if has_field(defaults.text_config, key)}
    config = AutoConfig.for_model(
        model_type,
        text_config=text | {"tie_word_embeddings": False},
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 8,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 16 * 16, "longest_edge": 256 * 16 * 16},
    }
    return _save(Path(path), config, processor, VISION_TOKENS, seed, dtype)


def _tiny_gemma3(path: Path, seed: int, dtype: str) -> Path:
    first = NUM_TOKENS
    sizes = TINY_SIZES | {"vocab_size": first + 6, "query_pre_attn_scalar": 16}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False}
    defaults = AutoConfig.for_model("gemma3")
    vision = {"num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8, "image_size": 48}
    config = AutoConfig.for_model(
        "gemma3",
        text_config={k: v for k, v in sizes.items() if has_field(defaults.text_config, k)},
        vision_config=vision | {"hidden_size": 32, "intermediate_size": 48},
        mm_tokens_per_image=9,
        boi_token_index=first,
        eoi_token_index=first + 1,
        image_token_index=first + 2,
        tie_word_embeddings=False,
    )
    processor = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 48, "width": 48},
        "image_seq_length": 9,
    }
    return _save(path, config, processor, GEMMA3_TOKENS, seed, dtype)


def _tiny_gemma4(path: Path, kind: str, seed: int, dtype: str) -> Path:
    first = NUM_TOKENS
    sizes = {"vocab_size": first + 6, "vocab_size_per_layer_input": first + 6}
    text: dict[str, Any] = GEMMA4_TEXT | sizes
    text["tie_word_embeddings"] = False
    if kind != "gemma4":
        text |= {"num_hidden_layers": 2, "layer_types": text["layer_types"][:2]}
        text |= {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
        text |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
        text |= {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0}
    if kind == "gemma4_moe":
        text |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        text["moe_intermediate_size"] = 32
    if kind == "gemma4_unified":
        vision: dict[str, Any] = {"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 70}
    else:
        vision = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        vision |= {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
        vision |= {"position_embedding_size": 256, "use_clipped_linears": kind == "gemma4"}
        vision |= {"standardize": kind != "gemma4"}
    model_type = "gemma4_unified" if kind == "gemma4_unified" else "gemma4"
    config = AutoConfig.for_model(
        model_type,
        text_config=text,
        vision_config=vision | {"patch_size": 4, "pooling_kernel_size": 3},
        boi_token_id=first,
        eoi_token_id=first + 1,
        image_token_id=first + 2,
        tie_word_embeddings=False,
    )
    name = (
        "Gemma4UnifiedImageProcessor" if model_type == "gemma4_unified" else "Gemma4ImageProcessor"
    )
    processor = {"image_processor_type": name, "do_normalize": False}
    processor |= {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}
    return _save(path, config, processor, GEMMA4_TOKENS, seed, dtype)


def _save(
    path: Path,
    config: Any,
    processor: dict[str, Any],
    tokens: tuple[str, ...],
    seed: int,
    dtype: str,
) -> Path:
    """Write a random model of a config. `tokens`: the control tokens beside those of testing.py."""
    config.dtype = dtype
    model: Any = AutoModelForImageTextToText.from_config(config)
    randomize(model, seed)
    model.to(DTYPES[dtype])
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    processor |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    GenerationConfig(eos_token_id=EOS_TOKEN_ID, pad_token_id=256).save_pretrained(path)
    return save_byte_tokenizer(path, tokens)
