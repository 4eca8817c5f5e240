"""The architecture of a base model, read from a Hugging Face config.json.

One decoder supports all families of `FAMILIES`, because they differ only in the fields of
`ModelConfig`. transformers' code computes the layers of other architectures (model/hf). A config that requires a feature that the decoder lacks is rejected before any weight
is read, and the error names the field. Required dimensions must be present. Any other missing field
takes the default of `transformers`. A `ModelConfig` does not contain the model's name, so the same
architecture from the hub and from a GGUF file compares equal.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from planish.errors import DamagedFileError, UnknownModelError, UnsupportedError
from planish.model.fp8_config import Fp8Config, read_fp8
from planish.model.inspection.inspect_model import inspect_model
from planish.model.inspection.modules import MAX_LAYERS, HFModules
from planish.model.json_fields import optional_object, positive_float, positive_int
from planish.model.rope_config import (
    LayerRopeSource,
    RopeConfig,
    max_context,
    original_context,
    read_rope,
    rope_parameters,
    rotary_dims,
)

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

MAX_CONFIG_BYTES = 16 << 20
"""The maximum size of a JSON file of settings."""
MAX_CONTEXT = 1 << 22
"""The maximum of max_position_embeddings, in tokens."""
MAX_EXPERTS = 1 << 18
"""The maximum number of experts in all layers together."""

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

_LAYER_ROPE_SOURCES: dict[Family, tuple[LayerRopeSource, LayerRopeSource]] = {
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


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a base model.

    Creating one raises UnsupportedError or DamagedFileError if the values contradict each other.
    """

    family: str
    """A value of `FAMILIES`, or transformers' model_type if `hf` is given."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_context: int
    """Longest supported sequence in tokens: max_position_embeddings, or the longer context that
    YaRN extends it to.
    """
    tied_head: bool
    """Whether the output head shares the embedding matrix; then there is no lm_head.weight."""
    qk_norm: bool
    """Whether each head's queries and keys pass an RMSNorm before RoPE (Qwen3)."""
    qkv_bias: bool
    """Whether the query, key and value projections have biases (Qwen2)."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence, from generation_config.json, else config.json; empty if neither
    names one.
    """
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    """The activation function of the MLP's gate. "clamped_swiglu" is the SwiGLU of gpt-oss: gate
    and up are clamped, and their columns alternate (see `Backend.clamped_swiglu`).
    """
    output_norms: bool = False
    """Whether the outputs of attention and MLP pass an RMSNorm before the residual addition (Gemma
    3, OLMo 3).
    """
    norm_offset: float = 0.0
    """The number that is added to the stored weight of every RMSNorm (1 in Gemma 3 and Qwen3.5),
    except the norms inside gated delta nets.
    """
    embedding_scale: float = 1.0
    """The factor of the embeddings. The decoder first rounds the factor to the model's dtype."""
    query_scalar: float | None = None
    """Attention scores are multiplied by query_scalar ** -0.5; None: by head_dim ** -0.5."""
    windows: tuple[int | None, ...] = ()
    """For each layer, the number of positions that a token attends to, including its own. None
    stands for all positions. An empty tuple means all positions in every layer.
    """
    local_rope: RopeConfig | None = None
    """RoPE of the layers with a window. None: these layers use `rope`, like the other layers."""
    layers_without_rope: tuple[int, ...] = ()
    """The layers whose queries and keys are not rotated (SmolLM3)."""
    rotary_dims: int | None = None
    """RoPE rotates only the first `rotary_dims` dimensions of each head (Phi-4 mini). None: RoPE
    rotates all dimensions.
    """
    input_norms: bool = True
    """Whether the inputs of attention and MLP pass an RMSNorm (all families except OLMo 3)."""
    joint_qk_norm: bool = False
    """Whether the norms of queries and keys are over all heads together (OLMo 3), not per head."""
    fused_projections: bool = False
    """Whether the checkpoint has one matrix for q, k and v and one for gate and up (Phi-3, Phi-4).
    An adapter then has one A and one B for each of them.
    """
    query_scale_beta: float | None = None
    """Queries at position p are multiplied by 1 + beta * log(1 + floor(p / N)), where N is
    `query_scale_interval` (Ministral 3). None: the scale of queries does not depend on p.
    """
    query_scale_interval: int = 1
    """The N of `query_scale_beta`: the factor is constant over each interval of N positions."""
    num_experts: int = 0
    """The number of experts of each mixture-of-experts layer; 0: every layer has a dense MLP."""
    experts_per_token: int = 0
    """The number of experts that the router chooses for each token."""
    expert_size: int = 0
    """The intermediate size of each expert's MLP. A dense MLP has `intermediate_size` instead."""
    normalizes_expert_weights: bool = False
    """Whether the router's probabilities of the chosen experts are divided by their sum."""
    dense_layers: tuple[int, ...] = ()
    """The layers with a dense MLP in a model with experts."""
    has_shared_expert: bool = False
    """Whether each mixture of experts also has a shared expert, an MLP of hidden size
    `intermediate_size` that computes every token (Qwen3.5). A sigmoid gate multiplies its output.
    """
    attention_sinks: bool = False
    """Whether each head has a sink (gpt-oss). A sink is a learned score that takes part in the
    softmax of every row and has no value.
    """
    output_bias: bool = False
    """Whether the output projection of the attention has a bias (gpt-oss)."""
    expert_biases: bool = False
    """Whether the router and the experts have biases (gpt-oss). Each expert then also has one joint
    matrix for gate and up.
    """
    swiglu_alpha: float = 1.0
    """The factor by which a clamped SwiGLU multiplies the gate inside the sigmoid."""
    swiglu_limit: float = 0.0
    """The limit of gate and up in a clamped SwiGLU."""
    mxfp4_experts: bool = False
    """Whether the checkpoint stores the experts' matrices in mxfp4. planish keeps their codes."""
    fp8: Fp8Config | None = None
    """How the checkpoint stores its linears in fp8. None: it does not."""
    output_gate: bool = False
    """Whether q_proj also computes a gate for each attention output (Qwen3.5)."""
    delta_net: DeltaNetConfig | None = None
    """The gated delta-net layers (Qwen3.5). None: every layer has attention."""
    score_cap: float | None = None
    """The limit c of attention scores, which become c * tanh(score / c) (Gemma 2). None: no limit.
    """
    logit_cap: float | None = None
    """The limit of logits, applied in the same way. None: no limit."""
    hf: HFModules | None = None
    """The modules, if transformers' code computes the layers. None: our own decoder does. With
    `hf`, the fields that describe details of a layer, such as `rope` and `activation`, have no
    meaning.
    """

    def has_experts(self, layer: int) -> bool:
        """Return whether the MLP of a layer is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The indices of the layers with attention, ascending."""
        recurrent_layers = self.delta_net.layers if self.delta_net is not None else ()
        return tuple(layer for layer in range(self.num_layers) if layer not in recurrent_layers)

    def window(self, layer: int) -> int | None:
        """Return the attention window of a layer in positions, or None if it has no window."""
        return self.windows[layer] if self.windows else None

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return the RoPE of a layer, or None if it has none."""
        if layer in self.layers_without_rope:
            return None
        uses_local = self.local_rope is not None and self.window(layer) is not None
        return self.local_rope if uses_local and self.local_rope is not None else self.rope

    def __post_init__(self) -> None:
        """Raise UnsupportedError or DamagedFileError if the values contradict each other."""
        for name, value, maximum in (
            (
                "num_experts times num_hidden_layers",
                self.num_experts * self.num_layers,
                MAX_EXPERTS,
            ),
            ("the context length", self.max_context, MAX_CONTEXT),
        ):
            if value > maximum:
                raise UnsupportedError(f"{name} is {value:,}; planish supports at most {maximum:,}")
        if self.query_scalar is not None and (not self.qk_norm or self.joint_qk_norm):
            raise UnsupportedError(
                f"query_pre_attn_scalar is {self.query_scalar}; planish supports this field only "
                "in models with a norm per query head (Gemma 3)"
            )
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedError(
                f"num_attention_heads is {self.num_heads}, which is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedError(f"head_dim is {self.head_dim}; RoPE needs an even number")
        if not 0 <= self.experts_per_token <= self.num_experts:
            raise UnsupportedError(
                f"num_experts_per_tok is {self.experts_per_token}; it must be at least 0, and at "
                f"most num_experts, which is {self.num_experts}"
            )
        if self.mxfp4_experts and (self.hidden_size % 32 or self.expert_size % 32):
            raise UnsupportedError(
                f"hidden_size {self.hidden_size} or intermediate_size {self.expert_size} is not a "
                "multiple of 32, the block size of mxfp4"
            )
        invalid_ids = [token for token in self.eos_token_ids if not 0 <= token < self.vocab_size]
        if invalid_ids:
            raise DamagedFileError(
                f"eos_token_id {invalid_ids} is outside the vocabulary of {self.vocab_size}; "
                "config.json or generation_config.json belongs to another model; copy both again"
            )

    @classmethod
    def from_directory(cls, path: str | Path) -> "ModelConfig":
        """Read config.json and generation_config.json of a Hugging Face directory.

        Raises UnknownModelError (no such directory or no config.json), DamagedFileError (not JSON,
        or a field is missing or has the wrong type), UnsupportedError (the decoder lacks a
        feature).
        """
        directory = Path(path)
        if not (directory / "config.json").is_file():
            raise UnknownModelError(
                f"{directory} is not a model directory: it has no config.json; check the path"
            )
        fields = outer_fields = read_json(directory / "config.json")
        architecture = _architecture(fields, directory)
        eos_token_ids = _eos_token_ids(directory, fields)
        if architecture is None:
            return _config_of_transformers(directory, str(fields["model_type"]), eos_token_ids)
        try:
            fields = text_fields(fields)
            if not fields.get("quantization_config"):
                fields |= _modelopt_fields(directory)
            # Before lists with one entry for each layer are made.
            if positive_int({"num_hidden_layers": 1, **fields}, "num_hidden_layers") > MAX_LAYERS:
                raise UnsupportedError(
                    f"num_hidden_layers is {fields['num_hidden_layers']:,}; planish supports at "
                    f"most {MAX_LAYERS:,}"
                )
            family = FAMILIES[
                fields["architectures"][0] if is_multimodal(outer_fields) else architecture
            ]
            fields = _FAMILY_DEFAULTS.get(family, {}) | fields
            if family in _ROPE_DEFAULTS and not rope_parameters(fields):
                fields["rope_parameters"] = _ROPE_DEFAULTS[family]
            _reject_unsupported(fields, family)
            return _config_from_fields(fields, family, eos_token_ids)
        except (UnsupportedError, DamagedFileError) as error:
            raise type(error)(f"{directory}/config.json: {error}") from error
        except (KeyError, TypeError) as error:
            raise DamagedFileError(
                f"{directory}/config.json is incomplete or wrong: {error.args[0]}. "
                "Copy it from the model again"
            ) from error

    def fingerprint(self) -> str:
        """Return a hash, in 16 hexadecimal digits, of the fields that determine weight shapes or
        logits: all except `eos_token_ids`, `max_context`, `mxfp4_experts` and `fp8`.
        """
        values = asdict(self)
        # A quantized checkpoint and its dequantized copy have the same weights, so both get the
        # same fingerprint.
        values["mxfp4_experts"], values["fp8"] = False, None
        del values["eos_token_ids"], values["max_context"]
        if self.hf is not None:
            values["hf"] = self.hf.settings_digest
        # Checkpoints contain fingerprints, so a new field of ModelConfig must not change the
        # fingerprints of existing models. These models have the default of the new field, so
        # fields with their default are left out.
        for field in fields(self):
            if field.default is not MISSING and values[field.name] == field.default:
                del values[field.name]
        values["rope"]["kind"] = type(self.rope.scaling).__name__
        if self.local_rope is not None:
            values["local_rope"]["kind"] = type(self.local_rope.scaling).__name__
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises DamagedFileError if the file contains anything else, is nested too deeply, or has more
    than `max_bytes`.
    """
    with open(path, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise DamagedFileError(
            f"{path} has more than {max_bytes:,} bytes, the maximum for such a file; copy it from "
            "the model again"
        )
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(
            f"{path} is not JSON ({error}); copy it from the model again"
        ) from error
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path} contains no JSON object; copy it from the model again")
    return content


