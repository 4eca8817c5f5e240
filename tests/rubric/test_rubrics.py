"""Rows of rubrics: the fields that are read, errors that name the place, and how a judge's score is
read.
"""

import pytest

from planish.errors import UserError
from planish.rubric.rubrics import Criterion, Example, read_rubric_row

QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]
ITEM = {"rubric_str": "Is it 7?"}


def test_a_row_of_the_cookbooks_is_read_as_it_is():
    item = {
        "rubric_str": "Does the chatbot correctly get the answer 134?",
        "extraction_regex": "<score>(.*)</score>",
        "grader_output_format_instruction": "Please output your score between 0 and 1 wrapped in "
        "<score> ... </score>",
    }
    row = read_rubric_row({"convo": QUESTION, "rubric_items": [item]}, "row 1")
    [criterion] = row.criteria
    assert (criterion.name, criterion.weight, criterion.instruction) == (
        "1",
        1.0,
        item["grader_output_format_instruction"],
    )
    assert criterion.read_score("I think <score>0.5</score>") == 0.5


def test_items_have_weights_names_and_ranges():
    items = [ITEM, {**ITEM, "name": "rude", "weight": 3, "score_range": [5, 1]}]
    row = read_rubric_row({"messages": QUESTION, "rubric_items": items}, "row 1")
    first, second = row.criteria
    assert (first.name, second.name, second.weight) == ("1", "rude", 3)
    assert (
        second.instruction
        == "Write your score, a number from 1 to 5, between <score> and </score>."
    )
    assert [second.read_score(f"<score>{n}</score>") for n in (1, 2, 5)] == [1.0, 0.75, 0.0]


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("<score>1</score>", 1.0),
        ("<score> 0.25\n</score> that is it", 0.25),
        ("First <score>1</score>, but no: <score>0</score>", 0.0),
        ("It wrote:\n> <score>1</score>\n<score>0.5</score>", 0.5),
        ("It wrote:\n> <score>1</score>", None),
        ("<score>2</score>", None),
        ("<score>-1</score>", None),
        ("<score>nan</score>", None),
        ("<score>inf</score>", None),
        ("<score>good</score>", None),
        ("<score></score>", None),
        ("1", None),
        ("", None),
    ],
)
def test_a_score_is_the_judges_last_own_word(reply, score):
    assert Criterion("Is it good?").read_score(reply) == score


def test_a_score_in_another_form():
    in_words = Criterion("Is it?", word_scores={"Yes": 1, "No": 0})
    assert in_words.instruction == "Write Yes or No between <score> and </score>."
    assert [
        in_words.read_score(f"<score>{word}</score>") for word in ("yes", " NO.", "maybe", "1")
    ] == [1, 0, None, None]
    points = Criterion("How good?", score_range=(0, 10), extraction_regex=r"Points: (\d+)")
    assert points.read_score("Points: 3. Points: 8") == 0.8
    whole = Criterion("How good?", extraction_regex=r"[01]$")
    assert whole.read_score("0 or 1? It is 1") == 1.0


def test_what_a_program_says():
    criterion = Criterion("Is it 7?", truth_regex=r"(?<!\d)7\D*\Z")
    assert [criterion.is_met(answer) for answer in ("3 + 4 = 7.", "17", "7, or 8")] == [
        True,
        False,
        False,
    ]
    assert Criterion("Is it 7?").is_met("7") is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": QUESTION},
            'train row 3: the row has .* give rows with "messages" and "rubric_items"',
        ),
        (
            {"rubric_items": [ITEM]},
            'train row 3: the row has .* give rows with "messages" and "rubric_items"',
        ),
        ({"messages": [], "rubric_items": [ITEM]}, 'train row 3, "messages": give a list'),
        (
            {"messages": [{"role": "robot", "content": "a"}], "rubric_items": [ITEM]},
            "message 1 has no role",
        ),
        (
            {"messages": [{"role": "user"}], "rubric_items": [ITEM]},
            "content of message 1 is not a text",
        ),
        (
            {
                "messages": [*QUESTION, {"role": "assistant", "content": "7"}],
                "rubric_items": [ITEM],
            },
            "is an answer",
        ),
        (
            {"messages": QUESTION, "rubric_items": []},
            '"rubric_items": give a list with at least one criterion',
        ),
        ({"messages": QUESTION, "rubric_items": "Is it?"}, '"rubric_items": give a list'),
    ],
)
def test_an_invalid_row_is_rejected_with_its_location(row, message):
    with pytest.raises(UserError, match=message):
        read_rubric_row(row, "train row 3")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({}, 'no text "rubric_str"'),
        ({"rubric_str": " "}, 'no text "rubric_str"'),
        ({**ITEM, "wieght": 2}, "has unknown fields wieght; give .*weight"),
        ({**ITEM, "weight": 0}, "weight=0: give a number above 0"),
        ({**ITEM, "weight": "2"}, "weight='2'"),
        ({**ITEM, "score_range": [1, 1]}, "score_range="),
        ({**ITEM, "score_range": [0, 1, 2]}, "score_range="),
        ({**ITEM, "score_range": "01"}, "score_range="),
        ({**ITEM, "extraction_regex": "("}, "extraction_regex="),
        (
            {**ITEM, "extraction_regex": "(a)(b)", "grader_output_format_instruction": "x"},
            "extraction_regex=",
        ),
        ({**ITEM, "extraction_regex": r"\d"}, "grader_output_format_instruction='': give a text"),
        ({**ITEM, "word_scores": {"Yes": 1}}, "word_scores="),
        ({**ITEM, "word_scores": {"Yes": 1, "No": -1}}, "are not all in score_range"),
        ({**ITEM, "truth_regex": "["}, "truth_regex="),
        ({**ITEM, "name": "a/b"}, "name='a/b'"),
    ],
)
def test_an_invalid_item_is_rejected_with_its_location(item, message):
    with pytest.raises(UserError, match="row 3, rubric item 2.*" + message):
        read_rubric_row(
            {"messages": QUESTION, "rubric_items": [{**ITEM, "name": "x"}, item]}, "row 3"
        )


def test_examples_are_read_and_must_have_a_score():
    def read(examples):
        return read_rubric_row(
            {"messages": QUESTION, "rubric_items": [{**ITEM, "examples": examples}]}, "row 3"
        )

    [criterion] = read([{"answer": "8", "reply": "<score>0</score>"}]).criteria
    assert criterion.examples == (Example("8", "<score>0</score>"),)
    with pytest.raises(
        UserError, match="row 3, rubric item 1: the example's reply 'No' has no readable score"
    ):
        read([{"answer": "8", "reply": "No"}])
    for wrong in (
        {"answer": "8"},
        [{"answer": "8"}],
        ["8"],
        [{"answer": 8, "reply": "<score>0</score>"}],
    ):
        with pytest.raises(UserError, match="row 3, rubric item 1: examples="):
            read(wrong)


def test_two_items_of_one_name_are_rejected():
    items = [{**ITEM, "name": "2"}, ITEM]
    with pytest.raises(UserError, match="several rubric items have the same name"):
        read_rubric_row({"messages": QUESTION, "rubric_items": items}, "row 3")
