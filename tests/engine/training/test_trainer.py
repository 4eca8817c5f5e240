"""The trainer equals transformers and PEFT, and each fast path equals its slow reference."""

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from backends import CPU, load_on, with_tiling
from peft import LoraConfig as PeftConfig, get_peft_model
from torch.autograd.graph import save_on_cpu
from transformers import AutoModelForCausalLM
from variants import slow_after

from planish.engine.checkpoints.files import peft_config
from planish.engine.training import trainer as trainer_module
from planish.engine.training.adapters import Adapter
from planish.engine.training.trainer import Trainer
from planish.engine.training.trainer_settings import TrainerSettings
from planish.errors import NonFiniteError, UnsupportedError, UserError
from planish.model.decoder.decoder import Decoder
from planish.model.kernels.choose import reference_backend
from planish.model.layers.linear import PackedLinear
from planish.model.layers.lora import LoraLayout
from planish.model.layers.row_tiling import RowTiling
from planish.testing import CONFIGS, tiny_model
from planish.types import AdamParams, Datum, LoraConfig, ModelInput, TensorData

YARN_SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE_SCALING = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.5, 2.0, 3.0, 4.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 0.75,
}
SAMPLED_LOSSES = ["importance_sampling", "ppo", "cispo", "gspo", "dro"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("llama"), tied=False)


@pytest.fixture(scope="module")
def decoder(model_path):
    return load_on(model_path, torch.float32, CPU)


def new_adapter(decoder: Decoder, rank: int = 4, **parts: bool) -> Adapter:
    layout = LoraLayout(decoder.config, LoraConfig(rank=rank, **parts))
    noise = torch.randn(layout.size, generator=torch.Generator().manual_seed(1))
    return Adapter(layout, decoder.backend, layout.init(0) + 0.02 * noise)


def new_trainer(decoder: Decoder, budget: int = 4096) -> Trainer:
    return Trainer(decoder, TrainerSettings(micro_batch_tokens=budget))


def datum_of(tokens: ModelInput, inputs: Mapping[str, Any]) -> Datum:
    return Datum(tokens, inputs)


def run(
    trainer: Trainer,
    adapter: Adapter,
    data: list[Datum],
    loss_fn: str = "cross_entropy",
    config=None,
    **options,
):
    """Return the result of the generator, and how often it yielded."""
    steps = trainer.forward_backward(adapter, data, loss_fn, config, **options)
    yields = 0
    while True:
        try:
            next(steps)
            yields += 1
        except StopIteration as stop:
            return stop.value, yields


def gradient(
    trainer: Trainer,
    adapter: Adapter,
    data: list[Datum],
    loss_fn: str = "cross_entropy",
    config=None,
):
    adapter.grad = None
    output, _ = run(trainer, adapter, data, loss_fn, config)
    assert adapter.grad is not None
    return output, adapter.grad


def group_datums(
    seed: int = 0, prompts: int = 3, samples: int = 3, vocab: int = 272, scale: float = 0.5
) -> list[Datum]:
    """Return datums as in GRPO: samples share a prompt, prompts share a prefix, and advantages have
    both signs. The logprobs are those of a nearly uniform model.
    """
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, vocab, 9)
    data = []
    for _ in range(prompts):
        prompt = np.concatenate([shared, rng.integers(0, vocab, rng.integers(2, 12))])
        for _ in range(samples):
            completion = rng.integers(0, vocab, rng.integers(1, 14))
            tokens = np.concatenate([prompt, completion])
            sampled = np.arange(1, len(tokens)) >= len(prompt)
            data.append(
                datum_of(
                    ModelInput.from_ints(tokens[:-1].tolist()),
                    {
                        "target_tokens": tokens[1:],
                        "logprobs": np.where(sampled, rng.normal(-6, scale, len(tokens) - 1), 0.0),
                        "advantages": np.where(sampled, rng.normal(0, 1, len(tokens) - 1), 0.0),
                    },
                )
            )
    return data


def with_policy_logprobs(
    trainer: Trainer, adapter: Adapter, data: list[Datum], noise: float = 0.3
) -> list[Datum]:
    """Return the datums with `logprobs` close to the model's, so that ratios lie on both sides of
    the clipping bounds.
    """
    output, _ = run(trainer, adapter, as_cross_entropy(data), forward_only=True)
    rng = np.random.default_rng(5)
    changed = []
    for datum, out in zip(data, output.loss_fn_outputs, strict=True):
        near = out["logprobs"].to_numpy() + rng.normal(0, noise, len(out["logprobs"])).astype(
            np.float32
        )
        changed.append(datum_of(datum.model_input, {**datum.loss_fn_inputs, "logprobs": near}))
    return changed


