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
    """One part of the work with a progress bar, such as sampling. `StepDisplay.open_stage` opens
    a stage, and the end of its `with` block closes it.
    """

    def __init__(
        self, progress: Progress, name: str, total: int | None, clock: Callable[[], float]
    ) -> None:
        self.name = name
        self.total = total
        self.num_done = 0
        self.num_tokens = 0
        self._clock = clock
        self._start_time = clock()
        self._progress = progress
        self._task: TaskID = progress.add_task(name, total=total, detail=self._count_text())
        self._lock = threading.Lock()
        self.is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def advance(self, count: int = 1) -> None:
        """Count `count` more parts of the stage as done."""
        self._update(count=count)

    def add_sampled_tokens(self, num_tokens: int) -> None:
        """Count `num_tokens` more sampled tokens. They are shown as a rate in tokens per second."""
        self._update(num_tokens=num_tokens)

    def close(self) -> None:
        """Remove the stage from the display. Further calls have no effect."""
        with self._lock:
            if self.is_open:
                self.is_open = False
                self._progress.remove_task(self._task)

    def status(self) -> str:
        """Return the stage as text, such as "sampling 83/128, 412 tokens/s, 31 s"."""
        seconds = self._clock() - self._start_time
        label = f"{self.name} {self._count_text()}".rstrip()
        return ", ".join([label, *self._rate_texts(), f"{seconds:.0f} s"])

    def _update(self, count: int = 0, num_tokens: int = 0) -> None:
        with self._lock:
            if self.is_open:
                self.num_done += count
                self.num_tokens += num_tokens
                detail = " ".join([self._count_text(), *self._rate_texts()])
                self._progress.update(self._task, completed=self.num_done, detail=detail)

    def _count_text(self) -> str:
        return "" if self.total is None else f"{self.num_done}/{self.total}"

    def _rate_texts(self) -> list[str]:
        seconds = self._clock() - self._start_time
        return (
            [f"{self.num_tokens / seconds:.0f} tokens/s"] if self.num_tokens and seconds > 0 else []
        )


class StepDisplay:
    """Shows the progress of a run on a console. It is a context manager."""

    def __init__(
        self,
        num_steps: int,
        num_done: int = 0,
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
        self.num_steps = num_steps
        self._unit = unit
        self.num_done = num_done
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
        self._run_task = self._progress.add_task(
            unit, total=num_steps, completed=num_done, detail=f"{num_done}/{num_steps}"
        )
        self._open_stages: list[Stage] = []
        self._current_stage: Stage | None = None
        self._last_line_time = clock()
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

    def open_stage(self, name: str, total: int | None = None) -> Stage:
        """Open a stage. `total` is the number of its parts; None if they cannot be counted."""
        self._open_stages = [stage for stage in self._open_stages if stage.is_open]
        stage = Stage(self._progress, name, total, self._clock)
        self._open_stages.append(stage)
        return stage

    def sampling(self, step: int, num_trajectories: int) -> Stage:
        """Open the stage of a step's rollouts. Each part is a trajectory."""
        return self.open_stage(f"sampling, step {step}", num_trajectories)

    def training(self, step: int, num_minibatches: int | None = None) -> Stage:
        """Open the stage of a step's gradients and updates. Each part is a minibatch."""
        return self.open_stage(f"training, step {step}", num_minibatches)

    def evaluation(self, name: str, num_trajectories: int | None = None) -> Stage:
        """Open the stage of the evaluator `name`. Each part is a trajectory; None if they cannot be
        counted.
        """
        return self.open_stage(f"evaluating {name}", num_trajectories)

    def saving(self, step: int) -> Stage:
        """Open the stage of the checkpoint after `step` steps."""
        return self.open_stage(f"saving, step {step}")

    def next_stage(self, name: str, total: int | None = None) -> None:
        """Close the current stage and open the next one, in a step whose stages run in sequence."""
        self._end_current()
        self._current_stage = self.open_stage(name, total)

    @property
    def current_stage_name(self) -> str | None:
        """The name of the stage that `next_stage` opened; None between steps."""
        return None if self._current_stage is None else self._current_stage.name

    def advance(self) -> None:
        """Count one more part as done, in the stage that `next_stage` opened."""
        assert self._current_stage is not None, "advance() without next_stage()"
        self._current_stage.advance()

    def step_done(self, line: str | None = None) -> None:
        """Count one more step as done, and print `line` if it is given."""
        self._end_current()
        self.num_done += 1
        self._last_line_time = self._clock()
        self._progress.update(
            self._run_task, completed=self.num_done, detail=f"{self.num_done}/{self.num_steps}"
        )
        if line is not None:
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self._last_line_time = self._clock()
        self.console.print(line, soft_wrap=True, markup=False)

    def status(self) -> str:
        """Return the open stages as one line; "" if no stage is open."""
        stages = [stage.status() for stage in list(self._open_stages) if stage.is_open]
        steps = f"{self.num_done} of {self.num_steps} {self._unit} done"
        return " | ".join([steps, *stages]) if stages else ""

    def _end_current(self) -> None:
        if self._current_stage is not None:
            self._current_stage.close()
            self._current_stage = None

    def _report(self) -> None:
        while not self._ended.wait(
            max(0.01, self._last_line_time + self._interval - self._clock())
        ):
            if self._clock() - self._last_line_time >= self._interval:
                self._last_line_time = self._clock()
                if line := self.status():
                    self.say(line)


def step_line(
    step: int, num_steps: int, metrics: Mapping[str, float], formats: Mapping[str, str]
) -> str:
    """Return one step as text. `formats` maps metric names to formats such as "reward {:.3f}"."""
    values = [form.format(metrics[name]) for name, form in formats.items() if name in metrics]
    return " | ".join([f"step {step:{len(str(num_steps))}d}/{num_steps}", *values])
