"""A little of the fuzzer of sizes and counts; tests/server/fuzz_sizes.py does it hundreds of times
as long.
"""

from pathlib import Path

import pytest
from fuzz_sizes import fuzz
from oversized_bodies import body_fields


def test_few_values_of_a_blown_up_list_are_blown_up_again():
    """A `Place` for each of the items of a list of 8 MiB took more memory than this program has."""
    assert (
        len(body_fields({"a": {"tokens": [0] * (1 << 22)}, "b": {str(i): 1 for i in range(10**5)}}))
        < 300
    )


@pytest.mark.slow
def test_oversized_requests_are_answered_or_rejected(tmp_path: Path):
    report = fuzz(tmp_path, count=400, seed=2, connections=4, idle_seconds=2.0)
    assert report.faults == []
    assert report.requests >= 400
    assert report.statuses["400"] > 50
    assert len(report.fields) > 150
    assert min(map(len, report.busy.values())) > 0
