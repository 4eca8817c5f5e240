"""Mixtures of experts: weights, routing and gradients, against transformers, PEFT and autograd."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from backends import load_on
from test_decoder import CPU, logits_of, peft_model, random_tokens
from transformers import AutoModelForCausalLM
from variants import slow_after

from planish.errors import DamagedFileError, UnsupportedError
from planish.model.architecture.config import ModelConfig
from planish.model.decoder.decoder import Decoder, _ForwardPass
from planish.model.decoder.experts import mixture_of_experts, route
from planish.model.decoder.operations import apply_output_gate
from planish.model.kernels.choose import reference_backend
from planish.model.kernels.cpp import ops
from planish.model.layers.expert_pairs import TokenExpertPairs
from planish.model.layers.layer_weights import Experts
from planish.model.layers.lora import AdapterRange, LoraLayout, LoraWeights
from planish.model.sources.weights import load_weights
from planish.testing import save_weights, tiny_model
from planish.types import LoraConfig

OPTIONS = {"layers": 3, "dense_layers": [1]}
OPTIONS_OF = {"qwen3_moe": OPTIONS, "qwen3_5_moe": OPTIONS, "gpt_oss": {"layers": 3}}
EVERY = pytest.mark.parametrize("family", OPTIONS_OF)


@pytest.fixture(params=["native", "torch"])
def _kernels(request, monkeypatch):
    """Run the test with planish's CPU kernels, if there are any, and without."""
    if request.param == "torch":
        monkeypatch.setattr(ops, "load_library", lambda: None)


def trained(decoder: Decoder, seed: int = 0, scale: float = 0.05, **options) -> LoraWeights:
    layout = LoraLayout(decoder.config, LoraConfig(**{"rank": 4, **options}))
    noise = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))
    return LoraWeights(
        layout, layout.init(seed) + scale * noise, decoder.backend, requires_grad=True
    )


def test_rows_are_sorted_by_expert_then_by_row():
    pairs = TokenExpertPairs(torch.tensor([[3, 0], [0, 1], [3, 1]]), 5)
    assert pairs.row_indices.tolist() == [0, 1, 1, 2, 0, 2]
    assert pairs.expert_slices == [(0, slice(0, 2)), (1, slice(2, 4)), (3, slice(4, 6))]
    assert pairs.expert_slices_of(1, 2) == [(0, slice(1, 2)), (1, slice(2, 3))]
    assert pairs.unsort(torch.arange(6)).tolist() == [[4, 0], [1, 2], [5, 3]]


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("experts_per_token", [3, 1])
@pytest.mark.parametrize("normalizes", [True, False])
def test_the_router_equals_transformers(tmp_path, normalizes, experts_per_token):
    tiny_model(tmp_path, "qwen3_moe", experts_per_token=experts_per_token)
    change_config(tmp_path, norm_topk_prob=normalizes)
    decoder = load_on(tmp_path, torch.float32, CPU)
    experts = decoder.layers[0].mlp
    assert isinstance(experts, Experts)
    x = torch.randn(50, 64)
    weights, pairs = route(decoder.backend, x, experts.router, training=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    _, theirs, chosen = model.model.layers[0].mlp.gate(x)
    torch.testing.assert_close(weights, theirs)
    if normalizes and experts_per_token == 1:
        assert torch.equal(weights, torch.ones_like(weights))
    expected = [sorted(row) for row in chosen.tolist()]
    found = [[] for _ in range(50)]
    for expert, part in pairs.expert_slices:
        for row in pairs.row_indices[part].tolist():
            found[row].append(expert)
    assert found == expected


def change_config(directory, **fields):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("family", "normalizes", "experts_per_token"),
    [
        ("qwen3_moe", True, 3),
        ("qwen3_moe", False, 3),
        ("qwen3_5_moe", True, 3),
        ("gpt_oss", True, 3),
        ("qwen3_moe", True, 1),
        ("gpt_oss", True, 1),
    ],
)
def test_gradients_equal_those_of_peft(tmp_path, family, normalizes, experts_per_token):
    options = OPTIONS_OF[family] | {"experts_per_token": experts_per_token}
    tiny_model(tmp_path, family, tied=False, **options)
    if family == "qwen3_moe":
        change_config(tmp_path, norm_topk_prob=normalizes)
    decoder = load_on(tmp_path, torch.float32, CPU)
    weights = trained(decoder)
    layout, tokens = weights.layout, random_tokens(decoder, 50)
    peft = peft_model(tmp_path, layout, master_of(weights))
    loss = F.cross_entropy(peft(tokens[None]).logits[0, :-1], tokens[1:])
    loss.backward()
    ours = F.cross_entropy(logits_of(decoder, tokens, weights)[:-1], tokens[1:])
    ours.backward()
    assert ours.item() == pytest.approx(loss.item(), rel=1e-5)
    parameters = dict(peft.named_parameters())
    found = layout.views(weights.collect_grad())
    for entry in layout.entries:
        expected = parameters[f"base_model.model.{entry.peft_name}.default.weight"].grad
        assert expected is not None
        scale = expected.abs().max()
        assert scale > 0
        assert (entry.to_peft(found[entry.name]) - expected).abs().max() < 1e-4 * scale, entry.name