def as_cross_entropy(data: list[Datum], weights: bool = True) -> list[Datum]:
    return [
        datum_of(
            d.model_input,
            {"target_tokens": d.loss_fn_inputs["target_tokens"]}
            | ({"weights": d.loss_fn_inputs["advantages"]} if weights else {}),
        )
        for d in data
    ]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def peft_gradient(
    path, adapter: Adapter, data: list[Datum], loss, dtype=torch.float32, temperature: float = 1.0
):
    """Return loss and flat gradient of transformers and PEFT, computed one datum at a time.

    `loss`: a function of (logprobs, inputs).
    """
    layout = adapter.layout
    base = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    fields = peft_config(layout, "")
    config = PeftConfig(
        r=layout.lora_config.rank,
        lora_alpha=32,
        target_modules=fields["target_modules"],
        target_parameters=fields.get("target_parameters"),
        lora_dropout=0.0,
    )
    peft = get_peft_model(base, config)
    named = dict(peft.named_parameters())
    parameters = [
        named[f"base_model.model.{entry.peft_name}.default.weight"] for entry in layout.entries
    ]
    views = layout.views(adapter.master)
    for entry, parameter in zip(layout.entries, parameters, strict=True):
        parameter.data.copy_(entry.to_peft(views[entry.name]))
    total = 0.0
    for datum in data:
        inputs = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
        logits = peft(torch.tensor([datum.model_input.to_ints()])).logits[0].float() / temperature
        index = inputs["target_tokens"].reshape(logits.shape[0], -1)
        logprobs = (
            torch.log_softmax(logits, -1).gather(1, index).reshape(inputs["target_tokens"].shape)
        )
        value = loss(logprobs, inputs)
        value.backward()
        total += value.item()
    grads = []
    for entry, parameter in zip(layout.entries, parameters, strict=True):
        assert parameter.grad is not None
        grads.append(entry.from_peft(parameter.grad).reshape(-1).float())
    return total, torch.cat(grads)


def plain_loss(name: str):
    """Return the loss as a tensor formula that does not use planish."""

    def cross_entropy(now, x):
        return -(x["weights"] * now).sum()

    def importance_sampling(now, x):
        return -((now - x["logprobs"]).exp() * x["advantages"]).sum()

    def ppo(now, x):
        r, a = (now - x["logprobs"]).exp(), x["advantages"]
        return -torch.minimum(r * a, r.clamp(0.8, 1.2) * a).sum()

    def cispo(now, x):
        return -((now - x["logprobs"]).exp().clamp(0, 4).detach() * now * x["advantages"]).sum()

    def dro(now, x):
        return -(now * x["advantages"] - 0.05 * (now - x["logprobs"]) ** 2).sum()

    def gspo(now, x):
        a = x["advantages"]
        s = (now.detach() - x["logprobs"])[a != 0].mean()
        r = (s + now - now.detach()).exp()
        return -torch.minimum(r * a, r.clamp(0.8, 1.2) * a).sum()

    return {f.__name__: f for f in (cross_entropy, importance_sampling, ppo, cispo, dro, gspo)}[
        name
    ]


@pytest.mark.parametrize(
    ("family", "options", "loss_fn"),
    slow_after(
        14,
        [
            ("llama", {}, "cross_entropy"),
            ("llama", {}, "importance_sampling"),
            ("mistral", {"window": 12}, "importance_sampling"),
            ("ministral3", {"rope_scaling": YARN_SCALING}, "importance_sampling"),
            ("qwen2", {}, "importance_sampling"),
            ("qwen3", {}, "cross_entropy"),
            ("qwen3_5", {}, "cross_entropy"),
            ("qwen3_moe", {}, "importance_sampling"),
            ("qwen3_5_moe", {}, "cross_entropy"),
            ("gpt_oss", {"rope_scaling": YARN_SCALING, "window": 12}, "importance_sampling"),
            ("smollm3", {"layers": 4}, "importance_sampling"),
            ("gemma3", {"layers": 4, "window": 12}, "cross_entropy"),
            ("olmo3", {"rope_scaling": YARN_SCALING, "window": 12}, "importance_sampling"),
            ("phi3", {"rope_scaling": LONGROPE_SCALING, "kv_heads": 4}, "importance_sampling"),
            ("mistral", {}, "cross_entropy"),
            ("ministral3", {"max_context": 64}, "cross_entropy"),
            ("qwen2", {"rope_scaling": YARN_SCALING}, "cross_entropy"),
            ("qwen3_5", {}, "importance_sampling"),
            ("qwen3_moe", {}, "cross_entropy"),
            ("qwen3_5_moe", {"layers": 3, "experts_per_token": 3}, "importance_sampling"),
            ("gpt_oss", {"layers": 3, "window": 12}, "cross_entropy"),
            ("gemma3", {"layers": 4, "window": 12}, "importance_sampling"),
            ("olmo3", {"layers": 4, "window": 12}, "cross_entropy"),
            ("phi3", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "cross_entropy"),
        ],
    ),
)
def test_gradients_equal_transformers_and_peft(tmp_path, family: str, options, loss_fn: str):
    path = tiny_model(tmp_path, family=family, tied=False, **options)
    decoder = load_on(path, torch.float32, CPU)
    trainer, adapter = new_trainer(decoder), new_adapter(decoder)
    data = with_policy_logprobs(trainer, adapter, group_datums())
    data = as_cross_entropy(data) if loss_fn == "cross_entropy" else data
    output, ours = gradient(trainer, adapter, data, loss_fn)
    loss, theirs = peft_gradient(path, adapter, data, plain_loss(loss_fn))
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    assert relative(ours, theirs) < 1e-4


