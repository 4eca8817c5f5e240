"""Services that store and show metrics: W&B, Trackio, TensorBoard. Each is an optional dependency,
imported only when it is used.

A service may already have steps of the run, from an earlier process. If it knows how many, its
`next_step` is the first step that it lacks.
"""

import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

DEFAULT_PROJECT = "planish"
FINISH_SECONDS = 120
"""The maximum time that the end of a run waits for an upload, in seconds."""


@dataclass(frozen=True)
class ServiceRunInfo:
    """The properties of a run that a service needs."""

    directory: Path
    config: Mapping[str, Any]
    project: str | None
    """None means "planish". At W&B, the variable WANDB_PROJECT takes precedence over that."""
    name: str
    run_id: str
    """A unique id, which stays the same when the run is resumed."""
    first_step: int
    """The first step that this process may log. Steps from there on that an earlier process logged
    are trained again.
    """


class Service(ABC):
    """One run at a service that stores metrics."""

    remedy: ClassVar[str]
    """What the user can do if the service does not start."""
    next_step: int | None = None
    """The first step that the service lacks. None if it does not know; the caller's count is used
    then.
    """

    @abstractmethod
    def __init__(self, run: ServiceRunInfo) -> None:
        """Open a new run, or continue one that the service has."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step."""

    takes_rollouts: ClassVar[bool] = False
    """Whether `log_rollouts` sends something."""

    def log_rollouts(  # noqa: B027  (most services show numbers only)
        self, step: int, split: str, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Send rollouts of one step, as rows of *_rollouts.jsonl (reports/rollout_rows.py)."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Finish the run at the service. `failed`: the run ended with an error."""


class TensorBoard(Service):
    """Event files in DIRECTORY/tensorboard. `tensorboard --logdir DIRECTORY` shows them. When a run
    is resumed, the steps that it repeats are removed.
    """

    remedy = "See that log_path can be written to."

    def __init__(self, run: ServiceRunInfo) -> None:
        writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(run.directory / "tensorboard", purge_step=run.first_step)
        self.next_step = run.first_step
        if run.first_step == 0:
            self._writer.add_text(
                "config", "```json\n" + json.dumps(run.config, indent=2) + "\n```", 0
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class Wandb(Service):
    """A run at W&B, or with WANDB_MODE=offline in DIRECTORY/wandb for `wandb sync`.

    Offline, W&B keeps the last steps in memory. If the process is killed with SIGKILL, its offline
    files lack those steps.
    """

    remedy = (
        "Log in with `wandb login` or set WANDB_API_KEY; WANDB_MODE=offline keeps the metrics in "
        "log_path/wandb."
    )

    def __init__(self, run: ServiceRunInfo) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            name=run.name,
            id=run.run_id,
            resume="allow",
            reinit="create_new",  # another run of this process stays open
            dir=run.directory,
            config=dict(run.config),
            allow_val_change=True,  # options such as max_steps may differ when a run is resumed
            settings=wandb.Settings(finish_timeout=FINISH_SECONDS),
        )
        if not self._run.offline:
            self.next_step = self._run.step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step, commit=True)  # send now, not with the next step

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio(Service):
    """A run in Trackio's local database, or at the Space or server that TRACKIO_SPACE_ID or
    TRACKIO_SERVER_URL names.
    """

    takes_rollouts = True
    remedy = "See `trackio --help`, and TRACKIO_SPACE_ID and TRACKIO_SERVER_URL if they are set."

    def __init__(self, run: ServiceRunInfo) -> None:
        trackio: Any = importlib.import_module("trackio")
        # Trackio finds a run by its name, so the name contains the id.
        name = f"{run.name}-{run.run_id}"
        self._run = trackio.init(
            run.project or DEFAULT_PROJECT,
            name=name,
            resume="allow",
            # Trackio reserves keys that begin with an underscore, as chz's `__chz_type__` does.
            config={key.lstrip("_"): value for key, value in run.config.items()},
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_rollouts(self, step: int, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send each rollout as a trace: its turns as messages, and its grades as metadata."""
        trace: Any = importlib.import_module("trackio").Trace
        traces = [trace(_trace_messages(row), metadata=_trace_metadata(row)) for row in rows]
        self._run.log({f"rollouts/{split}": traces}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()


def _trace_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the turns of a rollout as messages. A prompt contains the control tokens of its chat
    format, so a turn's whole observation is one message.
    """
    return [
        {"role": role, "content": text}
        for turn in row["turns"]
        for role, text in (("user", turn["observation"]), ("assistant", turn["answer"]))
        if text
    ]


def _trace_metadata(row: Mapping[str, Any]) -> dict[str, Any]:
    last = row["turns"][-1] if row["turns"] else {"metrics": {}, "logs": {}}
    return {
        "reward": row["total_reward"],
        "advantage": row["advantage"],
        "step": row["iteration"],
        "group": row["group_idx"],
        "sample": row["traj_idx"],
        "tags": row["tags"],
        "ending": row["stop_reason"],
        "tokens": sum(turn["answer_tokens"] for turn in row["turns"]),
        **last["metrics"],
        **last["logs"],
    }


SERVICES: dict[str, type[Service]] = {
    "wandb": Wandb,
    "trackio": Trackio,
    "tensorboard": TensorBoard,
}