def master_of(weights: LoraWeights) -> torch.Tensor:
    """Return the master vector of float32 compute weights."""
    parts = []
    for leaf, (_, _, is_b) in zip(weights.leaves, weights._leaf_ranges, strict=True):
        parts.append(leaf.detach().flatten() / (weights.layout.scaling if is_b else 1.0))
    return torch.cat(parts)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("family", OPTIONS_OF)
def test_bf16_gradients_are_close_to_float32(tmp_path, family):
    tiny_model(tmp_path, family, dtype="bfloat16", intermediate=128, **OPTIONS_OF[family])
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        decoder = load_on(tmp_path, dtype, CPU)
        weights = trained(decoder, scale=0.01)
        # The router is float32 in both, so the same rounded input gives the same experts.
        x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
        x = x.to(torch.bfloat16).to(dtype).requires_grad_()
        out = mixture(decoder, x, weights)
        (out.float() * torch.linspace(-1, 1, 64)).sum().backward()
        assert x.grad is not None
        found.append((out.float(), x.grad.float(), weights.collect_grad()))
    for exact, rounded in zip(*found, strict=True):
        assert (rounded - exact).norm() < 0.02 * exact.norm()


def mixture(decoder: Decoder, x: torch.Tensor, weights) -> torch.Tensor:
    mlp = decoder.layers[0].mlp
    assert isinstance(mlp, Experts)
    return mixture_of_experts(decoder.backend, x, mlp, weights, 0)


@EVERY
def test_bf16_is_as_close_to_float32_as_transformers_bf16(tmp_path, family):
    """Rounding changes the choice of experts in some rows, so the median of the rows counts."""
    tiny_model(tmp_path, family, layers=4, dtype="bfloat16")
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    decoder = load_on(tmp_path, torch.bfloat16, CPU)
    tokens = random_tokens(decoder, 200)
    exact.load_state_dict({name: weight.float() for name, weight in theirs.state_dict().items()})
    reference = exact(tokens[None]).logits[0]

    @torch.no_grad()
    def error(logits: torch.Tensor) -> torch.Tensor:
        return ((logits.float() - reference).norm(dim=1) / reference.norm(dim=1)).median()

    our_error = error(logits_of(decoder, tokens))
    assert our_error < 1.1 * error(theirs(tokens[None]).logits[0])
    # The random gates of the delta nets amplify rounding, for transformers too.
    assert our_error < (0.06 if family == "qwen3_5_moe" else 0.03)


@pytest.mark.usefixtures("_kernels")
@EVERY
@pytest.mark.parametrize("dtype", slow_after(1, [torch.bfloat16, torch.float32]))
def test_adapters_in_one_batch_equal_each_adapter_alone(tmp_path, dtype, family):
    tiny_model(tmp_path, family, intermediate=128, **OPTIONS_OF[family])
    decoder = load_on(tmp_path, dtype, CPU)
    weights: list[LoraWeights | None] = [None]
    for seed, rank in enumerate((4, 32, 7)):
        weights.append(trained(decoder, seed, rank=rank, train_mlp=rank != 7))
    tokens = random_tokens(decoder, 40)

    def itself(layer, q, k, v, sinks=None):
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    def values(layer, inputs):
        # The recurrence of a sequence of one position, without its factors.
        return inputs.qkv[:, -64:].float().unflatten(1, (4, 16))

    def run(rows, adapters):
        batch = decoder.backend.adapter_batch(adapters)
        positions = torch.arange(40)[rows]
        return decoder.forward(tokens[rows], positions, itself, batch, recurrence=values)

    with torch.inference_mode():
        together = run(
            slice(0, 40), [AdapterRange(10 * i, 10 * i + 10, w) for i, w in enumerate(weights)]
        )
        for i, own in enumerate(weights):
            rows = slice(10 * i, 10 * i + 10)
            alone = run(rows, [AdapterRange(0, 10, own)])
            positions = torch.arange(40)[rows]
            trainer = decoder.forward(tokens[rows], positions, itself, own, recurrence=values)
            if decoder.backend.uses_compiled_kernels:
                assert torch.equal(together[rows], alone)
                assert torch.equal(together[rows], trainer)
            else:
                gap = 1e-5 if dtype == torch.float32 else 0.05
                torch.testing.assert_close(together[rows], alone, atol=gap, rtol=gap)
                torch.testing.assert_close(together[rows], trainer, atol=gap, rtol=gap)


