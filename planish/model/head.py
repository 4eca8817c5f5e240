"""The output head: logits, and logprobs of chosen tokens with their gradients, in bounded memory.

On a CPU a bfloat16 matmul returns bfloat16, which rounds a logit of magnitude 30 by up to 0.06.
Logprobs would have the same error. So two kinds of logits are recomputed as float32 dot products:
those of the scored targets, and those of the most likely tokens of each row, which dominate the
log-sum-exp. The other logits stay rounded, because their errors average out in the sum. The
sampler and the trainer both use this module, so their logits agree.

The base head is frozen. Gradients go to the hidden states and to the LoRA factors of the head.

Shapes: R rows, D hidden, V vocabulary, P (row, target) pairs, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from planish.model.kernels.backend import Backend, HeadAdapters, HeadMember, LoraMatrices
from planish.model.kernels.linear import PackedLinear

# How many of the largest logits of each row are recomputed in float32.
_EXACT = 16
# A remainder of fewer rows joins the last chunk, because matmuls of few rows may not be
# batch-invariant (kernels/reference/row_tiling.py).
_FEW = 32


@torch.no_grad()
def head_logits(
    backend: Backend, hidden: Tensor, head: PackedLinear, adapters: Sequence[HeadMember] = ()
) -> Tensor:
    """Return the logits, float32 [R, V], without gradients.

    `hidden`: [R, D]. `adapters`: head adapters of ranges of rows.
    """
    lora = backend.head_adapters(adapters, hidden) if adapters else None
    logits = _logits(backend, hidden, head, lora)
    if not _is_rounded(backend):
        return logits.float()
    wide = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    backend.top_logits(hidden, head, lora, logits, min(_EXACT, logits.shape[1]), wide)
    return wide


@torch.no_grad()
def exact_logits(
    backend: Backend,
    hidden: Tensor,
    head: PackedLinear,
    rows: Tensor,
    tokens: Tensor,
    adapters: Sequence[HeadMember] = (),
) -> Tensor:
    """Return single logits, computed as float32 dot products: float32 [P].

    `rows`, `tokens`: int64 [P], the row and the vocabulary entry of each logit.
    """
    lora = backend.head_adapters(adapters, hidden) if adapters else None
    return backend.token_logits(hidden, head, lora, rows, tokens)


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
    entries in `Backend.logits_dtype`) are stored for the backward pass, or recomputed if
    `recompute`.
    """
    matrices = (None, None) if lora is None else (lora.a, lora.bs[0])
    keep = torch.is_grad_enabled() and not recompute
    run = _Scoring(backend, head, lora, temperature, keep)
    return _ScoredLogprobs.apply(hidden, *matrices, run, rows, targets)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Scoring:
    """The constants of one call of `scored_logprobs`."""

    backend: Backend
    head: PackedLinear
    lora: LoraMatrices | None
    temperature: float
    keep: bool
    """Whether to store the logits for the backward pass."""

    def adapters(
        self, hidden: Tensor, whole: HeadAdapters | None = None, part: slice | Tensor | None = None
    ) -> HeadAdapters | None:
        """Return the adapter for all rows of `hidden`, or None without an adapter.

        `hidden` may be a part of a larger batch. `whole`: the adapter for that batch, whose LoRA
        hidden states are reused. `part`: the rows of `hidden` in that batch.
        """
        if self.lora is None:
            return None
        known = None if whole is None else whole.hidden[part]
        return self.backend.head_adapters([(0, hidden.shape[0], self.lora)], hidden, known)

    def stored_logits(self, hidden: Tensor, lora: HeadAdapters | None) -> list[Tensor]:
        """Return [logits], or [tokens, exact values, logits] if the logits are rounded.

        The exact values then replace the rounded logits at `tokens`.
        """
        logits = _logits(self.backend, hidden, self.head, lora, training=True)
        if not _is_rounded(self.backend):
            return [logits]
        k = min(_EXACT, logits.shape[1])
        return [*self.backend.top_logits(hidden, self.head, lora, logits, k), logits]


