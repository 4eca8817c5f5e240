"""Training with a file of questions and a reward function."""

import asyncio
import json
import math
from functools import partial
from typing import Any

import pytest

from planish import ServiceClient
from planish.errors import NonFiniteError, UserError
from planish.files import read_rows
from planish.renderers import get_renderer
from planish.rl.environments.reward_env import RewardDatasetBuilder, RewardEnv
from planish.testing import tiny_model
from planish.training.rl_config import Config
from planish.training.train_rl import main


def length(answer, row):
    return -abs(len(answer) - row["length"]) / 10


async def parts(answer, row):
    return {"length": -len(answer) / 10, "greets": float("hello" in answer)}


@pytest.fixture
def renderer(tokenizer):
    return get_renderer("chatml", tokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"prompt": f"Say {n}.", "length": n} for n in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def env_of(renderer, reward, **row):
    return RewardEnv(renderer, [{"role": "user", "content": "Hi"}], row, reward)


def stepped(env, renderer, text="hello"):
    tokens = renderer.tokenizer.encode(text, add_special_tokens=False)
    stop = renderer.get_stop_sequences()
    asyncio.run(env.initial_observation())
    return asyncio.run(env.step([*tokens, *stop]))


def test_a_returned_number_is_the_reward(renderer):
    result = stepped(env_of(renderer, length, length=7), renderer)
    assert result.reward == pytest.approx(-0.2)
    assert result.metrics == {"ended": 1.0}
    assert result.episode_done


def test_reward_parts_are_summed_and_reported(renderer):
    result = stepped(env_of(renderer, parts), renderer)
    assert result.reward == pytest.approx(0.5)
    assert result.metrics == {"ended": 1.0, "length": -0.5, "greets": 1.0}


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        (math.nan, NonFiniteError, "reward=nan"),
        ("good", UserError, "reward='good'"),
        (None, UserError, "reward=None"),
        ({"a": math.inf}, NonFiniteError, "a returned reward=inf"),
        ({"ended": 1.0}, UserError, "rename it"),
    ],
)
def test_a_reward_that_is_not_a_finite_number_is_named(renderer, given, error, named):
    with pytest.raises(error, match=named):
        stepped(env_of(renderer, lambda answer, row: given), renderer)


@pytest.mark.slow
def test_a_run_with_held_out_rows_evaluates_them(model, questions, tmp_path):
    builder = RewardDatasetBuilder(
        dataset=questions, reward=length, model_name=model, batch_size=3, group_size=4, test_size=2
    )
    config = Config(
        dataset_builder=builder,
        model_name=model,
        learning_rate=1e-3,
        max_tokens=6,
        lora_rank=4,
        log_path=str(tmp_path / "run"),
        eval_every=1,
        rollout_processes=0,
    )
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as engine:
        run = asyncio.run(main(config, engine))
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all("env/all/reward/total" in row for row in rows[:2])
    assert rows[0]["test/env/all/total_episodes"] == 2
    assert "length" in json.loads((run / "config.json").read_text())["dataset_builder"]["reward"]


@pytest.mark.slow
def test_training_increases_the_reward(model, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Write."}]}) + "\n")
    builder = RewardDatasetBuilder(
        dataset=str(path),
        reward=partial(count_of, "a"),
        model_name=model,
        batch_size=1,
        group_size=32,
    )
    config = Config(
        dataset_builder=builder,
        model_name=model,
        learning_rate=3e-2,
        max_tokens=8,
        lora_rank=8,
        num_epochs=8,
        log_path=str(tmp_path / "run"),
        eval_every=0,
    )
    with ServiceClient(data_dir=tmp_path / "data", dtype="float32") as engine:
        run = asyncio.run(main(config, engine))
    rewards = [row["env/all/reward/total"] for row in read_rows(run / "metrics.jsonl")]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.5, rewards


def count_of(letter, answer, row):
    return answer.count(letter)


@pytest.mark.parametrize(
    ("rows", "change", "named"),
    [
        ([{"text": "x"}], {}, r"line 1: the row has \['text'\]; give rows with .* \"prompt\""),
        ([{"prompt": ""}], {}, 'line 1: the "prompt" is empty'),
        ([{"prompt": "x"}], {"test_size": 1}, "test_size=1: there are 1 rows"),
    ],
)
def test_rows_without_a_question_are_named_in_the_error(model, tmp_path, rows, change, named):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    builder = RewardDatasetBuilder(dataset=str(path), reward=length, model_name=model, **change)
    with pytest.raises(UserError, match=named):
        asyncio.run(builder())


def test_a_file_without_rows_is_rejected_by_name(model, tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    builder = RewardDatasetBuilder(dataset=str(path), reward=length, model_name=model)
    with pytest.raises(UserError, match=r"empty\.jsonl has no rows in its train split"):
        asyncio.run(builder())


def test_the_answer_of_a_row_is_not_in_the_prompt(model, tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {}}}]
    row = {
        "system": "Be kind.",
        "tools": tools,
        "messages": [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": "REFERENCE"},
        ],
        "images": [],
        "hint": {"a": None},
    }
    path.write_text(json.dumps(row) + "\n")
    builder = RewardDatasetBuilder(
        dataset=str(path), reward=length, model_name=model, batch_size=1, group_size=2
    )
    train, _ = asyncio.run(builder())
    [env, _] = asyncio.run(train.get_batch(0)[0].make_envs())
    assert isinstance(env, RewardEnv)
    prompt, _ = asyncio.run(env.initial_observation())
    text = env.renderer.tokenizer.decode(prompt.to_ints())
    assert "REFERENCE" not in text
    assert all(part in text for part in ("Be kind.", '"name": "lookup"', "Why?"))
    assert env.row == row, "the reward function gets the whole row"
    path.write_text(json.dumps({**row, "images": ["x.png"]}) + "\n")
    with pytest.raises(UserError, match='rows.jsonl, line 1, "images".0.: there is no image file'):
        asyncio.run(builder())


def test_splits_may_have_any_name(model, tmp_path):
    for split, count in (("train_rl", 3), ("test_rl", 2), ("test", 1)):
        rows = [{"question": f"{split} {n}"} for n in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {
        "dataset": str(tmp_path),
        "reward": length,
        "model_name": model,
        "batch_size": 1,
    }
    names: dict[str, Any] = {"train_split": "train_rl", "test_split": "test_rl"}
    train, test = asyncio.run(RewardDatasetBuilder(**options, **names)())
    assert test is not None
    assert (train.data_size(), test.data_size()) == (3, 2)
    with pytest.raises(UserError, match="test_split=test_rl names test rows too"):
        asyncio.run(RewardDatasetBuilder(**options, **names, test_size=1)())
