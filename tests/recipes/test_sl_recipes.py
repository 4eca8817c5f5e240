"""sl_basic and chat_sl from their options to their files, on an untrained tiny model."""

import json
from typing import Any

import datasets as hub
import pytest

from planish.datasets.layouts import conversation_of
from planish.datasets.row_files import Row
from planish.errors import UserError
from planish.files import read_rows
from planish.recipes import chat_sl, sl_basic, sl_loop
from planish.recipes.training_run import read_options
from planish.renderers import TrainOnWhat
from planish.training.learning_rates import get_lr

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4, dear."}]


def options_of(recipe, small_model, dataset, tmp_path, **changes):
    usual = {
        "model_name": small_model,
        "dataset": str(dataset),
        "log_path": str(tmp_path / "run"),
        "batch_size": 8,
        "lora_rank": 4,
        "max_steps": 2,
        "eval_every": 1,
    }
    return recipe.Options(**{**usual, **changes})


@pytest.mark.parametrize("recipe", [sl_basic, chat_sl])
def test_a_run_on_worked_solutions(recipe, small_model, sums_dataset, tmp_path, engine):
    run = recipe.main(options_of(recipe, small_model, sums_dataset, tmp_path), engine)
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["test/nll"] < rows[0]["test/nll"]
    expected = 2e-4 if recipe is sl_basic else get_lr(small_model)
    assert [row["learning_rate"] for row in rows[:2]] == pytest.approx([expected, expected / 2])
    config = json.loads((run / "config.json").read_text())
    assert (config["recipe_name"], config["renderer_name"]) == (
        recipe.__name__.rpartition(".")[2],
        "qwen3_instruct",
    )
    assert config["dataset_builder"]["read_row"] == "planish.datasets.layouts.conversation_of"


def test_a_file_of_chats_of_which_some_are_held_out(small_model, tmp_path, engine):
    path = tmp_path / "chats.jsonl"
    rows = [{"prompt": f"Say {n}.", "completion": str(n)} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = chat_sl.main(
        options_of(chat_sl, small_model, path, tmp_path, test_size=3, max_steps=None), engine
    )
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2], "17 of them are two batches of 8"
    assert all("test/bpb" in row for row in rows)


def test_a_published_name_is_found_on_the_hub(small_model, tmp_path, engine, monkeypatch):
    asked = []
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return hub.Dataset.from_list([{"messages": messages, "source": "x"}] * 8)

    monkeypatch.setattr(hub, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "get_dataset_split_names", lambda name, config: ["train"])
    chat_sl.main(
        options_of(chat_sl, small_model, "tulu3", tmp_path, test_size=0, max_steps=1), engine
    )
    chat_sl.main(
        options_of(
            chat_sl, small_model, "a/b", tmp_path, log_path=str(tmp_path / "b"), max_steps=1
        ),
        engine,
    )
    assert asked == [("allenai/tulu-3-sft-mixture", None, "train"), ("a/b", None, "train")]


def test_worked_solutions_end_in_a_box():
    conversation: Any = conversation_of(
        {"question": "What is 1 + 2?", "answer": "1 + 2 = <<1+2=3>>3\n#### 3"}, "here"
    )
    asked, answer = conversation
    assert asked["content"].startswith("What is 1 + 2?")
    assert answer["content"] == "1 + 2 = 3\nThe answer is \\boxed{3}"


PLAIN = {"question": "What causes rain?", "answer": "Water vapour condenses."}


@pytest.mark.parametrize(
    "read",
    [lambda row: conversation_of(row, "here"), lambda row: sl_loop.read_row(Row(row, "here"))],
)
def test_a_plain_question_is_trained_as_it_is(read):
    assert read(PLAIN) == [
        {"role": "user", "content": "What causes rain?"},
        {"role": "assistant", "content": "Water vapour condenses."},
    ]
    heading = {**PLAIN, "answer": "It rains.\n#### Why\nVapour.\n#### Step 1 of 2"}
    assert read(heading)[-1]["content"] == heading["answer"]
    assert read({**PLAIN, "messages": CHAT}) == CHAT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("batch_size", 27),
        ("max_length", 1),
        ("test_size", -1),
        ("learning_rate", 0.0),
        ("num_epochs", 0),
    ],
)
def test_an_invalid_option_is_rejected_by_name(
    small_model, sums_dataset, tmp_path, engine, name, value
):
    with pytest.raises(UserError, match=f"{name}="):
        chat_sl.main(
            options_of(chat_sl, small_model, sums_dataset, tmp_path, **{name: value}), engine
        )
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_known_rate_needs_one(sums_dataset, tmp_path):
    with pytest.raises(UserError, match="learning_rate=..."):
        chat_sl.main(options_of(chat_sl, "google/gemma-3-4b", sums_dataset, tmp_path))


def test_options_from_the_command_line():
    options = read_options(
        chat_sl.Options, chat_sl.PRESETS, ["preset=seed", "train_on_what=last_assistant_message"]
    )
    assert (options.batch_size, options.lora_rank, options.train_on_what) == (
        128,
        64,
        TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    )
    published = read_options(sl_basic.Options, sl_basic.PRESETS, ["preset=seed"])
    assert (published.batch_size, published.learning_rate, published.eval_every) == (128, 2e-4, 8)
