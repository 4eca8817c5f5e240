"""The losses, registered by name in `LOSSES`.

Each loss is a pure function of the logprobs of the targets, the datum's tensors and the config. A
loss is the SUM over the positions of one datum, not a mean. So the loss and gradient of a call do
not depend on how its datums are split into micro-batches. Position i of the model input predicts
target i.

The docstrings use these symbols:

    l  logprob of the target under the trained model, at the config's `temperature` (logits are
       divided by it)
    q  `logprobs`: logprob under the policy that sampled the target   r = exp(l - q)
    A  `advantages`                                                   sg = stop-gradient

The formulas are those of the public API's documentation. If the API leaves a default open, the
docstring calls the default "our choice".
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planish.errors import UnsupportedError, UserError
from planish.service import SUBSTITUTE_REMEDY

LossInputs = Mapping[str, Tensor]
"""The `loss_fn_inputs` of one datum by name, except target_tokens."""
LossConfig = Mapping[str, float]
"""The options of a loss by name, including the defaults."""


@dataclass(frozen=True)
class Loss:
    """A loss function and the inputs that it accepts."""

    fn: Callable[[Tensor, LossInputs, LossConfig], Tensor]
    """The loss function: (l float32 [N] or [N, K], inputs of the same shape, complete config) ->
    scalar.
    """
    required_inputs: tuple[str, ...]
    """Names of the required `loss_fn_inputs`, in addition to target_tokens."""
    optional_inputs: tuple[str, ...] = ()
    """Names of the optional `loss_fn_inputs`."""
    allows_multiple_targets: bool = False
    """Whether target_tokens may be [N, K]."""
    mask_inputs: tuple[str, ...] = ()
    """Names of the inputs that decide which positions contribute to the loss: those where at least
    one of these inputs is nonzero. If the first of them is missing, every position contributes.
    """

    def contributing_mask(
        self, inputs: Mapping[str, np.ndarray], shape: tuple[int, ...]
    ) -> np.ndarray:
        """Return whether the loss depends on the logprob of each target: bool [N] or [N, K]."""
        if self.mask_inputs[0] not in inputs:
            return np.ones(shape, dtype=bool)
        nonzero = [inputs[name] != 0 for name in self.mask_inputs if name in inputs]
        return np.logical_or.reduce(nonzero)

    @property
    def has_ratio(self) -> bool:
        """Whether the loss uses the importance ratio r."""
        return "logprobs" in self.required_inputs


def cross_entropy(logprobs: Tensor, inputs: LossInputs, config: LossConfig) -> Tensor:
    """Return -sum w l.

    The weights `w` may have any sign. Missing weights mean 1 everywhere (our choice). Targets [N,
    K] are K candidates per position. The gradient with respect to l is -w. So this loss can stand
    for any loss L of the logprobs: the weights w = -dL/dl give the gradient of L.
    """
    weights = inputs.get("weights")
    return -(logprobs.sum() if weights is None else (weights * logprobs).sum())


def importance_sampling(logprobs: Tensor, inputs: LossInputs, config: LossConfig) -> Tensor:
    """Return -sum r A, the policy gradient with the importance weight of the sampled token."""
    return -_ratio_times_advantages(logprobs - inputs["logprobs"], inputs["advantages"]).sum()


def ppo(logprobs: Tensor, inputs: LossInputs, config: LossConfig) -> Tensor:
    """Return -sum min(r A, clip(r, low, high) A) (Schulman et al. 2017).

    `low` and `high` bound the ratio itself, not its distance from 1.
    """
    return -_clipped_objective(logprobs - inputs["logprobs"], inputs["advantages"], config).sum()


def cispo(logprobs: Tensor, inputs: LossInputs, config: LossConfig) -> Tensor:
    """Return -sum sg(clip(r, low, high)) l A (MiniMax 2025).

    Only the weight is clipped, so every token keeps a gradient.
    """
    weight = torch.exp(logprobs.detach() - inputs["logprobs"]).clamp(
        config["clip_low_threshold"], config["clip_high_threshold"]
    )
    return -(weight * logprobs * inputs["advantages"]).sum()


def gspo(logprobs: Tensor, inputs: LossInputs, config: LossConfig) -> Tensor:
    """Return -sum min(ratio A, clip(ratio, low, high) A), with one ratio per sequence (Zheng et al.
    2025).

    s is the mean of sg(l) - q over `sequence_ratio_mask` != 0. The ratio at each position is exp(s
    + l - sg(l)). An empty mask gives s = 0. Our choices: the clipping bounds are 0.8 and 1.2, and a
    missing mask means `advantages != 0`.
    """
    advantages = inputs["advantages"]
    mask = inputs.get("sequence_ratio_mask", advantages) != 0
    log_ratio = (logprobs.detach() - inputs["logprobs"])[mask]
    mean_log_ratio = log_ratio.sum() / max(1, log_ratio.numel())
    return -_clipped_objective(
        mean_log_ratio + logprobs - logprobs.detach(), advantages, config
    ).sum()


def dro(logprobs: Tensor, inputs: LossInputs, config: LossConfig) -> Tensor:
    """Return -sum m (l A - beta / 2 (l - q)^2) (Richemond et al. 2024).

    m is `mask`. Our choices: beta is 0.1 by default, and a missing mask is 1 everywhere. The mask
    is necessary if some positions were not sampled, because an advantage of 0 does not remove
    their squared term from the sum.
    """
    log_ratio = logprobs - inputs["logprobs"]
    mask = inputs.get("mask")
    if mask is not None:
        # Programs mark positions without a logprob by a value such as -1e20. Its square overflows
        # float32, and 0 times infinity is NaN.
        log_ratio = log_ratio.masked_fill(mask == 0, 0.0)
    terms = logprobs * inputs["advantages"] - 0.5 * config["beta"] * log_ratio.square()
    return -(terms if mask is None else terms * mask).sum()


_MAX_LOG_RATIO = 88.0
"""Largest log-ratio whose exp is computed directly: exp overflows float32 from 88.73 on."""


def _ratio_times_advantages(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return exp(log_ratio) A for each position.

    The result and its gradient are finite wherever float32 can represent the result.
    """
    # The log-ratio has no effect if A is 0; reset it, because 0 times infinity is NaN.
    log_ratio = log_ratio.masked_fill(advantages == 0, 0.0)
    product = torch.exp(log_ratio.clamp(max=_MAX_LOG_RATIO)) * advantages
    overflows = log_ratio > _MAX_LOG_RATIO
    if not bool(overflows.any()):
        return product
    # exp(log_ratio) alone overflows, but its product with a small advantage may not.
    log_magnitude = torch.where(overflows, log_ratio + advantages.abs().log(), 0.0)
    return torch.where(overflows, torch.exp(log_magnitude) * advantages.sign(), product)


