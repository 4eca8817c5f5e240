"""The rollout page of an iteration: its content, the safety of its markup, and its controls in a
browser.
"""

import asyncio
import json
import re
from functools import partial
from html.parser import HTMLParser
from typing import Any

import pytest
from byte_chat import END as END_TEXT, ScriptedPolicy
from chromium import EXECUTABLE, Chromium, chromium
from rollout_samples import END, NASTY, group, logged_tree, questions, several, single, spoken, turn

from planish import logtree
from planish.completers import TokensWithLogprobs
from planish.logtree.html import visible
from planish.renderers import get_renderer
from planish.reports.rollout_files import RolloutFiles
from planish.reports.rollout_overview import format_short
from planish.rl.environments.problem_env import ProblemEnv, ProblemGroupBuilder
from planish.rl.rollout.rollouts import GroupRollout, do_group_rollout
from planish.rl.rollout.strategy import RetryOnFailure
from planish.rl.types import RolloutError, Trajectory
from planish.types import ModelInput

needs_browser = pytest.mark.skipif(
    EXECUTABLE is None, reason="no chromium on the PATH to show the page in"
)


class Page(HTMLParser):
    """A parsed page: elements by id and class, text, and elements that load or run something."""

    VOID = ("meta", "input", "br", "img")

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text_of: dict[int, str] = {}
        self.open: list[int] = []
        self.feed(text)
        assert self.open == [], "an element is not closed"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        number = len(self.elements)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self.text_of[number] = ""
        if tag not in self.VOID:
            self.open.append(number)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for number in self.open:
            self.text_of[number] += data

    def named(self, name: str) -> list[tuple[dict[str, str], str]]:
        """Return (attributes, text) of the elements with a class, tag or id."""
        return [
            (attrs, self.text_of[number])
            for number, (tag, attrs) in enumerate(self.elements)
            if name in (tag, attrs.get("id"), *attrs.get("class", "").split())
        ]


@pytest.fixture
def written(tmp_path, tokenizer):
    """Write rollouts and return the parsed page."""

    def write(rollouts, advantages=None, *, split="train", logged=4) -> Page:
        path = RolloutFiles(tmp_path, "flat", logged, True, tokenizer).write(
            split, 10, rollouts, advantages
        )
        return Page(path.read_text())

    return write


def advantages_of(rollouts) -> list[list[float]]:
    totals = [rollout.group.get_total_rewards() for rollout in rollouts]
    return [[reward - sum(rewards) / len(rewards) for reward in rewards] for rewards in totals]


def test_the_page_has_prompt_answer_reward_and_advantage_of_every_trajectory(written):
    rollouts = questions(2, size=4)
    page = written(rollouts, advantages_of(rollouts))
    assert len(page.named("group")) == 2
    for number in range(2):
        [(_, of_group)] = page.named(f"g{number}")
        # the prompt, the last words of its summary, a log
        assert of_group.count(f"What is {number} + 2?") == 3
        for index in range(4):
            [(attrs, text)] = page.named(f"g{number}t{index}")
            assert float(attrs["data-r"]) == rollouts[number].group.get_total_rewards()[index]
            assert f"I think it is {number + index}.<|im_end|>" in text
            assert "reference_answer" in text
            assert ("+0.775" in text) == (index == 2)
            assert ("-0.325" in text) == (index == 3)


def test_token_numbers_add_up_to_the_text(written):
    text = "é😀 a\r\n中文\n\n"
    page = written([group(0, [single("q", text, 1.0)])])
    [(attrs, shown)] = page.named("answer")
    assert shown == visible(text) + "<|im_end|>"
    sizes = [size.split("*") for size in attrs["data-n"].split()]
    assert sum(int(size[0]) for size in sizes) == len(shown.encode("utf-16-le")) // 2
    assert sum(int(size[1]) if size[1:] else 1 for size in sizes) == len(text.encode()) + 1
    assert [int(token) for token in attrs["data-i"].split()] == [*text.encode(), END]
    assert attrs["data-c"].split() == [str(len(sizes) - 1)]
    losses = [int(loss) for loss in attrs["data-p"].split()]
    assert losses == [round(1000 * 0.01 * (1 + index)) for index in range(len(text.encode()) + 1)]


