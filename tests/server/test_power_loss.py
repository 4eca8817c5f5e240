"""The simulated disk forgets what was not synced, and a server on it loses nothing that was
acknowledged.
"""

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from crash_run import CALM, SETTINGS, PowerLosses, differences, power_losses, run_round
from disk_shim import Shim, compiler, kill_between_calls, library
from power_loss import LOSSES, Disk, Loss
from wire_client import RequestRejected

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

STRICTEST = Loss(names=0, data=0)
ALL_KEPT = Loss(names=1, data=1)


def changed(tmp_path: Path, code: str, before: Mapping[str, str] | None = None) -> Disk:
    """Run Python code under the shim, in a directory with the files `before`. Return the disk."""
    root = tmp_path / "disk"
    root.mkdir()
    for name, text in (before or {}).items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    shim, disk = Shim(tmp_path / "shim", root), Disk(root)
    head = (
        "import os\n"
        "def write(name, text, sync=True, mode='w'):\n"
        "    with open(name, mode) as file:\n"
        "        file.write(text)\n"
        "        file.flush()\n"
        "        sync and os.fsync(file.fileno())\n"
        "def sync(name='.'):\n"
        "    handle = os.open(name, os.O_RDONLY)\n"
        "    os.fsync(handle)\n"
        "    os.close(handle)\n"
    )
    command = [sys.executable, "-S", "-c", head + code]
    subprocess.run(command, cwd=root, env=shim.environment(), check=True)
    disk.replay(shim.log)
    return disk


def left(disk: Disk, loss: Loss, seed: int = 0) -> dict[str, str]:
    """Let the power fail, and return the files that are left."""
    disk.lose_power(loss, random.Random(seed))
    return {
        str(path.relative_to(disk.root)): path.read_text()
        for path in disk.root.rglob("*")
        if path.is_file()
    }


def test_synced_files_with_synced_names_are_kept(tmp_path):
    disk = changed(tmp_path, "write('a', 'one'); sync(); write('b', 'two', sync=False); sync()")
    assert left(disk, STRICTEST) == {"a": "one", "b": ""}


def test_the_name_of_a_synced_file_is_lost_if_its_directory_was_not_synced(tmp_path):
    disk = changed(tmp_path, "write('a', 'one')")
    assert left(disk, STRICTEST) == {}


def test_a_new_directory_whose_name_was_not_synced_is_lost_with_its_files(tmp_path):
    disk = changed(tmp_path, "os.mkdir('new'); write('new/a', 'one'); sync('new')")
    assert left(disk, STRICTEST) == {}


def test_nothing_is_lost_if_the_disk_wrote_everything(tmp_path):
    code = """
os.mkdir('new'); write('new/a', 'one', sync=False); os.rename('new/a', 'new/b')
write('c', 'three', sync=False); os.truncate('c', 2); os.unlink('old'); os.link('c', 'd')
write('e', '01', sync=False); write('e', '2', sync=False, mode='a')
with open('e', 'r+') as file: file.seek(1); file.write('x')
"""
    disk = changed(tmp_path, code, {"old": "old", "deep/kept": "kept"})
    expected = {"new/b": "one", "c": "th", "d": "th", "e": "0x2", "deep/kept": "kept"}
    assert left(disk, ALL_KEPT) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("os.rename('new', 'old')", {"old": "old", "new": "new"}),
        ("os.rename('new', 'old'); sync()", {"old": "new"}),
        ("os.unlink('old')", {"old": "old", "new": "new"}),
        ("os.unlink('old'); sync()", {"new": "new"}),
        ("write('old', 'more', sync=False, mode='a')", {"old": "old", "new": "new"}),
        ("write('old', '', sync=False)", {"old": "old", "new": "new"}),
        ("write('old', '')", {"old": "", "new": "new"}),
    ],
)
def test_changes_count_once_they_are_synced(tmp_path, code, expected):
    assert left(changed(tmp_path, code, {"old": "old", "new": "new"}), STRICTEST) == expected


def test_hard_links_stay_links(tmp_path):
    disk = changed(tmp_path, "os.link('old', 'second'); sync()", {"old": "old"})
    assert left(disk, STRICTEST) == {"old": "old", "second": "old"}
    assert (disk.root / "old").stat().st_ino == (disk.root / "second").stat().st_ino


def test_writes_are_torn_into_sectors_that_survive_in_any_order(tmp_path):
    disk = changed(tmp_path, "write('old', 'b' * 4096, mode='r+', sync=False)", {"old": "a" * 4096})
    found = set()
    for seed in range(40):
        tree = disk.after_power_loss(Loss(0, 0.5, 512), random.Random(seed))
        content = tree.contents()["old"]
        sectors = [content[at : at + 512] for at in range(0, len(content), 512)]
        assert all(sector in (b"a" * 512, b"b" * 512) for sector in sectors)
        found.add(content)
    assert len(found) > 30
    assert any(content.startswith(b"a") and content.endswith(b"b") for content in found)


