"""Prompts are checked before a run begins: those that cannot be rendered, and those that are too
long.
"""

import asyncio
import json
import random

import chz
import pytest

from planish.distillation.datasets import TaughtDataset
from planish.errors import UserError
from planish.files import read_rows
from planish.renderers import get_renderer
from planish.rl.environments.datasets import (
    ConcatenatedRLDataset,
    EpochCycledRLDataset,
    InterleavedRLDataset,
    ProblemDataset,
    RebatchedRLDataset,
)
from planish.rl.environments.prompt_selection import PromptLengths, select_problems
from planish.rl.environments.reward_env import RewardDatasetBuilder, RewardEnv
from planish.testing import tiny_model
from planish.training.rl_config import Config
from planish.training.train_rl import main
from planish.types import ModelInput

CONTEXT = 120
OVERHEAD = 20
"""The tokens of a prompt beside its question: one per byte of the chat format."""


@pytest.fixture(autouse=True)
def _no_git(monkeypatch):
    monkeypatch.setattr("planish.training.run_loop.code_diff", lambda paths: "")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model directory for its tokenizer, which has one token per byte."""
    return str(tiny_model(tmp_path_factory.mktemp("model")))


def rows_file(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def reward(answer, row):
    return float(len(answer) % 2)


def builder_of(path, model, **changes):
    options = {"renderer_name": "chatml", "batch_size": 2, "group_size": 2, **changes}
    return RewardDatasetBuilder(dataset=path, reward=reward, model_name=model, **options)


def train(service, path, builder, **changes):
    options = {
        "learning_rate": 0.1,
        "dataset_builder": builder,
        "model_name": "tiny",
        "max_tokens": 8,
        "log_path": str(path),
        "num_groups_to_log": 0,
        "rollout_json_export": False,
        **changes,
    }
    return asyncio.run(main(Config(**options), service))


def prompt_tokens(model, question):
    tokenizer = builder_of("unread", model).renderer.tokenizer
    messages = [{"role": "user", "content": question}]
    return get_renderer("chatml", tokenizer).build_generation_prompt(messages).length


def questions_with_one_of(length):
    """Sixteen rows, of which the twelfth has a question of `length` characters."""
    return [{"prompt": "x" * (length if number == 12 else number)} for number in range(1, 17)]


def test_a_prompt_longer_than_the_context_is_named_before_the_first_step(service, model, tmp_path):
    service.context = CONTEXT
    path = rows_file(tmp_path / "rows.jsonl", questions_with_one_of(500))
    with pytest.raises(UserError) as caught:
        train(service, tmp_path / "run", builder_of(path, model))
    tokens = prompt_tokens(model, "x" * 500)
    assert str(caught.value).startswith(f"{path}, line 12: its prompt has {tokens} tokens, which")
    assert f"the context window of {CONTEXT} tokens of tiny; leave out long" in str(caught.value)
    assert not {"sample", "optim_step"} & set(service.operations)


@pytest.mark.parametrize("room", [0, 1])
def test_a_prompt_may_leave_room_for_one_token(service, model, tmp_path, room):
    length = CONTEXT - prompt_tokens(model, "") - room
    service.context = CONTEXT
    path = rows_file(tmp_path / "rows.jsonl", questions_with_one_of(length))
    if room:
        train(service, tmp_path / "run", builder_of(path, model))
        assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 8
    else:
        with pytest.raises(UserError, match="line 12: its prompt has 120 tokens"):
            train(service, tmp_path / "run", builder_of(path, model))


def test_long_prompts_are_left_out_of_training_and_tests_and_counted(
    service, model, tmp_path, caplog
):
    service.context = CONTEXT
    path = rows_file(
        tmp_path / "rows.jsonl",
        [*questions_with_one_of(500), {"prompt": "y" * 300}, {"prompt": "z"}],
    )
    builder = builder_of(path, model, test_size=2, max_prompt_tokens=CONTEXT - 8)
    train(service, tmp_path / "run", builder, eval_every=4)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(9)), "15 problems in batches of 2, the tests"
    assert rows[0]["test/env/all/total_episodes"] == 1
    assert (
        "1 of 16 train problems are left out, because their prompts have more than "
        f"max_prompt_tokens={CONTEXT - 8} tokens; the first is {path}, line 12, with "
        f"{prompt_tokens(model, 'x' * 500)} tokens"
    ) in caplog.text
    assert "1 of 2 test problems are left out" in caplog.text
    assert "line 17" in caplog.text


def test_a_long_test_prompt_is_named_before_the_first_step(service, model, tmp_path):
    service.context = CONTEXT
    path = rows_file(
        tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "z" * 500}]
    )
    with pytest.raises(UserError, match="line 3: its prompt has"):
        train(service, tmp_path / "run", builder_of(path, model, test_size=1))
    train(service, tmp_path / "run", builder_of(path, model, test_size=1), eval_every=0)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "poet", "content": "b"}, {"role": "user", "content": "c"}], "line 2: .*poet"),
        ([{"role": "user", "content": 5}], "line 2: .*content"),
    ],
)
def test_a_row_that_cannot_be_rendered_is_named(model, tmp_path, messages, message):
    path = rows_file(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"messages": messages}])
    with pytest.raises(UserError, match=message):
        asyncio.run(builder_of(path, model)())


def test_no_problem_left_is_an_error(model, tmp_path):
    path = rows_file(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(UserError, match="max_prompt_tokens=5: the prompts of all 2 train problems"):
        asyncio.run(builder_of(path, model, max_prompt_tokens=5)())
    with pytest.raises(UserError, match="max_prompt_tokens=0: give a whole number of at least 1"):
        asyncio.run(builder_of(path, model, max_prompt_tokens=0)())


class WaitingEnv(RewardEnv):
    """Its prompt comes from elsewhere."""

    async def initial_observation(self):
        await asyncio.sleep(0)
        return await super().initial_observation()


@chz.chz
class WaitingBuilder(RewardDatasetBuilder):
    def make_env(self, problem):
        return WaitingEnv(self.renderer, *problem, self.reward)  # pyright: ignore[reportArgumentType]


def test_prompts_that_are_known_only_during_rollouts_are_not_checked(model, tmp_path):
    path = rows_file(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b" * 999}])
    options = {"dataset": path, "reward": reward, "model_name": model, "renderer_name": "chatml"}
    train_set, _ = asyncio.run(WaitingBuilder(**options)())
    assert train_set.data_size() == 2
    assert train_set.longest_prompt() is None
    with pytest.raises(UserError, match="max_prompt_tokens=9: the prompts are known only during"):
        asyncio.run(WaitingBuilder(**options, max_prompt_tokens=9)())


@chz.chz
class GeneratedBuilder(RewardDatasetBuilder):
    """Questions of 1 to 60 characters."""

    dataset: str = "unread"

    async def __call__(self):
        return self.generated(
            lambda rng: ([{"role": "user", "content": "x" * rng.randint(1, 60)}], {})
        ), None


def test_generated_problems_with_long_prompts_are_replaced(model, caplog):
    limit = prompt_tokens(model, "x" * 30)
    options = {"reward": reward, "model_name": model, "renderer_name": "chatml", "batch_size": 8}
    builder = GeneratedBuilder(**options, max_prompt_tokens=limit)
    dataset, _ = asyncio.run(builder())
    other, _ = asyncio.run(builder())

    def questions(data, index):
        envs = [asyncio.run(group.make_envs())[0] for group in data.get_batch(index)]
        return [len(env.messages[0]["content"]) for env in envs]

    lengths = [questions(dataset, index) for index in range(4)]
    assert all(length <= 30 for batch in lengths for length in batch)
    assert len({length for batch in lengths for length in batch}) > 10
    assert [questions(other, index) for index in (3, 2, 1, 0)] == lengths[::-1]
    rng = random.Random("0:0:0")
    draws = iter(lambda: rng.randint(1, 60), None)
    assert lengths[0][0] == next(length for length in draws if length <= 30)
    assert "2 generated problems so far are replaced by others" in caplog.text
    with pytest.raises(UserError, match="max_prompt_tokens=2: 1000 generated problems in a row"):
        asyncio.run(GeneratedBuilder(**options, max_prompt_tokens=2)())[0].get_batch(0)


def test_a_problem_without_a_place_is_named_by_its_number_and_text(service):
    def prompt_of(problem):
        raise ValueError("no such role")

    with pytest.raises(UserError, match="second: no such role"):
        select_problems([1], prompt_of, lambda index: "second", split="train")


def test_an_error_of_an_environment_keeps_its_type_and_names_the_problem():
    def prompt_of(problem):
        return problem["text"]

    with pytest.raises(KeyError) as caught:
        select_problems([{}], prompt_of, lambda index: f"row {index}", split="train")
    assert caught.value.__notes__ == ["in the prompt of row 0"]


def test_datasets_of_datasets_know_the_longest_prompt():
    def of(tokens):
        """A dataset with prompts of one token and of `tokens` tokens; None: of unknown length."""
        if tokens is None:
            return ProblemDataset([1, 2], lambda problem: None, 2)  # type: ignore[arg-type, return-value]
        prompts = [ModelInput.from_ints([0] * length) for length in (1, tokens)]
        lengths = PromptLengths(prompts, lambda prompt: prompt, str, [1, tokens])
        return ProblemDataset(prompts, lambda problem: None, 2, lengths=lengths)  # type: ignore[arg-type, return-value]

    def tokens_of(dataset, above=0):
        longest = dataset.longest_prompt(above)
        return None if longest is None else longest.num_tokens

    assert tokens_of(EpochCycledRLDataset(of(3), 2)) == 3
    assert tokens_of(RebatchedRLDataset(of(3), 1)) == 3
    for joined in (
        ConcatenatedRLDataset([of(3), of(None), of(5)]),
        InterleavedRLDataset([of(3), of(None), of(5)], [1.0] * 3, 2, 2),
        TaughtDataset([of(3), of(None), of(5)]),
    ):
        assert tokens_of(joined) == tokens_of(joined, above=4) == 5
        assert tokens_of(joined, above=5) is None
    assert tokens_of(ConcatenatedRLDataset([of(None)])) is None
