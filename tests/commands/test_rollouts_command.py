"""`planish rollouts` shows the rollouts of a run, selected by step, reward, tag and text."""

import json

import pytest

from planish.commands.cli import main


def row(iteration, group, trajectory, reward, answer, split="train", tags=("sums",), turns=1):
    return {
        "schema_version": 1,
        "split": split,
        "iteration": iteration,
        "group_idx": group,
        "traj_idx": trajectory,
        "tags": list(tags),
        "total_reward": reward,
        "group_reward": 0.0,
        "group_metrics": {},
        "advantage": 0.25,
        "stop_reason": "completed",
        "turns": [
            {
                "observation": f"[bold]Question {group}[/bold]\n",
                "answer": f"{answer} {turn}",
                "answer_tokens": 3,
                "reward": reward,
                "metrics": {"correct": 1.0, "stop/completed": 1.0},
                "logs": {"note": "seen"},
            }
            for turn in range(turns)
        ],
    }


@pytest.fixture
def run(tmp_path):
    rows = {
        "train_iteration_000000_rollouts.jsonl": [row(0, 0, 0, 0.0, "old")],
        "train_iteration_000010_rollouts.jsonl": [
            row(10, 0, 0, 0.0, "zero"),
            row(10, 0, 1, 1.0, "one"),
            row(10, 1, 0, 0.5, "half", tags=("words",)),
            row(10, 1, 1, None, "broken", tags=("words",)),
            row(10, 2, 0, -1.0, "minus", turns=2),
        ],
        "eval_gsm8k_iteration_000005_rollouts.jsonl": [row(5, 0, 0, 1.0, "tested", "eval/gsm8k")],
    }
    for name, found in rows.items():
        (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in found))
    return tmp_path


def shown(capsys, run, *words):
    assert main(["rollouts", str(run), *words]) == 0
    return capsys.readouterr().out


def answers(capsys, run, *words):
    lines = shown(capsys, run, "--json", *words).splitlines()
    return [json.loads(line)["turns"][0]["answer"].split()[0] for line in lines]


def test_the_last_step_is_shown_with_prompt_answer_and_parts_of_the_reward(run, capsys):
    printed = shown(capsys, run)
    assert "step 10, group 0, trajectory 1, sums" in printed
    assert "[bold]Question 0[/bold]" in printed
    assert "one 0" in printed
    assert "reward 1 = 1 + 0 (group), advantage +0.25, ended: completed | correct 1" in printed
    assert "note: seen" in printed
    assert "4 of 5 trajectories" in printed
    assert "--limit 0 shows all" in printed
    assert "--limit 0" not in shown(capsys, run, "--best", "1")
    assert "stop/" not in printed
    assert "minus" not in printed


def test_each_turn_of_an_episode_is_shown(run, capsys):
    printed = shown(capsys, run, "--worst", "2")
    assert "[answer, turn 2 (3 tokens)]" in printed
    assert "reward not finite = not finite + 0 (group)" in printed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["zero", "one", "half", "broken"]),
        (["--limit", "0"], ["zero", "one", "half", "broken", "minus"]),
        (["--step", "0"], ["old"]),
        (["--eval", "gsm8k"], ["tested"]),
        (["--best", "2"], ["one", "half"]),
        (["--worst", "2"], ["broken", "minus"]),
        (["--reward", "0:0.5"], ["zero", "half"]),
        (["--reward", "0.5:"], ["one", "half"]),
        (["--reward", ":0"], ["zero", "broken", "minus"]),
        (["--tag", "words"], ["half", "broken"]),
        (["--text", "Question 1", "--best", "1"], ["half"]),
        (["--text", "absent"], []),
    ],
)
def test_trajectories_can_be_selected(run, capsys, words, expected):
    assert answers(capsys, run, *words) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "7"], "--step 7: give one of 0, 10"),
        (["--eval", "math"], "no rollouts of this kind; it has --eval gsm8k, training"),
        (["--reward", "1"], "--reward 1: write MIN:MAX"),
        (["--reward", "1:0"], "--reward 1:0: write MIN:MAX"),
        (["--reward", "a:b"], "--reward a:b: write MIN:MAX"),
        (["--best", "0"], "--best 0: give a whole number of at least 1"),
        (["--limit", "-1"], "--limit -1: give a whole number of at least 0"),
    ],
)
def test_an_invalid_selection_is_rejected(run, capsys, words, message):
    assert main(["rollouts", str(run), *words]) == 1
    assert message in capsys.readouterr().err


def test_a_directory_without_rollouts_is_explained(tmp_path, capsys):
    assert main(["rollouts", str(tmp_path / "absent")]) == 1
    assert "there is no such directory; give the log_path" in capsys.readouterr().err
    assert main(["rollouts", str(tmp_path)]) == 1
    assert "no *_rollouts.jsonl" in capsys.readouterr().err
