"""Samplers, and the samples that run on them. A sampler serves a base model, a checkpoint, or the
weights that a training model had at one moment.

A sampler of a checkpoint has a private copy of the files. So the sampler does not change when the
checkpoint is deleted or replaced, and it can be loaded again after a restart.

A training model publishes its current weights as a sampler without a name (PublishSampler). The
server saves the weights of this sampler in the background. Until these weights are on disk, the
sampler stays in memory. After a crash before that, a replay of the model publishes the sampler
again.

Each sample request is a task. The task waits for its sampler, for its tenant's turn and for memory,
and then for the engine. Samples may run in any order. After a crash, unanswered requests run again
with the seeds that were journaled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from planish.errors import (
    CheckpointError,
    DamagedFileError,
    EngineClosedError,
    StorageError,
    UserError,
)
from planish.server.durable.checkpoints import check_is_not_private, sampler_copy_path
from planish.server.durable.crash_points import crash_point
from planish.server.durable.quotas import ROW_BYTES, check_samplers
from planish.server.durable.records import SamplerRow, select, update_row, upsert
from planish.server.durable.request_log import (
    JournalEntry,
    QueuedRequest,
    done_from_result,
    encode_request,
    failed_from_error,
    new_request_row,
    run_uncancelled,
)
from planish.server.durable.store import Transaction
from planish.server.results import (
    Abandoned,
    Accepted,
    BadRequest,
    Done,
    Failed,
    Gone,
    NotFound,
    ServerError,
    Tenant,
    stopping,
)
from planish.server.scheduling import CachedAdapter
from planish.service import CreateSampler, ReleaseSampler, Sample, SampledToken, SamplerInfo
from planish.types import SampleResponse
from planish.wire.models import session_id_of

if TYPE_CHECKING:
    from planish.server.services import Services

_log = logging.getLogger(__name__)

_MAX_INLINE_TOKENS = 4096
"""Longer prompts are checked in a thread."""


@dataclass(eq=False)
class Sampler:
    """One sampler, in memory or not. The adapter cache calls `load` and `unload`."""

    row: SamplerRow
    _services: Services
    model: CachedAdapter | None
    """The training model that publishes the sampler; None for other samplers."""
    failure: str | None = None
    """Why the sampler cannot be used: its creation failed, or it is closed."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the sampler is created or published, or when its creation fails."""
    last_used: float = field(default_factory=time.time)

    @property
    def id(self) -> str:
        """The id of the sampling session."""
        return self.row.id

    @property
    def memory_bytes(self) -> int:
        """The sampler's size in memory; 0 for a sampler of a base model."""
        return self.row.memory_bytes

    @property
    def is_evictable(self) -> bool:
        """Whether the sampler's weights are on disk, so that it can be loaded again."""
        return self.row.source is not None

    def check(self) -> None:
        """Raise UserError if the sampler cannot be used."""
        if self.failure is not None:
            raise UserError(f"sampling_session_id={self.id!r}: {self.failure}")

    async def load(self) -> None:
        """Create the sampler in the engine. Raise UserError if it is closed during the creation,
        and DamagedFileError or CheckpointError if its weights cannot be read.
        """
        async with self._services.crash_guard.running(self.id):
            try:
                await self._services.engine.perform(await self._creation_operation())
            except (DamagedFileError, CheckpointError) as error:
                _log.error("%s cannot be loaded: %s", self.id, error)
                raise
        if self.failure is not None:
            await self._services.engine.perform(ReleaseSampler(self.id))
            self.check()

    async def unload(self) -> None:
        """Remove the sampler from the engine."""
        with suppress(UserError):  # a simultaneous `close` may have removed it
            await self._services.engine.perform(ReleaseSampler(self.id))

    async def _creation_operation(self) -> CreateSampler:
        row = self.row
        if row.source is None:
            assert row.model is None, (
                f"{row.id} has no weights of its own: only its model can create it again"
            )
            return CreateSampler(row.id, row.base_model)
        trained_on = (await self._services.engine.checkpoint_info(row.source)).base_model
        # The engine rejects a checkpoint that was trained on other base weights, unless the
        # operation names the base model. A row does not store whether the client named one. If the
        # row's base model differs from the checkpoint's, the client must have named it.
        return CreateSampler(
            row.id, row.base_model if row.base_model != trained_on else None, row.source
        )


