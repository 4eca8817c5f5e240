"""Which rollouts a page as one file contains."""

from itertools import pairwise

import pytest
from sample_runs import write_index

from planish.console.run_reader import RunReader
from planish.console.saved_rollouts import MAX_BYTES, MAX_ROLLOUTS, saved_rollouts

STEPS, GROUPS, SIZE = 75, 10, 4


def reader_of(path, num_bytes: int | None = None, steps: int = STEPS) -> RunReader:
    write_index(path, steps, GROUPS, SIZE, num_bytes)
    return RunReader(path, "a")


def test_a_large_run_is_saved_as_whole_groups_of_all_steps(tmp_path):
    saved = saved_rollouts(reader_of(tmp_path), 1)
    assert saved["total"] == STEPS * GROUPS * SIZE == 3000
    rows = saved["rollouts"]
    assert 0.9 * MAX_ROLLOUTS <= len(rows) <= MAX_ROLLOUTS
    groups = [(row["step"], row["group"]) for row in rows]
    assert all(groups.count(group) == SIZE for group in groups)
    assert (groups[0], groups[-1]) == ((0, 0), (STEPS - 1, GROUPS - 1))
    steps = sorted({step for step, _ in groups})
    assert max(after - before for before, after in pairwise(steps)) == 1


def test_several_runs_share_the_file(tmp_path):
    rows = saved_rollouts(reader_of(tmp_path), 4)["rollouts"]
    assert 0.9 * MAX_ROLLOUTS / 4 - SIZE <= len(rows) <= MAX_ROLLOUTS / 4


@pytest.mark.parametrize(("size", "expected"), [(MAX_BYTES // 100, 100), (MAX_BYTES, 0)])
def test_long_texts_make_fewer_rollouts(tmp_path, size, expected):
    rows = saved_rollouts(reader_of(tmp_path, size), 1)["rollouts"]
    assert 0.8 * expected <= len(rows) <= expected


def test_a_small_run_is_saved_whole(tmp_path):
    saved = saved_rollouts(reader_of(tmp_path, steps=2), 1)
    assert len(saved["rollouts"]) == saved["total"] == 2 * GROUPS * SIZE
    assert saved["rollouts"][0]["problem"].startswith("the texts of this rollout were not written")


def test_a_run_without_rollouts_has_none(tmp_path):
    saved = saved_rollouts(RunReader(tmp_path, "a"), 1)
    assert (saved["total"], saved["rollouts"]) == (0, [])
