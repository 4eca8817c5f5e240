"""Custom losses: any differentiable function of the logprobs, computed in two passes.

For a loss L(l) of the logprobs l, let w = -dL/dl be constant weights. The weighted cross entropy
-sum(w * l) then has the same gradient as L. So a first forward pass returns l. The caller's
function computes L, and autograd computes dL/dl. A second pass, forward and backward, accumulates
the gradient of the weighted cross entropy.
"""

# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
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
    """The gradient of a custom loss, as weights for cross entropy."""

    data: list[Datum]
    """The datums of the second pass, with -dL/dl as "weights"."""
    metrics: Mapping[str, float]
    """The metrics that the loss returned, and "loss:sum"."""


def first_pass_data(data: Sequence[Datum]) -> list[Datum]:
    """Return the datums with target_tokens as their only loss input."""
    # Import torch in the caller's thread: Ctrl-C can interrupt the import there.
    import_module("torch")

    check_data(data)
    for index, datum in enumerate(data):
        if "target_tokens" not in datum.loss_fn_inputs:
            raise UserError(
                f"data[{index}].loss_fn_inputs has no 'target_tokens', which "
                "forward_backward_custom needs; add it"
            )
    return [
        Datum(d.model_input, {"target_tokens": d.loss_fn_inputs["target_tokens"]}) for d in data
    ]


def custom_gradient(
    data: Sequence[Datum], forward: ForwardBackwardOutput, loss_fn: CustomLoss
) -> CustomGradient:
    """Call `loss_fn(data, logprobs)` and differentiate its loss by the logprobs.

    Raise UserError if `loss_fn` does not return (loss, metrics), and NonFiniteError if the loss or
    its gradient is not finite. The messages name the function.
    """
    # Imported here, because `import planish` must not import torch.
    import torch

    function = f"the custom loss {_name_of(loss_fn)}"
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
            f"{function} must return (loss, metrics): a scalar tensor and a dictionary of numbers"
        )
    loss, metrics = outcome
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"{function} returned metrics of type {type(metrics).__name__}; return a dictionary of "
            "numbers"
        )
    metric_values = {name: _metric_value(function, name, value) for name, value in metrics.items()}
    if loss.numel() != 1 or not loss.requires_grad:
        raise UserError(
            f"{function} must be one number computed from the logprobs by torch functions, so that "
            "it has a gradient"
        )
    value = float(loss.detach())
    grads: list[torch.Tensor | None] = list(
        torch.autograd.grad(loss.reshape(()), leaves, allow_unused=True)
    )
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
            f"{function} ({value}) or its gradient is not finite; nothing was applied"
        )
    weighted_data = [
        Datum(
            d.model_input,
            {
                "target_tokens": d.loss_fn_inputs["target_tokens"],
                "weights": TensorData.from_torch(w),
            },
        )
        for d, w in zip(data, weights, strict=True)
    ]
    return CustomGradient(weighted_data, {**metric_values, "loss:sum": value})


def _name_of(function: object) -> str:
    """Return the dotted name of a function, or that of its type for other callable objects."""
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"


def _metric_value(function: str, name: str, value: Any) -> float:
    try:
        # A tensor that is part of the graph would print a warning.
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError):
        raise UserError(
            f"{function} returned {value!r} as its metric {name!r}; return a number"
        ) from None


def add_custom_metrics(
    output: ForwardBackwardOutput, metrics: Mapping[str, float]
) -> ForwardBackwardOutput:
    """Return the output of the second pass with the custom loss's metrics. The weighted cross
    entropy of that pass is renamed to "surrogate_loss:sum".
    """
    renamed_metrics = {**output.metrics, "surrogate_loss:sum": output.metrics["loss:sum"]}
    return ForwardBackwardOutput(
        output.loss_fn_output_type, output.loss_fn_outputs, {**renamed_metrics, **metrics}
    )
