"""The seam between those who ask and the engine that does: operations as frozen dataclasses in,
futures out.

The embedded engine implements `Service` in process, a client of a server implements it over the
wire, and the server exposes one; a test can run against any.

Operations of one model run in the order in which they were submitted. `submit` raises at once on
input that cannot be right, before anything is queued; what only shows while the work is done comes
through the future. A future can be cancelled until its operation has begun, that of `Sample` until
it is answered. If a `ForwardBackward` fails or is cancelled, the next `OptimStep` of that model
fails too, so a pipelined pair is applied as a whole or not at all. One that `submit` refuses was
never there: who goes on behind it puts a `ForwardBackwardLater` whose data are that error in its
place, as TrainingClient does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from planish.errors import UserError
from planish.types import (
    AdamParams,
    Checkpoint,
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
    whole_number,
)

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Operation(Generic[R_co]):
    """Something to do; its parameter is the type of its result."""


@dataclass(frozen=True)
class CreateModel(Operation[GetInfoResponse]):
    """A new adapter on a base model, fresh or from a checkpoint (`from_path`)."""

    model_id: str
    base_model: str | None = None
    """A name; None only with `from_path`, which knows its base model."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Ignored with `from_path`: the checkpoint's own shape counts."""
    from_path: str | None = None
    with_optimizer: bool = False
    """With `from_path`: restore the optimizer's state and step too."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class UnloadModel(Operation[None]):
    """Frees a model's memory. Its checkpoints and samplers stay."""

    model_id: str


@dataclass(frozen=True)
class ForwardBackward(Operation[ForwardBackwardOutput]):
    model_id: str
    data: Sequence[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True)
class ForwardBackwardLater(Operation[ForwardBackwardOutput]):
    """A `ForwardBackward` whose data are still being made. It keeps its place: later operations of
    the model wait for them.
    """

    model_id: str
    data: Future[Sequence[Datum]]
    """Its error becomes that of the operation. While it is `running()` somebody makes it, and a
    `close` that finishes waits for it.
    """
    loss_fn: str
    loss_fn_config: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimStep(Operation[OptimStepResponse]):
    model_id: str
    adam_params: AdamParams


@dataclass(frozen=True)
class _Save:
    """A checkpoint with a name."""

    model_id: str
    name: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ttl_seconds is not None:
            _keep_whole(self, "ttl_seconds")
        _keep_flag(self, "overwrite")


@dataclass(frozen=True)
class SaveWeights(_Save, Operation[SaveWeightsResponse]):
    """A training checkpoint: adapter, optimizer, step."""


@dataclass(frozen=True)
class LoadWeights(Operation[LoadWeightsResponse]):
    """Replaces the adapter of an existing model by a checkpoint of the same shape."""

    model_id: str
    path: str
    with_optimizer: bool = False


@dataclass(frozen=True)
class SaveWeightsForSampler(_Save, Operation[SaveWeightsForSamplerResponse]):
    """A named sampler checkpoint: the adapter alone. Without `overwrite`, a name is taken again by
    equal weights only.
    """


@dataclass(frozen=True)
class PublishSampler(Operation[str]):
    """An ephemeral sampler of the model's weights as they are after the operations before this one;
    answers its id.
    """

    model_id: str
    sampler_id: str


@dataclass(frozen=True)
class CreateSampler(Operation[str]):
    """A sampler of a base model, or of a checkpoint by its path; answers its id."""

    sampler_id: str
    base_model: str | None = None
    model_path: str | None = None


@dataclass(frozen=True)
class ReleaseSampler(Operation[None]):
    """Frees a sampler once its running requests are done."""

    sampler_id: str


@dataclass(frozen=True)
class DrawnToken:
    """One token of one sample, at the moment it was drawn."""

    sample: int
    """0 .. num_samples - 1"""
    token: int
    logprob: float
    topk: Sequence[tuple[int, float]]
    """The likeliest tokens with their logprobs, as many as `topk_sample_logprobs` asks for."""