def test_rollout_text_is_never_markup(written):
    with (
        logtree.capture("Group 0") as tree,
        logtree.scope_header("Trajectory 0"),
        logtree.scope_header(NASTY),
    ):
        logtree.conversation([{"role": NASTY, "content": NASTY + " "}])
        logtree.table_from_dict({NASTY: NASTY}, caption=NASTY)
    spoken_turn = turn(
        NASTY, spoken(NASTY), metrics={NASTY: 1.0}, logs={NASTY: NASTY, "long": NASTY * 9}
    )
    trajectory = Trajectory([spoken_turn], ModelInput.empty(), NASTY)
    rollout = group(0, [trajectory], tree=tree, errors=[RolloutError(NASTY, NASTY)], tags=[NASTY])
    page = written([rollout], split=f"eval/{NASTY}")
    assert {tag for tag, _ in page.elements} & {
        "img",
        "iframe",
        "object",
        "embed",
        "link",
        "form",
        "base",
    } == set()
    assert len(page.named("script")) == 1
    assert visible(NASTY) in page.named("answer")[0][1]
    handlers = [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert handlers == []


def test_the_page_loads_nothing_and_runs_only_its_own_script(written):
    page = written(questions(1))
    [policy] = [
        attrs["content"]
        for _, attrs in page.elements
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none';")
    assert re.fullmatch(r".*script-src 'sha256-[A-Za-z0-9+/=]{44}'", policy)
    [(_, style)] = page.named("style")
    assert "url(" not in style
    assert "@import" not in style
    links = [attrs["href"] for tag, attrs in page.elements if tag == "a"]
    assert all(link.startswith("#") or "/" not in link for link in links)
    assert not any("src" in attrs for _, attrs in page.elements)


def test_the_page_header_counts_all_groups_and_hidden_ones(written, monkeypatch):
    monkeypatch.setattr("planish.reports.rollout_files.MAX_PAGE_TOKENS", 0)
    page = written(questions(6, size=4), logged=2)
    squeezed = page.named("facts")[0][1]
    for said in (
        "mean reward0.225",
        "over 24 trajectories",
        "groups66 mixed",
        "weights of step7up to 3 behind",
    ):
        assert said in squeezed
    bars = [text for attrs, text in page.named("button") if "data-low" in attrs]
    assert bars == ["6-0.1", "120", "61"]  # counts and rewards
    assert len(page.named("group")) == 2
    assert "4 more groups" in page.named("others")[0][1]


def test_many_distinct_rewards_are_binned(written):
    page = written([group(0, [single("q", "a", index / 100) for index in range(101)])])
    bars = [(attrs, text) for attrs, text in page.named("button") if "data-low" in attrs]
    assert len(bars) == 12
    counts = [
        int(
            text.removesuffix(
                f"{format_short(float(attrs['data-low']))} to "
                f"{format_short(float(attrs['data-high']))}"
            )
        )
        for attrs, text in bars
    ]
    assert sum(counts) == 101
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (-0.1, "-0.1"),
        (0.30000000000000004, "0.3"),
        (0.0, "0"),
        (-0.0, "0"),
        (3, "3"),
        (-0.00004, "-4e-05"),
    ],
)
def test_numbers_are_formatted_for_reading(value, text):
    assert format_short(value) == text


def test_each_turn_shows_only_new_text(written):
    page = written(
        [group(0, [several("Begin.", ["one", "two", "three"], 0.5)], final_rewards=[0.25])]
    )
    assert [text.split("<|im_end|>")[0] for _, text in page.named("answer")] == [
        "one",
        "two",
        "three",
    ]
    assert [text for _, text in page.named("given")] == ["Begin.", "next?", "next?", "bye"]
    [(_, total)] = page.named("sum")
    assert (
        " ".join(total.split())
        == "Reward 0 + 0 + 0.5 of the turns + 0.25 of the group's grading = 0.75"
    )
    assert "not a continuation" not in page.named("g0")[0][1]


def test_a_turn_that_does_not_extend_the_last_is_marked(written):
    turns = [
        turn("Begin.", spoken("one"), 0.0, done=False),
        turn("Anew.", spoken("two"), 1.0, train_on_action=False),
    ]
    page = written([group(0, [Trajectory(turns, ModelInput.empty(), "completed")])])
    [(_, text)] = page.named("g0t0")
    assert "not a continuation of the turn before" in text
    assert "Anew." in text
    assert [flag for _, flag in page.named("flag")] == ["not trained on"]


