"""A system clock that is wrong for a while deletes nothing early, and keeps nothing for ever."""

import asyncio
import time
from pathlib import Path

import pytest
from server_client import TENANT, Client, change_database, gradient, run, running

from planish.engine.checkpoints.files import Manifest
from planish.engine.checkpoints.store import CheckpointStore
from planish.errors import CheckpointError
from planish.server.durable.expiry_clock import ExpiryClock
from planish.server.results import Gone
from planish.server.settings import ServerSettings
from planish.types import CheckpointPath

HOUR, DAY = 3600.0, 86400.0
STORE = "planish.engine.checkpoints.store"


class Clocks:
    """A system clock and a monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.wall, self.monotonic = 1e9, 0.0

    def watch(self, delay: float = 7 * DAY) -> ExpiryClock:
        return ExpiryClock(delay, lambda: self.wall, lambda: self.monotonic)

    def run(self, watch: ExpiryClock, seconds: float) -> None:
        """Let time pass, while the server looks at the clock once a minute."""
        while seconds > 0:
            step = min(60.0, seconds)
            self.wall += step
            self.monotonic += step
            seconds -= step
            watch.earliest()


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def test_a_steady_clock_is_believed(clocks):
    watch = clocks.watch()
    clocks.run(watch, 8 * DAY)
    assert watch.earliest() == clocks.wall
    assert watch.before(DAY) == clocks.wall - DAY
    assert watch.extended(100) == 100
    assert watch.extended(None) is None


@pytest.mark.parametrize("jump", [3 * DAY, 400 * DAY])
def test_a_jump_ahead_does_not_count_until_the_clock_was_steady(clocks, jump, caplog):
    watch = clocks.watch()
    clocks.run(watch, HOUR)
    right = clocks.wall
    clocks.wall += jump
    assert watch.earliest() == right
    assert f"jumped by {jump:+.0f} seconds" in caplog.text
    clocks.run(watch, HOUR)
    assert watch.earliest() == right + HOUR
    # What is dated after the jump can be an hour old, and nothing else is certain.
    assert watch.before(HOUR) == clocks.wall - HOUR
    assert watch.before(2 * HOUR) == right - HOUR
    clocks.run(watch, 7 * DAY)
    assert watch.earliest() == clocks.wall


def test_a_clock_that_is_ahead_for_a_while_changes_nothing(clocks):
    watch = clocks.watch()
    clocks.wall += 3 * DAY
    clocks.run(watch, DAY)
    clocks.wall -= 3 * DAY
    assert watch.earliest() == clocks.wall
    clocks.run(watch, HOUR)
    assert watch.earliest() == clocks.wall


def test_time_without_a_server_does_not_count_until_the_clock_was_steady(clocks, caplog):
    right, watch = clocks.wall, clocks.watch()
    clocks.wall += 3 * DAY
    watch = clocks.watch()
    watch.resume(right, right)
    assert "last used 3.0 days ago" in caplog.text
    clocks.run(watch, HOUR)
    assert watch.earliest() == right + HOUR
    clocks.run(watch, 7 * DAY)
    assert watch.earliest() == clocks.wall


def test_a_time_to_live_is_longer_while_the_clock_is_behind(clocks, caplog):
    right = clocks.wall
    clocks.wall -= 3 * DAY
    watch = clocks.watch()
    watch.resume(right, right)
    assert "259200 seconds behind" in caplog.text
    assert watch.extended(100) == 100 + 3 * DAY
    saved_until = clocks.wall + watch.extended(9 * DAY)
    clocks.run(watch, HOUR)
    clocks.wall += 3 * DAY  # corrected
    assert watch.extended(100) == 100
    assert watch.earliest() == clocks.wall - 3 * DAY
    clocks.run(watch, 9 * DAY - 2 * HOUR)
    assert watch.earliest() < saved_until
    clocks.run(watch, 2 * HOUR)
    assert watch.earliest() >= saved_until


def test_a_clock_that_is_behind_by_years_changes_no_bound(clocks):
    """As on a machine whose clock has no battery."""
    right = clocks.wall
    clocks.wall -= 9000 * DAY
    watch = clocks.watch()
    watch.resume(right, right)
    clocks.run(watch, 60)
    assert watch.earliest() == clocks.wall
    assert watch.extended(100) == 100
    clocks.wall += 9000 * DAY
    assert watch.earliest() == clocks.wall


def has_expired(manifest: Manifest) -> bool:
    """Do the same as the function of the store, with the clock that the tests replace."""
    return manifest.expires_at is not None and manifest.expires_at.timestamp() <= time.time()


class ShiftedClock:
    """The system's clock, shifted by `seconds`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, real = 0.0, time.time
        monkeypatch.setattr("time.time", lambda: real() + self.seconds)
        monkeypatch.setattr(f"{STORE}._has_expired", has_expired)


