"""Read a GGUF file, or the parts of a split one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader, ReaderTensor

from planish.errors import DamagedFileError, UnknownModelError

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""How llama.cpp names the parts of a split file: "NAME-00001-of-00003.gguf"."""


@dataclass(frozen=True)
class GGUFFile:
    """The contents of a GGUF file: metadata by key, tensors by name (quantized, memory-mapped).

    The parts of a split file are joined.
    """

    path: Path
    """The file; the first part of a split file."""
    metadata: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]

    @property
    def architecture(self) -> str:
        """The value of general.architecture, such as "llama"."""
        return str(self.metadata.get("general.architecture"))

    def field(self, name: str, default: Any = None) -> Any:
        """Return a metadata field of the architecture, such as "block_count".

        Raises DamagedFileError if the field is missing and there is no default.
        """
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise DamagedFileError(
                f"{self.path} has no {self.architecture}.{name}; get the file again"
            )
        return value


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of a split GGUF file, given the path of any of them.

    The parts need not exist. The result is [path] if the file's name is not that of a part.
    """
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    numbers = range(1, int(count) + 1)
    return [path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in numbers]


def read_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file. `path`: the file, or any part of a split file.

    Raises UnknownModelError if there is no file. Raises DamagedFileError if a file is truncated or
    not a GGUF file, or if a part is missing or is not the one that its name says.
    """
    path = Path(path)
    first = _read_file(path)
    count = first.metadata.get("split.count", 1)
    if count == 1:
        return first
    paths = part_paths(path)
    if len(paths) != count:
        raise DamagedFileError(
            f"{path} is one of {count} parts of a GGUF file, and its name does not say which; give "
            f"all parts their names again: NAME-00001-of-{count:05}.gguf to "
            f"NAME-{count:05}-of-{count:05}.gguf"
        )
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise DamagedFileError(
            f"{path} is one of {count} parts of a GGUF file, and {', '.join(missing)} is missing in "
            "its directory; copy the parts there"
        )
    parts = [_read_file(part) for part in paths]
    for number, part in enumerate(parts):
        found = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if found != (number, count):
            raise DamagedFileError(
                f"{part.path} says that it is part {found[0]} (counted from 0) of {found[1]}; get "
                "all parts of one file again"
            )
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise DamagedFileError(
            f"the {count} parts of {paths[0]} hold {len(tensors)} tensors instead of {expected}; "
            "get all parts of one file again"
        )
    return GGUFFile(paths[0], parts[0].metadata, tensors)


def _read_file(path: Path) -> GGUFFile:
    if not path.is_file():
        raise UnknownModelError(f"there is no GGUF file at {path}; check the path")
    try:
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        return GGUFFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
    except Exception as error:
        # GGUFReader indexes into the file without checks, so a damaged file can raise anything.
        raise DamagedFileError(
            f"{path} is not a readable GGUF file ({error}); it is truncated or altered"
        ) from error
