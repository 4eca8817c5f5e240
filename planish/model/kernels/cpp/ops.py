"""The C++ kernels (src/) as functions on tensors.

Most functions do the same as the operation of `Backend` with the same name, and are documented
there. The functions of the attention are documented here.

By default the kernels are used if the CPU has AVX2 or AVX-512, and planish is installed from a
wheel or finds a C++ compiler; otherwise one log line gives the reason. With PLANISH_KERNELS=native,
missing kernels are an error. Sampler and trainer use the same library, so their results agree.

Shapes: T rows, D hidden, H heads, E head_dim. Tensors are float32 or bf16 and on the CPU. They must
be contiguous unless a docstring says otherwise.
"""

from __future__ import annotations

import ctypes
import logging
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
from planish.model.kernels.cpp.build import BuildError, compiled_library
from planish.model.kernels.cpp.self_test import FAMILIES, verdicts_of
from planish.model.kernels.interface.parts import ExactLogits
from planish.model.kernels.interface.setting import kernels_setting
from planish.model.kernels.self_test.verdicts import Verdict

_SUFFIX = {torch.float32: "f", torch.bfloat16: "h"}
_LANES = 16
_KINDS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "f": ctypes.c_float, "i": ctypes.c_int}
_SIGNATURES = {
    "rms_norm": "pppfpppnni",
    "rms_norm_backward": "ppppppnni",
    "rope": "pnppfpnnni",
    "swiglu": "ppnni",
    "swiglu_backward": "pppnni",
    "geglu": "ppnni",
    "geglu_backward": "pppnni",
    "clamped_swiglu": "ppffnni",
    "clamped_swiglu_backward": "pppffnni",
    "log_sum_exp": "pppnpppnni",
    "log_sum_exp_backward": "ppppnfpppppnni",
    "store_kv": "ppnpnpnnni",
    "attend": "pnpppi",
    "attend_backward": "ppnpppppppppni",
    "sample_from_weights": "pppnnni",
    "sample": "pppppfppnni",
    "top_k_logits": "ppnpppnni",
    "single_logits": "ppppni",
    "head_lora_hidden": "pnpnpnni",
    "add_head_lora": "pnpnpni",
    "pack_panels": "pnni",
    "matmul": "ppppnnni",
    "quantized_matmul": "pnpppni",
    "add_lora": "pnpnppnpi",
    "lora_backward": "pnppnppni",
    "lora_gradients": "pnpppnpnppni",
    "decode": "ppi",
    "delta_scan": "ppi",
    "delta_scan_backward": "pppppppi",
}
"""The argument types of each C++ function: p is an address, n an int64 and f a float.

The last argument, i, is the number of threads.
"""

Range = np.dtype(
    [("k", np.int64), ("v", np.int64), ("count", np.int64), ("row", np.int64), ("head", np.int64)]
)
"""The keys and values of `count` consecutive positions, in the dtype of the queries.

`k` and `v` are addresses. `row` and `head` are the strides between positions and between heads, in
elements.
"""
Block = np.dtype(
    [("first", np.int64), ("count", np.int64), ("first_range", np.int64), ("ranges", np.int64)]
)
"""A block of query rows that share key ranges.

The block contains the entries first .. first + count - 1 of an `AttentionPlan`. Their shared keys
are those of the ranges first_range .. first_range + ranges - 1, in this order.
"""


