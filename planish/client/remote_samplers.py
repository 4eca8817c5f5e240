"""Samplers on a server, and what is drawn from them.

Requests that are given at about the same time travel as one, whose answer brings each result as it
is done: with one HTTP request for each sample, and another for its result, the wire would cost more
than drawing a short sample. A batch whose connection breaks is sent again as far as it is not
answered; the server knows its requests by sampler and number. A server of the protocol that is not
planish's has no such batches; there each sample travels alone.

A sample can be given up until it is answered; the server is told, and draws no more for it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from planish.client.remote_errors import NoSuchEndpointError, error_of_frame
from planish.client.remote_lane import Entry
from planish.client.remote_link import Link
from planish.client.remote_patience import LATER
from planish.client.remote_thread import LoopThread, in_pool
from planish.errors import PlanishError
from planish.service import CreateSampler, Sample, SamplerInfo
from planish.wire.client_frames import Frame
from planish.wire.client_operations import Posted, create_sampler_request, sample_request
from planish.wire.fields import Fields
from planish.wire.records import sampler_info_from_json
from planish.wire.sampling import sample_response_from_message

_GATHER_SECONDS = 0.002
_MAX_BATCH, _MAX_BATCH_BYTES = 512, 8 << 20
_MAX_STREAMS = 256
_RETRY_SECONDS = 1.0
_INLINE_BYTES = 64 * 1024


@dataclass(eq=False)
class RemoteSampler:
    """`unanswered` (requests, its making included) and `is_released` belong to the thread of the
    connection.
    """

    server_id: str
    ready: Future[SamplerInfo] = field(default_factory=Future)
    """Answered when the server has it; its error is that of its making."""
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Of its requests."""
    unanswered: int = 0
    is_released: bool = False


@dataclass(eq=False)
class Draw:
    """One request on its way."""

    body: bytes
    content: asyncio.Future[bytes]
    """The result, when it is there."""
    request_id: str | None = None
    """Given by the server when it has accepted it."""
    sequence_ids: Sequence[str] = ()
    is_given_up: bool = False
    """Nobody waits for it any more."""


