"""A preference model that reads both answers: the comparison is a conversation, and the assistant
answers it with a label.

    prompt . system "==== Completion A ====" . A . system "==== Completion B ====" . B . system "==== Preference ====" -> A, B or Tie

The public cookbooks use the same format and sample the label. Here the probabilities of the three
labels are computed instead. So a preference is an expectation without sampling noise, and can be
calibrated. Only the label's token is trained on. Comparisons that are too long are left out of
training whole and counted, because a truncated one would have no label.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from planish import SamplingClient, TrainingClient
from planish.preference.choices import Choice
from planish.preference.types import Comparison, Label, LabeledComparison
from planish.renderers import Renderer
from planish.supervised.objective import Metrics
from planish.supervised.types import Batch
from planish.types import Datum

LABELS: tuple[Label, ...] = get_args(Label)
"""The labels, in the order of weights and logprobs."""


def comparison_conversation(comparison: Comparison) -> list[Any]:
    """Return the conversation that the model answers with a label."""
    return [
        *comparison.prompt_conversation,
        {"role": "system", "content": "==== Completion A ===="},
        *comparison.completion_A,
        {"role": "system", "content": "==== Completion B ===="},
        *comparison.completion_B,
        {"role": "system", "content": "==== Preference ===="},
    ]


def label_choice(renderer: Renderer) -> Choice:
    """Return the choice between A, B and Tie in the format of `renderer`."""
    return Choice.between(LABELS, renderer)


def comparison_to_datum(
    labeled: LabeledComparison, choice: Choice, max_length: int | None = None
) -> Batch:
    """Return one datum for cross entropy, with weight 1 on the label's token.

    If it has more than `max_length` tokens, the batch is empty with left_out = 1.
    """
    weights = [float(label == labeled.label) for label in LABELS]
    datum = choice.datum(comparison_conversation(labeled.comparison), weights)
    if max_length is not None and datum.model_input.length > max_length:
        return Batch(left_out=1)
    return Batch([datum])


@dataclass(frozen=True)
class LabelCrossEntropy:
    """The training half of a supervised objective: minus the label logprobs, summed over
    comparisons.
    """

    async def submit(
        self, training_client: TrainingClient, data: Sequence[Datum]
    ) -> "LabelGradient":
        """Submit a gradient on datums of `comparison_to_datum`."""
        return LabelGradient(
            data, await training_client.forward_backward_async(data, "cross_entropy")
        )


@dataclass(frozen=True)
class LabelGradient:
    """A submitted gradient whose metrics can be awaited."""

    data: Sequence[Datum]
    pending: Any

    async def metrics(self) -> Metrics:
        """Return mean NLL in nats and accuracy over labels, and the trainer's metrics as
        optim/NAME.
        """
        output = await self.pending
        weights = [datum.loss_fn_inputs["weights"].to_numpy()[-1] for datum in self.data]
        logprobs = [tensors["logprobs"].to_numpy()[-1] for tensors in output.loss_fn_outputs]
        pairs = list(zip(weights, logprobs, strict=True))
        return {
            "num_pairs": len(pairs),
            "train_mean_nll": -sum(float(weight @ logprob) for weight, logprob in pairs)
            / len(pairs),
            "accuracy": sum(float(weight.argmax() == logprob.argmax()) for weight, logprob in pairs)
            / len(pairs),
            **{f"optim/{name}": value for name, value in output.metrics.items()},
        }


def expected_preference(label_logprobs: Sequence[float], temperature: float = 1.0) -> float:
    """Return P(B) - P(A), where the probabilities of A, B and Tie are normalised to sum to 1."""
    largest = max(label_logprobs)
    a, b, tie = (math.exp((logprob - largest) / temperature) for logprob in label_logprobs)
    return (b - a) / (a + b + tie)


@dataclass(frozen=True)
class ChatPreferenceModel:
    """A preference model that judges a comparison with one request.

    The order of the answers may influence it; `preference_models.BothOrders` removes that bias.
    """

    sampling_client: SamplingClient
    choice: Choice
    """`label_choice` of the renderer that the model was trained with."""
    temperature: float = 1.0
    """Label logprobs are divided by this temperature, which is fitted on held-out comparisons
    (planish/preference/calibration.py).
    """

    async def __call__(self, comparison: Comparison) -> float:
        return expected_preference(await self._label_logprobs(comparison), self.temperature)

    async def log_odds(self, comparison: Comparison) -> float:
        """Return log(P(B) / P(A)) for the answers in the given order, before the temperature is
        applied.
        """
        a, b, _ = await self._label_logprobs(comparison)
        return b - a

    async def _label_logprobs(self, comparison: Comparison) -> list[float]:
        return await self.choice.logprobs(self.sampling_client, comparison_conversation(comparison))
