"""Pairs of datums: the trained tokens, truncation, and skipped pairs."""

import json

import pytest

from planish.errors import UserError
from planish.preference.datasets import (
    ComparisonBuilderFromJsonl,
    ComparisonBuilderFromRows,
    DPODatasetBuilderFromComparisons,
    comparison_to_data,
    pairs_of,
)
from planish.preference.types import Comparison, Label, LabeledComparison
from planish.renderers import TrainOnWhat, get_renderer
from planish.runlog import model_renderer
from planish.supervised.types import ChatDatasetBuilderCommonConfig


@pytest.fixture(autouse=True)
def names_of_models(monkeypatch, renderer):
    monkeypatch.setattr(model_renderer, "_RENDERERS", {("tiny", None): renderer})


def says(role, content):
    return {"role": role, "content": content}


def labeled(*prompt, label: Label = "A", first="short", second="a long one"):
    return LabeledComparison(
        Comparison(prompt, [says("assistant", first)], [says("assistant", second)]), label
    )


def learned(datum, renderer):
    targets, weights = (
        datum.loss_fn_inputs[name].tolist() for name in ("target_tokens", "weights")
    )
    assert set(weights) == {0.0, 1.0}
    return renderer.tokenizer.decode(
        [token for token, weight in zip(targets, weights, strict=True) if weight]
    )


def test_only_the_answers_are_trained(renderer):
    talk = [says("user", "a"), says("assistant", "earlier"), says("user", "b")]
    [pair] = pairs_of(comparison_to_data(labeled(*talk), renderer))
    assert learned(pair.chosen, renderer) == "short<|im_end|>"
    assert learned(pair.rejected, renderer) == "a long one<|im_end|>"
    [swapped] = pairs_of(comparison_to_data(labeled(*talk, label="B"), renderer))
    assert learned(swapped.chosen, renderer) == "a long one<|im_end|>"
    with pytest.raises(UserError, match="tie"):
        comparison_to_data(labeled(*talk, label="Tie"), renderer)