class Attention(ctypes.Structure):
    """`struct Attention` of src/attention_matmuls.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "group", "e", "window")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("blocks", "ranges", "rows", "visible", "own")),
        ("sinks", ctypes.c_void_p),
        ("window_ends", ctypes.c_void_p),
    )


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """A table of which rows attend to which keys, in all L layers.

    Each of the N entries is one query row. The row attends to the first positions of its block's
    shared ranges, and then to a range of its own, if `own` is given. The layers differ only in the
    addresses of keys and values.
    """

    blocks: np.ndarray
    """[B] of Block: the blocks, which together contain all entries."""
    ranges: np.ndarray
    """[L, *] of Range: the shared ranges of all blocks."""
    rows: np.ndarray
    """int64 [N]: the batch row of each entry. A row has at most one entry."""
    visible: np.ndarray
    """int64 [N]: the number of shared positions that each entry attends to."""
    own: np.ndarray | None = None
    """[L, N] of Range: each entry's own range, after the shared positions."""
    windows: Sequence[int | None] = ()
    """The attention window of each layer (see `ModelConfig.attention_windows`).

    In a layer with a window of W positions, a row attends only to the last W of its keys.
    """
    window_ends: np.ndarray | None = None
    """int64 [N]: the position after which each entry's window ends, if this is not the end of its
    keys. Not with `own`.
    """

    def arguments(
        self, heads: tuple[int, int], e: int, layer: int, sinks: Tensor | None = None
    ) -> Attention:
        """Return the arguments of the kernels for one layer.

        `heads`: the number of query heads and of key heads. `e`: the head_dim. `sinks`: the sinks
        of the layer, contiguous float32 [Hq], or None. They must outlive the result.
        """
        blocks, ranges, visible = self._addresses
        ranges += layer * self.ranges.strides[0]
        key_heads, group = heads[1], heads[0] // heads[1]
        own = self.own_ranges(layer)
        return Attention(
            key_heads,
            group,
            e,
            self.windows[layer] or 0 if self.windows else 0,
            e**-0.5,
            blocks,
            ranges,
            self.rows_address,
            visible,
            own,
            None if sinks is None else sinks.data_ptr(),
            None if self.window_ends is None else self.window_ends.ctypes.data,
        )

    def own_ranges(self, layer: int) -> int | None:
        """Return the address of `own` for one layer, or None if entries have no own ranges."""
        return None if self.own is None else self._own_address + layer * self.own.strides[0]

    @cached_property
    def rows_address(self) -> int:
        """The address of `rows`."""
        return self.rows.ctypes.data

    @cached_property
    def _own_address(self) -> int:
        assert self.own is not None
        return self.own.ctypes.data

    @cached_property
    def _addresses(self) -> tuple[int, int, int]:
        return self.blocks.ctypes.data, self.ranges.ctypes.data, self.visible.ctypes.data


def instructions() -> str:
    """Return the instruction set for which the kernels are compiled, a key of `INSTRUCTIONS` in
    build.py.

    As in torch, ATEN_CPU_CAPABILITY=avx2 selects AVX2 on a CPU with AVX-512. Raises BuildError if
    the CPU has no AVX2.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX512", "AMX", "AVX2"):
        raise BuildError("this CPU has no AVX2")
    return (
        "AVX512_BF16" if capability != "AVX2" and torch.cpu._is_avx512_bf16_supported() else "AVX2"
    )


class Library(ctypes.CDLL):
    """The compiled kernels and the verdicts of their self-test."""

    verdicts: Sequence[Verdict] = ()
    torch_families: Collection[str] = frozenset()
    """The families (self_test.FAMILIES) that torch replaces."""
    uses_amx: bool = False
    """Whether matmuls use AMX."""


under_test: Library | None = None
"""The untested library that `load_library` returns; set only in the process of the self-test."""
load_warnings: list[str] = []
"""What `load_library` logged when it loaded the library: why torch replaces kernels."""


@cache
def load_library() -> Library | None:
    """Return the library, or None if torch computes everything.

    The first call on a machine tests the kernels, and compiles them if planish is not installed
    from a wheel. Raises UserError if PLANISH_KERNELS=native and kernels are missing or failed.
    """
    load_warnings.clear()
    setting = kernels_setting()
    if under_test is not None or setting in ("torch", "triton"):
        return under_test
    try:
        path, library = _library()
    except (BuildError, OSError) as error:
        if setting == "native":
            raise UserError(f"PLANISH_KERNELS=native: {error}") from error
        _warn(
            "planish's kernels cannot be used on this CPU, so everything takes several times "
            f"longer: {error}"
        )
        return None
    has_amx = bool(library.has_amx())
    library.verdicts = verdicts_of(path, has_amx)
    failed = {verdict.family: verdict.reason for verdict in library.verdicts if not verdict.passed}
    if failed:
        reasons = ", ".join(f"{family} ({reason})" for family, reason in failed.items())
        if setting == "native" and failed.keys() != {"amx"}:
            raise UserError(f"PLANISH_KERNELS=native: kernels failed their self-test: {reasons}")
        _warn(f"torch replaces kernels that failed their self-test: {reasons}; {_REMEDY}")
    if len(failed) == len(library.verdicts):
        return None
    library.torch_families = frozenset(failed)
    if failed.keys() - {"amx", "log_sum_exp", "sampling", "delta_net"}:
        # The decoding pass calls the kernels of the failed families too.
        library.torch_families |= {"decode"}
    library.uses_amx = has_amx and "amx" not in failed
    library.use_amx(int(library.uses_amx))
    return library


_log = logging.getLogger(__name__)
_REMEDY = "another compiler may help (CXX=clang++); PLANISH_KERNELS=torch uses only torch"


def _warn(text: str) -> None:
    load_warnings.append(text)
    _log.warning("%s", text)


def is_supported(family: str) -> bool:
    """Return whether this family of kernels (self_test.FAMILIES) may be used on this machine."""
    assert family in FAMILIES, family
    library = load_library()
    return library is not None and family not in library.torch_families


def _library() -> tuple[Path, Library]:
    cache, instruction_set = cache_home() / "kernels", instructions()
    path = compiled_library(cache, instruction_set)
    try:
        return path, Library(str(path))
    except OSError:
        # A power cut may have truncated the file. In a shared cache, a machine with a newer system
        # may have compiled it, as may the machine that built the wheel. Compile it here.
        path.unlink(missing_ok=True)
        path = compiled_library(cache, instruction_set, may_be_prebuilt=False)
        return path, Library(str(path))


def supports_attention(head_dim: int) -> bool:
    """Return whether the attention kernels support heads of this size."""
    return head_dim % _LANES == 0 and is_supported("attention")


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same as `Norms.rms_norm`, with outputs in `dtype`."""
    x, out = x.contiguous(), x.new_empty(x.shape, dtype=dtype)
    scale = x.new_empty(x.shape[:-1])
    total = x if residual is None or in_place else torch.empty_like(x)
    call("rms_norm", dtype, x, residual, weight, eps, total, out, scale, scale.numel(), x.shape[-1])
    return total, out, scale


