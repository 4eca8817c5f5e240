"""The types of supervised training: batches of datums, datasets of batches, and their builders.

Names are those of the public cookbooks. `set_epoch` selects an epoch of a dataset, and `get_batch`
returns a batch by its index in that epoch. Epoch and index determine the batch in every process, so
a run can be resumed at any batch.
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
    """The datums of a batch, with counts of datums that were too long."""

    def __init__(
        self, data: Iterable[Datum] = (), *, num_truncated: int = 0, num_left_out: int = 0
    ) -> None:
        """`num_truncated`: the number of datums whose end was cut off. `num_left_out`: the number
        of datums left out because truncation would remove every learned token.
        """
        super().__init__(data)
        self.num_truncated = num_truncated
        self.num_left_out = num_left_out

    @classmethod
    def concatenate(cls, batches: Iterable["Batch"]) -> Self:
        """Return one batch with all datums and the summed counts."""
        batches = list(batches)
        return cls(
            (datum for batch in batches for datum in batch),
            num_truncated=sum(batch.num_truncated for batch in batches),
            num_left_out=sum(batch.num_left_out for batch in batches),
        )

    @classmethod
    def from_data(cls, data: Sequence[Datum]) -> "Batch":
        """Return a Batch unchanged. Convert a plain list, as some datasets return, to a Batch."""
        return data if isinstance(data, Batch) else cls(data)


class SupervisedDataset(ABC):
    """A dataset that returns batches by epoch and index."""

    @abstractmethod
    def get_batch(self, index: int) -> Sequence[Datum]:
        """Return batch `index` of the current epoch. A step with an empty batch trains nothing."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches per epoch."""

    def data_size(self) -> int:
        """Return the number of examples; by default, of batches. A run can be resumed only with a
        dataset of the same size.
        """
        return len(self)

    def set_epoch(self, seed: int = 0) -> None:  # noqa: B027  (the same order each time is a choice too)
        """Select epoch number `seed`. This is called before the epoch's first batch is requested,
        and when a run is resumed in the middle of the epoch.
        """


class SupervisedDatasetBuilder(ABC):
    """The options of a dataset. Calling the builder returns the training set, and the test set or
    None.
    """

    @abstractmethod
    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        """Return the training set, and the test set or None."""


@chz.chz
class ChatDatasetBuilderCommonConfig:
    """Options of the conversion of conversations to datums, and of the batch size."""

    model_name_for_tokenizer: str
    renderer_name: str | None = chz.field(default=None, doc="chat format; none = the model's own")
    max_length: int | None = chz.field(
        default=32768,
        doc="maximum tokens in a conversation, at most the model's context; longer ones are "
        "truncated and counted",
    )
    batch_size: int = chz.field(default=128, doc="conversations per step")
    train_on_what: TrainOnWhat = TrainOnWhat.ALL_ASSISTANT_MESSAGES
    reduction: Reduction = chz.field(
        default="mean", doc="weights in the loss: mean = 1 per datum, none = 1 per token"
    )


@chz.chz
class ChatDatasetBuilder(SupervisedDatasetBuilder):
    """A builder of a dataset of conversations, with the renderer that its options name."""

    common_config: ChatDatasetBuilderCommonConfig

    @property
    def renderer(self) -> Renderer:
        """The renderer of the options; by default, the model's own."""
        return model_renderer(
            self.common_config.model_name_for_tokenizer, self.common_config.renderer_name
        )
