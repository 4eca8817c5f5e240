"""Faults of chat templates that were reported in other projects: what each template writes here.

The templates are short ones with the construct of the report.
"""

import json
import pickle
from typing import Any

import pytest
from family_tokenizers import family_tokenizer, template
from oracle_cases import TOOLS, with_tools

from planish.renderers import Renderer, get_renderer

HELLO = {"role": "user", "content": "Hello"}
CALL = {"function": {"name": "add", "arguments": '{"a":1,  "b": "x"}'}}
TURN = "{{ '<|im_start|>' + message.role + '\\n' }}"
END = "{{ '<|im_end|>\\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def made(body: str, family: str = "qwen", **templates: str) -> Renderer:
    """Return the renderer of a template that writes each message with `body`."""
    source = f"{{% for message in messages %}}{TURN}{body}{END}{{% endfor %}}{PROMPT}"
    tokenizer: Any = family_tokenizer(family)
    tokenizer.chat_template = {"default": source, **templates} if templates else source
    return get_renderer("template", tokenizer)


def with_calls(arguments: str, text: str = "{{ message.content or '' }}") -> str:
    tools = "{% if tools and loop.first %}{{ tools | tojson }}{% endif %}"
    calls = f"""{{% for call in message.tool_calls or [] %}}{{{{ '<tool_call>\\n{{"name": "' +
call.function.name + '", "arguments": ' }}}}{arguments}{{{{ '}}\\n</tool_call>' }}}}{{% endfor %}}"""
    return tools + text + calls


def last_text(renderer: Renderer, messages: list[Any]) -> str:
    tokens, weights = renderer.build_supervised_example(messages)
    trained = [id_ for id_, weight in zip(tokens.to_ints(), weights, strict=True) if weight]
    return str(renderer.tokenizer.decode(trained))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # Encoded twice if the arguments are JSON text.
        ("{{ call.function.arguments | tojson }}", '{"a": 1, "b": "x"}'),
        # An error if the arguments are an object.
        ("{{ '' + call.function.arguments }}", '{"a":1,  "b": "x"}'),
        # Python's text of a dictionary, if they are an object.
        ("{{ call.function.arguments }}", '{"a":1,  "b": "x"}'),
        # Braces around the braces, if they are JSON text.
        (
            "{% if call.function.arguments is mapping %}{{ call.function.arguments | tojson }}"
            "{% else %}{{ '{' + call.function.arguments + '}' }}{% endif %}",
            '{"a": 1, "b": "x"}',
        ),
    ],
)
def test_arguments_of_calls_are_encoded_once(arguments, expected):
    renderer = made(with_calls(arguments))
    answer = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    messages = with_tools(renderer, [HELLO, answer], TOOLS)
    text = last_text(renderer, messages)
    assert f'"arguments": {expected}}}' in text
    message, _ = renderer.parse_response(renderer.tokenizer.encode(text, add_special_tokens=False))
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": "x"}


@pytest.mark.parametrize(
    "text",
    [
        "{{ message.content }}",
        "{{ message.content if message.content is not none else '' }}",
        "{% if message.content is none or not message.tool_calls %}{{ message.content or '' }}"
        "{% endif %}",
    ],
)
def test_a_call_without_text_writes_no_none(text):
    renderer = made(with_calls("{{ call.function.arguments | tojson }}", text))
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    text = last_text(renderer, with_tools(renderer, [HELLO, answer], TOOLS))
    assert text.startswith("<tool_call>")
    assert "None" not in text


def test_the_end_of_a_turn_is_trained_although_it_is_not_the_end_of_sequence():
    """Gemma's end of sequence is another token than its end of turn."""
    tokenizer = family_tokenizer("gemma", "gemma")
    renderer = get_renderer("template", tokenizer)
    assert tokenizer.eos_token != "<end_of_turn>"
    conversation = [HELLO, {"role": "assistant", "content": "Yes"}]
    assert last_text(renderer, conversation) == "Yes<end_of_turn>"


def test_an_end_of_sequence_after_the_whole_conversation_is_not_trained():
    """Phi 3 writes it after the last end of turn, where no sample has it."""
    source = template("phi3_5")
    tokenizer: Any = family_tokenizer("qwen")
    tokens = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template, tokenizer.eos_token = source, "<|endoftext|>"
    renderer = get_renderer("template", tokenizer)
    conversation = [HELLO, {"role": "assistant", "content": "Yes"}]
    assert last_text(renderer, conversation) == "Yes<|end|>"
    tokens = renderer.build_supervised_example(conversation)[0].to_ints()
    assert tokenizer.eos_token_id not in tokens


