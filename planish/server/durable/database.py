"""The directory of a server's database: opened, locked and private.

If the database is missing but other files of a server exist, it is not opened. A new, empty
database would name none of these files, so the start would delete them.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import stat
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from planish.errors import DamagedFileError, StorageError, UserError
from planish.files import make_directory, write_remedy
from planish.server.durable.schema import SCHEMA, VERSION
from planish.server.results import OUT_OF_MEMORY

PRIVATE_PREFIX = "_planish."
"""The beginning of the names of checkpoints that the server makes for itself."""
DATABASE, BODIES = "server.db", "bodies"
_DIRECTORY_MODE, _FILE_MODE = 0o700, 0o600
_SPARE_FILE, _SPARE_BYTES = ".server.spare", 1 << 20
_WAL_PIECE_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class Database:
    """The SQLite database of a data directory, locked by this process until `close`."""

    def __init__(self, directory: Path) -> None:
        """Open and lock the directory.

        Raise UserError if another process uses it, or if its database has another version. Raise
        DamagedFileError if the database is damaged, or missing while other files of a server exist.
        Raise StorageError if the disk refuses access.
        """
        self.directory = directory
        self._lock = FileLock(directory / ".server.lock", thread_local=False)
        try:
            for path in (directory, directory / BODIES):
                make_directory(path, _DIRECTORY_MODE)
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(
                f"data_dir={directory}: another server is using it; stop that server, or give "
                "another directory"
            ) from error
        except OSError as error:
            raise StorageError(
                f"data_dir={directory}: {error}; give a directory that can be written to"
            ) from error
        self._connections: list[sqlite3.Connection] = []
        """All open connections."""
        try:
            self._check_complete()
            self._make_private()
            self.connection = self._open_with_spare()
            self._create_spare()
        except (OSError, sqlite3.DatabaseError) as error:
            self.close()
            raise self.error_for_operator(error) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections, and unlock the directory."""
        for connection in self._connections:
            connection.close()
        self._lock.release()

    def connect(self) -> sqlite3.Connection:
        """Return a new connection, which is open until `close`."""
        connection = sqlite3.connect(
            self.directory / DATABASE, isolation_level=None, check_same_thread=False, timeout=30
        )
        self._connections.append(connection)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA temp_store = MEMORY")  # a full /tmp must not fail a transaction
        connection.row_factory = sqlite3.Row
        return connection

    def error_for_operator(self, error: Exception) -> Exception:
        """Return the error to show to the operator for an error of SQLite or the disk."""
        if type(error) is sqlite3.DatabaseError:
            # SQLite reports a read that failed with EIO as damage, too.
            return DamagedFileError(
                f"data_dir={self.directory}: {DATABASE} is damaged, or the disk failed to read it "
                f"({error}); stop the server, check the disk, and start the server again; if this "
                "error stays, restore the directory from a backup"
            )
        if _is_lack_of_memory(error):
            return StorageError(OUT_OF_MEMORY)
        remedy = "free space there, or grant the permissions it needs"
        if isinstance(error, OSError):
            remedy = write_remedy(error, remedy)
        return StorageError(f"the server cannot use {self.directory} ({error}); {remedy}")

    def _check_complete(self) -> None:
        """Raise DamagedFileError if the database is missing or empty, but other files of a server
        exist. This must run before SQLite opens the database. SQLite creates a missing database,
        and removes the log of an empty one.
        """
        database = self.directory / DATABASE
        if database.is_file() and database.stat().st_size:
            return
        log = database.with_name(DATABASE + "-wal")
        others = [
            *(self.directory / BODIES).iterdir(),
            *self.directory.glob(f"*/*/{PRIVATE_PREFIX}*"),
        ]
        if others or (log.is_file() and log.stat().st_size):
            raise DamagedFileError(
                f"data_dir={self.directory}: {DATABASE} is "
                f"{'empty' if database.is_file() else 'missing'}, but other files of a server are "
                f"there{f', such as {others[0].relative_to(self.directory)}' if others else ''}; "
                "restore the whole directory from a backup, or start with another one (`planish "
                "checkpoints --data-dir` still finds the checkpoints in this one)"
            )

    def _make_private(self) -> None:
        """Create the database if it is missing, and remove other users' access to the directory and
        the database, whatever the umask is. The database contains prompts and training data.
        """
        database = self.directory / DATABASE
        database.touch(_FILE_MODE)  # SQLite gives its log the mode of the database
        for path in (self.directory, self.directory / BODIES, *self.directory.glob(DATABASE + "*")):
            mode = stat.S_IMODE(path.stat().st_mode)
            private_mode = mode & ~0o077
            if mode == private_mode:
                continue
            try:
                path.chmod(private_mode)
            except OSError as error:
                _log.warning(
                    "%s can be used by other users of this machine (mode %04o), and this cannot "
                    "be changed: %s",
                    path,
                    mode,
                    error,
                )
            else:
                _log.warning(
                    "%s could be used by other users of this machine (mode %04o); its mode is "
                    "%04o now",
                    path,
                    mode,
                    private_mode,
                )

    def _open_with_spare(self) -> sqlite3.Connection:
        """Open the database. If the disk has no space for that, delete the spare file and try
        again.
        """
        try:
            self._rewrite_wal()
            return self._open()
        except (OSError, sqlite3.OperationalError) as error:
            spare = self.directory / _SPARE_FILE
            if not is_disk_or_memory_error(error) or not spare.exists():
                raise
            while self._connections:
                self._connections.pop().close()
            spare.unlink()
            _log.warning(
                "%s: the database could not be opened (%s), so the spare space was freed",
                self.directory,
                error,
            )
            self._rewrite_wal()
            return self._open()

    def _rewrite_wal(self) -> None:
        """Write SQLite's log once more in place, and sync it.

        An earlier process may have ended after a sync of the log failed. Then a part of the log is
        only in the page cache: Linux does not write it again at the next sync. SQLite would read
        this part as valid and append to it, so a power loss would lose all later transactions.
        """
        # Closing a file releases all POSIX locks of the process on it. SQLite has no locks on the
        # log file, so closing it here is safe.
        with (
            suppress(FileNotFoundError),
            open(self.directory / (DATABASE + "-wal"), "r+b", buffering=0) as log,
        ):
            position = 0
            while piece := os.pread(log.fileno(), _WAL_PIECE_BYTES, position):
                position += os.pwrite(log.fileno(), piece, position)
            os.fsync(log.fileno())

    def _create_spare(self) -> None:
        """Create a spare file, which reserves 1 MiB of disk space for the next start. SQLite needs
        free space to open a database, even to read it. Without the spare file, a server could not
        start on a completely full disk.
        """
        spare = self.directory / _SPARE_FILE
        if spare.exists() or shutil.disk_usage(self.directory).free < 4 * _SPARE_BYTES:
            return
        try:
            with open(spare, "xb") as file:
                os.fchmod(file.fileno(), _FILE_MODE)
                file.write(bytes(_SPARE_BYTES))  # a sparse file would reserve no blocks
                os.fsync(file.fileno())
        except OSError:
            spare.unlink(missing_ok=True)

    def _open(self) -> sqlite3.Connection:
        connection = self.connect()
        connection.executescript(
            "PRAGMA page_size = 16384; PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL;"
        )
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
        elif version != VERSION:
            raise UserError(
                f"data_dir={self.directory}: its database has version {version}, and this planish "
                f"reads version {VERSION}; use the planish that wrote it, or another data_dir"
            )
        return connection


def is_disk_or_memory_error(error: Exception) -> bool:
    """Return whether the cause of an error is the disk, the memory or a damaged database, and not
    the SQL statement.
    """
    if isinstance(error, OSError | MemoryError) or type(error) is sqlite3.DatabaseError:
        return True
    # SQLITE_ERROR means a wrong statement. An error that Python's sqlite3 module raised has no
    # code.
    return (
        isinstance(error, sqlite3.OperationalError)
        and getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_ERROR
    )


def _is_lack_of_memory(error: Exception) -> bool:
    """Return whether an error of Python, a file call or SQLite means that memory ran out."""
    if isinstance(error, sqlite3.Error):
        # sqlite3 raises MemoryError for SQLITE_NOMEM, but not for memory that a file call lacked.
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_IOERR_NOMEM
    is_refused_call = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return is_refused_call or isinstance(error, MemoryError)
