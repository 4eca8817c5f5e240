"""What the renderers of Qwen3.5, Nemotron 3, DeepSeek, Kimi, gpt-oss and Mistral have in common:
texts recorded from their oracles, targets, stability, parsing, streaming and grammars.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import llguidance.hf
import pytest
import torch
from family_tokenizers import family_tokenizer
from oracle_cases import (
    CALLS,
    CONVERSATIONS,
    QUESTION,
    TOOL_CONVERSATIONS,
    TOOLS,
    assistant,
    family_of,
    is_of_a_family,
    planish_messages,
    tool,
    user,
    with_tools,
)
from streamed import Reading, streamed
from variants import slow_after

from planish.errors import UnsupportedError
from planish.renderers import FORMATS, Renderer, get_renderer
from planish.renderers.grammars import (
    ANY_TEXT,
    CallableTool,
    answer_rules,
    calls_rules,
    message_grammar,
)
from planish.renderers.messages import RENDERERS_WITH_TOOLS
from planish.renderers.registry import with_effort, with_thinking

RECORDED = json.loads(Path(__file__).with_name("recorded_texts.json").read_text(encoding="utf-8"))
NAMES = [name for name in FORMATS if is_of_a_family(name)]
DATE = "2025-06-28"
TOKENIZERS = {family: family_tokenizer(family) for family in sorted({family_of(n) for n in NAMES})}


def make(name: str) -> Renderer:
    has_date = name.startswith("gpt_oss") and name != "gpt_oss_no_sysprompt"
    return get_renderer(name, TOKENIZERS[family_of(name)], current_date=DATE if has_date else None)


MADE = {name: make(name) for name in NAMES}
WITH_TOOLS = [name for name in NAMES if MADE[name].format.capabilities.tools]
THINKING = [name for name in NAMES if MADE[name].format.capabilities.samples_thinking]


def tokens_of(renderer: Renderer, case: str) -> list[int]:
    """Return the tokens of a conversation: an example if it ends with an answer, or a prompt."""
    given = CONVERSATIONS.get(case) or TOOL_CONVERSATIONS[case]
    messages = planish_messages(given)
    if case in TOOL_CONVERSATIONS:
        messages = with_tools(renderer, messages)
    if given[-1]["role"] != "assistant":
        return renderer.build_generation_prompt(messages).to_ints()
    # The texts of all answers have a form, also of those that cannot be trained.
    return renderer.build_supervised_example(messages, "all_user_and_system_messages")[0].to_ints()


@pytest.mark.parametrize(("name", "case"), [(n, c) for n, cases in RECORDED.items() for c in cases])
def test_texts_equal_the_recorded_texts_of_the_oracles(name, case):
    """test_renderer_oracles.py compares tokens with the oracles and checks the record."""
    renderer = MADE[name]
    assert renderer.tokenizer.decode(tokens_of(renderer, case)) == RECORDED[name][case]


def test_every_behaviour_is_recorded():
    formats = {MADE[name].format for name in NAMES if name != "mistral"}
    recorded = {MADE[name].format for name in RECORDED}
    assert formats == recorded


def answer_for(renderer: Renderer, text: str, call: bool = False) -> dict[str, Any]:
    """Return an answer that the renderer can train: with reasoning if it samples reasoning."""
    thinking = "I think." if renderer.format.capabilities.samples_thinking else ""
    calls = CALLS[:1] if call else None
    return planish_messages([assistant(text, thinking, calls)])[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("call", [False, True])
def test_exactly_what_follows_the_prompt_is_trained(name, call):
    renderer = MADE[name]
    if call and name not in WITH_TOOLS:
        return
    for history in ([], [user("Hi"), answer_for(renderer, "Hello.")]):
        messages = [*history, user(QUESTION), answer_for(renderer, "42", call)]
        prompt = renderer.build_generation_prompt(messages[:-1]).to_ints()
        example, weights = renderer.build_supervised_example(messages)
        assert example.to_ints()[: len(prompt)] == prompt
        assert weights[: len(prompt)].sum() == 0
        assert torch.all(weights[len(prompt) :] == 1)
        assert len(weights) > len(prompt)


JSON_CALLS = {
    name: get_renderer(name, family_tokenizer("qwen", "qwen2_5"))
    for name in ("chatml", "qwen3", "qwen3_instruct")
}


@pytest.mark.parametrize("name", sorted([*WITH_TOOLS, *JSON_CALLS]))
@pytest.mark.parametrize("text", ['{"a": "b', "[1", "not JSON <|im_end|>", "  "])
def test_a_call_that_was_cut_off_is_written_unchanged(name, text):
    """If the calls are XML, it cannot be written, and the error says what to do. No arguments at
    all are an empty object.
    """
    renderer = {**MADE, **JSON_CALLS}[name]

    def messages(arguments: str) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [user(QUESTION), answer, {"role": "tool", "content": "wrong"}]

    form = renderer.format.capabilities.calls
    assert form is not None
    if text.strip() and form.xml:
        with pytest.raises(ValueError, match="XML element; give .* that max_tokens cut off"):
            renderer.build_generation_prompt(messages(text))
        return
    prompt = renderer.build_generation_prompt(messages(text)).to_ints()
    written = renderer.tokenizer.decode(prompt)
    if text.strip():
        assert text in written
    else:
        assert prompt == renderer.build_generation_prompt(messages("{}")).to_ints()
    controls = set(renderer.tokenizer.all_special_ids)
    plain = renderer.build_generation_prompt(messages("{}")).to_ints()
    assert [token for token in prompt if token in controls] == [
        token for token in plain if token in controls
    ]


STABLE = {
    "qwen3_8_disable_thinking",
    "nemotron3_disable_thinking",
    "nemotron3_preserve_thinking",
    "nemotron3_ultra_disable_thinking",
    "nemotron3_ultra_preserve_thinking",
    "deepseekv3",
    "deepseekv3_disable_thinking",
    "kimi_k25_disable_thinking",
    "kimi_k26_disable_thinking",
    "kimi_k26_preserve_thinking",
    "mistral",
}
STABLE_IN_TURN = STABLE | {
    "qwen3_5_disable_thinking",
    "nemotron3",
    "nemotron3_low_thinking",
    "nemotron3_ultra",
    "nemotron3_ultra_medium_thinking",
    "kimi_k2",
    "kimi_k25",
    "kimi_k26",
    "gpt_oss_no_sysprompt",
    "gpt_oss_low_reasoning",
    "gpt_oss_medium_reasoning",
    "gpt_oss_high_reasoning",
}


def extends(renderer: Renderer, messages: Sequence[dict[str, Any]], end: int) -> bool:
    """Return whether the prompt of `messages` begins with the example of messages[:end]."""
    seen = renderer.build_supervised_example(list(messages[:end]))[0].to_ints()
    return renderer.build_generation_prompt(list(messages)).to_ints()[: len(seen)] == seen


@pytest.mark.parametrize("name", NAMES)
def test_a_renderer_says_whether_prompts_extend_each_other(name):
    """A counterexample exists wherever the property is denied."""
    renderer = MADE[name]
    answers = [answer_for(renderer, "42")]
    if name.startswith(("qwen3", "kimi", "gpt_oss", "deepseek")):
        answers.append({"role": "assistant", "content": "42"})
    turns = [
        extends(renderer, [user("Hi"), answer, user("And?"), answer, user("So?")], 2)
        for answer in answers
    ]
    assert all(turns) == renderer.has_extension_property == (name in STABLE)
    if name not in WITH_TOOLS:
        return
    steps = []
    for answer in answers:
        call = {**answer, "tool_calls": answer_for(renderer, "", True)["tool_calls"]}
        result = planish_messages([tool("13", CALLS[0])])[0]
        prefix = with_tools(renderer, [user("Add.")])
        steps.append(extends(renderer, [*prefix, call, result], len(prefix) + 1))
    in_turn = renderer.format.capabilities.extends_in_turn
    assert all(steps) == in_turn == (name in STABLE_IN_TURN)


def sample_of(renderer: Renderer, answer: dict[str, Any]) -> list[int]:
    """Return the tokens that a model samples for `answer`."""
    messages = [user(QUESTION), answer]
    prompt = renderer.build_generation_prompt(messages[:1]).to_ints()
    return renderer.build_supervised_example(messages)[0].to_ints()[len(prompt) :]


def with_one_call(renderer: Renderer, text: str = "Wait.") -> dict[str, Any]:
    answer = answer_for(renderer, text, call=True)
    function = answer["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    if not renderer.name.startswith("kimi"):
        del answer["tool_calls"][0]["id"]
    return answer


@pytest.mark.parametrize("name", NAMES)
def test_rendered_answers_and_calls_are_parsed_back(name):
    renderer = MADE[name]
    answers = [answer_for(renderer, "It is 42.\n\nYes: 東京 🙂")]
    if name in WITH_TOOLS:
        answers += [with_one_call(renderer), with_one_call(renderer, "")]
    for answer in answers:
        parsed = renderer.parse_response(sample_of(renderer, answer))
        assert parsed.termination.is_stop_sequence
        assert parsed.message == answer
        cut = renderer.parse_response(sample_of(renderer, answer)[:-1])
        assert not cut.termination.is_clean


@pytest.mark.parametrize("name", NAMES)
def test_streamed_answers_equal_the_parsed_answers(name):
    renderer = MADE[name]
    answers = [answer_for(renderer, "It is 42.\n\nYes: 東京 🙂")]
    answers += [with_one_call(renderer)] if name in WITH_TOOLS else []
    for answer in answers:
        tokens = sample_of(renderer, answer)
        _, whole = streamed(renderer, tokens)
        assert whole == Reading.of_message(renderer.parse_response(tokens).message)
        assert len(whole.calls) == len(answer.get("tool_calls", ()))
        content = answer["content"]
        text = content if isinstance(content, str) else content[-1]["text"]
        assert whole.content == text
        assert whole.reasoning == ("I think." if name in THINKING else "")


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_can_end_within_the_last_message(name):
    """The prompt and the rest of the message are the tokens of the whole message."""
    renderer = MADE[name]
    messages = [{"role": "user", "content": "6 times 7?"}, answer_for(renderer, "It is 42.")]
    tokens = renderer.build_supervised_example(messages)[0].to_ints()
    begun = [messages[0], answer_for(renderer, "It is")]
    prompt = renderer.build_continued_prompt(begun).to_ints()
    text = renderer.codec.decode(prompt)
    assert text.endswith("It is")
    assert renderer.codec.decode(tokens).startswith(f"{text} 42.")
    if name in THINKING:
        thought = [*messages[:1], {**begun[1], "content": begun[1]["content"][:1]}]
        text = renderer.codec.decode(renderer.build_continued_prompt(thought).to_ints())
        assert text.endswith("I think.")
        assert renderer.codec.decode(tokens).startswith(text)


compiler_of = cache(llguidance.hf.from_tokenizer)
CALLABLE = [CallableTool(one["name"], one["parameters"]) for one in TOOLS]


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("instead", slow_after(2, [None, ANY_TEXT, "/[0-9]+/"]))
def test_call_grammars_accept_the_family_own_form(name, instead):
    renderer = MADE[name]
    tokenizer: Any = renderer.tokenizer
    compiler = compiler_of(tokenizer)
    rules = calls_rules(renderer, CALLABLE, alternative=instead)
    grammar = message_grammar(renderer, rules)
    assert llguidance.LLMatcher.validate_grammar(grammar, compiler) == ""

    def accepts(tokens: Sequence[int], grammar: str = grammar) -> bool:
        matcher = llguidance.LLMatcher(compiler, grammar)
        return matcher.try_consume_tokens(list(tokens)) == len(tokens) and matcher.is_accepting()

    call = with_one_call(renderer, "")
    both = with_one_call(renderer, "")
    both["tool_calls"] = planish_messages([assistant("", calls=CALLS)])[0]["tool_calls"]
    # The engine adds the stop token, so the grammar ends before it.
    assert accepts(sample_of(renderer, call)[:-1])
    # gpt-oss stops at each call.
    has_one = name.startswith("gpt_oss")
    assert accepts(sample_of(renderer, both)[:-1]) == (not has_one)
    wrong = with_one_call(renderer, "")
    wrong["tool_calls"][0]["function"]["arguments"] = '{"a": "x", "b": "two"}'
    assert not accepts(sample_of(renderer, wrong)[:-1])
    wrong["tool_calls"][0]["function"] = {"name": "sub", "arguments": "{}"}
    assert not accepts(sample_of(renderer, wrong)[:-1])
    assert accepts(sample_of(renderer, answer_for(renderer, "42"))[:-1]) == (instead is not None)
    assert accepts(sample_of(renderer, answer_for(renderer, "Hi"))[:-1]) == (instead == ANY_TEXT)
    plain = message_grammar(renderer, answer_rules(renderer, "/[0-9]+/"))
    assert accepts(sample_of(renderer, answer_for(renderer, "42"))[:-1], plain)
    assert not accepts(sample_of(renderer, answer_for(renderer, "Hi"))[:-1], plain)


def test_errors_name_every_renderer_with_tools():
    named = tuple(re.sub(r"\(.*?\)|,| or ", " ", RENDERERS_WITH_TOOLS).split())
    assert all(any(name.startswith(begin) for name in FORMATS) for begin in named)
    tokenizer = TOKENIZERS[family_of("qwen3_5")]
    for name in FORMATS:
        if name.startswith("template"):  # it has the tools of its chat template
            continue
        is_named = name != "deepseekv3_thinking" and name.startswith(named)
        assert FORMATS[name](tokenizer).capabilities.tools == is_named, name


@pytest.mark.parametrize("name", ["mistral", "deepseekv3_thinking"])
def test_renderers_without_tools_say_so(name):
    with pytest.raises(UnsupportedError, match=f"{name} has no form for tool calls"):
        calls_rules(MADE[name], CALLABLE)
    with pytest.raises(UnsupportedError, match=f"{name} has no form for tools"):
        MADE[name].create_conversation_prefix_with_tools(TOOLS)
    with pytest.raises(ValueError, match=r"messages\[1\] has tool calls"):
        MADE[name].build_generation_prompt(
            [user("a"), *planish_messages([assistant("", calls=CALLS)])]
        )


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(THINKING) - {"mistral"}))
def test_reasoning_is_no_target_where_thinking_is_disabled(name):
    reasoned = planish_messages([assistant("42", "Hm.")])
    with pytest.raises(ValueError, match=r"messages\[1\] cannot be trained.*it has reasoning"):
        MADE[name].build_supervised_example([user("a"), *reasoned])


@pytest.mark.parametrize("name", [name for name in THINKING if name.startswith("nemotron3")])
def test_nemotron_answers_need_reasoning_where_prompts_open_a_block(name):
    with pytest.raises(ValueError, match=r"messages\[1\] cannot be trained.*no reasoning"):
        MADE[name].build_supervised_example([user("a"), assistant("42")])


def test_tool_results_are_matched_to_their_calls():
    """gpt-oss needs the function's name and Kimi the call's id; both follow from the calls."""
    calls = planish_messages([assistant("", calls=CALLS)])
    for call in calls[0]["tool_calls"]:
        del call["id"]
    results = [{"role": "tool", "content": "13"}, {"role": "tool", "content": "noon"}]
    messages = [user("a"), *calls, *results]
    texts = {
        name: MADE[name].tokenizer.decode(MADE[name].build_generation_prompt(messages).to_ints())
        for name in ("gpt_oss_no_sysprompt", "kimi_k2")
    }
    assert "<|start|>functions.now to=assistant" in texts["gpt_oss_no_sysprompt"]
    assert "## Return of functions.now:1\nnoon" in texts["kimi_k2"]
    for name, key in (("gpt_oss_no_sysprompt", "name"), ("kimi_k2", "tool_call_id")):
        with pytest.raises(ValueError, match=rf"messages\[1\] is a tool result without '{key}'"):
            MADE[name].build_generation_prompt([user("a"), results[0]])


def test_deepseek_has_one_system_message():
    late = [user("a"), {"role": "system", "content": "b"}]
    with pytest.raises(ValueError, match=r"messages\[1\] is a system message"):
        MADE["deepseekv3"].build_generation_prompt(late)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_broken_calls_are_kept_and_rendered_unchanged(name):
    renderer = MADE[name]
    sample = sample_of(renderer, with_one_call(renderer, ""))
    text = str(renderer.tokenizer.decode(sample))
    broken = text.replace("</function>", "").replace('{"a"', '{"a')
    tokens = renderer.tokenizer.encode(broken, add_special_tokens=False)
    message, _ = renderer.parse_response(tokens)
    assert "tool_calls" not in message
    assert message["unparsed_tool_calls"][0]["error"]
    assert sample_of(renderer, message) == tokens


@pytest.mark.parametrize(
    ("name", "text"),
    [("qwen3_5", "True"), ("qwen3_5_preserve_thinking", "true"), ("qwen3_8_low_reasoning", "true")],
)
def test_qwen_writes_boolean_arguments_as_its_template_does(name, text):
    """The template of Qwen3.5 writes Python's text, and those of Qwen3.6 and 3.8 write JSON."""
    renderer = MADE[name]
    message = with_one_call(renderer, "")
    message["tool_calls"][0]["function"]["arguments"] = '{"a": true}'
    sampled = str(renderer.tokenizer.decode(sample_of(renderer, message)))
    assert f"<parameter=a>\n{text}\n</parameter>" in sampled


