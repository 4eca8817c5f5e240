"""Convert supervised examples to datums for the cross_entropy loss."""

from typing import Literal

import torch

from planish.renderers.renderer import Messages, Renderer
from planish.renderers.train_on import TrainOnWhat
from planish.types import Datum, ModelInput, TensorData

Reduction = Literal["mean", "none"]


def conversation_to_datum(
    messages: Messages,
    renderer: Renderer,
    max_length: int | None = None,
    train_on_what: TrainOnWhat | str = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    reduction: Reduction = "mean",
) -> Datum:
    """Return one conversation as one datum of at most `max_length` positions; see
    `datum_from_weights` for arguments and errors.
    """
    model_input, weights = renderer.build_supervised_example(messages, train_on_what)
    return datum_from_weights(model_input, weights, max_length, reduction)


def datum_from_weights(
    model_input: ModelInput,
    weights: torch.Tensor,
    max_length: int | None = None,
    reduction: Reduction = "mean",
) -> Datum:
    """Return tokens [N] and weights [N] as a datum of N - 1 positions: position i reads token i and
    predicts token i + 1.

    At most the first `max_length` positions are kept; an image is kept as a whole or not at all.
    The targets at the positions of images are 0. With reduction "mean" the weights are divided by
    their sum, so that each example counts equally in a summed loss; "none" keeps the weights.
    Raises ValueError if no kept target has a weight.
    """
    if reduction not in ("mean", "none"):
        raise ValueError(f"reduction={reduction!r}: give 'mean' or 'none'")
    if max_length is not None and (
        isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1
    ):
        raise ValueError(f"max_length={max_length!r}: give a whole number of at least 1, or None")
    tokens = model_input.to_targets()
    if weights.ndim != 1 or len(weights) != len(tokens):
        raise ValueError(
            f"weights has shape {tuple(weights.shape)} for {len(tokens)} tokens; give one weight "
            "per token"
        )
    length = len(tokens) - 1 if max_length is None else min(max_length, len(tokens) - 1)
    kept_input = model_input.prefix(length)
    length = kept_input.length
    tokens, weights = tokens[: length + 1], weights[: length + 1]
    target_weights = weights[1:].to(torch.float32)
    total = float(target_weights.sum())
    if not torch.any(target_weights != 0):
        raise ValueError(
            f"no token with a weight is left in the first max_length={max_length} positions; raise "
            "max_length or leave the conversation out"
        )
    if reduction == "mean":
        if total <= 0:
            raise ValueError(
                f"weights sum to {total:g}, which 'mean' cannot divide by; use reduction='none'"
            )
        target_weights = target_weights / total
    return Datum(
        model_input=kept_input,
        loss_fn_inputs={
            "target_tokens": TensorData(tokens[1:], "int64", [len(tokens) - 1]),
            "weights": TensorData.from_torch(target_weights),
        },
    )
