"""Rollouts with written answers (planish/rl/rollout/play.py), and `planish play`."""

import asyncio
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rollout_samples import NASTY

from planish.commands import play as command
from planish.commands.cli import main
from planish.errors import UserError
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.recipes import guess_number
from planish.recipes.guess_number import GuessNumberDatasetBuilder
from planish.renderers import get_renderer
from planish.rl.rollout.play import Answer, FirstEnvOnly, ScriptedPolicy, play
from planish.runlog import model_renderer
from planish.testing import tiny_model
from planish.tokenizer import load_tokenizer
from planish.training.run_options import run_in_place_of_training
from planish.types import ModelInput


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def mapped(model, monkeypatch):
    monkeypatch.setenv("PLANISH_MODELS", f"{DEFAULT_MODEL}={model}")
    monkeypatch.setattr(model_renderer, "_RENDERERS", {})


@pytest.fixture
def tokenizer(model):
    return load_tokenizer(model)


def guessing(size):
    return GuessNumberDatasetBuilder(model_name=DEFAULT_MODEL).group(7, size)


def test_written_answers_run_an_episode(mapped, tokenizer):
    [trajectory] = play(guessing(1), "3", "11", "7", tokenizer=tokenizer).trajectories_G
    assert [turn.reward for turn in trajectory.transitions] == [0.0, 0.0, 1.0]
    assert trajectory.stop_reason == "completed"


def test_answers_of_a_group_are_given_turn_by_turn(mapped, tokenizer):
    group = play(guessing(2), "7", "3", "7", tokenizer=tokenizer)
    assert [len(each.transitions) for each in group.trajectories_G] == [1, 2]


def test_a_written_answer_can_be_truncated(mapped, tokenizer):
    [trajectory] = play(
        guessing(1), Answer("7", was_cut_off=True), tokenizer=tokenizer
    ).trajectories_G
    assert trajectory.stop_reason == "max_tokens"
    assert trajectory.transitions[0].ac.stop_reason == "length"


def test_too_few_written_answers_raise(mapped, tokenizer):
    with pytest.raises(UserError, match="all 1 answers were used and the episode has not ended"):
        play(guessing(1), "3", tokenizer=tokenizer)


def test_a_written_answer_ends_with_the_stop_condition(tokenizer):
    def tokens(stop):
        policy = ScriptedPolicy(tokenizer, ["a"])
        return asyncio.run(policy(ModelInput.empty(), stop)).tokens

    assert tokens([5]) == [*tokenizer.encode("a", add_special_tokens=False), 5]
    assert tokenizer.decode(tokens(["\n\nUser:"])) == "a\n\nUser:"
    assert tokenizer.decode(tokens([])) == "a"


def test_one_environment_of_a_group_can_be_run_alone(mapped, tokenizer):
    group = play(FirstEnvOnly(guessing(4)), "7", tokenizer=tokenizer)
    assert len(group.trajectories_G) == 1
    assert group.metrics_G == [{"found": 1.0}]


def run_play(monkeypatch, capsys, typed, *words):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    status = main(["play", *words])
    return status, capsys.readouterr()


def test_a_person_answers_an_environment_in_the_terminal(mapped, monkeypatch, capsys, tmp_path):
    log_path = tmp_path / "run"
    words = ("guess_number", "largest=3", "max_guesses=4", f"log_path={log_path}")
    status, said = run_play(monkeypatch, capsys, "0\n1\n2\n3\n", *words)
    assert status == 0
    assert "Guess my number, 0 to 3." in said.out
    assert "Too low: 1 to 3." in said.out
    assert "total reward" in said.out
    assert "ended: completed" in said.out
    assert not log_path.exists()


def test_the_written_answer_is_not_printed_as_new_text(mapped, monkeypatch, capsys):
    _, said = run_play(monkeypatch, capsys, "1234567\n" * 4, "guess_number")
    second = said.out.split("tokens ─")[2]
    assert "1234567<|im_end|>" not in second
    assert "Write a number" in second


