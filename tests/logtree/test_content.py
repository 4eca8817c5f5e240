"""Logged content is escaped, is copied when it is logged, and can be read by programs."""

import json
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from markupsafe import Markup

from planish import logtree
from planish.errors import UserError
from planish.logtree.html import to_html, visible
from planish.logtree.nodes import plain

NASTY = "</script><img src=x onerror=alert(1)> \"q\" 'a' &amp; \x00\x1b[31m\r\n\ud800 \u202eabc مرحبا 😀"


class Page(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


# The seed's snippet, as it stands there.
def find_conversations(node):
    results = []
    if isinstance(node, dict):
        if node.get("data", {}).get("type") == "conversation":
            results.append(node["data"])
        for child in node.get("children", []):
            if isinstance(child, dict):
                results.extend(find_conversations(child))
    return results


def logged(*calls) -> logtree.Trace:
    with logtree.init_trace("T") as trace:
        for call in calls:
            call()
    return trace


@pytest.mark.parametrize(
    "call",
    [
        lambda: logtree.log_text(NASTY),
        lambda: logtree.log_text(NASTY, div_class=NASTY),
        lambda: logtree.log_text(Markup(NASTY)),
        lambda: logtree.details(NASTY, summary=NASTY),
        lambda: logtree.header(NASTY),
        lambda: logtree.table([{NASTY: NASTY}], caption=NASTY),
        lambda: logtree.table_from_dict({NASTY: NASTY}, key_header=NASTY),
        lambda: logtree.scope_header(NASTY, data__x=NASTY)(lambda: None)(),
        lambda: logtree.conversation([{"role": NASTY, "content": NASTY, "name": NASTY}]),
        lambda: logtree.conversation([{"role": "user", "content": [{"type": NASTY, "x": NASTY}]}]),
        lambda: logtree.conversation(
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": NASTY, "arguments": NASTY}}],
                }
            ]
        ),
        lambda: logtree.conversation(
            [
                {
                    "role": "assistant",
                    "content": "",
                    "unparsed_tool_calls": [{"raw_text": NASTY, "error": NASTY}],
                }
            ]
        ),
    ],
)
def test_text_is_never_read_as_html(call):
    trace = logged(call)
    page = trace.to_html().encode().decode()  # encodes: nothing that UTF-8 cannot hold is left
    assert "<img" not in page
    assert "</script" not in page
    assert not set(page) & {"\x00", "\x1b", "\r"}
    json.dumps(trace.to_json()).encode("ascii")


def test_what_a_page_cannot_show_becomes_a_visible_sign():
    assert visible("a\x00\r\n\t\x7f\ud83d\x85😀") == "a␀␍\n\t␡\\ud83d\\u0085😀"
    page = Page(logged(lambda: logtree.log_text(NASTY)).to_html())
    assert visible(NASTY) in page.text


@given(st.text())
def test_the_text_of_a_page_is_the_text_that_was_logged(text):
    node = logtree.Node("pre", {}, [text])
    parsed = Page(to_html(node))
    assert parsed.tags == ["pre"]
    # the line end that browsers drop behind <pre>
    assert parsed.text.removeprefix("\n") == visible(text)


def test_html_goes_in_as_it_is():
    trace = logged(
        lambda: logtree.log_html("<em>x</em>"),
        lambda: logtree.log_html("<i>y</i>", div_class="own"),
    )
    assert '<div class="lt-html"><em>x</em></div>' in trace.to_html()
    assert '<div class="own"><i>y</i></div>' in trace.to_html()


def test_the_seeds_snippet_finds_every_conversation():
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}]
    with logtree.init_trace("T") as trace:
        logtree.conversation(messages)
        with logtree.scope_header("Policy Response"):
            logtree.log_formatter(
                logtree.ConversationFormatter([{"role": "assistant", "content": "4"}])
            )
    document = json.loads(json.dumps(trace.to_json()))
    lines = [
        f"{msg['role']}: {msg['content'][:100]}"
        for conv in find_conversations(document["root"])
        for msg in conv["messages"]
    ]
    assert lines == ["system: Be short.", "user: 2 + 2?", "assistant: 4"]


