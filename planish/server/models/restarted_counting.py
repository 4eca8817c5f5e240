"""A client that begins to count its model's requests again, after it loaded a checkpoint.

logits-sdk makes a training client from a checkpoint in two steps: the SDK below it creates a model
and loads the weights, as number 1; then it wraps the model into a new client, whose first request
is number 1 again. Just this is taken: where all that a model ever had is a load_weights of number
1, another request of number 1 begins a second count. Its numbers are kept apart from the first
count's by adding `RESTART`, and those in between are passed over, which is how the database
remembers it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planish.server.durable import journal
from planish.server.durable.journal import entry
from planish.server.durable.records import ModelRow, change
from planish.server.durable.store import Store
from planish.server.models.model import Model
from planish.service import LoadWeights, Operation

RESTART = 1 << 61


async def counted(store: Store, model: Model, seq_id: int, operation: Operation[Any]) -> int:
    """The number of a request, from the one that its client gave it."""
    if seq_id == 1 and (model.end == 2 or isinstance(operation, LoadWeights)):
        first = await store.read(lambda connection: journal.row(connection, f"{model.id}:1"))
        if first is None or first.digest == entry(operation, 1).digest:
            return seq_id
        if first.kind == "load_weights" and model.end == 2:
            await _begin_again(store, model)
    return shifted(model, seq_id)


def shifted(model: Model, seq_id: int) -> int:
    """The number of a request of which only the client's number is known."""
    return seq_id + RESTART if model.lane.passed >= RESTART else seq_id


async def _begin_again(store: Store, model: Model) -> None:
    passed = RESTART + 1
    await store.write(lambda transaction: change(transaction, ModelRow, model.id, passed=passed))
    model.lane.passed = passed
    model.row = replace(model.row, passed=passed)
