"""`Service`, the interface between clients and an engine: operations are frozen dataclasses,
results are futures.

The engine implements `Service` in process, `RemoteService` implements it over HTTP, and the server
exposes an engine. Tests can run against each of them.

Operations of one model run in the order in which they were submitted. `submit` rejects invalid
input at once, before it queues anything; later errors arrive through the future. A future can be
cancelled until its operation has begun; the future of a `Sample` can be cancelled until it has its
result.

If a `ForwardBackward` fails or is cancelled, the next `OptimStep` of that model fails too, so a
pipelined pair is applied completely or not at all. A `ForwardBackward` that `submit` rejects was
never queued, so it does not make the next `OptimStep` fail. To make that `OptimStep` fail too,
TrainingClient submits a `DeferredForwardBackward` in its place. The `data` future of that operation
already has the error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from planish.errors import UserError
from planish.types import (
    AdamParams,
    Checkpoint,
    CheckpointPath,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    LoadWeightsResponse,
    LoraConfig,
    ModelInput,
    OptimStepResponse,
    SampleResponse,
    SamplingParams,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    TensorData,
    check_data,
    check_metadata,
    check_name,
    check_ttl,
    checked_integer,
    convert_flag,
)

R = TypeVar("R")

MAX_METADATA = 65_536
"""Maximum number of characters of the keys and values of `user_metadata`."""
R_co = TypeVar("R_co", covariant=True)


class Operation(Generic[R_co]):
    """Base class of all operations. The type parameter is the type of the result.

    The constructor of an operation checks the types of its fields and raises UserError. It copies
    lists and dictionaries, because the caller may change them later.
    """


@dataclass(frozen=True)
class CreateModel(Operation[GetInfoResponse]):
    """Create an adapter on a base model, with new weights or those of a checkpoint
    (`from_path`).
    """

    model_id: str
    base_model: str | None = None
    """The name of the base model. With `from_path` it can be None: the checkpoint names its own."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Ignored with `from_path`: the adapter then has the checkpoint's shape."""
    from_path: str | None = None
    with_optimizer: bool = False
    """With `from_path`: also restore the optimizer state and step."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    """At most MAX_METADATA characters."""

    def __post_init__(self) -> None:
        _check_type("lora", self.lora, LoraConfig, "LoraConfig(rank=...)")
        _check_weights_source("from_path", self.base_model, self.from_path)
        _check_and_copy_metadata(self)


@dataclass(frozen=True)
class UnloadModel(Operation[None]):
    """Free the memory of a training model. Its checkpoints and samplers are kept."""

    model_id: str


@dataclass(frozen=True)
class ForwardBackward(Operation[ForwardBackwardOutput]):
    """Compute loss and logprobs and, unless `forward_only`, add to the accumulated gradient."""

    model_id: str
    data: Sequence[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float] = field(default_factory=dict)
    forward_only: bool = False

    def __post_init__(self) -> None:
        check_data(self.data)
        object.__setattr__(self, "data", list(self.data))
        _check_and_copy_loss(self)

    @cached_property
    def num_tokens(self) -> int:
        """The number of input tokens of all datums (see `ModelInput.max_length`)."""
        return sum(datum.model_input.max_length for datum in self.data)


@dataclass(frozen=True)
class DeferredForwardBackward(Operation[ForwardBackwardOutput]):
    """A `ForwardBackward` whose data are not known yet. Later operations of the model wait for the
    data.
    """

    model_id: str
    data: Future[Sequence[Datum]]
    """An error of this future becomes the error of the operation. `close(finish=True)` waits for
    this future while it is `running()`.
    """
    loss_fn: str
    loss_fn_config: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_and_copy_loss(self)


@dataclass(frozen=True)
class OptimStep(Operation[OptimStepResponse]):
    """Apply the accumulated gradient with AdamW, and clear it."""

    model_id: str
    adam_params: AdamParams

    def __post_init__(self) -> None:
        _check_type("adam_params", self.adam_params, AdamParams, "AdamParams(learning_rate=...)")


@dataclass(frozen=True)
class _SaveOperation:
    """The fields that both kinds of named checkpoints share."""

    model_id: str
    name: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if self.ttl_seconds is not None:
            _convert_integer(self, "ttl_seconds")
        check_ttl(self.ttl_seconds)
        convert_flag(self, "overwrite")
        _check_and_copy_metadata(self)


@dataclass(frozen=True)
class SaveWeights(_SaveOperation, Operation[SaveWeightsResponse]):
    """Save a training checkpoint: adapter, optimizer state and step."""


@dataclass(frozen=True)
class LoadWeights(Operation[LoadWeightsResponse]):
    """Replace the adapter of an existing model with a checkpoint of the same shape."""

    model_id: str
    path: str
    with_optimizer: bool = False

    def __post_init__(self) -> None:
        CheckpointPath.parse(self.path)


@dataclass(frozen=True)
class SaveWeightsForSampler(_SaveOperation, Operation[SaveWeightsForSamplerResponse]):
    """Save a sampler checkpoint: the adapter alone. Without `overwrite`, an existing name is
    accepted only if its weights are equal.
    """


@dataclass(frozen=True)
class PublishSampler(Operation[str]):
    """Create a sampler without a checkpoint, from the model's weights after all earlier operations.
    The result is its id.
    """

    model_id: str
    sampler_id: str


@dataclass(frozen=True)
class CreateSampler(Operation[str]):
    """Create a sampler for a base model, or for the checkpoint at `model_path`. The result is its
    id.
    """

    sampler_id: str
    base_model: str | None = None
    model_path: str | None = None

    def __post_init__(self) -> None:
        _check_weights_source("model_path", self.base_model, self.model_path)


@dataclass(frozen=True)
class ReleaseSampler(Operation[None]):
    """Free a sampler as soon as its running requests are done."""

    sampler_id: str


@dataclass(frozen=True)
class TextEnd:
    """Where the text of a sample ends that a stop token or a stop string ended."""

    token: int
    """The number of tokens that belong to the text completely."""
    num_bytes: int
    """The number of bytes of the next token that belong to the text too."""
    stop: int | str
    """The stop token or the stop string."""


@dataclass(frozen=True)
class StopGate:
    """Lets the stop strings and stop tokens of a request sleep at the start of each sample, for
    example until the reasoning of a thinking model has ended.
    """

    new_tracker: Callable[[], Callable[[int], bool]]
    """Creates the tracker of one sample. The engine calls the tracker with each token, until it
    returns True. Then stop strings are searched in the text of this token and of later tokens. It
    runs in the engine thread, so it must return fast.
    """
    open_ids: frozenset[int]
    """The stop tokens that always end a sample."""


@dataclass(frozen=True)
class SampledToken:
    """One sampled token, for streaming."""

    sample: int
    """Index of the sample in its request, from 0 to num_samples - 1."""
    token: int
    logprob: float
    top_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """The `topk_sample_logprobs` most likely tokens, likeliest first, or the tokens of
    `logprob_token_ids`: int32 [k].
    """
    top_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """Their logprobs: float32 [k]."""
    num_unsettled: int = 0
    """The number of tokens at the end of the sample, this one included, that a stop string may
    still remove from the text, completely or in part.
    """
    text_end: TextEnd | None = None
    """Where the text ends, if this token ends the sample by a stop token or a stop string."""


MAX_SAMPLES = 4096
"""Maximum `num_samples` of one request. It bounds the cost of a request: each sample has its own
random stream, and a server lists an id for each sample when it accepts the request.
"""


@dataclass(frozen=True)
class Sample(Operation[SampleResponse]):
    """Sample `num_samples` continuations of a prompt, or only score the prompt (`prompt_only`)."""

    sampler_id: str
    prompt: ModelInput
    num_samples: int
    sampling_params: SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    logprob_token_ids: Sequence[int] = ()
    """Tokens whose logprobs are returned for each sampled position, in place of the
    `topk_sample_logprobs` likeliest. They are in the same fields, in the order given here. At most
    MAX_SCORED_TOKENS. A client of a server rejects this option.
    """
    target_prompt_logprobs: TensorData | None = None
    """int64 [P - 1, K]: K token ids for each of the prompt positions 1..P-1; -1 = no token. The
    response has the logprobs of these tokens.
    """
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool = False
    """Request the data that the loss stable_reinforce needs. An engine rejects this option, unless
    it substitutes another loss for stable_reinforce. Such an engine accepts the option and records
    nothing.
    """
    prompt_only: bool = False
    """Sample nothing; return only the requested prompt logprobs (`compute_logprobs`)."""
    on_token: Callable[[SampledToken], None] | None = field(default=None, repr=False, compare=False)
    """Called with each token when it is sampled. It runs in the engine thread, so it must return
    fast. If it raises, this operation fails.

    A client of a server rejects this option.
    """
    stop_gate: StopGate | None = field(default=None, repr=False, compare=False)
    """Lets the stop strings and stop tokens sleep at the start of each sample. A client of a server
    rejects this option.
    """
    owner: str = field(default="", repr=False, compare=False)
    """Whose request this is. Owners take turns in admission and decoding. Reservations follow the
    lengths of the owner's recent samples, and preemption begins with the owner that uses the most
    memory. A request only uses cached prefixes and grammars of the same owner. A server sets the
    name of the tenant; clients leave this empty.
    """

    @property
    def num_scored_tokens(self) -> int:
        """The number of logprobs per sampled position, apart from that of the token itself."""
        return len(self.logprob_token_ids) or self.topk_sample_logprobs

    def __post_init__(self) -> None:
        _check_type("prompt", self.prompt, ModelInput)
        _check_type("sampling_params", self.sampling_params, SamplingParams)
        _convert_integer(
            self,
            "num_samples",
            remedy=f"a whole number from 1 to {MAX_SAMPLES}; split more samples into several "
            "requests",
            low=1,
            high=MAX_SAMPLES,
        )
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
            _convert_integer(self, name, remedy="a whole number of at least 0", low=0)
        if self.prompt_logprobs_last_n is not None:
            _convert_integer(self, "prompt_logprobs_last_n")
        convert_flag(self, "prompt_logprobs")
        convert_flag(self, "record_stability_info")
        targets = self.target_prompt_logprobs
        if targets is not None and not isinstance(targets, TensorData):
            kind = type(targets).__name__
            raise UserError(
                f"target_prompt_logprobs is a {kind}; give TensorData.from_numpy(...) of int64"
            )


def _check_type(name: str, value: Any, expected_type: type, remedy: str | None = None) -> None:
    if not isinstance(value, expected_type):
        raise UserError(
            f"{name} is a {type(value).__name__}; give {remedy or expected_type.__name__}"
        )


def _check_weights_source(path_name: str, base_model: Any, path: Any) -> None:
    """Raise UserError unless there is a base model, the path of a checkpoint, or both."""
    if path is not None:
        CheckpointPath.parse(path)
    elif base_model is None:
        raise UserError(f"base_model and {path_name} are both missing; give one of them")
    if base_model is not None:
        _check_type("base_model", base_model, str, "a name from get_server_capabilities()")
        if not base_model:
            raise UserError("base_model is empty; give a name from get_server_capabilities()")


def _check_and_copy_loss(operation: Any) -> None:
    """Check the loss and its options, and copy the options."""
    config = operation.loss_fn_config
    _check_type("loss_fn", operation.loss_fn, str)
    _check_type("loss_fn_config", config, Mapping, "a dictionary of numbers, or None")
    for key, value in config.items():
        if not isinstance(key, str):
            raise UserError(f"loss_fn_config[{key!r}]={value!r}: option names must be strings")
        option_value(key, value)
    object.__setattr__(operation, "loss_fn_config", dict(config))


def _check_and_copy_metadata(operation: Any) -> None:
    check_metadata(operation.user_metadata)
    metadata = dict(operation.user_metadata)
    size = sum(map(len, (*metadata, *metadata.values())))
    if size > MAX_METADATA:
        raise UserError(
            f"user_metadata has {size:,} characters; give at most {MAX_METADATA:,}, and keep "
            "larger data in a file of your own"
        )
    object.__setattr__(operation, "user_metadata", metadata)


def _convert_integer(
    operation: Any, name: str, remedy: str = "a whole number", **bounds: int
) -> None:
    """Convert the field to a Python int. Raise UserError if it is not a whole number, or is out of
    bounds.
    """
    value = checked_integer(name, getattr(operation, name), remedy, **bounds)
    object.__setattr__(operation, name, value)


@dataclass(frozen=True)
class SamplerInfo:
    """A sampler's id, base model and checkpoint path (None for a base model or unsaved weights)."""

    sampler_id: str
    base_model: str
    model_path: str | None


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint with its base model and adapter shape."""

    base_model: str
    lora: LoraConfig
    checkpoint: Checkpoint


class Service(Protocol):
    """An engine in this process, or on a server.

    Methods raise EngineClosedError after `close`, except for methods whose result is already in
    memory.
    """

    def submit(self, operation: Operation[R]) -> Future[R]:
        """Queue `operation`. Raise ValueError at once on invalid input, EngineClosedError after
        `close`.

        For `CreateModel`, `CreateSampler` and `LoadWeights` this call may take seconds, because an
        engine reads the base model or the checkpoint before the call returns.
        """
        ...

    def capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the base models that this service offers."""
        ...

    def sampler_info(self, sampler_id: str) -> SamplerInfo:
        """Return a sampler's base model and checkpoint. Available after `close` too."""
        ...

    def tokenizer_directory(self, base_model: str) -> Path:
        """Return a local directory with the base model's tokenizer files."""
        ...

    def checkpoints(self, run_id: str | None = None) -> list[Checkpoint]:
        """Return saved checkpoints, newest first. Raise CheckpointError if the run is unknown."""
        ...

    def checkpoint_info(self, path: str) -> CheckpointInfo:
        """Return base model and adapter shape of the checkpoint at a tinker:// path."""
        ...

    def delete_checkpoint(self, path: str) -> None:
        """Delete the checkpoint at a tinker:// path."""

    def close(self, finish: bool = True) -> None:
        """Accept no more operations, and return when the device is free. With `finish`, queued
        operations run first; otherwise they fail.
        """