def rms_norm_backward(
    grad: Tensor, total: Tensor, weight: Tensor, scale: Tensor, grad_total: Tensor | None
) -> Tensor:
    """Do the same as `Norms.rms_norm_backward`."""
    out = torch.empty_like(total)
    grad_total = None if grad_total is None else grad_total.contiguous()
    call(
        "rms_norm_backward",
        grad.dtype,
        grad.contiguous(),
        total,
        weight,
        scale,
        grad_total,
        out,
        scale.numel(),
        total.shape[-1],
    )
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Do the same as `Rope.rope`. The rows of `x` may have any stride."""
    rows, heads, e = x.shape
    assert x.stride()[1:] == (e, 1)
    out = x.new_empty(x.shape)
    call("rope", x.dtype, x, x.stride(0), cos, sin, -1.0 if inverse else 1.0, out, rows, heads, e)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """Do the same as `Activations.swiglu`."""
    return _gated("swiglu", gate_up)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Do the same as `Activations.swiglu_backward`."""
    return _gated_backward("swiglu_backward", grad, gate_up)


def geglu(gate_up: Tensor) -> Tensor:
    """Do the same as `Activations.geglu`."""
    return _gated("geglu", gate_up)


def geglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Do the same as `Activations.geglu_backward`."""
    return _gated_backward("geglu_backward", grad, gate_up)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Do the same as `Activations.clamped_swiglu`."""
    return _gated("clamped_swiglu", gate_up, alpha, limit)