def test_long_text_is_collapsed_but_complete(written):
    prompt = "All of it. " * 400 + "The end?"
    page = written(
        [
            group(
                0,
                [
                    single(prompt, "x" * 5000, 1.0),
                    Trajectory(
                        [turn(prompt, spoken("y" * 300, is_cut_off=True))],
                        ModelInput.empty(),
                        "max_tokens",
                    ),
                ],
            )
        ]
    )
    [(attrs, text)] = page.named("reading")
    assert "open" not in attrs
    assert prompt in text
    assert "x" * 5000 in page.named("g0t0")[0][1]
    assert [flag for _, flag in page.named("flag")] == ["max_tokens", "cut off"]


def test_the_best_and_worst_trajectories_are_expanded(written):
    page = written(
        [group(0, [single("q", str(reward), reward) for reward in (0.5, 0.1, 0.9, 0.4)])]
    )
    opened = [attrs["id"] for attrs, _ in page.named("traj") if "open" in attrs]
    assert opened == ["g0t1", "g0t2"]


def test_a_log_is_shown_once_with_its_trajectory(written):
    rollouts = questions(1, size=2)
    page = written(rollouts)
    first, second = (page.named(f"g0t{index}")[0][1] for index in range(2))
    assert "What is 0 + 2?" in first
    assert "What is 0 + 2?" not in second
    assert "The same messages as in trajectory 0." in second
    assert "Policy Response" not in first  # it is what the tokens say
    # its tokens, and the last words of its summary
    assert page.named("g0")[0][1].count("I think it is 1.") == 2


def test_a_failed_attempt_is_shown_with_the_group(written):
    @logtree.scope_header("Trajectory 0")
    def fail() -> None:
        logtree.log_text("first try")
        raise RuntimeError("the tool is gone")

    with logtree.capture("Group 0") as tree:
        with pytest.raises(RuntimeError):
            fail()
        with logtree.scope_header("Trajectory 1"):
            logtree.log_text("of one")
        with logtree.scope_header("Trajectory 0, attempt 2"):
            logtree.log_text("second try")
        with logtree.scope_header("Grading"):
            logtree.log_text("compared")
    error = RolloutError("RuntimeError", "the tool is gone")
    rollout = group(
        0, [single("q", "zero", 0.0), single("q", "one", 1.0)], tree=tree, errors=[error]
    )
    page = written([rollout])
    assert "second try" in page.named("g0t0")[0][1]
    assert "of one" in page.named("g0t1")[0][1]
    log = page.named("log")[-1][1]
    assert "first try" in log
    assert "compared" in log
    assert "second try" not in log
    assert page.named("lt-error")[0][1] == "An attempt failed: RuntimeError: the tool is gone"


class Sum(ProblemEnv):
    def get_question(self):
        return "2 + 3 = ?"

    def check_answer(self, sample_str):
        if sample_str == "fail":
            raise RuntimeError("the grader is gone")
        return sample_str == "5"

    def check_format(self, sample_str):
        return True

    def get_reference_answer(self):
        return "five"


def test_a_group_from_a_real_rollout_is_shown(written, tokenizer):
    renderer = get_renderer("qwen3_instruct", tokenizer)
    policy = ScriptedPolicy(
        renderer, [f"4{END_TEXT}", f"fail{END_TEXT}", f"5{END_TEXT}", f"5{END_TEXT}"]
    )
    builder = ProblemGroupBuilder(partial(Sum, renderer), 3, "sums")
    with logtree.capture("Group 0") as tree:
        result = asyncio.run(do_group_rollout(builder, policy, RetryOnFailure(max_retries=1)))
    assert result is not None
    page = written([GroupRollout(0, builder.logging_tags(), result, 9, tree)])
    for index, answer in enumerate("455"):
        text = page.named(f"g0t{index}")[0][1]
        assert f"{answer}<|im_end|>" in text
        assert "reference_answerfive" in text
        assert "fail" not in text
    assert "the grader is gone" in page.named("log")[-1][1]
    assert "An attempt failed: RuntimeError: the grader is gone" in page.named("g0")[0][1]


def test_logs_without_a_trajectory_are_shown_with_the_group(written):
    with logtree.capture("Group 0") as tree:
        logtree.log_text("somebody said this")
    page = written([group(0, [single("q", "zero", 0.0), single("q", "one", 1.0)], tree=tree)])
    assert "somebody said this" in page.named("log")[0][1]
    assert len(page.named("log")) == 1


