"""What one tenant may keep: bytes on disk, and numbers of sessions, models and samplers."""

import asyncio

import pytest
from server_client import TENANT, Client, running

from planish.errors import StorageError, UserError
from planish.server.durable.quotas import stored_bytes
from planish.server.durable.records import ModelRow, SamplerRow, SessionRow, count
from planish.server.durable.store import Store
from planish.server.results import (
    BadRequest,
    KeyReused,
    NotFound,
    SessionSpec,
    Tenant,
    Unavailable,
)
from planish.server.server import Server
from planish.server.settings import ServerSettings
from planish.service import UnloadModel

OTHER = Tenant("other")


async def stored(server: Server) -> int:
    return await server.store.read(stored_bytes, TENANT.name)


async def rows(server: Server, kind: type[SessionRow | ModelRow | SamplerRow]) -> int:
    return await server.store.read(count, kind, "tenant = ?", [TENANT.name])


async def published(server: Server) -> None:
    """Wait until the files of all samplers are saved."""
    while any(sampler.row.source is None for sampler in server.samplers.open_samplers()):
        await asyncio.sleep(0.02)


async def test_metadata_counts_against_the_storage_quota(model_dir, data_dir):
    """A checkpoint of a few KiB had metadata of any size for nothing."""
    metadata = {"key": "x" * 60_000}

    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        before = await stored(server)
        small = await model.save("small")
        plain = await stored(server) - before
        large = await model.save("large", user_metadata=metadata)
        assert await stored(server) - before - 2 * plain > 60_000
        sizes = {
            path: (await server.checkpoints.info(TENANT, path)).checkpoint.size_bytes or 0
            for path in (small, large)
        }
        for path, size in sizes.items():
            directory = data_dir / "checkpoints" / path.removeprefix("tinker://")
            on_disk = sum(file.stat().st_size for file in directory.iterdir())
            assert size == on_disk
        await server.checkpoints.delete(TENANT, large)
        await server.checkpoints.delete(TENANT, small)
        assert await stored(server) == before
        await client.model(user_metadata=metadata)
        assert await stored(server) - before > 60_000
        before = await stored(server)
        await server.sessions.create(TENANT, SessionSpec(user_metadata=metadata))
        assert await stored(server) - before > 60_000


async def test_a_tenant_over_its_quota_can_still_delete(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(max_storage_bytes=50_000)) as server:
        client = await Client.start(server)
        model = await client.model()
        path = await model.save("a")
        assert await stored(server) >= 50_000
        with pytest.raises(BadRequest, match=r"max_storage_bytes.*delete some"):
            await client.model()
        with pytest.raises(BadRequest, match="max_storage_bytes"):
            await server.stored_runs.copy(TENANT, path, client.session_id, 8, None)
        for options in ({}, {"base_model": None, "model_path": path}):
            with pytest.raises(BadRequest, match="max_storage_bytes"):
                await client.sampler(**options)
        await Client.start(server)
        await server.checkpoints.delete(TENANT, path)
        assert await stored(server) < 50_000
        client.models += 1
        await client.model()


