"""The CPU's kernels (src/), called on tensors. choose.py says what each does; those of the
attention, which only CPUs have, say it here.

PLANISH_KERNELS=native makes it an error that there are none; by default they are used where the CPU
has AVX-512 or AVX2 and a C++ compiler is found, and one line of the log says why not. Sampler and
trainer ask alike, so they agree.

Shapes: T rows, D hidden, H heads, E head_dim. Types: float32 and bf16, on a CPU. Everything given
must be contiguous but for what is said.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.errors import UserError
from planish.files import cache_home
from planish.model.kernels.cpp.build import BuildError, library
from planish.model.kernels.cpp.self_test import FAMILIES, verdicts_of
from planish.model.kernels.verdicts import Verdict

_SUFFIX = {torch.float32: "f", torch.bfloat16: "h"}
_LANES = 16
_KINDS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float, "i": ctypes.c_int}
_SIGNATURES = {
    "rms_norm": "pppfpppnni",
    "rms_norm_backward": "ppppppnni",
    "rotate": "pnppfpnnni",
    "swiglu": "ppnni",
    "swiglu_backward": "pppnni",
    "normalizers": "pppnpppnni",
    "normalizers_backward": "pppnfppppnni",
    "keep": "ppnpnpnnni",
    "attend": "pnpppi",
    "attend_backward": "ppnpppppppppni",
    "invert": "pppnnni",
    "draw": "ppppppnni",
    "likeliest": "ppnpppnni",
    "single_logits": "ppppni",
    "head_low": "pnpnpnni",
    "add_head": "pnpnpni",
    "pack_panels": "pnni",
    "product": "ppppnnni",
    "add_lora": "pnpnppnpi",
    "lora_backward": "pnppnppni",
    "lora_gradients": "pnpppnpnppni",
    "decode": "ppi",
}
"""Of each function: p for an address, n for a number of things, f for a float; the number of
threads, i, comes last.
"""

Range = np.dtype(
    [("k", np.int64), ("v", np.int64), ("count", np.int64), ("row", np.int64), ("head", np.int64)]
)
"""Keys and values of consecutive positions, of the queries' dtype: addresses, and how many elements
lie between positions and between heads.
"""
Block = np.dtype(
    [("first", np.int64), ("count", np.int64), ("first_range", np.int64), ("ranges", np.int64)]
)
"""Entries first .. of the lists of rows, which share the ranges first_range .., one behind the
other.
"""


class Attention(ctypes.Structure):
    """`struct Attention` of cpp/attention_products.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "group", "e")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("blocks", "ranges", "rows", "visible", "own")),
    )


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Which rows attend to which keys: for each entry a row, how many of its block's shared
    positions it sees, and a range of its own behind them.

    One plan serves L layers, whose keys and values lie elsewhere but alike.
    """

    blocks: np.ndarray
    """[B] of Block."""
    ranges: np.ndarray
    """[L, *] of Range."""
    rows: np.ndarray
    """int64 [N], each another row"""
    visible: np.ndarray
    """int64 [N]"""
    own: np.ndarray | None = None
    """[L, N] of Range."""

    def arguments(self, heads: tuple[int, int], e: int, layer: int) -> Attention:
        """For so many heads of queries, and of keys, of e entries."""
        blocks, ranges, visible = self._addresses
        ranges += layer * self.ranges.strides[0]
        of_keys, group = heads[1], heads[0] // heads[1]
        own = self.own_ranges(layer)
        return Attention(
            of_keys, group, e, e**-0.5, blocks, ranges, self.rows_address, visible, own
        )

    def own_ranges(self, layer: int) -> int | None:
        """Where those of a layer lie."""
        return None if self.own is None else self._own_address + layer * self.own.strides[0]

    @cached_property
    def rows_address(self) -> int:
        return self.rows.ctypes.data

    @cached_property
    def _own_address(self) -> int:
        assert self.own is not None
        return self.own.ctypes.data

    @cached_property
    def _addresses(self) -> tuple[int, int, int]:
        return self.blocks.ctypes.data, self.ranges.ctypes.data, self.visible.ctypes.data


def instructions() -> str:
    """Which of this CPU's the kernels are compiled for, a key of INSTRUCTIONS;
    ATEN_CPU_CAPABILITY=avx2 asks us, as it asks torch, for fewer than there are.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX512", "AMX", "AVX2"):
        raise BuildError("this CPU has no AVX2")
    return (
        "AVX512_BF16" if capability != "AVX2" and torch.cpu._is_avx512_bf16_supported() else "AVX2"
    )


