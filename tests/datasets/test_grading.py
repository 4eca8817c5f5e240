"""Boxed answers with braces, answers that a library must grade, and answers whose evaluation would
not end.
"""

import contextlib
import re
import string
import time
from pathlib import Path

import pytest
from math_verify import parse, verify

from planish.datasets.grading import Grade, Grader, GradingError, extract_boxed, is_one_value
from planish.sandbox import SandboxUnavailableError
from planish.sandbox.worker_process import WorkerStartError


@pytest.fixture(scope="module")
def grader():
    with Grader(timeout_seconds=60) as grader:
        yield grader


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{72}", "72"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{72\\}", "72\\\\"),
        (r"\boxed{a \\\} b}", r"a \\\} b"),
        ("\\boxed{5} and a last \\", "5"),
        (r"\boxed{3} and then \boxed{4", "3"),
        (r"\boxed{ 5 }", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{\frac{1}{2}", None),
        ("boxed 7", None),
        ("", None),
    ],
)
def test_the_last_closed_box_counts(text, expected):
    assert extract_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1 \boxed{2} {3}", "2"),
        (r"\boxed{1 \boxed{2}}", "2"),
        (r"\boxed{1 \boxed{2}", "2"),
        (r"} \boxed{1}} {\boxed{2", "1"),
        (r"\boxed{1\}} \boxed{2\}", r"1\}"),
    ],
)
def test_boxes_within_and_beside_others(text, expected):
    assert extract_boxed(text) == expected


def test_time_is_linear_in_the_text():
    text = r"\boxed{" * 20_000
    began = time.thread_time()
    assert extract_boxed(text + "}") == ""
    assert time.thread_time() - began < 2


NUMBERS = [
    ("72", "72", True),
    ("72.0", "72", True),
    ("1,000", "1000", True),
    ("$18", "18", True),
    (r"\$18", "18", True),
    ("18.", "18", True),
    ("-3", "3", False),
    ("+3", "3", True),
    ("73", "72", False),
    (".5", "0.5", True),
]
EXPRESSIONS = [
    (r"\frac{1}{2}", "0.5", True),
    ("10^{3}", "1000", True),
    ("2+3", "5", True),
    ("x = 5", "5", True),
    (r"5\text{ cm}", "5", True),
    (r"\frac{", "5", False),
    ("{{{", "5", False),
    ("", "5", False),
    ("none", "5", False),
]


@pytest.mark.sandbox
@pytest.mark.slow
@pytest.mark.parametrize(("answer", "expected", "equal"), NUMBERS + EXPRESSIONS)
def test_answers_are_compared_by_value(grader, answer, expected, equal):
    assert grader.equal(answer, expected) is equal


@pytest.mark.parametrize(("answer", "expected", "equal"), NUMBERS)
def test_the_fast_way_for_numbers_equals_the_library(answer, expected, equal):
    assert verify(parse(f"${expected}$"), parse(f"${answer}$")) is equal


PAGE = Path(__file__).parents[2] / "docs/guide/evaluation.md"
ROW = re.compile(r"\| `(.+?)` \| (`.*)? \| (`.*)? \|")
SMALL_NUMBERS = [
    ("2^{-56}", "2^{-55}", False),
    ("2^{-56}", r"\frac{1}{2^{56}}", True),
    ("10^{-20}", r"2\cdot 10^{-20}", False),
    (r"\frac{3}{2^{60}}", r"\frac{3}{2^{59}}", False),
    (r"\frac{1}{10^8}", "0.00000002", False),
    (r"\frac{1}{10^8}", "0.00000001", True),
    (r"\sqrt{2}\cdot 2^{-56}", r"\sqrt{2}\cdot 2^{-55}", False),
    (r"\sqrt{8}\cdot 2^{-56}", r"\sqrt{2}\cdot 2^{-55}", True),
    ("(2^{-56}, 1)", "(2^{-55}, 1)", False),
    ("(2^{-56}, 1)", r"(\frac{1}{2^{56}}, 1)", True),
    (r"\{1, 2^{-56}\}", r"\{2^{-55}, 1\}", False),
    (r"\{1, 2^{-56}\}", r"\{2^{-56}, 1\}", True),
    (r"\sqrt{3+2\sqrt{2}}-1-\sqrt{2}", "0", True),
    (r"50\%", r"\frac{1}{2}", True),
    (r"\frac{1}{3}", "0.333333", True),
]


