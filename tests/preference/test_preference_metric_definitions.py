"""Each metric has one definition, and the page shows it."""

import re

import pytest

from planish.metric_definition import with_table
from planish.preference.metric_definitions import BEGIN, END, PAGE, PAIRS, definition_of


@pytest.mark.parametrize("metric", PAIRS.metrics, ids=lambda metric: metric.pattern)
def test_no_pattern_hides_behind_an_earlier_one(metric):
    assert definition_of(re.sub(r"<\w+>", "something", metric.pattern)) is metric


def test_the_page_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, (PAIRS,), BEGIN, END) == page, (
        "run: python -m planish.preference.metric_definitions"
    )
