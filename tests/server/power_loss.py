"""A model of a disk that forgets, when the power fails, what was not synced.

`Disk` replays the records of disk_shim.c. For each file it knows the content at the last fsync and
every write after it. For each directory it knows the entries at the last fsync of the directory and
every change after it. `after_power_loss` returns one of the many trees that a file system may show
after the power came back:

* Writes that were not synced are dropped, kept or torn into sectors, in any combination and
  whatever their order.
* Changes of a directory that were not synced are dropped or kept in any combination, but changes of
  one name keep their order. A rename is one change. An fsync of a file does not sync its name.
* An fsync that failed loses what it should have synced: a later fsync that succeeds does not bring
  it to the disk, as on Linux.
* A new directory whose name was not synced is lost with all that it contains.

POSIX allows all of these. Common file systems order some of them, so a server that survives them
all relies on none of that.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_HEAD = struct.Struct("=IIQq")
CREATE, WRITE, TRUNCATE, MKDIR, RENAME, LINK, UNLINK, RMDIR, SYNC, OPEN, FAILED_SYNC = range(1, 12)


@dataclass(frozen=True)
class Record:
    """One change or sync, as disk_shim.c describes it."""

    kind: int
    inode: int
    offset: int
    payload: bytes

    @property
    def paths(self) -> list[str]:
        """The paths below the root, each beginning with a slash."""
        return [os.fsdecode(path) for path in self.payload.split(b"\0")[:-1]]


def read_log(path: Path) -> Iterator[Record]:
    """Yield the records of a log. The last one may be incomplete, and is left out then."""
    content = path.read_bytes() if path.exists() else b""
    at = 0
    while at + _HEAD.size <= len(content):
        kind, size, inode, offset = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        if at + size > len(content):
            return
        yield Record(kind, inode, offset, content[at : at + size])
        at += size


@dataclass(eq=False)
class _Write:
    """A write that was not synced; without data, a change of the size."""

    number: int
    offset: int
    data: bytes | None
    is_lost: bool = False
    """Whether the disk failed to take it. It is seen until the power fails."""

    def apply(self, content: bytearray) -> None:
        end = self.offset + len(self.data or b"")
        if len(content) < end:
            content.extend(bytes(end - len(content)))
        if self.data is None:
            del content[self.offset :]
        else:
            content[self.offset : end] = self.data


@dataclass
class _File:
    synced: bytearray = field(default_factory=bytearray)
    writes: list[_Write] = field(default_factory=list)
    seen: bytearray = field(default_factory=bytearray)
    """The content as the processes see it."""

    def write(self, write: _Write) -> None:
        write.apply(self.seen)
        self.writes.append(write)

    def sync(self, before: int) -> None:
        """Make the writes whose numbers are below `before` durable."""
        due = [write for write in self.writes if write.number < before and not write.is_lost]
        for write in due:
            write.apply(self.synced)
        self.writes = [write for write in self.writes if write not in due]

    def lose(self) -> None:
        """Note that an fsync failed."""
        for write in self.writes:
            write.is_lost = True


@dataclass
class _Change:
    """A change of a directory that was not synced: the new value of one or two names."""

    number: int
    values: dict[str, _File | _Directory | None]


@dataclass
class _Directory:
    entries: dict[str, _File | _Directory] = field(default_factory=dict)
    """As the processes see them."""
    synced: dict[str, _File | _Directory] = field(default_factory=dict)
    changes: list[_Change] = field(default_factory=list)

    def contents(self) -> dict[str, bytes]:
        """Return the synced content of the files of this directory."""
        return {
            name: bytes(node.synced)
            for name, node in self.synced.items()
            if isinstance(node, _File)
        }

    def change(self, number: int, values: dict[str, _File | _Directory | None]) -> None:
        _set(self.entries, values)
        self.changes.append(_Change(number, values))

    def sync(self, before: int) -> None:
        while self.changes and self.changes[0].number < before:
            _set(self.synced, self.changes.pop(0).values)


def _set(
    entries: dict[str, _File | _Directory], values: dict[str, _File | _Directory | None]
) -> None:
    for name, value in values.items():
        if value is None:
            entries.pop(name, None)
        else:
            entries[name] = value


@dataclass(frozen=True)
class Loss:
    """What a power loss does to changes that were not synced."""

    names: float
    """The share of directory changes that are kept."""
    data: float
    """The share of writes that are kept."""
    sector: int = 4096
    """The bytes that a write is torn into; 0: each write is kept or dropped as a whole."""

    def __str__(self) -> str:
        return f"names {self.names:.0%}, data {self.data:.0%}, sectors of {self.sector}"


LOSSES = (
    Loss(0, 0),
    Loss(0, 0),
    Loss(1, 0),
    Loss(0, 1),
    Loss(0.5, 0.5, 0),
    Loss(0.5, 0.5, 512),
    Loss(0.5, 0.5, 4096),
    Loss(1, 0.8, 512),
    Loss(0.8, 1, 0),
    Loss(0.9, 0.1, 512),
)
"""The kinds of power loss to choose from. The first one is the strictest, and comes twice."""


class Disk:
    """The state of a directory under the shim, with what is on the disk and what is not."""

    def __init__(self, root: Path) -> None:
        """Everything that `root` contains now is on the disk."""
        self.root = root.resolve()
        self._inodes: dict[int, _File | _Directory] = {}
        self._top = self._scanned(self.root)

    def replay(self, log: Path) -> None:
        """Apply the records of one process. Its numbers begin with 0."""
        for number, record in enumerate(read_log(log)):
            self._apply(number, record)
        self._settle_numbers()

    def check(self) -> None:
        """AssertionError if `root` is not as the processes must see it, so that a change was not
        recorded. A power loss would then lose it although it was synced.
        """
        self._check(self._top, self.root)

    def _check(self, directory: _Directory, path: Path) -> None:
        # SQLite changes its -shm file through a mapping, and rebuilds the file after a crash.
        found = {each.name: each for each in path.iterdir() if not each.name.endswith("-shm")}
        for name in found.keys() - directory.entries.keys():
            # A library may have renamed the file by a system call that the shim does not see.
            node = self._inodes.get(found[name].stat().st_ino)
            for old in [old for old, known in directory.entries.items() if known is node]:
                directory.change(-1, {old: None, name: node})
        known = {name for name in directory.entries if not name.endswith("-shm")}
        assert found.keys() == known, f"changes of {path} were not recorded: {found.keys() ^ known}"
        for name in known:
            match directory.entries[name]:
                case _Directory() as below:
                    self._check(below, path / name)
                case _File() as file:
                    content = (path / name).read_bytes()
                    assert content == file.seen, f"a write to {path / name} was not recorded"

    def after_power_loss(self, loss: Loss, rng: random.Random) -> _Directory:
        """Return the tree that is found when the power is back."""
        kept: dict[int, _File | _Directory] = {}
        return _surviving_directory(self._top, loss, rng, kept)

    def lose_power(self, loss: Loss, rng: random.Random) -> None:
        """Replace the content of `root` by what a power loss leaves. No process may use it."""
        tree = self.after_power_loss(loss, rng)
        for path in self.root.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        _write_tree(tree, self.root, {})
        self.__init__(self.root)

    def _settle_numbers(self) -> None:
        """Let what is not synced yet come before all records of the next process."""
        for node in self._inodes.values():
            for change in node.writes if isinstance(node, _File) else node.changes:
                change.number = -1

    def _scanned(self, path: Path) -> _Directory:
        found = _Directory()
        self._inodes[path.stat().st_ino] = found
        for entry in sorted(path.iterdir()):
            inode = entry.stat().st_ino
            if entry.is_dir():
                found.entries[entry.name] = self._scanned(entry)
            elif inode in self._inodes:  # a hard link
                found.entries[entry.name] = self._inodes[inode]
            else:
                content = _File(bytearray(entry.read_bytes()), seen=bytearray(entry.read_bytes()))
                self._inodes[inode] = found.entries[entry.name] = content
        found.synced = dict(found.entries)
        return found

    def _apply(self, number: int, record: Record) -> None:
        match record.kind:
            case 1 | 4:  # CREATE, MKDIR
                node = _File() if record.kind == CREATE else _Directory()
                self._inodes[record.inode] = node
                parent, name = self._entry(record.paths[0])
                parent.change(number, {name: node})
            case 2 | 3:  # WRITE, TRUNCATE
                file = self._inodes[record.inode]
                assert isinstance(file, _File)
                data = record.payload if record.kind == WRITE else None
                file.write(_Write(number, record.offset, data))
            case 5:  # RENAME
                old_parent, old = self._entry(record.paths[0])
                parent, name = self._entry(record.paths[1])
                if parent is not old_parent:
                    raise NotImplementedError(
                        f"{record.paths[0]} was renamed to {record.paths[1]}: Disk does not know "
                        "renames between directories"
                    )
                parent.change(number, {old: None, name: self._inodes[record.inode]})
            case 6:  # LINK
                parent, name = self._entry(record.paths[1])
                parent.change(number, {name: self._inodes[record.inode]})
            case 7 | 8:  # UNLINK, RMDIR
                parent, name = self._entry(record.paths[0])
                parent.change(number, {name: None})
            case 9:  # SYNC
                self._inodes[record.inode].sync(record.offset)
            case 10:  # OPEN
                self._notice_rename(number, record)
            case 11:  # FAILED_SYNC
                node = self._inodes[record.inode]
                if isinstance(node, _File):
                    node.lose()
            case _:
                raise ValueError(f"a record of the unknown kind {record.kind}")

    def _notice_rename(self, number: int, record: Record) -> None:
        """Add a rename that the shim did not see, when the file is opened under its new name."""
        node = self._inodes[record.inode]
        if node is self._top:
            return
        parent, name = self._entry(record.paths[0])
        if parent.entries.get(name) is not node:
            old = next(old for old, known in parent.entries.items() if known is node)
            parent.change(number, {old: None, name: node})

    def _entry(self, path: str) -> tuple[_Directory, str]:
        *above, name = path.strip("/").split("/")
        directory = self._top
        for part in above:
            found = directory.entries[part]
            assert isinstance(found, _Directory)
            directory = found
        return directory, name


def _surviving_directory(
    directory: _Directory, loss: Loss, rng: random.Random, known: dict[int, _File | _Directory]
) -> _Directory:
    """Return what is left of a directory. Files with several names are the same object again."""
    entries = dict(directory.synced)
    stuck: set[str] = set()
    for change in directory.changes:
        if stuck.isdisjoint(change.values) and rng.random() < loss.names:
            _set(entries, change.values)
        else:
            stuck.update(change.values)
    found = _Directory()
    for name, node in entries.items():
        if isinstance(node, _Directory):
            found.synced[name] = _surviving_directory(node, loss, rng, known)
        else:
            if id(node) not in known:
                known[id(node)] = _surviving_file(node, loss, rng)
            found.synced[name] = known[id(node)]
    return found


def _surviving_file(file: _File, loss: Loss, rng: random.Random) -> _File:
    content = bytearray(file.synced)
    for write in file.writes:
        if write.is_lost:
            continue
        if write.data is None or not loss.sector:
            if rng.random() < loss.data:
                write.apply(content)
            continue
        for start, piece in _sectors(write, loss.sector):
            if rng.random() < loss.data:
                _Write(write.number, start, piece).apply(content)
            elif rng.random() < loss.names * 0.5:
                # The new size is on the disk, and the data is not.
                end = start + len(piece)
                content.extend(bytes(max(0, end - len(content))))
    return _File(content)


def _sectors(write: _Write, size: int) -> Iterator[tuple[int, bytes]]:
    assert write.data is not None
    at, end = write.offset, write.offset + len(write.data)
    while at < end:
        until = min(end, at - at % size + size)
        yield at, write.data[at - write.offset : until - write.offset]
        at = until


def _write_tree(directory: _Directory, path: Path, written: dict[int, Path]) -> None:
    for name, node in directory.synced.items():
        target = path / name
        if isinstance(node, _Directory):
            target.mkdir(0o700)
            _write_tree(node, target, written)
        elif id(node) in written:
            os.link(written[id(node)], target)
        else:
            target.write_bytes(node.synced)
            target.chmod(0o600)  # the server warns of files that others can read
            written[id(node)] = target