@pytest.mark.parametrize("loss_fn", SAMPLED_LOSSES)
def test_each_loss_equals_transformers_and_peft(model_path, decoder, loss_fn: str):
    trainer, adapter = new_trainer(decoder), new_adapter(decoder, rank=3)
    data = with_policy_logprobs(trainer, adapter, group_datums(2))
    output, ours = gradient(trainer, adapter, data, loss_fn)
    loss, theirs = peft_gradient(model_path, adapter, data, plain_loss(loss_fn))
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4, abs=1e-4)
    assert relative(ours, theirs) < 1e-4
    assert output.metrics["ratio:min"] < 0.8 < 1.2 < output.metrics["ratio:max"]


def test_temperature_scales_the_logits_of_the_loss(model_path, decoder):
    trainer, adapter = new_trainer(decoder), new_adapter(decoder)
    data = as_cross_entropy(group_datums(3))
    output, ours = gradient(trainer, adapter, data, config={"temperature": 0.6})
    loss, theirs = peft_gradient(
        model_path, adapter, data, plain_loss("cross_entropy"), temperature=0.6
    )
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    assert relative(ours, theirs) < 1e-4


@pytest.mark.parametrize(
    "parts", [{"train_unembed": False}, {"train_attn": False, "train_mlp": False}]
)
def test_gradients_of_partially_trained_adapters_equal_peft(model_path, decoder, parts: dict):
    trainer, adapter = new_trainer(decoder), new_adapter(decoder, **parts)
    data = as_cross_entropy(group_datums(4))
    _, ours = gradient(trainer, adapter, data)
    _, theirs = peft_gradient(model_path, adapter, data, plain_loss("cross_entropy"))
    assert relative(ours, theirs) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", sorted(CONFIGS.keys() - {"qwen3_moe", "qwen3_5", "qwen3_5_moe", "gpt_oss"})
)
def test_bfloat16_is_as_close_to_float32_as_transformers_bfloat16(tmp_path, family):
    path = tiny_model(tmp_path, family, layers=3, tied=False, dtype="bfloat16")
    wide, narrow = (load_on(path, dtype, CPU) for dtype in (torch.float32, torch.bfloat16))
    data = as_cross_entropy(group_datums(6))
    exact, exact_grad = gradient(new_trainer(wide), new_adapter(wide), data)
    output, ours = gradient(new_trainer(narrow), new_adapter(narrow), data)
    _, theirs = peft_gradient(
        path, new_adapter(wide), data, plain_loss("cross_entropy"), torch.bfloat16
    )
    assert relative(ours, exact_grad) < 0.03
    assert relative(ours, exact_grad) < 1.2 * relative(theirs, exact_grad)
    for a, b in zip(output.loss_fn_outputs, exact.loss_fn_outputs, strict=True):
        assert float(np.abs(a["logprobs"].to_numpy() - b["logprobs"].to_numpy()).max()) < 0.3


def test_several_targets_per_position_equal_peft(model_path, decoder):
    rng = np.random.default_rng(0)
    data = []
    for _ in range(3):
        length = int(rng.integers(3, 12))
        targets, weights = (
            rng.integers(0, 272, (length, 5)),
            rng.normal(0, 1, (length, 5)).astype(np.float32),
        )
        tokens = ModelInput.from_ints(rng.integers(0, 272, length).tolist())
        data.append(datum_of(tokens, {"target_tokens": targets, "weights": weights}))
    trainer, adapter = new_trainer(decoder), new_adapter(decoder)
    output, ours = gradient(trainer, adapter, data)
    loss, theirs = peft_gradient(model_path, adapter, data, plain_loss("cross_entropy"))
    assert output.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
    assert relative(ours, theirs) < 1e-4
    shapes = [out["logprobs"].shape for out in output.loss_fn_outputs]
    assert shapes == [datum.loss_fn_inputs["target_tokens"].shape for datum in data]


def test_a_sparse_tensor_is_checked_before_it_is_expanded(decoder, monkeypatch):
    monkeypatch.delattr(TensorData, "to_numpy")
    tokens = ModelInput.from_ints([1, 2])
    for wide, tall in ((273, 2), (5, 3)):
        inputs = {"target_tokens": TensorData([], "int64", [tall, wide], [0] * (tall + 1), [])}
        with pytest.raises(ValueError, match=r"target_tokens.*shape"):
            new_trainer(decoder).read_batch([datum_of(tokens, inputs)], "cross_entropy", {})


