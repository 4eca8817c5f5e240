"""Generated preference data whose rule is known."""

import asyncio
import random

import pytest

from planish.errors import UserError
from planish.preference.types import Comparison
from planish.recipes.sums import Sum
from planish.recipes.wordy_sums import (
    WordySumChats,
    WordySumComparisons,
    WordySumPrompts,
    WordySums,
    quality,
    random_answer,
    random_comparison,
    rule_preference,
)
from planish.supervised.datasets import RowDataset
from planish.supervised.types import ChatDatasetBuilderCommonConfig

PROMPT = [Sum(3, 4).prompt]


def preference(a, b):
    sides = ([{"role": "assistant", "content": text}] for text in (a, b))
    return asyncio.run(rule_preference(Comparison(PROMPT, *sides)))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("3 + 4 = 7.", "3 + 4 = 8.", -1),
        ("8", "Well, let me see. I think that it is 7", 1),
        ("It is 7.", "7", 1),
        ("7", "It is 7.", -1),
        ("3 + 4 = 7.", "3 + 4 = 7.", 0),
        ("6", "8", 0),
        ("It is 6.", "8", 1),
        ("", "8", -1),
        ("seven", "7", 1),
        ("7 or 8", "3 + 4 = 7.", 1),
    ],
)
def test_right_comes_before_short(a, b, expected):
    assert preference(a, b) == expected == -preference(b, a)


def test_the_rule_knows_its_own_questions_only():
    with pytest.raises(UserError, match="is not a question of the generated sums"):
        quality(
            [{"role": "user", "content": "Who are you?"}], [{"role": "assistant", "content": "7"}]
        )


def test_demonstrations_are_right_and_differ_in_words():
    said = [random_answer(Sum(3, 4), 7, random.Random(seed)) for seed in range(60)]
    found = [quality(PROMPT, each) for each in said]
    assert all(each.is_right for each in found)
    assert len({each.num_words for each in found}) > 5


def test_comparisons_are_labelled_by_the_rule():
    drawn = [random_comparison(Sum(3, 4), random.Random(seed)) for seed in range(400)]
    for labeled in drawn:
        assert asyncio.run(rule_preference(labeled.comparison)) == {"A": -1, "B": 1}[labeled.label]
    rights = [
        [
            quality(PROMPT, side).is_right
            for side in (d.comparison.completion_A, d.comparison.completion_B)
        ]
        for d in drawn
    ]
    assert {tuple(sorted(each)) for each in rights} == {(False, False), (False, True), (True, True)}
    assert {labeled.label for labeled in drawn} == {"A", "B"}


def sums_in(prompts):
    return {tuple(sorted(part.split(" + "))) for p in prompts for part in [p[0]["content"][8:-1]]}


@pytest.mark.parametrize(("largest", "test_size"), [(12, 48), (5, 6), (3, 1)])
def test_held_out_sums_are_in_no_training_data_in_either_order(small_model, largest, test_size):
    sums = WordySums(largest=largest, test_size=test_size, seed=1)
    prompts = WordySumPrompts(sums=sums)()
    assert len(prompts.test) in (test_size, test_size + 1)
    assert len(prompts.train) + len(prompts.test) == (largest + 1) ** 2
    held_out = sums_in(prompts.test)
    assert not held_out & sums_in(prompts.train)
    train, test = WordySumComparisons(sums=sums, each=2)()
    assert len(train) == 2 * len(prompts.train)
    assert sums_in([each.comparison.prompt_conversation for each in test]) == held_out
    assert not held_out & sums_in([each.comparison.prompt_conversation for each in train])
    config = ChatDatasetBuilderCommonConfig(model_name_for_tokenizer=small_model, batch_size=2)
    chats, tests = WordySumChats(common_config=config, sums=sums, each=2)()
    assert isinstance(chats, RowDataset)
    assert isinstance(tests, RowDataset)
    assert sums_in(tests.rows) == held_out
    assert not held_out & sums_in(chats.rows)
    assert len(chats.rows) == 2 * len(prompts.train)
    again, _ = WordySumChats(common_config=config, sums=sums, each=2)()
    assert isinstance(again, RowDataset)
    assert again.rows == chats.rows


def test_sums_that_are_too_few_are_rejected():
    with pytest.raises(UserError, match="test_size=9: there are 16 sums"):
        WordySums(largest=3, test_size=9)
