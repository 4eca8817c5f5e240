"""Numbers of rows for which a row's product has the same bits.

A matrix library picks its kernel, and with it the order of additions, by the number of rows. So the
logits of one sample depend, in their last bits, on how many others are in the batch, unless every
product has a number of rows from a set within which the library was seen to give the same bits.
`probe` looks, on the model's own shapes, for the smallest `multiple` such that all multiples of it
agree from some number of rows on; where there is none, products run in tiles of a fixed number of
rows, which is the same by construction, and slower. The LoRA matmuls of a rank are looked at when an
adapter of that rank is first used, in the form in which the decoder makes them.

Our own products (native/cpu_products.py) need none of this, and are not looked at: they have one
order for any number of rows. Those on other CPUs do, and adapters of a head whose vocabulary is no
multiple of 16. Few rows are what differs in practice: oneDNN has another kernel for one row of more
than 1024 columns, and torch multiplies small matrices (up to 16 ** 3 multiplications, so few rows
of a LoRA of low rank) by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F

from planish.engine.ordered_attention import QUERY_ROWS
from planish.engine.positions import SPAN
from planish.model.config import ModelConfig
from planish.model.decoder import add_lora_, add_lora_stack_, lora_hidden
from planish.model.linear import FrozenLinear
from planish.model.lora import (
    LAYER_SITES,
    LoraWeights,
    Site,
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
    *(80, 96, 112, 128, 150, 160, 191, 192, 200, 240, 255, 256, 301, 384, 500, 511, 512),
)
_PROBE_COLUMNS = 4096
_QUERY_ROWS = (1, 2, 4, 8)
_LORA_RANKS = (8, 16, 32)
"""Looked at when a model is loaded, to choose the multiple; other ranks when they are first used."""
_LORA_LEAST = (*_LEAST, 64, 128, 256)
"""A low rank may need more rows: torch multiplies matrices of up to 16 ** 3 multiplications by
itself, so rank 1 of a narrow model takes its own kernel below a hundred rows.
"""
_LORA_ROWS = 32
"""Rows of a LoRA's product that are looked at for each number of rows: its sums are short, so their
order shows in few entries.
"""
_STACKED = 3
_STACK_ROWS = (4, 8, 12, 16, 32, 64)
FIXED_TILE = 32


@dataclass(frozen=True)
class LoraNeeds:
    """What batch invariance asks of the rows of one adapter whose LoRA torch multiplies."""

    least: int | None
    """The fewest rows; None if its matmuls were seen to differ at any number."""
    multiple: int = 1
    """The rows are a multiple of this; with rank 1, some matrix-vector products want four."""
    stacks: bool = False
    """Whether one matmul of several adapters has the bits of separate ones."""


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
    lora: Callable[[int], LoraNeeds] | None = None
    """What adapters of a rank need; None if no more than the base weights."""

    def padded(self, rows: int, weights: LoraWeights | None) -> int:
        """How many rows products take for `rows` of this adapter."""
        least, multiple = self.least, self.multiple
        if weights is not None and self.lora is not None:
            needs = self.lora(weights.layout.lora.rank)
            least, multiple = max(least, needs.least or 1), max(multiple, needs.multiple)
        rows = max(rows, least)
        return rows + -rows % multiple  # each of _MULTIPLES divides the next

    def is_invariant(self, rank: int) -> bool:
        """Whether a sample of an adapter of this rank has the same bits in every batch."""
        return self.lora is None or self.lora(rank).least is not None

    def stacks(self, rank: int) -> bool:
        """Whether torch's products of several adapters at once have the bits of separate ones."""
        return self.lora is not None and self.lora(rank).stacks


FIXED = RowTiling(multiple=FIXED_TILE, tile=FIXED_TILE)


