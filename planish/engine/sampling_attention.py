"""Attention of the sampler: rows against the keys of their prompt, and against those of their own sample, in place.

Rows whose samples share a prompt attend to its keys in one matrix product; each row then attends to the few keys drawn after the
prompt. The two parts meet by their softmax denominators (as in FlashAttention, Dao et al. 2022), so the result is
that of attention over both.

In deterministic mode each product has a shape that depends on the row's own sequence alone (full slots, a fixed number of query rows), so
that its bits do too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from planish.engine.kv_cache import CHUNK, KVPool, KVPools

_LANE_ROWS = 8
"""Query rows of one prompt in one product, in deterministic mode."""


class PromptSlot(Protocol):
    """A prompt in a pool."""

    slot: int
    length: int


class SampleSlot(Protocol):
    """A running sample: where its own keys lie, how many positions they hold before this step, and its prompt."""

    slot: int
    drawn: int

    @property
    def prompt(self) -> PromptSlot: ...


@dataclass(frozen=True)
class Partial:
    """Attention over some of the keys: out is the weighted sum of values with weights exp(score - peak), total their sum."""

    out: Tensor
    """float32 [..., E]"""
    peak: Tensor
    """float32 [..., 1]"""
    total: Tensor
    """float32 [..., 1]"""


def attend_part(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Partial:
    """q [G, H, M, E] against keys, values [G, H, C, E]; bias (0 or -inf) broadcasts to [G, H, M, C]."""
    scores = _scores(q, keys).add_(bias)
    # Rows without any key have peak -inf; -inf minus -inf would be NaN.
    peak = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    return Partial(torch.matmul(weights.to(values.dtype), values).float(), peak, total)


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both."""
    peak = torch.maximum(a.peak, b.peak)
    scale_a, scale_b = (a.peak - peak).exp_(), (b.peak - peak).exp_()
    return Partial(a.out * scale_a + b.out * scale_b, peak, a.total * scale_a + b.total * scale_b)


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """Scaled scores in float32; operands in bf16 are multiplied exactly and summed in float32."""
    scale = q.shape[-1] ** -0.5
    if keys.dtype == torch.float32:
        return torch.matmul(q.float() * scale, keys.transpose(-1, -2))
    groups, heads = q.shape[:2]
    flat = torch.bmm(q.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), out_dtype=torch.float32)
    return flat.unflatten(0, (groups, heads)).mul_(scale)


def _causal_bias(visible: Tensor, width: int) -> Tensor:
    """0 where a key's position is below `visible`, -inf elsewhere: [*visible.shape, width]."""
    hidden = torch.arange(width, device=visible.device) >= visible.unsqueeze(-1)
    return torch.zeros(hidden.shape, device=visible.device).masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True)
class PrefillSpan:
    """Rows row .. row + count - 1 of the batch are positions start .. of the prompt in slot `slot` of `pool`."""

    pool: KVPool
    slot: int
    row: int
    start: int
    count: int


