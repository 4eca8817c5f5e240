"""The parts that chat and text completions share: limits of a request, sampling with or without
streaming, and the format of answers. Samples that are still running are cancelled if the answer is
cancelled or the client disconnects.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from planish.errors import ContextLengthError, UserError
from planish.server.http.compatible_routes import ClientGoneError
from planish.server.http.context import RequestContext
from planish.server.http.openai_errors import WrongParameterError, openai_error_body
from planish.server.openai.constraints import error_for_client
from planish.server.openai.models import OpenAIModels, ServedModel
from planish.server.openai.requests import GenerationRequest
from planish.server.openai.streaming import (
    DONE_EVENT,
    KEEP_ALIVE_COMMENT,
    StreamWriter,
    server_sent_event,
    stream_samples,
)
from planish.server.results import Tenant
from planish.service import Sample, SampledToken, TextEnd
from planish.types import SampleResponse
from planish.wire.pacing import pause_if_due

T = TypeVar("T")
R = TypeVar("R", bound=GenerationRequest)
P = TypeVar("P", bound="ParsedRequest")


MAX_ANSWER_BYTES = 1 << 30
"""Limit for the memory of one answer, in bytes."""
_TRUNCATION_REMEDY = ", or give truncate_max_tokens=true, which lowers it to what is left"
_TOKEN_BYTES, _LOGPROB_BYTES = 32, 300
"""Estimated bytes of memory for one sampled token, and for one logprob with the token's text."""


def check_text(name: str, value: Any, max_characters: int) -> None:
    """Raise WrongParameterError if a JSON value has more than `max_characters`.

    `name` is the parameter that the error names. Call this before tokenizing, because the tokenizer
    needs up to 540 bytes of memory per character.
    """
    size = count_characters(value)
    if size > max_characters:
        raise context_error(
            name,
            f"this model's maximum context length is at most {max_characters:,} characters, but "
            f"{name} has {size:,}; shorten it",
        )


def context_error(name: str, message: str) -> WrongParameterError:
    """Return the error for a parameter that is too long for the model's context."""
    error = WrongParameterError(name, message)
    error.code = ContextLengthError.code
    return error


def truncate_max_tokens(operation: Sample, max_context: int) -> Sample:
    """Return the operation with at most as many new tokens as the model's context leaves."""
    params, left = operation.sampling_params, max_context - operation.prompt.length
    if params.max_tokens is None or params.max_tokens <= left or left < 1:
        return operation
    return replace(operation, sampling_params=replace(params, max_tokens=left))


def count_characters(value: Any) -> int:
    """Return the number of characters of all texts and keys in a JSON value, plus one per list or
    object.
    """
    total, pending = 0, [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):
            pause_if_due()
            total += 1
            pending += value.keys()
            pending += value.values()
        elif isinstance(value, list):
            total += 1
            pending += value
    return total


def check_answer_size(operations: Sequence[Sample], max_context: int) -> None:
    """Raise WrongParameterError if the answer could need more memory than one request may use.
    `max_context` is the length of the model's context in tokens.
    """
    size = sum(_max_answer_bytes(operation, max_context) for operation in operations)
    if size > MAX_ANSWER_BYTES:
        raise WrongParameterError(
            "n",
            f"the answer could have {size >> 20:,} MiB, and the limit is "
            f"{MAX_ANSWER_BYTES >> 20:,}; lower n, max_tokens, logprobs or the number of prompts",
        )


def _max_answer_bytes(operation: Sample, max_context: int) -> int:
    """Return the most memory that the answer may need for its Python objects and JSON, in bytes."""
    max_new_tokens = (
        0
        if operation.prompt_only
        else min(operation.sampling_params.max_tokens or max_context, max_context)
    )
    bytes_per_sampled_token = _TOKEN_BYTES + _LOGPROB_BYTES * operation.num_scored_tokens
    bytes_per_prompt_token = (
        _LOGPROB_BYTES * (1 + operation.topk_prompt_logprobs) if operation.prompt_logprobs else 0
    )
    return operation.num_samples * (
        max_new_tokens * bytes_per_sampled_token + operation.prompt.length * bytes_per_prompt_token
    )


@dataclass(frozen=True)
class SampledPrompt:
    """The samples of one prompt."""

    response: SampleResponse
    text_ends: Mapping[int, TextEnd]
    """Where the text of each sample ends that a stop token or a stop string ended, by the sample's
    index.
    """


