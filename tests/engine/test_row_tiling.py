"""The claim that `probe` makes about this machine's products, on fresh numbers and other counts of rows."""

import pytest
import torch
import torch.nn.functional as F

from planish.engine.row_tiling import FIXED, RowTiling, probe
from planish.model.config import ModelConfig
from planish.model.decoder import product
from planish.testing import tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_at_every_multiple(tmp_path, dtype):
    tiny_model(tmp_path)
    tiling = probe(ModelConfig.from_directory(tmp_path), dtype, torch.device("cpu"))
    if tiling is None:
        pytest.skip("this machine's products differ at every multiple; the sampler uses fixed tiles here")
    x, weight = torch.randn(240, 64).to(dtype), torch.randn(96, 64).to(dtype)
    whole = F.linear(x, weight)
    for rows in range(tiling.multiple, 241, tiling.multiple):
        assert torch.equal(F.linear(x[:rows], weight), whole[:rows])


def test_fixed_tiles_give_the_same_bits_by_construction():
    x, weight = torch.randn(256, 64), torch.randn(96, 64)
    assert RowTiling(multiple=FIXED.multiple, tile=FIXED.multiple) == FIXED
    whole = product(x, weight, None, FIXED.tile)
    for start in range(0, 256, FIXED.multiple):
        part = product(x[start : start + FIXED.multiple], weight, None, FIXED.tile)
        assert torch.equal(part, whole[start : start + FIXED.multiple])
    torch.testing.assert_close(whole, x @ weight.t())
