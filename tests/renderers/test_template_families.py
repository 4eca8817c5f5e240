"""The renderer `template` with templates of many kinds, against transformers' rendering of them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from family_tokenizers import family_tokenizer, template
from oracle_cases import CONVERSATIONS, TOOL_CONVERSATIONS, TOOLS, template_messages, with_tools
from streamed import Reading, streamed

from planish.renderers import Renderer, Termination, get_renderer, get_text_content
from planish.renderers.messages import get_thinking_content
from planish.renderers.template_format import TemplateFormat
from planish.renderers.template_traits import TemplateTraits

CALLS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINK = ["<think>", "</think>"]
DEEPSEEK = ["begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant"]
MISTRAL = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
MISTRAL += ["[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
LLAMA = [
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
]
GLM = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
GLM += ["<|endoftext|>", *CALLS, *THINK, "<arg_key>", "</arg_key>", "<arg_value>"]
GEMMA4 = ["<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", '<|"|>']
GEMMA4 += [
    f"{begin}{name}{end}"
    for name in ("tool", "tool_call", "tool_response")
    for begin, end in (("<|", ">"), ("<", "|>"))
]
COHERE = ["<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"]
COHERE += ["<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"]


@dataclass(frozen=True)
class Family:
    """A template, the special tokens of its tokenizer, and what the renderer finds out."""

    tokens: list[str]
    stops: list[str]
    syntax: str | None = None
    thinks: bool = False
    opens_thought: bool = False
    eos: str = ""
    roles: str = "system user assistant"
    texts_with_calls: bool = True


FAMILIES = {
    "phi4": Family([*CHATML, "<|im_sep|>", *THINK], ["<|im_end|>"], thinks=True),
    "phi3_5": Family(
        ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"],
        ["<|end|>"],
        eos="<|endoftext|>",
    ),
    "olmo3_like": Family(CHATML, ["<|endoftext|>", "<|im_end|>"], "python lines", eos=CHATML[0]),
    "deepseek_r1_distill": Family(
        [*(f"<｜{name}｜>" for name in DEEPSEEK), *THINK],
        ["<｜end▁of▁sentence｜>"],
        thinks=True,
        opens_thought=True,
        eos="<｜end▁of▁sentence｜>",
    ),
    "qwen3_thinking_2507": Family(
        [*CHATML, *CALLS, *THINK], ["<|im_end|>"], "json", thinks=True, opens_thought=True
    ),
    "qwen3_training": Family([*CHATML, *CALLS, *THINK], ["<|im_end|>"], "json", thinks=True),
    "qwen3_coder": Family([*CHATML, *CALLS], ["<|im_end|>"], "xml"),
    "hermes_like": Family([*CHATML, *CALLS], ["<|im_end|>"], "json", texts_with_calls=False),
    "mistral_7b": Family(MISTRAL, ["</s>"], "mistral", eos="</s>", texts_with_calls=False),
    "magistral_like": Family(
        [*MISTRAL, "[THINK]", "[/THINK]", "[CALL_ID]", "[ARGS]", "[TOOL_CONTENT]"],
        ["</s>"],
        "mistral",
        thinks=True,
        eos="</s>",
    ),
    "gemma": Family(
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        ["<end_of_turn>"],
        eos="<eos>",
        roles="user assistant",
    ),
    "gemma4": Family(GEMMA4, ["<turn|>", "<|tool_response>"], "gemma4", eos="<eos>"),
    "granite_like": Family(
        ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"],
        ["<|end_of_text|>"],
        "open json list",
        eos="<|end_of_text|>",
    ),
    "glm4moe": Family(
        GLM, ["<|user|>", "<|observation|>"], "arg_key", thinks=True, eos="<|endoftext|>"
    ),
    "lfm2_v2": Family(
        [*CHATML, "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>"],
        ["<|im_end|>"],
        "python list",
    ),
    "llama3_1": Family(LLAMA, ["<|eot_id|>"], "bare json", texts_with_calls=False),
    "cohere": Family(COHERE, ["<|END_OF_TURN_TOKEN|>"]),
}
THINKING_2507 = template("qwen3").replace(
    "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable",
    "{{- '<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable",
)


def renderer_of(name: str) -> Renderer:
    family = FAMILIES[name]
    tokenizer: Any = family_tokenizer("mistral" if name.startswith("m") else "llama3")
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(family.tokens)})
    tokenizer.bos_token = next(
        (t for t in family.tokens if re.search("begin|bos|BOS|^<s>", t)), "<s>"
    )
    tokenizer.eos_token = family.eos or family.stops[0]
    tokenizer.chat_template = THINKING_2507 if name == "qwen3_thinking_2507" else template(name)
    return get_renderer("template", tokenizer, current_date="2025-06-28")


def traits_of(renderer: Renderer) -> TemplateTraits:
    assert isinstance(renderer.format, TemplateFormat)
    return renderer.format.traits


def stop_ids(renderer: Renderer) -> list[int]:
    return [stop for stop in renderer.get_stop_sequences() if isinstance(stop, int)]


RENDERERS = {name: renderer_of(name) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_traits_are_found_in_the_output(name):
    family, renderer = FAMILIES[name], RENDERERS[name]
    tokenizer: Any = renderer.tokenizer
    stops = tokenizer.convert_ids_to_tokens(renderer.get_stop_sequences())
    assert stops == family.stops
    traits = traits_of(renderer)
    assert (traits.syntax.name if traits.syntax else None) == family.syntax
    capabilities = renderer.format.capabilities
    assert capabilities.tools == (family.syntax is not None)
    assert capabilities.samples_thinking == family.thinks
    assert traits.opens_thought == family.opens_thought
    assert capabilities.roles == (*family.roles.split(), *(["tool"] if family.syntax else []))


def cases(name: str) -> Iterator[tuple[str, list[dict[str, Any]], bool]]:
    """Yield each conversation that the family can write: its name, its messages as transformers
    takes them, and whether tools are offered.
    """
    family, capabilities = FAMILIES[name], RENDERERS[name].format.capabilities
    for case, conversation in {**CONVERSATIONS, **TOOL_CONVERSATIONS}.items():
        text = json.dumps(template_messages(conversation))
        messages = json.loads(
            text.replace("functions.add:0", "000000000").replace("functions.now:1", "000000001")
        )
        if any(one["role"] not in capabilities.roles for one in messages):
            continue
        if case in TOOL_CONVERSATIONS and not capabilities.tools:
            continue
        calls = [one for one in messages if one.get("tool_calls")]
        if not family.texts_with_calls and any(one["content"] for one in calls):
            continue
        if any(len(one["tool_calls"]) > 1 for one in calls) and name == "llama3_1":
            continue
        if not capabilities.thinking and any("reasoning_content" in one for one in messages):
            continue
        is_system = messages[0]["role"] == "system" and messages[0]["content"]
        if name == "olmo3_like" and case in TOOL_CONVERSATIONS and not is_system:
            continue
        yield case, messages, case in TOOL_CONVERSATIONS


def for_transformers(renderer: Renderer, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages in the form of the template's documentation."""
    form = traits_of(renderer).form
    made = []
    for one in messages:
        message = dict(one)
        thinking = message.pop("reasoning_content", None)
        if thinking and form.thinking == "parts":
            parts = [{"type": "thinking", "thinking": thinking}]
            message["content"] = [*parts, {"type": "text", "text": message["content"]}]
        elif thinking and form.thinking == "inline":
            message["content"] = f"<think>\n{thinking}\n</think>\n\n{message['content']}"
        elif thinking:
            message["reasoning_content"] = thinking
        made.append(message)
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_equal_those_of_transformers(name):
    renderer = RENDERERS[name]
    tokenizer: Any = renderer.tokenizer
    num_cases = 0
    for case, messages, offers in cases(name):
        if messages[-1]["role"] == "assistant":
            continue
        tools = [{"type": "function", "function": tool} for tool in TOOLS] if offers else None
        expected = tokenizer.apply_chat_template(
            for_transformers(renderer, messages),
            tools=tools,
            tokenize=False,
            add_generation_prompt=True,
        )
        ours = with_tools(renderer, messages, TOOLS) if offers else messages
        tokens = renderer.build_generation_prompt(ours).to_ints()
        assert tokenizer.decode(tokens) == re.sub(
            r"Today's Date: \w+ \d+, \d+", "Today's Date: June 28, 2025", expected
        ), case
        num_cases += 1
    assert num_cases >= 2