ADD = [{"type": "function", "function": {"name": "now", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("name", "answer", "written"),
    [
        # Before the last question, next to a call.
        (
            "nemotron3",
            {"content": " \n  Wait. ", "tool_calls": ADD},
            "<think></think>Wait.\n<tool_",
        ),
        (
            "nemotron3_ultra",
            {"content": "  Wait. ", "tool_calls": ADD},
            "<think></think>  Wait. \n<tool_",
        ),
        ("nemotron3", {"content": "  Yes. "}, "<think></think>  Yes.<|im_end|>"),
        ("qwen3_5", {"content": "  Wait. ", "tool_calls": ADD}, "assistant\nWait.\n\n<tool_"),
        # After a think block in a string, Qwen3.5 removes line breaks, but no spaces.
        ("qwen3_5", {"content": "<think>\nA\n</think>\n\n  Yes. "}, "assistant\n  Yes.<|im_end|>"),
        (
            "qwen3_5_preserve_thinking",
            {"content": "<think>\nA\n</think>\n\n  Wait. ", "tool_calls": ADD},
            "<think>\nA\n</think>\n\n  Wait.\n\n<tool_",
        ),
        (
            "qwen3_5_preserve_thinking",
            {"content": "  Yes. ", "reasoning_content": "A"},
            "<think>\nA\n</think>\n\nYes.<|im_end|>",
        ),
    ],
)
def test_spaces_around_answers_follow_the_chat_template(name, answer, written):
    """The texts are those of the templates as TRL stores them."""
    messages = [user("Hi."), {"role": "assistant", **answer}, user("And now?")]
    tokens = MADE[name].build_generation_prompt(messages).to_ints()
    assert written in MADE[name].tokenizer.decode(tokens)


@pytest.mark.parametrize("name", NAMES)
def test_thinking_can_be_switched_within_a_family(name):
    renderer = MADE[name]
    thinks = renderer.format.capabilities.samples_thinking
    if name == "mistral":
        with pytest.raises(UnsupportedError, match="do not think"):
            with_thinking(name, True)
    else:
        thinking = MADE[with_thinking(name, True)]
        assert thinking.format.capabilities.samples_thinking
        assert (thinking is renderer) == thinks
    if name.startswith("gpt_oss") or name == "kimi_k2":
        with pytest.raises(UnsupportedError, match="always think"):
            with_thinking(name, False)
    else:
        assert not MADE[with_thinking(name, False)].format.capabilities.samples_thinking


def test_the_date_of_gpt_oss_is_an_option():
    tokenizer = TOKENIZERS["gpt_oss"]
    renderer = get_renderer("gpt_oss_low_reasoning", tokenizer, current_date="1999-12-31")
    text = tokenizer.decode(renderer.build_generation_prompt([user("a")]).to_ints())
    assert "Current date: 1999-12-31\n\nReasoning: low" in str(text)
    with pytest.raises(ValueError, match="current_date is an option of"):
        get_renderer("gpt_oss_no_sysprompt", tokenizer, current_date=DATE)


def thinking(name: str) -> dict[str, str]:
    """Return the efforts of models that think in one way, with renderer `name`."""
    return dict.fromkeys(("low", "medium", "high"), name)


@pytest.mark.parametrize(
    ("name", "efforts"),
    [
        (
            "gpt_oss_medium_reasoning",
            {e: f"gpt_oss_{e}_reasoning" for e in ("low", "medium", "high")},
        ),
        ("gpt_oss_no_sysprompt", {e: f"gpt_oss_{e}_reasoning" for e in ("low", "medium", "high")}),
        (
            "qwen3_8_disable_thinking",
            {
                "none": "qwen3_8_disable_thinking",
                "low": "qwen3_8_low_reasoning",
                "medium": "qwen3_8_medium_reasoning",
                "xhigh": "qwen3_8_xhigh_reasoning",
            },
        ),
        (
            "nemotron3",
            {
                "none": "nemotron3_disable_thinking",
                "low": "nemotron3_low_thinking",
                "high": "nemotron3",
            },
        ),
        (
            "nemotron3_ultra_disable_thinking",
            {
                "none": "nemotron3_ultra_disable_thinking",
                "medium": "nemotron3_ultra_medium_thinking",
                "high": "nemotron3_ultra",
            },
        ),
        (
            "nemotron3_preserve_thinking",
            {"none": "nemotron3_disable_thinking", **thinking("nemotron3_preserve_thinking")},
        ),
        ("qwen3_disable_thinking", {"none": "qwen3_disable_thinking", **thinking("qwen3")}),
        ("deepseekv3", {"none": "deepseekv3", **thinking("deepseekv3_thinking")}),
        ("kimi_k2", thinking("kimi_k2")),
        ("llama3", {"none": "llama3"}),
    ],
)
def test_an_effort_chooses_the_renderer_of_the_same_models(name, efforts):
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh"):
        if effort in efforts:
            assert with_effort(name, effort) == efforts[effort]
        else:
            with pytest.raises(UnsupportedError, match=f"{effort!r}; give {' or '.join(efforts)}$"):
                with_effort(name, effort)
