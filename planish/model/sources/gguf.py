"""Convert a GGUF file to an ordinary Hugging Face directory, which the rest of planish can read.

The weights are dequantized to bfloat16. Four differences between the formats would make a model
silently wrong if the conversion ignored them:

1. The order of rows in the query and key projections of Llama, SmolLM3 and Ministral 3. GGUF stores
   the interleaved RoPE order. Hugging Face pairs the two halves of a head. For the other families,
   both formats pair the halves.
2. The tokenizer (gguf_tokenizer.py). A GGUF file contains only the name of its pre-tokenizer.
3. The weights of Gemma's norms. GGUF stores them with 1 added.
4. RoPE scaling. For Llama 3.1, GGUF stores a table of divisors instead of the parameters. The
   converter finds the parameters that give this table, and rejects any other table.

The conversion is atomic: it writes a temporary directory, loads it back, checks it against its own
config, and renames it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from gguf import dequantize

from planish.errors import StorageError, UnsupportedError
from planish.files import set_default_mode, sync
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.families import FAMILIES, MODEL_TYPES
from planish.model.sources.gguf_file import GGUFFile, read_gguf
from planish.model.sources.gguf_tokenizer import build_tokenizer, tokenizer_settings
from planish.model.sources.weights import SINGLE_FILE, load_weights
from planish.tokenizer import save_tokenizer

if TYPE_CHECKING:  # importing torch takes seconds, and commands that list models do not need it
    import torch

CONVERSION_VERSION = 2
"""Version of the conversion of files that users name. Increase it when the conversion changes, so
that cached results of an older version are not reused.
"""

TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The Hugging Face name of each tensor of a layer, by its name in GGUF."""
OUTPUT_NORM_NAMES = TENSOR_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED_NAMES = TENSOR_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
EXPERT_NAMES = TENSOR_NAMES | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
"""In GGUF, one tensor has the weights of all experts. Its first dimension is the expert's index."""
TENSOR_NAMES_BY_ARCHITECTURE = {
    "gemma3": OUTPUT_NORM_NAMES,
    "olmo2": OUTPUT_NORM_NAMES,
    "phi3": FUSED_NAMES,
    "qwen3moe": EXPERT_NAMES,
}
"""The names of a layer's tensors by architecture. TENSOR_NAMES applies to all others."""

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "olmo2": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
"""The architecture to write to config.json, by the file's general.architecture. Files of Mistral
models name llama as their architecture, or mistral3 if the model came with a vision tower.
"""

INTERLEAVED_ARCHITECTURES = ("llama", "smollm3", "mistral3")
"""The architectures whose query and key rows GGUF stores in the interleaved RoPE order."""

ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""The tensors with RoPE scaling. The conversion writes their contents to config.json."""

NON_LAYER_TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""The Hugging Face name of each tensor outside the layers, by its name in GGUF."""


