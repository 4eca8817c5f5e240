"""A mixture of experts: an MLP layer of many small MLPs (experts), of which each token uses a few.

For each token, the router computes a float32 probability for each expert. Only the k experts with
the largest probabilities process the token. The layer's output is the sum of their outputs,
weighted by the probabilities. The router is frozen, but gradients pass through its probabilities to
the layer's input.

In Qwen3.5, a layer also has a shared expert, which processes every token. The decoder computes the
shared expert as a dense MLP, multiplies its output by a gate, and adds the product to the sum over
the chosen experts.

One matmul computes all rows of an expert. For this, the pairs of a row and an expert are sorted by
expert. On a GPU, one kernel computes the matmuls of all experts (`ExpertKernels`). Sampler and
trainer choose experts with the same code, and add the outputs of a token's experts in the order of
their probabilities. So the layer is batch-invariant if the backend's matmuls are.

Shapes: T rows of a batch, D hidden, N experts, k experts per token, P = T * k pairs of a row and
an expert, I hidden size of an expert, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from planish.model.decoder.operations import (
    adapted_linear,
    gated_activation_backward,
    gated_activation_forward,
)
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.interface.parts import AdapterBatch
from planish.model.layers.expert_pairs import TokenExpertPairs
from planish.model.layers.layer_weights import Experts
from planish.model.layers.linear import ExpertLinears, PackedLinear, call_before_matmul
from planish.model.layers.lora import LoraMatrices, LoraWeights, padded_lora_columns


def mixture_of_experts(
    backend: Backend,
    x: Tensor,
    experts: Experts,
    adapters: LoraWeights | AdapterBatch | None,
    layer: int,
) -> Tensor:
    """Return the output [T, D] of a mixture of experts, in the model's dtype.

    `x`: [T, D]. `adapters`: one adapter (or None) for all rows, with gradients, or a batch of
    several adapters, without gradients. `layer`: the index of the decoder layer.
    """
    adapter_batch = None if adapters is None or isinstance(adapters, LoraWeights) else adapters
    weights, pairs = route(backend, x, experts.router, training=adapter_batch is None)
    if adapter_batch is None:
        lora_in = lora_out = None
        if isinstance(adapters, LoraWeights):
            lora_in, lora_out = map(adapters.layers[layer].matrices_of, ("mlp_in", "mlp_out"))
        matrices = [
            matrix
            for lora in (lora_in, lora_out)
            for matrix in (() if lora is None else (lora.a, *lora.b_matrices))
        ]
        call = _ExpertsCall(backend, experts, pairs, lora_in, lora_out)
        return _ExpertsFunction.apply(call, x, weights, *matrices)  # type: ignore[no-any-return]
    expert_inputs = x[pairs.row_indices]
    gate_up = expert_matmuls(backend, expert_inputs, experts.gate_up, pairs)
    adapter_batch.add_expert_(expert_inputs, gate_up, pairs, layer, "mlp_in")
    activations = gated_activation_forward(backend, gate_up)
    out = expert_matmuls(backend, activations, experts.down, pairs)
    adapter_batch.add_expert_(activations, out, pairs, layer, "mlp_out")
    return weighted_sum(out, pairs, weights)


def route(
    backend: Backend, x: Tensor, router: PackedLinear, *, training: bool
) -> tuple[Tensor, TokenExpertPairs]:
    """Choose the k experts of each row.

    Return the weights of the experts' outputs, float32 [T, k], and the sorted pairs.

    `x`: [T, D]. `training`: the rows are a micro-batch of the trainer, with gradients.
    """
    config = backend.config
    x_float32 = x.to(torch.promote_types(x.dtype, torch.float32))
    if training:
        logits = adapted_linear(backend, x_float32, router, None)
    else:
        logits = backend.matmul(x_float32, router)
    kernels, num_chosen = backend.expert_kernels, config.experts_per_token
    normalizes = config.normalizes_expert_weights
    if kernels is not None:
        weights, chosen = kernels.choose(logits.detach(), num_chosen, normalizes=normalizes)
        if training:
            weights = _weights_of(chosen, logits.softmax(-1), normalizes=normalizes)
        return weights, TokenExpertPairs(chosen, config.num_experts, kernels)
    probabilities = logits.softmax(-1)
    # A stable sort defines which of two equal probabilities comes first; topk does not.
    ranked_experts = probabilities.detach().sort(dim=-1, descending=True, stable=True).indices
    chosen = ranked_experts[:, :num_chosen].contiguous()
    weights = _weights_of(chosen, probabilities, normalizes=normalizes)
    return weights, TokenExpertPairs(chosen, config.num_experts)


def _weights_of(chosen: Tensor, probabilities: Tensor, *, normalizes: bool) -> Tensor:
    """Return the weights of the chosen experts, [T, k]. `probabilities`: [T, N]."""
    weights = probabilities.gather(1, chosen)
    if normalizes:
        # Add column by column, because the order of torch's sum over the last dimension may depend
        # on the number of rows.
        total = weights[:, :1]
        for rank in range(1, chosen.shape[1]):
            total = total + weights[:, rank : rank + 1]
        weights = weights / total
    return weights


@dataclass(frozen=True)
class _ExpertsCall:
    """The constants of one call of `_ExpertsFunction`."""

    backend: Backend
    experts: Experts
    pairs: TokenExpertPairs
    lora_in: LoraMatrices | None
    lora_out: LoraMatrices | None


class _ExpertsFunction(torch.autograd.Function):
    """The experts with one adapter or none, and their gradients.

    Only the input, the router's weights, the output of gate and up, and the LoRA hidden states are
    stored. The backward pass recomputes the activations, but not the experts' outputs.

    The gradient of a pair's weight is dot(output, gradient of the output). The output is not
    stored, so the backward pass computes this value from the activations. Apart from its bias, the
    output is linear in the activations. So the value is dot(activations, gradient of the
    activations), plus dot(bias, gradient of the output).
    """

    @staticmethod
    def forward(ctx, call: _ExpertsCall, x: Tensor, weights: Tensor, *matrices: Tensor) -> Tensor:
        backend, pairs = call.backend, call.pairs
        expert_inputs = x[pairs.row_indices]
        gate_up = expert_matmuls(backend, expert_inputs, call.experts.gate_up, pairs, training=True)
        lora_hidden_in = add_expert_lora_(backend, expert_inputs, gate_up, pairs, call.lora_in)
        activations = gated_activation_forward(backend, gate_up)
        out = expert_matmuls(backend, activations, call.experts.down, pairs, training=True)
        lora_hidden_out = add_expert_lora_(backend, activations, out, pairs, call.lora_out)
        ctx.call = call
        ctx.save_for_backward(x, weights, gate_up, lora_hidden_in, lora_hidden_out)
        return weighted_sum(out, pairs, weights)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weights, gate_up, lora_hidden_in, lora_hidden_out = ctx.saved_tensors
        call: _ExpertsCall = ctx.call
        backend, pairs = call.backend, call.pairs
        activations = gated_activation_forward(backend, gate_up)
        pair_weights = weights.flatten()[pairs.order].unsqueeze(1)
        # `grad` is not multiplied by the pairs' weights, because the gradient of a weight needs
        # `grad_activations` without that weight. But the LoRA gradients must contain the weights.
        # They are products of `grad` with `activations` and `lora_hidden_out`, so `activations` and
        # `lora_hidden_out` are multiplied by the weights instead.
        scale = pair_weights.to(activations.dtype)
        weighted_inputs = (
            activations * scale,
            None if lora_hidden_out is None else lora_hidden_out * scale,
        )
        linears_out = (call.experts.down, call.lora_out)
        grad_activations, grads_out = expert_linears_backward(
            backend, pairs, grad[pairs.row_indices], *weighted_inputs, *linears_out
        )
        grad_weights = (grad_activations.to(weights.dtype) * activations.to(weights.dtype)).sum(1)
        _add_bias_terms_(grad_weights, grad, call.experts.down, pairs)
        grad_activations = (grad_activations * pair_weights).to(activations.dtype)
        grad_gate_up = gated_activation_backward(backend, grad_activations, gate_up)
        grad_expert_inputs, grads_in = expert_linears_backward(
            backend,
            pairs,
            grad_gate_up,
            x[pairs.row_indices],
            lora_hidden_in,
            call.experts.gate_up,
            call.lora_in,
        )
        return (
            None,
            weighted_sum(grad_expert_inputs, pairs),
            pairs.unsort(grad_weights),
            *grads_in,
            *grads_out,
        )


def expert_matmuls(
    backend: Backend,
    x: Tensor,
    linears: ExpertLinears,
    pairs: TokenExpertPairs,
    *,
    training: bool = False,
) -> Tensor:
    """Return the outputs [P, out] of the experts' linears for the sorted pairs `x` [P, in]."""
    weights = None if pairs.kernels is None else linears.kernel_weights
    if pairs.kernels is not None and weights is not None:
        call_before_matmul()
        columns = sum(linears[0].sizes)
        return pairs.kernels.matmul(x, weights, pairs.ranges, columns, bias=linears.biases)
    out = x.new_empty(len(x), sum(linears[0].sizes))
    for expert, expert_slice in pairs.expert_slices:
        out[expert_slice] = backend.matmul(x[expert_slice], linears[expert], training=training)
    return out


