"""The console in a real browser: what a person sees, clicks and types."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from digit_env import DigitsBuilder
from http_thread import serving_app
from rollout_samples import NASTY, group, single, spoken
from sample_runs import reward_curve, rl_metrics, write_index, write_run
from test_eval_directories import write_evaluation
from watched_page import CHROMIUM, PACKAGES, Watched, panel, serious_faults

from planish import ServiceClient
from planish.console.actions import Actions
from planish.console.answers import Answers
from planish.console.app import create_app
from planish.console.catalog import Catalog
from planish.console.web import STATIC
from planish.files import RowFile, read_rows
from planish.processes.interruption import run_coroutine
from planish.reports.rollout_records import TrainedTokens
from planish.rl.types import RolloutError
from planish.runlog.run_directory import request_stop
from planish.testing import tiny_model
from planish.training.rl_config import Config
from planish.training.train_rl import main

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH"),
]
playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright_api.expect
expect.set_options(timeout=60_000)
# Answers of a random model are sampled without a seed, and may end before the limit.
ENDING = re.compile(r"[1-8] tokens, ended: (length|stop)")
FIRST, SECOND = "runs/first", "runs/second"
VIEWS = ("", "curves", "rollouts", "evaluations", "checkpoints", "findings", "options", "chat")


def cut_off_after_40(step: int, num_steps: int) -> dict[str, float]:
    late = step >= 40
    return rl_metrics(step, num_steps, **{"env/all/stop/max_tokens": 0.4 if late else 0.02})


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokenizer) -> Path:
    root = tmp_path_factory.mktemp("served") / "runs"
    write_run(root / "first", tokenizer, steps=80, eval_every=20, metrics=cut_off_after_40)
    write_run(
        root / "second",
        steps=60,
        num_steps=80,
        is_final=False,
        learning_rate=3e-4,
        metrics=lambda step, total: rl_metrics(
            step, total, **{"env/all/reward/total": reward_curve(step, 20)}
        ),
    )
    return root


@pytest.fixture(scope="module")
def url(runs) -> Iterator[str]:
    with serving_app(create_app(Answers(Catalog([runs])))) as address:
        yield address


@pytest.fixture
def own(tmp_path, page) -> Iterator[tuple[Any, str, Path]]:
    """A page, the address of a console of the test's own directory, and this directory."""
    root = tmp_path / "own"
    root.mkdir()
    with serving_app(create_app(Answers(Catalog([root])))) as address:
        yield page, address, root
        page.goto("about:blank")


REWARD = "env/all/reward/total"


def test_the_curve_grows_while_a_run_trains(own):
    page, url, root = own
    write_run(root / "a", steps=3, num_steps=9, checkpoint_at=0)
    page.goto(f"{url}/curves?run=own/a")
    readout = panel(page, REWARD).locator(".readout")
    expect(readout).to_contain_text("last, step 2")
    with open(root / "a/metrics.jsonl", "ab") as file:
        row = {"step": 3, **rl_metrics(3, 9, **{REWARD: 0.625})}
        file.write(json.dumps(row).encode() + b"\n")
    expect(readout).to_contain_text("last, step 3")
    expect(readout).to_contain_text("0.625")
    file = RowFile(root / "a/metrics.jsonl")
    file.keep(lambda row: row["step"] < 1)
    file.close()
    expect(readout).to_contain_text("last, step 0")


def test_the_six_metrics_to_watch_come_first_and_others_by_search(page, url):
    page.goto(f"{url}/curves?run={FIRST}")
    expect(page.locator(".panel")).to_have_count(6)
    page.get_by_label("add a metric").fill("grad_norm")
    page.keyboard.press("Enter")
    expect(panel(page, "optim/grad_norm").locator("canvas")).to_be_visible()
    expect(page.locator(".panel")).to_have_count(7)
    page.reload()
    expect(page.locator(".panel")).to_have_count(7)


def test_a_click_on_a_point_opens_the_rollouts_of_its_step(page, url):
    page.goto(f"{url}/curves?run={FIRST}")
    chart = panel(page, REWARD)
    plot = chart.locator(".u-over")
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] / 2, "y": box["height"] / 2})
    text = chart.locator(".readout").inner_text()
    step = text.split("step ")[1].split()[0]
    assert 35 <= int(step) <= 45
    plot.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
    expect(page.locator("h1")).to_contain_text("8 of 672 rollouts" if step != "40" else "16 of 672")
    expect(page.locator("tbody tr").first.locator("td").first).to_have_text(step)


