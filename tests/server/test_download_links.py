"""Signed download links: forged, expired and rotated ones, restarts, and how many run at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import orjson
import pytest
from starlette.datastructures import Headers

from planish.errors import DamagedFileError
from planish.server.durable import links
from planish.server.durable.links import KEY_FILE, LinkSigner
from planish.server.http.budgets import MAX_DOWNLOADS, MAX_TENANT_DOWNLOADS, DownloadSlots
from planish.server.http.downloads import OpenFile, download_response
from planish.server.results import NotFound, Tenant, Unavailable

PATH = "tinker://session:train:0/sampler_weights/a"


def test_a_link_outlives_a_restart(tmp_path: Path):
    token = LinkSigner(tmp_path).token(PATH, "alice", 60)
    assert LinkSigner(tmp_path).verify(token) == (PATH, "alice")
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]


def test_forged_links_are_rejected(tmp_path: Path):
    signer = LinkSigner(tmp_path)
    content, _, signature = signer.token(PATH, "alice", 60).partition(".")
    other = orjson.dumps([PATH, "bob", 1 << 60]).hex()
    forged = [
        f"{other}.{signature}",
        f"{content}.{signature[:-1]}",
        f"{content}.{signature.upper()}",
        f"{content}.",
        content,
        "",
        ".",
        "\udc80.\udc80",
        f"{content}.{signature}.{signature}",
        f" {content}.{signature}",
    ]
    for token in forged:
        with pytest.raises(NotFound, match="not signed by this server"):
            signer.verify(token)


def test_links_expire_at_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr(links.time, "time", lambda: now)
    signer = LinkSigner(tmp_path)
    token = signer.token(PATH, "alice", 60)
    now = 1059.0
    assert signer.verify(token) == (PATH, "alice")
    now = 1060.0
    with pytest.raises(NotFound, match="expired"):
        signer.verify(token)


def test_a_new_key_makes_older_links_invalid(tmp_path: Path):
    token = LinkSigner(tmp_path).token(PATH, "alice", 60)
    (tmp_path / KEY_FILE).unlink()
    rotated = LinkSigner(tmp_path)
    with pytest.raises(NotFound, match="key was replaced"):
        rotated.verify(token)
    assert rotated.verify(rotated.token(PATH, "alice", 60)) == (PATH, "alice")


def test_a_damaged_key_is_reported(tmp_path: Path):
    (tmp_path / KEY_FILE).write_bytes(b"short")
    with pytest.raises(DamagedFileError, match="has 5 bytes, not 32; restore"):
        LinkSigner(tmp_path)


def test_a_key_that_others_can_read_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    LinkSigner(tmp_path)
    (tmp_path / KEY_FILE).chmod(0o644)
    with caplog.at_level(logging.WARNING):
        LinkSigner(tmp_path)
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    assert "could be read by other users" in caplog.text


def test_without_a_place_for_the_key_links_are_valid_until_the_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(path: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(links.os, "fsync", full)
    signer = LinkSigner(tmp_path)
    assert signer.verify(signer.token(PATH, "alice", 60)) == (PATH, "alice")
    assert "No space left" in caplog.text


# Downloads at once


def test_one_tenant_does_not_take_all_downloads():
    slots, alice = DownloadSlots(), Tenant("alice")
    held = []
    for _ in range(MAX_TENANT_DOWNLOADS):
        with slots.slot(alice) as slot:
            held.append(slot.pop_all())
    with pytest.raises(Unavailable), slots.slot(alice):
        pass
    for number in range(MAX_DOWNLOADS - MAX_TENANT_DOWNLOADS):
        with slots.slot(Tenant(str(number))) as slot:
            held.append(slot.pop_all())
    with pytest.raises(Unavailable), slots.slot(Tenant("bob")):
        pass
    for slot in held:
        slot.close()
    assert slots.running.total() == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_download_closes_its_files_however_it_ends(tmp_path: Path, fails: bool):
    (tmp_path / "a").write_bytes(b"content")
    slots = DownloadSlots()
    with slots.slot(Tenant("alice")) as slot, open(tmp_path / "a", "rb") as file:
        response = download_response(
            [OpenFile("a", file, 7)], slot.pop_all(), True, True, Headers()
        )

        async def send(message: Mapping[str, object]) -> None:
            if fails:
                raise OSError("the client is gone")

        async def receive() -> dict[str, object]:
            await asyncio.sleep(60)
            return {}

        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        try:
            asyncio.run(response(scope, receive, send))
        except Exception:
            assert fails
        assert file.closed
    assert slots.running.total() == 0
