"""Builds the prompt of a conversation, and samples its answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planish.errors import ContextLengthError, UserError
from planish.renderers import Renderer
from planish.renderers.registry import with_effort, with_thinking
from planish.server.http.openai_errors import WrongParameterError
from planish.server.messages.conversation import Conversation
from planish.server.messages.errors import PromptTooLongError
from planish.server.openai.chat import ParsedChat, parse_chat
from planish.server.openai.chat_prompts import with_message_names
from planish.server.openai.models import ModelTokenization, ServedModel
from planish.server.openai.protocol import count_characters
from planish.service import Sample

_DEFAULT_EFFORT = "high"
_NAMES = {
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""The names here of parameters of the chat endpoint."""


@dataclass(frozen=True)
class ParsedMessages:
    """A conversation with its prompt and the operation that samples its answer."""

    conversation: Conversation
    chat: ParsedChat

    @property
    def operations(self) -> list[Sample]:
        """The one sample request."""
        return self.chat.operations

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of the prompt."""
        return self.operations[0].prompt.length


def parse_messages(model: ServedModel, conversation: Conversation) -> ParsedMessages:
    """Build the prompt and the sample operation. Raise PromptTooLongError if the context is too
    small, and WrongParameterError if the model's chat format does not allow the request.
    """
    tokenization = model.tokenization
    max_prompt = tokenization.max_context - 1  # one token of the context is left for the answer
    try:
        renderer = _renderer_of(model, conversation)
        chat = parse_chat(model, conversation.chat, renderer, conversation.unlisted_tools)
    except WrongParameterError as error:
        if error.code == ContextLengthError.code:
            raise _too_much_text(conversation, tokenization, max_prompt) from None
        raise
    parsed = ParsedMessages(conversation, chat)
    if parsed.num_prompt_tokens > max_prompt:
        raise PromptTooLongError(parsed.num_prompt_tokens, max_prompt)
    return parsed


def _too_much_text(
    conversation: Conversation, tokenization: ModelTokenization, max_prompt: int
) -> PromptTooLongError:
    """Return the error for a text that is too long to be tokenized."""
    chat = conversation.chat
    tools = [tool.function.model_dump(exclude_none=True) for tool in chat.tools]
    size = max(count_characters(chat.messages), count_characters(tools))
    max_characters_per_token = tokenization.max_characters / tokenization.max_context
    num_tokens = max(max_prompt + 1, math.ceil(size / max_characters_per_token))
    return PromptTooLongError(num_tokens, max_prompt, f" (at least; it has {size:,} characters)")


def _renderer_of(model: ServedModel, conversation: Conversation) -> Renderer:
    """Return the model's renderer with the thinking and the effort of the request."""
    request, tokenization = conversation.request, model.tokenization
    renderer = tokenization.renderer(model.renderer_name)
    kind = None if request.thinking is None else request.thinking.type
    if kind in ("enabled", "disabled"):
        try:
            renderer = tokenization.renderer(with_thinking(renderer.name, kind == "enabled"))
        except UserError as error:
            raise WrongParameterError("thinking", f"thinking.type={kind!r}: {error}") from None
    effort = request.output_config.effort
    if effort is None:
        return renderer
    try:
        if not renderer.format.capabilities.samples_thinking:
            raise UserError(
                f"renderer {renderer.name} writes no reasoning, so it has no other effort; leave "
                "it out"
            )
        return tokenization.renderer(with_effort(renderer.name, effort))
    except UserError as error:
        if effort == _DEFAULT_EFFORT:
            return renderer
        raise WrongParameterError(
            "output_config", f"output_config.effort={effort!r}: {error}"
        ) from None


def error_of_messages(error: WrongParameterError, conversation: Conversation) -> Exception:
    """Return an error of the chat endpoint with the names of this API."""
    if isinstance(error, PromptTooLongError):
        return error
    places = conversation.places
    if error.param == "continue_final_message":
        return WrongParameterError(
            "messages",
            "messages: an assistant message at the end is continued, which cannot be combined with "
            "output_config.format, nor with tools that are strict, must be called or may be called "
            "once only; end with a user message",
        )
    text = with_message_names(
        str(error), lambda index: places[index] if index < len(places) else f"messages.{index}"
    )
    for chat_name, name in _NAMES.items():
        if error.param == chat_name:
            text = text.replace(chat_name, name)
    place, is_system, _ = text.partition(" is a system message;")
    if is_system:
        # Claude Code looks for this wording, and then puts its reminders into user messages.
        text = f"{place}.role: Input should be 'user' or 'assistant': {text}"
    return WrongParameterError(_NAMES.get(error.param, error.param), text)
