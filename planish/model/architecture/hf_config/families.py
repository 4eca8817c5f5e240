"""The families of models that the decoder supports: their names, and the defaults of their fields.

A multimodal config.json contains the config of a text model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from planish.errors import DamagedFileError, UnsupportedError
from planish.model.architecture.hf_config.rope_config import LayerRopeSource, rope_parameters

Family = Literal[
    "llama",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "gpt_oss",
    "smollm3",
    "gemma3",
    "olmo3",
    "phi3",
]

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "ministral3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "GptOssForCausalLM": "gpt_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "Gemma3ForCausalLM": "gemma3",
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi3",
}
"""The family of each supported architecture. The keys are values of `architectures` in config.json.
"""

MULTIMODAL_ARCHITECTURES = {
    "Gemma3ForConditionalGeneration": ("gemma3", ("Gemma3ForCausalLM",)),
    "Mistral3ForConditionalGeneration": (
        "mistral3",
        ("MistralForCausalLM", "Ministral3ForCausalLM"),
    ),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", ("Qwen3_5ForCausalLM",)),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", ("Qwen3_5MoeForCausalLM",)),
}
"""The supported multimodal architectures: the model_type, and the possible text models. The first
text model is the default.
"""

MODEL_TYPES = {
    "Gemma3ForCausalLM": "gemma3_text",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}
"""The model_type in config.json where it differs from the family's name."""

PARTIAL_ROPE_FAMILIES: tuple[Family, ...] = ("phi3", "qwen3_5", "qwen3_5_moe")
"""The families whose RoPE may rotate only a part of each head."""

_QWEN3_5_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}

_FAMILY_DEFAULTS: dict[Family, dict[str, Any]] = {
    "gemma3": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
    "smollm3": {"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    "mistral": {"sliding_window": 4096},
    "ministral3": {"head_dim": 128, "rms_norm_eps": 1e-5},
    "olmo3": {"sliding_window": 4096, "rms_norm_eps": 1e-5},
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "qwen3_5": _QWEN3_5_DEFAULTS,
    "qwen3_5_moe": _QWEN3_5_DEFAULTS
    | {
        "num_key_value_heads": 2,
        "num_experts": 256,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "gpt_oss": {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
}
"""The defaults of `transformers` that are specific to a family. Published configs of Gemma 3 omit
every field that has its default, including the model's dimensions.
"""

_ROPE_DEFAULTS: dict[Family, dict[str, Any]] = {
    "ministral3": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    "gpt_oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
"""The default of `rope_parameters` in a family, used if the config lacks this field."""

LAYER_ROPE_SOURCES: dict[Family, tuple[LayerRopeSource, LayerRopeSource]] = {
    "gemma3": (
        LayerRopeSource("full_attention", "rope_theta", 1_000_000.0),
        LayerRopeSource(
            "sliding_attention", "rope_local_base_freq", 10_000.0, has_rope_scaling=False
        ),
    ),
    "olmo3": (
        LayerRopeSource("full_attention", default_theta=500_000.0),
        LayerRopeSource("sliding_attention", default_theta=500_000.0, has_rope_scaling=False),
    ),
}
"""For each family whose layer types differ in RoPE: the settings of full-attention layers and of
sliding-window layers.
"""


def supported_architecture(fields: Mapping[str, Any], directory: Path) -> str | None:
    """Return the architecture that config.json names, or None if our own decoder lacks it.

    Raises UnsupportedError if config.json names no model_type that transformers could know.
    """
    model_type, listed = fields.get("model_type"), fields.get("architectures") or []
    if not isinstance(model_type, str | None) or not (
        isinstance(listed, list) and all(isinstance(name, str) for name in listed)
    ):
        raise DamagedFileError(
            f"{directory}/config.json: architectures is {listed!r} and model_type {model_type!r}; "
            "they must be a list of names and a name. Copy it from the model again"
        )
    model_types = {name: MODEL_TYPES.get(name, family) for name, family in FAMILIES.items()}
    model_types |= {name: outer_type for name, (outer_type, _) in MULTIMODAL_ARCHITECTURES.items()}
    architectures = listed or [
        name for name, outer_type in model_types.items() if outer_type == model_type
    ]
    for name in architectures:
        if name in model_types and model_type in (None, model_types[name]):
            return str(name)
    if model_type is not None and model_type not in model_types.values():
        return None
    raise UnsupportedError(
        f"{directory}/config.json: the architecture is "
        f"{', '.join(map(str, architectures)) or 'not named'} (model_type {model_type!r}); planish "
        f"supports {', '.join(FAMILIES)}, the text models of "
        f"{', '.join(MULTIMODAL_ARCHITECTURES)}, and models that transformers has by their "
        "model_type"
    )


def is_multimodal(fields: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a multimodal model whose text model is supported."""
    return fields.get("model_type") in {
        model_type for model_type, _ in MULTIMODAL_ARCHITECTURES.values()
    }


def text_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the text model inside a multimodal config.

    A text model's config is returned unchanged. Raises TypeError if `text_config` is not an object,
    and UnsupportedError if the text model is not supported.
    """
    if not is_multimodal(fields):
        return dict(fields)
    text_config = fields.get("text_config")
    if not isinstance(text_config, Mapping):
        raise TypeError(f"text_config is {text_config!r}, not an object")
    text_architectures = next(
        names
        for outer_type, names in MULTIMODAL_ARCHITECTURES.values()
        if outer_type == fields["model_type"]
    )
    architectures_by_type = {
        MODEL_TYPES.get(name, FAMILIES[name]): name for name in text_architectures
    }
    model_type = text_config.get("model_type", next(iter(architectures_by_type)))
    if model_type not in architectures_by_type:
        raise UnsupportedError(
            f"the text_config has model_type {model_type!r}; inside {fields['model_type']}, "
            f"planish supports {', '.join(architectures_by_type)}"
        )
    shared_keys = ("quantization_config", "eos_token_id", "dtype", "torch_dtype")
    outer_fields = {key: fields[key] for key in shared_keys if key in fields}
    # In transformers, the outer config decides whether the head is tied.
    is_tied = fields.get("tie_word_embeddings")
    if is_tied is None and fields["model_type"] in ("qwen3_5", "qwen3_5_moe"):
        is_tied = False
    if is_tied is not None:
        text_config = {**text_config, "tie_word_embeddings": bool(is_tied)}
    return {
        **outer_fields,
        **text_config,
        "model_type": model_type,
        "architectures": [architectures_by_type[model_type]],
    }


def with_family_defaults(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of a text model, with the family's defaults for missing ones."""
    fields = _FAMILY_DEFAULTS.get(family, {}) | dict(fields)
    if family in _ROPE_DEFAULTS and not rope_parameters(fields):
        fields["rope_parameters"] = _ROPE_DEFAULTS[family]
    return fields
