"""The claim that `probe` makes about this machine's products, on fresh numbers and other counts of
rows.
"""

import pytest
import torch
import torch.nn.functional as F

from planish.engine import row_tiling
from planish.engine.row_tiling import FIXED, RowTiling, cancelling, probe
from planish.model.config import ModelConfig
from planish.model.linear import FrozenLinear
from planish.model.lora import LoraLayout, LoraWeights, adapts_in_panels
from planish.native.cpu_products import multiplies
from planish.testing import tiny_model
from planish.types import LoraConfig

CPU = torch.device("cpu")
COUNTS = (*range(1, 70), 100, 150, 239, 240)


def disagreeing(
    tiling: RowTiling, weights: LoraWeights | None, x: torch.Tensor, weight: torch.Tensor
) -> list[int]:
    """The numbers of rows at which a product that is padded as the tiling says has other bits."""
    frozen = FrozenLinear([weight])

    def product(rows: int) -> torch.Tensor:
        padded = F.pad(x[:rows], (0, 0, 0, tiling.padded(rows, weights) - rows))
        return (frozen.product(padded) if weights is None else F.linear(padded, weight))[:rows]

    whole = product(len(x))
    return [n for n in COUNTS if not torch.equal(product(n), whole[:n])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(tmp_path, dtype):
    """One row of 1536 columns has a kernel of its own on some machines; rounding to bf16 hides that
    in nearly every entry.
    """
    tiny_model(tmp_path, intermediate=1536, vocab_size=(vocab := 333))
    config = ModelConfig.from_directory(tmp_path)
    tiling = probe(config, dtype, CPU)
    if tiling is None:
        pytest.skip(
            "this machine's products differ at every multiple; the sampler uses fixed tiles here"
        )
    for fan_out, fan_in in ((96, 64), (64, 1536)):
        x, weight = (tensor.to(dtype) for tensor in cancelling(240, fan_out, fan_in))
        assert not disagreeing(tiling, None, x, weight)
    # Where our own kernels serve the layers' adapters, those of a head of so many tokens are
    # torch's still.
    layers = [] if adapts_in_panels(config, dtype, CPU) else [1536]
    for rank in (8, 12, 32):
        layout = LoraLayout(config, LoraConfig(rank=rank))
        weights = LoraWeights(layout, layout.init(0), dtype, CPU)
        for fan_out, fan_in in ((rank, 64), (vocab, rank), *((rank, width) for width in layers)):
            x, weight = (tensor.to(dtype) for tensor in cancelling(240, fan_out, fan_in))
            assert not disagreeing(tiling, weights, x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocab_size", "looked_at"), [(4128, set()), (32001, {(8, 64), (4097, 8)})]
)
def test_what_our_own_kernels_multiply_is_not_looked_at(
    tmp_path, monkeypatch, dtype, vocab_size, looked_at
):
    """Of adapters of a head that they do not serve, a part is looked at which they would not serve
    either.
    """
    config = ModelConfig.from_directory(tiny_model(tmp_path, vocab_size=vocab_size))
    if not multiplies(64, 64, dtype, CPU):
        pytest.skip("this machine has no kernels of our own")
    seen = []
    look = row_tiling._Look.agreeing

    def agreeing(self, shapes, *how, **named):
        seen.append(set(shapes))
        return look(self, seen[-1], *how, **named)

    monkeypatch.setattr(row_tiling._Look, "agreeing", agreeing)
    tiling = probe(config, dtype, CPU)
    base, *by_rank = seen
    assert not base
    assert looked_at in by_rank
    if not looked_at:
        assert not any(by_rank)
        assert tiling is not None
        assert tiling.padded(1, None) == 1


def test_rows_are_padded_to_the_least_then_to_the_multiple(tmp_path):
    tiny_model(tmp_path)
    config = ModelConfig.from_directory(tmp_path)
    layouts = {rank: LoraLayout(config, LoraConfig(rank=rank)) for rank in (1, 8, 20)}
    weights = {
        rank: LoraWeights(layout, layout.init(0), torch.float32, CPU)
        for rank, layout in layouts.items()
    }
    tiling = RowTiling(multiple=4, least=2, lora_least=((4, 16), (16, 8)))
    assert [tiling.padded(n, None) for n in (1, 2, 4, 5)] == [4, 4, 4, 8]
    assert [tiling.padded(3, weights[rank]) for rank in (1, 8, 20)] == [4, 16, 8]
    assert tiling.padded(17, weights[8]) == 20
    assert RowTiling().padded(1, weights[8]) == 1


def test_fixed_tiles_give_the_same_bits_by_construction():
    x, weight = torch.randn(256, 64), torch.randn(96, 64)
    assert RowTiling(multiple=FIXED.multiple, tile=FIXED.multiple) == FIXED
    frozen = FrozenLinear([weight])
    whole = frozen.product(x, FIXED.tile)
    for start in range(0, 256, FIXED.multiple):
        part = frozen.product(x[start : start + FIXED.multiple], FIXED.tile)
        assert torch.equal(part, whole[start : start + FIXED.multiple])
    torch.testing.assert_close(whole, x @ weight.t())
