"""Names of the SDK that planish has nothing for."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from planish.errors import UnsupportedError

NO_HTTP = "no HTTP request is made; ServiceClient(base_url=...) reaches a server of planish"


class Refused:
    """A type that cannot be made. It can be imported, named in annotations and asked about with
    isinstance, so that code which never makes one works.
    """

    reason = ""

    def __new__(cls, *arguments: object, **options: object) -> Any:
        raise UnsupportedError(f"{cls.__name__} is not offered: {cls.reason}")


def refused_type(name: str, reason: str) -> type[Refused]:
    """Return a type of this name that raises UnsupportedError with `reason` when it is made."""
    return type(name, (Refused,), {"reason": reason, "__doc__": f"Not offered: {reason}."})


class Alias(ModuleType):
    """A module whose names are those of another one."""

    def __init__(self, name: str, target: ModuleType) -> None:
        super().__init__(name, f"The names of {target.__name__}.")
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def add_submodules(package: ModuleType, names: list[str], target: ModuleType) -> None:
    """Make `import PACKAGE.NAME` work, with the names of `target` in it."""
    for name in names:
        full = f"{package.__name__}.{name}"
        alias = Alias(full, target)
        sys.modules[full] = alias
        if not hasattr(package, name):
            setattr(package, name, alias)
