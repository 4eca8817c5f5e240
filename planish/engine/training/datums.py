"""The checks of datums, and their conversion to numpy arrays, before any computation.

Every error names the datum, the input and the remedy. The module uses numpy only, so the thread
that submits the datums can call it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planish.engine.training.losses import Loss
from planish.errors import NonFiniteError, UnsupportedError, UserError
from planish.model.vision.image_tokens import ImageRegistry, InputTokens, read_input
from planish.types import Datum, TensorData

# Inputs that clients of the public API send with every loss, even if the loss does not use them.
# Such an input is checked against the other inputs and then ignored.
_IGNORED_INPUTS = ("mask",)
_LOGPROB_ROUNDING = 1e-3
"""How far above 0 rounding may lift the logprob of a token that is nearly certain."""
_PER_TOKEN_CLIPPING_INPUTS = ("clip_low_threshold", "clip_high_threshold")


@dataclass(frozen=True, eq=False)
class Example:
    """One datum as arrays: N tokens, their targets, and the inputs of the loss."""

    input: InputTokens
    """The input tokens and images."""
    tokens: np.ndarray
    """The token ids of `input`, int64 [N]."""
    targets: np.ndarray
    """The target tokens of each position, int64 [N] or [N, K]."""
    inputs: Mapping[str, np.ndarray]
    """The inputs of the loss by name, float32, each in the shape of `targets`."""


def read_examples(
    data: Mapping[int, Datum],
    loss: Loss,
    loss_name: str,
    vocab_size: int,
    max_context: int,
    max_trainable_tokens: int | None = None,
    images: ImageRegistry | None = None,
) -> dict[int, Example]:
    """Return the datums as arrays, by their index in the call.

    `images`: the model's images; None if it reads only text. `max_trainable_tokens`: the longest
    sequence whose gradient fits into memory; None: no limit.
    Raise UserError or NonFiniteError for the first invalid datum. The error names the datum, its
    input and the remedy.
    """
    if not data:
        raise UserError("data is empty; give at least one Datum")
    examples = {
        index: _read_example(index, datum, loss, loss_name, vocab_size, max_context, images)
        for index, datum in data.items()
    }
    for index, example in examples.items():
        if max_trainable_tokens is not None and example.tokens.size > max_trainable_tokens:
            raise UserError(
                f"data[{index}].model_input has {example.tokens.size:,} tokens, and beside this "
                f"base model the GPU's memory is enough to train on {max_trainable_tokens:,}; "
                "shorten the sequence, or quantize the base model (quantize='int8' or 'nf4')"
            )
    return examples


def _read_example(
    index: int,
    datum: Datum,
    loss: Loss,
    loss_name: str,
    vocab_size: int,
    max_context: int,
    images: ImageRegistry | None,
) -> Example:
    datum_path = f"data[{index}]"
    model_input = read_input(datum.model_input, images, f"{datum_path}.model_input")
    tokens = np.asarray(model_input.tokens, dtype=np.int64)
    if tokens.size == 0:
        raise UserError(f"{datum_path}.model_input is empty; give at least one token")
    if tokens.size > max_context:
        raise UserError(
            f"{datum_path}.model_input has {tokens.size} tokens, and the model's context is "
            f"{max_context}; shorten the sequence"
        )
    if not model_input.images:
        _check_tokens(f"{datum_path}.model_input", tokens, vocab_size)
    _check_names(datum_path, datum.loss_fn_inputs, loss, loss_name)
    targets = _read_targets(
        datum_path, datum.loss_fn_inputs["target_tokens"], tokens.size, loss, loss_name, vocab_size
    )
    _check_tokens(f"{datum_path}.loss_fn_inputs['target_tokens']", targets, vocab_size)
    inputs: dict[str, np.ndarray] = {}
    for name in (*loss.required_inputs, *loss.optional_inputs):
        if name in datum.loss_fn_inputs:
            inputs[name] = _read_floats(
                f"{datum_path}.loss_fn_inputs[{name!r}]", datum.loss_fn_inputs[name], targets.shape
            )
    if "logprobs" in inputs:
        _check_logprobs(datum_path, inputs, loss)
    if "mask" in datum.loss_fn_inputs and "mask" not in inputs:
        mask = _read_floats(
            f"{datum_path}.loss_fn_inputs['mask']", datum.loss_fn_inputs["mask"], targets.shape
        )
        weight_name = "weights" if "weights" in loss.optional_inputs else "advantages"
        if np.any((mask == 0) & (inputs.get(weight_name, np.float32(1)) != 0)):
            raise UserError(
                f"{datum_path}.loss_fn_inputs['mask'] is 0 where {weight_name} is not, and "
                f"loss_fn={loss_name!r} takes no mask; give 0 in {weight_name} there"
            )
    return Example(model_input, tokens, targets, inputs)


def _check_names(
    datum_path: str, inputs: Mapping[str, TensorData], loss: Loss, loss_name: str
) -> None:
    """Raise UserError if a required input is missing, or if an input is unknown to the loss."""
    missing_names = [
        name for name in ("target_tokens", *loss.required_inputs) if name not in inputs
    ]
    if missing_names:
        raise UserError(
            f"{datum_path}.loss_fn_inputs has no {missing_names[0]!r}, which loss_fn={loss_name!r} "
            "needs; add it"
        )
    known_names = ("target_tokens", *loss.required_inputs, *loss.optional_inputs, *_IGNORED_INPUTS)
    for name in inputs:
        if name in known_names:
            continue
        if name in _PER_TOKEN_CLIPPING_INPUTS:
            raise UnsupportedError(
                f"{datum_path}.loss_fn_inputs[{name!r}]: clipping per token is not supported; give "
                f"one number in loss_fn_config[{name!r}]"
            )
        raise UserError(
            f"{datum_path}.loss_fn_inputs[{name!r}] is unknown to loss_fn={loss_name!r}, which "
            f"takes {', '.join(known_names[: -len(_IGNORED_INPUTS)])}; remove it"
        )


def _check_logprobs(datum_path: str, inputs: Mapping[str, np.ndarray], loss: Loss) -> None:
    """Raise UserError if a logprob that the loss uses is positive, by more than rounding."""
    logprobs = inputs["logprobs"]
    is_wrong = (logprobs > _LOGPROB_ROUNDING) & loss.contributing_mask(inputs, logprobs.shape)
    if is_wrong.any():
        position = int(np.flatnonzero(is_wrong)[0])
        raise UserError(
            f"{datum_path}.loss_fn_inputs['logprobs'] is {logprobs[position]:g} at position "
            f"{position}, and a logprob is at most 0; give the logprobs with which the tokens were "
            "sampled, not probabilities or their negative logarithms"
        )


def _read_targets(
    datum_path: str, data: TensorData, length: int, loss: Loss, loss_name: str, vocab_size: int
) -> np.ndarray:
    """Return the target tokens, int64 [N] or [N, K], after a check of their dtype and shape."""
    name = f"{datum_path}.loss_fn_inputs['target_tokens']"
    if data.dtype != "int64":
        raise UserError(f"{name} has dtype {data.dtype}; token ids are int64")
    # Check the shape first: a sparse tensor may claim a shape that does not fit into memory.
    shape = data.shape or []
    if len(shape) == 2 and not loss.allows_multiple_targets:
        raise UserError(
            f"{name} has shape {shape}; loss_fn={loss_name!r} takes one target per position"
        )
    if len(shape) not in (1, 2) or shape[0] != length or 0 in shape:
        raise UserError(
            f"{name} has shape {shape}, but model_input has {length} tokens; give one target per "
            "token (the input shifted by one), or K of them"
        )
    if len(shape) == 2 and shape[1] > vocab_size:
        raise UserError(
            f"{name} has shape {shape}: {shape[1]} targets per token, and the vocabulary has "
            f"{vocab_size}; give fewer"
        )
    return data.to_numpy()


def _check_tokens(name: str, tokens: np.ndarray, vocab_size: int) -> None:
    """Raise UserError if a token is outside the vocabulary."""
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        invalid_token = tokens[(tokens < 0) | (tokens >= vocab_size)].flat[0]
        remedy = "use the model's own tokenizer"
        if invalid_token < 0 and name.endswith("['target_tokens']"):
            remedy = (
                "give positions that should not be learned a weight or an advantage of 0, and any "
                "valid token"
            )
        raise UserError(
            f"{name} holds token {invalid_token}, but the vocabulary has {vocab_size}; {remedy}"
        )


def _read_floats(name: str, data: TensorData, shape: tuple[int, ...]) -> np.ndarray:
    """Return an input as finite float32 values of this shape."""
    if data.shape != list(shape):
        raise UserError(
            f"{name} has shape {data.shape}, but target_tokens has {list(shape)}; give one value "
            "per target"
        )
    values = data.to_numpy().astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        position = np.argwhere(~np.isfinite(values))[0].tolist()
        raise NonFiniteError(
            f"{name} is not finite at position {position}; replace NaN and infinity"
        )
    return values
