"""The log-sum-exp of logits and its gradient in torch.

Shapes: see kernels/interface/parts.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.model.device import Device
from planish.model.kernels.interface.parts import ExactLogits
from planish.model.kernels.reference.elementwise import accum_dtype
from planish.model.layers.row_tiling import row_slices

# Number of vocabulary entries that `_chunk_sums` sums in float32 before it changes to float64.
_SUM_CHUNK = 128
# Number of rows converted to float32 at a time, on a CPU and on a GPU. Larger buffers do not fit
# into a CPU's cache and take four times as long.
_FLOAT32_ROWS = (16, 256)


class TorchLogSumExp:
    """The log-sum-exp of logits and its gradient (see `LogSumExp`), a few rows at a time."""

    def __init__(self, device: torch.device) -> None:
        self._float32_rows = _FLOAT32_ROWS[Device(device).is_gpu]

    def log_sum_exp(
        self,
        logits: Tensor,
        temperature: Tensor,
        exact: ExactLogits | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the log-sum-exp [R] of logits [R, V] / temperature [R], in float32 or wider."""
        if weights is not None:
            weights = weights if weights is logits else weights.copy_(logits)
            if exact is not None:
                weights.scatter_(1, *exact)
            return _log_sum_exp_(weights, temperature)
        totals = torch.empty(len(logits), dtype=accum_dtype(logits), device=logits.device)
        for row_slice, scaled_logits in self._float32_logits(logits, exact):
            totals[row_slice] = _log_sum_exp_(scaled_logits, temperature[row_slice])
        return totals

    def log_sum_exp_backward_(
        self,
        logits: Tensor,
        temperature: float,
        log_total: Tensor,
        first: Tensor,
        targets: Tensor,
        grads: Tensor,
        exact: ExactLogits | None = None,
    ) -> None:
        """Overwrite logits [R, V] with the gradient of the loss sum(grads * logprobs)."""
        rows = torch.arange(len(logits), device=logits.device)
        row_of_pair = rows.repeat_interleave(first.diff(), output_size=len(targets))
        row_grad = log_total.new_zeros(len(logits)).index_add_(0, row_of_pair, grads)
        for row_slice, logits_grad in self._float32_logits(logits, exact):
            logits_grad.div_(temperature).sub_(log_total[row_slice, None]).exp_().mul_(
                -row_grad[row_slice, None]
            )
            pairs = slice(*first[[row_slice.start, row_slice.stop]].tolist())
            logits_grad.index_put_(
                (row_of_pair[pairs] - row_slice.start, targets[pairs]),
                grads[pairs],
                accumulate=True,
            )
            logits[row_slice] = logits_grad

    def log_sum_exp_backward(
        self,
        logits: Tensor,
        rows: Tensor,
        temperature: float,
        log_total: Tensor,
        first: Tensor,
        targets: Tensor,
        grads: Tensor,
        exact: ExactLogits | None = None,
    ) -> Tensor:
        """Return the gradient for some rows of `logits` [R, V]: [N, V]. `rows`: int64 [N]."""
        grad = logits[rows]
        exact_of_rows = None if exact is None else (exact[0][rows], exact[1][rows])
        self.log_sum_exp_backward_(
            grad, temperature, log_total, first, targets, grads, exact_of_rows
        )
        return grad

    def _float32_logits(
        self, logits: Tensor, exact: ExactLogits | None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits in float32 or wider with their exact values, a few rows at a time.

        All parts share one buffer, which fits into a CPU's cache. Each part is valid until the next
        part is requested.
        """
        rows, vocab = logits.shape
        size = (min(self._float32_rows, rows), vocab)
        buffer = torch.empty(size, dtype=accum_dtype(logits), device=logits.device)
        for row_slice in row_slices(rows, self._float32_rows):
            float32_logits = buffer[: row_slice.stop - row_slice.start].copy_(logits[row_slice])
            if exact is not None:
                float32_logits.scatter_(1, exact[0][row_slice], exact[1][row_slice])
            yield row_slice, float32_logits


def _log_sum_exp_(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return the log-sum-exp [R] of logits / temperature.

    `logits` [R, V] are overwritten with exp(scaled logit - max of the row).
    """
    row_max = logits.div_(temperature.unsqueeze(1)).amax(1, keepdim=True)
    return (row_max.squeeze(1) + _chunk_sums(logits.sub_(row_max).exp_()).sum(1).log()).to(
        logits.dtype
    )


def _chunk_sums(weights: Tensor) -> Tensor:
    """Return the sums of 128 consecutive entries each: float64 [R, C].

    torch adds so few entries in the same order for every R, so the sums are batch-invariant.
    """
    missing = -weights.shape[1] % _SUM_CHUNK
    padded = F.pad(weights, (0, missing)) if missing else weights
    return padded.unflatten(1, (-1, _SUM_CHUNK)).sum(2).double()
