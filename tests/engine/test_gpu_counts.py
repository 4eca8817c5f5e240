"""The recorded launches, waits and bytes of passes on a GPU do not grow (tools/gpu_counts.py)."""

import gpu_counts
import pytest
import torch

pytest.importorskip("triton")

ALL_SCHEMES = ("qwen3", "qwen3_moe")
"""The families whose quantized weights are counted: one without and one with experts."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted without a GPU only")
def test_no_number_grew():
    schemes = {
        family: gpu_counts.SCHEMES if family in ALL_SCHEMES else ("bf16",)
        for family in gpu_counts.FAMILIES
    }
    found = gpu_counts.count_all(schemes)
    grown = list(gpu_counts.growth(gpu_counts.recorded_counts(), found))
    assert not grown, "python tools/gpu_counts.py --write records other numbers"


def test_the_page_has_the_recorded_numbers():
    counts = gpu_counts.recorded_counts()
    assert gpu_counts.PAGE.read_text() == gpu_counts.page_text(counts)
    assert list(counts["launches"]) == list(gpu_counts.FAMILIES)
    for schemes in counts["launches"].values():
        assert tuple(schemes) == gpu_counts.SCHEMES
        assert all(tuple(kinds) == gpu_counts.PASSES for kinds in schemes.values())


def test_growth_names_each_number():
    recorded = {"a": {"x": 2.0, "y": 3}, "b": 1}
    assert list(gpu_counts.growth(recorded, {"a": {"x": 1.5, "y": 3}, "b": 1})) == []
    grown = list(gpu_counts.growth(recorded, {"a": {"x": 2.5, "z": 1}}))
    assert grown == ["a/x: 2.5, recorded 2.0", "a/z: 1, recorded nothing"]


def test_families_with_equal_counts_share_the_rows_of_the_table():
    def kinds(layer):
        return {kind: {"layer": layer, "fixed": 3, "waits": 2} for kind in gpu_counts.PASSES}

    launches = {
        name: {"bf16": kinds(1), "int8": kinds(quantized), "nf4": kinds(2)}
        for name, quantized in (("a", 2), ("b", 1), ("c", 2))
    }
    cells = [[f"{layer} x layers + 3; 2"] * 2 for layer in (1, 2)]
    assert [list(row) for row in gpu_counts._launch_rows(launches)] == [
        ["a, c", "bf16", *cells[0]],
        ["a, c", "int8, nf4", *cells[1]],
        ["b", "bf16, int8", *cells[0]],
        ["b", "nf4", *cells[1]],
    ]
