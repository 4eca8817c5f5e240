"""The mixer of Mamba-2 layers, with planish's states of sequences."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from planish.model.hf.forward_pass import current_pass
from planish.model.layers.recurrence import Mamba2Inputs, Mamba2Weights


class FrozenMamba2(nn.Module):
    """A Mamba-2 mixer that reads the previous rows of the same sequence, or its stored state.

    transformers' module assumes that the rows of a batch are one sequence.
    """

    def __init__(self, source: nn.Module, index: int) -> None:
        """`source`: the module that this one replaces, with its linears and its gated norm.
        `index`: its number among the model's Mamba-2 layers.
        """
        super().__init__()
        self._source, self._index = source, index
        mixer: Any = source
        conv = mixer.conv1d
        self._sizes = [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads]
        smallest, largest = map(float, mixer.time_step_limit)
        self._weights = Mamba2Weights(
            conv=conv.weight.detach().squeeze(1).float(),
            conv_bias=None if conv.bias is None else conv.bias.detach().float(),
            decay_rate=-mixer.A_log.detach().float().exp(),
            dt_bias=mixer.dt_bias.detach().float(),
            skip=mixer.D.detach().float(),
            dt_limits=(smallest, largest),
        )
        # Only Falcon-H1 scales the projection, and lacks the norm in some sizes.
        self._input_scale: float = getattr(mixer, "ssm_in_multiplier", 1.0)
        self._scales: Tensor | None = getattr(mixer, "mup_vector", None)
        self._has_norm: bool = getattr(mixer, "mamba_rms_norm", True)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Return the outputs [1, T, D]. `hidden_states`: [1, T, D]."""
        source: Any = self._source
        if self._input_scale != 1:
            hidden_states = hidden_states * self._input_scale
        projected = source.in_proj(hidden_states)
        if self._scales is not None:
            projected = projected * self._scales
        gate, xbc, dt = projected.split(self._sizes, -1)
        inputs = Mamba2Inputs(xbc[0], dt[0], self._weights)
        out = current_pass().recur(self._index, inputs).flatten(1)[None]
        out = source.norm(out, gate) if self._has_norm else out * F.silu(gate)
        return source.out_proj(out.to(hidden_states.dtype))
