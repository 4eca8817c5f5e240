"""The format of a model's own chat template.

Every conversation is rendered by the template, in the process of template_process.py. The output is
divided into turns at the places of the messages (template_markup.py). What differs between
templates is found once, by probe conversations (template_traits.py).

Invariants:

* The pieces of a prompt equal the output of the template with add_generation_prompt. A training
  example is the output without it, up to the end mark of the last message.
* An answer is a training target only if the prompt that sampling would use precedes it.
* Text of messages never becomes a control token.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from typing import Any

from planish.errors import UnsupportedError
from planish.renderers.chat_format import StopTokenFormat, Turn
from planish.renderers.chatml import begun_in_thought, split_thought, with_thought
from planish.renderers.codec import Codec, Control, Piece
from planish.renderers.forms import ThoughtForm
from planish.renderers.message_parts import MessageParser, ParseOptions
from planish.renderers.messages import Capabilities, CheckedMessage
from planish.renderers.tagged_parser import BareCallParser, TaggedParser, TextRules
from planish.renderers.template_markup import ChatTemplate
from planish.renderers.template_traits import SWITCHES, TemplateTraits, find_traits
from planish.renderers.templates import chat_template_of
from planish.renderers.tool_calls import CALL, as_text
from planish.renderers.transcript import Transcript
from planish.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)


def template_format(
    tokenizer: ModelTokenizer, thinks: bool | None = None, current_date: str | None = None
) -> "TemplateFormat":
    """Return the format of a tokenizer's chat template.

    `thinks`: whether the template's switch for reasoning is on; None = as the template has it by
    default. `current_date`: the date that the template gets if it asks for it, by default today's.
    Raises UnsupportedError if the tokenizer has no template, or planish cannot use the template, and
    DamagedFileError if the template fails.
    """
    source = chat_template_of(tokenizer)
    if source is None:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise UnsupportedError(
            f"tokenizer {name} has no chat template; name another renderer, such as role_colon"
        )
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    special_tokens = {"bos_token": "", **getattr(tokenizer, "special_tokens_map", {})}
    template = ChatTemplate(
        source,
        tuple((role, text) for role, text in special_tokens.items() if isinstance(text, str)),
        tuple(sorted(Codec(tokenizer).guarded_tokens.values())),
        frozenset(token.content for token in added if token.lstrip),
        frozenset(token.content for token in added if token.rstrip),
        now=current_date or date.today().isoformat(),
        tool_source=chat_template_of(tokenizer, "tool_use"),
    )
    if thinks is not None:
        template = template.with_options(dict.fromkeys(SWITCHES, thinks))
    made = TemplateFormat(template, find_traits(template))
    if thinks not in (None, made.traits.samples_thinking):
        raise UnsupportedError(
            "the chat template has no switch that turns reasoning "
            f"{'on' if thinks else 'off'} (none of {', '.join(SWITCHES)} does); use renderer "
            "template"
        )
    if made.traits.has_tools and made.traits.syntax is None:
        logger.warning(
            "the chat template writes tool calls in a syntax that planish does not know; tools are "
            "offered to the model, and its calls stay text"
        )
    return made


@dataclass(frozen=True)
class TemplateFormat(StopTokenFormat):
    """The format of a chat template."""

    template: ChatTemplate
    traits: TemplateTraits = field(repr=False)

    @property
    def capabilities(self) -> Capabilities:
        """What the template can express."""
        traits = self.traits
        begin, end = traits.think_tags or ("<think>", "</think>")
        opens = () if traits.opens_thought else (Control(begin), "\n")
        return Capabilities(
            roles=traits.roles,
            thinking=traits.form.thinking is not None or traits.think_tags is not None,
            samples_thinking=traits.samples_thinking,
            thought=ThoughtForm(opens, (Control(end),)),
            calls=traits.syntax.form if traits.syntax else None,
            has_tools=traits.has_tools,
            required=traits.stops,
            extends=False,
            extends_in_turn=False,
        )

    def stop(self, codec: Codec) -> list[int]:
        """Return the ids of the stop tokens."""
        ids = [codec.control_id(token) for token in self.traits.stops]
        return [id_ for id_ in ids if id_ is not None]

    def tags(self) -> Sequence[str]:
        """Return the tags of reasoning and tool calls."""
        syntax = self.traits.syntax
        return (*(self.traits.think_tags or ()), *(syntax.all_tags if syntax else ()))

    def turns(self, messages: Sequence[CheckedMessage]) -> list[Turn]:
        """Return the turns of a training example. Raises ValueError if the template rejects the
        conversation, or leaves out a message.
        """
        return Transcript(self.template, self.traits, messages).example_turns()

    def suffix(self, messages: Sequence[CheckedMessage], role: str) -> tuple[Piece, ...]:
        """Return the header of the next message, which only the assistant can write."""
        return self.prompt_turns(messages, role)[-1].header

    def prompt_turns(self, messages: Sequence[CheckedMessage], role: str) -> list[Turn]:
        """Return the turns of a prompt. The last turn is the header of the assistant's message."""
        if role != "assistant":
            raise ValueError(
                f"role={role!r}: a chat template can prompt for the assistant only; use the "
                "renderer of the model's family, or role_colon"
            )
        return Transcript(self.template, self.traits, messages).prompt_turns()

    def overlap(self, last: CheckedMessage) -> tuple[Piece, ...]:
        """Return the stop token, if it belongs to the header of the next message."""
        if not self.traits.stops_in_next_header or last.role != "assistant":
            return ()
        # The last stop token is that of a message with calls.
        return (Control(self.traits.stops[-1 if last.calls else 0]),)

    def extends(self, messages: Sequence[CheckedMessage], answer: int) -> bool:
        """Return whether the prompt after `messages` begins with the prompt of the message
        `answer` and that message.
        """
        return Transcript(self.template, self.traits, messages).extends(answer, len(messages))

    def example_ends(self, messages: Sequence[CheckedMessage]) -> list[int]:
        """Return where the examples of a conversation end: before each message whose prompt does
        not begin with the answer before it, and at the end.
        """
        transcript = Transcript(self.template, self.traits, messages)
        answers = [index for index, one in enumerate(messages) if one.role == "assistant"]
        return [
            *(
                first + 1
                for first, second in pairwise(answers)
                if not transcript.extends(first, second)
            ),
            len(messages),
        ]

    def read_message(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the sampled message that `pieces` contain."""
        traits, syntax = self.traits, self.traits.syntax
        thought: str | None = None
        if traits.think_tags is not None:
            begin, end = map(Control, traits.think_tags)
            calls = syntax.tags.begin if syntax and syntax.tags else CALL
            if traits.opens_thought:
                pieces = begun_in_thought(pieces, begin)
            thought, pieces = split_thought(pieces, calls, (begin, end))
        read = syntax.read(pieces) if syntax else {"content": as_text(pieces)}
        num_calls = len(read.get("tool_calls", ()))
        if not traits.can_write(num_calls, read["content"]) and not traits.writes_raw_calls:
            # The template could not write the message again, and the model was not trained on it.
            read = {"content": as_text(pieces)}
        message: dict[str, Any] = {"role": "assistant", **read}
        if thought is not None:
            message["content"] = message["content"].lstrip("\n")
            thought = thought.strip("\n")
        return with_thought(message, thought)

    def message_parser(self, options: ParseOptions) -> MessageParser:
        """Return a parser of one assistant message whose text arrives in pieces."""
        traits = self.traits
        begin, end = traits.think_tags or ("", "")
        syntax = traits.syntax
        parser = TaggedParser(
            options,
            syntax.tags if syntax else None,
            TextRules(around_reasoning="\n", after_reasoning="\n"),
            reads_reasoning=traits.think_tags is not None,
            begins_in_reasoning=traits.opens_thought,
            think_tags=(Control(begin), Control(end)),
        )
        if syntax is None or syntax.read_bare is None:
            return parser
        return BareCallParser(parser, options, syntax.read_bare, syntax.starts)
