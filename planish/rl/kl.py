"""Estimates of the KL divergence between policies on sampled tokens, and advantage terms that
reduce it.

Legend: D sequences, N tokens of a sequence. For a sampled token, q is its logprob under the policy
that sampled it, and l its logprob under the other policy. v1 = mean(q - l) is an unbiased estimate
of KL(sampler || other) and can be negative; v2 = mean((q - l)^2) / 2 is biased but has little
variance (Schulman, "Approximating KL divergence", 2020).

An `AdvantageShaping` adds coefficient * (baseline - (q - l)) to the advantage of each trained
token. So tokens that are likelier under the other policy become likelier. The term differs from
token to token, so it is added after rewards are compared within their groups. The KL penalty of a
run uses one reference model; on-policy distillation (planish/distillation) uses teachers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from planish.processes.interruption import gather_or_cancel
from planish.rl.data_processing import TrainingSequence
from planish.rl.types import Metrics
from planish.types import ForwardBackwardOutput


class AdvantageShaping(Protocol):
    """Changes the advantages of a batch, depending on the logprobs of its tokens under other
    policies.
    """

    timing_name: ClassVar[str]
    """Name under which its duration is reported."""

    async def __call__(
        self, data_D: Sequence[TrainingSequence]
    ) -> tuple[list[TrainingSequence], Metrics]:
        """Return the same data with changed advantages, and metrics."""
        ...


@dataclass(frozen=True)
class KLPenalty:
    """Keeps the policy near a reference model. The baseline is the mean of q - l over the batch, so
    the penalty adds 0 on average.
    """

    reference: Any
    """A sampling client of the reference model."""
    coefficient: float
    discount: float
    timing_name: ClassVar[str] = "kl_vs_base"

    async def __call__(
        self, data_D: Sequence[TrainingSequence]
    ) -> tuple[list[TrainingSequence], Metrics]:
        """Return the sequences with changed advantages, and the metric kl_policy_base, the mean of
        q - l. Without trained tokens, nothing changes and there are no metrics.
        """
        log_ratios_D = await log_ratios(data_D, lambda sequence: self.reference)
        mean = mean_log_ratio(data_D, log_ratios_D)
        if mean is None:
            return list(data_D), {}
        shaped_D = [
            add_kl_term(sequence, log_ratio_N, self.coefficient, self.discount, baseline=mean)
            for sequence, log_ratio_N in zip(data_D, log_ratios_D, strict=True)
        ]
        return shaped_D, {"kl_policy_base": mean}


def kl_metrics(
    name: str, data_D: Sequence[TrainingSequence], outputs_D: Sequence[ForwardBackwardOutput]
) -> Metrics:
    """Return {name}_v1 and {name}_v2 between the sampler's logprobs and those in `outputs_D`; {}
    without sequences.
    """
    trainer_logprobs_D = [
        tensors["logprobs"].to_numpy() for output in outputs_D for tensors in output.loss_fn_outputs
    ]
    log_ratios_D = [
        (sequence.logprobs_N[1:] - trainer_logprobs)[sequence.mask_N[1:] > 0]
        for sequence, trainer_logprobs in zip(data_D, trainer_logprobs_D, strict=True)
    ]
    if not log_ratios_D:
        return {}
    log_ratio = np.concatenate(log_ratios_D).astype(np.float64)
    return {
        f"{name}_v1": float(log_ratio.mean()),
        f"{name}_v2": float(0.5 * np.square(log_ratio).mean()),
    }


async def log_ratios(
    data_D: Sequence[TrainingSequence], client_for: Callable[[TrainingSequence], Any]
) -> list[np.ndarray]:
    """Return (q - l) * mask, [D][N]. l is the logprob at temperature 1 under the sampling client
    that `client_for` returns for a sequence.
    """

    async def log_ratio(sequence: TrainingSequence) -> np.ndarray:
        # The mask is 0 before the first trained token, so earlier logprobs are not needed.
        num_scored = len(sequence.mask_N) - int(np.argmax(sequence.mask_N > 0))
        scores = await client_for(sequence).compute_logprobs_async(
            sequence.model_input, prompt_logprobs_last_n=num_scored
        )
        other_logprobs_N = np.array(
            [0.0 if score is None else score for score in scores], np.float32
        )
        return (sequence.logprobs_N - other_logprobs_N) * sequence.mask_N

    return await gather_or_cancel(log_ratio(sequence) for sequence in data_D)


def mean_log_ratio(
    data_D: Sequence[TrainingSequence], log_ratios_D: Sequence[np.ndarray]
) -> float | None:
    """Return the mean of `log_ratios_D`, the result of `log_ratios`, over trained tokens;
    None without trained tokens.
    """
    num_tokens = sum(float(sequence.mask_N.sum()) for sequence in data_D)
    return (
        sum(float(log_ratio_N.sum()) for log_ratio_N in log_ratios_D) / num_tokens
        if num_tokens
        else None
    )


def add_kl_term(
    sequence: TrainingSequence,
    log_ratio_N: np.ndarray,
    coefficient: float,
    discount: float,
    *,
    baseline: float = 0.0,
) -> TrainingSequence:
    """Return the sequence with advantage += coefficient * mask * (baseline - log_ratio_N).

    `log_ratio_N` is the result of `log_ratios` for the sequence.

    With `discount` > 0, the term of a token becomes the discounted sum of its own term and the
    terms of all later tokens.
    """
    term_N = coefficient * sequence.mask_N * (baseline - log_ratio_N)
    if discount > 0:
        term_N = discounted_sums(term_N, discount) * sequence.mask_N
    return sequence.with_advantages(sequence.advantages_N + term_N)


def discounted_sums(values_N: np.ndarray, discount: float) -> np.ndarray:
    """Return out with out[i] = sum over j >= i of discount^(j - i) values[j]."""
    sums_N = np.zeros_like(values_N, dtype=np.float64)
    discounted_sum = 0.0
    for index in range(len(values_N) - 1, -1, -1):
        discounted_sum = float(values_N[index]) + discount * discounted_sum
        sums_N[index] = discounted_sum
    return sums_N
