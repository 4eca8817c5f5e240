"""The logits of the LM head and of its adapters in torch.

Shapes: see kernels/interface/parts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from planish.model.device import Device
from planish.model.kernels.interface.parts import ExactLogits, HeadAdapters, Matmuls, SingleLogits
from planish.model.kernels.reference.elementwise import accum_dtype
from planish.model.layers.linear import PackedLinear
from planish.model.layers.lora import HeadAdapterRange, LoraMatrices, padded_lora_columns
from planish.model.layers.row_tiling import RowTiling, RowTilings, row_slices

# Number of vocabulary entries per block in the search for the largest logits.
_BLOCK = 32
# Maximum number of gathered weight entries in memory at a time, on a CPU and on a GPU. It is larger
# on a GPU because each part costs twenty kernel launches and a synchronization.
_GATHERED_ENTRIES = (1 << 18, 1 << 24)
# Number of rows per matmul with the head, on a CPU and on a GPU. Fewer rows would not fill a GPU.
_HEAD_ROWS = (256, 2048)


class TorchHead:
    """The logits of the LM head (see `Head`)."""

    def __init__(
        self,
        matmuls: Matmuls,
        dtype: torch.dtype,
        device: torch.device,
        tilings: RowTilings,
        single_logits: SingleLogits | None = None,
    ) -> None:
        """`matmuls`: compute the logits of all tokens. `dtype`: the dtype of the model.

        `single_logits`: a kernel for single logits in float32. With it, the trainer's logits on a
        GPU have the model's dtype, because recomputing the largest ones then costs little.
        """
        is_gpu = Device(device).is_gpu
        self._matmul, self._dtype, self._tilings = matmuls.matmul, dtype, tilings
        self.logits_dtype = torch.promote_types(dtype, torch.float32) if is_gpu else dtype
        self.training_logits_dtype = self.logits_dtype if single_logits is None else dtype
        self._single_logits = single_logits
        self.head_rows = _HEAD_ROWS[is_gpu]
        self._gathered_entries = _GATHERED_ENTRIES[is_gpu]

    def base_logits(self, hidden: Tensor, head: PackedLinear, *, training: bool = False) -> Tensor:
        """Return the logits [R, V] of the base model. `hidden`: [R, D]."""
        if self._dtype == (self.training_logits_dtype if training else self.logits_dtype):
            return self._matmul(hidden, head, training=training)

        def float32_matmul(hidden: Tensor) -> Tensor:
            logits = torch.mm(hidden, head.weight.t(), out_dtype=self.logits_dtype)
            return logits if head.bias is None else logits.add_(head.bias)

        return self._tilings.of(training=training).run(float32_matmul, hidden)

    def head_adapters(
        self,
        adapter_ranges: Sequence[HeadAdapterRange],
        hidden: Tensor,
        lora_hidden: Tensor | None = None,
    ) -> HeadAdapters:
        """Return head adapters that are applied to one range of rows after another."""
        return TorchHeadAdapters(self._tilings.sampling, adapter_ranges, hidden, lora_hidden)

    def top_logits(
        self,
        hidden: Tensor,
        head: PackedLinear,
        adapters: HeadAdapters | None,
        logits: Tensor,
        k: int,
        float32_logits: Tensor | None = None,
    ) -> ExactLogits:
        """Find the k largest `logits` of each row, and return them recomputed in float32."""
        return recomputed_top_logits(
            lambda rows, tokens: self.token_logits(hidden, head, adapters, rows, tokens),
            logits,
            k,
            float32_logits,
        )

    def token_logits(
        self,
        hidden: Tensor,
        head: PackedLinear,
        adapters: HeadAdapters | None,
        rows: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        """Return single logits [P] in float32 or wider, as sums of elementwise products."""
        if self._single_logits is not None:
            return self._kernel_logits(self._single_logits, hidden, head, adapters, rows, tokens)
        out = torch.empty(rows.shape[0], dtype=accum_dtype(hidden), device=hidden.device)
        for pair_slice in row_slices(
            rows.shape[0], max(1, self._gathered_entries // hidden.shape[1])
        ):
            x, weight = (
                hidden[rows[pair_slice]].to(out.dtype),
                head.weight[tokens[pair_slice]].to(out.dtype),
            )
            out[pair_slice] = (x * weight).sum(-1)
            if adapters is not None:
                adapters.add_single_(out[pair_slice], rows[pair_slice], tokens[pair_slice])
        return out

    def _kernel_logits(
        self,
        kernel: SingleLogits,
        hidden: Tensor,
        head: PackedLinear,
        adapters: HeadAdapters | None,
        rows: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        """Return single logits [P] of a kernel, which also applies an adapter that all rows use."""
        lora = adapters.lora_of_all_rows if isinstance(adapters, TorchHeadAdapters) else None
        out = kernel(hidden, head.weight, rows, tokens, lora)
        if adapters is not None and lora is None:
            adapters.add_single_(out, rows, tokens)
        return out


class TorchHeadAdapters:
    """The head adapters of ranges of rows, applied one after another."""

    hidden: Tensor
    """The LoRA hidden states [R, r or more]."""

    def __init__(
        self,
        tiling: RowTiling,
        adapter_ranges: Sequence[HeadAdapterRange],
        x: Tensor,
        lora_hidden: Tensor | None,
    ) -> None:
        self._tiling, self._adapter_ranges = tiling, adapter_ranges
        self.hidden = self._lora_hidden(x) if lora_hidden is None else lora_hidden

    @property
    def lora_of_all_rows(self) -> tuple[Tensor, Tensor] | None:
        """The LoRA hidden states [R, r or more] and B [V, r] if all rows use one adapter."""
        if len(self._adapter_ranges) != 1:
            return None
        start, stop, lora = self._adapter_ranges[0]
        is_whole = (start, stop) == (0, len(self.hidden))
        return (self.hidden, lora.b_matrices[0]) if is_whole else None

    def _lora_hidden(self, x: Tensor) -> Tensor:
        ranks = [lora.rank for _, _, lora in self._adapter_ranges]
        width = max(map(padded_lora_columns, ranks), default=0)
        # The C++ kernels of single logits read an even number of columns and multiply those after
        # the rank by zero, which gives NaN if they are not finite.
        hidden = x.new_zeros(x.shape[0], width)
        for start, stop, lora in self._adapter_ranges:
            a, rows = lora.a.t(), x[start:stop]
            hidden[start:stop, : lora.rank] = self._tiling.run(
                lambda rows, a=a: rows @ a, rows, rank=lora.rank
            )
        return hidden

    def add_(self, logits: Tensor) -> None:
        """Add the adapters' part to `logits` [R, V], in place."""
        for start, stop, lora in self._adapter_ranges:

            def add(hidden: Tensor, logits: Tensor, lora: LoraMatrices = lora) -> Tensor:
                lora_hidden, b = hidden[:, : lora.rank], lora.b_matrices[0].t()
                if logits.dtype == hidden.dtype:
                    logits.addmm_(lora_hidden, b)
                else:
                    logits.add_(torch.mm(lora_hidden, b, out_dtype=logits.dtype))
                return hidden

            self._tiling.run(add, self.hidden[start:stop], logits[start:stop], rank=lora.rank)

    def add_single_(self, out: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """Add the adapters' part to single logits `out` [P] of `rows` and `tokens` [P]."""
        for start, stop, lora in self._adapter_ranges:
            own_pairs = ((rows >= start) & (rows < stop)).nonzero().squeeze(1)
            lora_hidden, b = (
                self.hidden[rows[own_pairs], : lora.rank],
                lora.b_matrices[0][tokens[own_pairs]],
            )
            out[own_pairs] += (lora_hidden.to(out.dtype) * b.to(out.dtype)).sum(-1)


def recomputed_top_logits(
    token_logits: Callable[[Tensor, Tensor], Tensor],
    logits: Tensor,
    k: int,
    float32_logits: Tensor | None,
) -> ExactLogits:
    """Find the k largest `logits` [R, V] of each row, and recompute them (see `Head.top_logits`).

    `token_logits` returns single logits [P] in float32 or wider, given rows and tokens, int64 [P].
    """
    tokens = top_tokens(logits, k)
    rows = torch.arange(len(logits), device=logits.device).repeat_interleave(k)
    exact = token_logits(rows, tokens.flatten()).view(tokens.shape)
    if float32_logits is not None:
        float32_logits.copy_(logits).scatter_(1, tokens, exact)
    return tokens, exact


def top_tokens(logits: Tensor, k: int) -> Tensor:
    """Return the indices [R, k] of the k largest logits of each row.

    The k largest logits lie in the k blocks with the largest maxima. So one pass over the logits
    suffices. A full `topk` over the vocabulary would cost as much as the matmul itself.
    """
    num_blocks = logits.shape[1] // _BLOCK
    if num_blocks <= 2 * k:
        return logits.topk(k, dim=1).indices
    blocks = (
        logits[:, : num_blocks * _BLOCK]
        .unflatten(1, (_BLOCK, num_blocks))
        .amax(1)
        .topk(k, dim=1)
        .indices
    )
    offsets_in_block = torch.arange(_BLOCK, device=logits.device) * num_blocks
    candidates = (blocks.unsqueeze(2) + offsets_in_block).flatten(1)
    tail_tokens = torch.arange(num_blocks * _BLOCK, logits.shape[1], device=logits.device).expand(
        logits.shape[0], -1
    )
    candidates = torch.cat([candidates, tail_tokens], 1)
    return candidates.gather(1, logits.gather(1, candidates).topk(k, dim=1).indices)
