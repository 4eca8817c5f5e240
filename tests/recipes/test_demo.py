"""The demo's files and its held-out sums, on a fake service; the real model runs in `make demo`."""

import pytest

from planish.errors import UserError
from planish.recipes import demo
from planish.runs import read_rows


def test_the_demo_writes_one_row_a_step_and_reports_what_it_found(service, tmp_path, capsys):
    config = demo.Config(model_name="tiny", log_path=str(tmp_path / "demo"), steps=8, held_out=20)
    run = demo.train(config, service)
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(8))
    rewards = [row["reward/total"] for row in rows]
    assert sum(rewards[:3]) / 3 < 0.6
    assert rewards[-1] == 1.0
    printed = capsys.readouterr().out
    assert "before, 100% after" in printed
    assert "metrics.jsonl" in printed
    assert (run / "reward.png").exists()


def test_held_out_sums_are_never_trained_on_in_either_order():
    tests, pool = demo.split_sums(demo.Config())
    shown = {frozenset((s.left, s.right)) for s in demo.EXAMPLES}
    held_out = {frozenset((s.left, s.right)) for s in tests}
    trained = {frozenset((s.left, s.right)) for s in pool}
    assert len(held_out) == len(tests) == demo.Config().held_out
    assert not held_out & trained
    assert not shown & (held_out | trained)
    assert len(pool) > 100


def test_too_few_sums_are_refused(tmp_path):
    with pytest.raises(UserError, match="largest=5"):
        demo.main(demo.Config(largest=5, log_path=str(tmp_path)))
