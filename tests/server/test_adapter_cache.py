"""The adapter cache: adapters are loaded once, stay while they are pinned, and are evicted in the
order of their last use.
"""

import asyncio
import gc
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from planish.errors import DamagedFileError, StorageError, UserError
from planish.server.durable import retries
from planish.server.metrics import Counters
from planish.server.scheduling import AdapterCache


@dataclass(eq=False)
class Fake:
    id: str
    log: list[str]
    memory_bytes: int = 10
    is_evictable: bool = True
    errors: list[Exception] = field(default_factory=list)

    async def load(self) -> None:
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop()
        self.log.append(f"+{self.id}")

    async def unload(self) -> None:
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop()
        self.log.append(f"-{self.id}")


@pytest.fixture
def log() -> list[str]:
    return []


def fakes(log: list[str], names: Iterable[str]) -> list[Fake]:
    return [Fake(name, log) for name in names]


async def test_an_adapter_is_loaded_once_for_all_pins(log):
    residency, (a,) = AdapterCache(100, Counters()), fakes(log, "a")

    async def use() -> None:
        async with residency.pinned(a):
            await asyncio.sleep(0)

    await asyncio.gather(use(), use(), use())
    await use()
    assert log == ["+a"]
    assert residency.used_bytes == 10
    assert residency.loaded_adapters() == [a]


async def test_the_least_recently_used_adapter_is_evicted(log):
    residency, (a, b, c, d) = AdapterCache(30, Counters()), fakes(log, "abcd")
    for one in (a, b, c, a, d):
        async with residency.pinned(one):
            pass
    assert log == ["+a", "+b", "+c", "-b", "+d"]
    assert residency.used_bytes == 30


async def test_a_load_waits_until_an_adapter_can_be_evicted(log):
    residency, (a, b) = AdapterCache(15, Counters()), fakes(log, "ab")

    async def use_b() -> None:
        async with residency.pinned(b):
            log.append("b")

    async with residency.pinned(a):
        waiting = asyncio.create_task(use_b())
        while not residency.is_waiting:
            await asyncio.sleep(0)
        assert log == ["+a"]
    await waiting
    assert log == ["+a", "-a", "+b", "b"]


async def test_an_adapter_without_a_size_never_waits(log):
    """A base model is always in memory, so its samplers do not wait behind adapters."""
    residency, (a, b, base) = AdapterCache(15, Counters()), fakes(log, ["a", "b", "base"])
    base.memory_bytes = 0
    async with residency.pinned(a):
        waiting = asyncio.create_task(use(residency, b))
        while not residency.is_waiting:
            await asyncio.sleep(0)
        async with asyncio.timeout(60), residency.pinned(base):
            assert log == ["+a", "+base"]
    await waiting


async def test_an_adapter_that_is_not_evictable_stays(log):
    residency, (a, b, c) = AdapterCache(20, Counters()), fakes(log, "abc")
    a.is_evictable = False
    for one in (a, b, c):
        async with residency.pinned(one):
            pass
    assert log == ["+a", "+b", "-b", "+c"]


async def test_an_adapter_larger_than_the_budget_is_loaded_alone(log):
    residency, (a, b) = AdapterCache(15, Counters()), fakes(log, "ab")
    b.memory_bytes = 100
    for one in (a, b, a):
        async with residency.pinned(one):
            pass
    assert log == ["+a", "-a", "+b", "-b", "+a"]


async def test_an_error_of_loading_is_raised_and_takes_no_room(log):
    residency, (a,) = AdapterCache(15, Counters()), fakes(log, "a")
    a.errors = [UserError("once")]
    with pytest.raises(UserError):
        async with residency.pinned(a):
            pass
    assert residency.used_bytes == 0
    async with residency.pinned(a):
        pass
    assert log == ["+a"]


def damaged(cause: OSError) -> DamagedFileError:
    error = DamagedFileError("the file cannot be read")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("error", [StorageError("once"), damaged(OSError(5, "once"))])
