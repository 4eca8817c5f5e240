"""The nouns of supervised training: batches of datums, data sets of batches, and the options that
make them.

Names are those of the public cookbooks. A data set answers batches by their index within an epoch;
`set_epoch` chooses the epoch, and both together determine the batch, in every process, so that a
run can be resumed at any of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Self

import chz

from planish.renderers import Renderer, TrainOnWhat
from planish.renderers.datums import Reduction
from planish.runlog.model_renderer import model_renderer
from planish.types import Datum


class Batch(list[Datum]):
    """The datums of a batch, and what became of conversations that were too long."""

    def __init__(
        self, data: Iterable[Datum] = (), *, truncated: int = 0, left_out: int = 0
    ) -> None:
        """`truncated`: datums whose end was cut off. `left_out`: those of which nothing that is
        learned would be left.
        """
        super().__init__(data)
        self.truncated = truncated
        self.left_out = left_out

    @classmethod
    def joined(cls, parts: Iterable["Batch"]) -> Self:
        parts = list(parts)
        return cls(
            (datum for part in parts for datum in part),
            truncated=sum(part.truncated for part in parts),
            left_out=sum(part.left_out for part in parts),
        )

    @classmethod
    def of(cls, data: Sequence[Datum]) -> "Batch":
        """A batch as it is, or a plain list of a data set that has no notion of length."""
        return data if isinstance(data, Batch) else cls(data)


class SupervisedDataset(ABC):
    """Batches of one epoch after the other."""

    @abstractmethod
    def get_batch(self, index: int) -> Sequence[Datum]:
        """Batch `index` of the current epoch. It may be empty; then the step changes nothing."""

    @abstractmethod
    def __len__(self) -> int:
        """Batches an epoch."""

    def data_size(self) -> int:
        """Examples, or batches if it does not say: a run goes on only with as many as it began
        with.
        """
        return len(self)

    def set_epoch(self, seed: int = 0) -> None:  # noqa: B027  (the same order each time is a choice too)
        """Go to the epoch of that number; called before its first batch, also when a run is resumed
        within it.
        """


class SupervisedDatasetBuilder(ABC):
    """The options of a data set; calling it gives the one for training and, if there is one, that
    for tests.
    """

    @abstractmethod
    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]: ...


@chz.chz
class ChatDatasetBuilderCommonConfig:
    """How conversations become datums, and datums batches."""

    model_name_for_tokenizer: str
    renderer_name: str | None = chz.field(default=None, doc="chat format; none = the model's own")
    max_length: int | None = chz.field(
        default=32768,
        doc="tokens, at most the model's context; what is beyond is cut off and counted",
    )
    batch_size: int = chz.field(default=128, doc="conversations a step")
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES
    reduction: Reduction = chz.field(
        default="mean", doc="mean = the weights of each datum sum to 1, none = each token weighs 1"
    )


@chz.chz
class ChatDatasetBuilder(SupervisedDatasetBuilder):
    """A builder of conversations; `SupervisedDatasetBuilder` with the renderer that its options
    name.
    """

    common_config: ChatDatasetBuilderCommonConfig

    @property
    def renderer(self) -> Renderer:
        return model_renderer(
            self.common_config.model_name_for_tokenizer, self.common_config.renderer_name
        )
