"""The metrics of each optimizer step of a model, which the console draws as curves.

A step has one row in the table `steps`. The row is written in the transaction of the answer to
`optim_step`, so a crash neither loses nor doubles it. It has the metrics that the client got:

    loss:sum ...              metrics of the forward_backward calls since the last step. Sums are
                              added, other reductions are those of the last call
    loss_per_token            loss:sum divided by num_tokens
    num_tokens, num_sequences input tokens and datums of these calls
    grad_norm, learning_rate  of the step
    time/total, time/device   seconds since the answer of the step before, and seconds of the device

If a model loads an earlier state, its next step deletes the rows of the steps that it repeats. Ids of
rows only grow, so a reader that has seen an id finds everything that is newer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planish.server.durable.store import Transaction
from planish.server.request import TransactionHook
from planish.service import ForwardBackward, Operation, OptimStep


@dataclass
class StepMetrics:
    """Collects the metrics of one model."""

    model_id: str
    _sums: dict[str, float] = field(default_factory=dict[str, float])
    _last: dict[str, float] = field(default_factory=dict[str, float])
    _device_seconds: float = 0.0
    _since: float | None = None
    """When the step before was answered, or else when the first gradient was."""

    def note(
        self, operation: Operation[Any], result: Any, seconds: float
    ) -> TransactionHook | None:
        """Add the result of an operation that took `seconds` of the device. After an `optim_step`,
        return the function that writes the row of the step.
        """
        match operation:
            case ForwardBackward(forward_only=False):
                self._add_gradient(operation, result.metrics, seconds)
            case OptimStep():
                return self._write_step(operation, result.metrics, seconds)
            case _:
                pass
        return None

    def _add_gradient(
        self, operation: ForwardBackward, metrics: Mapping[str, float], seconds: float
    ) -> None:
        counts = {"num_tokens": operation.num_tokens, "num_sequences": len(operation.data)}
        for name, value in {**metrics, **counts}.items():
            if name.endswith(":sum") or name in counts:
                self._sums[name] = self._sums.get(name, 0.0) + value
            else:
                self._last[name] = value
        self._device_seconds += seconds
        if self._since is None:
            self._since = time.monotonic() - seconds

    def _write_step(
        self, operation: OptimStep, metrics: Mapping[str, float], seconds: float
    ) -> TransactionHook | None:
        now = time.monotonic()
        row: dict[str, Any] = {
            **self._last,
            **self._sums,
            "grad_norm": metrics.get("grad_norm"),
            "learning_rate": operation.adam_params.learning_rate,
            "time/device": self._device_seconds + seconds,
        }
        if self._since is not None:
            row["time/total"] = now - self._since
        if row.get("num_tokens") and "loss:sum" in row:
            row["loss_per_token"] = row["loss:sum"] / row["num_tokens"]
        step = metrics.get("adam_step")
        self._sums, self._last, self._device_seconds, self._since = {}, {}, 0.0, now
        return None if step is None else _row_writer(self.model_id, int(step), json.dumps(row))


def _row_writer(model_id: str, step: int, text: str) -> TransactionHook:
    def write(transaction: Transaction) -> None:
        transaction.execute("DELETE FROM steps WHERE model = ? AND step >= ?", [model_id, step])
        transaction.execute(
            "INSERT INTO steps (model, step, metrics) VALUES (?, ?, ?)", [model_id, step, text]
        )

    return write
