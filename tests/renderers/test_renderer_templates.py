"""A renderer writes the same tokens as the model's chat template."""

import json
import re
from typing import Any

import pytest
from family_tokenizers import family_tokenizer, template
from hypothesis import HealthCheck, given, settings, strategies as st

from planish.datasets.layouts import prompt_of
from planish.renderers import Renderer, get_renderer

CASES = [
    ("llama3", "llama3", "llama3"),
    ("gemma3", "gemma", "gemma3"),
    ("chatml", "smollm2", "smollm2"),
    ("chatml", "qwen", "qwen2_5"),
    ("qwen3", "qwen", "qwen3"),
    ("qwen3_disable_thinking", "qwen", "qwen3"),
    ("qwen3_instruct", "qwen", "qwen3_instruct_2507"),
    ("smollm3", "smollm3", "smollm3"),
    ("smollm3_disable_thinking", "smollm3", "smollm3"),
]
DATE = "2025-06-28"


def made(name: str, family: str, chat_template: str) -> Renderer:
    date = DATE if name.startswith("smollm3") else None
    return get_renderer(name, family_tokenizer(family, chat_template), current_date=date)


MADE = {case: made(*case) for case in CASES}
QWENS = [case for case in CASES if case[1] == "qwen"]
WITH_TOOLS = [case for case in CASES if case[1] in ("qwen", "smollm3")]
"""The cases whose templates have tools."""

TOOLS = [
    {
        "name": "add",
        "description": "Adds two numbers: größer & <besser>.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        },
    },
    {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
]


def by_template(renderer: Renderer, messages, prompt: bool, **names) -> list[int]:
    if renderer.name.endswith("_disable_thinking"):
        names["enable_thinking"] = False
    tokenizer: Any = renderer.tokenizer
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt, **names
    )
    # The template writes today's date, which may change while the tests run.
    text = re.sub(r"(?<=\nToday Date: ).*", "28 June 2025", text, count=1)
    if not prompt:
        # The line break after the last end of turn belongs to the next message here.
        text = text.removesuffix("\n")
    return renderer.tokenizer.encode(text, add_special_tokens=False)


def assert_equal(renderer: Renderer, ours: list[int], theirs: list[int]) -> None:
    assert renderer.tokenizer.decode(ours) == renderer.tokenizer.decode(theirs)
    assert ours == theirs


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case))
@pytest.mark.parametrize("system", [None, "", "Be brief.", "\n two\n\nparagraphs \n"])
def test_conversations_equal_the_template(case, system):
    renderer = MADE[case]
    messages = [
        {"role": "user", "content": "\n\nWhat is 6 times 7?\n"},
        {"role": "assistant", "content": "It is 42.\n"},
        {"role": "user", "content": "  东京 🙂 Größe\n\n\n  indented"},
        {"role": "assistant", "content": "naïve\n\n    more"},
    ]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    prompt = messages[:-1]
    assert_equal(
        renderer,
        renderer.build_generation_prompt(prompt).to_ints(),
        by_template(renderer, prompt, True),
    )
    example, _ = renderer.build_supervised_example(messages)
    assert_equal(renderer, example.to_ints(), by_template(renderer, messages, False))


text = st.text(alphabet=st.sampled_from("ab1 \n\t.:é東🙂<|>"), max_size=30).filter(
    lambda text: "<|" not in text
)
# The sampler starts anew after the header, so an answer that begins with blanks is tokenised apart
# from the header's line break; the template's text would merge them.
answer = st.text(alphabet=st.sampled_from("ab1 \n.:é東🙂"), max_size=30).map(str.lstrip)


@pytest.mark.parametrize(
    "case",
    [*CASES[:5], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[5:])],
    ids="-".join,
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(system=st.none() | text, rounds=st.lists(st.tuples(text, answer), min_size=1, max_size=4))
def test_any_conversation_equals_the_template(case, system, rounds):
    renderer = MADE[case]
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, reply in rounds:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    prompt = messages[:-1]
    assert_equal(
        renderer,
        renderer.build_generation_prompt(prompt).to_ints(),
        by_template(renderer, prompt, True),
    )
    example, weights = renderer.build_supervised_example(messages, "all_assistant_messages")
    assert_equal(renderer, example.to_ints(), by_template(renderer, messages, False))
    assert weights.shape == (example.length,)


def tool_conversation(thinking: bool) -> list[dict]:
    def think(text: str) -> str:
        return f"<think>\n{text}\n</think>\n\n" if thinking else ""

    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "zwölf"}}}
    other = {"type": "function", "function": {"name": "now", "arguments": {}}}
    return [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": think("old thoughts") + "Old answer."},
        {"role": "user", "content": "Add again, and tell the time."},
        {
            "role": "assistant",
            "content": think("I need tools.") + "One moment.",
            "tool_calls": [call, other],
        },
        {"role": "tool", "content": "13"},
        {"role": "tool", "content": "noon\n"},
        {"role": "assistant", "content": "", "tool_calls": [other]},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": think("Done.") + "13, at noon."},
    ]


