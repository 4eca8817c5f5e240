"""The fair queue: turns within the capacity, in each tenant's order, to the tenant with the fewest
tokens.
"""

import asyncio

import pytest
from server_client import run

from planish.server.scheduling import ActiveTenants, FairQueue


async def quiet() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_tenant_with_the_fewest_tokens_is_next():
    async def scenario() -> list[str]:
        gate, order = FairQueue(1), []
        first = await gate.acquire_slots("long", 1, 1000)

        async def ask(tenant: str) -> None:
            turn = await gate.acquire_slots(tenant, 1, 10)
            order.append(tenant)
            await quiet()
            turn.release()

        asked = [
            asyncio.create_task(ask(name)) for name in ("long", "long", "short", "short", "short")
        ]
        await quiet()
        assert gate.num_waiting == 5
        first.release()
        await asyncio.gather(*asked)
        return order

    assert run(scenario()) == ["short", "short", "short", "long", "long"]


def test_tokens_charged_after_a_turn_count():
    async def scenario() -> list[str]:
        gate, order = FairQueue(1), []
        first = await gate.acquire_slots("a", 1, 1)
        gate.charge("a", 100)

        async def ask(tenant: str) -> None:
            turn = await gate.acquire_slots(tenant, 1, 30)
            order.append(tenant)
            turn.release()

        asked = [asyncio.create_task(ask(name)) for name in ("a", "b", "b", "b", "b")]
        await quiet()
        first.release()
        await asyncio.gather(*asked)
        return order

    assert run(scenario()) == ["b", "b", "b", "b", "a"]


async def test_turns_stay_within_capacity_and_large_ones_are_not_overtaken():
    gate = FairQueue(10)
    three = [await gate.acquire_slots("a", 3, 1) for _ in range(3)]
    large = asyncio.create_task(gate.acquire_slots("a", 100, 1))
    small = asyncio.create_task(gate.acquire_slots("a", 1, 1))
    await quiet()
    assert not large.done()
    assert not small.done()
    for turn in three:
        turn.release()
        turn.release()  # again: nothing
    await quiet()
    assert large.done()
    assert not small.done()
    (await large).release()
    await small


async def test_a_cancelled_request_leaves_the_queue():
    gate = FairQueue(1)
    first = await gate.acquire_slots("a", 1, 1)
    gone, stays, gone_too = (asyncio.create_task(gate.acquire_slots("a", 1, 1)) for _ in range(3))
    await quiet()
    for task in (gone, gone_too):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert gate.num_waiting == 1
    first.release()
    last = asyncio.create_task(gate.acquire_slots("a", 1, 1))
    (await stays).release()
    await last
    assert gate.num_waiting == 0


async def test_requests_behind_a_cancelled_large_one_get_their_turn():
    gate = FairQueue(2)
    await gate.acquire_slots("a", 1, 1)
    large = asyncio.create_task(gate.acquire_slots("a", 2, 1))
    small = asyncio.create_task(gate.acquire_slots("a", 1, 1))
    await quiet()
    assert not small.done()
    large.cancel()
    async with asyncio.timeout(60):
        await small


async def test_a_turn_granted_to_a_cancelled_request_is_returned():
    gate = FairQueue(1)
    first = await gate.acquire_slots("a", 1, 1)
    gone = asyncio.create_task(gate.acquire_slots("a", 1, 1))
    await quiet()
    first.release()  # granted, but the task has not run yet
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    async with asyncio.timeout(60):
        await gate.acquire_slots("b", 1, 1)