class Library(ctypes.CDLL):
    """The compiled kernels, and what their self-test found."""

    verdicts: Sequence[Verdict] = ()
    refused: Collection[str] = frozenset()
    """The families (self_test.FAMILIES) that torch replaces."""
    uses_amx: bool = False


under_test: Library | None = None
"""Set in the process of the self-test: `loaded` returns this library as it is."""


@cache
def loaded() -> Library | None:
    """Return the library, compiled and self-tested at first use, or None where torch does all the
    work.
    """
    chosen = wanted()
    if under_test is not None or chosen in ("torch", "triton"):
        return under_test
    try:
        path, found = _library()
    except (BuildError, OSError) as error:
        if chosen == "native":
            raise UserError(f"PLANISH_KERNELS=native: {error}") from error
        _log.warning(
            "no kernels of our own on this CPU, so all takes several times longer: %s", error
        )
        return None
    has_tiles = bool(found.has_tiles())
    found.verdicts = verdicts_of(path, has_tiles)
    failed = {verdict.family: verdict.reason for verdict in found.verdicts if not verdict.passed}
    if failed:
        told = ", ".join(f"{family} ({reason})" for family, reason in failed.items())
        if chosen == "native" and failed.keys() != {"amx"}:
            raise UserError(f"PLANISH_KERNELS=native: kernels failed their self-test: {told}")
        _log.warning("torch replaces kernels that failed their self-test: %s; %s", told, _REMEDY)
    if len(failed) == len(found.verdicts):
        return None
    found.refused = frozenset(failed)
    if failed.keys() - {"amx", "log_sum_exp", "sampling"}:
        found.refused |= {"decode"}  # which is made of the other families
    found.uses_amx = has_tiles and "amx" not in failed
    found.use_tiles(int(found.uses_amx))
    return found


_log = logging.getLogger(__name__)
_REMEDY = (
    "another compiler may help (CXX=clang++); PLANISH_KERNELS=torch uses no kernels of our own"
)


def serves(family: str) -> bool:
    """Whether this family of the kernels (self_test.FAMILIES) may be used on this machine."""
    assert family in FAMILIES, family
    found = loaded()
    return found is not None and family not in found.refused


def wanted() -> str:
    """Whose kernels the environment asks for; UserError if there are none of that name."""
    found = os.environ.get("PLANISH_KERNELS", "auto")
    if found not in ("auto", "native", "torch", "triton"):
        raise UserError(f"PLANISH_KERNELS={found!r}: give 'auto', 'native' or 'torch'")
    return found


def _library() -> tuple[Path, Library]:
    cache, of = cache_home() / "kernels", instructions()
    path = library(cache, of)
    try:
        return path, Library(str(path))
    except OSError:
        # a file that a power cut left half, or that a machine with a newer system put into a shared
        # cache
        path.unlink(missing_ok=True)
        path = library(cache, of)
        return path, Library(str(path))


def attends(head_dim: int) -> bool:
    """Return whether the attention kernels support heads of this size."""
    return head_dim % _LANES == 0 and serves("attention")


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    x, out = x.contiguous(), x.new_empty(x.shape, dtype=dtype)
    scale = x.new_empty(x.shape[:-1])
    total = x if residual is None or in_place else torch.empty_like(x)
    call("rms_norm", dtype, x, residual, weight, eps, total, out, scale, scale.numel(), x.shape[-1])
    return total, out, scale


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, grad_total: Tensor | None
) -> Tensor:
    out = torch.empty_like(x)
    grad_total = None if grad_total is None else grad_total.contiguous()
    call(
        "rms_norm_backward",
        grad.dtype,
        grad.contiguous(),
        x,
        weight,
        scale,
        grad_total,
        out,
        scale.numel(),
        x.shape[-1],
    )
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    rows, heads, e = x.shape
    assert x.stride()[1:] == (e, 1)
    out = x.new_empty(x.shape)
    call("rotate", x.dtype, x, x.stride(0), cos, sin, -1.0 if inverse else 1.0, out, rows, heads, e)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    call("swiglu", gate_up.dtype, gate_up, out, *out.shape)
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    out = torch.empty_like(gate_up)
    call("swiglu_backward", grad.dtype, grad.contiguous(), gate_up, out, *grad.shape)
    return out


