"""The choice of a backend's parts: kernels for the families that work, torch for all others."""

from types import MethodType
from typing import Any

import pytest
import torch
from backends import CONFIG, CPU, torch_backend

from planish.model.kernels.choose import fastest_backend
from planish.model.kernels.cpp import ops

OPERATIONS = {
    "norms": ("rms_norm_backward",),
    "rope": ("rope",),
    "swiglu": ("swiglu", "swiglu_backward", "geglu", "geglu_backward", "clamped_swiglu_backward"),
    "log_sum_exp": ("log_sum_exp", "log_sum_exp_backward", "log_sum_exp_backward_"),
    "sampling": ("sample", "sample_from_weights"),
    "attention": ("tree_attention", "prefill_attention", "decode_attention"),
}


def implementation(operation: Any) -> str:
    """Return the package of an operation's implementation: "cpp" or "reference"."""
    owner = type(operation.__self__) if isinstance(operation, MethodType) else operation
    return owner.__module__.split(".")[3]


@pytest.fixture
def library() -> ops.Library:
    found = ops.load_library()
    if found is None or found.torch_families:
        pytest.skip("this machine has no C++ kernels, or some of them failed their self-test")
    return found


@pytest.mark.parametrize("failed", [None, *OPERATIONS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_computes_the_families_that_failed_and_no_others(library, monkeypatch, failed, dtype):
    monkeypatch.setattr(library, "torch_families", frozenset({failed}))
    backend = fastest_backend(CONFIG, dtype, CPU)
    found = {
        family: {implementation(getattr(backend, name)) for name in names}
        for family, names in OPERATIONS.items()
    }
    assert found == {family: {"reference" if family == failed else "cpp"} for family in OPERATIONS}
    assert backend.torch_families == ({failed} if failed else set())
    assert backend.attention_is_batch_invariant == (failed != "attention")


@pytest.mark.parametrize("failed", ["matmul", "lora", "decode", "attention"])
def test_a_decoding_step_is_one_call_only_with_all_of_its_families(library, monkeypatch, failed):
    assert fastest_backend(CONFIG, torch.float32, CPU).parts.decode_passes is not None
    monkeypatch.setattr(library, "torch_families", frozenset({failed}))
    backend = fastest_backend(CONFIG, torch.float32, CPU)
    assert backend.parts.decode_passes is None
    assert backend.uses_compiled_kernels == (failed == "decode")
    assert backend.packs_layer_adapters == (failed not in ("matmul", "lora"))
    assert backend.can_pack(64, 64) == (failed != "matmul")


def test_the_reference_uses_no_compiled_kernels():
    backend = torch_backend(torch.bfloat16)
    names = [name for names in OPERATIONS.values() for name in names]
    assert {implementation(getattr(backend, name)) for name in names} == {"reference"}
    assert not backend.families
    assert not backend.uses_compiled_kernels
