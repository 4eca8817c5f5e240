"""The Triton kernel for top_k, top_p and min_p keeps exactly the tokens of the reference."""

import pytest
import torch
from hopper import Case, resources

pytest.importorskip("triton")
from planish.model.kernels.reference.token_sampling import (
    _filtered,
    _masses,
    filter_,
    is_filtered,
    mass_bits,
)
from planish.model.kernels.triton import filter_kernels
from planish.types import SamplingParams

ALL = [
    SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    for top_k, top_p, min_p in (
        (-1, 1.0, 0.0), (1, 1.0, 0.0), (7, 1.0, 0.0), (10**6, 1.0, 0.0), (-1, 0.9, 0.0),
        (-1, 0.5, 0.0), (-1, 1e-30, 0.0), (-1, 1 - 2.0**-53, 0.0), (-1, 1.0, 0.7), (9, 0.6, 0.0),
        (50, 0.99, 0.05), (3, 0.999, 1e-9), (-1, 0.3, 0.3),
    )
    for temperature in ((1.0,) if top_k != 7 else (1.0, 0.0))
]  # fmt: skip


def weights_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    """Return weights [rows, vocab] whose maximum is 1."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    if kind == "ties":
        logits = (logits / 3).round()
    elif kind == "equal":
        logits.zero_()
    elif kind == "wide":
        logits *= 8
        logits[:, 1::3] = -torch.inf
    return (logits - logits.amax(1, keepdim=True)).exp()


def filtered(weights: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    found = weights.clone()
    filter_kernels.filter_(found, params)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "vocab"),
    [("random", 1), ("wide", 2), ("equal", 129), ("ties", 129), ("random", 129), ("wide", 1300)],
)
def test_the_kept_tokens_are_those_of_the_reference(kind: str, vocab: int, device: torch.device):
    """Rows with and without filters are in one batch."""
    weights = weights_of(kind, len(ALL), vocab)
    expected = weights.clone()
    filter_(expected, ALL)
    found = filtered(weights.to(device), ALL).cpu()
    assert torch.equal(found, expected)
    rows = [row for row, p in enumerate(ALL) if is_filtered(p)]
    assert torch.equal(_filtered(weights[rows], [ALL[row] for row in rows]), expected[rows])
    if vocab == 1300:
        assert len({int((row > 0).sum()) for row in found}) >= 7


def test_top_k_and_top_p_of_odd_vocabularies(device: torch.device):
    params = [SamplingParams(top_k=9, top_p=0.6, min_p=0.05), SamplingParams()]
    for vocab, kind in ((131, "ties"), (1100, "random")):
        weights = weights_of(kind, len(params), vocab)
        expected = weights.clone()
        filter_(expected, params)
        assert torch.equal(filtered(weights.to(device), params).cpu(), expected)
        assert 1 <= int((expected[0] > 0).sum()) < 9


def test_the_first_of_equal_weights_stay(device: torch.device):
    """Five weights of 1 are followed by weights of 0.5."""
    weights = torch.full((4, 40), 0.5)
    weights[:, [3, 8, 20, 21, 39]] = 1.0
    params = [
        SamplingParams(top_k=3), SamplingParams(top_k=7), SamplingParams(top_p=0.1),
        SamplingParams(top_k=8, top_p=0.85),
    ]  # fmt: skip
    kept = [row.nonzero().squeeze(1).tolist() for row in filtered(weights.to(device), params)]
    assert kept[0] == [3, 8, 20]
    assert kept[1] == [0, 1, 3, 8, 20, 21, 39]
    # The mass is 5 + 35 / 2 = 22.5. Two weights are less than 2.25, and three are more.
    assert kept[2] == [3, 8, 20]
    # Of the mass 6.5, 85% is 5.525: five weights of 1 and two of 0.5.
    assert kept[3] == [0, 1, 3, 8, 20, 21, 39]


def test_a_row_that_is_not_finite_changes_no_other_row(device: torch.device):
    weights = weights_of("random", 2, 300)
    params = [SamplingParams(top_k=5, top_p=0.9)] * 2
    expected = filtered(weights.to(device), params)
    weights[0] = torch.nan
    found = filtered(weights.to(device), params)
    assert torch.equal(found[1], expected[1])


def test_masses_are_the_rounded_weights(device: torch.device):
    """The kernel derives them from the bits of a weight, and torch multiplies in float64."""
    weights = torch.tensor([1.0, 1 - 2.0**-24, 0.3, 2.0**-44, 2.0**-43 * 1.5, 1e-30, 1e-42, 0.0])
    found = _masses(weights.repeat(20_000))[:8] / 2.0 ** mass_bits(160_000)
    assert found[:3].tolist() == weights[:3].double().tolist()
    assert found[3:].tolist() == [2.0**-44, 2.0**-43 + 2.0**-44, 0, 0, 0]
    rows = weights.repeat(250)[None]
    expected, params = rows.clone(), [SamplingParams(top_p=1 - 2.0**-53)]
    filter_(expected, params)
    assert torch.equal(filtered(rows.to(device), params).cpu(), expected)
    # The mass of the other weights is 0 or below the last bit of the goal.
    assert set(expected.unique().tolist()) >= set(weights[:4].tolist())


@pytest.mark.slow
def test_the_kernel_compiles_for_hopper():
    types = {"weights": "*fp32", "bounds": "*fp64", "vocab": "i32"}
    constants: dict[str, int | bool | float | str | None]
    constants = {"MASS_BITS": 44, "PASSES": 10, "DIGIT_BITS": 3, "BLOCK": filter_kernels._BLOCK}
    case = Case("filter_kernel", types, constants, filter_kernels._WARPS)
    for found in resources("planish.model.kernels.triton.filter_kernels", [case]):
        assert found.spilled <= 8, found
        assert found.shared < 48 << 10, found