@pytest.mark.parametrize("name", FAMILIES)
def test_a_trained_answer_follows_its_prompt_and_is_parsed_as_it_was_given(name):
    renderer, family = RENDERERS[name], FAMILIES[name]
    num_cases = 0
    for case, messages, offers in cases(name):
        answer = messages[-1]
        if answer["role"] != "assistant":
            continue
        if family.opens_thought and not answer.get("reasoning_content"):
            if name == "deepseek_r1_distill":
                with pytest.raises(ValueError, match="has none; add reasoning_content"):
                    renderer.build_supervised_example(messages)
            continue
        ours = with_tools(renderer, messages, TOOLS) if offers else messages
        tokens, weights = renderer.build_supervised_example(ours)
        ids = tokens.to_ints()
        sampled = [id_ for id_, weight in zip(ids, weights, strict=True) if weight]
        assert ids == renderer.build_generation_prompt(ours[:-1]).to_ints() + sampled, case
        message, termination = renderer.parse_response(sampled)
        assert termination is Termination.STOP_SEQUENCE, case
        assert get_text_content(message).strip() == answer["content"], case
        assert get_thinking_content(message) == answer.get("reasoning_content", ""), case
        calls = [call["function"] for call in message.get("tool_calls", ())]
        given = [call["function"] for call in answer.get("tool_calls", ())]
        assert [(one["name"], json.loads(one["arguments"])) for one in calls] == [
            (one["name"], one["arguments"]) for one in given
        ], case
        _, whole = streamed(renderer, sampled)
        expected = Reading.of_message(message)
        assert whole.calls == expected.calls, case
        assert whole.reasoning == expected.reasoning, case
        assert whole.content.strip() == expected.content.strip(), case
        num_cases += 1
    assert num_cases >= 1


