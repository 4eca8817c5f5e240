"""The adapter: steps equal torch's AdamW, are atomic, and never change published versions."""

from weakref import ref

import numpy as np
import pytest
import torch

from planish.engine.training.adapters import Adapter
from planish.errors import CheckpointError, NonFiniteError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.rope_config import RopeConfig
from planish.model.kernels.choose import choose_backend
from planish.model.kernels.cpp.matmul import CppPackedAdapter, supports_bf16_matmul
from planish.model.kernels.interface.backend import Backend
from planish.model.layers.lora import LoraLayout
from planish.types import AdamParams, LoraConfig

CPU = torch.device("cpu")
TINY = ModelConfig(
    "llama", 300, 16, 24, 2, 2, 1, 8, 1e-5, RopeConfig(1e4), 128, True, False, False, ()
)


def backend(config: ModelConfig) -> Backend:
    return choose_backend(config, torch.bfloat16, CPU, deterministic=False)


def new_adapter(rank: int = 4, seed: int = 0) -> Adapter:
    return Adapter(LoraLayout(TINY, LoraConfig(rank=rank, seed=seed)), backend(TINY))


def gradient(adapter: Adapter, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(seed)) * scale


def copy_of(adapter: Adapter) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in adapter.state().items()}


def assert_same(state: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in before)


def test_steps_equal_torch_adamw_with_decay_and_clipping():
    adapter = new_adapter()
    reference = adapter.master.clone().requires_grad_()
    steps = [(1e-2, 0.0, 0.0), (3e-3, 0.1, 0.0), (1e-2, 0.1, 0.5), (1e-2, 0.0, 1e6)]
    optimizer = torch.optim.AdamW([reference], betas=(0.9, 0.95), eps=1e-12)
    for step, (rate, decay, clip) in enumerate(steps):
        optimizer.param_groups[0].update(lr=rate, weight_decay=decay)
        reference.grad = gradient(adapter, step) + gradient(adapter, step + 50)
        norm = torch.nn.utils.clip_grad_norm_([reference], clip or float("inf"))
        optimizer.step()
        adapter.add_grad(gradient(adapter, step))
        adapter.add_grad(gradient(adapter, step + 50))
        response = adapter.optim_step(
            AdamParams(learning_rate=rate, weight_decay=decay, grad_clip_norm=clip)
        )
        assert response.metrics == {
            "grad_norm": pytest.approx(float(norm), rel=1e-5),
            "adam_step": step + 1,
        }
        torch.testing.assert_close(adapter.master, reference.detach(), rtol=1e-6, atol=1e-8)
    assert adapter.version == len(steps)


def test_the_norm_and_clipping_are_exact_at_millions_of_parameters():
    """A float32 sum of 5 million squares is wrong by more than 1e-5 on a CPU."""
    wide = ModelConfig(
        "llama", 300, 512, 1024, 8, 8, 4, 64, 1e-5, RopeConfig(1e4), 128, True, False, False, ()
    )
    layout = LoraLayout(wide, LoraConfig(rank=96, seed=0))
    assert layout.size > 5_000_000
    adapter = Adapter(layout, backend(wide))
    grad = gradient(adapter, 1, scale=1e-3) + 2e-3
    expected = float(np.sqrt(np.sum(grad.numpy().astype(np.float64) ** 2)))
    adapter.add_grad(grad)
    found = adapter.optim_step(AdamParams(beta1=0.5, grad_clip_norm=1.0)).metrics["grad_norm"]
    assert found == pytest.approx(expected, rel=1e-9)
    # The first moment of the first step is (1 - beta1) times the clipped gradient.
    clipped = adapter.exp_avg.numpy().astype(np.float64) / 0.5
    assert np.sqrt(np.sum(clipped**2)) == pytest.approx(1.0, rel=1e-6)


def test_an_optimizer_step_changes_neither_gradient_tensor_nor_snapshots():
    adapter = new_adapter()
    published = adapter.snapshot()
    before = [leaf.detach().clone() for leaf in published.leaves]
    given = gradient(adapter, 0)
    kept = given.clone()
    adapter.add_grad(given)
    adapter.optim_step(AdamParams(learning_rate=0.1, grad_clip_norm=0.01))
    assert torch.equal(given, kept)
    assert all(torch.equal(leaf, old) for leaf, old in zip(published.leaves, before, strict=True))
    assert any(
        not torch.equal(leaf, old)
        for leaf, old in zip(adapter.snapshot().leaves, before, strict=True)
    )