@pytest.mark.parametrize("case", QWENS, ids=lambda case: "-".join(case))
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_tools_equal_the_template(case, system):
    renderer = MADE[case]
    messages = tool_conversation(thinking=case[0] == "qwen3")
    specs = [{"type": "function", "function": tool} for tool in TOOLS]
    prefix = renderer.create_conversation_prefix_with_tools(TOOLS, system)
    theirs_prefix = [{"role": "system", "content": system}] if system else []
    for end in (1, 3, 6, 8):
        ours = renderer.build_generation_prompt(prefix + messages[:end])
        theirs = by_template(renderer, theirs_prefix + messages[:end], True, tools=specs)
        assert_equal(renderer, ours.to_ints(), theirs)
    example, _ = renderer.build_supervised_example(prefix + messages)
    assert_equal(
        renderer,
        example.to_ints(),
        by_template(renderer, theirs_prefix + messages, False, tools=specs),
    )


@pytest.mark.parametrize("case", WITH_TOOLS, ids=lambda case: "-".join(case))
@pytest.mark.parametrize("system", [None, "", "Be brief."])
@pytest.mark.parametrize("form", ["list", "JSON text", "column"])
def test_a_row_with_tools_equals_the_template(case, system, form):
    """An empty system message is another prompt than none: Qwen2.5 has a default message, and
    Qwen3 writes two line breaks. An empty column is no system message.
    """
    renderer = MADE[case]
    is_smollm3 = case[1] == "smollm3"
    messages = tool_conversation(thinking=case[0] == "qwen3")[: 1 if is_smollm3 else 8]
    tools = [
        {"function": TOOLS[0], "type": "function", "strict": True},
        {"type": "function", "function": TOOLS[1]},
    ]
    has_system = system is not None and (system or form != "column")
    before = [{"role": "system", "content": system}] if has_system else []
    row = {"messages": [*before, *messages], "tools": tools}
    if form == "JSON text":
        row["tools"] = json.dumps(tools)
    elif form == "column":
        row = {"messages": messages, "system": system, "tools": tools}
    conversation = prompt_of(row, "here")
    assert_equal(
        renderer,
        renderer.build_generation_prompt(conversation).to_ints(),
        by_template(
            renderer,
            [*before, *messages],
            True,
            **({"xml_tools": TOOLS} if is_smollm3 else {"tools": tools}),
        ),
    )


def test_reasoning_of_earlier_turns_is_dropped_as_in_the_template():
    renderer = MADE[("qwen3", "qwen", "qwen3")]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nfirst\n</think>\n\nA"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "<think>\nsecond\n\nthoughts\n</think>\n\nB"},
    ]
    example, _ = renderer.build_supervised_example(messages)
    assert_equal(renderer, example.to_ints(), by_template(renderer, messages, False))
    text = renderer.tokenizer.decode(example.to_ints())
    assert "first" not in text
    assert "<think>\nsecond\n\nthoughts\n</think>\n\nB<|im_end|>" in text
    as_parts = [
        *messages[:3],
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "second\n\nthoughts"},
                {"type": "text", "text": "B"},
            ],
        },
    ]
    assert renderer.build_supervised_example(as_parts)[0] == example
    as_key = [
        *messages[:3],
        {"role": "assistant", "content": "B", "reasoning_content": "second\n\nthoughts"},
    ]
    assert renderer.build_supervised_example(as_key)[0] == example


def test_line_breaks_around_a_think_block_equal_the_template():
    renderer = MADE[("qwen3", "qwen", "qwen3")]
    for content in (
        "\n\nA\n",
        "<think>\n\n\nhm\n\n</think>\n\n\n\nA\n",
        "<think></think>A",
        "<think>\n  \n</think>\n A",
    ):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
        example, _ = renderer.build_supervised_example(messages)
        assert_equal(renderer, example.to_ints(), by_template(renderer, messages, False))


def test_chatml_takes_the_default_system_message_from_the_template():
    smollm2 = MADE[("chatml", "smollm2", "smollm2")].build_generation_prompt(
        [{"role": "user", "content": "hi"}]
    )
    text = str(family_tokenizer("smollm2").decode(smollm2.to_ints()))
    assert text.startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>"
    )
    tokenizer = family_tokenizer("qwen", "qwen2_5")
    other = get_renderer("chatml", tokenizer, default_system="Answer in rhymes.")
    none = get_renderer("chatml", tokenizer, default_system="")
    hello = [{"role": "user", "content": "hi"}]
    assert str(tokenizer.decode(other.build_generation_prompt(hello).to_ints())).startswith(
        "<|im_start|>system\nAnswer in rhymes.<|im_end|>"
    )
    assert str(tokenizer.decode(none.build_generation_prompt(hello).to_ints())).startswith(
        "<|im_start|>user\nhi"
    )
    unknown = get_renderer("chatml", family_tokenizer("qwen"))
    assert unknown.build_generation_prompt(hello) == none.build_generation_prompt(hello)


def test_stored_templates_equal_the_originals():
    """The stored templates must contain the lines in which they differ, so that an emptied file
    cannot pass.
    """
    assert "loop.index0 > ns.last_query_index" in template("qwen3")
    assert "You are Qwen, created by Alibaba Cloud." in template("qwen2_5")
    assert "| trim + '<|eot_id|>'" in template("llama3")
    assert "trained by Hugging Face" in template("smollm2")
