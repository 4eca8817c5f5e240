"""The short convolution of LFM2, with planish's states of sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from planish.model.hf.forward_pass import current_pass
from planish.model.layers.recurrence import ShortConvInputs


class FrozenShortConv(nn.Module):
    """A short convolution that reads the previous rows of the same sequence, or its stored state.

    transformers' module assumes that the rows of a batch are one sequence.
    """

    def __init__(self, source: nn.Module, index: int) -> None:
        """`source`: the module that this one replaces, with the linears of its projections.
        `index`: its number among the model's short convolutions.
        """
        super().__init__()
        self._source, self._index = source, index
        conv: Any = source.conv
        self._weight: Tensor = conv.weight.detach().squeeze(1).float()
        self._bias: Tensor | None = None if conv.bias is None else conv.bias.detach().float()

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Return the outputs [1, T, D]. `hidden_states`: [1, T, D]."""
        source: Any = self._source
        input_gate, output_gate, x = source.in_proj(hidden_states).chunk(3, -1)
        inputs = ShortConvInputs((input_gate * x)[0], self._weight, self._bias)
        return source.out_proj(output_gate * current_pass().recur(self._index, inputs))
