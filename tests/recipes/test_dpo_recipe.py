"""The dpo recipe from its options to its files, on a tiny model that knows nothing."""

import json

import pytest

from planish import ServiceClient
from planish.errors import UserError
from planish.recipes import dpo
from planish.recipes.preference_pairs import drawn_pairs
from planish.runs import read_rows


@pytest.fixture
def engine(tmp_path):
    with ServiceClient(data_dir=tmp_path / "data") as client:
        yield client


def options_of(small_model, tmp_path, **changes):
    usual = {
        "model_name": small_model,
        "log_path": str(tmp_path / "run"),
        "batch_size": 4,
        "lora_rank": 4,
        "learning_rate": 1e-3,
        "max_steps": 3,
        "test_size": 4,
        "largest": 4,
    }
    return dpo.Options(**{**usual, **changes})


def test_drawn_pairs_teach_a_style(small_model, tmp_path, engine):
    run = dpo.main(options_of(small_model, tmp_path), engine)
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["test/margin"] > rows[0]["test/margin"]
    config = json.loads((run / "config.json").read_text())
    assert (config["recipe_name"], config["dataset_builder"]["comparison_builder"]["largest"]) == ("dpo", 4)


def test_pairs_of_a_file(small_model, tmp_path, engine):
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"Say {n}.", "chosen": str(n), "rejected": "no"} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = dpo.main(options_of(small_model, tmp_path, dataset=str(path), max_steps=None), engine)
    assert [row.get("num_pairs") for row in read_rows(run / "metrics.jsonl")] == [4, 4, None]


def test_drawn_pairs_hold_out_their_sums_and_differ_by_style_alone():
    train, test = drawn_pairs(5, 6, seed=0)
    assert (len(train), len(test)) == (30, 6)
    questions = [pair.comparison.prompt_conversation[0]["content"] for pair in [*train, *test]]
    assert len(set(questions)) == 36
    assert drawn_pairs(5, 6, seed=0) == (train, test) != drawn_pairs(5, 6, seed=1)
    for pair in train:
        assert pair.ranked is not None
        short, wordy = (answer[0]["content"] for answer in pair.ranked)
        assert short.rpartition(" ")[2] in wordy
        assert len(wordy) > 3 * len(short)


@pytest.mark.parametrize(
    ("name", "value"), [("batch_size", 0), ("test_size", 25), ("largest", 0), ("dpo_beta", 0.0), ("max_steps", 0)]
)
def test_an_option_that_cannot_be_right_is_refused_by_name(small_model, tmp_path, name, value):
    with pytest.raises(UserError, match=f"{name}="):
        dpo.main(options_of(small_model, tmp_path, **{name: value}))
    assert not (tmp_path / "run").exists()
