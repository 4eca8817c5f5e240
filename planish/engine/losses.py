"""The losses: each a pure function of (logprobs of the targets, the datum's tensors, config),
registered in `LOSSES`.

A loss is the SUM over the positions of one datum; nothing is averaged, so a call's loss and
gradient do not depend on how its datums are split. Position i of the model input predicts target i.
Throughout:

    l  logprob of the target under the trained model, at the config's `temperature` (logits are
       divided by it)
    q  `logprobs`, that of the policy which sampled the target        r = exp(l - q)
    A  `advantages`                                                   sg = stop-gradient

Formulas are those that the public API documents; where it leaves a default open, the docstring says
that the choice is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from planish.errors import UnsupportedError, UserError
from planish.service import SUBSTITUTE_REMEDY

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


@dataclass(frozen=True)
class Loss:
    """What a loss computes and what it takes."""

    fn: Callable[[Tensor, Inputs, Config], Tensor]
    """(l float32 [N] or [N, K], inputs of the same shape, complete config) -> scalar."""
    required: tuple[str, ...]
    """Names of `loss_fn_inputs`, besides target_tokens."""
    optional: tuple[str, ...] = ()
    many_targets: bool = False
    """Whether target_tokens may be [N, K]."""

    @property
    def has_ratio(self) -> bool:
        return "logprobs" in self.required


def cross_entropy(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """-sum w l. Weights `w` of any sign; without weights all are 1 (our choice). With targets [N,
    K], K candidates a position.

    Linear in w, so that w = -dL/dl gives the gradient of any other loss L of the logprobs.
    """
    weights = inputs.get("weights")
    return -(logprobs.sum() if weights is None else (weights * logprobs).sum())


def importance_sampling(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """-sum r A: the policy gradient with the importance weight of the sampled token."""
    return -_ratio_times(logprobs - inputs["logprobs"], inputs["advantages"]).sum()


def ppo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """-sum min(r A, clip(r, low, high) A) (Schulman et al. 2017); low and high bound the ratio
    itself.
    """
    return -_clipped(logprobs - inputs["logprobs"], inputs["advantages"], config).sum()


def cispo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """-sum sg(clip(r, low, high)) l A (MiniMax 2025): the weight is clipped, the gradient never cut
    off.
    """
    weight = torch.exp(logprobs.detach() - inputs["logprobs"]).clamp(
        config["clip_low_threshold"], config["clip_high_threshold"]
    )
    return -(weight * logprobs * inputs["advantages"]).sum()


def gspo(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """-sum min(ratio A, clip(ratio, low, high) A) with one ratio a sequence (Zheng et al. 2025).

    s = mean of sg(l) - q over `sequence_ratio_mask` != 0, and ratio = exp(s + l - sg(l)) at each
    position. Ours: the clipping bounds 0.8 and 1.2, and a missing mask is `advantages != 0`. An
    empty mask gives s = 0.
    """
    advantages = inputs["advantages"]
    mask = inputs.get("sequence_ratio_mask", advantages) != 0
    gap = (logprobs.detach() - inputs["logprobs"])[mask]
    sequence = gap.sum() / max(1, gap.numel())
    return -_clipped(sequence + logprobs - logprobs.detach(), advantages, config).sum()


def dro(logprobs: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """-sum m (l A - beta / 2 (l - q)^2) (Richemond et al. 2024). Ours: beta is 0.1, and `mask` m, 1
    if it is not given.

    The mask is needed wherever some positions were not sampled: an advantage of 0 does not take
    their square out of the sum.
    """
    gap = logprobs - inputs["logprobs"]
    terms = logprobs * inputs["advantages"] - 0.5 * config["beta"] * gap.square()
    return -(terms * inputs["mask"] if "mask" in inputs else terms).sum()


_LARGEST_GAP = 88.0
"""exp of a larger log-ratio may overflow float32 (from 88.73 on)."""


def _ratio_times(gap: Tensor, advantages: Tensor) -> Tensor:
    """exp(gap) A for each position; finite, with a finite gradient, wherever float32 holds it."""
    # A log-ratio counts for nothing where A is 0, and must not make 0 times infinity.
    gap = gap.masked_fill(advantages == 0, 0.0)
    product = torch.exp(gap.clamp(max=_LARGEST_GAP)) * advantages
    overflows = gap > _LARGEST_GAP
    if not bool(overflows.any()):
        return product
    # exp(gap) overflows alone, but not times a small advantage.
    log_size = torch.where(overflows, gap + advantages.abs().log(), 0.0)
    return torch.where(overflows, torch.exp(log_size) * advantages.sign(), product)


def _clipped(gap: Tensor, advantages: Tensor, config: Config) -> Tensor:
    """min(r A, clip(r, low, high) A) for each position, with r = exp(gap)."""
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    # With A > 0 the clipped ratio counts from `high` on. The log-ratio stops a little later:
    # exp would overflow, and a gradient of 0 times infinity is NaN.
    bound = min(math.log(high) + 1, _LARGEST_GAP)
    gap = torch.where(advantages > 0, gap.clamp(max=bound), gap)
    clipped = torch.exp(gap.clamp(max=_LARGEST_GAP)).clamp(low, high)
    return torch.minimum(_ratio_times(gap, advantages), clipped * advantages)


_SAMPLED = ("logprobs", "advantages")


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, (), ("weights",), many_targets=True),
    "importance_sampling": Loss(importance_sampling, _SAMPLED),
    "ppo": Loss(ppo, _SAMPLED),
    "cispo": Loss(cispo, _SAMPLED),
    "gspo": Loss(gspo, _SAMPLED, ("sequence_ratio_mask",)),
    "dro": Loss(dro, _SAMPLED, ("mask",)),
}

# Losses of the public API that planish does not serve, and what to use instead.
_REFUSED = {
    "stable_reinforce": f"its formula is not public; {SUBSTITUTE_REMEDY}",
    "custom": "losses traced on a server are not offered; use forward_backward_custom(data, fn)",
}


def find_loss(name: str) -> Loss:
    """The loss of this name; UnsupportedError for one that exists elsewhere, UserError for an
    unknown one.
    """
    if not isinstance(name, str):
        raise UserError(f"loss_fn is a {type(name).__name__}; give str")
    if name in LOSSES:
        return LOSSES[name]
    if name in _REFUSED:
        raise UnsupportedError(f"loss_fn={name!r} is not supported: {_REFUSED[name]}")
    raise UserError(
        f"loss_fn={name!r} is unknown; planish has {', '.join(LOSSES)}, and forward_backward_custom for any other"
    )
