"""The plan of one pass through the decoder: its rows, their tokens, and where their keys and values
are.

A plan is either a prefill, whose rows are the next tokens of prompts, or a decoding step, whose
rows are the newest tokens of samples. Every model runner takes both and returns a `StepOutput`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.engine.constraints.grammar import GrammarState
from planish.engine.sampling.requests import RunningSample
from planish.engine.sampling.slots import SampleSlots, Slots
from planish.model.device import on_device
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.reference.adapter_stacks import shape_of
from planish.model.layers.lora import AdapterRange, LoraWeights
from planish.model.layers.recurrence import Recurrence, RecurrentState, StateSegment
from planish.model.sequences.kv_cache import PrefillSpan


class RowLayout:
    """The batch rows of each sequence (a prompt or a sample), grouped by adapter.

    `first_rows` has each sequence's first row, and `num_rows` is the number of rows including
    padding.
    """

    def __init__(
        self, sequences: Sequence[tuple[LoraWeights | None, int]], row_multiple: int = 1
    ) -> None:
        """Lay out sequences, each given as (weights, number of rows).

        Sequences of one adapter must be neighbours. After the last sequence of each adapter,
        padding rows round the adapter's rows up to a multiple of `row_multiple`.
        """
        self.first_rows: list[int] = []
        self.adapters: list[AdapterRange] = []
        row = first = 0
        for index, (weights, count) in enumerate(sequences):
            self.first_rows.append(row)
            row += count
            if index + 1 == len(sequences) or sequences[index + 1][0] is not weights:
                row += -(row - first) % row_multiple
                self.adapters.append(AdapterRange(first, row, weights))
                first = row
        self.num_rows = row


@dataclass(frozen=True, eq=False)
class SampleRows:
    """The samples that get tokens in a step, and the batch rows whose logits give these tokens.

    Sample i has the rows first_rows[i] .. first_rows[i] + num_rows - 1. All but the last of them
    give the logprobs of forced tokens. Several samples may have the same row.
    """

    samples: Sequence[RunningSample]
    first_rows: Sequence[int]
    adapters: Sequence[AdapterRange]
    """The adapters of all rows of the batch."""
    grammar_states: Sequence[GrammarState] = ()
    """The constraints whose masks are computed during the pass. The tokens of their samples can
    be sampled only after that.
    """


@dataclass(frozen=True, eq=False)
class PendingTokens:
    """The tokens of the last decoding step, if they are on the device only."""

    tokens: Tensor
    """The tokens: int64 [N]."""
    index_of: Mapping[RunningSample, int]
    """The index of each sample's token in `tokens`."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One pass of T rows through the decoder, including padding rows.

    Row i has token tokens[i] at position positions[i] of its sequence.
    """

    tokens: list[int]
    """The tokens of the rows; 0 for a row whose token is on the device only."""
    positions: list[int] | np.ndarray
    """The positions of the rows. In a prefill with images, these are RoPE positions [3, T]."""
    layout: RowLayout
    """The rows of each sequence, grouped by adapter."""
    slots: Sequence[PrefillSpan] | SampleSlots
    """Where the keys and values of the rows are stored: in the slots of prompts (a prefill) or of
    samples (a decoding step).
    """
    recurrence: Recurrence | None = None
    """The recurrence of the rows; None if the model has no recurrent states."""
    sampled: SampleRows = SampleRows((), (), ())
    """Which samples get tokens from these rows; none in a prefill."""
    pending: Tensor | None = None
    """The tokens that are on the device only: int64 [N]. None if all tokens are in `tokens`."""
    sources: Sequence[int] = ()
    """With `pending`: the index of each row's token in `tokens` followed by `pending`."""

    def inputs(self, device: torch.device) -> Tensor:
        """Return the tokens and the positions on the device: int64 [2, T], or [4, T] in a prefill
        with images. A GPU receives them asynchronously.
        """
        numbers = [self.tokens, *np.atleast_2d(self.positions).tolist()]
        if self.pending is None:
            return on_device(numbers, torch.int64, device)
        rows = on_device([*numbers, self.sources], torch.int64, device)
        torch.index_select(torch.cat([rows[0], self.pending]), 0, rows[-1], out=rows[0])
        return rows[:-1]


