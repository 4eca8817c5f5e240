"""A run does not resume if a row that it reads was edited, even if the number of rows is the same."""

import asyncio
import json

import pytest

from planish import ServiceClient
from planish.datasets.rows import open_rows
from planish.errors import UserError
from planish.files import read_rows
from planish.preference import dpo, model_training
from planish.preference.datasets import ComparisonBuilderFromRows, DPODatasetBuilderFromComparisons
from planish.preference.model_datasets import PreferenceDatasetBuilder
from planish.recipes import rl_loop, sl_loop
from planish.rl.environments.reward_env import RewardDatasetBuilder
from planish.supervised.datasets import FromRowsBuilder
from planish.supervised.types import ChatDatasetBuilderCommonConfig
from planish.testing import tiny_model
from planish.training import rl_config, supervised_config, train_rl, train_supervised


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def client(tmp_path):
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as client:
        yield client


def reward(answer, row):
    return float(len(answer))


def common(model):
    return ChatDatasetBuilderCommonConfig(model_name_for_tokenizer=model, batch_size=2)


def run_rl(client, model, data, options):
    builder = RewardDatasetBuilder(
        dataset=data, reward=reward, model_name=model, batch_size=1, group_size=2
    )
    config = rl_config.Config(dataset_builder=builder, max_tokens=4, **options)
    asyncio.run(train_rl.main(config, client))


def run_supervised(client, model, data, options):
    builder = FromRowsBuilder(common_config=common(model), dataset=data)
    config = supervised_config.Config(dataset_builder=builder, **options)
    asyncio.run(train_supervised.main(config, client))


def run_dpo(client, model, data, options):
    builder = DPODatasetBuilderFromComparisons(
        common_config=common(model), comparison_builder=ComparisonBuilderFromRows(dataset=data)
    )
    asyncio.run(dpo.main(dpo.Config(dataset_builder=builder, **options), client))


def run_preference_model(client, model, data, options):
    builder = PreferenceDatasetBuilder(
        common_config=common(model),
        comparison_builder=ComparisonBuilderFromRows(dataset=data),
        kind="bradley_terry",
    )
    config = model_training.Config(dataset_builder=builder, **options)
    asyncio.run(model_training.main(config, client))


def loop_options(options):
    return {name: options[name] for name in options if name not in ("lr_schedule", "eval_every")}


def run_rl_loop(client, model, data, options):
    config = rl_loop.Config(
        dataset=data,
        batch_size=1,
        group_size=2,
        max_tokens=4,
        eval_problems=1,
        renderer_name="role_colon",
        **loop_options(options),
    )
    rl_loop.train(config, client)


def run_sl_loop(client, model, data, options):
    config = sl_loop.Config(
        dataset=data, batch_size=2, eval_examples=1, num_epochs=3, **loop_options(options)
    )
    sl_loop.train(config, client)


def chat(number):
    return {
        "messages": [
            {"role": "user", "content": f"Say {number}."},
            {"role": "assistant", "content": f"It is {number}."},
        ]
    }


def pair(number):
    return {"prompt": f"Say {number}.", "chosen": f"{number}", "rejected": f"It is {number}."}


def sum_of(number):
    return {"question": f"What is {number} + 1?", "answer": f"It is\n#### {number + 1}"}


RUNS = {
    "rl": (run_rl, lambda number: {"prompt": f"Say {number}."}),
    "supervised": (run_supervised, chat),
    "dpo": (run_dpo, pair),
    "preference model": (run_preference_model, pair),
    "rl_loop": (run_rl_loop, sum_of),
    "sl_loop": (run_sl_loop, chat),
}


def write(directory, split, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (directory / f"{split}.jsonl").write_text(text)


def splits(make):
    return {"train": [make(number) for number in range(4)], "test": [make(7)]}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_edited_rows_does_not_resume(name, client, model, tmp_path):
    run, make = RUNS[name]
    data, log_path = tmp_path / "rows", tmp_path / "run"
    data.mkdir()
    options = {
        "model_name": model,
        "log_path": str(log_path),
        "learning_rate": 1e-3,
        "lora_rank": 2,
        "lr_schedule": "constant",
        "eval_every": 0,
        "save_every": 1,
        "max_steps": 1,
    }
    for split, rows in splits(make).items():
        write(data, split, rows)
    run(client, model, str(data), options)
    metrics = (log_path / "metrics.jsonl").read_text()
    assert len(json.loads((log_path / "rows.json").read_text())) in (1, 2)
    longer = {**options, "max_steps": None if name == "sl_loop" else 2}
    if name == "sl_loop":  # its learning rate depends on max_steps, so that cannot change
        longer = options
    for split, rows in splits(make).items():
        if f"{data}, {split}" not in json.loads((log_path / "rows.json").read_text()):
            continue
        write(data, split, [make(9), *rows[1:]])
        with pytest.raises(UserError, match=f"other rows of {data}, {split}: .* load_checkpoint"):
            run(client, model, str(data), longer)
        assert (log_path / "metrics.jsonl").read_text() == metrics
        write(data, split, rows)
    run(client, model, str(data), longer)
    if name != "sl_loop":
        assert [row["step"] for row in read_rows(log_path / "metrics.jsonl")][:2] == [0, 1]


def test_rows_that_a_resumed_run_reads_for_the_first_time_are_recorded(client, model, tmp_path):
    write(tmp_path, "train", splits(sum_of)["train"])
    write(tmp_path, "test", splits(sum_of)["test"])
    config = rl_loop.Config(
        model_name=model,
        dataset=str(tmp_path),
        log_path=str(tmp_path / "run"),
        batch_size=1,
        group_size=2,
        max_tokens=4,
        lora_rank=2,
        renderer_name="role_colon",
        max_steps=1,
    )
    run = rl_loop.train(config, client)
    train_name, test_name = (f"{tmp_path}, {split}" for split in ("train", "test"))
    assert list(json.loads((run / "rows.json").read_text())) == [train_name]
    import chz

    rl_loop.train(chz.replace(config, eval_problems=1, max_steps=2), client)
    assert list(json.loads((run / "rows.json").read_text())) == [train_name, test_name]


def test_rows_may_change_until_the_first_checkpoint(client, model, tmp_path, monkeypatch):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(chat(number)) + "\n" for number in range(4)))
    options = {
        "model_name": model,
        "log_path": str(tmp_path / "run"),
        "learning_rate": 1e-3,
        "lora_rank": 2,
        "max_steps": 1,
    }

    async def killed(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(train_supervised.SupervisedLearner, "run_steps", killed)
        with pytest.raises(KeyboardInterrupt):
            run_supervised(client, model, str(data), options)
    data.write_text(data.read_text().replace("Say 1", "Say 8"))
    run_supervised(client, model, str(data), options)
    assert len(open_rows(str(data), "train")) == 4
