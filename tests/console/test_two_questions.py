"""The two questions of docs/guide/console.md, answered on two real runs by the clicks that the page
describes.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from counting_runs import train_two_runs
from http_thread import serving_app
from watched_page import CHROMIUM, panel

from planish.console.answers import Answers
from planish.console.app import create_app
from planish.console.catalog import Catalog

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH"),
]
playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright_api.expect
expect.set_options(timeout=60_000)
PAGE = Path(__file__).parents[2] / "docs/guide/console.md"
REWARD = "env/all/reward/total"


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    runs = tmp_path_factory.mktemp("two") / "runs"
    train_two_runs(runs, 80)
    with serving_app(create_app(Answers(Catalog([runs])))) as address:
        yield address


def clicks_of(title: str) -> set[str]:
    """Return the names of the controls in a section of the page; they are in italics."""
    section = PAGE.read_text().partition(f"### {title}\n")[2].partition("\n##")[0]
    assert section, title
    return {name.replace("\n   ", " ") for name in re.findall(r"(?<!\*)\*([^*]+)\*", section)}


def test_why_the_reward_stopped_rising(page, url):
    clicked = set()

    def click(name: str, place=page) -> None:
        place.get_by_role("link", name=name, exact=True).first.click()
        clicked.add(name)

    page.goto(url)
    page.get_by_role("link", name="runs/short", exact=True).first.click()
    expect(panel(page, REWARD).locator(".readout")).to_contain_text("last, step 79")
    click("What is wrong")
    finding = page.locator(".finding", has_text="The reward has not risen since step")
    expect(finding).to_contain_text("of the answers are cut off")
    click("Its rollouts", finding)
    endings = page.locator("tbody tr td:nth-child(7)")
    expect(endings.first).to_have_text("max_tokens")
    page.locator("tbody tr a").first.click()
    expect(page.locator(".rollout").first).to_contain_text("of 12 odd characters")
    expect(page.locator(".rollout").first).to_contain_text("8 tokens")
    click("Same question at all steps")
    expect(page.locator("tbody tr").first).to_contain_text("Question")
    assert clicked == clicks_of("Why did the reward stop rising?")


def test_which_of_two_runs_is_better(page, url):
    clicked = set()

    def click(role: str, name: str) -> None:
        page.get_by_role(role, name=name, exact=True).first.click()
        clicked.add(name)

    page.goto(url)
    for run in ("runs/short", "runs/long"):
        page.get_by_label(f"choose {run}").check()
    click("link", "Compare 2 runs")
    expect(page.locator("details.card")).to_contain_text("1 option differs")
    expect(page.locator("details.card tbody td")).to_have_text(["max_tokens", "8", "16"])
    values = panel(page, "test/env/all/correct").locator(".readout .value")
    expect(values).to_have_count(2)
    short, long = (float(text.split()[-1]) for text in values.all_inner_texts())
    assert short < long
    click("link", "Evaluations")
    expect(page.locator("h3")).to_contain_text("runs/long is better at 4 and worse at 0 of 4")
    expect(page.locator("main")).to_contain_text("standard error")
    page.go_back()
    with page.expect_download():
        click("link", "Save as one file")
    assert clicked == clicks_of("Which of two runs is better, and where do they differ?")
