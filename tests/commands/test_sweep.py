"""`planish sweep`: what it plans and refuses, and a real sweep that is interrupted and resumed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planish.commands import recipe_modules, sweep
from planish.commands.cli import main
from planish.files import read_rows
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.testing import tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_path(monkeypatch, tmp_path):
    """Work in an empty directory. A sweep puts it on the path of imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def planned(recipe, *words):
    return sweep.plan(recipe, recipe_modules.import_recipe(recipe), words)


def test_each_combination_is_a_run_with_a_directory():
    directory, runs = planned(
        "math_rl", "env=arithmetic", "learning_rate=1e-4,3e-4", "model_name=a/b,c", "loggers=x,y"
    )
    assert directory == Path("runs/sweep-math_rl")
    assert [one.directory.name for one in runs] == [
        "learning_rate=1e-4,model_name=a_b",
        "learning_rate=1e-4,model_name=c",
        "learning_rate=3e-4,model_name=a_b",
        "learning_rate=3e-4,model_name=c",
    ]
    assert runs[1].values == {"learning_rate": "1e-4", "model_name": "c"}
    assert runs[1].options == [
        *("env=arithmetic", "loggers=x,y", "learning_rate=1e-4", "model_name=c"),
    ]
    assert planned("sl_loop", "log_path=here", "seed=1,2")[0] == Path("here")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing", "seed=1,2"], "RECIPE nothing: there is no such recipe"),
        (["./absent.py", "seed=1,2"], "there is no such file"),
        (["math_rl"], "give an option with several values"),
        (["math_rl", "seed=1"], "give an option with several values"),
        (["math_rl", "seed"], "seed: options are written name=value or name=a,b,c"),
        (["math_rl", "seed=1,,2"], "a value is empty or given twice"),
        (["math_rl", "seed=1,2,1"], "a value is empty or given twice"),
        (["math_rl", "seed=1,2", "seed=3"], "seed is given twice"),
        (["math_rl", "log_path=a,b"], "log_path is the one directory of the sweep"),
        (["math_rl", "dataset=a/b,a:b"], "differ only in characters"),
        (["math_rl", "env=gsm8k", f"dataset={'a' * 250},b"], "name of 258 characters, and 255 are"),
        (
            ["math_rl", "env=arithmetic", "learning_rate=1e-4,0.0001"],
            "learning_rate=1e-4 and learning_rate=0.0001 are the same run",
        ),
        (["math_rl", "sede=1,2"], "sede"),
        (["math_rl", "seed=1,x"], "seed=x; no run was started"),
        (["math_rl", "env=arithmetic", "learning_rate=1e-4,0"], "learning_rate=0; no run was"),
        (["math_rl", "env=arithmetic", "loss_fn=ppo,pop"], "loss_fn=pop: give one of"),
        (["math_rl", "env=arithmetic", "advantage=mean,rules:f"], "there is no module rules"),
        (["math_rl", "env=arithmetic", "kl_reference_model=a,b"], "kl_penalty_coef is 0"),
        (["rl_loop", "group_size=4,1"], "group_size=1: give at least 2"),
        (["sl_basic", "keep_best=0,1", "dataset=x"], "keep_last=None: give a number"),
        (["dpo", "largest=8,9", "dataset=x"], "is for generated pairs"),
    ],
)
def test_wrong_words_are_refused_before_the_first_run(words, message, capsys, tmp_path):
    assert main(["sweep", *words]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", ["sl_basic", "dpo", "preference_model", "math_rl", "calculator"])
def test_right_options_are_checked_without_training(recipe, tmp_path):
    module = recipe_modules.import_recipe(recipe)
    for one in planned(recipe, "seed=1,2")[1]:
        sweep.check_options(module, one)
    assert list(tmp_path.iterdir()) == []


def test_functions_next_to_a_recipe_are_found(tmp_path):
    (tmp_path / "rules_of_sweep.py").write_text("def half(rewards):\n    return rewards\n")
    module = recipe_modules.import_recipe("math_rl")
    for one in planned("math_rl", "env=arithmetic", "advantage=mean,rules_of_sweep:half")[1]:
        sweep.check_options(module, one)


RULES = """
import os, signal, time
from pathlib import Path

# The check of a function gets the rewards 0 and 1, and a step gets others.
def failing(rewards):
    if rewards != [0.0, 1.0]:
        raise LookupError("no baseline")
    return rewards

def interrupting(rewards):
    if rewards != [0.0, 1.0] and Path("interrupt").exists():
        Path("interrupt").unlink()
        control_c = signal.getsignal(signal.SIGINT).__self__
        os.kill(os.getppid(), signal.SIGINT)
        while control_c._receiver is not None:  # until the parent has passed the signal on
            time.sleep(0.01)
    return rewards
"""


@pytest.mark.slow
def test_a_sweep_runs_what_failed_or_was_interrupted_again_and_nothing_twice(
    tmp_path, planish_home
):
    model = tiny_model(tmp_path / "model")
    home = planish_home(tmp_path / "home")
    (tmp_path / "my_rules.py").write_text(RULES)
    options = [
        *("sweep", "math_rl", "env=arithmetic", "advantage=my_rules:failing,my_rules:interrupting"),
        *("max_steps=3", "batch_size=2", "group_size=2", "max_tokens=4", "lora_rank=4"),
        *("eval_every=0", "save_every=1"),
    ]

    def start():
        return subprocess.run(
            [sys.executable, "-m", "planish", *options],
            capture_output=True,
            text=True,
            timeout=500,
            env={
                **os.environ,
                "PLANISH_MODELS": f"{DEFAULT_MODEL}={model}",
                "PLANISH_HOME": str(home),
                "PLANISH_DATA": str(tmp_path / "data"),
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
            },
        )

    names = ["advantage=my_rules_failing", "advantage=my_rules_interrupting"]
    (tmp_path / "interrupt").touch()
    stopped = start()
    assert stopped.returncode == 130, stopped.stderr
    assert "in advantage=my_rules:failing" in stopped.stderr
    assert stopped.stderr.endswith(f"{names[1]}; the same command resumes there\n")
    directory = tmp_path / "runs" / "sweep-math_rl"
    rows = read_rows(directory / sweep.RECORD)
    assert [(row["run"], row["status"]) for row in rows] == [(names[0], 1), (names[1], 130)]
    assert len(read_rows(directory / names[1] / "metrics.jsonl")) < 3

    done = start()
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"not finished: {names[0]}; the same command runs only these again\n"
    )
    steps = [row["step"] for row in read_rows(directory / names[1] / "metrics.jsonl")]
    assert steps == [0, 1, 2]
    [row] = [line.split() for line in done.stdout.splitlines() if line.endswith("finished")]
    assert row[:2] == ["my_rules:interrupting", "3"]
    assert names[1] in (directory / sweep.PAGE).read_text()
    assert [one.is_finished for one in planned(*options[1:])[1]] == [False, True]
