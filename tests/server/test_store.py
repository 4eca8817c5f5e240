"""The store: atomic changes, group commit, large bodies in files, full disks, one owner."""

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from planish.errors import DamagedFileError, StorageError, UserError
from planish.server.durable.journal import requests_of_model
from planish.server.durable.store import BODIES, DATABASE, VERSION, Store, StoredBody, Transaction

LARGE = bytes(300_000)


def put(key: str, value: bytes = b""):
    return lambda transaction: (
        transaction.execute("INSERT INTO meta VALUES (?, ?)", (key, value)).rowcount
    )


def keys(connection: sqlite3.Connection) -> set[str]:
    return {row[0] for row in connection.execute("SELECT key FROM meta")}


def files(directory: Path) -> list[str]:
    return os.listdir(directory / BODIES)


def journal(name: str, body: bytes, seq: int = 1):
    def change(transaction: Transaction) -> None:
        stored = transaction.store_body(body)
        transaction.execute(
            "INSERT INTO requests (id, tenant, kind, owner, seq, state, accepted, body, body_file) "
            "VALUES (?, 't', 'k', 'o', ?, 'accepted', 0, ?, ?)",
            (name, seq, stored.inline, stored.file),
        )

    return change


async def test_writes_survive_closing(tmp_path):
    store = Store(tmp_path)
    assert await store.write(put("a")) == 1
    assert await store.read(keys) == {"a"}
    store.close()
    again = Store(tmp_path)
    assert await again.read(keys) == {"a"}
    again.close()


async def test_a_failing_change_is_rolled_back_alone(tmp_path):
    store = Store(tmp_path)

    def half(transaction: Transaction) -> None:
        put("half")(transaction)
        transaction.store_body(LARGE)
        raise ValueError("no")

    outcomes = await asyncio.gather(
        store.write(put("a")), store.write(half), store.write(put("b")), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [int, ValueError, int]
    assert await store.read(keys) == {"a", "b"}
    assert files(tmp_path) == []
    store.close()


async def test_many_changes_share_a_transaction(tmp_path, monkeypatch):
    store = Store(tmp_path)
    held = threading.Event()
    first = asyncio.ensure_future(store.write(lambda _: held.wait()))
    commits = []

    def commit(changes: list) -> Exception | None:
        commits.append(len(changes))
        return Store._commit(store, changes)

    monkeypatch.setattr(store, "_commit", commit)
    rest = [asyncio.ensure_future(store.write(put(str(index)))) for index in range(200)]
    await asyncio.sleep(0.01)
    held.set()
    await asyncio.gather(first, *rest)
    assert len(commits) <= 2, commits
    store.close()


async def test_large_bodies_are_files_that_come_and_go_with_their_rows(tmp_path):
    store = Store(tmp_path)
    await store.write(journal("small", b"small"))
    await store.write(journal("large", LARGE))
    (file,) = files(tmp_path)
    assert (tmp_path / BODIES / file).read_bytes() == LARGE

    def drop(transaction: Transaction) -> None:
        transaction.drop_file(file)
        transaction.execute("UPDATE requests SET body_file = NULL WHERE id = 'large'")

    await store.write(drop)
    assert files(tmp_path) == []
    store.close()


async def test_the_requests_of_a_model_are_in_the_order_of_their_numbers(tmp_path):
    store = Store(tmp_path)
    for seq in range(12):
        await store.write(journal(f"o:{seq}", b"", seq))
    found = await store.read(lambda connection: requests_of_model(connection, "o", after=7))
    assert [request.seq for request in found] == [8, 9, 10, 11]
    store.close()


async def test_orphaned_files_are_removed_at_the_next_start(tmp_path):
    store = Store(tmp_path)
    await store.write(journal("large", LARGE))
    store.close()
    (tmp_path / BODIES / "left").write_bytes(b"by a kill")
    again = Store(tmp_path)
    assert len(files(tmp_path)) == 1
    assert "left" not in files(tmp_path)
    again.close()


@pytest.fixture
def disk(monkeypatch) -> SimpleNamespace:
    """A disk that refuses commits while `is_full` is true, as it is at first."""
    disk = SimpleNamespace(is_full=True)

    def refuse(name: str) -> None:
        if disk.is_full and name == "before commit":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("planish.server.durable.store.crash_point", refuse)
    return disk


@pytest.mark.slow
async def test_a_full_disk_fails_writes_and_retries_keeps(tmp_path, disk):
    store = Store(tmp_path)
    kept = [store.write_with_retries(put("kept")), store.write_with_retries(put("kept too"))]
    with pytest.raises(StorageError, match="disk is full") as refused:
        await store.write(journal("large", LARGE))
    assert str(tmp_path) not in str(refused.value)  # a client reads it
    assert store.is_failing
    assert files(tmp_path) == []
    assert not any(future.done() for future in kept)
    disk.is_full = False
    await asyncio.gather(*kept)
    assert not store.is_failing
    await store.write(put("new"))
    assert await store.read(keys) == {"kept", "kept too", "new"}
    store.close()


async def test_changes_that_run_out_of_memory_are_repeated_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr("planish.server.durable.store._RETRY_SECONDS", 0.01)

    store = Store(tmp_path)
    tries = 0

    def needs_memory(transaction: Transaction) -> None:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise MemoryError
        put("first")(transaction)

    def is_second(transaction: Transaction) -> None:
        found = transaction.execute("SELECT key FROM meta").fetchall()
        assert [row[0] for row in found] == ["first"]
        put("second")(transaction)

    kept = [store.write_with_retries(needs_memory), store.write_with_retries(is_second)]
    await asyncio.gather(*kept)
    tries = 0
    with pytest.raises(StorageError, match="out of memory"):
        await store.write(needs_memory)
    await store.write(put("third"))
    assert await store.read(keys) == {"first", "second", "third"}
    store.close()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()])
