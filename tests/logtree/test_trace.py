"""A trace records what is logged in its context, also in concurrent tasks and other processes.
Without a trace, logging costs nothing.
"""

import asyncio
import json
import pickle
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from planish import logtree
from planish.errors import UserError


def texts(node: logtree.Node) -> list[str]:
    """Return all text below a node, in order."""
    return [
        text
        for child in node.children
        for text in (
            [child]
            if isinstance(child, str)
            else texts(child)
            if isinstance(child, logtree.Node)
            else []
        )
    ]


def outline(node: logtree.Node) -> list:
    """Return headings with their content: [["Prompt", ["text", ...]], ...]."""
    found = []
    for child in node.children:
        if isinstance(child, str):
            found.append(child)
        elif child.tag == "section":
            heading, body = child.children
            assert isinstance(heading, logtree.Node)
            assert isinstance(body, logtree.Node)
            found.append([heading.children[0], *outline(body)])
        elif child.attrs.get("class") not in ("lt-title", "lt-subtitle"):
            found += outline(child)
    return found


def test_scopes_nest_and_headings_get_smaller():
    with logtree.init_trace("T") as trace, logtree.scope_header("a", class_="x", data__kind=3):
        logtree.log_text("one")
        with (
            logtree.scope_header("b"),
            logtree.scope_div(),
            logtree.scope_details("more"),
            logtree.scope_header("c"),
        ):
            logtree.log_text("two")
        logtree.header("aside")
    assert outline(trace.root) == [["a", "one", ["b", "more", ["c", "two"]], "aside"]]
    tags = [node.tag for node in trace.root.walk() if node.tag.startswith("h")]
    assert tags == ["h1", "h2", "h3", "h4", "h3"]
    assert trace.root.children[2].attrs == {"class": "x", "data-kind": "3"}  # pyright: ignore


def test_headings_stop_at_the_sixth():
    with logtree.init_trace("T") as trace:
        scopes = [logtree.scope_header(str(depth)) for depth in range(8)]
        for scope in scopes:
            scope.__enter__()
        for scope in reversed(scopes):
            scope.__exit__(None, None, None)
    assert [node.tag for node in trace.root.walk() if node.tag.startswith("h")][-3:] == [
        "h6",
        "h6",
        "h6",
    ]


def test_the_json_has_the_schema_that_readers_know():
    with logtree.init_trace("T", path=None) as trace, logtree.scope_header("Prompt"):
        logtree.log_text("<b>")
    document = json.loads(json.dumps(trace.to_json()))
    assert list(document) == ["title", "started_at", "path", "root"]
    assert document["title"] == "T"
    assert document["path"] is None
    root = document["root"]
    assert (root["tag"], root["attrs"]) == ("body", {"class": "lt-root"})
    title, subtitle, section = root["children"]
    assert title == {"tag": "h1", "attrs": {"class": "lt-title"}, "children": ["T"]}
    assert subtitle["attrs"] == {"class": "lt-subtitle"}
    assert section == {
        "tag": "section",
        "attrs": {"class": "lt-section"},
        "children": [
            {"tag": "h2", "attrs": {"class": "lt-h2"}, "children": ["Prompt"]},
            {
                "tag": "div",
                "attrs": {"class": "lt-section-body"},
                "children": [{"tag": "p", "attrs": {"class": "lt-p"}, "children": ["<b>"]}],
            },
        ],
    }


async def worker(number: int) -> None:
    with logtree.scope_header(f"task {number}"):
        for step in range(3):
            await asyncio.sleep(0.001 * ((number * 7 + step * 3) % 4))
            logtree.log_text(f"{number}.{step}")
            with logtree.scope_header("inner"):
                await asyncio.sleep(0)
                logtree.log_text(f"{number}.{step} in")


def test_concurrent_tasks_do_not_mix():
    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(6):
                tasks.create_task(worker(number))

    with logtree.init_trace("T") as trace:
        asyncio.run(run())
    assert sorted(outline(trace.root)) == [
        [f"task {n}", *(part for s in range(3) for part in (f"{n}.{s}", ["inner", f"{n}.{s} in"]))]
        for n in range(6)
    ]


def test_decorators_wrap_plain_and_async_functions():
    @logtree.scope_header("adds")
    def add(a: int, b: int = 1) -> int:
        logtree.log_text("adding")
        return a + b

    @logtree.scope_header_decorator
    async def play(number: int) -> int:
        """Plays."""
        await asyncio.sleep(0.001 * (3 - number))
        logtree.log_text(str(number))
        return number

    @logtree.scope_header_decorator("titled")
    def nothing() -> None: ...

    async def run() -> Sequence[int]:
        return await asyncio.gather(play(1), play(2))

    assert add(1) == 2  # nobody listens
    with logtree.init_trace("T") as trace:
        assert add(1, b=4) == 5
        assert asyncio.run(run()) == [1, 2]
        nothing()
    assert play.__doc__ == "Plays."
    assert asyncio.iscoroutinefunction(play)
    assert outline(trace.root) == [["adds", "adding"], ["play", "1"], ["play", "2"], ["titled"]]


