"""Streams samples to clients as server-sent events, for every API that streams.

A `StreamWriter` turns tokens into the events of one API. `stream_samples` samples, calls the
writer, and sends its events. Four rules keep one stream from harming other requests:

    turns      Tokens are parsed in the event loop, for a millisecond at a time. Streams take turns,
               and those of one tenant take turns with those of other tenants. All streams together
               compute for half of the time at most.
    batches    A stream takes all tokens that have arrived since its last turn, so under load an
               event contains several tokens.
    memory     If a client does not read, the unsent tokens of its stream are limited in number and
               in time. All unsent tokens of a tenant are limited too, even if its clients read: the
               engine may sample faster than the event loop can encode. Beyond a limit, the stream
               stops its samples and ends with an error event.
    silence    If there is nothing to send for 15 seconds, a comment or another event without
               content is sent, so that proxies and clients do not take the connection for dead.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import orjson
from starlette.responses import StreamingResponse

from planish.errors import UserError
from planish.server.results import Tenant
from planish.server.scheduling import FairQueue
from planish.service import Sample, SampledToken
from planish.types import SampleResponse

KEEP_ALIVE_SECONDS = 15.0
"""A stream sends a sign of life after this many seconds of silence."""
_SLICE_SECONDS = 1e-3
"""A stream computes for about this long per turn."""
_SHARE = 0.5
"""The share of the time in which all streams together may compute."""
_SENDING_SECONDS = 1e-4
"""The estimated time in which the event loop sends the events of one turn."""
_MAX_BATCH = 256
"""The maximum number of tokens between two events of a choice."""
_TOKEN_BYTES, _TOP_TOKEN_BYTES = 400, 130
"""Estimated bytes of memory for an unsent token, and for each of its top tokens."""
STALL_BYTES, STALL_SECONDS = 1 << 20, 10.0
"""A stream ends if more unsent bytes than this wait for a client that has read nothing for so many
seconds.
"""
MAX_UNREAD_BYTES = 16 << 20
"""A stream ends if more unsent bytes than this wait for its client to read."""
MAX_TENANT_UNREAD_BYTES = 64 << 20
"""A stream ends if more unsent bytes than this wait for the clients of its tenant to read."""


MAX_TENANT_UNSENT_BYTES = 256 << 20
"""A stream ends if more unsent bytes than this wait in all streams of its tenant, whether or not
their clients read. It must have at least an average share of them.
"""


class SlowReaderError(UserError):
    """A client reads its stream more slowly than the samples grow."""

    code = "slow_reader"


class TooManyUnsentTokensError(UserError):
    """The samples of a tenant's streams grow faster than the server can send them."""

    code = "too_many_unsent_tokens"


class StreamWriter(Protocol):
    """Turns the progress of the samples of one request into the events of one API. Each event is
    encoded by `server_sent_event`.
    """

    def begin(self) -> Iterator[bytes]:
        """Yield the events before the first token."""
        ...

    def add(self, prompt_index: int, token: SampledToken) -> None:
        """Add a token of prompt `prompt_index`."""
        ...

    def flush(self) -> Iterator[bytes]:
        """Yield the events for the tokens that were added since the last flush."""
        ...

    def finish_prompt(self, prompt_index: int, response: SampleResponse) -> Iterator[bytes]:
        """Yield the events that end the samples of a prompt. All its tokens were added before."""
        ...

    def end(self) -> Iterator[bytes]:
        """Yield the last events of a stream without an error."""
        ...

    def fail(self, error: Exception) -> Iterator[bytes]:
        """Yield the last events of a stream that failed."""
        ...


SampleFunction = Callable[[Sample], "asyncio.Task[SampleResponse]"]
"""Starts to sample an operation. Cancelling the task cancels the samples."""


def server_sent_event(body: dict[str, Any], event: str | None = None) -> bytes:
    """Return a server-sent event with a JSON body. `event` is the event's name, if it has one.

    Some clients split events at every line break that Unicode knows, so the three that JSON leaves
    as they are become escape sequences.
    """
    data = orjson.dumps(body)
    if b"\xe2\x80" in data:
        data = data.replace(b"\xe2\x80\xa8", rb"\u2028").replace(b"\xe2\x80\xa9", rb"\u2029")
    if b"\xc2\x85" in data:
        data = data.replace(b"\xc2\x85", rb"\u0085")
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + data + b"\n\n"


DONE_EVENT = b"data: [DONE]\n\n"
"""The last event of a stream in OpenAI's format."""
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"
"""What a silent stream sends by default."""


