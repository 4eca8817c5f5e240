"""The output head: logits, and logprobs of chosen tokens with their gradients, in bounded memory.

A bfloat16 matmul returns bfloat16, which rounds a logit of magnitude 30 by up to 0.06. Logprobs
would have the same error. So two kinds of logits are recomputed as float32 dot products:
those of the scored targets, and those of the most likely tokens of each row, which dominate the
log-sum-exp. The other logits stay rounded, because their errors average out in the sum. On a GPU
the sampler's logits are float32, because a decoding step has few of them. The sampler and the
trainer both use this module, so their logits agree.

The base head is frozen. Gradients go to the hidden states and to the LoRA factors of the head.

Shapes: R rows, D hidden, V vocabulary, P (row, target) pairs, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.interface.parts import HeadAdapters
from planish.model.layers.linear import PackedLinear
from planish.model.layers.lora import HeadAdapterRange, LoraMatrices

# How many of the largest logits of each row are recomputed in float32.
_NUM_EXACT_LOGITS = 16
# A remainder of fewer rows joins the last chunk, because matmuls of few rows may not be
# batch-invariant (kernels/reference/probe.py).
_MIN_CHUNK_ROWS = 32


@torch.no_grad()
def head_logits(
    backend: Backend, hidden: Tensor, head: PackedLinear, adapters: Sequence[HeadAdapterRange] = ()
) -> Tensor:
    """Return the logits, float32 [R, V], without gradients.

    `hidden`: [R, D]. `adapters`: head adapters of ranges of rows.
    """
    lora = backend.head_adapters(adapters, hidden) if adapters else None
    logits = _logits(backend, hidden, head, lora)
    if not _is_rounded(backend.logits_dtype):
        return logits.float()
    float32_logits = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    k = min(_NUM_EXACT_LOGITS, logits.shape[1])
    tokens, exact = backend.top_logits(hidden, head, lora, logits, k, float32_logits)
    if _has_function(backend, head):
        float32_logits.scatter_(1, tokens, _finish(backend, head, exact, tokens))
    return float32_logits


@torch.no_grad()
def exact_logits(
    backend: Backend,
    hidden: Tensor,
    head: PackedLinear,
    rows: Tensor,
    tokens: Tensor,
    adapters: Sequence[HeadAdapterRange] = (),
) -> Tensor:
    """Return single logits, computed as float32 dot products: float32 [P].

    `rows`, `tokens`: int64 [P], the row and the vocabulary entry of each logit.
    """
    lora = backend.head_adapters(adapters, hidden) if adapters else None
    return _token_logits(backend, hidden, head, lora, rows, tokens)


def token_logprobs(scaled_logits: Tensor, log_sum_exp: Tensor) -> Tensor:
    """Return scaled_logits - log_sum_exp, but 0 where the difference is positive.

    `scaled_logits`: single logits divided by the temperature. `log_sum_exp`: that of the same rows
    and temperature. Sampler, scorer and trainer all use this function, so their logprobs are equal.
    """
    # A token's own dot product may round differently from the matmul whose log-sum-exp it meets. If
    # its probability is near 1, the difference may then be above 0. An infinite logit becomes NaN,
    # which the callers reject.
    difference = scaled_logits - log_sum_exp
    return difference.sub_(difference.clamp(min=0.0))


def scored_logprobs(
    backend: Backend,
    hidden: Tensor,
    head: PackedLinear,
    lora: LoraMatrices | None,
    rows: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    recompute: bool = False,
) -> Tensor:
    """Return log-softmax(logits[rows] / temperature) at `targets`: float32 [P].

    The result is differentiable with respect to `hidden` and the LoRA matrices. `lora`: the head
    adapter that all rows use. `rows`, `targets`: int64 [P]. A row may have several targets.

    Rows whose logprobs get a zero gradient cost nothing in the backward pass. The logits (R * V
    entries in `Backend.training_logits_dtype`) are stored for the backward pass, or recomputed if
    `recompute`.
    """
    matrices = (None, None) if lora is None else (lora.a, lora.b_matrices[0])
    stores_logits = torch.is_grad_enabled() and not recompute
    call = _ScoringCall(backend, head, lora, temperature, stores_logits)
    return _ScoredLogprobs.apply(hidden, *matrices, call, rows, targets)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _ScoringCall:
    """The constants of one call of `scored_logprobs`."""

    backend: Backend
    head: PackedLinear
    lora: LoraMatrices | None
    temperature: float
    stores_logits: bool
    """Whether to store the logits for the backward pass."""

    def adapters(
        self,
        hidden: Tensor,
        batch_adapters: HeadAdapters | None = None,
        rows: slice | Tensor | None = None,
    ) -> HeadAdapters | None:
        """Return the adapter for all rows of `hidden`, or None without an adapter.

        `hidden` may be a part of a larger batch. `batch_adapters`: the adapter for that
        batch, whose LoRA hidden states are reused. `rows`: the rows of `hidden` in that batch.
        """
        if self.lora is None:
            return None
        lora_hidden = None if batch_adapters is None else batch_adapters.hidden[rows]
        return self.backend.head_adapters([(0, hidden.shape[0], self.lora)], hidden, lora_hidden)

    def stored_logits(self, hidden: Tensor, lora: HeadAdapters | None) -> list[Tensor]:
        """Return [logits], or [tokens, exact values, logits] if the logits are rounded.

        The exact values then replace the rounded logits at `tokens`.
        """
        logits = _logits(self.backend, hidden, self.head, lora, training=True)
        if not _is_rounded(self.backend.training_logits_dtype):
            return [logits]
        k = min(_NUM_EXACT_LOGITS, logits.shape[1])
        tokens, exact = self.backend.top_logits(hidden, self.head, lora, logits, k)
        return [tokens, _finish(self.backend, self.head, exact, tokens), logits]


class _ScoredLogprobs(torch.autograd.Function):
    """The differentiable operation of `scored_logprobs`."""

    @staticmethod
    def forward(ctx, hidden, a, b, call: _ScoringCall, rows, targets) -> Tensor:
        backend, lora, stored_chunks = call.backend, call.adapters(hidden), list[Tensor]()
        accumulation_dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_sum_exp = torch.empty(hidden.shape[0], dtype=accumulation_dtype, device=hidden.device)
        temperatures = torch.full_like(log_sum_exp, call.temperature)
        for chunk in _chunks(hidden.shape[0], backend.head_rows):
            stored_tensors = call.stored_logits(
                hidden[chunk], call.adapters(hidden[chunk], lora, chunk)
            )
            log_sum_exp[chunk] = backend.log_sum_exp(
                stored_tensors[-1], temperatures[chunk], _exact_logits_of(stored_tensors)
            )
            stored_chunks += stored_tensors if call.stores_logits else ()
        scored = _token_logits(backend, hidden, call.head, lora, rows, targets)
        ctx.save_for_backward(hidden, rows, targets, log_sum_exp, *stored_chunks)
        ctx.call, ctx.lora = call, lora
        scaled_logits = scored.div_(torch.full_like(scored, call.temperature))
        return token_logprobs(scaled_logits, log_sum_exp[rows])

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of hidden, A and B.

        The gradient of a logprob with respect to the logits is (onehot(target) - softmax) /
        temperature. All pairs of a row are handled together.
        """
        hidden, rows, targets, log_sum_exp, *stored_chunks = ctx.saved_tensors
        call: _ScoringCall = ctx.call
        pairs = _NonzeroPairs(rows, targets, grad / call.temperature)
        grads = _HeadGrads(hidden, call, ctx.lora)
        tensors_per_chunk = 3 if _is_rounded(call.backend.training_logits_dtype) else 1
        for number, chunk in enumerate(_chunks(hidden.shape[0], call.backend.head_rows)):
            row_indices = pairs.distinct_rows(chunk)
            if row_indices.numel() == 0:
                continue
            slopes = None
            loss_inputs = (call.temperature, log_sum_exp[row_indices], *pairs.by_row(row_indices))
            if call.stores_logits:
                stored_tensors = stored_chunks[
                    tensors_per_chunk * number : tensors_per_chunk * (number + 1)
                ]
                slopes = _cap_slopes(call.backend, stored_tensors[-1], row_indices - chunk.start)
                grad_logits = call.backend.log_sum_exp_backward(
                    stored_tensors[-1],
                    row_indices - chunk.start,
                    *loss_inputs,
                    _exact_logits_of(stored_tensors),
                )
            else:
                lora = call.adapters(hidden[row_indices], ctx.lora, row_indices)
                stored_tensors = call.stored_logits(hidden[row_indices], lora)
                grad_logits = stored_tensors[-1]
                slopes = _cap_slopes(call.backend, grad_logits)
                call.backend.log_sum_exp_backward_(
                    grad_logits, *loss_inputs, _exact_logits_of(stored_tensors)
                )
            if slopes is not None:
                grad_logits = grad_logits * slopes
            grads.add(row_indices, grad_logits.to(hidden.dtype))
        return grads.hidden, *grads.matrices, None, None, None


