"""Generated pairs: both answers are correct, the length does not reveal the preferred one, and test
pairs have other questions and other words.
"""

import pytest
from pair_texts import answers_of, question_of

from planish.errors import UserError
from planish.recipes.sum_comparisons import (
    COURTEOUS,
    RUDE,
    TEST_COURTEOUS,
    TEST_RUDE,
    SumComparisons,
)


@pytest.fixture(scope="module")
def splits():
    return SumComparisons(kind="courtesy", largest=12, test_size=40, seed=0)()


def test_both_answers_are_right_and_differ_in_their_words(splits):
    train, test = splits
    assert (len(train), len(test)) == (129, 40)
    for pairs, courteous, rude in ((train, COURTEOUS, RUDE), (test, TEST_COURTEOUS, TEST_RUDE)):
        for pair, (chosen, rejected) in zip(pairs, answers_of(pairs), strict=True):
            a, b = (
                int(word.strip("?"))
                for word in question_of(pair).split()
                if word.strip("?").isdigit()
            )
            result = f" {a} + {b} is {a + b}."
            assert chosen.removesuffix(result) in courteous
            assert rejected.removesuffix(result) in rude


def test_the_longer_answer_is_preferred_in_every_other_pair(splits):
    for pairs in splits:
        longer = [len(chosen) - len(rejected) > 0 for chosen, rejected in answers_of(pairs)]
        assert longer == [place % 2 == 0 for place in range(len(pairs))]
        assert all(len(chosen) != len(rejected) for chosen, rejected in answers_of(pairs))


def test_neither_questions_nor_words_of_tests_are_in_training(splits):
    train, test = splits
    assert len({question_of(pair) for pair in [*train, *test]}) == 169
    assert not {*COURTEOUS, *RUDE} & {*TEST_COURTEOUS, *TEST_RUDE}
    assert SumComparisons(kind="courtesy", largest=12, test_size=40, seed=0)() == splits
    assert SumComparisons(kind="courtesy", largest=12, test_size=40, seed=1)() != splits


def test_more_tests_than_there_are_questions_is_an_error():
    with pytest.raises(UserError, match="test_size=36"):
        SumComparisons(kind="courtesy", largest=5, test_size=36, seed=0)()
