"""The renderers of SmolLM3: its template with tools, reasoning and flags, targets, parsing,
streaming and grammars. test_renderer_templates.py compares plain conversations with the template.
"""

from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.hf
import pytest
from family_tokenizers import family_tokenizer
from streamed import Reading, streamed
from test_renderer_templates import DATE, TOOLS, assert_equal, by_template

from planish.renderers import Renderer, get_renderer
from planish.renderers.grammars import ANY_TEXT, CallableTool, calls_rules, message_grammar
from planish.renderers.registry import with_effort, with_thinking

TOKENIZER = family_tokenizer("smollm3", "smollm3")
MADE = {
    name: get_renderer(name, TOKENIZER, current_date=DATE)
    for name in ("smollm3", "smollm3_disable_thinking")
}
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "zwölf"}}\n</tool_call>'
NOW_TEXT = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "zwölf"}'}}
NOW = {"type": "function", "function": {"name": "now", "arguments": "{}"}}
BOTH = pytest.mark.parametrize("name", MADE)


def thought(renderer: Renderer, text: str) -> str:
    return f"<think>\n{text}\n</think>\n" if renderer.name == "smollm3" else ""


def with_tools(renderer: Renderer, messages: list[Any], system: str = "") -> list[Any]:
    return [*renderer.create_conversation_prefix_with_tools(TOOLS, system), *messages]


@BOTH
@pytest.mark.parametrize("system", ["", "Be brief. "])
def test_tools_equal_the_template(name, system):
    """The template has no field for calls, so it gets the calls as text."""
    renderer = MADE[name]
    ours = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": thought(renderer, "old thoughts") + "Old answer."},
        {"role": "user", "content": "Add again, and tell the time."},
        {
            "role": "assistant",
            "content": thought(renderer, "I need tools.") + "One moment.",
            "tool_calls": [CALL, NOW],
        },
        {"role": "tool", "content": "13"},
        {"role": "tool", "content": "noon\n"},
        {"role": "assistant", "content": "", "tool_calls": [NOW]},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": thought(renderer, "Done.") + "13, at noon."},
    ]
    theirs: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    texts = {3: f"\n{CALL_TEXT}\n{NOW_TEXT}", 6: NOW_TEXT}
    theirs += [
        {"role": message["role"], "content": message["content"] + texts.get(index, "")}
        for index, message in enumerate(ours)
    ]
    first = len(theirs) - len(ours)
    for end in (1, 3, 6, 8):
        prompt = renderer.build_generation_prompt(with_tools(renderer, ours[:end], system))
        expected = by_template(renderer, theirs[: first + end], True, xml_tools=TOOLS)
        assert_equal(renderer, prompt.to_ints(), expected)
    example, _ = renderer.build_supervised_example(with_tools(renderer, ours, system))
    assert_equal(renderer, example.to_ints(), by_template(renderer, theirs, False, xml_tools=TOOLS))


@BOTH
@pytest.mark.parametrize(
    "system",
    [
        "/think",
        "/no_think",
        "Be brief. /no_think",
        "/think Be brief.\n",
        "/system_override Only this.  ",
        "/no_think/system_override",
    ],
)
def test_flags_in_the_system_message_equal_the_template(name, system):
    renderer = MADE[name]
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And?"},
    ]
    ours = renderer.build_generation_prompt(messages).to_ints()
    assert_equal(renderer, ours, by_template(renderer, messages, True))


def test_the_default_system_message_has_control_tokens():
    """Its text names the tags, which the tokenizer reads as tokens, as in the template."""
    ids = MADE["smollm3"].build_generation_prompt([{"role": "user", "content": "<think>"}])
    assert ids.to_ints().count(TOKENIZER.get_vocab()["<think>"]) == 1


def test_the_date_is_an_option():
    renderer = get_renderer("smollm3", TOKENIZER, current_date="1999-12-03")
    prompt = renderer.build_generation_prompt([{"role": "user", "content": "Hi"}])
    assert "\nToday Date: 03 December 1999\n" in str(TOKENIZER.decode(prompt.to_ints()))
    with pytest.raises(ValueError, match=r"smollm3\* and template\*, not of qwen3"):
        get_renderer("qwen3", TOKENIZER, current_date="1999-12-03")


def test_a_tag_in_the_system_message_is_no_flag():
    system = {"role": "system", "content": "End with </think>."}
    for renderer in MADE.values():
        prompt = renderer.build_generation_prompt([system, {"role": "user", "content": "Hi"}])
        text = str(TOKENIZER.decode(prompt.to_ints()))
        assert "End with </think>.\n\n<|im_start|>user" in text
        mode = "/think" if renderer.name == "smollm3" else "/no_think"
        assert f"Reasoning Mode: {mode}\n" in text


