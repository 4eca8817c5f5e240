"""The items of a response's output, and the events of a stream that announce them.

An item begins with its first text and ends when the next item begins. An event is a dictionary
without its number: the writer of the stream numbers the events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from planish.server.openai.response_input import FunctionId, encode_reasoning, item_id

Event = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


class OutputItem(Protocol):
    """An item of the output."""

    def begin(self) -> Iterator[Event]:
        """Yield the events that begin the item."""
        ...

    def add(self, text: str, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """Yield the events for more text. `logprobs` are the logprobs of its tokens."""
        ...

    def end(self, status: Status) -> Iterator[Event]:
        """Yield the events that end the item."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return the item in its present state."""
        ...


@dataclass(frozen=True)
class TextKind:
    """The names of the events and fields of one kind of text."""

    part_type: str
    part_event: str
    text_event: str
    index_field: str


MESSAGE_TEXT = TextKind(
    "output_text", "response.content_part", "response.output_text", "content_index"
)
REASONING_TEXT = TextKind(
    "reasoning_text", "response.content_part", "response.reasoning_text", "content_index"
)
REASONING_SUMMARY = TextKind(
    "summary_text",
    "response.reasoning_summary_part",
    "response.reasoning_summary_text",
    "summary_index",
)


@dataclass
class TextItem:
    """A message, or the reasoning before it."""

    sample: str
    """Names the sample in the ids of its items."""
    output_index: int
    kind: TextKind
    is_encoded: bool = False
    """Whether reasoning is returned in `encrypted_content` too."""
    status: Status = "in_progress"
    logprobs: list[Any] = field(default_factory=list[Any])
    """The logprobs of the text's tokens."""
    _pieces: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        prefix = "msg" if self.kind is MESSAGE_TEXT else "rs"
        self.id = item_id(prefix, self.sample, self.output_index)

    @property
    def is_empty(self) -> bool:
        """Whether there is no text yet."""
        return not self._pieces

    def begin(self) -> Iterator[Event]:
        """Yield the events that begin the item and its only part."""
        yield {
            "type": "response.output_item.added",
            "output_index": self.output_index,
            "item": self._item([], encoded=False),
        }
        yield self._part_event(f"{self.kind.part_event}.added", part=self._part())

    def add(self, text: str, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """Yield the event with more text."""
        self._pieces.append(text)
        self.logprobs += logprobs
        more = {"logprobs": list(logprobs)} if self.kind is MESSAGE_TEXT else {}
        yield self._part_event(f"{self.kind.text_event}.delta", delta=text, **more)

    def end(self, status: Status) -> Iterator[Event]:
        """Yield the events that end the part and the item."""
        self.status = status
        more = {"logprobs": self.logprobs} if self.kind is MESSAGE_TEXT else {}
        yield self._part_event(f"{self.kind.text_event}.done", text=self._text(), **more)
        yield self._part_event(f"{self.kind.part_event}.done", part=self._part())
        yield {
            "type": "response.output_item.done",
            "output_index": self.output_index,
            "item": self.to_json(),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the item in its present state."""
        return self._item([self._part()], encoded=self.is_encoded)

    def _text(self) -> str:
        return "".join(self._pieces)

    def _item(self, parts: list[Any], *, encoded: bool) -> dict[str, Any]:
        if self.kind is MESSAGE_TEXT:
            kind = {"type": "message", "role": "assistant", "content": parts}
            return {"id": self.id, **kind, "status": self.status}
        is_summary = self.kind is REASONING_SUMMARY
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": parts if is_summary else [],
            "content": [] if is_summary else parts,
            "encrypted_content": encode_reasoning(self._text()) if encoded else None,
            "status": self.status,
        }

    def _part(self) -> dict[str, Any]:
        part = {"type": self.kind.part_type, "text": self._text()}
        return (
            {**part, "annotations": [], "logprobs": self.logprobs}
            if self.kind is MESSAGE_TEXT
            else part
        )

    def _part_event(self, event_type: str, **fields: Any) -> Event:
        return {
            "type": event_type,
            "item_id": self.id,
            "output_index": self.output_index,
            self.kind.index_field: 0,
            **fields,
        }


@dataclass
class FunctionCallOutput:
    """A call of a function."""

    sample: str
    """Names the sample in the ids of its items."""
    output_index: int
    function: FunctionId
    call_id: str
    status: Status = "in_progress"
    _pieces: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.id = item_id("fc", self.sample, self.output_index)

    def begin(self) -> Iterator[Event]:
        """Yield the event that begins the item."""
        yield {
            "type": "response.output_item.added",
            "output_index": self.output_index,
            "item": self.to_json(),
        }

    def add(self, text: str, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """Yield the event with more of the arguments."""
        self._pieces.append(text)
        yield self._event("delta", delta=text)

    def end(self, status: Status) -> Iterator[Event]:
        """Yield the events that end the arguments and the item."""
        self.status = status
        yield self._event("done", arguments="".join(self._pieces))
        yield {
            "type": "response.output_item.done",
            "output_index": self.output_index,
            "item": self.to_json(),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the item in its present state."""
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self.call_id,
            **self.function.to_json(),
            "arguments": "".join(self._pieces),
            "status": self.status,
        }

    def _event(self, name: str, **fields: Any) -> Event:
        return {
            "type": f"response.function_call_arguments.{name}",
            "item_id": self.id,
            "output_index": self.output_index,
            **fields,
        }
