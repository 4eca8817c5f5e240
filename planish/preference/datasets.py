"""Comparisons as pairs of datums: the preferred answer and the other one, each behind the same
prompt.

A batch holds them alternately: chosen, rejected, chosen, rejected, ... What is learned of each is
the answer, with weight 1 a token, so that the weighted sum of logprobs is the logprob of the
answer. Ties say nothing and are left out when the data are read. Both answers are cut at
`max_length`; a pair of which one answer would begin behind it is left out and counted.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import chz

from planish.errors import UserError
from planish.preference.types import LabeledComparison, Messages, read_comparison
from planish.renderers import Renderer, TrainOnWhat
from planish.supervised.datasets import RowDataset, placed, row_splits
from planish.supervised.rendering import conversation_to_data
from planish.supervised.types import (
    Batch,
    ChatDatasetBuilder,
    ChatDatasetBuilderCommonConfig,
    SupervisedDataset,
)
from planish.types import Datum


@dataclass(frozen=True)
class Pair:
    chosen: Datum
    rejected: Datum


def pairs_of(data: Sequence[Datum]) -> list[Pair]:
    """The pairs of a batch that holds chosen and rejected alternately."""
    return [Pair(chosen, rejected) for chosen, rejected in zip(data[::2], data[1::2], strict=True)]


def answer_conversation(prompt: Messages, answer: Messages) -> list[dict[str, Any]]:
    """The conversation in which the answer's own messages alone are learned."""
    return [
        *({**message, "trainable": False} for message in prompt),
        *({**message, "trainable": message.get("role") == "assistant"} for message in answer),
    ]


def comparison_to_data(
    labeled: LabeledComparison, renderer: Renderer, max_length: int | None = None
) -> Batch:
    """Chosen and rejected; UserError for a tie."""
    if labeled.ranked is None:
        raise UserError("a tie has no preferred answer; leave it out")
    sides = [
        conversation_to_data(
            answer_conversation(labeled.comparison.prompt_conversation, answer),
            renderer,
            max_length,
            TrainOnWhat.CUSTOMIZED,
            reduction="none",
        )
        for answer in labeled.ranked
    ]
    if any(len(side) != 1 for side in sides):
        return Batch(left_out=1)
    return Batch.joined(sides)


class ComparisonBuilder(ABC):
    """The options of comparisons; calling it gives those for training and those for tests, which
    may be none.
    """

    @abstractmethod
    def __call__(self) -> tuple[list[LabeledComparison], list[LabeledComparison]]: ...


@chz.chz
class ComparisonBuilderFromRows(ComparisonBuilder):
    """Comparisons of a hub name, a directory, or one file; forms:
    `planish.preference.types.read_comparison`.
    """

    dataset: str
    test_size: int | None = chz.field(
        default=None, doc="test pairs; none = the whole test split, 0 = no tests"
    )
    shuffle_seed: int | None = 0

    def __call__(self) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
        splits = row_splits(self.dataset, self.test_size, self.shuffle_seed)
        return _read(splits.train, f"dataset={self.dataset}, train"), _read(
            splits.test, f"dataset={self.dataset}, test"
        )


@chz.chz
class ComparisonBuilderFromJsonl(ComparisonBuilder):
    """Comparisons of one or two JSONL files."""

    train_path: str
    test_path: str | None = None

    def __call__(self) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
        train, _ = ComparisonBuilderFromRows(dataset=self.train_path, test_size=0)()
        test, _ = (
            ComparisonBuilderFromRows(dataset=self.test_path, test_size=0)()
            if self.test_path
            else ([], None)
        )
        return train, test


@chz.chz
class DPODatasetBuilderFromComparisons(ChatDatasetBuilder):
    """Batches of `common_config.batch_size` pairs."""

    comparison_builder: ComparisonBuilder
    shuffle_seed: int | None = 0

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        train, test = self.comparison_builder()
        config, renderer = self.common_config, self.renderer
        require_answers_alone(config)
        check_comparisons(train, renderer, "train")
        check_comparisons(test, renderer, "test")

        def data_of(labeled: LabeledComparison) -> Batch:
            return comparison_to_data(labeled, renderer, config.max_length)

        train_set = RowDataset(
            without_ties(train), config.batch_size, data_of, shuffle_seed=self.shuffle_seed
        )
        kept = without_ties(test)
        return train_set, RowDataset(
            kept, config.batch_size, data_of, drop_last=False
        ) if kept else None


def check_comparisons(
    comparisons: Sequence[LabeledComparison], renderer: Renderer, split: str
) -> None:
    """UserError for the first one of which an answer cannot be trained on: tokens are not made for
    it.
    """
    for number, labeled in enumerate(comparisons, start=1):
        for answer in labeled.ranked or ():
            conversation = answer_conversation(labeled.comparison.prompt_conversation, answer)
            try:
                renderer.check_supervised_examples(conversation, TrainOnWhat.CUSTOMIZED)
            except ValueError as error:
                raise UserError(f"{split} comparison {number}: {error}") from error


def without_ties(comparisons: Sequence[LabeledComparison]) -> list[LabeledComparison]:
    return [labeled for labeled in comparisons if labeled.ranked is not None]


def require_answers_alone(config: ChatDatasetBuilderCommonConfig) -> None:
    """The loss is of whole answers: what is learned and how much it weighs is no choice here."""
    if config.train_on_what is not TrainOnWhat.ALL_ASSISTANT_MESSAGES:
        raise UserError(
            f"train_on_what={config.train_on_what.value}: pairs are learned by their answers; leave it out"
        )


def _read(rows: Sequence[Mapping[str, Any]], where: str) -> list[LabeledComparison]:
    return [read_comparison(row, place) for place, row in placed(rows, where)]
