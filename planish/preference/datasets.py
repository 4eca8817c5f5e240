"""Comparisons as pairs of datums: the same prompt with the preferred answer, and with the other
one.

A batch alternates between them: chosen, rejected, chosen, rejected, ... Every token of an answer
has weight 1, so the weighted sum of logprobs is the logprob of the answer. Ties and
pairs of equal answers, from which nothing can be learned, are left out and counted before training.
Both conversations are truncated at `max_length` tokens. If that leaves no token
of an answer, or the same tokens of both, the pair is left out and counted.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import chz

from planish.datasets.layouts import COMPARISONS
from planish.datasets.split_names import SplitNames
from planish.errors import UserError
from planish.preference.types import LabeledComparison, Messages, read_comparison
from planish.renderers import Renderer, TrainOnWhat
from planish.renderers.spelled_tokens import SpelledTokens
from planish.supervised.datasets import RowDataset, read_splits, row_splits
from planish.supervised.objective import Metrics
from planish.supervised.rendering import conversation_to_data
from planish.supervised.types import (
    Batch,
    ChatDatasetBuilder,
    ChatDatasetBuilderCommonConfig,
    SupervisedDataset,
)
from planish.types import Datum

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pair:
    """The datums of one comparison."""

    chosen: Datum
    rejected: Datum


def pairs_of(data: Sequence[Datum]) -> list[Pair]:
    """Return the pairs of a batch that alternates between chosen and rejected answers."""
    return [Pair(chosen, rejected) for chosen, rejected in zip(data[::2], data[1::2], strict=True)]


@dataclass(frozen=True)
class PairGradient:
    """A submitted gradient whose metrics can be awaited."""

    num_pairs: int
    metric_names: Sequence[str]
    """The metrics of the custom loss. All other metrics are the trainer's."""
    pending: Any

    async def metrics(self) -> Metrics:
        """Return the loss metrics of the pairs, and the trainer's own metrics as optim/NAME."""
        output = await self.pending
        loss_metrics = {name: output.metrics[name] for name in self.metric_names}
        trainer_metrics = {
            f"optim/{name}": value
            for name, value in output.metrics.items()
            if name not in self.metric_names
        }
        return {"num_pairs": self.num_pairs, **loss_metrics, **trainer_metrics}


def answer_conversation(prompt: Messages, answer: Messages) -> list[dict[str, Any]]:
    """Return the conversation, marked so that only the assistant messages of `answer` are trained
    on.
    """
    return [
        *({**message, "trainable": False} for message in prompt),
        *({**message, "trainable": message.get("role") == "assistant"} for message in answer),
    ]


def comparison_to_data(
    labeled: LabeledComparison, renderer: Renderer, max_length: int | None = None
) -> Batch:
    """Return the datums of the chosen and the rejected answer. Raise UserError for a tie.

    The batch is empty, with left_out = 1, if `max_length` leaves nothing of one of the answers, or
    if the two are equal, in the data or after truncation.
    """
    if labeled.ranked is None:
        raise UserError("a tie has no preferred answer; leave it out")
    batches = [
        conversation_to_data(
            answer_conversation(labeled.comparison.prompt_conversation, answer),
            renderer,
            max_length,
            TrainOnWhat.CUSTOMIZED,
            reduction="none",
        )
        for answer in labeled.ranked
    ]
    if any(len(batch) != 1 for batch in batches):
        return Batch(num_left_out=1)
    pair = Batch.concatenate(batches)
    return Batch(num_left_out=1) if _has_equal_tokens(pair[0], pair[1]) else pair


def _has_equal_tokens(first: Datum, second: Datum) -> bool:
    """Return whether two datums have the same tokens, including the last target."""
    return first.model_input.to_ints() == second.model_input.to_ints() and (
        first.loss_fn_inputs["target_tokens"].tolist()
        == second.loss_fn_inputs["target_tokens"].tolist()
    )


class ComparisonBuilder(ABC):
    """The options of a dataset of comparisons."""

    @abstractmethod
    def __call__(self) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
        """Return the comparisons for training and those for evaluation; the latter may be empty."""


@chz.chz
class ComparisonBuilderFromRows(SplitNames, ComparisonBuilder):
    """Comparisons from a hub dataset, a directory, or one file; docs/reference/data.md lists the
    layouts of rows.
    """

    dataset: str
    test_size: int | None = chz.field(
        default=None, doc="number of test pairs; none = the whole test split, 0 = no evaluation"
    )
    shuffle_seed: int | None = 0

    def __call__(self) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
        splits = row_splits(
            self.dataset, self.test_size, self.shuffle_seed, self.train_split, self.test_split
        )
        return read_splits(self.dataset, splits, read_comparison, COMPARISONS)


@chz.chz
class ComparisonBuilderFromJsonl(ComparisonBuilder):
    """Comparisons from one or two files."""

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

        def to_batch(labeled: LabeledComparison) -> Batch:
            return comparison_to_data(labeled, renderer, config.max_length)

        return RowDataset.from_splits(
            in_one_sequence(distinct_pairs(train, "train"), renderer, "train"),
            in_one_sequence(distinct_pairs(test, "test"), renderer, "test"),
            config.batch_size,
            to_batch,
            self.shuffle_seed,
        )


