"""What a person sees while a recipe runs: a bar for the run, a bar for the stage of the step, a line for each step.

On a terminal the bars redraw in place; elsewhere only the lines are printed.
"""

from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class StepDisplay:
    def __init__(self, steps: int, done: int = 0, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True)
        self._run = self._progress.add_task("steps", total=steps, completed=done)
        self._stage = self._progress.add_task("", total=None, visible=False)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, name: str, total: int | None = None) -> None:
        """Say what the step is doing; `total` parts of it, if they can be counted."""
        self._progress.reset(self._stage, description=name, total=total, visible=True)

    def advance(self) -> None:
        self._progress.advance(self._stage)

    def step_done(self, line: str) -> None:
        self._progress.update(self._stage, visible=False)
        self._progress.advance(self._run)
        self.console.print(line, soft_wrap=True, markup=False)

    def say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, markup=False)


def step_line(step: int, steps: int, metrics: Mapping[str, float], shown: Mapping[str, str]) -> str:
    """One step as text; `shown` maps metric names to how they are written, such as "reward {:.3f}"."""
    parts = [form.format(metrics[name]) for name, form in shown.items() if name in metrics]
    return " | ".join([f"step {step:{len(str(steps))}d}/{steps}", *parts])
