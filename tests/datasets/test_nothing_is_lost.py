"""Random rows of all layouts through every reader: each column is used, refused or named in a
warning.

The oracle knows nothing of the readers. Every text of a row is a word of its own. A column is used
if all of its words are in the tokens that are trained or prompted, decoded, or in the reference of
a grader. Otherwise its name must be in the error or in the warning. Two exceptions are documented: a
prompt leaves out the answers of its row, and a reward function gets the whole row.

The rows of readers with layouts of their own (rubrics, problems, tests, choices) have these columns,
and often those of other layouts. The files are written by `datasets`, pandas, csv and json.
"""

import asyncio
import csv
import gzip
import json
import random
import re
from functools import cache
from typing import Any

import datasets as hub
import pandas
import pytest
from pyarrow import ArrowException

from planish.datasets import unused_columns
from planish.datasets.math_problems import COLLECTIONS, load_splits
from planish.distillation.prompts import check_prompt, load_prompts
from planish.errors import UserError
from planish.evaluation.tasks import load_task
from planish.preference.datasets import ComparisonBuilderFromRows, DPODatasetBuilderFromComparisons
from planish.preference.model_datasets import PreferenceDatasetBuilder
from planish.preference.prompts import PromptsFromRows, fitting_prompts
from planish.recipes import sl_loop
from planish.recipes.code_datasets import CodeDatasetBuilder
from planish.recipes.rubric import rows_of_dataset
from planish.renderers import get_renderer
from planish.rl.environments.reward_env import RewardDatasetBuilder
from planish.rubric.grading import judge_prompt
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
    "solution",
}
"""Columns whose answers are left out of prompts, and whose worked solutions of evaluations."""
PROMPTS = ("distillation", "preference prompts")
SHOW_NO_ANSWERS = (*PROMPTS, "gsm8k evaluation", "math evaluation")
"""Readers that use a prompt, and perhaps its final answer, and no text of an answer."""
WORD = re.compile(r"(?:answer)?w\d+[äöü]x|\b9\d{4}\b")


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
        messages = [message(words(), "user", rng), message(words(), "assistant", rng), *messages]
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
        lambda: {"instruction": words()},
        lambda: {"question": words()},
        lambda: {"instruction": words(), "output": words.answer()},
        lambda: {"instruction": words(), "input": words(), "output": words.answer()},
        lambda: {"question": words(), "answer": words.answer()},
        lambda: {"text": f"{words()} {words()}"},
        lambda: {"prompt": text, "chosen": [first], "rejected": [second]},
        lambda: {"question": words(), "chosen": words.answer(), "rejected": words.answer()},
        lambda: {"chosen": [*chat, first], "rejected": [*chat, second]},
        lambda: {"conversations": chat, "chosen": first, "rejected": second},
        lambda: {"instruction": words(), "chosen": words.answer(), "rejected": words.answer()},
        lambda: transcripts(words),
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


def transcripts(words):
    """Return the columns of hh-rlhf."""
    asked = f"\n\nHuman: {words()}\n\nAssistant: {words()}\n\nHuman: {words()}\n\nAssistant: "
    return {"chosen": asked + words.answer(), "rejected": asked + words.answer()}


def number(words):
    """Return a number that no other text of the row contains."""
    words.count += 1
    return str(90_000 + words.count)


def rubric_row(words, rng):
    criterion = {"rubric_str": words(), "weight": 2.0, "grader_output_format_instruction": words()}
    examples = [{"answer": words(), "reply": f"{words()} <score>1</score>"}]
    items = [criterion, {"rubric_str": words(), "name": words(), "examples": examples}]
    return {rng.choice(["messages", "convo"]): question(words, rng), "rubric_items": items}


def problem_row(words, rng):
    return {"question": words(), "answer": f"{words.answer()}\n#### {number(words)}"}


def math_row(words, rng):
    if rng.random() < 0.5:
        return {"problem": words(), "solution": rf"{words.answer()} \boxed{{{number(words)}}}"}
    return {"problem": words(), "solution": words.answer(), "answer": number(words)}


def choices_row(words, rng):
    return {"question": words(), "choices": [words(), words(), words()], "answer": "B"}


def code_row(words, rng):
    row = {rng.choice(["question", "problem", "prompt"]): words(), "starter_code": words()}
    tests = [
        {"tests": [{"input": words(), "output": words()}]},
        {"tests": json.dumps([{"input": words(), "output": words(), "testtype": "stdin"}])},
        {"input_output": {"inputs": [words()], "outputs": [words()]}},
        {"test_list": [f"assert f({words()!r}) == {words()!r}"]},
        {"tests": [{"fn_name": "f", "input": [words()], "output": words(), "note": words()}]},
    ]
    row |= rng.choice(tests)
    if rng.random() < 0.3:
        row["public_tests"] = [{"input": words(), "output": words()}]
    return row


