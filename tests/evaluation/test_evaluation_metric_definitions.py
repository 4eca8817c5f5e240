"""Each metric has one definition, and the page shows it."""

import re

import pytest

from planish.evaluation.metric_definitions import BEGIN, END, PAGE, SECTIONS, definition_of
from planish.metric_definition import with_table

DEFINITIONS = [metric for section in SECTIONS for metric in section.metrics]


@pytest.mark.parametrize("metric", DEFINITIONS, ids=lambda metric: metric.pattern)
def test_no_pattern_hides_behind_an_earlier_one(metric):
    assert definition_of(re.sub(r"<\w+>", "something", metric.pattern)) is metric


def test_the_page_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, SECTIONS, BEGIN, END) == page, (
        "run: python -m planish.evaluation.metric_definitions"
    )


def test_what_is_no_metric_has_no_definition():
    assert definition_of("eval/gsm8k/reward") is None