def test_a_drag_zooms_all_charts_and_a_key_shows_all(page, url):
    page.goto(f"{url}/curves?run={FIRST}")
    plot = panel(page, REWARD).locator(".u-over")
    box = plot.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.25, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, y, steps=5)
    page.mouse.up()
    expect(page.get_by_role("button", name="Reset zoom")).to_be_enabled()
    assert "from=" in page.url
    other = panel(page, "optim/entropy").locator(".u-over")
    width = other.bounding_box()["width"]
    other.hover(position={"x": width - 3, "y": 20})
    step = (
        panel(page, "optim/entropy").locator(".readout").inner_text().split("step ")[1].split()[0]
    )
    assert int(step) <= 42
    page.keyboard.press("0")
    expect(page.get_by_role("button", name="Reset zoom")).to_be_disabled()


def test_the_keyboard_alone_reaches_the_rollouts_of_a_step(page, url):
    page.goto(f"{url}/curves?run={FIRST}")
    chart = panel(page, REWARD)
    expect(chart.locator("canvas")).to_be_visible()
    chart.locator(".plot").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(chart.locator(".readout")).to_contain_text("step 78")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr").first.locator("td").first).to_have_text("78")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Step 78, group 0")
    page.keyboard.press("n")
    expect(page.locator("h1")).to_have_text("Step 78, group 1")
    page.keyboard.press("g")
    page.keyboard.press("w")
    expect(page.locator("h1")).to_have_text("What is wrong")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_filters_and_the_histogram_narrow_the_rollouts(page, url):
    page.goto(f"{url}/rollouts?run={FIRST}&split=train")
    expect(page.locator("h1")).to_have_text("640 of 672 rollouts")
    page.get_by_label("Reward to").fill("0.1")
    wrong = page.locator(".histogram-bar").first.locator(".count")
    expect(page.locator("h1")).not_to_have_text("640 of 672 rollouts")
    count = wrong.inner_text()
    expect(page.locator("h1")).to_have_text(f"{count} of 672 rollouts")
    assert set(page.locator(".pill").all_inner_texts()) == {"0"}
    page.get_by_label("search texts").fill("it is 10")
    expect(page.locator("tbody tr").first).to_contain_text("What is 1 + 2?")
    page.get_by_role("button", name="Clear filters").click()
    expect(page.locator("h1")).to_have_text("672 of 672 rollouts")
    page.locator(".histogram-bar").last.click()
    expect(page.locator(".histogram-bar").last).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".pill").first).to_have_text("1")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    expect(page.locator(".histogram-bar").last).to_have_attribute("aria-pressed", "true")


def test_a_group_shows_its_answers_and_a_token_its_logprob(page, url, runs):
    page.goto(f"{url}/group?run={FIRST}&split=train&step=12&group=1")
    expect(page.locator(".rollout")).to_have_count(4)
    expect(page.locator(".question-card")).to_contain_text("What is 1 + 2?")
    tokens = page.locator(".rollout").first.locator(".answer > span")
    expect(tokens.nth(3)).to_have_class("q0")
    tokens.nth(3).hover()
    texts = (runs / "first/train_iteration_000012_rollouts.jsonl").read_text().splitlines()
    row = next(row for row in map(json.loads, texts) if row["group_idx"] == 1)
    [turn] = row["turns"]
    tip = page.locator("#tip")
    expect(tip).to_contain_text(f"logprob{turn['logprobs'][3]}")
    expect(tip).to_contain_text(f"token{turn['answer_ids'][3]}")
    page.get_by_label("colours of tokens").select_option("advantage")
    assert row["advantage"] == 0.5
    expect(tokens.nth(3)).to_have_class("up1")
    page.get_by_label("colours of tokens").select_option("mask")
    expect(tokens.nth(3)).to_have_class("trained")
    assert "colours=mask" in page.url


