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
