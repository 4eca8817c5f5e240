"""A preference model that gives each answer a score (Bradley and Terry 1952; Ouyang et al. 2022 for
language models).

    score(answer)   = log p("Yes") - log p("No") after the answer and a fixed question about it
    P(B is better)  = sigmoid(score(B) - score(A)),  preference = 2 P - 1
    loss            = mean over pairs of -log sigmoid(score(chosen) - score(rejected))

The difference of two logprobs at one position equals the difference of their logits. So a score is
an unbounded linear function of the last hidden state. It does not saturate, however confident the
model is.
The model needs no extra head, and its checkpoint is an ordinary one. A fresh adapter starts from
what the base model knows about the words Yes and No. Ties carry no order, so training leaves them
out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from planish import SamplingClient, TrainingClient
from planish.preference.choices import Choice
from planish.preference.datasets import PairGradient, pairs_of
from planish.preference.types import EMPTY_ANSWER, Comparison, LabeledComparison, Messages
from planish.processes.interruption import gather_or_cancel
from planish.renderers import Renderer
from planish.supervised.objective import Metrics
from planish.supervised.types import Batch
from planish.types import Datum

QUESTION = "Is this a good answer? Say Yes or No."
WEIGHTS = (1.0, -1.0)
"""The weights of the logprobs of Yes and No in a score."""
MEASURES = ("bradley_terry_loss", "accuracy", "score_margin")
"""The metrics that `bradley_terry_loss` computes."""


def score_conversation(prompt: Messages, answer: Messages, question: str) -> list[Any]:
    """Return prompt, answer and question as a conversation that the model answers with Yes
    or No.
    """
    return [*prompt, *answer, {"role": "user", "content": question}]


def score_choice(renderer: Renderer) -> Choice:
    """Return the choice between Yes and No in the format of `renderer`."""
    return Choice.between(("Yes", "No"), renderer)


def comparison_to_score_data(
    labeled: LabeledComparison,
    choice: Choice,
    question: str = QUESTION,
    max_length: int | None = None,
) -> Batch:
    """Return the datums of the chosen and the rejected answer, in this order.

    If one of them has more than `max_length` tokens, or if the two are equal, the batch is empty
    with left_out = 1. The comparison must not be a tie.
    """
    assert labeled.ranked is not None
    prompt = labeled.comparison.prompt_conversation
    data = [
        choice.datum(score_conversation(prompt, answer, question), WEIGHTS)
        for answer in labeled.ranked
    ]
    if max_length is not None and any(datum.model_input.length > max_length for datum in data):
        return Batch(num_left_out=1)
    # Formats that leave out the reasoning of earlier answers can make two answers equal.
    return Batch(num_left_out=1) if data[0].model_input == data[1].model_input else Batch(data)


def bradley_terry_loss(
    data: Sequence[Datum], logprobs_D: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Metrics]:
    """Return the Bradley-Terry loss, averaged over pairs, and its metrics.

    `data` alternates between chosen and rejected answers. Use it as a custom loss.
    """
    scores_D = torch.stack(
        [
            (datum.loss_fn_inputs["weights"].to_torch() * each).sum()
            for datum, each in zip(data, logprobs_D, strict=True)
        ]
    )
    margins = scores_D[::2] - scores_D[1::2]
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    measured = (loss, (margins > 0).float().mean(), margins.mean())
    return loss, {
        name: float(value.detach()) for name, value in zip(MEASURES, measured, strict=True)
    }


@dataclass(frozen=True)
class BradleyTerryPreferenceModel:
    """A preference model that scores each answer with one request, so two requests per comparison.

    Swapping the answers changes only the sign of the preference.
    """

    sampling_client: SamplingClient
    choice: Choice
    """`score_choice` of the renderer that the model was trained with."""
    question: str = QUESTION
    temperature: float = 1.0
    """Score differences are divided by this temperature, which is fitted on held-out comparisons.
    """

    context_window: int | None = None
    """The maximum number of tokens of a request; None = not known."""

    def require_fits(self, prompt: Messages, max_tokens: int, where: str) -> None:
        """Raise UserError, which begins with `where`, if an answer of `max_tokens` tokens is too
        long for the context window.
        """
        name = self.sampling_client.get_base_model()
        self.choice.require_fits(
            score_conversation(prompt, EMPTY_ANSWER, self.question),
            max_tokens,
            self.context_window,
            f"{where}: the preference model {name} reads this prompt with an answer of "
            f"max_tokens={max_tokens} tokens. It",
        )

    async def __call__(self, comparison: Comparison) -> float:
        return self.preference_between(*await self._scores(comparison))

    def preference_between(self, score_a: float, score_b: float) -> float:
        """Return the preference, from -1 (A is better) to 1 (B is better), for two scores."""
        return math.tanh((score_b - score_a) / (2 * self.temperature))

    async def log_odds(self, comparison: Comparison) -> float:
        """Return log(P(B is better) / P(A is better)) before the temperature is applied."""
        a, b = await self._scores(comparison)
        return b - a

    async def score(self, prompt: Messages, answer: Messages) -> float:
        """Return the score of one answer, which is comparable only to scores for the same
        prompt.
        """
        yes, no = await self.choice.logprobs(
            self.sampling_client, score_conversation(prompt, answer, self.question)
        )
        return yes - no

    async def _scores(self, comparison: Comparison) -> list[float]:
        prompt = comparison.prompt_conversation
        return await gather_or_cancel(
            self.score(prompt, each) for each in (comparison.completion_A, comparison.completion_B)
        )


@dataclass(frozen=True)
class BradleyTerryForm:
    """The form of preference models that score each answer. Its attributes and methods are those of
    `planish.preference.chat_preferences.ChatForm`.
    """

    choice: Choice
    """`score_choice` of the renderer."""
    question: str = QUESTION
    """The question that is asked about an answer."""
    depends_on_order: ClassVar[bool] = False

    def check(self, labeled: LabeledComparison) -> None:
        comparison = labeled.comparison
        for answer in (comparison.completion_A, comparison.completion_B):
            self.choice.check(
                score_conversation(comparison.prompt_conversation, answer, self.question)
            )

    def to_batch(self, labeled: LabeledComparison, max_length: int | None) -> Batch:
        return comparison_to_score_data(labeled, self.choice, self.question, max_length)

    async def submit(self, training_client: TrainingClient, data: Sequence[Datum]) -> PairGradient:
        """Submit a gradient of the Bradley-Terry loss on `data`, which alternates between chosen
        and rejected answers.
        """
        pending = await training_client.forward_backward_custom_async(data, bradley_terry_loss)
        return PairGradient(len(pairs_of(data)), MEASURES, pending)

    def model(
        self,
        sampling_client: SamplingClient,
        temperature: float = 1.0,
        context_window: int | None = None,
    ) -> BradleyTerryPreferenceModel:
        return BradleyTerryPreferenceModel(
            sampling_client, self.choice, self.question, temperature, context_window
        )
