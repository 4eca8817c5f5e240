"""The modules that replace linears and experts in transformers' modelling code.

They multiply by planish's packed weights and add the outputs of unmerged adapters.

Shapes: T rows, P pairs of a row and an expert (see decoder/experts.py), k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from planish.model.architecture.inspection.probing import (
    expert_linear_names,
    is_transposed,
    linear_shape,
)
from planish.model.decoder.experts import weighted_sum
from planish.model.hf.expert_linears import expert_linears
from planish.model.hf.forward_pass import current_pass
from planish.model.kernels.interface.backend import Backend
from planish.model.layers.expert_pairs import TokenExpertPairs
from planish.model.layers.linear import ExpertLinears, PackedLinear
from planish.model.layers.quantization import quantize


class FrozenLinear(nn.Module):
    """A frozen linear with the adapters of the current forward pass."""

    def __init__(
        self, source: nn.Module, packed: PackedLinear, layer: int, name: str | None
    ) -> None:
        """`source`: the linear that this one replaces. `packed`: its weights. `layer`, `name`: its
        layer and the name of its target module in that layer; None: it has no adapter.
        """
        super().__init__()
        # Modelling code reads these attributes of linears.
        self.out_features, self.in_features = linear_shape(source)
        self.weight, self.bias = source.weight, source.bias
        self._packed, self._layer, self._name = packed, layer, name

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [..., out] for x [..., in]."""
        rows = x.reshape(-1, self.in_features)
        out = current_pass().linear(rows, self._packed, self._layer, self._name)
        return out.view(*x.shape[:-1], self.out_features)


class FrozenExperts(nn.Module):
    """The frozen experts of a layer with the adapters of the current forward pass."""

    def __init__(
        self,
        source: nn.Module,
        packed: Sequence[ExpertLinears],
        layer: int,
        name: str,
    ) -> None:
        """`source`: the module that this one replaces, which has the activation. `packed`: the
        first linears of all experts, and their second linears. `name`: the module's name in layer
        `layer`.
        """
        super().__init__()
        self._source, self._packed, self._layer = source, packed, layer
        self._names = [f"{name}.{linear}" for linear in expert_linear_names(source)]

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, [T, hidden].

        `hidden`: [T, hidden]. `top_k_index`, `top_k_weights`: [T, k].
        """
        kernels = current_pass().backend.expert_kernels
        pairs = TokenExpertPairs(top_k_index, len(self._packed[0]), kernels)
        gate_up = self._linear(0, hidden[pairs.row_indices], pairs)
        source = self._source
        activations = source._apply_gate(gate_up) if source.has_gate else source.act_fn(gate_up)  # type: ignore[operator]
        out = self._linear(1, activations, pairs)
        if source.has_post_expert_norm:
            out = source.post_expert_norm(out)  # type: ignore[operator]
        return weighted_sum(out, pairs, top_k_weights)

    def _linear(self, index: int, x: Tensor, pairs: TokenExpertPairs) -> Tensor:
        """Return the outputs [P, out] of the first or second linear for the pairs x [P, in]."""
        target = (self._layer, self._names[index])
        return expert_linears(current_pass(), x, self._packed[index], pairs, *target)


def freeze_linear(
    source: nn.Module, backend: Backend, scheme: str | None, layer: int, name: str | None
) -> FrozenLinear:
    """Return the replacement of a linear. `scheme`: its quantization, or None."""
    weight: Tensor = source.weight  # type: ignore[assignment]
    bias: Tensor | None = source.bias  # type: ignore[assignment]
    scheme = scheme if name is not None else None
    packed = _pack(weight.t() if is_transposed(source) else weight, bias, backend, scheme)
    if scheme is not None:
        source.weight = nn.Parameter(weight.to("meta"), requires_grad=False)
    return FrozenLinear(source, packed, layer, name)


def freeze_experts(
    source: nn.Module, backend: Backend, scheme: str | None, layer: int, name: str
) -> FrozenExperts:
    """Return the replacement of a layer's experts. `scheme`: their quantization, or None."""
    packed = []
    for linear in expert_linear_names(source):
        weights: Tensor = getattr(source, linear)
        biases = getattr(source, f"{linear}_bias") if source.has_bias else [None] * len(weights)
        packed.append(
            ExpertLinears(
                _pack(weight.t() if source.is_transposed else weight, bias, backend, scheme)
                for weight, bias in zip(weights, biases, strict=True)
            )
        )
        setattr(source, linear, None)
    return FrozenExperts(source, packed, layer, name)


def _pack(
    weight: Tensor, bias: Tensor | None, backend: Backend, scheme: str | None
) -> PackedLinear:
    """Return a packed linear. `weight`: [out, in]."""
    bias = None if bias is None else bias.detach()
    if scheme is None:
        return backend.pack([weight.detach()], [bias], keep_unpacked=False)
    # Quantize from float32, so that the result does not depend on the model's dtype.
    return backend.pack_quantized([quantize(weight.detach().to(torch.float32), scheme)], [bias])
