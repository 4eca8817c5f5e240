# pyright: reportMissingImports=false
"""Convert Inspect's messages to a renderer's form, and sampled sequences to Inspect's choices."""

from collections.abc import Sequence
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ContentReasoning,
    ContentText,
    Logprob,
    Logprobs,
    TopLogprob,
)

from planish.errors import UnsupportedError
from planish.renderers import Message, Renderer
from planish.renderers.stream_parser import text_before
from planish.types import SampledSequence


def renderer_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Return the messages in the renderer's form. UnsupportedError for content other than text:
    images, audio, documents and tool calls.
    """
    return [_message(message) for message in messages]


def _message(message: ChatMessage) -> Message:
    if message.role == "tool" or getattr(message, "tool_calls", None):
        raise UnsupportedError(
            "a message is a tool call or a tool result; planish's Inspect provider supports no tools"
        )
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    parts: list[Any] = [_part(part, message.role) for part in message.content]
    if all(part["type"] == "text" for part in parts):
        return {"role": message.role, "content": "\n".join(part["text"] for part in parts)}
    return {"role": message.role, "content": parts}


def _part(part: Any, role: str) -> dict[str, str]:
    if isinstance(part, ContentText):
        return {"type": "text", "text": part.text}
    if isinstance(part, ContentReasoning) and role == "assistant":
        return {"type": "thinking", "thinking": part.reasoning}
    raise UnsupportedError(f"a message of the {role} contains {part.type}; planish reads only text")


def choice(
    sequence: SampledSequence,
    renderer: Renderer,
    model_name: str,
    *,
    stop: Sequence[str],
    was_bounded_by_context: bool,
    with_logprobs: bool,
) -> ChatCompletionChoice:
    """Return a sampled sequence as Inspect's choice. `stop` are the stop strings of the request.
    Inspect expects text without them, so the text ends before the first one.
    """
    message, _ = renderer.parse_response(sequence.tokens)
    cut_off = "model_length" if was_bounded_by_context else "max_tokens"
    return ChatCompletionChoice(
        message=ChatMessageAssistant(
            content=_content(message, stop), model=model_name, source="generate"
        ),
        stop_reason="stop" if sequence.stop_reason == "stop" else cut_off,
        logprobs=Logprobs(content=_logprobs(sequence, renderer)) if with_logprobs else None,
    )


def _content(message: dict[str, Any], stop: Sequence[str]) -> Any:
    if isinstance(message["content"], str):
        return text_before(message["content"], stop)
    return [
        ContentReasoning(reasoning=part["thinking"])
        if part["type"] == "thinking"
        else ContentText(text=text_before(part["text"], stop))
        for part in message["content"]
    ]


def _logprobs(sequence: SampledSequence, renderer: Renderer) -> list[Logprob]:
    """Return the logprob of each sampled token, including the token that ends the message."""
    decode = renderer.codec.decode
    tops = sequence.topk_logprobs or [()] * len(sequence.tokens)
    logprobs = []
    for token, logprob, top in zip(sequence.tokens, sequence.logprobs, tops, strict=True):
        text = decode([token])
        others = [TopLogprob(token=decode([other]), logprob=value) for other, value in top or ()]
        logprobs.append(
            Logprob(
                token=text, logprob=logprob, bytes=list(text.encode()), top_logprobs=others or None
            )
        )
    return logprobs
