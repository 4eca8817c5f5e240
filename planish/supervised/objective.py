"""What a supervised loop minimises: how the gradient of a batch is asked for, and what is said of
it.

The loop itself knows neither the loss nor the metrics. Another objective is another class with
these two methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from planish import TrainingClient
from planish.runlog.evaluators import Evaluator
from planish.supervised.nll import NLLEvaluator, Tally
from planish.supervised.types import SupervisedDataset
from planish.tokenizer import ModelTokenizer
from planish.types import Datum

Metrics = dict[str, float]


class Gradient(Protocol):
    """A gradient that was asked for."""

    async def metrics(self) -> Metrics:
        """Wait until it is there; what the trainer and the objective say of it."""
        ...


class Objective(Protocol):
    async def submit(self, training_client: TrainingClient, data: Sequence[Datum]) -> Gradient:
        """Ask for the gradient of a batch; it is not waited for here, since the step before may be
        under way.
        """
        ...

    def test(self, test_set: SupervisedDataset) -> Evaluator:
        """What is measured on held-out data."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """Minus the logprob of each target, times its weight, summed."""

    tokenizer: ModelTokenizer

    async def submit(
        self, training_client: TrainingClient, data: Sequence[Datum]
    ) -> "CrossEntropyGradient":
        pending = await training_client.forward_backward_async(data, "cross_entropy")
        return CrossEntropyGradient(self.tokenizer, data, pending)

    def test(self, test_set: SupervisedDataset) -> NLLEvaluator:
        return NLLEvaluator.from_dataset(test_set)


@dataclass(frozen=True)
class CrossEntropyGradient:
    tokenizer: ModelTokenizer
    data: Sequence[Datum]
    pending: Any

    async def metrics(self) -> Metrics:
        output = await self.pending
        tally = Tally(self.tokenizer).add(self.data, output)
        return {
            "num_loss_tokens": tally.weight,
            **tally.metrics("train_mean_nll", "train_mean_bpb"),
            **{f"optim/{name}": value for name, value in output.metrics.items()},
        }
