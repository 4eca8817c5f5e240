"""The fields of `ModelConfig`, read from the fields of a config.json.

A feature that the decoder lacks raises UnsupportedError, and a wrong field TypeError.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planish.errors import UnsupportedError
from planish.model.architecture.hf_config.families import (
    LAYER_ROPE_SOURCES,
    PARTIAL_ROPE_FAMILIES,
    Family,
)
from planish.model.architecture.hf_config.fp8_config import Fp8Config, read_fp8
from planish.model.architecture.hf_config.json_fields import (
    optional_object,
    positive_float,
    positive_int,
)
from planish.model.architecture.hf_config.rope_config import (
    max_context,
    original_context,
    read_rope,
    rope_parameters,
    rotary_dims,
)


@dataclass(frozen=True)
class DeltaNetConfig:
    """The sizes of gated delta-net layers (Yang et al. 2024), which have a recurrent state instead
    of keys and values.
    """

    layers: tuple[int, ...]
    """The indices of the decoder layers that are gated delta-net layers, ascending."""
    num_key_heads: int
    """The number of query heads, and of key heads."""
    num_value_heads: int
    """A multiple of `num_key_heads`: consecutive value heads share one query head and key head."""
    key_dim: int
    """The size of a query or key head."""
    value_dim: int
    """The size of a value head."""
    conv_width: int
    """The kernel size of the causal convolution, in positions."""

    @property
    def channels(self) -> int:
        """The channels of the convolution: all heads of queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """The shape of the matrices of one layer's state."""
        return self.num_value_heads, self.key_dim, self.value_dim


