"""A full disk rejects new work and loses nothing that was accepted; work resumes when there is
space.
"""

import asyncio
import shutil
import sqlite3
from types import SimpleNamespace

import pytest
from server_client import (
    TENANT,
    Client,
    change_database,
    gradient,
    make_core,
    run,
    running,
    sample,
    state,
)

from planish.server.durable.database import Database
from planish.server.durable.store import Store
from planish.server.results import Done, TryAgain, Unavailable
from planish.server.server import Server
from planish.server.settings import ServerSettings


async def test_new_requests_are_rejected_with_little_disk_space(
    model_dir, data_dir, monkeypatch, caplog
):
    async with running(model_dir, data_dir, ServerSettings(min_free_disk_bytes=1000)) as server:
        client = await Client.start(server)
        model, sampler = await client.model(), await client.sampler()
        before = await model.submit(gradient(model.model_id))
        monkeypatch.setattr(server.store, "free_bytes", lambda: 999)
        calls = [
            model.submit(gradient(model.model_id), 2),
            server.sampling.submit(TENANT, 0, sample(sampler)),
            client.model(),
            client.sampler(),
        ]
        for call in calls:
            with pytest.raises(Unavailable, match="disk is full") as refused:
                await call
            assert refused.value.retry_after
        assert (await server.metrics()).disk_is_full
        assert [
            record.getMessage() for record in caplog.records if record.levelname == "ERROR"
        ] == [
            f"no new work is accepted until there is space: 999 bytes are free in {data_dir}, and "
            "the server keeps 1,000 bytes free (min_free_disk_bytes)"
        ]
        assert isinstance(await client.answer(before), Done)
        monkeypatch.undo()
        await client.done(await model.submit(gradient(model.model_id), 2))
        await client.sample(sampler)
        assert not (await server.metrics()).disk_is_full


async def test_moving_the_data_directory_away_and_back_loses_nothing(model_dir, data_dir, caplog):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        await model.step(1)
        away = data_dir.rename(data_dir.with_name("away"))
        with pytest.raises(Unavailable):
            await model.submit(gradient(model.model_id), 3)
        assert "the directory is missing" in caplog.text
        assert (await server.metrics()).disk_is_full
        away.rename(data_dir)
        await client.done(await model.submit(gradient(model.model_id), 3))


@pytest.mark.slow
def test_answers_wait_until_a_full_disk_accepts_them(model_dir, tmp_path, monkeypatch):
    async def play(name: str, full: bool) -> dict[str, bytes]:
        data_dir = tmp_path / name
        passing = 10**6  # commits until the disk is full

        def refuse(place: str) -> None:
            nonlocal passing
            passing -= place == "before commit"
            if passing < 0 and place == "before commit":
                raise OSError(28, "No space left on device")

        monkeypatch.setattr("planish.server.durable.store.crash_point", refuse)
        async with running(model_dir, data_dir) as server:
            client = await Client.start(server)
            model = await client.model()
            passing = 1 if full else passing  # the request's own
            request = await model.submit(gradient(model.model_id))
            if full:
                assert await server.settlement.outcome(TENANT, request, 0.3) == TryAgain()
                with pytest.raises(Unavailable):
                    await model.submit(gradient(model.model_id), 2)
                passing = 10**6
            assert isinstance(await client.answer(request), Done)
            await model.step(1)
            return state(data_dir, await model.save("last"))

    assert run(play("full", True)) == run(play("free", False))


@pytest.mark.slow
async def test_expired_checkpoints_are_deleted_from_a_full_disk(model_dir, data_dir, monkeypatch):
    async with running(model_dir, data_dir, ServerSettings(expiry_delay=1e-3)) as server:
        model = await (await Client.start(server)).model()
        for name in "ab":
            await model.save(name, ttl_seconds=1)
        await asyncio.sleep(1.1)
        server.expiry_clock.read()
        await asyncio.sleep(0.01)  # longer than `expiry_delay`
        weights = data_dir / "checkpoints" / model.model_id / "weights"

        def refuse(place: str) -> None:
            if place == "before commit" and any((weights / name).exists() for name in "ab"):
                raise OSError(28, "No space left on device")

        monkeypatch.setattr("planish.server.durable.store.crash_point", refuse)
        await server.sessions.touch(TENANT, model.client.session_id)
        await asyncio.wait_for(server.cleanup.clean(), 100)
        monkeypatch.undo()
        assert not any((weights / name).exists() for name in "ab")


@pytest.mark.slow
async def test_a_server_can_stop_with_a_full_disk(model_dir, data_dir, monkeypatch):
    server = make_core(model_dir, data_dir)
    await server.start()
    client = await Client.start(server)

    def refuse(place: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("planish.server.durable.store.crash_point", refuse)
        await server.sessions.touch(TENANT, client.session_id)
        await asyncio.wait_for(server.stop(1), 100)
    async with running(model_dir, data_dir) as server:
        await server.sessions.touch(TENANT, client.session_id)


async def test_a_server_starts_and_serves_reads_on_a_full_disk(model_dir, data_dir, monkeypatch):
    def refuse(place: str) -> None:
        if place == "before commit":
            raise OSError(28, "No space left on device")

    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        path, lost = await model.save("a"), await model.save("lost")
        await model.publish()
    # What a crash may leave for the start to clean up: a sampler without weights, and a row
    # without files.
    change_database(data_dir, "UPDATE samplers SET source = NULL, model = 'unknown:train:0'")
    shutil.rmtree(data_dir / "checkpoints" / lost.removeprefix("tinker://"))
    with monkeypatch.context() as full:
        full.setattr("planish.server.durable.store.crash_point", refuse)
        server = make_core(model_dir, data_dir)
        await asyncio.wait_for(server.start(), 100)
        assert (await server.checkpoints.info(TENANT, path)).base_model
        assert isinstance(await client_of(server, client).answer(f"{model.model_id}:1"), Done)
        await asyncio.wait_for(server.stop(1), 100)


def client_of(server: Server, client: Client) -> Client:
    return Client(server, client.session_id)


def test_spare_space_is_freed_if_the_database_cannot_be_opened(tmp_path, monkeypatch, caplog):
    """SQLite needs space to open a database, even to read it."""
    Store(tmp_path).close()
    spare, opened = tmp_path / ".server.spare", Database._open
    assert spare.stat().st_size == 1 << 20
    assert spare.stat().st_mode & 0o777 == 0o600

    def refuse(database: Database) -> sqlite3.Connection:
        connection = opened(database)
        if spare.exists():
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error
        return connection

    monkeypatch.setattr(Database, "_open", refuse)
    monkeypatch.setattr("shutil.disk_usage", lambda directory: SimpleNamespace(free=0))
    Store(tmp_path).close()
    assert not spare.exists()
    assert "the spare space was freed" in caplog.text
    monkeypatch.undo()
    Store(tmp_path).close()
    assert spare.exists()
