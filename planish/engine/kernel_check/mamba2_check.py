"""The check of the recurrence of Mamba-2 layers, without a model."""

# pyright: reportUnknownMemberType=false

import numpy as np
import torch

from planish.engine.kernel_check.operation_check import OperationCheck
from planish.model.layers.recurrence import (
    Mamba2Inputs,
    Mamba2Weights,
    RecurrentState,
    StateSegment,
)
from planish.model.sequences.prefix_tree import pack


class Mamba2Check(OperationCheck):
    """The check of a backend whose config has Mamba-2 layers."""

    def run(self) -> None:
        """Check a prefix tree with gradients, and rows that continue stored states.

        Raises WrongResultError if an operation differs from torch.
        """
        shared = np.arange(37)
        sequences = [np.append(shared, 100 * branch + np.arange(34)) for branch in range(3)]
        (micro_batch,) = pack(sequences, 1 << 20)
        inputs = self._inputs(len(micro_batch))
        leaves = (inputs.xbc.requires_grad_(), inputs.dt.requires_grad_())
        tree = self.backend.tree_recurrence(micro_batch)
        assert tree is not None
        out = tree(0, inputs)
        (out * self.random(*out.shape, dtype=torch.float32)).sum().backward()
        assert all(leaf.grad is not None for leaf in leaves)
        config, dtype, device = self.config.mamba2, self.backend.dtype, self.backend.device
        assert config is not None
        states = [RecurrentState(config, dtype, device) for _ in range(4)]
        segments = [
            StateSegment(0, 40, states[0], states[1]),
            StateSegment(40, 41, states[1], states[2]),
            StateSegment(41, 48, states[3], states[3]),
        ]
        recurrence = self.backend.sequence_recurrence(segments, 50)
        assert recurrence is not None
        with torch.no_grad():
            recurrence(0, self._inputs(50))

    def _inputs(self, num_rows: int) -> Mamba2Inputs:
        config = self.config.mamba2
        assert config is not None
        heads, channels, wide = config.num_heads, config.channels, torch.float32
        weights = Mamba2Weights(
            conv=self.random(channels, config.conv_width, dtype=wide),
            conv_bias=self.random(channels, dtype=wide),
            decay_rate=-self.random(heads, dtype=wide).abs(),
            dt_bias=self.random(heads, dtype=wide) - 2,
            skip=self.random(heads, dtype=wide),
            dt_limits=(0.0, float("inf")),
        )
        return Mamba2Inputs(self.random(num_rows, channels), self.random(num_rows, heads), weights)
