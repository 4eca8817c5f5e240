"""Losses on pairs of answers. They depend on neither a model nor a training loop.

Each loss has two parts. A reward is computed from the logprob of an answer. A cost is computed from
the margin: the reward of the chosen answer minus that of the rejected one. Shape suffixes: _A
answers, _P pairs.

    dpo     reward = beta * (log p - log p_reference)    cost = -log sigmoid(margin)
            Rafailov et al. 2023, eq. 7
    ipo     the same reward                              cost = ((margin - 1/2) / beta)^2
            Azar et al. 2023, eq. 17
    simpo   reward = beta * log p / tokens               cost = -log sigmoid(margin - gamma)
            Meng et al. 2024, eq. 6

log p is the logprob of the whole answer, including its end-of-message token. IPO is often written
as (h - 1 / (2 beta))^2, or with tau for beta, where h is the difference of the log ratios. Here h =
margin / beta.

Conservative DPO (Mitchell 2023) assumes that a label is wrong with probability `label_smoothing`:

    cost = -(1 - label_smoothing) log sigmoid(margin) - label_smoothing log sigmoid(-margin)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch.nn.functional import logsigmoid

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AnswerLogprobs:
    """The inputs of the losses."""

    logprobs_A: Tensor
    """The policy's logprob of each whole answer, in nats."""
    reference_logprobs_A: Tensor | None
    """The reference model's logprobs; None for a loss without a reference."""
    num_tokens_A: Tensor
    """The number of tokens of each answer."""


class PairLoss(Protocol):
    """A loss on pairs of answers."""

    needs_reference: ClassVar[bool]

    def rewards(self, answers: AnswerLogprobs) -> Tensor:
        """Return the reward of each answer, shape (A,)."""
        ...

    def losses(self, margins_P: Tensor) -> Tensor:
        """Return the cost of each pair, shape (P,).

        `margins_P` are the rewards of the chosen answers minus those of the rejected ones.
        """
        ...


@dataclass(frozen=True)
class DPOLoss:
    """Direct preference optimization, with optional label smoothing."""

    needs_reference: ClassVar[bool] = True
    beta: float
    label_smoothing: float = 0.0

    def rewards(self, answers: AnswerLogprobs) -> Tensor:
        return implicit_rewards(answers, self.beta)

    def losses(self, margins_P: Tensor) -> Tensor:
        smoothing = self.label_smoothing
        return -(1 - smoothing) * logsigmoid(margins_P) - smoothing * logsigmoid(-margins_P)


@dataclass(frozen=True)
class IPOLoss:
    """Identity preference optimization.

    The cost is minimal at a margin of 1/2, so pairs that reach it are not pushed further apart.
    """

    needs_reference: ClassVar[bool] = True
    beta: float

    def rewards(self, answers: AnswerLogprobs) -> Tensor:
        return implicit_rewards(answers, self.beta)

    def losses(self, margins_P: Tensor) -> Tensor:
        return ((margins_P - 0.5) / self.beta).square()


@dataclass(frozen=True)
class SimPOLoss:
    """Simple preference optimization, which uses no reference model.

    The reward is beta times the mean logprob per token, so long answers are not penalised.
    """

    needs_reference: ClassVar[bool] = False
    beta: float
    gamma: float
    """The target margin."""

    def rewards(self, answers: AnswerLogprobs) -> Tensor:
        return self.beta * answers.logprobs_A / answers.num_tokens_A

    def losses(self, margins_P: Tensor) -> Tensor:
        return -logsigmoid(margins_P - self.gamma)


def implicit_rewards(answers: AnswerLogprobs, beta: float) -> Tensor:
    """Return beta times the log ratio of policy and reference, shape (A,).

    The policy maximises this reward minus beta times the KL divergence from the reference.
    """
    assert answers.reference_logprobs_A is not None
    return beta * (answers.logprobs_A - answers.reference_logprobs_A)