def read_decoder_fields(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of `ModelConfig`, except the tokens that end a sequence.

    `fields` are those of a text model, with the defaults of its family.
    """
    _reject_unsupported(fields, family)
    num_heads = positive_int(fields, "num_attention_heads")
    hidden_size = positive_int(fields, "hidden_size")
    if fields.get("head_dim") is not None:
        head_dim = positive_int(fields, "head_dim")
    elif family == "qwen3":
        head_dim = 128
    elif hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads
    else:
        raise TypeError(
            f"head_dim is missing, and hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {num_heads}"
        )
    full_rope, local_rope = LAYER_ROPE_SOURCES.get(family, (None, None))
    rope = read_rope(fields, full_rope)
    context_length = max_context(fields, rope)
    windows = _windows(fields, family, context_length)
    has_kv_heads = fields.get("num_key_value_heads") is not None or family not in (
        "llama",
        "olmo3",
        "phi3",
    )
    return {
        "family": family,
        "vocab_size": positive_int(fields, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": positive_int(
            fields,
            "intermediate_size" if family != "qwen3_5_moe" else "shared_expert_intermediate_size",
        ),
        "num_layers": positive_int(fields, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": positive_int(fields, "num_key_value_heads") if has_kv_heads else num_heads,
        "head_dim": head_dim,
        "rms_norm_eps": positive_float(fields, "rms_norm_eps", 1e-6),
        "rope": rope,
        "max_context": context_length,
        "tied_head": bool(fields.get("tie_word_embeddings", False)),
        "qk_norm": family in ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "olmo3"),
        "qkv_bias": family in ("qwen2", "gpt_oss"),
        "windows": windows,
        "local_rope": read_rope(fields, local_rope) if local_rope is not None else None,
        "rotary_dims": rotary_dims(fields, head_dim) if family in PARTIAL_ROPE_FAMILIES else None,
        "fp8": _fp8_config(fields, family),
        **_family_fields(fields, family),
    }


def _reject_unsupported(fields: Mapping[str, Any], family: Family) -> None:
    if (
        family == "gpt_oss"
        and fields.get("quantization_config")
        and not _has_mxfp4_experts(fields, family)
    ):
        raise UnsupportedError(
            f"quantization_config has quant_method {_quant_method(fields)!r}; planish loads "
            "gpt-oss in mxfp4 or bf16. Use such a checkpoint"
        )
    if family == "gemma3":
        _reject_gemma_options(fields)
    elif fields.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedError(
            f"hidden_act is {fields['hidden_act']!r}; planish supports only silu in this family"
        )
    if fields.get("attention_bias") and family not in ("qwen2", "gpt_oss"):
        raise UnsupportedError(
            "attention_bias is true; planish supports these biases only in Qwen2 and gpt-oss models"
        )
    if family == "gpt_oss" and not fields["attention_bias"]:
        raise UnsupportedError("attention_bias is false; planish supports gpt-oss only with biases")
    if fields.get("mlp_bias"):
        raise UnsupportedError("mlp_bias is true; planish supports no biases in the MLP")
    if (fields.get("pretraining_tp") or 1) > 1:
        raise UnsupportedError(
            f"pretraining_tp is {fields['pretraining_tp']}; planish supports only 1. Set it to 1 "
            "in config.json if the weights are not split"
        )
    if fields.get("rope_interleaved"):
        raise UnsupportedError(
            "rope_interleaved is true; planish supports only RoPE that pairs dimension i with "
            "dimension i + head_dim / 2"
        )
    expert_keys = family not in ("qwen3_moe", "qwen3_5_moe", "gpt_oss") and [
        key
        for key in ("num_experts", "num_local_experts", "n_routed_experts")
        if (fields.get(key) or 0) > 1
    ]
    if expert_keys:
        raise UnsupportedError(
            f"{expert_keys[0]} is {fields[expert_keys[0]]}; planish supports mixtures of experts "
            "only in Qwen3 and gpt-oss models"
        )
    rotary_fraction = rope_parameters(fields).get(
        "partial_rotary_factor", fields.get("partial_rotary_factor")
    )
    if family not in PARTIAL_ROPE_FAMILIES and rotary_fraction not in (None, 1, 1.0):
        raise UnsupportedError(
            f"partial_rotary_factor is {rotary_fraction}; planish supports only 1 in this family"
        )


def _has_mxfp4_experts(fields: Mapping[str, Any], family: Family) -> bool:
    """Return whether the checkpoint stores the experts of a gpt-oss model in mxfp4."""
    return family == "gpt_oss" and _quant_method(fields) == "mxfp4"


def _quant_method(fields: Mapping[str, Any]) -> str | None:
    """Return the quant_method of a checkpoint that is quantized, else None."""
    return optional_object(fields, "quantization_config").get("quant_method")


def _fp8_config(fields: Mapping[str, Any], family: Family) -> Fp8Config | None:
    quantization = optional_object(fields, "quantization_config")
    return (
        read_fp8(quantization) if quantization and not _has_mxfp4_experts(fields, family) else None
    )


def _reject_gemma_options(fields: Mapping[str, Any]) -> None:
    activation = fields.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise UnsupportedError(
            f"hidden_activation is {activation!r}; planish supports only gelu_pytorch_tanh in "
            "Gemma 3 models"
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.get(key) is not None:
            raise UnsupportedError(f"{key} is {fields[key]}; planish does not support softcapping")
    if fields.get("use_bidirectional_attention"):
        raise UnsupportedError(
            "use_bidirectional_attention is true; planish supports only causal attention"
        )


def _windows(
    fields: Mapping[str, Any], family: Family, context_length: int
) -> tuple[int | None, ...]:
    """Return the attention window of each layer (see `ModelConfig.windows`)."""
    num_layers = positive_int(fields, "num_hidden_layers")
    layer_types = fields.get("layer_types")
    if family in ("qwen3_5", "qwen3_5_moe"):
        return ()  # `_delta_net_config` reads the layer types of these families.
    if family in ("mistral", "ministral3", "phi3"):
        layer_types = ["sliding_attention"] * num_layers
    elif family == "gemma3":
        pattern = fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern", 6))
        layer_types = layer_types or _alternating_layer_types(num_layers, pattern)
    elif family == "olmo3":
        layer_types = layer_types or _alternating_layer_types(num_layers, 4)
    elif family == "gpt_oss":
        layer_types = layer_types or _alternating_layer_types(num_layers, 2)
    elif not fields.get("use_sliding_window") and family in ("qwen2", "qwen3", "qwen3_moe"):
        layer_types = None
    elif family in ("qwen2", "qwen3", "qwen3_moe"):
        num_full = min(num_layers, fields.get("max_window_layers", 28))
        layer_types = layer_types or ["full_attention"] * num_full + ["sliding_attention"] * (
            num_layers - num_full
        )
    elif fields.get("use_sliding_window") and (family == "llama" or not layer_types):
        raise UnsupportedError(
            "use_sliding_window is true, but layer_types is missing; it must name each layer's type"
            if family != "llama"
            else "use_sliding_window is true; planish supports no sliding windows in Llama models"
        )
    layer_types = layer_types or ["full_attention"] * num_layers
    _check_layer_types(layer_types, num_layers, "sliding_attention")
    if "sliding_attention" not in layer_types or fields.get("sliding_window") is None:
        return ()
    window = positive_int(fields, "sliding_window")
    if window >= context_length and family not in LAYER_ROPE_SOURCES:
        # A window that covers the whole context masks nothing. The families of
        # LAYER_ROPE_SOURCES keep it anyway, because the window also determines which RoPE a layer
        # uses.
        return ()
    return tuple(
        window if layer_type == "sliding_attention" else None for layer_type in layer_types
    )


def _check_layer_types(layer_types: Sequence[object], num_layers: int, other_type: str) -> None:
    """Raise TypeError unless all `num_layers` layers are of type full_attention or `other_type`."""
    if len(layer_types) != num_layers:
        raise TypeError(
            f"layer_types has {len(layer_types)} entries, and num_hidden_layers is {num_layers}; "
            "layer_types needs one entry for each layer"
        )
    unknown = sorted(
        {
            repr(layer_type)
            for layer_type in layer_types
            if layer_type not in (other_type, "full_attention")
        }
    )
    if unknown:
        raise TypeError(
            f"layer_types contains {', '.join(unknown)}; each entry must be {other_type!r} or "
            "'full_attention'"
        )


def _alternating_layer_types(num_layers: int, period: int) -> list[str]:
    """Return the types of `num_layers` layers. Every `period`-th layer has full attention."""
    layer_types = ("sliding_attention", "full_attention")
    return [layer_types[(layer + 1) % period == 0] for layer in range(num_layers)]


def _expert_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that describe the experts of Qwen3 and Qwen3.5."""
    num_layers = positive_int(fields, "num_hidden_layers")
    # transformers 5 writes num_local_experts, older versions num_experts.
    expert_fields = {"num_experts": fields.get("num_local_experts", 128), **fields}
    sparse_step = positive_int({"decoder_sparse_step": 1, **fields}, "decoder_sparse_step")
    dense_layers = fields.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or any(
        not isinstance(layer, int) for layer in dense_layers
    ):
        raise TypeError(f"mlp_only_layers is {dense_layers!r}; it must be a list of layer indices")
    return {
        "num_experts": positive_int(expert_fields, "num_experts"),
        "experts_per_token": positive_int(
            {"num_experts_per_tok": 8, **fields}, "num_experts_per_tok"
        ),
        "expert_size": positive_int(
            {"moe_intermediate_size": 768, **fields}, "moe_intermediate_size"
        ),
        "normalizes_expert_weights": bool(fields.get("norm_topk_prob", False)),
        "dense_layers": tuple(
            layer
            for layer in range(num_layers)
            if layer in dense_layers or (layer + 1) % sparse_step
        ),
    }


def _layers_without_rope(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the indices of SmolLM3's layers without RoPE: those whose entry in `no_rope_layers` is
    0.
    """
    num_layers = positive_int(fields, "num_hidden_layers")
    interval = positive_int({"no_rope_layer_interval": 4, **fields}, "no_rope_layer_interval")
    uses_rope = fields.get("no_rope_layers")
    if uses_rope is None:
        uses_rope = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(uses_rope, list) or len(uses_rope) != num_layers:
        raise TypeError(f"no_rope_layers is {uses_rope!r}, not a list with {num_layers} entries")
    return tuple(layer for layer, uses in enumerate(uses_rope) if not uses)


def _family_fields(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that are specific to this family."""
    if family == "smollm3":
        return {"layers_without_rope": _layers_without_rope(fields)}
    if family == "gemma3":
        return {
            "activation": "gelu_tanh",
            "output_norms": True,
            "norm_offset": 1.0,
            "embedding_scale": positive_int(fields, "hidden_size") ** 0.5,
            "query_scalar": positive_float(fields, "query_pre_attn_scalar"),
        }
    if family == "olmo3":
        return {"output_norms": True, "input_norms": False, "joint_qk_norm": True}
    if family in ("qwen3_5", "qwen3_5_moe"):
        family_fields = {
            "norm_offset": 1.0,
            "output_gate": True,
            "delta_net": _delta_net_config(fields),
        }
        if family == "qwen3_5_moe":
            # The router always divides by the sum, and every layer has experts.
            family_fields |= _expert_fields(fields) | {"normalizes_expert_weights": True}
            family_fields |= {"has_shared_expert": True, "dense_layers": ()}
        return family_fields
    if family == "phi3":
        return {"fused_projections": True}
    if family == "qwen3_moe":
        return _expert_fields(fields)
    if family == "gpt_oss":
        return {
            "activation": "clamped_swiglu",
            "swiglu_alpha": positive_float(fields, "swiglu_alpha"),
            "swiglu_limit": positive_float(fields, "swiglu_limit"),
            "attention_sinks": True,
            "output_bias": True,
            "expert_biases": True,
            "num_experts": positive_int(fields, "num_local_experts"),
            "experts_per_token": positive_int(fields, "num_experts_per_tok"),
            "expert_size": positive_int(fields, "intermediate_size"),
            # The softmax over the chosen experts equals the normalized softmax over all.
            "normalizes_expert_weights": True,
            "mxfp4_experts": _has_mxfp4_experts(fields, family),
        }
    if family == "ministral3" and rope_parameters(fields).get("llama_4_scaling_beta"):
        parameters = rope_parameters(fields)
        return {
            "query_scale_beta": positive_float(parameters, "llama_4_scaling_beta"),
            "query_scale_interval": original_context(fields, parameters),
        }
    return {}


def _delta_net_config(fields: Mapping[str, Any]) -> DeltaNetConfig | None:
    """Return the gated delta-net layers of Qwen3.5, or None if all layers have attention."""
    num_layers = positive_int(fields, "num_hidden_layers")
    interval = positive_int(fields, "full_attention_interval")
    layer_types = fields.get("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(num_layers)
    ]
    _check_layer_types(layer_types, num_layers, "linear_attention")
    recurrent_layers = tuple(
        layer for layer, layer_type in enumerate(layer_types) if layer_type == "linear_attention"
    )
    if len(recurrent_layers) == num_layers:
        raise UnsupportedError(
            "layer_types has no full_attention layer; planish needs at least one"
        )
    num_key_heads, num_value_heads = (
        positive_int(fields, f"linear_num_{part}_heads") for part in ("key", "value")
    )
    if num_value_heads % num_key_heads:
        raise UnsupportedError(
            f"linear_num_value_heads is {num_value_heads}, which is not a multiple of "
            f"linear_num_key_heads {num_key_heads}"
        )
    conv_width = positive_int(fields, "linear_conv_kernel_dim")
    if conv_width < 2:
        raise UnsupportedError("linear_conv_kernel_dim is 1; it must be at least 2")
    if fields.get("attn_output_gate", True) is not True:
        raise UnsupportedError(
            "attn_output_gate is false; planish supports Qwen3.5 only with this gate"
        )
    if not recurrent_layers:
        return None
    return DeltaNetConfig(
        layers=recurrent_layers,
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=positive_int(fields, "linear_key_head_dim"),
        value_dim=positive_int(fields, "linear_value_head_dim"),
        conv_width=conv_width,
    )