def test_answers_of_several_turns_are_left_out_if_the_format_strips_reasoning(
    renderer, monkeypatch, tmp_path, caplog
):
    """In qwen3 such an answer is a sequence for each turn; qwen3_instruct keeps it as one."""
    thinking = get_renderer("qwen3", renderer.tokenizer)
    names = {("tiny", None): thinking, ("tiny", "qwen3_instruct"): renderer}
    monkeypatch.setattr(model_renderer, "_RENDERERS", names)
    turns = [says("user", "a"), says("assistant", "b"), says("user", "c")]
    rows = [
        {
            "chosen": [*turns, says("assistant", "d")],
            "rejected": [*turns[:1], says("assistant", "e")],
        },
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, expected in ((None, 1), ("qwen3_instruct", 2)):
        caplog.clear()
        train_set, _ = DPODatasetBuilderFromComparisons(
            common_config=ChatDatasetBuilderCommonConfig(
                model_name_for_tokenizer="tiny", renderer_name=name, batch_size=1
            ),
            comparison_builder=ComparisonBuilderFromRows(dataset=str(path)),
        )()
        assert [len(train_set.get_batch(index)) for index in range(len(train_set))] == [
            2
        ] * expected
        message = f"1 of 2 train pairs have an answer of several turns, the first in {path}, line 1"
        assert (message in caplog.text) == (name is None)


def test_an_overlong_pair_is_truncated_or_dropped_and_counted(renderer):
    whole = comparison_to_data(labeled(says("user", "a")), renderer)
    lengths = [datum.model_input.length for datum in whole]
    cut = comparison_to_data(labeled(says("user", "a")), renderer, lengths[0])
    assert (len(cut), cut.num_truncated, cut.num_left_out) == (2, 1, 0)
    none = comparison_to_data(labeled(says("user", "a")), renderer, lengths[0] - 6)
    assert (len(none), none.num_left_out) == (0, 1)


def config(**changes):
    return ChatDatasetBuilderCommonConfig(
        **{"model_name_for_tokenizer": "tiny", "batch_size": 4, **changes}
    )


def test_batches_of_pairs_are_read_from_files(renderer, pairs, tmp_path):
    rows = ComparisonBuilderFromRows(dataset=str(pairs), test_size=3)
    train, test = DPODatasetBuilderFromComparisons(
        common_config=config(), comparison_builder=rows
    )()
    assert test is not None
    assert (len(train), len(train.get_batch(0)), len(test), len(test.get_batch(0))) == (2, 8, 1, 6)
    for pair in pairs_of(train.get_batch(0)):
        assert len(learned(pair.chosen, renderer)) < len(learned(pair.rejected, renderer))
    tie = {
        "comparison": {"prompt_conversation": "a", "completion_A": "b", "completion_B": "c"},
        "label": "Tie",
    }
    (tmp_path / "more.jsonl").write_text(
        json.dumps(tie) + "\n" + json.dumps({**tie, "label": "B"}) + "\n"
    )
    files = ComparisonBuilderFromJsonl(
        train_path=str(pairs), test_path=str(tmp_path / "more.jsonl")
    )
    train, test = DPODatasetBuilderFromComparisons(
        common_config=config(), comparison_builder=files
    )()
    assert (len(train), test and len(test.get_batch(0))) == (3, 2)


def test_untrainable_pairs_are_rejected_before_training(tmp_path, pairs):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(
        json.dumps({"prompt": [says("robot", "x")], "chosen": "a", "rejected": "b"}) + "\n"
    )
    builder = ComparisonBuilderFromJsonl(train_path=str(bad))
    with pytest.raises(UserError, match="line 1: .*'robot'"):
        DPODatasetBuilderFromComparisons(
            common_config=config(batch_size=1), comparison_builder=builder
        )()
    only_users = config(train_on_what=TrainOnWhat.ALL_MESSAGES)
    with pytest.raises(UserError, match="train_on_what=all_messages"):
        DPODatasetBuilderFromComparisons(
            common_config=only_users,
            comparison_builder=ComparisonBuilderFromJsonl(train_path=str(pairs)),
        )()


def test_held_out_rows_keep_their_numbers(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [*[{"prompt": "a", "chosen": "b", "rejected": "c"}] * 9, {"prompt": "a"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="line 10: the row has"):
        ComparisonBuilderFromRows(dataset=str(path), test_size=4)()


def test_pairs_of_equal_answers_are_left_out_and_counted(tmp_path, renderer, caplog):
    rows = [
        {"prompt": "a", "chosen": "good", "rejected": "bad"},
        {"prompt": "a", "chosen": "same", "rejected": "same"},
        {"prompt": "b", "chosen": "fine", "rejected": "worse"},
        {
            "comparison": {"prompt_conversation": "a", "completion_A": "x", "completion_B": "y"},
            "label": "Tie",
        },
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    builder = DPODatasetBuilderFromComparisons(
        common_config=config(batch_size=2),
        comparison_builder=ComparisonBuilderFromJsonl(train_path=str(path)),
    )
    train, _ = builder()
    assert (train.data_size(), len(train.get_batch(0))) == (2, 4)
    assert f"1 of 3 train pairs have two equal answers and are left out, the first in {path}, " in (
        caplog.text
    )
    assert "line 2" in caplog.text
    assert "1 of 4 train comparisons are ties and are left out" in caplog.text


def test_pairs_that_truncation_makes_equal_are_left_out_and_counted(renderer):
    pair = labeled(says("user", "a"), first="one two three", second="one two four")
    whole = comparison_to_data(pair, renderer)
    shared = next(
        position
        for position, (one, other) in enumerate(
            zip(whole[0].model_input.to_ints(), whole[1].model_input.to_ints(), strict=False)
        )
        if one != other
    )
    # The datum of `shared` positions has the differing token as its last target.
    assert len(comparison_to_data(pair, renderer, shared)) == 2
    equal = comparison_to_data(pair, renderer, shared - 1)
    assert (len(equal), equal.num_left_out) == (0, 1)


def test_the_system_message_and_tools_of_a_row_are_in_both_prompts(tmp_path, renderer):
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": {}}}]
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "system": "Be kind.", "tools": tools}
    prompt = [says("system", "Be kind."), says("user", "a")]
    conversations = {
        "prompt": prompt,
        "chosen": [says("user", "a"), says("assistant", "b")],
        "rejected": [says("user", "a"), says("assistant", "c")],
        "tools": json.dumps(tools),
    }
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(conversations) + "\n")
    train, _ = DPODatasetBuilderFromComparisons(
        common_config=config(batch_size=2),
        comparison_builder=ComparisonBuilderFromJsonl(train_path=str(path)),
        shuffle_seed=None,
    )()
    texts = [renderer.tokenizer.decode(datum.model_input.to_ints()) for datum in train.get_batch(0)]
    assert texts[:2] == texts[2:]
    assert all("Be kind." in text and '"name": "lookup"' in text for text in texts)
