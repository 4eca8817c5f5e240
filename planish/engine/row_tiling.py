"""Numbers of rows for which a row's product has the same bits.

A matrix library picks its kernel, and with it the order of additions, by the number of rows. So the logits of one sample
depend, in their last bits, on how many others are in the batch, unless every product has a number of rows from a set within which
the library was seen to give the same bits. `probe` looks for the smallest `multiple` such that all multiples of it agree, on the
model's own shapes; where there is none, products run in tiles of a fixed number of rows, which is the same by construction, and slower.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from planish.engine.ordered_attention import QUERY_ROWS
from planish.engine.positions import SPAN
from planish.model.config import ModelConfig
from planish.model.lora import LAYER_SITES, linear_shape

_MULTIPLES = (1, 4, 16)
_ROWS = (1, 2, 3, 4, 5, 8, 12, 16, 20, 28, 31, 32, 33, 48, 64, 80, 96, 112, 128, 160, 192, 200, 240, 256, 384, 500, 512)
_PROBE_COLUMNS = 4096
_QUERY_ROWS = (1, 2, 4, 8)
_LORA_RANKS = (8, 32)
FIXED_TILE = 32


@dataclass(frozen=True)
class RowTiling:
    """Each adapter's rows are padded to a multiple of `multiple`; with `tile`, products take exactly that many rows."""

    multiple: int = 1
    tile: int | None = None
    query_rows: int = QUERY_ROWS
    """Products of the attention, in float32, are padded to at least this many rows."""


FIXED = RowTiling(multiple=FIXED_TILE, tile=FIXED_TILE)


@torch.inference_mode()
def probe(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> RowTiling | None:
    """The cheapest padding under which this machine's products were seen to have the same bits; None if none was found."""
    generator = torch.Generator().manual_seed(0)
    agreeing = set(_ROWS)
    for fan_out, fan_in in sorted(_shapes(config)):
        weight = torch.randn(fan_out, fan_in, generator=generator).to(device, dtype)
        x = torch.randn(max(_ROWS), fan_in, generator=generator).to(device, dtype)
        whole = F.linear(x, weight)
        agreeing &= {rows for rows in _ROWS if torch.equal(F.linear(x[:rows], weight), whole[:rows])}
    for multiple in _MULTIPLES:
        if all(rows in agreeing for rows in _ROWS if rows % multiple == 0):
            return RowTiling(multiple, query_rows=_probe_query_rows(config, device))
    return None


def _probe_query_rows(config: ModelConfig, device: torch.device) -> int:
    """The fewest rows from which float32 products as attention makes them have the same bits."""
    generator = torch.Generator().manual_seed(0)
    heads = config.num_kv_heads  # the fewest products of a batch; one alone is divided among threads by its rows
    q = torch.randn(heads, QUERY_ROWS * 2, config.head_dim, generator=generator).to(device)
    keys = torch.randn(heads, SPAN * 2, config.head_dim, generator=generator).to(device).transpose(1, 2)
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
    """(out, in) of the products; the head's many columns are looked at in part, as columns do not change a kernel's inner loop."""
    shapes = {linear_shape(config, name) for site in LAYER_SITES for name in site}
    shapes.add((min(config.vocab_size, _PROBE_COLUMNS), config.hidden_size))
    return shapes | set(_lora_shapes(shapes))


def _lora_shapes(shapes: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    for fan_out, fan_in in shapes:
        for rank in _LORA_RANKS:
            yield rank, fan_in
            yield fan_out, rank