def test_tokens_are_coloured_by_the_gap_and_by_the_loss_mask(own, tokenizer):
    page, url, root = own
    answers = [group(0, [single("q", "yes", 1.0), single("q", "\u00e9\u00e9", 0.0)])]
    gaps = np.array([0.0, 5e-4, 5e-3, 5e-2, 0.0], np.float32)
    trained = {
        (0, number): TrainedTokens(
            np.full(count, 0.5, np.float32),
            np.array(spoken("yes!"[: count - 1]).logprobs, np.float32) + gaps[:count],
        )
        for number, count in ((0, 4), (1, 5))
    }
    write_run(
        root / "a", tokenizer, steps=1, eval_every=1, rollouts=lambda _: answers, trained=trained
    )
    address = f"{url}/group?run=own/a&step=0&group=0"
    page.goto(f"{address}&split=train&colours=gap")
    tokens = page.locator(".rollout").first.locator(".answer > span")
    for index, name in enumerate(("nogap", "gap1", "gap2", "gap3 control")):
        expect(tokens.nth(index)).to_have_class(re.compile(name.split()[0]))
    tokens.nth(1).hover()
    expect(page.locator("#tip")).to_contain_text("trainer − sampler5.00e-4")
    expect(page.locator("#tip")).to_contain_text("advantage+0.5")
    # Two tokens make one character, which has the colour of the larger gap.
    characters = page.locator(".rollout").last.locator(".answer > span")
    expect(characters.nth(0)).to_have_class("gap1")
    expect(characters.nth(1)).to_have_class("gap3")
    characters.nth(0).hover()
    expect(page.locator("#tip")).to_contain_text("2 tokens make this character")
    page.goto(f"{address}&split=train&colours=mask")
    expect(tokens.first).to_have_class("trained")
    page.goto(f"{address}&split=eval/test&colours=mask")
    expect(tokens.first).to_have_class("untrained")
    tokens.first.hover()
    expect(page.locator("#tip")).to_contain_text("not trained on")


def test_two_runs_are_compared(page, url):
    page.goto(url)
    page.get_by_label(f"choose {FIRST}").check()
    page.get_by_label(f"choose {SECOND}").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    expect(page.locator("details.card")).to_contain_text("1 option differs")
    expect(page.locator("details.card tbody td")).to_have_text(
        ["learning_rate", "0.0001", "0.0003"]
    )
    values = panel(page, REWARD).locator(".readout .value")
    expect(values).to_have_count(2)
    # The second run has ended earlier, so its value has its own step.
    expect(values.first).not_to_contain_text("step")
    expect(values.last).to_contain_text("step 59: ")
    page.get_by_label(f"remove {SECOND}").click()
    expect(panel(page, REWARD).locator(".readout .value")).to_have_count(1)


def test_why_the_reward_stopped_rising_takes_three_clicks(page, url):
    page.goto(url)
    page.get_by_role("link", name=FIRST).first.click()
    page.get_by_role("link", name="What is wrong").click()
    finding = page.locator(".finding", has_text="The reward has not risen since step 40")
    expect(finding).to_contain_text("40% of the answers are cut off")
    finding.get_by_role("link", name="Its rollouts").click()
    expect(page.locator("tbody tr").first.locator(".pill")).to_have_text("0")
    assert "step_from=40" in page.url


def test_text_of_a_model_stays_text_in_every_field(own, tokenizer, tmp_path):
    page, url, root = own
    script = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    rollouts = [
        group(
            0,
            [single(script + NASTY, script + NASTY, reward) for reward in (0.0, 1.0)],
            tags=[script],
            metrics=[{script: 1.0}, {script: 2.0}],
            errors=[RolloutError(script, script)],
        )
    ]
    write_run(
        root / "a&b <i>",
        tokenizer,
        steps=3,
        eval_every=2,
        rollouts=lambda step: rollouts,
        metrics=lambda step, total: rl_metrics(step, total, **{script: 1.0}),
        model_name=script,
        recipe_name=script,
        dataset_builder={script: script},
    )
    run = "own/a%26b%20%3Ci%3E"
    for view in (*VIEWS[1:], "group"):
        page.goto(f"{url}/{view}?run={run}&split=train&step=0&group=0&metric={script}")
        expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")
        expect(page.locator(".run-chip")).to_have_text("own/a&b <i>")
        assert page.locator("main script, main img, main i:not(.histogram i)").count() == 0, view
        assert "owned" not in page.title()
    expect(page.locator(".answer").first).to_contain_text("<script>document.title")
    page.goto(url)
    expect(page.locator("tbody tr").first).to_contain_text("a&b <i>")
    page.locator("tbody tr").first.click()
    expect(page.locator(".run-chip")).to_have_text("own/a&b <i>")
    saved = saved_file(url, "own/a&b <i>", tmp_path / "saved.html").as_uri()
    for view in ("rollouts", "group", "options", "curves"):
        page.goto(f"{saved}#/{view}?run={run}&split=train&step=0&group=0")
        expect(page.locator(".run-chip")).to_have_text("own/a&b <i>")
        expect(page.locator("main :is(h1, canvas)").first).to_be_visible()
        assert page.locator("main script, main img, main i:not(.histogram i)").count() == 0, view
        assert "owned" not in page.title()


