"""RequestLog come out of a lane in the order of their numbers, each once, whatever order they came
in.
"""

from hypothesis import given
from hypothesis import strategies as st

from planish.server.models.request_queue import RequestQueue


def taken(lane: RequestQueue[int]) -> list[int]:
    return list(iter(lane.take, None))


@given(st.permutations(range(1, 12)), st.data())
def test_any_order_of_arrival_gives_the_order_of_numbers(arrival, data):
    lane: RequestQueue[int] = RequestQueue(1)
    out: list[int] = []
    for seq in arrival:
        assert not lane.is_used(seq)
        lane.add(seq, seq)
        assert lane.is_used(seq)
        if data.draw(st.booleans()):
            out += taken(lane)
    assert out + taken(lane) == list(range(1, 12))
    assert (lane.end, len(lane), lane.is_blocked) == (12, 0, False)


def test_a_missing_number_blocks_those_behind_it():
    lane: RequestQueue[int] = RequestQueue(1)
    lane.add(1, 1)
    lane.add(3, 3)
    assert not lane.is_blocked
    assert taken(lane) == [1]
    assert lane.is_blocked
    assert lane.peek() is None
    lane.add(2, 2)
    assert lane.peek() == 2
    assert taken(lane) == [2, 3]
    assert not lane.is_blocked


def test_giving_up_passes_over_what_is_missing():
    lane: RequestQueue[int] = RequestQueue(1)
    for seq in (9, 5, 6):
        lane.add(seq, seq)
    assert lane.give_up() == [5, 6, 9]
    assert taken(lane) == [5, 6, 9]
    assert all(lane.is_used(seq) for seq in range(10))
    assert not lane.is_used(10)
    lane.add(10, 10)
    assert taken(lane) == [10]


def test_what_comes_while_passed_over_requests_wait_is_behind_them():
    lane: RequestQueue[int] = RequestQueue(1)
    lane.add(5, 5)
    lane.give_up()
    lane.add(6, 6)
    assert taken(lane) == [5, 6]


def test_after_a_start_numbers_that_were_passed_over_are_not_waited_for():
    lane: RequestQueue[int] = RequestQueue(3, passed=7)
    lane.add(5, 5)
    assert [lane.is_used(seq) for seq in (2, 4, 6, 7)] == [True, True, True, False]
    lane.add(7, 7)
    assert taken(lane) == [5, 7]


def test_numbers_may_be_as_large_as_the_clients_count():
    lane: RequestQueue[int] = RequestQueue(1)
    lane.add(2**62, 1)
    assert lane.is_blocked
    assert lane.give_up() == [1]
    assert taken(lane) == [1]
    assert lane.end == 2**62 + 1