@dataclass(frozen=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @classmethod
    def from_responses(
        cls, operations: Sequence[Sample], responses: Sequence[SampleResponse]
    ) -> Usage:
        """Count the tokens of requests and responses."""
        return cls(
            prompt_tokens=sum(operation.prompt.length for operation in operations),
            completion_tokens=sum(
                len(sequence.tokens_np) for response in responses for sequence in response.sequences
            ),
            cached_tokens=sum(response.prompt_cache_hit_tokens for response in responses),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of the counts."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Envelope:
    """The fields that are the same in every body of one answer, such as its id."""

    object_type: str
    model: str
    id: str
    created: int

    @classmethod
    def new(cls, prefix: str, object_type: str, model: str) -> Envelope:
        """Return an envelope with a new id."""
        return cls(object_type, model, f"{prefix}-{secrets.token_hex(12)}", int(time.time()))

    def event(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        """Return an event of a stream with these choices."""
        return server_sent_event(self.body(choices, usage))

    def body(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        """Return a response body or stream chunk with these choices."""
        fields = {
            "id": self.id,
            "object": self.object_type,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        return fields if usage is None else {**fields, "usage": usage.to_json()}


class ParsedRequest(Protocol):
    """A parsed request: a Chat or a Completion."""

    @property
    def operations(self) -> list[Sample]:
        """One sample request for each prompt."""
        ...


async def answer(
    models: OpenAIModels,
    tenant: Tenant,
    request: Request,
    options: R,
    parse: Callable[[ServedModel, R], P],
    make_writer: Callable[[P], StreamWriter],
    make_body: Callable[[P, Sequence[SampledPrompt]], dict[str, Any]],
    keep_alive: bytes = KEEP_ALIVE_COMMENT,
) -> Response:
    """Parse a request, sample its prompts, and answer it: with the events of the writer that
    `make_writer` returns if `options.stream` is true, otherwise with the body that `make_body`
    returns. A silent stream sends `keep_alive`.
    """
    model = await models.find(tenant, options.model)
    parsed = await models.run_tokenizer(tenant, request, lambda: parse(model, options))
    operations, max_context = parsed.operations, model.tokenization.max_context
    if options.truncate_max_tokens is None:
        truncates = request.app.state.http.settings.truncate_max_tokens
    else:
        truncates = options.truncate_max_tokens
    if truncates:
        operations = [truncate_max_tokens(operation, max_context) for operation in operations]
    check_answer_size(operations, max_context)
    try:
        await while_connected(request, models.check(tenant, model, operations))
    except ContextLengthError as error:
        remedy = _TRUNCATION_REMEDY if "max_tokens" in str(error) else ""
        raise context_error(options.text_parameter, f"{error}{remedy}") from None
    except UserError as error:
        raise error_for_client(error, options) from None
    sampler_id = await models.sampler_id(tenant, model)
    if options.stream:
        return stream_samples(
            models.open_streams,
            tenant,
            lambda operation: asyncio.create_task(models.sample(tenant, sampler_id, operation)),
            operations,
            make_writer(parsed),
            keep_alive,
        )
    sampling = sample_all(models, tenant, sampler_id, operations)
    prompts = await while_connected(request, sampling)
    size = sum(
        len(sequence.tokens_np) * (_TOKEN_BYTES + _LOGPROB_BYTES * operation.num_scored_tokens)
        for operation, prompt in zip(operations, prompts, strict=True)
        for sequence in prompt.response.sequences
    )
    context = RequestContext(request, request.app.state.http, tenant)
    body = await context.compute(size, lambda: orjson.dumps(make_body(parsed, prompts)))
    return Response(body, media_type="application/json")


async def sample_all(
    models: OpenAIModels, tenant: Tenant, sampler_id: str, operations: Sequence[Sample]
) -> list[SampledPrompt]:
    """Return the samples of every prompt. If one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as task_group:
            tasks = [
                task_group.create_task(_sample_prompt(models, tenant, sampler_id, operation))
                for operation in operations
            ]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in tasks]


async def _sample_prompt(
    models: OpenAIModels, tenant: Tenant, sampler_id: str, operation: Sample
) -> SampledPrompt:
    text_ends: dict[int, TextEnd] = {}

    def on_token(token: SampledToken) -> None:
        if token.text_end is not None:
            text_ends[token.sample] = token.text_end

    response = await models.sample(tenant, sampler_id, replace(operation, on_token=on_token))
    return SampledPrompt(response, text_ends)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client closes the connection first, cancel `work` and
    raise ClientGoneError.
    """
    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ClientGoneError
        return work_task.result()
    finally:
        disconnect_task.cancel()
        work_task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await work_task


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def error_events(error: Exception) -> Iterator[bytes]:
    """Yield the events that end a stream with an error. The status line was sent before the error,
    so the error is an event.
    """
    yield server_sent_event(openai_error_body(error))
    yield DONE_EVENT
