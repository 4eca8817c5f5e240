"""The data directory is closed to other users, and its new entries are durable."""

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_client import Client, running

from planish.engine.checkpoints import replacement
from planish.server.durable.store import BODIES, DATABASE, Store
from planish.server.results import Failed
from planish.service import SaveWeights


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_data_directory_is_private_whatever_the_umask(tmp_path, open_umask, caplog):
    store = Store(tmp_path / "data")
    assert [mode(path) for path in (store.directory, store.directory / BODIES)] == [0o700] * 2
    databases = sorted(store.directory.glob(DATABASE + "*"))
    assert len(databases) > 1  # with its log
    assert {mode(path) for path in databases} == {0o600}
    store.close()
    assert not caplog.records


def test_an_open_data_directory_is_closed_at_the_start_with_a_log_line(tmp_path, caplog):
    Store(tmp_path / "data").close()
    (tmp_path / "data").chmod(0o755)
    (tmp_path / "data" / DATABASE).chmod(0o644)
    with caplog.at_level(logging.WARNING):
        Store(tmp_path / "data").close()
    assert mode(tmp_path / "data") == 0o700
    assert mode(tmp_path / "data" / DATABASE) == 0o600
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "(mode 0755); its mode is 0700 now" in told[0]
    assert f"{DATABASE} could be used by other users of this machine (mode 0644)" in told[1]


async def test_the_first_save_of_a_run_syncs_its_new_directory_entries(
    model_dir, data_dir, monkeypatch
):
    synced: list[Path] = []

    async with running(model_dir, data_dir) as server:
        model = await (await Client.start(server)).model()
        checkpoints, sync = data_dir / "checkpoints", replacement.sync
        assert not checkpoints.exists()

        def spy(path: Path) -> None:
            synced.append(path)
            sync(path)

        monkeypatch.setattr(replacement, "sync", spy)
        monkeypatch.setattr("planish.files.sync", spy)
        await model.save("a")
        segment = checkpoints / model.model_id / "weights"
        for directory in (segment, *segment.parents[:3]):
            assert directory in synced, directory
        # Each of them is synced again, because a killed process may have made it: the parents
        # before the checkpoint is renamed into place, and its own directory after that.
        assert synced[-4:] == [segment.parent, checkpoints, data_dir, segment]
        synced.clear()
        await server.checkpoints.delete(model.client.tenant, f"tinker://{model.model_id}/weights/a")
        assert segment in synced


@pytest.mark.parametrize("failing", ["data", "checkpoints"])
async def test_a_save_after_a_failed_sync_syncs_the_directories_that_were_left(
    model_dir, data_dir, monkeypatch, failing
):
    synced: list[str] = []
    fails = False
    sync = replacement.sync

    def spy(path: Path) -> None:
        if fails and path.name == failing:
            raise OSError(5, "Input/output error")
        synced.append(path.name)
        sync(path)

    monkeypatch.setattr(replacement, "sync", spy)
    monkeypatch.setattr("planish.files.sync", spy)

    async with running(model_dir, data_dir) as server:
        model = await (await Client.start(server)).model()
        fails = True
        request = await model.submit(SaveWeights(model.model_id, "a"))
        answer = await model.client.answer(request)
        assert isinstance(answer, Failed)
        assert "Input/output error" in answer.message
        fails = False
        synced.clear()
        await model.save("a")
        assert {"data", "checkpoints", model.model_id, "weights"} <= set(synced)
