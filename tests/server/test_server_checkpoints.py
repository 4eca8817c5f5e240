"""Checkpoints through the server: listed, described, kept, copied, downloaded; and training runs
and sessions.
"""

import asyncio
import errno
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from server_client import BASE, RANK, TENANT, Client, adam, gradient, make_core, running, state

from planish.errors import DamagedFileError
from planish.server.durable.checkpoints import CheckpointCatalog
from planish.server.durable.expiry_clock import ExpiryClock
from planish.server.results import BadRequest, Done, Failed, Gone, NotFound
from planish.server.settings import ServerSettings
from planish.service import CreateModel, LoraConfig, SaveWeights, SaveWeightsForSampler

AT_ONCE = ServerSettings(expiry_delay=1e-3)
"""What has expired is deleted soon after a start."""


async def test_lists_are_newest_first_and_in_pages(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        first, second = await client.model(user_metadata={"task": "a"}), await client.model()
        paths = [await first.save(name, user_metadata={"name": name}) for name in "ab"]
        await first.run(SaveWeightsForSampler(first.model_id, "s", 3600))
        paths += [f"tinker://{first.model_id}/sampler_weights/s", await second.save("c")]
        page = await server.runs.list_checkpoints(TENANT)
        assert [item.tinker_path for item in page.items] == paths[::-1]
        assert (await server.runs.list_checkpoints(TENANT, first.model_id)).total == 3
        part = await server.runs.list_checkpoints(TENANT, limit=2, offset=1)
        assert [item.tinker_path for item in part.items] == paths[2:0:-1]
        assert (part.total, part.offset, part.limit) == (4, 1, 2)
        assert page.items[3].user_metadata == {"task": "a", "name": "a"}
        assert page.items[1].expires_at is not None
        assert (page.items[3].size_bytes or 0) > 1000
        runs = await server.runs.page(TENANT, 10, 0)
        assert [item.training_run_id for item in runs.items] == [
            second.model_id,
            first.model_id,
        ]
        seen = runs.items[1]
        assert (seen.base_model, seen.lora_rank, seen.user_metadata) == (
            BASE,
            RANK,
            {"task": "a"},
        )
        assert seen.last_checkpoint is not None
        assert seen.last_checkpoint.tinker_path == paths[1]
        assert seen.last_sampler_checkpoint is not None
        with pytest.raises(NotFound):
            await server.runs.list_checkpoints(TENANT, "no:train:0")


async def test_a_checkpoint_can_be_described_kept_and_deleted(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        model = await (await Client.start(server)).model()
        path = await model.save("a", ttl_seconds=3600)
        info = await server.checkpoints.info(TENANT, path)
        assert (info.base_model, info.lora.rank) == (BASE, RANK)
        await server.checkpoints.set_ttl(TENANT, path, None)
        assert (await server.checkpoints.info(TENANT, path)).checkpoint.expires_at is None
        await server.checkpoints.set_ttl(TENANT, path, 7200)
        expires = (await server.checkpoints.info(TENANT, path)).checkpoint.expires_at
        assert expires is not None
        assert abs(expires.timestamp() - time.time() - 7200) < 300
        with pytest.raises(ValueError, match="ttl_seconds"):
            await server.checkpoints.set_ttl(TENANT, path, -1)
        await server.checkpoints.delete(TENANT, path)
        for call in (
            server.checkpoints.delete(TENANT, path),
            server.checkpoints.info(TENANT, path),
        ):
            with pytest.raises(NotFound):
                await call
        await model.save("a")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "a",
        "tinker://../../x/weights/a",
        "tinker://a/weights/..",
        "tinker://a/b/c",
        "/etc/passwd",
    ],
)
async def test_invalid_checkpoint_paths_are_rejected(model_dir, data_dir, path):
    async with running(model_dir, data_dir) as server:
        with pytest.raises((ValueError, NotFound)):
            await server.checkpoints.info(TENANT, path)
        with pytest.raises((ValueError, NotFound)):
            await server.checkpoints.delete(TENANT, path)


