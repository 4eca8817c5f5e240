"""Short convolutions equal those of transformers, with the same bits in every batch."""

import numpy as np
import pytest
import torch
from transformers.models.lfm2.modeling_lfm2 import causal_conv1d_fn

from planish.errors import UnsupportedError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.inspection.modules import ShortConvConfig
from planish.model.kernels.reference.causal_conv import SequenceConvolution, TreeConvolution
from planish.model.layers.recurrence import (
    RecurrentState,
    ShortConvInputs,
    StateSegment,
    state_bytes,
)
from planish.model.sequences.prefix_tree import MicroBatch, pack
from planish.testing import tiny_transformers_model

CPU = torch.device("cpu")
CHANNELS = 20


def inputs_of(rows: int, width: int, dtype: torch.dtype = torch.float32) -> ShortConvInputs:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator)
        for shape in ((rows, CHANNELS), (CHANNELS, width), (CHANNELS,))
    )
    return ShortConvInputs(x.to(dtype), weight, bias)


def rows_of(inputs: ShortConvInputs, rows: list[int]) -> ShortConvInputs:
    return ShortConvInputs(inputs.x[rows], inputs.weight, inputs.bias)


def theirs(inputs: ShortConvInputs) -> torch.Tensor:
    """Return the outputs of transformers for one sequence."""
    return causal_conv1d_fn(inputs.x.t()[None], inputs.weight, inputs.bias)[0].t()


def tree() -> MicroBatch:
    """Return sequences of which some end within the width of a convolution after they branch."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, 9, 12)
    sequences = [common[:1], rng.integers(10, 19, 30)]
    for prefix in (common, np.append(common, rng.integers(0, 9, 2))):
        sequences += [np.append(prefix, rng.integers(30, 99, n)) for n in (1, 2, 9, 9)]
    (micro_batch,) = pack(sequences, 1000)
    return micro_batch


@pytest.mark.parametrize("width", [1, 3, 7])
def test_a_prefix_tree_has_the_outputs_and_gradients_of_its_sequences(width):
    micro_batch = tree()
    inputs = inputs_of(len(micro_batch), width)
    inputs.x.requires_grad_()
    found = TreeConvolution(micro_batch, width, CPU)(0, inputs)
    probe = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    expected_sum, found_sum = torch.zeros(()), torch.zeros(())
    for rows in micro_batch.datum_rows:
        expected = theirs(rows_of(inputs, rows.tolist()))
        torch.testing.assert_close(found[rows], expected)
        expected_sum = expected_sum + (expected * probe[rows]).sum()
        found_sum = found_sum + (found[rows] * probe[rows]).sum()
    (expected_gradient,) = torch.autograd.grad(expected_sum, inputs.x)
    (gradient,) = torch.autograd.grad(found_sum, inputs.x)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 7])
def test_continued_sequences_have_the_bits_of_the_tree(width, dtype):
    micro_batch, config = tree(), ShortConvConfig((0,), CHANNELS, width)
    inputs = inputs_of(len(micro_batch), width, dtype)
    expected = TreeConvolution(micro_batch, width, CPU)(0, inputs)
    states = [RecurrentState(config, dtype, CPU) for _ in micro_batch.datum_rows]
    # The first step has half of each sequence, in two segments, and later steps have one row each.
    segments: list[StateSegment] = []
    rows: list[int] = []
    progress = [len(path) // 2 for path in micro_batch.datum_rows]
    for path, state, half in zip(micro_batch.datum_rows, states, progress, strict=True):
        middle = RecurrentState(config, dtype, CPU) if half > 1 else state
        for first, stop in ((0, half // 2), (half // 2, half)):
            if first < stop:
                before, after = (middle, state) if first else (state, middle)
                segments.append(StateSegment(len(rows), len(rows) + stop - first, before, after))
                rows += path[first:stop].tolist()
    step = SequenceConvolution(segments, len(rows), width, CPU)
    assert torch.equal(step(0, rows_of(inputs, rows)), expected[rows])
    for offset in range(max(map(len, micro_batch.datum_rows))):
        running = [
            (path[at + offset], state)
            for path, state, at in zip(micro_batch.datum_rows, states, progress, strict=True)
            if at + offset < len(path)
        ]
        if not running:
            break
        segments = [StateSegment(i, i + 1, state, state) for i, (_, state) in enumerate(running)]
        rows = [int(row) for row, _ in running]
        step = SequenceConvolution(segments, len(rows) + 2, width, CPU)
        found = step(0, rows_of(inputs, [*rows, rows[0], rows[0]]))  # two rows of padding
        assert torch.equal(found[: len(rows)], expected[rows])


def test_the_layers_of_a_model_are_read_from_its_code(tmp_path):
    config = ModelConfig.from_directory(tiny_transformers_model(tmp_path, "lfm3"))
    assert config.short_conv == ShortConvConfig((0, 2), 64, 7)
    assert config.attention_layers == (1, 3)
    assert config.windows[0] is config.windows[2] is config.windows[3] is None
    assert config.attention_windows == (config.windows[1], None)
    assert config.short_conv is not None
    state = RecurrentState(config.short_conv, torch.bfloat16, CPU)
    assert state_bytes(config, torch.bfloat16) == state.conv.nbytes == 2 * 2 * 6 * 64
    assert not state.matrices.numel()


def test_a_model_without_attention_is_refused(tmp_path):
    tiny_transformers_model(tmp_path, "lfm2", layer_types=["conv"] * 3)
    with pytest.raises(UnsupportedError, match="no layer with attention"):
        ModelConfig.from_directory(tmp_path)