def test_csr_tensors_equal_dense_tensors(decoder):
    targets, weights = torch.zeros(6, 20, dtype=torch.int64), torch.zeros(6, 20)
    targets[2, 3], weights[2, 3], targets[5, 0], weights[5, 0] = 17, 2.0, 5, -1.0
    inputs = {
        "target_tokens": TensorData.from_torch_sparse(targets),
        "weights": TensorData.from_torch_sparse(weights),
    }
    assert inputs["weights"].sparse_crow_indices is not None
    tokens = ModelInput.from_ints([1, 2, 3, 4, 5, 6])
    trainer, adapter = new_trainer(decoder), new_adapter(decoder)
    sparse, sparse_grad = gradient(trainer, adapter, [Datum(tokens, inputs)])
    dense, dense_grad = gradient(
        trainer, adapter, [datum_of(tokens, {"target_tokens": targets, "weights": weights})]
    )
    assert torch.equal(sparse_grad, dense_grad)
    assert (
        sparse.loss_fn_outputs[0]["logprobs"].tolist()
        == dense.loss_fn_outputs[0]["logprobs"].tolist()
    )
    assert sparse.loss_fn_outputs[0]["logprobs"].shape == [6, 20]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_packed_training_equals_single_datums_and_any_split(model_path, dtype, tolerance: float):
    decoder = load_on(model_path, dtype, CPU)
    adapter = new_adapter(decoder)
    data = with_policy_logprobs(
        new_trainer(decoder), adapter, group_datums(7, prompts=4, samples=4)
    )
    together, whole = gradient(new_trainer(decoder), adapter, data, "importance_sampling")
    assert together.metrics["micro_batches:sum"] == 1
    assert together.metrics["computed_tokens:sum"] < together.metrics["tokens:sum"] / 1.5
    # Sixteen calls with one datum each share no prefix.
    trainer, outputs = new_trainer(decoder), []
    adapter.grad = None
    for datum in data:
        outputs += run(trainer, adapter, [datum], "importance_sampling")[0].loss_fn_outputs
    assert adapter.grad is not None
    assert relative(adapter.grad, whole) < tolerance
    for a, b in zip(outputs, together.loss_fn_outputs, strict=True):
        torch.testing.assert_close(
            a["logprobs"].to_torch(), b["logprobs"].to_torch(), rtol=tolerance, atol=10 * tolerance
        )
    # Small budgets split the call into micro-batches. Every sequence exceeds the smallest budget.
    for budget in (60, 30, 1):
        output, split = gradient(new_trainer(decoder, budget), adapter, data, "importance_sampling")
        assert output.metrics["micro_batches:sum"] > 1
        assert relative(split, whole) < tolerance
        for a, b in zip(output.loss_fn_outputs, together.loss_fn_outputs, strict=True):
            torch.testing.assert_close(
                a["logprobs"].to_torch(),
                b["logprobs"].to_torch(),
                rtol=tolerance,
                atol=10 * tolerance,
            )


def test_outputs_are_in_the_order_of_the_datums(decoder):
    trainer, adapter, data = (
        new_trainer(decoder, 40),
        new_adapter(decoder),
        as_cross_entropy(group_datums(8)),
    )
    order = np.random.default_rng(0).permutation(len(data))
    straight, whole = gradient(trainer, adapter, data)
    shuffled, other = gradient(trainer, adapter, [data[i] for i in order])
    for place, i in enumerate(order):
        assert (
            shuffled.loss_fn_outputs[place]["logprobs"].tolist()
            == straight.loss_fn_outputs[i]["logprobs"].tolist()
        )
    assert relative(other, whole) < 1e-6


def test_a_repeated_call_is_bitwise_reproducible(decoder):
    trainer, adapter, data = new_trainer(decoder, 50), new_adapter(decoder), group_datums(9)
    first, second = (gradient(trainer, adapter, data, "ppo") for _ in range(2))
    assert torch.equal(first[1], second[1])
    assert first[0].metrics == second[0].metrics


def test_gradients_accumulate_over_calls_until_the_step(decoder):
    trainer, adapter, data = (
        new_trainer(decoder),
        new_adapter(decoder),
        as_cross_entropy(group_datums(1)),
    )
    _, one = gradient(trainer, adapter, data)
    one = one.clone()
    run(trainer, adapter, data)
    assert adapter.grad is not None
    assert relative(adapter.grad, 2 * one) < 1e-6
    adapter.optim_step(AdamParams(learning_rate=1e-3))
    assert adapter.grad is None


