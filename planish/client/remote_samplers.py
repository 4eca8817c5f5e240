"""Samplers on a server, and sampling requests to them.

Sampling requests that are submitted at about the same time are sent as one HTTP request, whose
response streams each result when it is finished. Two HTTP requests per sample would take longer
than sampling a short answer. If the connection of a batch breaks, its unfinished requests are sent
again; the server recognises them by sampler and number. Servers other than planish's do not support
batches, so they get one request per sample.

A sample can be cancelled until it is finished. The client then sends a cancel request, and the
server stops sampling.
"""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from planish.client.remote_connection import ServerConnection
from planish.client.remote_errors import NoSuchEndpointError, error_from_frame
from planish.client.remote_model_queue import QueuedOperation
from planish.client.remote_retries import RETRIED_STATUSES
from planish.client.remote_thread import LoopThread, run_in_pool
from planish.errors import PlanishError
from planish.service import CreateSampler, Sample, SamplerInfo
from planish.wire.client_frames import Frame
from planish.wire.fields import Fields
from planish.wire.operations import PostRequest, post_request_for
from planish.wire.records import sampler_info_from_json
from planish.wire.sampling import sample_response_from_message

_BATCH_WINDOW_SECONDS = 0.002
_MAX_BATCH, _MAX_BATCH_BYTES = 512, 8 << 20
_MAX_STREAMS = 256
_RETRY_SECONDS = 1.0
_MAX_INLINE_BYTES = 64 * 1024


@dataclass(eq=False)
class RemoteSampler:
    """A sampler on the server. `num_pending` and `is_released` are used only in the connection's
    thread.
    """

    server_id: str
    info_future: Future[SamplerInfo] = field(default_factory=Future[SamplerInfo])
    """Done when the server has created the sampler, or with the error of its creation."""
    sequence_numbers: Iterator[int] = field(default_factory=itertools.count)
    """The sequence numbers of its requests."""
    num_pending: int = 0
    """Number of unfinished requests, including the creation."""
    is_released: bool = False


@dataclass(eq=False)
class PendingSample:
    """One sampling request that is not finished."""

    body: bytes
    content: asyncio.Future[bytes]
    """The future of the serialized result."""
    request_id: str | None = None
    """The server's id of the request; None until the server has accepted it."""
    sequence_ids: Sequence[str] = ()
    is_cancelled: bool = False
    """The caller has cancelled the request."""


