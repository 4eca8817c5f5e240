"""The vocabulary of planish: what goes into an operation and what comes out of it.

Field names and meanings are those of the public SDK that people already write against, so code
moves over by changing an import. Everything here is plain data: no torch is imported until a tensor
is asked for, and every constructor checks what it can check alone (shapes, kinds, ranges); what
needs a model (vocabulary, context) is checked by the service.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from planish.errors import UserError
from planish.tensors import HoldsArrays, TensorData, as_tensor_data

if TYPE_CHECKING:
    import torch

StopReason = Literal["stop", "length"]

_SHOWN_TOKENS = 16

_LEAST_TEMPERATURE = 1e-30
"""Logits of 3e8 divided by it are float32 numbers."""
_SEED = "a whole number from -2**63 to 2**64 - 1, or None"
"""As torch's generators take them."""


@dataclass(frozen=True)
class EncodedTextChunk:
    """A run of token ids."""

    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _token_list(self.tokens, "EncodedTextChunk.tokens"))

    def __repr__(self) -> str:
        more = len(self.tokens) - _SHOWN_TOKENS
        shown = (
            repr(self.tokens)
            if more <= 0
            else f"[{', '.join(map(str, self.tokens[:_SHOWN_TOKENS]))}, ... {more} more]"
        )
        return f"EncodedTextChunk(tokens={shown})"

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


@dataclass(frozen=True)
class ModelInput:
    """A sequence of chunks that together are one token sequence."""

    chunks: list[EncodedTextChunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        chunks = list(self.chunks)
        for chunk in chunks:
            if not isinstance(chunk, EncodedTextChunk):
                raise UserError(
                    f"ModelInput.chunks holds a {type(chunk).__name__}; planish reads text only: give EncodedTextChunk(tokens=[...])"
                )
        object.__setattr__(self, "chunks", chunks)

    @classmethod
    def from_ints(cls, tokens: Sequence[int] | np.ndarray | torch.Tensor) -> ModelInput:
        """One chunk of these token ids: a flat list, or an array or tensor of whole numbers with
        one dimension.
        """
        return cls(chunks=[EncodedTextChunk(tokens=tokens)])  # type: ignore[arg-type]

    @classmethod
    def empty(cls) -> ModelInput:
        """No tokens."""
        return cls(chunks=[])

    def to_ints(self) -> list[int]:
        """All token ids in one list."""
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return sum(chunk.length for chunk in self.chunks)

    def append(self, chunk: EncodedTextChunk) -> ModelInput:
        """A longer one; this stays as it is."""
        return ModelInput(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """A longer one; this stays as it is."""
        return self.append(EncodedTextChunk(tokens=[token]))


@dataclass(frozen=True, kw_only=True)
class _ProvenanceSpan:
    sequence_id: str
    """`SampledSequence.sequence_id`"""
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.sequence_id, str) or not self.sequence_id:
            raise UserError(
                f"{type(self).__name__}.sequence_id={self.sequence_id!r}: give that of a SampledSequence"
            )
        for name in ("offset", "length"):
            _keep_whole(self, name, "a whole number of at least 0", low=0)


@dataclass(frozen=True, kw_only=True)
class PromptProvenanceSpan(_ProvenanceSpan):
    """`length` positions that hold the tokens from `offset` on of the prompt of a sample."""


@dataclass(frozen=True, kw_only=True)
class SampledProvenanceSpan(_ProvenanceSpan):
    """`length` positions that hold the tokens from `offset` on of a sample."""


ProvenanceSpans = list[PromptProvenanceSpan | SampledProvenanceSpan]


@dataclass(frozen=True, init=False)
class Datum:
    """One training sequence: position i of `model_input` predicts
    `loss_fn_inputs["target_tokens"][i]`.

    Values of `loss_fn_inputs` may be TensorData, torch tensors, numpy arrays or (nested) lists;
    lists get the dtype of their key (`LOSS_INPUT_DTYPES`).
    """

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, TensorData]
    model_input_spans: ProvenanceSpans | None = None
    loss_fn_input_spans: ProvenanceSpans | None = None

    def __init__(
        self,
        model_input: ModelInput,
        loss_fn_inputs: Mapping[str, TensorData | torch.Tensor | np.ndarray | Sequence[Any]]
        | None = None,
        model_input_spans: ProvenanceSpans | None = None,
        loss_fn_input_spans: ProvenanceSpans | None = None,
    ) -> None:
        if not isinstance(model_input, ModelInput):
            raise UserError(
                f"Datum.model_input is a {type(model_input).__name__}; give ModelInput.from_ints(tokens)"
            )
        object.__setattr__(self, "model_input", model_input)
        if loss_fn_inputs is not None and not isinstance(loss_fn_inputs, Mapping):
            kind = type(loss_fn_inputs).__name__
            raise UserError(
                f'Datum.loss_fn_inputs is a {kind}; give a dictionary such as {{"target_tokens": [...]}}'
            )
        converted = {
            key: as_tensor_data(key, value) for key, value in (loss_fn_inputs or {}).items()
        }
        object.__setattr__(self, "loss_fn_inputs", converted)
        if (model_input_spans is None) != (loss_fn_input_spans is None):
            raise UserError(
                "model_input_spans and loss_fn_input_spans go together; give both or neither"
            )
        targets = converted.get("target_tokens")
        lengths = {
            "model_input_spans": (model_input_spans, model_input.length),
            "loss_fn_input_spans": (
                loss_fn_input_spans,
                targets.shape[0] if targets is not None and len(targets.shape or ()) == 1 else None,
            ),
        }
        for name, (spans, length) in lengths.items():
            if spans is not None:
                _check_spans(name, spans, length)
            object.__setattr__(self, name, spans)

    def with_provenance(
        self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans
    ) -> Datum:
        """A copy that says from which samples its tokens are: runs of positions that together cover
        `model_input`, and `target_tokens`. No loss of planish reads it.
        """
        return Datum(self.model_input, self.loss_fn_inputs, model_input, loss_fn_inputs)


