"""The self-test of the CPU kernels passes correct kernels and detects each fault."""

import pytest
import torch

from planish.model.kernels.cpp import checks, ops, self_test
from planish.model.kernels.verdicts import Verdict

FLOAT, HALF = torch.float32, torch.bfloat16
# For each kernel: the family that tests it, and the arguments that it writes.
OUTPUTS = {
    "rms_norm": ("norms", (4, 5, 6)),
    "rms_norm_backward": ("norms", (5,)),
    "rope": ("rope", (5,)),
    "swiglu": ("swiglu", (1,)),
    "swiglu_backward": ("swiglu", (2,)),
    "geglu": ("swiglu", (1,)),
    "geglu_backward": ("swiglu", (2,)),
    "clamped_swiglu": ("swiglu", (1,)),
    "clamped_swiglu_backward": ("swiglu", (2,)),
    "log_sum_exp": ("log_sum_exp", (5, 6)),
    "log_sum_exp_backward": ("log_sum_exp", (10,)),
    "attend": ("attention", (3, 4)),
    "attend_backward": ("attention", (8, 9, 10)),
    "sample_from_weights": ("sampling", (2,)),
    "sample": ("sampling", (6, 7)),
    "top_k_logits": ("sampling", (3, 4, 5)),
    "single_logits": ("sampling", (3,)),
    "head_lora_hidden": ("lora", (4,)),
    "add_head_lora": ("lora", (4,)),
    "matmul": ("matmul", (3,)),
    "quantized_matmul": ("matmul", (4,)),
    "add_lora": ("lora", (4, 7)),
    "lora_backward": ("lora", (5, 6)),
    "lora_gradients": ("lora", (8, 9)),
    "decode": ("decode", (1,)),
    "delta_scan": ("delta_net", (1,)),
    "delta_scan_backward": ("delta_net", (2, 3, 4, 5, 6)),
}
IN_MEMORY = {"store_kv": "attention", "pack_panels": "matmul"}
"""Kernels that write to addresses instead of tensors."""
FLOAT_ONLY = ("sample_from_weights", "sample", "delta_scan", "delta_scan_backward")
HALF_ONLY = ("top_k_logits", "single_logits")
FAULTS = [
    (name, output, dtype)
    for name, (_, outputs) in OUTPUTS.items()
    for output in outputs
    for dtype in (FLOAT, HALF)
    if not (dtype == FLOAT and name in HALF_ONLY) and not (dtype == HALF and name in FLOAT_ONLY)
]


def test_every_kernel_has_a_fault_in_this_file():
    assert ops._SIGNATURES.keys() == OUTPUTS.keys() | IN_MEMORY.keys()
    assert tuple(checks.CHECKS) == self_test.FAMILIES


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("family", [name for name in self_test.FAMILIES if name != "amx"])
def test_correct_cpu_kernels_pass_the_self_test(family):
    assert checks.verdict_of(family) == Verdict(family, True)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(("name", "output", "dtype"), FAULTS)
def test_the_self_test_detects_one_wrong_entry(name, output, dtype, monkeypatch):
    """One entry of one output is wrong by a twentieth of the largest entry."""
    plain, faults = ops.call, []

    def faulty(called, called_dtype, *arguments):
        plain(called, called_dtype, *arguments)
        if called == name and called_dtype == dtype and isinstance(arguments[output], torch.Tensor):
            written = arguments[output]
            place = (*(n // 2 for n in written.shape[:1]), *(0 for _ in written.shape[1:]))
            size = 1 if written.dtype == torch.int64 else 0.05 * written.abs().max()
            written[place] += size
            faults.append(size)

    monkeypatch.setattr(ops, "call", faulty)
    family = OUTPUTS[name][0]
    verdict = checks.verdict_of(family)
    assert faults
    assert not verdict.passed
    assert "differ" in verdict.reason or "depend" in verdict.reason


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("name", [*OUTPUTS, *IN_MEMORY])
def test_the_self_test_detects_a_kernel_that_writes_nothing(name, monkeypatch):
    plain = ops.call

    def lazy(called, dtype, *arguments):
        if called != name:
            plain(called, dtype, *arguments)

    monkeypatch.setattr(ops, "call", lazy)
    family = OUTPUTS[name][0] if name in OUTPUTS else IN_MEMORY[name]
    assert not checks.verdict_of(family).passed


@pytest.mark.usefixtures("cpu_kernels")
def test_the_self_test_detects_a_row_that_depends_on_others(monkeypatch):
    plain = ops.call

    def leaky(called, dtype, *arguments):
        plain(called, dtype, *arguments)
        if called == "matmul" and len(arguments[3]) > 1:
            arguments[3].view(torch.int16)[len(arguments[3]) // 2, 0] ^= 1  # changes the last bit

    monkeypatch.setattr(ops, "call", leaky)
    assert "depend on the other rows" in checks.verdict_of("matmul").reason