MAX_SAMPLES = 4096
"""Of one request: each has an id in the acceptance of a server, and a number of its own to be drawn
by.
"""


@dataclass(frozen=True)
class Sample(Operation[SampleResponse]):
    sampler_id: str
    prompt: ModelInput
    num_samples: int
    sampling_params: SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    """int64 [P - 1, K]: token ids whose logprobs at prompt positions 1..P-1 are asked for; -1 =
    none.
    """
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool = False
    """Ask for what the loss stable_reinforce reads. Refused, unless another loss stands in for that
    loss: then nothing is recorded.
    """
    prompt_only: bool = False
    """Draw nothing; answer what was asked about the prompt (`compute_logprobs`)."""
    on_token: Callable[[DrawnToken], None] | None = field(default=None, repr=False, compare=False)
    """Called with each token as it is drawn, in the engine's thread: let it be short. If it raises,
    this operation fails.

    It cannot travel: a client of a server refuses it.
    """

    def __post_init__(self) -> None:
        _keep_whole(
            self,
            "num_samples",
            remedy=f"a whole number from 1 to {MAX_SAMPLES}; more take several requests",
            low=1,
            high=MAX_SAMPLES,
        )
        _keep_whole(self, "topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")
        if self.prompt_logprobs_last_n is not None:
            _keep_whole(self, "prompt_logprobs_last_n")
        _keep_flag(self, "prompt_logprobs")
        _keep_flag(self, "record_stability_info")
        targets = self.target_prompt_logprobs
        if targets is not None and not isinstance(targets, TensorData):
            kind = type(targets).__name__
            raise UserError(
                f"target_prompt_logprobs is a {kind}; give TensorData.from_numpy(...) of int64"
            )


def _keep_whole(operation: Any, *names: str, remedy: str = "a whole number", **bounds: int) -> None:
    """The fields as ints of Python's, also where they are numpy's. UserError for what is no whole
    number, or out of bounds.
    """
    for name in names:
        try:
            value = whole_number(name, getattr(operation, name), remedy, **bounds)
        except ValueError as error:
            raise UserError(str(error)) from None
        object.__setattr__(operation, name, value)


def _keep_flag(operation: Any, name: str) -> None:
    """The field as a bool of Python's. UserError for what only counts as true or false."""
    value = getattr(operation, name)
    if not isinstance(value, (bool, np.bool_)):
        raise UserError(f"{name}={value!r}: give True or False")
    object.__setattr__(operation, name, bool(value))


@dataclass(frozen=True)
class SamplerInfo:
    sampler_id: str
    base_model: str
    model_path: str | None


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says of itself."""

    base_model: str
    lora: LoraConfig
    checkpoint: Checkpoint


class Service(Protocol):
    """An engine, near or far."""

    def submit(self, operation: Operation[R]) -> Future[R]:
        """Queue `operation`. Raises ValueError at once on bad input, EngineClosedError after
        `close`.

        `CreateModel`, `CreateSampler` and `LoadWeights` may take seconds here, to read the base
        model or the checkpoint.
        """
        ...

    # What is read: EngineClosedError after `close`, but for what the service holds of models and
    # samplers.

    def capabilities(self) -> GetServerCapabilitiesResponse: ...

    def sampler_info(self, sampler_id: str) -> SamplerInfo: ...

    def tokenizer_directory(self, base_model: str) -> Path:
        """A local directory from which the base model's tokenizer loads."""
        ...

    def checkpoints(self, run_id: str | None = None) -> list[Checkpoint]:
        """Saved checkpoints, newest first. CheckpointError for a run of which nothing is known."""
        ...

    def checkpoint_info(self, path: str) -> CheckpointInfo: ...

    def delete_checkpoint(self, path: str) -> None: ...

    def close(self, finish: bool = True) -> None:
        """Take no more work, and return when the device is free. `finish`: do what is queued first;
        otherwise it fails.
        """
        ...


@dataclass(frozen=True)
class AdapterBytes:
    """The most memory that one adapter takes."""

    training: int
    sampling: int
    """One version, without what trains it."""