def _check_spans(name: str, spans: Any, length: int | None) -> None:
    if not isinstance(spans, Sequence) or not all(isinstance(s, _ProvenanceSpan) for s in spans):
        raise UserError(
            f"Datum.{name}: give a list of PromptProvenanceSpan and SampledProvenanceSpan"
        )
    covered = sum(span.length for span in spans)
    if length is not None and covered != length:
        raise UserError(
            f"Datum.{name} covers {covered} positions of {length}; its runs must cover all of them"
        )


def check_data(data: Any) -> None:
    """UserError unless `data` is a list of Datum, whose inputs are TensorData still."""
    if isinstance(data, Datum) or not isinstance(data, Sequence):
        raise UserError(f"data is a {type(data).__name__}; give a list of Datum")
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise UserError(f"data[{index}] is a {type(datum).__name__}; give a Datum")
        for name, value in datum.loss_fn_inputs.items():
            if not isinstance(value, TensorData):  # put there after the datum was made
                raise UserError(
                    f"data[{index}].loss_fn_inputs[{name!r}] is a {type(value).__name__}; give TensorData"
                )


@dataclass(frozen=True)
class SamplingParams:
    """How to draw tokens."""

    max_tokens: int | None = None
    """Most tokens to draw; None = until the model's context is full."""
    seed: int | None = None
    """Makes the draw reproducible; the samples of one request still differ from each other."""
    stop: str | Sequence[str] | Sequence[int] | None = None
    """None = the model's end-of-sequence tokens; strings or token ids replace them; [] = never stop
    early.
    """
    temperature: float = 1.0
    """0 = greedy."""
    top_k: int = -1
    """-1 = off."""
    top_p: float = 1.0
    """1 = off."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest; 0 = off."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _keep_whole(self, "max_tokens", "a whole number of at least 1, or None", low=1)
        if self.seed is not None:
            _keep_whole(self, "seed", _SEED, high=2**64 - 1)
        _keep_number(self, "temperature", low=0.0)
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise UserError(
                f"SamplingParams.temperature={self.temperature!r}: logits divided by it are no numbers; give 0, which is greedy, "
                f"or at least {_LEAST_TEMPERATURE:g}"
            )
        if self.top_k != -1:
            _keep_whole(self, "top_k", "a whole number of at least 1, or -1 for off", low=1)
        _keep_number(self, "top_p", low=0.0, high=1.0, open_low=True)
        _keep_number(self, "min_p", low=0.0, high=1.0)
        object.__setattr__(self, "stop", _stop(self.stop))


@dataclass(frozen=True)
class AdamParams:
    """One AdamW step (Loshchilov & Hutter 2019, decoupled weight decay), as in torch.optim.AdamW."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0 = off."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            _keep_number(self, name, low=0.0)
        for name in ("beta1", "beta2"):
            _keep_number(self, name, low=0.0, high=1.0, open_high=True)


