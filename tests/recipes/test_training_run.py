"""What every recipe does around its loop."""

import asyncio
import os
import signal
import threading

import pytest

from planish.recipes import math_rl, rl_basic, shorter
from planish.recipes.training_run import Presets, finished, read_options


async def work(ends: list[str]) -> str:
    """Interrupted from outside in its middle, as by the button of a notebook."""
    try:
        if ends:
            threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
            await asyncio.sleep(30)
        return threading.current_thread().name
    finally:
        ends.append("cleaned up")


async def cell(ends: list[str]) -> str:
    """A notebook's loop runs, and leaves Ctrl-C to Python."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return finished(work(ends))
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_recipe_runs_in_a_script_and_in_a_notebook():
    assert finished(work([])) == threading.current_thread().name
    assert asyncio.run(cell([])) != threading.current_thread().name


def test_an_interrupt_in_a_notebook_ends_the_run_in_order():
    ends = ["begun"]
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell(ends))
    assert ends == ["begun", "cleaned up"]


@pytest.mark.parametrize(
    ("options", "presets", "arguments", "told"),
    [
        (rl_basic.Options, rl_basic.PRESETS, [], "preset=NAME gives other defaults: seed"),
        (rl_basic.Options, rl_basic.PRESETS, ["preset=seed"], None),
        (shorter.Options, {}, [], None),
        (math_rl.Options, *math_rl.with_sizes([]), None),
    ],
    ids=["one", "the one that is shown", "none", "the sizes of an env"],
)
def test_help_tells_the_presets_that_are_left(
    options: type, presets: Presets, arguments: list[str], told: str | None, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        read_options(options, presets, [*arguments, "--help"])
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert last == told or (told is None and "preset=NAME" not in last)


def test_errors_come_out_of_a_notebooks_thread():
    async def fails() -> None:
        raise LookupError("x")

    async def in_a_cell() -> None:
        finished(fails())

    with pytest.raises(LookupError, match="x"):
        asyncio.run(in_a_cell())
