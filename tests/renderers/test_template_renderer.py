"""The renderer `template` against the renderers of the families, on random conversations, and its
rules for templates that no other renderer writes.
"""

import json
import random
from typing import Any

import pytest
from family_tokenizers import family_tokenizer, template
from oracle_cases import TOOLS, with_tools

from planish.errors import DamagedFileError, UnsupportedError
from planish.renderers import Renderer, Termination, get_renderer
from planish.renderers.codec import Control

CASES = {
    "llama3": ("llama3", "llama3", "template"),
    "gemma3": ("gemma", "gemma3", "template"),
    "chatml of SmolLM2": ("smollm2", "smollm2", "template"),
    "chatml of Qwen2.5": ("qwen", "qwen2_5", "template"),
    "qwen3": ("qwen", "qwen3", "template"),
    "qwen3_disable_thinking": ("qwen", "qwen3", "template_disable_thinking"),
    "qwen3_instruct": ("qwen", "qwen3_instruct_2507", "template"),
}
TEXTS = (
    "Hi",
    " two\n\nlines ",
    "東京 🙂 Größe\n",
    "<|im_end|>\n<|im_start|>user\n",
    "a<|eot_id|>b<end_of_turn>",
    "<tool_call>\n{}",
    "x</think>y<think>",
    "\n  indented",
)
WITH_ARGUMENTS = ('{"a": 1, "b": "two"}', '{"a": 2.5, "b": "<|im_end|>"}', "{}")


def pair(case: str) -> tuple[Renderer, Renderer]:
    family, chat_template, name = CASES[case]
    tokenizer = family_tokenizer(family, chat_template)
    return get_renderer(case.split()[0], tokenizer), get_renderer(name, tokenizer)


PAIRS = {case: pair(case) for case in CASES}


def random_conversation(rng: random.Random, own: Renderer, has_tools: bool) -> list[dict[str, Any]]:
    """Return turns of questions and answers, with calls and reasoning if the renderer has them.

    Answers do not begin with white space, because the templates join it to the line break of the
    header. Messages with calls have reasoning: without, Qwen3's template writes an empty think
    block in the last message only, so `template` trains such a message in an example of its own.
    """
    capabilities = own.format.capabilities
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(TEXTS)})
    uses_tools = has_tools and rng.random() < 0.5
    thinks = capabilities.samples_thinking
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": rng.choice(TEXTS)})
        for _ in range(rng.randint(0, 2) if uses_tools else 0):
            num_calls = rng.randint(1, 2)
            calls = [
                {"function": {"name": "add", "arguments": rng.choice(WITH_ARGUMENTS)}}
                for _ in range(num_calls)
            ]
            messages.append(answer(rng, thinks, 1.0, ("", "Wait."), tool_calls=calls))
            messages += [{"role": "tool", "content": rng.choice(TEXTS)} for _ in calls]
        messages.append(answer(rng, thinks, 0.5, [text.lstrip() for text in TEXTS]))
    return with_tools(own, messages, TOOLS) if uses_tools else messages


def answer(
    rng: random.Random, thinks: bool, how_often: float, texts: Any, **keys: Any
) -> dict[str, Any]:
    made = {"role": "assistant", "content": [{"type": "text", "text": rng.choice(texts)}], **keys}
    if thinks and rng.random() < how_often:
        made["content"].insert(0, {"type": "thinking", "thinking": rng.choice(("So.", "a\n\nb"))})
    return made


def outcome(make: Any, *arguments: Any) -> Any:
    """Return the examples, or None if they are rejected."""
    try:
        made = make(*arguments)
    except ValueError:
        return None
    examples = made if isinstance(made, list) else [made]
    return [(tokens.to_ints(), weights.tolist()) for tokens, weights in examples]


def assert_same(case: str, seed: int) -> None:
    own, other = PAIRS[case]
    rng = random.Random(seed)
    messages = random_conversation(rng, own, other.format.capabilities.tools)
    for end in [
        index for index, one in enumerate(messages) if one["role"] == "assistant" and index
    ]:
        prompts = [one.build_generation_prompt(messages[:end]).to_ints() for one in (own, other)]
        assert prompts[0] == prompts[1], messages[:end]
    for train_on in ("last_assistant_message", "last_assistant_turn", "all_assistant_messages"):
        ours, theirs = (
            outcome(one.build_supervised_examples, messages, train_on) for one in (own, other)
        )
        assert ours is not None
        assert ours == theirs, (train_on, messages)
    if not any("tools" in one or one["role"] == "tool" for one in messages):
        for train_on in ("all_messages", "all_user_and_system_messages"):
            ours, theirs = (
                outcome(one.build_supervised_examples, messages, train_on) for one in (own, other)
            )
            assert ours == theirs, (train_on, messages)
    if own.format.capabilities.tools != other.format.capabilities.tools:
        return  # SmolLM2's template has no tools, so `template` reads no calls
    for tokens, weights in outcome(
        own.build_supervised_examples, messages, "last_assistant_message"
    ):
        sampled = [token for token, weight in zip(tokens, weights, strict=True) if weight]
        assert own.parse_response(sampled) == other.parse_response(sampled)
        cut = sampled[: rng.randint(0, len(sampled))]
        assert own.parse_response(cut) == other.parse_response(cut)


@pytest.mark.parametrize("case", CASES)
def test_random_conversations_equal_those_of_the_own_renderer(case):
    for seed in range(6):
        assert_same(case, seed)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_many_random_conversations_equal_those_of_the_own_renderer(case):
    for seed in range(1000, 1060):
        assert_same(case, seed)


def made(source: str, family: str = "qwen", name: str = "template") -> Renderer:
    tokenizer = family_tokenizer(family)
    tokenizer.chat_template = source
    return get_renderer(name, tokenizer)


def text_of(renderer: Renderer, tokens: Any) -> str:
    return str(
        renderer.tokenizer.decode(tokens.to_ints() if hasattr(tokens, "to_ints") else tokens)
    )


def trained(renderer: Renderer, example: Any) -> str:
    tokens, weights = example
    return text_of(
        renderer, [token for token, weight in zip(tokens.to_ints(), weights, strict=True) if weight]
    )


HELLO = {"role": "user", "content": "Hello"}
PLAIN = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content
+ '<|im_end|>\\n' }}{% endfor %}"""
"""ChatML without a generation prompt, as fine-tuned models often have it."""


def test_a_template_without_a_generation_prompt_gets_the_header_of_its_answers():
    renderer = made(PLAIN)
    prompt = renderer.build_generation_prompt([HELLO])
    assert text_of(renderer, prompt) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    example = renderer.build_supervised_example([HELLO, {"role": "assistant", "content": "Hi"}])
    assert trained(renderer, example) == "Hi<|im_end|>"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ raise_exception('no') }}", "no"),
        pytest.param(
            "{% for _ in range(99999) %}{% for _ in range(99999) %}{% endfor %}{% endfor %}",
            "CPU",
            marks=pytest.mark.slow,
        ),
        (PLAIN + "{{ range(10**5) | random }}", "two texts for one conversation"),
        ("{% if %}", "cannot be rendered"),
    ],
)
def test_a_template_that_fails_is_an_error_before_it_is_used(source, error):
    with pytest.raises(DamagedFileError, match=error):
        made(source)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "no control token"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "does not write the text"),
        ("{{ messages[0].content }}<|im_end|>", "leaves out the text of a message of role 'ass"),
    ],
)
def test_a_template_that_cannot_train_an_answer_is_unsupported(source, error):
    with pytest.raises(UnsupportedError, match=error):
        made(source)
    with pytest.raises(UnsupportedError, match="has no chat template"):
        get_renderer("template", family_tokenizer("qwen"))


def test_a_rejected_conversation_says_what_the_template_said():
    renderer = made(
        PLAIN.replace(
            "{{ '<|im_start|>'",
            "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('roles must alternate') }}{% endif %}{{ '<|im_start|>'",
        )
    )
    assert "system" not in renderer.format.capabilities.roles
    with pytest.raises(ValueError, match="the chat template rejects the conversation: roles must"):
        renderer.build_generation_prompt([HELLO, HELLO])


def test_a_message_that_the_template_leaves_out_is_an_error():
    renderer = made(PLAIN.replace("in messages", "in messages if message.content != 'Secret'"))
    with pytest.raises(ValueError, match=r"messages\[1\]: the chat template leaves out the text"):
        renderer.build_generation_prompt([HELLO, {"role": "assistant", "content": "Secret"}, HELLO])


LAST_SYSTEM = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n' %}
{%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{{- bos_token }}
{%- for message in messages %}{%- if message.role == 'user' %}
{{- '[INST]' + (system if loop.index0 >= (messages | length) - 2 + (messages | length) % 2 else '')
+ message.content + '[/INST]' }}{% else %}{{- ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""
"""As in Mistral 7B v0.3: the last user message contains the system message."""


def test_a_turn_whose_prompt_is_rewritten_starts_a_new_example():
    renderer = made(LAST_SYSTEM, "mistral")
    conversation = [
        {"role": "system", "content": "Brief."},
        HELLO,
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "More"},
        {"role": "assistant", "content": "No"},
    ]
    first, second = renderer.build_supervised_examples(conversation, "all_assistant_messages")
    assert text_of(renderer, first[0]) == "<s>[INST]Brief.\n\nHello[/INST] Hi</s>"
    assert trained(renderer, first) == " Hi</s>"
    assert text_of(renderer, second[0]) == (
        "<s>[INST]Hello[/INST] Hi</s>[INST]Brief.\n\nMore[/INST] No</s>"
    )
    assert trained(renderer, second) == " No</s>"
    with pytest.raises(ValueError, match=r"messages\[2\] cannot be trained.*example of its own"):
        renderer.build_supervised_example(conversation, "all_assistant_messages")
    sampled = renderer.codec.encode([" Hi", Control("</s>")])
    assert renderer.build_continuation(conversation[:4], 2, sampled) is None
    without = conversation[1:]
    [example] = renderer.build_supervised_examples(without, "all_assistant_messages")
    assert trained(renderer, example) == " Hi</s> No</s>"
    continuation = renderer.build_continuation(without[:3], 1, sampled)
    assert continuation is not None
    assert text_of(renderer, continuation) == "[INST]More[/INST]"


THINKING = template("qwen3").replace(
    "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable",
    "{{- '<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable",
)
"""As in Qwen3-Thinking-2507: prompts end within the reasoning."""


def test_an_answer_to_a_prompt_that_begins_the_reasoning():
    renderer = made(THINKING)
    prompt = renderer.build_generation_prompt([HELLO])
    assert text_of(renderer, prompt).endswith("<|im_start|>assistant\n<think>\n")
    sampled = renderer.codec.encode(["Hm.\n", Control("</think>"), "\n\nHi", Control("<|im_end|>")])
    message, termination = renderer.parse_response(sampled)
    assert termination is Termination.STOP_SEQUENCE
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "text", "text": "Hi"},
    ]
    example = renderer.build_supervised_example([HELLO, message])
    assert example[0].to_ints() == prompt.to_ints() + sampled
    assert trained(renderer, example) == "Hm.\n</think>\n\nHi<|im_end|>"


GENERATION = """{% for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{- message.content }}{% endgeneration %}
{{- '<|im_end|>\\n' }}{% else %}{{- message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def test_generation_blocks_choose_the_trained_tokens():
    renderer = made(GENERATION)
    conversation = [HELLO, {"role": "assistant", "content": "Hi"}] * 2
    [example] = renderer.build_supervised_examples(conversation, "all_assistant_messages")
    assert trained(renderer, example) == "HiHi", "the end marks are outside of the blocks"
    inside = GENERATION.replace(
        "{% endgeneration %}\n{{- '<|im_end|>\\n' }}", "{{- '<|im_end|>\\n' }}{% endgeneration %}"
    )
    [example] = made(inside).build_supervised_examples(conversation, "all_assistant_messages")
    assert trained(renderer, example) == "Hi<|im_end|>Hi<|im_end|>"


def test_the_date_of_a_template_is_fixed():
    renderer = made("{{ strftime_now('%d %b %Y %H:%M') }}" + PLAIN)
    assert renderer.build_generation_prompt([HELLO]) == renderer.build_generation_prompt([HELLO])
    fixed = get_renderer("template", renderer.tokenizer, current_date="2025-06-28")
    assert text_of(fixed, fixed.build_generation_prompt([HELLO])).startswith("28 Jun 2025 00:00")


def test_other_prompts_than_the_assistants_are_rejected():
    with pytest.raises(ValueError, match="can prompt for the assistant only"):
        made(PLAIN).build_generation_prompt([HELLO], role="user")


def test_a_switch_that_a_template_lacks_is_unsupported():
    with pytest.raises(UnsupportedError, match="no switch that turns reasoning off"):
        made(THINKING.replace("enable_thinking", "other"), name="template_disable_thinking")
    assert made(template("qwen3"), name="template_thinking").format.capabilities.samples_thinking


def test_tokens_of_harmless_text_equal_apply_chat_template():
    """The marks of a template are found in its output, and the texts between them are joined."""
    for case in ("qwen3", "gemma3", "llama3"):
        _, renderer = PAIRS[case]
        tokenizer: Any = renderer.tokenizer
        messages = [HELLO, {"role": "assistant", "content": "Größe"}, HELLO]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected = tokenizer.encode(text, add_special_tokens=False)
        assert renderer.build_generation_prompt(messages).to_ints() == expected


def test_private_use_characters_of_a_text_are_kept():
    renderer = PAIRS["qwen3"][1]
    text = "\U000f0000\U000f1002 \\U000f0000 \\udb80\\udc00 <|im_end|>"
    prompt = renderer.build_generation_prompt([{"role": "user", "content": text}])
    assert text_of(renderer, prompt).startswith(f"<|im_start|>user\n{text}<|im_end|>\n")
    escaped = json.loads('"\\udb80\\udc00"')
    assert escaped == "\U000f0000"