@pytest.mark.slow
async def test_an_expired_checkpoint_is_not_found(model_dir, data_dir):
    async with running(model_dir, data_dir, AT_ONCE) as server:
        client = await Client.start(server)
        model = await client.model()
        path = await model.save("a", ttl_seconds=1)
        kept = await model.save("b")
        time.sleep(1.1)
        server.expiry_clock.read()
        time.sleep(0.01)  # longer than `expiry_delay`
        with pytest.raises(NotFound):
            await server.checkpoints.info(TENANT, path)
        assert [
            item.tinker_path for item in (await server.runs.list_checkpoints(TENANT)).items
        ] == [kept]
        await server.cleanup.clean()
        assert not (data_dir / "checkpoints" / model.model_id / "weights" / "a").exists()


@pytest.mark.slow
async def test_a_checkpoint_saved_again_while_it_expires_stays(model_dir, data_dir):
    async with running(model_dir, data_dir, AT_ONCE) as server:
        client = await Client.start(server)
        model = await client.model()
        for name in "ab":
            await model.save(name, ttl_seconds=1)
        time.sleep(1.1)
        server.expiry_clock.read()
        time.sleep(0.01)  # longer than `expiry_delay`
        delete, deleting, saved = (
            server.engine.checkpoints.delete,
            asyncio.Event(),
            asyncio.Event(),
        )

        async def slow(path: str) -> None:
            deleting.set()
            await saved.wait()
            await delete(path)

        server.engine.checkpoints.delete = slow
        cleaning = asyncio.create_task(server.cleanup.clean())
        await deleting.wait()
        path = await model.save("b", overwrite=True)
        # its files are being deleted
        saving = await model.submit(SaveWeights(model.model_id, "a", overwrite=True))
        await asyncio.sleep(0.05)
        saved.set()
        await client.done(saving)
        await cleaning
        for kept in (path, path[:-1] + "a"):
            assert (await server.checkpoints.info(TENANT, kept)).checkpoint.expires_at is None
            assert (await server.downloads.files(TENANT, kept)).names


async def test_a_damaged_checkpoint_stays_listed_until_restored_or_deleted(
    model_dir, data_dir, caplog
):
    async with running(model_dir, data_dir) as server:
        model = await (await Client.start(server)).model()
        path, other = await model.save("a"), await model.save("b")
    manifest = data_dir / "checkpoints" / model.model_id / "weights" / "a" / "planish.json"
    content = manifest.read_bytes()
    manifest.write_bytes(b"{" + content)
    async with running(model_dir, data_dir) as server:
        assert {
            item.tinker_path for item in (await server.runs.list_checkpoints(TENANT)).items
        } == {
            path,
            other,
        }
        with pytest.raises(DamagedFileError, match=r"planish\.json") as refused:
            await server.checkpoints.info(TENANT, path)
        assert str(refused.value).startswith(
            f"checkpoints/{model.model_id}/weights/a/planish.json cannot be used"
        )
        await server.checkpoints.delete(TENANT, other)
    assert f"{path} cannot be read" in caplog.text
    manifest.write_bytes(content)
    async with running(model_dir, data_dir) as server:
        assert (await server.checkpoints.info(TENANT, path)).checkpoint.tinker_path == path
        manifest.write_bytes(b"")
        await server.checkpoints.delete(TENANT, path)
        assert not (await server.runs.list_checkpoints(TENANT)).items


@pytest.mark.slow
async def test_a_damaged_checkpoint_does_not_block_expiry_of_others(model_dir, data_dir):
    async with running(model_dir, data_dir, AT_ONCE) as server:
        model = await (await Client.start(server)).model()
        for name in "ab":
            await model.save(name, ttl_seconds=1)
        weights = data_dir / "checkpoints" / model.model_id / "weights"
        (weights / "a" / "planish.json").write_bytes(b"")
        time.sleep(1.1)
        server.expiry_clock.read()
        time.sleep(0.01)  # longer than `expiry_delay`
        await server.cleanup.clean()
        assert not weights.exists() or not list(weights.iterdir())


