"""The RoPE settings of a base model, read from a Hugging Face config.json.

In `transformers`, two kinds of RoPE scaling change the frequencies when a sequence exceeds a
certain length. If a growing sample exceeded it, the earlier keys in its KV cache would have the
wrong frequencies. So planish limits the context of both kinds to the length at which the
frequencies change:

- dynamic (NTK): `transformers` scales the frequencies of sequences longer than
  max_position_embeddings. planish always uses the unscaled frequencies.
- longrope: `transformers` changes from `short_factor` to `long_factor` beyond
  original_max_position_embeddings, so the context ends there. If both lists are equal, the
  frequencies never change, and the context is max_position_embeddings.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planish.errors import UnsupportedError
from planish.model.architecture.hf_config.json_fields import (
    optional_object,
    positive_float,
    positive_int,
    raise_missing,
)

_ORIGINAL_CONTEXT_KEY = "original_max_position_embeddings"


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
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024) within the original context (Phi-3 and Phi-4 mini)."""

    factors: tuple[float, ...]
    """The divisor of each dimension pair's frequency: `short_factor` of config.json."""
    attention_factor: float
    """Factor of cos and sin."""


@dataclass(frozen=True)
class RopeConfig:
    """The base and the scaling of a rotary position embedding (RoPE).

    RoPE rotates the first `rotary_dims` dimensions of each head (see `ModelConfig.rotary_dims`). It
    pairs dimension i with dimension i + rotary_dims / 2; it is not interleaved.
    """

    theta: float
    scaling: Llama3RopeScaling | LinearRopeScaling | YarnRopeScaling | LongRopeScaling | None = None


@dataclass(frozen=True)
class LayerRopeSource:
    """Where config.json has the RoPE settings of one layer type, and their defaults.

    Only families whose layer types differ in RoPE need it.
    """

    layer_type: str
    """The key of the layer type's settings in `rope_parameters` (transformers 5)."""
    theta_key: str = "rope_theta"
    """The field with theta in configs of transformers 4."""
    default_theta: float = 10000.0
    """The default of theta."""
    has_rope_scaling: bool = True
    """Whether the field `rope_scaling` of transformers 4 applies to the layer type."""


