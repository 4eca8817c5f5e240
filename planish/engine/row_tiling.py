"""Numbers of rows for which a row's product has the same bits.

A matrix library picks its kernel, and with it the order of additions, by the number of rows. So the
logits of one sample depend, in their last bits, on how many others are in the batch, unless every
product has a number of rows from a set within which the library was seen to give the same bits.
`probe` looks, on the model's own shapes, for the smallest `multiple` such that all multiples of it
agree from some number of rows on; where there is none, products run in tiles of a fixed number of
rows, which is the same by construction, and slower.

Our own products (native/cpu_products.py) need none of this, and are not looked at: they have one
order for any number of rows. Those on other CPUs do, and adapters of a head whose vocabulary is no
multiple of 16. Few rows are what differs in practice: oneDNN has another kernel for one row of more
than 1024 columns, and torch multiplies small matrices (up to 16 ** 3 multiplications, so few rows
of a LoRA of low rank) by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from planish.engine.ordered_attention import QUERY_ROWS
from planish.engine.positions import SPAN
from planish.model.config import ModelConfig
from planish.model.linear import FrozenLinear
from planish.model.lora import (
    LAYER_SITES,
    LoraWeights,
    adapts_in_panels,
    head_adapts_in_panels,
    linear_shape,
)
from planish.native import cpu
from planish.native.cpu_products import LOW_COLUMNS, multiplies

_MULTIPLES = (1, 4, 16)
_LEAST = (1, 2, 4, 8, 16, 32)
_ROWS = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 20, 28, 31, 32, 33, 48, 63, 64, 65),
    *(80, 96, 112, 128, 160, 192, 200, 240, 256, 384, 500, 512),
)
_PROBE_COLUMNS = 4096
_QUERY_ROWS = (1, 2, 4, 8)
_LORA_RANKS = (8, 16, 32)
_LOW_RANKS = (1, 2, 4)
"""Looked at too, but a rank that needs more rows than _LEAST has is not padded for: on some
machines rank 1 in float32 does.
"""
_LORA_ROWS = 32
"""Rows of a LoRA's product that are looked at for each number of rows: its sums are short, so their
order shows in few entries.
"""
_STACKED = 3
_STACK_ROWS = (4, 8, 12, 16, 32, 64)
FIXED_TILE = 32


@dataclass(frozen=True)
class RowTiling:
    """Each adapter's rows are padded to a multiple of `multiple`; with `tile`, products take
    exactly that many rows.
    """

    multiple: int = 1
    tile: int | None = None
    query_rows: int = QUERY_ROWS
    """Products of the attention by torch, in float32, are padded to at least this many rows."""
    least: int = 1
    """Fewest rows of products with the base weights."""
    lora_least: tuple[tuple[int, int], ...] = ()
    """(rank, fewest rows of products with an adapter of this rank or more), by rising rank."""

    stacks: bool = False
    """Whether torch's products of several adapters at once have the bits of separate ones; False
    where it makes none.
    """

    def padded(self, rows: int, weights: LoraWeights | None) -> int:
        """How many rows products take for `rows` of this adapter."""
        least = self.least
        if weights is not None:
            needs = [need for rank, need in self.lora_least if rank <= weights.layout.lora.rank]
            least = needs[-1] if needs else least
        rows = max(rows, least)
        return rows + -rows % self.multiple


FIXED = RowTiling(multiple=FIXED_TILE, tile=FIXED_TILE)


@torch.inference_mode()
def probe(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> RowTiling | None:
    """The cheapest padding under which this machine's products were seen to have the same bits;
    None if none was found.
    """
    look = _Look(dtype, device, torch.Generator().manual_seed(0))
    shapes = _shapes(config)
    others = {shape for shape in _base_shapes(config) if not multiplies(*shape, dtype, device)}
    base = look.agreeing(others, 1, frozen=True)
    ranks = (*_LOW_RANKS, *_LORA_RANKS)
    adapted, grouped = shapes, adapts_in_panels(config, dtype, device)
    if grouped:
        adapted = set() if head_adapts_in_panels(config, dtype, device) else {_head_shape(config)}
    by_rank = {
        rank: base & look.agreeing(_lora_shapes(adapted, rank), _LORA_ROWS) for rank in ranks
    }
    for multiple in _MULTIPLES:
        least = _least(base, multiple)
        lora_least = {
            rank: need for rank, rows in by_rank.items() if (need := _least(rows, multiple))
        }
        if least and all(rank in lora_least for rank in _LORA_RANKS):
            native = cpu.attends(config.head_dim, dtype, device)
            return RowTiling(
                multiple,
                query_rows=QUERY_ROWS if native else _probe_query_rows(config, device),
                least=least,
                lora_least=tuple(lora_least.items()),
                stacks=not grouped and _stacks_agree(look, shapes),
            )
    return None


def cancelling(
    rows: int, fan_out: int, fan_in: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, fan_in] and weight [fan_out, fan_in], float32, whose product is about 0: its terms
    come in pairs a and -a.

    So the outcome is what the additions rounded, and another order of them shows in nearly every
    entry. In the product of other numbers, which is rounded to bf16, it shows in one of thousands.
    """
    half = fan_in // 2
    x, weight = (torch.randn(n, fan_in - half, generator=generator) for n in (rows, fan_out))
    order = torch.randperm(fan_in, generator=generator)
    return torch.cat([x, -x[:, :half]], 1)[:, order], torch.cat([weight, weight[:, :half]], 1)[
        :, order
    ]