async def test_a_repeated_save_that_fails_leaves_its_name_free(model_dir, data_dir, monkeypatch):
    """The server ends after a save has written its files and before its row. The repeated save
    fails, because the disk is full. The files of the first attempt do not take the name.
    """
    written = asyncio.Event()

    async def never_return(*_: object) -> None:
        written.set()
        await asyncio.Event().wait()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    server = make_core(model_dir, data_dir)
    await server.start()
    client = await Client.start(server)
    model = await client.model()
    with monkeypatch.context() as interrupted:
        interrupted.setattr(CheckpointCatalog, "row_from_files", never_return)
        first = await model.submit(SaveWeights(model.model_id, "a"))
        await written.wait()
        await server.stop(0.1)
    with monkeypatch.context() as full:
        full.setattr("planish.engine.checkpoints.store.rename_into_place", refuse)
        server = make_core(model_dir, data_dir)
        await server.start()
        model.client = client = Client(server, client.session_id, samplers=1, models=1)
        failed = await client.answer(first)
        assert isinstance(failed, Failed)
        assert "No space left on device" in failed.message
    await model.step()
    path = await model.save("a")
    assert int(np.frombuffer(state(data_dir, path)["step"], np.int64)[0]) == 1
    taken = await client.answer(await model.submit(SaveWeights(model.model_id, "a")))
    assert isinstance(taken, Failed)
    assert "exists; give another name" in taken.message
    await server.stop(20)