def test_a_snapshot_copies_no_weights():
    large = ModelConfig(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, RopeConfig(1e4), 8192, True, False, False, ()
    )
    adapter = Adapter(LoraLayout(large, LoraConfig(rank=32, seed=0)), backend(large))
    assert adapter.snapshot() is adapter.weights


@pytest.mark.skipif(
    not supports_bf16_matmul(),
    reason="this CPU has no kernels of its own, so nothing is packed for them",
)
def test_a_snapshot_drops_backward_panels_after_the_step():
    adapter = new_adapter()
    packed = adapter.snapshot().packed
    assert isinstance(packed, CppPackedAdapter)
    forth, back = (ref(panels) for panels in (packed.forward, packed.backward))
    adapter.add_grad(gradient(adapter, 1))
    adapter.optim_step(AdamParams())
    assert back() is None
    assert forth() is packed.forward


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_non_finite_gradient_changes_nothing(poison: float):
    adapter = new_adapter()
    adapter.add_grad(gradient(adapter, 1))
    adapter.optim_step(AdamParams())
    before, weights = copy_of(adapter), adapter.weights
    bad = gradient(adapter, 2)
    bad[7] = poison
    adapter.add_grad(bad)
    with pytest.raises(NonFiniteError, match="gradient is not finite"):
        adapter.optim_step(AdamParams())
    assert_same(adapter.state(), before)
    assert adapter.weights is weights
    assert adapter.version == 1
    with pytest.raises(ValueError, match="no gradient to apply"):
        adapter.optim_step(AdamParams())


def test_a_step_that_overflows_float32_changes_nothing():
    adapter = new_adapter()
    before = copy_of(adapter)
    adapter.add_grad(gradient(adapter, 1, scale=1e30))  # finite, but its square overflows float32
    with pytest.raises(NonFiniteError, match="would not be finite"):
        adapter.optim_step(AdamParams())
    assert_same(adapter.state(), before)


def test_a_failed_forward_backward_fails_exactly_one_step():
    adapter = new_adapter()
    adapter.add_grad(gradient(adapter, 1))
    adapter.reject_next_step(NonFiniteError("the loss of data[3] is not finite"))
    adapter.reject_next_step(NonFiniteError("the loss of data[4] is not finite"))
    with pytest.raises(NonFiniteError, match=r"nothing was applied.*data\[3\]"):
        adapter.optim_step(AdamParams())
    assert adapter.step == 0
    adapter.add_grad(gradient(adapter, 2))
    assert adapter.optim_step(AdamParams()).metrics["adam_step"] == 1


def test_a_step_needs_a_gradient():
    with pytest.raises(ValueError, match="call forward_backward first"):
        new_adapter().optim_step(AdamParams())


def test_a_restored_adapter_continues_bitwise_identically():
    adapter, restored = new_adapter(seed=1), new_adapter(seed=2)
    for seed in range(3):
        adapter.add_grad(gradient(adapter, seed))
        adapter.optim_step(AdamParams())
    restored.load_state(adapter.state())
    for each in (adapter, restored):
        each.add_grad(gradient(adapter, 9))
        each.optim_step(AdamParams(weight_decay=0.1))
    assert_same(restored.state(), adapter.state())
    assert restored.version == 2


def test_loading_without_the_optimizer_resets_moments_and_step():
    adapter, restored = new_adapter(seed=1), new_adapter(seed=2)
    adapter.add_grad(gradient(adapter, 0))
    adapter.optim_step(AdamParams())
    restored.add_grad(gradient(adapter, 5))
    restored.reject_next_step(NonFiniteError("the loss of data[3] is not finite"))
    restored.load_state({"master": adapter.master}, with_optimizer=False)
    assert torch.equal(restored.master, adapter.master)
    assert restored.step == 0
    assert not restored.exp_avg.any()
    assert restored.grad is None
    restored.add_grad(gradient(adapter, 6))
    assert restored.optim_step(AdamParams()).metrics["adam_step"] == 1


def test_a_state_with_wrong_shape_or_values_is_rejected():
    adapter = new_adapter(rank=4)
    before = copy_of(adapter)
    broken, infinite = copy_of(adapter), copy_of(adapter)
    broken["exp_avg"][3], infinite["master"][5] = float("nan"), -float("inf")
    for state, message in [
        (new_adapter(rank=5).state(), "rank"),
        ({"master": adapter.master}, "exp_avg"),
        (broken, "NaN"),
        (infinite, "'master' contains NaN or infinity"),
        ({k: v for k, v in before.items() if k != "step"}, "step"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            adapter.load_state(state)
        assert_same(adapter.state(), before)
        assert adapter.version == 0
