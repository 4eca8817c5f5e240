"""POST /v1/responses: OpenAI's newer API, without stored state.

A request is answered as the chat request with the same conversation (`response_input`), so both
APIs have the same prompts, constraints and samples. The output has items in place of a message
(`response_output`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from planish.server.http.openai_errors import WrongParameterError, openai_error_body
from planish.server.openai.chat import ParsedChat, parse_chat
from planish.server.openai.logprobs import scored_tokens
from planish.server.openai.models import OpenAIModels, ServedModel
from planish.server.openai.protocol import SampledPrompt, Usage, answer
from planish.server.openai.requests import ChatRequest
from planish.server.openai.response_input import ChatTranslation, rename_error, translate
from planish.server.openai.response_items import Event
from planish.server.openai.response_output import OutputOptions, ResponseOutput
from planish.server.openai.response_requests import ResponsesRequest
from planish.server.openai.streaming import server_sent_event
from planish.server.results import Tenant
from planish.service import Sample, SampledToken
from planish.types import SampledSequence, SampleResponse


async def responses(
    models: OpenAIModels, tenant: Tenant, request: Request, options: ResponsesRequest
) -> Response:
    """Answer a request for a response, streamed or in one body."""
    translation = translate(options)

    def parse(model: ServedModel, chat: ChatRequest) -> ParsedResponse:
        return ParsedResponse(parse_chat(model, chat), options, translation)

    try:
        return await answer(
            models,
            tenant,
            request,
            translation.chat,
            parse,
            ResponseStreamWriter,
            _response_body,
        )
    except WrongParameterError as error:
        raise rename_error(error, translation) from None


@dataclass(frozen=True)
class ParsedResponse:
    """A parsed request."""

    chat: ParsedChat
    options: ResponsesRequest
    translation: ChatTranslation

    @property
    def operations(self) -> list[Sample]:
        """The one sample request."""
        return self.chat.operations

    def new_output(self) -> ResponseOutput:
        """Return an empty output."""
        options = OutputOptions(
            functions=self.translation.functions,
            summarizes=self.options.summary is not None,
            encodes_reasoning="reasoning.encrypted_content" in self.options.include,
            has_logprobs=self.options.includes_logprobs,
        )
        return ResponseOutput(self.chat, options)


@dataclass
class _Envelope:
    """The `response` object, in each state of the response."""

    response: ParsedResponse
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(16)}")
    created_at: int = field(default_factory=lambda: int(time.time()))

    def started(self) -> dict[str, Any]:
        """Return the response before its first token."""
        return self._body("in_progress", [])

    def finished(
        self, output: ResponseOutput, sequence: SampledSequence, usage: Usage
    ) -> dict[str, Any]:
        """Return the response after its last token."""
        is_complete = sequence.stop_reason != "length"
        return {
            **self._body("completed" if is_complete else "incomplete", output.to_json()),
            "completed_at": int(time.time()) if is_complete else None,
            "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
            "usage": _usage(usage, output.num_reasoning_tokens),
        }

    def failed(self, output: ResponseOutput, error: dict[str, Any]) -> dict[str, Any]:
        """Return a response that failed while it was streamed."""
        return {**self._body("failed", output.to_json()), "error": error}

    def _body(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        options = self.response.options
        choice = options.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": options.instructions,
            "max_output_tokens": options.max_output_tokens,
            "max_tool_calls": None,
            "metadata": options.metadata,
            "model": self.response.chat.model.name,
            "output": output,
            "parallel_tool_calls": options.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": options.prompt_cache_key,
            "reasoning": {"effort": options.reasoning.effort, "summary": options.summary},
            "safety_identifier": options.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": options.temperature,
            "text": options.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": choice if isinstance(choice, str) else _dumped(choice),
            "tools": [_dumped(tool) for tool in options.tools],
            "top_logprobs": options.top_logprobs,
            "top_p": options.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": options.user,
        }


def _dumped(value: Any) -> dict[str, Any]:
    return value.model_dump(exclude_none=True, exclude_defaults=True) | {"type": value.type}


def _usage(usage: Usage, num_reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _response_body(response: ParsedResponse, prompts: Sequence[SampledPrompt]) -> dict[str, Any]:
    [prompt] = prompts
    [sequence] = prompt.response.sequences
    output = response.new_output()
    output.add_all(scored_tokens(sequence), prompt.text_ends.get(0))
    for _ in output.finish(sequence):
        pass
    usage = Usage.from_responses(response.operations, [prompt.response])
    return _Envelope(response).finished(output, sequence, usage)


class ResponseStreamWriter:
    """Writes the events of a streamed response."""

    def __init__(self, response: ParsedResponse) -> None:
        """`response` is the parsed request."""
        self._operations = response.operations
        self._envelope = _Envelope(response)
        self._output = response.new_output()
        self._num_events = 0
        self._finished: dict[str, Any] = {}

    def begin(self) -> Iterator[bytes]:
        """Yield the events before the first token."""
        for name in ("created", "in_progress"):
            yield self._encode({"type": f"response.{name}", "response": self._envelope.started()})

    def add(self, prompt_index: int, token: SampledToken) -> None:
        """Add a token."""
        self._output.add(token)

    def flush(self) -> Iterator[bytes]:
        """Yield events with what the new tokens add."""
        yield from map(self._encode, self._output.take_events())

    def finish_prompt(self, prompt_index: int, response: SampleResponse) -> Iterator[bytes]:
        """Yield the events that end the last item."""
        [sequence] = response.sequences
        yield from map(self._encode, self._output.finish(sequence))
        usage = Usage.from_responses(self._operations, [response])
        self._finished = self._envelope.finished(self._output, sequence, usage)

    def end(self) -> Iterator[bytes]:
        """Yield the event with the whole response."""
        event_type = f"response.{self._finished['status']}"
        yield self._encode({"type": event_type, "response": self._finished})

    def fail(self, error: Exception) -> Iterator[bytes]:
        """Yield the error as an event, and the event of a failed response."""
        fields = openai_error_body(error)["error"]
        code, message = fields["code"] or fields["type"], fields["message"]
        yield self._encode(
            {"type": "error", "code": code, "message": message, "param": fields["param"]}
        )
        failed = self._envelope.failed(self._output, {"code": code, "message": message})
        yield self._encode({"type": "response.failed", "response": failed})

    def _encode(self, event: Event) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return server_sent_event({**event, "sequence_number": number}, event["type"])
