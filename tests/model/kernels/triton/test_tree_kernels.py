"""The prefix-tree attention kernels: log-sum-exp, and compilation for GPUs."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hopper import Case, resources

from planish.model.kernels.triton.tree_attention import TritonTreeAttention
from planish.model.prefix_tree import attention_mask, pack

triton_forest = pytest.importorskip("planish.model.kernels.triton.tree_kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_sum_exp_covers_exactly_the_visible_scores(device: torch.device, dtype: torch.dtype):
    (whole,) = pack(
        [np.arange(50), np.array([*range(20), *range(70, 90)]), np.arange(100, 107)], 1000
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(len(whole), heads, 16, generator=generator).to(device, dtype)
        for heads in (6, 2, 2)
    )
    out, lse = TritonTreeAttention(whole, device).attend(q, k, v)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    scores = torch.einsum("the,she->ths", q.float(), k.float().repeat_interleave(3, 1)) / 4
    hidden = ~torch.from_numpy(attention_mask(whole)).to(device)
    expected = scores.masked_fill(hidden[:, None], float("-inf")).logsumexp(-1)
    torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class Heads:
    """The attention heads of one model."""

    group: int
    kv_heads: int
    size: int
    dtype: torch.dtype = torch.bfloat16


MODELS = {
    "Qwen3-8B": Heads(4, 8, 128),
    "Qwen3-0.6B": Heads(2, 8, 128),
    "Llama-3.2-3B": Heads(3, 8, 128),
    "Qwen3-14B": Heads(5, 8, 128),
    "Qwen2.5-7B": Heads(7, 4, 128),
    "heads of no power of two": Heads(5, 8, 80),
    "SmolLM2-135M": Heads(3, 3, 64),
    "SmolLM2-135M in float32": Heads(3, 3, 64, torch.float32),
}
# Registers per multiprocessor, shared memory per program.
REGISTERS, SHARED = 65_536, 227 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128])
def test_kernels_with_windows_and_sinks_fit_a_multiprocessor(size: int):
    """64 is the head size of gpt-oss, and 128 that of OLMo 3."""
    for found in resources(
        "planish.model.kernels.triton.tree_kernels",
        cases_of(Heads(8 if size == 64 else 1, 8, size), windowed=True)[:3],
    ):
        assert found.spilled <= 32, found
        assert found.shared <= SHARED, found


@pytest.mark.slow
@pytest.mark.parametrize("heads", MODELS.values(), ids=MODELS)
def test_every_kernel_fits_a_multiprocessor(heads: Heads):
    cases = cases_of(heads)
    for case, found in zip(
        cases, resources("planish.model.kernels.triton.tree_kernels", cases), strict=True
    ):
        assert found.spilled == 0, case
        assert found.shared <= SHARED, case
        assert found.registers * 32 * case.warps <= REGISTERS, case


TARGETS = {
    "A100": (("cuda", 80, 32), 166_912),
    "RTX 4090": (("cuda", 89, 32), 101_376),
    "RTX 5090": (("cuda", 120, 32), 101_376),
    "B200": (("cuda", 100, 32), 232_448),
    "MI300": (("hip", "gfx942", 64), 65_536),
}
"""Compilation targets, and the bytes of shared memory that a program may use on each."""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [86, 89, 120])
def test_a_multiprocessor_of_99_kib_has_8_warps_without_spills(architecture: int):
    cases = cases_of(MODELS["Qwen3-8B"], 101_376)[:3]
    target = ("cuda", architecture, 32)
    for case, found in zip(
        cases,
        resources("planish.model.kernels.triton.tree_kernels", cases, target),
        strict=True,
    ):
        assert case.warps == 8
        assert found.spilled == 0, found
        assert found.shared <= 101_376, found


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_for_other_gpus(target: str, size: int):
    kind, shared = TARGETS[target]
    cases = cases_of(Heads(4, 8, size), shared)
    for case, found in zip(
        cases, resources("planish.model.kernels.triton.tree_kernels", cases, kind), strict=True
    ):
        assert found.shared <= shared, case


def cases_of(heads: Heads, shared: int = SHARED, *, windowed: bool = False) -> list[Case]:
    """Return the kernel specializations for these heads. `windowed`: with a window and sinks."""
    tiles = triton_forest.tiles_for(heads.dtype, heads.size, heads.group, shared)
    cuts = {
        "forward": tiles.forward,
        "backward_queries": tiles.backward_queries,
        "backward_keys": tiles.backward_keys,
    }
    cases = [_case(kernel, cut, heads, windowed=windowed) for kernel, cut in cuts.items()]
    return [*cases, _sum_case(tiles.backward_keys, heads)]


def _case(kernel: str, cut, heads: Heads, *, windowed: bool = False) -> Case:
    constants = {
        "HEADS": heads.kv_heads,
        "G": heads.group,
        "E": heads.size,
        "EP": triton_forest._width(heads.size),
        "M": cut.queries,
        "N": cut.keys,
        "WINDOWED": windowed,
    }
    arguments = getattr(triton_forest, kernel).arg_names
    if not windowed:
        constants["sinks"] = None
    constants = {name: value for name, value in constants.items() if name in (*arguments, "M")}
    types = {name: _type(name, heads.dtype) for name in arguments if name not in constants}
    multiples = tuple(name for name in types if name.endswith("_row"))
    return Case(kernel, types, constants, cut.warps, cut.stages, multiples)


def _sum_case(cut, heads: Heads) -> Case:
    case = _case("add_parts", cut, heads)
    constants = {name: value for name, value in case.constants.items() if name != "M"} | {
        "ROWS": 16
    }
    types = {name: kind for name, kind in case.types.items() if name != "ROWS"}
    return Case("add_parts", types, constants)


def _type(name: str, dtype: torch.dtype) -> str:
    if name in ("rows", "window") or name.endswith("_row"):
        return "i32"
    if name in ("factor", "scale"):
        return "fp32"
    if name in ("subtree_end", "positions", "items", "lists", "sums"):
        return "*i32"
    return (
        "*fp32" if name in ("lse", "delta", "parts", "sinks") or dtype == torch.float32 else "*bf16"
    )
