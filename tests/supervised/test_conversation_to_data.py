"""A conversation becomes datums: the trained tokens, truncation, and skipped conversations."""

import pytest
from ledger_service import digest

from planish.renderers import TrainOnWhat, conversation_to_datum, get_renderer
from planish.supervised.rendering import conversation_to_data

CHAT = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day to you."}]
THINKING = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "<think>one</think>\n\nb"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "<think>two</think>\n\nd"},
]


def length(renderer, messages):
    return conversation_to_datum(messages, renderer).model_input.length


def test_a_short_conversation_equals_the_renderer_datum(renderer):
    for reduction in ("mean", "none"):
        [datum] = batch = conversation_to_data(CHAT, renderer, reduction=reduction)
        assert digest(datum) == digest(conversation_to_datum(CHAT, renderer, reduction=reduction))
        assert (batch.num_truncated, batch.num_left_out) == (0, 0)
        total = sum(datum.loss_fn_inputs["weights"].tolist())
        assert total == pytest.approx(1.0 if reduction == "mean" else len("Good day to you.") + 1)


def test_conversations_are_truncated_beyond_max_length(renderer):
    whole = length(renderer, CHAT)
    assert conversation_to_data(CHAT, renderer, whole).num_truncated == 0
    [datum] = batch = conversation_to_data(CHAT, renderer, whole - 3)
    assert (batch.num_truncated, batch.num_left_out) == (1, 0)
    assert datum.model_input.length == whole - 3
    assert sum(datum.loss_fn_inputs["weights"].tolist()) == pytest.approx(1.0), (
        "normalised by what is left"
    )


def test_a_conversation_truncated_before_its_answer_is_dropped(renderer):
    answer = length(renderer, CHAT) - len("Good day to you.") - 1
    batch = conversation_to_data(CHAT, renderer, answer)
    assert (len(batch), batch.num_truncated, batch.num_left_out) == (0, 0, 1)
    assert len(conversation_to_data(CHAT, renderer, answer + 1)) == 1


def test_each_answer_follows_the_prompt_it_would_be_sampled_from(tokenizer):
    renderer = get_renderer("qwen3", tokenizer)
    first, second = conversation_to_data(THINKING, renderer)
    assert "one" in tokenizer.decode(first.loss_fn_inputs["target_tokens"].tolist())
    assert "one" not in tokenizer.decode(second.loss_fn_inputs["target_tokens"].tolist())
    last = conversation_to_data(
        THINKING, renderer, train_on_what=TrainOnWhat.LAST_ASSISTANT_MESSAGE
    )
    assert len(last) == 1
    assert conversation_to_data(THINKING, renderer, first.model_input.length).num_left_out == 1


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_instruct", "qwen3_disable_thinking", "role_colon"]
)
@pytest.mark.parametrize(
    "messages",
    [
        CHAT,
        THINKING,
        CHAT[:1],
        [{"role": "assistant", "content": "x", "trainable": True}],
        [*CHAT, {"role": "robot", "content": "x"}],
        [{"role": "assistant", "content": "x\n\nUser: y"}],
        [{"role": "assistant", "content": 5}],
        [],
    ],
)
def test_checking_rejects_what_rendering_rejects(tokenizer, name, messages):
    renderer = get_renderer(name, tokenizer)
    for what in TrainOnWhat:
        outcomes = []
        for act in (renderer.check_supervised_examples, renderer.build_supervised_examples):
            try:
                act(messages, what)
                outcomes.append(None)
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
