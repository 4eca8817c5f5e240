"""Matmuls with AMX, emulated on a CPU without AMX. The emulator rejects what the instructions
reject.
"""

import pytest
import torch

from planish.model.kernels.cpp.matmul import PanelWeight, WeightArena


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(("fan_out", "fan_in"), [(96, 576), (64, 34), (176, 8), (16, 2)])
def test_amx_rows_are_batch_invariant(fan_out, fan_in):
    generator = torch.Generator().manual_seed(fan_in)
    weight, x, bias = (
        torch.randn(*n, generator=generator).bfloat16()
        for n in ((fan_out, fan_in), (70, fan_in), (fan_out,))
    )
    panels = PanelWeight(weight, WeightArena(0))
    whole = panels.matmul(x, bias)
    expected = x.double() @ weight.double().t() + bias.double()
    assert (whole.double() - expected).abs().max() <= 0.005 * expected.abs().max()
    for first, stop in ((0, 1), (15, 17), (3, 36), (69, 70)):
        assert torch.equal(panels.matmul(x[first:stop], bias), whole[first:stop])


def test_a_non_finite_row_does_not_change_other_amx_rows(products):
    x = torch.ones(33, 34, dtype=torch.bfloat16)
    x[16] = torch.nan
    found = PanelWeight(torch.ones(32, 34, dtype=torch.bfloat16), WeightArena(0)).matmul(x, None)
    assert found[16].isnan().all()
    others = torch.arange(33) != 16
    assert (found[others] == 34).all()
