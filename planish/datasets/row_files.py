"""Read the rows of one file: JSON lines, a JSON array, CSV or parquet.

Text files may begin with a byte order mark, and may be compressed (.gz, .zst). Every row knows the
file and the line (or the number of the row) that it comes from. Nothing is guessed: cells of a CSV
file stay texts, except for JSON objects in columns of messages and tools. An object that has a key
twice is an error.
"""

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from planish.datasets.arrow_rows import MESSAGE_COLUMNS, read_parquet
from planish.errors import UserError

TEXT_SUFFIXES = (".jsonl", ".json", ".csv")
COMPRESSION_SUFFIXES = (".gz", ".zst")
FILE_SUFFIXES = (
    *TEXT_SUFFIXES,
    *(text + compression for text in TEXT_SUFFIXES for compression in COMPRESSION_SUFFIXES),
    ".parquet",
)
"""The endings of the files that are read."""
_MESSAGE_KEYS = frozenset({"role", "from", "messages", "prompt_conversation"})
"""Each message has "role" or "from"; the others are keys of objects that contain messages."""


class Row(dict[str, Any]):
    """The columns of a row, and where the row is (`location`), for error messages."""

    location: str
    directory: Path | None
    """The directory to which paths of images in the row are relative; None for a row of the hub."""

    def __init__(
        self, columns: Mapping[str, Any], location: str, directory: Path | None = None
    ) -> None:
        super().__init__(columns)
        self.location, self.directory = location, directory


def is_data_file(name: str) -> bool:
    """Return whether a file of this name can be read."""
    return name.endswith(FILE_SUFFIXES)


def read_file(path: Path) -> list[Row]:
    """Return the rows of a file. Raise UserError, which names the line or row, for a file that
    cannot be read.
    """
    if path.suffix == ".parquet":
        rows = enumerate(read_parquet(path), start=1)
        return [Row(row, f"{path}, row {number}", path.parent) for number, row in rows]
    text = _read_text(path)
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    if name.endswith(".csv"):
        return list(_csv_rows(text, path))
    is_array = text.lstrip()[:1] == "["
    return list(_array_rows(text, path) if is_array else _line_rows(text, path))


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    try:
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        elif path.suffix == ".zst":
            import zstandard

            # A stream has no size in its header, and a file may have several frames.
            with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as file:
                data = file.read()
    except Exception as error:  # zlib.error, EOFError, OSError and ZstdError have no common class
        raise UserError(
            f"{path} cannot be decompressed ({error}); compress or download the file again"
        ) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text ({error}); give JSON lines, a JSON array, CSV or a .parquet "
            "file"
        ) from error


def _line_rows(text: str, path: Path) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield _row(_parse(line, where, "write one object per line"), where, path)


def _array_rows(text: str, path: Path) -> Iterator[Row]:
    elements = _parse(text, str(path), "give one array of objects, or one object per line")
    for number, element in enumerate(elements, start=1):
        yield _row(element, f"{path}, row {number}", path)


def _parse(text: str, where: str, remedy: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); {remedy}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in keys if names.count(name) > 1)
        raise ValueError(f"an object has the key {repeated!r} twice")
    return keys


def _row(value: Any, where: str, path: Path) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object; write one object per row")
    return Row(value, where, path.parent)


def _cell(column: str, text: str) -> Any:
    """Return the value of a cell: None if it is empty, the messages of a column that holds messages
    as JSON, and otherwise its text.
    """
    if column in MESSAGE_COLUMNS and text[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            value = json.loads(text, object_pairs_hook=_unique_keys)
            objects = value if isinstance(value, list) else [value]
            if all(
                isinstance(each, dict) and not _MESSAGE_KEYS.isdisjoint(each) for each in objects
            ):
                return value
    return text or None


def _csv_rows(text: str, path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file with a header. An empty cell is null."""
    csv.field_size_limit(sys.maxsize)  # the default, 128 KiB, is less than many conversations
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header) or "" in header:
            raise UserError(f"{path}: the header is {header}; give every column a name of its own")
        for number, cells in enumerate(filter(None, reader), start=1):
            where = f"{path}, row {number}"
            if len(cells) != len(header):
                raise UserError(
                    f"{where} has {len(cells)} cells, and the header has {len(header)}; quote "
                    "cells that contain a comma or a line break"
                )
            values = {name: _cell(name, cell) for name, cell in zip(header, cells, strict=True)}
            yield Row(values, where, path.parent)
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num} is not CSV ({error})") from error