@dataclass(frozen=True)
class LoraConfig:
    """Shape and initialisation of an adapter (Hu et al. 2021); alpha is 32 whatever the rank."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def __post_init__(self) -> None:
        _keep_whole(self, "rank", "a whole number from 1 to 256", low=1, high=256)
        if self.seed is not None:
            _keep_whole(self, "seed", _SEED, high=2**64 - 1)
        for name in ("train_unembed", "train_mlp", "train_attn"):
            value = getattr(self, name)
            if not isinstance(value, (bool, np.bool_)):
                raise UserError(f"LoraConfig.{name}={value!r}: give True or False")
            object.__setattr__(self, name, bool(value))
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise UserError(
                "train_attn, train_mlp and train_unembed are all False: nothing would be trained; set one to True"
            )


@dataclass(frozen=True, eq=False)
class TopkLogprobs(HoldsArrays):
    """The k likeliest tokens at each of n positions: two (n, k) arrays. Rows of NaN were not
    computed.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray

    def tolist(self) -> list[list[tuple[int, float]] | None]:
        """One list of (token id, logprob) pairs a position; None where not computed."""
        rows = zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        return [
            None if any(math.isnan(p) for p in probs) else list(zip(ids, probs, strict=True))
            for ids, probs in rows
        ]


@dataclass(frozen=True)
class PromptAltTokens:
    """`k` draws at every prompt position after the first: tokens int64 and logprobs float32, both
    [P - 1, k].
    """

    tokens: TensorData
    logprobs: TensorData


@dataclass(frozen=True, eq=False)
class SampledSequence(HoldsArrays):
    """One sample. The stop token, if one was drawn, is the last of `tokens`."""

    stop_reason: StopReason
    sequence_id: str
    tokens_np: np.ndarray = field(repr=False)
    """int32 [n]"""
    logprobs_np: np.ndarray = field(repr=False)
    """float32 [n]: log-softmax(logits / temperature) of each token, before top_k, top_p and min_p
    (temperature 0: of the logits).
    """
    topk_logprobs_np: TopkLogprobs | None = field(default=None, repr=False)

    @cached_property
    def tokens(self) -> list[int]:
        return self.tokens_np.tolist()

    @cached_property
    def logprobs(self) -> list[float]:
        return self.logprobs_np.tolist()

    @cached_property
    def topk_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        return self.topk_logprobs_np.tolist() if self.topk_logprobs_np is not None else None


@dataclass(frozen=True, eq=False)
class SampleResponse(HoldsArrays):
    """What `sample` answers."""

    sequences: list[SampledSequence]
    prompt_logprobs_np: np.ndarray | None = field(default=None, repr=False)
    """float32 [P], at temperature 1; NaN where undefined (the first token) or not asked for."""
    topk_prompt_logprobs_np: TopkLogprobs | None = field(default=None, repr=False)
    target_prompt_logprobs: TensorData | None = None
    """float32, shape of the request's tensor; 0.0 where it had -1."""
    prompt_alt_tokens: PromptAltTokens | None = None
    prompt_cache_hit_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""

    @cached_property
    def prompt_logprobs(self) -> list[float | None] | None:
        if self.prompt_logprobs_np is None:
            return None
        return [None if math.isnan(p) else p for p in self.prompt_logprobs_np.tolist()]

    @cached_property
    def topk_prompt_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        return (
            self.topk_prompt_logprobs_np.tolist()
            if self.topk_prompt_logprobs_np is not None
            else None
        )


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """What `forward` and `forward_backward` answer."""

    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, TensorData]]
    """One dictionary a datum; "logprobs" has the shape of its target_tokens."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Keys are "name:reduction"; "loss:sum" is always there."""


