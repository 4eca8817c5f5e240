"""What both OpenAI-compatible endpoints share: the sampling options of a request, and its samples,
streamed or as a whole.

Unsupported parameters are rejected by name. Besides OpenAI's parameters, `top_k` and `min_p` are
supported, as in other servers. Parameters that describe the client and change nothing in the answer
are accepted. Cancelling the answer, or losing the client, cancels the samples that are still
running.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import StreamingResponse

from planish.errors import UserError
from planish.server.http.context import UnsupportedParameterError, WrongParameterError, error_body
from planish.server.openai.models import OpenAIModels
from planish.server.results import Tenant
from planish.service import Sample, SampledToken
from planish.types import SampleResponse, SamplingParams
from planish.wire.fields import Fields

T = TypeVar("T")


MAX_CHOICES, MAX_TOP_LOGPROBS, MAX_STOPS = 128, 20, 16

_MAX_ANSWER = 1 << 30
_TOKEN_BYTES, _SCORE_BYTES = 32, 300

_SHARED = {
    *(
        "model",
        "n",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stream",
        "stream_options",
    ),
    "logprobs",
}
_CLIENT_INFORMATION = {
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
}
# Parameters of OpenAI, with the values that change nothing, and the remedy for other values.
_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "frequency_penalty": (
        (0,),
        "tokens are sampled from the model's own distribution; leave it out or give 0",
    ),
    "presence_penalty": (
        (0,),
        "tokens are sampled from the model's own distribution; leave it out or give 0",
    ),
    "logit_bias": (({},), "tokens are sampled from the model's own distribution; leave it out"),
    "store": ((False,), "nothing is stored; leave it out or give false"),
    "service_tier": (("auto", "default"), "there is one tier; leave it out"),
}
_CHAT_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (
        ({"type": "text"},),
        "output is not constrained; ask for JSON in the messages",
    ),
    "modalities": ((["text"],), "the models here write text; leave it out"),
    "parallel_tool_calls": ((True,), "calls are not constrained; leave it out or give true"),
    "functions": ((), "give tools"),
    "function_call": ((), "give tool_choice"),
}
_TEXT_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "every choice is returned; leave it out"),
    "suffix": (("",), "the models here continue a prompt; leave it out"),
}


@dataclass(frozen=True)
class Options:
    """The options that both endpoints have."""

    model: str
    n: int
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    top_logprobs: int | None
    """None: no logprobs; 0: only those of the sampled tokens."""
    stream: bool
    include_usage: bool
    """Whether a stream ends with the token counts."""

    def sampling_params(self, stop: list[str] | list[int]) -> SamplingParams:
        """Return the sampling parameters with the given stop condition."""
        try:
            return SamplingParams(
                self.max_tokens,
                self.seed,
                stop,
                self.temperature,
                self.top_k,
                self.top_p,
                self.min_p,
            )
        except ValueError as error:
            name = str(error).partition("SamplingParams.")[2].partition("=")[0]
            raise WrongParameterError(name, str(error).replace("SamplingParams.", "")) from None


def read_chat_options(fields: Fields) -> Options:
    """Read the options of /v1/chat/completions, without messages and tools."""
    _reject_others(
        fields,
        _SHARED | {"messages", "tools", "tool_choice", "top_logprobs", "max_completion_tokens"},
        {**_NEUTRAL, **_CHAT_NEUTRAL},
    )
    wanted = optional(fields, fields.boolean, "logprobs", False)
    top = _top(fields, "top_logprobs")
    if top is not None and not wanted:
        raise WrongParameterError("top_logprobs", "top_logprobs needs logprobs=true")
    longest = optional(fields, lambda name: fields.integer(name, 1), "max_completion_tokens", None)
    return _options(
        fields,
        longest or optional(fields, lambda name: fields.integer(name, 1), "max_tokens", None),
        (top or 0) if wanted else None,
    )


def read_text_options(fields: Fields, default_max_tokens: int) -> Options:
    """Read the options of /v1/completions, without prompt and echo."""
    _reject_others(fields, _SHARED | {"prompt", "echo"}, {**_NEUTRAL, **_TEXT_NEUTRAL})
    longest = optional(
        fields, lambda name: fields.integer(name, 0), "max_tokens", default_max_tokens
    )
    return _options(fields, longest, _top(fields, "logprobs"))


def check_text(name: str, given: Any, max_characters: int) -> None:
    """Raise WrongParameterError if a JSON value contains too much text for the model's context.

    Call this before tokenizing, because the tokenizer needs about 280 bytes per character.
    """
    size = _characters(given)
    if size > max_characters:
        raise WrongParameterError(
            name,
            f"{name} has {size:,} characters, and the model's context holds at most "
            f"{max_characters:,}; shorten it",
        )


def _characters(value: Any) -> int:
    """Return the number of characters of all texts in a JSON value, plus one per list or object."""
    total, pending = 0, [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):
            total += 1
            pending += value.values()
        elif isinstance(value, list):
            total += 1
            pending += value
    return total


def check_size(operations: Sequence[Sample], context: int) -> None:
    """Raise WrongParameterError if the answer could need more memory than one request may use.
    `context` is the length of the model's context in tokens.
    """
    size = sum(_max_bytes(operation, context) for operation in operations)
    if size > _MAX_ANSWER:
        raise WrongParameterError(
            "n",
            f"the answer could have {size >> 20:,} MiB, and the limit is {_MAX_ANSWER >> 20:,}; "
            "lower n, max_tokens, logprobs "
            "or the number of prompts",
        )


def _max_bytes(operation: Sample, context: int) -> int:
    """Estimate the largest size of an answer, as Python objects and JSON."""
    drawn = (
        0
        if operation.prompt_only
        else min(operation.sampling_params.max_tokens or context, context)
    )
    row = _TOKEN_BYTES + _SCORE_BYTES * operation.topk_sample_logprobs
    prompt_row = (
        _SCORE_BYTES * (1 + operation.topk_prompt_logprobs) if operation.prompt_logprobs else 0
    )
    return operation.num_samples * (drawn * row + operation.prompt.length * prompt_row)


def optional(fields: Fields, read: Callable[[str], T], name: str, default: Any) -> Any:
    """Read a field, or return the default if it is absent. Errors name the parameter as OpenAI
    does.
    """
    try:
        return fields.optional(read, name, default)
    except UserError as error:
        raise WrongParameterError(name, str(error)) from None


def _options(fields: Fields, max_tokens: int | None, top_logprobs: int | None) -> Options:
    stream = optional(fields, fields.boolean, "stream", False)
    details = optional(fields, fields.object, "stream_options", None)
    if details is not None and not stream:
        raise WrongParameterError("stream_options", "stream_options needs stream=true")
    return Options(
        model=_required_text(fields, "model"),
        n=optional(fields, lambda name: fields.integer(name, 1, MAX_CHOICES), "n", 1),
        max_tokens=max_tokens,
        temperature=optional(fields, fields.number, "temperature", 1.0),
        top_p=optional(fields, fields.number, "top_p", 1.0),
        top_k=optional(fields, fields.integer, "top_k", -1) or -1,
        min_p=optional(fields, fields.number, "min_p", 0.0),
        seed=optional(fields, fields.integer, "seed", None),
        stop=_stop(fields),
        top_logprobs=top_logprobs,
        stream=stream,
        include_usage=details is not None and _include_usage(details),
    )


def _include_usage(details: Fields) -> bool:
    with details:
        return optional(details, details.boolean, "include_usage", False)


def _required_text(fields: Fields, name: str) -> str:
    if not fields.has(name):
        raise WrongParameterError(name, f"{name} is missing")
    return optional(fields, fields.text, name, "")


def _top(fields: Fields, name: str) -> int | None:
    return optional(fields, lambda name: fields.integer(name, 0, MAX_TOP_LOGPROBS), name, None)


def _stop(fields: Fields) -> tuple[str, ...]:
    given = fields.raw("stop")
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise WrongParameterError(
            "stop", "stop: give a string that is not empty, or a list of such strings"
        )
    if len(stops) > MAX_STOPS:
        raise WrongParameterError(
            "stop", f"stop has {len(stops)} strings; at most {MAX_STOPS} are supported"
        )
    return tuple(stops)


def _reject_others(
    fields: Fields, known: set[str], neutral: Mapping[str, tuple[tuple[Any, ...], str]]
) -> None:
    for name in fields:
        value = fields.raw(name)
        if value is None or name in known or name in _CLIENT_INFORMATION:
            continue
        if name not in neutral:
            raise UnsupportedParameterError(name, "leave it out")
        values, remedy = neutral[name]
        if value not in values:
            raise UnsupportedParameterError(name, remedy)


class ClientGoneError(Exception):
    """The client has closed the connection."""


@dataclass(frozen=True)
class Sampled:
    """A token of one prompt's samples."""

    prompt: int
    token: SampledToken


