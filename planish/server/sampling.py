"""Samples on the samplers of a server.

Each sample request is a task. The task waits for its turn, and then for the engine. Samples may run
in any order. After a crash, unanswered requests run again with the seeds that were journaled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from planish.errors import EngineClosedError
from planish.server.durable.request_log import RequestLog
from planish.server.durable.retries import retry_briefly
from planish.server.engine_client import EngineClient
from planish.server.intake import Intake
from planish.server.metrics import Counters
from planish.server.request import (
    Request,
    done_from_result,
    encode_operation,
    encoded_request,
    failed_from_error,
    run_uncancelled,
)
from planish.server.results import Abandoned, Accepted, Done, Failed, Gone, Tenant, stopping
from planish.server.samplers import Sampler, Samplers
from planish.server.settle import Settlement
from planish.server.tenant_limits import TenantLimits
from planish.server.turn import Turns
from planish.service import Sample, SampledToken
from planish.types import SampleResponse

_log = logging.getLogger(__name__)

_MAX_INLINE_TOKENS = 4096
"""Longer prompts are checked in a thread."""


class Sampling:
    """Runs the sample requests of all samplers."""

    def __init__(
        self,
        samplers: Samplers,
        engine: EngineClient,
        intake: Intake,
        turns: Turns,
        settlement: Settlement,
        request_log: RequestLog,
        tenant_limits: TenantLimits,
        counters: Counters,
    ) -> None:
        """`turns` are the turns of samples. `tenant_limits` and `counters` count the sampled
        tokens.
        """
        self._samplers, self._engine, self._tenant_limits = samplers, engine, tenant_limits
        self._intake, self._turns, self._settlement = intake, turns, settlement
        self._request_log, self._counters = request_log, counters
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
        has its slots.
        """
        self._ended_tasks: set[asyncio.Task[SampleResponse]] = set()
        """The tasks of `_connected_tasks` that were cancelled by a stop."""
        self._postponed_tasks: set[asyncio.Task[None]] = set()
        """Tasks that were cancelled by a stop. The next start runs their requests."""

    async def check(self, tenant: Tenant, base_model: str, operation: Sample) -> None:
        """Raise ValueError if the request is invalid. The check needs only the base model, so the
        result is the same for all samplers of this base model.
        """
        operation = replace(operation, owner=tenant.name)
        stop = operation.sampling_params.stop
        has_stop_strings = isinstance(stop, str) or any(
            isinstance(item, str) for item in stop or ()
        )
        # The check compiles a constraint, which may take some tenths of a second.
        is_long = (
            bool(operation.prompt.images)
            or operation.prompt.max_length > _MAX_INLINE_TOKENS
            or operation.sampling_params.constraint is not None
        )
        is_slow = has_stop_strings or is_long or not self._engine.checks_inline
        if is_slow or base_model not in self._checked_models:
            await self._engine.check_sample(base_model, operation)
            self._checked_models.add(base_model)
        else:
            self._engine.check_sample_inline(base_model, operation)

    # Journaled samples.

    async def submit(self, tenant: Tenant, seq_id: int, operation: Sample) -> Accepted:
        """Journal a sample request and start it. A repeated request returns the same request id.
        Raise BadRequest if a different request has used this number.
        """
        sampler = await self._samplers.touch(tenant, operation.sampler_id)
        await self.check(tenant, sampler.row.base_model, operation)
        request = await encoded_request(tenant, sampler.id, seq_id, operation)
        await run_uncancelled(self._accept(sampler, request))
        sequence_ids = [f"{request.id}:{index}" for index in range(operation.num_samples)]
        return Accepted(request.id, sample_sequence_ids=sequence_ids)

    async def _accept(self, sampler: Sampler, request: Request) -> None:
        if await self._intake.accept(request):
            self.start(sampler, request)

    def start(self, sampler: Sampler, request: Request) -> None:
        """Run a journaled sample request in a task of its own."""
        task = asyncio.create_task(self._run(sampler, request), name=f"sample {request.id}")
        self._tasks[request.id] = task
        task.add_done_callback(lambda ended: self._on_task_done(request, ended))

    def cancel(self, tenant: Tenant, request_id: str) -> None:
        """Cancel a sample that has no answer yet. Other requests do not change."""
        request = self._request_log.active.get(request_id)
        if request is not None and request.row.tenant == tenant.name and request_id in self._tasks:
            self._tasks[request_id].cancel()

    def _on_task_done(self, request: Request, task: asyncio.Task[None]) -> None:
        self._tasks.pop(request.id, None)
        self._ids_in_engine.discard(request.id)
        if task.cancelled() and task not in self._postponed_tasks:
            self._settlement.settle(request, Failed("the request was cancelled", "user"))

    async def _run(self, sampler: Sampler, request: Request) -> None:
        try:
            # After a disk fault, `_compute_answer` is called again. Each call waits for a turn of
            # its own, so the request holds no slots while it waits for the disk.
            answer = await self._request_log.disk_faults.retry_until_fixed(
                lambda: self._compute_answer(sampler, request), sampler.id
            )
        except EngineClosedError:
            return
        except Exception as error:
            if not isinstance(error, (ValueError, Abandoned)):
                _log.exception("%s failed", request.id)
            answer = failed_from_error(error)
        self._settlement.settle(request, answer)

    async def _compute_answer(self, sampler: Sampler, request: Request) -> Done:
        """Wait for the turn of the request, and then sample. The operation is read from the journal
        only after this wait, so that waiting requests need no memory.
        """
        await sampler.ready.wait()
        if not request.num_sequences:  # an earlier process accepted the request
            await self._request_log.operation(request)
        async with self._turns.turn(
            request.id,
            request.row.tenant,
            max(1, request.num_sequences),
            request.num_input_tokens,
            self._samplers.pinned(sampler),
        ):
            self._ids_in_engine.add(request.id)
            request.begun = time.time()
            operation = request.operation or await retry_briefly(
                lambda: self._request_log.read_operation(request.row), request.id
            )
            assert isinstance(operation, Sample)
            return done_from_result(operation, await self._sample(request.row.tenant, operation))

    # Samples of clients that keep their connection open.

    async def sample(self, tenant: Tenant, operation: Sample) -> SampleResponse:
        """Sample for a client that keeps its connection open. The request is not journaled, but it
        waits for its tenant's turn like a journaled request. Cancelling this call cancels the
        sample. Raise Gone if the sampler was closed. Raise Unavailable if the server begins to stop
        while the sample waits for its turn, or stops before the sample is finished.
        """
        sampler = self._samplers.get(operation.sampler_id)
        if sampler is None:
            raise Gone("the model was released at this moment; send the request again")
        key = ""
        if self._turns.needs_key:
            key = await asyncio.to_thread(_guard_key, tenant.name, operation)
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
        async with self._turns.turn(
            key,
            tenant,
            max(1, operation.num_samples),
            operation.prompt.max_length,
            self._pinned_after_slots(sampler),
        ):
            return await self._sample(tenant, operation)

    @asynccontextmanager
    async def _pinned_after_slots(self, sampler: Sampler) -> AsyncGenerator[None]:
        """Keep a sampler in memory for the block. The present task has its slots."""
        task = asyncio.current_task()
        assert task is not None
        self._connected_tasks[task] = True
        async with self._samplers.pinned(sampler):
            yield

    async def stop(self, seconds: float) -> None:
        """Wait up to `seconds` for the samples in the engine. Waiting and unfinished samples run
        again after the next start. Those of clients that keep a connection open are not journaled,
        and end with Unavailable.
        """
        await self._postpone(self._tasks.keys() - self._ids_in_engine)
        self._end([task for task, has_slots in self._connected_tasks.items() if not has_slots])
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

    async def _sample(self, tenant: str, operation: Sample) -> SampleResponse:
        num_sampled = 0

        def on_token(token: SampledToken) -> None:
            nonlocal num_sampled
            num_sampled += 1
            if operation.on_token is not None:
                operation.on_token(token)

        counters = self._counters
        try:
            counters.num_sample_requests += 1
            counters.sum_of_running_sequences += self._turns.num_used_slots
            response = await self._engine.perform(
                replace(operation, on_token=on_token, owner=tenant)
            )
        finally:  # a cancelled request is charged for the tokens sampled so far
            self._turns.charge(tenant, num_sampled)
            self._tenant_limits.use_tokens(tenant, num_sampled)
            counters.sampled_tokens[tenant] += num_sampled
        counters.prompt_tokens[tenant] += operation.prompt.max_length
        counters.cached_prompt_tokens[tenant] += response.prompt_cache_hit_tokens
        return response


def _guard_key(tenant: str, operation: Sample) -> str:
    """Return the crash guard's key for a sample that is not journaled. A repeated request has the
    same key.
    """
    encoded = encode_operation(replace(operation, sampler_id="", on_token=None), 0)
    return f"a sample of {tenant} ({encoded.digest.hex()})"
