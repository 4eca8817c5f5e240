"""The progress display of a run: a bar for the run, a bar for each open stage, a line per step.

On a terminal, the bars redraw in place below the lines. If the output is a file or a pipe, only
lines are printed: one for each finished step. During long steps, a line with the open stages is
printed every `interval` seconds. Several stages may be open at once, from any thread or task. For
example, an asynchronous run samples one step while it trains on another.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from planish.processes.background import BackgroundThread


class Stage:
    """One part of the work with a progress bar, such as sampling. `StepDisplay.begin` opens a
    stage, and the end of its `with` block closes it.
    """

    def __init__(
        self, progress: Progress, name: str, total: int | None, clock: Callable[[], float]
    ) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self.tokens = 0
        self._clock = clock
        self._began = clock()
        self._progress = progress
        self._task: TaskID = progress.add_task(name, total=total, detail=self._count())
        self._lock = threading.Lock()
        self.is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def advance(self, parts: int = 1) -> None:
        """Count `parts` more parts of the stage as done."""
        self._update(parts=parts)

    def sampled(self, tokens: int) -> None:
        """Count `tokens` more sampled tokens. They are shown as a rate in tokens per second."""
        self._update(tokens=tokens)

    def close(self) -> None:
        """Remove the stage from the display. Idempotent."""
        with self._lock:
            if self.is_open:
                self.is_open = False
                self._progress.remove_task(self._task)

    def status(self) -> str:
        """Return the stage as text, such as "sampling 83/128, 412 tokens/s, 31 s"."""
        seconds = self._clock() - self._began
        named = f"{self.name} {self._count()}".rstrip()
        return ", ".join([named, *self._rate(), f"{seconds:.0f} s"])

    def _update(self, parts: int = 0, tokens: int = 0) -> None:
        with self._lock:
            if self.is_open:
                self.done += parts
                self.tokens += tokens
                detail = " ".join([self._count(), *self._rate()])
                self._progress.update(self._task, completed=self.done, detail=detail)

    def _count(self) -> str:
        return "" if self.total is None else f"{self.done}/{self.total}"

    def _rate(self) -> list[str]:
        seconds = self._clock() - self._began
        return [f"{self.tokens / seconds:.0f} tokens/s"] if self.tokens and seconds > 0 else []


class StepDisplay:
    """Shows the progress of a run on a console. It is a context manager."""

    def __init__(
        self,
        steps: int,
        done: int = 0,
        console: Console | None = None,
        *,
        unit: str = "steps",
        interval: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`interval`: without a terminal, the open stages are printed after this many seconds
        without a line.
        """
        self.console = console or Console(highlight=False)
        self.steps = steps
        self._unit = unit
        self.done = done
        self._interval = interval
        self._clock = clock
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            # A step may take minutes, and the remaining time is estimated from several steps.
            speed_estimate_period=3600.0,
        )
        self._run = self._progress.add_task(
            unit, total=steps, completed=done, detail=f"{done}/{steps}"
        )
        self._open: list[Stage] = []
        self._current: Stage | None = None
        self._last_line = clock()
        self._ended = threading.Event()
        self._reporter: BackgroundThread | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._progress.start()
        else:
            self._reporter = BackgroundThread(
                self._report, "planish-progress", stop=self._ended.set, exit_seconds=1.0
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._reporter is None:
            self._progress.stop()
        else:
            self._reporter.join()

    def begin(self, name: str, total: int | None = None) -> Stage:
        """Open a stage. `total` is the number of its parts; None if they cannot be counted."""
        self._open = [stage for stage in self._open if stage.is_open]
        stage = Stage(self._progress, name, total, self._clock)
        self._open.append(stage)
        return stage

    def sampling(self, step: int, trajectories: int) -> Stage:
        """Open the stage of a step's rollouts. Each part is a trajectory."""
        return self.begin(f"sampling, step {step}", trajectories)

    def training(self, step: int, minibatches: int | None = None) -> Stage:
        """Open the stage of a step's gradients and updates. Each part is a minibatch."""
        return self.begin(f"training, step {step}", minibatches)

    def evaluation(self, name: str, trajectories: int | None = None) -> Stage:
        """Open the stage of the evaluator `name`. Each part is a trajectory; None if they cannot be
        counted.
        """
        return self.begin(f"evaluating {name}", trajectories)

    def saving(self, step: int) -> Stage:
        """Open the stage of the checkpoint after `step` steps."""
        return self.begin(f"saving, step {step}")

    def stage(self, name: str, total: int | None = None) -> None:
        """Close the current stage and open the next one, in a step whose stages run in sequence."""
        self._end_current()
        self._current = self.begin(name, total)

    def advance(self) -> None:
        """Count one more part as done, in the stage that `stage` opened."""
        assert self._current is not None, "advance() without stage()"
        self._current.advance()

    def step_done(self, line: str | None = None) -> None:
        """Count one more step as done, and print `line` if it is given."""
        self._end_current()
        self.done += 1
        self._last_line = self._clock()
        self._progress.update(self._run, completed=self.done, detail=f"{self.done}/{self.steps}")
        if line is not None:
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self._last_line = self._clock()
        self.console.print(line, soft_wrap=True, markup=False)

    def status(self) -> str:
        """Return the open stages as one line; "" if no stage is open."""
        stages = [stage.status() for stage in list(self._open) if stage.is_open]
        done = f"{self.done} of {self.steps} {self._unit} done"
        return " | ".join([done, *stages]) if stages else ""

    def _end_current(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None

    def _report(self) -> None:
        while not self._ended.wait(max(0.01, self._last_line + self._interval - self._clock())):
            if self._clock() - self._last_line >= self._interval:
                self._last_line = self._clock()
                if line := self.status():
                    self.say(line)


def step_line(step: int, steps: int, metrics: Mapping[str, float], shown: Mapping[str, str]) -> str:
    """Return one step as text. `shown` maps names of metrics to formats such as "reward {:.3f}"."""
    parts = [form.format(metrics[name]) for name, form in shown.items() if name in metrics]
    return " | ".join([f"step {step:{len(str(steps))}d}/{steps}", *parts])
