"""The shorter recipe from its options to its files, on an untrained tiny model."""

import asyncio
import json
import pickle

import pytest
from metric_tables import definition_of

from planish import ServiceClient
from planish.errors import UserError
from planish.files import read_rows
from planish.preference.types import Comparison
from planish.recipes import shorter
from planish.recipes.shorter import GeneratedPrompts, Shorter


def options_of(small_model, tmp_path, **changes):
    usual = {
        "model_name": small_model,
        "log_path": str(tmp_path / "run"),
        "batch_size": 2,
        "lora_rank": 4,
        "max_steps": 2,
        "max_tokens": 6,
        "eval_every": 2,
    }
    return shorter.Options(**{**usual, **changes})


def test_a_run_with_its_test(small_model, tmp_path):
    with ServiceClient(data_dir=tmp_path / "data") as engine:
        run = shorter.main(
            options_of(small_model, tmp_path, tournament_pattern="all_pairs_one_way"), engine
        )
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["env/all/total_episodes"] == 8
    assert rows[0]["env/all/win_minus_loss"] == pytest.approx(0)
    assert [("test/win_rate/shorter" in row) for row in rows] == [True, False, True]
    assert [
        key for row in rows for key in row if key != "step" and definition_of(key) is None
    ] == []
    config = json.loads((run / "config.json").read_text())
    assert (config["recipe_name"], config["dataset_builder"]["matchup_group_size"]) == (
        "shorter",
        4,
    )
    assert "Matchups" in (run / "train_iteration_000000.html").read_text()


def test_without_evaluations_and_checkpoints_between(small_model, tmp_path):
    """`--help` says that 0 means never."""
    options = options_of(small_model, tmp_path, eval_every=0, save_every=0, max_steps=1)
    with ServiceClient(data_dir=tmp_path / "data") as engine:
        run = shorter.main(options, engine)
    [row] = read_rows(run / "metrics.jsonl")
    assert not [key for key in row if key.startswith("test/")]
    assert [record["batch"] for record in read_rows(run / "checkpoints.jsonl")] == [1]


@pytest.mark.slow
def test_prompts_of_a_file_in_other_processes(small_model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(8)))
    options = options_of(
        small_model, tmp_path, dataset=str(path), test_size=0, max_steps=1, rollout_processes=1
    )
    with ServiceClient(data_dir=tmp_path / "data") as engine:
        [row] = read_rows(shorter.main(options, engine) / "metrics.jsonl")
    assert not [key for key in row if key.startswith("test/")]


def test_fewer_tokens_win(small_model):
    rule = pickle.loads(pickle.dumps(Shorter(small_model)))
    sides = [[{"role": "assistant", "content": text}] for text in ("abc", "ab", "xy")]
    comparisons = [Comparison([], sides[i], sides[j]) for i, j in ((0, 1), (1, 0), (1, 2))]
    assert [asyncio.run(rule(comparison)) for comparison in comparisons] == [1, -1, 0]


def test_generated_questions_hold_out_their_topics():
    prompts = GeneratedPrompts()()
    train, test = ({p[0]["content"] for p in part} for part in (prompts.train, prompts.test))
    assert (len(train), len(test)) == (72, 24)
    assert not train & test
    assert GeneratedPrompts()() == prompts != GeneratedPrompts(seed=1)()


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("group_size", 1), ("matchup_group_size", 1), ("max_steps", 0)],
)
def test_an_invalid_option_is_rejected_by_name(small_model, tmp_path, name, value):
    with pytest.raises(UserError, match=f"{name}={value}"):
        shorter.main(options_of(small_model, tmp_path, **{name: value}))
    assert not (tmp_path / "run").exists()