def test_cross_entropy_is_linear_in_its_weights(decoder):
    """forward_backward_custom relies on this: its weights are -dL/dlogprob."""
    trainer, adapter, data = new_trainer(decoder), new_adapter(decoder), group_datums(1)
    data = with_policy_logprobs(trainer, adapter, data)
    forward, _ = run(trainer, adapter, as_cross_entropy(data), forward_only=True)
    assert adapter.grad is None
    surrogate = []
    for datum, out in zip(data, forward.loss_fn_outputs, strict=True):
        logprobs = out["logprobs"].to_torch().clone().requires_grad_()
        inputs = {name: value.to_torch() for name, value in datum.loss_fn_inputs.items()}
        plain_loss("ppo")(logprobs, inputs).backward()
        assert logprobs.grad is not None
        weights = -logprobs.grad
        surrogate.append(
            datum_of(
                datum.model_input, {"target_tokens": inputs["target_tokens"], "weights": weights}
            )
        )
    _, custom = gradient(trainer, adapter, surrogate)
    _, direct = gradient(trainer, adapter, data, "ppo")
    assert relative(custom, direct) < 1e-5


def test_forward_equals_forward_backward_and_changes_nothing(decoder):
    trainer, adapter, data = new_trainer(decoder), new_adapter(decoder), group_datums(1)
    forward, _ = run(trainer, adapter, data, "ppo", forward_only=True)
    assert adapter.grad is None
    both, _ = run(trainer, adapter, data, "ppo")
    assert forward.metrics == both.metrics
    assert all(key.count(":") == 1 for key in both.metrics)


@pytest.mark.slow
def test_a_long_sequence_runs_alone_with_recomputed_activations(decoder):
    tokens = np.random.default_rng(0).integers(0, 272, 2049)
    long = datum_of(ModelInput.from_ints(tokens[:-1].tolist()), {"target_tokens": tokens[1:]})
    data = [*as_cross_entropy(group_datums(1), weights=False), long]
    adapter = new_adapter(decoder)
    output, split = gradient(new_trainer(decoder, 256), adapter, data)
    _, whole = gradient(new_trainer(decoder, 8192), adapter, data)
    assert output.metrics["micro_batches:sum"] == 2
    assert relative(split, whole) < 1e-5
    config = dataclasses.replace(decoder.config, num_layers=30)
    backend = reference_backend(config, torch.bfloat16, CPU)
    plain = TrainerSettings(micro_batch_tokens=2048).activation_bytes(backend)
    less = TrainerSettings(micro_batch_tokens=256).activation_bytes(backend, num_tokens=2048)
    assert less < plain / 4
    assert less == TrainerSettings(2048, recompute=True).activation_bytes(backend)