async def test_of_two_saves_under_one_name_at_once_one_fails(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        requests = [await model.submit(SaveWeights(model.model_id, "a")) for _ in range(2)]
        first, second = [await client.answer(request) for request in requests]
        assert isinstance(first, Done)
        assert isinstance(second, Failed)
        assert "exists; give another name" in second.message


async def test_a_copy_belongs_to_a_new_run(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model(user_metadata={"renderer": "x"})
        await model.step()
        path = await model.save("a")
        copy = await server.stored_runs.copy(TENANT, path, client.session_id, 8, None)
        assert copy == f"tinker://{client.session_id}:train:8/weights/a"
        assert await server.stored_runs.copy(TENANT, path, client.session_id, 8, None) == copy
        before = state(data_dir, path)
        await server.checkpoints.delete(TENANT, path)
        assert state(data_dir, copy) == before
        second = await client.model(base_model=None, from_path=copy, with_optimizer=True)
        assert (await second.step())["adam_step"] == 2
        found = await server.runs.run(TENANT, f"{client.session_id}:train:8")
        assert (found.base_model, found.lora_rank, found.user_metadata) == (
            BASE,
            RANK,
            {"renderer": "x"},
        )
        other = await model.save("b")
        with pytest.raises(ValueError, match="already used by another model or by a copy"):
            await server.stored_runs.copy(TENANT, other, client.session_id, 8, None)
        with pytest.raises(ValueError, match="already used by another model or by a copy"):
            await server.stored_runs.copy(TENANT, other, client.session_id, 0, None)


async def test_concurrent_copies_into_one_run_do_not_mix(model_dir, data_dir, monkeypatch):
    """One copy wins, and its files, row and run agree. The other copies get an error."""
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        paths = []
        for number in range(2):
            model = await client.model(user_metadata={"number": str(number)})
            for _ in range(number):
                await model.step()
            paths.append(await model.save("a"))
        copy_files, both = server.engine.checkpoints.copy, asyncio.Event()
        begun, creations = 0, []
        run_id = f"{client.session_id}:train:8"
        creation = CreateModel(run_id, BASE, LoraConfig(RANK, 1))

        async def copy_together(*arguments) -> None:
            """Copy when both copies have begun, or after 0.5 s if the other one cannot."""
            nonlocal begun
            begun += 1
            creations.append(asyncio.create_task(server.models.create(TENANT, creation)))
            if begun == 2:
                both.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(both.wait(), 0.5)
            await copy_files(*arguments)

        monkeypatch.setattr(server.engine.checkpoints, "copy", copy_together)
        copy = partial(server.stored_runs.copy, TENANT, ttl_seconds=None)
        answers = await asyncio.gather(
            *(copy(path, client.session_id, 8) for path in paths),
            return_exceptions=True,
        )
        with pytest.raises(ValueError, match="already been used"):
            await creations[0]
        [number] = [index for index in (0, 1) if isinstance(answers[index], str)]
        copied = str(answers[number])
        assert state(data_dir, copied) == state(data_dir, paths[number])
        assert (await server.runs.run(TENANT, run_id)).user_metadata == {"number": str(number)}
        with pytest.raises(ValueError, match="already used by another model or by a copy"):
            await server.stored_runs.copy(TENANT, paths[1 - number], client.session_id, 8, None)


async def test_a_copy_that_nobody_waits_for_is_finished_before_the_next(
    model_dir, data_dir, monkeypatch
):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        first, second = await client.model(), await client.model()
        await second.step()
        paths = [await model.save("a") for model in (first, second)]
        copy_files, begun = server.engine.checkpoints.copy, asyncio.Event()

        async def copy_slowly(*arguments) -> None:
            begun.set()
            await asyncio.sleep(0.2)
            await copy_files(*arguments)

        monkeypatch.setattr(server.engine.checkpoints, "copy", copy_slowly)
        left = asyncio.create_task(
            server.stored_runs.copy(TENANT, paths[0], client.session_id, 8, None)
        )
        await begun.wait()
        left.cancel()
        with pytest.raises(ValueError, match="already used by another model or by a copy"):
            await server.stored_runs.copy(TENANT, paths[1], client.session_id, 8, None)
        copied = f"tinker://{client.session_id}:train:8/weights/a"
        assert state(data_dir, copied) == state(data_dir, paths[0])


async def test_a_download_token_opens_one_checkpoint_for_a_while(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        model = await (await Client.start(server)).model()
        path = await model.save("a")
        token = server.downloads.token(TENANT, path, 60)
        tenant, files = await server.downloads.files_of_token(token)
        assert tenant == TENANT
        assert {"adapter_model.safetensors", "adapter_config.json"} <= set(files.names)
        assert all(file.is_file() for file in files.paths.values())
        old = server.downloads.token(TENANT, path, -1)
        for false in (
            old,
            token[:-1],
            token + "0",
            "",
            "a.b",
            token.replace(".", ""),
            "\udc80",
        ):
            with pytest.raises(NotFound):
                await server.downloads.files_of_token(false)
        await server.checkpoints.delete(TENANT, path)
        with pytest.raises(NotFound):
            await server.downloads.files_of_token(token)


async def test_ending_a_session_removes_everything_but_named_checkpoints(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client, other = await Client.start(server), await Client.start(server)
        model = await client.model()
        await model.step()
        path, sampler = await model.save("a"), await model.publish()
        record = await server.sessions.record(TENANT, client.session_id)
        assert (record.training_run_ids, record.sampler_ids) == ([model.model_id], [sampler])
        assert record.ended is None
        last = [
            await model.submit(op) for op in (gradient(model.model_id, 9), adam(model.model_id))
        ]
        await server.sessions.finish(TENANT, client.session_id, "success", None)
        await server.sessions.finish(TENANT, client.session_id, "success", None)
        await server.sessions.members.wait_until_closed()
        for request_id in last:
            assert (await client.done(request_id)) is not None
        for call in (
            server.sessions.touch(TENANT, client.session_id),
            client.sample(sampler),
            client.model(),
            model.publish(),
        ):
            with pytest.raises(Gone):
                await call
        assert (await server.sessions.record(TENANT, client.session_id)).ended is not None
        assert [
            item.tinker_path for item in (await server.runs.list_checkpoints(TENANT)).items
        ] == [path]
        left = {file.name for file in (data_dir / "checkpoints").glob("*/*/*")}
        assert left == {"a"}
        assert server.adapter_cache.loaded_adapters() == []
        await server.sessions.touch(TENANT, other.session_id)
        assert (await server.sessions.page(TENANT, 10, 0)).items == [
            other.session_id,
            client.session_id,
        ]
        with pytest.raises(NotFound):
            await server.sessions.record(TENANT, "nothing")


@pytest.mark.slow
async def test_a_session_without_heartbeats_ends(model_dir, data_dir):
    async with running(model_dir, data_dir, ServerSettings(session_timeout=3)) as server:
        silent, heard = await Client.start(server), await Client.start(server)
        server.expiry_clock.read()
        time.sleep(3.1)
        await server.sessions.touch(TENANT, heard.session_id)
        await server.cleanup.clean()
        with pytest.raises(Gone, match="has sent nothing for too long"):
            await server.sessions.touch(TENANT, silent.session_id)
        await server.sessions.touch(TENANT, heard.session_id)


async def test_sessions_have_time_to_return_after_the_server_was_suspended(
    model_dir, data_dir, monkeypatch
):
    """The process was stopped for days."""
    waited = 0.0
    clock = SimpleNamespace(
        time=lambda: time.time() + waited, monotonic=lambda: time.monotonic() + waited
    )
    monkeypatch.setattr("planish.server.sessions.time", clock)

    async with running(model_dir, data_dir) as server:
        watch = ExpiryClock(clock.time, clock.monotonic)
        object.__setattr__(server.cleanup, "_expiry_clock", watch)
        silent, heard = await Client.start(server), await Client.start(server)
        watch.read()
        waited = 3 * 86400.0
        await server.cleanup.clean()
        await server.sessions.touch(TENANT, heard.session_id)
        for _ in range(7):
            waited += 100
            await server.cleanup.clean()
        with pytest.raises(Gone, match="has sent nothing for too long"):
            await server.sessions.touch(TENANT, silent.session_id)
        await server.sessions.touch(TENANT, heard.session_id)


@pytest.mark.slow
async def test_results_expire_and_published_samplers_use_bounded_space(model_dir, data_dir):
    settings = ServerSettings(
        result_retention=0.3,
        max_unnamed_sampler_bytes=100_000,
        result_memory_bytes=1,
        expiry_delay=1e-3,
    )
    async with running(model_dir, data_dir, settings) as server:
        client = await Client.start(server)
        model = await client.model()
        samplers = [await model.publish() for _ in range(4)]
        await client.sample(samplers[0], 0)
        request = f"{model.model_id}:1"
        await client.answer(request)
        await model.save("wait")  # behind the writing of the samplers
        server.expiry_clock.read()
        time.sleep(0.4)
        await server.cleanup.clean()
        with pytest.raises(Gone):
            await client.answer(request)
        with pytest.raises(Gone):
            await client.answer(f"{samplers[0]}:0")
        await client.sample(samplers[0], 1)  # it was used last
        with pytest.raises(Gone, match="save weights under a name"):
            await client.sample(samplers[1], 0)
        with pytest.raises(BadRequest):
            await model.submit(SaveWeightsForSampler(model.model_id, "x"), 1)


async def test_the_newest_checkpoints_of_each_run_are_kept(model_dir, data_dir):
    settings = ServerSettings(max_checkpoints_per_run=2)

    async with running(model_dir, data_dir, settings) as server:
        client = await Client.start(server)
        runs = [await client.model() for _ in range(2)]
        saved = {run.model_id: [await run.save(name) for name in "abcd"] for run in runs}
        first, second = (saved[run.model_id] for run in runs)
        await server.checkpoints.set_public(TENANT, first[0], True)
        sampler = await client.sampler(None, first[1])
        await server.cleanup.clean()
        left = {item.tinker_path for item in (await server.runs.list_checkpoints(TENANT)).items}
        assert left == {first[0], *first[2:], *second[2:]}
        for path in (first[1], *second[:2]):
            assert not (data_dir / "checkpoints" / path.removeprefix("tinker://")).exists()
        await client.sample(sampler)  # it has its own copy of the files
        newer = await runs[0].save("e")
        await server.cleanup.clean()
        left = {item.tinker_path for item in (await server.runs.list_checkpoints(TENANT)).items}
        assert left == {first[0], first[3], newer, *second[2:]}
