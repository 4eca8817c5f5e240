"""Taking requests: whose they are, whether they came before, whether they can be right; then the
journal; then whoever does them.

A training request that is refused has used up its number, since the client counts on. It is
journaled as refused, because a part of a gradient that is missing must keep the optimizer step
behind it from being applied.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from planish.engine.checkpoint_labels import check_name, check_ttl
from planish.errors import StorageError, UnknownModelError
from planish.server.durable.checkpoints import CheckpointCatalog, check_source
from planish.server.durable.journal import JournalEntry, RequestRow, kind_of
from planish.server.durable.names import check_name_is_not_private
from planish.server.durable.records import ModelRow, SamplerRow, put, select, text_of
from planish.server.durable.request_log import Also, Request, RequestLog
from planish.server.durable.store import Store
from planish.server.engine_client import EngineClient
from planish.server.models.model import Model
from planish.server.models.request_queue import RequestQueue
from planish.server.models.restarted_counting import counted, shifted
from planish.server.models.training import Training
from planish.server.results import Accepted, BadRequest, Failed, Gone, NotFound, ServerError, Tenant
from planish.server.samplers import Sampler, Samplers
from planish.server.sampling import Sampling
from planish.server.sessions import Sessions
from planish.server.settings import ServerSettings
from planish.service import (
    CreateModel,
    ForwardBackward,
    LoadWeights,
    Operation,
    PublishSampler,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
    UnloadModel,
)
from planish.wire.client_errors import name_of
from planish.wire.models import session_of

R = TypeVar("R")

_MOST_SEQ = 2**62
"""What is counted beyond it would soon not fit into the database."""


class Submission:
    def __init__(
        self,
        base_models: Sequence[str],
        engine: EngineClient,
        store: Store,
        sessions: Sessions,
        requests: RequestLog,
        training: Training,
        sampling: Sampling,
        samplers: Samplers,
        catalog: CheckpointCatalog,
        settings: ServerSettings,
    ) -> None:
        self._settings = settings
        self._base_models = tuple(base_models)
        self._engine = engine
        self._store = store
        self._sessions = sessions
        self._requests = requests
        self._training = training
        self._sampling = sampling
        self._samplers = samplers
        self._catalog = catalog

    def check_base_model(self, name: str) -> None:
        """UnknownModelError for a name that is not served; a client's name must not start a
        download.
        """
        if name not in self._base_models:
            raise UnknownModelError(
                f"base_model={name[:200]!r} is not served here; this server has {', '.join(self._base_models)}"
            )

    async def create_model(self, tenant: Tenant, operation: CreateModel) -> Accepted:
        model_id = operation.model_id
        await self._sessions.touch(tenant, session_of(model_id))
        accepted = Accepted(f"{model_id}:0", model_id)
        journaled = await self._requests.encoded(operation, 0)
        # Looked up first: one that is written after it is found among the requests, or by `accept`.
        is_taken = bool(
            await self._store.read(lambda db: select(db, ModelRow, "id = ?", [model_id]))
        )
        if await self._requests.repeats(accepted.request_id, journaled.digest):
            return accepted
        if is_taken:
            raise BadRequest(f"model_seq_id: {model_id!r} was used before; count on")
        row = await self._model_row(tenant, operation)
        await _whole(self._journal_model(row, journaled))
        return accepted

    async def submit_training(
        self, tenant: Tenant, seq_id: int, operation: Operation[Any]
    ) -> Accepted:
        model = await self.model(tenant, model_of(operation))
        if not 1 <= seq_id <= _MOST_SEQ:
            raise BadRequest(f"seq_id={seq_id}: the requests of a model are counted from 1")
        await self._sessions.touch(tenant, model.row.session)
        seq_id = await counted(self._store, model, seq_id, operation)
        accepted = Accepted(f"{model.id}:{seq_id}", model.id)
        try:
            journaled = await self._requests.encoded(operation, seq_id)
        except ValueError as error:
            if self._can_arrive(model, seq_id):
                await model.arrive(
                    seq_id, self._journal_refused(model, seq_id, error, kind_of(operation))
                )
            raise
        if not await self._came_before(model, seq_id, accepted.request_id, journaled.digest):
            await model.arrive(seq_id, self._take(tenant, model, seq_id, operation, journaled))
        return accepted

    async def reject(
        self, tenant: Tenant, model_id: str, seq_id: int, error: Exception, kind: str
    ) -> None:
        with suppress(NotFound, Gone):
            model = await self.model(tenant, model_id)
            seq_id = shifted(model, seq_id)
            if 1 <= seq_id <= _MOST_SEQ and self._can_arrive(model, seq_id):
                await model.arrive(seq_id, self._journal_refused(model, seq_id, error, kind))

    async def unload_model(self, tenant: Tenant, model_id: str) -> Accepted:
        accepted, operation = Accepted(f"{model_id}:unload", model_id), UnloadModel(model_id)
        journaled = await self._requests.encoded(operation, 0)
        try:
            model = await self.model(tenant, model_id)
        except Gone:
            if await self._requests.repeats(accepted.request_id, journaled.digest):
                return accepted
            raise
        before, model.unload_seq = (
            model.unload_seq,
            model.end if model.unload_seq is None else model.unload_seq,
        )
        row = replace(_row(tenant, model.id, model.unload_seq, journaled), id=accepted.request_id)
        try:
            await _whole(self._journal_training(model, row, journaled))
        except (ServerError, StorageError):
            model.unload_seq = before
            raise
        return accepted

    async def submit_sample(self, tenant: Tenant, seq_id: int, operation: Sample) -> Accepted:
        sampler = self._samplers.get(operation.sampler_id)
        if sampler is None or sampler.row.tenant != tenant.name:
            row = await self._samplers.row(tenant, operation.sampler_id)
            raise Gone(f"sampling_session_id={row.id!r} is closed: {row.closed}")
        await self._sessions.touch(tenant, sampler.row.session)
        request_id = f"{sampler.id}:{seq_id}"
        accepted = Accepted(
            request_id,
            sample_sequence_ids=[f"{request_id}:{index}" for index in range(operation.num_samples)],
        )
        await self._sampling.check(sampler.row.base_model, operation)
        journaled = await self._requests.encoded(operation, seq_id)
        await _whole(
            self._journal_sample(sampler, _row(tenant, sampler.id, seq_id, journaled), journaled)
        )
        return accepted

    async def model(self, tenant: Tenant, model_id: str) -> Model:
        """The tenant's model, if it takes requests. NotFound; Gone if it is closed."""
        model = self._training.get(model_id)
        if model is not None and model.row.tenant == tenant.name:
            return model
        row = await self.model_row(tenant, model_id)
        raise Gone(
            f"model_id={model_id!r} takes no more requests: {row.closed}; create another, from a checkpoint of it"
        )

    async def model_row(self, tenant: Tenant, model_id: str) -> ModelRow:
        """Of any model that the tenant ever made."""
        rows = await self._store.read(
            lambda db: select(db, ModelRow, "id = ? AND tenant = ?", [model_id, tenant.name])
        )
        if not rows:
            raise NotFound(f"model_id={model_id[:200]!r}: there is no such model")
        return rows[0]

    async def _model_row(self, tenant: Tenant, operation: CreateModel) -> ModelRow:
        base_model, lora = operation.base_model, operation.lora
        if operation.from_path is not None:
            check_source(operation.from_path)
            info = await self._catalog.info(tenant, operation.from_path)
            base_model, lora = base_model or info.base_model, info.lora
        if base_model is None:
            raise BadRequest("base_model is missing; name one")
        self.check_base_model(base_model)
        size, now = await self._engine.adapter_bytes(base_model, lora), time.time()
        return ModelRow(
            id=operation.model_id,
            tenant=tenant.name,
            session=session_of(operation.model_id),
            base_model=base_model,
            lora=text_of(lora),
            user_metadata=text_of(operation.user_metadata),
            training_bytes=size.training,
            sampling_bytes=size.sampling,
            created=now,
            used=now,
        )

    async def _check_training(
        self, tenant: Tenant, model: Model, operation: Operation[Any]
    ) -> None:
        match operation:
            case ForwardBackward(forward_only=False) if (
                model.progress.bytes > self._settings.journal_bytes
            ):
                raise BadRequest(
                    f"model_id={model.id!r}: the data of one gradient have {model.progress.bytes:,} bytes, and may have "
                    f"{self._settings.journal_bytes:,}; the next optim_step is refused, take steps with less data"
                )
            case SaveWeights(name=name) | SaveWeightsForSampler(name=name):
                check_name("name", name)
                check_ttl(operation.ttl_seconds)
                check_name_is_not_private(name)
            case LoadWeights(path=path):
                check_source(path)
                await self._catalog.readable(tenant, path)
            case PublishSampler(sampler_id=sampler_id):
                if await self._store.read(
                    lambda db: select(db, SamplerRow, "id = ?", [sampler_id])
                ):
                    raise BadRequest(
                        f"sampling_session_id={sampler_id!r} was used before; count on"
                    )

    def _can_arrive(self, model: Model, seq: int) -> bool:
        """Whether no request of this number came, and one may."""
        is_late = model.unload_seq is not None and seq >= model.unload_seq
        return not (is_late or model.lane.is_used(seq) or seq in model.arriving)

    async def _take(
        self,
        tenant: Tenant,
        model: Model,
        seq: int,
        operation: Operation[Any],
        journaled: JournalEntry,
    ) -> None:
        try:
            await self._check_training(tenant, model, operation)
        except (ValueError, ServerError) as error:
            await self._journal_refused(model, seq, error, journaled.kind)
            raise
        sampler = (
            _sampler_row(model, seq, operation) if isinstance(operation, PublishSampler) else None
        )
        await self._journal_training(
            model, _row(tenant, model.id, seq, journaled), journaled, sampler
        )

    async def _came_before(self, model: Model, seq: int, request_id: str, digest: bytes) -> bool:
        """Whether this request was taken already. BadRequest or Gone if its number cannot be used
        any more.
        """
        while (arriving := model.arriving.get(seq)) is not None:
            await asyncio.wait([arriving])
        if model.unload_seq is not None and seq >= model.unload_seq:
            raise Gone(f"model_id={model.id!r} is to be unloaded and takes no more requests")
        if not model.lane.is_used(seq):
            return False
        if await self._requests.repeats(request_id, digest):
            return True
        if seq < model.lane.passed:
            raise BadRequest(
                f"seq_id={seq} of {model.id!r} came too late: it is not waited for any more; count on"
            )
        raise Gone(f"seq_id={seq} of {model.id!r} was done long ago, and its result was removed")

    async def _journal_refused(self, model: Model, seq: int, error: Exception, kind: str) -> None:
        row = RequestRow(
            *(
                f"{model.id}:{seq}",
                model.row.tenant,
                kind,
                model.id,
                seq,
                "refused",
                None,
                time.time(),
            ),
            message=str(error),
            category="user",
            error_class=name_of(error),
        )
        await self._journal_training(
            model, row, JournalEntry(kind, b"", b"", UnloadModel(model.id))
        )

    async def _journal_model(self, row: ModelRow, journaled: JournalEntry) -> None:
        creation = _row(Tenant(row.tenant), row.id, 0, journaled)
        request = await self._requests.accept(
            creation, journaled, lambda transaction: put(transaction, row)
        )
        if request is not None:
            self._queue(self._training.add(row, RequestQueue(0)), request)
            self._sessions.clear_if_ended(row.session)

    async def _journal_sample(
        self, sampler: Sampler, row: RequestRow, journaled: JournalEntry
    ) -> None:
        request = await self._requests.accept(row, journaled)
        if request is not None:
            self._sampling.begin(sampler, request)

    async def _journal_training(
        self,
        model: Model,
        row: RequestRow,
        journaled: JournalEntry,
        sampler: SamplerRow | None = None,
    ) -> None:
        also: Also | None = (
            None if sampler is None else lambda transaction: put(transaction, sampler)
        )
        request = await self._requests.accept(row, journaled, also)
        if request is not None:
            if sampler is not None:
                self._samplers.add(sampler, model.residence)
            self._queue(model, request)
            if sampler is not None:
                self._sessions.clear_if_ended(sampler.session)

    def _queue(self, model: Model, request: Request) -> None:
        if model.row.closed is None and not model.lane.is_used(request.seq):
            model.lane.add(request.seq, request)
            self._training.wake(model)
        else:  # in the moment in which it was journaled
            reason = model.row.closed or "its number is not waited for any more"
            answer = Failed(f"{request.id} came too late: {reason}", "user")
            self._samplers.not_published(model.id, request.seq, answer.message)
            self._requests.settle(request, answer, state="refused")


async def _whole(work: Coroutine[Any, Any, R]) -> R:
    """Do it to its end even if whoever waits gives up: what was journaled must be queued."""
    return await asyncio.shield(asyncio.create_task(work))


def model_of(operation: Operation[Any]) -> str:
    model_id = getattr(operation, "model_id", None)
    if not isinstance(model_id, str):
        raise TypeError(f"{type(operation).__name__} is no operation of a model")
    return model_id


def _sampler_row(model: Model, seq: int, operation: PublishSampler) -> SamplerRow:
    now = time.time()
    return SamplerRow(
        id=operation.sampler_id,
        tenant=model.row.tenant,
        session=model.row.session,
        base_model=model.row.base_model,
        model_path=None,
        model=model.id,
        seq=seq,
        source=None,
        memory_bytes=model.row.sampling_bytes,
        created=now,
        used=now,
    )


def _row(tenant: Tenant, owner: str, seq: int, journaled: JournalEntry) -> RequestRow:
    return RequestRow(
        f"{owner}:{seq}",
        tenant.name,
        journaled.kind,
        owner,
        seq,
        "accepted",
        journaled.digest,
        time.time(),
        len(journaled.body),
    )