@dataclass(frozen=True)
class OptimStepResponse:
    """What `optim_step` answers."""

    metrics: dict[str, float] = field(default_factory=dict)
    """"grad_norm" before clipping; "adam_step", counted from 1 (not "step": loops put these beside
    a "step" of their own).
    """


@dataclass(frozen=True)
class SaveWeightsResponse:
    path: str


@dataclass(frozen=True)
class SaveWeightsForSamplerResponse:
    path: str


@dataclass(frozen=True)
class LoadWeightsResponse:
    path: str


@dataclass(frozen=True)
class ModelData:
    arch: str
    model_name: str
    tokenizer_id: str | None = None


@dataclass(frozen=True)
class GetInfoResponse:
    """What is known of one training model."""

    model_id: str
    model_data: ModelData
    is_lora: bool = True
    lora_rank: int | None = None

    @property
    def model_name(self) -> str:
        return self.model_data.model_name


@dataclass(frozen=True)
class SupportedModel:
    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True


@dataclass(frozen=True)
class GetServerCapabilitiesResponse:
    supported_models: list[SupportedModel]

    def context_of(self, model_name: str) -> int | None:
        """Tokens that the model's context holds; None if that is not said."""
        return next(
            (
                model.max_context_length
                for model in self.supported_models
                if model.model_name == model_name
            ),
            None,
        )


CheckpointType = Literal["training", "sampler"]
_SEGMENTS: dict[str, CheckpointType] = {"weights": "training", "sampler_weights": "sampler"}


@dataclass(frozen=True)
class Checkpoint:
    """One saved checkpoint."""

    checkpoint_id: str
    """"weights/NAME" or "sampler_weights/NAME"."""
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True)
class Cursor:
    """Which part of a list was asked for."""

    offset: int
    limit: int
    total_count: int


@dataclass(frozen=True)
class CheckpointsListResponse:
    """Newest first."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


@dataclass(frozen=True)
class TrainingRun:
    """A model with checkpoints. Its metadata are those of its newest checkpoint."""

    training_run_id: str
    base_model: str
    is_lora: bool
    last_request_time: datetime
    """When its newest checkpoint was saved."""
    lora_rank: int | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None
    model_owner: str = "local"
    corrupted: bool = False


@dataclass(frozen=True)
class TrainingRunsResponse:
    """The latest first."""

    training_runs: list[TrainingRun]
    cursor: Cursor


@dataclass(frozen=True)
class WeightsInfoResponse:
    """The shape of a checkpoint's adapter."""

    base_model: str
    is_lora: bool = True
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


@dataclass(frozen=True)
class CheckpointPath:
    """A parsed checkpoint path, `tinker://<run>/<weights|sampler_weights>/<name>`.

    The scheme is the public SDK's, so a path from planish works in either client.
    """

    run_id: str
    checkpoint_type: CheckpointType
    name: str

    def __str__(self) -> str:
        segment = next(key for key, kind in _SEGMENTS.items() if kind == self.checkpoint_type)
        return f"tinker://{self.run_id}/{segment}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        return str(self).split("/", 3)[3]

    @classmethod
    def parse(cls, path: str) -> CheckpointPath:
        for scheme in ("tinker://", "planish://"):
            if isinstance(path, str) and path.startswith(scheme):
                parts = path.removeprefix(scheme).split("/")
                if len(parts) == 3 and all(parts) and parts[1] in _SEGMENTS:
                    return cls(parts[0], _SEGMENTS[parts[1]], parts[2])
        raise UserError(
            f"checkpoint path {path!r}: expected tinker://<run>/weights/<name> or tinker://<run>/sampler_weights/<name>, "
            "the `path` in the result of save_state or save_weights_for_sampler"
        )


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """`params` with another seed."""
    return replace(params, seed=seed)