def test_with_ignored_syncs_nothing_is_on_the_disk(tmp_path):
    root = tmp_path / "disk"
    root.mkdir()
    shim, disk = Shim(tmp_path / "shim", root), Disk(root)
    shim.fields.ignores_syncs = 1
    code = (
        "import os; a = open('a', 'w'); a.write('a'); a.flush(); os.fsync(a); "
        "os.fsync(os.open('.', 0))"
    )
    subprocess.run([sys.executable, "-S", "-c", code], cwd=root, env=shim.environment(), check=True)
    disk.replay(shim.log)
    assert left(disk, STRICTEST) == {}


def test_a_rename_by_a_library_that_calls_the_kernel_itself_is_seen(tmp_path):
    code = """
import ctypes
write('aside', 'new')
assert ctypes.CDLL(None).syscall(ctypes.c_long(82 if os.uname().machine == 'x86_64' else 38),
    *((b'aside', b'a') if os.uname().machine == 'x86_64' else (-100, b'aside', -100, b'a'))) == 0
sync('a'); sync()
"""
    assert left(changed(tmp_path, code), STRICTEST) == {"a": "new"}


def test_a_rename_before_the_end_of_a_process_is_seen(tmp_path):
    disk = changed(tmp_path, "write('aside', 'new'); sync()")
    (disk.root / "aside").rename(disk.root / "a")
    disk.check()
    assert left(disk, ALL_KEPT) == {"a": "new"}


def test_the_nth_call_can_fail_or_kill(tmp_path):
    root = tmp_path / "disk"
    root.mkdir()
    shim = Shim(tmp_path / "shim", root)
    code = (
        "for name in 'abc':\n"
        "    try: open(name, 'x').close()\n"
        "    except OSError as error: print(name, error.errno)\n"
    )

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-c", code]
        return subprocess.run(
            command, cwd=root, env=shim.environment(), capture_output=True, text=True
        )

    shim.fail(2, 28)
    assert run().stdout == "b 28\n"
    assert (shim.fields.failed, shim.fields.failed_call) == (1, b"create")
    shim.fail(1, 5, count=2)
    assert run().stdout == "a 5\nb 5\nc 17\n"
    shim.heal()
    shim.fail(1, 0)
    assert run().returncode == -signal.SIGKILL


@pytest.mark.parametrize("is_between_calls", [True, False])
def test_a_change_without_a_record_is_noticed(tmp_path, is_between_calls):
    root = tmp_path / "disk"
    root.mkdir()
    shim, disk = Shim(tmp_path / "shim", root), Disk(root)
    code = "while True: open('a', 'ab', buffering=0).write(b'more')"
    command = [sys.executable, "-S", "-c", code]
    shim.fields.record_delay = 20_000 if is_between_calls else 10**9
    with subprocess.Popen(command, cwd=root, env=shim.environment()) as process:
        # Without a record of its first call, the process waits for a quarter of an hour.
        size = 8 if is_between_calls else 0
        while not (root / "a").exists() or (root / "a").stat().st_size < size:
            time.sleep(0.01)
        if is_between_calls:
            kill_between_calls(process.pid, shim)
        else:
            process.kill()
    disk.replay(shim.log)
    if is_between_calls:
        disk.check()
    else:
        with pytest.raises(AssertionError, match="recorded"):
            disk.check()


WRITER = """
import asyncio, errno, os, signal, sys
from pathlib import Path
from disk_shim import Shim, configure
from planish.errors import StorageError
from planish.server.durable.store import Store

root, shim = Path(sys.argv[1]), Shim(Path(sys.argv[2]), Path(sys.argv[1]))
name, must_fail = sys.argv[3], sys.argv[4] == "True"
configure(*shim.files)

async def write(store):
    for number in range(1, 50):
        if must_fail:
            shim.fail(number, errno.EIO)
        key = f"{name} {number}"
        insert = lambda change: change.execute("INSERT INTO meta VALUES (?, x'')", (key,))
        try:
            await store.write(insert)
            print(key)
        except StorageError:
            if shim.fields.failed_call == b"fdatasync":
                return
        if not must_fail:
            return

asyncio.run(write(Store(root)))
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_commit_after_one_whose_sync_failed_in_a_killed_process_is_kept(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    disk = Disk(root)
    acknowledged = list[str]()
    for number, must_fail in enumerate([False, True, False]):
        shim = tmp_path / f"shim {number}"
        command = [sys.executable, "-c", WRITER, root, shim, f"process {number}", str(must_fail)]
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        ended = subprocess.run(
            command,
            env={**os.environ, "LD_PRELOAD": str(library()), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert ended.returncode == -signal.SIGKILL
        acknowledged += ended.stdout.splitlines()
        disk.replay(shim / "log 0")
        disk.check()
    assert acknowledged[-1] == "process 2 1"
    disk.lose_power(STRICTEST, random.Random(0))
    with closing(sqlite3.connect(root / "server.db")) as connection:
        found = {row[0] for row in connection.execute("SELECT key FROM meta")}
    assert set(acknowledged) <= found


SAVER = """
import errno, os, sys
from pathlib import Path
from disk_shim import Shim, configure
from planish.engine.checkpoints.replacement import rename_into_place