def test_all_environments_of_a_group_run_on_request(mapped, monkeypatch, capsys):
    words = ("guess_number", "largest=3", "group_size=2", "--group")
    status, said = run_play(monkeypatch, capsys, "0\n0\n1\n1\n2\n2\n3\n3\n", *words)
    assert status == 0
    assert "outcome of environment 2" in said.out


def test_multi_line_and_truncated_answers_are_read(monkeypatch, capsys):
    def read(typed):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        return command.read_answer(Console())

    assert read("plain\n") == Answer("plain")
    assert read('"""\na\n\nb\n"""\n') == Answer("a\n\nb")
    assert read("/cut off here\n") == Answer("off here", was_cut_off=True)
    assert read("//cut\n") == Answer("/cut")
    assert read("/cutter\n") == Answer("/cutter")
    with pytest.raises(UserError, match="the input ended"):
        read('"""\na\n')


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "RECIPE nothing: there is no such recipe"),
        (["sl_loop"], "has no environments to play"),
        (["./absent.py"], "there is no such file"),
        (["guess_number", "largest=0"], "largest=0: give"),
        (["guess_number", "colour=red"], "colour"),
        (["guess_number", "--number", "-1"], "--number -1: give"),
        (["guess_number", "largest=3", "--test", "--number", "9"], "has 4 problems, from 0 on"),
        (["on_policy_distillation", f"teacher_model={DEFAULT_MODEL}"], "no environments to play"),
    ],
)
def test_recipes_without_environments_are_rejected(mapped, monkeypatch, capsys, words, message):
    status, said = run_play(monkeypatch, capsys, "", *words)
    assert status == 1
    assert message in said.err


def test_a_recipe_file_can_be_run(mapped, monkeypatch, capsys, tmp_path):
    path = tmp_path / "my_guessing.py"
    source = Path(guess_number.__file__).read_text()
    path.write_text(source.replace("Guess my number", "Guess mine"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    status, said = run_play(monkeypatch, capsys, "0\n1\n2\n3\n", str(path), "largest=3")
    assert status == 0
    assert "Guess mine, 0 to 3." in said.out
    assert run_in_place_of_training.get() is None


SCRIPT = """
import asyncio
import json
from pathlib import Path
from planish.rl.environments.reward_env import RewardDatasetBuilder
from planish.training.rl_config import Config
from planish.training.train_rl import main

def reward(answer, row):
    return 0.25 * len(answer)

if %s:
    Path("questions.jsonl").write_text(json.dumps({"prompt": "Say hello."}))
    questions = RewardDatasetBuilder(dataset="questions.jsonl", reward=reward, model_name=MODEL)
    config = Config(
        dataset_builder=questions, model_name=MODEL, learning_rate=1e-4, max_tokens=8, log_path="run"
    )
    raise SystemExit(f"trained in {asyncio.run(main(config))}")
"""


@pytest.mark.parametrize("condition", ["True", "__name__ == '__main__'"])
def test_a_script_that_trains_is_played_in_place_of_training(
    condition, mapped, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("train_me.py").write_text(f"MODEL = {DEFAULT_MODEL!r}\n" + SCRIPT % condition)
    status, said = run_play(monkeypatch, capsys, "hello\n", "train_me.py")
    assert (status, said.err) == (0, "")
    assert "Say hello." in said.out
    assert "total reward 1.25" in said.out
    assert not Path("run").exists()
    assert run_in_place_of_training.get() is None
    status, said = run_play(monkeypatch, capsys, "hello\n", "train_me.py", "max_tokens=9")
    assert status == 1
    assert "max_tokens=9: train_me.py has no class `Options`; change its config" in said.err


def test_terminal_control_characters_are_not_printed(model, monkeypatch, capsys):
    tokenizer = load_tokenizer(model)
    renderer = get_renderer("role_colon", tokenizer)
    person = command.PersonAtTerminal(tokenizer, 8, Console())
    monkeypatch.setattr("sys.stdin", io.StringIO("ok\n"))
    person.answer(
        renderer.build_generation_prompt([{"role": "user", "content": "a\x1b[2J" + NASTY}])
    )
    assert "\x1b[2J" not in capsys.readouterr().out