OPEN_END, NO_REASONING = "end without an answer", "answers have reasoning"
UNTRAINED = "messages holds nothing to train on"
OWN_ROWS = {
    "rubric": rubric_row,
    "gsm8k problems": problem_row,
    "gsm8k evaluation": problem_row,
    "math problems": math_row,
    "math evaluation": math_row,
    "choices": choices_row,
    "code": code_row,
}
"""The rows of readers that have columns of their own, by reader."""


def random_row(rng, reader):
    words = Words(rng)
    row = layout(words, rng)
    if rng.random() < 0.2:
        row = {**layout(words, rng), **row}
    if reader in OWN_ROWS and rng.random() < 0.9:
        row = {} if rng.random() < 0.7 else row
        row |= OWN_ROWS[reader](words, rng)
    others = {
        "system": lambda: words(),
        "system_prompt": lambda: words(),
        "tools": lambda: [
            {
                "type": "function",
                "function": {"name": "look", "description": words(), "parameters": {}},
            }
        ],
        "images": lambda: [words()],
        "image": lambda: words(),
        "video": lambda: words(),
        "functions": lambda: [{"name": words()}],
        "chat_template_kwargs": lambda: {"enable_thinking": words()},
        "weight": lambda: 0.5,
        "margin": lambda: 2.5,
        "history": lambda: [[words(), words()]],
        "source": lambda: words(),
        "extra_info": lambda: {"index": words()},
    }
    for name, value in others.items():
        if rng.random() < 0.1:
            row[name] = value()
    if rng.random() < 0.2:
        row["tools"] = json.dumps(row.get("tools", []))
    if rng.random() < 0.3:
        row |= {name: None for name in ("messages", "prompt", "images") if name not in row}
    if rng.random() < 0.15:
        add_unknown_key(row, words, rng)
    names = list(row)
    rng.shuffle(names)
    return {name: row[name] for name in names}


def add_unknown_key(row, words, rng):
    """Add a key that no reader knows to an object in a column, at any depth."""
    objects = [(name, each) for name, column in row.items() for each in objects_in(column)]
    if objects:
        name, chosen = rng.choice(objects)
        chosen["remark"] = words.answer() if name in ANSWER_COLUMNS else words()


def objects_in(value):
    values = list(value.values()) if isinstance(value, dict) else value
    found = [value] if isinstance(value, dict) else []
    nested = values if isinstance(values, list) else []
    return [*found, *(each for part in nested for each in objects_in(part))]


def leaves(value):
    """Return the words in a value; those of JSON text too."""
    if isinstance(value, str):
        if value[:1] in ("[", "{"):
            return leaves(json.loads(value))
        return WORD.findall(value)
    if isinstance(value, dict):
        return [leaf for key, each in value.items() if key not in FIXED for leaf in leaves(each)]
    if isinstance(value, list):
        return [leaf for each in value for leaf in leaves(each)]
    return []


FIXED = {"role", "from", "type", "name", "label", "fn_name", "testtype"}
"""Keys whose texts are not words of the row."""


