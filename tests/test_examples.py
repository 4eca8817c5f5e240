"""The README's script, the tutorial and the recipes, on a tiny random model. Only the model's name
leads to another directory; everything else runs as a reader would start it.
"""

import ast
import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import chz
import pytest

from planish.errors import UserError
from planish.files import read_rows
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.recipes import demo, rl_loop, sl_loop
from planish.recipes.training_run import read_options
from planish.testing import tiny_model

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, planish_home):
    """A directory with a tiny model in place of the embedded one, and a dataset of a few sums."""
    directory = tmp_path_factory.mktemp("workplace")
    tiny_model(directory / "model")
    planish_home(directory / "home")
    (directory / "sums").mkdir()
    for split, count in (("train", 12), ("test", 3)):
        rows = [
            {"question": f"What is {n} + 2?", "answer": f"{n} + 2 = {n + 2}\n#### {n + 2}"}
            for n in range(count)
        ]
        (directory / "sums" / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return directory


def start(workplace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PLANISH_MODELS": f"{DEFAULT_MODEL}={workplace / 'model'}",
        "PLANISH_HOME": str(workplace / "home"),
        "PLANISH_DATA": str(workplace / "data"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", *arguments],
        capture_output=True,
        text=True,
        cwd=workplace,
        env=environment,
        timeout=500,
    )


def run(workplace: Path, *arguments: str) -> str:
    done = start(workplace, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


THREE_WORDS = (ROOT / "examples" / "three_words.py").read_text()


@pytest.mark.slow
def test_the_script_of_the_readme_runs(workplace):
    [_, script] = scripts_of_the_readme()
    (workplace / "readme.py").write_text(script)
    printed = run(workplace, "readme.py").splitlines()
    *steps, saved = [line.partition(":")[0] for line in printed]
    assert steps == [f"step {step}" for step in range(10)]
    assert saved == "tinker"  # the path of the saved state


def test_the_readme_shows_the_example_of_a_reward_function():
    [shown, _] = scripts_of_the_readme()
    assert shown.startswith("def reward(")
    assert shown.endswith("asyncio.run(main(config))\n")
    assert THREE_WORDS.endswith(shown)


@pytest.mark.slow
def test_the_example_of_a_reward_function_trains_and_a_wrong_option_ends_in_one_line(workplace):
    script = THREE_WORDS.replace("num_epochs=6", "max_steps=2")
    (workplace / "rewards.py").write_text(script)
    run(workplace, "rewards.py")
    rows = read_rows(workplace / "runs/three-words/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    assert all("env/all/reward/total" in row for row in rows)
    (workplace / "rewards.py").write_text(script.replace("2e-4", "3e-4"))
    done = start(workplace, "rewards.py")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert re.match(r"error: log_path=.*runs/three-words.*learning_rate", line)


SENDING_CONTROL_C = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
sending = [1]


def send():
    sending.clear()
    os.kill(os.getpid(), signal.SIGINT)


"""


@pytest.mark.slow
def test_control_c_in_the_example_of_a_reward_function_ends_without_a_traceback(workplace):
    # The reward function sends one signal, in the middle of the first step.
    script = THREE_WORDS.replace("    items = ", "    send() if sending else None\n    items = ")
    script = SENDING_CONTROL_C + script.replace("num_epochs=6", "max_steps=2")
    (workplace / "stopped.py").write_text(script.replace("runs/three-words", "runs/stopped"))
    done = start(workplace, "stopped.py")
    assert done.returncode == 130
    assert "stopped after 0 of 2 steps; the same command resumes there" in done.stdout
    assert done.stderr == ""


def scripts_of_the_readme() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


TUTORIAL = ROOT / "examples" / "tutorial_grpo.py"
TINY_SETTINGS = ["steps=2", "batch_size=2", "group_size=3", "test_size=3", "max_tokens=8", "rank=4"]


@pytest.mark.slow
def test_the_tutorial_runs_as_a_script(workplace):
    settings = [*TINY_SETTINGS, "dataset=sums", "plot=curve.png"]
    printed = run(workplace, str(TUTORIAL), *settings)
    assert "12 problems" in printed
    assert re.findall(r"^step +(\d) \| reward [\d.]+", printed, flags=re.MULTILINE) == ["0", "1"]
    assert (workplace / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_grpo_on_one_page_runs(workplace):
    page = ROOT / "examples" / "grpo_one_page.py"
    assert len(page.read_text().splitlines()) <= 110
    printed = run(workplace, str(page), "2")
    expected = (
        r"test sums .*: \d+%\nstep 0: reward [\d.]+\nstep 1: reward [\d.]+\ntest sums .*: \d+%\n"
    )
    assert re.fullmatch(expected, printed), printed


@pytest.mark.slow
def test_words_are_split_by_family_and_trained_on(workplace):
    words = [f"{chr(97 + n % 26)}{chr(97 + n // 26)}word" for n in range(40)]
    rated = [(word + end, (-1) ** n * 2.0) for n, word in enumerate(words) for end in ("", "ly")]
    lines = [f"{word}\t{mean}\t0.5\t[2, 2]" for word, mean in [*rated, (":)", 2.0), ("weak", 0.3)]]
    (workplace / "lexicon.txt").write_text("\n".join(lines))
    settings = [f"model_name={DEFAULT_MODEL}", "lexicon=lexicon.txt", "batch_size=2", "max_steps=2"]
    run(workplace, str(ROOT / "examples" / "word_sentiment.py"), "log_path=runs/words", *settings)
    train, test = (
        read_rows(workplace / f"runs/words-questions/{split}.jsonl") for split in ("train", "test")
    )
    for rows in (train, test):
        answers = [row["answer"] for row in rows]
        assert answers.count("positive") == answers.count("negative") > 0
    stems = [
        {re.findall(r"Now the word (\w{4})", row["prompt"])[0] for row in rows}
        for rows in (train, test)
    ]
    assert not stems[0] & stems[1]
    assert [row["step"] for row in read_rows(workplace / "runs/words/metrics.jsonl")][:2] == [0, 1]


@pytest.mark.slow
def test_the_tutorial_is_a_notebook(workplace):
    printed = run(workplace, "-m", "marimo", "check", str(TUTORIAL))
    assert "error" not in printed


def recorded_cells() -> list[dict[str, Any]]:
    """Return the cells of the recorded notebook."""
    return json.loads(TUTORIAL.with_suffix(".ipynb").read_text())["cells"]


def test_the_recorded_notebook_has_the_cells_of_the_tutorial():
    """If this fails, record it again, as CONTRIBUTING.md says."""
    cells = []
    for function in ast.parse(TUTORIAL.read_text()).body:
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            body = [each for each in function.body if not isinstance(each, ast.Return)]
            cells.append(ast.unparse(ast.Module(body, [])))
    recorded = []
    for cell in recorded_cells():
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            recorded.append(source)
        else:
            recorded.append(ast.unparse(ast.parse(source)))
    assert len(cells) == len(recorded) > 20
    for cell, source in zip(cells, recorded, strict=True):
        if cell.startswith("mo.md("):
            assert inspect.cleandoc(ast.literal_eval(cell[len("mo.md(") : -1])) == source
        else:
            assert cell == source


@pytest.mark.slow
def test_the_recorded_notebook_runs_and_its_outputs_have_the_recorded_form(
    in_process, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["jupyter", *TINY_SETTINGS])
    monkeypatch.setenv("MPLBACKEND", "agg")
    namespace: dict[str, Any] = {}

    async def run_cells() -> None:
        for cell in recorded_cells():
            if cell["cell_type"] == "code":
                code = compile(
                    "".join(cell["source"]), "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                )
                if (waiting := eval(code, namespace)) is not None:
                    await waiting
                printed = capsys.readouterr().out
                recorded = "".join(
                    line for output in cell["outputs"] for line in output.get("text", [])
                )
                assert forms_of(printed) == forms_of(recorded)

    asyncio.run(run_cells())
    namespace["service_client"].close()
    assert namespace["plt"].gca().lines
    namespace["plt"].close("all")
    outputs = [output for cell in recorded_cells() for output in cell.get("outputs", [])]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1


def forms_of(printed: str) -> set[str]:
    """Return the forms of the lines about the training, and whether anything is printed."""
    lines = [line for line in printed.splitlines() if line.startswith(("step ", "test questions"))]
    return {re.sub(r"\s+", " ", re.sub(r"[\d.]+", "#", line)) for line in lines} | {
        "text" if printed.strip() else "nothing"
    }


def test_without_marimo_the_tutorial_names_the_extra(workplace):
    program = (
        "import runpy, sys; sys.modules['marimo'] = None; "
        f"runpy.run_path({str(TUTORIAL)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "the tutorial needs marimo: pip install 'planish[notebooks]'\n"


@pytest.fixture
def in_process(workplace, monkeypatch):
    """Run recipes as functions, because starting a process for each would take longer than the rest
    of this file.
    """
    monkeypatch.setenv("PLANISH_MODELS", f"{DEFAULT_MODEL}={workplace / 'model'}")
    monkeypatch.setenv("PLANISH_HOME", str(workplace / "home"))
    monkeypatch.setenv("PLANISH_DATA", str(workplace / "data"))
    monkeypatch.chdir(workplace)
    return workplace


SMALL = {"dataset": "sums", "batch_size": 4, "lora_rank": 4, "save_every": 1}


@pytest.mark.slow
def test_a_warm_start_and_then_rewards(in_process, capsys):
    sl_loop.main(sl_loop.Config(**SMALL, max_steps=2, log_path="sl", eval_examples=3))
    rewards = rl_loop.Config(
        **SMALL,
        group_size=2,
        max_tokens=8,
        log_path="rl",
        load_checkpoint_path="sl",
        eval_problems=3,
        max_steps=1,
    )
    rl_loop.main(rewards)
    rl_loop.main(chz.replace(rewards, max_steps=2))
    rows = read_rows("rl/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["step"] for row in rows if "reward/total" in row] == [0, 1]
    assert [row["step"] for row in rows if "test/env/all/correct" in row] == [0, 1, 2]
    assert (in_process / "rl" / "reward.png").exists()
    assert read_rows("sl/metrics.jsonl")[0]["train_mean_nll"] > 0
    trained = len(rows)
    rl_loop.main(chz.replace(rewards, max_steps=2))
    assert "all 2 steps are done" in capsys.readouterr().out
    assert len(read_rows("rl/metrics.jsonl")) == trained


@pytest.mark.slow
def test_a_start_from_an_adapter_of_another_rank_is_rejected(in_process):
    sl_loop.main(sl_loop.Config(**SMALL, max_steps=1, log_path="sl4"))
    other = {**SMALL, "lora_rank": 8}
    with pytest.raises(UserError, match="rank 4.*lora_rank=8"):
        rl_loop.main(rl_loop.Config(**other, log_path="rl8", load_checkpoint_path="sl4"))


def test_a_run_that_cannot_begin_says_why_in_words_of_the_command_line(in_process):
    for option, value, message in (
        ("renderer_name", "llama4", "renderer_name: .*'llama4' is unknown"),
        ("load_checkpoint_path", "runs/typo", "'runs/typo' is neither the path of a checkpoint"),
    ):
        with pytest.raises(UserError, match=message):
            rl_loop.main(
                chz.replace(
                    rl_loop.Config(**SMALL, log_path="never", max_steps=1), **{option: value}
                )
            )
    for argument in ("--learning_rate=1e-4", "-h", "4"):
        with pytest.raises(UserError, match=f"{argument}: options are written name=value"):
            read_options(rl_loop.Config, {}, [argument])


@pytest.mark.slow
def test_the_demo_on_a_model_that_cannot_add(in_process):
    config = demo.Config(steps=2, batch_size=2, group_size=2, held_out=4, lora_rank=4)
    demo.main(config)
    demo.main(config)
    assert len(read_rows("runs/demo/metrics.jsonl")) == 2
    assert len(list((in_process / "runs/demo/checkpoints").glob("*"))) == 1, (
        "those of the old demo are gone"
    )


@pytest.mark.slow
def test_a_recipe_runs_from_the_command_line_and_names_what_is_wrong(workplace):
    done = start(workplace, "-m", "planish.recipes.rl_loop", "dataset=nowhere.jsonl", "max_steps=1")
    assert done.returncode == 1
    assert "dataset nowhere.jsonl: no such file" in done.stderr
    assert "Traceback" not in done.stderr
