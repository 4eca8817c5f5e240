"""Sampling: each request is a task that waits for its sampler, for its tenant's turn, and for room
in memory, and then for the engine.

RequestLog have no order. After a crash those that were not answered are drawn again, with the seeds
that they were accepted with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from planish.errors import EngineClosedError
from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.journal import entry, result_of
from planish.server.durable.request_log import Request, RequestLog, TenantLimits, failure
from planish.server.durable.store import crash_point
from planish.server.engine_client import EngineClient
from planish.server.metrics import Counters
from planish.server.results import Abandoned, Done, Failed
from planish.server.samplers import Sampler, Samplers
from planish.server.scheduling.fair_queue import FairQueue
from planish.service import DrawnToken, Sample
from planish.types import SampleResponse

_log = logging.getLogger(__name__)

_INLINE_TOKENS = 4096


class Sampling:
    def __init__(
        self,
        engine: EngineClient,
        requests: RequestLog,
        under_way: CrashGuard,
        samplers: Samplers,
        gate: FairQueue,
        limits: TenantLimits,
        counters: Counters,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._under_way = under_way
        self._samplers = samplers
        self._gate = gate
        self._limits = limits
        self._counters = counters
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loaded: set[str] = set()
        """Base models that are in memory."""
        self._begun: set[str] = set()
        """Those of them that are with the engine."""
        self._left: set[asyncio.Task[None]] = set()
        """Those that a stop leaves for the next start."""

    async def check(self, base_model: str, operation: Sample) -> None:
        """ValueError if no sampler of the base model could ever serve the request."""
        stop = operation.sampling_params.stop
        reads_text = isinstance(stop, str) or any(isinstance(item, str) for item in stop or ())
        if reads_text or operation.prompt.length > _INLINE_TOKENS or base_model not in self._loaded:
            await self._engine.check_sample(base_model, operation)
            self._loaded.add(base_model)
        else:
            self._engine.check_sample_now(base_model, operation)

    def begin(self, sampler: Sampler, request: Request) -> None:
        task = asyncio.create_task(self._draw(sampler, request), name=f"sample {request.id}")
        self._tasks[request.id] = task
        task.add_done_callback(lambda ended: self._ended(request, ended))

    def cancel(self, request_id: str) -> None:
        """Give a request up, if it is not answered."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    def _ended(self, request: Request, task: asyncio.Task[None]) -> None:
        self._tasks.pop(request.id, None)
        self._begun.discard(request.id)
        if task.cancelled() and task not in self._left:
            self._requests.settle(request, Failed("it was cancelled", "user"))

    async def stop(self, seconds: float) -> None:
        """Let what the engine has be finished for up to so long. What waits for its turn, and what
        is left, is drawn after the next start.
        """
        await self._leave(self._tasks.keys() - self._begun)
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=seconds)
        await self._leave(self._tasks)

    async def _leave(self, request_ids: Iterable[str]) -> None:
        left = [self._tasks[request_id] for request_id in request_ids]
        self._left.update(left)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _draw(self, sampler: Sampler, request: Request) -> None:
        try:
            answer = await self._drawn(sampler, request)
        except EngineClosedError:
            return
        except Exception as error:
            if not isinstance(error, (ValueError, Abandoned)):
                _log.exception("%s failed", request.id)
            answer = failure(error)
        self._requests.settle(request, answer)

    async def _drawn(self, sampler: Sampler, request: Request) -> Done:
        """The operation is read, if it has to be, when its turn has come: those that wait take no
        memory.
        """
        await sampler.ready.wait()
        if not request.sequences:  # of an earlier process
            request.measure(await self._requests.operation(request))
        async with self._turn(request.row.tenant, request.sequences, request.tokens):
            operation = await self._requests.operation(request)
            assert isinstance(operation, Sample)
            async with self._samplers.held(sampler), self._under_way.doing(request.id):
                self._begun.add(request.id)
                response = await self._draw_now(request.row.tenant, operation)
                return result_of(request.row.kind, operation, response)

    async def draw(self, tenant: str, sampler: Sampler, operation: Sample) -> SampleResponse:
        """In the tenant's turn; nothing is journaled, and cancelling it gives it up."""
        key = "" if self._under_way.is_calm else await asyncio.to_thread(_key, tenant, operation)
        async with (
            self._turn(tenant, operation.num_samples, operation.prompt.length),
            self._samplers.held(sampler),
            self._under_way.doing(key),
        ):
            return await self._draw_now(tenant, operation)

    @asynccontextmanager
    async def _turn(self, tenant: str, sequences: int, tokens: int) -> AsyncIterator[None]:
        turn = await self._gate.turn(tenant, max(1, sequences), tokens)
        try:
            yield
        finally:
            turn.give_back()

    async def _draw_now(self, tenant: str, operation: Sample) -> SampleResponse:
        drawn, told = 0, operation.on_token

        def on_token(token: DrawnToken) -> None:
            nonlocal drawn
            drawn += 1
            if told is not None:
                told(token)

        try:
            crash_point("before running")
            self._counters.draws += 1
            self._counters.sequences_at_draws += self._gate.used
            response = await self._engine.perform(replace(operation, on_token=on_token))
        finally:  # what was drawn is paid for by whoever gives it up, too
            self._gate.charge(tenant, drawn)
            self._limits.use(tenant, drawn)
            self._counters.sampled_tokens[tenant] += drawn
        self._counters.prompt_tokens[tenant] += operation.prompt.length
        self._counters.cached_prompt_tokens[tenant] += response.prompt_cache_hit_tokens
        return response


def _key(tenant: str, operation: Sample) -> str:
    """The same for a repetition, which has no other name."""
    drawn = entry(replace(operation, sampler_id="", on_token=None), 0)
    return f"a draw of {tenant} ({drawn.digest.hex()})"
