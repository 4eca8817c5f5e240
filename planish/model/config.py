"""The architecture of a base model, read from a Hugging Face config.json.

One decoder supports Llama 3.x (and SmolLM2), Mistral, Qwen2.5, Qwen3, SmolLM3 and Gemma 3, because
these families differ only in the fields of `ModelConfig`. If a config requires a feature that the
decoder lacks, it is rejected before any weight is read, and the error names the field. Required
dimensions must be present; any other missing field takes the default of `transformers`. A
`ModelConfig` does not contain the model's name, so the same architecture from the hub and from a
GGUF file compares equal.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from planish.errors import DamagedFileError, UnknownModelError, UnsupportedError

Family = Literal["llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3"]

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
    "Gemma3ForCausalLM": "gemma3",
}
"""The family of each supported architecture, as config.json names the architecture."""

MULTIMODAL = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
"""The text model inside each supported multimodal architecture."""

MODEL_TYPES = {"Gemma3ForCausalLM": "gemma3_text", "Gemma3ForConditionalGeneration": "gemma3"}
"""The model_type in config.json where it differs from the family's name."""

_GEMMA3_DEFAULTS = {
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
}
"""The defaults of `transformers` for Gemma 3. Published configs omit even dimensions that have
these values.
"""


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's RoPE scaling by frequency bands; the fields are those of config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LinearRopeScaling:
    """RoPE scaling that divides the positions by `factor`."""

    factor: float


@dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN (Peng et al. 2023): low-frequency dimension pairs are scaled by `factor`, high-frequency
    pairs are kept, and the pairs in between are interpolated.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    """Pairs that make at least this many full rotations within the original context are kept."""
    beta_slow: float
    """Pairs that make at most this many full rotations within the original context are scaled."""
    truncate: bool
    """Whether the indices of the two boundary pairs are rounded to integers."""
    attention_factor: float
    """Factor of cos and sin; each attention logit is therefore multiplied by its square."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding over all dimensions of a head. It pairs dimension i with dimension
    i + head_dim / 2 (not interleaved).
    """

    theta: float
    scaling: Llama3RopeScaling | LinearRopeScaling | YarnRopeScaling | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a base model. UnsupportedError or DamagedFileError if the values
    contradict each other.
    """

    family: Family
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
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """The activation function of the MLP's gate."""
    output_norms: bool = False
    """Whether the outputs of attention and MLP pass an RMSNorm before they are added (Gemma 3)."""
    norm_offset: float = 0.0
    """The number that is added to the stored weight of every RMSNorm (1 in Gemma 3)."""
    embedding_scale: float = 1.0
    """The embeddings are multiplied by this factor, after it is rounded to the model's dtype."""
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

    def window(self, layer: int) -> int | None:
        """Return the attention window of a layer in positions, or None if it has no window."""
        return self.windows[layer] if self.windows else None

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return the RoPE of a layer, or None if it has none."""
        if layer in self.layers_without_rope:
            return None
        has_own = self.local_rope is not None and self.window(layer) is not None
        return self.local_rope if has_own and self.local_rope is not None else self.rope

    def __post_init__(self) -> None:
        if self.query_scalar is not None and not self.qk_norm:
            raise UnsupportedError(
                f"query_pre_attn_scalar is {self.query_scalar}; the decoder supports it only with norms of queries"
            )
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedError(
                f"head_dim {self.head_dim} is odd; rotary embedding needs an even one"
            )
        outside = [token for token in self.eos_token_ids if not 0 <= token < self.vocab_size]
        if outside:
            raise DamagedFileError(
                f"eos_token_id {outside} is outside the vocabulary of {self.vocab_size}; "
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
        fields = read_json(directory / "config.json")
        architecture = _architecture(fields, directory)
        eos_token_ids = _eos_token_ids(directory, fields)
        try:
            fields = text_fields(fields)
            family = FAMILIES[MULTIMODAL.get(architecture, architecture)]
            if family == "gemma3":
                fields = _GEMMA3_DEFAULTS | fields
            elif family == "smollm3":
                fields = {"tie_word_embeddings": True, "rope_theta": 2_000_000.0, **fields}
            _refuse_unsupported(fields, family)
            return _from_fields(fields, family, eos_token_ids)
        except UnsupportedError as error:
            raise UnsupportedError(f"{directory}/config.json: {error}") from error
        except (KeyError, TypeError) as error:
            raise DamagedFileError(
                f"{directory}/config.json is incomplete: {error.args[0]}; copy it from the model again"
            ) from error

    def fingerprint(self) -> str:
        """Return a hash, in 16 hexadecimal digits, of the fields that determine weight shapes or
        logits: all except `eos_token_ids` and `max_context`.
        """
        found = asdict(self)
        del found["eos_token_ids"], found["max_context"]
        # A field that a later version of planish added must not change older models' fingerprints,
        # because checkpoints contain them.
        for field in fields(self):
            if field.default is not MISSING and found[field.name] == field.default:
                del found[field.name]
        found["rope"]["kind"] = type(self.rope.scaling).__name__
        if self.local_rope is not None:
            found["local_rope"]["kind"] = type(self.local_rope.scaling).__name__
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. DamagedFileError if the file contains anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedFileError(
            f"{path} is not JSON ({error}); copy it from the model again"
        ) from error
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path} holds no JSON object; copy it from the model again")
    return content


def _architecture(fields: Mapping[str, Any], directory: Path) -> str:
    """Return the supported architecture that config.json names. UnsupportedError for any other."""
    model_type = fields.get("model_type")
    types = {name: MODEL_TYPES.get(name, family) for name, family in FAMILIES.items()}
    types |= {name: MODEL_TYPES[name] for name in MULTIMODAL}
    architectures = fields.get("architectures") or [
        name for name, own_type in types.items() if own_type == model_type
    ]
    for name in architectures:
        if name in types and model_type in (None, types[name]):
            return str(name)
    raise UnsupportedError(
        f"{directory}/config.json: the architecture is {', '.join(map(str, architectures)) or model_type!r}; "
        f"planish supports {', '.join(types)}"
    )


def is_multimodal(fields: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a multimodal model whose text model is supported."""
    return fields.get("model_type") in {MODEL_TYPES[name] for name in MULTIMODAL}


