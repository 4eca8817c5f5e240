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
from planish.types import SampledSequence


def renderer_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Return the messages in the renderer's form. Raises UnsupportedError for content other than
    text: images, audio, documents and tool calls.
    """
    return [_renderer_message(message) for message in messages]


def _renderer_message(message: ChatMessage) -> Message:
    if message.role == "tool" or getattr(message, "tool_calls", None):
        raise UnsupportedError(
            "a message is a tool call or a tool result; planish's Inspect provider supports no "
            "tools"
        )
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    parts: list[Any] = [_renderer_part(part, message.role) for part in message.content]
    if all(part["type"] == "text" for part in parts):
        return {"role": message.role, "content": "\n".join(part["text"] for part in parts)}
    return {"role": message.role, "content": parts}


def _renderer_part(part: Any, role: str) -> dict[str, str]:
    if isinstance(part, ContentText):
        return {"type": "text", "text": part.text}
    if isinstance(part, ContentReasoning) and role == "assistant":
        return {"type": "thinking", "thinking": part.reasoning}
    raise UnsupportedError(f"a message of the {role} contains {part.type}; planish reads only text")


def make_choice(
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
    length_reason = "model_length" if was_bounded_by_context else "max_tokens"
    return ChatCompletionChoice(
        message=ChatMessageAssistant(
            content=_inspect_content(message, stop), model=model_name, source="generate"
        ),
        stop_reason="stop" if sequence.stop_reason == "stop" else length_reason,
        logprobs=Logprobs(content=_inspect_logprobs(sequence, renderer)) if with_logprobs else None,
    )


def _inspect_content(message: dict[str, Any], stop: Sequence[str]) -> Any:
    if isinstance(message["content"], str):
        return _text_before(message["content"], stop)
    return [
        ContentReasoning(reasoning=part["thinking"])
        if part["type"] == "thinking"
        else ContentText(text=_text_before(part["text"], stop))
        for part in message["content"]
    ]


def _text_before(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of the stop strings."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def _inspect_logprobs(sequence: SampledSequence, renderer: Renderer) -> list[Logprob]:
    """Return the logprob of each sampled token, including the token that ends the message."""
    decode = renderer.codec.decode
    topk_by_position = sequence.topk_logprobs or [()] * len(sequence.tokens)
    logprobs = []
    for token, logprob, topk in zip(
        sequence.tokens, sequence.logprobs, topk_by_position, strict=True
    ):
        text = decode([token])
        alternatives = [
            TopLogprob(token=decode([alternative]), logprob=value)
            for alternative, value in topk or ()
        ]
        logprobs.append(
            Logprob(
                token=text,
                logprob=logprob,
                bytes=list(text.encode()),
                top_logprobs=alternatives or None,
            )
        )
    return logprobs