class HostedService(Service, Protocol):
    """An engine on this machine, as a server needs it."""

    def check_sample(self, base_model: str, operation: Sample) -> None:
        """ValueError if `operation` could not be served by any sampler of the base model; nothing
        is queued.
        """
        ...

    def adapter_bytes(self, base_model: str, lora: LoraConfig) -> AdapterBytes:
        """What an adapter of this shape would take; the base model is not loaded for it."""
        ...

    def copy_checkpoint(
        self, source: str, destination: str, ttl_seconds: int | None = None, overwrite: bool = False
    ) -> None:
        """Make the checkpoint `destination` of the files of `source`; it stays when `source` goes.
        Metadata are the same.
        """
        ...

    def set_checkpoint_ttl(self, path: str, ttl_seconds: int | None) -> None:
        """Let a checkpoint expire so long from now; None keeps it."""
        ...

    def clear_leftovers(self) -> None:
        """Remove what killed processes left half written."""
        ...

    def checkpoint_files(self, path: str) -> Mapping[str, Path]:
        """The files of a checkpoint by name."""
        ...


LOSS_OPTIONS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.1},
}
"""Besides temperature, which all of them have."""


SUBSTITUTABLE_LOSSES = ("stable_reinforce",)
"""Losses of the public SDK whose formulas are not public. They are refused, unless whoever starts
the engine names a loss to compute in their place.
"""

SUBSTITUTE_REMEDY = (
    "use 'importance_sampling', 'ppo' or 'cispo', or start planish with "
    "--substitute-loss stable_reinforce=cispo, which computes that loss in its place"
)


def checked_substitutes(given: Mapping[str, str]) -> dict[str, str]:
    """A copy of `given`, which maps refused losses to losses of planish. UserError names the entry
    at fault.
    """
    stand_ins = [name for name in LOSS_OPTIONS if name != "cross_entropy"]
    for name, by in given.items():
        if name not in SUBSTITUTABLE_LOSSES:
            names = ", ".join(SUBSTITUTABLE_LOSSES)
            raise UserError(
                f"substitute_losses: {name!r} is no loss that planish refuses; {names} is"
            )
        if by not in stand_ins:
            raise UserError(
                f"substitute_losses: {by!r} cannot stand in for {name!r}; give one of {', '.join(stand_ins)}"
            )
    return dict(given)


def complete_config(name: str, given: Mapping[str, float] | None) -> dict[str, float]:
    """`given` checked and filled with the loss's defaults; UserError names the key at fault."""
    config: dict[str, float] = {"temperature": 1.0, **LOSS_OPTIONS[name]}
    for key, value in (given or {}).items():
        if key not in config:
            raise UserError(
                f"loss_fn_config[{key!r}] is unknown for {name!r}; it takes {', '.join(config)}"
            )
        config[key] = option_value(key, value)
    if config["temperature"] <= 0:
        raise UserError(
            f"loss_fn_config['temperature']={config['temperature']:g}: give a number above 0"
        )
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 1.0)
    if not 0 <= low <= 1 <= high:
        raise UserError(
            f"loss_fn_config: clip_low_threshold={low:g} and clip_high_threshold={high:g} bound the ratio itself, which is "
            "1 on-policy, and not its distance from 1; give 0 <= low <= 1 <= high, such as 0.8 and 1.2"
        )
    if config.get("beta", 0.0) < 0:
        raise UserError(f"loss_fn_config['beta']={config['beta']:g}: give 0 or more")
    return config


def option_value(key: str, value: Any) -> float:
    """`value` as a float; UserError unless it is a finite number."""
    number = value.item() if isinstance(value, np.generic) else value
    is_number = isinstance(number, (int, float)) and not isinstance(value, bool)
    if not is_number or not -sys.float_info.max <= number <= sys.float_info.max:
        raise UserError(f"loss_fn_config[{key!r}]={value!r}: give a finite number")
    return float(number)
