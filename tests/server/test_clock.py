"""A system clock that is wrong for a while deletes nothing early, and keeps nothing for ever."""

import math
import time
from datetime import datetime
from pathlib import Path

import pytest
from server_client import TENANT, Client, gradient, run, running

from planish.engine.checkpoints.store import CheckpointStore
from planish.errors import CheckpointError
from planish.server.durable.expiry_clock import ExpiryClock
from planish.server.durable.store import Store
from planish.server.results import Failed, Gone, NotFound, Tenant
from planish.server.settings import ServerSettings
from planish.service import SaveWeights
from planish.types import CheckpointPath

HOUR, DAY = 3600.0, 86400.0
CHECKPOINTS = "planish.engine.checkpoints"


class Clocks:
    """A system clock and a monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.wall, self.monotonic = 1e9, 0.0

    def watch(self) -> ExpiryClock:
        return ExpiryClock(lambda: self.wall, lambda: self.monotonic)

    def run(self, watch: ExpiryClock, seconds: float) -> None:
        """Let time pass, while the server looks at the clock every ten minutes."""
        while seconds > 0:
            step = min(600.0, seconds)
            self.wall += step
            self.monotonic += step
            seconds -= step
            watch.read()


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def test_the_date_before_which_data_are_old_is_exact_to_a_twentieth(clocks):
    watch = clocks.watch()
    clocks.run(watch, 8 * DAY)
    for seconds in (HOUR, DAY, 7 * DAY):
        age = clocks.wall - watch.before(seconds)
        assert seconds <= age <= 1.06 * seconds + 600
    assert len(watch._readings) < 200


def test_nothing_is_old_before_servers_have_run_for_long_enough(clocks):
    watch = clocks.watch()
    clocks.run(watch, HOUR)
    assert watch.before(2 * HOUR) == -math.inf


@pytest.mark.parametrize("jump", [3 * DAY, 400 * DAY])
def test_a_jump_ahead_counts_when_the_server_has_run_since(clocks, jump, caplog):
    watch = clocks.watch()
    clocks.run(watch, 3 * HOUR)
    right = clocks.wall
    clocks.wall += jump
    clocks.run(watch, HOUR)
    assert f"jumped by {jump:+.0f} seconds" in caplog.text
    assert watch.before(1.5 * HOUR) <= right
    clocks.run(watch, HOUR)
    assert watch.before(1.5 * HOUR) > right + jump


def test_a_clock_that_is_ahead_for_a_while_changes_nothing(clocks):
    watch = clocks.watch()
    clocks.run(watch, DAY)
    clocks.wall += 3 * DAY
    clocks.run(watch, HOUR)
    clocks.wall -= 3 * DAY
    clocks.run(watch, HOUR)
    for seconds in (HOUR, 6 * HOUR):
        assert clocks.wall - watch.before(seconds) >= seconds - 600


def test_time_without_a_server_does_not_count(clocks, caplog):
    watch = clocks.watch()
    clocks.run(watch, DAY)
    right, readings = clocks.wall, list(watch._readings)
    clocks.wall += 3 * DAY
    watch = clocks.watch()
    watch.resume(readings)
    assert "last used 3.0 days ago" in caplog.text
    clocks.run(watch, HOUR)
    assert watch.before(2 * HOUR) <= right - HOUR
    clocks.run(watch, 2 * HOUR)
    assert watch.before(2 * HOUR) > right + 3 * DAY


async def test_the_database_has_the_latest_readings(clocks, tmp_path):
    store, watch = Store(tmp_path), clocks.watch()
    for _ in range(2):
        clocks.run(watch, HOUR)
        await store.write(watch.record)
    resumed = clocks.watch()
    await resumed.begin(store)
    store.close()
    assert resumed.before(1.5 * HOUR) == watch.before(1.5 * HOUR) > -math.inf


@pytest.mark.parametrize("behind", [3 * DAY, 9000 * DAY])
def test_a_clock_that_is_behind_deletes_nothing_early(clocks, behind, caplog):
    """9000 days, as on a machine whose clock has no battery."""
    watch = clocks.watch()
    clocks.run(watch, DAY)
    readings = list(watch._readings)
    clocks.wall -= behind
    watch = clocks.watch()
    watch.resume(readings)
    assert f"{behind:.0f} seconds behind" in caplog.text
    clocks.run(watch, 600)
    wrong = clocks.wall
    clocks.wall += behind
    clocks.run(watch, HOUR)
    assert watch.before(2 * HOUR) <= wrong
    clocks.run(watch, 2 * HOUR)
    assert watch.before(2 * HOUR) > wrong


class ShiftedDatetime(datetime):
    """The class `datetime` with the clock that the tests replace."""

    @classmethod
    def now(cls, tz=None):
        return datetime.fromtimestamp(time.time(), tz)


class ShiftedClock:
    """The system's clock, shifted by `seconds`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self._run_seconds = 0.0, 0.0
        time_of_day, monotonic = time.time, time.monotonic
        monkeypatch.setattr("time.time", lambda: time_of_day() + self.seconds + self._run_seconds)
        for module in ("store", "replacement"):
            monkeypatch.setattr(f"{CHECKPOINTS}.{module}.datetime", ShiftedDatetime)
        monkeypatch.setattr(
            "planish.server.server.ExpiryClock",
            lambda: ExpiryClock(monotonic=lambda: monotonic() + self._run_seconds),
        )

    def run(self, seconds: float) -> None:
        """Let the server run for `seconds`."""
        self._run_seconds += seconds


