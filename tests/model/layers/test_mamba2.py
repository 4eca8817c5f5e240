"""Mamba-2 layers equal transformers; the recurrence has the same bits in every batch."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.nemotron_h.modeling_nemotron_h import causal_conv1d_fn, mamba2_chunk_scan
from variants import slow_after

from planish.errors import UnsupportedError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.inspection.modules import Mamba2Config
from planish.model.kernels.cpp.recurrences import (
    CppMamba2SequenceRecurrence,
    CppMamba2TreeRecurrence,
    supports_scan,
)
from planish.model.kernels.reference.mamba2 import Mamba2SequenceRecurrence, Mamba2TreeRecurrence
from planish.model.layers.recurrence import (
    Mamba2Inputs,
    Mamba2Weights,
    RecurrentState,
    StateSegment,
    state_bytes,
)
from planish.model.sequences.prefix_tree import MicroBatch, pack
from planish.testing import tiny_transformers_model

CPU = torch.device("cpu")
CONFIG = Mamba2Config((0,), num_heads=6, head_dim=48, num_groups=2, state_size=9, conv_width=4)
"""Three vectors per head, and a state whose size is no multiple of any."""
Kernels = tuple[type[Mamba2TreeRecurrence], type[Mamba2SequenceRecurrence]]


@pytest.fixture(params=["torch", "native"])
def kernels(request) -> Kernels:
    """The recurrences of trainer and sampler, in torch and with planish's CPU kernels."""
    if request.param == "torch":
        return Mamba2TreeRecurrence, Mamba2SequenceRecurrence
    if not supports_scan(CONFIG):
        pytest.skip("this machine has no C++ kernels")
    return CppMamba2TreeRecurrence, CppMamba2SequenceRecurrence


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs_of(
    rows: int, dtype: torch.dtype = torch.float32, config: Mamba2Config = CONFIG
) -> Mamba2Inputs:
    heads, channels = config.num_heads, config.channels
    weights = Mamba2Weights(
        conv=noise(channels, config.conv_width, seed=1),
        conv_bias=noise(channels, seed=2),
        decay_rate=-noise(heads, seed=3).abs(),
        dt_bias=noise(heads, seed=4) - 2,
        skip=noise(heads, seed=5),
        dt_limits=(0.02, 1.5),
    )
    return Mamba2Inputs(
        noise(rows, channels, seed=6).to(dtype), noise(rows, heads, seed=7).to(dtype), weights
    )


def rows_of(inputs: Mamba2Inputs, rows: Sequence[int]) -> Mamba2Inputs:
    return Mamba2Inputs(inputs.xbc[rows], inputs.dt[rows], inputs.weights)


def theirs(inputs: Mamba2Inputs, config: Mamba2Config = CONFIG, chunk: int = 16) -> torch.Tensor:
    """Return the outputs of transformers for one sequence."""
    weights = inputs.weights
    mixed = causal_conv1d_fn(
        inputs.xbc.t()[None], weights.conv, weights.conv_bias, activation="silu"
    )
    shared = config.num_groups * config.state_size
    x, b, c = mixed.transpose(1, 2).split([mixed.shape[1] - 2 * shared, shared, shared], -1)
    out = mamba2_chunk_scan(
        x.unflatten(-1, (config.num_heads, -1)),
        inputs.dt[None],
        weights.decay_rate,
        b.unflatten(-1, (config.num_groups, -1)),
        c.unflatten(-1, (config.num_groups, -1)),
        chunk_size=chunk,
        D=weights.skip,
        dt_bias=weights.dt_bias,
        dt_softplus=True,
        dt_limit=weights.dt_limits,
    )
    return out[0]