def test_damaged_files_have_a_message_in_place(own, tokenizer):
    page, url, root = own
    run = write_run(root / "a", tokenizer, steps=3)
    (run / "train_iteration_000001_rollouts.jsonl").write_text("gone\n")
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b"damaged\n")
    page.goto(f"{url}/curves?run=own/a")
    page.locator(".problems summary").click()
    expect(page.locator(".problems")).to_contain_text("metrics.jsonl, line 4 is not a JSON object")
    expect(panel(page, REWARD).locator(".readout")).to_contain_text("last, step 2")
    page.goto(f"{url}/group?run=own/a&split=train&step=1&group=0")
    expect(page.locator(".rollout").first).to_contain_text("another rollout at this place")
    expect(page.locator(".rollout").first).to_contain_text("tokens")


def test_empty_states_say_what_is_missing(own):
    page, url, root = own
    page.goto(url)
    expect(page.locator(".notice")).to_contain_text("There are no runs here yet.")
    (root / "a").mkdir()
    (root / "a/metrics.jsonl").touch()
    expect(page.get_by_role("link", name="own/a")).to_be_visible()
    for view, words in (
        ("rollouts", "no rollouts yet"),
        ("evaluations", "no evaluations"),
        ("checkpoints", "no checkpoint yet"),
        ("findings", "too early to tell"),
    ):
        page.goto(f"{url}/{view}?run=own/a")
        expect(page.locator("main")).to_contain_text(words)
    page.goto(f"{url}/curves")
    expect(page.locator("main")).to_contain_text("No run is chosen.")


def test_a_missing_run_has_a_message(browser, url):
    found = Watched(browser)
    found.page.goto(f"{url}/curves?run=nobody")
    expect(found.page.locator(".notice")).to_contain_text("there is no run 'nobody'")
    found.errors.clear()  # the browser logs the status 404
    found.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_has_serious_faults_of_accessibility(browser, url, scheme):
    if not (PACKAGES / "axe-core/axe.min.js").is_file():
        pytest.skip("npm has not installed axe-core here")
    found = Watched(browser, color_scheme=scheme, bypass_csp=True)
    for view in (*VIEWS, "group"):
        found.page.goto(f"{url}/{view}?run={FIRST}&split=train&step=12&group=1" if view else url)
        expect(found.page.locator("main")).not_to_have_attribute("aria-busy", "true")
        expect(found.page.locator("main :is(h1, canvas, .notice)").first).to_be_visible()
        assert serious_faults(found.page) == [], view
    found.close()


def test_every_view_fits_a_phone(browser, url):
    found = Watched(browser, viewport={"width": 390, "height": 844}, has_touch=True)
    for view in (*VIEWS, "group"):
        found.page.goto(f"{url}/{view}?run={FIRST}&split=train&step=12&group=1" if view else url)
        expect(found.page.locator("main :is(h1, canvas, .notice)").first).to_be_visible()
        assert found.page.evaluate("document.documentElement.scrollWidth") <= 390, view
    found.page.goto(f"{url}/evaluations?run={FIRST}&run={SECOND}")
    expect(found.page.locator("h1")).to_have_text("Evaluations of 2 runs")
    assert found.page.evaluate("document.documentElement.scrollWidth") <= 390
    found.close()


