"""How well a model predicts texts: nats per token and bits per byte, in training steps and on
held-out data.

    nll = -sum(weight * logprob) / sum(weight)
    bpb = nats of the learned tokens that are text / (ln 2 * UTF-8 bytes of that text)

If the weights of each datum sum to 1, every datum counts equally in nll. If all weights are 1,
every token counts equally. bpb ignores the sizes of weights and does not depend on the tokenizer,
so it can be compared between models. Special tokens, such as the mark that ends a message, do not
count as text.
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
"""The maximum number of datums in an evaluator's request. Larger test sets need more requests."""


@dataclass
class NLLSums:
    """The sums from which nll and bpb are computed, over any number of calls."""

    tokenizer: ModelTokenizer
    nats: float = 0.0
    """The weighted sum of negative logprobs."""
    weight: float = 0.0
    text_nats: float = 0.0
    text_bytes: int = 0
    special_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        marked_ids = {int(id_) for id_, token in added.items() if token.special}
        self.special_ids = frozenset(marked_ids | set(self.tokenizer.all_special_ids))

    def add(self, data: Sequence[Datum], output: ForwardBackwardOutput) -> Self:
        """Add datums with "target_tokens" of shape (N) or (N, K) and "weights" of the same shape.
        Only targets of shape (N) count for bpb.
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
            counts and token not in self.special_ids
            for token, counts in zip(targets, learned, strict=True)
        ]
        self.text_nats -= math.fsum(
            logprob for logprob, counts in zip(logprobs, is_text, strict=True) if counts
        )
        for counts, group in groupby(zip(is_text, targets, strict=True), key=lambda pair: pair[0]):
            if counts:
                tokens = [token for _, token in group]
                text = self.tokenizer.decode(
                    tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
                self.text_bytes += len(text.encode())

    def metrics(self, nll: str, bpb: str) -> dict[str, float]:
        """Return the measures under the given names. A measure without data is left out."""
        metrics = {}
        if self.weight:
            metrics[nll] = self.nats / self.weight
        if self.text_bytes:
            metrics[bpb] = self.text_nats / (math.log(2) * self.text_bytes)
        return metrics


def held_out_data(dataset: SupervisedDataset) -> list[Datum]:
    """Render a test set, and return all of its datums. Raises UserError if there are none."""
    dataset.set_epoch(0)
    data = [datum for index in range(len(dataset)) for datum in dataset.get_batch(index)]
    if not data:
        raise UserError(
            "the test set has no tokens to measure, because max_length cuts them off in each row; "
            "give a larger max_length, other test data, or no test data"
        )
    return data


async def forward_in_batches(
    training_client: TrainingClient, data: Sequence[Datum]
) -> list[tuple[Sequence[Datum], ForwardBackwardOutput]]:
    """Return `data` in batches of at most DATUMS_PER_CALL datums, each with its cross-entropy
    output. All batches are in flight concurrently.
    """
    batches = [
        data[start : start + DATUMS_PER_CALL] for start in range(0, len(data), DATUMS_PER_CALL)
    ]
    pending = [await training_client.forward_async(batch, "cross_entropy") for batch in batches]
    return [(batch, await output) for batch, output in zip(batches, pending, strict=True)]


@dataclass(eq=False)
class NLLEvaluator(TrainingClientEvaluator):
    """Measures NAME/nll and NAME/bpb of held-out datums."""

    data: Sequence[Datum]
    name: str = "test"

    @classmethod
    def from_dataset(cls, dataset: SupervisedDataset, name: str = "test") -> Self:
        """Return an evaluator of the dataset's first epoch, which is rendered now. Raises UserError
        if it has no datums.
        """
        return cls(held_out_data(dataset), name)

    async def __call__(self, training_client: TrainingClient) -> Mapping[str, float]:
        sums = NLLSums(training_client.get_tokenizer())
        for batch, output in await forward_in_batches(training_client, self.data):
            sums.add(batch, output)
        return sums.metrics(f"{self.name}/nll", f"{self.name}/bpb")
