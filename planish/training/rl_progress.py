"""What a person sees of a training step while it goes on: what is sampled, trained on, tested and
saved, and how fast.

Stages overlap freely: with an asynchronous lag, step 13 is sampled while step 12 is trained on, and
each is shown with its number. Bars on a terminal, a line now and then elsewhere
(planish/runlog/console.py). The metrics of a finished step are printed by a log (planish/runlog/metrics_log.py),
on the same console.
"""

from typing import Self

from rich.console import Console

from planish.runlog.console import Stage, StepDisplay


class TrainingProgress:
    """The progress of a run of `steps` steps, `done` of which were done before; used as a context
    manager.

    What each method gives is a `Stage`, open until its `with` block ends: `stage.advance()` when
    one of its parts is done, `stage.sampled(n)` when n tokens were sampled, from any task or
    thread.
    """

    def __init__(self, steps: int, done: int = 0, console: Console | None = None) -> None:
        self._display = StepDisplay(steps, done, console)

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._display.__exit__(*exc)

    @property
    def console(self) -> Console:
        """Where other lines are to be printed, so that they come above the bars."""
        return self._display.console

    def sampling(self, step: int, trajectories: int) -> Stage:
        """The rollouts of a step; each part is a trajectory."""
        return self._display.begin(f"sampling, step {step}", trajectories)

    def training(self, step: int, minibatches: int | None = None) -> Stage:
        """Gradients and updates of a step; each part is a minibatch."""
        return self._display.begin(f"training, step {step}", minibatches)

    def evaluation(self, name: str, trajectories: int | None = None) -> Stage:
        """The evaluator `name`; None where it plays no trajectories that could be counted."""
        return self._display.begin(f"evaluating {name}", trajectories)

    def saving(self, step: int) -> Stage:
        return self._display.begin(f"saving, step {step}")

    def step_done(self) -> None:
        self._display.step_done()

    def say(self, line: str) -> None:
        self._display.say(line)

    def status(self) -> str:
        """What is under way, as one line; "" if nothing is."""
        return self._display.status()
