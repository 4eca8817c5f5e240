"""The cookbook's store classes, which read and write run directories."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from planish.errors import UnsupportedError
from planish.files import read_rows
from planish.runlog.run_directory import CHECKPOINTS, METRICS


class LocalStorage:
    """A directory of this machine."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser()

    def read(self, path: str) -> bytes:
        """Return the bytes of a file."""
        return (self.root / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        """Write a file, and create its directory if it is missing."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    def append(self, path: str, data: bytes) -> None:
        """Append to a file, and create its directory if it is missing."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "ab") as file:
            file.write(data)

    def exists(self, path: str) -> bool:
        """Return whether there is such a file or directory."""
        return (self.root / path).exists()

    def url(self, path: str = "") -> str:
        """Return the path of a file."""
        return str(self.root / path)


def storage_from_uri(uri: str, **options: Any) -> LocalStorage:
    """Return the directory of a path or a file:// URI. Raises UnsupportedError for another
    scheme.
    """
    parsed = urlparse(uri)
    if parsed.scheme not in ("", "file"):
        raise UnsupportedError(f"{uri}: only directories of this machine are read and written")
    return LocalStorage(parsed.path if parsed.scheme else uri)


class TrainingRunStore:
    """The rows of a run directory."""

    def __init__(self, storage: LocalStorage | str | Path, prefix: str = "") -> None:
        root = storage.root if isinstance(storage, LocalStorage) else Path(storage)
        self.directory = root / prefix

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl."""
        return list(self._rows(METRICS))

    def read_checkpoints(self) -> list[dict[str, Any]]:
        """Return the rows of checkpoints.jsonl."""
        return list(self._rows(CHECKPOINTS))

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        return (dict(row) for row in read_rows(self.directory / name))