async def test_files_that_only_a_sampler_keeps_are_counted(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        before = await stored(server)
        path = await model.save("a")
        size = await stored(server) - before
        sampler_id = await client.sampler(None, path)
        assert await stored(server) == before + size  # hard links take no space
        await server.checkpoints.delete(TENANT, path)
        assert await stored(server) >= before + size
        sampler = server.samplers.get(sampler_id)
        assert sampler is not None
        await server.samplers.close(sampler, "it was released")
        assert await stored(server) == before
        assert (await server.metrics()).unnamed_sampler_bytes == 0


async def test_the_snapshot_of_an_open_model_is_counted(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(max_replay_bytes=1)) as server:
        model = await (await Client.start(server)).model()
        before = await stored(server)
        await model.step()
        async with asyncio.timeout(120):
            while await stored(server) == before:
                await asyncio.sleep(0.01)
        await model.run(UnloadModel(model.model_id))
        assert await stored(server) == before


async def test_private_copies_do_not_repeat_the_metadata(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        path = await model.save("a", user_metadata={"key": "x" * 60_000})
        sampler_id = await client.sampler(None, path)
        copy = data_dir / "checkpoints" / sampler_id / "sampler_weights" / "_planish.source"
        assert (copy / "planish.json").stat().st_size < 5000


async def test_open_models_samplers_and_sessions_are_limited(model_dir, data_dir):
    settings = ServerSettings(max_models=2, max_samplers=2, max_sessions=2)

    async with running(model_dir, data_dir, settings) as server:
        client, other = await Client.start(server), await Client.start(server, OTHER)
        made = await asyncio.gather(*(client.model() for _ in range(4)), return_exceptions=True)
        refused = [error for error in made if isinstance(error, BaseException)]
        assert len(refused) == 2
        for error in refused:
            assert isinstance(error, BadRequest)
            assert "2 open models, which is the limit (max_models); unload some" in str(error)
        assert await rows(server, ModelRow) == 2
        [model, _] = [model for model in made if not isinstance(model, BaseException)]
        unload = await server.models.unload(TENANT, model.model_id)
        await client.done(unload.request_id)
        await client.model()

        path = await (await other.model()).save("a")
        await server.checkpoints.set_public(OTHER, path, True)
        for _ in range(2):
            await client.sampler()
        for options in ({}, {"base_model": None, "model_path": path}):
            with pytest.raises(BadRequest, match=r"2 open samplers.*max_samplers"):
                await client.sampler(**options)
        assert not list((data_dir / "checkpoints").glob("*/*/_planish.source"))
        assert await rows(server, SamplerRow) == 2

        await Client.start(server)
        with pytest.raises(BadRequest, match=r"2 open sessions.*max_sessions.*session_timeout"):
            await Client.start(server)
        await Client.start(server, OTHER)


async def test_models_may_publish_any_number_of_samplers(model_dir, data_dir):
    """A run of thousands of steps publishes a sampler in each."""
    async with running(model_dir, data_dir, ServerSettings(max_samplers=2)) as server:
        client = await Client.start(server)
        model = await client.model()
        samplers = [await model.publish() for _ in range(4)]
        await published(server)
        await server.cleanup.clean()
        assert [sampler.id for sampler in server.samplers.open_samplers()] == samplers[-2:]
        await client.sample(samplers[-1])


async def test_the_tenant_with_most_unnamed_samplers_loses_them_first(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        small, large = await Client.start(server, OTHER), await Client.start(server)
        kept = await (await small.model()).publish()
        model = await large.model()
        for _ in range(3):
            await model.publish()
        await published(server)
        size = server.samplers.open_samplers()[0].row.bytes
        limited = ServerSettings(max_unnamed_sampler_bytes=2 * size)
        object.__setattr__(server.cleanup, "_settings", limited)
        await server.cleanup.clean()
        left = server.samplers.open_samplers()
        assert [sampler.row.tenant for sampler in left] == [OTHER.name, TENANT.name]
        assert left[0].id == kept


async def test_ended_sessions_make_room_for_new_ones(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(max_sessions=3)) as server:
        first = await Client.start(server)
        model = await first.model()
        path = await model.save("a")
        await server.models.unload(TENANT, (await first.model()).model_id)
        await server.sessions.finish(TENANT, first.session_id, "success", "x" * 100_000)
        await server.sessions.members.wait_until_closed()
        [ended] = await server.store.read(
            lambda db: db.execute("SELECT reason FROM sessions").fetchall()
        )
        assert len(ended["reason"]) < 2000
        for _ in range(20):
            client = await Client.start(server)
            await server.sessions.finish(TENANT, client.session_id, "success", None)
            await server.sessions.members.wait_until_closed()
        assert await rows(server, SessionRow) == 3
        with pytest.raises(NotFound):
            await server.sessions.record(TENANT, first.session_id)
        # A run with a checkpoint stays.
        assert [item.training_run_id for item in (await server.runs.page(TENANT, 10, 0)).items] == [
            model.model_id
        ]
        assert (await server.checkpoints.info(TENANT, path)).base_model


async def test_sessions_are_not_created_on_a_full_disk(model_dir, data_dir, monkeypatch):
    """They filled a disk through its reserve, after which nothing started."""
    async with running(model_dir, data_dir) as server:
        monkeypatch.setattr(server.store, "free_bytes", lambda: 1000)
        with pytest.raises(Unavailable, match="disk is full"):
            await Client.start(server)


async def test_an_idempotency_key_gives_one_session_after_a_restart(model_dir, data_dir):
    ids = []
    for _ in range(2):
        async with running(model_dir, data_dir) as server:
            create = server.sessions.create
            ids += await asyncio.gather(*(create(TENANT, SessionSpec(), "key") for _ in range(3)))
            others = [
                await create(TENANT, SessionSpec()),
                await create(TENANT, SessionSpec(), "another"),
                await create(OTHER, SessionSpec(), "key"),
            ]
            assert len({*ids, *others}) == 4
    assert len(set(ids)) == 1


async def test_a_second_call_with_a_key_waits_until_the_session_is_open(
    model_dir, data_dir, monkeypatch
):
    async with running(model_dir, data_dir) as server:
        write, is_written, may_return = server.store.write, asyncio.Event(), asyncio.Event()

        async def return_late(*arguments):
            await write(*arguments)
            is_written.set()
            await may_return.wait()

        monkeypatch.setattr(server.store, "write", return_late)
        create = server.sessions.create
        first = asyncio.create_task(create(TENANT, SessionSpec(), "key"))
        await is_written.wait()
        second = asyncio.create_task(create(TENANT, SessionSpec(), "key"))
        await asyncio.wait([second], timeout=0.1)
        may_return.set()
        assert await first == await second


async def test_an_idempotency_key_gives_one_copy_after_an_interrupted_one(
    model_dir, data_dir, monkeypatch
):
    def refuse(place: str) -> None:
        if place == "before commit":
            raise OSError(28, "No space left on device")

    async def copied(server: Server, source: str) -> str:
        with monkeypatch.context() as full:
            if is_full:
                full.setattr("planish.server.durable.store.crash_point", refuse)
            return await server.stored_runs.copy_alone(TENANT, source, None, "key")

    is_full = True
    async with running(model_dir, data_dir) as server:
        source = await (await (await Client.start(server)).model()).save("a")
        with pytest.raises(StorageError):
            await copied(server, source)
        is_full = False
        assert await rows(server, SessionRow) == 1  # that of the source's model
    paths = []
    for _ in range(2):
        async with running(model_dir, data_dir) as server:
            paths += [await copied(server, source) for _ in range(2)]
            listed = (await server.runs.list_checkpoints(TENANT)).items
            assert {item.tinker_path for item in listed} == {source, paths[0]}
    assert len(set(paths)) == 1


async def test_an_idempotency_key_with_another_request_is_rejected(model_dir, data_dir):
    """It made a second session, or a copy with another time to live, without a word."""
    async with running(model_dir, data_dir) as server:
        model = await (await Client.start(server)).model()
        first, second = await model.save("a"), await model.save("b")
        copy = await server.stored_runs.copy_alone(TENANT, first, 60, "copy")
        session = await server.sessions.create(TENANT, SessionSpec(["x"]), "session")
        before = await rows(server, SessionRow)
        for call in (
            lambda: server.stored_runs.copy_alone(TENANT, second, 60, "copy"),
            lambda: server.stored_runs.copy_alone(TENANT, first, None, "copy"),
            lambda: server.sessions.create(TENANT, SessionSpec(["y"]), "session"),
            lambda: server.sessions.create(TENANT, SessionSpec(["y"]), "copy"),
            lambda: server.stored_runs.copy_alone(TENANT, first, 60, "session"),
        ):
            with pytest.raises(KeyReused, match="X-Idempotency-Key"):
                await call()
        assert await server.stored_runs.copy_alone(TENANT, first, 60, "copy") == copy
        assert await server.sessions.create(TENANT, SessionSpec(["x"]), "session") == session
        assert await rows(server, SessionRow) == before


async def test_a_copy_that_fails_leaves_no_session(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(max_storage_bytes=50_000)) as server:
        model = await (await Client.start(server)).model()
        path = await model.save("a")
        before = await rows(server, SessionRow)
        for source, error in (
            (path, BadRequest),
            ("tinker://nobody:train:0/weights/a", NotFound),
        ):
            for key in (None, "key"):
                with pytest.raises(error):
                    await server.stored_runs.copy_alone(TENANT, source, None, key)
        assert await rows(server, SessionRow) == before


async def test_the_sum_of_sizes_reads_no_rows(tmp_path):
    store = Store(tmp_path)
    plan = await store.read(
        lambda db: db.execute(
            "EXPLAIN QUERY PLAN SELECT SUM(bytes) FROM sessions WHERE tenant = ?", ["t"]
        ).fetchall()
    )
    assert "COVERING INDEX" in plan[0]["detail"]
    store.close()


def test_limits_name_their_tenant_setting():
    with pytest.raises(UserError, match="max_models"):
        ServerSettings(max_models=0)
