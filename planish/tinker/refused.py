"""Placeholders for names of the SDK that planish does not support."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from planish.errors import UnsupportedError

NO_HTTP = "planish makes no HTTP request here; ServiceClient(base_url=...) connects to a server"


class Refused:
    """A type that cannot be instantiated. A script can import it, use it in annotations and pass it
    to isinstance. So a script that never instantiates it works.
    """

    reason = ""

    def __new__(cls, *arguments: object, **options: object) -> Any:
        raise UnsupportedError(f"{cls.__name__} is not offered: {cls.reason}")


def refused_type(name: str, reason: str) -> type[Refused]:
    """Return a type that raises UnsupportedError with `reason` when it is instantiated."""
    return type(name, (Refused,), {"reason": reason, "__doc__": f"Not offered: {reason}."})


class Alias(ModuleType):
    """A module that looks up its names in the module `target`."""

    def __init__(self, name: str, target: ModuleType) -> None:
        super().__init__(name, f"The names of {target.__name__}.")
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def add_submodules(package: ModuleType, names: list[str], target: ModuleType) -> None:
    """Make `import PACKAGE.NAME` work, with the names of `target` in it."""
    for name in names:
        full_name = f"{package.__name__}.{name}"
        alias = Alias(full_name, target)
        sys.modules[full_name] = alias
        if not hasattr(package, name):
            setattr(package, name, alias)
