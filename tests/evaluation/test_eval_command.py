"""`planish eval` on a small random model: its output and files, checkpoints by name, and Ctrl-C."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import planish
from planish import ServiceClient
from planish.commands.cli import _parser, main
from planish.errors import UserError
from planish.evaluation import TASKS, Sampling, evaluate, load_task, open_model
from planish.testing import tiny_model

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, small_model, planish_home):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLANISH_MODELS", f"tiny={small_model}")
    monkeypatch.setenv("PYTHONPATH", str(Path(planish.__file__).parents[1]))  # of the subprocess
    monkeypatch.setenv("PLANISH_HOME", str(planish_home(tmp_path / "home")))
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("PLANISH_BASE_URL", raising=False)
    return tmp_path


def words(model, data, *more):
    given = [
        "eval",
        "gsm8k",
        "--model",
        model,
        "--data",
        str(data),
        "--max-tokens",
        "8",
        "--temperature",
        "1",
    ]
    return [*given, "--samples", "3", "--k", "1,3", *more]


def results_of(directory):
    return json.loads((directory / "results.json").read_text())


def test_it_prints_what_it_keeps(here, sums, capsys):
    assert main(words("tiny", sums, "--limit", "4")) == 0
    out = here / "evaluations" / "gsm8k-tiny"
    printed = capsys.readouterr().out
    assert "evaluations/gsm8k-tiny/results.json" in printed
    found = results_of(out)
    assert found["task"]["num_questions"] == 4
    weights = found["model"].pop("weights")
    assert re.fullmatch("[0-9a-f]{16}", weights)
    assert found["model"] == {"name": "tiny", "base_model": "tiny", "renderer": "qwen3_instruct"}
    assert found["settings"]["k"] == [1, 3]
    assert f"pass@3                   {found['metrics']['pass@3']:.4f} ± " in printed
    assert {"planish", "torch", "python"} <= set(found["versions"])
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert len({row["answer"] for row in rows}) > 6
    assert all(1 <= len(row["tokens"]) <= 8 for row in rows)
    before = (out / "samples.jsonl").read_bytes()
    assert main(words("tiny", sums, "--limit", "4", "--concurrency", "1")) == 0
    assert (out / "samples.jsonl").read_bytes() == before
    assert main(words("tiny", sums, "--limit", "4", "--seed", "1")) == 1
    assert "seed was 0, is 1" in capsys.readouterr().err


def test_answers_of_other_weights_of_that_name_are_not_gone_on_with(here, sums, capsys):
    model = tiny_model(here / "model", seed=0)
    assert main(words(str(model), sums, "--limit", "1", "--out", "out")) == 0
    shutil.rmtree(model)
    tiny_model(model, seed=1)
    assert main(words(str(model), sums, "--limit", "1", "--out", "out")) == 1
    assert "weights was" in capsys.readouterr().err


def test_concurrency_changes_no_answer(sums):
    task = load_task("gsm8k", sums, limit=6)
    drawn = Sampling(samples=2, max_tokens=8, temperature=1.0)
    with ServiceClient() as service:
        client = open_model(service, "tiny").sampling_client
        one, many = (
            asyncio.run(evaluate(client, task, drawn, concurrency=count)) for count in (1, 6)
        )
    assert one == many


def test_choices_are_scored_as_one_by_one(capitals, here):
    task = load_task("multiple_choice_logprobs", capitals)
    with ServiceClient() as service:
        model = open_model(service, "tiny")
        asyncio.run(evaluate(model.sampling_client, task, out=here / "out"))
        rows = [
            json.loads(line) for line in (here / "out" / "samples.jsonl").read_text().splitlines()
        ]
        for row in rows:
            for choice in row["choices"]:
                messages = [
                    *task.questions[row["question"] - 1].messages,
                    {"role": "assistant", "content": choice["text"]},
                ]
                tokens, weights = model.renderer.build_supervised_example(messages)
                every = model.sampling_client.compute_logprobs(tokens).result()
                scored = [
                    logprob
                    for logprob, weight in zip(every, weights.tolist(), strict=True)
                    if weight and logprob is not None
                ]
                assert choice["logprob"] == pytest.approx(sum(scored), abs=1e-4)
                assert choice["num_tokens"] == len(scored)
            assert (
                row["answer"] == max(row["choices"], key=lambda choice: choice["logprob"])["letter"]
            )


def test_a_checkpoint_is_named_by_path_or_by_its_run_and_brings_its_renderer(here, sums, capsys):
    with ServiceClient() as service:
        training = service.create_lora_training_client(
            "tiny", rank=2, user_metadata={"renderer_name": "role_colon"}
        )
        path = training.save_weights_for_sampler("trained").result().path
        run = here / "runs" / "sl"
        run.mkdir(parents=True)
        (run / "checkpoints.jsonl").write_text(
            json.dumps({"name": "a", "batch": 1, "sampler_path": path}) + "\n"
        )
        model = open_model(service, path)
        assert (model.name, model.renderer.name) == (path, "role_colon")
        assert open_model(service, str(run)).name == path
        assert (
            open_model(service, path.replace("tinker://", "planish://"), "chatml").renderer.name
            == "chatml"
        )
        assert model.context_window == 2048
        (run / "checkpoints.jsonl").write_text("")
        with pytest.raises(UserError, match="saved no weights"):
            open_model(service, str(run))
    assert main(words(path, sums, "--limit", "1", "--out", "out")) == 0
    told = results_of(here / "out")["model"]
    saved_at = told.pop("weights")
    assert told == {"name": path, "base_model": "tiny", "renderer": "role_colon"}
    with ServiceClient() as service:
        service.create_training_client_from_state(path).save_weights_for_sampler("other").result()
        [other] = list((here / "data").glob("*/sampler_weights/other"))
        Path(here / "data", path.removeprefix("tinker://")).rename(here / "gone")
        other.rename(here / "data" / path.removeprefix("tinker://"))
    assert main(words(path, sums, "--limit", "1", "--out", "out")) == 1
    assert f"weights was '{saved_at}'" in capsys.readouterr().err
    assert main(words("tinker://gone/sampler_weights/x", sums)) == 1
    assert "gone" in capsys.readouterr().err


def test_the_commands_of_the_page_are_ones_that_are_taken():
    commands = re.findall(
        r"^planish (eval .+)$", (DOCS / "guide/evaluation.md").read_text(), re.MULTILINE
    )
    assert len(commands) > 3
    for command in commands:
        assert _parser(["eval"]).parse_args(shlex.split(command)).task in TASKS


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--samples", "3", "--temperature", "0"], "the same answer"),
        (["--data", "missing.jsonl"], "no such file"),
        (["--k", "9"], "from 1 to the number of samples"),
        (["--limit", "0"], "--limit 0:"),
    ],
)
def test_a_usage_error_is_one_line(sums, capsys, more, message):
    assert main(words("tiny", sums, *more)) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


STOPPED = """
import os, sys
from planish.commands.cli import main
from planish.evaluation.files import EvaluationDirectory
append, number = EvaluationDirectory.append, int(sys.argv[1])
def append_and_stop(self, answers):
    append(self, answers)
    EvaluationDirectory.append = append
    os.kill(os.getpid(), number)
EvaluationDirectory.append = append_and_stop
sys.exit(main(sys.argv[2:]))
"""
"""Sends itself a signal after the first question."""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_is_done(here, sums, end, status):
    command = [*words("tiny", sums), "--concurrency", "1"]
    out = here / "evaluations" / "gsm8k-tiny"
    stopped = subprocess.run(
        [sys.executable, "-c", STOPPED, str(int(end)), *command],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # A shell lets background jobs ignore SIGINT, and the program would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert stopped.returncode == status
    assert "the same command resumes" in stopped.stdout
    done = (out / "samples.jsonl").read_bytes()
    assert 0 < done.count(b"\n") < 36
    assert main(command) == 0
    assert (out / "samples.jsonl").read_bytes().startswith(done)
    resumed = results_of(out)
    assert main([*command, "--out", "whole", "--concurrency", "12"]) == 0
    assert results_of(here / "whole")["metrics"] == resumed["metrics"]
