"""Soft targets: a teacher's distribution over its K likeliest tokens at each position, instead of
one target token.

Legend: D datums, N positions of a datum, K candidates.

    p_j = exp(log p_teacher(j)) / sum over the K candidates         loss = -sum over positions and
        candidates of w p_j log p_student(j)

w is the weight of the position. If K is the size of the vocabulary, the loss is the cross entropy
between teacher and student. A smaller K cuts off the tail of the distribution, and the candidates'
probabilities are scaled to sum to 1. `topk_mass` is their sum before scaling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from planish.processes.interruption import gather_or_cancel
from planish.types import Datum, ModelInput, SamplingParams, TopkLogprobs


@dataclass(frozen=True)
class SoftTargetData:
    """Datums with targets and weights of shape (N, K), and statistics of the teacher's
    distributions. `entropy_sum` and `topk_mass` are sums over positions, weighted by w.
    """

    data: list[Datum]
    weight: float
    """The sum of w over positions."""
    entropy_sum: float
    """The entropy of the scaled distributions, in nats."""
    topk_mass: float
    """The teacher's total probability of the candidates."""

    @classmethod
    def concatenate(cls, batches: Sequence[Self]) -> Self:
        """Return all datums with the summed statistics."""
        data = [datum for batch in batches for datum in batch.data]
        return cls(
            data,
            *(
                sum(getattr(batch, name) for batch in batches)
                for name in ("weight", "entropy_sum", "topk_mass")
            ),
        )

    def metrics(self, cross_entropy: float | None, prefix: str = "") -> dict[str, float]:
        """Return teacher_kl, teacher_entropy (in nats) and teacher_topk_mass, per unit of weight.

        `cross_entropy` is the loss per unit of weight. With None, nothing was learned, and there
        are no metrics.
        """
        if cross_entropy is None:
            return {}
        entropy = self.entropy_sum / self.weight
        return {
            f"{prefix}teacher_kl": cross_entropy - entropy,
            f"{prefix}teacher_entropy": entropy,
            f"{prefix}teacher_topk_mass": self.topk_mass / self.weight,
        }


async def soft_targets(
    data_D: Sequence[Datum], teacher: Any, topk: int, num_ids: int | None = None
) -> SoftTargetData:
    """Return the datums with the teacher's distributions as targets; all requests run at once.
    `num_ids` is the student's number of token ids (`soft_datum`).
    """

    async def add_soft_targets(datum: Datum) -> SoftTargetData:
        weights_N = datum.loss_fn_inputs["weights"].to_numpy()
        tokens = [
            *datum.model_input.to_ints(),
            int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1]),
        ]
        response = await teacher.sample_async(
            prompt=ModelInput.from_ints(tokens),
            num_samples=1,
            sampling_params=SamplingParams(max_tokens=1),
            topk_prompt_logprobs=topk,
            prompt_logprobs_last_n=len(weights_N) - int(np.argmax(weights_N != 0)),
        )
        return soft_datum(datum, response.topk_prompt_logprobs_np, num_ids)

    return SoftTargetData.concatenate(
        await gather_or_cancel(add_soft_targets(datum) for datum in data_D)
    )


def soft_datum(
    datum: Datum, topk_logprobs: TopkLogprobs, num_ids: int | None = None
) -> SoftTargetData:
    """Return one datum with the teacher's distributions as targets.

    `datum` has targets and weights of shape (N). Row i of `topk_logprobs` has the K likeliest
    tokens at position i of the whole sequence of N + 1 tokens. Tokens with ids of `num_ids` or more
    are left out, because the student has no such ids (None = it has all). A position at which no
    token is left is not learned.
    """
    targets_N = datum.loss_fn_inputs["target_tokens"].to_numpy()
    weights_N = datum.loss_fn_inputs["weights"].to_numpy()
    ids_NK = topk_logprobs.token_ids[1:]
    is_known_NK = np.ones(ids_NK.shape, bool) if num_ids is None else ids_NK < num_ids
    is_learned = (weights_N != 0) & is_known_NK.any(axis=1)
    ids_LK, is_known_LK = ids_NK[is_learned], is_known_NK[is_learned]
    logprobs_LK = topk_logprobs.logprobs[1:][is_learned].astype(np.float64)
    masses_L = np.where(is_known_LK, np.exp(logprobs_LK), 0.0).sum(axis=1)
    normalized_logprobs_LK = logprobs_LK - np.log(masses_L)[:, None]
    probabilities_LK = np.where(is_known_LK, np.exp(normalized_logprobs_LK), 0.0)
    targets_NK = np.repeat(targets_N[:, None], ids_NK.shape[1], axis=1).astype(np.int64)
    weights_NK = np.zeros(targets_NK.shape, np.float32)
    targets_NK[is_learned] = np.where(is_known_LK, ids_LK, targets_NK[is_learned])
    weights_NK[is_learned] = probabilities_LK * weights_N[is_learned][:, None]
    entropies_L = -(probabilities_LK * normalized_logprobs_LK).sum(axis=1)
    return SoftTargetData(
        [Datum(datum.model_input, {"target_tokens": targets_NK, "weights": weights_NK})],
        weight=float(weights_N[is_learned].sum()),
        entropy_sum=float(np.dot(weights_N[is_learned], entropies_L)),
        topk_mass=float(np.dot(weights_N[is_learned], masses_L)),
    )
