"""Comparisons as pairs of datums: the same prompt with the preferred answer, and with the other
one.

A batch alternates between them: chosen, rejected, chosen, rejected, ... Every token of an answer
has weight 1, so the weighted sum of logprobs is the logprob of the answer. Ties are left out when
the data are read. Both conversations are truncated at `max_length` tokens. If that leaves no token
of an answer, the pair is left out and counted.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import chz

from planish.errors import UserError
from planish.preference.types import LabeledComparison, Messages, read_comparison
from planish.renderers import Renderer, TrainOnWhat
from planish.supervised.datasets import RowDataset, read_splits
from planish.supervised.objective import Metrics
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

    The batch is empty, with left_out = 1, if `max_length` leaves nothing of one of the answers.
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
    return Batch.concatenate(batches)


class ComparisonBuilder(ABC):
    """The options of a dataset of comparisons."""

    @abstractmethod
    def __call__(self) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
        """Return the comparisons for training and those for evaluation; the latter may be empty."""


@chz.chz
class ComparisonBuilderFromRows(ComparisonBuilder):
    """Comparisons from a hub dataset, a directory, or one file.

    `planish.preference.types.read_comparison` lists the supported formats of rows.
    """

    dataset: str
    test_size: int | None = chz.field(
        default=None, doc="number of test pairs; none = the whole test split, 0 = no evaluation"
    )
    shuffle_seed: int | None = 0

    def __call__(self) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
        return read_splits(self.dataset, self.test_size, self.shuffle_seed, read_comparison)


@chz.chz
class ComparisonBuilderFromJsonl(ComparisonBuilder):
    """Comparisons from one or two JSONL files."""

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
            without_ties(train), without_ties(test), config.batch_size, to_batch, self.shuffle_seed
        )


def check_comparisons(
    comparisons: Sequence[LabeledComparison], renderer: Renderer, split: str
) -> None:
    """Raise UserError for the first comparison with an answer that cannot be trained on.

    The check does not tokenize anything.
    """
    for index, labeled in enumerate(comparisons, start=1):
        for answer in labeled.ranked or ():
            conversation = answer_conversation(labeled.comparison.prompt_conversation, answer)
            try:
                renderer.check_supervised_examples(conversation, TrainOnWhat.CUSTOMIZED)
            except ValueError as error:
                raise UserError(f"{split} comparison {index}: {error}") from error


def without_ties(comparisons: Sequence[LabeledComparison]) -> list[LabeledComparison]:
    """Return the comparisons that have a preferred answer."""
    return [labeled for labeled in comparisons if labeled.ranked is not None]


def require_answers_alone(config: ChatDatasetBuilderCommonConfig) -> None:
    """Raise UserError unless `train_on_what` is the default: losses on pairs always use whole
    answers.
    """
    if config.train_on_what is not TrainOnWhat.ALL_ASSISTANT_MESSAGES:
        raise UserError(
            f"train_on_what={config.train_on_what.value}: pairs train on their answers only; leave "
            "it out"
        )
