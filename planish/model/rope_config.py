"""The RoPE settings of a base model, read from a Hugging Face config.json.

In `transformers`, two kinds of RoPE scaling use other frequencies for long sequences. If a growing
sample passed that length, the keys in its KV cache would have the wrong frequencies. So planish
limits the context of both kinds to the length at which the frequencies change:

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
from planish.model.json_fields import missing, number, positive


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
class LayerRope:
    """Where config.json has the RoPE settings of one layer type, and their defaults.

    Only families whose layer types differ in RoPE need it.
    """

    layer_type: str
    """The key of the layer type's settings in `rope_parameters` (transformers 5)."""
    theta_key: str = "rope_theta"
    """The field with theta in configs of transformers 4."""
    theta: float = 10000.0
    """The default of theta."""
    is_scaled: bool = True
    """Whether the field `rope_scaling` of transformers 4 applies to the layer type."""


def rope_parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).

    The result is empty if the config has neither. Raises TypeError if the field is not an object.
    """
    found = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise TypeError(f"rope_parameters is {found!r}, not an object")
    return dict(found)


def read_rope(fields: Mapping[str, Any], layer: LayerRope | None = None) -> RopeConfig:
    """Read the RoPE settings of all layers, or of one layer type.

    Raises UnsupportedError for an unknown kind of scaling, and TypeError for a wrong value.
    """
    parameters = rope_parameters(fields)
    key, default = "rope_theta", 10000.0
    if layer is not None:
        key, default = layer.theta_key, layer.theta
        if layer.layer_type in parameters:
            parameters = parameters[layer.layer_type] or {}
        elif not layer.is_scaled:
            parameters = {}
    given = {name: value for name, value in parameters.items() if value is not None}
    if fields.get(key) is not None:
        given.setdefault("rope_theta", fields[key])
    theta = number(given, "rope_theta", default)
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedError(
            "rope_parameters differ between layers; the decoder has one RoPE for all layers of this family"
        )
    kind = given.get("rope_type", given.get("type", "default"))
    if kind in ("default", "dynamic"):
        # Dynamic scaling begins beyond max_position_embeddings, where planish's context ends.
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, LinearRopeScaling(number(given, "factor")))
    if kind == "llama3":
        return RopeConfig(
            theta,
            Llama3RopeScaling(
                factor=number(given, "factor"),
                low_freq_factor=number(given, "low_freq_factor"),
                high_freq_factor=number(given, "high_freq_factor"),
                original_max_position_embeddings=positive(
                    given, "original_max_position_embeddings"
                ),
            ),
        )
    if kind == "yarn" and fields.get("model_type") != "phi3":
        return RopeConfig(theta, _yarn(given))
    if kind in ("longrope", "su", "yarn"):
        # Phi-3 was first published with the names su and yarn for longrope.
        return RopeConfig(theta, _longrope(fields, given))
    raise UnsupportedError(
        f"RoPE scaling {kind!r}; planish supports default, linear, dynamic, llama3, yarn and longrope"
    )


def rotary_dims(fields: Mapping[str, Any], head_dim: int) -> int | None:
    """Return the number of dimensions of each head that RoPE rotates; None stands for all.

    The field `partial_rotary_factor` gives their share of the head. Raises UnsupportedError if the
    number is odd, or not between 1 and `head_dim`.
    """
    share = rope_parameters(fields).get("partial_rotary_factor")
    share = fields.get("partial_rotary_factor") if share is None else share
    dims = int(head_dim * number({"share": 1.0 if share is None else share}, "share"))
    if dims % 2 or not 0 < dims <= head_dim:
        raise UnsupportedError(
            f"partial_rotary_factor is {share}, which rotates {dims} of {head_dim} dimensions; RoPE needs an even number of them"
        )
    return None if dims == head_dim else dims


def max_context(fields: Mapping[str, Any], rope: RopeConfig) -> int:
    """Return the longest supported sequence in tokens (see `ModelConfig.max_context`)."""
    configured = positive(fields, "max_position_embeddings")
    if isinstance(rope.scaling, YarnRopeScaling):
        # Qwen's model cards tell users to add YaRN and to leave max_position_embeddings at the
        # length without YaRN.
        extended = rope.scaling.factor * rope.scaling.original_max_position_embeddings
        return max(configured, int(extended))
    if isinstance(rope.scaling, LongRopeScaling):
        parameters = rope_parameters(fields)
        if tuple(parameters["long_factor"]) != rope.scaling.factors:
            return min(configured, _original_context(fields, parameters))
    return configured


def _original_context(fields: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
    # Phi-3 has this field at the top level of config.json. That value takes precedence over the
    # one inside rope_scaling.
    key = "original_max_position_embeddings"
    return positive(fields if fields.get(key) is not None else parameters, key)


def _longrope(fields: Mapping[str, Any], given: Mapping[str, Any]) -> LongRopeScaling:
    for key in ("short_factor", "long_factor"):
        values = given.get(key) or missing(key)
        if not isinstance(values, list) or not all(
            isinstance(value, int | float) and value > 0 for value in values
        ):
            raise TypeError(f"{key} is {values!r}, not a list of positive numbers")
    original = _original_context(fields, given)
    factor = number(given, "factor", positive(fields, "max_position_embeddings") / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return LongRopeScaling(
        factors=tuple(given["short_factor"]),
        attention_factor=number(given, "attention_factor", default),
    )


def _yarn(given: Mapping[str, Any]) -> YarnRopeScaling:
    factor = number(given, "factor")

    def stretch(share: float) -> float:
        return max(1.0, 0.1 * share * math.log(factor) + 1.0)

    by_mscale = stretch(number(given, "mscale", 1.0)) / stretch(
        number(given, "mscale_all_dim", 1.0)
    )
    default = by_mscale if {"mscale", "mscale_all_dim"} <= given.keys() else stretch(1.0)
    return YarnRopeScaling(
        factor=factor,
        original_max_position_embeddings=positive(given, "original_max_position_embeddings"),
        beta_fast=number(given, "beta_fast", 32.0),
        beta_slow=number(given, "beta_slow", 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=number(given, "attention_factor", default),
    )
