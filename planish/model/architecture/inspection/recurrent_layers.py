"""The layers with a recurrent state in transformers' modelling code, and those that planish runs.

The functions import torch themselves, because commands that only list models do not need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planish.errors import UnsupportedError
from planish.model.architecture.inspection.modules import Mamba2Config, ShortConvConfig
from planish.model.architecture.inspection.probing import is_mamba2, is_short_conv

_RECURRENT_WORDS = ("delta", "linear", "mamba", "recurrent", "ssm")
"""Parts of the names of layer types with a recurrent state."""
_MIXER_WORDS = ("Mixer", "MambaLayer", "Delta", "Lightning", "Rglru")
"""Parts of the names of modules with a recurrent state."""
_PLANISH_RUNS = (
    "planish runs layers with a recurrent state only in Qwen3.5, LFM2 and models with Mamba-2 "
    "layers"
)

NO_ATTENTION = "it has no layer with attention, and planish needs one"


def recurrent_modules(config: Any, layers: Any) -> dict[str, Any]:
    """Return the short convolutions and Mamba-2 mixers of a list of layers by their names, such as
    "0.conv".

    Raises UnsupportedError if other modules than these and the attention combine positions.
    """
    found = {
        name: module
        for name, module in layers.named_modules()
        if is_short_conv(module) or is_mamba2(module)
    }
    if found and not hasattr(config, "num_attention_heads"):
        raise UnsupportedError(NO_ATTENTION)
    _check_layer_types(config, layers, {layer_of(name) for name in found})
    _check_convolutions(layers, found)
    return found


def layer_of(name: str) -> int:
    """Return the layer of a module, given its name within the list of layers."""
    return int(name.partition(".")[0])


def short_conv_config(modules: Mapping[str, Any]) -> ShortConvConfig | None:
    """Return the sizes of a model's short convolutions, which are equal in all layers.

    `modules`: the result of `recurrent_modules`.
    """
    found = {name: module for name, module in modules.items() if is_short_conv(module)}
    if not found:
        return None
    channels, _, width = next(iter(found.values())).conv.weight.shape
    return ShortConvConfig(tuple(map(layer_of, found)), channels, width)


def mamba2_config(modules: Mapping[str, Any]) -> Mamba2Config | None:
    """Return the sizes of a model's Mamba-2 layers, which are equal in all layers.

    `modules`: the result of `recurrent_modules`. Raises UnsupportedError if the activation is not
    SiLU, or if the sizes do not fit one another.
    """
    found = {name: module for name, module in modules.items() if is_mamba2(module)}
    if not found:
        return None
    mixer = next(iter(found.values()))
    if mixer.activation not in ("silu", "swish"):
        raise UnsupportedError(
            f"the activation of its Mamba-2 layers is {mixer.activation!r}, and planish has only silu"
        )
    sizes = mixer.num_heads, mixer.head_dim, mixer.n_groups, mixer.ssm_state_size
    config = Mamba2Config(tuple(map(layer_of, found)), *sizes, mixer.conv_kernel_size)
    if mixer.num_heads % mixer.n_groups or mixer.conv1d.weight.shape[0] != config.channels:
        raise UnsupportedError(
            f"its Mamba-2 layers have {mixer.num_heads} heads of the size {mixer.head_dim}, "
            f"{mixer.n_groups} groups and {mixer.conv1d.weight.shape[0]} channels, which do not fit "
            "one another"
        )
    return config


def _check_layer_types(config: Any, layers: Any, known: set[int]) -> None:
    """Raise UnsupportedError if the config names layers with a recurrent state that are unknown."""
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    others = {
        str(kind): layer
        for index, (kind, layer) in enumerate(
            zip(layer_types or (), layers.children(), strict=False)
        )
        if any(word in str(kind) for word in _RECURRENT_WORDS) and index not in known
    }
    if others:
        names = [f"{kind} ({_mixer_class(layer)})" for kind, layer in sorted(others.items())]
        raise UnsupportedError(
            f"it has layers of the types {', '.join(names)}, and {_PLANISH_RUNS}"
        )


def _mixer_class(layer: Any) -> str:
    """Return the class of the module that has the recurrent state of a layer."""
    names = [type(module).__name__ for module in layer.modules()]
    found = (name for name in names if any(word in name for word in _MIXER_WORDS))
    return next(found, names[0])


def _check_convolutions(layers: Any, known: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if layers have convolutions outside of `known` modules."""
    from torch import nn

    for name, module in layers.named_modules():
        is_convolution = isinstance(module, nn.Conv1d | nn.Conv2d)
        if is_convolution and name.rpartition(".")[0] not in known:
            raise UnsupportedError(
                f"its layers' {name} is a convolution over positions, and {_PLANISH_RUNS}"
            )
