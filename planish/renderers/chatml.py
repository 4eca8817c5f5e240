r"""ChatML, `<|im_start|>role\n...<|im_end|>`, with the `<think>` blocks of the Qwen3 models.

One class implements four renderers. Their models differ only in three facts: a default system
message, whether answers begin with a `<think>` block, and whether a prompt ends with an empty one.
The rules follow the models' chat templates:

* A default system message is put first when the conversation begins with another role (Qwen2.5,
  SmolLM2).
* With thinking, an assistant message after the last user message keeps its reasoning. Earlier
  messages lose their reasoning, so a later prompt does not extend an earlier prompt. An assistant
  message at the end of the conversation has a think block even without reasoning.
* Consecutive tool results form one user turn. Text after a think block loses its leading line
  breaks.

Two differences from the templates are intended. A template ends with a line break after the last
`<|im_end|>`; here that line break belongs to the header of the next message. And user text that
looks like a tool result stays text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from planish.renderers.chat_format import Turn
from planish.renderers.codec import Codec, Control, Piece, split_text
from planish.renderers.forms import THINK, THINK_END
from planish.renderers.messages import Abilities, Checked
from planish.renderers.termination import Parsed, cut_at_stop
from planish.renderers.tool_calls import (
    CALL,
    CALL_TAGS,
    QWEN_CALLS,
    as_text,
    call_pieces,
    read_calls,
    response_pieces,
    tools_pieces,
)

START, END = Control("<|im_start|>"), Control("<|im_end|>")
EMPTY_THOUGHT: tuple[Piece, ...] = (THINK, "\n\n", THINK_END, "\n\n")


class Thinking(StrEnum):
    """How a renderer writes reasoning."""

    NONE = "none"
    """The model has no think blocks; the tags are text."""
    STRIP_HISTORY = "strip_history"
    """As in Qwen3's template: reasoning before the last user message is left out."""
    KEEP_HISTORY = "keep_history"
    """Every assistant message has its think block, so prompts extend each other."""
    DISABLED = "disabled"
    """Prompts end with an empty think block: the model answers at once."""