def test_one_scope_can_be_entered_within_itself():
    scope = logtree.scope_header("again")
    with logtree.init_trace("T") as trace, scope, scope:
        logtree.log_text("deep")
    assert outline(trace.root) == [["again", ["again", "deep"]]]


def test_generators_are_rejected_because_they_outlive_the_scope():
    def numbers():
        yield 1

    with pytest.raises(UserError, match="numbers is a generator"):
        logtree.scope_header("x")(numbers)


def exceptions(node: logtree.Node) -> list[logtree.Node]:
    return [each for each in node.walk() if each.attrs.get("class") == "lt-exc"]


def divide() -> None:
    with logtree.scope_header("outer"), logtree.scope_header("inner"):
        logtree.log_text("before")
        _ = 1 // 0


def test_an_exception_is_recorded_once_and_propagates():
    with logtree.init_trace("T") as trace:
        with pytest.raises(ZeroDivisionError):
            divide()
        logtree.log_text("after")
    [block] = exceptions(trace.root)
    assert texts(block)[0].startswith("ZeroDivisionError")
    assert "_ = 1 // 0" in texts(block)[1]
    assert outline(trace.root) == [["outer", ["inner", "before", *texts(block)]], "after"]


def test_an_exception_of_a_capture_is_recorded_there_and_in_the_tree_around_it():
    nodes = []

    def fail() -> None:
        with logtree.scope_header("around"), logtree.capture("G") as node:
            nodes.append(node)
            divide()

    with logtree.init_trace("T") as trace, pytest.raises(ZeroDivisionError):
        fail()
    assert len(exceptions(trace.root)) == len(exceptions(nodes[0])) == 1


def test_a_task_that_is_cancelled_says_where_it_was():
    async def run() -> None:
        with logtree.scope_header("slow"):
            await asyncio.sleep(60)

    async def main() -> None:
        await asyncio.wait_for(run(), 0.01)

    with logtree.init_trace("T") as trace, pytest.raises(TimeoutError):
        asyncio.run(main())
    assert "await asyncio.sleep(60)" in texts(exceptions(trace.root)[0])[1]


def test_nothing_happens_outside_a_trace():
    with logtree.scope_header("a"), logtree.scope_div(), logtree.scope_details("b"):
        logtree.log_text("x")
        logtree.log_html("<b>")
        logtree.log_formatter(logtree.ConversationFormatter([]))
        logtree.details("x")
        logtree.header("x")
        logtree.table({"not": "allowed"})
        logtree.table_from_dict({})
        logtree.table_from_dict_of_lists({"a": [1], "b": []})
        logtree.conversation([])
    assert not logtree.flush_trace()


def test_logging_can_be_switched_off_for_a_part():
    with logtree.init_trace("T") as trace:
        for number in range(4):
            with logtree.optional_enable_logging(number < 2), logtree.scope_header(str(number)):
                logtree.log_text("said")
        with logtree.scope_disable():
            logtree.log_text("unsaid")
    assert outline(trace.root) == [["0", "said"], ["1", "said"]]


def test_the_page_is_written_at_the_end_when_asked_for_and_after_an_exception(tmp_path):
    path = tmp_path / "deep" / "page.html"
    with logtree.init_trace("T & t", path) as trace:
        logtree.log_text("early")
        assert not path.exists()
        assert logtree.flush_trace()
        assert "early" in path.read_text()
        with logtree.capture("detached"):
            assert logtree.flush_trace()
        logtree.log_text("late")
    page = path.read_text()
    assert "late" in page
    assert "<title>T &amp; t</title>" in page
    assert trace.to_json()["path"] == str(path)
    with pytest.raises(RuntimeError), logtree.init_trace("T", tmp_path / "failed.html"):
        raise RuntimeError("reason")
    assert "RuntimeError: reason" in (tmp_path / "failed.html").read_text()
    with (
        pytest.raises(RuntimeError),
        logtree.init_trace("T", tmp_path / "none.html", write_on_error=False),
    ):
        raise RuntimeError
    assert not (tmp_path / "none.html").exists()


def captured(number: int) -> logtree.Node:
    with logtree.capture(f"Group {number}", data__g=number) as node, logtree.scope_header("Reward"):
        logtree.table_from_dict({"reward": number})
        logtree.conversation([{"role": "user", "content": "hi"}])
    return node


def test_a_capture_is_detached_until_it_is_attached():
    with logtree.init_trace("T") as trace:
        logtree.log_text("before")
        node = captured(1)
        logtree.log_text("after")
        assert outline(trace.root) == ["before", "after"]
    trace.attach(node)
    assert outline(trace.root)[2][0] == "Group 1"
    assert node.attrs == {"class": "lt-section", "data-g": "1"}


def test_a_capture_pickles():
    node = captured(2)
    assert pickle.loads(pickle.dumps(node)) == node


@pytest.mark.slow
def test_a_capture_comes_from_another_process():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(captured, 3).result() == captured(3)
