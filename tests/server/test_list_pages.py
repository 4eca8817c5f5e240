"""Lists of large records are cut by bytes, and a start reads no manifest."""

import asyncio

import pytest
from server_client import TENANT, Client, running

from planish.engine.checkpoints import files, store as checkpoint_store
from planish.errors import DamagedFileError
from planish.server.results import SessionSpec
from planish.server.server import Server
from planish.service import SaveWeightsForSampler

METADATA = {"key": "x" * 10_000}


@pytest.fixture
def small_pages(monkeypatch) -> None:
    for module in ("durable.records", "runs", "http.routes_sessions"):
        monkeypatch.setattr(f"planish.server.{module}.PAGE_BYTES", 25_000)


async def many_checkpoints(server: Server) -> list[str]:
    """Return the paths of five checkpoints with much metadata, newest first."""
    model = await (await Client.start(server)).model()
    return [await model.save(f"c{n}", user_metadata=METADATA) for n in range(5)][::-1]


async def test_a_page_of_checkpoints_is_cut_by_bytes(model_dir, data_dir, small_pages):
    async with running(model_dir, data_dir) as server:
        paths = await many_checkpoints(server)
        found: list[str] = []
        for offset, size in ((0, 2), (2, 2), (4, 1)):
            page = await server.runs.list_checkpoints(TENANT, None, 100, offset)
            assert (len(page.items), page.total) == (size, 5)
            assert page.limit == (size if size == 2 else 100)
            found += [item.tinker_path for item in page.items]
        assert found == paths
        [run] = (await server.runs.page(TENANT, 10, 0)).items
        assert (await server.runs.list_checkpoints(TENANT, run.training_run_id)).limit == 2
        # One item is returned, however large it is.
        model = await (await Client.start(server)).model()
        await model.save("large", user_metadata={"key": "x" * 50_000})
        assert len((await server.runs.list_checkpoints(TENANT, None, 100, 0)).items) == 1


async def test_a_page_of_runs_is_cut_by_bytes(model_dir, data_dir, small_pages):
    """A run shows the metadata of its last two checkpoints too."""
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        for _ in range(3):
            await (await client.model()).save("a", user_metadata=METADATA)
        for number in range(2):
            await client.model(user_metadata={"number": str(number), **METADATA})
        page = await server.runs.page(TENANT, 10, 0)
        assert [run.user_metadata["number"] for run in page.items] == ["1", "0"]
        assert (page.limit, page.total) == (2, 5)
        rest = await server.runs.page(TENANT, 10, 2)
        assert len(rest.items) == 2
        assert all(run.last_checkpoint is not None for run in rest.items)


async def test_the_last_checkpoint_of_each_kind_is_found(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        model = await (await Client.start(server)).model()
        await model.save("first")
        await model.save("last")
        for name in ("sampler", "external:program"):
            await model.run(SaveWeightsForSampler(model.model_id, name))
        run = await server.runs.run(TENANT, model.model_id)
        assert run.last_checkpoint is not None
        assert run.last_checkpoint.tinker_path.endswith("/weights/last")
        assert run.last_sampler_checkpoint is not None
        assert run.last_sampler_checkpoint.tinker_path.endswith("/sampler_weights/sampler")


async def test_a_start_reads_no_manifest_of_a_named_checkpoint(
    model_dir, data_dir, monkeypatch, caplog
):
    """63 KiB from one tenant became manifests that no start survived."""
    read: list[str] = []

    async with running(model_dir, data_dir) as server:
        paths = await many_checkpoints(server)
    huge, kept, *_ = paths
    directory = data_dir / "checkpoints" / huge.removeprefix("tinker://")
    with open(directory / "planish.json", "r+b") as manifest:
        manifest.truncate(files.MAX_MANIFEST_BYTES + 1)
    real = files.read_manifest

    def spy(directory):
        read.append(str(directory))
        return real(directory)

    monkeypatch.setattr(checkpoint_store, "read_manifest", spy)
    async with running(model_dir, data_dir) as server:
        assert not read
        assert len((await server.runs.list_checkpoints(TENANT)).items) == 5
        await server.checkpoint_maintenance.verify()
        assert len(set(read)) == 5
        with pytest.raises(DamagedFileError, match="more than the limit 4,194,304"):
            await server.checkpoints.info(TENANT, huge)
        assert (await server.checkpoints.info(TENANT, kept)).base_model
        await server.checkpoints.delete(TENANT, huge)
        assert not directory.exists()
    assert f"{huge} cannot be read" in caplog.text


async def test_the_verification_corrects_rows_of_interrupted_changes(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        path = await (await Client.start(server)).model()
        path = await path.save("a")
        true = (await server.runs.list_checkpoints(TENANT)).items
        await server.store.write(
            lambda transaction: (
                transaction.execute("UPDATE checkpoints SET expires = 4e9, bytes = 0").rowcount
            )
        )
    async with running(model_dir, data_dir) as server:
        while (await server.runs.list_checkpoints(TENANT)).items != true:
            await asyncio.sleep(0.01)


async def test_a_start_reads_no_texts_of_sessions_and_models(model_dir, data_dir):
    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        await server.sessions.create(TENANT, SessionSpec(user_metadata=METADATA))
        model = await client.model(user_metadata=METADATA)
        opened = server.models.get(model.model_id)
        assert opened is not None
        assert not opened.row.user_metadata
        await model.step()
    async with running(model_dir, data_dir) as server:
        opened = server.models.get(model.model_id)
        assert opened is not None
        assert not opened.row.user_metadata
        model.client.server = server
        await model.step()  # restores the model, with its metadata
        path = await model.save("a")
        info = await server.checkpoints.info(TENANT, path)
        assert info.checkpoint.user_metadata == METADATA