@pytest.fixture
def shifted(monkeypatch) -> ShiftedClock:
    return ShiftedClock(monkeypatch)


def directory_of(data_dir: Path, path: str) -> Path:
    return data_dir / "checkpoints" / path.removeprefix("tinker://")


async def test_a_clock_that_jumps_ahead_deletes_nothing_until_it_was_steady(
    model_dir, data_dir, shifted, caplog
):
    async with running(model_dir, data_dir, ServerSettings(expiry_delay=0.5)) as server:
        client = await Client.start(server)
        model = await client.model()
        path = await model.save("a", ttl_seconds=int(DAY))
        request = await model.submit(gradient(model.model_id))
        answer = await client.done(request)
        directory = directory_of(data_dir, path)
        shifted.seconds = 10 * DAY
        for _ in range(2):
            await server.cleanup.clean()
            with pytest.raises(CheckpointError):
                await server.checkpoints.info(TENANT, path)
            assert directory.is_dir()
        assert "jumped by +864000" in caplog.text
        shifted.seconds = 0.0
        await server.cleanup.clean()
        assert (await server.checkpoints.info(TENANT, path)).base_model
        assert await client.done(request) == answer
        shifted.seconds = 10 * DAY
        await server.cleanup.clean()
        await asyncio.sleep(0.6)
        await server.cleanup.clean()
        assert not directory.exists()


@pytest.mark.parametrize("wrong", [3 * DAY, 10 * DAY])
@pytest.mark.parametrize("has_recorded", [True, False])
async def test_a_clock_that_is_ahead_at_the_start_deletes_nothing_early(
    model_dir, data_dir, shifted, caplog, wrong, has_recorded
):
    """Neither a checkpoint, nor a session with its model, nor a result."""
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        path = await model.save("a", ttl_seconds=int(DAY))
        request = await model.submit(gradient(model.model_id))
        answer = await client.done(request)
        ended = await server.sessions.create(TENANT, (await client_record(server, client)).spec)
        await server.sessions.finish(TENANT, ended, "success", None)
        await server.cleanup.clean()
    if not has_recorded:  # by an older version
        change_database(data_dir, "DELETE FROM meta WHERE key = 'clock'")
    shifted.seconds = wrong
    directory = directory_of(data_dir, path)
    async with running(model_dir, data_dir) as server:
        assert "days ago. If the clock is wrong" in caplog.text
        await clean_after_the_time_to_reconnect(server)
        assert directory.is_dir()
        shifted.seconds = 0.0  # corrected
        await clean_after_the_time_to_reconnect(server)
        assert (await server.checkpoints.info(TENANT, path)).base_model
        assert await Client(server, client.session_id).done(request) == answer
        await server.sessions.touch(TENANT, client.session_id)
        with pytest.raises(Gone):
            await server.sessions.touch(TENANT, ended)  # NotFound if it were deleted


async def client_record(server, client):
    return await server.sessions.record(TENANT, client.session_id)