def data_of(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    trace = logged(lambda: logtree.conversation(messages))
    return find_conversations(trace.to_json()["root"])[0]["messages"]


def test_content_is_a_string_wherever_it_can_be():
    text = {"type": "text", "text": "a"}
    thinking = {"type": "thinking", "thinking": "hm"}
    assert (
        data_of({"role": "user", "content": [text, {"type": "text", "text": "b"}]})[0]["content"]
        == "ab"
    )
    assert data_of({"role": "assistant", "content": None})[0]["content"] == ""
    assert data_of({"role": "assistant", "content": []})[0]["content"] == ""
    assert data_of({"role": "assistant", "content": [thinking, text]})[0]["content"] == [
        thinking,
        text,
    ]


def test_all_keys_of_a_message_are_kept_as_plain_json():
    @dataclass
    class Call:
        function: dict[str, str]

    class Unparsed:
        def model_dump(self):
            return {"raw_text": "<tool_call>", "error": "no JSON"}

    [message] = data_of(
        {
            "role": "assistant",
            "content": "x",
            "tool_calls": [Call({"name": "f", "arguments": "{}"})],
            "unparsed_tool_calls": (Unparsed(),),
            "trainable": False,
            "name": None,
        }
    )
    assert message == {
        "role": "assistant",
        "content": "x",
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        "unparsed_tool_calls": [{"raw_text": "<tool_call>", "error": "no JSON"}],
        "trainable": False,
    }


def test_a_conversation_is_as_it_was_when_it_was_logged():
    messages = [{"role": "user", "content": "first"}]
    with logtree.init_trace("T") as trace:
        logtree.conversation(messages)
        messages[0]["content"] = "changed"
        messages.append({"role": "assistant", "content": "second"})
    [found] = find_conversations(trace.to_json()["root"])
    assert found["messages"] == [{"role": "user", "content": "first"}]
    assert "changed" not in trace.to_html()


def test_a_page_shows_thinking_tool_calls_and_results():
    page = logged(
        lambda: logtree.conversation(
            [
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "let me see"}]},
                {"role": "assistant", "content": "", "reasoning_content": "another thought"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "add", "arguments": {"x": 1}}}],
                },
                {"role": "assistant", "content": [{"type": "image", "url": "cat.png"}]},
                {"role": "tool", "content": "42", "tool_call_id": "call_0"},
            ]
        )
    ).to_html()
    text = Page(page).text
    for shown in (
        "let me see",
        "another thought",
        "add",
        '"x": 1',
        "cat.png",
        "42",
        "tool · call_0",
    ):
        assert shown in text


def test_a_formatter_draws_itself_and_may_have_data():
    class Plain:
        def to_html(self):
            return "<b>drawn</b>"

        def get_css(self):
            return ".mine { color: red } </style><script>"

    class WithData(Plain):
        def to_data(self):
            return {"type": "game", "board": np.arange(3)}

    with logtree.init_trace("T") as trace:
        logtree.log_formatter(Plain())
        logtree.log_formatter(WithData())
    page = trace.to_html()
    assert page.count("<b>drawn</b>") == 2
    assert page.count(".mine {") == 1
    assert page.count("</style>") == 1
    plain_node, data_node = trace.to_json()["root"]["children"][2:]
    assert plain_node["children"] == ["<b>drawn</b>"]
    assert "data" not in plain_node
    assert data_node["data"] == {"type": "game", "board": [0, 1, 2]}
    assert data_node["children"] == []


def cells(trace: logtree.Trace) -> list[list[str]]:
    return [
        [str(cell.children[0]) for cell in row.children if isinstance(cell, logtree.Node)]
        for row in trace.root.walk()
        if row.tag == "tr"
    ]


def test_tables_of_every_kind():
    pandas = pytest.importorskip("pandas")
    expected = [["a", "b"], ["1", "x"], ["2", ""]]
    assert cells(logged(lambda: logtree.table([{"a": 1, "b": "x"}, {"a": 2}]))) == expected
    assert (
        cells(logged(lambda: logtree.table(pandas.DataFrame({"a": [1, 2], "b": ["x", ""]}))))
        == expected
    )
    assert cells(logged(lambda: logtree.table([(1, "x"), [2, ""]]))) == expected[1:]
    assert cells(logged(lambda: logtree.table([], caption="none"))) == []
    by_value = logged(lambda: logtree.table_from_dict({"x": 2, "y": 1}, sort_by="value"))
    assert cells(by_value) == [["key", "value"], ["y", "1"], ["x", "2"]]
    columns = {"a": [1, 2], "b": [3, 4]}
    assert cells(logged(lambda: logtree.table_from_dict_of_lists(columns, order=["b"]))) == [
        ["b"],
        ["3"],
        ["4"],
    ]
    assert cells(logged(lambda: logtree.table_from_dict_of_lists({}))) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: logtree.table({"a": 1}), "table_from_dict"),
        (lambda: logtree.table("text"), "table of a str"),
        (lambda: logtree.table([{"a": 1}, [2]]), "all dictionaries or all lists"),
        (lambda: logtree.table_from_dict({}, sort_by="size"), "sort_by='size'"),
        (lambda: logtree.table_from_dict_of_lists({"a": [1], "b": []}), "one length"),
        (lambda: logtree.table_from_dict_of_lists({"a": [1]}, order=["z"]), r"\['z'\]"),
        (lambda: logtree.scope_div(**{"a b": 1})(lambda: None)(), "'a b' is no name"),
    ],
)
def test_unloggable_values_are_rejected_with_a_remedy(call, message):
    with pytest.raises(UserError, match=message):
        logged(call)


def test_plain_json_of_other_libraries_values():
    values = {
        "a": np.float32(0.5),
        "b": np.bool_(True),
        "c": float("nan"),
        1: {"x"},
        "e": object,
        "f": Markup("<b>"),
    }
    assert plain(values) == {
        "a": 0.5,
        "b": True,
        "c": None,
        "1": ["x"],
        "e": "<class 'object'>",
        "f": "<b>",
    }
    assert type(plain(Markup("<b>"))) is str