@dataclass(frozen=True, eq=False)
class StepOutput:
    """The result of a pass. It is valid only until the next pass, which may overwrite it."""

    hidden: Tensor
    """The final hidden states [T, D] in the model's dtype."""
    logits: Tensor | None
    """The logits, float32 [T, V]. None for a prefill."""


def tokens_and_positions(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens [T] and the positions [T] or [3, T] of `StepPlan.inputs`."""
    return inputs[0], inputs[1] if len(inputs) == 2 else inputs[1:]


def plan_decoding(
    samples: Sequence[RunningSample],
    slots: Slots,
    backend: Backend,
    row_multiple_for: Callable[[int], int],
    pending: PendingTokens | None = None,
) -> StepPlan:
    """Plan a decoding step of these samples. Each has a slot or gets one now.

    Each sample has `num_rows` rows: its last token, and the forced tokens of its grammar that
    follow it. `row_multiple_for`: see `ModelRunner.row_multiple`. `pending` has the last tokens of
    the samples with a pending token.
    """
    slots.ensure_space(samples)
    rows_per_adapter: Counter[LoraWeights | None] = Counter()
    for sample in samples:
        rows_per_adapter[sample.prompt.weights] += sample.num_rows
    row_multiple = row_multiple_for(len(rows_per_adapter))

    def batch_order(sample: RunningSample) -> tuple[Any, ...]:
        weights = sample.prompt.weights
        return (
            shape_of(weights),
            -rows_per_adapter[weights] // row_multiple,
            id(weights),
            sample.capacity,
            sample.slot,
        )

    # Adapters that can share a batched matmul become neighbours. The rows of an adapter are in
    # the order of their slots. Attention can then read adjacent slots without copying them.
    samples = sorted(samples, key=batch_order)
    layout = RowLayout(
        [(sample.prompt.weights, sample.num_rows) for sample in samples], row_multiple
    )
    tokens, positions = [0] * layout.num_rows, [0] * layout.num_rows
    sources = list(range(layout.num_rows)) if pending is not None else []
    for sample, row in zip(samples, layout.first_rows, strict=True):
        position = sample.position
        positions[row] = position
        if pending is not None and sample.num_pending_tokens:
            sources[row] = layout.num_rows + pending.index_of[sample]
        else:
            tokens[row] = sample.tokens[-1]
        if sample.num_rows > 1:
            stop = row + sample.num_rows
            tokens[row + 1 : stop] = sample.forced_tokens[: sample.num_rows - 1]
            positions[row + 1 : stop] = range(position + 1, position + sample.num_rows)
    return StepPlan(
        tokens,
        positions,
        layout,
        slots.of_samples(samples, layout.first_rows),
        backend.sequence_recurrence(
            _state_segments(samples, layout.first_rows, backend), layout.num_rows
        ),
        SampleRows(
            samples,
            layout.first_rows,
            layout.adapters,
            [sample.grammar for sample in samples if sample.grammar is not None],
        ),
        pending.tokens if pending is not None else None,
        sources,
    )


def _state_segments(
    samples: Sequence[RunningSample], first_rows: Sequence[int], backend: Backend
) -> list[StateSegment]:
    """Return the segments of a decoding step, one per sample.

    Each segment updates the recurrent state of its sample in place, or writes to `next_state` if
    the sample's mask is not computed yet. `first_rows`: the first row of each sample.
    """
    config = backend.config.recurrence
    if config is None:
        return []
    segments: list[StateSegment] = []
    for sample, row in zip(samples, first_rows, strict=True):
        if sample.recurrent_state is None:
            state_of_prompt = sample.prompt.tensors.state
            assert state_of_prompt is not None
            sample.recurrent_state = state_of_prompt.copy()
        state = final_state = sample.recurrent_state
        sample.writes_next_state = sample.grammar is not None and not sample.grammar.is_ready
        if sample.writes_next_state:
            if sample.next_state is None:
                sample.next_state = RecurrentState(config, backend.dtype, backend.device)
            final_state = sample.next_state
        segments.append(StateSegment(row, row + sample.num_rows, state, final_state))
    return segments
