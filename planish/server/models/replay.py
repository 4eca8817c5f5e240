"""How a model comes back into memory: from its last snapshot, and by replaying the requests that
were answered since.

A replay is bitwise reproducible: it computes the same weights as the first run. The replay also
repeats the effect of requests that failed or were rejected. A forward_backward that failed leaves
its part of the gradient missing, so the next optim_step must fail again.

A snapshot holds the weights and the optimizer state after one request. It is taken while no
gradient is pending. The server records a snapshot after request n once two things are on disk: the
answers of all requests up to n, and the weights of all samplers that these requests published. The
transaction that records it also drops the bodies of these requests. Older snapshots are deleted
afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from planish.errors import CheckpointError, DamagedFileError, UserError
from planish.server.durable import journal
from planish.server.durable.checkpoints import IS_UNEXPIRED, private_copy_path, snapshot_name
from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.crash_points import crash_point
from planish.server.durable.journal import RequestRow
from planish.server.durable.records import CheckpointRow, ModelRow, select, update_row
from planish.server.durable.request_log import RequestLog
from planish.server.durable.store import Store, Transaction
from planish.server.engine_client import EngineClient
from planish.server.metrics import Counters
from planish.server.results import Failed
from planish.server.settings import ReplaySettings
from planish.service import (
    CreateModel,
    DeferredForwardBackward,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    PublishSampler,
    SaveWeights,
    SaveWeightsForSampler,
)
from planish.types import AdamParams, Datum, OptimStepResponse, SaveWeightsResponse
from planish.wire.client_errors import error_from_name

_log = logging.getLogger(__name__)


@dataclass
class ReplayCost:
    """The work of one model since its last snapshot, which the server repeats after a crash."""

    seconds: float = 0.0
    """Device time."""
    bytes: int = 0
    """Size of the request bodies."""
    num_changes: int = 0
    """Requests that change the weights, the optimizer or the pending gradient."""
    requests: int = 0

    def exceeds(self, settings: ReplaySettings) -> bool:
        """Return whether the settings ask for a snapshot."""
        return (
            self.seconds >= settings.max_replay_seconds
            or self.bytes >= settings.max_replay_bytes
            or self.requests >= settings.max_replay_requests
        )


@dataclass
class AdapterState:
    """The state of a model's adapter in memory."""

    last_seq: int = -1
    """The number of the last request that was run or replayed on the adapter; -1 if none was."""
    has_gradient: bool = False
    """Whether a gradient may be pending. A snapshot cannot store a pending gradient."""
    has_lost_work: bool = False
    """Whether a published sampler could not be saved, or a running request ended without an answer.
    Then no snapshot is taken, because a replay from it would not repeat this work. Loading the
    model again from the last snapshot repeats it.
    """
    has_warned: bool = False
    """Whether the log has a warning that a replay of this model computed another result than the
    first run. The warning is logged once.
    """
    cost: ReplayCost = field(default_factory=ReplayCost)

    def unloaded(self) -> AdapterState:
        """Return the state of the adapter when it is not in memory."""
        return AdapterState(has_warned=self.has_warned)

    @property
    def can_be_saved(self) -> bool:
        """Whether a snapshot of the adapter would be complete."""
        return self.last_seq >= 0 and not self.has_gradient and not self.has_lost_work

    def note_gradient(self, operation: Operation[Any]) -> None:
        """Update `has_gradient` for an operation that was submitted to the engine."""
        match operation:
            case ForwardBackward(forward_only=False):
                self.has_gradient = True
            case OptimStep():
                self.has_gradient = False
            case _:
                pass

    def add_cost(self, operation: Operation[Any], seconds: float, body_bytes: int) -> None:
        """Count an answered request of `body_bytes` bytes."""
        self.cost.requests += 1
        is_save = isinstance(operation, SaveWeights | SaveWeightsForSampler)
        is_forward = isinstance(operation, ForwardBackward) and operation.forward_only
        if not (is_save or is_forward):
            self.cost.num_changes += 1
            self.cost.seconds += seconds
            self.cost.bytes += body_bytes


