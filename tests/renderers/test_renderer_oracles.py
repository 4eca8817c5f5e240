"""Tokens equal those of other implementations: tinker-cookbook's renderers, the models' own chat
templates (as TRL stores them), openai-harmony and the package `renderers`.

`python tests/renderers/test_renderer_oracles.py` writes recorded_texts.json, which the other tests
read, in an environment with these packages.
"""

import importlib.util
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from family_tokenizers import family_tokenizer
from oracle_cases import (
    CONVERSATIONS,
    TOOL_CONVERSATIONS,
    TOOLS,
    family_of,
    is_of_a_family,
    planish_messages,
    template_messages,
    user,
    with_tools,
)

from planish.renderers import FORMATS, Renderer, get_renderer, recommended_renderer_name
from planish.renderers.templates import format_text, render_template

cookbook = pytest.importorskip("tinker_cookbook.renderers")
pytestmark = pytest.mark.filterwarnings("ignore:use_system_prompt=True:UserWarning")
pytest.importorskip("trl")
oh = pytest.importorskip("openai_harmony")
oracle_renderers = pytest.importorskip("renderers")

DATE = "2025-06-28"
CASES = {**CONVERSATIONS, **TOOL_CONVERSATIONS}
RECORD = Path(__file__).with_name("recorded_texts.json")
WRAPPED = [{"type": "function", "function": tool} for tool in TOOLS]
TEMPLATES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_think", {}),
    "qwen3_5_disable_thinking": ("qwen3_5_think", {"enable_thinking": False}),
    "qwen3_5_preserve_thinking": ("qwen3_6", {"preserve_thinking": True}),
    "qwen3_8_xhigh_reasoning": ("qwen3_8", {}),
    "qwen3_8_medium_reasoning": ("qwen3_8", {"reasoning_effort": "medium"}),
    "qwen3_8_low_reasoning": ("qwen3_8", {"reasoning_effort": "low"}),
    "qwen3_8_disable_thinking": ("qwen3_8", {"enable_thinking": False}),
    "nemotron3": ("nemotron_3_nano", {}),
    "nemotron3_low_thinking": ("nemotron_3_super", {"low_effort": True}),
    "nemotron3_disable_thinking": ("nemotron_3_nano", {"enable_thinking": False}),
    "nemotron3_preserve_thinking": ("nemotron_3_nano", {"truncate_history_thinking": False}),
    "nemotron3_ultra": ("nemotron_3_5_lightning", {}),
    "nemotron3_ultra_disable_thinking": ("nemotron_3_ultra", {"enable_thinking": False}),
    "nemotron3_ultra_medium_thinking": ("nemotron_3_ultra", {"medium_effort": True}),
    "nemotron3_ultra_preserve_thinking": ("nemotron_3_ultra", {"truncate_history_thinking": False}),
}
"""A renderer's name -> the file in TRL and the options with which the template writes the same."""
# The cookbook writes reasoning and tool results of qwen3_vl in another way than of qwen3.
LEFT_OUT = ("mistral", "qwen3_vl", "qwen3_vl_instruct")
NAMES = [name for name in FORMATS if is_of_a_family(name) and name not in LEFT_OUT]


def make(name: str) -> Renderer:
    has_date = name.startswith("gpt_oss") and name != "gpt_oss_no_sysprompt"
    return get_renderer(
        name, family_tokenizer(family_of(name)), current_date=DATE if has_date else None
    )


def ours(renderer: Renderer, case: str) -> list[int]:
    messages = planish_messages(CASES[case])
    if case in TOOL_CONVERSATIONS:
        messages = with_tools(renderer, messages)
    if ends_with_answer(case):
        what = "all_user_and_system_messages"
        return renderer.build_supervised_example(messages, what)[0].to_ints()
    return renderer.build_generation_prompt(messages).to_ints()


def ends_with_answer(case: str) -> bool:
    return CASES[case][-1]["role"] == "assistant"


