"""SIGTERM does what Ctrl-C does: the run stops at a point from which it can be resumed, saves, and
prints a message.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from planish.files import read_rows

pytestmark = pytest.mark.slow

WAIT = 300.0

PROGRAM = """
import logging, os, runpy, signal, sys
logging.getLogger("planish.model.kernels").setLevel("ERROR")  # a machine may lack kernels, which is logged
from planish.processes import interruption
from planish.runlog.run_directory import RunDirectory
interruption._DUPLICATE_SIGTERM_SECONDS = 60.0  # a busy machine may pause between the signals
log, signals, number = RunDirectory.log, int(sys.argv[1]), getattr(signal, sys.argv[2])
def logged(self, step, metrics):
    log(self, step, metrics)
    if step == 2:
        for _ in range(signals):
            os.kill(os.getpid(), number)
RunDirectory.log = logged
module, sys.argv = sys.argv[3], sys.argv[3:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""Sends itself so many signals after three steps."""

QUESTIONS = ["max_steps=8", "batch_size=3", "eval_every=0", "save_every=100"]
RECIPES: dict[str, Sequence[str]] = {
    "rl_loop": [*QUESTIONS, "group_size=4", "max_tokens=8", "renderer_name=role_colon"],
    "rl_basic": [*QUESTIONS, "group_size=4", "max_tokens=8", "eval_problems=0"],
    "sl_loop": ["max_steps=8", "batch_size=3", "save_every=100"],
    "sl_basic": QUESTIONS,
    "dpo": [*QUESTIONS, "largest=8", "test_size=5"],
}
QUICK = ("rl_loop", "rl_basic")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("questions")
    rows = [{"question": f"What is {n} + 2?", "answer": f"#### {n + 2}"} for n in range(24)]
    for split in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{split}.jsonl").write_text(text)
    return directory


def run(
    recipe: str, options: Sequence[str], home: Path, signals: int = 0, name: str = "SIGTERM"
) -> Any:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(signals), name, f"planish.recipes.{recipe}", *options],
        capture_output=True,
        text=True,
        timeout=WAIT,
        env={
            **os.environ,
            "PLANISH_HOME": str(home),
            "PLANISH_DATA": str(home / "data"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        # A suite that a shell runs in the background ignores Ctrl-C, and so would this program.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def untimed(log_path: Path) -> list[dict[str, Any]]:
    """Return the rows without times, and without values that depend on the prefix cache of a new
    process.
    """
    timed = ("time/", "tokens_per_second/")
    return [
        {k: v for k, v in row.items() if not k.startswith(timed) and "cached" not in k}
        for row in read_rows(log_path / "metrics.jsonl")
    ]


@pytest.mark.parametrize(
    "recipe", [pytest.param(r, marks=() if r in QUICK else pytest.mark.slow) for r in RECIPES]
)
def test_a_terminated_run_is_resumed(recipe, small_model, dataset, tmp_path, planish_home):
    home = planish_home(tmp_path / "home")
    options = [f"model_name={small_model}", "lora_rank=4", *RECIPES[recipe]]
    options += [] if recipe == "dpo" else [f"dataset={dataset}"]
    whole, log = tmp_path / "whole", tmp_path / "run"
    done = run(recipe, [*options, f"log_path={whole}"], home)
    assert (done.returncode, done.stderr) == (0, "")

    # Two at once, as `timeout` sends them.
    stopped = run(recipe, [*options, f"log_path={log}"], home, signals=2)
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert stopped.stderr == "stopped; the same command resumes from the last checkpoint\n"
    assert "SIGTERM: stopping where the run can be resumed" in stopped.stdout
    rows = read_rows(log / "metrics.jsonl")
    assert f"stopped after {len(rows)} of 8 steps" in stopped.stdout
    assert 3 <= len(rows) < 8
    assert [row["batch"] for row in read_rows(log / "checkpoints.jsonl")] == [len(rows)]

    resumed = run(recipe, [*options, f"log_path={log}"], home)
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert untimed(log) == untimed(whole)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rl_loop", "sl_loop"])
def test_control_c_saves_a_loop_in_one_file(recipe, small_model, dataset, tmp_path, planish_home):
    home, log = planish_home(tmp_path / "home"), tmp_path / "run"
    options = [f"model_name={small_model}", "lora_rank=4", *RECIPES[recipe], f"dataset={dataset}"]
    options = [option for option in options if not option.startswith("eval_every")]
    stopped = run(recipe, [*options, f"log_path={log}"], home, signals=1, name="SIGINT")
    assert stopped.returncode == 130, stopped.stderr
    assert "Ctrl-C: stopping" in stopped.stdout
    rows = read_rows(log / "metrics.jsonl")
    assert [row["batch"] for row in read_rows(log / "checkpoints.jsonl")] == [len(rows)]