def check_comparisons(
    comparisons: Sequence[LabeledComparison], renderer: Renderer, split: str
) -> None:
    """Raise UserError for the first comparison with an answer that cannot be trained on.

    The check does not tokenize anything.
    """
    for index, labeled in enumerate(comparisons, start=1):
        where = labeled.location or f"{split} comparison {index}"
        for answer in labeled.ranked or ():
            conversation = answer_conversation(labeled.comparison.prompt_conversation, answer)
            try:
                renderer.check_supervised_examples(conversation, TrainOnWhat.CUSTOMIZED)
            except ValueError as error:
                raise UserError(f"{where}: {error}") from error
    warn_of_spelled_tokens(comparisons, renderer, split)


def warn_of_spelled_tokens(
    comparisons: Sequence[LabeledComparison], renderer: Renderer, split: str
) -> None:
    """Log how many answers of the comparisons, or their prompts, spell special tokens."""
    spelled = SpelledTokens()
    for index, labeled in enumerate(comparisons, start=1):
        comparison = labeled.comparison
        for answer in (comparison.completion_A, comparison.completion_B):
            conversation = answer_conversation(comparison.prompt_conversation, answer)
            render = partial(
                renderer.build_supervised_examples, conversation, TrainOnWhat.CUSTOMIZED
            )
            where = labeled.location or f"{split} comparison {index}"
            spelled.add_rendered(conversation, renderer, render, where)
    spelled.warn(f"of {2 * len(comparisons)} {split} answers")


def without_identical(
    comparisons: Sequence[LabeledComparison], split: str
) -> list[LabeledComparison]:
    """Return the comparisons whose answers differ, and the ties. A warning counts the others."""
    distinct = [
        labeled for labeled in comparisons if labeled.label == "Tie" or not labeled.is_identical
    ]
    if len(distinct) < len(comparisons):
        kept = set(map(id, distinct))
        first = next(labeled for labeled in comparisons if id(labeled) not in kept)
        _log.warning(
            "%d of %d %s pairs have two equal answers and are left out%s",
            len(comparisons) - len(distinct),
            len(comparisons),
            split,
            f", the first in {first.location}" if first.location else "",
        )
    return distinct


def without_ties(comparisons: Sequence[LabeledComparison], split: str) -> list[LabeledComparison]:
    """Return the comparisons that have a preferred answer. A message counts the others."""
    ranked = [labeled for labeled in comparisons if labeled.ranked is not None]
    if len(ranked) < len(comparisons):
        _log.warning(
            "%d of %d %s comparisons are ties and are left out",
            len(comparisons) - len(ranked),
            len(comparisons),
            split,
        )
    return ranked


def distinct_pairs(comparisons: Sequence[LabeledComparison], split: str) -> list[LabeledComparison]:
    """Return the comparisons that have a preferred answer, which differs from the other one.
    Warnings count the comparisons that are left out.
    """
    return without_identical(without_ties(comparisons, split), split)


def in_one_sequence(
    comparisons: Sequence[LabeledComparison], renderer: Renderer, split: str
) -> list[LabeledComparison]:
    """Return the comparisons whose answers are one sequence each. A warning counts the others: an
    answer of several turns, in a format that strips the reasoning of earlier turns, is several
    sequences, whose logprobs are not those of one answer.
    """
    kept = [
        labeled
        for labeled in comparisons
        if not any(
            _is_several_sequences(labeled.comparison.prompt_conversation, answer, renderer)
            for answer in labeled.ranked or ()
        )
    ]
    if len(kept) < len(comparisons):
        ids = set(map(id, kept))
        first = next(labeled for labeled in comparisons if id(labeled) not in ids)
        _log.warning(
            "%d of %d %s pairs have an answer of several turns, the first in %s, and the chat format "
            "%s strips the reasoning of earlier turns; these pairs are left out. Give answers of one "
            "turn, or a renderer_name that keeps the reasoning",
            len(comparisons) - len(kept),
            len(comparisons),
            split,
            first.location or "the first such pair",
            renderer.name,
        )
    return kept


def _is_several_sequences(prompt: Messages, answer: Messages, renderer: Renderer) -> bool:
    if all(message.get("role") != "user" for message in answer):
        return False  # one turn: nothing has to be rendered
    conversation = answer_conversation(prompt, answer)
    return len(renderer.build_supervised_examples(conversation, TrainOnWhat.CUSTOMIZED)) > 1


def require_answers_alone(config: ChatDatasetBuilderCommonConfig) -> None:
    """Raise UserError unless `train_on_what` is the default: losses on pairs always use whole
    answers.
    """
    if config.train_on_what is not TrainOnWhat.ALL_ASSISTANT_MESSAGES:
        raise UserError(
            f"train_on_what={config.train_on_what.value}: pairs train on their answers only; leave "
            "it out"
        )
