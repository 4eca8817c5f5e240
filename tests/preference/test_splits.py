"""Held-out comparisons share no prompt with training."""

import pytest

from planish.errors import UserError
from planish.preference.splits import prompt_of, split_by_prompt
from planish.preference.types import Comparison, Label, LabeledComparison


def pair(prompt: str, number: int, label: Label = "A") -> LabeledComparison:
    answers = ([{"role": "assistant", "content": f"{text} {number}"}] for text in ("yes", "no"))
    return LabeledComparison(Comparison([{"role": "user", "content": prompt}], *answers), label)


TRAIN = [pair(f"question {n % 10}", n, "Tie" if n % 10 == 9 else "A") for n in range(40)]


def test_splits_share_no_prompt_and_count_dropped_rows():
    test = [pair("question 3", 100), pair("new", 101)]
    splits = split_by_prompt(TRAIN, test, 2, seed=0)
    train, calibration = (
        {prompt_of(each) for each in part} for part in (splits.train, splits.calibration)
    )
    assert not train & calibration
    assert not (train | calibration) & {prompt_of(each) for each in test}
    assert len(splits.calibration) == 2
    assert len(splits.train) + len(splits.calibration) + splits.num_left_out == len(TRAIN)
    assert all(each.label != "Tie" for each in splits.calibration)
    assert split_by_prompt(TRAIN, test, 2, seed=0) == splits
    assert any(split_by_prompt(TRAIN, test, 2, seed=seed) != splits for seed in range(1, 5))


def test_without_held_out_comparisons_all_rows_are_trained():
    assert split_by_prompt(TRAIN, [], 0, seed=0).train == TRAIN


def test_an_empty_training_split_is_rejected():
    with pytest.raises(UserError, match="calibration_size=40"):
        split_by_prompt([pair("one", n) for n in range(3)], [], 40, seed=0)
