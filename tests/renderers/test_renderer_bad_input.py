"""Bad input is a ValueError that names the argument and the remedy; nothing is ignored."""

import pickle

import pytest
from family_tokenizers import family_tokenizer

from planish.errors import UnsupportedError
from planish.renderers import get_renderer

QWEN = family_tokenizer("qwen", "qwen2_5")
QWEN3 = get_renderer("qwen3", QWEN)
XML_CALLS = get_renderer("qwen3_5", family_tokenizer("qwen", "qwen3"))
INSTRUCT = get_renderer("qwen3_instruct", QWEN)
GEMMA3 = get_renderer("gemma3", family_tokenizer("gemma"))
ROLE_COLON = get_renderer("role_colon", QWEN)
USER = {"role": "user", "content": "a"}
ASSISTANT = {"role": "assistant", "content": "b"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


def said(**changes) -> dict:
    return {**ASSISTANT, **changes}


@pytest.mark.parametrize(
    ("renderer", "messages", "message"),
    [
        (INSTRUCT, [], r"messages is empty; give at least one"),
        (INSTRUCT, "hello", r"messages is a str; give a list"),
        (INSTRUCT, USER, r"messages is a dict; give a list"),
        (INSTRUCT, ["hello"], r"messages\[0\] is a str; give a dictionary"),
        (
            INSTRUCT,
            [USER, {"role": "robot", "content": "a"}],
            r"messages\[1\]\['role'\]='robot'.*system, user, assistant, tool",
        ),
        (INSTRUCT, [{"content": "a"}], r"messages\[0\]\['role'\]=None"),
        (
            GEMMA3,
            [{"role": "tool", "content": "a"}],
            r"messages\[0\]\['role'\]='tool'.*gemma3 knows the roles system, user, assistant",
        ),
        (INSTRUCT, [{"role": "user"}], r"messages\[0\] has no content; give a string"),
        (
            INSTRUCT,
            [{"role": "user", "content": 3}],
            r"messages\[0\]\['content'\] is a int; give a string or a list",
        ),
        (
            INSTRUCT,
            [{"role": "user", "content": [{"type": "image", "image": "x"}]}],
            r"content\[0\] is an image \(type 'image'\).*images need the renderer",
        ),
        (
            INSTRUCT,
            [{"role": "user", "content": [{"type": "text"}]}],
            r"content\[0\] lacks its text; give 'text' as a string",
        ),
        (
            INSTRUCT,
            [{"role": "user", "content": "a", "wieght": 1}],
            r"messages\[0\] has unknown keys \['wieght'\]; remove",
        ),
        (
            INSTRUCT,
            [USER, said(content=[{"type": "thinking", "thinking": "x"}])],
            r"messages\[1\] has a thinking part.*qwen3",
        ),
        (
            INSTRUCT,
            [USER, said(reasoning_content="x")],
            r"messages\[1\] has a thinking part.*qwen3_instruct",
        ),
        (
            QWEN3,
            [{**USER, "reasoning_content": "x"}],
            r"messages\[0\] is of role 'user' and has a thinking part",
        ),
        (
            QWEN3,
            [
                USER,
                said(
                    content=[{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "x"}]
                ),
            ],
            r"content\[1\]: thinking comes before the text",
        ),
        (
            GEMMA3,
            [USER, said(tool_calls=[CALL])],
            r"messages\[1\] has tool calls, which renderer gemma3 cannot write; use",
        ),
        (
            INSTRUCT,
            [{**USER, "tool_calls": [CALL]}],
            r"messages\[0\] is of role 'user' and has tool calls",
        ),
        (
            INSTRUCT,
            [USER, said(tool_calls=["f()"])],
            r"\['tool_calls'\]\[0\]: give \{'type': 'function'",
        ),
        (
            INSTRUCT,
            [USER, said(tool_calls=[{"function": {"name": 'a"b', "arguments": "{}"}}])],
            r"function name .* rename",
        ),
        (
            XML_CALLS,
            [USER, said(tool_calls=[{"function": {"name": "f", "arguments": "{"}}])],
            r"arguments='\{' is not a JSON object, .* XML element; give .* or remove a call that max",
        ),
        (
            XML_CALLS,
            [USER, said(tool_calls=[{"function": {"name": "f", "arguments": "[" * 100_000}}])],
            r"is not a JSON object, .* XML element",
        ),
        (
            INSTRUCT,
            [USER, said(tool_calls=[{"function": {"name": "f"}}])],
            r"arguments=None is not a JSON object",
        ),
        (
            INSTRUCT,
            [USER, said(unparsed_tool_calls=[{"error": "x"}])],
            r"\['unparsed_tool_calls'\]\[0\] lacks raw_text",
        ),
        (
            INSTRUCT,
            [USER, {"role": "system", "content": "a", "tools": [{"name": "f"}]}],
            r"messages\[1\] offers tools; only .* start",
        ),
        (
            GEMMA3,
            [{"role": "system", "content": "a", "tools": [{"name": "f"}]}],
            r"messages\[0\] offers tools.*gemma3",
        ),
        (
            INSTRUCT,
            [{"role": "system", "content": "a", "tools": ["f"]}],
            r"\['tools'\]\[0\]: give \{'name'",
        ),
        (
            INSTRUCT,
            [USER, said(content="b\ud83d")],
            r"messages\[1\] holds '\\ud83d', half of a character.*remove",
        ),
        (QWEN3, [USER, said(reasoning_content="\ude00 b")], r"messages\[1\] holds '\\ude00'"),
        (
            INSTRUCT,
            [USER, said(tool_calls=[{"function": {"name": "f", "arguments": {"x": "\ud83d"}}}])],
            r"messages\[1\] holds '\\ud83d'",
        ),
        (
            INSTRUCT,
            [USER, said(unparsed_tool_calls=[{"raw_text": "\ud83d", "error": "x"}])],
            r"messages\[1\] holds '\\ud83d'",
        ),
        (
            INSTRUCT,
            [{"role": "system", "content": "a", "tools": [{"name": "f", "description": "\ud83d"}]}],
            r"messages\[0\] holds '\\ud83d'",
        ),
        (
            INSTRUCT,
            [{**USER, "trainable": "yes"}],
            r"messages\[0\]\['trainable'\]='yes'; give True or False",
        ),
        (
            INSTRUCT,
            [{**USER, "name": "Alice"}],
            r"messages\[0\] is of role 'user' and has 'name', which only a tool result may have",
        ),
        (
            get_renderer("kimi_k2", family_tokenizer("kimi")),
            [USER, said(name="Bob")],
            r"messages\[1\] is of role 'assistant' and has 'name'",
        ),
        (INSTRUCT, [USER, said(tool_call_id="c1")], r"messages\[1\] is .* has 'tool_call_id'"),
        (
            INSTRUCT,
            [{"role": "user", "content": [{"type": "text", "text": "a", "weight": 0}]}],
            r"messages\[0\], content\[0\] has \['weight'\], which planish does not use; remove it",
        ),
        (
            QWEN3,
            [USER, said(content=[{"type": "text", "text": "a", "thinking": "x"}])],
            r"messages\[1\], content\[0\] has \['thinking'\]",
        ),
        (
            INSTRUCT,
            [USER, said(tool_calls=[{**CALL, "result": "4"}])],
            r"messages\[1\], tool_calls\[0\] has \['result'\]",
        ),
        (
            INSTRUCT,
            [USER, said(tool_calls=[{"function": {**CALL["function"], "parameters": {}}}])],
            r"messages\[1\], tool_calls\[0\] has \['parameters'\]",
        ),
        (
            INSTRUCT,
            [USER, said(tool_calls=[{"name": "f", "arguments": "{}", "parameters": {}}])],
            r"messages\[1\], tool_calls\[0\] has \['parameters'\]",
        ),
        (
            INSTRUCT,
            [USER, said(unparsed_tool_calls=[{"raw_text": "f(", "error": "x", "name": "f"}])],
            r"messages\[1\], unparsed_tool_calls\[0\] has \['name'\]",
        ),
    ],
)
def test_invalid_messages_are_rejected(renderer, messages, message):
    with pytest.raises(ValueError, match=message):
        renderer.build_generation_prompt(messages)
    with pytest.raises(ValueError, match=message):
        renderer.build_supervised_example(messages)


def test_a_key_that_is_null_counts_as_absent():
    """Structs of a table, and messages that clients dump, have all keys."""
    call = {**CALL, "index": None, "function": {**CALL["function"], "strict": None}}
    part = {"type": "text", "text": "b", "thinking": None, "image_url": None}
    given = [USER, said(content=[part], tool_calls=[call], refusal=None, audio=None)]
    plain = [USER, said(tool_calls=[CALL])]
    assert INSTRUCT.build_generation_prompt(given) == INSTRUCT.build_generation_prompt(plain)


@pytest.mark.parametrize(
    ("messages", "what", "message"),
    [
        (
            [USER, ASSISTANT],
            "assistant",
            r"train_on_what='assistant': give .*all_assistant_messages",
        ),
        ([USER], "last_assistant_message", r"holds nothing to train on"),
        ([USER], "all_assistant_messages", r"holds nothing to train on"),
        ([ASSISTANT, USER], "last_assistant_turn", r"holds nothing to train on"),
        ([ASSISTANT], "all_user_and_system_messages", r"holds nothing to train on"),
        ([USER, ASSISTANT], "customized", r"messages\[0\] lacks 'trainable'.*set True or False"),
        (
            [{**USER, "trainable": False}, ASSISTANT],
            "customized",
            r"messages\[1\] lacks 'trainable'",
        ),
        ([{**USER, "trainable": False}], "customized", r"holds nothing to train on"),
        (
            [USER, said(trainable=True)],
            "all_messages",
            r"messages\[1\] has 'trainable'.*customized",
        ),
        (
            [USER, said(trainable=False)],
            "last_assistant_message",
            r"messages\[1\] has 'trainable'.*customized",
        ),
    ],
)
def test_invalid_train_on_what_is_rejected(messages, what, message):
    with pytest.raises(ValueError, match=message):
        INSTRUCT.build_supervised_example(messages, what)
    with pytest.raises(ValueError, match=message):
        QWEN3.build_supervised_examples(messages, what)


def test_role_colon_rejects_targets_with_the_stop_string():
    messages = [{"role": "user", "content": "One.\n\nUser: two"}, said(content="b\n\nUser: c")]
    with pytest.raises(
        ValueError, match=r"messages\[1\] cannot be trained by renderer role_colon.*stop sequence"
    ):
        ROLE_COLON.build_supervised_example(messages)
    assert ROLE_COLON.build_supervised_example([*messages, USER, ASSISTANT])[0].length > 0
    assert ROLE_COLON.build_generation_prompt(messages).length > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"role": "robot"},
            r"role='robot': renderer qwen3_instruct can prompt for system, user, assistant",
        ),
        ({"role": "tool"}, r"role='tool'"),
        ({"prefill": 3}, r"prefill is a int; give a string"),
        ({"prefill": "\ud83d"}, r"prefill holds '\\ud83d', half of a character"),
    ],
)
def test_invalid_prompt_arguments_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        INSTRUCT.build_generation_prompt([USER], **arguments)