def test_layers_share_a_checkpoint_if_this_needs_less_memory(decoder):
    """The inputs of many layers take more memory than the activations of one more layer."""
    backends = {
        num_layers: reference_backend(
            dataclasses.replace(decoder.config, num_layers=num_layers), torch.bfloat16, CPU
        )
        for num_layers in (1, 2, 64, 400)
    }
    settings = TrainerSettings(256)
    sizes = [settings.layers_per_checkpoint(backend, 257) for backend in backends.values()]
    assert sizes[:2] == [1, 1]
    assert 1 < sizes[2] < sizes[3] < 20
    for size, (num_layers, backend) in zip(sizes, backends.items(), strict=True):
        assert settings.layers_per_checkpoint(backend, 256) == 0
        offloading = TrainerSettings(256, offload_above=100)
        assert offloading.layers_per_checkpoint(backend, 101) == 1
        # The activations of each additional layer of a group replace the inputs of some groups.
        layer_bytes = max(settings._bytes_by_layer(backend, 32))
        groups = -(-num_layers // size)
        saved = (num_layers - groups) * 4 * decoder.config.hidden_size - (size - 1) * layer_bytes
        assert saved >= 0
        assert (saved > 0) == (size > 1)


def test_recomputed_activations_give_the_same_gradient(decoder):
    adapter, data = new_adapter(decoder), as_cross_entropy(group_datums(2), weights=False)
    _, kept = gradient(new_trainer(decoder), adapter, data)
    output, again = gradient(Trainer(decoder, TrainerSettings(4096, recompute=True)), adapter, data)
    assert output.metrics["micro_batches:sum"] == 1
    assert relative(again, kept) < 1e-6


def test_offloaded_layer_inputs_give_the_same_gradient(decoder, monkeypatch):
    """Only the inputs of the layers are copied to main memory, with the final norm's input."""
    adapter, data = new_adapter(decoder), as_cross_entropy(group_datums(2), weights=False)
    _, kept = gradient(Trainer(decoder, TrainerSettings(4096, recompute=True)), adapter, data)
    copied: list[torch.Size] = []

    class Counted(save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda x: (copied.append(x.shape), pack(x))[1]

    monkeypatch.setattr(trainer_module, "save_on_cpu", Counted)
    settings = TrainerSettings(4096, offload_above=10)
    output, again = gradient(Trainer(decoder, settings), adapter, data)
    assert output.metrics["micro_batches:sum"] == 1
    assert torch.equal(again, kept)
    hidden = decoder.config.hidden_size
    assert sum(len(shape) == 2 and shape[1] == hidden for shape in copied) <= (
        decoder.config.num_layers + 2
    )
    copied.clear()
    _, stored = gradient(Trainer(decoder, TrainerSettings(4096, offload_above=4096)), adapter, data)
    assert relative(stored, kept) < 1e-6
    assert not copied


def test_offloaded_layer_inputs_take_no_device_memory(decoder):
    backend = decoder.backend
    stored, offloaded = TrainerSettings(8, offload_above=100), TrainerSettings(8, offload_above=0)
    input_bytes = 4 * decoder.config.hidden_size * decoder.config.num_layers
    for tokens, saved in ((100, input_bytes * 100), (101, 0)):
        found = stored.activation_bytes(backend, tokens)
        assert found - offloaded.activation_bytes(backend, tokens) == saved
    # The sequences up to 100 tokens fit, so the search begins behind them.
    room = stored.reserved_bytes(backend, 150)
    assert stored.longest_sequence(backend, room) == 150
    assert offloaded.longest_sequence(backend, room) == 150


def test_activation_bytes_match_the_memory_autograd_saves(model_path):
    decoder = load_on(model_path, torch.bfloat16, CPU)
    rng = np.random.default_rng(0)
    data = [
        datum_of(
            ModelInput.from_ints(rng.integers(0, 272, 500).tolist()),
            {"target_tokens": rng.integers(0, 272, 500)},
        )
    ]
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    adapter = new_adapter(decoder)
    frozen = {
        t.untyped_storage().data_ptr() for t in (*decoder_tensors(decoder), *adapter.weights.leaves)
    }
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(new_trainer(decoder), adapter, data)
    measured = sum(size for pointer, size in kept.items() if pointer not in frozen)
    estimate = TrainerSettings(micro_batch_tokens=500).activation_bytes(decoder.backend, rank=4)
    assert 0.6 * estimate < measured < 1.15 * estimate


def decoder_tensors(decoder: Decoder) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def walk(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.extend([value] if value.layout == torch.strided else [])
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif isinstance(value, PackedLinear):
            walk([value.packed, value._packed_backward, value._weights, value.bias])
        elif hasattr(value, "__dict__"):
            walk(list(vars(value).values()))

    walk([value for name, value in vars(decoder).items() if name != "backend"])
    return found


def test_the_trainer_yields_between_micro_batches(decoder):
    trainer, adapter, data = (
        new_trainer(decoder, 40),
        new_adapter(decoder),
        as_cross_entropy(group_datums(8)),
    )
    output, yields = run(trainer, adapter, data)
    assert yields == output.metrics["micro_batches:sum"] - 1 > 0


def poisoned(data: list[Datum], index: int) -> list[Datum]:
    """Return finite data whose loss is not finite, because exp(l - q) overflows."""
    changed = list(data)
    inputs: dict[str, Any] = dict(data[index].loss_fn_inputs)
    inputs["logprobs"] = np.full(len(inputs["logprobs"]), -2000.0, np.float32)
    changed[index] = datum_of(data[index].model_input, inputs)
    return changed


def test_a_non_finite_loss_fails_the_call_and_the_next_step(decoder):
    trainer, adapter, data = new_trainer(decoder, 40), new_adapter(decoder), group_datums(8)
    run(trainer, adapter, data, "importance_sampling")
    adapter.optim_step(AdamParams())
    run(trainer, adapter, data, "importance_sampling")
    assert adapter.grad is not None
    before, pending = copy.deepcopy(adapter.state()), adapter.grad.clone()
    with pytest.raises(NonFiniteError, match=r"loss of data\[4\]"):
        run(trainer, adapter, poisoned(data, 4), "importance_sampling", forward_only=True)
    with pytest.raises(NonFiniteError, match=r"loss of data\[4\]"):
        run(trainer, adapter, poisoned(data, 4), "importance_sampling")
    assert torch.equal(adapter.grad, pending)
    assert all(leaf.grad is None for leaf in adapter.weights.leaves)
    with pytest.raises(NonFiniteError, match=r"nothing was applied.*data\[4\]"):
        adapter.optim_step(AdamParams())
    for name, tensor in adapter.state().items():
        assert torch.equal(tensor, before[name])
    run(trainer, adapter, data, "importance_sampling")
    assert adapter.optim_step(AdamParams()).metrics["adam_step"] == 2


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_a_clipped_ratio_may_overflow_float32(loss, decoder):
    trainer, adapter, data = new_trainer(decoder, 40), new_adapter(decoder), group_datums(8)
    far = poisoned(data, 4)
    inputs: dict[str, Any] = dict(far[4].loss_fn_inputs)
    inputs["advantages"] = np.abs(np.array(inputs["advantages"].data, np.float32))
    far[4] = datum_of(far[4].model_input, inputs)
    output, _ = run(trainer, adapter, far, loss)
    assert math.isfinite(output.metrics["loss:sum"])
    assert math.isfinite(output.metrics["ratio:max"])
    assert adapter.grad is not None
    assert adapter.grad.isfinite().all()


def test_non_finite_weights_raise(decoder):
    adapter = new_adapter(decoder)
    broken = adapter.master.clone()
    broken[0] = float("inf")
    adapter = Adapter(adapter.layout, decoder.backend, broken)
    with pytest.raises(NonFiniteError, match="not finite"):
        run(new_trainer(decoder), adapter, as_cross_entropy(group_datums(8)))


def test_an_abandoned_call_leaves_no_gradient(decoder):
    trainer, adapter = new_trainer(decoder, 40), new_adapter(decoder)
    steps = trainer.forward_backward(adapter, as_cross_entropy(group_datums(8)), "cross_entropy")
    next(steps)
    steps.close()
    assert adapter.grad is None
    assert all(leaf.grad is None for leaf in adapter.weights.leaves)
    with pytest.raises(UserError, match="nothing was applied"):
        adapter.optim_step(AdamParams())


def one(tokens: list[int], **inputs) -> list[Datum]:
    return [*as_cross_entropy(group_datums(0))[:1], datum_of(ModelInput.from_ints(tokens), inputs)]


BAD = [
    ([], "cross_entropy", "data is empty"),
    (one([], target_tokens=[]), "cross_entropy", r"data\[1\].model_input is empty"),
    (one([1, 2]), "cross_entropy", "no 'target_tokens'"),
    (one([1, 2], target_tokens=[1, 2]), "ppo", r"no 'logprobs'"),
    (one([1, 2], target_tokens=[1]), "cross_entropy", r"shape \[1\], but model_input has 2 tokens"),
    (one([1, 2], target_tokens=[1, 2], weights=[1.0]), "cross_entropy", r"'weights'.*shape \[1\]"),
    (one([1, 272], target_tokens=[1, 2]), "cross_entropy", "token 272, but the vocabulary has 272"),
    (one([1, 2], target_tokens=[1, -100]), "cross_entropy", "token -100"),
    (one([1, 2], target_tokens=np.array([1.0, 2.0])), "cross_entropy", "int64"),
    (
        one([1, 2], target_tokens=[1, 2], weights=[1.0, float("nan")]),
        "cross_entropy",
        r"not finite at position \[1\]",
    ),
    (one([1, 2], target_tokens=[1, 2], weight=np.ones(2)), "cross_entropy", "'weight'.*unknown"),
    (
        one([1, 2], target_tokens=[1, 2], advantages=[1.0, 1.0]),
        "cross_entropy",
        "'advantages'.*unknown",
    ),
    (
        one([1] * 2049, target_tokens=[1] * 2049),
        "cross_entropy",
        "2049 tokens, and the model's context is 2048",
    ),
]


@pytest.mark.parametrize(("data", "loss_fn", "message"), BAD, ids=[message for *_, message in BAD])
def test_invalid_input_is_rejected_before_any_work(decoder, data, loss_fn: str, message: str):
    trainer = new_trainer(decoder)
    loss_data = data
    if loss_fn != "cross_entropy":
        loss_data = [*group_datums(0)[:1], *data[1:]]
    with pytest.raises(ValueError, match=message):
        trainer.read_batch(loss_data, loss_fn)


def test_a_sequence_that_does_not_fit_into_memory_is_rejected_before_any_work(decoder):
    settings = TrainerSettings(8, max_sequence_tokens=12)
    trainer = Trainer(decoder, settings)
    fits, too_long = (
        datum_of(ModelInput.from_ints([1] * n), {"target_tokens": np.ones(n, np.int64)})
        for n in (12, 13)
    )
    trainer.read_batch([fits], "cross_entropy")
    message = r"data\[1\]\.model_input has 13 tokens, .* memory is enough to train on 12; shorten"
    with pytest.raises(UserError, match=message):
        trainer.read_batch([fits, too_long], "cross_entropy")
    # A forward pass alone stores no activations.
    trainer.read_batch([too_long], "cross_entropy", forward_only=True)
    backend = decoder.backend
    longest = settings.longest_sequence(backend, settings.reserved_bytes(backend, 12))
    assert longest == 12
    assert settings.longest_sequence(backend, 1e15) == decoder.config.max_context


def test_input_of_other_servers_is_accepted_or_rejected_with_a_remedy(decoder):
    trainer, data = new_trainer(decoder), group_datums(0)[:1]
    inputs = data[0].loss_fn_inputs
    clipped = datum_of(data[0].model_input, {**inputs, "clip_low_threshold": inputs["logprobs"]})
    with pytest.raises(UnsupportedError, match="loss_fn_config"):
        trainer.read_batch([clipped], "ppo")
    masked = datum_of(data[0].model_input, {**inputs, "mask": inputs["advantages"]})
    trainer.read_batch([masked], "ppo")
    unlike = datum_of(
        data[0].model_input, {**inputs, "mask": np.zeros(len(inputs["logprobs"]), np.float32)}
    )
    with pytest.raises(ValueError, match="mask.* is 0 where advantages is not"):
        trainer.read_batch([unlike], "ppo")
    several = datum_of(
        data[0].model_input,
        {**inputs, "target_tokens": np.zeros((len(inputs["logprobs"]), 2), np.int64)},
    )
    with pytest.raises(ValueError, match="one target per position"):
        trainer.read_batch([several], "ppo")
    with pytest.raises(UnsupportedError, match="stable_reinforce"):
        trainer.read_batch(data, "stable_reinforce")
    with pytest.raises(ValueError, match="clip_ratio.*unknown"):
        trainer.read_batch(data, "ppo", {"clip_ratio": 0.2})
    with pytest.raises(ValueError, match="micro_batch_tokens=0"):
        TrainerSettings(micro_batch_tokens=0)


def test_padding_a_short_forest_changes_nothing(decoder):
    """`micro_batch_tokens` splits the call, so each prefix tree is short and padded."""
    data = [
        datum_of(ModelInput.from_ints(t), {"target_tokens": [n + 1 for n in t]})
        for t in ([1, 2, 3], [1, 2, 9], [7])
    ]
    outcomes = []
    for tiling in (None, RowTiling(multiple=4, min_rows=8)):
        adapter = new_adapter(decoder)
        result, _ = run(Trainer(with_tiling(decoder, tiling), TrainerSettings(4)), adapter, data)
        outcomes.append((result, adapter.grad))
    (plain, plain_grad), (padded, padded_grad) = outcomes
    for a, b in zip(plain.loss_fn_outputs, padded.loss_fn_outputs, strict=True):
        torch.testing.assert_close(
            a["logprobs"].to_torch(), b["logprobs"].to_torch(), rtol=0, atol=1e-5
        )
    torch.testing.assert_close(padded_grad, plain_grad, rtol=1e-4, atol=1e-6)
    assert padded.metrics["computed_tokens:sum"] == plain.metrics["computed_tokens:sum"]


@pytest.mark.parametrize("loss_fn", ["cross_entropy", *SAMPLED_LOSSES])
def test_skipping_unweighted_positions_changes_neither_loss_nor_gradient(decoder, loss_fn: str):
    """Positions without weight get the logprob 0; all others keep theirs."""
    trainer, adapter = new_trainer(decoder), new_adapter(decoder)
    sampled = group_datums(3)
    advantages = [datum.loss_fn_inputs["advantages"].to_numpy() for datum in sampled]
    data = as_cross_entropy(sampled) if loss_fn == "cross_entropy" else sampled
    if loss_fn == "dro":
        data = [
            datum_of(d.model_input, {**d.loss_fn_inputs, "mask": (given != 0).astype(np.float32)})
            for d, given in zip(data, advantages, strict=True)
        ]
    whole, grad = gradient(trainer, adapter, data, loss_fn)
    fewer, same_grad = gradient(trainer, adapter, data, loss_fn, {"skip_unweighted": 1})
    assert relative(same_grad, grad) < 1e-6
    assert fewer.metrics == pytest.approx(whole.metrics, rel=1e-6)
    for a, b, given in zip(fewer.loss_fn_outputs, whole.loss_fn_outputs, advantages, strict=True):
        expected = np.where(given != 0, b["logprobs"].to_numpy(), 0.0)
        np.testing.assert_allclose(a["logprobs"].to_numpy(), expected, rtol=0, atol=1e-5)
    assert any((given == 0).any() for given in advantages)


def test_skipping_unweighted_positions_computes_fewer_logits(decoder, monkeypatch):
    rows = []
    base_logits = decoder.backend.base_logits

    def counted(hidden, head, **options):
        rows.append(len(hidden))
        return base_logits(hidden, head, **options)

    monkeypatch.setattr(decoder.backend, "base_logits", counted)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    weights = np.array([0, 0, 0, 0, 0, 1, 1, 1], np.float32)
    data = one(tokens, target_tokens=tokens, weights=weights)[1:]
    run(new_trainer(decoder), new_adapter(decoder), data, config={"skip_unweighted": 1})
    assert rows == [3]


def test_a_call_without_any_weight_has_no_loss_and_no_gradient(decoder):
    data = one([1, 2, 3], target_tokens=[2, 3, 4], weights=np.zeros(3, np.float32))[1:]
    output, grad = gradient(
        new_trainer(decoder), new_adapter(decoder), data, config={"skip_unweighted": 1}
    )
    assert output.metrics["loss:sum"] == 0
    assert not grad.any()
    assert output.loss_fn_outputs[0]["logprobs"].to_numpy().tolist() == [0, 0, 0]


def test_unweighted_positions_are_scored_unless_the_option_says_otherwise(decoder):
    data = one([1, 2, 3], target_tokens=[2, 3, 4], weights=np.zeros(3, np.float32))[1:]
    output, _ = run(new_trainer(decoder), new_adapter(decoder), data)
    assert (output.loss_fn_outputs[0]["logprobs"].to_numpy() < 0).all()
    with pytest.raises(UserError, match="skip_unweighted.*=2: give 0"):
        new_trainer(decoder).read_batch(data, "cross_entropy", {"skip_unweighted": 2})