@dataclass(frozen=True)
class _Look:
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    def agreeing(
        self, shapes: Iterable[tuple[int, int]], least_rows: int, frozen: bool = False
    ) -> set[int]:
        """The numbers of rows, of _ROWS, at which products of all these shapes have the bits that
        they have at the most rows.

        Looked at are `least_rows` or more, in as many products as it takes. `frozen`: products with
        weights of the base model.
        """
        agreeing: set[int] = set(_ROWS)
        for fan_out, fan_in in sorted(set(shapes)):
            pair = cancelling(max(_ROWS), fan_out, fan_in, self.generator)
            x, weight = (tensor.to(self.device, self.dtype) for tensor in pair)
            product = FrozenLinear([weight]).product if frozen else partial(F.linear, weight=weight)
            whole = product(x)
            agreeing &= {rows for rows in _ROWS if _agrees(product, x, whole, rows, least_rows)}
        return agreeing


def _agrees(
    product: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    whole: torch.Tensor,
    rows: int,
    least_rows: int,
) -> bool:
    starts = range(0, max(1, least_rows - rows + 1), rows)
    return all(torch.equal(product(x[a : a + rows]), whole[a : a + rows]) for a in starts)


def _stacks_agree(look: _Look, shapes: Iterable[tuple[int, int]]) -> bool:
    """Whether a batched product has the bits of one product with many rows, for every shape of an
    adapter's.
    """
    for fan_out, fan_in in sorted(
        {shape for rank in _LORA_RANKS for shape in _lora_shapes(shapes, rank)}
    ):
        pairs = [cancelling(_LORA_ROWS, fan_out, fan_in, look.generator) for _ in range(_STACKED)]
        x, weight = (
            torch.stack(each).to(look.device, look.dtype) for each in zip(*pairs, strict=True)
        )
        whole = torch.stack([F.linear(a, b) for a, b in zip(x, weight, strict=True)])
        for rows in _STACK_ROWS:
            if not torch.equal(torch.bmm(x[:, :rows], weight.transpose(1, 2)), whole[:, :rows]):
                return False
    return True


def _least(agreeing: set[int], multiple: int) -> int | None:
    """From which number on all multiples agree; None if from none."""
    for least in _LEAST:
        if all(rows in agreeing for rows in _ROWS if rows >= least and rows % multiple == 0):
            return least
    return None


def _probe_query_rows(config: ModelConfig, device: torch.device) -> int:
    """The fewest rows from which float32 products as attention makes them have the same bits."""
    generator = torch.Generator().manual_seed(0)
    # the fewest products of a batch; one alone is divided among threads by its rows
    heads = config.num_kv_heads
    q = torch.randn(heads, QUERY_ROWS * 2, config.head_dim, generator=generator).to(device)
    keys = (
        torch.randn(heads, SPAN * 2, config.head_dim, generator=generator)
        .to(device)
        .transpose(1, 2)
    )
    weights = torch.rand(heads, QUERY_ROWS * 2, SPAN, generator=generator).to(device)
    values = keys.transpose(1, 2)[:, :SPAN]
    for rows in _QUERY_ROWS:
        pairs = ((q, keys), (weights, values))
        if all(
            torch.equal(torch.matmul(x[:, :n], y), torch.matmul(x, y)[:, :n])
            for x, y in pairs
            for n in range(rows, QUERY_ROWS)
        ):
            return rows
    return QUERY_ROWS


def _shapes(config: ModelConfig) -> set[tuple[int, int]]:
    """(out, in) of the linears; the head's many columns are looked at in part, as columns do not
    change a kernel's inner loop.
    """
    return {linear_shape(config, name) for site in LAYER_SITES for name in site} | {
        _head_shape(config)
    }


def _base_shapes(config: ModelConfig) -> set[tuple[int, int]]:
    """(out, in) of the products with base weights: linears that read one input are one product."""
    sites = ([linear_shape(config, name) for name in site] for site in LAYER_SITES)
    return {(sum(fan_out for fan_out, _ in site), site[0][1]) for site in sites} | {
        _head_shape(config)
    }


def _head_shape(config: ModelConfig) -> tuple[int, int]:
    """Adapters of it are served by our own kernel where those of the whole are."""
    return min(
        config.vocab_size, _PROBE_COLUMNS + config.vocab_size % LOW_COLUMNS
    ), config.hidden_size


def _lora_shapes(shapes: Iterable[tuple[int, int]], rank: int) -> Iterable[tuple[int, int]]:
    for fan_out, fan_in in shapes:
        yield rank, fan_in
        yield fan_out, rank
