"""Each layout of docs/reference/data.md is read for the purposes that the page names, and an error
names a row of no layout.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from planish.datasets.layouts import (
    COMPARISONS,
    CONVERSATIONS,
    PROMPTS,
    comparison_of,
    conversation_of,
    prompt_of,
)
from planish.datasets.messages import PlainText
from planish.errors import UserError

PAGE = Path(__file__).parents[2] / "docs/reference/data.md"
ASKED = [{"role": "user", "content": "Hello."}]
ANSWER = [{"role": "assistant", "content": "Good day."}]
OTHER = [{"role": "assistant", "content": "What?"}]
CHAT = [*ASKED, *ANSWER]
PURPOSES = {
    "conversation": (CONVERSATIONS, conversation_of),
    "comparison": (COMPARISONS, comparison_of),
    "prompt": (PROMPTS, prompt_of),
}
ROWS = {
    ("comparison", "label"): {
        "comparison": {"prompt_conversation": ASKED, "completion_A": ANSWER, "completion_B": OTHER},
        "label": "A",
    },
    ("input", "preferred_output", "non_preferred_output"): {
        "input": {"messages": ASKED, "tools": [], "parallel_tool_calls": True},
        "preferred_output": ANSWER,
        "non_preferred_output": OTHER,
    },
    ("chosen", "rejected", "prompt"): {
        "prompt": "Hello.",
        "chosen": "Good day.",
        "rejected": "What?",
    },
    ("chosen", "rejected", "conversations"): {
        "conversations": [{"from": "human", "value": "Hello."}],
        "chosen": {"from": "gpt", "value": "Good day."},
        "rejected": {"from": "gpt", "value": "What?"},
    },
    ("chosen", "rejected", "instruction"): {
        "instruction": "Hello.",
        "input": "",
        "chosen": "Good day.",
        "rejected": "What?",
    },
    ("chosen", "rejected", "question"): {
        "question": "Hello.",
        "chosen": "Good day.",
        "rejected": "What?",
    },
    ("chosen", "rejected"): {"chosen": CHAT, "rejected": [*ASKED, *OTHER]},
    ("messages",): {"messages": CHAT},
    ("conversations",): {
        "conversations": [
            {"from": "human", "value": "Hello."},
            {"from": "gpt", "value": "Good day."},
        ]
    },
    ("prompt", "completion"): {"prompt": "Hello.", "completion": "Good day."},
    ("prompt",): {"prompt": "Hello."},
    ("instruction", "output"): {"instruction": "Hello.", "input": "", "output": "Good day."},
    ("instruction",): {"instruction": "Hello."},
    ("question", "answer"): {"question": "Hello.", "answer": "Good day."},
    ("question",): {"question": "Hello."},
    ("text",): {"text": "Good day."},
}
"""A row of each layout, by its columns."""


def table() -> dict[tuple[str, ...], dict[str, bool]]:
    """Return the table of docs/reference/data.md: the purposes of each layout."""
    text = PAGE.read_text().partition("the table of layouts begins")[2]
    lines = text.partition("<!--")[0].strip().splitlines()
    lines = [line for line in lines if line.startswith("|")]
    _, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {
        tuple(columns.replace("`", "").split(", ")): {
            purpose: purpose in uses.split(", ") for purpose in PURPOSES
        }
        for columns, _, uses in rows
    }


def unweighted(messages):
    return [{k: v for k, v in message.items() if k != "weight"} for message in messages]


def test_the_page_has_every_layout_in_the_order_of_the_reader():
    for purpose, (layouts, _) in PURPOSES.items():
        documented = [columns for columns, uses in table().items() if uses[purpose]]
        assert documented == [layout.columns for layout in layouts], purpose
    assert table().keys() == ROWS.keys()


@pytest.mark.parametrize("columns", ROWS, ids=" ".join)
def test_a_layout_is_read_for_its_purposes_and_no_others(columns):
    for purpose, is_read in table()[columns].items():
        layouts, read = PURPOSES[purpose]
        if any(set(layout.columns) < set(columns) for layout in layouts) and not is_read:
            continue
        if not is_read:
            with pytest.raises(UserError, match=r"^here: the row has .*docs/reference/data.md"):
                read(ROWS[columns], "here")
            continue
        result = read(ROWS[columns], "here")
        if purpose == "prompt":
            assert result == ASKED
        elif purpose == "comparison":
            assert (result.prompt, result.first, result.second, result.label) == (
                ASKED,
                ANSWER,
                OTHER,
                "A",
            )
        elif columns == ("text",):
            assert result == "Good day."
            assert isinstance(result, PlainText)
        else:
            assert unweighted(result) == CHAT
        if purpose != "comparison":
            assert result.location == "here"


@pytest.mark.parametrize("columns", ROWS, ids=" ".join)
def test_columns_that_are_null_are_as_if_absent(columns):
    nulls = {name: None for each in ROWS for name in each} | {"system": None, "tools": None}
    for purpose, is_read in table()[columns].items():
        _, read = PURPOSES[purpose]
        if is_read:
            assert read({**nulls, **ROWS[columns]}, "here") == read(ROWS[columns], "here")


@pytest.mark.parametrize("columns", [each for each in ROWS if each != ("text",)], ids=" ".join)
@pytest.mark.parametrize("as_text", [False, True])
def test_a_system_message_and_tools_accompany_every_layout_of_messages(columns, as_text):
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    row = {**ROWS[columns], "system": "Be kind.", "tools": json.dumps(tools) if as_text else tools}
    system = {"role": "system", "content": "Be kind.", "tools": tools}
    for purpose, is_read in table()[columns].items():
        if is_read:
            result = PURPOSES[purpose][1](row, "here")
            messages = result.prompt if purpose == "comparison" else result
            assert unweighted(messages)[:2] == [system, *ASKED]


def test_tools_without_a_system_message_come_first_and_are_not_learned():
    tools = [{"name": "now"}]
    first, *others = conversation_of({"messages": CHAT, "tools": tools}, "here")
    assert first == {"role": "system", "content": None, "tools": tools, "weight": 0}
    assert others == CHAT
    marked = [{**message, "trainable": True} for message in CHAT]
    first = conversation_of({"messages": marked, "tools": tools, "system": "S"}, "here")[0]
    assert first == {"role": "system", "content": "S", "tools": tools, "trainable": False}


@pytest.mark.parametrize("name", ["video", "videos", "audio", "chat_template_kwargs", "history"])
def test_a_column_that_changes_the_prompt_is_an_error_for_every_purpose(name):
    for read, row in (
        (conversation_of, {"messages": CHAT}),
        (comparison_of, ROWS["chosen", "rejected", "prompt"]),
        (prompt_of, {"prompt": "Hello."}),
    ):
        for empty in (None, [], {}, ""):
            read({**row, name: empty}, "row 3")
        with pytest.raises(UserError, match=f'^row 3: the column "{name}" has'):
            read({**row, name: ["x"]}, "row 3")


@pytest.mark.parametrize("name", ["weight", "margin"])
def test_a_column_that_changes_the_loss_is_an_error_where_there_is_a_loss(name):
    row = {**CONVERSATION_AND_PAIR, name: 0.5}
    for read in (conversation_of, comparison_of):
        with pytest.raises(UserError, match=f'^row 3: the column "{name}" has 0.5'):
            read(row, "row 3")
    assert prompt_of(row, "row 3") == ASKED


CONVERSATION_AND_PAIR = {"messages": CHAT, **ROWS["chosen", "rejected", "prompt"]}


def test_a_completion_that_is_labeled_bad_is_an_error():
    row = ROWS["prompt", "completion"]
    assert conversation_of({**row, "label": True}, "here") == conversation_of(row, "here")
    with pytest.raises(UserError, match='row 3: the column "label" is false'):
        conversation_of({**row, "label": False}, "row 3")
    with pytest.raises(UserError, match='row 3: the column "label" has 3'):
        conversation_of({**row, "label": 3}, "row 3")


def test_only_the_completion_is_learned():
    earlier = [*CHAT, {"role": "user", "content": "And?"}]
    result = conversation_of({"prompt": earlier, "completion": ANSWER}, "here")
    assert result == [*({**message, "weight": 0} for message in earlier), *ANSWER]


@pytest.mark.parametrize(
    ("prompt", "chosen"),
    [
        (ASKED, CHAT),
        ("Hello.", CHAT),
        (None, CHAT),
        ([{"role": "system", "content": "S"}, *ASKED], CHAT),
        (ASKED, [{"role": "system", "content": "S"}, *CHAT]),
        ("Hello.", [{"role": "system", "content": "S"}, *CHAT]),
    ],
)
def test_answers_may_repeat_the_prompt_all_of_it_or_its_end(prompt, chosen):
    rejected = [*chosen[:-1], *OTHER]
    pair = comparison_of({"prompt": prompt, "chosen": chosen, "rejected": rejected}, "here")
    has_system = "S" in str(prompt) + str(chosen)
    assert pair.prompt == [{"role": "system", "content": "S"}] * has_system + ASKED
    assert (pair.first, pair.second) == (ANSWER, OTHER)


def test_a_prompt_that_differs_from_the_conversations_is_an_error():
    with pytest.raises(UserError, match='here: "prompt" differs from the messages before'):
        comparison_of({"prompt": "Other.", "chosen": CHAT, "rejected": [*ASKED, *OTHER]}, "here")


def test_conversations_that_differ_in_an_earlier_answer_have_the_prompt_before_it():
    more = {"role": "user", "content": "And?"}
    pair = comparison_of(
        {"chosen": [*CHAT, more, *ANSWER], "rejected": [*ASKED, *OTHER, more, *OTHER]}, "here"
    )
    assert pair.prompt == ASKED
    assert pair.first == [*ANSWER, more, *ANSWER]
    assert pair.second == [*OTHER, more, *OTHER]


def test_transcripts_of_hh_rlhf_are_conversations():
    start = "\n\nHuman: Hello.\n\nAssistant: Hm.\n\nHuman: So?\n\nAssistant:"
    pair = comparison_of({"chosen": f"{start} Good day.", "rejected": f"{start} What?"}, "here")
    assert pair.prompt == [
        *ASKED,
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": "So?"},
    ]
    assert (pair.first, pair.second) == (ANSWER, OTHER)


def test_an_input_follows_its_instruction_on_a_new_line():
    row = {"instruction": "Translate.", "input": "Guten Tag.", "output": "Good day."}
    assert conversation_of(row, "here") == [
        {"role": "user", "content": "Translate.\nGuten Tag."},
        *ANSWER,
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "x", "reasoning_content": "why"},
        {"role": "assistant", "content": "x", "reasoning": "why"},
        {"role": "assistant", "content": "x", "thinking": "why"},
        {"role": "assistant", "content": "x", "thinking": "why", "reasoning": "why"},
        {"role": "assistant", "content": "x", "thinking": "why", "reasoning": None, "weight": 1},
        {"from": "gpt", "value": "x", "thinking": "why", "tool_calls": None},
    ],
)
def test_reasoning_has_one_name(message):
    expected = {"role": "assistant", "content": "x", "reasoning_content": "why"}
    assert conversation_of({"messages": [*ASKED, message]}, "here") == [*ASKED, expected]


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("human", "user"),
        ("chatgpt", "assistant"),
        ("bing", "assistant"),
        ("bard", "assistant"),
        ("model", "assistant"),
        ("developer", "system"),
        ("observation", "tool"),
        ("function_response", "tool"),
        ("tool", "tool"),
    ],
)
def test_other_names_of_roles(role, expected):
    for message in ({"role": role, "content": "x"}, {"from": role, "value": "x"}):
        assert conversation_of({"conversations": [message]}, "here") == [
            {"role": expected, "content": "x"}
        ]


def test_a_function_call_of_sharegpt_is_a_tool_call():
    call = {"name": "now", "arguments": {"zone": "UTC"}}
    for value in (call, [call]):
        message = {"from": "function_call", "value": json.dumps(value)}
        assert conversation_of({"conversations": [message]}, "here") == [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call}],
            }
        ]


def test_a_message_of_weight_zero_is_not_learned():
    messages = [{**ASKED[0], "weight": 0}, {**ANSWER[0], "weight": 0}, *ASKED, *ANSWER]
    assert conversation_of({"messages": messages}, "here") == messages
    assert prompt_of({"messages": messages}, "here") == [*ASKED, *ANSWER, *ASKED]


def test_messages_may_be_json_text():
    calls = [{"type": "function", "function": {"name": "now", "arguments": "{}"}}]
    row = {
        "messages": json.dumps(
            [*ASKED, {"role": "assistant", "content": None, "tool_calls": json.dumps(calls)}]
        )
    }
    assert conversation_of(row, "here") == [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]


BAD = [
    ({"body": "Hello."}, r"row 3: the row has \['body'\]"),
    ({"messages": "Hello."}, 'row 3, "messages": give a list of messages.*no JSON'),
    ({"messages": []}, "at least one"),
    ({"messages": ["Hello."]}, r'"messages"\[0\]: holds a str'),
    ({"conversations": [{"from": "robot", "value": "Beep."}]}, "'from': 'robot'"),
    ({"conversations": [{"from": "human"}]}, '"value"'),
    ({"conversations": [{"from": "human", "value": "x", "role": "user"}]}, r"and \['role'\] too"),
    ({"messages": [{**ASKED[0], "weight": 1}]}, '"weight": 1 and is no assistant.*customized'),
    ({"messages": [{**ANSWER[0], "weight": 0.5}]}, r'\[0\] has "weight": 0.5'),
    ({"messages": [{**ANSWER[0], "thinking": "a", "reasoning": "b"}]}, "different texts"),
    (
        {"messages": [*ASKED, {**ANSWER[0], "content": "Add.\n</think>\n4"}]},
        r'row 3, "messages"\[1\] has </think> without <think>',
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        r"content\[0\] is the path 'x', and the row is from no directory",
    ),
    (
        {"messages": [{**ANSWER[0], "content": [{"type": "text", "text": "a", "thinking": "b"}]}]},
        r"content\[0\] has \['thinking'\]",
    ),
    (
        {"messages": [{**ANSWER[0], "tool_calls": [{"function": {"name": "f"}, "index": 0}]}]},
        r"tool_calls\[0\] has \['index'\]",
    ),
    (
        {"messages": [{**ANSWER[0], "tool_calls": [{"function": {"name": "f", "parsed": 1}}]}]},
        r"tool_calls\[0\] has \['parsed'\]",
    ),
    ({"prompt": 5, "completion": "x"}, '"prompt": give a text, or a list'),
    ({"messages": CHAT, "tools": "now()"}, 'row 3, "tools": give a list of tools'),
    ({"messages": CHAT, "tools": {"name": "now"}}, 'row 3, "tools": give a list of tools'),
    ({"messages": CHAT, "system": 5}, 'row 3, "system" is a int'),
    (
        {"messages": [{"role": "system", "content": "A"}, *CHAT], "system": "B"},
        'row 3, "system" differs from the system message',
    ),
    ({"instruction": "x", "output": 5}, 'row 3, "output": holds a int'),
    ({"text": "x", "system": "Be kind."}, 'the column "system" does not belong'),
    ({"text": ""}, 'the "text" is empty'),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_an_invalid_conversation_is_rejected_with_its_location(row, message):
    with pytest.raises(UserError, match=message):
        conversation_of(row, "row 3")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": ANSWER}, "there is no question"),
        ({"messages": [{"role": "system", "content": "b"}]}, "there is no question"),
        ({"prompt": CHAT}, "there is no question"),
        ({"text": "Hello?"}, "the row has"),
        ({"prompt": []}, "at least one"),
        ({"prompt": ""}, 'the "prompt" is empty'),
        ({"prompt": 3}, "give a text, or a list"),
    ],
)
def test_a_row_without_a_prompt_is_rejected_with_its_location(row, message):
    with pytest.raises(UserError, match=f"^row 3.*{message}"):
        prompt_of(row, "row 3")


def test_a_prompt_ends_before_the_answers_at_its_end():
    assert prompt_of({"messages": [*CHAT, *CHAT, *OTHER]}, "here") == [*CHAT, *ASKED]


def test_what_is_learned_says_nothing_about_answers_that_are_compared():
    for key, value in (("trainable", True), ("weight", 0)):
        answer = [{**ANSWER[0], key: value}]
        with pytest.raises(UserError, match="row 3: an answer has"):
            comparison_of({"prompt": "x", "chosen": answer, "rejected": OTHER}, "row 3")


@pytest.mark.parametrize("answers", [("completion",), ("chosen", "rejected")])
def test_a_prompt_that_begins_the_answer_is_refused(answers):
    """TRL continues such a message; a chat format would end it before the answer."""
    prompt = [*ASKED, {"role": "assistant", "content": "Sure: "}]
    row = {"prompt": prompt, **dict(zip(answers, ("Good day.", "What?"), strict=False))}
    read = conversation_of if answers == ("completion",) else comparison_of
    with pytest.raises(
        UserError, match='here, "prompt": the prompt ends in the beginning of an ans'
    ):
        read(row, "here")


@pytest.mark.parametrize(
    "arguments", ["{'a': 1}", json.dumps(json.dumps({"a": 1})), "[1]", '{"a": 1'], ids=str
)
def test_arguments_of_a_call_that_are_no_json_object_are_refused(arguments):
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    for each in (call, call["function"]):
        row = {"messages": [*ASKED, {"role": "assistant", "content": "", "tool_calls": [each]}]}
        with pytest.raises(UserError, match=r'"messages"\[1\], tool_calls\[0\].*JSON'):
            conversation_of(row, "here")


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}, ""])
def test_arguments_of_a_call_may_be_an_object_or_its_text(arguments):
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    row = {"messages": [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    conversation: Any = conversation_of(row, "here")
    assert conversation[1]["tool_calls"] == [call]


@pytest.mark.parametrize(
    "row",
    [{"prompt": "  "}, {"question": "\n"}, {"messages": [*CHAT, {"role": "user", "content": []}]}],
    ids=str,
)
def test_an_empty_question_is_no_prompt(row):
    with pytest.raises(UserError, match='here, ".*": the question is empty'):
        prompt_of(row, "here")
