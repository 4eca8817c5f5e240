"""Convert messages to tokens and back: build prompts and training examples, parse responses.

A Renderer combines a tokenizer with a chat format. Its invariants hold for every format:

* Text of messages never becomes a control token.
* If the last message is the assistant's, `build_generation_prompt(messages[:-1])` is a prefix of
  `build_supervised_example(messages)`. So training sees the answer after the same tokens as
  sampling.
* There is one weight per token, 0.0 or 1.0, unshifted: weights[i] belongs to token i as a target.
* No token spans the boundary between a header and an answer, because sampling begins there. So the
  two are tokenised separately.
* Time is linear in the length of the conversation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch

from planish.errors import UnsupportedError
from planish.renderers.chat_format import ChatFormat, Turn
from planish.renderers.codec import Codec, Control, Piece
from planish.renderers.messages import (
    RENDERERS_WITH_TOOLS,
    CheckedMessage,
    Message,
    ToolSpec,
    check_characters,
    get_text_content,
    read_messages,
    tool_json,
)
from planish.renderers.termination import ParsedResponse, eos_ids
from planish.renderers.tool_calls import as_text
from planish.renderers.train_on import TrainOnWhat, read_train_on_what, target_flags
from planish.tokenizer import ModelTokenizer
from planish.types import ModelInput

Messages = Sequence[Message] | Sequence[Mapping[str, Any]]
_PLACEHOLDERS = tuple(map(chr, range(0xE000, 0xF8FF)))
"""Characters without a meaning (Unicode's private use area)."""
SINGLE_EXAMPLE_TARGETS = (TrainOnWhat.ALL_TOKENS, TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES)


@dataclass(frozen=True)
class MessageEnding:
    """How a sampled message ends."""

    missing_tokens: list[int]
    """Tokens of the end mark that the model did not write."""
    next_header: str = ""
    """The next message's header, if the model wrote it to end its message (role_colon)."""


@dataclass(frozen=True)
class Renderer:
    """A tokenizer with a chat format. `get_renderer` makes one by name; for a custom format, call
    `Renderer(name, tokenizer, format)`. Raises ValueError if the tokenizer lacks a token of the
    format.
    """

    name: str
    tokenizer: ModelTokenizer = field(repr=False)
    format: ChatFormat
    codec: Codec = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        codec = Codec(self.tokenizer)
        codec.require(self.format.capabilities.required, self.name)
        object.__setattr__(self, "codec", codec)

    @property
    def has_extension_property(self) -> bool:
        """Whether each prompt of a conversation begins with the earlier prompts and their answers.

        If so, a rollout of several turns can be one training sequence. Two conditions must hold.
        The history contains the answers as `parse_response` returned them. And tokenising the text
        of an answer gives the sampled tokens again.
        """
        return self.format.capabilities.extends

    def get_stop_sequences(self) -> list[str] | list[int]:
        """Return the stop strings or stop tokens for `SamplingParams(stop=...)`."""
        return self.format.stop(self.codec)

    def build_generation_prompt(
        self, messages: Messages, role: str = "assistant", prefill: str | None = None
    ) -> ModelInput:
        """Return the prompt for the next message: the conversation, the header of `role`, and
        `prefill`, with which the message begins.

        `prefill` may contain the format's tags, such as `<think>`; everything else in it is
        ordinary text. Raises a ValueError that names the message or argument if the format cannot
        express it.
        """
        checked = read_messages(messages, self.format.capabilities, self.name)
        roles = [name for name in self.format.capabilities.roles if name != "tool"]
        if role not in roles:
            raise ValueError(
                f"role={role!r}: renderer {self.name} can prompt for {', '.join(roles)}"
            )
        if prefill is not None and not isinstance(prefill, str):
            raise ValueError(f"prefill is a {type(prefill).__name__}; give a string, or None")
        check_characters(prefill or "", "prefill")
        ids = self._encode_turns(self.format.prompt_turns(checked, role))
        if prefill:
            ids += self.codec.encode(self.format.prefill(prefill), _last(ids))
        return ModelInput.from_ints(ids)

    def build_continued_prompt(self, messages: Messages) -> ModelInput:
        """Return the prompt whose last message, an assistant's, the model continues.

        The prompt ends with the text of this message as it is given, without an end mark. If the
        message has reasoning and no text, the prompt ends with the reasoning. Raises a ValueError
        that names the message if the format cannot express it.
        """
        checked = read_messages(messages, self.format.capabilities, self.name)
        last, number = checked[-1], len(checked) - 1
        if last.role != "assistant" or last.calls or last.unparsed_calls:
            raise ValueError(
                f"messages[{number}] cannot be continued; give an assistant message without tool "
                "calls"
            )
        # Write a placeholder at the end of the message, and cut the message there. So the format's
        # rules for white space do not change the given text.
        continues_reasoning = bool(last.thinking) and not last.text
        given = (last.thinking or "") if continues_reasoning else last.text
        placeholder = next(mark for mark in _PLACEHOLDERS if mark not in given)
        marked = (
            replace(last, thinking=given + placeholder)
            if continues_reasoning
            else replace(last, text=placeholder)
        )
        *turns, last_turn = self.format.turns([*checked[:-1], marked])
        output: list[Piece] = []
        for piece in last_turn.output:
            before, found, _ = str(piece).partition(placeholder)
            if isinstance(piece, str) and found:
                output.append(before if continues_reasoning else before + given)
                break
            output.append(piece)
        turns.append(replace(last_turn, output=tuple(output)))
        return ModelInput.from_ints(self._encode_turns(turns))

    def build_continuation(
        self, messages: Messages, answer: int, sampled: Sequence[int]
    ) -> ModelInput | None:
        """Return what is between an answer's sampled tokens and the end of the next prompt.

        `messages`: the conversation so far. `answer`: the index of the answer in it. `sampled`: the
        answer's tokens as they were sampled.

        If `sampled` was sampled from the prompt P, then P + sampled + continuation is the next
        prompt with exactly the sampled tokens. `build_generation_prompt(messages)` instead
        tokenises the answer's text again, which may give other tokens. If the answer was cut off,
        its end mark is added.

        Returns None in these cases, because no prompt can begin with P + sampled:

        * The format rewrites history (see `has_extension_property`).
        * The answer has tokens after a stop token or stop string.
        * The answer ends with an end-of-sequence token that is not the format's stop token.
        * In role_colon, the answer ends with `User:`, but another role writes the next message.
        """
        checked = read_messages(messages, self.format.capabilities, self.name)
        if not self.format.extends(checked, answer):
            return None
        turns = self.format.prompt_turns(checked, "assistant")
        at = next(number for number, turn in enumerate(turns) if turn.message == answer)
        ending = _ending(self, checked[answer], turns[at], list(sampled))
        if ending is None:
            return None
        next_turns = turns[at + 1 :]
        if ending.next_header and as_text(next_turns[0].header) != ending.next_header:
            return None
        if ending.next_header:
            next_turns[0] = replace(next_turns[0], header=())
        ids = [*sampled, *ending.missing_tokens]
        for turn in next_turns:
            header, output = _encode_turn(self.codec, turn, _last(ids))
            ids += header
            ids += output
        return ModelInput.from_ints(ids[len(sampled) :])

    def check_prompt(self, messages: Messages) -> None:
        """Check the form of the messages of a prompt without tokenising them. Raises the same
        ValueError as `build_generation_prompt`.
        """
        read_messages(messages, self.format.capabilities, self.name)

    def build_supervised_example(
        self,
        messages: Messages,
        train_on_what: TrainOnWhat | str = TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    ) -> tuple[ModelInput, torch.Tensor]:
        """Return the tokens [N] and their weights, float32 [N]: 1.0 for the targets.

        `train_on_what` chooses messages. The text and the end mark of a chosen message are targets;
        headers are targets only with ALL_TOKENS. If the format strips reasoning from history, the
        earlier turns of this example lack their reasoning; `build_supervised_examples` trains each
        turn with its own. Raises ValueError if there is nothing to train on or a message is
        invalid.
        """
        train_on = read_train_on_what(train_on_what)
        checked = read_messages(messages, self.format.capabilities, self.name)
        trained = target_flags(checked, train_on)
        trains_all_tokens = train_on is TrainOnWhat.ALL_TOKENS
        ids = self.codec.encode(self.format.opening())
        weights = [0.0] * len(ids)
        for turn, is_target in self._targets(checked, trained, trains_all_tokens):
            header, output = _encode_turn(self.codec, turn, _last(ids))
            ids += header
            ids += output
            header_weight = float(trains_all_tokens and is_target)
            weights += [header_weight] * len(header) + [float(is_target)] * len(output)
        if trained[-1]:
            overlap = self.codec.encode(self.format.overlap(checked[-1]), _last(ids))
            ids += overlap
            weights += [1.0] * len(overlap)
        return ModelInput.from_ints(ids), torch.tensor(weights, dtype=torch.float32)

    def build_supervised_examples(
        self,
        messages: Messages,
        train_on_what: TrainOnWhat | str = TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    ) -> list[tuple[ModelInput, torch.Tensor]]:
        """Return examples, tokens [N] and weights [N], in which each trained answer follows the
        prompt that sampling would use.

        If the format keeps history, this is the one example of `build_supervised_example`. If the
        format strips history, there is one example for each user turn that has targets.
        qwen3_disable_thinking also rewrites the history within a turn with tool calls, so it has
        one example for each assistant message. Each chosen message is a target in exactly one
        example. ALL_TOKENS and ALL_USER_AND_SYSTEM_MESSAGES always give one example.
        """
        return [
            self.build_supervised_example(part, what)
            for part, what in self._split_into_examples(messages, train_on_what)
        ]

    def check_supervised_examples(
        self,
        messages: Messages,
        train_on_what: TrainOnWhat | str = TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    ) -> None:
        """Check the form of the messages without tokenising them. Raises the same ValueError as
        `build_supervised_examples`.
        """
        for part, what in self._split_into_examples(messages, train_on_what):
            checked = read_messages(part, self.format.capabilities, self.name)
            trained = target_flags(checked, what)
            list(self._targets(checked, trained, what is TrainOnWhat.ALL_TOKENS))

    def _split_into_examples(
        self, messages: Messages, train_on_what: TrainOnWhat | str
    ) -> list[tuple[Messages, TrainOnWhat]]:
        """Return the messages and the TrainOnWhat of each example of a conversation."""
        train_on = read_train_on_what(train_on_what)
        checked = read_messages(messages, self.format.capabilities, self.name)
        trained = target_flags(checked, train_on)
        if self.has_extension_property or train_on in SINGLE_EXAMPLE_TARGETS:
            return [(messages, train_on)]
        ends = self.format.example_ends(checked)
        if len(ends) == 1:
            return [(messages, train_on)]
        examples: list[tuple[Messages, TrainOnWhat]] = []
        begin = 0
        for end in ends:
            flags = [begin <= index and flag for index, flag in enumerate(trained[:end])]
            if any(flags):
                example_messages = [
                    {**message, "trainable": flag}
                    for message, flag in zip(messages[:end], flags, strict=True)
                ]
                examples.append((example_messages, TrainOnWhat.CUSTOMIZED))
            begin = end
        return examples

    def _targets(
        self, checked: Sequence[CheckedMessage], trained: Sequence[bool], trains_all_tokens: bool
    ) -> Iterator[tuple[Turn, bool]]:
        """Yield each turn and whether it is a target. Raises ValueError for a target that cannot be
        trained.
        """
        for turn in self.format.turns(checked):
            is_target = trains_all_tokens if turn.message is None else trained[turn.message]
            if is_target and turn.untrainable_reason is not None:
                raise ValueError(
                    f"messages[{turn.message}] cannot be trained by renderer {self.name}: "
                    f"{turn.untrainable_reason}"
                )
            yield turn, is_target

    def parse_response(self, tokens: Sequence[int] | np.ndarray) -> ParsedResponse:
        """Parse sampled tokens [T], which include the stop token or stop string, into (message,
        termination).

        The message is a dictionary with role and content, and with tool_calls and
        unparsed_tool_calls if there are any. The content is a string, or a list of parts if there
        is reasoning. This method never raises, whatever the model wrote.
        """
        ids = tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
        return self.format.parse(self.codec, ids)

    def create_conversation_prefix_with_tools(
        self, tools: Sequence[ToolSpec] | Sequence[Mapping[str, Any]], system_prompt: str = ""
    ) -> list[dict[str, Any]]:
        """Return the messages that offer `tools` to the model, for the start of a conversation.

        The rendered text equals that of the model's chat template. With `system_prompt` "", the
        conversation has no system message of its own. Raises ValueError for an invalid
        specification, and UnsupportedError if the format cannot express tools.
        """
        if not self.format.capabilities.tools:
            raise UnsupportedError(
                f"renderer {self.name} has no form for tools; use {RENDERERS_WITH_TOOLS}"
            )
        if not tools:
            raise ValueError(
                "tools is empty; give at least one {'name': ..., 'description': ..., 'parameters': "
                "...}"
            )
        for number, tool in enumerate(tools):
            tool_json(tool, f"tools[{number}]")
        return [{"role": "system", "content": system_prompt or None, "tools": list(tools)}]

    def _encode_turns(self, turns: Sequence[Turn]) -> list[int]:
        """Return the tokens of a conversation's turns, after the pieces at its start."""
        ids = self.codec.encode(self.format.opening())
        for turn in turns:
            header, output = _encode_turn(self.codec, turn, _last(ids))
            ids += header
            ids += output
        return ids


def with_tools(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> list[Message]:
    """Return a conversation that offers `tools` to the model, in the form that the renderer
    defines. The text of a system message at its start is kept.
    """
    if not tools:
        return list(messages)
    system = [message for message in messages[:1] if message["role"] == "system"]
    [prefix] = renderer.create_conversation_prefix_with_tools(tools)
    if system:
        prefix["content"] = get_text_content(system[0])
    return [cast(Message, prefix), *messages[len(system) :]]


def _ending(
    renderer: Renderer, message: CheckedMessage, turn: Turn, sampled: list[int]
) -> MessageEnding | None:
    """Return how a sampled message ends, or None if a conversation cannot continue after it.
    `turn` is the message as the next prompt writes it.
    """
    codec, stops = renderer.codec, renderer.get_stop_sequences()
    eos_tokens = eos_ids(codec)
    if not any(isinstance(stop, str) for stop in stops):
        end_mark = turn.output[-1] if turn.output else None
        stop = codec.control_id(end_mark.text) if isinstance(end_mark, Control) else None
        is_closed = sampled[-1:] == [stop]
        body = sampled[:-1] if is_closed else sampled
        if stop is None or stop not in stops or eos_tokens.union(stops).intersection(body):
            return None
        return MessageEnding([] if is_closed else [stop])
    [stop_text] = map(str, stops)
    text = codec.decode(sampled)
    body = text.removesuffix(stop_text)
    if eos_tokens.intersection(sampled) or stop_text in body:
        return None
    next_header = as_text(renderer.format.overlap(message))
    if body != text:
        return MessageEnding([], next_header)
    end = stop_text.removesuffix(next_header)
    return MessageEnding([] if text.endswith(end) else codec.encode([end], _last(sampled)))


def _encode_turn(codec: Codec, turn: Turn, after: int | None) -> tuple[list[int], list[int]]:
    header = codec.encode(turn.header, after)
    if turn.sampled:
        return header, codec.encode(turn.output, _last(header) if header else after)
    # A token may span the boundary (a line break of the header and one of the text). Such a
    # token belongs to the text.
    joint_ids = codec.encode((*turn.header, *turn.output), after)
    boundary = 0
    while boundary < len(header) and joint_ids[boundary] == header[boundary]:
        boundary += 1
    return joint_ids[:boundary], joint_ids[boundary:]


def _last(ids: Sequence[int]) -> int | None:
    return ids[-1] if ids else None
