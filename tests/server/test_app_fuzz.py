"""A little fuzzing of every endpoint of a real process; tests/server/fuzz.py does it hundreds of
times as long.
"""

from pathlib import Path

import pytest
from fuzz import fuzz

pytestmark = pytest.mark.slow


def test_random_requests_are_answered_or_rejected(tmp_path: Path):
    report = fuzz(tmp_path, count=300, seed=1, connections=8, rounds=1)
    assert report.faults == []
    assert report.requests == 300
    assert report.statuses["200"] > 60
    assert len(report.endpoints) > 40