class _ScoredLogprobs(torch.autograd.Function):
    """The differentiable operation of `scored_logprobs`."""

    @staticmethod
    def forward(ctx, hidden, a, b, run: _Scoring, rows, targets) -> Tensor:
        backend, lora, kept = run.backend, run.adapters(hidden), list[Tensor]()
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_total = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        temperatures = torch.full_like(log_total, run.temperature)
        for chunk in _chunks(hidden.shape[0], backend.head_rows):
            stored = run.stored_logits(hidden[chunk], run.adapters(hidden[chunk], lora, chunk))
            log_total[chunk] = backend.log_sum_exp(
                stored[-1], temperatures[chunk], _exact_part(stored)
            )
            kept += stored if run.keep else ()
        scored = backend.token_logits(hidden, run.head, lora, rows, targets)
        ctx.save_for_backward(hidden, rows, targets, log_total, *kept)
        ctx.run, ctx.lora = run, lora
        return scored.div_(torch.full_like(scored, run.temperature)) - log_total[rows]

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of hidden, A and B.

        The gradient of a logprob with respect to the logits is (onehot(target) - softmax) /
        temperature. All pairs of a row are handled together.
        """
        hidden, rows, targets, log_total, *kept = ctx.saved_tensors
        run: _Scoring = ctx.run
        pairs = _LivePairs(rows, targets, grad / run.temperature)
        grads = _HeadGrads(hidden, run, ctx.lora)
        per_chunk = 3 if _is_rounded(run.backend) else 1
        for number, chunk in enumerate(_chunks(hidden.shape[0], run.backend.head_rows)):
            where = pairs.distinct_rows(chunk)
            if where.numel() == 0:
                continue
            given = (run.temperature, log_total[where], *pairs.by_row(where))
            if run.keep:
                stored = kept[per_chunk * number : per_chunk * (number + 1)]
                grad_logits = run.backend.log_sum_exp_backward(
                    stored[-1], where - chunk.start, *given, _exact_part(stored)
                )
            else:
                lora = run.adapters(hidden[where], ctx.lora, where)
                stored = run.stored_logits(hidden[where], lora)
                grad_logits = stored[-1]
                run.backend.log_sum_exp_backward_(grad_logits, *given, _exact_part(stored))
            grads.add(where, grad_logits.to(hidden.dtype))
        return grads.hidden, *grads.matrices, None, None, None


class _LivePairs:
    """The pairs with a nonzero gradient, sorted by row."""

    def __init__(self, rows: Tensor, targets: Tensor, grad: Tensor) -> None:
        live = torch.nonzero(grad).squeeze(1)
        order = live[rows[live].argsort(stable=True)]
        self.rows, self.grad = rows[order], grad[order]
        self._targets = targets[order]

    def _between(self, first: int, last: int) -> slice:
        """Return the slice of the pairs whose rows are in first .. last, inclusive."""
        bounds = torch.searchsorted(self.rows, self.rows.new_tensor([first, last + 1])).tolist()
        return slice(*bounds)

    def distinct_rows(self, chunk: slice) -> Tensor:
        """Return the rows of `chunk` that have at least one pair, in ascending order."""
        return torch.unique_consecutive(self.rows[self._between(chunk.start, chunk.stop - 1)])

    def by_row(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pairs of `rows` in CSR form: row offsets [R + 1], targets and gradients.

        `rows`: int64 [R] in ascending order.
        """
        mine = self._between(int(rows[0]), int(rows[-1]))
        first = torch.searchsorted(self.rows[mine], torch.cat([rows, rows[-1:] + 1]))
        return first, self._targets[mine].contiguous(), self.grad[mine].contiguous()


class _HeadGrads:
    """The gradients of hidden, A and B, accumulated over chunks of rows."""

    def __init__(self, hidden: Tensor, run: _Scoring, adapters: HeadAdapters | None) -> None:
        self._source, self._run, self._adapters = hidden, run, adapters
        self.hidden = torch.zeros_like(hidden)
        matrices = () if run.lora is None else (run.lora.a, run.lora.bs[0])
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self._sums = [
            torch.zeros(matrix.shape, dtype=wide, device=hidden.device) for matrix in matrices
        ]

    def add(self, where: Tensor, grad_logits: Tensor) -> None:
        """Add the gradients of the rows `where` [R], given `grad_logits` [R, V]."""
        backend, lora = self._run.backend, self._run.lora
        grad_hidden = backend.matmul_backward(grad_logits, self._run.head)
        if lora is not None and self._adapters is not None:
            lora_hidden = self._adapters.hidden[where][:, : lora.rank]
            given = (grad_logits, self._source[where], lora_hidden, grad_hidden)
            grad_a, (grad_b,) = backend.lora_backward_(*given, [grad_logits.shape[1]], lora)
            self._sums[0] += grad_a
            self._sums[1] += grad_b
        self.hidden[where] = grad_hidden

    @property
    def matrices(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of A and B, or (None, None) without an adapter."""
        a, b = self._sums or (None, None)
        return a, b


def _logits(
    backend: Backend,
    hidden: Tensor,
    head: PackedLinear,
    lora: HeadAdapters | None,
    training: bool = False,
) -> Tensor:
    """Return the logits [R, V] of the base model plus the adapters, in `Backend.logits_dtype`."""
    logits = backend.base_logits(hidden, head, training=training)
    if lora is not None:
        lora.add_(logits)
    return logits


def _is_rounded(backend: Backend) -> bool:
    """Return whether logits have fewer bits than float32."""
    return backend.logits_dtype.itemsize < 4


def _exact_part(stored: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return the tokens and exact values of stored logits, or None if the logits are exact."""
    return (stored[0], stored[1]) if len(stored) == 3 else None


def _chunks(total: int, size: int) -> list[slice]:
    """Return slices of about `size` rows; a small remainder joins the last slice."""
    starts = [0, *range(size, total - _FEW + 1, size)]
    return [slice(start, stop) for start, stop in pairwise([*starts, total])]