@dataclass(eq=False)
class SampleSender:
    """Creates samplers and sends sampling requests. All methods run in the connection's thread."""

    connection: ServerConnection
    thread: LoopThread
    supports_batches: bool = True
    """Whether the server supports batches. Set to False if the server lacks the endpoint."""
    _queue: asyncio.Queue[PendingSample] = field(default_factory=asyncio.Queue[PendingSample])
    _streams: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_STREAMS))

    async def create(
        self, operation: CreateSampler, sampler: RemoteSampler, queued: QueuedOperation
    ) -> None:
        """Create a sampler on the server. `operation.sampler_id` is the server's id."""
        if not queued.future.set_running_or_notify_cancel():
            sampler.info_future.set_exception(CancelledError())
            return
        sampler.num_pending += 1
        try:
            await self.connection.post(post_request_for(operation))
            info_response = await self.connection.get(f"/samplers/{sampler.server_id}")
            info = sampler_info_from_json(Fields.of(info_response.content))
        except Exception as error:
            sampler.info_future.set_exception(error)
            queued.fail(error)
        else:
            sampler.info_future.set_result(info)
            queued.future.set_result(info.sampler_id)
        finally:
            sampler.num_pending -= 1
        if sampler.is_released:
            await self.release(sampler)

    async def release(self, sampler: RemoteSampler) -> None:
        """Release the sampler on the server when all of its requests are finished."""
        sampler.is_released = True
        if not sampler.num_pending:
            posted = PostRequest.json("/planish/release", {"sampler_id": sampler.server_id})
            with suppress(PlanishError):  # the end of the session releases it
                await self.connection.post(posted, max_retry_seconds=0)

    async def sample(self, operation: Sample, sampler: RemoteSampler, future: Future[Any]) -> None:
        """Send a sampling request, and set its result in `future`."""
        queued = QueuedOperation(operation, future)
        sampler.num_pending += 1
        try:
            await self._wait_until_created(sampler)
            request = post_request_for(
                replace(operation, sampler_id=sampler.server_id), next(sampler.sequence_numbers)
            )
            pending = PendingSample(request.content, asyncio.get_running_loop().create_future())
            future.add_done_callback(
                lambda _: future.cancelled() and self.thread.post(self._cancel, pending)
            )
            self._queue.put_nowait(pending)
            content = await pending.content
            ids = None if operation.prompt_only else pending.sequence_ids  # nothing is sampled
            if len(content) > _MAX_INLINE_BYTES:
                response = await run_in_pool(sample_response_from_message, content, ids)
            else:
                response = sample_response_from_message(content, ids)
            if future.set_running_or_notify_cancel():
                future.set_result(response)
        except Exception as error:
            queued.fail(error)
        finally:
            sampler.num_pending -= 1
        if sampler.is_released:
            await self.release(sampler)

    async def run(self) -> None:
        """Send waiting requests in batches until the connection ends."""
        while True:
            await self._streams.acquire()
            batch = [await self._queue.get()]
            # Callers submit many requests in a row: wait briefly to collect them in one batch.
            await asyncio.sleep(_BATCH_WINDOW_SECONDS)
            num_bytes = len(batch[0].body)
            while (
                not self._queue.empty() and len(batch) < _MAX_BATCH and num_bytes < _MAX_BATCH_BYTES
            ):
                batch.append(self._queue.get_nowait())
                num_bytes += len(batch[-1].body)
            self.thread.spawn(self._send_batch, batch)

    async def _send_batch(self, batch: list[PendingSample]) -> None:
        """Send a batch, repeatedly if the connection breaks, until all of its requests are finished
        or were moved back to the queue.
        """
        sent_requests: list[PendingSample] = []

        def unfinished_requests() -> PostRequest | None:
            sent_requests[:] = [pending for pending in batch if not pending.content.done()]
            bodies = b",".join(pending.body for pending in sent_requests)
            return (
                PostRequest("/planish/draw", b'{"requests":[' + bodies + b"]}")
                if sent_requests
                else None
            )

        try:
            if self.supports_batches:
                async for frame in self.connection.frames(unfinished_requests):
                    index: int = frame.header["index"]
                    pending = sent_requests[index]
                    if self._handle_frame(pending, frame):
                        batch.remove(pending)
        except NoSuchEndpointError:
            self.supports_batches = False
        except Exception as error:
            for pending in batch:
                if not pending.content.done():
                    pending.content.set_exception(error)
        finally:
            self._streams.release()
        for pending in batch:
            if not pending.content.done():
                self.thread.spawn(self._send_single, pending)

    async def _send_single(self, pending: PendingSample) -> None:
        """Send one request and poll for its result, as the tinker SDK does."""
        try:
            accepted = Fields.of(
                (await self.connection.post(PostRequest("/asample", pending.body))).content
            )
            pending.sequence_ids = accepted.optional(accepted.array, "sample_sequence_ids", [])
            request_id = accepted.identifier("request_id")
            self._record_request_id(pending, request_id)
            content = await self.connection.result(request_id, takes_protobuf=True)
        except Exception as error:
            if not pending.content.done():
                pending.content.set_exception(error)
        else:
            if not pending.content.done():
                pending.content.set_result(content)

    def _record_request_id(self, pending: PendingSample, request_id: str) -> None:
        pending.request_id = request_id
        if pending.is_cancelled:
            self.thread.spawn(self._cancel_on_server, request_id)

    def _handle_frame(self, pending: PendingSample, frame: Frame) -> bool:
        """Record the content of a frame. Return True if the server asks to retry the request later:
        then it leaves this batch and is queued again.
        """
        header = frame.header
        request_id = header.get("request_id")
        if request_id is not None:
            pending.sequence_ids = header["sample_sequence_ids"]
            self._record_request_id(pending, request_id)
        if not header["last"] or pending.content.done():
            return False
        if header.get("status") in RETRIED_STATUSES:
            self.thread.spawn(
                self._requeue_after, pending, header.get("retry_after") or _RETRY_SECONDS
            )
            return True
        if "status" in header or "error" in header:
            pending.content.set_exception(error_from_frame(header))
        else:
            pending.content.set_result(frame.content)
        return False

    async def _requeue_after(self, pending: PendingSample, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._queue.put_nowait(pending)

    def _cancel(self, pending: PendingSample) -> None:
        pending.is_cancelled = True
        if not pending.content.done():
            pending.content.set_exception(CancelledError())
            if pending.request_id is not None:
                self.thread.spawn(self._cancel_on_server, pending.request_id)

    async def _cancel_on_server(self, request_id: str) -> None:
        with suppress(PlanishError):  # otherwise the server samples it, and its result is dropped
            await self.connection.post(
                PostRequest.json("/cancel_future", {"request_id": request_id}), max_retry_seconds=0
            )

    async def _wait_until_created(self, sampler: RemoteSampler) -> None:
        if not sampler.info_future.done():
            created = asyncio.Event()
            sampler.info_future.add_done_callback(lambda _: self.thread.post(created.set))
            await created.wait()
        sampler.info_future.result()