def test_a_token_adds_no_html_element(tmp_path, tokenizer):
    """The page stores the text, id, logprob and length of a token, but no element per token."""
    files = RolloutFiles(tmp_path, "flat", 4, False, tokenizer)
    text = "word " * 800
    length = {
        count: files.write("train", 0, [group(0, [single("q", text, 1.0)] * count)]).stat().st_size
        for count in (1, 9)
    }
    assert (length[9] - length[1]) / 8 / len(text) < 13


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def shown(browser, tmp_path, tokenizer):
    """Write rollouts, open their page, and return the browser."""

    def show(rollouts, advantages=None, fragment: str = "") -> Chromium:
        path = RolloutFiles(tmp_path, "flat", 4, True, tokenizer).write(
            "train", 10, rollouts, advantages
        )
        browser.open(path, fragment)
        return browser

    return show


def ids(browser: Chromium, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((it) => it.id)")


def painted(browser: Chromium, selector: str) -> None:
    browser.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView()")
    browser.wait(f"document.querySelector({json.dumps(selector)}).classList.contains('painted')")


@needs_browser
def test_browser_colours_tokens_and_keeps_their_text(shown):
    text = "\n\té😀 a\r\nمرحبا <b>中文</b> \x00 &lt;"
    logprobs = [-0.05, -0.5, -1.0, -2.0, -4.0, -9.0]
    tokens = [*text.encode(), END]
    spoken_turn = turn("q", spoken(text, (logprobs * len(tokens))[: len(tokens)]))
    browser = shown([group(0, [Trajectory([spoken_turn], ModelInput.empty(), "completed")])])
    painted(browser, ".answer")
    assert (
        browser.run("document.querySelector('.answer').textContent") == visible(text) + "<|im_end|>"
    )
    spans = browser.run(
        "[...document.querySelectorAll('.answer span')].map((it) => [it.textContent, it.className])"
    )
    assert spans[:4] == [["\n", "q0 breaks"], ["\t", "q1"], ["é", "q4"], ["😀", "q5"]]
    assert spans[-1][0] == "<|im_end|>"
    assert "control" in spans[-1][1]
    assert browser.faults() == []
    assert browser.requests() == []


@needs_browser
def test_browser_shows_details_of_the_token_under_the_pointer(shown):
    logprobs = [-1.2345, -0.0001, -12.0, -0.5]
    spoken_turn = turn("q", TokensWithLogprobs([65, 0xC3, 0xA9, 10], logprobs))
    browser = shown([group(0, [Trajectory([spoken_turn], ModelInput.empty(), "completed")])])
    painted(browser, ".answer")
    browser.point(".answer span:nth-child(1)")
    tip = "document.querySelector('#tip').innerText.split('\\n')"
    assert browser.run(tip) == [
        "A",
        "probability",
        "29.1 %",
        "logprob",
        "-1.234",
        "token",
        "65",
        "position",
        "1 of 4",
    ]
    browser.point(".answer span:nth-child(2)")
    assert browser.run(tip) == [
        *['"é"', "2 tokens make this character"],
        *["probability", "100.0 %", "logprob", "0.000", "token", "195", "position", "2 of 4"],
        *["probability", "0.00061 %", "logprob", "-12.000", "token", "169", "position", "3 of 4"],
    ]
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    assert browser.run("document.querySelector('#tip').hidden")


@needs_browser
def test_browser_navigates_between_trajectories(shown):
    rollouts = questions(3, size=4)
    browser = shown(rollouts, advantages_of(rollouts))
    browser.run("all('.traj').forEach((it) => { it.open = false; })")
    went = []
    for key in "jjkbwnnnpp":
        browser.press(key)
        went.append(browser.run("location.hash"))
    assert went == [
        "#g0t0",
        "#g0t1",
        "#g0t0",
        "#g0t2",
        "#g0t3",
        "#g1t0",
        "#g2t0",
        "#g2t0",
        "#g1t0",
        "#g0t0",
    ]
    assert ids(browser, ".traj[open]") == ["g0t0", "g0t1", "g0t2", "g0t3", "g1t0", "g2t0"]
    assert ids(browser, ".current") == ["g0t0"]
    assert browser.run("document.querySelector('.cells [aria-current]').hash") == "#g0t0"
    browser.run("document.querySelector('.cells a[href=\"#g2t3\"]').click()")
    assert ids(browser, ".current") == ["g2t3"]
    browser.press("o")
    assert len(ids(browser, ".traj[open]")) == 12
    browser.press("x")
    assert ids(browser, ".traj[open]") == []
    assert browser.faults() == []


@needs_browser
def test_browser_opens_the_trajectory_in_the_url(shown):
    browser = shown(questions(2, size=4), fragment="#g1t1")
    assert ids(browser, ".current") == ["g1t1"]
    assert "g1t1" in ids(browser, ".traj[open]")


@needs_browser
def test_browser_sorts_and_filters_trajectories(shown):
    rollouts = [
        group(number, [single("q", str(reward), reward) for reward in rewards])
        for number, rewards in enumerate([(0.1, 0.3, 0.2), (1.0, 0.9, 1.0), (0.0, 0.5, 0.25)])
    ]
    browser = shown(rollouts)

    def choose(which: str, value: str) -> None:
        browser.run(
            f"(() => {{ const it = document.querySelector('#{which}'); it.value = '{value}';"
            " it.dispatchEvent(new Event('change')); })()"
        )

    choose("group-order", "-mean")
    assert ids(browser, ".group") == ["g1", "g2", "g0"]
    choose("group-order", "-spread")
    choose("traj-order", "-r")
    assert ids(browser, ".group") == ["g2", "g0", "g1"]
    assert ids(browser, ".traj") == [
        "g2t1",
        "g2t2",
        "g2t0",
        "g0t1",
        "g0t2",
        "g0t0",
        "g1t0",
        "g1t2",
        "g1t1",
    ]
    assert browser.run(
        "[...document.querySelectorAll('.cells a')].map((it) => it.hash.slice(1))"
    ) == ids(browser, ".traj")
    browser.run("document.querySelector('.bars button:last-child').click()")
    assert ids(browser, ".traj:not([hidden])") == ["g1t0", "g1t2"]
    assert ids(browser, ".group:not([hidden])") == ["g1"]
    assert browser.run("document.querySelector('#count').textContent") == "2 of 9 trajectories"
    browser.press("j")
    browser.press("j")
    browser.press("j")
    assert ids(browser, ".current") == ["g1t2"]
    browser.run("document.querySelector('[data-do=all]').click()")
    choose("traj-order", "n")
    choose("group-order", "n")
    assert ids(browser, ".traj:not([hidden])") == [
        f"g{number}t{index}" for number in range(3) for index in range(3)
    ]


@needs_browser
def test_browser_switches_theme_font_and_colour_scale(shown):
    browser = shown(questions(1))
    painted(browser, "[open] .answer")

    def style(selector: str, name: str) -> str:
        return browser.run(
            f"getComputedStyle(document.querySelector('{selector}')).getPropertyValue('{name}')"
        )

    before = (
        style("body", "background-color"),
        style(".answer", "font-family"),
        style(".answer .q1", "background-color"),
    )
    for key in "tfc":
        browser.press(key)
    after = (
        style("body", "background-color"),
        style(".answer", "font-family"),
        style(".answer .q1", "background-color"),
    )
    assert all(now != then for now, then in zip(after, before, strict=True))
    assert after[2] == "rgba(0, 0, 0, 0)"
    browser.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    browser.run("document.documentElement.style.colorScheme = ''")
    assert style("body", "background-color") == after[0]
    browser.call("Emulation.setEmulatedMedia", features=[])


@needs_browser
def test_browser_runs_no_script_from_rollout_text(shown):
    with logtree.capture("Group 0") as tree:
        logtree.log_html(
            "<img src='data:,' onerror='window.hit = 1'><script>window.hit = 2</script>"
        )
        logtree.log_html(
            "<script src='https://example.org/x.js'></script><link rel=stylesheet "
            "href='//example.org/a'>"
        )
    spoken_turn = turn(NASTY, spoken(NASTY), logs={"x": NASTY})
    browser = shown(
        [group(0, [Trajectory([spoken_turn], ModelInput.empty(), "completed")], tree=tree)]
    )
    painted(browser, ".answer")
    assert browser.run("window.hit") is None
    assert browser.requests() == []


@pytest.mark.slow
@needs_browser
def test_browser_fits_a_narrow_window(shown):
    text = "unbroken" * 100 + "\n" + "中" * 300
    trajectory = Trajectory(
        [turn(text, spoken(text), metrics={"m" * 90: 1.0}, logs={"k" * 90: text[:100]})],
        ModelInput.empty(),
        "completed",
    )
    tree = logged_tree(0, text, [text + "!"], [1.0])
    browser = shown([group(0, [trajectory], tree=tree, tags=["t" * 90])], [[0.5]])
    try:
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=390,
            height=800,
            deviceScaleFactor=1,
            mobile=False,
        )
        browser.run("all('details').forEach((it) => { it.open = true; })")
        assert browser.run("document.documentElement.scrollWidth") <= 390
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")
