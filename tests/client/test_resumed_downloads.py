"""A download that breaks off is resumed from the last byte that arrived."""

from pathlib import Path

import pytest
from server_thread import BROKEN, LOST, ServerThread

from planish import ServiceClient
from planish.client import rest_connection
from planish.client.checkpoint_records import ServerRecords
from planish.client.remote_errors import ServerFaultError, ServerUnreachableError
from planish.server.http.downloads import _range


@pytest.fixture
def path(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(rest_connection, "_RETRY_SECONDS", 0.0)
    with ServiceClient(base_url=server.url) as service:
        client = service.create_lora_training_client("tiny", rank=2)
        return client.save_weights_for_sampler("a").result().path


def test_a_broken_download_continues(
    server: ServerThread, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    records = ServerRecords(server.url, None)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    resumed.mkdir()
    expected = {file.name: file.read_bytes() for file in records.download(path, whole)}
    size = len(expected["adapter_model.safetensors"])
    monkeypatch.setattr("planish.server.http.downloads._BLOCK_BYTES", size // 10)
    num_requests = 0

    def fault(path: str) -> str | None:
        nonlocal num_requests
        if not path.endswith("adapter_model.safetensors"):
            return None
        num_requests += 1
        return BROKEN if num_requests <= 8 else None

    monkeypatch.setattr(server.network, "fault", fault)
    assert {file.name: file.read_bytes() for file in records.download(path, resumed)} == expected
    assert num_requests == 9


@pytest.mark.parametrize("offset", [-64, 64])
def test_a_range_that_begins_elsewhere_does_not_damage_the_file(
    server: ServerThread, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int
):
    """Some proxies answer with a range of whole blocks."""
    records = ServerRecords(server.url, None)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    resumed.mkdir()
    expected = {file.name: file.read_bytes() for file in records.download(path, whole)}
    size = len(expected["adapter_model.safetensors"])
    monkeypatch.setattr("planish.server.http.downloads._BLOCK_BYTES", size // 4)
    faults = iter([BROKEN])

    def fault(path: str) -> str | None:
        return next(faults, None) if path.endswith("adapter_model.safetensors") else None

    def shifted(header: str, size: int) -> tuple[int, int, int]:
        status, start, end = _range(header, size)
        return status, start + offset, end

    monkeypatch.setattr(server.network, "fault", fault)
    monkeypatch.setattr("planish.server.http.downloads._range", shifted)
    if offset > 0:
        with pytest.raises(ServerFaultError, match="download the checkpoint again"):
            records.download(path, resumed)
    else:
        files = records.download(path, resumed)
        assert {file.name: file.read_bytes() for file in files} == expected


def test_a_download_that_never_continues_fails(
    server: ServerThread, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    records = ServerRecords(server.url, None)
    monkeypatch.setattr("planish.server.http.downloads._BLOCK_BYTES", 100)
    faults = iter([BROKEN])

    def fault(path: str) -> str | None:
        return next(faults, LOST) if path.endswith("adapter_model.safetensors") else None

    monkeypatch.setattr(server.network, "fault", fault)
    with pytest.raises(ServerUnreachableError):
        records.download(path, tmp_path)
    assert not list(tmp_path.glob(".*.part"))