def clamped_swiglu_backward(grad: Tensor, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Do the same as `Activations.clamped_swiglu_backward`."""
    return _gated_backward("clamped_swiglu_backward", grad, gate_up, alpha, limit)


def _gated(function: str, gate_up: Tensor, *options: float) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    call(function, gate_up.dtype, gate_up, out, *options, *out.shape)
    return out


def _gated_backward(function: str, grad: Tensor, gate_up: Tensor, *options: float) -> Tensor:
    out = torch.empty_like(gate_up)
    call(function, grad.dtype, grad.contiguous(), gate_up, out, *options, *grad.shape)
    return out


def log_sum_exp(
    logits: Tensor,
    temperature: Tensor,
    exact: ExactLogits | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Do the same as `LogSumExp.log_sum_exp`."""
    out = torch.empty(logits.shape[0])
    call(
        "log_sum_exp",
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
    exact: ExactLogits | None = None,
) -> None:
    """Do the same as `LogSumExp.log_sum_exp_backward_`."""
    arguments = (*_corrections(exact), temperature, log_total, first, targets, grads)
    call("log_sum_exp_backward", logits.dtype, logits, None, *arguments, logits, *logits.shape)


def log_sum_exp_backward(
    logits: Tensor,
    rows: Tensor,
    temperature: float,
    log_total: Tensor,
    first: Tensor,
    targets: Tensor,
    grads: Tensor,
    exact: ExactLogits | None = None,
) -> Tensor:
    """Do the same as `LogSumExp.log_sum_exp_backward`."""
    out = logits.new_empty(len(rows), logits.shape[1])
    arguments = (*_corrections(exact), temperature, log_total, first, targets, grads)
    call("log_sum_exp_backward", logits.dtype, logits, rows, *arguments, out, *out.shape)
    return out


def _corrections(exact: ExactLogits | None) -> tuple[Tensor | None, Tensor | None, int]:
    return (None, None, 0) if exact is None else (*exact, exact[0].shape[1])


def store_kv(plan: AttentionPlan, layer: int, k: Tensor, v: Tensor) -> None:
    """Store new keys and values at the last position of each entry's own range.

    `k`, `v`: [T, H, E]. Their rows may have any stride.
    """
    _, heads, e = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (e, 1)
    own = plan.own_ranges(layer)
    call(
        "store_kv",
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


def attend(
    plan: AttentionPlan,
    layer: int,
    q: Tensor,
    heads: int,
    lse: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention output of `q` [T, Hq, E]: [T, Hq, E], 0 for rows without an entry.

    `heads`: the number of key heads. `lse`: an optional float32 output [T, Hq], which receives the
    log-sum-exp. `sinks`: the sinks of the layer, contiguous float32 [Hq] (see `Attend`), or None.

    The keys and values must have the dtype of `q` and must not move during the call. Sums are
    float32. If `q` is bf16 and the CPU has bf16 instructions, each weight exp(score - max) is
    rounded to bf16 before it multiplies its value.
    """
    out = q.new_empty(q.shape) if len(plan.rows) == q.shape[0] else q.new_zeros(q.shape)
    arguments = ctypes.byref(plan.arguments((q.shape[1], heads), q.shape[2], layer, sinks))
    call("attend", q.dtype, arguments, len(plan.blocks), q, out, lse)
    return out


class StoringAttention:
    """An attention that stores the key and value of each entry's new row, and then attends.

    An instance is an `Attend` of the decoder.
    """

    def __init__(self, plan: AttentionPlan) -> None:
        self.plan = plan

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the attention output [T, Hq, E] (see `Attend`)."""
        store_kv(self.plan, layer, k, v)
        return attend(self.plan, layer, q.contiguous(), k.shape[1], None, sinks)


def attend_backward(
    plan: AttentionPlan,
    unit_ends: np.ndarray,
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    keys: Tensor,
    sums: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, keys and values, given the gradient of the output.

    Every row of q must have an entry. The ranges of the plan must lie in `keys` [T, H, E] and in
    values of the same shape. Sinks have no argument here, because `lse` and `out` contain them.

    The blocks are divided into work units, which end at `unit_ends`. Each unit has its own sums of
    the gradients of keys and values, which are added afterwards. `sums` is the scratch memory for
    them: float32 [len(unit_ends), 2, T, H, E], with any contents.
    """
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(keys), torch.empty_like(keys)
    call(
        "attend_backward",
        q.dtype,
        ctypes.byref(plan.arguments((q.shape[1], keys.shape[1]), q.shape[2], 0)),
        unit_ends.ctypes.data,
        len(unit_ends),
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
    """Call the C++ function `name` for this dtype. Tensors are passed by address.

    Raises MemoryError if the function could not allocate its scratch memory. The contents of its
    outputs are then undefined.
    """
    addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    missing_bytes = _function(name, dtype)(*addresses, torch.get_num_threads())
    if missing_bytes:
        amount = f"{missing_bytes:,} bytes" if missing_bytes > 1 else "some"
        raise MemoryError(f"main memory is full: {name} needed {amount} more")


@cache
def _function(name: str, dtype: torch.dtype) -> Callable[..., int]:
    library = load_library()
    assert library is not None
    function = library[f"{name}_{_SUFFIX[dtype]}"]
    function.argtypes, function.restype = (
        [_KINDS[kind] for kind in _SIGNATURES[name]],
        ctypes.c_int64,
    )
    return function