root, shim = Path(sys.argv[1]), Shim(Path(sys.argv[2]), Path(sys.argv[1]))
configure(*shim.files)
for number in range(1, int(sys.argv[3])):
    for kind in ("replaced", "new"):
        weights = root / f"{kind} {number}" / "run" / "weights"
        shim.fail(number, errno.EIO)
        try:
            rename_into_place(weights / "aside", weights / "name")
        except OSError:
            print(f"{kind} {number}")
        shim.heal()
"""


@pytest.mark.slow
def test_a_save_that_failed_does_not_come_back_after_a_power_loss(tmp_path):
    root, last = tmp_path / "data", 14
    kinds = {"replaced": {"name": "old", "aside": "new"}, "new": {"aside": "new"}}
    places = {f"{kind} {number}": kind for kind in kinds for number in range(1, last)}
    for place, kind in places.items():
        for name, text in kinds[kind].items():
            directory = root / place / "run" / "weights" / name
            directory.mkdir(parents=True)
            (directory / "file").write_text(text)
    disk, shim = Disk(root), tmp_path / "shim"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", SAVER, root, shim, str(last)],
        env={**os.environ, "LD_PRELOAD": str(library()), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    failed = set(ended.stdout.splitlines())
    assert failed < places.keys()
    disk.replay(shim / "log 0")
    for seed, loss in enumerate(LOSSES * 4):
        tree = disk.after_power_loss(loss, random.Random(seed))
        for place, kind in places.items():
            if place in failed:
                expected = {"replaced": "old", "new": None}[kind]
            else:
                expected = "new"
            assert found_checkpoint(tree.synced[place]) == expected, f"{place} after {loss}"


def found_checkpoint(checkpoints: Any) -> str | None:
    """Return what a reader finds under the name. It renames the previous checkpoint back if there
    is no other.
    """
    weights = checkpoints.synced["run"].synced["weights"].synced
    directory = weights.get("name") or weights.get(".name.previous")
    return None if directory is None else directory.contents()["file"].decode()


def test_the_clock_can_jump(tmp_path):
    shim = Shim(tmp_path / "shim", tmp_path)
    shim.fields.clock_offset = -(10**9) * 86400 * 365 * 20
    code = "import time, datetime; print(time.time(), datetime.datetime.now().year)"
    command = [sys.executable, "-S", "-c", code]
    said = subprocess.run(
        command, env=shim.environment(), capture_output=True, text=True, check=True
    )
    seconds, year = said.stdout.split()
    assert abs(time.time() - float(seconds) - 86400 * 365 * 20) < 60
    assert int(year) < time.gmtime().tm_year - 18


def reported(model_dir: Path, directory: Path, most: int, ignores_syncs: bool) -> list[str]:
    """Run a client's script through power losses, and return what it reports: a call that failed,
    or differences from an undisturbed run.
    """

    async def scenario() -> list[str]:
        calm = await run_round(model_dir, directory / "calm", iter(()), 0, CALM, 1)
        data_dir = directory / "data"
        power = PowerLosses(data_dir, 1, 500, ignores_syncs)
        try:
            seen = await run_round(model_dir, data_dir, power_losses(1), most, SETTINGS, 1, power)
        except (AssertionError, RequestRejected) as error:
            return [repr(error)]
        assert seen.kills.total() == most
        return differences(seen, calm)

    return asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_loses_nothing_in_power_losses(model_dir, tmp_path):
    assert reported(model_dir, tmp_path, 20, ignores_syncs=False) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_whose_syncs_have_no_effect_is_found_out(model_dir, tmp_path):
    assert reported(model_dir, tmp_path, 20, ignores_syncs=True) != []


def test_the_strictest_loss_is_among_those_tried():
    assert STRICTEST in LOSSES