@EVERY
def test_kernels_equal_torch(tmp_path, family):
    """The compiled backend and torch compute the same outputs and gradients in float32."""
    tiny_model(tmp_path, family, intermediate=128, **OPTIONS_OF[family])
    config = ModelConfig.from_directory(tmp_path)
    found = []
    for backend in (None, reference_backend(config, torch.float32, CPU)):
        decoder = load_on(tmp_path, torch.float32, CPU)
        if backend is not None:
            decoder = Decoder(load_weights(tmp_path, config), backend)
        weights = trained(decoder)
        logits = logits_of(decoder, random_tokens(decoder, 60), weights)
        logits.logsumexp(-1).sum().backward()
        found.append((logits, weights.collect_grad()))
    for ours, reference in zip(*found, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-3, rtol=1e-3)


@EVERY
def test_recomputing_layers_gives_the_same_gradient(tmp_path, family):
    tiny_model(tmp_path, family, **OPTIONS_OF[family])
    decoder = load_on(tmp_path, torch.float32, CPU)
    gradients = []
    for group_size in (0, 1, 2):
        weights = trained(decoder)
        tokens = random_tokens(decoder, 30)
        logits = logits_of(decoder, tokens, weights, layers_per_checkpoint=group_size)
        logits.logsumexp(-1).sum().backward()
        gradients.append(weights.collect_grad())
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_files_of_transformers_hold_the_same_weights(tmp_path):
    """transformers 5 can store the weights of all experts of a layer in two tensors."""
    tiny_model(tmp_path / "hub", "qwen3_moe", tied=False, **OPTIONS)
    config = ModelConfig.from_directory(tmp_path / "hub")
    weights = load_weights(tmp_path / "hub", config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype=torch.float32)
    tiny_model(tmp_path / "fused", "qwen3_moe", tied=False, **OPTIONS)
    save_weights(tmp_path / "fused", dict(model.state_dict()))
    fused = load_weights(tmp_path / "fused", config)
    assert weights.keys() == fused.keys()
    assert all(torch.equal(weights[name], fused[name]) for name in weights)
    tensors = dict(model.state_dict())
    name = "model.layers.0.mlp.experts.down_proj"
    save_weights(tmp_path / "fused", tensors | {name: tensors[name][:-1].contiguous()})
    with pytest.raises(DamagedFileError, match=r"missing: model.layers.0.mlp.experts.5.down_proj"):
        load_weights(tmp_path / "fused", config)


def test_the_output_gate_has_the_gradients_of_autograd():
    x, gate = torch.randn(7, 12), torch.randn(7, 1)
    grad, found = torch.randn(7, 12), []
    for function in (apply_output_gate, lambda x, gate: x * gate.sigmoid()):
        leaves = x.clone().requires_grad_(), gate.clone().requires_grad_()
        out = function(*leaves)
        found.append((out, *torch.autograd.grad(out, leaves, grad)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_shared_expert_do_not_depend_on_the_batch(tmp_path, dtype):
    tiny_model(tmp_path, "qwen3_5_moe", intermediate=128)
    decoder = load_on(tmp_path, dtype, CPU)
    mlp = decoder.layers[0].mlp
    assert isinstance(mlp, Experts)
    assert mlp.shared is not None
    if not decoder.backend.uses_compiled_kernels:
        pytest.skip("bits are promised where the CPU's own kernels serve")
    x = torch.randn(40, 64).to(dtype)
    run = _ForwardPass(decoder.backend, {}, lambda *_: x, None, {})
    with torch.inference_mode():
        together = run.mlp(x, mlp, 0)
        for rows in (slice(3, 4), slice(5, 12)):
            assert torch.equal(run.mlp(x[rows], mlp, 0), together[rows])
    assert torch.equal(run.mlp(x.clone().requires_grad_(), mlp, 0), together)
    # The shared expert's share of the output is large enough that the comparison sees it.
    alone = run.mlp(x, replace(mlp, shared=None), 0)
    assert (together - alone).norm() > 0.1 * together.norm()


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({}, ()),
        ({"mlp_only_layers": [0, 2]}, (0, 2)),
        ({"decoder_sparse_step": 2}, (0, 2)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (0, 2, 3)),
    ],
)
def test_config_names_the_dense_layers(tmp_path, fields, dense):
    tiny_model(tmp_path, "qwen3_moe", layers=4)
    change_config(tmp_path, **fields)
    config = ModelConfig.from_directory(tmp_path)
    assert config.dense_layers == dense
    assert (config.num_experts, config.experts_per_token, config.expert_size) == (6, 2, 32)
    model = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(tmp_path).config)
    layers = model.model.layers
    assert [hasattr(layer.mlp, "experts") for layer in layers] == [
        config.has_experts(layer) for layer in range(4)
    ]