@pytest.mark.parametrize(
    ("name", "tokenizer", "options", "message"),
    [
        (
            "llama4",
            QWEN,
            {},
            r"renderer 'llama4' is unknown; choose one of role_colon, chatml, llama3, qwen3",
        ),
        (
            "llama3",
            QWEN,
            {},
            r"renderer llama3 needs '<\|begin_of_text\|>' as one token.*role_colon",
        ),
        (
            "qwen3_instruct",
            GEMMA3.tokenizer,
            {},
            r"renderer qwen3_instruct needs '<\|im_start\|>' as one token",
        ),
        ("qwen3", "Qwen/Qwen3-8B", {}, r"tokenizer is a str without decode.*transformers"),
        (
            "qwen3",
            QWEN,
            {"default_system": "a"},
            r"default_system is an option of the renderers chatml and mistral, not of qwen3",
        ),
        (
            "chatml",
            QWEN,
            {"strip_thinking_from_history": True},
            r"strip_thinking_from_history is an option of renderer qwen3",
        ),
    ],
)
def test_invalid_renderer_options_are_rejected(name, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        get_renderer(name, tokenizer, **options)


def test_invalid_tools_are_rejected():
    with pytest.raises(UnsupportedError, match=r"renderer gemma3 has no form for tools; use qwen3"):
        GEMMA3.create_conversation_prefix_with_tools([{"name": "f"}])
    with pytest.raises(ValueError, match=r"tools is empty"):
        QWEN3.create_conversation_prefix_with_tools([])
    with pytest.raises(ValueError, match=r"tools\[1\]: give \{'name'"):
        QWEN3.create_conversation_prefix_with_tools([{"name": "f"}, {"description": "x"}])
    with pytest.raises(ValueError, match=r"tools\[0\]: the specification is not plain JSON"):
        QWEN3.create_conversation_prefix_with_tools([{"name": "f", "parameters": {"x": {1, 2}}}])


def test_prompts_accept_a_prefill_and_other_roles():
    decode = QWEN.decode
    think = QWEN.convert_tokens_to_ids("<think>")
    prompt = QWEN3.build_generation_prompt([USER], prefill="<think>\nHm").to_ints()
    assert str(decode(prompt)).endswith("<|im_start|>assistant\n<think>\nHm")
    assert think in prompt
    assert think not in INSTRUCT.build_generation_prompt([USER], prefill="<think>\nHm").to_ints()
    assert str(decode(INSTRUCT.build_generation_prompt([USER], role="user").to_ints())).endswith(
        "<|im_end|>\n<|im_start|>user\n"
    )
    assert (
        decode(ROLE_COLON.build_generation_prompt([USER], role="user", prefill=" x").to_ints())
        == "User: a\n\nUser: x"
    )


def test_renderers_can_be_pickled():
    for renderer in (QWEN3, GEMMA3, ROLE_COLON):
        renderer.codec.encode_text("<|im_end|>")
        copy = pickle.loads(pickle.dumps(renderer))
        conversation = [USER, {**ASSISTANT, "content": "b<|im_end|>"}]
        assert (
            copy.build_supervised_example(conversation)[0]
            == renderer.build_supervised_example(conversation)[0]
        )
        assert (copy.name, copy.format) == (renderer.name, renderer.format)
