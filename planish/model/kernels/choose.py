"""Which compiled kernels serve a tensor: C++ on CPUs with AVX2 or AVX-512 (cpp/), Triton on GPUs
(triton/), or none; then torch does the work.

Both sides do the same arithmetic: float32 inside, rounded once. A family of Triton kernels serves a
GPU only after its self-test passed there (triton/self_test.py says so to `admit`); until then torch does
the work. PLANISH_KERNELS=torch turns all kernels off. PLANISH_KERNELS=triton is for tests: Triton
then serves without a self-test, and CPU tensors too, for which it is interpreted
(TRITON_INTERPRET=1).

Shapes: T rows, D hidden, H heads, E head_dim, R rows and V vocabulary of the head, P (row, target)
pairs.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from planish.errors import UserError
from planish.model.kernels.cpp import cpu
from planish.model.kernels.cpp.cpu import Exact

FAMILIES = (
    "norms",
    "rope",
    "swiglu",
    "log_sum_exp",
    "sampling",
    "attention",
    "tree attention",
    "lora",
    "graphs",
)
"""Triton kernels that are checked, and replaced by torch, together. "attention": of the sampler,
prefill and decode. "tree attention": of the trainer, over a tree of shared prefixes. "graphs": the
sampler's decoding step recorded as a CUDA graph.
"""


@dataclass(frozen=True)
class HeadShape:
    """The attention heads for which kernels are compiled."""

    size: int
    group: int
    """Query heads of each key head."""
    dtype: torch.dtype


_admitted: dict[tuple[torch.device, HeadShape], frozenset[str]] = {}
"""The families that may serve a model with these heads."""
_elementwise: dict[torch.device, frozenset[str]] = {}
"""The families that may serve all models of a GPU that were checked so far."""


class Kernels(Protocol):
    """On contiguous tensors in float32 or bf16, but for what is said."""

    def rms_norm(
        self,
        x: Tensor,
        more: Tensor | None,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype,
        *,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x + more (x float32 [..., D]), its norm in `dtype`, and the norm's factor [...].
        `in_place`: x is overwritten with the sum.
        """
        ...

    def rms_norm_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, more: Tensor | None
    ) -> Tensor:
        """The gradient of x, float32, with `more` added to it."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
        """Turns [T, H, E], whose rows may lie apart, by angles with cos and sin [T, 1, E/2];
        `back`: by the opposite ones.
        """
        ...

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [T, 2 * D], rounded once: [T, D]."""
        ...

    def swiglu_backward(self, grad: Tensor, gate_up: Tensor) -> Tensor: ...

    def normalizers(
        self,
        logits: Tensor,
        temperature: Tensor,
        exact: Exact | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Log-sum-exp of logits [R, V] / temperature [R]: float32 [R].

        `weights`, float32 [R, V] and perhaps the logits themselves, takes exp(entry - the row's
        largest).
        """
        ...

    def normalizers_backward(
        self,
        logits: Tensor,
        temperature: float,
        log_total: Tensor,
        first: Tensor,
        targets: Tensor,
        grads: Tensor,
        exact: Exact | None = None,
    ) -> None:
        """Logits [R, V] become the gradient, by logits / temperature, of grads [P] times the
        logprobs of targets [P].

        Pairs first[r] .. first[r + 1] - 1 are those of row r, whose log-sum-exp is log_total[r].
        """
        ...


class FusedHeads(Protocol):
    def turned_heads(
        self,
        qkv: Tensor,
        heads: tuple[int, int],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """q [T, Hq, E] and k [T, Hkv, E] out of qkv [T, (Hq + 2 * Hkv) * E]: normed by the weights
        `norms` [E] if given, then turned; (Hq, Hkv) are `heads`.
        """
        ...


def fused_heads(x: Tensor) -> FusedHeads | None:
    """Norms and rotations of all heads as one kernel, for passes without gradients: where launches
    cost more than what they do.
    """
    families = ("rope", "norms")
    own = serving(x, "rope") if all(triton_serves(x.device, each) for each in families) else None
    return cast(FusedHeads, own) if own is not None else None


def sample(weights: Tensor, uniforms: Tensor) -> Tensor | None:
    """Tokens [R], int64, for weights float32 [R, V] and uniforms float64 [R]: the first entry at
    which a row's running sum exceeds its uniform times the row's sum. One launch. None where Triton
    does not serve.
    """
    if not triton_serves(weights.device, "sampling"):
        return None
    found: Tensor = import_module("planish.model.kernels.triton.elementwise_kernels").sample(
        weights, uniforms
    )
    return found


def serving(x: Tensor, family: str) -> Kernels | None:
    """The kernels that take tensors of this dtype on this device, for one family of them: "norms",
    "rope", "swiglu" or "log_sum_exp". None where torch does the work.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        return None
    if triton_serves(x.device, family):
        return cast(Kernels, import_module("planish.model.kernels.triton.elementwise_kernels"))
    return cast(Kernels, cpu) if cpu.usable(x, family) else None


def triton_serves(device: torch.device, family: str) -> bool:
    """Whether Triton's kernels of this family serve all models on this device."""
    wanted = cpu.wanted()
    if wanted == "triton":
        return True
    return wanted != "torch" and family in _elementwise.get(device, ())


def triton_attends(family: str, heads: HeadShape, device: torch.device) -> bool:
    """Whether Triton's kernels of this family serve a model with these heads on this device."""
    known = heads.dtype in (torch.bfloat16, torch.float32)
    if not known or heads.size % 16 or heads.size > 256:
        return False
    wanted = cpu.wanted()
    if wanted == "triton":
        return True
    return wanted != "torch" and family in _admitted.get((device, heads), ())


def admit(device: torch.device, heads: HeadShape, families: Collection[str]) -> None:
    """From now on these families serve models with these heads on this GPU, and no others do.

    Kernels that do not depend on heads ("norms", "rope", "swiglu", "log_sum_exp") have to be admitted
    for every model of the GPU: a family that fails for one model serves none from then on.
    """
    _admitted[device, heads] = frozenset(families)
    alike = [found for (place, _), found in list(_admitted.items()) if place == device]
    _elementwise[device] = frozenset.intersection(*alike)


def wants_graphs() -> bool:
    """Whether decoding steps may be CUDA graphs, by PLANISH_GRAPHS; UserError for an unknown value."""
    found = os.environ.get("PLANISH_GRAPHS", "1")
    if found not in ("0", "1"):
        raise UserError(f"PLANISH_GRAPHS={found!r}: give 0 or 1 (the default)")
    return found == "1"


@cache
def has_triton() -> bool:
    """Whether Triton is installed. On Linux it comes with torch for CUDA."""
    try:
        import_module("triton")
    except ImportError:
        return False
    return True