@dataclass(frozen=True)
class ChatML:
    """The ChatML format, with an optional default system message and one kind of `Thinking`."""

    default_system: str | None = None
    thinking: Thinking = Thinking.NONE

    @property
    def abilities(self) -> Abilities:
        """What the format can express, and the tokens that it requires."""
        return Abilities(
            roles=("system", "user", "assistant", "tool"),
            thinking=self.thinking is not Thinking.NONE,
            samples_thinking=self.thinking in (Thinking.STRIP_HISTORY, Thinking.KEEP_HISTORY),
            calls=QWEN_CALLS,
            required=(START.text, END.text),
            extends=self.thinking in (Thinking.NONE, Thinking.KEEP_HISTORY),
            # With DISABLED, this prompt ends with an empty think block. The template omits that
            # block from the history, so the next prompt does not extend this prompt.
            extends_in_turn=self.thinking is not Thinking.DISABLED,
        )

    def opening(self) -> tuple[Piece, ...]:
        """Return no pieces: the format has no beginning-of-sequence token."""
        return ()

    def turns(self, messages: Sequence[Checked]) -> list[Turn]:
        """Return the turns of the messages, with the default system message first if needed."""
        turns: list[Turn] = []
        if self._adds_system(messages):
            turns.append(
                Turn(
                    header=(START, "system\n"), output=(str(self.default_system), END), message=None
                )
            )
        users = [index for index, message in enumerate(messages) if message.role == "user"]
        last_query = users[-1] if users else len(messages) - 1
        for index, message in enumerate(messages):
            lead = ("\n",) if turns else ()
            if message.role == "tool":
                turns.append(_tool_turn(lead, messages, index))
            elif message.role == "assistant":
                is_last = index == len(messages) - 1
                turns.append(
                    self._assistant_turn(lead, message, index, index > last_query, is_last)
                )
            else:
                turns.append(self._plain_turn(lead, message, index))
        return turns

    def suffix(self, messages: Sequence[Checked], role: str) -> tuple[Piece, ...]:
        """Return the header of the next message. With thinking disabled, an assistant's header
        includes an empty think block.
        """
        lead = ("\n",) if messages else ()
        closed = self.thinking is Thinking.DISABLED and role == "assistant"
        return (*lead, START, f"{role}\n", *(EMPTY_THOUGHT if closed else ()))

    def prefill(self, text: str) -> tuple[Piece, ...]:
        """Return the pieces of `text`. Tags of reasoning and tool calls become controls."""
        tags = (
            CALL_TAGS
            if self.thinking is Thinking.NONE
            else (THINK.text, THINK_END.text, *CALL_TAGS)
        )
        return tuple(split_text(text, tags))

    def overlap(self, last: Checked) -> tuple[Piece, ...]:
        """Return no pieces: the model stops at `<|im_end|>`."""
        return ()

    def stop(self, codec: Codec) -> list[int]:
        """Return the id of `<|im_end|>`."""
        stop = codec.control_id(END.text)
        assert stop is not None
        return [stop]

    def parse(self, codec: Codec, tokens: Sequence[int]) -> Parsed:
        """Parse the sampled tokens of an assistant message. Never raises."""
        body, ending = cut_at_stop(codec, tokens, self.stop(codec)[0])
        if self.thinking is Thinking.NONE:
            return Parsed({"role": "assistant", **read_calls(codec.split(body, CALL_TAGS))}, ending)
        thought, rest = split_thought(codec.split(body, (THINK.text, THINK_END.text, *CALL_TAGS)))
        message: dict[str, Any] = {"role": "assistant", **read_calls(rest)}
        if thought is not None:
            thought = thought.strip("\n")
            message["content"] = message["content"].lstrip("\n")
        if thought:
            text = {"type": "text", "text": message["content"]}
            message["content"] = [
                {"type": "thinking", "thinking": thought},
                *([text] if text["text"] else []),
            ]
        return Parsed(message, ending)

    def _adds_system(self, messages: Sequence[Checked]) -> bool:
        return self.default_system is not None and messages[0].role != "system"

    def _plain_turn(self, lead: tuple[Piece, ...], message: Checked, index: int) -> Turn:
        text: tuple[Piece, ...] = (message.text,)
        if message.tools:
            text = tools_pieces(message.text or self.default_system or "", message.tools)
        return Turn(header=(*lead, START, f"{message.role}\n"), output=(*text, END), message=index)

    def _assistant_turn(
        self, lead: tuple[Piece, ...], message: Checked, index: int, live: bool, last: bool
    ) -> Turn:
        header: tuple[Piece, ...] = (*lead, START, "assistant\n")
        thought, text = message.thinking, message.text
        if self.thinking is Thinking.KEEP_HISTORY:
            framed = True
        else:
            framed = self.thinking is not Thinking.NONE and live and (last or bool(thought))
        frame: tuple[Piece, ...] = ()
        if framed:
            text = text.lstrip("\n")
            inner = thought.strip("\n") if thought else ""
            frame = (THINK, f"\n{inner}\n", THINK_END, "\n\n") if inner else EMPTY_THOUGHT
        reason = None
        if self.thinking is Thinking.DISABLED:
            # The prompt already contains the empty think block, so the block is not a target.
            header, frame = (*header, *frame), ()
            if thought:
                reason = "it has reasoning, which qwen3_disable_thinking never samples; use qwen3, or remove the thinking part"
        return Turn(
            header,
            (*frame, text, *call_pieces(message), END),
            index,
            sampled=True,
            untrainable=reason,
        )


def _tool_turn(lead: tuple[Piece, ...], messages: Sequence[Checked], index: int) -> Turn:
    """Return the turn of one tool result. Neighbouring results share one user turn."""
    opens = index == 0 or messages[index - 1].role != "tool"
    closes = index == len(messages) - 1 or messages[index + 1].role != "tool"
    header: tuple[Piece, ...] = (*lead, START, "user\n") if opens else ("\n",)
    return Turn(
        header, (*response_pieces(messages[index].text), *((END,) if closes else ())), index
    )


def split_thought(pieces: Sequence[Piece], calls: Control = CALL) -> tuple[str | None, list[Piece]]:
    """Split a sampled message into (reasoning, rest); reasoning is None without a think block.
    `calls` is the tag that begins the tool calls.
    """
    end = next((at for at, piece in enumerate(pieces) if piece == THINK_END), None)
    before = pieces[:end]
    start = next((at for at, piece in enumerate(before) if piece == THINK), None)
    if start is None and (end is None or calls in before):
        return None, list(pieces)
    if start is not None and as_text(before[:start]).strip():
        return None, list(pieces)
    # A prompt may end with `<think>`; then the sample begins inside the block.
    thought = as_text(before[0 if start is None else start + 1 :])
    return thought, list(pieces[end + 1 :]) if end is not None else []