@torch.inference_mode()
def probe(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, at_any_cost: bool = False
) -> RowTiling | None:
    """The cheapest padding under which this machine's products were seen to have the same bits;
    None if none was found.

    Low ranks may need a hundred rows and more. They get them only `at_any_cost`.
    """
    base = _look(dtype, device).agreeing(
        {shape for shape in _base_shapes(config) if not multiplies(*shape, dtype, device)}
    )
    sites = _torch_sites(config, dtype, device)
    by_rank = {rank: _agreeing_with_lora(sites, rank, dtype, device) for rank in _LORA_RANKS}
    for multiple in _MULTIPLES:
        least = _least(base, multiple, _LEAST)
        if least and all(_least(base & rows, multiple, _LEAST) for rows in by_rank.values()):
            native = cpu.attends(config.head_dim, dtype, device)
            choices = _LORA_LEAST if at_any_cost else _LEAST
            needs = partial(_needs, sites, base, multiple, choices, dtype, device)
            return RowTiling(
                multiple,
                query_rows=QUERY_ROWS if native else _probe_query_rows(config, device),
                least=least,
                lora=cache(needs) if sites else None,
            )
    return None


@torch.inference_mode()
def _needs(
    sites: tuple[_TorchSite, ...],
    base: set[int],
    multiple: int,
    choices: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
) -> LoraNeeds:
    agreeing = base & _agreeing_with_lora(sites, rank, dtype, device)
    multiples = [each for each in _MULTIPLES if each >= multiple]
    found = [(_least(agreeing, each, choices), each) for each in multiples]
    fitting = [(least, each) for least, each in found if least is not None]
    least, multiple = min(fitting, key=max, default=(None, multiple))
    if least is None:
        logging.getLogger(__name__).warning(
            "samples of LoRA adapters of rank %d are not batch-invariant on this machine: with %d "
            "rows and more, torch's matmuls still differ (deterministic=True pads to %d)",
            rank,
            max(choices),
            max(_LORA_LEAST),
        )
    in_layers = [site for site in sites if not site.is_head]
    can_stack = bool(in_layers) and least is not None and least <= max(_STACK_ROWS)
    return LoraNeeds(least, multiple, can_stack and _stacks_agree(in_layers, rank, dtype, device))


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

    def cancelling(self, fan_out: int, fan_in: int) -> list[torch.Tensor]:
        """x [rows, fan_in], of the most rows, and weight [fan_out, fan_in]."""
        pair = cancelling(max(_ROWS), fan_out, fan_in, self.generator)
        return [tensor.to(self.device, self.dtype) for tensor in pair]

    def agreeing(self, shapes: Iterable[tuple[int, int]]) -> set[int]:
        """The numbers of rows, of _ROWS, at which products with frozen weights of all these shapes
        have the bits that they have at the most rows.
        """
        agreeing: set[int] = set(_ROWS)
        for fan_out, fan_in in sorted(set(shapes)):
            x, weight = self.cancelling(fan_out, fan_in)
            agreeing &= _agreeing(FrozenLinear([weight]).product, x, 1)
        return agreeing


