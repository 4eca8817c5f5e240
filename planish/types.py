"""The arguments and results of all operations, as plain data classes.

Field names and meanings are those of the tinker SDK, so its users only change an import. Every
constructor checks types, shapes and ranges. The service makes the checks
that need a model (vocabulary, context length). Importing this module does not import torch.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from planish.errors import UserError, suggest_arguments
from planish.images import MAX_IMAGE_TOKENS, MAX_IMAGES, ImageChunk
from planish.tensors import ArrayEquality, TensorData, as_tensor_data

if TYPE_CHECKING:
    import torch

MAX_STOP_STRINGS = 32
MAX_STOP_BYTES = 128
MAX_STOP_TOKENS = 1024
"""Limits of SamplingParams.stop. The engine matches the stop strings after each token of
every sequence, so an unlimited `stop` would delay all tenants.
"""

MAX_CONSTRAINT_BYTES = 1 << 16
MAX_CONSTRAINT_CHOICES = 1024
"""Limits of Constraint: the number of bytes of its text, or of all its choices together, and the
number of its choices. A longer text could take too long to compile.
"""

MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKENS = 1 << 15
MAX_SCORED_TOKENS = 1024
"""Maximum number of `Sample.logprob_token_ids`."""
"""Limits of SamplingParams.logit_bias and allowed_token_ids, in tokens."""

StopReason = Literal["stop", "length"]
ConstraintKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]

_MAX_SHOWN_TOKENS = 16

_MIN_TEMPERATURE = 1e-30
"""Logits up to 3e8, divided by this temperature, still fit in float32."""
_MAX_TEMPERATURE = 1e30
"""Temperatures are float32 in the sampler."""
_SEED_REMEDY = "a whole number from -2**63 to 2**64 - 1, or None"
"""The seeds that torch's generators accept, for error messages."""


@dataclass(frozen=True)
class EncodedTextChunk:
    """A list of consecutive token ids."""

    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _checked_tokens(self.tokens, "EncodedTextChunk.tokens"))

    def __repr__(self) -> str:
        num_hidden = len(self.tokens) - _MAX_SHOWN_TOKENS
        shown_tokens = (
            repr(self.tokens)
            if num_hidden <= 0
            else f"[{', '.join(map(str, self.tokens[:_MAX_SHOWN_TOKENS]))}, ... {num_hidden} more]"
        )
        return f"EncodedTextChunk(tokens={shown_tokens})"

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


ModelInputChunk = EncodedTextChunk | ImageChunk