async def test_a_load_that_the_disk_fails_is_repeated(log, monkeypatch, error):
    monkeypatch.setattr(retries, "_PAUSES", (0.0, 0.0))

    residency, (a,) = AdapterCache(15, Counters()), fakes(log, "a")
    a.errors = [error] * 2
    async with residency.pinned(a):
        assert log == ["+a"]
    await residency.unload_idle(0)
    a.errors = [error] * 3
    with pytest.raises(type(error)):
        async with residency.pinned(a):
            pass
    assert a.errors == []


@pytest.mark.parametrize("error", [damaged(FileNotFoundError()), DamagedFileError("altered")])
async def test_a_load_of_a_missing_or_altered_file_is_not_repeated(log, error):
    residency, (a,) = AdapterCache(15, Counters()), fakes(log, "a")
    a.errors = [error] * 2
    with pytest.raises(DamagedFileError):
        async with residency.pinned(a):
            pass
    assert a.errors == [error]


async def test_an_adapter_whose_unload_fails_stays_loaded(log, caplog):
    residency, (a,) = AdapterCache(15, Counters()), fakes(log, "a")
    async with residency.pinned(a):
        pass
    a.errors = [StorageError("no space")]
    await residency.unload_idle(0)
    assert residency.is_loaded(a)
    await residency.unload_idle(0)
    assert not residency.is_loaded(a)
    assert log == ["+a", "-a"]
    assert "could not be unloaded" in caplog.text


async def test_idle_adapters_and_those_beyond_the_budget_are_unloaded(log):
    residency, (a, b, c) = AdapterCache(15, Counters()), fakes(log, "abc")
    async with residency.pinned(a):
        pass
    await residency.unload_idle(60)
    assert log == ["+a"]
    residency.insert_loaded(b)
    assert residency.used_bytes == 20
    await residency.unload_idle(60)
    assert log == ["+a", "-a"]
    residency.discard(b)
    async with residency.pinned(c):
        await residency.unload_idle(0)
    assert log == ["+a", "-a", "+c"]


async def test_an_adapter_pinned_while_it_is_unloaded_is_loaded_again(log):
    residency, (a,) = AdapterCache(15, Counters()), fakes(log, "a")
    async with residency.pinned(a):
        pass
    leaving = asyncio.create_task(residency.unload_idle(0))
    await asyncio.sleep(0)
    async with residency.pinned(a):
        assert residency.is_loaded(a)
    await leaving
    assert log in (["+a", "-a", "+a"], ["+a"])


async def test_a_load_completes_although_its_caller_was_cancelled(log):
    """The engine thread completes the load, so the adapter must be in the cache."""
    residency, (a,) = AdapterCache(15, Counters()), fakes(log, "a")
    for turn in range(2):
        using = asyncio.create_task(use(residency, a))
        while not residency.used_bytes:
            await asyncio.sleep(0)
        using.cancel()
        if turn:
            await use(residency, a)
        else:
            await asyncio.wait([using])
            while residency.loaded_adapters() != [a]:
                await asyncio.sleep(0)
            await residency.unload_idle(0)
    assert log == ["+a", "-a", "+a"]
    leaving = asyncio.create_task(residency.unload_idle(0))
    await asyncio.sleep(0)
    leaving.cancel()
    await use(residency, a)
    assert log == ["+a", "-a", "+a", "-a", "+a"]


@pytest.mark.slow
async def test_a_load_error_without_a_caller_is_ignored(log, caplog):
    residency, (a,) = AdapterCache(15, Counters()), fakes(log, "a")
    gone = asyncio.Event()

    async def load() -> None:
        await gone.wait()
        raise UserError("once")

    a.load = load
    using = asyncio.create_task(use(residency, a))
    while not residency.used_bytes:
        await asyncio.sleep(0)
    using.cancel()
    await asyncio.wait([using])
    gone.set()
    while residency.used_bytes:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    gc.collect()
    assert "once" not in caplog.text


async def test_a_caller_cancelled_before_there_is_room_evicts_nothing(log):
    residency, (a, b, c) = AdapterCache(15, Counters()), fakes(log, "abc")
    async with residency.pinned(a):
        waiting = [asyncio.create_task(use(residency, one)) for one in (b, c)]
        await asyncio.sleep(0.01)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
    await waiting[1]
    assert log == ["+a", "-a", "+c"]


async def use(residency: AdapterCache, one: Fake) -> None:
    async with residency.pinned(one):
        pass