class _NonzeroPairs:
    """The pairs with a nonzero gradient, sorted by row."""

    def __init__(self, rows: Tensor, targets: Tensor, grad: Tensor) -> None:
        nonzero = torch.nonzero(grad).squeeze(1)
        order = nonzero[rows[nonzero].argsort(stable=True)]
        self.rows, self.grad = rows[order], grad[order]
        self._targets = targets[order]

    def _pairs_of_rows(self, first_row: int, last_row: int) -> slice:
        """Return the slice of the pairs whose rows are in first .. last, inclusive."""
        bounds = torch.searchsorted(
            self.rows, self.rows.new_tensor([first_row, last_row + 1])
        ).tolist()
        return slice(*bounds)

    def distinct_rows(self, chunk: slice) -> Tensor:
        """Return the rows of `chunk` that have at least one pair, in ascending order."""
        return torch.unique_consecutive(self.rows[self._pairs_of_rows(chunk.start, chunk.stop - 1)])

    def by_row(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pairs of `rows` in CSR form: row offsets [R + 1], targets and gradients.

        `rows`: int64 [R] in ascending order.
        """
        pairs = self._pairs_of_rows(int(rows[0]), int(rows[-1]))
        offsets = torch.searchsorted(self.rows[pairs], torch.cat([rows, rows[-1:] + 1]))
        return offsets, self._targets[pairs].contiguous(), self.grad[pairs].contiguous()


class _HeadGrads:
    """The gradients of hidden, A and B, accumulated over chunks of rows."""

    def __init__(self, hidden: Tensor, call: _ScoringCall, adapters: HeadAdapters | None) -> None:
        self._hidden_states, self._call, self._adapters = hidden, call, adapters
        self.hidden = torch.zeros_like(hidden)
        matrices = () if call.lora is None else (call.lora.a, call.lora.b_matrices[0])
        accumulation_dtype = torch.promote_types(hidden.dtype, torch.float32)
        self._matrix_grads = [
            torch.zeros(matrix.shape, dtype=accumulation_dtype, device=hidden.device)
            for matrix in matrices
        ]

    def add(self, row_indices: Tensor, grad_logits: Tensor) -> None:
        """Add the gradients of the rows `row_indices` [R], given `grad_logits` [R, V]."""
        backend, lora = self._call.backend, self._call.lora
        grad_hidden = backend.matmul_backward(grad_logits, self._call.head)
        if lora is not None and self._adapters is not None:
            lora_hidden = self._adapters.hidden[row_indices][:, : lora.rank]
            operands = (grad_logits, self._hidden_states[row_indices], lora_hidden, grad_hidden)
            grad_a, (grad_b,) = backend.lora_backward_(*operands, [grad_logits.shape[1]], lora)
            self._matrix_grads[0] += grad_a
            self._matrix_grads[1] += grad_b
        self.hidden[row_indices] = grad_hidden

    @property
    def matrices(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of A and B, or (None, None) without an adapter."""
        a, b = self._matrix_grads or (None, None)
        return a, b


def _logits(
    backend: Backend,
    hidden: Tensor,
    head: PackedLinear,
    lora: HeadAdapters | None,
    training: bool = False,
) -> Tensor:
    """Return the logits [R, V] of the base model plus the adapters (see `Head.base_logits`)."""
    logits = backend.base_logits(hidden, head, training=training)
    if lora is not None:
        lora.add_(logits)
    return _capped(backend, logits)


def _token_logits(
    backend: Backend,
    hidden: Tensor,
    head: PackedLinear,
    lora: HeadAdapters | None,
    rows: Tensor,
    tokens: Tensor,
) -> Tensor:
    """Return single logits [P] (see `Head.token_logits`) with the head's bias and cap."""
    return _finish(backend, head, backend.token_logits(hidden, head, lora, rows, tokens), tokens)


def _has_function(backend: Backend, head: PackedLinear) -> bool:
    """Return whether logits are more than products of hidden states and the head's weights."""
    return head.bias is not None or backend.config.logit_cap is not None


def _finish(backend: Backend, head: PackedLinear, logits: Tensor, tokens: Tensor) -> Tensor:
    """Add the head's bias to single logits of `tokens`, and apply the model's cap."""
    if head.bias is not None:
        logits = logits + head.bias[tokens].to(logits.dtype)
    return _capped(backend, logits)


def _capped(backend: Backend, logits: Tensor) -> Tensor:
    """Return the logits with the model's cap (see `ModelConfig.logit_cap`), in their dtype."""
    cap = backend.config.logit_cap
    if cap is None:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return ((wide / cap).tanh_() * cap).to(logits.dtype)


def _cap_slopes(backend: Backend, logits: Tensor, rows: Tensor | None = None) -> Tensor | None:
    """Return the derivative of the cap at `logits` that it has produced, or None without a cap.

    `rows`: the rows of `logits` to use; None: all.
    """
    cap = backend.config.logit_cap
    if cap is None:
        return None
    return 1 - ((logits if rows is None else logits[rows]).float() / cap).square_()


def _is_rounded(logits_dtype: torch.dtype) -> bool:
    """Return whether logits have fewer bits than float32."""
    return logits_dtype.itemsize < 4


def _exact_logits_of(stored_tensors: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return the tokens and exact values of stored logits, or None if the logits are exact."""
    return (stored_tensors[0], stored_tensors[1]) if len(stored_tensors) == 3 else None


def _chunks(num_rows: int, chunk_rows: int) -> list[slice]:
    """Return slices of about `chunk_rows` rows; a small remainder joins the last slice."""
    starts = [0, *range(chunk_rows, num_rows - _MIN_CHUNK_ROWS + 1, chunk_rows)]
    return [slice(start, stop) for start, stop in pairwise([*starts, num_rows])]
