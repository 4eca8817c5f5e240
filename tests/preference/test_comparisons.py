"""Comparisons in their published forms."""

import pytest

from planish.errors import UserError
from planish.preference.types import Comparison, LabeledComparison, read_comparison

PROMPT = [{"role": "user", "content": "Hello."}]
GOOD = [{"role": "assistant", "content": "Good day."}]
BAD = [{"role": "assistant", "content": "What?"}]
EXPECTED = LabeledComparison(Comparison(PROMPT, GOOD, BAD), "A")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hello.", "chosen": "Good day.", "rejected": "What?", "score": 1},
        {"prompt": PROMPT, "chosen": GOOD, "rejected": BAD},
        {"chosen": [*PROMPT, *GOOD], "rejected": [*PROMPT, *BAD]},
        {"prompt": "Hello.", "chosen": [*PROMPT, *GOOD], "rejected": [*PROMPT, *BAD]},
        {
            "comparison": {
                "prompt_conversation": PROMPT,
                "completion_A": GOOD,
                "completion_B": BAD,
            },
            "label": "A",
        },
    ],
)
def test_each_row_format_gives_the_comparison(row):
    assert read_comparison(row, "here") == EXPECTED


def test_swapping_changes_positions_but_not_the_preference():
    swapped = EXPECTED.swap()
    assert (swapped.label, swapped.comparison.completion_B) == ("B", GOOD)
    assert swapped.ranked == EXPECTED.ranked == (GOOD, BAD)
    assert swapped.swap() == EXPECTED
    tie = LabeledComparison(EXPECTED.comparison, "Tie")
    assert tie.ranked is None
    assert tie.swap().label == "Tie"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, r"row 3: the row has \['prompt'\]"),
        ({"chosen": "a", "rejected": "b"}, 'no "prompt"'),
        ({"prompt": "x", "chosen": 1, "rejected": "b"}, '"chosen": give a text'),
        (
            {"chosen": [*PROMPT, *GOOD], "rejected": [{"role": "user", "content": "Other."}, *BAD]},
            "differ before",
        ),
        ({"comparison": {"completion_A": GOOD}, "label": "A"}, "prompt_conversation"),
        ({"comparison": {}, "label": "C"}, "label is 'C'"),
    ],
)
def test_an_invalid_comparison_is_rejected_with_its_location(row, message):
    with pytest.raises(UserError, match=message):
        read_comparison(row, "row 3")