@pytest.mark.sandbox
@pytest.mark.slow
@pytest.mark.parametrize(("answer", "expected", "equal"), SMALL_NUMBERS)
def test_numbers_near_zero_are_not_all_equal(grader, answer, expected, equal):
    assert grader.equal(answer, expected) is equal


@pytest.mark.sandbox
def test_rational_numbers_are_compared_exactly(grader):
    assert not grader.grade(r"\boxed{2^{-56}}", "2^{-55}").correct
    assert grader.grade(r"\boxed{2^{-56}\\}", r"\frac{2}{2^{57}}").correct


TABLE = PAGE.read_text().partition("| known | right | wrong |\n")[2].partition("\n\n")[0]
FORMS = [
    (known, answer, verdict)
    for known, *cells in (row.groups("") for row in map(ROW.fullmatch, TABLE.splitlines()) if row)
    for verdict, cell in zip(("right", "wrong"), cells, strict=True)
    for answer in re.findall(r"`(.+?)`", cell)
]
"""The table of the page about evaluation: known, in the box, verdict."""


@pytest.mark.sandbox
@pytest.mark.parametrize(("known", "answer", "verdict"), FORMS)
def test_the_table_of_forms_holds(grader, known, answer, verdict):
    assert grader.grade(rf"\boxed{{{answer}}}", known).correct is (verdict == "right")


def test_the_table_has_both_verdicts():
    assert {verdict for _, _, verdict in FORMS} == {"right", "wrong"}
    assert len(FORMS) > 30


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        ("x = 2 or x = 3", "x = 2 or x = 3"),
    ],
)
def test_signs_between_values_are_taken_where_the_known_answer_has_them(grader, answer, expected):
    assert grader.equal(answer, expected)


@pytest.mark.parametrize(
    "sign", ["\\\\", "&", "#", ";", "$", " or ", " and ", r"\text{or}", r"\text{ or }"]
)
@pytest.mark.parametrize(("first", "second"), [("72", "73"), ("x", "y")])
def test_a_sign_between_values_is_rejected_without_the_library(monkeypatch, sign, first, second):
    """The process would accept every answer."""
    with Grader() as grader:
        monkeypatch.setattr(grader._process, "request", lambda *_: {"equal": True})
        assert grader.equal(f"{first}^2", first)
        assert not grader.equal(f"{first}{sign}{second}", first)
        assert not grader.equal(f"{second}{sign}{first}", first)


@pytest.mark.parametrize("answer", ["1e999", "9" * 5000, "1 1/0", "1e-999"])
def test_extreme_numbers_are_compared_at_once(grader, answer):
    began = time.thread_time()
    with contextlib.suppress(GradingError):
        assert not grader.equal(answer, "72")
    assert time.thread_time() - began < 2


def test_a_response_without_a_box_is_wrong(grader):
    assert grader.grade("it is 5", "5") == Grade(boxed=None, correct=False)
    assert grader.grade(r"\boxed{5}", "5") == Grade(boxed="5", correct=True)


@pytest.mark.parametrize("expected", ["", "5", ".", "$$"])
def test_an_empty_answer_is_wrong_whatever_is_expected(grader, expected):
    assert grader.grade(r"\boxed{}", expected) == Grade(boxed="", correct=False)


