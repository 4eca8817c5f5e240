"""preference_model from its options to its files, on an untrained tiny model."""

import asyncio
import json

import pytest

from planish.errors import UserError
from planish.files import read_rows
from planish.preference.model_files import PreferenceModelBuilderFromRun, PreferenceModelFile
from planish.preference.types import Comparison
from planish.recipes import preference_model


def options_of(small_model, tmp_path, **changes):
    usual = {
        "model_name": small_model,
        "log_path": str(tmp_path / "run"),
        "batch_size": 4,
        "lora_rank": 4,
        "max_steps": 2,
        "test_size": 4,
        "calibration_size": 4,
        "largest": 4,
    }
    return preference_model.Options(**{**usual, **changes})


@pytest.mark.parametrize(
    ("pairs", "kind"), [("courtesy", "chat"), ("sums", "bradley_terry"), ("solutions", "chat")]
)
def test_made_pairs_of_each_sort_train_a_model(
    small_model, tmp_path, engine, sums_dataset, pairs, kind
):
    given = {"questions": str(sums_dataset), "largest": None} if pairs == "solutions" else {}
    options = options_of(small_model, tmp_path, kind=kind, pairs=pairs, **given)
    run = preference_model.main(options, engine)
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["test/num_pairs"] == 4
    config = json.loads((run / "config.json").read_text())
    assert (config["recipe_name"], config["dataset_builder"]["kind"]) == ("preference_model", kind)
    assert PreferenceModelFile.read(run).calibration_pairs == 4


def test_comparisons_from_a_file_with_a_custom_question(small_model, tmp_path, engine):
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"Say {n}.", "chosen": str(n), "rejected": "no"} for n in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"dataset": str(path), "question": "Good?", "largest": None}
    options = options_of(small_model, tmp_path, kind="bradley_terry", **given)
    run = preference_model.main(options, engine)
    model = PreferenceModelBuilderFromRun(path=str(run))(engine)
    assert PreferenceModelFile.read(run).question == "Good?"
    yes = [{"role": "assistant", "content": "5"}]
    no = [{"role": "assistant", "content": "no"}]
    prompt = [{"role": "user", "content": "Say 5."}]
    there, back = (
        asyncio.run(model(Comparison(prompt, *answers))) for answers in ((yes, no), (no, yes))
    )
    assert there == -back
    assert -1 < there < 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("test_size", 100),
        ("largest", 0),
        ("calibration_size", -1),
        ("max_steps", 0),
    ],
)
def test_an_invalid_option_is_rejected_by_name(small_model, tmp_path, engine, name, value):
    with pytest.raises(UserError, match=f"{name}="):
        preference_model.main(options_of(small_model, tmp_path, **{name: value}), engine)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset": "pairs.jsonl"}, "largest=4 is for generated pairs"),
        (
            {"dataset": "pairs.jsonl", "largest": None, "pairs": "courtesy"},
            "pairs=courtesy is for generated pairs",
        ),
        (
            {"dataset": "pairs.jsonl", "largest": None, "questions": "a"},
            "questions=a is for generated pairs",
        ),
        ({"pairs": "solutions"}, "largest=4 is for pairs=courtesy"),
        ({"questions": "a"}, "questions=a is for pairs=solutions"),
        ({"question": "Good?"}, "question=Good.* is for kind=bradley_terry"),
    ],
)
def test_an_option_that_would_be_ignored_is_rejected(small_model, tmp_path, engine, given, message):
    with pytest.raises(UserError, match=message):
        preference_model.main(options_of(small_model, tmp_path, **given), engine)
    assert not (tmp_path / "run").exists()


def test_only_a_dataset_has_a_whole_test_split(small_model, tmp_path):
    with pytest.raises(UserError, match="test_size=none"):
        preference_model.main(options_of(small_model, tmp_path, test_size=None))