@pytest.mark.parametrize("name", ["hermes_like", "mistral_7b", "llama3_1"])
def test_a_sample_that_the_template_cannot_write_does_not_end_an_episode(name):
    """These templates leave out the text of a message with calls."""
    renderer = RENDERERS[name]
    call = {
        "hermes_like": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "mistral_7b": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "123456789"}]',
        "llama3_1": '{"name": "add", "parameters": {}}; {"name": "add", "parameters": {}}',
    }[name]
    text = call if name == "llama3_1" else f"Wait.\n{call}"
    tokenizer: Any = renderer.tokenizer
    sampled = [*tokenizer.encode(text, add_special_tokens=False), renderer.get_stop_sequences()[0]]
    message, _ = renderer.parse_response(sampled)
    hello = {"role": "user", "content": "Hi"}
    messages = with_tools(renderer, [hello, message, hello], TOOLS)
    continuation = renderer.build_continuation(messages, len(messages) - 2, sampled)
    prompt = str(tokenizer.decode(renderer.build_generation_prompt(messages).to_ints()))
    if name == "hermes_like":
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"]
        assert f"<|im_start|>assistant\n{text}<|im_end|>" in prompt
    else:
        assert message == {"role": "assistant", "content": text}
    assert continuation is None or "Hi" in str(tokenizer.decode(continuation.to_ints()))


def test_switches_of_templates():
    """Granite does not think by default, and says so in its system message."""
    tokenizer = RENDERERS["granite_like"].tokenizer
    hello = [{"role": "user", "content": "Hello"}]
    off, on = (get_renderer(f"template{end}", tokenizer) for end in ("", "_thinking"))
    assert (off.format.capabilities.samples_thinking, on.format.capabilities.samples_thinking) == (
        False,
        True,
    )
    assert "<think>" in tokenizer.decode(on.build_generation_prompt(hello).to_ints())
    assert "<think>" not in tokenizer.decode(off.build_generation_prompt(hello).to_ints())


def test_tools_that_need_a_system_message_are_not_left_out():
    renderer = RENDERERS["olmo3_like"]
    with pytest.raises(ValueError, match=r"messages\[0\] offers tools.*give the message a content"):
        renderer.build_generation_prompt(
            with_tools(renderer, [{"role": "user", "content": "Add."}], TOOLS)
        )


def test_a_stop_token_of_the_next_header_is_trained_once():
    """GLM ends an answer with the mark of the next message."""
    renderer = RENDERERS["glm4moe"]
    turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    tokens, weights = renderer.build_supervised_example(turn * 2, "all_assistant_messages")
    sampled = [id_ for id_, weight in zip(tokens.to_ints(), weights, strict=True) if weight]
    answer = "\n<think></think>\nYes<|user|>"
    assert renderer.tokenizer.decode(sampled) == answer * 2
    prompt = renderer.build_generation_prompt(turn[:1]).to_ints()
    text = renderer.codec.encode(["\nYes"])
    first, second = stop_ids(renderer)
    sampled = [*text, first]
    continuation = renderer.build_continuation(turn + turn[:1], 1, sampled)
    assert continuation is not None
    decoded = renderer.tokenizer.decode(prompt + sampled + continuation.to_ints())
    assert decoded == "[gMASK]<sop><|user|>\nHi<|assistant|>\nYes<|user|>\nHi<|assistant|>"
    assert renderer.build_continuation(turn + turn[:1], 1, [*text, second]) is None


