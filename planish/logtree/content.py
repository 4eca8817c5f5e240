"""Functions that log text, tables and conversations. Each call adds one node at the current
position of the trace, or does nothing outside a trace.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from markupsafe import Markup

from planish.errors import UserError
from planish.logtree.conversations import conversation_data, conversation_node
from planish.logtree.html import to_html
from planish.logtree.nodes import Node, details_node, plain, text_of
from planish.logtree.trace import append


class Formatter(Protocol):
    """An object that renders itself as HTML. If it also has a method `to_data`, which returns a
    mapping with "type", programs can read that data from the JSON.
    """

    def to_html(self) -> str: ...
    def get_css(self) -> str: ...


@runtime_checkable
class _HasData(Protocol):
    def to_data(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class ConversationFormatter:
    """Messages for `log_formatter`; `conversation(messages)` is shorter."""

    messages: Sequence[Mapping[str, Any]]

    def to_html(self) -> str:
        return to_html(conversation_node(self.messages))

    def get_css(self) -> str:
        return ""  # every page has the rules for conversations

    def to_data(self) -> dict[str, Any]:
        return conversation_data(self.messages)


def log_text(text: str, *, div_class: str | None = None) -> None:
    """Log text as a paragraph, or with `div_class` as a <div> of that class."""
    tag, css_class = ("div", div_class) if div_class else ("p", "lt-p")
    append(lambda _: Node(tag, {"class": css_class}, [text_of(text)]))


def log_html(html: str, *, div_class: str | None = None) -> None:
    """Log HTML unescaped. Never pass text that a model wrote: every other function of this module
    escapes its arguments, this one does not.
    """
    append(lambda _: Node("div", {"class": div_class or "lt-html"}, [Markup(html)]))


def log_formatter(formatter: Formatter) -> None:
    """Log an object that renders itself as HTML."""
    append(lambda _: _formatted(formatter))


def _formatted(formatter: Formatter) -> Node:
    if isinstance(formatter, ConversationFormatter):
        return conversation_node(formatter.messages)
    data = plain(formatter.to_data()) if isinstance(formatter, _HasData) else None
    html = Markup(formatter.to_html())
    return Node("div", {"class": "lt-html"}, [html], data=data, css=formatter.get_css() or None)


def conversation(messages: Sequence[Mapping[str, Any]]) -> None:
    """Log a copy of messages with role and content. Programs find them by data["type"] ==
    "conversation".
    """
    append(lambda _: conversation_node(messages))


def details(text: str, *, summary: str = "Details", pre: bool = True) -> None:
    """Log text that is collapsed until the reader opens it; `pre` keeps its white space."""
    append(
        lambda _: details_node(
            text_of(summary),
            Node("pre" if pre else "div", {"class": "lt-details-body"}, [text_of(text)]),
            css_class="lt-details",
        )
    )


def header(text: str, *, level: int | None = None) -> None:
    """Log a heading without a section. `level` is 1 to 6; by default, the level that a section at
    this position would have.
    """

    def make(here: int) -> Node:
        rank = here if level is None else max(1, min(6, level))
        return Node(f"h{rank}", {"class": f"lt-h{rank}"}, [text_of(text)])

    append(make)


def table(obj: Any, *, caption: str | None = None) -> None:
    """Log a table: a list of dictionaries (one column for each key of any of them), a list of lists
    (without a header row), or a pandas DataFrame. Raises UserError for anything else. For a
    dictionary, use `table_from_dict` or `table_from_dict_of_lists`.
    """

    def make(_: int) -> Node:
        if hasattr(obj, "itertuples") and hasattr(obj, "columns"):
            return table_node(obj.itertuples(index=False), head=obj.columns, caption=caption)
        if isinstance(obj, Mapping) or not isinstance(obj, Sequence) or isinstance(obj, str):
            raise UserError(
                f"table of a {type(obj).__name__}: give a list of dictionaries, a list of lists or "
                "a DataFrame; for a dictionary use table_from_dict or table_from_dict_of_lists"
            )
        if all(isinstance(row, Mapping) for row in obj):
            head = list(dict.fromkeys(key for row in obj for key in row))
            return table_node(
                [[row.get(key, "") for key in head] for row in obj], head=head, caption=caption
            )
        if all(isinstance(row, Sequence) and not isinstance(row, str) for row in obj):
            return table_node(obj, caption=caption)
        raise UserError("table: the rows must be all dictionaries or all lists")

    append(make)


def table_from_dict(
    data: Mapping[Any, Any],
    *,
    caption: str | None = None,
    key_header: str = "key",
    value_header: str = "value",
    sort_by: str | None = None,
) -> None:
    """Log a table with one row for each key. `sort_by` is "key", "value", or None for the order of
    the dictionary.
    """

    def make(_: int) -> Node:
        if sort_by not in (None, "key", "value"):
            raise UserError(f'sort_by={sort_by!r}: give "key", "value" or None')
        rows = list(data.items())
        if sort_by is not None:
            rows.sort(key=lambda row: row[0 if sort_by == "key" else 1])
        node = table_node(rows, head=(key_header, value_header), caption=caption)
        return replace(node, attrs={"class": "lt-table lt-dict"})

    append(make)


def table_from_dict_of_lists(
    columns: Mapping[str, Sequence[Any]],
    *,
    caption: str | None = None,
    order: Sequence[str] | None = None,
) -> None:
    """Log a table with one column for each key, all of the same length. `order` selects the columns
    and their order.
    """

    def make(_: int) -> Node:
        head = list(columns) if order is None else list(order)
        unknown = [name for name in head if name not in columns]
        if unknown:
            raise UserError(
                f"order names {unknown}, which are not columns; the columns are {list(columns)}"
            )
        if len({len(column) for column in columns.values()}) > 1:
            lengths = {name: len(column) for name, column in columns.items()}
            raise UserError(f"the columns of a table must have one length; they have {lengths}")
        return table_node(
            zip(*(columns[name] for name in head), strict=True), head=head, caption=caption
        )

    append(make)


def table_node(
    rows: Iterable[Iterable[Any]], *, head: Iterable[Any] = (), caption: str | None = None
) -> Node:
    """Return a table as a node, with every cell as text."""
    parts: list[Node | str] = []
    if caption:
        parts.append(Node("caption", {"class": "lt-table-caption"}, [text_of(caption)]))
    named = [Node("th", {}, [text_of(name)]) for name in head]
    if named:
        parts.append(Node("thead", {}, [Node("tr", {}, [*named])]))
    body = Node("tbody")
    for row in rows:
        body.children.append(Node("tr", {}, [Node("td", {}, [text_of(cell)]) for cell in row]))
    parts.append(body)
    return Node("table", {"class": "lt-table"}, parts)
