"""Distances between policies, estimated on the tokens that were sampled.

Legend: D sequences, N tokens of a sequence. For a sampled token, q is its logprob under the policy that sampled it and l that
under the other one. v1 = mean(q - l) is unbiased for KL(sampler || other) and may be negative in a sample; v2 = mean((q -
l)^2) / 2 has a bias but little variance (Schulman, "Approximating KL divergence", 2020).
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from planish.interruption import first_error
from planish.rl.data_processing import TrainingSequence
from planish.rl.types import Metrics
from planish.types import ForwardBackwardOutput, ModelInput


def kl_metrics(name: str, data_D: Sequence[TrainingSequence], outputs_D: Sequence[ForwardBackwardOutput]) -> Metrics:
    """{name}_v1 and {name}_v2 of the sampler against the logprobs that the trainer answered; {} without tokens."""
    trained_D = [tensors["logprobs"].to_numpy() for output in outputs_D for tensors in output.loss_fn_outputs]
    gaps = [
        (sequence.logprobs_N[1:] - trained)[sequence.mask_N[1:] > 0]
        for sequence, trained in zip(data_D, trained_D, strict=True)
    ]
    if not gaps:
        return {}
    gap = np.concatenate(gaps).astype(np.float64)
    return {f"{name}_v1": float(gap.mean()), f"{name}_v2": float(0.5 * np.square(gap).mean())}


async def reference_gaps(data_D: Sequence[TrainingSequence], reference: Any) -> list[np.ndarray]:
    """d = (q - l) * mask, [D][N], with l of a reference policy's sampling client at temperature 1."""

    async def gap(sequence: TrainingSequence) -> np.ndarray:
        scores = await reference.compute_logprobs_async(ModelInput.from_ints(sequence.tokens_N))
        reference_N = np.array([0.0, *scores[1:]], np.float64)  # nothing is said of the first token
        return (sequence.logprobs_N - reference_N) * sequence.mask_N

    with first_error():
        async with asyncio.TaskGroup() as tasks:
            gaps_D = [tasks.create_task(gap(sequence)) for sequence in data_D]
    return [gap.result() for gap in gaps_D]


def penalised(
    data_D: Sequence[TrainingSequence], gaps_D: Sequence[np.ndarray], coefficient: float, discount: float
) -> tuple[list[TrainingSequence], Metrics]:
    """Data whose advantages pull the policy to the reference, and kl_policy_base, the mean of d over trained tokens.

    advantage += coefficient * mask * (mean(d) - d), which adds nothing on average. With `discount` > 0 the term of a token is
    replaced by the discounted sum of those from it on, over the sequence's trained tokens.
    """
    tokens = sum(float(sequence.mask_N.sum()) for sequence in data_D)
    if tokens == 0:
        return list(data_D), {}
    mean = sum(float(gap_N.sum()) for gap_N in gaps_D) / tokens
    penalised_D = []
    for sequence, gap_N in zip(data_D, gaps_D, strict=True):
        term_N = coefficient * sequence.mask_N * (mean - gap_N)
        if discount > 0:
            term_N = discounted_sums(term_N, discount) * sequence.mask_N
        penalised_D.append(sequence.with_advantages(sequence.advantages_N + term_N))
    return penalised_D, {"kl_policy_base": mean}


def discounted_sums(values_N: np.ndarray, discount: float) -> np.ndarray:
    """out[i] = sum over j >= i of discount^(j - i) values[j]."""
    sums_N = np.zeros_like(values_N, dtype=np.float64)
    running = 0.0
    for index in range(len(values_N) - 1, -1, -1):
        running = float(values_N[index]) + discount * running
        sums_N[index] = running
    return sums_N
