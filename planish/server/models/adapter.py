"""The adapter of a training model: its loads and its snapshots.

An adapter in memory is a cache of the last snapshot and the requests that were answered since
(replay.py). So it can leave memory at any time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from planish.errors import EngineClosedError, UserError
from planish.fleet.link import ReplicaLostError
from planish.server.durable.checkpoints import is_superseded
from planish.server.durable.crash_points import crash_point
from planish.server.durable.journal import RequestRow
from planish.server.durable.records import ModelRow
from planish.server.engine_client import EngineCheckpoints, EngineClient
from planish.server.models.publications import Publications
from planish.server.models.replay import AdapterState, Replay, ReplayCost
from planish.server.models.request_queue import InFlight, QueueItem, RequestQueue
from planish.server.results import Abandoned, Failed
from planish.server.samplers import Samplers
from planish.service import UnloadModel
from planish.types import SaveWeightsResponse

R = TypeVar("R")

_log = logging.getLogger(__name__)

_MAX_LOSSES = 5
"""The restoration of a model is given up after so many replicas were lost meanwhile."""


class PrivateCheckpoints:
    """The private checkpoints (checkpoints.py) from which the server restores one model."""

    def __init__(self, checkpoints: EngineCheckpoints) -> None:
        """`checkpoints` deletes the files."""
        self.paths: set[str] = set()
        self._checkpoints = checkpoints

    async def delete_superseded(self, seq: int) -> None:
        """Delete those that a snapshot at request `seq` makes unnecessary."""
        await self._delete([path for path in self.paths if is_superseded(path, seq)])

    async def delete_all(self) -> None:
        """Delete all of them."""
        await self._delete(list(self.paths))

    async def _delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            await self._checkpoints.delete(path)
            self.paths.discard(path)


class ModelAdapter:
    """The adapter of one training model, in memory or not. It implements `CachedAdapter`
    (scheduling.py): the adapter cache calls `load` and `unload`.
    """

    def __init__(
        self,
        row: ModelRow,
        queue: RequestQueue[QueueItem],
        engine: EngineClient,
        replay: Replay,
        samplers: Samplers,
    ) -> None:
        """A load replays the requests that were taken from `queue`."""
        self.id = row.id
        self.row = row
        """The model's row. `user_metadata` is empty here, because only the database keeps it."""
        self.queue = queue
        self.in_flight = InFlight()
        self.state = AdapterState()
        self.private_checkpoints = PrivateCheckpoints(engine.checkpoints)
        self.is_snapshotting = False
        self.publications = Publications(
            self.id, engine, samplers, self.in_flight, self.spawn, self.note_lost_work
        )
        """The samplers that this model publishes."""
        self._engine, self._replay = engine, replay
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def memory_bytes(self) -> int:
        """Memory of the adapter with its optimizer state."""
        return self.row.training_bytes

    @property
    def is_evictable(self) -> bool:
        """Always true, because the model can be restored from its snapshot and the journal."""
        return True

    # Loading and unloading.

    async def load(self) -> None:
        """Bring the adapter back into memory: load the snapshot, then replay. Raise UserError if
        the model was closed, and DamagedFileError if a file was altered or removed.
        """
        if self.row.closed is not None:
            raise UserError(
                f"model_id={self.id!r} is closed, and its unnamed samplers were lost with it"
            )
        await self.restore()
        if self.row.closed is not None:  # the model was closed during the load
            await self.remove_from_engine()
            raise UserError(f"model_id={self.id!r} is closed: {self.row.closed}")

    async def unload(self) -> None:
        """Take a snapshot if one is due, and free the adapter's memory."""
        if self.row.closed is None:
            await self.save_snapshot()
            await self.remove_from_engine()

    async def remove_from_engine(self) -> None:
        """Remove the model from the engine, if it is there."""
        self.state = self.state.unloaded()
        with suppress(UserError, EngineClosedError):
            await self._engine.perform(UnloadModel(self.id))
            crash_point("unloaded")

    async def restore(self) -> None:
        """Restore the adapter to its state after the last dequeued request. If a file is damaged or
        missing, raise DamagedFileError and leave the adapter unloaded. The snapshot and the journal
        do not change, so a later load succeeds once the file is restored.
        """
        # Wait for running snapshots. A snapshot that is recorded during the replay would delete the
        # snapshot from which the replay began.
        while self.is_snapshotting:
            await self.in_flight.wait_for_change()
        # The replay reads the answered requests from the database, so all answers must be there.
        await asyncio.gather(*self.in_flight.unwritten_answers.values())
        for _ in range(_MAX_LOSSES):
            self.state = self.state.unloaded()
            try:
                await self._replay.restore(
                    self.row, self.queue.next_seq, self.state, self.publications.publish_again
                )
                return
            except ReplicaLostError as error:
                _log.warning("%s is restored once more: %s", self.id, error)
                await self.remove_from_engine()
            except BaseException:
                await self.remove_from_engine()
                raise
        raise Abandoned(
            f"model_id={self.id!r} cannot be loaded: {_MAX_LOSSES} replicas were lost while they "
            f"loaded it. {await self.advice()}"
        )

    async def advice(self) -> str:
        """Return what the client does if this model cannot be restored."""
        return await self._replay.advice(self.row)

    async def replay(self, row: RequestRow) -> None:
        """Repeat the effect of an answered request."""
        await self._replay.replay(row, self.state, self.publications.publish_again)

    async def replay_failure(self, row: RequestRow, failure: Failed) -> None:
        """Repeat the effect of a request that failed before the engine had it."""
        await self._replay.replay_failure(row, failure, self.state)
        self.state.last_seq = row.seq

    async def close(self, reason: str) -> None:
        """Mark the model as closed, once its snapshots and published samplers are on disk."""
        while self.in_flight.unsaved_samplers or self.is_snapshotting:
            await self.in_flight.wait_for_change()
        self.row = replace(self.row, closed=reason, snapshot=None, snapshot_seq=None)

    async def delete(self) -> None:
        """Delete everything from which a closed model could be restored."""
        await self._replay.record_closing(self.row)
        crash_point("model closed before cleaning")
        await self.remove_from_engine()
        await self.private_checkpoints.delete_all()

    def note_lost_work(self) -> None:
        """Note that a request ended without an answer, or that a sampler could not be saved. The
        adapter is then restored before its next snapshot.
        """
        self.state.has_lost_work = True

    # Snapshots.

    @property
    def _can_snapshot(self) -> bool:
        return self.row.closed is None and self.state.can_be_saved

    async def save_due_snapshot(self) -> None:
        """Begin a snapshot if the replay of the model would be too long without a new one."""
        is_due = self._replay.is_snapshot_due(self.state)
        if is_due and self._can_snapshot and not self.is_snapshotting:
            await self.begin_snapshot()

    async def save_snapshot(self) -> bool:
        """Take a snapshot if the adapter has changed since the last one. Take none if the model is
        closed, a gradient is pending or work was lost. Return whether the last snapshot is up to
        date.
        """
        while self.is_snapshotting:
            await self.in_flight.wait_for_change()
        state = self.state
        has_unsaved_changes = state.cost.num_changes > 0 and state.last_seq > self.row.last_snapshot
        if has_unsaved_changes and self._can_snapshot:
            return await (await self.begin_snapshot())
        return not has_unsaved_changes

    async def begin_snapshot(self) -> asyncio.Task[bool]:
        """Queue a snapshot after the last operation in the engine. The returned task ends with
        False if the snapshot failed. A failure is logged and loses nothing.
        """
        crash_point("before snapshot")
        self.is_snapshotting, self.state.cost = True, ReplayCost()
        state, seq = self.state, self.state.last_seq
        save = await self._replay.submit_snapshot(self.id, seq)
        return self.spawn(self._finish_snapshot(state, seq, save))

    async def _finish_snapshot(
        self, state: AdapterState, seq: int, save: asyncio.Future[SaveWeightsResponse]
    ) -> bool:
        """Record a snapshot that was submitted after request `seq`, when the adapter had the state
        `state`. The adapter may have another state by now, because it was unloaded meanwhile.
        """
        try:
            path = (await save).path
            self.private_checkpoints.paths.add(path)
            await self.in_flight.wait_until_durable(seq)
            if state.has_lost_work or self.state.has_lost_work:
                return False
            await self._replay.record_snapshot(self.row, seq, path)
            self.row = replace(self.row, snapshot=path, snapshot_seq=seq)
            await self.private_checkpoints.delete_superseded(seq)
        except Exception as error:
            if not isinstance(error, EngineClosedError):
                _log.exception(
                    "the snapshot of %s failed; everything since the last one stays in the journal",
                    self.id,
                )
            return False
        finally:
            self.is_snapshotting = False
            self.in_flight.notify()
        return True

    def spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Run `work` in a task. The event loop has only weak references to tasks, so keep one here
        until the task ends.
        """
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
