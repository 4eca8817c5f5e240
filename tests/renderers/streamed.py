"""Streams a finished sample, as the server streams it to a client."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planish.detokenizer import Detokenizer
from planish.engine.sampling.stopping import StopCondition, StopMatcher
from planish.renderers import Renderer
from planish.renderers.message_parts import MessagePart, ParseOptions
from planish.renderers.messages import get_text_content, get_thinking_content
from planish.renderers.stream_parser import SampleParser, message_parser
from planish.renderers.termination import eos_ids


@dataclass(frozen=True)
class Reading:
    """A parsed message."""

    content: str
    reasoning: str = ""
    calls: tuple[dict[str, str], ...] = ()
    """The name and the arguments of each call."""

    @classmethod
    def of_parts(cls, parts: Sequence[MessagePart]) -> "Reading":
        text, reasoning = (
            "".join(part.text for part in parts if part.kind == kind)
            for kind in ("text", "reasoning")
        )
        calls: list[dict[str, str]] = []
        for part in parts:
            if part.kind == "call":
                assert part.call == len(calls)
                calls.append({"name": part.text, "arguments": ""})
            elif part.kind == "arguments":
                calls[part.call]["arguments"] += part.text
        return cls(text, reasoning, tuple(calls))

    @classmethod
    def of_message(cls, message: Any) -> "Reading":
        """The reading of a message that a renderer has parsed. It has no unparsed calls."""
        assert "unparsed_tool_calls" not in message
        calls = (call["function"] for call in message.get("tool_calls", ()))
        return cls(
            get_text_content(message),
            get_thinking_content(message),
            tuple({key: call[key] for key in ("name", "arguments")} for call in calls),
        )


def parse_stream(
    parser: SampleParser, tokens: Sequence[int], condition: StopCondition
) -> list[list[MessagePart]]:
    """Return the parts of the stream after each token, and after the end of the sample."""
    matcher, parts = StopMatcher(condition), []
    for n, token in enumerate(tokens, start=1):
        text_end = matcher.text_end(tokens[:n])
        parser.add(token, matcher.num_unsettled(tokens[:n]), text_end)
        parts.append(parser.take())
        if text_end is not None:
            break
    parser.finish()
    return [*parts, parser.take()]


def parse_whole(
    parser: SampleParser, tokens: Sequence[int], condition: StopCondition
) -> list[MessagePart]:
    """Return the parts of the sample, parsed at once."""
    matcher = StopMatcher(condition)
    for n in range(1, len(tokens) + 1):
        text_end = matcher.text_end(tokens[:n])
        if text_end is not None:
            parser.add_all(tokens[:n], text_end)
            break
    else:
        parser.add_all(tokens, None)
    return parser.take()


def stop_condition(renderer: Renderer, *stops: str) -> StopCondition:
    """Return the stop condition of the renderer and of a request's stop strings."""
    own = renderer.get_stop_sequences()
    ids = eos_ids(renderer.codec).union(stop for stop in own if isinstance(stop, int))
    strings = (*(stop for stop in own if isinstance(stop, str)), *stops)
    return StopCondition(Detokenizer.of_tokenizer(renderer.tokenizer), frozenset(ids), strings)


def streamed(
    renderer: Renderer, tokens: Sequence[int], *stops: str, options: ParseOptions | None = None
) -> tuple[list[Reading], Reading]:
    """Return the pieces of the stream, one per token and the rest, and the whole message."""

    def new_parser() -> SampleParser:
        return message_parser(renderer, Detokenizer.of_tokenizer(renderer.tokenizer), options)

    condition = stop_condition(renderer, *stops)
    steps = parse_stream(new_parser(), tokens, condition)
    whole = Reading.of_parts(parse_whole(new_parser(), tokens, condition))
    assert Reading.of_parts([part for step in steps for part in step]) == whole
    return [
        Reading.of_parts([p for p in step if p.kind in ("text", "reasoning")]) for step in steps
    ], whole