def test_config_reads_the_hubs_name_of_the_number_of_experts(tmp_path):
    tiny_model(tmp_path, "qwen3_moe")
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["num_experts"] = fields.pop("num_local_experts", None) or fields["num_experts"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert ModelConfig.from_directory(tmp_path).num_experts == 6


def test_more_chosen_experts_than_experts_are_an_error(tmp_path):
    tiny_model(tmp_path, "qwen3_moe")
    change_config(tmp_path, num_experts_per_tok=9)
    with pytest.raises(UnsupportedError, match="num_experts_per_tok is 9; .* num_experts.* is 6"):
        ModelConfig.from_directory(tmp_path)


def test_experts_of_another_family_are_an_error(tmp_path):
    tiny_model(tmp_path, "qwen3")
    change_config(tmp_path, num_experts=8)
    with pytest.raises(
        UnsupportedError, match="num_experts is 8; .* only in Qwen3 and gpt-oss models"
    ):
        ModelConfig.from_directory(tmp_path)


def test_adapters_have_matrices_for_experts_and_not_for_the_router(tmp_path):
    tiny_model(tmp_path, "qwen3_moe", **OPTIONS)
    config = ModelConfig.from_directory(tmp_path)
    layout = LoraLayout(config, LoraConfig(rank=2, train_attn=False, train_unembed=False))
    found = {entry.name: entry.shape for entry in layout.entries}
    assert found == {
        "model.layers.0.mlp.experts.gate_up_proj.lora_A": (6, 2, 64),
        "model.layers.0.mlp.experts.gate_up_proj.lora_B": (6, 64, 2),
        "model.layers.0.mlp.experts.down_proj.lora_A": (6, 2, 32),
        "model.layers.0.mlp.experts.down_proj.lora_B": (6, 64, 2),
        "model.layers.1.mlp.gate_proj.lora_A": (2, 64),
        "model.layers.1.mlp.up_proj.lora_A": (2, 64),
        "model.layers.1.mlp.gate_proj.lora_B": (96, 2),
        "model.layers.1.mlp.up_proj.lora_B": (96, 2),
        "model.layers.1.mlp.down_proj.lora_A": (2, 96),
        "model.layers.1.mlp.down_proj.lora_B": (64, 2),
    } | {
        name.replace("layers.0.", "layers.2."): shape
        for name, shape in found.items()
        if ".layers.0." in name
    }
    check_files(layout)


def test_adapters_have_matrices_for_the_shared_expert(tmp_path):
    tiny_model(tmp_path, "qwen3_5_moe")
    config = ModelConfig.from_directory(tmp_path)
    assert (config.has_shared_expert, config.intermediate_size) == (True, 96)
    layout = LoraLayout(config, LoraConfig(rank=2, train_attn=False, train_unembed=False))
    found = {entry.name: entry.shape for entry in layout.entries}
    first = {name.split(".", 4)[4]: shape for name, shape in found.items() if "layers.0." in name}
    assert first == {
        "experts.gate_up_proj.lora_A": (6, 2, 64),
        "experts.gate_up_proj.lora_B": (6, 64, 2),
        "experts.down_proj.lora_A": (6, 2, 32),
        "experts.down_proj.lora_B": (6, 64, 2),
        "shared_expert.gate_proj.lora_A": (2, 64),
        "shared_expert.up_proj.lora_A": (2, 64),
        "shared_expert.gate_proj.lora_B": (96, 2),
        "shared_expert.up_proj.lora_B": (96, 2),
        "shared_expert.down_proj.lora_A": (2, 96),
        "shared_expert.down_proj.lora_B": (64, 2),
    }
    assert len(found) == 2 * len(first)
    check_files(layout)
    attention = LoraLayout(config, LoraConfig(rank=2, train_mlp=False, train_unembed=False))
    assert not any(".mlp." in entry.name for entry in attention.entries)


def check_files(layout: LoraLayout) -> None:
    """Check that matrices keep their numbers in the layout of PEFT's files."""
    views = layout.views(torch.arange(float(layout.size)))
    for entry in layout.entries:
        matrix = views[entry.name]
        assert entry.to_peft(matrix).shape == entry.peft_shape
        assert torch.equal(entry.from_peft(entry.to_peft(matrix)), matrix)
