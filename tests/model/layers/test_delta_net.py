"""Gated delta-net layers equal transformers; the recurrence has the same bits in every batch."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    causal_conv1d_fn,
    torch_recurrent_gated_delta_rule,
)
from variants import slow_after

from planish.errors import UnsupportedError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.decoder_fields import DeltaNetConfig
from planish.model.kernels.cpp.recurrences import (
    CppSequenceRecurrence,
    CppTreeRecurrence,
    supports_scan,
)
from planish.model.kernels.reference.delta_net import SequenceRecurrence, TreeRecurrence
from planish.model.layers.linear import PackedLinear
from planish.model.layers.recurrence import (
    DeltaNetInputs,
    DeltaNetWeights,
    RecurrentState,
    StateSegment,
    state_bytes,
)
from planish.model.sequences.prefix_tree import MicroBatch, pack
from planish.model.sources.weights import load_weights
from planish.testing import save_weights, tiny_model

CPU = torch.device("cpu")
Kernels = tuple[type[TreeRecurrence], type[SequenceRecurrence]]
CONFIG = DeltaNetConfig((0,), 2, 4, 16, 48, 4)


@pytest.fixture(params=["torch", "native"])
def kernels(request) -> Kernels:
    """The recurrences of trainer and sampler, in torch and with planish's CPU kernels."""
    if request.param == "torch":
        return TreeRecurrence, SequenceRecurrence
    if not supports_scan(CONFIG):
        pytest.skip("this machine has no C++ kernels")
    return CppTreeRecurrence, CppSequenceRecurrence


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs_of(rows: int, dtype: torch.dtype = torch.float32) -> DeltaNetInputs:
    heads, channels = CONFIG.num_value_heads, CONFIG.channels
    weights = DeltaNetWeights(
        beta_decay=PackedLinear([torch.zeros(2 * heads, 8)], packer=lambda *_: None),
        conv=noise(channels, CONFIG.conv_width, seed=1),
        decay_rate=-noise(heads, seed=2).abs(),
        decay_bias=noise(heads, seed=3),
        norm=torch.ones(CONFIG.value_dim),
    )
    qkv, gates = noise(rows, channels, seed=4), noise(rows, 2 * heads, seed=5)
    return DeltaNetInputs(qkv.to(dtype), gates.to(dtype), weights)


def rows_of(inputs: DeltaNetInputs, rows: Sequence[int]) -> DeltaNetInputs:
    return DeltaNetInputs(inputs.qkv[rows], inputs.beta_decay[rows], inputs.weights)


def theirs(inputs: DeltaNetInputs) -> torch.Tensor:
    """Return the outputs of transformers for one sequence."""
    weights = inputs.weights
    mixed = causal_conv1d_fn(inputs.qkv.t()[None], weights.conv, activation="silu")[0].t()
    keys = CONFIG.num_key_heads * CONFIG.key_dim
    q, k, v = mixed.split([keys, keys, mixed.shape[1] - 2 * keys], 1)
    b, a = inputs.beta_decay.chunk(2, 1)
    out, _ = torch_recurrent_gated_delta_rule(
        q.unflatten(1, (-1, CONFIG.key_dim))[None],
        k.unflatten(1, (-1, CONFIG.key_dim))[None],
        v.unflatten(1, (-1, CONFIG.value_dim))[None],
        g=(weights.decay_rate * torch.nn.functional.softplus(a + weights.decay_bias))[None],
        beta=b.sigmoid()[None],
        use_qk_l2norm_in_kernel=True,
    )
    return out[0]


