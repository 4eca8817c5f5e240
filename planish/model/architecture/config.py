"""The architecture of a base model, read from a Hugging Face config.json.

One decoder supports all families of `FAMILIES`, because they differ only in the fields of
`ModelConfig`. transformers' code computes the layers of other architectures (model/hf). A config
that requires a feature that the decoder lacks is rejected before any weight is read, and the error
names the field. Required dimensions must be present. Any other missing field takes the default of
`transformers`. A `ModelConfig` does not contain the model's name, so the same architecture from the
hub and from a GGUF file compares equal.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from planish.errors import DamagedFileError, UnknownModelError, UnsupportedError
from planish.model.architecture.hf_config.decoder_fields import DeltaNetConfig, read_decoder_fields
from planish.model.architecture.hf_config.families import (
    FAMILIES,
    is_multimodal,
    supported_architecture,
    text_fields,
    with_family_defaults,
)
from planish.model.architecture.hf_config.fp8_config import Fp8Config
from planish.model.architecture.hf_config.json_fields import positive_int, read_json
from planish.model.architecture.hf_config.rope_config import RopeConfig
from planish.model.architecture.inspection.inspect_model import inspect_model
from planish.model.architecture.inspection.modules import (
    MAX_LAYERS,
    HFModules,
    Mamba2Config,
    ShortConvConfig,
)
from planish.model.architecture.inspection.vision_config import VisionConfig, read_vision_config

MAX_CONTEXT = 1 << 22
"""The maximum of max_position_embeddings, in tokens."""
MAX_EXPERTS = 1 << 18
"""The maximum number of experts in all layers together."""
RecurrenceConfig = DeltaNetConfig | ShortConvConfig | Mamba2Config
"""The sizes of the layers with a recurrent state."""


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
    """The gated delta-net layers (Qwen3.5). None: there are none."""
    short_conv: ShortConvConfig | None = None
    """The layers with a short convolution in the place of attention (LFM2). None: there are none."""
    mamba2: Mamba2Config | None = None
    """The layers with a Mamba-2 state (Nemotron-H). None: there are none."""
    score_cap: float | None = None
    """The limit c of attention scores, which become c * tanh(score / c) (Gemma 2). None: no limit.
    """
    logit_cap: float | None = None
    """The limit of logits, applied in the same way. None: no limit."""
    vision: VisionConfig | None = None
    """The vision tower; None for a model that reads only text."""
    hf: HFModules | None = None
    """The modules, if transformers' code computes the layers. None: our own decoder does. With
    `hf`, the fields that describe details of a layer, such as `rope` and `activation`, have no
    meaning.
    """

    def has_experts(self, layer: int) -> bool:
        """Return whether the MLP of a layer is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def recurrence(self) -> RecurrenceConfig | None:
        """The layers with a recurrent state. None: there are none."""
        return self.delta_net or self.short_conv or self.mamba2

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The indices of the layers with attention, ascending."""
        if self.hf is not None:
            return self.hf.attention_layers
        recurrent_layers = self.recurrence.layers if self.recurrence is not None else ()
        return tuple(layer for layer in range(self.num_layers) if layer not in recurrent_layers)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers with attention whose keys and values are no other layer's, ascending."""
        if self.hf is None:
            return self.attention_layers
        numbers = self.hf.kv_numbers
        return tuple(self.attention_layers[numbers.index(number)] for number in sorted({*numbers}))

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """The attention window of each of `kv_layers`; empty if no layer has a window."""
        return tuple(self.windows[layer] for layer in self.kv_layers if self.windows)

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
        architecture = supported_architecture(fields, directory)
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
            decoder_fields = read_decoder_fields(with_family_defaults(fields, family), family)
            vision = read_vision_config(outer_fields)
            return cls(eos_token_ids=eos_token_ids, vision=vision, **decoder_fields)
        except (UnsupportedError, DamagedFileError) as error:
            raise type(error)(f"{directory}/config.json: {error}") from error
        except (KeyError, TypeError) as error:
            raise DamagedFileError(
                f"{directory}/config.json is incomplete or wrong: {error.args[0]}. "
                "Copy it from the model again"
            ) from error

    def fingerprint(self) -> str:
        """Return a hash, in 16 hexadecimal digits, of the fields that determine weight shapes or
        logits: all except `eos_token_ids`, `max_context`, `vision`, `mxfp4_experts` and `fp8`.
        """
        values = asdict(self)
        # A quantized checkpoint and its dequantized copy have the same weights, so both get the
        # same fingerprint.
        values["mxfp4_experts"], values["fp8"] = False, None
        # An adapter of the text model is for the multimodal model too.
        del values["eos_token_ids"], values["max_context"], values["vision"]
        if self.hf is not None:
            values["hf"] = self.hf.settings_digest
        # Checkpoints contain fingerprints, so a new field of ModelConfig must not change the
        # fingerprints of existing models. These models have the default of the new field, so
        # fields with their default are left out.
        for field in fields(self):
            if field.default is not MISSING and values.get(field.name) == field.default:
                values.pop(field.name, None)
        values["rope"]["kind"] = type(self.rope.scaling).__name__
        if self.local_rope is not None:
            values["local_rope"]["kind"] = type(self.local_rope.scaling).__name__
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


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
        num_layers=len(model.modules.layers),
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
        short_conv=model.short_conv,
        mamba2=model.mamba2,
        score_cap=model.attention[0].softcap,
        logit_cap=model.logit_cap,
        vision=model.modules.vision,
        num_experts=model.num_experts,
        experts_per_token=model.experts_per_token,
        expert_size=model.expert_size,
        hf=model.modules,
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
    # As in transformers, the text model's field counts if the multimodal config has none.
    for part in (fields, fields.get("text_config")):
        if eos is None and isinstance(part, Mapping):
            eos = part.get("eos_token_id")
    token_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in token_ids):
        raise DamagedFileError(
            f"eos_token_id in {directory} is {eos!r}; it must be a token id or a list of them. "
            "Download config.json and generation_config.json again"
        )
    return tuple(dict.fromkeys(token_ids))