LONGEST_TTL_SECONDS = 10 * 365 * 86400
"""Ten years."""

TTL_REMEDY = f"whole seconds from 1 to {LONGEST_TTL_SECONDS} (ten years), or None to keep it"


def is_ttl(seconds: object) -> bool:
    """Whether it can be a checkpoint's time to live; None is for ever."""
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        return seconds is None
    return 1 <= seconds <= LONGEST_TTL_SECONDS


def whole_number(
    name: str, value: Any, remedy: str, low: int = -(2**63), high: int = 2**63 - 1
) -> int:
    """`value` as an int of Python's, also where it is numpy's; of 64 bits, as neither a request nor
    a tensor holds more.

    UserError names it, with the remedy.
    """
    if _is_int(value) and not -(2**63) <= value <= 2**64 - 1:
        raise UserError(f"{name} has more than 64 bits: give {remedy}")
    if not _is_int(value) or not low <= value <= high:
        raise UserError(f"{name}={value!r}: give {remedy}")
    return int(value)


def _keep_whole(
    options: Any, name: str, remedy: str, low: int = -(2**63), high: int = 2**63 - 1
) -> None:
    value = whole_number(
        f"{type(options).__name__}.{name}", getattr(options, name), remedy, low, high
    )
    object.__setattr__(options, name, value)


def _keep_number(
    options: Any,
    name: str,
    low: float,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """The field as a float of Python's: optimizers and JSON take no other kind."""
    given = getattr(options, name)
    value = given.item() if isinstance(given, np.generic) else given
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    inside = is_number and low <= value <= min(high, sys.float_info.max)
    if inside and not (open_low and value == low) and not (open_high and value == high):
        object.__setattr__(options, name, float(value))
        return
    span = f"{'above' if open_low else 'at least'} {low:g}"
    if high != math.inf:
        span += f" and {'below' if open_high else 'at most'} {high:g}"
    raise UserError(f"{type(options).__name__}.{name}={given!r}: give a finite number {span}")


def _token_list(tokens: Any, name: str) -> list[int]:
    values = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if isinstance(values, Mapping) and "input_ids" in values:
        raise UserError(
            f"{name} is a {type(tokens).__name__}, as tokenizers give it; take its ['input_ids']"
        )
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise UserError(
            f"{name} is a {type(tokens).__name__}; give a list of token ids, such as tokenizer.encode(text)"
        )
    values = list(values)
    if not set(map(type, values)) <= {int}:
        for token in values:
            if not _is_int(token):
                raise UserError(
                    f"{name} holds {token!r}; give one list of token ids, which are whole numbers"
                )
        values = [int(token) for token in values]
    if values and (max(values) >= 2**63 or min(values) < -(2**63)):
        raise UserError(
            f"{name} holds a number of more than 64 bits, which no vocabulary has; use the model's own tokenizer"
        )
    return values


def _stop(stop: Any) -> Any:
    if stop is None or isinstance(stop, str):
        if stop == "":
            raise UserError(
                "SamplingParams.stop is an empty string, which every text contains; give [] for no stop"
            )
        return stop
    values = stop.tolist() if hasattr(stop, "tolist") else stop
    items: list[Any] = (
        list(values) if isinstance(values, Iterable) and not isinstance(values, bytes) else [None]
    )
    if all(isinstance(item, str) for item in items) and all(items):
        return tuple(items)
    if all(_is_int(item) for item in items):
        return tuple(
            whole_number("SamplingParams.stop", item, "token ids of the model's vocabulary")
            for item in items
        )
    raise UserError(
        f"SamplingParams.stop={stop!r}: give a string, a list of non-empty strings, a list of token ids, or None"
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