def test_the_saved_file_opens_without_the_console(own, tokenizer, browser, tmp_path):
    page, url, root = own
    write_run(root / "a", tokenizer, steps=12, eval_every=4, metrics=cut_off_after_40)
    write_run(root / "b", steps=8, learning_rate=1.0)
    page.goto(f"{url}/curves?run=own/a&run=own/b")
    with page.expect_download() as download:
        page.get_by_role("link", name="Save as one file").click()
    saved = tmp_path / "saved.html"
    download.value.save_as(saved)
    found = Watched(browser)
    found.page.goto(saved.as_uri())
    expect(panel(found.page, REWARD).locator(".readout .value")).to_have_count(2)
    expect(found.page.locator("details.card")).to_contain_text("learning_rate")
    found.page.get_by_label("add a metric").fill("grad_norm")
    found.page.keyboard.press("Enter")
    expect(panel(found.page, "optim/grad_norm").locator("canvas")).to_be_visible()
    for name, words in (
        ("Evaluations", "eval/test"),
        ("Checkpoints", "tinker://abc:train:0/weights/final"),
        ("What is wrong", "What is wrong"),
        ("Options", "learning_rate"),
    ):
        found.page.get_by_role("link", name=name).click()
        expect(found.page.locator("main")).to_contain_text(words)
    found.close()
    assert [each for each in found.requests if not each.startswith(("file:", "data:"))] == []


def saved_file(url: str, run: str, path: Path) -> Path:
    """Save the page with a run as one file."""
    response = httpx2.get(f"{url}/export", params={"run": run}, timeout=60)
    assert response.status_code == 200
    path.write_bytes(response.content)
    return path


def test_the_saved_file_has_the_rollouts(browser, url, tmp_path):
    found = Watched(browser)
    page = found.page
    page.goto(saved_file(url, FIRST, tmp_path / "saved.html").as_uri())
    page.get_by_role("link", name="Rollouts").click()
    expect(page.locator("h1")).to_have_text("400 of 400 rollouts")
    expect(page.locator("main")).to_contain_text(
        "This file contains 400 of the run's 672 rollouts: whole groups, spread evenly over its steps."
    )
    page.get_by_label("Kind").select_option("train")
    page.get_by_label("search texts").fill("IT IS 10")
    expect(page.locator("tbody tr").first).to_contain_text("What is 1 + 2?")
    page.get_by_label("Reward to").fill("0.1")
    expect(page.locator(".pill").first).to_have_text("0")
    page.get_by_role("button", name="Clear filters").click()
    expect(page.locator("h1")).to_have_text("400 of 400 rollouts")
    page.locator(".histogram-bar").last.click()
    expect(page.locator(".pill").first).to_have_text("1")
    page.get_by_label("order").select_option("-step")
    expect(page.locator("tbody tr td").first).to_have_text("79")
    page.get_by_role("button", name="Next").click()
    expect(page.locator("main")).to_contain_text("101 to")
    page.locator("tbody tr").first.locator("a").click()
    expect(page.locator(".rollout")).to_have_count(4)
    expect(page.locator(".answer > span.q0").first).to_be_visible()
    expect(page.locator("main")).to_contain_text("planish replay")
    page.get_by_role("link", name="Same question at all steps").click()
    expect(page.locator("tbody tr")).to_have_count(100)
    page.get_by_role("link", name="What is wrong").click()
    page.get_by_role("link", name="Its rollouts").first.click()
    expect(page.locator("tbody tr").first.locator(".pill")).to_have_text("0")
    page.goto(page.url.partition("#")[0] + f"#/group?run={FIRST}&split=train&step=1&group=7")
    expect(page.locator(".notice")).to_contain_text("This file contains some groups of each run")
    found.close()
    assert [each for each in found.requests if not each.startswith(("file:", "data:"))] == []


def test_a_run_of_100_000_rows_is_drawn(own):
    page, url, root = own
    (root / "long").mkdir()
    with open(root / "long/metrics.jsonl", "w") as file:
        for step in range(100_000):
            file.write(json.dumps({"step": step, **rl_metrics(step, 100_000)}) + "\n")
    page.goto(f"{url}/curves?run=own/long")
    expect(panel(page, REWARD).locator(".readout")).to_contain_text("last, step 99999")


