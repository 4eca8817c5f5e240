# pyright: reportMissingImports=false
"""Files that TRL's functions and trainers have written are read as TRL means them. Needs TRL
(`make test-extras`); skipped without it.
"""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from planish.datasets.layouts import comparison_of, conversation_of, prompt_of
from planish.datasets.rows import open_rows
from planish.errors import UserError
from planish.supervised.datasets import FromRowsBuilder
from planish.supervised.types import ChatDatasetBuilderCommonConfig
from planish.testing import tiny_model

trl = pytest.importorskip("trl", reason="make test-extras runs it")
data_utils = pytest.importorskip("trl.data_utils")

# TRL, Accelerate and torch warn of each other's newer versions.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
GOOD, BAD = [{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "5"}]
PAIRS = [
    {"chosen": [*QUESTION, *GOOD], "rejected": [*QUESTION, *BAD]},
    {"chosen": [QUESTION[1], *GOOD], "rejected": [QUESTION[1], *BAD]},
]


def rows_of(dataset: Any, path: Path) -> Any:
    """Return the rows of a dataset that was written to a file."""
    dataset.to_parquet(path) if path.suffix == ".parquet" else dataset.to_json(path)
    return open_rows(str(path), "train")


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_pairs_whose_prompt_trl_has_extracted(tmp_path, suffix):
    whole = Dataset.from_list(PAIRS)
    extracted = whole.map(data_utils.maybe_extract_prompt)
    assert "prompt" in extracted.column_names
    pairs = [
        [comparison_of(row, row.location) for row in rows_of(each, tmp_path / f"{name}{suffix}")]
        for name, each in (("whole", whole), ("extracted", extracted))
    ]
    assert pairs[0] == pairs[1]
    assert [pair.prompt for pair in pairs[0]] == [QUESTION, QUESTION[1:]]
    assert pairs[0][0].first == GOOD


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_pairs_that_trl_has_taken_apart(tmp_path, suffix):
    """Good completions are trained, and bad ones are errors."""
    pairs = Dataset.from_list(PAIRS).map(data_utils.maybe_extract_prompt)
    rows = rows_of(data_utils.unpair_preference_dataset(pairs), tmp_path / f"kto{suffix}")
    labels = [row["label"] for row in rows]
    assert sorted(labels) == [False, False, True, True]
    for row in rows:
        if row["label"]:
            conversation: Any = conversation_of(row, row.location)
            assert [each["content"] for each in conversation[-2:]] == ["2 + 2?", "4"]
            assert [each.get("weight") for each in conversation][-2:] == [0, None]
        else:
            with pytest.raises(UserError, match='the column "label" is false'):
                conversation_of(row, row.location)


def test_a_sharegpt_row_is_the_row_that_trl_converts_it_to(tmp_path):
    messages = [{"from": "user", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
    given = Dataset.from_list([{"conversations": messages}])
    converted = given.map(data_utils.maybe_convert_to_chatml)
    for name, dataset in (("given", given), ("converted", converted)):
        [row] = rows_of(dataset, tmp_path / f"{name}.parquet")
        conversation: Any = conversation_of(row, row.location)
        assert [each["content"] for each in conversation] == ["2 + 2?", "4"]


@pytest.mark.parametrize("form", ["messages", "text"])
def test_the_completions_that_grpo_logs_are_conversations(tmp_path, form, caplog):
    """A run of TRL's trainer writes prompts, completions, rewards and advantages."""
    base = tiny_model(tmp_path / "base")
    question = QUESTION if form == "messages" else "2 + 2?"
    options = trl.GRPOConfig(
        output_dir=str(tmp_path / "out"),
        max_steps=1,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=4,
        log_completions=True,
        logging_steps=1,
        num_completions_to_print=0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        seed=1,
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(base),
        reward_funcs=[lambda completions, **_: [0.5 * n for n in range(len(completions))]],
        args=options,
        train_dataset=Dataset.from_list([{"prompt": question, "source": "a"}] * 4),
        processing_class=AutoTokenizer.from_pretrained(base, padding_side="left"),
    )
    trainer.train()
    [path] = sorted((tmp_path / "out" / "completions").glob("*.parquet"))
    rows = open_rows(str(path), "train")
    assert len(rows) == 2
    for row in rows:
        conversation: Any = conversation_of(row, row.location)
        prompt: Any = QUESTION if form == "messages" else [{"role": "user", "content": "2 + 2?"}]
        assert [(each["role"], each["content"]) for each in conversation[:-1]] == [
            (each["role"], each["content"]) for each in prompt
        ]
        assert conversation[-1]["role"] == "assistant"
        assert prompt_of(row, row.location) == prompt
    common = ChatDatasetBuilderCommonConfig(model_name_for_tokenizer=str(base), batch_size=1)
    FromRowsBuilder(common_config=common, dataset=str(path), test_size=0)()
    for name in ("step", "advantage"):
        assert f'"{name}" (2 rows, first in {path}, row 1)' in caplog.text