def folder_of(package: str) -> Path:
    """Return the directory of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def template_text(file: str) -> str:
    return (folder_of("trl") / "chat_templates" / f"{file}.jinja").read_text(encoding="utf-8")


def by_template(name: str, case: str) -> str:
    file, options = TEMPLATES[name]
    template = template_text(file)
    if case in TOOL_CONVERSATIONS:
        options = {**options, "tools": WRAPPED}
    messages = template_messages(CASES[case])
    text = render_template(template, messages, not ends_with_answer(case), **options)
    return text.removesuffix("\n") if ends_with_answer(case) else text


def split_empty_thought(renderer: Renderer, text: str, case: str) -> list[int]:
    """Return the tokens of a template's text. An answer without reasoning begins in the think block
    that its prompt opened, so the line break of the prompt is a token of its own.
    """
    opening = "<|im_start|>assistant\n<think>\n"
    before, found, after = text.rpartition(f"{opening}\n")
    is_opened = renderer.name.startswith("qwen3") and renderer.format.capabilities.samples_thinking
    encode = lambda text: renderer.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    if is_opened and found and ends_with_answer(case) and "<|im_start|>" not in after:
        return encode(before + opening) + encode(f"\n{after}")
    return encode(text)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_the_chat_template(name, case):
    renderer = make(name)
    theirs = split_empty_thought(renderer, by_template(name, case), case)
    assert renderer.tokenizer.decode(ours(renderer, case)) == renderer.tokenizer.decode(theirs)
    assert ours(renderer, case) == theirs


SPACED = ("", "x", " x", "x ", "\n x", "\n\nx\n", "  x  y ", " ", "\tx")
THOUGHTS = (None, "t", " t ", "\nt\n", " ", "\n a\n\nb \n")


def spaced_conversation(rng: random.Random, inline: bool) -> list[dict[str, Any]]:
    """Return random turns of answers and calls with spaces around their texts and reasoning.

    `inline`: the reasoning is a think block in the content.
    """
    messages: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 3)):
        messages.append(user(rng.choice(("q", " q ", "\nq"))))
        num_steps = rng.randint(0, 2)
        for step in range(num_steps + 1):
            message: dict[str, Any] = {"role": "assistant", "content": rng.choice(SPACED)}
            thought = rng.choice(THOUGHTS)
            if thought is not None and inline:
                message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
            elif thought is not None:
                message["reasoning_content"] = thought
            messages.append(message)
            if step < num_steps:
                arguments = {"a": rng.choice(SPACED)}
                function = {"name": "add", "arguments": arguments}
                message["tool_calls"] = [{"type": "function", "function": function}]
                messages.append({"role": "tool", "content": rng.choice(SPACED)})
    return messages


@pytest.mark.parametrize(
    ("name", "inline"),
    [
        *((name, False) for name in TEMPLATES),
        *((name, True) for name in TEMPLATES if name.startswith("qwen3_5")),
    ],
)
def test_spaces_equal_those_of_the_chat_template(name, inline):
    file, options = TEMPLATES[name]
    rng, template = random.Random(0), template_text(file)
    for _ in range(100):
        messages = spaced_conversation(rng, inline)
        ours = json.loads(json.dumps(messages))
        for message in ours:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        theirs = render_template(template, messages, False, **options).removesuffix("\n")
        assert format_text(FORMATS[name](None), ours, False) == theirs


def of_cookbook(name: str, case: str) -> list[int]:
    renderer = cookbook.get_renderer(name, family_tokenizer(family_of(name)))
    if hasattr(renderer, "current_date"):
        renderer.current_date = DATE
    messages: list[Any] = planish_messages(CASES[case])
    for message in messages:
        for number, call in enumerate(message.get("tool_calls", ())):
            function = cookbook.ToolCall.FunctionBody(
                name=call["function"]["name"], arguments=json.dumps(call["function"]["arguments"])
            )
            message["tool_calls"][number] = cookbook.ToolCall(id=call["id"], function=function)
    if case in TOOL_CONVERSATIONS:
        # The cookbook writes a specification as it is given; the template gets wrapped ones.
        tools = WRAPPED if name.startswith("qwen3") else TOOLS
        messages = with_tools(renderer, messages, tools)
    if ends_with_answer(case):
        # With another choice it rejects what a renderer without thinking cannot train.
        what = cookbook.TrainOnWhat.ALL_TOKENS
        return renderer.build_supervised_example(messages, what)[0].to_ints()
    return renderer.build_generation_prompt(messages).to_ints()


@pytest.mark.parametrize(
    ("file", "renderer"),
    [
        ("qwen3_5_think", "qwen3_5"),
        ("qwen3_5_nothink", "qwen3_5_disable_thinking"),
        ("qwen3_6", "qwen3_5"),
        ("qwen3_8", "qwen3_8_xhigh_reasoning"),
        ("nemotron_3_nano", "nemotron3"),
        ("nemotron_3_super", "nemotron3"),
        ("nemotron_3_ultra", "nemotron3_ultra"),
        ("nemotron_3_5_lightning", "nemotron3_ultra"),
        ("gptoss", "gpt_oss_no_sysprompt"),
        ("qwen3", "qwen3"),
        ("qwen3_instruct_2507", "qwen3_instruct"),
        ("qwen2_5", "chatml"),
        ("llama3", "llama3"),
        ("gemma3", "gemma3"),
    ],
)
def test_a_directory_with_the_chat_template_is_recognised(tmp_path, file, renderer):
    bos = {"llama3": "<|begin_of_text|>", "gemma3": "<bos>"}.get(file, "")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos}))
    (tmp_path / "chat_template.jinja").write_text(template_text(file), encoding="utf-8")
    assert recommended_renderer_name(tmp_path) == renderer


REASONED_RESULTS = ("result after reasoning", "reasoned answer to results")


def differs(name: str, case: str) -> str:
    """Return why the tokens of a case are not the cookbook's; "" if they should be equal."""
    if name.startswith("qwen3_5") and case in REASONED_RESULTS and "preserve" not in name:
        return "the template keeps the reasoning of the current turn's tool steps"
    if name == "qwen3_5_preserve_thinking" and case.startswith("second") and "reasoned" not in case:
        histories = ("second question", "second answer without reasoning")
        return "the template of Qwen3.6 writes empty blocks in history" if case in histories else ""
    if name.startswith("gpt_oss"):
        if case == "empty system":
            return "the template leaves out an empty system message"
        if case in ("second question after reasoning", "second answer"):
            return "the template leaves out the reasoning of earlier turns"
        if case in TOOL_CONVERSATIONS:
            return "tools are declared as by openai-harmony"
    if name.startswith("kimi") and case == "tools and empty system":
        return "the template writes an empty system message, and its default one only without one"
    if name == "deepseekv3_thinking" and case in TOOL_CONVERSATIONS:
        return "tools need the mode without thinking"
    if name.startswith("deepseekv3") and case in ("call", "result", "reasoned answer to results"):
        return "the template ends a call without text with the end of sentence, too"
    return ""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_the_cookbook_or_differ_for_a_known_reason(name, case):
    renderer = make(name)
    if name == "deepseekv3_thinking" and case in TOOL_CONVERSATIONS:
        assert not renderer.format.capabilities.tools
        return
    theirs = of_cookbook(name, case)
    if differs(name, case):
        assert ours(renderer, case) != theirs
    else:
        decode = renderer.tokenizer.decode
        assert decode(ours(renderer, case)) == decode(theirs)
        assert ours(renderer, case) == theirs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ["answer", "reasoned answer", "second answer"])
