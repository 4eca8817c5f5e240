"""Streams share the event loop, hold little memory, and are never silent for long. The clock of these
tests is that of the event loop, which moves only when a test or a timer moves it.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
from virtual_time import VirtualTimeLoop

from planish.server.openai import streaming
from planish.server.openai.streaming import (
    KEEP_ALIVE_SECONDS,
    MAX_TENANT_UNREAD_BYTES,
    MAX_UNREAD_BYTES,
    STALL_BYTES,
    STALL_SECONDS,
    OpenStreams,
    SlowReaderError,
    TokenBuffer,
    TooManyUnsentTokensError,
    server_sent_event,
    stream_samples,
)
from planish.server.results import Tenant
from planish.service import Sample, SampledToken
from planish.types import ModelInput, SampleResponse, SamplingParams

T = TypeVar("T")
FIRST, SECOND = Tenant("first"), Tenant("second")
OPERATION = Sample("", ModelInput.from_ints([1]), 1, SamplingParams())
TOKEN = SampledToken(0, 7, -1.0)
TOP_TOKEN = replace(
    TOKEN, top_tokens=np.arange(20, dtype=np.int32), top_logprobs=np.full(20, -1.0, np.float32)
)


def run(work: Callable[[VirtualTimeLoop], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function in a loop with a clock of its own."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return runner.run(work(loop))


class Writer:
    """Writes the number of tokens of each event. Each token takes `seconds` of computing."""

    def __init__(self, loop: VirtualTimeLoop, seconds: float = 0.0) -> None:
        self._loop = loop
        self._seconds = seconds
        self._num_tokens = 0
        self.computed: list[float] = []
        """The time at the end of each computation."""

    def begin(self) -> Iterator[bytes]:
        return iter(())

    def add(self, prompt_index: int, token: SampledToken) -> None:
        self._loop.block(self._seconds)
        self.computed.append(self._loop.time())
        self._num_tokens += 1

    def flush(self) -> Iterator[bytes]:
        if self._num_tokens:
            number, self._num_tokens = self._num_tokens, 0
            yield server_sent_event({"tokens": number})

    def finish_prompt(self, prompt_index: int, response: SampleResponse) -> Iterator[bytes]:
        yield server_sent_event({"finished": prompt_index})

    def end(self) -> Iterator[bytes]:
        yield b"end\n\n"

    def fail(self, error: Exception) -> Iterator[bytes]:
        yield server_sent_event({"error": str(error)})


class Engine:
    """Samples what a test adds."""

    def __init__(self) -> None:
        self.operation = OPERATION
        self.answer: asyncio.Future[SampleResponse] = asyncio.get_running_loop().create_future()

    def sample(self, operation: Sample) -> asyncio.Task[SampleResponse]:
        self.operation = operation

        async def wait() -> SampleResponse:
            return await self.answer

        return asyncio.create_task(wait())

    def add(self, *tokens: SampledToken) -> None:
        """Add sampled tokens. As in the engine, an error of the listener fails the request."""
        assert self.operation.on_token is not None
        for token in tokens:
            if self.answer.done():
                return
            try:
                self.operation.on_token(token)
            except Exception as error:
                self.answer.set_exception(error)

    def finish(self) -> None:
        self.answer.set_result(SampleResponse([]))


def stream(
    streams: OpenStreams, engine: Engine, writer: Writer, tenant: Tenant = FIRST
) -> AsyncGenerator[bytes, None]:
    response = stream_samples(streams, tenant, engine.sample, [OPERATION], writer)
    body: Any = response.body_iterator
    assert response.headers["x-accel-buffering"] == "no"
    return body


async def collect(events: AsyncIterator[bytes]) -> list[bytes]:
    return [event async for event in events]


def test_a_stream_sends_what_was_sampled():
    async def main(loop: VirtualTimeLoop) -> None:
        streams, engine = OpenStreams(loop.time), Engine()
        events = stream(streams, engine, Writer(loop))
        first = asyncio.create_task(events.asend(None))
        await asyncio.sleep(0)
        engine.add(TOKEN)
        assert await first == b'data: {"tokens":1}\n\n'
        engine.add(TOKEN, TOKEN)
        engine.finish()
        assert b"".join(await collect(events)) == (
            b'data: {"tokens":2}\n\ndata: {"finished":0}\n\nend\n\n'
        )
        assert streams.buffers == {}

    run(main)


def test_streams_compute_for_half_of_the_time_and_in_short_slices():
    """Another task runs between any two slices of the streams, however many tokens wait."""

    async def main(loop: VirtualTimeLoop) -> None:
        streams = OpenStreams(loop.time)
        engines, writers = [], []
        for _ in range(12):
            engine, writer = Engine(), Writer(loop, 2e-4)
            task = asyncio.create_task(collect(stream(streams, engine, writer)))
            engines.append((engine, task))
            writers.append(writer)
        await asyncio.sleep(0)
        began = loop.time()
        for engine, _ in engines:
            engine.add(*[TOKEN] * 100)
            engine.finish()
        waits: list[float] = []

        async def other() -> None:
            while not all(task.done() for _, task in engines):
                before = loop.time()
                await asyncio.sleep(1e-4)
                waits.append(loop.time() - before)

        await other()
        computed = 12 * 100 * 2e-4
        assert computed / (loop.time() - began) <= 0.5
        # A slice ends at the first token after a millisecond.
        assert max(waits) < 1.5e-3

    run(main)


def test_streams_of_one_tenant_take_turns_with_those_of_others():
    async def main(loop: VirtualTimeLoop) -> None:
        streams = OpenStreams(loop.time)
        greedy = [Writer(loop, 2e-4) for _ in range(20)]
        modest = Writer(loop, 2e-4)
        tasks = []
        for writer, tenant in [*((writer, FIRST) for writer in greedy), (modest, SECOND)]:
            engine = Engine()
            tasks.append(asyncio.create_task(collect(stream(streams, engine, writer, tenant))))
            await asyncio.sleep(0)
            engine.add(*[TOKEN] * 100)
            engine.finish()
        await asyncio.gather(*tasks)
        ended_before = [writer.computed[-1] < modest.computed[-1] for writer in greedy]
        assert sum(ended_before) <= 2

    run(main)


def test_under_load_an_event_has_several_tokens():
    async def main(loop: VirtualTimeLoop) -> None:
        engine = Engine()
        task = asyncio.create_task(
            collect(stream(OpenStreams(loop.time), engine, Writer(loop, 2e-4)))
        )
        await asyncio.sleep(0)
        engine.add(*[TOKEN] * 1000)
        engine.finish()
        events = b"".join(await task).split(b"\n\n")
        assert events[:-4] == [b'data: {"tokens":256}'] * 3
        assert events[-4] == b'data: {"tokens":232}'

    run(main)


def test_a_silent_stream_sends_comments():
    async def main(loop: VirtualTimeLoop) -> None:
        engine = Engine()
        events = stream(OpenStreams(loop.time), engine, Writer(loop))
        for number in (1, 2):
            assert await anext(events) == b": keep-alive\n\n"
            assert loop.time() == pytest.approx(number * KEEP_ALIVE_SECONDS)
        engine.add(TOKEN)
        assert await anext(events) == b'data: {"tokens":1}\n\n'
        assert await anext(events) == b": keep-alive\n\n"
        assert loop.time() == pytest.approx(3 * KEEP_ALIVE_SECONDS)
        engine.finish()
        assert (await collect(events))[-1].endswith(b"end\n\n")

    run(main)


async def fill(engine: Engine, num_bytes: int) -> int:
    """Add tokens of at most `num_bytes` bytes, and return their number."""
    number = num_bytes // streaming._size_of(TOP_TOKEN)
    engine.add(*[TOP_TOKEN] * number)
    return number


def test_a_stream_that_nobody_reads_stops_its_samples():
    async def main(loop: VirtualTimeLoop) -> None:
        streams, engine = OpenStreams(loop.time), Engine()
        events = stream(streams, engine, Writer(loop))
        first = asyncio.create_task(events.asend(None))
        await asyncio.sleep(0)
        engine.add(TOKEN)
        await first
        # The client does not take the next event, so the server does not ask for another one.
        [buffer] = streams.buffers[FIRST.name]
        await fill(engine, STALL_BYTES + 10_000)
        assert not engine.answer.done()
        loop.block(STALL_SECONDS - 1)
        engine.add(TOKEN)
        assert not engine.answer.done()
        loop.block(2)
        engine.add(TOKEN)
        with pytest.raises(SlowReaderError, match="reads this stream too slowly"):
            await engine.answer
        assert len(buffer._items) == 0
        rest = b"".join(await collect(events))
        assert rest.startswith(b'data: {"error":"the client reads this stream too slowly')
        assert streams.buffers == {}

    run(main)


@pytest.mark.parametrize("num_streams", [1, 8])
def test_unread_tokens_are_limited_for_clients_that_read_slowly(num_streams: int):
    """One stream may have 16 MiB, and all streams of a tenant 64 MiB."""

    async def main(loop: VirtualTimeLoop) -> None:
        streams = OpenStreams(loop.time)
        engines: list[Engine] = []
        unread: list[AsyncIterator[bytes]] = []
        for tenant in (SECOND, *[FIRST] * num_streams):
            engine = Engine()
            events = stream(streams, engine, Writer(loop), tenant)
            first = asyncio.create_task(events.asend(None))
            await asyncio.sleep(0)
            engine.add(TOKEN)
            await first
            engines.append(engine)
            unread.append(events)
        num_tokens = 0
        step = MAX_UNREAD_BYTES // 64
        for _ in itertools.count():
            for engine in engines[1:]:
                num_tokens += await fill(engine, step)
            if any(engine.answer.done() for engine in engines):
                break
        size = num_tokens * streaming._size_of(TOP_TOKEN)
        limit = min(num_streams * MAX_UNREAD_BYTES, MAX_TENANT_UNREAD_BYTES)
        assert limit - num_streams * step <= size <= limit + num_streams * step
        assert not engines[0].answer.done()
        for engine in engines:
            with suppress(SlowReaderError):
                if engine.answer.done():
                    await engine.answer
                engine.answer.cancel()

    run(main)


def test_all_unsent_tokens_of_a_tenant_are_limited(monkeypatch: pytest.MonkeyPatch):
    """The event loop has no time here. A stream ends that has at least an average share."""
    monkeypatch.setattr(streaming, "MAX_TENANT_UNSENT_BYTES", 8 << 20)

    async def main(loop: VirtualTimeLoop) -> None:
        streams = OpenStreams(loop.time)
        large, small, other = engines = [Engine(), Engine(), Engine()]
        tasks = [
            asyncio.create_task(collect(stream(streams, engine, Writer(loop), tenant)))
            for engine, tenant in zip(engines, (FIRST, FIRST, SECOND), strict=True)
        ]
        await asyncio.sleep(0)
        await fill(other, 7 << 20)
        await fill(large, 6 << 20)
        await fill(small, 2 << 20)
        assert not any(engine.answer.done() for engine in engines)
        await fill(small, 1 << 20)
        assert not small.answer.done()
        await fill(large, 1 << 20)
        assert isinstance(large.answer.exception(), TooManyUnsentTokensError)
        await fill(small, 4 << 20)
        small.finish()
        other.answer.cancel()
        events = [b"".join(await task) for task in tasks[:2]]
        assert b"wait to be sent in the streams of this tenant" in events[0]
        assert events[1].endswith(b"end\n\n")

    run(main)


def test_a_client_that_reads_is_not_ended_however_much_waits():
    async def main(loop: VirtualTimeLoop) -> None:
        engine = Engine()
        task = asyncio.create_task(collect(stream(OpenStreams(loop.time), engine, Writer(loop))))
        await asyncio.sleep(0)
        loop.block(2 * STALL_SECONDS)
        number = await fill(engine, 2 * MAX_UNREAD_BYTES)
        engine.finish()
        events = b"".join(await task).split(b"\n\n")
        counts = [int(event.split(b":")[2][:-1]) for event in events if b"tokens" in event]
        assert sum(counts) == number

    run(main)


def test_closing_a_stream_cancels_its_samples():
    async def main(loop: VirtualTimeLoop) -> None:
        streams, engine = OpenStreams(loop.time), Engine()
        events = stream(streams, engine, Writer(loop))
        first = asyncio.create_task(events.asend(None))
        await asyncio.sleep(0)
        engine.add(TOKEN)
        await first
        await events.aclose()
        assert engine.answer.cancelled()
        assert streams.buffers == {}

    run(main)


def test_line_breaks_of_unicode_are_escaped():
    event = server_sent_event({"a": "\u2028\u2029\x85\u2027é"}, "delta")
    assert event == 'event: delta\ndata: {"a":"\\u2028\\u2029\\u0085\u2027é"}\n\n'.encode()
    assert len(event.decode().splitlines()) == 3


def test_a_buffer_signals_once_for_all_tokens_that_wait():
    async def main() -> None:
        buffer = TokenBuffer(set(), time.monotonic)
        for _ in range(3):
            await asyncio.to_thread(buffer.add, 0, TOKEN)
        await asyncio.sleep(0)
        assert buffer.arrived.is_set()
        assert [buffer.take() for _ in range(4)] == [(0, TOKEN)] * 3 + [None]
        assert not buffer.arrived.is_set()
        await asyncio.to_thread(buffer.add, 0, TOKEN)
        await asyncio.wait_for(buffer.arrived.wait(), 60)

    asyncio.run(main())