class StreamTurns:
    """Gives the streams of a server turns to compute in the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queue = FairQueue(1, clock=clock)
        self._computed_seconds = 0.0
        """The time that streams have computed since the last pause."""

    async def run(self, tenant: Tenant, work: Callable[[], bytes]) -> bytes:
        """Return `work()`, which computes for about a millisecond, when it is the tenant's turn.
        The next turn begins after a pause.
        """
        lease = await self._queue.acquire_slots(tenant.name, 1, 0)
        began = self._clock()
        try:
            return work()
        finally:
            seconds = self._clock() - began + _SENDING_SECONDS
            self._queue.charge(tenant.name, int(seconds * 1e6))
            self._computed_seconds += seconds
            loop = asyncio.get_running_loop()
            if self._computed_seconds < _SLICE_SECONDS:
                loop.call_soon(lease.release)
            else:
                loop.call_later(self._computed_seconds * (1 / _SHARE - 1), lease.release)
                self._computed_seconds = 0.0


class OpenStreams:
    """The streams of a server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.turns = StreamTurns(clock)
        self.buffers: dict[str, set[TokenBuffer]] = {}
        """The buffers of each tenant's streams."""

    def open(self, tenant: Tenant) -> TokenBuffer:
        """Return the buffer of a new stream."""
        buffers = self.buffers.setdefault(tenant.name, set())
        buffer = TokenBuffer(buffers, self.clock)
        buffers.add(buffer)
        return buffer

    def close(self, tenant: Tenant, buffer: TokenBuffer) -> None:
        """Forget a stream that has ended."""
        buffers = self.buffers[tenant.name]
        buffers.remove(buffer)
        if not buffers:
            del self.buffers[tenant.name]


@dataclass(frozen=True)
class _PromptFinished:
    """All samples of one prompt are finished."""

    prompt_index: int
    sampling: asyncio.Task[SampleResponse]


class TokenBuffer:
    """The tokens of one stream that were sampled and not yet parsed. The engine's thread adds them,
    and the event loop takes them.
    """

    def __init__(self, buffers_of_tenant: set[TokenBuffer], clock: Callable[[], float]) -> None:
        """`buffers_of_tenant` has the buffers of all streams of the tenant."""
        self._buffers_of_tenant = buffers_of_tenant
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[int, SampledToken] | _PromptFinished] = deque()
        self._added_bytes = 0  # Only the engine's thread changes this number.
        self._taken_bytes = 0  # Only the event loop changes this number.
        self._is_dropped = False
        self._has_signalled = False
        self.arrived = asyncio.Event()
        """Set when there is something to take."""
        self.sending_since: float | None = None
        """When the event loop began to send events that the client has not taken yet."""

    @property
    def unread_bytes(self) -> int:
        """The estimated bytes of the tokens that wait for the client to read; 0 if it reads."""
        return 0 if self.sending_since is None else self.unsent_bytes

    @property
    def unsent_bytes(self) -> int:
        """The estimated bytes of the tokens that were not parsed yet."""
        return 0 if self._is_dropped else self._added_bytes - self._taken_bytes

    def add(self, prompt_index: int, token: SampledToken) -> None:
        """Add a token. Raise SlowReaderError if too many tokens wait for the client, and
        TooManyUnsentTokensError if too many tokens of the tenant wait.
        """
        if self._is_dropped:  # the stream is ending
            return
        self._added_bytes += _size_of(token)
        if self.unsent_bytes > STALL_BYTES:
            self._check_reader()
            self._check_tenant()
        self._items.append((prompt_index, token))
        if not self._has_signalled:
            self._has_signalled = True
            self._loop.call_soon_threadsafe(self.arrived.set)

    def finish_prompt(self, prompt_index: int, sampling: asyncio.Task[SampleResponse]) -> None:
        """Note in the event loop that the samples of a prompt are finished."""
        self._items.append(_PromptFinished(prompt_index, sampling))
        self.arrived.set()

    def take(self) -> tuple[int, SampledToken] | _PromptFinished | None:
        """Return the next item, or None if there is none."""
        if not self._items:
            # A token that is added from now on sets the event again.
            self.arrived.clear()
            self._has_signalled = False
        try:
            item = self._items.popleft()
        except IndexError:
            return None
        if not isinstance(item, _PromptFinished):
            self._taken_bytes += _size_of(item[1])
        return item

    def drop(self) -> None:
        """Drop the tokens that were not taken, and those that are added later. Any thread may call
        this.
        """
        self._is_dropped = True
        self._items.clear()

    def _check_reader(self) -> None:
        size, since = self.unread_bytes, self.sending_since
        if since is None:
            return
        is_stalled = self._clock() - since > STALL_SECONDS
        unread_by_tenant = sum(buffer.unread_bytes for buffer in tuple(self._buffers_of_tenant))
        if is_stalled or size > MAX_UNREAD_BYTES or unread_by_tenant > MAX_TENANT_UNREAD_BYTES:
            self.drop()
            raise SlowReaderError(
                f"the client reads this stream too slowly: {size >> 10:,} KiB of sampled tokens "
                "wait for it; read faster, lower n or logprobs, or leave stream out"
            )

    def _check_tenant(self) -> None:
        sizes = [buffer.unsent_bytes for buffer in tuple(self._buffers_of_tenant)]
        if sum(sizes) > MAX_TENANT_UNSENT_BYTES and self.unsent_bytes * len(sizes) >= sum(sizes):
            self.drop()
            raise TooManyUnsentTokensError(
                f"{sum(sizes) >> 20:,} MiB of sampled tokens wait to be sent in the streams of this "
                "tenant; send fewer requests at a time, lower n or logprobs, or leave stream out"
            )


