"""Pairs with exchanged answers: the preferred answer is correct by construction, and an answer
alone does not reveal whether it is preferred.
"""

from collections import Counter

import pytest
from pair_texts import answers_of, question_of

from planish.errors import UserError
from planish.preference.splits import prompt_of
from planish.recipes.exchanged_answers import (
    ExchangedSolutionsBuilder,
    QuestionWithAnswer,
    make_exchanges,
)
from planish.recipes.sum_comparisons import SumComparisons


def test_the_preferred_sum_is_right_and_the_other_one_wrong():
    train, test = SumComparisons(kind="sums", largest=20, test_size=40, seed=0)()
    assert len(test) == 40
    assert len(train) > 350
    for pair, (chosen, rejected) in zip([*train, *test], answers_of([*train, *test]), strict=True):
        a, b = (
            int(word.strip("?")) for word in question_of(pair).split() if word.strip("?").isdigit()
        )
        assert chosen == f"The answer is {a + b}."
        assert rejected != chosen
    assert not {prompt_of(pair) for pair in train} & {prompt_of(pair) for pair in test}
    assert SumComparisons(kind="sums", largest=20, test_size=40, seed=0)() == (train, test)
    assert SumComparisons(kind="sums", largest=20, test_size=40, seed=1)() != (train, test)


@pytest.mark.parametrize("side", ["train", "test"])
def test_answer_and_length_alone_do_not_reveal_the_preference(side, sums_dataset):
    builders = (
        SumComparisons(kind="sums", largest=20, test_size=40, seed=0),
        ExchangedSolutionsBuilder(questions=str(sums_dataset), test_size=4, seed=0),
    )
    for builder in builders:
        pairs = builder()[side == "test"]
        chosen, rejected = zip(*answers_of(pairs), strict=True)
        assert Counter(chosen) == Counter(rejected), (
            "each answer is preferred as often as it is rejected"
        )
        assert sum(len(c) > len(r) for c, r in answers_of(pairs)) == sum(
            len(c) < len(r) for c, r in answers_of(pairs)
        )


def test_solutions_are_exchanged_with_those_of_nearly_their_length():
    answered = [QuestionWithAnswer(f"question {n}", "x" * n + str(n)) for n in range(10, 90)]
    for chosen, rejected in answers_of(
        [pair for both in make_exchanges(answered, 0) for pair in both]
    ):
        assert chosen != rejected
        assert abs(len(chosen) - len(rejected)) <= 1


def test_solutions_of_a_test_split_are_the_tests(sums_dataset):
    train, test = ExchangedSolutionsBuilder(questions=str(sums_dataset), test_size=4, seed=0)()
    assert (len(train), len(test)) == (26, 4)
    whole, none = ExchangedSolutionsBuilder(questions=str(sums_dataset), test_size=0, seed=0)()
    assert (whole, none) == (train, [])
    one_file = ExchangedSolutionsBuilder(
        questions=str(sums_dataset / "train.jsonl"), test_size=6, seed=0
    )
    train, test = one_file()
    assert (len(train), len(test)) == (20, 6)
    questions = {question_of(pair) for pair in test}
    assert not questions & {question_of(pair) for pair in train}


def test_more_tests_than_there_are_pairs_is_an_error():
    with pytest.raises(UserError, match="test_size=1000"):
        SumComparisons(kind="sums", largest=5, test_size=1000, seed=0)()
