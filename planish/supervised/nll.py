"""How well a model predicts texts: nats a token and bits a byte, in training steps and on held-out
data.

    nll = -sum(weight * logprob) / sum(weight)
    bpb = nats of the learned tokens that are text / (ln 2 * UTF-8 bytes of that text)

With weights that sum to 1 in each datum, nll is the mean over datums of their nats a token;
otherwise it is the mean over tokens. bpb takes no account of weights or of how a tokenizer cuts the
text, so it can be compared between models. Special tokens, such as the mark that ends a message,
are no text.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Self

from planish import TrainingClient
from planish.errors import UserError
from planish.runlog.evaluators import TrainingClientEvaluator
from planish.supervised.types import SupervisedDataset
from planish.tokenizer import ModelTokenizer
from planish.types import Datum, ForwardBackwardOutput

DATUMS_PER_CALL = 64
"""Of an evaluator, so that one request does not grow with the test set."""


@dataclass
class Tally:
    """The sums behind both measures, over any number of calls."""

    tokenizer: ModelTokenizer
    nats: float = 0.0
    """Weighted."""
    weight: float = 0.0
    text_nats: float = 0.0
    text_bytes: int = 0
    special: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        marked = {int(id_) for id_, token in added.items() if token.special}
        self.special = frozenset(marked | set(self.tokenizer.all_special_ids))

    def add(self, data: Sequence[Datum], output: ForwardBackwardOutput) -> Self:
        """Count datums with "target_tokens" (N) or (N, K) and "weights" alike; those of (N, K) have
        no text.
        """
        for datum, tensors in zip(data, output.loss_fn_outputs, strict=True):
            weights = datum.loss_fn_inputs["weights"].to_numpy()
            logprobs = tensors["logprobs"].to_numpy()
            self.nats -= math.fsum((weights * logprobs).flat)
            self.weight += math.fsum(weights.flat)
            targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
            if targets.ndim == 1:
                self._add_text(targets.tolist(), (weights != 0).tolist(), logprobs.tolist())
        return self

    def _add_text(self, targets: list[int], learned: list[bool], logprobs: list[float]) -> None:
        is_text = [
            flag and token not in self.special for token, flag in zip(targets, learned, strict=True)
        ]
        self.text_nats -= math.fsum(
            logprob for logprob, flag in zip(logprobs, is_text, strict=True) if flag
        )
        for flag, run in groupby(zip(is_text, targets, strict=True), key=lambda pair: pair[0]):
            if flag:
                tokens = [token for _, token in run]
                text = self.tokenizer.decode(
                    tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
                self.text_bytes += len(text.encode())

    def metrics(self, nll: str, bpb: str) -> dict[str, float]:
        """By the names given; a measure of nothing is left out."""
        found = {}
        if self.weight:
            found[nll] = self.nats / self.weight
        if self.text_bytes:
            found[bpb] = self.text_nats / (math.log(2) * self.text_bytes)
        return found


def held_out_data(dataset: SupervisedDataset) -> list[Datum]:
    """All datums of a test set, rendered now; UserError if there are none."""
    dataset.set_epoch(0)
    data = [datum for index in range(len(dataset)) for datum in dataset.get_batch(index)]
    if not data:
        raise UserError(
            "the test set has nothing to measure: what is learned lies behind max_length in each of its rows; give a larger "
            "max_length, other test data, or no tests"
        )
    return data


class NLLEvaluator(TrainingClientEvaluator):
    """NAME/nll and NAME/bpb of held-out datums."""

    def __init__(self, data: Sequence[Datum], name: str = "test") -> None:
        self.data = data
        self.name = name

    @classmethod
    def from_dataset(cls, dataset: SupervisedDataset, name: str = "test") -> Self:
        """Of all batches of the data set's first epoch, rendered now. UserError if they hold
        nothing.
        """
        return cls(held_out_data(dataset), name)

    async def __call__(self, training_client: TrainingClient) -> Mapping[str, float]:
        parts = [
            self.data[start : start + DATUMS_PER_CALL]
            for start in range(0, len(self.data), DATUMS_PER_CALL)
        ]
        pending = [await training_client.forward_async(part, "cross_entropy") for part in parts]
        tally = Tally(training_client.get_tokenizer())
        for part, output in zip(parts, pending, strict=True):
            tally.add(part, await output)
        return tally.metrics(f"{self.name}/nll", f"{self.name}/bpb")
