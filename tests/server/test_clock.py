"""A system clock that is wrong for a while deletes nothing."""

import asyncio
import time
from pathlib import Path

import pytest
from server_client import TENANT, Client, gradient, run, running

from planish.engine.checkpoints.files import Manifest
from planish.engine.checkpoints.store import CheckpointStore
from planish.errors import CheckpointError
from planish.server.maintenance import ClockWatch
from planish.server.settings import ServerSettings
from planish.types import CheckpointPath

DAY = 86400.0
STORE = "planish.engine.checkpoints.store"


def has_expired(manifest: Manifest) -> bool:
    """Do the same as the function of the store, with the clock that the tests replace."""
    return manifest.expires_at is not None and manifest.expires_at.timestamp() <= time.time()


def test_a_jump_starts_the_steady_time_again(caplog):
    wall, now = 1000.0, 0.0
    watch = ClockWatch(lambda: wall, lambda: now)

    def pass_time(seconds: float, jump: float = 0.0) -> float:
        nonlocal wall, now
        now += seconds
        wall += seconds + jump
        return watch.steady_seconds()

    assert watch.steady_seconds() == 0
    assert [pass_time(100, jump) for jump in (0, 1, -59)] == [100, 200, 300]
    assert not caplog.records
    assert pass_time(1, 10 * DAY) == 0
    assert "jumped by +864000 seconds" in caplog.text
    assert pass_time(50) == 50
    assert pass_time(1, -10 * DAY) == 0
    assert pass_time(3600) == 3600


async def test_a_clock_that_jumps_ahead_deletes_nothing_until_it_was_steady(
    model_dir, data_dir, monkeypatch, caplog
):
    ahead, real = 0.0, time.time
    monkeypatch.setattr("time.time", lambda: real() + ahead)
    monkeypatch.setattr(f"{STORE}._has_expired", has_expired)

    settings = ServerSettings(expiry_delay=0.5)
    async with running(model_dir, data_dir, settings) as server:
        client = await Client.start(server)
        model = await client.model()
        path = await model.save("a", ttl_seconds=int(DAY))
        request = await model.submit(gradient(model.model_id))
        answer = await client.done(request)
        directory = data_dir / "checkpoints" / path.removeprefix("tinker://")
        await asyncio.sleep(0.6)
        ahead = 10 * DAY
        for _ in range(2):
            await server.cleanup.clean()
            with pytest.raises(CheckpointError):
                await server.checkpoints.info(TENANT, path)
            assert directory.is_dir()
        assert "jumped by +864000" in caplog.text
        ahead = 0.0
        await server.cleanup.clean()
        assert (await server.checkpoints.info(TENANT, path)).base_model
        assert await client.done(request) == answer
        ahead = 10 * DAY
        await server.cleanup.clean()
        await asyncio.sleep(0.6)
        await server.cleanup.clean()
        assert not directory.exists()


async def test_a_clock_that_is_ahead_at_the_start_deletes_nothing_for_longer(
    model_dir, data_dir, monkeypatch, caplog
):
    ahead, real = 0.0, time.time
    monkeypatch.setattr("time.time", lambda: real() + ahead)
    monkeypatch.setattr(f"{STORE}._has_expired", has_expired)
    settings = ServerSettings(expiry_delay=0.05)

    async with running(model_dir, data_dir, settings) as server:
        client = await Client.start(server)
        path = await (await client.model()).save("a", ttl_seconds=int(DAY))
    directory = data_dir / "checkpoints" / path.removeprefix("tinker://")
    ahead = 10 * DAY
    async with running(model_dir, data_dir, settings) as server:
        assert "was last used 10 days ago" in caplog.text
        await asyncio.sleep(0.2)
        await server.cleanup.clean()
        assert directory.is_dir()
        await asyncio.sleep(1.1)
        await server.cleanup.clean()
        assert not directory.exists()


def test_a_reader_removes_only_what_was_found_expired_a_day_ago(model_dir, data_dir, monkeypatch):
    """The store of a program without a server."""

    async def saved() -> str:
        async with running(model_dir, data_dir) as server:
            return await (await (await Client.start(server)).model()).save("a", ttl_seconds=3600)

    path = CheckpointPath.parse(run(saved()))
    store = CheckpointStore(data_dir / "checkpoints")
    directory = next(Path(store.directory).glob("*/weights/a"))
    real, ahead = time.time, 0.0
    monkeypatch.setattr("time.time", lambda: real() + ahead)
    monkeypatch.setattr(f"{STORE}._has_expired", has_expired)

    def is_there(at: float) -> bool:
        nonlocal ahead
        ahead = at
        with pytest.raises(CheckpointError, match="expired"):
            store.manifest(path)
        return directory.exists()

    assert is_there(10 * DAY)  # the clock is wrong
    ahead = 0.0
    assert store.manifest(path).expires_at is not None
    assert is_there(7200)
    assert is_there(7200 + 0.9 * DAY)
    assert not is_there(7200 + 1.1 * DAY)
