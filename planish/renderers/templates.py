"""Find out what a model's chat template does, by rendering probe conversations with it.

Templates are programs, and different sources can have the same effect. So a default system message
is read from a template's output. The renderer of a local model is the one that writes the same text
as the template for all probes.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from planish.renderers.chat_format import ChatFormat
from planish.renderers.messages import read_messages
from planish.renderers.template_process import TemplateRefusedError, template_process
from planish.renderers.tool_calls import as_text
from planish.renderers.typescript import kimi_namespace
from planish.tokenizer import ModelTokenizer

HELLO: Mapping[str, Any] = {"role": "user", "content": "Hello."}
ANSWER: Mapping[str, Any] = {"role": "assistant", "content": "Good day."}
SYSTEM: Mapping[str, Any] = {"role": "system", "content": "Be brief."}
AGAIN: Mapping[str, Any] = {"role": "user", "content": "And now?"}
PROBES: tuple[tuple[Sequence[Mapping[str, Any]], bool], ...] = (
    ((HELLO,), True),
    ((SYSTEM, HELLO), True),
    ((HELLO, ANSWER, AGAIN), True),
    ((SYSTEM, HELLO, ANSWER), False),
)
"""Probe conversations, each with the value of add_generation_prompt."""
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_weather",
        "description": "Returns the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}},
            "required": ["city"],
        },
    },
}
_CALLS = [
    {
        "type": "function",
        "id": "call12345",
        "function": {"name": "probe_weather", "arguments": {"city": "Rome"}},
    }
]
TOOL_PROBES: tuple[tuple[Sequence[Mapping[str, Any]], bool], ...] = (
    ((SYSTEM, HELLO), True),
    ((SYSTEM, HELLO, {"role": "assistant", "content": "", "tool_calls": _CALLS}), False),
)
"""Probe conversations with the tool TOOL, each with the value of add_generation_prompt."""


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    prompt: bool,
    now: str = "",
    **names: Any,
) -> str:
    """Render a chat template, in a process with limited time and memory.

    `now`: the time that the template gets if it asks for it, in ISO format; "" = the present.
    `names`: the values of further names in the template, such as `tools`, `bos_token` and
    `eos_token`. Raises DamagedFileError if it is not a valid template or exceeds the limits, and
    its subclass TemplateRefusedError if it rejects the messages or fails on them.
    """
    variables = {
        "messages": [dict(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": prompt,
        **names,
    }
    return template_process.render(template, variables, now)


def chat_template_of(tokenizer: ModelTokenizer, name: str = "default") -> str | None:
    """Return a tokenizer's chat template, or None if it has none.

    If the tokenizer has several templates, return the one that is named `name`. Tokenizers with a
    template of their own for tools name it tool_use.
    """
    return choose_template(getattr(tokenizer, "chat_template", None), name)


def choose_template(template: Any, name: str = "default") -> str | None:
    """Return the template named `name` if `template` is a list or mapping of several templates.

    Return `template` itself if it is a string, and None for anything else.
    """
    if isinstance(template, list):
        template = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, Mapping)
        }
    if isinstance(template, Mapping):
        template = template.get(name)
    return template if isinstance(template, str) else None


CHATML_SYSTEM = ("<|im_start|>system\n", "<|im_end|>", "<|im_start|>user\n")
MISTRAL_SYSTEM = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]")
"""The marks before and after a system message, and before a user message."""


def default_system_message(
    template: str,
    special_tokens: Mapping[str, str] = {},
    marks: tuple[str, str, str] = CHATML_SYSTEM,
    now: str = "",
) -> str | None:
    """Return the system message that a template adds to a conversation without one.

    `special_tokens`: the special tokens by role, such as {"eos_token": "<|im_end|>"}. `marks`: the
    marks of the chat format. `now`: the time that the template writes, in ISO format.
    """
    begin, end, user = marks
    text = render_template(template, [HELLO], True, now, **special_tokens)
    before, separator, _ = text.partition(f"{user}{HELLO['content']}")
    if not separator:
        return None
    _, separator, rest = before.partition(begin)
    return rest.partition(end)[0] if separator else None


def writes_like(
    template: str, chat_format: ChatFormat, special_tokens: Mapping[str, str] = {}
) -> bool:
    """Return whether the format's text equals the template's on every probe without tools.

    A template that rejects a probe, such as one with a system message, does not.
    """
    return all(
        _is_same(
            format_text(chat_format, messages, prompt),
            _rendered(template, messages, prompt, special_tokens),
            prompt,
        )
        for messages, prompt in PROBES
    )


def writes_tools_like(
    template: str, chat_format: ChatFormat, special_tokens: Mapping[str, str] = {}
) -> bool:
    """Return whether the format's text equals the template's on every probe with tools.

    Probes are left out if the format has no tools, or if the template does not write them.
    """
    if not chat_format.capabilities.tools:
        return True
    for messages, prompt in TOOL_PROBES:
        template_output = _rendered(template, messages, prompt, special_tokens, tools=[dict(TOOL)])
        if template_output is None or TOOL["function"]["name"] not in template_output:
            continue
        own = [{**messages[0], "tools": [TOOL]}, *map(_with_json_arguments, messages[1:])]
        format_output, template_output = map(
            _without_known_differences, (format_text(chat_format, own, prompt), template_output)
        )
        if not _is_same(format_output, template_output, prompt):
            return False
    return True


def _without_known_differences(text: str) -> str:
    """Return a text without what differs between a template and the renderer of its family.

    In the calls of gpt-oss, planish follows openai-harmony, which has one more token. The tokenizers
    of Kimi write the list of tools by code of their own, which templates do not contain.
    """
    sorted_tool = json.loads(json.dumps(TOOL, sort_keys=True))
    lists = [
        kimi_namespace([TOOL["function"]]),
        *(
            json.dumps([tool], separators=separators)
            for tool in (TOOL, sorted_tool)
            for separators in ((", ", ": "), (",", ":"))
        ),
    ]
    for written in lists:
        text = text.replace(written, "TOOLS")
    return text.replace("<|constrain|>", "")


def writes_reasoning_like(
    template: str, chat_format: ChatFormat, special_tokens: Mapping[str, str] = {}
) -> bool:
    """Return whether the format's text of an answer with reasoning equals the template's."""
    if not chat_format.capabilities.thinking:
        return False
    thought = "So be it."
    format_output = format_text(
        chat_format, [HELLO, {**ANSWER, "reasoning_content": thought}], False
    )
    # The template of gpt-oss reads the reasoning from the key `thinking`.
    answer = {**ANSWER, "reasoning_content": thought, "thinking": thought}
    return _is_same(
        format_output, _rendered(template, [HELLO, answer], False, special_tokens), False
    )


def _rendered(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    prompt: bool,
    special_tokens: Mapping[str, str],
    **names: Any,
) -> str | None:
    """Return the template's text, or None if it rejects the messages."""
    try:
        return render_template(template, messages, prompt, **special_tokens, **names)
    except TemplateRefusedError:
        return None


def _is_same(format_output: str, template_output: str | None, prompt: bool) -> bool:
    # A ChatML template writes a line break after the last message. In planish that line break
    # begins the next header.
    return template_output == format_output or (
        not prompt and template_output == f"{format_output}\n"
    )


def _with_json_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls have their arguments as JSON text, as in planish."""
    if "tool_calls" not in message:
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"]),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def format_text(
    chat_format: ChatFormat, messages: Sequence[Mapping[str, Any]], prompt: bool
) -> str:
    """Return the text that a format writes for `messages`.

    `prompt`: whether to append the header of the assistant's next message.
    """
    checked = read_messages(messages, chat_format.capabilities, type(chat_format).__name__)
    pieces = list(chat_format.opening())
    turns = chat_format.prompt_turns(checked, "assistant") if prompt else chat_format.turns(checked)
    for turn in turns:
        pieces += [*turn.header, *turn.output]
    return as_text(pieces)