def test_weights_of_the_last_message_equal_the_cookbook(name, case):
    renderer = make(name)
    has_reasoning = case != "answer"
    thinks = renderer.format.capabilities.samples_thinking
    if differs(name, case) or (has_reasoning and not thinks):
        return
    if name.startswith("nemotron3") and thinks and not has_reasoning:
        return
    theirs = cookbook.get_renderer(name, family_tokenizer(family_of(name)))
    messages = planish_messages(CASES[case])
    _, expected = theirs.build_supervised_example(messages)
    _, weights = renderer.build_supervised_example(messages)
    assert weights.tolist() == expected.tolist()


SCHEMA = {
    "type": "object",
    "description": "What to search.",
    "properties": {
        "query": {"type": "string", "description": "The words.", "title": "Query"},
        "source": {"type": "string", "enum": ["web", "news"], "default": "web"},
        "counts": {"type": "array", "items": {"type": "integer"}},
        "since": {"type": ["string", "null"]},
        "any": {},
        "mixed": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "Mixed."},
        "either": {"oneOf": [{"type": "string", "description": "A name."}, {"type": "integer"}]},
        "options": {
            "type": "object",
            "description": "More.",
            "properties": {"deep": {"type": "boolean", "description": "Deeply."}},
            "required": ["deep"],
        },
        "empty": {"type": "object"},
        "limit": {"type": "integer", "default": 3},
        "like": {"type": "string", "examples": ["cats"]},
    },
    "required": ["query"],
}
SEARCH = {"name": "search", "description": "Searches.\nTwice.", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The encoding of openai-harmony, with the vocabulary that litellm contains."""
    files = folder_of("litellm") / "litellm_core_utils/tokenizers"
    found = files / "fb374d419588a4632f3f557e76b4b70aebbca790"
    folder = tmp_path_factory.mktemp("vocabulary")
    (folder / "o200k_base.tiktoken").symlink_to(found)
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
    return oh.load_harmony_encoding("HarmonyGptOss")


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_text_equals_openai_harmony(harmony, effort):
    say = oh.Message.from_role_and_content
    system = oh.SystemContent.new().with_conversation_start_date(DATE)
    system = system.with_reasoning_effort(getattr(oh.ReasoningEffort, effort.upper()))
    tools = [SEARCH, {"name": "now", "description": "The time."}]
    functions = [
        oh.ToolDescription.new(tool["name"], tool["description"], tool.get("parameters"))
        for tool in tools
    ]
    developer = oh.DeveloperContent.new().with_instructions("Be brief.")
    theirs = [
        say(oh.Role.SYSTEM, system),
        say(oh.Role.DEVELOPER, developer.with_function_tools(functions)),
        say(oh.Role.USER, "Search."),
        say(oh.Role.ASSISTANT, "I search.").with_channel("analysis"),
        say(oh.Role.ASSISTANT, "Wait.").with_channel("commentary"),
        say(oh.Role.ASSISTANT, '{"query": "x"}')
        .with_channel("commentary")
        .with_recipient("functions.search")
        .with_content_type("<|constrain|>json"),
        oh.Message.from_author_and_content(oh.Author.new(oh.Role.TOOL, "functions.search"), "13")
        .with_channel("commentary")
        .with_recipient("assistant"),
    ]
    arguments = {"name": "search", "arguments": '{"query": "x"}'}
    thought = [{"type": "thinking", "thinking": "I search."}, {"type": "text", "text": "Wait."}]
    renderer = make(f"gpt_oss_{effort}_reasoning")
    messages: list[Any] = [
        *renderer.create_conversation_prefix_with_tools(tools, "Be brief."),
        {"role": "user", "content": "Search."},
        {"role": "assistant", "content": thought, "tool_calls": [{"function": arguments}]},
        {"role": "tool", "name": "search", "content": "13"},
    ]
    conversation = oh.Conversation.from_messages(theirs)
    tokens = harmony.render_conversation_for_completion(conversation, oh.Role.ASSISTANT)
    text = renderer.tokenizer.decode(renderer.build_generation_prompt(messages).to_ints())
    assert text == harmony.decode(tokens)
    theirs += [
        say(oh.Role.ASSISTANT, "Done.").with_channel("analysis"),
        say(oh.Role.ASSISTANT, "13").with_channel("final"),
    ]
    # Of the steps before the last answer, the chat template keeps no reasoning.
    del theirs[3]
    keep = oh.RenderConversationConfig(auto_drop_analysis=False)
    answer = [{"type": "thinking", "thinking": "Done."}, {"type": "text", "text": "13"}]
    messages.append({"role": "assistant", "content": answer})
    conversation = oh.Conversation.from_messages(theirs)
    tokens = harmony.render_conversation_for_training(conversation, keep)
    text = renderer.tokenizer.decode(renderer.build_supervised_example(messages)[0].to_ints())
    assert text == harmony.decode(tokens)


SECOND = {
    "qwen3_5": ("Qwen35", {"enable_thinking": True}),
    "qwen3_8_low_reasoning": ("Qwen38", {"enable_thinking": True, "reasoning_effort": "low"}),
    "nemotron3": ("Nemotron3", {}),
    "nemotron3_ultra": ("Nemotron3Ultra", {}),
    "kimi_k25": ("KimiK25", {}),
}
"""A renderer's name -> the class in the package `renderers` and its options."""


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("case", [case for case in CASES if not ends_with_answer(case)])
def test_texts_equal_the_second_oracle(name, case):
    family, options = SECOND[name]
    if name == "kimi_k25" and CASES[case][0]["role"] != "system":
        # It has no default system message, and the cookbook has one.
        return
    renderer = make(name)
    tokenizer: Any = renderer.tokenizer
    extra = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    extra += ["<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": extra})
    config = getattr(oracle_renderers, f"{family}RendererConfig")(**options)
    module = {"Nemotron3Ultra": "nemotron3"}.get(family, family.lower().replace("kimik", "kimi_k"))
    made = getattr(importlib.import_module(f"renderers.{module}"), f"{family}Renderer")
    theirs = made(tokenizer, config)
    tools = WRAPPED if case in TOOL_CONVERSATIONS else None
    messages = template_messages(CASES[case])
    tokens = theirs.render_ids(messages, tools=tools, add_generation_prompt=True)
    # It tokenises pieces of text apart that a template's text joins.
    assert tokenizer.decode(ours(renderer, case)) == tokenizer.decode(tokens)


RECORDED_CASES = (
    "system",
    "empty system",
    "reasoned answer",
    "second question after reasoning",
    "second answer without reasoning",
    "question after results",
)


def record() -> dict[str, dict[str, str]]:
    """Return the texts of one renderer for each behaviour, from its template if there is one, or
    from the cookbook if its tokens are the ones to expect.
    """
    texts: dict[str, dict[str, str]] = {}
    seen = []
    for name in NAMES:
        renderer = make(name)
        if renderer.format in seen:
            continue
        seen.append(renderer.format)
        texts[name] = {}
        for case in RECORDED_CASES:
            if name in TEMPLATES:
                texts[name][case] = by_template(name, case)
            elif not differs(name, case):
                texts[name][case] = str(renderer.tokenizer.decode(of_cookbook(name, case)))
    return texts


def test_the_recorded_texts_are_those_of_the_oracles():
    assert json.loads(RECORD.read_text(encoding="utf-8")) == record()


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    sys.exit()
