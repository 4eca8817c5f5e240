"""A preference model that reads both answers: the comparison is a conversation, and the label is
the assistant's answer to it.

    prompt . system "==== Completion A ====" . A . system "==== Completion B ====" . B . system "==== Preference ====" -> A, B or Tie

The form is that of the public cookbooks, which sample the label. Here the probabilities of the
three labels are read off, so a preference is an expectation, with no noise of sampling, and can be
calibrated. Learned is the label's token alone. What is too long is left out of training whole, and
counted: an example that is cut has no label.
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


def comparison_conversation(comparison: Comparison) -> list[Any]:
    """What the label is the answer to."""
    return [
        *comparison.prompt_conversation,
        {"role": "system", "content": "==== Completion A ===="},
        *comparison.completion_A,
        {"role": "system", "content": "==== Completion B ===="},
        *comparison.completion_B,
        {"role": "system", "content": "==== Preference ===="},
    ]


def label_choice(renderer: Renderer) -> Choice:
    return Choice.between(LABELS, renderer)


def comparison_to_datum(
    labeled: LabeledComparison, choice: Choice, max_length: int | None = None
) -> Batch:
    """One example for cross entropy, with weight 1 on the label; none, and left_out = 1, if it has
    more tokens than `max_length`.
    """
    weights = [float(label == labeled.label) for label in LABELS]
    datum = choice.datum(comparison_conversation(labeled.comparison), weights)
    if max_length is not None and datum.model_input.length > max_length:
        return Batch(left_out=1)
    return Batch([datum])


@dataclass(frozen=True)
class LabelCrossEntropy:
    """Minus the logprob of each label, summed."""

    async def submit(
        self, training_client: TrainingClient, data: Sequence[Datum]
    ) -> "LabelGradient":
        return LabelGradient(
            data, await training_client.forward_backward_async(data, "cross_entropy")
        )


@dataclass(frozen=True)
class LabelGradient:
    data: Sequence[Datum]
    pending: Any

    async def metrics(self) -> Metrics:
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
    """P(B) - P(A), of probabilities of A, B and Tie that sum to 1."""
    peak = max(label_logprobs)
    a, b, tie = (math.exp((logprob - peak) / temperature) for logprob in label_logprobs)
    return (b - a) / (a + b + tie)


@dataclass(frozen=True)
class ChatPreferenceModel:
    """One request a comparison. The places of the answers may have a say;
    `preference_models.BothOrders` takes it away.
    """

    sampling_client: SamplingClient
    choice: Choice
    """`label_choice` of the renderer that it was trained with."""
    temperature: float = 1.0
    """Of the probabilities: fitted on comparisons that were not trained on
    (planish/preference/calibration.py).
    """

    async def __call__(self, comparison: Comparison) -> float:
        return expected_preference(await self._label_logprobs(comparison), self.temperature)

    async def log_odds(self, comparison: Comparison) -> float:
        """Of B over A, as the answers are given and before the temperature."""
        a, b, _ = await self._label_logprobs(comparison)
        return b - a

    async def _label_logprobs(self, comparison: Comparison) -> list[float]:
        return await self.choice.logprobs(self.sampling_client, comparison_conversation(comparison))
