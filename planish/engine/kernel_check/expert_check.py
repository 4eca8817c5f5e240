"""The check of the kernels for mixtures of experts: each operation is compared with torch."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Sequence

import torch
from torch import Tensor

from planish.engine.kernel_check.comparison import compare
from planish.engine.kernel_check.operation_check import weights_in_each_scheme
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.weight_sizes import NF4_BLOCK_SIZE
from planish.model.decoder.experts import (
    add_expert_lora_,
    expert_linears_backward,
    expert_matmuls,
    weighted_sum,
)
from planish.model.kernels.choose import reference_backend, triton_backend
from planish.model.kernels.interface.backend import Backend
from planish.model.layers.expert_pairs import TokenExpertPairs
from planish.model.layers.linear import ExpertLinears, PackedLinear
from planish.model.layers.lora import LoraMatrices
from planish.model.layers.quantization import QuantizedWeight, dequantized

_MAX_SIZE = 512
"""The maximum inputs and outputs of an expert under check. The kernels get the sizes as arguments,
so they are not compiled for them.
"""
_RANK = 5
_PAIRS_PER_EXPERT = (0.4, 68)
"""The mean numbers of pairs of an expert: with few pairs, tiles are small, and some experts have no
pairs.
"""
_QUANTIZED_EXPERTS = 3
"""The number of experts with weights of their own, which the other quantized experts share."""
_PARTS = 2
"""The number of weights of a quantized expert."""


class ExpertCheck:
    """The check of the kernels for the experts of one model."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._backend = triton_backend(model, dtype, device, ["experts", "quantized"])
        self._reference = reference_backend(model, torch.float64, device)
        self._num_experts, self._num_chosen = model.num_experts, model.experts_per_token
        sizes = (2 * model.expert_size, model.hidden_size)
        # The remainder decides which loads and stores are masked.
        self._fan_out, self._fan_in = (
            size if size <= _MAX_SIZE else _MAX_SIZE + size % 128 for size in sizes
        )
        self._generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def run(self) -> None:
        """Check all operations. Raises WrongResultError if one differs from torch."""
        num_experts, fan_out, fan_in = self._num_experts, self._fan_out, self._fan_in
        weights = self._random(num_experts, fan_out, fan_in) * fan_in**-0.5
        biases = self._random(num_experts, fan_out)
        lora = LoraMatrices(
            self._random(num_experts, _RANK, fan_in) * fan_in**-0.5,
            (self._random(num_experts, fan_out, _RANK) * _RANK**-0.5,),
        )
        for mean in _PAIRS_PER_EXPERT:
            chosen, row_weights = self._choose(self._rows(mean))
            self._operations(chosen, row_weights, weights, biases, lora)

    @torch.no_grad()
    def run_quantized(self) -> None:
        """Check the matmuls with quantized experts of each scheme, forward and backward.

        Raises WrongResultError if one differs from torch.
        """
        fan_in = -(-self._fan_in // NF4_BLOCK_SIZE) * NF4_BLOCK_SIZE
        fan_out = self._fan_out // _PARTS
        dense = [
            self._random(fan_out, fan_in) * fan_in**-0.5 for _ in range(_PARTS * _QUANTIZED_EXPERTS)
        ]
        has_fp8 = not self._backend.uses_main_memory
        for each in weights_in_each_scheme(dense, self._generator, has_fp8=has_fp8):
            experts = [each[_PARTS * index :][:_PARTS] for index in range(_QUANTIZED_EXPERTS)]
            experts = [experts[index % len(experts)] for index in range(self._num_experts)]
            for mean in _PAIRS_PER_EXPERT:
                self._quantized(mean, experts)

    def _quantized(self, mean: float, experts: Sequence[Sequence[QuantizedWeight]]) -> None:
        """Check a batch with this mean number of pairs of an expert."""
        dtype = self._backend.dtype
        sizes, fan_in = [weight.shape[0] for weight in experts[0]], experts[0][0].shape[1]
        biases = self._random(len(experts), sum(sizes))
        chosen, _ = self._choose(self._rows(mean))
        x, grad = (self._random(chosen.numel(), columns) for columns in (fan_in, sum(sizes)))
        tested = ExpertLinears(
            self._backend.pack_quantized(own, bias.split(sizes))
            for own, bias in zip(experts, biases, strict=True)
        )
        assert tested.quantized is not None
        weights = torch.stack([dequantized(own, dtype) for own in experts])
        reference = _linears(weights.double(), biases.double())
        results: list[tuple[Tensor, Tensor]] = []
        for backend, linears in ((self._backend, tested), (self._reference, reference)):
            pairs = TokenExpertPairs(chosen, self._num_experts, backend.expert_kernels)
            given, own_grad = x.to(backend.dtype), grad.to(backend.dtype)
            out = expert_matmuls(backend, given, linears, pairs, training=True)
            operands = (own_grad, given, None, linears, None)
            results.append((out, expert_linears_backward(backend, pairs, *operands)[0]))
        scheme = tested.quantized.scheme
        for what, found, expected in zip(("matmul", "gradient"), *results, strict=True):
            compare(f"experts in {scheme}: {what}", found, expected, dtype=dtype)

    def _rows(self, mean: float) -> int:
        """Return the rows of a batch with this mean number of pairs of an expert."""
        return max(3, int(mean * self._num_experts / self._num_chosen))

    def _choose(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Check the choice of experts, among which some have equal probabilities."""
        kernels = self._backend.expert_kernels
        assert kernels is not None
        logits = self._random(num_rows, self._num_experts, dtype=torch.float32)
        logits = (4 * logits).round() / 4
        ranked = logits.sort(dim=-1, descending=True, stable=True).indices[:, : self._num_chosen]
        probabilities = logits.double().softmax(-1).gather(1, ranked)
        for normalizes in (False, True):
            expected = probabilities
            if normalizes:
                expected = probabilities / probabilities.sum(1, keepdim=True)
            weights, chosen = kernels.choose(logits, self._num_chosen, normalizes=normalizes)
            compare("the chosen experts", chosen, ranked)
            compare("the weights of experts", weights, expected)
        return chosen, weights

    def _operations(
        self,
        chosen: Tensor,
        row_weights: Tensor,
        weights: Tensor,
        biases: Tensor,
        lora: LoraMatrices,
    ) -> None:
        results: list[list[Tensor]] = []
        x = self._random(len(chosen), self._fan_in)
        grad = self._random(chosen.numel(), self._fan_out)
        for backend in (self._backend, self._reference):
            pairs = TokenExpertPairs(chosen, self._num_experts, backend.expert_kernels)
            results.append(
                [
                    pairs.order,
                    pairs.row_indices,
                    *_results(
                        backend,
                        pairs,
                        x.to(backend.dtype)[pairs.row_indices],
                        grad.to(backend.dtype),
                        _linears(weights.to(backend.dtype), biases.to(backend.dtype)),
                        LoraMatrices(
                            lora.a.to(backend.dtype), (lora.b_matrices[0].to(backend.dtype),)
                        ),
                        row_weights,
                    ),
                ]
            )
        for what, found, expected in zip(_NAMES, *results, strict=True):
            # The gradients of A and B are float32 sums of products that are rounded.
            compare(f"experts: {what}", found, expected, dtype=self._backend.dtype)

    def _random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, generator=self._generator)
        return values.to(device=self._backend.device, dtype=dtype or self._backend.dtype)


_NAMES = (
    "order of the pairs",
    "rows of the pairs",
    "matmul",
    "matmul with an adapter",
    "matmul with the adapter of some rows",
    "LoRA hidden states",
    "weighted sum",
    "sum",
    "gradient of the input",
    "gradient of A",
    "gradient of B",
)


def _linears(weights: Tensor, biases: Tensor) -> ExpertLinears:
    """Return the linears of all experts, unpacked. `weights`: [N, out, in]. `biases`: [N, out]."""
    return ExpertLinears(
        PackedLinear([weight], [bias], packer=lambda weights, transposed: None)
        for weight, bias in zip(weights, biases, strict=True)
    )


def _results(
    backend: Backend,
    pairs: TokenExpertPairs,
    x: Tensor,
    grad: Tensor,
    linears: ExpertLinears,
    lora: LoraMatrices,
    row_weights: Tensor,
) -> list[Tensor]:
    """Return the results of all operations, in the order of _NAMES."""
    plain = expert_matmuls(backend, x, linears, pairs, training=True)
    adapted, partly = plain.clone(), plain.clone()
    hidden = add_expert_lora_(backend, x, adapted, pairs, lora)
    assert hidden is not None
    start, stop = pairs.num_rows // 3, pairs.num_rows - 1
    if pairs.kernels is not None:
        ranges = pairs.device_ranges(start, stop)
        pairs.kernels.add_lora_(x, partly, lora.a, lora.b_matrices[0], ranges)
    else:
        is_adapted = (pairs.row_indices >= start) & (pairs.row_indices < stop)
        partly = torch.where(is_adapted[:, None], adapted, plain)
    summed = weighted_sum(
        adapted, pairs, row_weights.to(torch.promote_types(x.dtype, torch.float32))
    )
    # The kernels and torch round the LoRA hidden states alike, so both get the same ones.
    grad_x, grads = expert_linears_backward(backend, pairs, grad, x, hidden, linears, lora)
    return [
        plain,
        adapted,
        partly,
        hidden[:, : lora.rank],
        summed,
        weighted_sum(adapted, pairs),
        grad_x,
        *grads,
    ]