@dataclass(frozen=True)
class Finished:
    """All samples of one prompt are finished."""

    prompt: int
    response: SampleResponse


@dataclass(frozen=True)
class Usage:
    """Token counts of a request."""

    prompt: int
    sampled: int
    cached: int

    @classmethod
    def of(cls, operations: Sequence[Sample], responses: Sequence[SampleResponse]) -> Usage:
        """Count the tokens of requests and responses."""
        return cls(
            prompt=sum(operation.prompt.length for operation in operations),
            sampled=sum(
                len(sequence.tokens_np) for response in responses for sequence in response.sequences
            ),
            cached=sum(response.prompt_cache_hit_tokens for response in responses),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of the counts."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.sampled,
            "total_tokens": self.prompt + self.sampled,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True)
class Envelope:
    """The fields that every body of one answer has."""

    kind: str
    model: str
    id: str
    created: int

    @classmethod
    def of(cls, prefix: str, kind: str, model: str) -> Envelope:
        """Return an envelope with a new id."""
        return cls(kind, model, f"{prefix}-{secrets.token_hex(12)}", int(time.time()))

    def body(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        """Return a body with these choices."""
        head = {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        return head if usage is None else {**head, "usage": usage.to_json()}


async def sample_all(
    models: OpenAIModels, tenant: Tenant, sampler_id: str, operations: Sequence[Sample]
) -> list[SampleResponse]:
    """Return the samples of every prompt. The first error cancels all of them."""
    try:
        async with asyncio.TaskGroup() as tasks:
            sampling = [
                tasks.create_task(models.sample(tenant, sampler_id, operation))
                for operation in operations
            ]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in sampling]


async def sample_events(
    models: OpenAIModels, tenant: Tenant, sampler_id: str, operations: Sequence[Sample]
) -> AsyncIterator[Sampled | Finished]:
    """Yield tokens as they are sampled, and each prompt's samples when they are finished. Closing
    the iterator cancels the rest.
    """
    events: asyncio.Queue[Sampled | asyncio.Task[SampleResponse]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    order: dict[asyncio.Task[SampleResponse], int] = {}

    def listening(index: int, operation: Sample) -> Sample:
        def on_token(token: SampledToken) -> None:
            loop.call_soon_threadsafe(events.put_nowait, Sampled(index, token))

        return replace(operation, on_token=on_token)

    for index, operation in enumerate(operations):
        task = asyncio.create_task(models.sample(tenant, sampler_id, listening(index, operation)))
        order[task] = index
        task.add_done_callback(events.put_nowait)
    try:
        left = len(order)
        while left:
            event = await events.get()
            if isinstance(event, Sampled):
                yield event
            else:
                left -= 1
                yield Finished(order[event], event.result())
    finally:
        for task in order:
            task.cancel()
        await asyncio.gather(*order, return_exceptions=True)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client closes the connection first, cancel `work` and
    raise ClientGoneError.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def stream_response(bodies: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """Return server-sent events in OpenAI's format. An error in the middle is an event too."""

    async def events() -> AsyncIterator[bytes]:
        try:
            async for body in bodies:
                yield _event(body)
        except Exception as error:
            yield _event(error_body(error))
        yield b"data: [DONE]\n\n"

    return StreamingResponse(
        events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