async def test_one_tenant_cannot_take_all_slots_while_others_are_active():
    now = 0.0
    gate = FairQueue(10, max_per_tenant=6, clock=lambda: now)
    alone = [await gate.acquire_slots("long", 2, 1000) for _ in range(5)]
    assert gate.used_slots == 10
    other = asyncio.create_task(gate.acquire_slots("other", 4, 1))
    await quiet()
    for turn in alone:
        turn.release()
    (await other).release()
    held = [await gate.acquire_slots("long", 2, 1000) for _ in range(3)]
    more = asyncio.create_task(gate.acquire_slots("long", 2, 1000))
    await quiet()
    assert not more.done()
    async with asyncio.timeout(60):
        # it does not wait for those that keep their places
        (await gate.acquire_slots("third", 4, 1)).release()
    assert not more.done()
    held.pop().release()
    await more
    now = 601.0  # nobody else was heard of for so long
    held += [await gate.acquire_slots("long", 2, 1000) for _ in range(2)]
    assert gate.used_slots == 10


async def test_long_requests_do_not_take_all_slots():
    """A step that is done in a moment does not wait for those of others, which take minutes,
    however many these are.
    """
    gate = FairQueue(3, long_capacity=2, long_tokens=100)
    first, second = [await gate.acquire_slots(tenant, 1, 5000) for tenant in ("a", "b")]
    third = asyncio.create_task(gate.acquire_slots("c", 1, 101))
    await quiet()
    assert not third.done()
    async with asyncio.timeout(60):
        for tenant in ("d", "d", "a"):
            (await gate.acquire_slots(tenant, 1, 100)).release()
    behind_its_own = asyncio.create_task(gate.acquire_slots("a", 1, 0, tokens_ahead=5000))
    await quiet()
    assert not behind_its_own.done()
    second.release()
    third.cancel()  # granted, but the task has not run yet
    await asyncio.wait([third])
    async with asyncio.timeout(60):
        (await behind_its_own).release()
    first.release()
    async with asyncio.timeout(60):
        for tenant in ("b", "c"):
            await gate.acquire_slots(tenant, 1, 5000)


async def test_a_first_turn_may_be_larger_than_the_share():
    gate = FairQueue(10, max_per_tenant=2)
    (await gate.acquire_slots("other", 1, 1)).release()
    async with asyncio.timeout(60):
        turn = await gate.acquire_slots("large", 100, 1)
    assert gate.used_slots == 10
    turn.release()
    assert gate.used_slots == 0


def test_tokens_are_shared_evenly_with_a_tenant_of_long_jobs():
    """Three tenants that always have something to do; one's jobs are a hundred times as long. The
    device works on what it has by turns.
    """
    sizes, piece = {"long": 5000, "short": 50, "middling": 400}, 50

    async def scenario() -> dict[str, int]:
        gate, device = FairQueue(3, max_per_tenant=2), asyncio.Lock()
        served, is_over = dict.fromkeys(sizes, 0), False

        async def work(tenant: str) -> None:
            nonlocal is_over
            while not is_over:
                turn = await gate.acquire_slots(tenant, 1, sizes[tenant] // 2)
                for _ in range(sizes[tenant] // piece):
                    async with device:
                        await asyncio.sleep(0)
                        served[tenant] += 0 if is_over else piece
                # what was drawn is known behind it
                gate.charge(tenant, sizes[tenant] - sizes[tenant] // 2)
                turn.release()
                is_over = is_over or sum(served.values()) >= 300_000

        await asyncio.gather(*(work(tenant) for tenant in sizes for _ in range(8)))
        return served

    served = run(scenario())
    assert max(served.values()) - min(served.values()) <= 3 * max(sizes.values()), served


def test_a_tenant_is_active_for_a_time_after_its_last_request():
    now = [0.0]
    active = ActiveTenants(seconds=1.0, clock=lambda: now[0])
    assert not active.has_others("a")
    active.touch("a")
    assert not active.has_others("a")
    assert active.has_others("b")
    now[0] = 0.6
    active.touch("b")
    active.touch("b")
    assert active.has_others("a")
    assert active.has_others("b")
    now[0] = 1.2
    assert active.has_others("a")
    assert not active.has_others("b")
    assert active.has_others("c")
    now[0] = 2.0
    assert not active.has_others("c")