def forest(seed: int = 0) -> tuple[list[np.ndarray], MicroBatch]:
    """Return sequences with shared prefixes of several depths, and their forest."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 9, 40)
    sequences = [common[:2], rng.integers(10, 19, 70), rng.integers(20, 29, 1)]
    for prefix in (common, np.append(common, rng.integers(0, 9, 33))):
        sequences += [np.append(prefix, rng.integers(30, 99, n)) for n in (1, 2, 5, 37, 37)]
    (micro_batch,) = pack(sequences, 10_000)
    return sequences, micro_batch


def test_the_recurrence_equals_transformers(kernels):
    inputs = inputs_of(70)
    (micro_batch,) = pack([np.arange(70)], 100)
    ours = kernels[0](micro_batch, CONFIG, CPU)(0, inputs)
    torch.testing.assert_close(ours, theirs(inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("few_entries", slow_after(1, [False, True]))
def test_a_forest_has_the_outputs_and_the_gradients_of_its_sequences(
    kernels, monkeypatch, few_entries
):
    """With few entries in memory, the backward pass computes one head at a time."""
    if few_entries:
        name = "planish.model.kernels.reference.state_scan.MAX_BLOCK_ELEMENTS"
        monkeypatch.setattr(name, 1)
    _, micro_batch = forest()
    inputs = inputs_of(len(micro_batch))
    leaves = (inputs.qkv.requires_grad_(), inputs.beta_decay.requires_grad_())
    probe = noise(len(micro_batch), CONFIG.num_value_heads, CONFIG.value_dim, seed=9)
    outputs = [
        (theirs(rows_of(inputs, rows.tolist())) * probe[rows]).sum()
        for rows in micro_batch.datum_rows
    ]
    expected = torch.autograd.grad(torch.stack(outputs).sum(), leaves)
    found = kernels[0](micro_batch, CONFIG, CPU)(0, inputs)
    ours = torch.stack([(found[rows] * probe[rows]).sum() for rows in micro_batch.datum_rows]).sum()
    for own, their in zip(torch.autograd.grad(ours, leaves), expected, strict=True):
        assert their.norm() > 1
        assert (own - their).norm() < 1e-5 * their.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_has_the_same_bits_in_every_batch(kernels, dtype):
    """A forest, sequences alone, chunks from stored states, and single steps agree bit for bit."""
    sequences, micro_batch = forest()
    inputs = inputs_of(len(micro_batch), dtype)
    tree, sequence = kernels
    together = tree(micro_batch, CONFIG, CPU)(0, inputs)
    paths = dict(zip(micro_batch.datums, micro_batch.datum_rows, strict=True))
    for index in range(len(sequences)):
        rows = paths[index]
        own = rows_of(inputs, rows.tolist())
        (alone,) = pack([sequences[index]], 1000)
        assert torch.equal(tree(alone, CONFIG, CPU)(0, own), together[rows])
    # One prefill of all sequences, in which each second segment continues another one of the batch.
    segments, rows, row = [], [], 0
    finals = []
    for path in micro_batch.datum_rows:
        cut = max(1, len(path) // 2)
        states = [RecurrentState(CONFIG, dtype, CPU) for _ in range(3)]
        parts = ((row, row + cut), (row + cut, row + len(path)))
        for number, (start, stop) in enumerate(parts):
            if start < stop:
                segments.append(StateSegment(start, stop, states[number], states[number + 1]))
        rows += path.tolist()
        finals.append(segments[-1].final_state)
        row += len(path)
    with torch.inference_mode():
        found = sequence(segments, row + 3, CONFIG, CPU)(0, rows_of(inputs, [*rows, *rows[:3]]))
    assert torch.equal(found[:row], together[rows])
    assert not found[row:].any()
    # Decoding steps reach the same outputs and the same states.
    stepping = [RecurrentState(CONFIG, dtype, CPU) for _ in micro_batch.datum_rows]
    for step in range(max(map(len, micro_batch.datum_rows))):
        at = [
            (path[step], state)
            for path, state in zip(micro_batch.datum_rows, stepping, strict=True)
            if step < len(path)
        ]
        segments = [StateSegment(row, row + 1, state, state) for row, (_, state) in enumerate(at)]
        some = [int(row) for row, _ in at]
        with torch.inference_mode():
            found = sequence(segments, len(at), CONFIG, CPU)(0, rows_of(inputs, some))
        assert torch.equal(found, together[some])
    for one, other in zip(stepping, finals, strict=True):
        assert torch.equal(one.matrices, other.matrices)
        assert torch.equal(one.conv, other.conv)


def test_a_state_has_the_bytes_that_memory_planning_counts(tmp_path):
    config = ModelConfig.from_directory(tiny_model(tmp_path, "qwen3_5", layers=4))
    assert config.delta_net is not None
    assert config.delta_net.layers == (0, 2)
    state = RecurrentState(config.delta_net, torch.bfloat16, CPU)
    assert state_bytes(config, torch.bfloat16) == state.conv.nbytes + state.matrices.nbytes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["linear_attention"] * 2}, "layer_types has no full_attention"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads is 5"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, "partial_rotary"),
    ],
)
def test_unsupported_options_are_named(tmp_path, changes, named):
    path = tiny_model(tmp_path, "qwen3_5") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UnsupportedError, match=named):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_text_model_of_a_multimodal_checkpoint_is_loaded(
    tmp_path, caplog, tied, family, architecture
):
    plain = tiny_model(tmp_path / "text", family, tied=tied)
    tensors = load_file(plain / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    both = tmp_path / "both"
    both.mkdir()
    config = {
        "architectures": [architecture],
        "model_type": family,
        "eos_token_id": text["eos_token_id"],
        "tie_word_embeddings": tied,
        "text_config": {key: text[key] for key in text if key != "tie_word_embeddings"},
        "vision_config": {"hidden_size": 8},
    }
    (both / "config.json").write_text(json.dumps(config))
    stored = {
        name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()
    }
    for name in ("model.visual.blocks.0.norm1.weight", "mtp.norm.weight"):
        stored[name] = torch.zeros(8)
    save_weights(both, stored)
    config = ModelConfig.from_directory(both)
    assert config.vision is not None
    assert replace(config, vision=None) == ModelConfig.from_directory(plain)
    assert config.fingerprint() == ModelConfig.from_directory(plain).fingerprint()
    with caplog.at_level("INFO"):
        found = load_weights(both, ModelConfig.from_directory(both))
    expected = load_weights(plain, ModelConfig.from_directory(plain))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert "skipped 2 tensors" in caplog.text
