# pyright: reportMissingImports=false
"""Evaluations as logs that Inspect reads. Needs `planish[inspect]`; skipped without it."""

import asyncio
import json
from pathlib import Path

import pytest
from digit_env import DigitsBuilder

from planish import ServiceClient
from planish.commands.cli import main as planish
from planish.evaluation.evaluate import evaluate
from planish.evaluation.tasks import load_task
from planish.evaluation.types import Sampling
from planish.files import read_rows
from planish.testing import tiny_model
from planish.training.rl_config import Config
from planish.training.train_rl import main

log = pytest.importorskip("inspect_ai.log", reason="make test-extras runs it")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def test_an_evaluation_and_a_run_become_logs(tmp_path, capsys):
    model = tiny_model(tmp_path / "tiny")
    config = Config(
        learning_rate=1e-2,
        dataset_builder=DigitsBuilder(batches=2, tests=2),
        model_name="tiny",
        lora_rank=4,
        max_tokens=6,
        log_path=str(tmp_path / "run"),
        eval_every=1,
    )
    with ServiceClient(models={"tiny": str(model)}, data_dir=tmp_path / "data") as client:
        asyncio.run(main(config, client))
        task = load_task("gsm8k", _questions(tmp_path / "questions.jsonl"))
        sampling = Sampling(samples=2, temperature=1.0, max_tokens=8)
        asyncio.run(
            evaluate(
                client.create_sampling_client(base_model="tiny"),
                task,
                sampling,
                out=tmp_path / "eval",
            )
        )
    capsys.readouterr()
    assert planish(["inspect-logs", str(tmp_path / "eval"), "--log-dir", str(tmp_path / "a")]) == 0
    [written] = capsys.readouterr().out.split()
    read = log.read_eval_log(written)
    rows = read_rows(tmp_path / "eval/samples.jsonl")
    rows.sort(key=lambda row: (row["sample"], row["question"]))  # the order of Inspect's logs
    assert [(s.id, s.epoch) for s in read.samples] == [
        (r["question"], r["sample"] + 1) for r in rows
    ]
    assert [s.scores["reward"].value for s in read.samples] == [row["reward"] for row in rows]
    assert [s.output.completion for s in read.samples] == [row["answer"] for row in rows]
    assert [s.target for s in read.samples] == [row["reference"] for row in rows]
    results = json.loads((tmp_path / "eval/results.json").read_text())
    measured = {name: each.value for name, each in read.results.scores[0].metrics.items()}
    assert measured == pytest.approx(results["metrics"])

    assert planish(["inspect-logs", str(tmp_path / "run"), "--log-dir", str(tmp_path / "b")]) == 0
    logs = [log.read_eval_log(path) for path in capsys.readouterr().out.split()]
    index = [r for r in read_rows(tmp_path / "run/rollouts/index.jsonl") if r["split"] != "train"]
    assert len(logs) == len({(row["split"], row["step"]) for row in index}) > 1
    assert sum(len(each.samples) for each in logs) == len(index)
    assert {each.eval.task for each in logs} == {
        f"{row['split'].removeprefix('eval/')}-step-{row['step']}" for row in index
    }


def test_a_directory_without_evaluations_is_rejected(tmp_path, capsys):
    assert planish(["inspect-logs", str(tmp_path)]) == 1
    assert "has neither samples.jsonl nor metrics.jsonl" in capsys.readouterr().err


def _questions(path: Path) -> Path:
    rows = [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
