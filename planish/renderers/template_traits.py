"""Find out how a chat template writes each kind of message, by rendering probe conversations.

Everything that a renderer needs is read from the output: the header of an answer, the stop tokens,
the tags of reasoning, the form of tool calls. What a template does not write is not offered.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from planish.errors import DamagedFileError, UnsupportedError
from planish.renderers.call_syntax import SYNTAXES, CallSyntax
from planish.renderers.codec import Control, Piece, split_text
from planish.renderers.messages import Call, CheckedMessage
from planish.renderers.template_markup import THINK_TAGS, ChatTemplate, Markers, Rendering
from planish.renderers.template_messages import MessageForm, ThinkingKey
from planish.renderers.template_process import TemplateRefusedError
from planish.renderers.tool_calls import as_text

_MARKERS = Markers()
_SYSTEM = CheckedMessage("system", "Be brief.")
_HELLO = CheckedMessage("user", "Hello.")
_ANSWER = CheckedMessage("assistant", "Good day.")
_AGAIN = CheckedMessage("user", "And now?")
_NAME, _CITY = "probe_weather", "Rome"
# With two spaces, the text of the arguments differs from what a template would write by itself.
_ARGUMENTS = f'{{"city":  "{_CITY}"}}'
_CALL = CheckedMessage("assistant", "", calls=(Call(_NAME, _ARGUMENTS),))
_OTHER = Call("probe_time", '{"zone": "Oslo"}')
_RESULT = CheckedMessage("tool", "Sunny.")
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Returns the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True)
class TemplateTraits:
    """How a chat template writes conversations."""

    form: MessageForm
    roles: tuple[str, ...]
    stops: tuple[str, ...]
    """The control tokens that end a sampled message."""
    ends: tuple[str, ...]
    """The control tokens that end an assistant message, in history too."""
    head: tuple[Piece, ...]
    """The header of an answer in history."""
    opening: tuple[Piece, ...]
    """The rest of the header in a prompt, such as `<think>`."""
    missing_prompt: tuple[Piece, ...]
    """The header of an answer that the template does not write in prompts."""
    role_ends: Mapping[str, tuple[Piece, ...]] = field(hash=False)
    """What ends a message of each role but the assistant's. A role is missing if its messages do
    not end before the next message begins.
    """
    role_leads: Mapping[str, str] = field(hash=False)
    """The white space between the header and the text of a message of each role."""
    think_tags: tuple[str, str] | None = None
    """The tags of reasoning; None if the model writes none."""
    is_thinking_off: bool = False
    """Whether the template's switch for reasoning is off."""
    has_tools: bool = False
    tools_need_system: bool = False
    """Whether the template offers tools only in a system message that is given."""
    calls_have_text: bool = False
    """Whether a message may have text and calls."""
    has_several_calls: bool = False
    syntax: CallSyntax | None = None
    """The syntax of calls; None if it is unknown."""
    stops_in_next_header: bool = False
    """Whether the stop tokens belong to the header of the next message, as in GLM 4.5."""

    def can_write(self, num_calls: int, text: str) -> bool:
        """Return whether the template writes a message with so many calls and this text."""
        has_room = num_calls <= 1 or self.has_several_calls
        return has_room and (self.calls_have_text or not num_calls or not text.strip())

    @property
    def writes_raw_calls(self) -> bool:
        """Whether planish can write calls as a part of the text, in the syntax of the model."""
        syntax = self.syntax
        return syntax is not None and syntax.tags is not None and syntax.form is not None

    @property
    def opens_thought(self) -> bool:
        """Whether prompts end within a block of reasoning."""
        return self.think_tags is not None and _is_open(self.opening, self.think_tags)

    @property
    def samples_thinking(self) -> bool:
        """Whether a sampled message may contain reasoning."""
        return not (self.think_tags is None or self.closes_thought or self.is_thinking_off)

    @property
    def closes_thought(self) -> bool:
        """Whether prompts end after a block of reasoning, so that the model answers at once."""
        return (
            self.think_tags is not None
            and not self.opens_thought
            and self.think_tags[1] in as_text(self.opening)
        )


