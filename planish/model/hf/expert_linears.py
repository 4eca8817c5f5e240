"""One linear of all experts of a layer, with adapters and gradients.

Shapes: P pairs of a row and an expert, sorted by expert (see model/decoder/experts.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.autograd import Function

from planish.model.decoder.experts import add_expert_lora_, expert_linears_backward, expert_matmuls
from planish.model.hf.forward_pass import HFForwardPass
from planish.model.kernels.interface.backend import Backend
from planish.model.layers.expert_pairs import TokenExpertPairs
from planish.model.layers.linear import ExpertLinears
from planish.model.layers.lora import LoraMatrices, LoraWeights


def expert_linears(
    run: HFForwardPass,
    x: Tensor,
    linears: ExpertLinears,
    pairs: TokenExpertPairs,
    layer: int,
    name: str,
) -> Tensor:
    """Return the outputs [P, out] of each pair's expert for x [P, in], with the rows' adapters.

    `linears`: the linear of each expert. `layer`, `name`: the layer and its target module.
    """
    if run.adapters is None or isinstance(run.adapters, LoraWeights):
        lora = run.lora_of(layer, name)
        matrices = () if lora is None else (lora.a, *lora.b_matrices)
        call = _Call(run.backend, linears, pairs, lora)
        return _ExpertLinears.apply(call, x, *matrices)  # type: ignore[no-any-return]
    out = expert_matmuls(run.backend, x, linears, pairs)
    run.adapters.add_expert_(x, out, pairs, layer, name)
    return out


@dataclass(frozen=True)
class _Call:
    """The constants of one call of `expert_linears`."""

    backend: Backend
    linears: ExpertLinears
    pairs: TokenExpertPairs
    lora: LoraMatrices | None


class _ExpertLinears(Function):
    """The linears with one adapter or none, and their gradients."""

    @staticmethod
    def forward(ctx, call: _Call, x: Tensor, *matrices: Tensor) -> Tensor:
        out = expert_matmuls(call.backend, x, call.linears, call.pairs, training=True)
        ctx.save_for_backward(x, add_expert_lora_(call.backend, x, out, call.pairs, call.lora))
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, lora_hidden = ctx.saved_tensors
        call: _Call = ctx.call
        grad_x, grads = expert_linears_backward(
            call.backend, call.pairs, grad.contiguous(), x, lora_hidden, call.linears, call.lora
        )
        return None, grad_x, *grads