class Samplers:
    """The open samplers of a server, and the samples that run on them."""

    def __init__(self, services: Services) -> None:
        """`services` are the other parts of the server."""
        self._services = services
        self._samplers: dict[str, Sampler] = {}
        self._published: dict[tuple[str, int], Sampler] = {}
        """The published samplers. The key is the model's id and the sequence number of the request
        that publishes the sampler.
        """
        self._creation_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by sampler id. A caller holds the lock while it creates the sampler."""
        self._checked_models: set[str] = set()
        """Base models that an earlier check has loaded. The first check of a base model loads it,
        so this check runs in a thread.
        """
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The unanswered samples, by request id."""
        self._ids_in_engine: set[str] = set()
        """The ids of the requests that run in the engine."""
        self._connected_tasks: dict[asyncio.Task[SampleResponse], bool] = {}
        """The samples of clients that keep their connection open. The value says whether the sample
        has its turn.
        """
        self._ended_tasks: set[asyncio.Task[SampleResponse]] = set()
        """The samples among them that were cancelled by a stop."""
        self._postponed_tasks: set[asyncio.Task[None]] = set()
        """Tasks that were cancelled by a stop. The next start runs their requests."""

    # Finding.

    def get(self, sampler_id: str) -> Sampler | None:
        """Return an open sampler, or None."""
        return self._samplers.get(sampler_id)

    def open_samplers(self) -> list[Sampler]:
        """Return the open samplers."""
        return list(self._samplers.values())

    async def row(self, tenant: Tenant, sampler_id: str) -> SamplerRow:
        """Return the row of a sampler of the tenant, open or closed. Raise NotFound if there is no
        such sampler.
        """
        rows = await self._services.store.read(
            select, SamplerRow, "id = ? AND tenant = ?", [sampler_id, tenant.name]
        )
        if not rows:
            raise NotFound(
                f"sampling_session_id={sampler_id[:200]!r}: there is no such sampling session"
            )
        return rows[0]

    async def info(self, tenant: Tenant, sampler_id: str) -> SamplerInfo:
        """Return a sampler's base model and checkpoint. Raise NotFound for an unknown sampler."""
        row = await self.row(tenant, sampler_id)
        return SamplerInfo(sampler_id, row.base_model, row.model_path)

    # Creating and closing.

    async def create(
        self, tenant: Tenant, operation: CreateSampler, checks_storage: bool = True
    ) -> str:
        """Create a sampler, and return its id when it can sample. A repeated request waits for the
        same sampler. Raise BadRequest if a different request has used this id, and, if
        `checks_storage` is true, if the tenant has used up its storage quota.
        """
        await self._services.sessions.touch(tenant, session_id_of(operation.sampler_id))
        lock = self._creation_locks.setdefault(operation.sampler_id, asyncio.Lock())
        async with lock:
            if not await self._was_created(tenant, operation):
                if checks_storage:
                    await self._services.checkpoints.check_quota(tenant)
                await self._create(tenant, operation)
        return operation.sampler_id

    async def _was_created(self, tenant: Tenant, operation: CreateSampler) -> bool:
        rows = await self._services.store.read(select, SamplerRow, "id = ?", [operation.sampler_id])
        if not rows:
            return False
        row = rows[0]
        has_same_base = operation.base_model in (None, row.base_model)
        if row.tenant != tenant.name or row.model_path != operation.model_path or not has_same_base:
            raise BadRequest(
                f"sampling_session_id={row.id!r} is already used by another sampler; continue with "
                "the next sequence number"
            )
        if row.closed is not None:
            raise Gone(f"sampling_session_id={row.id!r} is closed: {row.closed}")
        return True

    async def _create(self, tenant: Tenant, operation: CreateSampler) -> None:
        services = self._services
        services.request_log.check_capacity(tenant.name, 0)
        await services.store.read(check_samplers, tenant.name, services.settings)
        row = await self._new_sampler_row(tenant, operation)
        crash_point("pinned before recording")

        def record(transaction: Transaction) -> None:
            check_samplers(transaction, tenant.name, services.settings)
            upsert(transaction, row)

        try:
            await services.store.write(record)
        except (ServerError, StorageError):
            if row.source is not None:
                await services.engine.delete_checkpoint(row.source)
            raise
        sampler = self.add(row)
        sampler.ready.set()
        self._services.sessions.close_members_if_ended(row.session)
        try:
            async with self.pinned(sampler):
                pass
        except Exception as error:
            await self.close(sampler, f"the sampler could not be created ({error})")
            raise

    async def _new_sampler_row(self, tenant: Tenant, operation: CreateSampler) -> SamplerRow:
        base_model, source, memory_bytes, size_on_disk = operation.base_model, None, 0, 0
        if operation.model_path is not None:
            check_is_not_private(operation.model_path)
            info = await self._services.checkpoints.info(tenant, operation.model_path)
            base_model = base_model or info.base_model
            # Check first, because adapter_bytes reads the files of the base model.
            self._services.check_base_model(base_model)
            size = await self._services.engine.adapter_bytes(base_model, info.lora)
            memory_bytes = size.sampling
            source = sampler_copy_path(operation.sampler_id)
            await self._services.engine.copy_without_metadata(info.checkpoint.tinker_path, source)
            size_on_disk = info.checkpoint.size_bytes or 0
        assert base_model is not None
        self._services.check_base_model(base_model)
        now = time.time()
        return SamplerRow(
            id=operation.sampler_id,
            tenant=tenant.name,
            session=session_id_of(operation.sampler_id),
            base_model=base_model,
            model_path=operation.model_path,
            model=None,
            seq=None,
            source=source,
            memory_bytes=memory_bytes,
            created=now,
            used=now,
            bytes=size_on_disk + ROW_BYTES,
        )

    def add(self, row: SamplerRow, model: CachedAdapter | None = None) -> Sampler:
        """Open a sampler. `model` is the model that publishes it."""
        sampler = Sampler(row, self._services, model)
        self._samplers[row.id] = sampler
        if row.model is not None and row.seq is not None:
            self._published[row.model, row.seq] = sampler
        return sampler

    async def note_published(self, sampler: Sampler) -> None:
        """Note that the engine has published a sampler. If the sampler was closed before, release
        it.
        """
        if sampler.failure is not None:
            await self._services.engine.perform(ReleaseSampler(sampler.id))
            return
        self._services.adapter_cache.insert_loaded(sampler)
        sampler.ready.set()

    def note_failed_request(self, model_id: str, seq: int, message: str) -> None:
        """Note that request `seq` of a model failed. If the request should have published a
        sampler, the sampler fails with `message`.
        """
        sampler = self._published.get((model_id, seq))
        if sampler is not None:
            self._fail(sampler, message)

    async def record_save(self, sampler: Sampler, source: str, size: int) -> None:
        """Record the private checkpoint that holds a published sampler's weights."""
        sampler.row = replace(sampler.row, source=source, bytes=size)
        await self._services.store.write_with_retries(
            update_row, SamplerRow, sampler.id, source=source, bytes=size
        )

    async def release(self, sampler: Sampler) -> None:
        """Remove a sampler from memory, if it is loaded."""
        if self._services.adapter_cache.is_loaded(sampler):
            self._services.adapter_cache.discard(sampler)
            await sampler.unload()

    async def close(self, sampler: Sampler, reason: str) -> None:
        """Close a sampler and delete its files. The engine still finishes the samples that it is
        running on this sampler.
        """
        if self._samplers.pop(sampler.id, None) is None:
            return
        if sampler.row.model is not None and sampler.row.seq is not None:
            self._published.pop((sampler.row.model, sampler.row.seq), None)
        self._fail(sampler, reason)
        await self._services.store.write_with_retries(
            update_row, SamplerRow, sampler.id, closed=reason
        )
        crash_point("sampler closed before cleaning")
        await self.release(sampler)
        if sampler.row.source is not None:
            await self._services.engine.delete_checkpoint(sampler.row.source)

    def _fail(self, sampler: Sampler, message: str) -> None:
        sampler.failure = message
        sampler.ready.set()

    @asynccontextmanager
    async def pinned(self, sampler: Sampler) -> AsyncIterator[None]:
        """Load a sampler, and keep it in memory during the `async with` block. Raise UserError if
        the sampler is closed or could not be created. If `Sampler.load` fails, raise its error.
        """
        await sampler.ready.wait()
        sampler.check()
        sampler.last_used = time.time()
        cache = self._services.adapter_cache
        if (
            sampler.row.source is None
            and sampler.model is not None
            and not cache.is_loaded(sampler)
        ):
            async with cache.pinned(sampler.model):
                pass  # loading the model publishes the sampler again
        try:
            async with cache.pinned(sampler):
                yield
        finally:
            if sampler.failure is not None:  # it was closed while it was loaded or used
                await self.release(sampler)

    # Samples.

    async def check(self, tenant: Tenant, base_model: str, operation: Sample) -> None:
        """Raise ValueError if the request is invalid. The check needs only the base model, so the
        result is the same for all samplers of this base model.
        """
        operation = replace(operation, cache_owner=tenant.name)
        stop = operation.sampling_params.stop
        has_stop_strings = isinstance(stop, str) or any(
            isinstance(item, str) for item in stop or ()
        )
        # The check compiles a constraint, which may take some tenths of a second.
        is_long = (
            operation.prompt.length > _MAX_INLINE_TOKENS
            or operation.sampling_params.constraint is not None
        )
        if has_stop_strings or is_long or base_model not in self._checked_models:
            await self._services.engine.check_sample(base_model, operation)
            self._checked_models.add(base_model)
        else:
            self._services.engine.check_sample_inline(base_model, operation)

    async def submit(self, tenant: Tenant, seq_id: int, operation: Sample) -> Accepted:
        """Journal a sample request and start it. A repeated request returns the same request id.
        Raise BadRequest if a different request has used this number.
        """
        sampler = self.get(operation.sampler_id)
        if sampler is None or sampler.row.tenant != tenant.name:
            row = await self.row(tenant, operation.sampler_id)
            raise Gone(f"sampling_session_id={row.id!r} is closed: {row.closed}")
        await self._services.sessions.touch(tenant, sampler.row.session)
        await self.check(tenant, sampler.row.base_model, operation)
        entry = await self._services.request_log.encode(operation, seq_id)
        await run_uncancelled(self._journal(tenant, sampler, seq_id, entry))
        request_id = f"{sampler.id}:{seq_id}"
        sequence_ids = [f"{request_id}:{index}" for index in range(operation.num_samples)]
        return Accepted(request_id, sample_sequence_ids=sequence_ids)

    async def _journal(
        self, tenant: Tenant, sampler: Sampler, seq_id: int, entry: JournalEntry
    ) -> None:
        row = new_request_row(tenant, sampler.id, seq_id, entry)
        request = await self._services.request_log.accept(row, entry)
        if request is not None:
            self.start(sampler, request)

    def start(self, sampler: Sampler, request: QueuedRequest) -> None:
        """Run a journaled sample request in a task of its own."""
        task = asyncio.create_task(self._run(sampler, request), name=f"sample {request.id}")
        self._tasks[request.id] = task
        task.add_done_callback(lambda ended: self._on_task_done(request, ended))

    def cancel(self, tenant: Tenant, request_id: str) -> None:
        """Cancel a sample that has no answer yet. Other requests do not change."""
        request = self._services.request_log.active(request_id)
        if request is not None and request.row.tenant == tenant.name and request_id in self._tasks:
            self._tasks[request_id].cancel()

    async def sample(self, tenant: Tenant, operation: Sample) -> SampleResponse:
        """Sample for a client that keeps its connection open. The request is not journaled, but it
        waits for its tenant's turn like a journaled request. Cancelling this call cancels the
        sample. Raise Gone if the sampler was closed. Raise Unavailable if the server begins to stop
        while the sample waits for its turn, or stops before the sample is finished.
        """
        sampler = self.get(operation.sampler_id)
        if sampler is None:
            raise Gone("the model was released at this moment; send the request again")
        guard = self._services.crash_guard
        key = (
            "" if guard.is_inactive else await asyncio.to_thread(_guard_key, tenant.name, operation)
        )
        task = asyncio.create_task(self._sample_in_turn(tenant.name, sampler, operation, key))
        self._connected_tasks[task] = False
        try:
            return await task
        except asyncio.CancelledError:
            if task in self._ended_tasks:
                raise stopping() from None
            raise
        finally:
            del self._connected_tasks[task]
            self._ended_tasks.discard(task)

    async def _sample_in_turn(
        self, tenant: str, sampler: Sampler, operation: Sample, key: str
    ) -> SampleResponse:
        async with self._slots(tenant, operation.num_samples, operation.prompt.length):
            task = asyncio.current_task()
            assert task is not None
            self._connected_tasks[task] = True
            async with self.pinned(sampler), self._services.crash_guard.running(key):
                return await self._sample(tenant, operation)

    async def stop(self, seconds: float) -> None:
        """Wait up to `seconds` for the samples in the engine. Waiting and unfinished samples run
        again after the next start. Those of clients that keep a connection open are not journaled,
        and end with Unavailable.
        """
        await self._postpone(self._tasks.keys() - self._ids_in_engine)
        self._end([task for task, has_turn in self._connected_tasks.items() if not has_turn])
        running = [*self._tasks.values(), *self._connected_tasks]
        if running:
            await asyncio.wait(running, timeout=seconds)
        self._end(self._connected_tasks)
        await self._postpone(self._tasks)

    def _end(self, tasks: Iterable[asyncio.Task[SampleResponse]]) -> None:
        """End samples of connected clients with Unavailable."""
        for task in tasks:
            self._ended_tasks.add(task)
            task.cancel()

    async def _postpone(self, request_ids: Iterable[str]) -> None:
        tasks = [self._tasks[request_id] for request_id in request_ids]
        self._postponed_tasks.update(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_task_done(self, request: QueuedRequest, task: asyncio.Task[None]) -> None:
        self._tasks.pop(request.id, None)
        self._ids_in_engine.discard(request.id)
        if task.cancelled() and task not in self._postponed_tasks:
            self._services.request_log.settle(request, Failed("the request was cancelled", "user"))

    async def _run(self, sampler: Sampler, request: QueuedRequest) -> None:
        try:
            # After a disk fault, `_compute_answer` is called again. Each call waits for a turn of
            # its own, so the request holds no slots while it waits for the disk.
            answer = await self._services.request_log.disk_faults.retry_until_fixed(
                lambda: self._compute_answer(sampler, request), sampler.id
            )
        except EngineClosedError:
            return
        except Exception as error:
            if not isinstance(error, (ValueError, Abandoned)):
                _log.exception("%s failed", request.id)
            answer = failed_from_error(error)
        self._services.request_log.settle(request, answer)

    async def _compute_answer(self, sampler: Sampler, request: QueuedRequest) -> Done:
        """Wait for the turn of the request, and then sample. The operation is read from the journal
        only after this wait, so that waiting requests need no memory.
        """
        request_log, tenant = self._services.request_log, request.row.tenant
        await sampler.ready.wait()
        if not request.num_sequences:  # an earlier process accepted the request
            request.set_counts(await request_log.operation(request))
        async with self._slots(tenant, request.num_sequences, request.num_input_tokens):
            operation = await request_log.operation(request)
            assert isinstance(operation, Sample)
            async with self.pinned(sampler), self._services.crash_guard.running(request.id):
                self._ids_in_engine.add(request.id)
                response = await self._sample(tenant, operation)
                return done_from_result(operation, response)

    @asynccontextmanager
    async def _slots(self, tenant: str, num_sequences: int, num_tokens: int) -> AsyncIterator[None]:
        lease = await self._services.sampling_queue.acquire_slots(
            tenant, max(1, num_sequences), num_tokens
        )
        try:
            yield
        finally:
            lease.release()

    async def _sample(self, tenant: str, operation: Sample) -> SampleResponse:
        counters, queue = self._services.counters, self._services.sampling_queue
        num_sampled = 0

        def on_token(token: SampledToken) -> None:
            nonlocal num_sampled
            num_sampled += 1
            if operation.on_token is not None:
                operation.on_token(token)

        try:
            crash_point("before running")
            counters.num_sample_requests += 1
            counters.sum_of_running_sequences += queue.used_slots
            response = await self._services.engine.perform(
                replace(operation, on_token=on_token, cache_owner=tenant)
            )
        finally:  # a cancelled request is charged for the tokens sampled so far
            queue.charge(tenant, num_sampled)
            self._services.limits.use_tokens(tenant, num_sampled)
            counters.sampled_tokens[tenant] += num_sampled
        counters.prompt_tokens[tenant] += operation.prompt.length
        counters.cached_prompt_tokens[tenant] += response.prompt_cache_hit_tokens
        return response


def _guard_key(tenant: str, operation: Sample) -> str:
    """Return the crash guard's key for a sample that is not journaled. A repeated request has the
    same key.
    """
    entry = encode_request(replace(operation, sampler_id="", on_token=None), 0)
    return f"a sample of {tenant} ({entry.digest.hex()})"
