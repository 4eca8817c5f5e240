"""Which compiled kernels serve a tensor: C++ on CPUs with AVX2 or AVX-512 (cpu.py), Triton on GPUs
(triton_*.py), or none; then torch does the work.

Both sides do the same arithmetic: float32 inside, rounded once. PLANISH_KERNELS=torch turns all of
them off; =triton has Triton serve CPU tensors too, which is for tests: it is interpreted there
(TRITON_INTERPRET=1).

Shapes: T rows, D hidden, H heads, E head_dim, R rows and V vocabulary of the head, P (row, target)
pairs.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from planish.native import cpu
from planish.native.cpu import Exact


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
    own = serving(x, "norms") if triton_serves(x.device) else None
    return cast(FusedHeads, own) if own is not None else None


def serving(x: Tensor, family: str) -> Kernels | None:
    """The kernels that take tensors of this dtype on this device, for one family of them: "norms",
    "rope", "swiglu" or "log_sum_exp". None where torch does the work.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):
        return None
    if triton_serves(x.device):
        return cast(Kernels, import_module("planish.native.triton_elementwise"))
    return cast(Kernels, cpu) if cpu.usable(x, family) else None


def triton_serves(device: torch.device) -> bool:
    """Whether Triton's kernels do the work on this device."""
    wanted = cpu.wanted()
    return wanted == "triton" or (wanted != "torch" and device.type == "cuda" and _has_triton())


def triton_attends(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether Triton's attention serves heads of this size on this device."""
    served = head_dim % 16 == 0 and head_dim <= 256 and dtype in (torch.bfloat16, torch.float32)
    return served and triton_serves(device)


@cache
def _has_triton() -> bool:
    """torch for CUDA brings Triton on Linux."""
    try:
        import_module("triton")
    except ImportError:
        return False
    return True
