"""Random rows of all layouts through every reader: each column is used, refused or named in a
warning.

The oracle knows nothing of the readers. Every text of a row is a word of its own. A column is used
if all of its words are in the tokens that are trained or prompted, decoded. Otherwise its name must
be in the error or in the warning. Two exceptions are documented: a prompt leaves out the answers of
its row, and a reward function gets the whole row.
"""

import asyncio
import json
import random
from typing import Any

import datasets as hub
import pytest

from planish.datasets import unused_columns
from planish.distillation.prompts import load_prompts
from planish.errors import UserError
from planish.preference.datasets import ComparisonBuilderFromRows, DPODatasetBuilderFromComparisons
from planish.preference.prompts import PromptsFromRows
from planish.recipes import sl_loop
from planish.renderers import get_renderer
from planish.rl.environments.reward_env import RewardDatasetBuilder
from planish.runlog import model_renderer
from planish.supervised.datasets import FromRowsBuilder
from planish.supervised.types import ChatDatasetBuilderCommonConfig
from planish.testing import save_byte_tokenizer
from planish.tokenizer import load_tokenizer

NUM_ROWS = 300
ANSWER_COLUMNS = {
    "messages",
    "conversations",
    "completion",
    "output",
    "answer",
    "chosen",
    "rejected",
    "comparison",
    "preferred_output",
    "non_preferred_output",
    "label",
}
"""Columns whose answers are left out of prompts."""


class Words:
    """Makes words, each of them once."""

    def __init__(self, rng):
        self.rng = rng
        self.count = 0

    def __call__(self):
        self.count += 1
        return f"w{self.count}{self.rng.choice('äöü')}x"

    def answer(self):
        """Return a word that only an answer contains."""
        return f"answer{self()}"


def message(word, role, rng):
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    if rng.random() < 0.3:
        return {"from": names[role], "value": word}
    return {"role": rng.choice([role, names[role]]), "content": word}


def question(words, rng):
    messages = [message(words(), "user", rng)]
    if rng.random() < 0.3:
        messages = [
            message(words(), "user", rng),
            message(words(), "assistant", rng),
            *messages,
        ]
    if rng.random() < 0.3:
        messages.insert(0, message(words(), "system", rng))
    return messages


def answer(words, rng):
    reply = message(words.answer(), "assistant", rng)
    if rng.random() < 0.3:
        reply[rng.choice(["thinking", "reasoning", "reasoning_content"])] = words.answer()
    elif rng.random() < 0.3:
        arguments = {"city": words.answer()}
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        reply["tool_calls"] = [call]
    return reply


def text_or_messages(messages, words, rng):
    return words() if rng.random() < 0.5 else messages


def layout(words, rng):
    """Return the columns of a random layout."""
    chat = question(words, rng)
    text = text_or_messages(chat, words, rng)
    first, second = answer(words, rng), answer(words, rng)
    choices = [
        lambda: {"messages": [*chat, first]},
        lambda: {"messages": json.dumps([*chat, first])},
        lambda: {"conversations": [*chat, first]},
        lambda: {"prompt": text, "completion": rng.choice([[first], words.answer()])},
        lambda: {"prompt": text},
        lambda: {"instruction": words(), "output": words.answer()},
        lambda: {"instruction": words(), "input": words(), "output": words.answer()},
        lambda: {"question": words(), "answer": words.answer()},
        lambda: {"text": f"{words()} {words()}"},
        lambda: {"prompt": text, "chosen": [first], "rejected": [second]},
        lambda: {"question": words(), "chosen": words.answer(), "rejected": words.answer()},
        lambda: {"chosen": [*chat, first], "rejected": [*chat, second]},
        lambda: {"prompt": chat, "chosen": [chat[-1], first], "rejected": [chat[-1], second]},
        lambda: {
            "input": {"messages": chat},
            "preferred_output": [first],
            "non_preferred_output": [second],
        },
        lambda: {
            "comparison": {
                "prompt_conversation": chat,
                "completion_A": [first],
                "completion_B": words.answer(),
            },
            "label": rng.choice("AB"),
        },
    ]
    return rng.choice(choices)()


def random_row(rng):
    words = Words(rng)
    row = layout(words, rng)
    if rng.random() < 0.2:
        row = {**layout(words, rng), **row}
    others = {
        "system": lambda: words(),
        "tools": lambda: [
            {
                "type": "function",
                "function": {"name": "look", "description": words(), "parameters": {}},
            }
        ],
        "images": lambda: [words()],
        "chat_template_kwargs": lambda: {"enable_thinking": words()},
        "weight": lambda: 0.5,
        "margin": lambda: 2.5,
        "history": lambda: [[words(), words()]],
        "source": lambda: words(),
        "extra_info": lambda: {"index": words()},
    }
    for name, value in others.items():
        if rng.random() < 0.15:
            row[name] = value()
    if rng.random() < 0.2:
        row["tools"] = json.dumps(row.get("tools", []))
    if rng.random() < 0.3:
        row |= {name: None for name in ("messages", "prompt", "images") if name not in row}
    names = list(row)
    rng.shuffle(names)
    return {name: row[name] for name in names}