class PrefillAttention:
    """Prompts' own rows: keys and values go into the prompt's slot, each row sees the positions up to its own."""

    def __init__(self, spans: Sequence[PrefillSpan], query_chunk: int | None) -> None:
        """`query_chunk`: rows of one product; given, every product is padded to exactly that many (deterministic mode)."""
        self._spans = spans
        self._pad = query_chunk is not None
        self._chunk = query_chunk or 8 * CHUNK

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        for span in self._spans:
            rows = slice(span.row, span.row + span.count)
            self._attend(span, layer, q[rows], k[rows], v[rows], out[rows])
        return out

    def _attend(self, span: PrefillSpan, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        keys, values = span.pool.keys[layer][span.slot], span.pool.values[layer][span.slot]
        end = span.start + span.count
        keys[:, span.start : end] = k.transpose(0, 1)
        values[:, span.start : end] = v.transpose(0, 1)
        for first in range(0, span.count, self._chunk):
            part = q[first : first + self._chunk]
            rows = self._chunk if self._pad else part.shape[0]
            queries = q.new_zeros(rows, *q.shape[1:])
            queries[: part.shape[0]] = part
            positions = span.start + first + torch.arange(rows, device=q.device)
            width = -(-(span.start + first + rows) // CHUNK) * CHUNK
            width = min(width, span.pool.capacity)
            bias = _causal_bias(positions + 1, width).repeat(q.shape[1] // k.shape[1], 1)
            heads = queries.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3).flatten(1, 2)
            part_out = attend_part(heads.unsqueeze(0), keys[None, :, :width], values[None, :, :width], bias)
            attended = (part_out.out / part_out.total).squeeze(0).unflatten(1, (-1, rows))
            out[first : first + part.shape[0]] = (
                attended.permute(2, 0, 1, 3).flatten(1, 2)[: part.shape[0]].to(out.dtype)
            )


class DecodeAttention:
    """One new row for each running sample."""

    def __init__(
        self, rows: dict[int, int], prompts: KVPools, samples: KVPools, deterministic: bool, device: torch.device
    ) -> None:
        """`rows`: the batch row of each sample, by id(sample). Every sample in `samples` has one."""
        self._deterministic = deterministic
        self._samples = [self._sample_part(pool, rows, device) for pool in samples.in_use()]
        self._prompts = [part for pool in prompts.in_use() for part in self._prompt_parts(pool, samples, rows, device)]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = k.shape[1]
        grouped = q.unflatten(1, (heads, -1))
        prompts, own = _Gathered.like(grouped), _Gathered.like(grouped)
        for part in self._prompts:
            prompts.put(part.rows, part.attend(layer, grouped))
        for part in self._samples:
            part.store(layer, k, v)
            own.put(part.rows, part.attend(layer, grouped))
        both = merge(prompts.partial, own.partial)
        # Padding rows have no keys at all.
        return (both.out / both.total.clamp_(min=torch.finfo(torch.float32).tiny)).flatten(1, 2).to(q.dtype)

    def _sample_part(self, pool: KVPool, rows: dict[int, int], device: torch.device) -> _SamplePart:
        drawn = [sample.drawn for sample in pool.owners]  # type: ignore[attr-defined]
        width = pool.capacity if self._deterministic else -(-(max(drawn) + 1) // CHUNK) * CHUNK
        positions = torch.tensor(drawn, device=device)
        return _SamplePart(
            pool=pool,
            rows=torch.tensor([rows[id(sample)] for sample in pool.owners], device=device),
            positions=positions,
            bias=_causal_bias(positions + 1, min(width, pool.capacity))[:, None, None],
        )

    def _prompt_parts(
        self, pool: KVPool, samples: KVPools, rows: dict[int, int], device: torch.device
    ) -> list[_PromptPart]:
        by_slot: list[list[int]] = [[] for _ in pool.owners]
        for sample_pool in samples.in_use():
            for sample in sample_pool.owners:
                prompt: PromptSlot = sample.prompt  # type: ignore[attr-defined]
                if prompt.slot < len(pool.owners) and pool.owners[prompt.slot] is prompt:
                    by_slot[prompt.slot].append(rows[id(sample)])
        most = max(map(len, by_slot), default=0)
        lane = _LANE_ROWS if self._deterministic else most
        parts = []
        for first in range(0, most, max(lane, 1)):
            slots = [slot for slot, members in enumerate(by_slot) if len(members) > first]
            members = [by_slot[slot][first : first + lane] for slot in slots]
            parts.append(_prompt_part(pool, slots, members, lane, self._deterministic, device))
        return parts


@dataclass(frozen=True)
class _SamplePart:
    """All samples of one pool: slot i is batch row rows[i], its new key goes to positions[i]."""

    pool: KVPool
    rows: Tensor
    positions: Tensor
    bias: Tensor

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        slots = torch.arange(len(self.rows), device=k.device)
        self.pool.keys[layer][slots, :, self.positions] = k[self.rows].to(self.pool.shape.key_dtype)
        self.pool.values[layer][slots, :, self.positions] = v[self.rows]

    def attend(self, layer: int, grouped: Tensor) -> Partial:
        """grouped [T, H, M, E] -> one partial a slot: [n, H, M, E]."""
        n, width = len(self.rows), self.bias.shape[-1]
        return attend_part(
            grouped[self.rows], self.pool.keys[layer][:n, :, :width], self.pool.values[layer][:n, :, :width], self.bias
        )


@dataclass(frozen=True)
class _PromptPart:
    """Some prompts of one pool, `lane` rows each: table [n, lane] holds batch rows, padded with row 0."""

    pool: KVPool
    slots: Tensor | None
    """None = slots 0 .. n - 1, which need no gathering."""
    table: Tensor
    valid: Tensor
    """Places of the real rows within the flattened table."""
    rows: Tensor
    """Their batch rows, in the same order."""
    bias: Tensor

    def attend(self, layer: int, grouped: Tensor) -> Partial:
        n, lane = self.table.shape
        heads, width = grouped.shape[1], self.bias.shape[-1]
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        if self.slots is not None:
            keys, values = keys[self.slots], values[self.slots]
        q = grouped[self.table].transpose(1, 2).flatten(2, 3)
        part = attend_part(q, keys[:n, :, :width], values[:n, :, :width], self.bias)

        def by_row(x: Tensor) -> Tensor:
            return x.unflatten(2, (lane, -1)).transpose(1, 2).reshape(n * lane, heads, -1, x.shape[-1])[self.valid]

        return Partial(by_row(part.out), by_row(part.peak), by_row(part.total))


def _prompt_part(
    pool: KVPool, slots: list[int], members: list[list[int]], lane: int, deterministic: bool, device: torch.device
) -> _PromptPart:
    lengths = [pool.owners[slot].length for slot in slots]  # type: ignore[attr-defined]
    width = pool.capacity if deterministic else min(pool.capacity, -(-max(lengths) // CHUNK) * CHUNK)
    table = [row + [0] * (lane - len(row)) for row in members]
    valid = [i * lane + j for i, row in enumerate(members) for j in range(len(row))]
    return _PromptPart(
        pool=pool,
        slots=None if slots == list(range(len(slots))) else torch.tensor(slots, device=device),
        table=torch.tensor(table, device=device),
        valid=torch.tensor(valid, device=device),
        rows=torch.tensor([row for rows in members for row in rows], device=device),
        bias=_causal_bias(torch.tensor(lengths, device=device), width)[:, None, None],
    )


@dataclass(frozen=True)
class _Gathered:
    """Partials of all rows of the batch, filled part by part."""

    partial: Partial

    @classmethod
    def like(cls, grouped: Tensor) -> _Gathered:
        out = torch.zeros(grouped.shape, dtype=torch.float32, device=grouped.device)
        peak = out.new_full((*grouped.shape[:-1], 1), torch.finfo(torch.float32).min)
        return cls(Partial(out, peak, torch.zeros_like(peak)))

    def put(self, rows: Tensor, part: Partial) -> None:
        self.partial.out[rows] = part.out
        self.partial.peak[rows] = part.peak
        self.partial.total[rows] = part.total