async def test_a_read_that_the_machine_refuses_raises_storage_error(tmp_path, error):
    def refused(connection: object) -> None:
        raise error

    store = Store(tmp_path)
    with pytest.raises(StorageError, match="disk is full or cannot|out of memory"):
        await store.read(refused)
    store.close()


@pytest.mark.slow
async def test_an_unwritable_disk_rejects_writes_until_it_recovers(tmp_path, caplog):
    store = Store(tmp_path)
    # as on a file system that became read-only
    store._connection.execute("PRAGMA query_only = 1")
    with pytest.raises(StorageError, match="disk is full or cannot"):
        await store.write(put("a"))
    await asyncio.sleep(1.5)
    assert store.is_failing
    store._connection.execute("PRAGMA query_only = 0")
    await store.write_with_retries(put("b"))
    assert not store.is_failing
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert await store.read(keys) == {"b"}
    store.close()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are not told here")
async def test_statement_journals_are_kept_in_memory(tmp_path):
    def change(transaction: Transaction) -> list[str]:
        transaction.execute("UPDATE meta SET value = zeroblob(1000)")
        return [file for file in _open_files() if "etilqs" in file]

    store = Store(tmp_path)
    for index in range(300):
        await store.write(put(str(index), bytes(2000)))
    assert await store.write(change) == []
    store.close()


