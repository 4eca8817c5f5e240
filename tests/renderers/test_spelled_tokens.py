"""Texts that spell special tokens are counted in a warning, for every kind of training."""

import asyncio
import json

import pytest

from planish.distillation.prompts import load_prompts
from planish.preference.datasets import ComparisonBuilderFromRows, DPODatasetBuilderFromComparisons
from planish.preference.model_datasets import PreferenceDatasetBuilder
from planish.renderers import spelled_tokens
from planish.rl.environments.reward_env import RewardDatasetBuilder
from planish.runlog.model_renderer import model_renderer
from planish.supervised.datasets import FromRowsBuilder
from planish.supervised.types import ChatDatasetBuilderCommonConfig
from planish.testing import tiny_model

RENDERED = "<|im_start|>user\nHello.<|im_end|>\n"
"""A prompt that a chat template has rendered."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def warned(tmp_path, caplog, monkeypatch):
    """Return the warnings of a reader of rows."""
    monkeypatch.setattr(spelled_tokens, "_logged", set())

    def read(reader, *rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        caplog.clear()
        for _ in range(2):
            reader(str(path))
        return [text.replace(str(path), "FILE") for text in caplog.messages if "spell" in text]

    return read


def config(model, renderer_name="qwen3_instruct"):
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=renderer_name, max_length=None, batch_size=1
    )


END = (
    "; they are encoded as text, not as these tokens. Give messages, not texts that a chat template "
    "has rendered"
)


def test_conversations(model, warned):
    def supervised(path, renderer_name="qwen3_instruct"):
        FromRowsBuilder(common_config=config(model, renderer_name), dataset=path, test_size=0)()

    fine = {"prompt": "Hello.", "completion": "Good day."}
    assert warned(supervised, fine) == []
    assert warned(supervised, {"text": RENDERED}) == []
    ended = {**fine, "completion": "Good day.<|im_end|>"}
    assert warned(supervised, fine, ended, {**fine, "prompt": RENDERED}) == [
        "2 of 3 conversations of FILE spell special tokens in their texts, first '<|im_end|>' in "
        f"FILE, line 2{END}"
    ]
    thinking = {"prompt": "Hello.", "completion": "<think>\nHm.\n</think>\n\nGood day."}
    assert "'<think>' in FILE, line 1" in warned(supervised, thinking)[0]
    assert warned(lambda path: supervised(path, "qwen3"), thinking) == [], "a token in this format"


@pytest.mark.parametrize("builder", ["dpo", "chat", "bradley_terry"])
def test_pairs(model, warned, builder):
    def pairs(path):
        options = {
            "common_config": config(model),
            "comparison_builder": ComparisonBuilderFromRows(dataset=path, test_size=0),
        }
        if builder == "dpo":
            DPODatasetBuilderFromComparisons(**options)()
        else:
            PreferenceDatasetBuilder(kind=builder, **options)()

    row = {"prompt": "Hello.", "chosen": "Good day.", "rejected": "What?"}
    assert warned(pairs, row) == []
    assert warned(pairs, row, {**row, "chosen": "Good day.<|im_end|>"}) == [
        "1 of 4 train answers spell special tokens in their texts, first '<|im_end|>' in FILE, line "
        f"2{END}"
    ]


def test_prompts(model, warned):
    def rewarded(path):
        builder = RewardDatasetBuilder(
            dataset=path,
            reward=lambda answer, row: 1.0,
            model_name=model,
            renderer_name="qwen3_instruct",
            batch_size=1,
        )
        asyncio.run(builder())

    def taught(path):
        load_prompts(path, model_renderer(model, "qwen3_instruct"))

    rows = [{"prompt": "Hello."}, {"prompt": RENDERED}]
    assert warned(rewarded, rows[0]) == warned(taught, rows[0]) == []
    [message] = warned(rewarded, *rows)
    assert message.startswith("1 of 2 train prompts spell special tokens in their texts, first ")
    assert message.endswith(f"'<|im_start|>' in FILE, line 2{END}")
    [message] = warned(taught, *rows)
    assert message.startswith("1 of 2 prompts of FILE spell special tokens in their texts, first ")