def leaves(value):
    """Return the texts in a value; JSON text counts as what it holds."""
    if isinstance(value, str):
        if value[:1] in "[{" and value:
            return leaves(json.loads(value))
        return value.split()
    if isinstance(value, dict):
        return [leaf for key, each in value.items() if key not in FIXED for leaf in leaves(each)]
    if isinstance(value, list):
        return [leaf for each in value for leaf in leaves(each)]
    return []


FIXED = {"role", "from", "type", "name", "label"}
"""Keys whose texts are not words of the row."""


def decoded(data, tokenizer):
    ids = [
        [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]
        for datum in data
    ]
    return " ".join(tokenizer.decode(each) for each in ids)


def config():
    return ChatDatasetBuilderCommonConfig(model_name_for_tokenizer="tiny", batch_size=1)


def supervised(place, renderer):
    train, _ = FromRowsBuilder(common_config=config(), dataset=place)()
    return decoded(train.get_batch(0), renderer.tokenizer)


def supervised_loop(place, renderer):
    [example] = sl_loop.load_conversations(place, "train")
    return decoded(sl_loop.render([example], renderer, 10_000).data, renderer.tokenizer)


def pairs(place, renderer):
    train, _ = DPODatasetBuilderFromComparisons(
        common_config=config(), comparison_builder=ComparisonBuilderFromRows(dataset=place)
    )()
    return decoded(train.get_batch(0), renderer.tokenizer)


def prompted(messages, renderer):
    return renderer.tokenizer.decode(renderer.build_generation_prompt(messages).to_ints())


def distillation(place, renderer):
    return prompted(load_prompts(place, renderer)[0], renderer)


def preference_prompts(place, renderer):
    return prompted(PromptsFromRows(dataset=place)().train[0], renderer)


def rewards(place, renderer):
    builder = RewardDatasetBuilder(
        dataset=place, reward=lambda *_: 0.0, model_name="tiny", batch_size=1, group_size=2
    )
    train, _ = asyncio.run(builder())
    env: Any = asyncio.run(train.get_batch(0)[0].make_envs())[0]
    prompt, _ = asyncio.run(env.initial_observation())
    return " ".join([renderer.tokenizer.decode(prompt.to_ints()), *leaves(env.row)])


READERS = {
    "supervised": supervised,
    "sl_loop": supervised_loop,
    "pairs": pairs,
    "distillation": distillation,
    "preference prompts": preference_prompts,
    "rewards": rewards,
}


def read(name, place, renderer) -> Any:
    """Return (text, None), or (None, error)."""
    try:
        return READERS[name](place, renderer), None
    except UserError as error:
        return None, str(error)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    return get_renderer("qwen3", load_tokenizer(save_byte_tokenizer(directory)))


@pytest.fixture(autouse=True)
def names_of_models(monkeypatch, renderer):
    monkeypatch.setattr(model_renderer, "_RENDERERS", {("tiny", None): renderer})
    monkeypatch.setattr(unused_columns, "_logged", set())


def written(row, number, directory):
    """Write a row as a file of one of three formats."""
    path = directory / f"{number}{('.jsonl', '.json', '.parquet')[number % 3]}"
    if path.suffix == ".parquet":
        hub.Dataset.from_list([row], on_mixed_types="use_json").to_parquet(path)
    else:
        path.write_text(json.dumps([row] if path.suffix == ".json" else row))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_each_column_is_used_refused_or_named(name, tmp_path, renderer, caplog):
    rng = random.Random(f"rows of {name}")
    num_read = 0
    for number in range(NUM_ROWS):
        row = random_row(rng)
        place = written(row, number, tmp_path)
        caplog.clear()
        text, error = read(name, place, renderer)
        if error is not None:
            assert place in error
            assert any(f'"{key}"' in error or f"'{key}'" in error for key in row), (row, error)
            continue
        num_read += 1
        for key, value in row.items():
            words = [] if key == "label" else leaves(value)
            lost = [word for word in words if word not in text]
            if "prompts" in name or name == "distillation":
                is_answer = key in ANSWER_COLUMNS
                lost = [word for word in lost if not (is_answer and word.startswith("answer"))]
            if key in ("weight", "margin"):
                assert name == "rewards" or f'"{key}"' in caplog.text, (row, key)
            assert not lost or f'"{key}"' in caplog.text, (row, key, lost, text)
        if name not in ("supervised", "sl_loop", "pairs", "rewards"):
            assert "answer" not in text, row
    assert num_read > NUM_ROWS / 10