def text_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the text model inside a multimodal config.

    A text model's config is returned as it is. TypeError if `text_config` is not an object.
    """
    if not is_multimodal(fields):
        return dict(fields)
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        raise TypeError(f"text_config is {text!r}, not an object")
    names = {MODEL_TYPES[outer]: inner for outer, inner in MULTIMODAL.items()}
    kept = ("quantization_config", "eos_token_id", "dtype", "torch_dtype")
    outer = {key: fields[key] for key in kept if key in fields}
    return {**outer, **text, "architectures": [names[fields["model_type"]]]}


def _refuse_unsupported(fields: Mapping[str, Any], family: Family) -> None:
    if fields.get("quantization_config"):
        raise UnsupportedError("quantization_config is set; use the unquantized checkpoint")
    if family == "gemma3":
        _refuse_gemma_options(fields)
    elif fields.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedError(
            f"hidden_act {fields['hidden_act']!r}; the decoder supports only silu"
        )
    if fields.get("attention_bias") and family != "qwen2":
        raise UnsupportedError("attention_bias is true; biases are supported only for Qwen2")
    if fields.get("mlp_bias"):
        raise UnsupportedError("mlp_bias is true; the decoder's MLP has no biases")
    if (fields.get("pretraining_tp") or 1) > 1:
        raise UnsupportedError(
            f"pretraining_tp is {fields['pretraining_tp']}; set it to 1 if the weights are not split"
        )
    if fields.get("rope_interleaved"):
        raise UnsupportedError("rope_interleaved is true; the decoder rotates halves")
    experts = [
        key
        for key in ("num_experts", "num_local_experts", "n_routed_experts")
        if (fields.get(key) or 0) > 1
    ]
    if experts:
        raise UnsupportedError(
            f"{experts[0]} is {fields[experts[0]]}; mixtures of experts are not supported"
        )
    if family == "mistral":
        _refuse_mistral_window(fields)
    elif family != "gemma3" and _uses_sliding_window(fields):
        raise UnsupportedError(
            "the model attends within a sliding window; the decoder attends to the whole context"
        )


def _refuse_gemma_options(fields: Mapping[str, Any]) -> None:
    activation = fields.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise UnsupportedError(
            f"hidden_activation {activation!r}; the decoder supports gelu_pytorch_tanh for Gemma 3"
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.get(key) is not None:
            raise UnsupportedError(f"{key} is {fields[key]}; the decoder has no softcapping")
    if fields.get("use_bidirectional_attention"):
        raise UnsupportedError(
            "use_bidirectional_attention is true; the decoder's attention is causal"
        )


def _refuse_mistral_window(fields: Mapping[str, Any]) -> None:
    if fields.get("sliding_window", 4096) is None:
        # Only an explicit null means no window: transformers' default for a missing field is 4096.
        return
    window = _positive({"sliding_window": 4096, **fields}, "sliding_window")
    if window < _max_context(fields, _rope(fields)):
        raise UnsupportedError(
            f"sliding_window is {window}, and the decoder attends to the whole context; lower max_position_embeddings "
            f"to {window} to use the model within its window"
        )


def _uses_sliding_window(fields: Mapping[str, Any]) -> bool:
    if fields.get("layer_types"):
        return any(kind != "full_attention" for kind in fields["layer_types"])
    if not fields.get("use_sliding_window") or fields.get("sliding_window") is None:
        return False
    return fields.get("max_window_layers", 28) < fields["num_hidden_layers"]


def _from_fields(
    fields: Mapping[str, Any], family: Family, eos_token_ids: tuple[int, ...]
) -> ModelConfig:
    num_heads = _positive(fields, "num_attention_heads")
    hidden_size = _positive(fields, "hidden_size")
    if fields.get("head_dim") is not None:
        head_dim = _positive(fields, "head_dim")
    elif family == "qwen3":
        head_dim = 128
    elif hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads
    else:
        raise TypeError(
            f"head_dim is missing, and hidden_size {hidden_size} is not a multiple of the {num_heads} heads"
        )
    rope = _rope(fields, "full_attention" if family == "gemma3" else None)
    has_kv_heads = fields.get("num_key_value_heads") is not None or family != "llama"
    return ModelConfig(
        family=family,
        vocab_size=_positive(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(fields, "intermediate_size"),
        num_layers=_positive(fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_positive(fields, "num_key_value_heads") if has_kv_heads else num_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(fields, "rms_norm_eps", 1e-6),
        rope=rope,
        max_context=_max_context(fields, rope),
        tied_head=bool(fields.get("tie_word_embeddings", False)),
        qk_norm=family in ("qwen3", "gemma3"),
        qkv_bias=family == "qwen2",
        eos_token_ids=eos_token_ids,
        layers_without_rope=_layers_without_rope(fields) if family == "smollm3" else (),
        **(_gemma3_fields(fields) if family == "gemma3" else {}),
    )


def _layers_without_rope(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the indices of SmolLM3's layers without RoPE: those whose entry in `no_rope_layers` is
    0.
    """
    layers = _positive(fields, "num_hidden_layers")
    interval = _positive({"no_rope_layer_interval": 4, **fields}, "no_rope_layer_interval")
    uses_rope = fields.get("no_rope_layers")
    if uses_rope is None:
        uses_rope = [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(uses_rope, list) or len(uses_rope) != layers:
        raise TypeError(f"no_rope_layers is {uses_rope!r}, not a list with {layers} entries")
    return tuple(layer for layer, uses in enumerate(uses_rope) if not uses)


def _gemma3_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelConfig` in which Gemma 3 differs from the other families."""
    layers = _positive(fields, "num_hidden_layers")
    pattern = fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern", 6))
    kinds = fields.get("layer_types") or [
        "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
        for layer in range(layers)
    ]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise TypeError(
            f"layer_types has {len(kinds)} entries ({', '.join(sorted(map(str, set(kinds))))}), not one "
            f"of sliding_attention and full_attention for each of {layers} layers"
        )
    window = _positive(fields, "sliding_window")
    return {
        "activation": "gelu_tanh",
        "output_norms": True,
        "norm_offset": 1.0,
        "embedding_scale": _positive(fields, "hidden_size") ** 0.5,
        "query_scalar": _number(fields, "query_pre_attn_scalar"),
        "windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
        "local_rope": _rope(fields, "sliding_attention"),
    }


_GEMMA3_THETAS = {
    "full_attention": ("rope_theta", 1_000_000.0),
    "sliding_attention": ("rope_local_base_freq", 10_000.0),
}
"""For each of Gemma 3's layer types: the field that holds RoPE's theta in configs written before
transformers 5, and the field's default.
"""


def _rope(fields: Mapping[str, Any], layer_type: str | None = None) -> RopeConfig:
    """Read the RoPE settings from `rope_parameters` (transformers 5), or from `rope_theta` and
    `rope_scaling` (older versions).

    `layer_type` is a key of `_GEMMA3_THETAS` for Gemma 3, whose layer types differ in RoPE. It is
    None for the other families.
    """
    parameters = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise TypeError(f"rope_parameters is {parameters!r}, not an object")
    key, default = "rope_theta", 10000.0
    if layer_type is not None:
        key, default = _GEMMA3_THETAS[layer_type]
        if layer_type in parameters:
            parameters = parameters[layer_type] or {}
        elif layer_type == "sliding_attention":
            parameters = {}  # Older configs scale only the layers with full attention.
    merged = {"rope_theta": fields.get(key), **parameters}
    theta = _number(
        {key: value for key, value in merged.items() if value is not None}, "rope_theta", default
    )
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise UnsupportedError(
            "rope_parameters differ between layers; the decoder has one RoPE for all layers of this family"
        )
    rotary_part = parameters.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if rotary_part not in (None, 1, 1.0):
        raise UnsupportedError(
            f"partial_rotary_factor is {rotary_part}; the decoder rotates whole heads"
        )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, LinearRopeScaling(_number(parameters, "factor")))
    if kind == "llama3":
        return RopeConfig(
            theta,
            Llama3RopeScaling(
                factor=_number(parameters, "factor"),
                low_freq_factor=_number(parameters, "low_freq_factor"),
                high_freq_factor=_number(parameters, "high_freq_factor"),
                original_max_position_embeddings=_positive(
                    parameters, "original_max_position_embeddings"
                ),
            ),
        )
    if kind == "yarn":
        return RopeConfig(theta, _yarn(parameters))
    raise UnsupportedError(
        f"RoPE scaling {kind!r}; planish supports default, linear, llama3 and yarn"
    )


def _yarn(parameters: Mapping[str, Any]) -> YarnRopeScaling:
    given = {key: value for key, value in parameters.items() if value is not None}
    factor = _number(given, "factor")

    def stretch(share: float) -> float:
        return max(1.0, 0.1 * share * math.log(factor) + 1.0)

    by_mscale = stretch(_number(given, "mscale", 1.0)) / stretch(
        _number(given, "mscale_all_dim", 1.0)
    )
    default = by_mscale if {"mscale", "mscale_all_dim"} <= given.keys() else stretch(1.0)
    return YarnRopeScaling(
        factor=factor,
        original_max_position_embeddings=_positive(given, "original_max_position_embeddings"),
        beta_fast=_number(given, "beta_fast", 32.0),
        beta_slow=_number(given, "beta_slow", 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=_number(given, "attention_factor", default),
    )


def _max_context(fields: Mapping[str, Any], rope: RopeConfig) -> int:
    configured = _positive(fields, "max_position_embeddings")
    if not isinstance(rope.scaling, YarnRopeScaling):
        return configured
    # Qwen's model cards tell users to add YaRN and to leave max_position_embeddings at the length
    # without YaRN.
    return max(configured, int(rope.scaling.factor * rope.scaling.original_max_position_embeddings))


def _eos_token_ids(directory: Path, fields: Mapping[str, Any]) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    found = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if found is None:
        found = fields.get("eos_token_id")
    listed = found if isinstance(found, list) else [] if found is None else [found]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in listed):
        raise DamagedFileError(
            f"eos_token_id in {directory} is {found!r}, not token ids; get the file again"
        )
    return tuple(dict.fromkeys(listed))


def _positive(fields: Mapping[str, Any], key: str) -> int:
    value = fields[key] if key in fields else _missing(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TypeError(f"{key} is {value!r}, not a positive integer")
    return value


def _number(fields: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = fields.get(key, default)
    if value is None:
        _missing(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise TypeError(f"{key} is {value!r}, not a positive number")
    return float(value)


def _missing(key: str) -> Any:
    raise TypeError(f"{key} is missing")
