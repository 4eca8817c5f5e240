"""A full disk rejects new work and loses nothing that was accepted; work resumes when there is
space.
"""

import asyncio

import pytest
from server_client import TENANT, Client, gradient, make_core, run, running, sample, state

from planish.server.results import Done, Unavailable
from planish.server.settings import ServerSettings


def test_new_requests_are_rejected_with_little_disk_space(model_dir, data_dir, monkeypatch, caplog):
    async def scenario() -> None:
        async with running(model_dir, data_dir, ServerSettings(min_free_disk_bytes=1000)) as server:
            client = await Client.start(server)
            model, sampler = await client.model(), await client.sampler()
            before = await model.submit(gradient(model.model_id))
            monkeypatch.setattr(server.store, "free_bytes", lambda: 999)
            calls = [
                model.submit(gradient(model.model_id), 2),
                server.samplers.submit(TENANT, 0, sample(sampler)),
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
                f"no new work is accepted until there is space: 999 bytes are free in {data_dir}, and the server keeps 1,000 bytes free (min_free_disk_bytes)"
            ]
            assert isinstance(await client.answer(before), Done)
            monkeypatch.undo()
            await client.done(await model.submit(gradient(model.model_id), 2))
            await client.sample(sampler)
            assert not (await server.metrics()).disk_is_full

    run(scenario())


def test_moving_the_data_directory_away_and_back_loses_nothing(model_dir, data_dir, caplog):
    async def scenario() -> None:
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

    run(scenario())


@pytest.mark.slow
def test_answers_wait_until_a_full_disk_accepts_them(model_dir, tmp_path, monkeypatch):
    async def play(name: str, full: bool) -> dict[str, bytes]:
        data_dir = tmp_path / name
        refusing = False

        def refuse(place: str) -> None:
            if refusing and place == "before commit":
                raise OSError(28, "No space left on device")

        monkeypatch.setattr("planish.server.durable.store.crash_point", refuse)
        async with running(model_dir, data_dir) as server:
            client = await Client.start(server)
            model = await client.model()
            request = await model.submit(gradient(model.model_id))
            refusing = full
            assert isinstance(await client.answer(request), Done)  # told, though it is not on disk
            if full:
                await asyncio.sleep(0.1)
                with pytest.raises(Unavailable):
                    await model.submit(gradient(model.model_id), 2)
                refusing = False
                while server.store.is_refused:
                    await asyncio.sleep(0.05)
            await model.step(1)
            return state(data_dir, await model.save("last"))

    assert run(play("full", True)) == run(play("free", False))


@pytest.mark.slow
def test_expired_checkpoints_are_deleted_from_a_full_disk(model_dir, data_dir, monkeypatch):
    async def scenario() -> None:
        async with running(model_dir, data_dir, ServerSettings(expiry_delay=1e-3)) as server:
            model = await (await Client.start(server)).model()
            for name in "ab":
                await model.save(name, ttl_seconds=1)
            await asyncio.sleep(1.1)
            weights = data_dir / "checkpoints" / model.model_id / "weights"

            def refuse(place: str) -> None:
                if place == "before commit" and any((weights / name).exists() for name in "ab"):
                    raise OSError(28, "No space left on device")

            monkeypatch.setattr("planish.server.durable.store.crash_point", refuse)
            await server.sessions.touch(TENANT, model.client.session_id)
            await asyncio.wait_for(server.cleanup.clean(), 10)
            monkeypatch.undo()
            assert not any((weights / name).exists() for name in "ab")

    run(scenario())


@pytest.mark.slow
def test_a_server_can_stop_with_a_full_disk(model_dir, data_dir, monkeypatch):
    async def scenario() -> None:
        server = make_core(model_dir, data_dir)
        await server.start()
        client = await Client.start(server)

        def refuse(place: str) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as full:
            full.setattr("planish.server.durable.store.crash_point", refuse)
            await server.sessions.touch(TENANT, client.session_id)
            await asyncio.wait_for(server.stop(1), 10)
        async with running(model_dir, data_dir) as server:
            await server.sessions.touch(TENANT, client.session_id)

    run(scenario())