def _open_files() -> list[str]:
    """SQLite's temporary files are such that have no name any more, in TMPDIR."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread has closed it
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


@pytest.mark.slow
async def test_a_disk_error_is_cleared_by_the_next_successful_write(tmp_path, disk):
    store = Store(tmp_path)
    with pytest.raises(StorageError):
        await store.write(put("refused"))
    assert store.is_failing
    disk.is_full = False
    while store.is_failing:  # though nobody writes
        await asyncio.sleep(0.02)
    store.close()


@pytest.mark.slow
class FailsToCommit:
    """A connection whose commits report a full disk `failures` times. With `is_written`, the
    transaction is on the disk nevertheless, as when only the sync of SQLite's log fails.
    """

    def __init__(self, connection: sqlite3.Connection, failures: int, is_written: bool) -> None:
        self._connection, self.failures, self._is_written = connection, failures, is_written

    def execute(self, sql: str, *values):
        if sql != "COMMIT" or not self.failures:
            return self._connection.execute(sql, *values)
        self._connection.execute("COMMIT" if self._is_written else "ROLLBACK")
        self.failures -= 1
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    def __getattr__(self, name: str):
        return getattr(self._connection, name)


async def test_the_body_of_a_transaction_that_a_crash_may_complete_is_kept(tmp_path, monkeypatch):
    store = Store(tmp_path)
    monkeypatch.setattr(store, "_connection", FailsToCommit(store._connection, 1000, True))
    with pytest.raises(StorageError):
        await store.write(journal("one", LARGE))
    with pytest.raises(StorageError):  # writes no second file
        await store.write(journal("two", LARGE))
    copy = tmp_path.with_name("copy")  # what a crash leaves
    shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("*-shm", ".server.lock"))
    store.close()
    again = Store(copy)
    [found] = await again.read(requests_of_model, "o", 0)
    assert found.id == "one"
    place = again._connection.execute("SELECT body, body_file FROM requests").fetchone()
    assert again.read_body(StoredBody(*place)) == LARGE
    assert len(files(copy)) == 1
    again.close()


async def test_the_body_of_a_failed_transaction_is_removed_after_the_next_one(
    tmp_path, monkeypatch
):
    store = Store(tmp_path)

    monkeypatch.setattr(store, "_connection", FailsToCommit(store._connection, 1, False))
    with pytest.raises(StorageError):
        await store.write(journal("one", LARGE))
    assert len(files(tmp_path)) == 1
    await store.write(put("a"))
    assert files(tmp_path) == []
    store.close()


async def test_a_real_full_disk_raises_storage_error(tmp_path):
    """SQLite itself says that there is no more room."""
    store = Store(tmp_path)
    await store.write(put("before"))

    def shrink(transaction: Transaction) -> None:
        pages = transaction.execute("PRAGMA page_count").fetchone()[0]
        transaction.execute(f"PRAGMA max_page_count = {pages + 2}").fetchone()

    await store.write(shrink)
    kept = store.write_with_retries(put("kept", bytes(200_000)))
    with pytest.raises(StorageError):
        await store.write(put("refused", bytes(200_000)))
    assert await store.read(keys) == {"before"}
    store._connection.execute("PRAGMA max_page_count = 1000000")
    await kept
    assert await store.read(keys) == {"before", "kept"}
    store.close()


async def test_writes_that_wait_for_a_full_disk_fail_at_close(tmp_path, monkeypatch):
    store = Store(tmp_path)

    def refuse(name: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("planish.server.durable.store.crash_point", refuse)
    kept = store.write_with_retries(put("kept"))
    await asyncio.to_thread(store.close)
    with pytest.raises(StorageError):
        await kept


def test_two_servers_cannot_use_one_directory(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(UserError, match="another server"):
        Store(tmp_path)
    other = subprocess.run(
        [
            sys.executable,
            "-c",
            "from pathlib import Path; from planish.server.durable.store import Store; "
            f"Store(Path({str(tmp_path)!r}))",
        ],
        capture_output=True,
        text=True,
    )
    assert "another server" in other.stderr
    store.close()
    Store(tmp_path).close()


def test_a_database_of_another_version_is_rejected_unchanged(tmp_path):
    Store(tmp_path).close()
    connection = sqlite3.connect(tmp_path / DATABASE)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(
        UserError, match=f"has version 99, and this planish reads version {VERSION}"
    ):
        Store(tmp_path)
    connection = sqlite3.connect(tmp_path / DATABASE)
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.close()
    Store(tmp_path).close()


def test_an_impossible_directory_is_named_in_the_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="data_dir"):
        Store(tmp_path / "file" / "data")


@pytest.mark.parametrize("left", [None, b""])
@pytest.mark.parametrize(
    "other", ["bodies/00", "run/weights/_planish.snapshot.3/planish.json", "server.db-wal"]
)
def test_a_missing_database_beside_other_files_is_not_recreated(tmp_path, left, other):
    Store(tmp_path).close()
    (tmp_path / DATABASE).unlink()
    if left is not None:
        (tmp_path / DATABASE).write_bytes(left)
    (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / other).write_bytes(b"of the lost one")
    with pytest.raises(DamagedFileError, match=r"data_dir=.*server\.db is (missing|empty).*backup"):
        Store(tmp_path)
    assert (tmp_path / other).read_bytes() == b"of the lost one"


@pytest.mark.parametrize("table", ["sqlite_schema", "requests", "meta"])
async def test_a_damaged_database_is_named_in_the_error(tmp_path, table, caplog):
    Store(tmp_path).close()
    connection = sqlite3.connect(tmp_path / DATABASE)
    found = connection.execute(
        "SELECT rootpage FROM sqlite_schema WHERE name = ?", (table,)
    ).fetchone()
    connection.close()
    content = bytearray((tmp_path / DATABASE).read_bytes())
    begin = (found[0] - 1) * 16384 if found else 0
    content[begin : begin + 200] = bytes(200)
    (tmp_path / DATABASE).write_bytes(content)

    if table == "meta":  # which a start does not read
        store = Store(tmp_path)
        with pytest.raises(StorageError, match="database is damaged"):
            await store.read(lambda connection: connection.execute("SELECT * FROM meta").fetchall())
        with pytest.raises(StorageError, match="database is damaged"):
            await store.write(put("a"))
        store.close()
        assert [
            f"data_dir={tmp_path}: server.db is damaged" in text for text in caplog.messages[:2]
        ] == [
            True,
            True,
        ]
    else:
        with pytest.raises(DamagedFileError, match=r"server\.db is damaged"):
            Store(tmp_path)


async def test_a_failing_disk_is_logged_once(tmp_path, monkeypatch, caplog):
    def refuse(name: str) -> None:
        raise OSError(28, "No space left on device")

    store = Store(tmp_path)
    monkeypatch.setattr("planish.server.durable.store.crash_point", refuse)
    for key in "ab":
        with pytest.raises(StorageError):
            await store.write(put(key))
    monkeypatch.undo()
    await store.write_with_retries(put("c"))
    store.close()
    records = [record for record in caplog.records if record.name.startswith("planish.server")]
    assert [record.levelname for record in records] == ["ERROR", "WARNING"]
    assert "No space left" in caplog.text


async def test_free_pages_return_to_the_disk(tmp_path):
    store = Store(tmp_path)
    await store.write(put("a", bytes(5_000_000)))
    await store.write(lambda transaction: transaction.execute("DELETE FROM meta"))
    await store.write(lambda transaction: transaction.free_pages(10_000))
    pages = await store.read(
        lambda connection: connection.execute("PRAGMA page_count").fetchone()[0]
    )
    assert pages < 50
    store.close()
