"""A preference model that gives each answer a number (Bradley and Terry 1952; Ouyang et al. 2022
for language models).

    score(answer)   = log p("Yes") - log p("No") after the answer and a fixed question about it
    P(B is better)  = sigmoid(score(B) - score(A)),  preference = 2 P - 1
    loss            = mean over pairs of -log sigmoid(score(chosen) - score(rejected))

The difference of two logprobs at one position is the difference of two logits: a linear function of
the last hidden state, without bounds, exact also where the model is sure. So no head has to be
added to the model, a new adapter already knows what the words mean, and a checkpoint is an ordinary
one. Ties say nothing about an order and are left out of training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planish import SamplingClient, TrainingClient
from planish.preference.choices import Choice
from planish.preference.datasets import pairs_of
from planish.preference.types import Comparison, LabeledComparison, Messages
from planish.processes.interruption import at_once
from planish.renderers import Renderer
from planish.supervised.objective import Metrics
from planish.supervised.types import Batch
from planish.types import Datum

QUESTION = "Is this a good answer? Say Yes or No."
WEIGHTS = (1.0, -1.0)
"""Of the logprobs of Yes and No in a score."""
MEASURES = ("bradley_terry_loss", "accuracy", "score_margin")


def score_conversation(prompt: Messages, answer: Messages, question: str) -> list[Any]:
    """What Yes or No is the answer to."""
    return [*prompt, *answer, {"role": "user", "content": question}]


def score_choice(renderer: Renderer) -> Choice:
    return Choice.between(("Yes", "No"), renderer)


def comparison_to_score_data(
    labeled: LabeledComparison,
    choice: Choice,
    question: str = QUESTION,
    max_length: int | None = None,
) -> Batch:
    """Chosen and rejected; none, and left_out = 1, if one of them has more tokens than
    `max_length`. No ties.
    """
    assert labeled.ranked is not None
    prompt = labeled.comparison.prompt_conversation
    data = [
        choice.datum(score_conversation(prompt, answer, question), WEIGHTS)
        for answer in labeled.ranked
    ]
    if max_length is not None and any(datum.model_input.length > max_length for datum in data):
        return Batch(left_out=1)
    return Batch(data)


def bradley_terry_loss(
    data: Sequence[Datum], logprobs_D: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Metrics]:
    """A custom loss of chosen and rejected alternately; the loss and its measures."""
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
class BradleyTerry:
    """The part of a supervised objective that is learned from."""

    async def submit(
        self, training_client: TrainingClient, data: Sequence[Datum]
    ) -> "BradleyTerryGradient":
        pending = await training_client.forward_backward_custom_async(data, bradley_terry_loss)
        return BradleyTerryGradient(len(pairs_of(data)), pending)


@dataclass(frozen=True)
class BradleyTerryGradient:
    num_pairs: int
    pending: Any

    async def metrics(self) -> Metrics:
        output = await self.pending
        found = {name: output.metrics[name] for name in MEASURES}
        served = {
            f"optim/{name}": value for name, value in output.metrics.items() if name not in MEASURES
        }
        return {"num_pairs": self.num_pairs, **found, **served}


@dataclass(frozen=True)
class BradleyTerryPreferenceModel:
    """Two requests a comparison, one a score. Swapping the answers changes the sign and nothing
    else.
    """

    sampling_client: SamplingClient
    choice: Choice
    """`score_choice` of the renderer that it was trained with."""
    question: str = QUESTION
    temperature: float = 1.0
    """By which differences of scores are divided: fitted on comparisons that were not trained on.
    """

    async def __call__(self, comparison: Comparison) -> float:
        return self.preference_between(*await self._scores(comparison))

    def preference_between(self, score_a: float, score_b: float) -> float:
        return math.tanh((score_b - score_a) / (2 * self.temperature))

    async def log_odds(self, comparison: Comparison) -> float:
        """Of B over A, before the temperature."""
        a, b = await self._scores(comparison)
        return b - a

    async def score(self, prompt: Messages, answer: Messages) -> float:
        """Of one answer. Only differences between answers to one prompt were learned."""
        yes, no = await self.choice.logprobs(
            self.sampling_client, score_conversation(prompt, answer, self.question)
        )
        return yes - no

    async def _scores(self, comparison: Comparison) -> list[float]:
        prompt = comparison.prompt_conversation
        return await at_once(
            self.score(prompt, each) for each in (comparison.completion_A, comparison.completion_B)
        )
