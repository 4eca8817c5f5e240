"""Prompts from rows of many forms."""

import json

import pytest

from planish.errors import UserError
from planish.preference.datasets import ComparisonBuilderFromJsonl
from planish.preference.prompts import PromptsFromRows, PromptsOfComparisons, fitting_prompts

ASKED = [{"role": "user", "content": "Hello?"}]


def test_prompts_are_read_from_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(10)))
    prompts = PromptsFromRows(dataset=str(path), test_size=3)()
    assert (len(prompts.train), len(prompts.test)) == (7, 3)
    assert {p[0]["content"] for p in [*prompts.train, *prompts.test]} == {
        f"Say {n}." for n in range(10)
    }


def test_held_out_rows_keep_their_numbers(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [*[{"prompt": "a"}] * 9, {"text": "a"}])
    )
    with pytest.raises(UserError, match="line 10: the row has"):
        PromptsFromRows(dataset=str(path), test_size=4)()


def test_a_prompt_of_several_comparisons_is_used_once(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"Say {n % 3}.", "chosen": "a", "rejected": "b"} for n in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    comparisons = ComparisonBuilderFromJsonl(train_path=str(path))
    prompts = PromptsOfComparisons(comparison_builder=comparisons)()
    assert ([p[0]["content"] for p in prompts.train], prompts.test) == (
        ["Say 0.", "Say 1.", "Say 2."],
        [],
    )
    kept = PromptsOfComparisons(comparison_builder=comparisons, keep_repeated=True)()
    assert len(kept.train) == 9


def test_unrenderable_prompts_are_rejected_before_sampling(renderer):
    odd = [{"role": "wizard", "content": "Abracadabra"}]
    with pytest.raises(UserError, match="test prompt 2"):
        fitting_prompts([ASKED, odd], renderer, "test", None)