def convert_gguf(path: str | Path, directory: str | Path) -> Path:
    """Convert the GGUF file `path` to a Hugging Face directory in bfloat16; return the directory.

    `path` may be any part of a split file.
    The file's architecture must be one of ARCHITECTURES. An existing `directory` is left unchanged,
    even if another process creates it during the conversion.

    Raises UnknownModelError, UnsupportedError, DamagedFileError or StorageError. A failed
    conversion leaves no directory behind.
    """
    directory = Path(directory)
    if directory.exists():
        return directory
    from safetensors.torch import save_file

    source = read_gguf(path)
    config = _config_json(source)
    tokenizer = build_tokenizer(source)
    staging = directory.with_name(f".{directory.name}.{os.getpid()}-{uuid4().hex[:8]}.tmp")
    try:
        staging.mkdir(parents=True)
        _write_json(staging / "config.json", config)
        _write_json(
            staging / "generation_config.json",
            {k: v for k, v in config.items() if k.endswith("_token_id")},
        )
        save_tokenizer(staging, tokenizer, **tokenizer_settings(source))
        (staging / "README.md").write_text(_readme(source), encoding="utf-8")
        save_file(_converted_tensors(source), staging / SINGLE_FILE, metadata={"format": "pt"})
        set_default_mode(staging / SINGLE_FILE)
        load_weights(staging, ModelConfig.from_directory(staging))
        _publish(staging, directory)
    except OSError as error:
        raise StorageError(
            f"{path} could not be converted into {directory} ({error}); check the free space and "
            "the permissions"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory


def _readme(source: GGUFFile) -> str:
    """Return a model card (README.md) with the licence from the file's metadata."""
    names = {"license": "license", "license_name": "license.name", "license_link": "license.link"}
    licence_fields = {name: source.metadata.get(f"general.{key}") for name, key in names.items()}
    lines = [
        f"{name}: {json.dumps(value)}"
        for name, value in licence_fields.items()
        if isinstance(value, str)
    ]
    return "\n".join(
        ["---", *lines, "---", "", f"Converted from {source.path.name} by planish.", ""]
    )


def _publish(staging: Path, directory: Path) -> None:
    for file in staging.iterdir():
        sync(file)
    try:
        staging.rename(directory)
    except OSError:
        # Another process finished first. Its directory is complete, because renaming is atomic.
        if not (directory / "config.json").is_file():
            raise


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _config_json(source: GGUFFile) -> dict[str, Any]:
    """Return the contents of the model's config.json."""
    if source.architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{source.path} holds the architecture {source.architecture!r}; planish converts "
            f"{', '.join(ARCHITECTURES)}"
        )
    _reject_unsupported(source)
    architecture = ARCHITECTURES[source.architecture]
    if source.architecture == "mistral3" and not source.field("attention.temperature_scale", 0.0):
        architecture = "MistralForCausalLM"
    num_heads = source.field("attention.head_count")
    special_token_ids = {
        f"{role}_token_id": source.metadata.get(f"tokenizer.ggml.{name}_token_id")
        for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    end_token_ids = [
        special_token_ids["eos_token_id"],
        source.metadata.get("tokenizer.ggml.eot_token_id"),
    ]
    if None not in end_token_ids and end_token_ids[0] != end_token_ids[1]:
        special_token_ids["eos_token_id"] = end_token_ids
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPES.get(architecture, FAMILIES[architecture]),
        "dtype": "bfloat16",
        "vocab_size": int(source.tensors["token_embd.weight"].shape[1]),
        "hidden_size": source.field("embedding_length"),
        "intermediate_size": source.field("feed_forward_length"),
        "num_hidden_layers": source.field("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": source.field("attention.head_count_kv", num_heads),
        "head_dim": _head_dim(source),
        "hidden_act": "silu",
        "rms_norm_eps": _shortest_decimal(source.field("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest_decimal(source.field("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(source),
        "max_position_embeddings": source.field("context_length"),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        **_family_config(source),
        **{role: token for role, token in special_token_ids.items() if token is not None},
    }


def _family_config(source: GGUFFile) -> dict[str, Any]:
    """Return the fields of config.json that only some families have."""
    if source.architecture == "gemma3":
        return _gemma3_config(source)
    window = source.field("attention.sliding_window", 0)
    if source.architecture == "olmo2":
        sliding_layers = source.field("attention.sliding_window_pattern")
        layer_types = [
            "sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding_layers
        ]
        return {"sliding_window": window, "layer_types": layer_types}
    if source.architecture == "phi3":
        head_dim = _head_dim(source)
        return {
            "sliding_window": window or None,
            "partial_rotary_factor": source.field("rope.dimension_count", head_dim) / head_dim,
            "original_max_position_embeddings": source.field(
                "rope.scaling.original_context_length", source.field("context_length")
            ),
        }
    if source.architecture == "qwen3moe":
        return {
            "num_experts": source.field("expert_count"),
            "num_experts_per_tok": source.field("expert_used_count"),
            "moe_intermediate_size": source.field("expert_feed_forward_length"),
            # llama.cpp has this value as a constant of the architecture in its code.
            "norm_topk_prob": True,
        }
    return {"sliding_window": None} if source.architecture == "mistral3" else {}


def _gemma3_config(source: GGUFFile) -> dict[str, Any]:
    """Return the fields of config.json that only Gemma 3 has.

    A GGUF file lacks the values that llama.cpp has as constants of the architecture in its code.
    """
    num_layers, hidden_size = source.field("block_count"), source.field("embedding_length")
    # Only Gemma 3 27B, which has 62 layers, scales attention scores by the hidden size per head.
    is_27b = num_layers == 62
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": source.field("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": hidden_size // source.field("attention.head_count")
        if is_27b
        else _head_dim(source),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": source.field("final_logit_softcapping", 0.0) or None,
    }


def _reject_unsupported(source: GGUFFile) -> None:
    unsupported_reason = None
    if "token_embd.weight" not in source.tensors:
        unsupported_reason = "it has no token_embd.weight (is it only a vocabulary or an adapter?)"
    elif source.architecture != "qwen3moe" and source.field("expert_count", 0):
        unsupported_reason = "it is a mixture of experts of another family than Qwen3"
    elif isinstance(source.field("attention.head_count"), list):
        unsupported_reason = "its layers differ in their number of heads"
    elif source.architecture == "olmo2" and not source.field("attention.sliding_window", 0):
        unsupported_reason = "it is an OLMo 2; planish supports OLMo 3"
    elif source.field("attention.value_length", _head_dim(source)) != _head_dim(source):
        unsupported_reason = "its keys and values differ in length"
    elif source.architecture != "phi3" and source.field(
        "rope.dimension_count", _head_dim(source)
    ) != _head_dim(source):
        unsupported_reason = "its RoPE rotates only a part of each head"
    if unsupported_reason:
        raise UnsupportedError(f"{source.path} cannot be converted: {unsupported_reason}")


def _head_dim(source: GGUFFile) -> int:
    even_split = source.field("embedding_length") // source.field("attention.head_count")
    return source.field("attention.key_length", even_split)


def _shortest_decimal(value: float) -> float:
    """Return the float with the shortest decimal form that rounds to the same float32.

    For example, a GGUF file contains 9.99999975e-06 where the model's author wrote 1e-05.
    """
    return float(str(np.float32(value)))


def _rope_scaling(source: GGUFFile) -> dict[str, Any] | None:
    scaling_type = source.field("rope.scaling.type", "none")
    if "rope_factors_short.weight" in source.tensors:
        return _longrope_scaling(source)
    if scaling_type == "none" and "rope_freqs.weight" in source.tensors:
        return _llama3_scaling(source)
    if scaling_type == "none":
        return None
    if scaling_type == "linear":
        return {"rope_type": "linear", "factor": source.field("rope.scaling.factor")}
    if scaling_type == "yarn" and "rope_freqs.weight" not in source.tensors:
        return _yarn_scaling(source)
    raise UnsupportedError(
        f"{source.path} has RoPE scaling {scaling_type!r}; planish converts none, linear, llama3, "
        "yarn and longrope"
    )


def _yarn_scaling(source: GGUFFile) -> dict[str, Any]:
    required_fields = {
        "rope_type": "yarn",
        "factor": source.field("rope.scaling.factor"),
        "original_max_position_embeddings": source.field("rope.scaling.original_context_length"),
    }
    optional_keys = {
        "attention_factor": "rope.scaling.attn_factor",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
        "llama_4_scaling_beta": "attention.temperature_scale",
        # GGUF has one field for mscale and mscale_all_dim, which are equal in the models that have
        # them.
        "mscale": "rope.scaling.yarn_log_multiplier",
        "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
    }
    optional_values = {name: source.field(key, 0.0) for name, key in optional_keys.items()}
    return required_fields | {
        name: _shortest_decimal(value) for name, value in optional_values.items() if value
    }


def _longrope_scaling(source: GGUFFile) -> dict[str, Any]:
    factors = {
        name: [
            _shortest_decimal(value)
            for value in _dequantized(source, f"rope_factors_{length}.weight")
        ]
        for name, length in (("short_factor", "short"), ("long_factor", "long"))
    }
    context_length = source.field("context_length")
    original_context = source.field("rope.scaling.original_context_length")
    default_factor = math.sqrt(
        1 + math.log(max(1.0, context_length / original_context)) / math.log(original_context)
    )
    stored_factor = source.field("rope.scaling.attn_factor", default_factor)
    # Published configs usually omit this factor, so omit it if it has its default.
    optional_fields = (
        {}
        if math.isclose(stored_factor, default_factor, rel_tol=1e-5)
        else {"attention_factor": stored_factor}
    )
    return {"rope_type": "longrope", **factors, **optional_fields}


def _llama3_scaling(source: GGUFFile) -> dict[str, Any] | None:
    """Return the RoPE scaling of Llama 3.1 and later that gives the file's table of divisors.

    In all of these models, the frequency bands have the same bounds. The models differ only in
    `factor`, which is the largest divisor of the table.
    """
    divisors = _dequantized(source, "rope_freqs.weight")
    if (divisors == 1).all():
        return None
    factor = _shortest_decimal(divisors.max())
    low_freq_factor, high_freq_factor, original_context = 1.0, 4.0, 8192
    head_dim = _head_dim(source)
    theta = source.field("rope.freq_base", 10000.0)
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (
        (original_context / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    ).clip(0, 1)
    expected_divisors = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected_divisors.shape or not np.allclose(
        expected_divisors, divisors, rtol=1e-4
    ):
        raise UnsupportedError(
            f"{source.path} has a table of RoPE frequencies that is not Llama 3's; use the model's "
            "Hugging Face directory"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor,
        "original_max_position_embeddings": original_context,
    }


def _dequantized(source: GGUFFile, name: str) -> np.ndarray:
    """Return a dequantized copy of a tensor of the file, float32."""
    tensor = source.tensors[name]
    return np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def _converted_tensors(source: GGUFFile) -> dict[str, torch.Tensor]:
    import torch

    tensors = {}
    for name, tensor in source.tensors.items():
        if name in ROPE_TABLES:
            continue
        try:
            values = torch.from_numpy(_dequantized(source, name))
        except NotImplementedError:
            raise UnsupportedError(
                f"{source.path} has {name} quantized as {tensor.tensor_type.name}, which planish "
                "cannot read; get a file in another quantization, such as Q8_0"
            ) from None
        if source.architecture in INTERLEAVED_ARCHITECTURES and name.split(".")[-2:-1] in (
            ["attn_q"],
            ["attn_k"],
        ):
            values = _deinterleave_heads(values, _head_dim(source))
        if source.architecture == "gemma3" and name.endswith("_norm.weight"):
            values -= 1.0
        target, values = _tensor_name(name, source.architecture), values.to(torch.bfloat16)
        if ".experts." not in target:
            tensors[target] = values.contiguous()
            continue
        for expert, weight in enumerate(values):
            expert_target = target.replace(".experts.", f".experts.{expert}.")
            tensors[expert_target] = weight.clone()  # safetensors refuses tensors that share memory
    return tensors


def _tensor_name(name: str, architecture: str) -> str:
    """Return the Hugging Face name of a GGUF tensor.

    An unknown name is returned unchanged, so that the check in `load_weights` reports it.
    """
    names = TENSOR_NAMES_BY_ARCHITECTURE.get(architecture, TENSOR_NAMES)
    parts = name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in names:
        return f"model.layers.{parts[1]}.{names[parts[2]]}.{parts[3]}"
    return NON_LAYER_TENSOR_NAMES.get(name, name)


def _deinterleave_heads(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows 0, 1, 2, 3, ... of each head to 0, 2, ..., 1, 3, ..., because the decoder's
    RoPE pairs row i with row i + head_dim / 2.
    """
    return (
        weight.reshape(-1, head_dim // 2, 2, *weight.shape[1:])
        .transpose(1, 2)
        .reshape(weight.shape)
    )
