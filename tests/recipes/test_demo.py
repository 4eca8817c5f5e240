"""The demo's files and its held-out sums, on a fake service. `make demo` runs the real model."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from planish.errors import UserError
from planish.files import read_rows
from planish.recipes import demo, training_run


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


def test_the_demo_names_a_command_that_talks_with_what_it_made(
    service, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(demo, "ServiceClient", lambda data_dir, quantize: nullcontext(service))
    run = demo.main(demo.Config(model_name="tiny", log_path=str(tmp_path / "demo"), steps=1))
    [command] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("talk: ")]
    _, python, *words = command.split()
    assert Path(python).samefile(sys.executable)
    assert words == [
        "-m",
        "planish",
        "chat",
        "--model",
        str(run),
        "--data-dir",
        str(run / "checkpoints"),
    ]


def test_held_out_sums_are_never_trained_on_in_either_order():
    tests, pool = demo.split_sums(demo.Config())
    shown = {frozenset((s.left, s.right)) for s in demo.EXAMPLE_SUMS}
    held_out = {frozenset((s.left, s.right)) for s in tests}
    trained = {frozenset((s.left, s.right)) for s in pool}
    assert len(held_out) == len(tests) == demo.Config().held_out
    assert not held_out & trained
    assert not shown & (held_out | trained)
    assert len(pool) > 40


def test_a_slow_machine_ends_early_with_a_whole_run(service, tmp_path, capsys):
    config = demo.Config(model_name="tiny", log_path=str(tmp_path / "demo"), max_seconds=0.0)
    run = demo.train(config, service)
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [0]
    assert read_rows(run / "checkpoints.jsonl")[-1]["batch"] == 1
    assert "stopping after 1 steps" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "value"), [("largest", 5), ("held_out", 0), ("batch_size", 0)])
def test_sizes_that_leave_no_data_are_rejected(tmp_path, name, value):
    with pytest.raises(UserError, match=f"{name}={value}: give"):
        demo.main(demo.Config(log_path=str(tmp_path), **{name: value}))


def test_batches_go_through_all_sums_before_any_comes_again():
    config = demo.Config(batch_size=4)
    pool = [demo.Sum(left, 1) for left in range(10)]
    drawn = [problem for step in range(5) for problem in demo.batch_at(pool, config, step)]
    assert set(drawn[:10]) == set(drawn[10:]) == set(pool)
    assert drawn[:10] != drawn[10:]


def test_the_learning_rate_rises_and_falls():
    config = demo.Config()
    rates = [demo.learning_rate(config, step) for step in range(config.steps)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert 0 < min(rates) <= max(rates) <= config.learning_rate


def test_ctrl_c_says_what_the_same_command_does(capsys):
    def interrupted(config):
        raise KeyboardInterrupt

    for again, told in (
        ({}, "resumes from the last checkpoint"),
        ({"on_restart": "begins anew"}, "begins anew"),
    ):
        with pytest.raises(SystemExit) as ended:
            training_run.run_command(interrupted, demo.Config, {}, [], **again)
        assert ended.value.code == 130
        assert f"the same command {told}" in capsys.readouterr().err
