"""Batches from datasets of Hugging Face's `datasets`, and metrics of a batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import chz

from planish.errors import UserError
from planish.renderers import TrainOnWhat, conversation_to_datum
from planish.renderers.datums import Reduction, datum_from_weights
from planish.supervised import types
from planish.supervised.nll import NLLSums
from planish.supervised.types import SupervisedDataset
from planish.tokenizer import ModelTokenizer
from planish.types import Datum, ForwardBackwardOutput, ModelInput, TensorData

__all__ = ["conversation_to_datum"]

Row = Mapping[str, Any]


def datum_from_model_input_weights(
    model_input: ModelInput,
    weights: Any,
    max_length: int | None = None,
    reduction: Reduction = "none",
) -> Datum:
    """Same as `planish.renderers.datum_from_weights`, with reduction "none" by default."""
    return datum_from_weights(model_input, weights, max_length, reduction)


def compute_mean_nll(
    logprobs_list: Sequence[TensorData], weights_list: Sequence[TensorData]
) -> float:
    """Return -sum(logprobs * weights) / sum(weights), or NaN if the weights sum to 0."""
    pairs = [(p.to_numpy(), w.to_numpy()) for p, w in zip(logprobs_list, weights_list, strict=True)]
    total = sum(float(weights.sum()) for _, weights in pairs)
    nats = -sum(float((logprobs * weights).sum()) for logprobs, weights in pairs)
    return nats / total if total else math.nan


def compute_bpb(
    logprobs_list: Sequence[TensorData],
    weights_list: Sequence[TensorData],
    target_tokens_list: Sequence[TensorData],
    tokenizer: ModelTokenizer,
) -> float:
    """Return the bits per byte of the trained text, without special tokens. NaN if there is no
    trained text.
    """
    data = [
        Datum(ModelInput.empty(), {"weights": weights, "target_tokens": targets})
        for weights, targets in zip(weights_list, target_tokens_list, strict=True)
    ]
    output = ForwardBackwardOutput("", [{"logprobs": logprobs} for logprobs in logprobs_list])
    return NLLSums(tokenizer).add(data, output).metrics("nll", "bpb").get("bpb", math.nan)


@chz.chz
class ChatDatasetBuilderCommonConfig(types.ChatDatasetBuilderCommonConfig):
    """planish's class of this name, in which `train_on_what=None` trains on all messages of the
    assistant.
    """

    train_on_what: TrainOnWhat = chz.field(
        default=TrainOnWhat.ALL_ASSISTANT_MESSAGES,
        munger=lambda _, given: given or TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    )


def _data_of(
    map_fn: Callable[[Row], Datum] | None, flatmap_fn: Callable[[Row], list[Datum]] | None
) -> Callable[[Row], list[Datum]]:
    """Return a function from a row to its datums. Raises UserError unless exactly one argument is
    given.
    """
    if (map_fn is None) == (flatmap_fn is None):
        raise UserError("give either map_fn or flatmap_fn")
    return flatmap_fn or (lambda row: [map_fn(row)])  # type: ignore[misc]


@dataclass(eq=False)
class SupervisedDatasetFromHFDataset(SupervisedDataset):
    """Batches of `batch_size` rows of a `datasets.Dataset`. `map_fn` converts a row to a datum,
    `flatmap_fn` to a list of datums.
    """

    hf_dataset: Any
    batch_size: int
    map_fn: Callable[[Row], Datum] | None = None
    flatmap_fn: Callable[[Row], list[Datum]] | None = None

    def __post_init__(self) -> None:
        self._epoch = self.hf_dataset
        self._data_of = _data_of(self.map_fn, self.flatmap_fn)

    def get_batch(self, index: int) -> list[Datum]:
        """Return the datums of the rows of batch `index`."""
        begin = index * self.batch_size
        end = min(begin + self.batch_size, len(self._epoch))
        rows = self._epoch.select(range(begin, end)).to_list()
        return [datum for row in rows for datum in self._data_of(row)]

    def set_epoch(self, seed: int = 0) -> None:
        """Shuffle the rows for epoch `seed`."""
        self._epoch = self.hf_dataset.shuffle(seed=seed)

    def __len__(self) -> int:
        """Return the number of full batches, but 1 if all rows together fill no batch."""
        return len(self.hf_dataset) // self.batch_size or min(1, len(self.hf_dataset))


@dataclass(eq=False)
class StreamingSupervisedDatasetFromHFDataset(SupervisedDataset):
    """Batches of `batch_size` rows of a `datasets.IterableDataset` with `length` rows. Batches must
    be read in order. A resumed run skips the rows of earlier batches.
    """

    hf_dataset: Any
    batch_size: int
    length: int
    map_fn: Callable[[Row], Datum] | None = None
    flatmap_fn: Callable[[Row], list[Datum]] | None = None
    buffer_size: int = 10_000

    def __post_init__(self) -> None:
        self._data_of = _data_of(self.map_fn, self.flatmap_fn)
        self.set_epoch(0)

    def get_batch(self, index: int) -> list[Datum]:
        """Return the datums of batch `index`. Raises UserError if this batch was already passed."""
        if index < self._next:
            raise UserError(f"batch {index} of the stream was already read; read batches in order")
        for _ in range((index - self._next) * self.batch_size):
            next(self._rows, None)
        self._next = index + 1
        rows = [row for _, row in zip(range(self.batch_size), self._rows, strict=False)]
        return [datum for row in rows for datum in self._data_of(row)]

    def set_epoch(self, seed: int = 0) -> None:
        """Restart the stream, shuffled for epoch `seed`."""
        self._rows = iter(self.hf_dataset.shuffle(seed=seed, buffer_size=self.buffer_size))
        self._next = 0

    def __len__(self) -> int:
        """Return the number of full batches."""
        return self.length // self.batch_size
