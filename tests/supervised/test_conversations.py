"""Rows of several forms become the same conversation. An error names a row of no known form."""

import pytest

from planish.errors import UserError
from planish.supervised.conversations import conversation_of

CHAT = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT, "prompt": "something else", "prompt_id": 7},
        {"messages": [{**message, "tool_calls": None, "name": None} for message in CHAT]},
        {
            "conversations": [
                {"from": "human", "value": "Hello."},
                {"from": "gpt", "value": "Good day."},
            ]
        },
        {
            "conversations": [
                {"from": "human", "value": "Hello.", "weight": 0},
                {"from": "gpt", "value": "Good day.", "weight": 1},
            ]
        },
        {"prompt": "Hello.", "completion": "Good day."},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
    ],
)
def test_each_row_format_gives_the_messages(row):
    assert conversation_of(row, "here") == CHAT


def test_a_message_of_tool_calls_alone_keeps_its_empty_content():
    row = {
        "messages": [
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
        ]
    }
    assert conversation_of(row, "here") == row["messages"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "Hello."}, r"row 3: the row has \['text'\]"),
        ({"messages": "Hello."}, 'row 3, "messages": give a list'),
        ({"messages": []}, "at least one"),
        ({"messages": ["Hello."]}, "holds a str"),
        ({"conversations": [{"from": "robot", "value": "Beep."}]}, "'from': 'robot'"),
        ({"conversations": [{"from": "human"}]}, '"value"'),
        (
            {"conversations": [{"from": "gpt", "value": "Beep.", "weight": 0}]},
            '"weight": 0, .*"trainable"',
        ),
        ({"prompt": 5, "completion": "x"}, '"prompt": give a text, or a list'),
    ],
)
def test_an_unknown_row_format_is_rejected_with_its_location(row, message):
    with pytest.raises(UserError, match=message):
        conversation_of(row, "row 3")
