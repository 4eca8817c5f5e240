"""Any differentiable function of the logprobs as a loss, by two passes of the trainer.

For a loss L(l) of the logprobs l, cross entropy with weights w = -dL/dl held constant has the
gradient of L, since it is -sum w l. So: a forward pass gives l, the caller's function gives L,
autograd gives dL/dl, and a second pass applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planish.errors import NonFiniteError, UserError
from planish.types import Datum, ForwardBackwardOutput, TensorData, check_data

if TYPE_CHECKING:
    import torch

    CustomLoss = Callable[
        [Sequence[Datum], list[torch.Tensor]], tuple[torch.Tensor, Mapping[str, float]]
    ]


@dataclass(frozen=True)
class CustomGradient:
    """What the caller's function gave."""

    data: list[Datum]
    """For the second pass."""
    metrics: Mapping[str, float]
    """Its own, and "loss:sum"."""


def first_pass_data(data: Sequence[Datum]) -> list[Datum]:
    """The datums with their targets alone."""
    # Loaded in the caller's thread, where it is interrupted if the program ends meanwhile.
    import torch  # noqa: F401

    check_data(data)
    for index, datum in enumerate(data):
        if "target_tokens" not in datum.loss_fn_inputs:
            raise UserError(
                f"data[{index}].loss_fn_inputs has no 'target_tokens', which forward_backward_custom needs; add it"
            )
    return [
        Datum(d.model_input, {"target_tokens": d.loss_fn_inputs["target_tokens"]}) for d in data
    ]


def custom_gradient(
    data: Sequence[Datum], forward: ForwardBackwardOutput, loss_fn: CustomLoss
) -> CustomGradient:
    """Call `loss_fn(data, logprobs)` and differentiate. UserError for what is no loss,
    NonFiniteError for one that is not finite.
    """
    # Loaded here: planish can be imported without torch.
    import torch

    leaves = [
        output["logprobs"].to_torch().clone().requires_grad_() for output in forward.loss_fn_outputs
    ]
    with torch.enable_grad():
        outcome = loss_fn(data, leaves)
    if (
        not isinstance(outcome, tuple)
        or len(outcome) != 2
        or not isinstance(outcome[0], torch.Tensor)
    ):
        raise UserError(
            "the custom loss must return (loss, metrics): a scalar tensor and a dictionary of numbers"
        )
    loss, metrics = outcome
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"the custom loss's metrics are a {type(metrics).__name__}; give a dictionary of numbers"
        )
    numbers = {name: _number(name, value) for name, value in metrics.items()}
    if loss.numel() != 1 or not loss.requires_grad:
        raise UserError(
            "the custom loss must be one number computed from the logprobs by torch functions, so that it has a gradient"
        )
    value = float(loss.detach())
    grads = torch.autograd.grad(loss.reshape(()), leaves, allow_unused=True)
    weights = [
        torch.zeros_like(leaf) if grad is None else -grad
        for leaf, grad in zip(leaves, grads, strict=True)
    ]
    if (
        value != value
        or abs(value) == float("inf")
        or not all(bool(torch.isfinite(w).all()) for w in weights)
    ):
        raise NonFiniteError(
            f"the custom loss ({value}) or its gradient is not finite; nothing was applied"
        )
    second = [
        Datum(
            d.model_input,
            {
                "target_tokens": d.loss_fn_inputs["target_tokens"],
                "weights": TensorData.from_torch(w),
            },
        )
        for d, w in zip(data, weights, strict=True)
    ]
    return CustomGradient(second, {**numbers, "loss:sum": value})


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"the custom loss's metric {name!r} is {value!r}; give a number") from None


def merged(output: ForwardBackwardOutput, metrics: Mapping[str, float]) -> ForwardBackwardOutput:
    """The second pass's output with the custom loss and metrics; what the trainer summed is
    "surrogate_loss:sum".
    """
    theirs = {**output.metrics, "surrogate_loss:sum": output.metrics["loss:sum"]}
    return ForwardBackwardOutput(
        output.loss_fn_output_type, output.loss_fn_outputs, {**theirs, **metrics}
    )