@pytest.fixture
def shifted(monkeypatch) -> ShiftedClock:
    return ShiftedClock(monkeypatch)


def directory_of(data_dir: Path, path: str) -> Path:
    return data_dir / "checkpoints" / path.removeprefix("tinker://")


async def test_an_expired_checkpoint_is_deleted_when_the_server_has_run_for_a_day(
    model_dir, data_dir, shifted, caplog
):
    """So a clock that jumps ahead, and is corrected within a day, deletes nothing."""
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        path = await model.save("a", ttl_seconds=int(DAY))
        request = await model.submit(gradient(model.model_id))
        answer = await client.done(request)
        directory = directory_of(data_dir, path)
        await server.cleanup.clean()
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
        shifted.run(0.9 * DAY)
        await server.cleanup.clean()
        shifted.run(0.9 * DAY)
        await server.cleanup.clean()
        with pytest.raises(CheckpointError):
            await server.checkpoints.info(TENANT, path)
        assert directory.is_dir()
        shifted.run(1.1 * DAY)
        await server.cleanup.clean()
        assert not directory.exists()


async def test_the_owner_can_extend_a_checkpoint_that_seems_expired(model_dir, data_dir, shifted):
    """The clock was behind at the save, and was corrected."""
    shifted.seconds = -3 * DAY
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        path = await (await client.model()).save("a", ttl_seconds=int(DAY))
        shifted.seconds = 0.0
        await server.cleanup.clean()
        with pytest.raises(CheckpointError):
            await server.checkpoints.info(TENANT, path)
        with pytest.raises(NotFound):
            await server.checkpoints.set_ttl(Tenant("another"), path, int(DAY))
        await server.checkpoints.set_ttl(TENANT, path, int(2 * DAY))
        shifted.run(1.9 * DAY)
        await server.cleanup.clean()
        assert (await server.checkpoints.info(TENANT, path)).base_model


async def test_a_result_of_a_clock_that_was_behind_is_kept_for_its_whole_time(
    model_dir, data_dir, shifted
):
    settings = ServerSettings(result_retention=10 * DAY, result_memory_bytes=1)
    shifted.seconds = 7 * DAY
    async with running(model_dir, data_dir, settings) as server:
        client = await Client.start(server)
        model = await client.model()
        request = await model.submit(gradient(model.model_id))
        answer = await client.done(request)
        await model.step(3)
        shifted.seconds = 10 * DAY
        await server.cleanup.clean()
        shifted.run(9 * DAY)
        await server.cleanup.clean()
        assert await client.done(request) == answer
        shifted.run(2 * DAY)
        await server.cleanup.clean()
        with pytest.raises(Gone):
            await client.answer(request)


async def test_an_expired_checkpoint_may_be_replaced(model_dir, data_dir, shifted):
    async with running(model_dir, data_dir) as server:
        model = await (await Client.start(server)).model()
        path = await model.save("a", ttl_seconds=int(DAY))
        answer = await model.client.answer(await model.submit(SaveWeights(model.model_id, "a")))
        assert isinstance(answer, Failed)
        assert "exists; give another name" in answer.message
        shifted.run(1.1 * DAY)
        assert await model.save("a") == path
        shifted.run(3 * DAY)
        await server.cleanup.clean()
        assert (await server.checkpoints.info(TENANT, path)).base_model


@pytest.mark.parametrize("wrong", [3 * DAY, 10 * DAY])
async def test_a_clock_that_is_ahead_at_the_start_deletes_nothing_early(
    model_dir, data_dir, shifted, caplog, wrong
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


async def test_times_of_a_clock_that_was_ahead_are_corrected(model_dir, data_dir, shifted):
    """Results and sessions of the time with the wrong clock are not kept for longer."""
    settings = ServerSettings(result_retention=300, session_timeout=300, result_memory_bytes=1)
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
        shifted.run(400)
        await clean_after_the_time_to_reconnect(server)
        with pytest.raises(Gone):
            await client.answer(request)
        shifted.run(400)
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
            await server.checkpoint_maintenance.verify()
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
