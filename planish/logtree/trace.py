"""Traces, captures, and the scopes within them.

The only state is the position where the next node goes. It is a context variable: each asyncio task
starts at the position of the task that created it, so concurrent trajectories do not mix. Outside a
trace, every function of this module does nothing and costs one look-up.

A capture is a separate tree, attached to a trace later, perhaps from another process. Each group of
rollouts is logged into a capture. An exception that leaves a scope is recorded there once and then
propagates. Every part of the tree that the exception left gets the attribute data-failed.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, overload

from jinja2 import Environment, PackageLoader

from planish.errors import UserError
from planish.files import write_atomically
from planish.logtree.html import css_of, to_html
from planish.logtree.nodes import Node, attributes, details_node, section, text_of

P = ParamSpec("P")
R = TypeVar("R")

_RECORDED = "_planish_logtree_recorded"

_PAGES = Environment(loader=PackageLoader("planish.logtree", "."), autoescape=True)


@dataclass
class Trace:
    """A tree with a title, which can be written as JSON and as an HTML page."""

    title: str
    path: Path | None = None
    """Path of the page, which is written at the end and by `flush_trace`."""
    started_at: datetime = field(default_factory=lambda: datetime.now().astimezone())
    root: Node = field(init=False)

    def __post_init__(self) -> None:
        started = self.started_at.isoformat(sep=" ", timespec="seconds")
        self.root = Node(
            "body",
            {"class": "lt-root"},
            [
                Node("h1", {"class": "lt-title"}, [self.title]),
                Node("div", {"class": "lt-subtitle"}, [started]),
            ],
        )

    def attach(self, node: Node) -> None:
        """Append a captured tree."""
        self.root.children.append(node)

    def to_json(self) -> dict[str, Any]:
        """Return the trace as plain JSON: title, started_at, path and root."""
        return {
            "title": self.title,
            "started_at": self.started_at.isoformat(),
            "path": None if self.path is None else str(self.path),
            "root": self.root.to_json(),
        }

    def to_html(self) -> str:
        """Return the trace as a self-contained HTML page."""
        page = _PAGES.get_template("trace.html")
        return page.render(title=self.title, css=css_of(self.root), body=to_html(self.root))

    def write(self) -> None:
        """Write the page to `path`."""
        if self.path is None:
            raise UserError("this trace has no path; give one to init_trace")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, self.to_html().encode(errors="backslashreplace"))


@dataclass(frozen=True)
class _Position:
    container: Node
    level: int
    """The level of the enclosing heading."""
    trace: Trace | None


_position: ContextVar[_Position | None] = ContextVar("planish_logtree_place", default=None)


def append(make: Callable[[int], Node]) -> None:
    """Add the node `make(level)` at the current position, where `level` is the level of a heading
    there. Outside a trace, `make` is not called.
    """
    position = _position.get()
    if position is not None:
        position.container.children.append(make(min(6, position.level + 1)))


@contextmanager
def init_trace(
    title: str, path: str | Path | None = None, *, write_on_error: bool = True
) -> Iterator[Trace]:
    """Record a trace of the block. With a `path`, the page is written there at the end, also after
    an exception, unless `write_on_error` is False.
    """
    trace = Trace(text_of(title), None if path is None else Path(path))
    done = False
    try:
        with _at(_Position(trace.root, 1, trace)):
            yield trace
        done = True
    finally:
        if trace.path is not None and (done or write_on_error):
            trace.write()


@contextmanager
def capture(title: str, **attrs: Any) -> Iterator[Node]:
    """Record the block in a section that belongs to no trace yet; see `Trace.attach`."""
    position = _position.get()
    node, body = section(title, 2, attributes(attrs))
    with _at(_Position(body, 2, position.trace if position else None)):
        yield node


@contextmanager
def _at(place: _Position) -> Iterator[None]:
    """Set the position to the root of a tree. An exception that leaves the tree is recorded in it
    and may be recorded again in the enclosing tree.
    """
    token = _position.set(place)
    try:
        yield
    except BaseException as error:
        _record(error, place.container)
        setattr(error, _RECORDED, False)
        raise
    finally:
        _position.reset(token)


class Scope(AbstractContextManager[None]):
    """A part of the tree, as a context manager for a block, or as a decorator for every call of a
    plain or async function.
    """

    def __init__(self, make: Callable[[int], tuple[Node, Node, int]]) -> None:
        """`make` takes the level of the enclosing heading and returns (part, body, level of the
        part's own heading).
        """
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        block = _within(self._make)
        block.__enter__()
        self._entered.append(block)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, at)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UserError(
                f"{function.__name__} is a generator, which runs after it has returned; use `with` "
                "inside it"
            )
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                with _within(self._make):
                    return await function(*args, **kwargs)

            return call_async  # pyright: ignore[reportReturnType]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with _within(self._make):
                return function(*args, **kwargs)

        return call


@contextmanager
def _within(make: Callable[[int], tuple[Node, Node, int]]) -> Iterator[None]:
    position = _position.get()
    if position is None:
        yield
        return
    node, body, level = make(position.level)
    position.container.children.append(node)
    token = _position.set(replace(position, container=body, level=level))
    try:
        yield
    except GeneratorExit:  # closing an unfinished generator is not a failure
        raise
    except BaseException as error:
        node.attrs["data-failed"] = type(error).__name__
        _record(error, body)
        raise
    finally:
        _position.reset(token)


def scope_header(title: str, **attrs: Any) -> Scope:
    """Return a scope with a heading; scopes inside it get smaller headings. class_="x" and
    data__y="z" become the attributes class="x" and data-y="z".
    """

    def make(level: int) -> tuple[Node, Node, int]:
        node, body = section(title, min(6, level + 1), attributes(attrs))
        return node, body, min(6, level + 1)

    return Scope(make)


@overload
def scope_header_decorator(title: str) -> Scope: ...
@overload
def scope_header_decorator(title: Callable[P, R]) -> Callable[P, R]: ...
def scope_header_decorator(title: Any) -> Any:
    """`scope_header` as a decorator; without a title, the function's name is the heading."""
    return scope_header(title) if isinstance(title, str) else scope_header(title.__name__)(title)


def scope_div(**attrs: Any) -> Scope:
    """Return a scope that is a <div>, with attributes as in `scope_header`."""

    def make(level: int) -> tuple[Node, Node, int]:
        node = Node("div", attributes(attrs))
        return node, node, level

    return Scope(make)


def scope_details(summary: str) -> Scope:
    """Return a scope that is collapsed until the reader opens it."""

    def make(level: int) -> tuple[Node, Node, int]:
        body = Node("div", {"class": "lt-details-body"})
        return details_node(text_of(summary), body, css_class="lt-details"), body, level

    return Scope(make)


@contextmanager
def scope_disable() -> Iterator[None]:
    """Log nothing in the block, except in traces and captures that begin there."""
    token = _position.set(None)
    try:
        yield
    finally:
        _position.reset(token)


@contextmanager
def optional_enable_logging(enable: bool) -> Iterator[None]:
    """Log in the block only if `enable`."""
    if enable:
        yield
        return
    with scope_disable():
        yield


def flush_trace() -> bool:
    """Write the page of the current trace as it is now; False if there is no trace or it has no
    path.
    """
    position = _position.get()
    if position is None or position.trace is None or position.trace.path is None:
        return False
    position.trace.write()
    return True


def _record(error: BaseException, body: Node) -> None:
    """Record an exception in the tree, unless it is there already. An attribute of the exception
    marks it as recorded.
    """
    if getattr(error, _RECORDED, False):
        return
    setattr(error, _RECORDED, True)
    trail = "".join(traceback.format_exception(error))
    summary, shown = f"{type(error).__name__}: {error}", Node("pre", {}, [trail])
    body.children.append(details_node(summary, shown, css_class="lt-exc", open="open"))
