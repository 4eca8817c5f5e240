"""What the sampler and the trainer need of a decoder.

Two classes have this interface: `Decoder` (decoder.py) and `TransformersDecoder` (hf/decoder.py).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from planish.model.architecture.config import ModelConfig
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.interface.parts import AdapterBatch, Attend, ForwardPass
from planish.model.layers.linear import PackedLinear
from planish.model.layers.lora import LoraWeights
from planish.model.layers.recurrence import Recurrence
from planish.model.vision.image_tokens import ImageRegistry
from planish.model.vision.tower import VisionTower


class BaseDecoder(Protocol):
    """A frozen base model: its layers, and the weights of its head."""

    config: ModelConfig
    backend: Backend
    head: PackedLinear
    """The output head, [V, D]."""
    images: ImageRegistry | None
    """The images of inputs; None if the model reads only text."""
    vision: VisionTower | None
    """The vision tower of a model with images."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and matmuls."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        adapters: LoraWeights | AdapterBatch | None,
        *,
        layers_per_checkpoint: int = 0,
        recurrence: Recurrence | None = None,
    ) -> Tensor:
        """Return the last hidden states, from which the head computes logits: [T, D] in the model's
        dtype.

        `tokens`, `positions`: int64 [T]. With images, `tokens` contains their ids
        (vision/image_tokens.py), and `positions` are their RoPE positions [3, T]. `attend`: the
        attention, from the backend. `adapters`: one
        adapter (or None) for all rows, with gradients, or a batch of several adapters, without
        gradients. `layers_per_checkpoint`: use activation checkpointing, which stores only the
        inputs of groups of so many layers for the backward pass; 0: store all activations.
        `recurrence`: required for models with recurrent states.
        """
        ...

    def decode_pass(self) -> ForwardPass | None:
        """Return a forward pass for decoding steps that is faster than `forward`, or None."""
        ...
