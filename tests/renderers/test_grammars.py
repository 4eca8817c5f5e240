"""Grammars of messages, checked with llguidance and the embedded model's tokenizer."""

import json
from typing import Any

import llguidance
import llguidance.hf
import pytest
from transformers import AutoTokenizer

from planish.errors import UnsupportedError
from planish.model.sources.resolve import DEFAULT_MODEL, resolve_model
from planish.renderers import get_renderer
from planish.renderers.grammars import (
    ANY_TEXT,
    CallableTool,
    calls_rules,
    json_rule,
    message_grammar,
)

TOOLS = [
    CallableTool(
        "add",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        strict=True,
    ),
    CallableTool("noop", {}),
]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NOOP = '<tool_call>\n{"name": "noop", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nSo <b>.\n</think>\n\n"
SCHEMA = {"properties": {"z": {"type": "boolean"}}, "required": ["z"], "type": "object"}


@pytest.fixture(scope="module", params=["text", "tokens"])
def tokenizer(request) -> Any:
    """A tokenizer without tokens for the marks of tool calls and thoughts, and one with them."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(DEFAULT_MODEL))
    if request.param == "tokens":
        tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer) -> Any:
    return llguidance.hf.from_tokenizer(tokenizer)


def accepts(tokenizer: Any, compiler: Any, grammar: str, text: str) -> bool:
    assert llguidance.LLMatcher.validate_grammar(grammar, compiler) == ""
    matcher = llguidance.LLMatcher(compiler, grammar)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


CASES: list[tuple[str, dict[str, Any], dict[str, bool]]] = [
    (
        "chatml",
        {},
        {
            ADD: True,
            NOOP: True,
            f"{ADD}\n{NOOP}": True,
            "Hi": False,
            f"Hi\n{ADD}": False,
            f"{ADD}x": False,
            ADD[:-12]: False,
            ADD.replace("1", '"1"'): False,
            ADD.replace("add", "subtract"): False,
            f"{THOUGHT}{ADD}": False,
        },
    ),
    ("chatml", {"several": False}, {ADD: True, f"{ADD}\n{NOOP}": False}),
    (
        "chatml",
        {"alternative": ANY_TEXT},
        {
            "A <b> {x} \n é": True,
            ADD: True,
            f"Hi!\n{ADD}\n{NOOP}": True,
            f"Hi!\n{ADD}\nBye": False,
            "Hi!\n<tool_call>\nx": False,
        },
    ),
    (
        "chatml",
        {"alternative": json_rule(SCHEMA, strict=True)},
        {
            ADD: True,
            '{"z": true}': True,
            '{"z":false}': True,
            '{\n  "z": true\n}': False,
            '{"z": 1}': False,
            f'{{"z": true}}{ADD}': False,
        },
    ),
    (
        "qwen3",
        {},
        {
            ADD: True,
            f"{THOUGHT}{ADD}": True,
            f"{THOUGHT}{NOOP}\n{ADD}": True,
            THOUGHT: False,
            f"{THOUGHT}Hi": False,
        },
    ),
    (
        "qwen3",
        {"alternative": json_rule(SCHEMA, strict=True)},
        {f'{THOUGHT}{{"z": true}}': True, '{"z": true}': True},
    ),
    ("qwen3_disable_thinking", {}, {ADD: True, f"{THOUGHT}{ADD}": False}),
]


@pytest.mark.parametrize(("name", "options", "texts"), CASES)
def test_a_grammar_accepts_the_messages_that_the_renderer_reads(
    tokenizer, compiler, name, options, texts
):
    renderer = get_renderer(name, tokenizer)
    grammar = message_grammar(renderer, calls_rules(renderer, TOOLS, **options))
    for text, is_accepted in texts.items():
        assert accepts(tokenizer, compiler, grammar, text) is is_accepted, text
        if is_accepted and "tool_call" in text:
            tokens = tokenizer.encode(text, add_special_tokens=False)
            message = renderer.parse_response(tokens).message
            assert "unparsed_tool_calls" not in message
            assert len(message["tool_calls"]) == text.count("</tool_call>")
            for call in message["tool_calls"]:
                assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_a_strict_schema_may_not_have_unknown_keywords(tokenizer, compiler):
    renderer = get_renderer("chatml", tokenizer)
    for strict in (False, True):
        tool = CallableTool("odd", {"properties": {"x": {"uniqueItems": True}}}, strict)
        grammar = message_grammar(renderer, calls_rules(renderer, [tool]))
        error = llguidance.LLMatcher.validate_grammar(grammar, compiler)
        assert ("uniqueItems" in error) is strict


def test_a_format_without_tools_names_those_that_have_them(tokenizer):
    renderer = get_renderer("role_colon", tokenizer)
    with pytest.raises(UnsupportedError, match="role_colon has no form for tool calls; use qwen3"):
        calls_rules(renderer, TOOLS)
