"""The CPU's kernels (kernels.cpp), called on tensors. kernels.py says what each does; those of the attention, which only CPUs have, say it here.

PLANISH_KERNELS=native makes it an error that there are none; by default they are used where the CPU has
AVX-512 and a C++ compiler is found, and one line of the log says why not. Sampler and trainer ask alike, so they agree.

Shapes: T rows, D hidden, H heads, E head_dim. Types: float32 and bf16, on a CPU. Everything given must be contiguous but for what is said.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.errors import UserError
from planish.home import cache_home
from planish.native.build import BuildError, library

_SUFFIX = {torch.float32: "f", torch.bfloat16: "h"}
_LANES = 16

Range = np.dtype([("k", np.int64), ("v", np.int64), ("count", np.int64), ("row", np.int64), ("head", np.int64)])
"""Keys and values of consecutive positions, of the queries' dtype: addresses, and how many elements lie between positions and between heads."""
Block = np.dtype([("first", np.int64), ("count", np.int64), ("first_range", np.int64), ("ranges", np.int64)])
"""Entries first .. of the lists of rows, which share the ranges first_range .., one behind the other."""


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "group", "e")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("blocks", "ranges", "rows", "visible", "own")),
    )


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Which rows attend to which keys: for each entry a row, how many of its block's shared positions it sees, and a range of its own behind them."""

    blocks: np.ndarray
    """[B] of Block."""
    ranges: np.ndarray
    """Of Range."""
    rows: np.ndarray
    """int64 [N]"""
    visible: np.ndarray
    """int64 [N]"""
    own: np.ndarray | None = None
    """[N] of Range."""

    def arguments(self, q: Tensor, heads: int) -> _Attention:
        group, e = q.shape[1] // heads, q.shape[2]
        own = None if self.own is None else self.own.ctypes.data
        arrays = (self.blocks, self.ranges, self.rows, self.visible)
        return _Attention(heads, group, e, e**-0.5, *(array.ctypes.data for array in arrays), own)


@cache
def loaded() -> ctypes.CDLL | None:
    """The library, or None where torch is to do the work."""
    wanted = os.environ.get("PLANISH_KERNELS", "auto")
    if wanted not in ("auto", "native", "torch", "triton"):
        raise UserError(f"PLANISH_KERNELS={wanted!r}: give 'auto', 'native' or 'torch'")
    if wanted in ("torch", "triton"):
        return None
    try:
        if torch.backends.cpu.get_cpu_capability() not in ("AVX512", "AMX"):
            raise BuildError("this CPU has no AVX-512")
        return ctypes.CDLL(str(library(cache_home() / "kernels")))
    except (BuildError, OSError) as error:
        if wanted == "native":
            raise UserError(f"PLANISH_KERNELS=native: {error}") from error
        logging.getLogger(__name__).info("the CPU's own kernels are not used: %s", error)
        return None


def usable(x: Tensor) -> bool:
    """Whether the kernels take tensors of this kind."""
    return _serve(x.dtype, x.device) and loaded() is not None