def decoded(data, tokenizer):
    ids = [
        [*datum.model_input.to_ints(), *datum.loss_fn_inputs["target_tokens"].to_numpy()[-1:].flat]
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
    options = sl_loop.Config(max_length=10_000)
    sl_loop.check_data([example], renderer, options, "train")
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
    prompts = PromptsFromRows(dataset=place)().train
    return prompted(fitting_prompts(prompts, renderer, "train", None).problems[0], renderer)


def rewards(place, renderer):
    builder = RewardDatasetBuilder(
        dataset=place, reward=lambda *_: 0.0, model_name="tiny", batch_size=1, group_size=2
    )
    train, _ = asyncio.run(builder())
    env: Any = asyncio.run(train.get_batch(0)[0].make_envs())[0]
    prompt, _ = asyncio.run(env.initial_observation())
    return " ".join([renderer.tokenizer.decode(prompt.to_ints()), *leaves(env.row)])


def preference_model(kind):
    def read(place, renderer):
        train, _ = PreferenceDatasetBuilder(
            common_config=config(),
            comparison_builder=ComparisonBuilderFromRows(dataset=place),
            kind=kind,
        )()
        return decoded(train.get_batch(0), renderer.tokenizer)

    return read


def rubric(place, renderer):
    [row] = rows_of_dataset(place, test_size=0, seed=0).train
    check_prompt(row.messages, renderer, row.location)
    graded = " ".join(
        " ".join(str(message["content"]) for message in judge_prompt(row.messages, "", criterion))
        for criterion in row.criteria
    )
    return f"{prompted(row.messages, renderer)} {graded}"


def problems(name):
    def read(place, renderer):
        splits = load_splits(COLLECTIONS[name], place, eval_problems=0)
        return str(splits.train)

    return read


def evaluation(task):
    def read(place, renderer):
        [question] = load_task(task, place, split="train").questions
        return str(question)

    return read


def code(place, renderer):
    train: Any
    train, _ = asyncio.run(CodeDatasetBuilder(dataset=place, model_name="tiny", group_size=2)())
    return str(train.problems)


READERS = {
    "preference model": preference_model("chat"),
    "bradley_terry": preference_model("bradley_terry"),
    "rubric": rubric,
    "gsm8k problems": problems("gsm8k"),
    "math problems": problems("math"),
    "gsm8k evaluation": evaluation("gsm8k"),
    "math evaluation": evaluation("math500"),
    "choices": evaluation("multiple_choice"),
    "code": code,
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


def as_dataset(row):
    return hub.Dataset.from_list([row], on_mixed_types="use_json")


def write_csv(row, path):
    cells = {
        key: json.dumps(value) if isinstance(value, dict | list) else value
        for key, value in row.items()
    }
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(cells))
        writer.writeheader()
        writer.writerow(cells)


def write_pandas(row, path):
    try:
        pandas.DataFrame([row]).to_parquet(path)
    except ArrowException:  # mixed types in a column, or an empty object
        as_dataset(row).to_parquet(path)


WRITERS = {
    "a.jsonl": lambda row, path: path.write_text(json.dumps(row)),
    "b.json": lambda row, path: path.write_text(json.dumps([row])),
    "c.parquet": lambda row, path: as_dataset(row).to_parquet(path),
    "d.parquet": write_pandas,
    "e.csv": write_csv,
    "f.jsonl.gz": lambda row, path: path.write_bytes(gzip.compress(json.dumps(row).encode())),
    "g.jsonl": lambda row, path: as_dataset(row).to_json(path),
    "saved": lambda row, path: as_dataset(row).save_to_disk(path),
}
"""The ways in which a row is written, one after the other."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a function that returns the rows of a reader, with a file of each."""

    @cache
    def of(kind):
        rng, directory = random.Random(f"rows of {kind}"), tmp_path_factory.mktemp("rows")
        rows = [random_row(rng, kind) for _ in range(NUM_ROWS)]
        paths = [directory / f"{n}{list(WRITERS)[n % len(WRITERS)]}" for n in range(NUM_ROWS)]
        for row, path in zip(rows, paths, strict=True):
            WRITERS[path.name.lstrip("0123456789")](row, path)
        return list(zip(rows, map(str, paths), strict=True))

    return lambda name: of(name if name in OWN_ROWS else "layouts")


def keys_in(row):
    return {key for each in objects_in(row) for key in each}


def is_named(key, text):
    return re.search(rf"""["']{key}["'\\[]|fields {key};""", text) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_each_column_is_used_refused_or_named(name, files, renderer, caplog):
    num_read = 0
    for row, place in files(name):
        caplog.clear()
        text, error = read(name, place, renderer)
        if error is not None:
            assert place in error
            named = any(is_named(key, error) for key in keys_in(row))
            assert named or UNTRAINED in error or "needs" in error, (row, error)
            continue
        num_read += 1
        for key, value in row.items():
            lost = [word for word in leaves(value) if word not in text]
            if name in SHOW_NO_ANSWERS and key in ANSWER_COLUMNS:
                lost = [word for word in lost if not word.startswith("answer")]
            if key in ("weight", "margin"):
                assert name == "rewards" or is_named(key, caplog.text), (row, key)
            if OPEN_END in caplog.text and key in ("messages", "conversations"):
                continue
            if NO_REASONING in caplog.text and key in (
                "chosen",
                "rejected",
                "preferred_output",
                "non_preferred_output",
                "comparison",
            ):
                continue
            assert not lost or is_named(key, caplog.text), (row, key, lost, text, place)
        if name in PROMPTS:
            assert "answerw" not in text, row
    assert num_read > NUM_ROWS / 10
