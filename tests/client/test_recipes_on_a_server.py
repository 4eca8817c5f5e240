"""Recipes with `base_url` write the same rows as a run in this process, and a run can be resumed in
another session.
"""

import asyncio
import json
from pathlib import Path

import pytest

from planish.evaluation import Sampling, evaluate, load_task, open_model
from planish.files import read_rows
from planish.recipes import math_rl, rl_loop, sl_loop


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("sums")
    for split, count in (("train", 12), ("test", 2)):
        rows = [
            {"question": f"{n} + 2?", "answer": f"It is {n + 2}\n#### {n + 2}"}
            for n in range(count)
        ]
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PLANISH_HOME", str(tmp_path / "cache"))


def rows_of(run: Path) -> list[dict]:
    """Return the rows without values that depend on time, on caches or on the planned number of
    steps.
    """
    other = ("time/", "tokens_per_second/", "tokens/prefill", "progress/done_frac")
    rows = read_rows(run / "metrics.jsonl")
    return [
        {k: v for k, v in row.items() if not k.startswith(other) and "cached" not in k}
        for row in rows
    ]


@pytest.mark.slow
def test_supervised_training_is_equal_on_a_server(server_url, embedded_client, sums, tmp_path):
    options = {
        "model_name": "tiny",
        "dataset": str(sums),
        "renderer_name": "role_colon",
        "batch_size": 4,
        "lora_rank": 4,
        "save_every": 2,
        "eval_examples": 2,
    }
    far = sl_loop.main(
        sl_loop.Config(**options, base_url=server_url, log_path=str(tmp_path / "far"))
    )
    near = sl_loop.train(
        sl_loop.Config(**options, log_path=str(tmp_path / "near")), embedded_client
    )
    assert rows_of(far) == rows_of(near)
    assert len(rows_of(far)) == 4


@pytest.mark.slow
def test_rl_is_equal_on_a_server_and_resumes_in_another_session(
    server_url, embedded_client, sums, tmp_path
):
    options = {
        "model_name": "tiny",
        "dataset": str(sums),
        "renderer_name": "role_colon",
        "batch_size": 2,
        "group_size": 2,
        "max_tokens": 8,
        "lora_rank": 4,
    }
    far = {**options, "base_url": server_url, "log_path": str(tmp_path / "far")}
    rl_loop.main(rl_loop.Config(**far, max_steps=1))
    run = rl_loop.main(rl_loop.Config(**far, max_steps=2))
    near = rl_loop.train(
        rl_loop.Config(**options, log_path=str(tmp_path / "near"), max_steps=2), embedded_client
    )
    assert rows_of(run) == rows_of(near)
    assert [row["batch"] for row in read_rows(run / "checkpoints.jsonl")] == [1, 2]


@pytest.mark.slow
def test_recipes_run_on_a_server(server_url, tmp_path):
    changes = {
        "max_steps": 2,
        "batch_size": 2,
        "group_size": 2,
        "eval_problems": 2,
        "max_tokens": 8,
        "lora_rank": 4,
    }
    options = math_rl.options_for(
        "arithmetic",
        **changes,
        model_name="tiny",
        renderer_name="role_colon",
        base_url=server_url,
        log_path=str(tmp_path / "run"),
    )
    run = math_rl.main(options)
    assert [row["progress/batch"] for row in rows_of(run)] == [0, 1, 2]
    assert read_rows(run / "checkpoints.jsonl")[-1]["sampler_path"].startswith("tinker://")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm8k", "multiple_choice_logprobs"])
def test_an_evaluation_is_equal_on_a_server(remote_client, embedded_client, sums, tmp_path, name):
    choices = {"question": "Which?", "choices": ["one", "two", "three"], "answer": "B"}
    (tmp_path / "choices.jsonl").write_text(json.dumps(choices) + "\n")
    task = load_task(name, sums if name == "gsm8k" else tmp_path / "choices.jsonl")
    draws = Sampling(samples=2, max_tokens=8, temperature=1.0) if name == "gsm8k" else None
    rows = []
    for client in (remote_client, embedded_client):
        model = open_model(client, "tiny", "role_colon")
        assert model.context_window == 2048
        out = tmp_path / f"out-{len(rows)}"
        asyncio.run(
            evaluate(
                model.sampling_client, task, draws, renderer=model.renderer, concurrency=1, out=out
            )
        )
        rows.append(read_rows(out / "samples.jsonl"))
    assert rows[0] == rows[1]