def rope_parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).

    The result is empty if the config has neither. Raises TypeError if the field is not an object.
    """
    found = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise TypeError(f"rope_parameters is {found!r}, not an object")
    return dict(found)


def read_rope(fields: Mapping[str, Any], source: LayerRopeSource | None = None) -> RopeConfig:
    """Read the RoPE settings of all layers, or of one layer type.

    Raises UnsupportedError for an unknown kind of scaling, and TypeError for a wrong value.
    """
    parameters = rope_parameters(fields)
    theta_key, default_theta = "rope_theta", 10000.0
    if source is not None:
        theta_key, default_theta = source.theta_key, source.default_theta
        # transformers ignores this field at the top level if layer types differ in RoPE.
        fields = {**fields, _ORIGINAL_CONTEXT_KEY: None}
        if source.layer_type in parameters:
            parameters = dict(optional_object(parameters, source.layer_type))
        elif not source.has_rope_scaling:
            parameters = {}
    settings = {name: value for name, value in parameters.items() if value is not None}
    if fields.get(theta_key) is not None:
        settings.setdefault("rope_theta", fields[theta_key])
    theta = positive_float(settings, "rope_theta", default_theta)
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise UnsupportedError(
            "rope_parameters differ between layers; the decoder has one RoPE for all layers of "
            "this family"
        )
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    if rope_type in ("default", "dynamic"):
        # Dynamic scaling begins beyond max_position_embeddings, where planish's context ends.
        return RopeConfig(theta)
    if rope_type == "linear":
        return RopeConfig(theta, LinearRopeScaling(positive_float(settings, "factor")))
    if rope_type == "llama3":
        return RopeConfig(
            theta,
            Llama3RopeScaling(
                factor=positive_float(settings, "factor"),
                low_freq_factor=positive_float(settings, "low_freq_factor"),
                high_freq_factor=positive_float(settings, "high_freq_factor"),
                original_max_position_embeddings=original_context(fields, settings),
            ),
        )
    if rope_type == "yarn" and fields.get("model_type") != "phi3":
        if "factor" in parameters and parameters["factor"] is None:
            length = positive_int(fields, "max_position_embeddings")
            settings["factor"] = length / original_context(fields, settings)
        return RopeConfig(theta, _yarn_scaling(settings, original_context(fields, settings)))
    if rope_type in ("longrope", "su", "yarn"):
        # Phi-3 was first published with the names su and yarn for longrope.
        return RopeConfig(theta, _longrope_scaling(fields, settings))
    raise UnsupportedError(
        f"RoPE scaling {rope_type!r}; planish supports default, linear, dynamic, llama3, yarn and "
        "longrope"
    )


def rotary_dims(fields: Mapping[str, Any], head_dim: int) -> int | None:
    """Return the number of dimensions of each head that RoPE rotates; None stands for all.

    The field `partial_rotary_factor` gives their share of the head. Raises UnsupportedError if the
    number is odd, or not between 1 and `head_dim`.
    """
    fraction = rope_parameters(fields).get("partial_rotary_factor")
    fraction = fields.get("partial_rotary_factor") if fraction is None else fraction
    dims = int(head_dim * positive_float({"share": 1.0 if fraction is None else fraction}, "share"))
    if dims % 2 or not 0 < dims <= head_dim:
        raise UnsupportedError(
            f"partial_rotary_factor is {fraction}, which rotates {dims} of {head_dim} dimensions; "
            "RoPE needs an even number of them"
        )
    return None if dims == head_dim else dims


def max_context(fields: Mapping[str, Any], rope: RopeConfig) -> int:
    """Return the longest supported sequence in tokens (see `ModelConfig.max_context`)."""
    configured = positive_int(fields, "max_position_embeddings")
    if isinstance(rope.scaling, YarnRopeScaling):
        # Qwen's model cards tell users to add YaRN and to leave max_position_embeddings at the
        # length without YaRN.
        extended = rope.scaling.factor * rope.scaling.original_max_position_embeddings
        return max(configured, int(extended))
    if isinstance(rope.scaling, LongRopeScaling):
        parameters = rope_parameters(fields)
        if tuple(parameters["long_factor"]) != rope.scaling.factors:
            return min(configured, original_context(fields, parameters))
    return configured


def original_context(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """Return the context length before RoPE scaling, in tokens, as `transformers` finds it.

    `settings`: the RoPE settings, whose original_max_position_embeddings counts if config.json has
    none at its top level. If both are missing, the length is max_position_embeddings.
    """
    for source, key in (
        (fields, _ORIGINAL_CONTEXT_KEY),
        (settings, _ORIGINAL_CONTEXT_KEY),
        (fields, "max_position_embeddings"),
    ):
        if source.get(key) is not None:
            return positive_int(source, key)
    return raise_missing(_ORIGINAL_CONTEXT_KEY)  # type: ignore[no-any-return]


def _longrope_scaling(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> LongRopeScaling:
    for key in ("short_factor", "long_factor"):
        values = settings.get(key) or raise_missing(key)
        if not isinstance(values, list) or not all(
            isinstance(value, int | float) and value > 0 for value in values
        ):
            raise TypeError(f"{key} is {values!r}, not a list of positive numbers")
    context = original_context(fields, settings)
    factor = positive_float(
        settings, "factor", positive_int(fields, "max_position_embeddings") / context
    )
    default = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1.0 else 1.0
    return LongRopeScaling(
        factors=tuple(settings["short_factor"]),
        attention_factor=positive_float(settings, "attention_factor", default),
    )


def _yarn_scaling(settings: Mapping[str, Any], original_context_length: int) -> YarnRopeScaling:
    # transformers takes the default for a value of 0, too.
    optional = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    settings = {key: value for key, value in settings.items() if value or key not in optional}
    factor = positive_float(settings, "factor")

    def mscale_factor(coefficient: float) -> float:
        return max(1.0, 0.1 * coefficient * math.log(factor) + 1.0)

    mscale_ratio = mscale_factor(positive_float(settings, "mscale", 1.0)) / mscale_factor(
        positive_float(settings, "mscale_all_dim", 1.0)
    )
    default = (
        mscale_ratio if {"mscale", "mscale_all_dim"} <= settings.keys() else mscale_factor(1.0)
    )
    return YarnRopeScaling(
        factor=factor,
        original_max_position_embeddings=original_context_length,
        beta_fast=positive_float(settings, "beta_fast", 32.0),
        beta_slow=positive_float(settings, "beta_slow", 1.0),
        truncate=bool(settings.get("truncate", True)),
        attention_factor=positive_float(settings, "attention_factor", default),
    )