def attends(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the attention serves heads of this size."""
    return head_dim % _LANES == 0 and _serve(dtype, device) and loaded() is not None


def _serve(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype in _SUFFIX


def rms_norm(
    x: Tensor, more: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype, *, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=dtype)
    scale = torch.empty(x.shape[:-1])
    total = x if more is None or in_place else torch.empty_like(x)
    _call(
        "rms_norm",
        dtype,
        x,
        more,
        weight,
        ctypes.c_float(eps),
        total,
        out,
        scale,
        ctypes.c_int64(scale.numel()),
        ctypes.c_int64(x.shape[-1]),
    )
    return total, out, scale


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, more: Tensor | None) -> Tensor:
    out = torch.empty_like(x)
    _call(
        "rms_norm_backward",
        grad.dtype,
        grad,
        x,
        weight,
        scale,
        more,
        out,
        ctypes.c_int64(scale.numel()),
        ctypes.c_int64(x.shape[-1]),
    )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    rows, heads, e = x.shape
    assert x.stride()[1:] == (e, 1)
    out = torch.empty(x.shape, dtype=x.dtype)
    sign = ctypes.c_float(-1.0 if back else 1.0)
    sizes = (ctypes.c_int64(n) for n in (rows, heads, e))
    _call("rotate", x.dtype, x, ctypes.c_int64(x.stride(0)), cos, sin, sign, out, *sizes)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _call("swiglu", gate_up.dtype, gate_up, out, *(ctypes.c_int64(n) for n in out.shape))
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    out = torch.empty_like(gate_up)
    _call("swiglu_backward", grad.dtype, grad, gate_up, out, *(ctypes.c_int64(n) for n in grad.shape))
    return out


Exact = tuple[Tensor, Tensor]
"""Entries of logits whose values are known better: tokens int64 [R, k], values float32 [R, k]."""


def normalizers(
    logits: Tensor, temperature: Tensor, exact: Exact | None = None, weights: Tensor | None = None
) -> Tensor:
    out = torch.empty(logits.shape[0])
    corrections, sizes = _corrections(exact), (ctypes.c_int64(n) for n in logits.shape)
    _call("normalizers", logits.dtype, logits, *corrections, temperature, weights, out, *sizes)
    return out


def normalizers_backward(
    logits: Tensor,
    temperature: float,
    log_total: Tensor,
    first: Tensor,
    targets: Tensor,
    grads: Tensor,
    exact: Exact | None = None,
) -> None:
    corrections, sizes = _corrections(exact), (ctypes.c_int64(n) for n in logits.shape)
    scale = ctypes.c_float(temperature)
    _call("normalizers_backward", logits.dtype, logits, *corrections, scale, log_total, first, targets, grads, *sizes)


def _corrections(exact: Exact | None) -> tuple[Tensor | None, Tensor | None, ctypes.c_int64]:
    return (None, None, ctypes.c_int64(0)) if exact is None else (*exact, ctypes.c_int64(exact[0].shape[1]))


def keep(plan: AttentionPlan, k: Tensor, v: Tensor) -> None:
    """New keys and values [T, H, E], whose rows may lie apart, at the last position of each entry's own range."""
    assert plan.own is not None
    _, heads, e = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (e, 1)
    addresses = (ctypes.c_void_p(array.ctypes.data) for array in (plan.own, plan.rows))
    strides = (ctypes.c_int64(k.stride(0)), ctypes.c_int64(v.stride(0)))
    sizes = (ctypes.c_int64(n) for n in (heads, e))
    _call("keep", k.dtype, *addresses, ctypes.c_int64(len(plan.rows)), k, strides[0], v, strides[1], *sizes)


def attend(plan: AttentionPlan, q: Tensor, heads: int, lse: Tensor | None) -> Tensor:
    """Attention of q [T, Hq, E] as planned: [T, Hq, E], 0 for rows that have no entry. `lse` [T, Hq] takes the log-sum-exp.

    What the ranges name must have the dtype of q and stay where it is during the call.
    """
    out = torch.zeros(q.shape, dtype=q.dtype)
    arguments = ctypes.byref(plan.arguments(q, heads))
    _call("attend", q.dtype, arguments, ctypes.c_int64(len(plan.blocks)), q, out, lse)
    return out


def attend_backward(
    plan: AttentionPlan,
    part_ends: np.ndarray,
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    keys: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, keys and values, whose ranges must lie in `keys` [T, H, E] and in values of the same shape.

    Runs of blocks that end at `part_ends` add up by themselves first, each in memory of the size of keys and values.
    """
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.empty_like(keys), torch.empty_like(keys)
    sums = torch.zeros(len(part_ends), 2, *keys.shape)
    _call(
        "attend_backward",
        q.dtype,
        ctypes.byref(plan.arguments(q, keys.shape[1])),
        ctypes.c_void_p(part_ends.ctypes.data),
        ctypes.c_int64(len(part_ends)),
        grad,
        q,
        out,
        lse,
        keys,
        grad_q,
        grad_k,
        grad_v,
        sums,
        ctypes.c_int64(keys.numel()),
    )
    return grad_q, grad_k, grad_v


def _call(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    """The function of this type; tensors are given by address, and the number of threads comes last."""
    found = loaded()
    assert found is not None
    given: Sequence[Any] = [_address(x) if isinstance(x, Tensor) else x for x in arguments]
    getattr(found, f"{name}_{_SUFFIX[dtype]}")(*given, ctypes.c_int(torch.get_num_threads()))


def _address(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())