def _size_of(token: SampledToken) -> int:
    return _TOKEN_BYTES + _TOP_TOKEN_BYTES * len(token.top_tokens)


def stream_samples(
    streams: OpenStreams,
    tenant: Tenant,
    sample: SampleFunction,
    operations: Sequence[Sample],
    writer: StreamWriter,
    keep_alive: bytes = KEEP_ALIVE_COMMENT,
) -> StreamingResponse:
    """Return a response that samples `operations` and streams the events of `writer`. A silent
    stream sends `keep_alive`.
    """
    return StreamingResponse(
        _event_stream(streams, tenant, sample, operations, writer, keep_alive),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _event_stream(
    streams: OpenStreams,
    tenant: Tenant,
    sample: SampleFunction,
    operations: Sequence[Sample],
    writer: StreamWriter,
    keep_alive: bytes,
) -> AsyncIterator[bytes]:
    """Yield the events of a stream, as many at once as one turn gives. Closing the iterator cancels
    the unfinished samples.
    """
    buffer = streams.open(tenant)
    samplings = [
        _start_sampling(buffer, sample, index, operation)
        for index, operation in enumerate(operations)
    ]
    clock = streams.clock
    events = _Events(buffer, writer, len(operations), clock)
    sent_at = clock()
    try:
        while not events.is_finished:
            if not buffer.arrived.is_set() and not events.has_work:
                try:
                    async with asyncio.timeout(sent_at + KEEP_ALIVE_SECONDS - clock()):
                        await buffer.arrived.wait()
                except TimeoutError:
                    yield keep_alive
                    sent_at = clock()
                    continue
            data = await streams.turns.run(tenant, events.compute)
            if data:
                buffer.sending_since = clock()
                yield data
                buffer.sending_since = None
                sent_at = clock()
    finally:
        streams.close(tenant, buffer)
        buffer.drop()
        for sampling in samplings:
            sampling.cancel()
        await asyncio.gather(*samplings, return_exceptions=True)


def _start_sampling(
    buffer: TokenBuffer, sample: SampleFunction, index: int, operation: Sample
) -> asyncio.Task[SampleResponse]:
    def on_token(token: SampledToken) -> None:
        buffer.add(index, token)

    sampling = sample(replace(operation, on_token=on_token))
    sampling.add_done_callback(lambda task: buffer.finish_prompt(index, task))
    return sampling


class _Events:
    """Computes the events of one stream, a slice at a time."""

    def __init__(
        self,
        buffer: TokenBuffer,
        writer: StreamWriter,
        num_prompts: int,
        clock: Callable[[], float],
    ) -> None:
        self._buffer = buffer
        self._writer = writer
        self._clock = clock
        self._num_unfinished = num_prompts
        self._steps = self._compute_steps()
        self.has_work = True
        """Whether there is work left, apart from tokens that have not arrived yet."""
        self.is_finished = False

    def compute(self) -> bytes:
        """Return the next events, after about a millisecond of work."""
        self.has_work = True
        pieces: list[bytes] = []
        end = self._clock() + _SLICE_SECONDS
        while self._clock() < end:
            try:
                piece = next(self._steps)
            except StopIteration:
                self.is_finished = True
                break
            except Exception as error:
                self._buffer.drop()
                self._steps = self._writer.fail(error)
                continue
            if piece is None:
                self.has_work = False
                break
            if piece:
                pieces.append(piece)
        return b"".join(pieces)

    def _compute_steps(self) -> Iterator[bytes | None]:
        """Yield events; an empty one after each step without an event, and None if the next token
        has not arrived yet.
        """
        yield from self._writer.begin()
        while self._num_unfinished:
            num_tokens = 0
            while num_tokens < _MAX_BATCH and (item := self._buffer.take()) is not None:
                if isinstance(item, _PromptFinished):
                    yield from self._writer.flush()
                    response = item.sampling.result()
                    yield from self._writer.finish_prompt(item.prompt_index, response)
                    self._num_unfinished -= 1
                else:
                    self._writer.add(*item)
                    num_tokens += 1
                    yield b""
            yield from self._writer.flush()
            if num_tokens < _MAX_BATCH and self._num_unfinished:
                yield None
        yield from self._writer.end()