@dataclass(eq=False)
class Drawing:
    """Makes samplers and draws from them. All methods run in the thread of the connection."""

    link: Link
    thread: LoopThread
    has_batches: bool = True
    """Until the server says that it has none."""
    _waiting: asyncio.Queue[Draw] = field(default_factory=asyncio.Queue)
    _streams: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_STREAMS))

    async def create(self, operation: CreateSampler, sampler: RemoteSampler, entry: Entry) -> None:
        """`operation` names the sampler as the server will."""
        if not entry.answer.set_running_or_notify_cancel():
            sampler.ready.set_exception(CancelledError())
            return
        sampler.unanswered += 1
        try:
            await self.link.post(create_sampler_request(operation))
            found = await self.link.get(f"/samplers/{sampler.server_id}")
            info = sampler_info_from_json(Fields.of(found.content))
        except Exception as error:
            sampler.ready.set_exception(error)
            entry.fail(error)
        else:
            sampler.ready.set_result(info)
            entry.answer.set_result(info.sampler_id)
        finally:
            sampler.unanswered -= 1
        if sampler.is_released:
            await self.release(sampler)

    async def release(self, sampler: RemoteSampler) -> None:
        """Let the server free it, when all of its requests are answered."""
        sampler.is_released = True
        if not sampler.unanswered:
            posted = Posted.json("/planish/release", {"sampler_id": sampler.server_id})
            with suppress(PlanishError):  # then it goes with the session
                await self.link.post(posted, patience=0)

    async def sample(self, operation: Sample, sampler: RemoteSampler, answer: Future[Any]) -> None:
        """Draw, and answer."""
        entry = Entry(operation, answer)
        sampler.unanswered += 1
        try:
            await self._until_ready(sampler)
            request = sample_request(
                replace(operation, sampler_id=sampler.server_id), next(sampler.numbers)
            )
            draw = Draw(request.content, asyncio.get_running_loop().create_future())
            answer.add_done_callback(
                lambda _: answer.cancelled() and self.thread.post(self._give_up, draw)
            )
            self._waiting.put_nowait(draw)
            content = await draw.content
            ids = None if operation.prompt_only else draw.sequence_ids  # nothing was drawn
            if len(content) > _INLINE_BYTES:
                response = await in_pool(sample_response_from_message, content, ids)
            else:
                response = sample_response_from_message(content, ids)
            if answer.set_running_or_notify_cancel():
                answer.set_result(response)
        except Exception as error:
            entry.fail(error)
        finally:
            sampler.unanswered -= 1
        if sampler.is_released:
            await self.release(sampler)

    async def run(self) -> None:
        """Send what waits, in batches, until the connection ends."""
        while True:
            await self._streams.acquire()
            batch = [await self._waiting.get()]
            # Who has sent one is about to send more.
            await asyncio.sleep(_GATHER_SECONDS)
            size = len(batch[0].body)
            while not self._waiting.empty() and len(batch) < _MAX_BATCH and size < _MAX_BATCH_BYTES:
                batch.append(self._waiting.get_nowait())
                size += len(batch[-1].body)
            self.thread.spawn(self._draw, batch)

    async def _draw(self, batch: list[Draw]) -> None:
        """Send a batch until each of its requests is answered, or has left it to be sent again."""
        sent: list[Draw] = []

        def unanswered() -> Posted | None:
            sent[:] = [draw for draw in batch if not draw.content.done()]
            bodies = b",".join(draw.body for draw in sent)
            return Posted("/planish/draw", b'{"requests":[' + bodies + b"]}") if sent else None

        try:
            if self.has_batches:
                async for frame in self.link.frames(unanswered):
                    draw = sent[frame.header["index"]]
                    if self._is_to_repeat(draw, frame):
                        batch.remove(draw)
        except NoSuchEndpointError:
            self.has_batches = False
        except Exception as error:
            for draw in batch:
                if not draw.content.done():
                    draw.content.set_exception(error)
        finally:
            self._streams.release()
        for draw in batch:
            if not draw.content.done():
                self.thread.spawn(self._draw_alone, draw)

    async def _draw_alone(self, draw: Draw) -> None:
        """As the public SDK does it."""
        try:
            accepted = Fields.of((await self.link.post(Posted("/asample", draw.body))).content)
            draw.sequence_ids = accepted.optional(accepted.array, "sample_sequence_ids", [])
            request_id = accepted.identifier("request_id")
            self._accepted(draw, request_id)
            content = await self.link.result(request_id, takes_protobuf=True)
        except Exception as error:
            if not draw.content.done():
                draw.content.set_exception(error)
        else:
            if not draw.content.done():
                draw.content.set_result(content)

    def _accepted(self, draw: Draw, request_id: str) -> None:
        draw.request_id = request_id
        if draw.is_given_up:
            self.thread.spawn(self._tell_given_up, request_id)

    def _is_to_repeat(self, draw: Draw, frame: Frame) -> bool:
        """Note what a frame says of a request. Whether that is "later": then it is sent again,
        apart from this batch.
        """
        header = frame.header
        request_id = header.get("request_id")
        if request_id is not None:
            draw.sequence_ids = header["sample_sequence_ids"]
            self._accepted(draw, request_id)
        if not header["last"] or draw.content.done():
            return False
        if header.get("status") in LATER:
            self.thread.spawn(self._repeat, draw, header.get("retry_after") or _RETRY_SECONDS)
            return True
        if "status" in header or "error" in header:
            draw.content.set_exception(error_of_frame(header))
        else:
            draw.content.set_result(frame.content)
        return False

    async def _repeat(self, draw: Draw, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._waiting.put_nowait(draw)

    def _give_up(self, draw: Draw) -> None:
        draw.is_given_up = True
        if not draw.content.done():
            draw.content.set_exception(CancelledError())
            if draw.request_id is not None:
                self.thread.spawn(self._tell_given_up, draw.request_id)

    async def _tell_given_up(self, request_id: str) -> None:
        with suppress(PlanishError):  # then it is drawn, and nobody asks for it
            await self.link.post(
                Posted.json("/cancel_future", {"request_id": request_id}), patience=0
            )

    async def _until_ready(self, sampler: RemoteSampler) -> None:
        if not sampler.ready.done():
            ready = asyncio.Event()
            sampler.ready.add_done_callback(lambda _: self.thread.post(ready.set))
            await ready.wait()
        sampler.ready.result()
