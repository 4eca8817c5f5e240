"""Lines come out as they were given, on a terminal and in a file."""

import io

import pytest
from rich.console import Console

from planish.recipes.console import StepDisplay, step_line


@pytest.mark.parametrize("is_terminal", [True, False])
def test_every_line_is_printed_with_its_brackets(is_terminal):
    out = io.StringIO()
    with StepDisplay(2, console=Console(file=out, force_terminal=is_terminal, width=40, highlight=False)) as display:
        display.say("runs/[bold]x[/bold] " + "long " * 20)
        display.stage("sampling", 2)
        display.advance()
        display.step_done("step 0/2 | reward 0.500")
    assert "runs/[bold]x[/bold] " + "long " * 19 in out.getvalue()
    assert "step 0/2 | reward 0.500" in out.getvalue()
    assert ("sampling" in out.getvalue()) == is_terminal


def test_a_step_shows_the_metrics_that_it_has():
    shown = {"reward/total": "reward {:.2f}", "time/total": "{:.1f} s"}
    assert step_line(7, 120, {"reward/total": 0.5}, shown) == "step   7/120 | reward 0.50"
