"""The parts that every recipe shares."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from planish.errors import UserError
from planish.processes.interruption import Interrupted, Interruption
from planish.recipes import calculator, math_rl, rl_basic, rlhf_options, shorter
from planish.recipes.training_run import (
    Presets,
    engine_log_on_console,
    read_options,
    run_command,
    run_coroutine,
)
from planish.training import rl_config, supervised_config


def interrupt_soon() -> None:
    threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()


async def work(ends: list[str]) -> str:
    """Interrupted from outside in its middle, as by the button of a notebook."""
    try:
        if ends:
            interrupt_soon()
            await asyncio.sleep(30)
        return threading.current_thread().name
    finally:
        ends.append("cleaned up")


async def cell(work: Coroutine[Any, Any, str]) -> str:
    """A notebook's loop runs, and leaves Ctrl-C to Python."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run_coroutine(work)
    finally:
        assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_a_recipe_runs_in_a_script_and_in_a_notebook():
    assert run_coroutine(work([])) == threading.current_thread().name
    assert asyncio.run(cell(work([]))) != threading.current_thread().name


def test_an_interrupt_in_a_notebook_ends_what_cannot_be_asked():
    ends = ["begun"]
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell(work(ends)))
    assert ends == ["begun", "cleaned up"]


@pytest.mark.parametrize(
    ("options", "presets", "arguments", "told"),
    [
        (rl_basic.Options, rl_basic.PRESETS, [], "preset=NAME gives other defaults: seed"),
        (rl_basic.Options, rl_basic.PRESETS, ["preset=seed"], None),
        (shorter.Options, {}, [], None),
        (math_rl.Options, *math_rl.with_env_defaults([]), None),
    ],
    ids=["one", "the one that is shown", "none", "the sizes of an env"],
)
def test_help_tells_the_presets_that_are_left(
    options: type,
    presets: Presets,
    arguments: list[str],
    told: str | None,
    capsys: pytest.CaptureFixture[str],
):
    with pytest.raises(SystemExit):
        read_options(options, presets, [*arguments, "--help"])
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert last == told or (told is None and "preset=NAME" not in last)


def test_help_explains_options_whose_default_a_recipe_changes(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        read_options(calculator.Options, {}, ["--help"])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()}
    assert lines["learning_rate"].endswith("learning rate before the schedule")
    assert lines["max_tokens"].endswith("maximum number of tokens in an answer")
    assert "copies the worked examples" in lines["eval_temperature"]


def test_help_explains_options_of_stages(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        read_options(rlhf_options.Options, {}, ["--help"])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()}
    assert lines["rl.lr_schedule"].endswith(
        "learning rate schedule: one of constant, linear, cosine"
    )


async def run(said: list[str], heeds: bool) -> str:
    """Interrupted in its middle; one that does not heed that is interrupted again."""
    interruption = Interruption()
    with interruption.handle_signals(said.append):
        interrupt_soon()
        try:
            await interruption.guard(asyncio.sleep(30))
        except Interrupted:
            said.append("asked")
        if not heeds:
            interrupt_soon()
            try:
                await asyncio.sleep(30)
            finally:
                said.append("cleaned up")
    return "saved"


def test_the_first_interrupt_in_a_notebook_asks_and_the_second_ends():
    said: list[str] = []
    assert asyncio.run(cell(run(said, heeds=True))) == "saved"
    assert [line[:6] for line in said] == ["Ctrl-C", "asked"]
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell(run(said, heeds=False)))
    assert [line[:6] for line in said[2:]] == ["Ctrl-C", "asked", "cleane"]


def test_a_second_interrupt_of_what_a_notebook_awaits_is_the_notebooks():
    """A KeyboardInterrupt in its loop would end it; it cancels the cell."""
    said: list[str] = []

    async def awaited() -> None:
        task, loop = asyncio.ensure_future(run(said, heeds=False)), asyncio.get_running_loop()
        before = signal.signal(signal.SIGINT, lambda *_: loop.call_soon_threadsafe(task.cancel))
        try:
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            signal.signal(signal.SIGINT, before)

    asyncio.run(awaited())
    assert [line[:6] for line in said] == ["Ctrl-C", "asked", "cleane"]


async def test_errors_come_out_of_a_notebooks_thread():
    async def fails() -> None:
        raise LookupError("x")

    with pytest.raises(LookupError, match="x"):
        run_coroutine(fails())


def test_the_console_shows_what_the_engine_logs(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    engine, other = (logging.getLogger(f"planish.{name}.part") for name in ("engine", "rl"))

    def main(config):
        engine.info("bfloat16 on cpu")
        engine.debug("details")
        other.info("a retry")
        logging.getLogger("planish.model.kernels.cpp.ops").warning("no kernels")

    run_command(main, rl_basic.Options, {}, [])
    said = capsys.readouterr()
    assert (said.out, said.err) == ("bfloat16 on cpu\n", "no kernels\n")
    engine.info("after the run")
    assert capsys.readouterr().out == ""


def test_a_program_that_set_up_logging_sees_the_records_itself(capsys, monkeypatch):
    seen = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", seen.append)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    with engine_log_on_console():
        logging.getLogger("planish.engine.part").warning("no kernels")
    assert [record.getMessage() for record in seen] == ["no kernels"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("word", "right"), [("lr=1e-4", "learning_rate"), ("output_dir=a", "log_path")]
)
def test_names_of_other_libraries_lead_to_the_right_option(word, right):
    name = word.partition("=")[0]
    with pytest.raises(UserError, match=f"{word}: there is no option {name}; give {right}"):
        read_options(rl_basic.Options, {}, [word])
    given: dict[str, Any] = {name: 1}
    for config in (rl_config.Config, supervised_config.Config):
        with pytest.raises(UserError, match=f"unexpected keyword argument '{name}'; give {right}"):
            config(**given)
