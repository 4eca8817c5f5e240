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
from typing import Any, ClassVar, get_args

from planish import SamplingClient, TrainingClient
from planish.preference.choices import Choice
from planish.preference.types import (
    EMPTY_ANSWER,
    Comparison,
    Label,
    LabeledComparison,
    Messages,
)
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
        return Batch(num_left_out=1)
    return Batch([datum])


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

    context_window: int | None = None
    """The maximum number of tokens of a request; None = not known."""

    def require_fits(self, prompt: Messages, max_tokens: int, where: str) -> None:
        """Raise UserError, which begins with `where`, if two answers of `max_tokens` tokens are too
        long for the context window.
        """
        conversation = comparison_conversation(Comparison(prompt, EMPTY_ANSWER, EMPTY_ANSWER))
        name = self.sampling_client.get_base_model()
        self.choice.require_fits(
            conversation,
            2 * max_tokens,
            self.context_window,
            f"{where}: the preference model {name} reads this prompt with two answers of "
            f"max_tokens={max_tokens} tokens. It",
        )

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


@dataclass(frozen=True)
class ChatForm:
    """The form of preference models that read both answers and write a label."""

    choice: Choice
    """`label_choice` of the renderer."""
    depends_on_order: ClassVar[bool] = True
    """Whether the order of the answers can influence the model.

    If so, a fair evaluation asks about both orders.
    """

    def check(self, labeled: LabeledComparison) -> None:
        """Raise ValueError for a comparison that the format cannot express. Nothing is
        tokenized.
        """
        self.choice.check(comparison_conversation(labeled.comparison))

    def to_batch(self, labeled: LabeledComparison, max_length: int | None) -> Batch:
        """Return the datum of a comparison.

        The batch is empty, with left_out = 1, if the comparison is longer than `max_length` tokens.
        """
        return comparison_to_datum(labeled, self.choice, max_length)

    async def submit(self, training_client: TrainingClient, data: Sequence[Datum]) -> LabelGradient:
        """Submit a gradient of minus the label logprobs, summed over comparisons."""
        pending = await training_client.forward_backward_async(data, "cross_entropy")
        return LabelGradient(data, pending)

    def model(
        self,
        sampling_client: SamplingClient,
        temperature: float = 1.0,
        context_window: int | None = None,
    ) -> ChatPreferenceModel:
        """Return the preference model that runs on `sampling_client`."""
        return ChatPreferenceModel(sampling_client, self.choice, temperature, context_window)
