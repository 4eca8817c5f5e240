"""Lines are printed unchanged. A terminal shows bars; elsewhere, a line is printed while a step
takes long.
"""

import io
import threading
import time

import pytest
from rich.console import Console

from planish.runlog.console import StepDisplay, step_line


def console(is_terminal: bool = False, width: int = 80) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=is_terminal, width=width, highlight=False), out


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("is_terminal", [True, False])
def test_every_line_is_printed_with_its_brackets(is_terminal):
    shown, out = console(is_terminal, width=40)
    with StepDisplay(2, console=shown) as display:
        display.say("runs/[bold]x[/bold] " + "long " * 20)
        display.next_stage("sampling [all]", 2)
        display.advance()
        display.step_done("step 0/2 | reward 0.500")
    assert "runs/[bold]x[/bold] " + "long " * 19 in out.getvalue()
    assert "step 0/2 | reward 0.500" in out.getvalue()
    assert ("sampling [all]" in out.getvalue()) == is_terminal


def test_a_step_shows_the_metrics_that_it_has():
    shown = {"reward/total": "reward {:.2f}", "time/total": "{:.1f} s"}
    assert step_line(7, 120, {"reward/total": 0.5}, shown) == "step   7/120 | reward 0.50"


def test_stages_that_overlap_are_all_in_the_status():
    clock, (shown, _) = Clock(), console()
    display = StepDisplay(24, 3, shown, clock=clock)
    assert display.status() == ""
    sampling = display.open_stage("sampling, step 4", 128)
    clock.now = 2.0
    with display.open_stage("training, step 3", 4) as training:
        sampling.add_sampled_tokens(600)
        sampling.add_sampled_tokens(200)
        sampling.advance(83)
        training.advance()
        clock.now = 4.0
        assert display.status() == (
            "3 of 24 steps done | sampling, step 4 83/128, 200 tokens/s, 4 s | training, step 3 "
            "1/4, 2 s"
        )
    assert display.status() == "3 of 24 steps done | sampling, step 4 83/128, 200 tokens/s, 4 s"
    sampling.close()
    assert display.status() == ""


def test_one_thing_after_the_other_is_one_stage():
    shown, _ = console()
    display = StepDisplay(2, console=shown, clock=Clock())
    display.next_stage("sampling", 2)
    display.advance()
    display.next_stage("training")
    assert display.status() == "0 of 2 steps done | training, 0 s"
    display.step_done()
    assert display.status() == ""


def test_a_closed_stage_hears_nothing_more():
    shown, _ = console()
    display = StepDisplay(2, console=shown, clock=Clock())
    stage = display.open_stage("sampling", 2)
    stage.close()
    stage.advance()
    stage.add_sampled_tokens(5)
    stage.close()
    assert (stage.num_done, stage.num_tokens) == (0, 0)


def test_counts_hold_when_many_threads_report():
    shown, _ = console()
    stage = StepDisplay(1, console=shown).open_stage("sampling", 4000)
    threads = [
        threading.Thread(target=lambda: [stage.advance() for _ in range(1000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stage.num_done == 4000


def test_a_long_step_says_now_and_then_what_it_does_where_there_is_no_terminal():
    shown, out = console()
    with (
        StepDisplay(2, console=shown, interval=0.05) as display,
        display.open_stage("sampling", 8) as stage,
    ):
        stage.advance(3)
        begun = len(out.getvalue())  # A line may come before the stage or its samples.
        deadline = time.monotonic() + 60
        while out.getvalue()[begun:].count("\n") < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = out.getvalue()[begun:].splitlines()[1:]
    assert len(lines) >= 2
    assert all(line.startswith("0 of 2 steps done | sampling 3/8, ") for line in lines)


def test_short_steps_say_only_their_lines_where_there_is_no_terminal():
    shown, out = console()
    with StepDisplay(3, console=shown, interval=30.0) as display:
        for step in range(3):
            with display.open_stage("sampling", 8):
                display.step_done(f"step {step}")
    assert out.getvalue().splitlines() == ["step 0", "step 1", "step 2"]


def test_nothing_is_reported_after_the_end():
    shown, out = console()
    with StepDisplay(1, console=shown, interval=0.02) as display:
        display.open_stage("sampling")
    before = out.getvalue()
    time.sleep(0.1)
    assert out.getvalue() == before


def test_the_bars_fit_into_80_columns():
    shown, out = console(is_terminal=True)
    with (
        StepDisplay(1000, 999, shown) as display,
        display.open_stage("evaluating test, step 1000", 1319) as stage,
    ):
        stage.add_sampled_tokens(123456)
        stage.advance(1318)
        display._progress.refresh()
        assert "1318/1319" in out.getvalue()
        assert "tokens/s" in out.getvalue()