def _clipped_objective(log_ratio: Tensor, advantages: Tensor, config: LossConfig) -> Tensor:
    """Return min(r A, clip(r, low, high) A) for each position, with r = exp(log_ratio)."""
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    # With A > 0, the min uses the clipped ratio once r exceeds `high`. So limit the log-ratio a
    # little above log(high): otherwise exp could overflow, and a gradient of 0 times infinity is
    # NaN.
    bound = min(math.log(high) + 1, _MAX_LOG_RATIO)
    log_ratio = torch.where(advantages > 0, log_ratio.clamp(max=bound), log_ratio)
    clipped = torch.exp(log_ratio.clamp(max=_MAX_LOG_RATIO)).clamp(low, high)
    return torch.minimum(_ratio_times_advantages(log_ratio, advantages), clipped * advantages)


_POLICY_GRADIENT_INPUTS = ("logprobs", "advantages")


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(
        cross_entropy, (), ("weights",), allows_multiple_targets=True, mask_inputs=("weights",)
    ),
    "importance_sampling": Loss(
        importance_sampling, _POLICY_GRADIENT_INPUTS, mask_inputs=("advantages",)
    ),
    "ppo": Loss(ppo, _POLICY_GRADIENT_INPUTS, mask_inputs=("advantages",)),
    "cispo": Loss(cispo, _POLICY_GRADIENT_INPUTS, mask_inputs=("advantages",)),
    "gspo": Loss(
        gspo,
        _POLICY_GRADIENT_INPUTS,
        ("sequence_ratio_mask",),
        mask_inputs=("advantages", "sequence_ratio_mask"),
    ),
    "dro": Loss(dro, _POLICY_GRADIENT_INPUTS, ("mask",), mask_inputs=("mask",)),
}

# Losses of the public API that planish does not support, with the alternative to each.
_UNSUPPORTED_LOSSES = {
    "stable_reinforce": f"its formula is not public; {SUBSTITUTE_REMEDY}",
    "custom": "losses traced on a server are not offered; use forward_backward_custom(data, fn)",
}


def find_loss(name: str) -> Loss:
    """Return the loss of this name.

    Raises UnsupportedError for a loss of the public API that planish does not support. Raises
    UserError for an unknown name.
    """
    if name in LOSSES:
        return LOSSES[name]
    if name in _UNSUPPORTED_LOSSES:
        raise UnsupportedError(f"loss_fn={name!r} is not supported: {_UNSUPPORTED_LOSSES[name]}")
    raise UserError(
        f"loss_fn={name!r} is unknown; planish has {', '.join(LOSSES)}, and "
        "forward_backward_custom for any other"
    )
