"""Comparisons as training batches of a preference model.

For the chat form, each comparison is shown in a random order. Otherwise rows of "chosen" and
"rejected" would teach the model that the first answer is always better. The chat form learns ties
as the label Tie, and Bradley-Terry leaves them out. Evaluation sets hold no ties. Pairs of equal
answers are left out and counted.
"""

import logging
import random
from collections.abc import Sequence

import chz

from planish.errors import UserError
from planish.preference.bradley_terry import QUESTION, score_conversation
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
from planish.renderers import Renderer
from planish.supervised.datasets import RowDataset
from planish.supervised.types import Batch, ChatDatasetBuilder

_log = logging.getLogger(__name__)


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
        for comparisons, split in ((train, "train"), (test, "test")):
            warn_of_spelled_tokens(comparisons, self.renderer, split)
            if self.kind == "bradley_terry":
                warn_of_lost_reasoning(comparisons, self.renderer, split)
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


def warn_of_lost_reasoning(
    comparisons: Sequence[LabeledComparison], renderer: Renderer, split: str
) -> None:
    """Log how many comparisons have an answer with reasoning, if the format leaves it out. A
    Bradley-Terry model reads an answer as an earlier turn, and such formats strip reasoning there.
    """
    reasoned = [
        labeled
        for labeled in comparisons
        for answer in (labeled.comparison.completion_A, labeled.comparison.completion_B)
        if any(message.get("reasoning_content") for message in answer)
    ]
    word = "Sevenfold"
    probe = score_conversation(
        [{"role": "user", "content": "?"}],
        [{"role": "assistant", "content": "!", "reasoning_content": word}],
        QUESTION,
    )
    if reasoned and word not in renderer.tokenizer.decode(
        renderer.build_generation_prompt(probe).to_ints()
    ):
        _log.warning(
            "%d %s answers have reasoning, the first in %s; the chat format %s leaves it out of "
            "earlier turns, so a bradley_terry model does not read it. kind=chat reads it",
            len(reasoned),
            split,
            reasoned[0].location or "the first such comparison",
            renderer.name,
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
