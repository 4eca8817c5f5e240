"""The self-test of the CPU kernels passes correct kernels and detects each fault."""

import pytest
import torch

from planish.engine.kernel_check import cpu as check
from planish.model.kernels.cpp import ops, self_test
from planish.model.kernels.self_test.process import WrongResultError

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


def error_of(family: str) -> str:
    """Return what the check of a family finds; empty if the kernels pass."""
    try:
        check.check_family(family)
    except WrongResultError as error:
        return str(error)
    return ""


def test_every_kernel_has_a_fault_in_this_file():
    assert ops._SIGNATURES.keys() == OUTPUTS.keys() | IN_MEMORY.keys()
    assert ("amx", *check._MODELS) == self_test.FAMILIES


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("family", [name for name in self_test.FAMILIES if name != "amx"])
def test_correct_cpu_kernels_pass_the_check(family):
    assert error_of(family) == ""


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(("name", "output", "dtype"), FAULTS)
def test_the_check_detects_one_wrong_entry(name, output, dtype, monkeypatch):
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
    error = error_of(OUTPUTS[name][0])
    assert faults
    assert "differ" in error or "depend" in error or "wrong" in error


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("name", [*OUTPUTS, *IN_MEMORY])
def test_the_check_detects_a_kernel_that_writes_nothing(name, monkeypatch):
    plain = ops.call

    def lazy(called, dtype, *arguments):
        if called != name:
            plain(called, dtype, *arguments)

    monkeypatch.setattr(ops, "call", lazy)
    assert error_of(OUTPUTS[name][0] if name in OUTPUTS else IN_MEMORY[name])


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(
    ("name", "output"), [("matmul", 3), ("rms_norm", 5), ("swiglu", 1), ("log_sum_exp", 6)]
)
def test_the_check_detects_a_row_that_depends_on_others(name, output, monkeypatch):
    plain = ops.call

    def leaky(called, dtype, *arguments):
        plain(called, dtype, *arguments)
        if called == name and len(arguments[output]) > 1:
            row = arguments[output][len(arguments[output]) // 2].view(-1)
            row.view(torch.int16 if row.itemsize == 2 else torch.int32)[0] ^= 1  # the last bit

    monkeypatch.setattr(ops, "call", leaky)
    assert "depend on the other rows" in error_of(OUTPUTS[name][0])
