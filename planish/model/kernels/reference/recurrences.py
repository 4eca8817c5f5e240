"""The recurrences of a model in torch: gated delta nets, Mamba-2 layers, short convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from planish.model.architecture.config import Mamba2Config, RecurrenceConfig
from planish.model.architecture.hf_config.decoder_fields import DeltaNetConfig
from planish.model.kernels.reference.causal_conv import SequenceConvolution, TreeConvolution
from planish.model.kernels.reference.delta_net import SequenceRecurrence, TreeRecurrence
from planish.model.kernels.reference.mamba2 import Mamba2SequenceRecurrence, Mamba2TreeRecurrence
from planish.model.layers.recurrence import Recurrence, StateSegment
from planish.model.sequences.prefix_tree import MicroBatch


class TorchRecurrences:
    """The recurrences of layers with a recurrent state (see `Recurrences`)."""

    def __init__(self, config: RecurrenceConfig | None, device: torch.device) -> None:
        """`config`: None for a model without such layers."""
        self._config, self._device = config, device

    def tree_recurrence(self, micro_batch: MicroBatch) -> Recurrence | None:
        """Return the recurrence of a micro-batch of the trainer, with gradients."""
        config = self._config
        if config is None:
            return None
        if isinstance(config, DeltaNetConfig):
            return TreeRecurrence(micro_batch, config, self._device)
        if isinstance(config, Mamba2Config):
            return Mamba2TreeRecurrence(micro_batch, config, self._device)
        return TreeConvolution(micro_batch, config.conv_width, self._device)

    def sequence_recurrence(
        self, segments: Sequence[StateSegment], num_rows: int
    ) -> Recurrence | None:
        """Return the recurrence of batch rows that continue stored states, without gradients."""
        config = self._config
        if config is None:
            return None
        if isinstance(config, DeltaNetConfig):
            return SequenceRecurrence(segments, num_rows, config, self._device)
        if isinstance(config, Mamba2Config):
            return Mamba2SequenceRecurrence(segments, num_rows, config, self._device)
        return SequenceConvolution(segments, num_rows, config.conv_width, self._device)