def test_the_two_stop_tokens_of_olmo_continue_a_conversation():
    renderer = RENDERERS["olmo3_like"]
    hello = {"role": "user", "content": "Hi"}
    messages = [hello, {"role": "assistant", "content": "Yes"}, hello]
    eos, end = stop_ids(renderer)
    text = renderer.codec.encode(["Yes"])
    continuation = renderer.build_continuation(messages, 1, [*text, end])
    assert continuation is not None
    assert str(renderer.tokenizer.decode(continuation.to_ints())).startswith(
        "\n<|im_start|>user\nHi<|im_end|>"
    )
    assert renderer.build_continuation(messages, 1, [*text, eos]) is None


@pytest.mark.parametrize("name", FAMILIES)
def test_no_text_becomes_a_control_token(name):
    renderer, family = RENDERERS[name], FAMILIES[name]
    ids = {renderer.codec.control_id(token) for token in family.tokens}

    def controls(text: str) -> list[int]:
        messages = [
            {"role": "user", "content": f"a{text}b"},
            {"role": "assistant", "content": [{"type": "text", "text": f"{text} c"}]},
            {"role": "user", "content": text},
        ]
        if family.syntax:
            call = {"function": {"name": "add", "arguments": {"a": text}}, "id": "000000000"}
            messages[1:1] = [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": text, "tool_call_id": "000000000", "name": "add"},
            ]
            messages = with_tools(renderer, messages, [{**TOOLS[0], "description": text}])
        if "system" in family.roles:
            start = messages.pop(0) if messages[0]["role"] == "system" else {"role": "system"}
            messages.insert(0, {**start, "content": f"{text}."})
        prompt = renderer.build_generation_prompt(messages).to_ints()
        return [id_ for id_ in prompt if id_ in ids]

    harmless = controls("harmless")
    for token in family.tokens:
        assert controls(token) == harmless, token
    assert controls("".join(family.tokens)) == harmless


@pytest.mark.parametrize(
    "case", [case for case in TOOL_CONVERSATIONS if "results" not in case and "text" not in case]
)
def test_llama3_writes_tools_as_the_template_without_the_dates(case):
    """The template writes one call in a message, and no text beside it."""
    tokenizer: Any = RENDERERS["llama3_1"].tokenizer
    renderer = get_renderer("llama3", tokenizer)
    messages = [
        {**one, "content": ""} if one.get("tool_calls") else one
        for one in template_messages(TOOL_CONVERSATIONS[case])
    ]
    for one in messages:
        one.pop("reasoning_content", None)
    expected = tokenizer.apply_chat_template(
        messages,
        tools=[{"type": "function", "function": tool} for tool in TOOLS],
        tokenize=False,
        add_generation_prompt=messages[-1]["role"] != "assistant",
    )
    expected = re.sub("Cutting Knowledge.*\nToday Date.*\n", "", expected)
    ours = with_tools(renderer, messages, TOOLS)
    if messages[-1]["role"] == "assistant":
        tokens = renderer.build_supervised_example(ours)[0].to_ints()
    else:
        tokens = renderer.build_generation_prompt(ours).to_ints()
    assert tokenizer.decode(tokens) == expected


def test_llama3_calls_are_parsed_and_streamed():
    renderer = get_renderer("llama3", RENDERERS["llama3_1"].tokenizer)
    for text in (
        '{"name": "add", "parameters": {"a": 1, "b": "x"}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "x"}}',
    ):
        sampled = [*renderer.codec.encode([text]), *renderer.get_stop_sequences()]
        message, _ = renderer.parse_response(sampled)
        assert message["content"] == ""
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": "x"}'}
        assert streamed(renderer, sampled)[1] == Reading.of_message(message)
    for text in ("{1, 2} is a set", '{"a": 1}', "{", '{"name": "add"}', '{"name": 1'):
        sampled = [*renderer.codec.encode([text]), *renderer.get_stop_sequences()]
        assert renderer.parse_response(sampled).message == {"role": "assistant", "content": text}
        assert streamed(renderer, sampled)[1] == Reading(text)


@pytest.mark.parametrize(
    "message",
    [
        {"content": "Wait.", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}] * 2},
    ],
)
def test_llama3_rejects_what_its_template_leaves_out(message):
    renderer = get_renderer("llama3", RENDERERS["llama3_1"].tokenizer)
    with pytest.raises(ValueError, match="one tool call in a message, and no text beside it"):
        renderer.build_supervised_example(
            [{"role": "user", "content": "Add."}, {"role": "assistant", **message}]
        )
    prefix = renderer.create_conversation_prefix_with_tools(TOOLS)
    with pytest.raises(ValueError, match=r"let messages\[1\] be a user message"):
        renderer.build_generation_prompt([*prefix, {"role": "assistant", "content": "Hi"}])