def test_a_run_of_3_000_rollouts_is_listed_page_by_page(own):
    page, url, root = own
    write_run(root / "a", steps=3)
    write_index(root / "a", 75, 10, 4)
    page.goto(f"{url}/rollouts?run=own/a")
    expect(page.locator("h1")).to_have_text("3000 of 3000 rollouts")
    expect(page.locator("tbody tr")).to_have_count(100)
    page.locator(".histogram-bar").first.click()
    expect(page.locator("h1")).to_have_text("1500 of 3000 rollouts")
    page.get_by_role("button", name="Next").click()
    expect(page.locator("main")).to_contain_text("101 to 200 of 1500")


# Faults that users of other dashboards have reported: mlflow 1830 and 9425 (names with special
# characters), mlflow 2773 (one point), trackio 395 (chosen runs shift), Inspect 1375 and 1388 (long
# texts), mlflow 14297 (an axis without data). Others are tested where they belong: NaN (aim 2199) in
# test_advice.py, the steps of runs that differ in length (wandb 6007) above, repeated steps after a
# resume (tensorboard 3732) and many points (mlflow 11444) in test_metric_table.py.


def test_a_metric_may_have_any_name_and_a_single_point(own, browser, tmp_path):
    page, url, root = own
    name = "val/MAP@k[delta=1.3] ~&=#%+;?'\"é"
    write_run(root / "a", steps=1, metrics=lambda step, total: {name: 0.5})
    page.goto(f"{url}/curves?run=own/a")
    page.get_by_label("add a metric").fill(name)
    page.keyboard.press("Enter")
    readout = page.locator(".panel .readout")
    expect(readout).to_contain_text("last, step 0")
    expect(page.locator(".panel h2")).to_have_text(name)
    page.reload()
    expect(readout).to_contain_text("0.5")
    page.get_by_label("horizontal axis").select_option("time")
    expect(page.locator(".panel .empty")).to_contain_text("no time/total in the run")
    page.goto(saved_file(url, "own/a", tmp_path / "saved.html").as_uri())
    page.get_by_label("add a metric").fill(name)
    page.keyboard.press("Enter")
    expect(readout).to_contain_text("0.5")


def test_chosen_runs_stay_chosen_when_a_new_run_appears(own):
    page, url, root = own
    for name in ("b", "c"):
        write_run(root / name, steps=2)
    page.goto(url)
    page.get_by_label("choose own/b").check()
    write_run(root / "a", steps=2)
    expect(page.locator("tbody tr")).to_have_count(3)
    expect(page.get_by_label("choose own/b")).to_be_checked()
    for name in ("a", "c"):
        expect(page.get_by_label(f"choose own/{name}")).not_to_be_checked()


def test_a_very_long_answer_is_shown(own, tokenizer):
    page, url, root = own
    answers = [group(0, [single("question " * 5000, "token " * 10_000, 1.0)])]
    write_run(root / "a", tokenizer, steps=1, rollouts=lambda _: answers)
    page.goto(f"{url}/group?run=own/a&split=train&step=0&group=0")
    tokens = page.locator(".answer > span")
    expect(tokens).to_have_count(60_001)
    tokens.nth(3).hover()
    expect(page.locator("#tip")).to_contain_text("position4 of 60001")
    expect(page.locator(".question-card summary")).to_contain_text("45000 characters")


