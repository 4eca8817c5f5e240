"""The objectives of supervised training: the loss that is minimised, and its metrics.

The training loop works with any loss and any metrics. To train with another loss, write a class
with the two methods of `Objective`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from planish import TrainingClient
from planish.runlog.evaluators import Evaluator
from planish.supervised.nll import NLLEvaluator, NLLSums
from planish.supervised.types import SupervisedDataset
from planish.tokenizer import ModelTokenizer
from planish.types import Datum

Metrics = dict[str, float]


class PendingGradient(Protocol):
    """A submitted gradient computation."""

    async def metrics(self) -> Metrics:
        """Wait for the gradient, and return the metrics of the trainer and the objective."""
        ...


class Objective(Protocol):
    """A loss for supervised training, with its evaluation."""

    async def submit(
        self, training_client: TrainingClient, data: Sequence[Datum]
    ) -> PendingGradient:
        """Submit the gradient computation of a batch, and return without waiting for its result.
        The previous step may still be running.
        """
        ...

    def evaluator(self, test_set: SupervisedDataset) -> Evaluator:
        """Return the evaluator of this objective on held-out data."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """The cross-entropy loss: the sum over targets of -weight * logprob."""

    tokenizer: ModelTokenizer

    async def submit(
        self, training_client: TrainingClient, data: Sequence[Datum]
    ) -> "CrossEntropyGradient":
        """Submit the gradient computation of a batch, and return without waiting for its result."""
        # `NLLSums` reads only the logprobs of targets with a weight, so do not compute the others.
        pending = await training_client.forward_backward_async(
            data, "cross_entropy", {"skip_unweighted": 1}
        )
        return CrossEntropyGradient(self.tokenizer, data, pending)

    def evaluator(self, test_set: SupervisedDataset) -> NLLEvaluator:
        """Return the evaluator of the mean NLL on `test_set`."""
        return NLLEvaluator.from_dataset(test_set)


@dataclass(frozen=True)
class CrossEntropyGradient:
    """The submitted cross-entropy gradient of a batch."""

    tokenizer: ModelTokenizer
    data: Sequence[Datum]
    pending: Any

    async def metrics(self) -> Metrics:
        """Wait for the gradient. Return the mean NLL in nats per token, the mean bits per byte, and
        the trainer's metrics.
        """
        output = await self.pending
        sums = NLLSums(self.tokenizer).add(self.data, output)
        return {
            "num_loss_tokens": sums.weight,
            **sums.metrics("train_mean_nll", "train_mean_bpb"),
            **{f"optim/{name}": value for name, value in output.metrics.items()},
        }
