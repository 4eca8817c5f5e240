"""Sums as environments: the reward of an answer, and test sums that are never trained on."""

import asyncio
import hashlib
import pickle
import random
from typing import Any

import pytest

from planish.errors import UserError
from planish.recipes.sum_comparisons import SumComparisons
from planish.recipes.sum_tasks import (
    SumDatasetBuilder,
    SumEnv,
    generated_rubrics,
    generated_sum_prompts,
)
from planish.recipes.sums import EXAMPLE_SUMS, Sum, held_out_sums
from planish.recipes.wordy_sums import WordySumComparisons, WordySums
from planish.renderers import get_renderer
from planish.testing import EOS_TOKEN_ID


@pytest.mark.parametrize(
    ("text", "ended", "reward", "form"),
    [
        ("17 + 25 = 42", True, 1.0, 1),
        ("17 + 25 = 42.", True, 1.0, 1),
        ("42", True, 1.0, 1),
        ("17 + 25 = 42", False, 0.9, 0),
        ("The sum is 42", True, 0.9, 0),
        ("17 + 25 = 43", True, 0.0, 1),
        ("17 + 25 = 42 or 43", True, -0.1, 0),
        ("", True, -0.1, 0),
    ],
)
def test_the_last_number_is_the_answer_and_the_equation_its_form(
    tokenizer, text, ended, reward, form
):
    env = SumEnv(get_renderer("chatml", tokenizer), Sum(17, 25))
    result = asyncio.run(env.step([*tokenizer.encode(text), *[EOS_TOKEN_ID] * ended]))
    assert result.reward == pytest.approx(reward)
    assert (result.metrics["correct"], result.metrics["format"]) == (float(reward > 0.5), form)


def test_the_prompt_shows_the_form(tokenizer):
    prompt, _ = asyncio.run(
        SumEnv(get_renderer("chatml", tokenizer), Sum(1, 2)).initial_observation()
    )
    text = tokenizer.decode(prompt.to_ints())
    assert "4 + 3 = 7<|im_end|>" in text
    assert "What is 1 + 2?<|im_end|>\n<|im_start|>assistant\n" in text


@pytest.fixture
def built(small_model):
    def build(**options) -> Any:
        builder = SumDatasetBuilder(model_name=small_model, batch_size=8, group_size=4, **options)
        return asyncio.run(builder())

    return build


def sums(dataset, batches):
    return [builder.env_thunk.args[0] for index in batches for builder in dataset.get_batch(index)]


@pytest.mark.parametrize("max_operand", [1, 3, 10, 1_000_000])
def test_no_sum_of_the_test_is_trained_on_in_either_order(built, max_operand):
    train, test = built(max_operand=max_operand)
    tested = {problem.pair for problem in sums(test, range(len(test)))}
    trained = {problem.pair for problem in sums(train, range(20))}
    shown = {problem.pair for problem in EXAMPLE_SUMS}
    assert tested
    assert trained
    assert not tested & trained
    assert not shown & (tested | trained)
    assert (
        len(tested)
        == len(sums(test, range(len(test))))
        == min(100, (max_operand + 1) * (max_operand + 2) // 6)
    )
    assert all(0 <= n <= max_operand for pair in tested | trained for n in pair)


def test_a_batch_is_a_function_of_seed_and_index(built):
    train, _ = built(max_operand=50)
    again, _ = built(max_operand=50)
    other, _ = built(max_operand=50, seed=1)
    assert sums(train, [7]) == sums(again, [7]) != sums(train, [8])
    assert sums(train, [7]) != sums(other, [7])


def test_every_seed_has_the_same_test(built):
    assert sums(built(max_operand=50, seed=3)[1], [0]) == sums(built(max_operand=50)[1], [0])


def test_all_sums_that_are_left_are_trained_on(built):
    train, _ = built(max_operand=3, eval_problems=4)
    assert len({problem.pair for problem in sums(train, range(60))}) == 10 - 4
    assert built(max_operand=3, eval_problems=0)[1] is None


def test_groups_pickle(built):
    builder = built(max_operand=50)[0].get_batch(random.randrange(10))[0]
    assert pickle.loads(pickle.dumps(builder)) is not builder
    assert len(pickle.dumps(builder)) < 1000


def test_more_tests_than_half_of_the_sums_are_rejected():
    with pytest.raises(UserError, match="eval_problems=34.*66 sums.*at most 33"):
        held_out_sums(10, 34)


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("style", "7256eb109dbafb98"),
        ("result", "065aafe5ad2320fa"),
        ("courtesy", "86be908d83d7ef9e"),
        ("sums", "1be4dfab67201081"),
        ("rubrics", "550713b473287be0"),
        ("prompts", "c5347492699f6c7a"),
        ("wordy", "495343ee81f850dd"),
    ],
)
def test_a_seed_always_makes_the_same_rows(kind, digest):
    """Recorded runs can be repeated only if their data stay as they are."""
    rows: Any
    match kind:
        case "rubrics":
            made = generated_rubrics(12, 6, seed=1)
            rows = [*made.train, *made.test]
        case "prompts":
            rows = generated_sum_prompts(50, 12, seed=1, shows_examples=True)
        case "wordy":
            train, test = WordySumComparisons(sums=WordySums(largest=12, test_size=7, seed=1))()
            rows = train + test
        case _:
            train, test = SumComparisons(kind=kind, largest=12, test_size=6, seed=1)()
            rows = train + test
    text = "\n".join(map(repr, rows))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest
