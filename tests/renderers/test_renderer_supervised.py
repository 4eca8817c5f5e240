"""The target tokens of supervised examples, and that training has the same prompt tokens as
sampling.
"""

from typing import Any

import pytest
import torch
from family_tokenizers import family_tokenizer
from hypothesis import given, settings, strategies as st

from planish.renderers import Renderer, TrainOnWhat, get_renderer

CONVERSATION = [
    {"role": "system", "content": "Sys."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
    {"role": "assistant", "content": "Four."},
]


def trained_text(renderer: Renderer, messages, what) -> list[str]:
    """Return the decoded runs of tokens with weight 1."""
    example, weights = renderer.build_supervised_example(messages, what)
    tokens = example.to_ints()
    assert weights.shape == (len(tokens),)
    assert weights.dtype == torch.float32
    assert set(weights.tolist()) <= {0.0, 1.0}
    runs: list[list[int]] = []
    before = 0.0
    for token, weight in zip(tokens, weights.tolist(), strict=True):
        if weight and not before:
            runs.append([])
        if weight:
            runs[-1].append(token)
        before = weight
    return [renderer.tokenizer.decode(run) for run in runs]


EXPECTED = {
    TrainOnWhat.LAST_ASSISTANT_MESSAGE: ["Four.<|im_end|>"],
    TrainOnWhat.LAST_ASSISTANT_TURN: ["Four.<|im_end|>"],
    TrainOnWhat.ALL_ASSISTANT_MESSAGES: ["Two.<|im_end|>", "Four.<|im_end|>"],
    TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES: [
        "Sys.<|im_end|>",
        "One?<|im_end|>",
        "Three?<|im_end|>",
    ],
    TrainOnWhat.ALL_MESSAGES: [
        "Sys.<|im_end|>",
        "One?<|im_end|>",
        "Two.<|im_end|>",
        "Three?<|im_end|>",
        "Four.<|im_end|>",
    ],
    TrainOnWhat.ALL_TOKENS: [
        "<|im_start|>system\nSys.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n"
        "<|im_start|>user\nThree?<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>"
    ],
}


@pytest.mark.parametrize("what", list(EXPECTED))
@pytest.mark.parametrize("name", ["chatml", "qwen3_instruct"])
def test_chatml_targets_are_the_assistant_messages(name, what):
    renderer = get_renderer(name, family_tokenizer("qwen", "qwen2_5"))
    assert trained_text(renderer, CONVERSATION, what) == EXPECTED[what]
    assert trained_text(renderer, CONVERSATION, what.value) == EXPECTED[what]


def test_customized_targets_follow_the_trainable_field():
    renderer = get_renderer("qwen3_instruct", family_tokenizer("qwen"))
    messages = [
        {**message, "trainable": index in (1, 4)} for index, message in enumerate(CONVERSATION)
    ]
    assert trained_text(renderer, messages, TrainOnWhat.CUSTOMIZED) == [
        "One?<|im_end|>",
        "Four.<|im_end|>",
    ]


def test_a_default_system_message_is_never_a_target():
    renderer = get_renderer("chatml", family_tokenizer("smollm2", "smollm2"))
    runs = trained_text(renderer, CONVERSATION[1:3], TrainOnWhat.ALL_MESSAGES)
    assert runs == ["One?<|im_end|>", "Two.<|im_end|>"]


def test_llama3_targets_never_include_the_beginning_of_text():
    renderer = get_renderer("llama3", family_tokenizer("llama3"))
    assert trained_text(renderer, CONVERSATION, "last_assistant_message") == ["Four.<|eot_id|>"]
    (everything,) = trained_text(renderer, CONVERSATION, "all_tokens")
    assert everything.startswith("<|start_header_id|>system")
    assert everything.endswith("Four.<|eot_id|>")


def test_role_colon_targets_include_the_next_turn_that_stops_it():
    renderer = get_renderer("role_colon", family_tokenizer("llama3"))
    assert trained_text(renderer, CONVERSATION, "all_assistant_messages") == [
        " Two.\n\n",
        " Four.\n\nUser:",
    ]
    example, _ = renderer.build_supervised_example(CONVERSATION)
    text = renderer.tokenizer.decode(example.to_ints())
    assert text == (
        "<|begin_of_text|>System: Sys.\n\nUser: One?\n\nAssistant: Two.\n\nUser: "
        "Three?\n\nAssistant: Four.\n\nUser:"
    )
    # Without a target in the last message the overlap is not written.
    example, _ = renderer.build_supervised_example(CONVERSATION, "all_user_and_system_messages")
    assert renderer.tokenizer.decode(example.to_ints()).endswith("Assistant: Four.\n\n")
    assert trained_text(renderer, CONVERSATION, "all_tokens")[0].startswith("System:")


def test_the_last_assistant_turn_has_all_its_tool_steps():
    renderer = get_renderer("qwen3_instruct", family_tokenizer("qwen"))
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [
        *CONVERSATION[1:4],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "Five."},
    ]
    calls = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
    assert trained_text(renderer, messages, "last_assistant_turn") == [calls, "Five.<|im_end|>"]
    assert trained_text(renderer, messages, "last_assistant_message") == ["Five.<|im_end|>"]
    response = "<tool_response>\n5\n</tool_response><|im_end|>"
    assert trained_text(renderer, messages, "all_messages")[2:] == [
        "Three?<|im_end|>",
        calls,
        response,
        "Five.<|im_end|>",
    ]


def test_a_message_after_the_last_assistant_is_context():
    renderer = get_renderer("qwen3_instruct", family_tokenizer("qwen"))
    assert trained_text(renderer, CONVERSATION[:4], "last_assistant_message") == ["Two.<|im_end|>"]


def test_the_think_block_belongs_to_target_or_prompt():
    thinking = get_renderer("qwen3", family_tokenizer("qwen"))
    disabled = get_renderer("qwen3_disable_thinking", family_tokenizer("qwen"))
    assert trained_text(thinking, CONVERSATION, "last_assistant_message") == [
        "<think>\n\n</think>\n\nFour.<|im_end|>"
    ]
    assert trained_text(disabled, CONVERSATION, "last_assistant_message") == ["Four.<|im_end|>"]
    tokens = disabled.build_supervised_example(CONVERSATION)[0]
    assert tokens == thinking.build_supervised_example(CONVERSATION)[0]
    reasoned = [*CONVERSATION[:4], {"role": "assistant", "content": "<think>hm</think>Four."}]
    with pytest.raises(ValueError, match=r"messages\[4\].*qwen3_disable_thinking.*reasoning"):
        disabled.build_supervised_example(reasoned)
    # As history it is context, and left out as the template does.
    more = [*reasoned, *CONVERSATION[3:]]
    assert "hm" not in disabled.tokenizer.decode(
        disabled.build_supervised_example(more)[0].to_ints()
    )


@pytest.mark.parametrize("end", [3, 5])
def test_the_prompt_is_a_prefix_of_the_example(renderer: Renderer, end):
    prompt = renderer.build_generation_prompt(CONVERSATION[: end - 1]).to_ints()
    example, weights = renderer.build_supervised_example(CONVERSATION[:end])
    assert example.to_ints()[: len(prompt)] == prompt
    assert weights[: len(prompt)].sum() == 0
    assert torch.all(weights[len(prompt) :] == 1)


def test_examples_are_split_where_history_is_stripped():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nA thought\n</think>\n\nA"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "<think>\nB thought\n</think>\n\nB"},
    ]
    renderer = get_renderer("qwen3", family_tokenizer("qwen"))
    assert not renderer.has_extension_property
    examples = renderer.build_supervised_examples(messages, "all_assistant_messages")
    assert examples[0][0] == renderer.build_supervised_example(messages[:2])[0]
    assert examples[1][0] == renderer.build_supervised_example(messages)[0]
    targets = [
        [token for token, weight in zip(e.to_ints(), w.tolist(), strict=True) if weight]
        for e, w in examples
    ]
    assert [renderer.tokenizer.decode(tokens) for tokens in targets] == [
        "<think>\nA thought\n</think>\n\nA<|im_end|>",
        "<think>\nB thought\n</think>\n\nB<|im_end|>",
    ]
    flagged = [{**message, "trainable": index == 1} for index, message in enumerate(messages)]
    (only,) = renderer.build_supervised_examples(flagged, "customized")
    assert only[0] == examples[0][0]

    keeping = get_renderer("qwen3", family_tokenizer("qwen"), strip_thinking_from_history=False)
    assert keeping.has_extension_property
    (whole,) = keeping.build_supervised_examples(messages, "all_assistant_messages")
    text = keeping.tokenizer.decode(whole[0].to_ints())
    assert "A thought" in text
    assert "B thought" in text


CALLS = [{"function": {"name": "f", "arguments": "{}"}}]
STEPS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "Again.", "tool_calls": CALLS},
    {"role": "tool", "content": "6"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "B"},
]


@pytest.mark.parametrize(
    ("what", "end", "answers"),
    [
        ("all_assistant_messages", 8, (1, 3, 5, 7)),
        ("all_assistant_messages", 7, (1, 3, 5)),
        ("all_messages", 8, (1, 3, 5, 7)),
        ("last_assistant_turn", 6, (1, 3, 5)),
        ("last_assistant_turn", 8, (7,)),
        ("last_assistant_message", 7, (5,)),
    ],
)
def test_each_tool_step_follows_the_prompt_it_is_sampled_from(what, end, answers):
    """As in the model's template, the empty think block of a prompt is absent from later
    prompts.
    """
    renderer = get_renderer("qwen3_disable_thinking", family_tokenizer("qwen"))
    examples = renderer.build_supervised_examples(STEPS[:end], what)
    for index, (example, weights) in zip(answers, examples, strict=True):
        prompt = renderer.build_generation_prompt(STEPS[:index]).to_ints()
        assert example == renderer.build_supervised_example(STEPS[: index + 1])[0]
        assert example.to_ints()[: len(prompt)] == prompt
        assert torch.all(weights[len(prompt) :] == 1)


@pytest.mark.parametrize("what", ["all_messages", "customized"])
def test_each_message_is_a_target_exactly_once(what):
    tokenizer = family_tokenizer("qwen")
    messages = [
        {**message, **({"trainable": index != 3} if what == "customized" else {})}
        for index, message in enumerate(STEPS)
    ]
    targets = []
    for name in ("qwen3_disable_thinking", "qwen3_instruct"):
        examples = get_renderer(name, tokenizer).build_supervised_examples(messages, what)
        targets.append(
            [
                token
                for e, w in examples
                for token, weight in zip(e.to_ints(), w, strict=True)
                if weight
            ]
        )
    assert targets[0] == targets[1]


def test_time_is_linear_in_the_conversation():
    """Time is counted in characters that the tokenizer gets, not in seconds."""

    class Counting:
        def __init__(self, inner):
            self.inner = inner
            self.characters = 0

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def encode(self, text, **options):
            self.characters += len(text)
            return self.inner.encode(text, **options)

    def characters(rounds: int) -> int:
        tokenizer: Any = Counting(family_tokenizer("qwen"))
        renderer = get_renderer("qwen3", tokenizer)
        renderer.build_supervised_example(CONVERSATION[1:3] * rounds, "all_assistant_messages")
        return tokenizer.characters

    assert characters(400) < 11 * characters(40)


answers = st.lists(
    st.text(alphabet=st.sampled_from("ab \n.:é🙂"), max_size=15), min_size=2, max_size=4
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(texts=answers)
def test_prompts_extend_each_other_if_the_renderer_claims_it(renderers: dict[str, Renderer], texts):
    keeping = get_renderer("qwen3", renderers["qwen3"].tokenizer, strip_thinking_from_history=False)
    for case, renderer in [*renderers.items(), ("qwen3 that keeps history", keeping)]:
        messages = []
        for text in texts:
            seen = renderer.build_supervised_example(messages)[0].to_ints() if messages else []
            messages.append({"role": "user", "content": text})
            prompt = renderer.build_generation_prompt(messages).to_ints()
            if renderer.has_extension_property:
                assert prompt[: len(seen)] == seen, case
            messages.append({"role": "assistant", "content": text})


def test_stripped_history_does_not_extend_the_prompt(renderers: dict[str, Renderer]):
    renderer = renderers["qwen3"]
    seen = renderer.build_supervised_example(CONVERSATION[:3])[0].to_ints()
    prompt = renderer.build_generation_prompt(CONVERSATION[:4]).to_ints()
    assert prompt[: len(seen)] != seen


def weighted(*weights):
    messages = [dict(message) for message in CONVERSATION]
    for index in weights:
        messages[index]["weight"] = 0
    return messages


@pytest.mark.parametrize("name", ["qwen3_instruct", "qwen3"])
@pytest.mark.parametrize("what", [each for each in TrainOnWhat if each != "customized"])
def test_a_message_of_weight_zero_is_never_learned(name, what):
    renderer = get_renderer(name, family_tokenizer("qwen", "qwen3"))
    examples = renderer.build_supervised_examples(weighted(2), what)
    for tokens, weights in examples:
        learned = [t for t, w in zip(tokens.to_ints(), weights.tolist(), strict=True) if w]
        assert "Two." not in renderer.tokenizer.decode(learned)
        assert "Two." in renderer.tokenizer.decode(tokens.to_ints())


def test_without_the_other_messages_nothing_is_left_to_learn():
    renderer = get_renderer("qwen3_instruct", family_tokenizer("qwen", "qwen3"))
    assert trained_text(renderer, weighted(2), "all_assistant_messages") == ["Four.<|im_end|>"]
    for weights, what in (((2, 4), "all_assistant_messages"), ((4,), "last_assistant_message")):
        with pytest.raises(ValueError, match="nothing to train on"):
            renderer.build_supervised_example(weighted(*weights), what)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"weight": 0.5}, r"\['weight'\]=0.5; give 0 or 1"),
        ({"weight": True}, r"\['weight'\]=True; give 0 or 1"),
        ({"weight": 0, "trainable": True}, "has weight 0 and trainable True"),
    ],
)
def test_a_weight_that_contradicts_is_an_error(message, error):
    renderer = get_renderer("qwen3_instruct", family_tokenizer("qwen", "qwen3"))
    with pytest.raises(ValueError, match=error):
        renderer.build_supervised_example([*CONVERSATION[:-1], {**CONVERSATION[-1], **message}])