def forest() -> tuple[list[np.ndarray], MicroBatch]:
    """Return sequences with shared prefixes of several depths, and their forest."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, 9, 40)
    sequences = [common[:2], rng.integers(10, 19, 70), rng.integers(20, 29, 1)]
    for prefix in (common, np.append(common, rng.integers(0, 9, 33))):
        sequences += [np.append(prefix, rng.integers(30, 99, n)) for n in (1, 2, 5, 37, 37)]
    (micro_batch,) = pack(sequences, 10_000)
    return sequences, micro_batch


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 70])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_the_recurrence_equals_transformers(kernels, rows, groups):
    config = replace(CONFIG, num_groups=groups)
    inputs = inputs_of(rows, config=config)
    (micro_batch,) = pack([np.arange(rows)], 100)
    ours = kernels[0](micro_batch, config, CPU)(0, inputs)
    torch.testing.assert_close(ours, theirs(inputs, config), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("few_entries", slow_after(1, [False, True]))
@pytest.mark.parametrize("groups", slow_after(1, [2, 1]))
def test_a_forest_has_the_outputs_and_the_gradients_of_its_sequences(
    kernels, monkeypatch, few_entries, groups
):
    """With few entries in memory, the backward pass computes one head at a time."""
    if few_entries:
        for module in ("reference.state_scan", "cpp.recurrences"):
            monkeypatch.setattr(f"planish.model.kernels.{module}.MAX_BLOCK_ELEMENTS", 1)
    config = replace(CONFIG, num_groups=groups)
    _, micro_batch = forest()
    inputs = inputs_of(len(micro_batch), config=config)
    leaves = (inputs.xbc.requires_grad_(), inputs.dt.requires_grad_())
    probe = noise(len(micro_batch), config.num_heads, config.head_dim, seed=9)
    outputs = [
        (theirs(rows_of(inputs, rows.tolist()), config) * probe[rows]).sum()
        for rows in micro_batch.datum_rows
    ]
    expected = torch.autograd.grad(torch.stack(outputs).sum(), leaves)
    found = kernels[0](micro_batch, config, CPU)(0, inputs)
    ours = torch.stack([(found[rows] * probe[rows]).sum() for rows in micro_batch.datum_rows]).sum()
    for own, their in zip(torch.autograd.grad(ours, leaves), expected, strict=True):
        assert their.norm() > 1
        assert (own - their).norm() < 1e-5 * their.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_has_the_same_bits_in_every_batch(kernels, dtype):
    """A forest, sequences alone, chunks from stored states, and single steps agree bit for bit."""
    sequences, micro_batch = forest()
    inputs = inputs_of(len(micro_batch), dtype)
    together = kernels[0](micro_batch, CONFIG, CPU)(0, inputs)
    paths = dict(zip(micro_batch.datums, micro_batch.datum_rows, strict=True))
    for index in range(len(sequences)):
        rows = paths[index]
        (alone,) = pack([sequences[index]], 1000)
        own = kernels[0](alone, CONFIG, CPU)(0, rows_of(inputs, rows.tolist()))
        assert torch.equal(own, together[rows])
    # One prefill of all sequences, in which each second segment continues another one of the batch.
    segments, rows, finals = [], [], []
    for path in micro_batch.datum_rows:
        row, cut = len(rows), max(1, len(path) // 2)
        states = [RecurrentState(CONFIG, dtype, CPU) for _ in range(3)]
        parts = ((row, row + cut), (row + cut, row + len(path)))
        for number, (start, stop) in enumerate(parts):
            if start < stop:
                segments.append(StateSegment(start, stop, states[number], states[number + 1]))
        rows += path.tolist()
        finals.append(segments[-1].final_state)
    with torch.inference_mode():
        padded = rows_of(inputs, [*rows, *rows[:3]])
        found = kernels[1](segments, len(rows) + 3, CONFIG, CPU)(0, padded)
    assert torch.equal(found[: len(rows)], together[rows])
    # Decoding steps reach the same outputs and the same states.
    stepping = [RecurrentState(CONFIG, dtype, CPU) for _ in micro_batch.datum_rows]
    for step in range(max(map(len, micro_batch.datum_rows))):
        at = [
            (int(path[step]), state)
            for path, state in zip(micro_batch.datum_rows, stepping, strict=True)
            if step < len(path)
        ]
        segments = [StateSegment(row, row + 1, state, state) for row, (_, state) in enumerate(at)]
        some = [row for row, _ in at]
        with torch.inference_mode():
            step_recurrence = kernels[1](segments, len(at), CONFIG, CPU)
            found = step_recurrence(0, rows_of(inputs, some))
        assert torch.equal(found, together[some])
    for one, other in zip(stepping, finals, strict=True):
        assert torch.equal(one.matrices, other.matrices)
        assert torch.equal(one.conv, other.conv)


def test_the_layers_of_a_model_are_read_from_its_code(tmp_path):
    config = ModelConfig.from_directory(tiny_transformers_model(tmp_path, "nemotron_h"))
    assert config.mamba2 == Mamba2Config((0, 4), 6, 16, 2, 24, 4)
    assert config.attention_layers == (2,)  # Layers 1 and 3 have neither attention nor a state.
    assert config.hf is not None
    names = [[linear.name for linear in layer] for layer in config.hf.layers]
    assert names[0] == ["mixer.in_proj"]  # PEFT refuses out_proj in this family.
    assert not config.hf.linear(0, "mixer.in_proj").is_mlp
    assert config.hf.linear(3, "mixer.up_proj").is_mlp
    assert names[1][:2] == ["mixer.experts.up_proj", "mixer.experts.down_proj"]
    assert config.mamba2 is not None
    state = RecurrentState(config.mamba2, torch.bfloat16, CPU)
    assert state_bytes(config, torch.bfloat16) == state.conv.nbytes + state.matrices.nbytes


def test_a_layer_may_have_attention_and_a_state(tmp_path):
    config = ModelConfig.from_directory(tiny_transformers_model(tmp_path, "falcon_h1"))
    assert config.mamba2 is not None
    assert config.mamba2.layers == config.attention_layers == (0, 1)


def test_another_activation_is_refused(tmp_path):
    tiny_transformers_model(tmp_path, "nemotron_h", mamba_hidden_act="gelu")
    with pytest.raises(UnsupportedError, match="Mamba-2 layers is 'gelu'"):
        ModelConfig.from_directory(tmp_path)


def test_installed_packages_of_kernels_are_not_imported(tmp_path):
    tiny_transformers_model(tmp_path / "model", "bamba")
    for name in ("mamba_ssm", "causal_conv1d"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import torch
from planish.model.architecture.config import ModelConfig
from planish.model.kernels.choose import choose_backend
from planish.model.loading import load_decoder
config = ModelConfig.from_directory({str(tmp_path / "model")!r})
cpu = torch.device("cpu")
load_decoder({str(tmp_path / "model")!r}, choose_backend(config, torch.float32, cpu, None))
assert "mamba_ssm" not in sys.modules and "causal_conv1d" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
