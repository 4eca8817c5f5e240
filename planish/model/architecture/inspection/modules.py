"""The description of a model whose layers transformers' modelling code computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from planish.model.architecture.inspection.vision_config import VisionConfig

MAX_LAYERS = 1024
"""The maximum number of decoder layers of a model."""


@dataclass(frozen=True)
class HFLinear:
    """A linear of a layer that adapters can train."""

    name: str
    """The linear's name within its layer, such as "self_attn.q_proj". A name that ends in
    ".experts.gate_up_proj" stands for that linear of all experts of the layer.
    """
    fan_out: int
    fan_in: int
    is_mlp: bool
    """Whether `train_mlp` trains the linear. `train_attn` trains the others."""
    num_experts: int = 0
    """The number of experts, whose linears have this shape each. 0: a single linear."""
    is_transposed: bool = False
    """Whether the module of a single linear has the weight (in, out), as in GPT-2."""


@dataclass(frozen=True)
class ShortConvConfig:
    """The sizes of layers with a short causal convolution in the place of attention (LFM2)."""

    layers: tuple[int, ...]
    """The indices of these layers among the decoder layers, ascending."""
    channels: int
    conv_width: int
    """The kernel size of the convolution, in positions."""

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """The shape of the matrices of one layer's state, which has none."""
        return 0, 0, 0


@dataclass(frozen=True)
class Mamba2Config:
    """The sizes of Mamba-2 layers (Dao and Gu 2024), which have a recurrent state."""

    layers: tuple[int, ...]
    """The indices of the decoder layers with such a state, ascending. In Falcon-H1, they have
    attention too.
    """
    num_heads: int
    head_dim: int
    num_groups: int
    """Consecutive heads share their B and C: `num_heads` / `num_groups` of them."""
    state_size: int
    """The size of B and C."""
    conv_width: int
    """The kernel size of the convolution, in positions."""

    @property
    def channels(self) -> int:
        """The channels of the convolution: x of all heads, B and C of all groups."""
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """The shape of the matrices of one layer's state."""
        return self.num_heads, self.state_size, self.head_dim


@dataclass(frozen=True)
class HFModules:
    """The modules of a model whose layers transformers' modelling code computes."""

    architecture: str
    """The class in transformers, such as "Glm4ForCausalLM"."""
    layers_name: str
    """The name of the list of decoder layers, such as "model.layers"."""
    head_name: str
    """The name of the output head, such as "lm_head"."""
    layers: tuple[tuple[HFLinear, ...], ...]
    """The linears of each decoder layer that adapters can train, in the order of the modules."""
    attention_names: tuple[str, ...]
    """The name of the module that calls the attention, for each layer with attention."""
    attention_layers: tuple[int, ...]
    """The indices of these layers, ascending."""
    kv_numbers: tuple[int, ...]
    """The number of the keys and values that each layer with attention reads. Layers that share
    keys and values have the same number (Gemma 3n, Gemma 4 E2B and E4B).
    """
    weight_shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """The name and shape of each weight in transformers' modules."""
    stored: tuple[tuple[int, ...], ...]
    """What each layer stores per token for the backward pass, except LoRA hidden states and the
    recurrence of Mamba-2: the number of values in the model's dtype, and the bytes of other dtypes
    if that dtype has 16 bits.
    """
    workspace: tuple[int, ...]
    """What the layers need per token without a backward pass, at the peak, in the same two parts."""
    settings_digest: str
    """A hash of the fields of config.json that determine logits."""
    head_scale: float = 1.0
    """The factor of the logits (Granite, Cohere)."""
    vision: VisionConfig | None = None
    """The vision tower; None for a model that reads only text."""
    is_multimodal: bool = False
    """Whether the text model is a part of a model with towers, which planish may leave out."""

    @property
    def text_model_name(self) -> str:
        """The name of the module that has the embedding, the layers and the last norm."""
        return text_part_name(self.layers_name, self.is_multimodal)

    @property
    def base_name(self) -> str:
        """The name of the part of the model below its head."""
        return base_model_name(self.layers_name)

    @cached_property
    def num_experts_by_name(self) -> dict[str, int]:
        """The number of experts of the linears of each name, in any layer; 0: single linears."""
        return {linear.name: linear.num_experts for layer in self.layers for linear in layer}

    @property
    def linear_names(self) -> tuple[str, ...]:
        """The names of the linears of all layers, each once."""
        return tuple(self.num_experts_by_name)

    def linear(self, layer: int, name: str) -> HFLinear:
        """Return a linear of a layer by its name. Raise KeyError if the layer does not have it."""
        for linear in self.layers[layer]:
            if linear.name == name:
                return linear
        raise KeyError(name)


def base_model_name(layers_name: str) -> str:
    """Return the name of the part of a causal language model below its head."""
    return layers_name.partition(".")[0]


def text_part_name(layers_name: str, is_multimodal: bool) -> str:
    """Return the name of the module that has the embedding, the layers and the last norm."""
    return layers_name.rpartition(".")[0] if is_multimodal else base_model_name(layers_name)
