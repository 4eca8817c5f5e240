"""Comparisons as training batches of a preference model.

For the chat form, each comparison is shown in a random order. Otherwise rows of "chosen" and
"rejected" would teach the model that the first answer is always better. The chat form learns ties
as the label Tie, and Bradley-Terry leaves them out. Evaluation sets hold no ties. Pairs of equal
answers are left out and counted.
"""

import random
from collections.abc import Sequence

import chz

from planish.errors import UserError
from planish.preference.bradley_terry import QUESTION
from planish.preference.datasets import (
    ComparisonBuilder,
    distinct_pairs,
    require_answers_alone,
    warn_of_spelled_tokens,
    without_identical,
)
from planish.preference.forms import Form, Kind, form_of
from planish.preference.splits import PreferenceSplits, split_by_prompt
from planish.preference.types import LabeledComparison
from planish.supervised.datasets import RowDataset
from planish.supervised.types import Batch, ChatDatasetBuilder


class ComparisonDataset(RowDataset):
    """Batches of comparisons that also expose the comparisons themselves as `rows`."""

    rows: Sequence[LabeledComparison]


@chz.chz
class PreferenceDatasetBuilder(ChatDatasetBuilder):
    """Batches of `common_config.batch_size` comparisons, as datums for a preference model of
    `kind`.
    """

    comparison_builder: ComparisonBuilder
    kind: Kind
    question: str = chz.field(
        default=QUESTION, doc="bradley_terry: question that is asked about an answer"
    )
    calibration_size: int = chz.field(
        default=0, doc="number of comparisons held out of training for calibration"
    )
    shuffle_seed: int = 0

    def __call__(self) -> tuple[ComparisonDataset, ComparisonDataset | None]:
        form, splits = self.form, self.splits()
        config = self.common_config

        def to_batch(labeled: LabeledComparison) -> Batch:
            return form.to_batch(labeled, config.max_length)

        return ComparisonDataset.from_splits(
            splits.train, splits.test, config.batch_size, to_batch, self.shuffle_seed
        )

    @property
    def form(self) -> Form:
        """The form of `kind` in the chat format of the builder's renderer."""
        return form_of(self.kind, self.renderer, self.question)

    def splits(self) -> PreferenceSplits:
        """Return the comparisons for training, calibration and evaluation.

        Raise UserError for a comparison that the model's format cannot express.
        """
        require_answers_alone(self.common_config)
        train, test = self.comparison_builder()
        form = self.form
        check_form(train, form, "train")
        check_form(test, form, "test")
        warn_of_spelled_tokens(train, self.renderer, "train")
        warn_of_spelled_tokens(test, self.renderer, "test")
        train_comparisons = (
            distinct_pairs(train, "train")
            if self.kind == "bradley_terry"
            else swap_randomly(without_identical(train, "train"), self.shuffle_seed)
        )
        return split_by_prompt(
            train_comparisons,
            distinct_pairs(test, "test"),
            self.calibration_size,
            self.shuffle_seed,
        )


def check_form(comparisons: Sequence[LabeledComparison], form: Form, split: str) -> None:
    """Raise UserError for the first comparison that the format cannot express."""
    for index, labeled in enumerate(comparisons, start=1):
        try:
            form.check(labeled)
        except ValueError as error:
            where = labeled.location or f"{split} comparison {index}"
            raise UserError(f"{where}: {error}") from error


def swap_randomly(comparisons: Sequence[LabeledComparison], seed: int) -> list[LabeledComparison]:
    """Return the comparisons, each of them swapped with probability 1/2; `seed` decides which."""
    rng = random.Random(f"order:{seed}")
    return [labeled.swap() if rng.random() < 0.5 else labeled for labeled in comparisons]