def _is_open(pieces: Sequence[Piece], tags: tuple[str, str]) -> bool:
    text = as_text(pieces)
    return text.rfind(tags[0]) > text.rfind(tags[1])


def common_prefix(first: str, second: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


SWITCHES = ("enable_thinking", "thinking")
"""The variables with which templates turn reasoning on and off."""


def find_traits(template: ChatTemplate) -> TemplateTraits:
    """Return the traits of a template.

    Raises DamagedFileError if the template fails, or gives two texts for one conversation, and
    UnsupportedError if it leaves out messages, or writes no token after an answer.
    """
    form = _text_form(template)
    probe = _Probe(template, form)
    prompt, single = probe.render(_HELLO, prompt=True), probe.render(_HELLO)
    answer, history = probe.render(_HELLO, _ANSWER), probe.render(_HELLO, _ANSWER, _AGAIN)
    question_end = _place(prompt, 0, _HELLO)[1]
    (answer_start, answer_end), (next_start, _) = (
        _place(answer, 1, _ANSWER),
        _place(history, 2, _AGAIN),
    )
    user_end = _message_end(single, prompt, question_end)
    missing: tuple[Piece, ...] = ()
    if not prompt.code[user_end:].strip() and answer.code.startswith(prompt.code):
        # The template ignores add_generation_prompt. So the header is the one before an answer.
        header = answer.pieces(len(prompt.code), answer_start)
        missing = header if as_text(header).strip() else ()
    header_code = prompt.code[user_end:] + prompt.code_of(missing)
    past_start, past_end = _place(history, 1, _ANSWER)
    shared = 0
    if history.code.startswith(prompt.code[:user_end]):
        shared = common_prefix(header_code, history.code[user_end:past_start])
    # Some templates write a tag of reasoning before all answers. It is a part of the opening.
    for begin, _ in THINK_TAGS:
        shared = min(shared, _position(prompt.pieces_of(header_code), begin))
    stop = _control_after(answer, answer_end) or _control_after(history, past_end)
    if stop is None:
        raise UnsupportedError(
            "the chat template writes no control token after an answer, so the end of a sampled "
            "answer cannot be found; name another renderer, such as role_colon"
        )
    past_stop = _control_after(history, past_end)
    traits = TemplateTraits(
        form=form,
        roles=("user", "assistant"),
        stops=(stop,),
        ends=tuple(dict.fromkeys([stop, past_stop or stop])),
        head=prompt.pieces_of(header_code[:shared]),
        opening=prompt.pieces_of(header_code[shared:]),
        missing_prompt=missing,
        stops_in_next_header=_control_after(answer, answer_end) is None,
        role_ends={"user": prompt.pieces(question_end, user_end)},
        role_leads={"user": _space_before(prompt, 0)},
    )
    past_stop_end = history.next_control(past_end, traits.ends)
    user_header = history.code[(past_stop_end or past_end - 1) + 1 : next_start].lstrip()
    traits = _with_system(traits, probe, user_header)
    traits = _with_thinking(traits, probe)
    traits = replace(traits, is_thinking_off=_is_thinking_off(probe, prompt))
    traits = _with_history_stop(traits, probe, past_stop or stop)
    return _with_tools(traits, probe)


@dataclass(frozen=True)
class _Probe:
    """Renders probe conversations with one template."""

    template: ChatTemplate
    form: MessageForm
    lead: tuple[CheckedMessage, ...] = ()
    """Messages before those of each conversation."""

    def render(
        self, *messages: CheckedMessage, prompt: bool = False, tools: bool = False
    ) -> Rendering:
        """Return the output for messages. Raises TemplateRefusedError if the template rejects
        them.
        """
        messages = (*self.lead, *messages)
        made = self.form.messages(messages, self.template, _MARKERS, range(len(messages)))
        offered = [dict(TOOL)] if tools else []
        return self.template.render(made, _MARKERS, prompt=prompt, tools=offered)

    def try_render(self, *messages: CheckedMessage, **options: bool) -> Rendering | None:
        """Return the output, or None if the template rejects the messages."""
        try:
            return self.render(*messages, **options)
        except TemplateRefusedError:
            return None

    def written_call(self, message: CheckedMessage, num_offered: int) -> str | None:
        """Return the output for a question and a message with one call, or None if the template
        does not write the call, or no result of it. The tool's name occurs `num_offered` times
        before the call.
        """
        call = self.try_render(_HELLO, message, tools=True)
        result = self.try_render(_HELLO, message, _RESULT, tools=True)
        if call is None or result is None or 2 * (2 + len(self.lead)) not in result.places:
            return None
        # Python's text of a dictionary, or of a missing text, was not meant by the template.
        is_python = f"{{'city': '{_CITY}'}}" in call.code or "None" in call.code
        is_written = call.code.count(_NAME) > num_offered and _CITY in call.code
        return call.code if is_written and not is_python else None


def _text_form(template: ChatTemplate) -> MessageForm:
    """Return the form in which the template reads the text of a message."""
    failure: Exception | None = None
    for form in (MessageForm(), MessageForm(has_parts=True)):
        probe = _Probe(template, form)
        try:
            first, second = (probe.render(_HELLO, prompt=True) for _ in range(2))
        except TemplateRefusedError as error:
            failure = failure or error
            continue
        if first != second:
            raise DamagedFileError(
                "the chat template gives two texts for one conversation, so prompts would not be "
                "reproducible; remove what changes, such as the filter random, or name another "
                "renderer"
            )
        if 0 in first.places:
            return form
    if failure is not None:
        raise failure
    raise UnsupportedError(
        "the chat template does not write the text of a user message; name another renderer"
    )


def _place(rendering: Rendering, index: int, message: CheckedMessage) -> tuple[int, int]:
    """Return the start and end of the text of message `index`."""
    places = rendering.places.get(2 * index)
    if not places:
        raise UnsupportedError(
            f"the chat template leaves out the text of a message of role {message.role!r}; name "
            "another renderer"
        )
    return places[0]


def _position(pieces: Sequence[Piece], tag: str) -> int:
    """Return the position of a tag in the code of pieces; a large number if there is none."""
    before = 0
    for piece in pieces:
        found = piece.text == tag if isinstance(piece, Control) else tag in piece
        if found:
            return before if isinstance(piece, Control) else before + piece.index(tag)
        before += 1 if isinstance(piece, Control) else len(piece)
    return sys.maxsize


def _message_end(rendering: Rendering, prompt: Rendering, text_end: int) -> int:
    """Return the end of the last message, whose text ends at `text_end`. White space after its
    last token is not part of the message.
    """
    shared = common_prefix(rendering.code, prompt.code)
    return max(text_end, rendering.end_of_markup(shared))


def _space_before(rendering: Rendering, index: int) -> str:
    """Return the white space before the text of message `index`."""
    before = rendering.code[: rendering.places[2 * index][0][0]]
    return before[len(before.rstrip()) :]


def _control_after(rendering: Rendering, start: int) -> str | None:
    position = rendering.next_control(start)
    return None if position is None else rendering.control_at(position)


def _with_system(traits: TemplateTraits, probe: _Probe, user_header: str) -> TemplateTraits:
    rendering = probe.try_render(_SYSTEM, _HELLO, prompt=True)
    if rendering is None or not {0, 2} <= rendering.places.keys():
        return traits
    roles = ("system", *traits.roles)
    end, user_start = rendering.places[0][0][1], rendering.places[2][0][0]
    between = rendering.code[end:user_start] if end < user_start else None
    if between is None or not between.endswith(user_header) or not user_header:
        return replace(traits, roles=roles)
    system_end = rendering.end_of_markup(user_start - len(user_header))
    ends = {**traits.role_ends, "system": rendering.pieces(end, max(end, system_end))}
    leads = {**traits.role_leads, "system": _space_before(rendering, 0)}
    return replace(traits, roles=roles, role_ends=ends, role_leads=leads)


_THOUGHT = "So be it."
_KEYS: tuple[ThinkingKey, ...] = ("reasoning_content", "thinking", "reasoning", "parts", "inline")


def _with_thinking(traits: TemplateTraits, probe: _Probe) -> TemplateTraits:
    named = [tags for tags in THINK_TAGS if tags[1] in probe.template.source]
    tags = next((tags for tags in named if _is_open(traits.opening, tags)), None)
    tags = tags or next(iter(named), None)
    answer = replace(_ANSWER, thinking=_THOUGHT)
    for key in _KEYS:
        if key == "inline" and tags is None:
            continue
        form = replace(traits.form, thinking=key, think_tags=tags or THINK_TAGS[0])
        rendering = replace(probe, form=form).try_render(_HELLO, answer)
        if rendering is None or not {2, 3} <= rendering.places.keys():
            continue
        around = _tags_around(rendering)
        # A template that expects a string may write the parts as the text of a Python list.
        if key != "parts" or around is not None:
            return replace(traits, form=form, think_tags=around or tags)
    return replace(traits, think_tags=tags)


def _is_thinking_off(probe: _Probe, prompt: Rendering) -> bool:
    """Return whether the template has a switch for reasoning that is off in `prompt`."""
    switched = (
        replace(probe, template=probe.template.with_options(dict.fromkeys(SWITCHES, value)))
        for value in (True, False)
    )
    on, off = (one.try_render(_HELLO, prompt=True) for one in switched)
    return on is not None and off is not None and on.code != off.code == prompt.code


def _with_history_stop(traits: TemplateTraits, probe: _Probe, mark: str) -> TemplateTraits:
    """Return the traits with the end mark of answers in history as another stop token, unless the
    mark also occurs within an answer.
    """
    thought = replace(_ANSWER, thinking=_THOUGHT if traits.form.thinking else None)
    rendering = replace(probe, form=traits.form).try_render(_HELLO, thought)
    if rendering is None or mark in traits.stops:
        return traits
    start = max(end for _, end in rendering.places[0])
    first = rendering.next_control(rendering.places[2][0][1], traits.stops)
    within = rendering.pieces(start, first)
    header = (*traits.role_ends["user"], *traits.head, *traits.opening)
    is_within = within.count(Control(mark)) > header.count(Control(mark))
    return traits if is_within else replace(traits, stops=(*traits.stops, mark))


def _tags_around(rendering: Rendering) -> tuple[str, str] | None:
    """Return the known tags around the reasoning of message 1."""
    start, end = rendering.places[3][0]
    before = as_text(rendering.pieces(0, start)).rstrip()
    after = as_text(rendering.pieces(end)).lstrip()
    return next(
        (tags for tags in THINK_TAGS if before.endswith(tags[0]) and after.startswith(tags[1])),
        None,
    )


def _with_tools(traits: TemplateTraits, probe: _Probe) -> TemplateTraits:
    # Some templates offer the tools only in a given system message.
    for lead in ((), (_SYSTEM,)):
        probe = replace(probe, lead=lead)
        offer = probe.try_render(_HELLO, prompt=True, tools=True)
        if offer is not None and _NAME in offer.code:
            break
    else:
        return traits
    num_offered = offer.code.count(_NAME)
    found = _with_call_form(replace(probe, form=traits.form), num_offered)
    if found is None:
        return traits
    probe = found
    calls, result = (
        probe.render(_HELLO, _CALL, *results, tools=True) for results in ((), (_RESULT,))
    )
    two = replace(_CALL, calls=(*_CALL.calls, _OTHER))
    several = probe.try_render(_HELLO, two, tools=True)
    if several is not None and not (
        several.code.count(_NAME) > num_offered and _OTHER.name in several.code
    ):
        several = None
    with_text = probe.try_render(_HELLO, replace(_CALL, text="Wait."), tools=True)
    start = common_prefix(offer.code, calls.code)
    stop = _call_stop(traits, calls, result, start)
    stops = tuple(dict.fromkeys([*traits.stops, *([stop] if stop else [])]))
    result_prompt = probe.render(_HELLO, _CALL, _RESULT, prompt=True, tools=True)
    result_end = _place(result, 2 + len(lead), _RESULT)[1]
    tool_end = result.pieces(result_end, _message_end(result, result_prompt, result_end))
    syntax = _find_syntax(
        replace(traits, stops=stops), several or calls, start, two if several else _CALL
    )
    form = replace(probe.form, call_tags=syntax.all_tags if syntax else ())
    return replace(
        traits,
        form=form,
        roles=(*traits.roles, "tool"),
        stops=stops,
        ends=tuple(dict.fromkeys([*traits.ends, *stops])),
        role_ends={**traits.role_ends, "tool": tool_end},
        role_leads={**traits.role_leads, "tool": _space_before(result, 2 + len(lead))},
        has_tools=True,
        tools_need_system=bool(lead),
        calls_have_text=with_text is not None
        and 2 * (1 + len(lead)) in with_text.places
        and with_text.code.count(_NAME) > num_offered,
        has_several_calls=several is not None,
        syntax=syntax,
    )


def _with_call_form(probe: _Probe, num_offered: int) -> _Probe | None:
    """Return the probe with the form in which the template writes a call and its result, or None if
    it writes none.
    """
    for names_results, has_short_ids, call_text in product(
        (False, True), (False, True), ("", None)
    ):
        form = replace(
            probe.form,
            names_results=names_results,
            has_short_ids=has_short_ids,
            call_text=call_text,
        )
        objects = replace(probe, form=form)
        texts = replace(probe, form=replace(form, arguments_are_text=True))
        written = objects.written_call(_CALL, num_offered)
        verbatim = texts.written_call(_CALL, num_offered)
        if verbatim is not None and _ARGUMENTS in verbatim:
            # The text of the arguments is written as it is. Some templates write an object in
            # another syntax, so that only a template without such a syntax may have the text.
            plain = replace(_CALL, calls=(Call(_NAME, json.dumps(json.loads(_ARGUMENTS))),))
            if written is None or written == texts.written_call(plain, num_offered):
                return texts
        if written is not None:
            return objects
    return None


def _call_stop(
    traits: TemplateTraits, calls: Rendering, result: Rendering, start: int
) -> str | None:
    """Return the control token that ends a message with calls, or None if it is one of the known
    stop tokens.
    """
    if calls.next_control(start, traits.stops) is not None:
        return None
    end = calls.end_of_markup(len(calls.code))
    if calls.control_at(end - 1) is not None and not traits.stops_in_next_header:
        return calls.control_at(end - 1)
    return _control_after(result, end) if result.code.startswith(calls.code[:end]) else None


def _find_syntax(
    traits: TemplateTraits, rendering: Rendering, start: int, message: CheckedMessage
) -> CallSyntax | None:
    """Return the syntax that reads the calls of `message` from the output after `start`."""
    pieces = rendering.pieces(start, rendering.next_control(start, traits.stops))
    wanted = [(call.name, json.loads(call.arguments)) for call in message.calls]
    for syntax in SYNTAXES:
        found = syntax.read(split_at_tags(pieces, syntax.all_tags))
        calls = [call["function"] for call in found.get("tool_calls", ())]
        text = found["content"]
        for tag in traits.think_tags or ():
            text = text.replace(tag, "")
        read = [(call["name"], json.loads(call["arguments"])) for call in calls]
        if read == wanted and not text.strip() and "unparsed_tool_calls" not in found:
            return syntax
    return None


def split_at_tags(pieces: Sequence[Piece], tags: Sequence[str]) -> list[Piece]:
    """Return pieces in which exactly `tags` are controls."""
    return [
        part
        for piece in pieces
        for part in (
            [piece]
            if isinstance(piece, Control) and piece.text in tags
            else split_text(as_text([piece]), tags)
        )
    ]
