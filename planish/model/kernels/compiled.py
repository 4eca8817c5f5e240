"""What the C++ and the Triton backend share: norms, RoPE, SwiGLU and log-sum-exp by kernels.

The kernels compute in float32 and round once. They take contiguous tensors in float32 or bf16.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from planish.model.config import ModelConfig
from planish.model.kernels.backend import Exact
from planish.model.kernels.reference.backend import TorchBackend


class Kernels(Protocol):
    """The functions of a module of kernels; `Backend` describes them under similar names."""

    def rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype,
        *,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def rms_norm_backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, grad_total: Tensor | None
    ) -> Tensor: ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor: ...

    def swiglu(self, gate_up: Tensor) -> Tensor: ...

    def swiglu_backward(self, grad: Tensor, gate_up: Tensor) -> Tensor: ...

    def normalizers(
        self,
        logits: Tensor,
        temperature: Tensor,
        exact: Exact | None = None,
        weights: Tensor | None = None,
    ) -> Tensor: ...

    def normalizers_backward(
        self,
        logits: Tensor,
        temperature: float,
        log_total: Tensor,
        first: Tensor,
        targets: Tensor,
        grads: Tensor,
        exact: Exact | None = None,
    ) -> None: ...


class CompiledBackend(TorchBackend):
    """A backend with compiled kernels of some families; torch replaces the other families."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        families: Collection[str],
    ) -> None:
        """`families`: the families of kernels that may be used on this machine."""
        super().__init__(config, dtype, device)
        self._kernels, self.families = kernels, frozenset(families)

    def rms_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        *,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if "norms" not in self.families:
            return super().rms_norm(x, residual, weight, eps, in_place=in_place)
        return self._kernels.rms_norm(
            x.contiguous(), residual, weight, eps, self.dtype, in_place=in_place
        )

    def rms_norm_backward(
        self, grad: Tensor, total: Tensor, weight: Tensor, scale: Tensor, grad_total: Tensor | None
    ) -> Tensor:
        if "norms" not in self.families:
            return super().rms_norm_backward(grad, total, weight, scale, grad_total)
        grad_total = None if grad_total is None else grad_total.contiguous()
        return self._kernels.rms_norm_backward(grad.contiguous(), total, weight, scale, grad_total)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        if "rope" not in self.families:
            return super().rope(x, cos, sin, inverse=inverse)
        return self._kernels.rotate(x, cos, sin, back=inverse)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        if "swiglu" not in self.families:
            return super().swiglu(gate_up)
        return self._kernels.swiglu(gate_up)

    def swiglu_backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        if "swiglu" not in self.families:
            return super().swiglu_backward(grad, gate_up)
        return self._kernels.swiglu_backward(grad.contiguous(), gate_up)

    def log_sum_exp(
        self,
        logits: Tensor,
        temperature: Tensor,
        exact: Exact | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        if "log_sum_exp" not in self.families:
            return super().log_sum_exp(logits, temperature, exact, weights)
        return self._kernels.normalizers(logits, temperature, exact, weights)

    def log_sum_exp_backward_(
        self,
        logits: Tensor,
        temperature: float,
        log_total: Tensor,
        first: Tensor,
        targets: Tensor,
        grads: Tensor,
        exact: Exact | None = None,
    ) -> None:
        given = (logits, temperature, log_total, first, targets, grads, exact)
        if "log_sum_exp" in self.families:
            self._kernels.normalizers_backward(*given)
        else:
            super().log_sum_exp_backward_(*given)