def _architecture(fields: Mapping[str, Any], directory: Path) -> str | None:
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


def _config_of_transformers(
    directory: Path, model_type: str, eos_token_ids: tuple[int, ...]
) -> ModelConfig:
    """Return the config of a model whose layers transformers' code computes.

    Raises UnsupportedError with the reason if planish cannot run the model.
    """
    try:
        model = inspect_model(directory)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{directory}/config.json: planish has no decoder of its own for model_type "
            f"{model_type!r}, and cannot run the model by the code of transformers: {error}"
        ) from error
    return ModelConfig(
        family=model_type,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=len(model.attention),
        num_heads=max(call.num_heads for call in model.attention),
        num_kv_heads=max(call.num_kv_heads for call in model.attention),
        head_dim=max(max(call.key_dim, call.value_dim) for call in model.attention),
        rms_norm_eps=0.0,
        rope=RopeConfig(theta=1.0),
        max_context=model.max_context,
        tied_head=model.tied_head,
        qk_norm=False,
        qkv_bias=False,
        eos_token_ids=eos_token_ids,
        windows=model.windows,
        attention_sinks=any(call.has_sinks for call in model.attention),
        score_cap=model.attention[0].softcap,
        logit_cap=model.logit_cap,
        num_experts=model.num_experts,
        experts_per_token=model.experts_per_token,
        expert_size=model.expert_size,
        hf=model.modules,
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
    shared_keys = (
        "quantization_config",
        "eos_token_id",
        "dtype",
        "torch_dtype",
        "tie_word_embeddings",
    )
    outer_fields = {key: fields[key] for key in shared_keys if key in fields}
    if fields["model_type"] in ("qwen3_5", "qwen3_5_moe"):
        # In transformers, only the outer config decides whether the head of these models is tied.
        text_config = {
            **text_config,
            "tie_word_embeddings": bool(fields.get("tie_word_embeddings", False)),
        }
    return {
        **outer_fields,
        **text_config,
        "model_type": model_type,
        "architectures": [architectures_by_type[model_type]],
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
    if window >= context_length and family not in _LAYER_ROPE_SOURCES:
        # A window that covers the whole context masks nothing. The families of
        # _LAYER_ROPE_SOURCES keep it anyway, because the window also determines which RoPE a layer
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


def _config_from_fields(
    fields: Mapping[str, Any], family: Family, eos_token_ids: tuple[int, ...]
) -> ModelConfig:
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
    full_rope, local_rope = _LAYER_ROPE_SOURCES.get(family, (None, None))
    rope = read_rope(fields, full_rope)
    context_length = max_context(fields, rope)
    windows = _windows(fields, family, context_length)
    has_kv_heads = fields.get("num_key_value_heads") is not None or family not in (
        "llama",
        "olmo3",
        "phi3",
    )
    return ModelConfig(
        family=family,
        vocab_size=positive_int(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive_int(
            fields,
            "intermediate_size" if family != "qwen3_5_moe" else "shared_expert_intermediate_size",
        ),
        num_layers=positive_int(fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=positive_int(fields, "num_key_value_heads") if has_kv_heads else num_heads,
        head_dim=head_dim,
        rms_norm_eps=positive_float(fields, "rms_norm_eps", 1e-6),
        rope=rope,
        max_context=context_length,
        tied_head=bool(fields.get("tie_word_embeddings", False)),
        qk_norm=family in ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "olmo3"),
        qkv_bias=family in ("qwen2", "gpt_oss"),
        eos_token_ids=eos_token_ids,
        windows=windows,
        local_rope=read_rope(fields, local_rope) if local_rope is not None else None,
        rotary_dims=rotary_dims(fields, head_dim) if family in PARTIAL_ROPE_FAMILIES else None,
        fp8=_fp8_config(fields, family),
        **_family_fields(fields, family),
    )


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


def _modelopt_fields(directory: Path) -> dict[str, Any]:
    """Return the `quantization_config` in hf_quant_config.json, where older versions of modelopt
    write it.
    """
    path = directory / "hf_quant_config.json"
    quantization = read_json(path).get("quantization") if path.is_file() else None
    return (
        {"quantization_config": {"quant_method": "modelopt", **quantization}}
        if quantization
        else {}
    )


def _eos_token_ids(directory: Path, fields: Mapping[str, Any]) -> tuple[int, ...]:
    generation_config = directory / "generation_config.json"
    eos = read_json(generation_config).get("eos_token_id") if generation_config.is_file() else None
    if eos is None:
        eos = fields.get("eos_token_id")
    token_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in token_ids):
        raise DamagedFileError(
            f"eos_token_id in {directory} is {eos!r}; it must be a token id or a list of them. "
            "Download config.json and generation_config.json again"
        )
    return tuple(dict.fromkeys(token_ids))