async def clean_after_the_time_to_reconnect(server) -> None:
    """Clean up as if the server had run for more than ten minutes."""
    server.sessions._running_since -= HOUR
    await server.cleanup.clean()


async def test_a_clock_that_is_behind_at_the_start_deletes_nothing_early(
    model_dir, data_dir, shifted, caplog
):
    async with running(model_dir, data_dir) as server:
        await server.cleanup.clean()
    shifted.seconds = -3 * DAY
    async with running(model_dir, data_dir) as server:
        assert "behind the last use" in caplog.text
        client = await Client.start(server)
        model = await client.model()
        path = await model.save("a", ttl_seconds=int(DAY))
        copy = await model.save("b")
        await server.checkpoints.set_ttl(TENANT, copy, int(DAY))
        request = await model.submit(gradient(model.model_id))
        answer = await client.done(request)
        shifted.seconds = 0.0  # corrected
        await clean_after_the_time_to_reconnect(server)
        for each in (path, copy):
            assert (await server.checkpoints.info(TENANT, each)).base_model
        assert await client.done(request) == answer
        await server.sessions.touch(TENANT, client.session_id)


async def test_times_of_a_clock_that_was_ahead_are_corrected(model_dir, data_dir, shifted):
    """Results and sessions of the time with the wrong clock are not kept for longer."""
    settings = ServerSettings(result_retention=0.3, session_timeout=0.3, result_memory_bytes=1)
    shifted.seconds = 3 * DAY
    async with running(model_dir, data_dir, settings) as server:
        client = await Client.start(server)
        model = await client.model()
        request = await model.submit(gradient(model.model_id))
        await client.done(request)
        await model.step(3)
        shifted.seconds = 0.0
        await clean_after_the_time_to_reconnect(server)
        await server.sessions.touch(TENANT, client.session_id)
        await asyncio.sleep(0.4)
        await clean_after_the_time_to_reconnect(server)
        with pytest.raises(Gone):
            await client.answer(request)
        await asyncio.sleep(0.4)
        await clean_after_the_time_to_reconnect(server)
        with pytest.raises(Gone):
            await server.sessions.touch(TENANT, client.session_id)


async def test_a_restart_reads_expired_checkpoints_without_removing_them(
    model_dir, data_dir, shifted
):
    """At its start the server reads all manifests. A clock that is ahead for more than a day must
    not let this remove checkpoints.
    """
    async with running(model_dir, data_dir) as server:
        path = await (await (await Client.start(server)).model()).save("a", ttl_seconds=3600)
        await server.cleanup.clean()
    for ahead in (2 * DAY, 4 * DAY):
        shifted.seconds = ahead
        async with running(model_dir, data_dir) as server:
            await server.checkpoints.verify()
            await server.cleanup.clean()
    shifted.seconds = 0.0
    async with running(model_dir, data_dir) as server:
        assert (await server.checkpoints.info(TENANT, path)).base_model


def test_a_reader_removes_only_what_was_found_expired_a_day_ago(model_dir, data_dir, shifted):
    """The store of a program without a server."""

    async def saved() -> str:
        async with running(model_dir, data_dir) as server:
            return await (await (await Client.start(server)).model()).save("a", ttl_seconds=3600)

    path = CheckpointPath.parse(run(saved()))
    store = CheckpointStore(data_dir / "checkpoints")
    directory = next(Path(store.directory).glob("*/weights/a"))

    def is_there(at: float) -> bool:
        shifted.seconds = at
        with pytest.raises(CheckpointError, match="expired"):
            store.manifest(path)
        return directory.exists()

    assert is_there(10 * DAY)  # the clock is wrong
    shifted.seconds = 0.0
    assert store.manifest(path).expires_at is not None
    assert is_there(7200)
    assert is_there(7200 + 0.9 * DAY)
    assert not is_there(7200 + 1.1 * DAY)