@dataclass(frozen=True)
class AdapterBytes:
    """Maximum memory of one adapter, in bytes."""

    training: int
    """The adapter with its gradients and optimizer state."""
    sampling: int
    """One version of the adapter's weights, for sampling."""


LOSS_OPTIONS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.1},
}
"""The options of each loss with their defaults, in addition to those of `COMMON_LOSS_OPTIONS`."""

COMMON_LOSS_OPTIONS = {"temperature": 1.0, "skip_unweighted": 0.0}
"""The options that every loss has, with their defaults.

`temperature`: the divisor of the logits. `skip_unweighted`: with 1, positions whose weight,
advantage or mask is 0 are not scored, because these positions do not contribute to the loss. That
saves the LM head's work at these positions. Their logprobs in the result are 0.
"""


SUBSTITUTABLE_LOSSES = ("stable_reinforce",)
"""Losses of the tinker SDK whose formulas are not public. They are rejected unless the engine was
started with a loss to substitute for them.
"""

SUBSTITUTE_REMEDY = (
    "use 'importance_sampling', 'ppo' or 'cispo', or start planish with "
    "--substitute-loss stable_reinforce=cispo, which computes that loss in its place"
)


def checked_substitutes(substitutes: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `substitutes`, which maps rejected losses to losses of planish. Raise
    UserError, which names the entry, if an entry is invalid.
    """
    valid_substitutes = [name for name in LOSS_OPTIONS if name != "cross_entropy"]
    for name, by in substitutes.items():
        if name not in SUBSTITUTABLE_LOSSES:
            names = ", ".join(SUBSTITUTABLE_LOSSES)
            raise UserError(
                f"substitute_losses: {name!r} cannot be substituted; the losses that can be are: "
                f"{names}"
            )
        if by not in valid_substitutes:
            raise UserError(
                f"substitute_losses: {by!r} cannot be substituted for {name!r}; give one of "
                f"{', '.join(valid_substitutes)}"
            )
    return dict(substitutes)


def complete_config(name: str, options: Mapping[str, float] | None) -> dict[str, float]:
    """Return the checked options of loss `name`, with defaults for missing ones. Raise UserError,
    which names the option, if an option is unknown or invalid.
    """
    config: dict[str, float] = {**COMMON_LOSS_OPTIONS, **LOSS_OPTIONS[name]}
    for key, value in (options or {}).items():
        if key not in config:
            raise UserError(
                f"loss_fn_config[{key!r}] is unknown for {name!r}; it takes {', '.join(config)}"
            )
        config[key] = option_value(key, value)
    if config["temperature"] <= 0:
        raise UserError(
            f"loss_fn_config['temperature']={config['temperature']:g}: give a number above 0"
        )
    if config["skip_unweighted"] not in (0, 1):
        raise UserError(
            f"loss_fn_config['skip_unweighted']={config['skip_unweighted']:g}: give 0 to score "
            "every position, or 1 to skip those without weight"
        )
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 1.0)
    if not 0 <= low <= 1 <= high:
        raise UserError(
            f"loss_fn_config: clip_low_threshold={low:g} and clip_high_threshold={high:g} bound "
            "the ratio itself, which is 1 on-policy, and not its distance from 1; give 0 <= low "
            "<= 1 <= high, such as 0.8 and 1.2"
        )
    if config.get("beta", 0.0) < 0:
        raise UserError(f"loss_fn_config['beta']={config['beta']:g}: give 0 or more")
    return config


def option_value(key: str, value: Any) -> float:
    """Convert `value` to a float. Raise UserError, which names `key`, unless `value` is a finite
    number.
    """
    number = value.item() if isinstance(value, np.generic) else value
    is_number = isinstance(number, (int, float)) and not isinstance(value, bool)
    if not is_number or not -sys.float_info.max <= number <= sys.float_info.max:
        raise UserError(f"loss_fn_config[{key!r}]={value!r}: give a finite number")
    return float(number)