Republish = Callable[[int, PublishSampler], Awaitable[None]]
"""Publishes a sampler again, as the request with this number did."""


@dataclass(frozen=True)
class Replay:
    """Restores models, and records from where they are restored."""

    _store: Store
    _engine: EngineClient
    _request_log: RequestLog
    _crash_guard: CrashGuard
    _settings: ReplaySettings
    _counters: Counters

    async def restore(
        self, row: ModelRow, next_seq: int, state: AdapterState, republish: Republish
    ) -> None:
        """Create the model of `row` in the engine from its snapshot, and repeat the requests below
        `next_seq` that were answered since. `state` is updated along the way. Raise
        DamagedFileError if a file was altered or removed.
        """
        snapshot_seq = row.last_snapshot
        try:
            if row.snapshot is not None:
                [stored_row] = await self._store.read(select, ModelRow, "id = ?", [row.id])
                creation = CreateModel(
                    row.id,
                    from_path=row.snapshot,
                    with_optimizer=True,
                    user_metadata=stored_row.metadata,
                )
                async with self._crash_guard.running(row.id):
                    await self._engine.perform(creation)
                state.last_seq = snapshot_seq
            crash_point("loaded before replay")
            rows = await self._store.read(journal.requests_of_model, row.id, snapshot_seq)
            for request_row in rows:
                if request_row.seq < next_seq:
                    await self.replay(request_row, state, republish)
                    crash_point("between replayed operations")
        except (DamagedFileError, CheckpointError) as error:
            _log.error("%s cannot be loaded until the file is restored: %s", row.id, error)
            raise DamagedFileError(
                f"model_id={row.id!r} cannot be loaded ({error}). {await self.advice(row)}; the "
                "server's operator may have the file in a backup"
            ) from error

    async def advice(self, row: ModelRow) -> str:
        """Return what the client of a model does that cannot be restored. The text names the newest
        training checkpoint of the model.
        """
        where = (
            f"run = ? AND {IS_UNEXPIRED} AND instr(path, '/weights/') ORDER BY created DESC LIMIT 1"
        )
        saved = await self._store.read(select, CheckpointRow, where, [row.id, time.time()])
        if not saved:
            return "Create a new client; this model has no checkpoint"
        return f"Create a new client from your last checkpoint, {saved[0].checkpoint.tinker_path}"

    async def replay(self, row: RequestRow, state: AdapterState, republish: Republish) -> None:
        """Repeat the effect of an answered request on a model, and update `state`."""
        assert not row.is_unanswered, row
        state.last_seq = row.seq
        state.cost.requests += 1
        if row.is_replayed:
            async with self._crash_guard.running(row.id):
                operation = await self._request_log.read_operation(row)
                if isinstance(operation, PublishSampler):
                    await republish(row.seq, operation)
                else:
                    await self._run_again(row, operation, state)
            self._counters.replayed_requests += 1
            state.cost.num_changes += 1
            state.cost.bytes += row.body_bytes
        elif row.state != "done":
            await self.replay_failure(row, row.failure, state)

    async def _run_again(
        self, row: RequestRow, operation: Operation[Any], state: AdapterState
    ) -> None:
        """Run an answered operation again. Loads read the private copy that their first run
        made.
        """
        match operation:
            case CreateModel(from_path=str(path)):
                copy = private_copy_path(row.owner, row.seq, path)
                operation = replace(operation, from_path=copy)
            case LoadWeights(path=path):
                operation = replace(operation, path=private_copy_path(row.owner, row.seq, path))
                state.has_gradient = False
            case _:
                pass
        state.note_gradient(operation)
        try:
            result: Any = await self._engine.perform(operation)
        except UserError as error:
            if not isinstance(operation, OptimStep):
                raise
            # The first run applied the step. Without it, the model would get other weights.
            raise DamagedFileError(
                f"the journal contradicts itself: the first run applied {row.id}, but a request "
                f"before it is stored as failed, so the step cannot be repeated: {error}"
            ) from error
        if isinstance(operation, OptimStep) and not state.has_warned:
            state.has_warned = not await is_reproduced(self._store, row, result)

    async def replay_failure(self, row: RequestRow, failure: Failed, state: AdapterState) -> None:
        """Repeat the effect of a request that failed with `failure`. A failed forward_backward
        makes the next optim_step fail. A failed optim_step clears the gradient. Other failures have
        no effect.
        """
        if row.kind not in ("forward_backward", "optim_step"):
            return
        state.has_gradient = row.kind == "forward_backward"
        # A DeferredForwardBackward gets its data from a future. This future has an error, so the
        # engine rejects the next optim_step, as in the first run.
        failed_data: Future[Sequence[Datum]] = Future()
        failed_data.set_exception(error_from_name(failure.message, failure.error_class))
        with suppress(ValueError):
            await self._engine.perform(
                DeferredForwardBackward(row.owner, failed_data, "cross_entropy")
            )
        if row.kind == "optim_step":
            with suppress(ValueError):
                await self._engine.perform(OptimStep(row.owner, AdamParams()))

    def is_snapshot_due(self, state: AdapterState) -> bool:
        """Return whether the replay of the model would be too long without a new snapshot."""
        return state.cost.exceeds(self._settings)

    async def submit_snapshot(self, model_id: str, seq: int) -> asyncio.Future[SaveWeightsResponse]:
        """Queue a snapshot after request `seq`. Errors are raised by the future."""
        try:
            return await self._engine.submit(
                SaveWeights(model_id, snapshot_name(seq), overwrite=True)
            )
        except Exception as error:
            failed: asyncio.Future[SaveWeightsResponse] = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed

    async def record_snapshot(self, row: ModelRow, seq: int, path: str) -> None:
        """Make `path` the snapshot of `row`'s model after request `seq`, and drop the bodies that
        it covers.
        """
        crash_point("snapshot saved before recording")
        assert seq > row.last_snapshot, (row.id, seq, row.last_snapshot)

        def record(transaction: Transaction) -> None:
            columns = {"snapshot": path, "snapshot_seq": seq, "used": time.time()}
            update_row(transaction, ModelRow, row.id, **columns)
            journal.drop_bodies(transaction, "owner = ? AND seq <= ?", (row.id, seq))

        await self._store.write_with_retries(record)
        self._counters.num_snapshots += 1
        crash_point("snapshot recorded before cleaning")

    async def record_closing(self, row: ModelRow) -> None:
        """Record why the model of `row` is closed, and drop the data that only a restore would
        need.
        """

        def record(transaction: Transaction) -> None:
            columns = {"closed": row.closed, "snapshot": None, "snapshot_seq": None}
            update_row(transaction, ModelRow, row.id, **columns)
            journal.drop_bodies(transaction, "owner = ?", [row.id])

        await self._store.write_with_retries(record)


async def is_reproduced(store: Store, row: RequestRow, response: OptimStepResponse) -> bool:
    """Compare the gradient norm of a repeated optim_step with the stored one. Logs a warning and
    returns False if they differ.
    """
    stored_answer = await store.read(journal.stored_result, row.id)
    if stored_answer is None:
        return True
    # The stored answer may expire meanwhile or be damaged. Nothing else depends on it.
    with suppress(ValueError, FileNotFoundError):
        norm = (response.metrics or {}).get("grad_norm")
        first_norm = orjson.loads(store.read_body(stored_answer))["metrics"].get("grad_norm")
        if norm != first_norm:
            _log.warning(
                "the replay of %s computed gradient norm %s, but the first run computed %s: the "
                "model resumes from weights that may differ by a similar amount. A different "
                "planish version, --dtype, number of threads or kind of machine causes this; "
                "stopping the server with SIGTERM before such a change prevents it. If nothing "
                "changed, this machine does not compute reproducibly",
                row.id,
                norm,
                first_norm,
            )
            return False
    return True