def test_thinking_can_be_switched():
    assert with_thinking("smollm3", False) == "smollm3_disable_thinking"
    assert with_effort("smollm3_disable_thinking", "high") == "smollm3"


def answers(renderer: Renderer) -> list[dict[str, Any]]:
    content: Any = "It is 42.\n\nYes: 東京"
    if renderer.name == "smollm3":
        content = [{"type": "thinking", "thinking": "I\nthink."}, {"type": "text", "text": content}]
    plain = {"role": "assistant", "content": content}
    return [plain, {**plain, "tool_calls": [CALL]}, {**plain, "tool_calls": [CALL, NOW]}]


def sample_of(renderer: Renderer, answer: dict[str, Any]) -> list[int]:
    """Return the tokens that a model samples for `answer`."""
    messages = [{"role": "user", "content": "6 times 7?"}, answer]
    prompt = renderer.build_generation_prompt(messages[:1]).to_ints()
    example, weights = renderer.build_supervised_example(messages)
    assert example.to_ints()[: len(prompt)] == prompt
    assert weights.tolist() == [0.0] * len(prompt) + [1.0] * (len(weights) - len(prompt))
    return example.to_ints()[len(prompt) :]


@BOTH
def test_answers_are_parsed_back_and_streamed(name):
    renderer = MADE[name]
    for answer in answers(renderer):
        tokens = sample_of(renderer, answer)
        parsed = renderer.parse_response(tokens)
        assert parsed.termination.is_stop_sequence
        assert parsed.message == answer
        _, whole = streamed(renderer, tokens)
        assert whole == Reading.of_message(parsed.message)
        assert whole.reasoning == ("I\nthink." if name == "smollm3" else "")
        assert len(whole.calls) == len(answer.get("tool_calls", ()))


@BOTH
def test_every_prompt_extends_the_earlier_prompts(name):
    renderer = MADE[name]
    assert renderer.has_extension_property
    messages: list[Any] = with_tools(renderer, [{"role": "user", "content": "Hi"}])
    for answer in answers(renderer)[:2]:
        messages.append(answer)
        seen = renderer.build_supervised_example(messages)[0].to_ints()
        role = "tool" if "tool_calls" in answer else "user"
        messages.append({"role": role, "content": "13"})
        assert renderer.build_generation_prompt(messages).to_ints()[: len(seen)] == seen


@BOTH
@pytest.mark.parametrize("instead", [None, ANY_TEXT])
def test_call_grammars_accept_the_sampled_form(name, instead):
    renderer = MADE[name]
    compiler = llguidance.hf.from_tokenizer(TOKENIZER)
    parameters = {**TOOLS[0]["parameters"], "properties": {"a": {"type": "number"}, "b": {}}}
    tools = [CallableTool("add", parameters), CallableTool("now", TOOLS[1]["parameters"])]
    grammar = message_grammar(renderer, calls_rules(renderer, tools, alternative=instead))
    assert llguidance.LLMatcher.validate_grammar(grammar, compiler) == ""

    def accepts(tokens: Sequence[int]) -> bool:
        matcher = llguidance.LLMatcher(compiler, grammar)
        return matcher.try_consume_tokens(list(tokens)) == len(tokens) and matcher.is_accepting()

    plain, _, both = answers(renderer)
    text = (
        [part for part in both["content"] if part["type"] == "thinking"]
        if instead is None and name == "smollm3"
        else both["content"]
    )
    calls = {**both, "content": "" if instead is None and name != "smollm3" else text}
    assert accepts(sample_of(renderer, calls)[:-1])
    assert accepts(sample_of(renderer, plain)[:-1]) == (instead is not None)


def test_messages_that_the_format_cannot_express_are_rejected():
    renderer = MADE["smollm3_disable_thinking"]
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "b"}
    with pytest.raises(ValueError, match=r"messages\[1\] is a system message"):
        renderer.build_generation_prompt([user, system])
    with pytest.raises(ValueError, match="has tools and /system_override"):
        renderer.build_generation_prompt(with_tools(renderer, [user], "/system_override"))
    reasoned = {"role": "assistant", "content": "<think>\nHm.\n</think>\n42"}
    with pytest.raises(ValueError, match=r"messages\[1\] cannot be trained.*it has reasoning"):
        renderer.build_supervised_example([user, reasoned])