@pytest.mark.sandbox
@pytest.mark.slow
def test_an_endless_answer_is_ended_counted_and_raised():
    with Grader(timeout_seconds=60) as grader:
        assert grader.equal("2+3", "5")
        usual, grader.timeout_seconds = grader.timeout_seconds, 0.5
        start = time.monotonic()
        with pytest.raises(GradingError, match="could not be compared"):
            grader.equal("9^{9^{9^{9}}}", "5")
        assert time.monotonic() - start < 50
        assert grader.num_failures == 1
        grader.timeout_seconds = usual
        assert grader.equal("2+3", "5"), "the next answer gets a fresh process"


@pytest.mark.sandbox
def test_an_answer_on_which_the_library_fails_is_counted_and_raised(grader):
    before = grader.num_failures
    with pytest.raises(GradingError, match="1/0"):
        grader.equal("1/0", "2/0")
    assert grader.num_failures == before + 1
    assert grader.equal("2+3", "5")


@pytest.mark.sandbox
def test_without_the_library_the_error_says_so(monkeypatch, tmp_path):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "math_verify.py").write_text("raise ImportError('not here')")
    monkeypatch.syspath_prepend(packages)
    with (
        Grader() as grader,
        pytest.raises(WorkerStartError, match="ImportError: not here; is math-verify installed"),
    ):
        grader.equal("2+3", "5")


def test_without_a_sandbox_numbers_are_graded_and_expressions_are_unjudged(monkeypatch, caplog):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with Grader() as grader:
        assert grader.equal("1,234", "1234")
        for _ in range(2):
            with pytest.raises(GradingError, match="install bubblewrap|needs bubblewrap"):
                grader.equal("2+3", "5")
        assert grader.num_failures == 2
        assert caplog.text.count("cannot be graded") == 1
        with pytest.raises(SandboxUnavailableError):
            grader.equal("2+x", "x+2")


SEPARATORS = [
    *(sign for sign in string.punctuation if sign not in "-+*/^!.,"),
    *(" ", "\n", "\t", "\\ ", "\\,", "\\;", "\\quad ", "\\qquad ", "\\newline ", "\\par ", "\\cr "),
    *("\\mid ", "\\vert ", "\\lor ", "\\cup ", "\\to ", "\\approx ", "\\equiv ", "\\sim ", "\\ne "),
    *("\\implies ", "\\hspace{1em}", "\\_", "\\{", "\\}", "\\text{ or }", "\\mathrm{or}", "\\in "),
    *(" or ", " or, ", " then ", "→", "—", "、", "，", "；", "..", "...", " . ", "\\ldots "),
]


@pytest.mark.sandbox
@pytest.mark.slow
@pytest.mark.parametrize("known", ["72", r"\frac{144}{2}", r"36\sqrt{4}"])
def test_no_sign_between_two_numbers_hedges(grader, known):
    accepted = []
    for sign in SEPARATORS:
        for answer in (f"72{sign}73", f"73{sign}72", f"72 {sign} 73", f"73 {sign} 72"):
            with contextlib.suppress(GradingError):
                if grader.equal(answer, known):
                    accepted.append(answer)
    assert accepted == []


@pytest.mark.parametrize(
    "text",
    [
        "72", r"\frac{144}{2}", r"\frac12", r"\frac 1 2", r"\sqrt[3]{8}", r"2\pi r^2", "x^2 + 2x + 1", r"\log_2 8", r"72\text{ cm}^2",
        r"\left(1 + \frac{2}{3}\right) \cdot "
        r"4", "2(3)", "1,234 + 1", r"\binom{5}{2}", r"2^{3} \times 5", r"10\sin 30^\circ", "3 + 4i",
    ],
)  # fmt: skip
def test_arithmetic_is_one_value(text):
    assert is_one_value(text)


@pytest.mark.parametrize(
    "text", ["1, 2", "[0, 5)", r"\{1, 2\}", "1 < x < 3", "x = 2 or x = 3", "3:4"]
)
def test_lists_intervals_and_ratios_are_not_one_value(text):
    assert not is_one_value(text)
