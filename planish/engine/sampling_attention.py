"""Attention of the sampler: rows against the keys of their prompt, and against those of their own
sample, in place.

Rows whose samples share a prompt attend to its keys in one product; each row then attends to the
few keys behind them. The sums of the second part go on where those of the first end, in the order
that ordered_attention.py prescribes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.engine.kv_cache import KVPool, KVPools
from planish.engine.ordered_attention import Sums, add_spans, attend, peaks, scores
from planish.engine.positions import SPAN, whole_spans

_QUERY_BLOCK = 256
_LANE = 8
"""Most rows of one prompt in one product: with prompts of one sample and of many in a pool, little
is padded.
"""


class PromptSlot(Protocol):
    """A prompt in a pool."""

    slot: int

    @property
    def length(self) -> int: ...


class SampleSlot(Protocol):
    """A running sample: where its own keys lie, how many positions they hold before this step, and
    its prompt.
    """

    slot: int

    @property
    def stored(self) -> int: ...

    @property
    def prompt(self) -> PromptSlot: ...


@dataclass(frozen=True)
class PrefillSpan:
    """Rows row .. row + count - 1 of the batch are positions start .. of the prompt in slot `slot`
    of `pool`.
    """

    pool: KVPool
    slot: int
    row: int
    start: int
    count: int


class PrefillAttention:
    """Prompts' own rows: keys and values go into the prompt's slot, each row sees the positions up
    to its own.
    """

    def __init__(self, spans: Sequence[PrefillSpan]) -> None:
        self._spans = spans

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        for span in self._spans:
            rows = slice(span.row, span.row + span.count)
            self._attend(span, layer, q[rows], k[rows], v[rows], out[rows])
        return out

    def _attend(
        self, span: PrefillSpan, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        keys, values = span.pool.keys[layer][span.slot], span.pool.values[layer][span.slot]
        keys[:, span.start : span.start + span.count] = k.transpose(0, 1)
        values[:, span.start : span.start + span.count] = v.transpose(0, 1)
        heads, group = k.shape[1], q.shape[1] // k.shape[1]
        for first in range(0, span.count, _QUERY_BLOCK):
            part = q[first : first + _QUERY_BLOCK]
            seen = span.start + first + torch.arange(1, len(part) + 1, device=q.device)
            width = whole_spans(span.start + first + len(part))
            queries = part.unflatten(1, (heads, group)).permute(1, 2, 0, 3).flatten(1, 2)
            attended, _ = attend(
                queries[None],
                keys[None, :, :width],
                values[None, :, :width],
                seen.repeat(group)[None, None],
            )
            rows = attended[0].unflatten(1, (group, len(part))).permute(2, 0, 1, 3).flatten(1, 2)
            out[first : first + len(part)] = rows.to(out.dtype)


class DecodeAttention:
    """One new row for each running sample."""

    def __init__(
        self,
        rows: dict[int, int],
        prompts: KVPools,
        samples: KVPools,
        query_rows: int,
        device: torch.device,
    ) -> None:
        """`rows`: the batch row of each sample, by id(sample). Every sample in `samples` has one.

        `query_rows`: fewest rows of a product.
        """
        self._query_rows = query_rows
        self._own = [_own_part(pool, rows, device) for pool in samples.in_use()]
        shared = [
            part for pool in prompts.in_use() for part in _prompt_parts(pool, samples, rows, device)
        ]
        self._parts = [*shared, *self._own]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for part in self._own:
            part.store(layer, k, v)
        grouped = q.unflatten(1, (k.shape[1], -1))
        found = [
            scores(self._placed(part, grouped), part.keys(layer), part.visible)
            for part in self._parts
        ]
        wide = found[0].dtype
        peak = torch.full(
            (*grouped.shape[:-1], 1), torch.finfo(wide).min, dtype=wide, device=q.device
        )
        sums = Sums(torch.zeros_like(grouped, dtype=wide), torch.zeros_like(peak))
        where = [part.rows if part.span is None else part.span for part in self._parts]
        for part, rows, score in zip(self._parts, where, found, strict=True):
            peak[rows] = torch.maximum(peak[rows], part.taken(peaks(score), grouped.shape[2]))
        for part, rows, score in zip(self._parts, where, found, strict=True):
            # A prompt's sums are a row's first.
            before = self._so_far(part, sums) if part in self._own else None
            after = add_spans(score, self._placed(part, peak), part.values(layer), before)
            sums.values[rows] = part.taken(after.values, grouped.shape[2])
            sums.weights[rows] = part.taken(after.weights, grouped.shape[2])
        # Padding rows have no keys at all.
        return (
            (sums.values / sums.weights.clamp_(min=torch.finfo(wide).tiny))
            .flatten(1, 2)
            .to(q.dtype)
        )

    def _so_far(self, part: _Part, sums: Sums) -> Sums:
        return Sums(self._placed(part, sums.values), self._placed(part, sums.weights))

    def _placed(self, part: _Part, x: Tensor) -> Tensor:
        return part.placed(x, self._query_rows)


@dataclass(frozen=True, eq=False)
class _Part:
    """Slots of one pool, and the batch rows that attend to them."""

    pool: KVPool
    slots: Tensor | None
    """None = slots 0 .. n - 1, which need no gathering."""
    table: Tensor
    """Batch row of each of a slot's places [n, lane]; free places hold row 0."""
    taken_places: Tensor | None
    """Places of `rows` within the flattened table; None = all."""
    rows: Tensor
    visible: Tensor
    """Positions of the slot that its rows see: [n, 1, 1]."""
    width: int
    span: slice | None = None
    """The rows as a slice, if each slot has one and they lie in the order of the slots: nothing
    need be gathered then.
    """

    def keys(self, layer: int) -> Tensor:
        return self._of_slots(self.pool.keys[layer])

    def values(self, layer: int) -> Tensor:
        return self._of_slots(self.pool.values[layer])

    def _of_slots(self, kept: Tensor) -> Tensor:
        chosen = kept[: len(self.table)] if self.slots is None else kept[self.slots]
        return chosen[:, :, : self.width]

    def placed(self, x: Tensor, query_rows: int) -> Tensor:
        """x [T, H, group, E] as [n, H, M, E] with M = lane * group, or zeros behind up to
        `query_rows`.
        """
        placed = x[self.table].transpose(1, 2).flatten(2, 3) if self.span is None else x[self.span]
        return F.pad(placed, (0, 0, 0, max(0, query_rows - placed.shape[2])))

    def taken(self, x: Tensor, group: int) -> Tensor:
        """The reverse for the places in use: [n, H, M, E] as [len(rows), H, group, E]."""
        if self.span is not None:
            return x[:, :, :group]
        lane = self.table.shape[1]
        places = x[:, :, : lane * group].unflatten(2, (lane, group)).transpose(1, 2).flatten(0, 1)
        return places if self.taken_places is None else places[self.taken_places]

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put the rows' new keys and values at their slots' last visible positions."""
        slots, last = torch.arange(len(self.rows), device=k.device), self.visible.flatten() - 1
        rows = self.rows if self.span is None else self.span
        self.pool.keys[layer][slots, :, last] = k[rows].to(self.pool.shape.dtype)
        self.pool.values[layer][slots, :, last] = v[rows].to(self.pool.shape.dtype)


def _own_part(pool: KVPool, rows: dict[int, int], device: torch.device) -> _Part:
    """All samples of one pool, each with its own slot."""
    samples = cast("list[SampleSlot]", pool.owners)
    visible = [sample.stored + 1 for sample in samples]
    numbers = [rows[id(sample)] for sample in samples]
    in_order = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    batch_rows = torch.tensor(numbers, device=device)
    return _Part(
        pool=pool,
        slots=None,
        table=batch_rows.unsqueeze(1),
        taken_places=None,
        rows=batch_rows,
        visible=torch.tensor(visible, device=device)[:, None, None],
        width=whole_spans(max(visible)),
        span=slice(numbers[0], numbers[0] + len(numbers)) if in_order else None,
    )


def _prompt_parts(
    pool: KVPool, samples: KVPools, rows: dict[int, int], device: torch.device
) -> list[_Part]:
    """Prompts of one pool, `_LANE` rows each; a prompt with more samples is in several parts.

    Samples see whole spans of the prompt only; what is behind these is in their own slots.
    """
    prompts = cast("list[PromptSlot]", pool.owners)
    members: list[list[int]] = [[] for _ in prompts]
    for sample in (
        sample for other in samples.in_use() for sample in cast("list[SampleSlot]", other.owners)
    ):
        slot = sample.prompt.slot
        if slot < len(prompts) and prompts[slot] is sample.prompt and sample.prompt.length >= SPAN:
            members[slot].append(rows[id(sample)])
    parts = []
    for first in range(0, max(map(len, members)), _LANE):
        slots = [slot for slot, of_slot in enumerate(members) if len(of_slot) > first]
        table = [members[slot][first : first + _LANE] for slot in slots]
        lane = max(map(len, table))
        visible = [prompts[slot].length // SPAN * SPAN for slot in slots]
        parts.append(
            _Part(
                pool=pool,
                slots=None
                if slots == list(range(len(slots)))
                else torch.tensor(slots, device=device),
                table=torch.tensor([row + [0] * (lane - len(row)) for row in table], device=device),
                taken_places=torch.tensor(
                    [i * lane + j for i, row in enumerate(table) for j in range(len(row))],
                    device=device,
                ),
                rows=torch.tensor([row for of_slot in table for row in of_slot], device=device),
                visible=torch.tensor(visible, device=device)[:, None, None],
                width=max(visible),
            )
        )
    return parts
