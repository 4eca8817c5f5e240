"""Operations on norms that are composed of other parts' operations."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from planish.model.kernels.interface.parts import Norms, Rope


class NormKernels(Protocol):
    """A module of compiled kernels for norms, for any dtype of the output."""

    def rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype,
        *,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do the same as `Norms.rms_norm`, with outputs in `dtype`."""
        ...

    def rms_norm_backward(
        self, grad: Tensor, total: Tensor, weight: Tensor, scale: Tensor, grad_total: Tensor | None
    ) -> Tensor:
        """Do the same as `Norms.rms_norm_backward`."""
        ...


class CompiledNorms:
    """The norms of compiled kernels for a model in one dtype (see `Norms`)."""

    def __init__(self, kernels: NormKernels, dtype: torch.dtype) -> None:
        """`dtype`: the dtype of the model."""
        self._rms_norm, self._dtype = kernels.rms_norm, dtype
        self.rms_norm_backward = kernels.rms_norm_backward

    def rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        *,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return x + residual, its RMSNorm in the model's dtype, and the norm's scale per row."""
        return self._rms_norm(x, residual, weight, eps, self._dtype, in_place=in_place)


class SeparateQkNormRope:
    """The norms and rotations of queries and keys, one after another (see `QkNormRope`)."""

    def __init__(self, norms: Norms, rope: Rope) -> None:
        self._norms, self._rope = norms, rope

    def qk_norm_rope(
        self,
        qkv: Tensor,
        heads: tuple[int, int],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return q [T, Hq, E] and k [T, Hkv, E] of `qkv`, normed and rotated."""
        q, k, _ = qkv.unflatten(-1, (-1, 2 * cos.shape[-1])).split([*heads, heads[1]], 1)
        if norms is not None:
            q, k = (
                self._norms.rms_norm(x.float(), None, weight, eps, in_place=True)[1]
                for x, weight in zip((q, k), norms, strict=True)
            )
        return self._rope.rope(q, cos, sin), self._rope.rope(k, cos, sin)
