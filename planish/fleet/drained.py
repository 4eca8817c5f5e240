"""The numbers of the drained replicas of a server, in a file of its data directory."""

import json
from collections.abc import Collection
from pathlib import Path

from planish.errors import UserError
from planish.files import write_atomically

_FILE = "drained_replicas.json"


def read_drained(data_dir: Path) -> frozenset[int]:
    """Return the numbers of the drained replicas. Raise UserError if the file is damaged."""
    path = data_dir / _FILE
    try:
        numbers = json.loads(path.read_text())
        if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
            raise ValueError("it is no list of integers")
    except FileNotFoundError:
        return frozenset()
    except ValueError as error:
        raise UserError(
            f"{path}: {error}; it has the numbers of drained replicas, such as [3]. Correct it, or "
            "remove it to start all replicas"
        ) from error
    return frozenset(numbers)


def write_drained(data_dir: Path, numbers: Collection[int]) -> None:
    """Write the numbers of the drained replicas."""
    write_atomically(data_dir / _FILE, json.dumps(sorted(numbers)))
