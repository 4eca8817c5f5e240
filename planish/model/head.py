"""The output head: logits, and logprobs of chosen tokens with their gradients, in bounded memory.

On a CPU a bfloat16 matmul returns bfloat16, which rounds a logit of magnitude 30 by up to 0.06.
Logprobs would have the same error. So two kinds of logits are recomputed as float32 dot products of
single weight rows: the scored targets, and the most likely tokens of each row, which dominate the
log-sum-exp. The other logits stay rounded, because their errors average out in the sum. The
sampler and the trainer both use this module, so their logits agree.

The base head is frozen. Gradients go to the hidden states and to the LoRA factors of the head.

Shapes: R rows, D hidden, V vocabulary, P (row, target) pairs, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.model.head_lora import HeadLora, Member
from planish.model.kernels import choose
from planish.model.kernels.cpp.cpu_head import HeadTable, SingleLogits
from planish.model.linear import FrozenLinear
from planish.model.lora import Site

# Number of logits per row, the largest ones, that are recomputed in float32.
_EXACT = 16
# Number of vocabulary entries that `_chunk_sums` sums in float32 before it changes to float64.
_RUN = 128
# Number of vocabulary entries per block in the search for the largest logits.
_BLOCK = 32
# Number of rows per matmul with the head on a CPU.
_CHUNK = 256
# Number of rows per matmul with the head on a GPU; fewer rows would not fill the GPU.
_LARGE_CHUNK = 2048
# A remainder of fewer rows joins the last chunk, because matmuls of few rows may not be
# batch-invariant (model/kernels/reference/row_tiling.py).
_FEW = 32
# Number of rows converted to float32 at a time on a CPU. Larger buffers do not fit into the cache
# and take four times as long.
_TILE = 16
# Maximum number of gathered weight entries in memory at a time on a CPU.
_PAIR_ENTRIES = 1 << 18
# The same maximum on a GPU. It is larger because each part costs twenty kernel launches and a
# synchronization.
_LARGE_PAIR_ENTRIES = 1 << 24


@torch.no_grad()
def head_logits(hidden: Tensor, head: FrozenLinear, adapters: Sequence[Member] = ()) -> Tensor:
    """Return the logits, float32 [R, V], without gradients.

    `hidden`: [R, D]. `adapters`: head adapters of ranges of rows.
    """
    lora = HeadLora(adapters, hidden) if adapters else None
    logits = _logits(hidden, head, lora)
    if not _is_rounded(hidden):
        return logits.float()
    wide = torch.empty(logits.shape, dtype=torch.float32)
    _likeliest(hidden, head, lora, logits, wide)
    return wide


@torch.no_grad()
def exact_logits(
    hidden: Tensor,
    head: FrozenLinear,
    rows: Tensor,
    tokens: Tensor,
    adapters: Sequence[Member] = (),
) -> Tensor:
    """Return single logits, computed as float32 dot products: float32 [P].

    `rows`, `tokens`: int64 [P], the row and the vocabulary entry of each logit.
    """
    return _dots(hidden, head, HeadLora(adapters, hidden) if adapters else None, rows, tokens)


def scored_logprobs(
    hidden: Tensor,
    head: FrozenLinear,
    site: Site | None,
    rows: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    recompute: bool = False,
) -> Tensor:
    """Return log-softmax(logits[rows] / temperature) at `targets`: float32 [P].

    The result is differentiable with respect to `hidden` and the LoRA factors. `site`: the head
    adapter that all rows use. `rows`, `targets`: int64 [P]. A row may have several targets.

    Rows whose logprobs get a zero gradient cost nothing in the backward pass. The logits (R * V
    entries in `logits_dtype`) are stored for the backward pass, or recomputed if `recompute`.
    """
    a, b = (site.a, site.bs[0]) if site is not None else (None, None)
    keep = torch.is_grad_enabled() and not recompute
    return _ScoredLogprobs.apply(hidden, a, b, site, head, rows, targets, temperature, keep)  # type: ignore[no-any-return]


class _ScoredLogprobs(torch.autograd.Function):
    """The differentiable operation of `scored_logprobs`."""

    @staticmethod
    def forward(
        ctx,
        hidden,
        a,
        b,
        site: Site | None,
        head: FrozenLinear,
        rows,
        targets,
        temperature: float,
        keep: bool,
    ) -> Tensor:
        lora = _of_all(site, hidden)
        kept: list[Tensor] = []
        log_total = torch.empty(hidden.shape[0], dtype=_wide(hidden), device=hidden.device)
        for chunk in _chunks(hidden):
            stored = _stored_logits(hidden[chunk], head, _of_all(site, hidden[chunk], lora, chunk))
            log_total[chunk] = _log_totals(stored, temperature)
            kept += stored if keep else ()
        scored = _dots(hidden, head, lora, rows, targets)
        ctx.save_for_backward(hidden, rows, targets, log_total, *kept)
        ctx.head, ctx.site, ctx.lora, ctx.temperature, ctx.keep = (
            head,
            site,
            lora,
            temperature,
            keep,
        )
        return scored.div_(torch.full_like(scored, temperature)) - log_total[rows]

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of hidden, A and B.

        The gradient of a logprob with respect to the logits is (onehot(target) - softmax) /
        temperature. All pairs of a row are handled together.
        """
        hidden, rows, targets, log_total, *kept = ctx.saved_tensors
        pairs = _LivePairs(rows, targets, grad / ctx.temperature)
        row_grad = log_total.new_zeros(hidden.shape[0]).index_add_(0, pairs.rows, pairs.grad)
        grads = _HeadGrads(hidden, ctx.head, ctx.site, ctx.lora)
        per_chunk = 3 if _is_rounded(hidden) else 1
        for number, chunk in enumerate(_chunks(hidden)):
            where = pairs.distinct_rows(chunk)
            if where.numel() == 0:
                continue
            here = where - chunk.start
            if ctx.keep:
                stored = [
                    tensor[here] for tensor in kept[per_chunk * number : per_chunk * (number + 1)]
                ]
            else:
                stored = _stored_logits(
                    hidden[where], ctx.head, _of_all(ctx.site, hidden[where], ctx.lora, where)
                )
            own = choose.serving(stored[-1], "log_sum_exp")
            if own is not None:
                first, targets, amounts = pairs.by_row(where)
                totals = log_total[where]
                own.normalizers_backward(
                    stored[-1],
                    ctx.temperature,
                    totals,
                    first,
                    targets,
                    amounts,
                    _exact_part(stored),
                )
            else:
                for tile, wide in _wide_tiles(stored):
                    mine = where[tile]
                    wide.div_(ctx.temperature).sub_(log_total[mine, None]).exp_().mul_(
                        -row_grad[mine, None]
                    )
                    pairs.add_at_targets(wide, mine)
                    stored[-1][tile] = wide
            grads.add(where, stored[-1].to(hidden.dtype))
        return grads.hidden, *grads.matrices, *[None] * 6


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

    def add_at_targets(self, grad_logits: Tensor, rows: Tensor) -> None:
        """Add each pair's gradient at its target, in place.

        `grad_logits`: [R, V]. `rows`: the row numbers of `grad_logits`, int64 [R] ascending.
        """
        mine = self._between(int(rows[0]), int(rows[-1]))
        slots = torch.searchsorted(rows, self.rows[mine])
        grad_logits.index_put_((slots, self._targets[mine]), self.grad[mine], accumulate=True)


