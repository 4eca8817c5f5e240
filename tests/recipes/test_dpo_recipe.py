"""The dpo recipe from its options to its files, on an untrained tiny model."""

import json
import re

import pytest

from planish.errors import UserError
from planish.files import read_rows
from planish.recipes import dpo
from planish.recipes.dpo import KINDS
from planish.recipes.sum_comparisons import SumComparisons, SumPairs


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


def test_generated_pairs_teach_a_style(small_model, tmp_path, engine):
    run = dpo.main(options_of(small_model, tmp_path), engine)
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[-1]["test/margin"] > rows[0]["test/margin"]
    config = json.loads((run / "config.json").read_text())
    assert (config["recipe_name"], config["dataset_builder"]["comparison_builder"]["largest"]) == (
        "dpo",
        4,
    )


def test_pairs_of_a_file(small_model, tmp_path, engine):
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"Say {n}.", "chosen": str(n), "rejected": "no"} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = dpo.main(
        options_of(small_model, tmp_path, dataset=str(path), max_steps=None, largest=None), engine
    )
    assert [row.get("num_pairs") for row in read_rows(run / "metrics.jsonl")] == [4, 4, None]


def generated_pairs(largest, test_size, seed, kind: SumPairs = "style"):
    return SumComparisons(kind=kind, largest=largest, test_size=test_size, seed=seed)()


@pytest.mark.parametrize("kind", KINDS)
def test_generated_pairs_hold_out_their_sums_in_either_order(kind):
    train, test = generated_pairs(5, 6, seed=0, kind=kind)
    sums = [sum_of(pair) for pair in [*train, *test]]
    assert len(set(sums)) == len(sums)
    assert len(test) == 6
    held_out = {frozenset(sum_of(pair)) for pair in test}
    assert {frozenset(pair) for pair in sums} - held_out == {
        frozenset(sum_of(pair)) for pair in train
    }
    assert generated_pairs(5, 6, 0, kind) == (train, test) != generated_pairs(5, 6, 1, kind)


def sum_of(pair):
    first, second = re.findall(r"\d+", pair.comparison.prompt_conversation[0]["content"])
    return int(first), int(second)


def answers(pair):
    assert pair.ranked is not None
    return [answer[0]["content"] for answer in pair.ranked]


def test_pairs_of_style_differ_by_style_alone():
    for short, wordy in map(answers, generated_pairs(5, 6, seed=0)[0]):
        assert short.rpartition(" ")[2] in wordy
        assert len(wordy) > 3 * len(short)


def test_pairs_of_results_differ_by_the_result_alone():
    train, test = generated_pairs(20, 64, seed=0, kind="result")
    for pair in [*train, *test]:
        right, wrong = answers(pair)
        assert len(right) == len(wrong)
        assert re.sub(r"\d+", "", right) == re.sub(r"\d+", "", wrong)
        result = str(sum(sum_of(pair)))
        assert result in re.findall(r"\d+", right)
        assert right != wrong
    larger = sum(
        int(max(re.findall(r"\d+", a), key=int)) > int(max(re.findall(r"\d+", b), key=int))
        for a, b in map(answers, train)
    )
    assert 0.3 < larger / len(train) < 0.7, "the right result is no more often the larger one"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("test_size", 15),
        ("largest", 0),
        ("dpo_beta", 0.0),
        ("max_steps", 0),
        ("pairs", "manner"),
    ],
)
def test_an_invalid_option_is_rejected_by_name(small_model, tmp_path, name, value):
    with pytest.raises(UserError, match=f"{name}="):
        dpo.main(options_of(small_model, tmp_path, **{name: value}))
    assert not (tmp_path / "run").exists()


def test_the_gradient_can_be_clipped(small_model, tmp_path):
    assert dpo.dpo_config(options_of(small_model, tmp_path)).grad_clip_norm == 0.0
    clipped = dpo.dpo_config(options_of(small_model, tmp_path, grad_clip_norm=2.0))
    assert clipped.grad_clip_norm == 2.0


@pytest.mark.parametrize(("name", "value"), [("pairs", "style"), ("largest", 30)])
def test_options_of_generated_pairs_are_rejected_with_a_dataset(small_model, tmp_path, name, value):
    given = {"dataset": "pairs.jsonl", "largest": None, name: value}
    with pytest.raises(UserError, match=f"{name}={value} is for generated pairs"):
        dpo.main(options_of(small_model, tmp_path, **given))