@dataclass(frozen=True)
class ModelInput:
    """A token sequence, given as a list of chunks of text and images."""

    chunks: list[ModelInputChunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        chunks = list(self.chunks)
        for chunk in chunks:
            if not isinstance(chunk, ModelInputChunk):
                raise UserError(
                    f"ModelInput.chunks contains a {type(chunk).__name__}; planish supports text "
                    "and images: give EncodedTextChunk(tokens=[...]) or ImageChunk(data=..., "
                    "format='png')"
                )
        object.__setattr__(self, "chunks", chunks)
        if len(self.images) > MAX_IMAGES:
            raise UserError(
                f"ModelInput.chunks contains {len(self.images)} images; give at most {MAX_IMAGES}"
            )

    @classmethod
    def from_ints(cls, tokens: Sequence[int] | np.ndarray | torch.Tensor) -> ModelInput:
        """Return a ModelInput with one chunk of these token ids: a list, or an integer array or
        tensor [N].
        """
        return cls(chunks=[EncodedTextChunk(tokens=tokens)])  # type: ignore[arg-type]

    @classmethod
    def empty(cls) -> ModelInput:
        """Return a ModelInput without tokens."""
        return cls(chunks=[])

    @property
    def images(self) -> list[ImageChunk]:
        """The images, in order."""
        return [chunk for chunk in self.chunks if isinstance(chunk, ImageChunk)]

    def to_ints(self) -> list[int]:
        """Return all token ids as one list. Raise UserError if the input contains an image."""
        if self.images:
            raise UserError(
                "this ModelInput contains an image, which is no list of token ids; use its chunks"
            )
        text = (chunk for chunk in self.chunks if isinstance(chunk, EncodedTextChunk))
        return [token for chunk in text for token in chunk.tokens]

    @property
    def length(self) -> int:
        """Number of tokens. Raise UserError if an image has no `expected_tokens`."""
        return sum(chunk.length for chunk in self.chunks)

    def to_targets(self) -> list[int]:
        """Return all token ids, with 0 at each position of an image. Raise UserError if an image
        has no `expected_tokens`.
        """
        targets: list[int] = []
        for chunk in self.chunks:
            is_image = isinstance(chunk, ImageChunk)
            targets += [0] * chunk.length if is_image else chunk.tokens
        return targets

    def to_keys(self) -> list[int]:
        """Return one integer for each token, which is equal in two inputs if the tokens are.

        Text has its token ids. The positions of an image have negative numbers that follow from its
        content. Raise UserError if an image has no `expected_tokens`.
        """
        keys: list[int] = []
        for chunk in self.chunks:
            keys += chunk.keys() if isinstance(chunk, ImageChunk) else chunk.tokens
        return keys

    def prefix(self, length: int) -> ModelInput:
        """Return the first `length` tokens. An image that does not fit as a whole is left out, and
        the result ends before it. Raise UserError if an image has no `expected_tokens`.
        """
        chunks: list[ModelInputChunk] = []
        for chunk in self.chunks:
            if length < chunk.length:
                if isinstance(chunk, EncodedTextChunk) and length > 0:
                    chunks.append(EncodedTextChunk(chunk.tokens[:length]))
                break
            chunks.append(chunk)
            length -= chunk.length
        return ModelInput(chunks)

    @property
    def max_length(self) -> int:
        """Number of tokens, in which an image without `expected_tokens` counts MAX_IMAGE_TOKENS."""
        return sum(
            MAX_IMAGE_TOKENS
            if isinstance(chunk, ImageChunk) and chunk.expected_tokens is None
            else chunk.length
            for chunk in self.chunks
        )

    def append(self, chunk: ModelInputChunk) -> ModelInput:
        """Return a copy with `chunk` at the end."""
        return ModelInput(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """Return a copy with one more token at the end."""
        return self.append(EncodedTextChunk(tokens=[token]))


@dataclass(frozen=True, kw_only=True)
class _ProvenanceSpan:
    sequence_id: str
    """The `sequence_id` of a SampledSequence."""
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.sequence_id, str) or not self.sequence_id:
            raise UserError(
                f"{type(self).__name__}.sequence_id={self.sequence_id!r}: give the sequence_id of "
                "a SampledSequence"
            )
        for name in ("offset", "length"):
            _convert_integer(self, name, "a whole number of at least 0", low=0)


@dataclass(frozen=True, kw_only=True)
class PromptProvenanceSpan(_ProvenanceSpan):
    """`length` positions whose tokens come from a sample's prompt, starting at prompt token
    `offset`.
    """


@dataclass(frozen=True, kw_only=True)
class SampledProvenanceSpan(_ProvenanceSpan):
    """`length` positions whose tokens were sampled, starting at sampled token `offset`."""


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
                f"Datum.model_input is a {type(model_input).__name__}; give "
                "ModelInput.from_ints(tokens)"
            )
        object.__setattr__(self, "model_input", model_input)
        if loss_fn_inputs is not None and not isinstance(loss_fn_inputs, Mapping):
            kind = type(loss_fn_inputs).__name__
            raise UserError(
                f'Datum.loss_fn_inputs is a {kind}; give a dictionary such as {{"target_tokens": '
                f"[...]}}"
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
        shape = None if targets is None else targets.shape
        num_targets = shape[0] if shape is not None and len(shape) == 1 else None
        if model_input_spans is not None:
            _check_spans("model_input_spans", model_input_spans, model_input.length)
            _check_spans("loss_fn_input_spans", loss_fn_input_spans, num_targets)
        object.__setattr__(self, "model_input_spans", model_input_spans)
        object.__setattr__(self, "loss_fn_input_spans", loss_fn_input_spans)

    def with_provenance(
        self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans
    ) -> Datum:
        """Return a copy that records which samples its tokens come from.

        `model_input` and `loss_fn_inputs` are lists of spans that cover all positions of
        `model_input` and of `target_tokens`. No loss of planish reads the spans.
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
            f"Datum.{name} covers {covered} of {length} positions; its spans must cover all of them"
        )


def check_data(data: Any) -> None:
    """Raise UserError unless `data` is a list of Datum with TensorData inputs."""
    if isinstance(data, Datum) or not isinstance(data, Sequence):
        raise UserError(f"data is a {type(data).__name__}; give a list of Datum")
    for index, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise UserError(f"data[{index}] is a {type(datum).__name__}; give a Datum")
        for name, value in datum.loss_fn_inputs.items():
            if not isinstance(value, TensorData):  # replaced after the Datum was made
                raise UserError(
                    f"data[{index}].loss_fn_inputs[{name!r}] is a {type(value).__name__}; give "
                    "TensorData"
                )


@dataclass(frozen=True)
class Constraint:
    """A formal language for structured output: the text of a sample has to be in this language.

    A token is only sampled if some text of the language begins with the text so far and this token.
    When the text so far is in the language, a stop token is allowed. If no continuation of such
    a text is in the language, a stop token must follow. A sample that reaches `max_tokens` is
    incomplete.

    - `Constraint("json_object")`: any JSON object.
    - `Constraint("json_schema", text)`: JSON that `text`, a JSON schema as JSON text, accepts.
    - `Constraint("regex", text)`: text that the regular expression `text` matches as a whole, in
      the syntax of Rust's `regex` library (no look-around, no back-references).
    - `Constraint("choice", choices=[...])`: one of these strings.
    - `Constraint("lark", text)`: text of the Lark grammar `text`, in the dialect of `llguidance`.

    The text has at most MAX_CONSTRAINT_BYTES bytes, and so have all choices together.
    """

    kind: ConstraintKind
    text: str = ""
    choices: Sequence[str] = ()

    def __post_init__(self) -> None:
        kinds = get_args(ConstraintKind)
        if self.kind not in kinds:
            raise UserError(f"Constraint.kind={self.kind!r}: give one of {', '.join(kinds)}")
        if not isinstance(self.text, str):
            raise UserError(
                f"Constraint.text is a {type(self.text).__name__}; give a string (a JSON schema as "
                "JSON text: json.dumps(schema))"
            )
        needs_text = self.kind not in ("json_object", "choice")
        if bool(self.text) is not needs_text:
            remedy = "give its text" if needs_text else "leave it out"
            raise UserError(
                f"Constraint.text={reprlib.repr(self.text)} of kind {self.kind}: {remedy}"
            )
        choices: list[Any] = (
            [None] if isinstance(self.choices, (str, bytes)) else list(self.choices)
        )
        is_choice = self.kind == "choice"
        if bool(self.choices) is not is_choice or not all(
            isinstance(choice, str) and choice for choice in choices
        ):
            remedy = "a list of non-empty strings" if is_choice else "no choices"
            raise UserError(
                f"Constraint.choices={reprlib.repr(self.choices)} of kind {self.kind}: give "
                f"{remedy}"
            )
        if len(choices) > MAX_CONSTRAINT_CHOICES:
            raise UserError(
                f"Constraint.choices has {len(choices)} strings: give at most "
                f"{MAX_CONSTRAINT_CHOICES}"
            )
        object.__setattr__(self, "choices", tuple(choices))
        try:
            size = sum(len(text.encode()) for text in (self.text, *choices))
        except UnicodeEncodeError:
            raise UserError(
                "Constraint.text or a choice contains a lone surrogate; give Unicode text"
            ) from None
        if size > MAX_CONSTRAINT_BYTES:
            raise UserError(
                f"Constraint.text and choices have {size} bytes: give at most "
                f"{MAX_CONSTRAINT_BYTES}"
            )
        if self.kind == "json_schema":
            _check_schema(self.text)


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"Constraint.text is not JSON ({error}); give a JSON schema as JSON text"
        ) from None
    if not isinstance(schema, (dict, bool)):
        raise UserError(
            f"Constraint.text is a JSON {type(schema).__name__}; give a JSON schema, which is an "
            "object"
        )


@suggest_arguments(
    max_new_tokens="max_tokens",
    stop_sequences="stop",
    n="num_samples to SamplingClient.sample",
    num_samples="num_samples to SamplingClient.sample",
    logprobs="nothing: each sample has its logprobs",
)
@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled.

    The returned logprobs are those of the model at `temperature`. The filters, the penalties,
    `min_tokens`, `constraint`, `logit_bias` and `allowed_token_ids` change which token is sampled,
    and never the returned logprobs.
    """

    max_tokens: int | None = None
    """Maximum number of tokens to sample; None = until the model's context is full."""
    seed: int | None = None
    """Makes sampling reproducible. The samples of one request still differ from each other."""
    stop: str | Sequence[str] | Sequence[int] | None = None
    """None = the model's end-of-sequence tokens. Strings or token ids replace these; [] = never
    stop early. At most MAX_STOP_STRINGS strings of MAX_STOP_BYTES bytes, or MAX_STOP_TOKENS ids.
    """
    temperature: float = 1.0
    """0 = greedy."""
    top_k: int = -1
    """-1 = off."""
    top_p: float = 1.0
    """1 = off."""
    min_p: float = 0.0
    """Keep only tokens whose probability is at least `min_p` times the highest one; 0 = off."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end a sample in addition to `stop`; at most MAX_STOP_TOKENS."""
    min_tokens: int = 0
    """Minimum number of tokens before a stop token or a stop string can end a sample. Until then,
    stop tokens are not sampled, unless `constraint` allows no other token.
    """
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in the prompt and the sample, and multiplies their
    negative logits; 1 = off.
    """
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time the sample contains it; 0 = off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the sample contains; 0 = off."""
    constraint: Constraint | None = None
    """Restricts the text of a sample, for example to JSON of a given schema; None = off."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Numbers from -100 to 100 that are added to the logits of tokens, by token id. They are added
    before the penalties, the temperature and the filters, as in vLLM. At most MAX_LOGIT_BIASES.
    """
    allowed_token_ids: Sequence[int] = ()
    """The only tokens that can be sampled, at most MAX_ALLOWED_TOKENS; () = all. A sample can end
    at a stop token only if it is one of them. Cannot be combined with `constraint`.
    """

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _convert_integer(self, "max_tokens", "a whole number of at least 1, or None", low=1)
        if self.seed is not None:
            _convert_integer(self, "seed", _SEED_REMEDY, high=2**64 - 1)
        _convert_number(self, "temperature", low=0.0, high=_MAX_TEMPERATURE)
        if 0 < self.temperature < _MIN_TEMPERATURE:
            raise UserError(
                f"SamplingParams.temperature={self.temperature!r}: dividing the logits by it "
                f"overflows; give 0 for greedy decoding, or at least {_MIN_TEMPERATURE:g}"
            )
        if self.top_k != -1:
            _convert_integer(self, "top_k", "a whole number of at least 1, or -1 for off", low=1)
        _convert_number(self, "top_p", low=0.0, high=1.0, open_low=True)
        _convert_number(self, "min_p", low=0.0, high=1.0)
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_stop_token_ids(self.stop_token_ids))
        _convert_integer(self, "min_tokens", "a whole number of at least 0", low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(
                f"SamplingParams.min_tokens={self.min_tokens} is more than "
                f"max_tokens={self.max_tokens}: give at most that"
            )
        _convert_number(self, "repetition_penalty", low=0.01, high=100.0)
        _convert_number(self, "frequency_penalty", low=-100.0, high=100.0)
        _convert_number(self, "presence_penalty", low=-100.0, high=100.0)
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise UserError(
                f"SamplingParams.constraint is a {type(self.constraint).__name__}; give a "
                "Constraint or None"
            )
        object.__setattr__(self, "logit_bias", _checked_biases(self.logit_bias))
        object.__setattr__(
            self,
            "allowed_token_ids",
            _checked_ids(self.allowed_token_ids, "allowed_token_ids", MAX_ALLOWED_TOKENS),
        )
        if self.allowed_token_ids and self.constraint is not None:
            raise UserError(
                f"SamplingParams.allowed_token_ids={reprlib.repr(self.allowed_token_ids)}: the "
                "constraint restricts the tokens too; give one of them"
            )


@suggest_arguments(
    lr="learning_rate",
    betas="beta1 and beta2",
    max_grad_norm="grad_clip_norm",
    clip_grad_norm="grad_clip_norm",
)
@dataclass(frozen=True)
class AdamParams:
    """One AdamW step (Loshchilov & Hutter 2019, decoupled weight decay), as in
    torch.optim.AdamW.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Maximum global gradient norm: gradients with a larger norm are scaled down. 0 = off."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            _convert_number(self, name, low=0.0)
        for name in ("beta1", "beta2"):
            _convert_number(self, name, low=0.0, high=1.0, open_high=True)


@suggest_arguments(r="rank", lora_rank="rank")
@dataclass(frozen=True)
class LoraConfig:
    """Shape and initialisation of a LoRA adapter (Hu et al. 2021). Alpha is 32 at every rank."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def __post_init__(self) -> None:
        _convert_integer(self, "rank", "a whole number from 1 to 256", low=1, high=256)
        if self.seed is not None:
            _convert_integer(self, "seed", _SEED_REMEDY, high=2**64 - 1)
        for name in ("train_unembed", "train_mlp", "train_attn"):
            convert_flag(self, name, "LoraConfig.")
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise UserError(
                "train_attn, train_mlp and train_unembed are all False: nothing would be trained; "
                "set one to True"
            )


@dataclass(frozen=True, eq=False)
class TopkLogprobs(ArrayEquality):
    """The k most likely tokens at each of n positions, as two [n, k] arrays. The logprobs are NaN
    at positions that were not computed.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray

    def tolist(self) -> list[list[tuple[int, float]] | None]:
        """Return one list of (token id, logprob) pairs per position; None where not computed."""
        rows = zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        return [
            None if any(math.isnan(p) for p in probs) else list(zip(ids, probs, strict=True))
            for ids, probs in rows
        ]


@dataclass(frozen=True)
class PromptAltTokens:
    """`k` sampled alternatives at every prompt position after the first: tokens (int64) and
    logprobs (float32), both [P - 1, k].
    """

    tokens: TensorData
    logprobs: TensorData


@dataclass(frozen=True, eq=False)
class SampledSequence(ArrayEquality):
    """One sample. If a stop token was sampled, it is the last of `tokens`."""

    stop_reason: StopReason
    sequence_id: str
    tokens_np: np.ndarray = field(repr=False)
    """int32 [n]"""
    logprobs_np: np.ndarray = field(repr=False)
    """float32 [n]: log-softmax(logits / temperature) of each token, before top_k, top_p and min_p
    (at temperature 0: log-softmax(logits)).
    """
    topk_logprobs_np: TopkLogprobs | None = field(default=None, repr=False)

    @cached_property
    def tokens(self) -> list[int]:
        """The sampled token ids."""
        return self.tokens_np.tolist()

    @cached_property
    def logprobs(self) -> list[float]:
        """The logprob of each sampled token, as in `logprobs_np`."""
        return self.logprobs_np.tolist()

    @cached_property
    def topk_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        """Per position the most likely tokens as (token id, logprob); None if not requested."""
        return self.topk_logprobs_np.tolist() if self.topk_logprobs_np is not None else None


@dataclass(frozen=True, eq=False)
class SampleResponse(ArrayEquality):
    """The result of `sample`."""

    sequences: list[SampledSequence]
    prompt_logprobs_np: np.ndarray | None = field(default=None, repr=False)
    """float32 [P], at temperature 1; NaN where undefined (the first token) or not requested."""
    topk_prompt_logprobs_np: TopkLogprobs | None = field(default=None, repr=False)
    target_prompt_logprobs: TensorData | None = None
    """float32, in the shape of the requested token ids; 0.0 where the requested id was -1."""
    prompt_alt_tokens: PromptAltTokens | None = None
    prompt_cache_hit_tokens: int = 0
    """Number of prompt tokens whose keys and values came from the prefix cache."""

    @cached_property
    def prompt_logprobs(self) -> list[float | None] | None:
        """The logprob of each prompt token; None where undefined or not requested."""
        if self.prompt_logprobs_np is None:
            return None
        return [None if math.isnan(p) else p for p in self.prompt_logprobs_np.tolist()]

    @cached_property
    def topk_prompt_logprobs(self) -> list[list[tuple[int, float]] | None] | None:
        """Per prompt position the most likely tokens as (token id, logprob)."""
        return (
            self.topk_prompt_logprobs_np.tolist()
            if self.topk_prompt_logprobs_np is not None
            else None
        )


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """The result of `forward` and `forward_backward`."""

    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, TensorData]]
    """One dictionary per datum; its "logprobs" have the shape of the datum's target_tokens."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Keys have the form "name:reduction"; "loss:sum" is always present."""


@dataclass(frozen=True)
class OptimStepResponse:
    """The result of `optim_step`."""

    metrics: dict[str, float] = field(default_factory=dict)
    """"grad_norm" before clipping, and "adam_step", counted from 1. (The key is not "step", because
    training loops log these metrics next to their own "step".)
    """


@dataclass(frozen=True)
class SaveWeightsResponse:
    """The checkpoint that `save_state` wrote."""

    path: str


@dataclass(frozen=True)
class SaveWeightsForSamplerResponse:
    """The checkpoint that `save_weights_for_sampler` wrote."""

    path: str


@dataclass(frozen=True)
class LoadWeightsResponse:
    """The checkpoint that `load_state` loaded."""

    path: str


@dataclass(frozen=True)
class ModelData:
    """The base model of a training model."""

    arch: str
    model_name: str
    tokenizer_id: str | None = None


@dataclass(frozen=True)
class GetInfoResponse:
    """A training model: its id, base model and LoRA rank."""

    model_id: str
    model_data: ModelData
    is_lora: bool = True
    lora_rank: int | None = None

    @property
    def model_name(self) -> str:
        """The name of the base model."""
        return self.model_data.model_name


@dataclass(frozen=True)
class SupportedModel:
    """A base model that a service offers."""

    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True
    vocab_size: int | None = None
    """The number of token ids, which may be larger than the tokenizer's. The tinker SDK does not
    have this field.
    """


@dataclass(frozen=True)
class GetServerCapabilitiesResponse:
    """The base models that a service offers."""

    supported_models: list[SupportedModel]

    def model(self, model_name: str) -> SupportedModel | None:
        """Return the model of this name; None if the service does not list it."""
        return next(
            (model for model in self.supported_models if model.model_name == model_name), None
        )

    def context_length_of(self, model_name: str) -> int | None:
        """Return the context length of a model in tokens; None if it is not known."""
        model = self.model(model_name)
        return None if model is None else model.max_context_length


CheckpointType = Literal["training", "sampler"]
_TYPE_OF_SEGMENT: dict[str, CheckpointType] = {"weights": "training", "sampler_weights": "sampler"}


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
    """The requested page of a list."""

    offset: int
    limit: int
    total_count: int


@dataclass(frozen=True)
class CheckpointsListResponse:
    """Checkpoints, newest first."""

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


@dataclass(frozen=True)
class TrainingRun:
    """A training model that has checkpoints. `user_metadata` is that of its newest checkpoint."""

    training_run_id: str
    base_model: str
    is_lora: bool
    last_request_time: datetime
    """The time at which the newest checkpoint was saved."""
    lora_rank: int | None = None
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None
    model_owner: str = "local"
    corrupted: bool = False


@dataclass(frozen=True)
class TrainingRunsResponse:
    """Training runs, the most recent first."""

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

    The scheme is that of the tinker SDK, so both clients accept the same paths.
    """

    run_id: str
    checkpoint_type: CheckpointType
    name: str

    def __str__(self) -> str:
        segment = next(
            key for key, kind in _TYPE_OF_SEGMENT.items() if kind == self.checkpoint_type
        )
        return f"tinker://{self.run_id}/{segment}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        """ "weights/NAME" or "sampler_weights/NAME"."""
        return str(self).split("/", 3)[3]

    @classmethod
    def parse(cls, path: str) -> CheckpointPath:
        """Parse a path with the scheme tinker:// or planish://. Raise UserError if `path` is not
        the path of a checkpoint.
        """
        for scheme in ("tinker://", "planish://"):
            if isinstance(path, str) and path.startswith(scheme):
                parts = path.removeprefix(scheme).split("/")
                if len(parts) == 3 and all(parts) and parts[1] in _TYPE_OF_SEGMENT:
                    return cls(parts[0], _TYPE_OF_SEGMENT[parts[1]], parts[2])
        raise UserError(
            f"checkpoint path {path!r}: expected tinker://<run>/weights/<name> or "
            "tinker://<run>/sampler_weights/<name>, the `path` in the result of save_state or "
            "save_weights_for_sampler"
        )


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """Return a copy of `params` with another seed."""
    return replace(params, seed=seed)


LONGEST_TTL_SECONDS = 10 * 365 * 86400
"""Ten years."""

TTL_REMEDY = f"whole seconds from 1 to {LONGEST_TTL_SECONDS} (ten years), or None to keep it"


NAME_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}"
"""A name of this form can be one component of a path and of a URL."""


def is_name(name: object) -> bool:
    """Return whether `name` can name a checkpoint or a run."""
    return isinstance(name, str) and re.fullmatch(NAME_PATTERN, name) is not None


def check_name(argument: str, name: object) -> None:
    """Raise UserError unless `name` is a valid name of a checkpoint or a run. The message names the
    `argument`.
    """
    if not is_name(name):
        raise UserError(
            f"{argument}={name!r}: give up to 200 letters, digits and _ . - : without a slash, "
            "not beginning with a dot or dash"
        )


def check_metadata(user_metadata: object) -> None:
    """Raise UserError unless `user_metadata` is a mapping of strings to strings."""
    if not isinstance(user_metadata, Mapping) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in user_metadata.items()
    ):
        raise UserError(f"user_metadata={user_metadata!r}: give a dictionary of strings to strings")


def check_ttl(seconds: object) -> None:
    """Raise UserError unless `seconds` is a valid time to live, or None."""
    if not is_ttl(seconds):
        raise UserError(f"ttl_seconds={seconds!r}: give {TTL_REMEDY}")


def is_ttl(seconds: object) -> bool:
    """Return whether `seconds` is a valid time to live of a checkpoint. None, which keeps the
    checkpoint for ever, is valid.
    """
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        return seconds is None
    return 1 <= seconds <= LONGEST_TTL_SECONDS


def checked_integer(
    name: str, value: Any, remedy: str, low: int = -(2**63), high: int = 2**63 - 1
) -> int:
    """Return `value`, a Python or numpy integer of at most 64 bits, as a Python int.

    Raise UserError with `name` and `remedy` if `value` is not an integer from `low` to `high`.
    """
    if _is_int(value) and not -(2**63) <= value <= 2**64 - 1:
        raise UserError(f"{name} has more than 64 bits: give {remedy}")
    if not _is_int(value) or not low <= value <= high:
        raise UserError(f"{name}={value!r}: give {remedy}")
    return int(value)


def convert_flag(options: Any, name: str, prefix: str = "") -> None:
    """Convert a field to a Python bool. Raise UserError unless it is a Python or numpy bool. The
    message names the field with `prefix` before its name.
    """
    value = getattr(options, name)
    if not isinstance(value, (bool, np.bool_)):
        raise UserError(f"{prefix}{name}={value!r}: give True or False")
    object.__setattr__(options, name, bool(value))


def _convert_integer(
    options: Any, name: str, remedy: str, low: int = -(2**63), high: int = 2**63 - 1
) -> None:
    value = checked_integer(
        f"{type(options).__name__}.{name}", getattr(options, name), remedy, low, high
    )
    object.__setattr__(options, name, value)


def _convert_number(
    options: Any,
    name: str,
    low: float,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Convert the field to a Python float, because optimizers and JSON reject some numpy numbers.
    Raise UserError unless the value is a finite number in the range.
    """
    field_value = getattr(options, name)
    value = field_value.item() if isinstance(field_value, np.generic) else field_value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_in_range = is_number and low <= value <= min(high, sys.float_info.max)
    if is_in_range and not (open_low and value == low) and not (open_high and value == high):
        object.__setattr__(options, name, float(value))
        return
    range_text = f"{'above' if open_low else 'at least'} {low:g}"
    if high != math.inf:
        range_text += f" and {'below' if open_high else 'at most'} {high:g}"
    raise UserError(
        f"{type(options).__name__}.{name}={field_value!r}: give a finite number {range_text}"
    )


def _checked_tokens(tokens: Any, name: str) -> list[int]:
    values = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if isinstance(values, Mapping) and "input_ids" in values:
        raise UserError(
            f"{name} is a {type(tokens).__name__}, as tokenizers return it; give its ['input_ids']"
        )
    if isinstance(values, (str, bytes, Mapping, Set)) or not isinstance(values, Iterable):
        raise UserError(
            f"{name} is a {type(tokens).__name__}; give a list of token ids, such as "
            "tokenizer.encode(text)"
        )
    values = list(values)
    if not set(map(type, values)) <= {int}:
        for token in values:
            if not _is_int(token):
                raise UserError(
                    f"{name} contains {token!r}; give one list of token ids, which are whole "
                    "numbers"
                )
        values = [int(token) for token in values]
    if values and (max(values) >= 2**63 or min(values) < -(2**63)):
        raise UserError(
            f"{name} contains a number of more than 64 bits, which is in no vocabulary; use the "
            "model's own tokenizer"
        )
    return values


def _check_stop_string(string: str) -> None:
    size = len(string.encode("utf-8", "surrogatepass"))
    if size > MAX_STOP_BYTES:
        raise UserError(
            f"SamplingParams.stop contains a string of {size} bytes: give at most {MAX_STOP_BYTES} "
            "bytes"
        )


def _checked_stop(stop: Any) -> Any:
    if stop is None or isinstance(stop, str):
        if stop == "":
            raise UserError(
                "SamplingParams.stop is an empty string, which would stop at once; give [] to "
                "never stop early"
            )
        if stop is not None:
            _check_stop_string(stop)
        return stop
    values = stop.tolist() if hasattr(stop, "tolist") else stop
    items: list[Any] = (
        list(islice(values, MAX_STOP_TOKENS + 1))
        if isinstance(values, Iterable) and not isinstance(values, bytes)
        else [None]
    )
    if len(items) > MAX_STOP_TOKENS:
        raise UserError(
            f"SamplingParams.stop: give at most {MAX_STOP_TOKENS} token ids or {MAX_STOP_STRINGS} "
            "strings"
        )
    if all(isinstance(item, str) for item in items) and all(items):
        if len(items) > MAX_STOP_STRINGS:
            raise UserError(
                f"SamplingParams.stop has {len(items)} strings: give at most {MAX_STOP_STRINGS}"
            )
        for item in items:
            _check_stop_string(item)
        return tuple(items)
    if all(_is_int(item) for item in items):
        return tuple(
            checked_integer("SamplingParams.stop", item, "token ids of the model's vocabulary")
            for item in items
        )
    raise UserError(
        f"SamplingParams.stop={reprlib.repr(stop)}: give a string, a list of non-empty strings, a "
        "list of token ids, or None"
    )


def _checked_stop_token_ids(stop_token_ids: Any) -> tuple[int, ...]:
    name = "SamplingParams.stop_token_ids"
    ids = () if stop_token_ids is None else stop_token_ids
    try:
        stop = None if isinstance(ids, str) else _checked_stop(ids)
    except UserError as error:
        raise UserError(str(error).replace("SamplingParams.stop", name)) from None
    if stop is None or any(isinstance(item, str) for item in stop):
        raise UserError(f"{name}={reprlib.repr(stop_token_ids)}: give a list of token ids")
    return stop


def _checked_ids(value: Any, name: str, limit: int) -> tuple[int, ...]:
    given = () if value is None else value
    is_list = isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping))
    ids: tuple[Any, ...] = tuple(given) if is_list else (None,)
    if len(ids) > limit or not all(_is_int(token) and 0 <= token < 1 << 31 for token in ids):
        raise UserError(
            f"SamplingParams.{name}={reprlib.repr(value)}: give a list of at most {limit} token ids"
        )
    return tuple(map(int, ids))


def _checked_biases(value: Any) -> dict[int, float]:
    biases = {} if value is None else value
    if not isinstance(biases, Mapping) or len(biases) > MAX_LOGIT_BIASES:
        raise UserError(
            f"SamplingParams.logit_bias={reprlib.repr(value)}: give a dictionary of at most "
            f"{MAX_LOGIT_BIASES} token ids and their biases"
        )
    for token, bias in biases.items():
        is_number = isinstance(bias, (int, float, np.number)) and not isinstance(bias, bool)
        if not (_is_int(token) and 0 <= token < 1 << 31 and is_number and -100 <= bias <= 100):
            raise UserError(
                f"SamplingParams.logit_bias[{reprlib.repr(token)}]={reprlib.repr(bias)}: give a "
                "token id, and a number from -100 to 100"
            )
    return {int(token): float(bias) for token, bias in biases.items()}


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
