"""The request queue returns requests in the order of their numbers, each once, whatever the order
of arrival.
"""

import asyncio

import pytest
from hypothesis import given, strategies as st

from planish.server.models.request_queue import InFlight, RequestQueue, Worker


def taken(queue: RequestQueue[int]) -> list[int]:
    return list(iter(queue.take, None))


@pytest.mark.slow
@given(st.permutations(range(1, 12)), st.data())
def test_requests_are_taken_in_the_order_of_their_numbers(arrival, data):
    queue: RequestQueue[int] = RequestQueue(1)
    out: list[int] = []
    for seq in arrival:
        assert not queue.is_used(seq)
        queue.add(seq, seq)
        assert queue.is_used(seq)
        if data.draw(st.booleans()):
            out += taken(queue)
    assert out + taken(queue) == list(range(1, 12))
    assert (queue.unused_seq, len(queue), queue.is_blocked) == (12, 0, False)


def test_a_missing_number_blocks_the_requests_after_it():
    queue: RequestQueue[int] = RequestQueue(1)
    queue.add(1, 1)
    queue.add(3, 3)
    assert not queue.is_blocked
    assert taken(queue) == [1]
    assert queue.is_blocked
    assert queue.peek() is None
    queue.add(2, 2)
    assert queue.peek() == 2
    assert taken(queue) == [2, 3]
    assert not queue.is_blocked


def test_missing_numbers_can_be_skipped():
    queue: RequestQueue[int] = RequestQueue(1)
    for seq in (9, 5, 6):
        queue.add(seq, seq)
    assert queue.skip_missing() == [5, 6, 9]
    assert taken(queue) == [5, 6, 9]
    assert all(queue.is_used(seq) for seq in range(10))
    assert not queue.is_used(10)
    queue.add(10, 10)
    assert taken(queue) == [10]


def test_new_requests_queue_behind_those_after_a_skipped_number():
    queue: RequestQueue[int] = RequestQueue(1)
    queue.add(5, 5)
    queue.skip_missing()
    queue.add(6, 6)
    assert taken(queue) == [5, 6]


def test_skipped_numbers_stay_skipped_after_a_restart():
    queue: RequestQueue[int] = RequestQueue(3, skipped_below=7)
    queue.add(5, 5)
    assert [queue.is_used(seq) for seq in (2, 4, 6, 7)] == [True, True, True, False]
    queue.add(7, 7)
    assert taken(queue) == [5, 7]


def test_sequence_numbers_can_be_very_large():
    queue: RequestQueue[int] = RequestQueue(1)
    queue.add(2**62, 1)
    assert queue.is_blocked
    assert queue.skip_missing() == [1]
    assert taken(queue) == [1]
    assert queue.unused_seq == 2**62 + 1


async def test_a_worker_runs_while_a_request_is_ready():
    queue, stopping, runs = RequestQueue(1), asyncio.Event(), []

    async def run() -> None:
        runs.append(queue.take())
        await asyncio.sleep(0)

    async def woken(*numbers: int) -> list[int]:
        for seq in numbers:
            queue.add(seq, seq)
        worker.wake()
        await worker.wait()
        return runs

    worker = Worker("model", queue, InFlight(), stopping, run)
    assert await woken(2) == []
    assert await woken(1) == [1, 2]  # a request that is left begins another task
    stopping.set()
    assert await woken(3) == [1, 2]
    stopping.clear()
    worker.is_closed = True
    assert await woken() == [1, 2]
    worker.is_closed = False
    assert await woken() == [1, 2, 3]