Exact = tuple[Tensor, Tensor]
"""Entries of logits whose values are known better: tokens int64 [R, k], values float32 [R, k]."""


def log_sum_exp(
    logits: Tensor, temperature: Tensor, exact: Exact | None = None, weights: Tensor | None = None
) -> Tensor:
    out = torch.empty(logits.shape[0])
    call(
        "normalizers",
        logits.dtype,
        logits,
        *_corrections(exact),
        temperature,
        weights,
        out,
        *logits.shape,
    )
    return out


def log_sum_exp_backward_(
    logits: Tensor,
    temperature: float,
    log_total: Tensor,
    first: Tensor,
    targets: Tensor,
    grads: Tensor,
    exact: Exact | None = None,
) -> None:
    given = (*_corrections(exact), temperature, log_total, first, targets, grads)
    call("normalizers_backward", logits.dtype, logits, *given, *logits.shape)


def _corrections(exact: Exact | None) -> tuple[Tensor | None, Tensor | None, int]:
    return (None, None, 0) if exact is None else (*exact, exact[0].shape[1])


def keep(plan: AttentionPlan, layer: int, k: Tensor, v: Tensor) -> None:
    """New keys and values [T, H, E], whose rows may lie apart, at the last position of each entry's
    own range.
    """
    _, heads, e = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (e, 1)
    own = plan.own_ranges(layer)
    call(
        "keep",
        k.dtype,
        own,
        plan.rows_address,
        len(plan.rows),
        k,
        k.stride(0),
        v,
        v.stride(0),
        heads,
        e,
    )


def attend(plan: AttentionPlan, layer: int, q: Tensor, heads: int, lse: Tensor | None) -> Tensor:
    """Attention of q [T, Hq, E] as planned: [T, Hq, E], 0 for rows that have no entry. `lse` [T,
    Hq] takes the log-sum-exp.

    What the ranges name must have the dtype of q and stay where it is during the call. Sums are
    float32; where the CPU multiplies pairs of bf16, a weight is rounded to it, relative to the
    row's largest, before it meets its value.
    """
    out = q.new_empty(q.shape) if len(plan.rows) == q.shape[0] else q.new_zeros(q.shape)
    arguments = ctypes.byref(plan.arguments((q.shape[1], heads), q.shape[2], layer))
    call("attend", q.dtype, arguments, len(plan.blocks), q, out, lse)
    return out


class KeptAttention:
    """An `Attend` of the decoder: one new row for each entry, whose key and value are kept first."""

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep(self.plan, layer, k, v)
        return attend(self.plan, layer, q.contiguous(), k.shape[1], None)


def attend_backward(
    plan: AttentionPlan,
    part_ends: np.ndarray,
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    keys: Tensor,
    sums: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, each row of which has an entry, and of keys and values, whose ranges must lie
    in `keys` [T, H, E] and in values of the same shape.

    Runs of blocks that end at `part_ends` add up by themselves first, in `sums` [len(part_ends), 2,
    T, H, E], float32 with any content.
    """
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(keys), torch.empty_like(keys)
    call(
        "attend_backward",
        q.dtype,
        ctypes.byref(plan.arguments((q.shape[1], keys.shape[1]), q.shape[2], 0)),
        part_ends.ctypes.data,
        len(part_ends),
        grad,
        q,
        out,
        lse,
        keys,
        grad_q,
        grad_k,
        grad_v,
        sums,
        keys.numel(),
    )
    return grad_q, grad_k, grad_v


def call(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    """The function of this type; tensors are given by address.

    MemoryError if there was none for what it computes in between; what it was to write then holds
    anything.
    """
    given = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    missing = _function(name, dtype)(*given, torch.get_num_threads())
    if missing:
        raise MemoryError(
            f"main memory is full: {name} needed {f'{missing:,} bytes' if missing > 1 else 'some'} more"
        )


@cache
def _function(name: str, dtype: torch.dtype) -> Callable[..., int]:
    found = loaded()
    assert found is not None
    function = found[f"{name}_{_SUFFIX[dtype]}"]
    function.argtypes, function.restype = (
        [_KINDS[kind] for kind in _SIGNATURES[name]],
        ctypes.c_int64,
    )
    return function
