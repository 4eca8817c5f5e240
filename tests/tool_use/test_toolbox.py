"""Running the tool calls of one message."""

import asyncio
import json
import threading
from typing import Any, cast

import pytest

from planish.errors import UserError
from planish.tool_use import Toolbox, ToolResult, tool
from planish.tool_use.toolbox import shorten


@tool
def double(x: int) -> int:
    """Double a number."""
    return 2 * x


@tool
def explode(x: int = 0) -> int:
    """Fail."""
    return 1 // x


@tool
async def sleep(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "awake"


@tool
def leave(x: int = 0) -> ToolResult:
    """End."""
    return ToolResult("bye", stop=True, metrics={"left": 1})


@tool
def long(length: int) -> str:
    """Much text."""
    return "0123456789" * (length // 10)


TOOLS = [double, explode, sleep, leave, long]


def call(name: str, arguments: Any = None, id: str | None = None) -> Any:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"type": "function", "id": id, "function": {"name": name, "arguments": text}}


def run(*calls: Any, **options: Any) -> Any:
    return asyncio.run(Toolbox(TOOLS, **options).run(list(calls)))


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
def test_answers_in_the_order_of_the_calls(execution):
    slow, fast = call("sleep", {"seconds": 0.02}, "a"), call("double", {"x": 4}, "b")
    first, second = run(slow, fast, execution=execution)
    assert first.message == {
        "role": "tool",
        "content": "awake",
        "name": "sleep",
        "tool_call_id": "a",
    }
    assert second.message == {"role": "tool", "content": "8", "name": "double", "tool_call_id": "b"}
    assert not first.is_error
    assert first.tool == "sleep"


def test_parallel_calls_overlap_and_sequential_ones_do_not():
    def contents(execution, seconds):
        barrier = threading.Barrier(2, timeout=seconds)

        @tool
        def meet() -> str:
            """Wait for the other."""
            barrier.wait()
            return "met"

        box = Toolbox([meet], execution=execution)
        return [result.message["content"] for result in asyncio.run(box.run([call("meet")] * 2))]

    assert contents("parallel", 50.0) == ["met", "met"]
    assert contents("sequential", 0.05) == ["Error: meet: BrokenBarrierError: "] * 2


@pytest.mark.parametrize(
    ("called", "content"),
    [
        (
            call("triple"),
            "Error: there is no tool 'triple'. The tools are: double, explode, sleep, leave, long",
        ),
        (
            call("double", {"y": 1}),
            "Error: double: wrong arguments: x is missing; y is unknown. The parameters are: x",
        ),
        (
            call("double", "{"),
            "Error: double: the arguments are not JSON (Expecting property name enclosed in double "
            "quotes",
        ),
        (call("double", "[1]"), "Error: double: the arguments are not a JSON object, such as {}"),
        (call("explode"), "Error: explode: ZeroDivisionError: integer division or modulo by zero"),
    ],
)
def test_errors_are_reported_to_the_model(called, content):
    [result] = run(called)
    assert result.is_error
    assert result.message["content"].startswith(content)
    assert result.message["role"] == "tool"


@pytest.mark.parametrize("is_async", [True, False])
def test_a_tool_that_takes_too_long(is_async):
    go_on, ended = threading.Event(), threading.Event()

    @tool
    def block() -> str:
        """Wait without letting others go on."""
        go_on.wait(60)
        ended.set()
        return "awake"

    @tool
    async def wait() -> str:
        """Wait."""
        await asyncio.sleep(60)
        ended.set()
        return "awake"

    late = wait if is_async else block
    [result] = asyncio.run(Toolbox([late], timeout_seconds=0.02).run([call(late.name)]))
    assert not ended.is_set()
    go_on.set()
    assert result.is_error
    assert result.message["content"] == f"Error: {late.name} returned no result within 0.02 seconds"


def test_a_tools_own_timeout_is_its_error():
    @tool
    async def ask() -> str:
        """Ask."""
        raise TimeoutError("no reply")

    [result] = asyncio.run(Toolbox([ask]).run([call("ask")]))
    assert result.message["content"] == "Error: ask: TimeoutError: no reply"


def test_cancelling_is_no_error_of_a_tool():
    async def cancelled():
        task = asyncio.create_task(Toolbox(TOOLS).run([call("sleep", {"seconds": 60})]))
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_long_results_are_cut_and_say_so():
    [result] = run(call("long", {"length": 5000}), max_result_chars=100)
    content = result.message["content"]
    assert content.startswith("0123456789" * 5 + "\n[... 4900 of 5000 characters left out ...]\n")
    assert content.endswith("\n" + "0123456789" * 5)
    assert (
        run(call("long", {"length": 100}), max_result_chars=100)[0].message["content"]
        == "0123456789" * 10
    )


@pytest.mark.parametrize("length", [9, 10, 11, 12])
def test_what_is_kept_is_what_fits(length):
    text = "abcdefghijkl"[:length]
    shown = shorten(text, 10)
    kept = "".join(line for line in shown.split("\n") if not line.startswith("[..."))
    assert len(kept) == min(length, 10)
    assert (shown == text) == (length <= 10)


def test_a_stop_ends_a_sequence():
    calls = [call("double", {"x": 1}), call("leave"), call("double", {"x": 2})]
    assert [result.stop for result in run(*calls, execution="sequential")] == [False, True]
    assert [result.stop for result in run(*calls)] == [False, True, False]
    assert run(calls[1])[0].metrics == {"left": 1}


def test_an_unreadable_call_is_answered():
    result = Toolbox(TOOLS).answer_unparsed(
        {"raw_text": "<tool_call>{", "error": "the call is not closed"}
    )
    assert result.is_error
    assert (
        "Error: the tool call could not be read: the call is not closed."
        in result.message["content"]
    )


@pytest.mark.parametrize(
    "options",
    [
        {"execution": "both"},
        {"timeout_seconds": 0},
        {"max_result_chars": 5},
        {"tools": [double, double]},
    ],
)
def test_invalid_options_are_rejected(options):
    with pytest.raises(
        UserError,
        match=r"tool_execution|tool_timeout_seconds|max_result_chars|several have the name double",
    ):
        Toolbox(**{"tools": TOOLS, **options})


class Given:
    """A tool that is not a function. Its `run` returns a given value."""

    name, description = "given", "Give."

    def __init__(self, value: Any) -> None:
        self.value = value
        self.parameters_schema = {"type": "object", "properties": {}}

    async def run(self, input) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


@pytest.mark.parametrize("execution", ["parallel", "sequential"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "the tool given returned a str;.*ToolResult"),
        (ToolResult(cast(Any, 12)), r"given returned ToolResult\(12\)"),
    ],
)
def test_a_tool_that_gives_no_text_is_named(value, message, execution):
    with pytest.raises(UserError, match=message):
        asyncio.run(Toolbox([Given(value)], execution).run([call("given"), call("given")]))


@pytest.mark.parametrize("raised", [asyncio.CancelledError(), SystemExit(3)])
def test_a_tool_that_lets_out_what_is_no_exception_has_failed(raised):
    """A client of a tool server does this if its own task was cancelled, and so does a program that
    calls `exit()`.
    """
    [result] = asyncio.run(Toolbox([Given(raised)]).run([call("given")]))
    assert result.is_error
    assert type(raised).__name__ in str(result.message["content"])
