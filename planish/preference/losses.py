"""What a pair of answers costs: leaves that know neither a model nor a loop.

Each loss is two things: a reward of an answer, computed from its logprob, and a cost of the margin
between the rewards of the chosen and the rejected answer. Shapes: _A answers, _P pairs.

    dpo     reward = beta * (log p - log p_reference)    cost = -log sigmoid(margin)
            Rafailov et al. 2023, eq. 7
    ipo     the same                                     cost = ((margin - 1/2) / beta)^2       Azar
            et al. 2023, eq. 17
    simpo   reward = beta * log p / tokens               cost = -log sigmoid(margin - gamma)    Meng
            et al. 2024, eq. 6

log p is that of the whole answer, its end mark included. IPO is often written with h, the
difference of the log ratios, as (h - 1 / (2 beta))^2, and beta as tau; h is margin / beta. A label
that is wrong with probability `label_smoothing` costs DPO -(1 - label_smoothing) log
sigmoid(margin) - label_smoothing log sigmoid(-margin) (conservative DPO, Mitchell 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch.nn.functional import logsigmoid

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Answers:
    """What the losses know of answers."""

    logprobs_A: Tensor
    """Of whole answers, by the policy."""
    reference_A: Tensor | None
    """The same by the reference; None for a loss that needs none."""
    tokens_A: Tensor


class PairLoss(Protocol):
    needs_reference: ClassVar[bool]

    def rewards(self, answers: Answers) -> Tensor:
        """One for each answer."""
        ...

    def costs(self, margins_P: Tensor) -> Tensor:
        """One for each pair, of the chosen answer's reward minus the rejected one's."""
        ...


@dataclass(frozen=True)
class DPOLoss:
    needs_reference: ClassVar[bool] = True
    beta: float
    label_smoothing: float = 0.0

    def rewards(self, answers: Answers) -> Tensor:
        return implicit_rewards(answers, self.beta)

    def costs(self, margins_P: Tensor) -> Tensor:
        wrong = self.label_smoothing
        return -(1 - wrong) * logsigmoid(margins_P) - wrong * logsigmoid(-margins_P)


@dataclass(frozen=True)
class IPOLoss:
    """Its cost is least at a margin of 1/2, so pairs that are told apart already are left alone."""

    needs_reference: ClassVar[bool] = True
    beta: float

    def rewards(self, answers: Answers) -> Tensor:
        return implicit_rewards(answers, self.beta)

    def costs(self, margins_P: Tensor) -> Tensor:
        return ((margins_P - 0.5) / self.beta).square()


@dataclass(frozen=True)
class SimPOLoss:
    """The reward is the mean logprob of a token, so a long answer is not worth less for its length,
    and no reference is asked.
    """

    needs_reference: ClassVar[bool] = False
    beta: float
    gamma: float
    """The margin that is aimed at."""

    def rewards(self, answers: Answers) -> Tensor:
        return self.beta * answers.logprobs_A / answers.tokens_A

    def costs(self, margins_P: Tensor) -> Tensor:
        return -logsigmoid(margins_P - self.gamma)


def implicit_rewards(answers: Answers, beta: float) -> Tensor:
    """That of which the policy is the best one at a price of beta for each nat of KL from the
    reference.
    """
    assert answers.reference_A is not None
    return beta * (answers.logprobs_A - answers.reference_A)
