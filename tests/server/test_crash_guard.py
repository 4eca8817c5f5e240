"""The crash guard: which requests run together, what is recorded, and what a crash makes of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from planish.errors import EngineClosedError
from planish.server.durable import crash_guard, journal
from planish.server.durable.crash_guard import CrashGuard
from planish.server.durable.store import Store
from planish.server.intake import insert_request
from planish.server.results import Abandoned


class Life:
    """One process, without the parts that run requests."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.prepared = 0
        self.guard = CrashGuard(store, self._prepare)
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def _prepare(self) -> None:
        await asyncio.sleep(0)
        self.prepared += 1

    async def ask(self, *keys: str) -> None:
        """For each to be under way, as far as it goes by itself."""
        for key in keys:
            self.tasks[key] = asyncio.create_task(self.guard.enter(key))
        await self.rest()

    async def rest(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            await self.store.write(lambda _: None)

    @property
    def entered(self) -> set[str]:
        return {key for key, task in self.tasks.items() if _is_in(task)}

    async def marked(self) -> set[str]:
        found = await self.store.read(
            lambda db: db.execute("SELECT id FROM crash_guard WHERE is_marked").fetchall()
        )
        return {row[0] for row in found}


def _is_in(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


@asynccontextmanager
async def life(directory: Path, in_order: bool = False) -> AsyncIterator[Life]:
    """Ends as by a kill, or in order."""
    lived = Life(Store(directory))
    await lived.guard.begin()
    yield lived
    if in_order:
        await lived.guard.end()
    for task in lived.tasks.values():
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    lived.store.close()


async def ended_with(directory: Path, *keys: str) -> None:
    """Let a process end while these requests are running."""
    async with life(directory) as lived:
        await lived.ask(*keys)
        assert lived.entered == set(keys)


async def test_requests_are_marked_only_after_an_unclean_end(tmp_path):
    for _ in range(2):
        async with life(tmp_path, in_order=True) as lived:
            await lived.ask("a", "b")
            assert lived.entered == {"a", "b"}
            assert not lived.guard.is_active
            assert await lived.marked() == set()
    await ended_with(tmp_path, "a")
    async with life(tmp_path) as lived:
        await lived.ask("a", "b")
        assert await lived.marked() == lived.entered == {"a", "b"}
        lived.guard.leave("a")
        lived.guard.pause("b")
        await lived.rest()
        assert await lived.marked() == set()
        assert not lived.prepared


async def test_requests_are_marked_for_a_limited_time(tmp_path, monkeypatch):
    await ended_with(tmp_path)
    monkeypatch.setattr(crash_guard, "_WATCH_SECONDS", 0.0)
    async with life(tmp_path) as lived:
        await lived.ask("a")
        assert await lived.marked() == set()


async def test_a_request_that_runs_alone_at_three_crashes_is_abandoned(tmp_path):
    await ended_with(tmp_path, "bad", "good")  # not marked
    await ended_with(tmp_path, "bad", "good")
    for _ in range(3):
        async with life(tmp_path) as lived:
            await lived.ask("bad")
            await lived.ask("good", "new")
            assert lived.entered == await lived.marked() == {"bad"}
            assert lived.prepared == 1
    async with life(tmp_path) as lived:
        with pytest.raises(Abandoned, match="crashed 3 times while it ran bad and nothing else"):
            await lived.guard.enter("bad")
        await lived.ask("good")
        await lived.ask("new")
        assert lived.entered == {"good"}
        lived.guard.leave("good")
        await lived.rest()
        assert lived.entered == {"good", "new"}


async def test_crashes_with_other_requests_running_blame_nothing(tmp_path):
    await ended_with(tmp_path)
    await ended_with(tmp_path, "a")  # alone, but among whatever else might have been
    for _ in range(2):
        await ended_with(tmp_path, "a")  # the two ends that count
    await ended_with(tmp_path, "b", "c", "d")
    async with life(tmp_path) as lived:
        assert not lived.guard._abandoned_keys
        assert lived.guard._crash_counts == {"a": 3, "b": 1, "c": 1, "d": 1}


@pytest.mark.parametrize("forgive", ["answered", "stopped"])
async def test_an_answer_or_a_clean_stop_clears_a_suspect(tmp_path, forgive):
    for _ in range(4):  # twice alone
        await ended_with(tmp_path, "slow")
    async with life(tmp_path, in_order=forgive == "stopped") as lived:
        await lived.ask("slow")
        if forgive == "answered":
            lived.guard.leave("slow")
            await lived.rest()
    await ended_with(tmp_path, "slow")
    await ended_with(tmp_path, "slow")
    async with life(tmp_path) as lived:
        assert not lived.guard._abandoned_keys


async def test_a_request_that_was_only_read_is_no_suspect(tmp_path):
    await ended_with(tmp_path)
    async with life(tmp_path) as lived:
        async with lived.guard.reading("read"):
            pass
        await lived.ask("a")
    async with life(tmp_path) as lived:
        assert lived.guard._crash_counts == {"a": 1}


async def test_an_abandoned_request_has_one_try_after_a_clean_stop(tmp_path):
    for _ in range(5):
        await ended_with(tmp_path, "model")
    async with life(tmp_path, in_order=True) as lived:
        with pytest.raises(Abandoned):
            await lived.guard.enter("model")
    async with life(tmp_path) as lived:
        await lived.ask("model")
        assert lived.entered == await lived.marked() == {"model"}
    async with life(tmp_path) as lived:
        with pytest.raises(Abandoned):
            await lived.guard.enter("model")


async def test_many_suspects_are_bisected(tmp_path):
    await ended_with(tmp_path)
    await ended_with(tmp_path, *(f"r{number}" for number in range(320)))
    widths = []
    for _ in range(5):
        async with life(tmp_path) as lived:
            order = sorted((f"r{number}" for number in range(320)), key=lambda key: key != "r0")
            await lived.ask(*order)
            widths.append(len(lived.entered))
            assert "r0" in lived.entered
    assert widths == [40, 5, 1, 1, 1]
    async with life(tmp_path) as lived:
        assert lived.guard._abandoned_keys == {"r0"}


async def test_suspects_and_other_requests_alternate_in_order(tmp_path):
    await ended_with(tmp_path)
    await ended_with(tmp_path, "s1", "s2")
    async with life(tmp_path) as lived:
        for key in ("a", "b", "s1", "c", "s2", "d"):
            await lived.ask(key)
        for group in ({"a", "b"}, {"s1"}, {"c"}, {"s2"}, {"d"}):
            assert lived.entered >= group
            before = set(lived.tasks) - lived.entered
            for key in group:
                assert set(lived.tasks) - lived.entered == before
                lived.guard.leave(key)
            await lived.rest()
        assert lived.entered == set(lived.tasks)


async def test_a_cancelled_wait_leaves_no_request_running(tmp_path):
    await ended_with(tmp_path)
    await ended_with(tmp_path, "s")
    async with life(tmp_path) as lived:
        for key in ("a", "s", "b"):
            await lived.ask(key)
        assert lived.entered == {"a"}
        lived.tasks["s"].cancel()
        await lived.rest()
        assert lived.entered == {"a", "b"}
        lived.guard.leave("a")
        late = asyncio.create_task(lived.guard.enter("s"))
        await lived.rest()
        lived.guard.leave("b")
        late.cancel()
        await lived.rest()
        await lived.ask("c")
        assert "c" in lived.entered
        assert await lived.marked() == {"c"}


async def test_the_mark_stays_when_the_engine_fails(tmp_path):
    await ended_with(tmp_path)
    async with life(tmp_path) as lived:
        errors: list[Callable[[], Exception]] = [
            ValueError,
            lambda: EngineClosedError("a fault"),
        ]
        for key, error in zip(("failed", "fault"), errors, strict=True):
            with pytest.raises(Exception):  # noqa: B017
                async with lived.guard.running(key):
                    raise error()
        async with lived.guard.running("done"):
            pass
        async with lived.guard.reading("read"):
            pass
        await lived.rest()
        assert await lived.marked() == {"fault"}


async def test_an_abandoned_request_fails_and_an_abandoned_creation_closes_its_model(
    tmp_path,
):
    store = Store(tmp_path)

    def accept(transaction) -> None:
        for request_id, kind, seq in (
            ("m:0", "create_model", 0),
            ("m:1", "forward_backward", 1),
        ):
            row = journal.RequestRow(request_id, "one", kind, "m", seq, "accepted", b"", 1.0, 4)
            insert_request(transaction, row, b"body")
        transaction.execute(
            "INSERT INTO models (id, tenant, session, base_model, lora, user_metadata, created, "
            "used, training_bytes, sampling_bytes) VALUES ('m', 'one', 's', 'base', '{}', '{}', "
            "1.0, 1.0, 1, 1)"
        )

    await store.write(accept)
    store.close()
    for _ in range(5):
        await ended_with(tmp_path, "m:0")
    async with life(tmp_path) as lived:
        row = await lived.store.read(lambda db: journal.request_row(db, "m:0"))
        assert row is not None
        assert (row.state, row.category) == ("failed", "server")
        assert row.message is not None
        assert "crashed 3 times while it ran m:0 and nothing else" in row.message
        closed = await lived.store.read(
            lambda db: db.execute("SELECT closed FROM models").fetchone()[0]
        )
        assert closed.startswith("the model could not be created")
        kept = await lived.store.read(
            lambda db: db.execute("SELECT COUNT(*) FROM crash_guard").fetchone()[0]
        )
        assert kept == 0