def add_expert_lora_(
    backend: Backend, x: Tensor, out: Tensor, pairs: TokenExpertPairs, lora: LoraMatrices | None
) -> Tensor | None:
    """Add the LoRA outputs of the experts to `out` [P, out].

    Return the LoRA hidden states [P, r]. Without kernels for all experts, they are padded to a
    multiple of LORA_COLUMNS columns.
    """
    if lora is None:
        return None
    if pairs.kernels is not None:
        (b,) = lora.b_matrices
        return pairs.kernels.add_lora_(x, out, lora.a, b, pairs.ranges)
    lora_hidden = x.new_zeros(len(x), padded_lora_columns(lora.rank))
    for expert, expert_slice in pairs.expert_slices:
        expert_lora = lora.expert(expert)
        lora_hidden[expert_slice, : lora.rank] = backend.add_lora_(
            x[expert_slice], out[expert_slice], [out.shape[1]], expert_lora
        )
    return lora_hidden


def expert_linears_backward(
    backend: Backend,
    pairs: TokenExpertPairs,
    grad: Tensor,
    x: Tensor,
    lora_hidden: Tensor | None,
    linears: ExpertLinears,
    lora: LoraMatrices | None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of the experts' inputs [P, in] and of the LoRA matrices, if any.

    `grad`: the gradient of the outputs, [P, out]. `x`, `lora_hidden`: the inputs [P, in] and the
    LoRA hidden states, from which the gradients of the LoRA matrices are computed.
    """
    grad_x = _expert_matmuls_backward(backend, grad, x.shape[1], linears, pairs)
    if lora is None or lora_hidden is None:
        return grad_x, []
    if pairs.kernels is not None:
        (b,) = lora.b_matrices
        operands = (grad, x, lora_hidden, grad_x, lora.a, b, pairs.ranges)
        return grad_x, list(pairs.kernels.lora_backward_(*operands))
    grads = [
        torch.zeros(matrix.shape, dtype=torch.float32, device=matrix.device)
        for matrix in (lora.a, *lora.b_matrices)
    ]
    for expert, expert_slice in pairs.expert_slices:
        operands = (
            grad[expert_slice],
            x[expert_slice],
            lora_hidden[expert_slice, : lora.rank],
            grad_x[expert_slice],
        )
        grad_a, b_grads = backend.lora_backward_(*operands, [grad.shape[1]], lora.expert(expert))
        for layer_grad, expert_grad in zip(grads, (grad_a, *b_grads), strict=True):
            layer_grad[expert] = expert_grad
    return grad_x, grads


def _expert_matmuls_backward(
    backend: Backend, grad: Tensor, columns: int, linears: ExpertLinears, pairs: TokenExpertPairs
) -> Tensor:
    """Return the gradients of the experts' inputs, [P, columns]. `grad`: [P, out]."""
    weights = None if pairs.kernels is None else linears.kernel_weights
    if pairs.kernels is not None and weights is not None:
        call_before_matmul()
        return pairs.kernels.matmul(grad, weights, pairs.ranges, columns, transposed=True)
    grad_x = grad.new_empty(len(grad), columns)
    for expert, expert_slice in pairs.expert_slices:
        grad_x[expert_slice] = backend.matmul_backward(grad[expert_slice], linears[expert])
    return grad_x


def _add_bias_terms_(
    grad_weights: Tensor, grad: Tensor, down: ExpertLinears, pairs: TokenExpertPairs
) -> None:
    """Add dot(bias, gradient of the output) to the gradient of each sorted pair's weight [P].

    `grad`: the gradient of the layer's output, [T, D].
    """
    dtype = grad_weights.dtype
    if pairs.kernels is not None:
        if down.biases is not None:
            products = grad.to(dtype) @ down.biases.to(dtype).t()
            grad_weights += products[pairs.row_indices, pairs.sorted_experts]
        return
    for expert, expert_slice in pairs.expert_slices:
        bias = down[expert].bias
        if bias is not None:
            grad_float32 = grad[pairs.row_indices[expert_slice]].to(dtype)
            grad_weights[expert_slice] += grad_float32 @ bias.to(dtype)


def weighted_sum(values: Tensor, pairs: TokenExpertPairs, weights: Tensor | None = None) -> Tensor:
    """Return the weighted sum over each row's experts, [T, D], in the dtype of `values` [P, D].

    `weights`: [T, k]; None stands for 1. The terms are added in float32, one column of `weights`
    after another.
    """
    if pairs.kernels is not None and not torch.is_grad_enabled():
        return pairs.kernels.weighted_sum(values, pairs.places, pairs.experts_per_row, weights)
    row_values = pairs.unsort(values)
    total: Tensor | None = None
    for column in range(pairs.experts_per_row):
        term = row_values[:, column].to(torch.promote_types(values.dtype, torch.float32))
        if weights is not None:
            term = term * weights[:, column, None]
        total = term if total is None else total + term
    assert total is not None
    return total.to(values.dtype)