def _look(dtype: torch.dtype, device: torch.device) -> _Look:
    return _Look(dtype, device, torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class _TorchSite:
    """Linears that read one input and whose adapters torch multiplies: (out of each, in)."""

    sizes: tuple[int, ...]
    fan_in: int
    is_head: bool = False


def _torch_sites(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[_TorchSite, ...]:
    found = set()
    if not adapts_in_panels(config, dtype, device):
        for names in LAYER_SITES:
            shapes = [linear_shape(config, name) for name in names]
            found.add(_TorchSite(tuple(fan_out for fan_out, _ in shapes), shapes[0][1]))
    if not head_adapts_in_panels(config, dtype, device):
        vocab, hidden = _head_shape(config)
        found.add(_TorchSite((vocab,), hidden, is_head=True))
    return tuple(sorted(found, key=str))


def _agreeing_with_lora(
    sites: Iterable[_TorchSite], rank: int, dtype: torch.dtype, device: torch.device
) -> set[int]:
    """The numbers of rows at which the matmuls of an adapter of this rank have the same bits.

    They are made as the decoder makes them: one A for the linears that read one input, and a B for
    each that multiplies a part of the columns between.
    """
    look, agreeing = _look(dtype, device), set(_ROWS)
    for site in sites:
        x, a = look.cancelling(len(site.sizes) * rank, site.fan_in)
        agreeing &= _agreeing(partial(lora_hidden, a=a, tile=None), x, _LORA_ROWS)
        pairs = [look.cancelling(size, rank) for size in site.sizes]
        low = torch.cat([low for low, _ in pairs], 1)
        if site.is_head:  # whose columns between are whole vectors
            low = F.pad(low, (0, -rank % LOW_COLUMNS))[:, :rank]
        add = partial(_lora_outputs, sizes=site.sizes, bs=[b for _, b in pairs])
        agreeing &= _agreeing(add, low, _LORA_ROWS)
    return agreeing


def _lora_outputs(
    low: torch.Tensor, sizes: tuple[int, ...], bs: Sequence[torch.Tensor]
) -> torch.Tensor:
    out = low.new_zeros(len(low), sum(sizes))
    add_lora_(low, out.split(sizes, 1), bs, None)
    return out


def _agreeing(
    product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, least_rows: int
) -> set[int]:
    """The numbers of rows at which `product` has the bits that it has for all rows of x.

    Looked at are `least_rows` or more, in as many products as it takes.
    """
    whole = product(x)
    return {rows for rows in _ROWS if _agrees(product, x, whole, rows, least_rows)}


def _agrees(
    product: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    whole: torch.Tensor,
    rows: int,
    least_rows: int,
) -> bool:
    starts = range(0, max(1, least_rows - rows + 1), rows)
    return all(torch.equal(product(x[a : a + rows]), whole[a : a + rows]) for a in starts)


def _stacks_agree(
    sites: Iterable[_TorchSite], rank: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether matmuls of several adapters of this rank at once have the bits of separate ones."""
    look = _look(dtype, device)
    for site in sites:
        for is_a in (True, False):
            made = [_cancelling_site(look, site, rank, is_a) for _ in range(_STACKED)]
            xs, members = [x for x, _ in made], [own for _, own in made]
            whole = [
                _lora_outputs(lora_hidden(x, own.a, None), site.sizes, own.bs)
                for x, own in zip(xs, members, strict=True)
            ]
            bs = zip(*(own.bs for own in members), strict=True)
            stack = Site(torch.stack([own.a for own in members]), tuple(map(torch.stack, bs)))
            for rows in _STACK_ROWS:
                x = torch.cat([part[:rows] for part in xs])
                out = x.new_zeros(len(x), sum(site.sizes))
                add_lora_stack_(x, out.split(site.sizes, 1), stack)
                if not torch.equal(out, torch.cat([part[:rows] for part in whole])):
                    return False
    return True


def _cancelling_site(
    look: _Look, site: _TorchSite, rank: int, is_a: bool
) -> tuple[torch.Tensor, Site]:
    """An input and an adapter for which the sums of x A (`is_a`), or those of x A B, cancel."""
    columns = len(site.sizes) * rank
    pairs = [look.cancelling(size, rank) for size in site.sizes]
    bs = tuple(b for _, b in pairs)
    if is_a:
        x, a = look.cancelling(columns, site.fan_in)
        return x, Site(a, bs)
    # A picks columns out of x, exactly: what lies between A and B is what was made to cancel.
    low = torch.cat([low for low, _ in pairs], 1)[:, : site.fan_in]
    x = F.pad(low, (0, site.fan_in - low.shape[1]))
    return x, Site(torch.eye(columns, site.fan_in, dtype=x.dtype, device=x.device), bs)


def _least(agreeing: set[int], multiple: int, choices: Iterable[int]) -> int | None:
    """From which number on all multiples agree; None if from none."""
    for least in choices:
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
