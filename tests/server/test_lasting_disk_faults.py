"""A disk that stays broken delays accepted requests, and fails none of them."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from typing import Any

import orjson
import pytest
from server_client import TENANT, Client, adam, gradient, running, sample

from planish.engine.checkpoint_loading import CheckpointLoader
from planish.errors import CheckpointError, StorageError
from planish.server.durable import retries
from planish.server.durable.retries import is_lasting_fault
from planish.server.durable.store import Store, StoredBody
from planish.server.results import Done, TryAgain, Unavailable
from planish.server.settings import ServerSettings
from planish.service import SaveWeightsForSampler


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retries, "_PAUSES", (0.0,) * 4)
    monkeypatch.setattr(retries, "_LONG_PAUSES", (0.05,))


class BrokenDisk:
    """Reads of bodies and loads of checkpoints fail while `is_broken`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_broken = False
        self.faults = 0
        body, read = Store.read_body, CheckpointLoader.read

        def broken_body(store: Store, stored: StoredBody) -> bytes:
            self.check()
            return body(store, stored)

        def broken_read(loader: CheckpointLoader, *arguments: Any) -> Any:
            self.check()
            return read(loader, *arguments)

        monkeypatch.setattr(Store, "read_body", broken_body)
        monkeypatch.setattr(CheckpointLoader, "read", broken_read)

    def check(self) -> None:
        if self.is_broken:
            self.faults += 1
            raise OSError(errno.EIO, "Input/output error")

    async def fail(self, times: int) -> None:
        self.faults = 0
        while self.faults < times:
            await asyncio.sleep(0.01)


async def test_accepted_requests_wait_for_the_disk(model_dir, data_dir, monkeypatch):
    disk = BrokenDisk(monkeypatch)

    async with running(model_dir, data_dir) as server:
        client = await Client.start(server)
        model = await client.model()
        await model.step()
        await model.run(gradient(model.model_id))
        server.stopping.set()
        waiting = await model.submit(adam(model.model_id))
    disk.is_broken = True
    async with running(model_dir, data_dir) as server:
        client.server = server
        await disk.fail(40)
        assert isinstance(await server.settlement.outcome(TENANT, waiting, 0.0), TryAgain)
        assert server.engine.is_healthy  # a restart would not help
        assert not server.intake.disk_is_full()  # one file may be damaged
    async with running(model_dir, data_dir) as server:  # a stop in between loses nothing
        client.server = server
        await disk.fail(10)
        disk.is_broken = False
        assert isinstance(await client.answer(waiting), Done)
        assert server.request_log.disk_faults._waiting_owners == {}


async def test_samples_wait_for_the_disk_without_a_turn(model_dir, data_dir, monkeypatch):
    """Samples of two samplers wait for their weights. Then new work is rejected, because the whole
    disk is broken, and other samples run.
    """
    disk = BrokenDisk(monkeypatch)

    settings = ServerSettings(adapter_memory_bytes=1, sampling_slots=1)
    async with running(model_dir, data_dir, settings) as server:
        client = await Client.start(server)
        model = await client.model()
        paths = [
            orjson.loads(await model.run(SaveWeightsForSampler(model.model_id, name)))["path"]
            for name in ("a", "b")
        ]
        samplers = [await client.sampler(None, path) for path in paths]
        base = await client.sampler()
        await server.adapter_cache.unload_idle(0)
        disk.is_broken = True
        unaffected = await server.sampling.submit(TENANT, 0, sample(base))
        waiting = [await server.sampling.submit(TENANT, 0, sample(one)) for one in samplers]
        await disk.fail(40)
        assert isinstance(await client.answer(unaffected.request_id), Done)
        assert server.intake.disk_is_full()
        with pytest.raises(Unavailable, match="full or broken"):
            server.intake.check_disk(0)
        disk.is_broken = False
        for one in waiting:
            assert isinstance(await client.answer(one.request_id), Done)
        assert not server.intake.disk_is_full()


@pytest.mark.parametrize(
    ("number", "lasts"),
    [
        (errno.EIO, True),
        (errno.ENOSPC, True),
        (errno.EROFS, True),
        (errno.EACCES, False),
        (None, False),
    ],
)
def test_only_faults_of_the_disk_last(number, lasts):
    def caused(error: Exception, cause: Exception) -> Exception:
        error.__cause__ = cause
        return error

    fault = OSError("no tokenizer") if number is None else OSError(number, "")
    assert is_lasting_fault(fault) is lasts
    assert is_lasting_fault(caused(CheckpointError(""), fault)) is lasts
    busy = sqlite3.OperationalError("disk I/O error")
    busy.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ if lasts else sqlite3.SQLITE_ERROR
    assert is_lasting_fault(caused(StorageError(""), busy)) is lasts