class _HeadGrads:
    """The gradients of hidden, A and B, accumulated over chunks of rows."""

    def __init__(
        self, hidden: Tensor, head: FrozenLinear, site: Site | None, lora: HeadLora | None
    ) -> None:
        self._source, self._head, self._site, self._lora = hidden, head, site, lora
        self.hidden = torch.zeros_like(hidden)
        matrices = () if site is None else (site.a, site.bs[0])
        self._sums = [
            torch.zeros(matrix.shape, dtype=_wide(hidden), device=hidden.device)
            for matrix in matrices
        ]

    def add(self, where: Tensor, grad_logits: Tensor) -> None:
        """Add the gradients of the rows `where` [R], given `grad_logits` [R, V]."""
        grad_hidden = self._head.product_back(grad_logits)
        if self._site is not None and self._lora is not None:
            low = self._lora.low[where][:, : len(self._site.a)]
            given = (grad_logits, self._source[where], low, grad_hidden, [grad_logits.shape[1]])
            grad_a, (grad_b,) = self._site.backward_(*given)
            self._sums[0] += grad_a
            self._sums[1] += grad_b
        self.hidden[where] = grad_hidden

    @property
    def matrices(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of A and B, or (None, None) without an adapter."""
        a, b = self._sums or (None, None)
        return a, b


def _of_all(
    site: Site | None,
    hidden: Tensor,
    whole: HeadLora | None = None,
    part: slice | Tensor | None = None,
) -> HeadLora | None:
    """Return `site` as the adapter of all rows of `hidden`, or None without an adapter.

    If `whole` is given, `hidden` is the part `part` of its rows, and the LoRA hidden states of
    `whole` are reused.
    """
    low = None if whole is None else whole.low[part]
    return None if site is None else HeadLora([(0, hidden.shape[0], site)], hidden, low)


def _stored_logits(hidden: Tensor, head: FrozenLinear, lora: HeadLora | None) -> list[Tensor]:
    """Return [logits], or [tokens, exact values, logits] if the logits are rounded.

    The exact values then replace the rounded logits at `tokens` (`_likeliest`).
    """
    logits = _logits(hidden, head, lora)
    return [*_likeliest(hidden, head, lora, logits), logits] if _is_rounded(hidden) else [logits]


def _wide_tiles(stored: list[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Yield the stored logits in float32 (or wider), a few rows at a time.

    All tiles share one buffer, which fits into a CPU's cache. A tile is valid until the next one.
    """
    *corrections, logits = stored
    size = _TILE if logits.device.type == "cpu" else _CHUNK
    buffer = torch.empty(
        min(size, logits.shape[0]), logits.shape[1], dtype=_wide(logits), device=logits.device
    )
    for tile in _spans(logits.shape[0], size):
        wide = buffer[: tile.stop - tile.start].copy_(logits[tile])
        if corrections:
            tokens, exact = corrections
            wide.scatter_(1, tokens[tile], exact[tile])
        yield tile, wide


def log_normalizer(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return the log-sum-exp [R] of logits / temperature.

    `logits`: float32 [R, V]. They are overwritten with exp(scaled logit - max of the row).
    `temperature`: [R].
    """
    own = choose.serving(logits, "log_sum_exp")
    if own is not None:
        return own.normalizers(logits, temperature, weights=logits)
    peak = logits.div_(temperature.unsqueeze(1)).amax(1, keepdim=True)
    return (peak.squeeze(1) + _chunk_sums(logits.sub_(peak).exp_()).sum(1).log()).to(logits.dtype)


def _chunk_sums(weights: Tensor) -> Tensor:
    """Return the sums of runs of 128 entries: float64 [R, C].

    With such short runs the order of the additions does not depend on R.
    """
    missing = -weights.shape[1] % _RUN
    return (
        (F.pad(weights, (0, missing)) if missing else weights)
        .unflatten(1, (-1, _RUN))
        .sum(2)
        .double()
    )


def _log_totals(stored: list[Tensor], temperature: float) -> Tensor:
    """Return `log_normalizer` of stored logits without changing them."""
    own = choose.serving(stored[-1], "log_sum_exp")
    if own is not None:
        temperatures = torch.full((stored[-1].shape[0],), temperature, device=stored[-1].device)
        return own.normalizers(stored[-1], temperatures, _exact_part(stored))
    totals = torch.empty(stored[-1].shape[0], dtype=_wide(stored[-1]), device=stored[-1].device)
    for tile, wide in _wide_tiles(stored):
        totals[tile] = log_normalizer(wide, wide.new_full(wide.shape[:1], temperature))
    return totals


def _exact_part(stored: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return the tokens and exact values of stored logits, or None if the logits are exact."""
    return (stored[0], stored[1]) if len(stored) == 3 else None


def _wide(x: Tensor) -> torch.dtype:
    """Return float32, or the dtype of `x` if that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _is_rounded(hidden: Tensor) -> bool:
    """Return whether a plain matmul returns fewer bits than float32."""
    return hidden.dtype in (torch.bfloat16, torch.float16) and hidden.device.type == "cpu"


def logits_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which logits are computed and stored for the backward pass.

    `dtype`: the dtype of the hidden states. On a GPU the logits have the accumulation dtype of the
    matmul, at least float32.
    """
    return dtype if device.type == "cpu" else torch.promote_types(dtype, torch.float32)


def rows_at_once(device: torch.device) -> int:
    """Return the number of rows whose logits are in memory at a time if they are recomputed."""
    return _CHUNK if device.type == "cpu" else _LARGE_CHUNK


def base_product(hidden: Tensor, head: FrozenLinear) -> Tensor:
    """Return the logits [R, V] of the base model, without adapters, in `logits_dtype`."""
    dtype = logits_dtype(hidden.dtype, hidden.device)
    if dtype != hidden.dtype:
        return torch.mm(hidden, head.weight.t(), out_dtype=dtype)
    return head.product(hidden)


def _logits(hidden: Tensor, head: FrozenLinear, lora: HeadLora | None) -> Tensor:
    """Return the logits [R, V] of the base model plus the adapters, in `logits_dtype`."""
    logits = base_product(hidden, head)
    if lora is not None:
        lora.add_(logits)
    return logits


def _likeliest(
    hidden: Tensor,
    head: FrozenLinear,
    lora: HeadLora | None,
    logits: Tensor,
    wide: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of each row: tokens [R, k] and exact float32 values [R, k].

    `wide`: an optional float32 output [R, V]. It receives all logits, with the exact values at
    the returned tokens.
    """
    k = min(_EXACT, logits.shape[1])
    own = _single(hidden, head, lora)
    if own is not None:
        return own.likeliest(logits, k, wide)
    tokens = _top_tokens(logits, k)
    rows = torch.arange(hidden.shape[0], device=hidden.device).repeat_interleave(k)
    exact = _dots(hidden, head, lora, rows, tokens.flatten()).view(tokens.shape)
    if wide is not None:
        wide.copy_(logits).scatter_(1, tokens, exact)
    return tokens, exact


def _single(hidden: Tensor, head: FrozenLinear, lora: HeadLora | None) -> SingleLogits | None:
    """Return the native CPU kernels for single logits, or None if they are not supported."""
    if not SingleLogits.serve(hidden, head.weight):
        return None
    return SingleLogits(
        hidden,
        head.weight,
        *((lora.table, lora.low) if lora is not None else (HeadTable(()), None)),
    )


def _top_tokens(logits: Tensor, k: int) -> Tensor:
    """Return the indices [R, k] of the k largest logits of each row.

    The k largest logits lie in the k blocks with the largest maxima. So one pass over the logits
    suffices. A full `topk` over the vocabulary would cost as much as the matmul itself.
    """
    width = logits.shape[1] // _BLOCK
    if width <= 2 * k:
        return logits.topk(k, dim=1).indices
    blocks = (
        logits[:, : width * _BLOCK].unflatten(1, (_BLOCK, width)).amax(1).topk(k, dim=1).indices
    )
    steps = torch.arange(_BLOCK, device=logits.device) * width
    candidates = (blocks.unsqueeze(2) + steps).flatten(1)
    rest = torch.arange(width * _BLOCK, logits.shape[1], device=logits.device).expand(
        logits.shape[0], -1
    )
    candidates = torch.cat([candidates, rest], 1)
    return candidates.gather(1, logits.gather(1, candidates).topk(k, dim=1).indices)


def _dots(
    hidden: Tensor, head: FrozenLinear, lora: HeadLora | None, rows: Tensor, tokens: Tensor
) -> Tensor:
    """Return single logits [P] in float32 (or wider).

    Each logit is its own dot product, so it is bitwise independent of the other pairs.
    """
    own = _single(hidden, head, lora)
    if own is not None:
        return own.at(rows, tokens)
    out = torch.empty(rows.shape[0], dtype=_wide(hidden), device=hidden.device)
    entries = _PAIR_ENTRIES if hidden.device.type == "cpu" else _LARGE_PAIR_ENTRIES
    for part in _spans(rows.shape[0], max(1, entries // hidden.shape[1])):
        out[part] = (
            hidden[rows[part]].to(out.dtype) * head.weight[tokens[part]].to(out.dtype)
        ).sum(-1)
        if lora is not None:
            lora.add_single_(out[part], rows[part], tokens[part])
    return out


def _chunks(hidden: Tensor) -> list[slice]:
    """Return slices of about `rows_at_once` rows; a small remainder joins the last slice."""
    total, size = hidden.shape[0], rows_at_once(hidden.device)
    starts = [0, *range(size, total - _FEW + 1, size)]
    return [slice(start, stop) for start, stop in pairwise([*starts, total])]


def _spans(total: int, size: int) -> list[slice]:
    """Return slices of at most `size` that cover range(total)."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