def test_replay_and_chat_on_the_page(page, tmp_path, monkeypatch):
    """A run of a real engine: its rollouts are sampled again, and its checkpoint answers."""
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "data"))
    config = Config(
        learning_rate=1e-2,
        dataset_builder=DigitsBuilder(batches=2),
        model_name=str(tiny_model(tmp_path / "tiny")),
        lora_rank=4,
        max_tokens=6,
        log_path=str(tmp_path / "own/run"),
        eval_every=0,
        save_every=0,
    )
    with ServiceClient() as client:
        run_coroutine(main(config, client))
    catalog = Catalog([tmp_path / "own"])
    actions = Actions(catalog)
    with serving_app(create_app(Answers(catalog), actions, "key")) as url:
        page.goto(f"{url}/?key=key")
        page.goto(f"{url}/group?run=own/run&split=train&step=0&group=0")
        page.get_by_role("button", name="Replay").click()
        expect(page.locator(".replay")).to_contain_text("bit-equal: all 4 answers")
        page.get_by_label("weights of the replay").select_option(index=1)
        page.get_by_role("button", name="Replay").click()
        expect(page.locator(".replay")).to_contain_text("answers are bit-equal")
        expect(page.locator(".differs").first).to_be_visible()
        page.locator(".answer > span").nth(1).click()
        choices = page.locator(".alternatives button:has(code)")
        expect(choices).to_have_count(8)
        choices.last.click()
        expect(page.locator(".alternatives")).to_contain_text("From token 2 on:")
        expect(page.locator(".alternatives .answer > span").first).to_be_visible()
        page.goto(f"{url}/chat?run=own/run&second=")
        page.get_by_label("Most tokens").fill("8")
        page.get_by_label("message").fill("hello")
        page.keyboard.press("Enter")
        expect(page.locator(".message.assistant")).to_have_count(2)
        expect(page.locator(".message.assistant").first).to_contain_text(ENDING)
        expect(page.locator(".message.assistant").last).to_contain_text(ENDING)
        page.goto("about:blank")
    actions.close()


def test_a_run_is_stopped_and_resumed_on_the_page(page, tmp_path):
    """A run in a process of its own stops with a checkpoint, and goes on with the next step."""
    model, run = tiny_model(tmp_path / "tiny"), tmp_path / "own/run"
    script = Path(__file__).with_name("stoppable_run.py")
    run.parent.mkdir()
    catalog = Catalog([run.parent])
    actions = Actions(catalog)
    command = [sys.executable, str(script), str(model), str(run)]
    with (
        subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ) as run_process,
        serving_app(create_app(Answers(catalog), actions, "key")) as url,
    ):
        try:
            page.goto(f"{url}/?key=key")
            expect(page.locator("tbody .state")).to_have_text("running", timeout=120_000)
            page.goto(f"{url}/checkpoints?run=own/run")
            page.get_by_role("button", name="Stop after this step").click()
            assert run_process.wait(300) == 0
            expect(page.locator("h1 + .state")).to_have_text("stopped")
            [stopped] = read_rows(run / "checkpoints.jsonl")
            expect(page.locator("tbody tr td").nth(1)).to_have_text(str(stopped["batch"]))
            page.get_by_role("button", name="Resume").click()
            expect(page.locator("h1 + .state")).to_have_text("running", timeout=120_000)
            page.goto(f"{url}/?q=run")
            step = page.locator("tbody tr td").nth(3)
            expect(step).not_to_have_text(re.compile(f"^{stopped['batch'] - 1} "), timeout=120_000)
        finally:
            run_process.kill()
            request_stop(run)
        page.goto(f"{url}/checkpoints?run=own/run")
        expect(page.locator("h1 + .state")).to_have_text("stopped", timeout=120_000)
        page.goto("about:blank")
    steps = [row["step"] for row in read_rows(run / "metrics.jsonl")]
    assert steps == list(range(len(steps)))
    assert len(steps) > stopped["batch"]
    actions.close()


def test_the_chart_library_is_the_published_one():
    package = PACKAGES / "uplot"
    if not package.is_dir():
        pytest.skip("npm has not installed uplot here")
    for name in ("dist/uPlot.iife.min.js", "dist/uPlot.min.css", "LICENSE"):
        assert (package / name).read_bytes() == (STATIC / "uplot" / Path(name).name).read_bytes()


def test_two_evaluations_without_a_run_are_compared(own):
    page, url, root = own
    write_evaluation(root / "before", [[0.0, 1.0], [1.0, 1.0]])
    write_evaluation(root / "after", [[1.0, 1.0], [1.0, 0.0]])
    page.goto(f"{url}/evaluations")
    page.get_by_label("choose own/before").check()
    page.get_by_label("choose own/after").check()
    page.get_by_role("link", name="Compare 2 evaluations").click()
    expect(page.locator("main")).to_contain_text("Before and after: 1 better, 1 worse")
    page.get_by_role("link", name="#0").click()
    expect(page.locator("h1")).to_have_text("Question 0")
    expect(page.locator(".rollout")).to_have_count(4)
    expect(page.locator(".rollout").first).to_contain_text("<script>document.title")
    assert page.locator("main script").count() == 0
    assert "owned" not in page.title()