def test_the_beginning_of_sequence_is_written_once():
    """The tokenizer of Llama 3 adds it to every text, and the template writes it too."""
    tokenizer: Any = family_tokenizer("llama3", "llama3")
    renderer = get_renderer("template", tokenizer)
    prompt = renderer.build_generation_prompt([HELLO]).to_ints()
    assert prompt.count(tokenizer.bos_token_id) == 1
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id


def test_tags_in_the_text_of_a_user_do_not_cut_it():
    """Templates that strip reasoning cut a text at `</think>`."""
    renderer = made("{{ message.content.split('</think>')[-1] }}{# <think> #}")
    text = "What does </think> mean, or <think>?"
    prompt = renderer.build_generation_prompt([{"role": "user", "content": text}]).to_ints()
    assert text in str(renderer.tokenizer.decode(prompt))


def test_json_of_a_template_is_not_escaped_for_html():
    renderer = made(with_calls("{{ call.function.arguments | tojson }}"))
    arguments = '{"a": "<b> & \'c\'"}'
    answer = {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "add", "arguments": arguments}}
    ]}  # fmt: skip
    assert arguments in last_text(renderer, with_tools(renderer, [HELLO, answer], TOOLS))


def test_a_system_message_in_the_middle_is_an_error_that_says_so():
    renderer = made(
        "{% if message.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
        "{{ message.content }}"
    )
    with pytest.raises(ValueError, match="System message must be at the beginning"):
        renderer.build_generation_prompt([HELLO, {"role": "system", "content": "Brief."}, HELLO])


def test_an_answer_is_not_repeated_if_the_template_drops_its_reasoning():
    """A difference of two renderings would contain the answer twice."""
    renderer = get_renderer("template", family_tokenizer("qwen", "qwen3"))
    turn = [HELLO, {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."}]
    examples = renderer.build_supervised_examples(turn * 3, "all_assistant_messages")
    texts = [str(renderer.tokenizer.decode(tokens.to_ints())) for tokens, _ in examples]
    assert [text.count("Yes") for text in texts] == [1, 2, 3]
    assert [text.count("Hm.") for text in texts] == [1, 1, 1]
    assert [int(weights.sum()) for _, weights in examples] == [int(examples[0][1].sum())] * 3


def test_the_template_for_tools_is_used_with_tools_only():
    """Some tokenizers have two templates, named default and tool_use."""
    body = with_calls("{{ call.function.arguments | tojson }}")
    other = f"{{% for message in messages %}}{TURN}{body}{END}{{% endfor %}}{PROMPT}"
    renderer = made("{{ message.content | trim }}", tool_use=other)
    spaced = [{"role": "user", "content": " Hi "}]
    plain, offering = (
        str(renderer.tokenizer.decode(renderer.build_generation_prompt(messages).to_ints()))
        for messages in (spaced, with_tools(renderer, spaced, TOOLS))
    )
    assert "user\nHi<|im_end|>" in plain
    assert "Adds two numbers." in offering
    assert " Hi <|im_end|>" in offering


def test_a_renderer_can_be_sent_to_another_process():
    renderer = get_renderer("template", family_tokenizer("qwen", "qwen3"))
    copy = pickle.loads(pickle.dumps(renderer.format))
    assert copy == renderer.format


def test_reasoning_that_the_template_never_writes_does_not_end_an_episode():
    """A template may strip reasoning, although the model writes it."""
    renderer = made("{{ message.content.split('</think>')[-1] | trim }}{# <think> #}")
    sampled = renderer.tokenizer.encode(
        "<think>\nHm.\n</think>\n\nYes<|im_end|>", add_special_tokens=False
    )
    message, _ = renderer.parse_response(sampled)
    assert message["content"][0] == {"type": "thinking", "thinking": "Hm."}
    messages: list[Any] = [HELLO, message, HELLO]
    prompt = str(renderer.tokenizer.decode(renderer.build_generation_prompt(messages).to_ints()))
    assert "Hm." not in prompt
    with pytest.raises(ValueError, match="leaves out its reasoning"):
        renderer.build_supervised_example(messages[:2])
