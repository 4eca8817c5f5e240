"""The order in which the steps of an RL run use the dataset's batches.

A step takes the next batch, and so does each of its refills (dynamic sampling). So no batch is used
twice before all batches of an epoch have been used. Without refills, step j uses batch j.
Checkpoints contain the order, because later steps depend on the refills of earlier ones.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from planish.runlog.run_directory import CheckpointRecord

FIELD = "batch_order"
"""The field of a checkpoint's row."""


@dataclass
class BatchOrder:
    """The indices of the batches that have been used, and of those of the running steps."""

    next_index: int
    """The batch that is used next."""
    restored: deque[int] = field(default_factory=deque[int])
    """The batches of steps that an earlier process had started and not finished, in order."""
    running: deque[int] = field(default_factory=deque[int])
    """The batches of the steps that are running, in order, without their refills."""

    def __post_init__(self) -> None:
        self._at_last_step = self._fields()

    @classmethod
    def from_checkpoint(cls, record: CheckpointRecord | None, steps_done: int) -> Self:
        """Return the order with which a run continues after `steps_done` steps. `record` is None
        for a new run.
        """
        fields = record.extra.get(FIELD) if record is not None else None
        return cls(steps_done) if fields is None else cls(fields["next"], deque(fields["running"]))

    def start_step(self) -> int:
        """Return the index of the next step's batch."""
        index = self.restored.popleft() if self.restored else self.refill()
        self.running.append(index)
        return index

    def refill(self) -> int:
        """Return the index of a further batch."""
        self.next_index += 1
        return self.next_index - 1

    def finish_step(self) -> None:
        """Note that the earliest of the running steps is done."""
        self.running.popleft()
        self._at_last_step = self._fields()

    def checkpoint_fields(self) -> Mapping[str, Any]:
        """Return the order as of the last finished step. A run that resumes there repeats the steps
        that are running now, with the same batches and refills.
        """
        return {FIELD: self._at_last_step}

    def _fields(self) -> dict[str, Any]:
        return {"next": self.next_index, "running": [*self.running, *self.restored]}
