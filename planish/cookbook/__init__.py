"""The names of the public tinker_cookbook, for code that imports it and shall run without it.

    sed -i s/tinker_cookbook/planish.cookbook/ my_recipe.py

The modules are made from one table (planish/cookbook/table.py): each name is a name of planish, or
a small adapter. What is not there is refused when it is imported.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

from planish.cookbook.table import MODULES, REFUSED, CookbookModule
from planish.errors import UnsupportedError


class RefusedNameError(UnsupportedError, ImportError):
    """A name of the cookbook that planish does not have."""


class _Module(ModuleType):
    """A module of the table. A target is imported when its name is first asked for."""

    def __init__(self, name: str, described: CookbookModule, reason: str | None = None) -> None:
        super().__init__(name, described.difference)
        self.__path__ = []  # it holds submodules, none of them in a directory
        self._described = described
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._found(name)
        self.__dict__[name] = value
        return value

    def _found(self, name: str) -> Any:
        target = self._described.names.get(name)
        if target is not None:
            module, _, attribute = target.partition(":")
            return getattr(importlib.import_module(module), attribute)
        if self._described.passes_on is not None:
            module = importlib.import_module(self._described.passes_on)
            if hasattr(module, name):
                return getattr(module, name)
        reason = self._reason or "docs/porting.md lists what planish has of the cookbook"
        raise RefusedNameError(f"{self.__name__}.{name} is not offered: {reason}")


def _register(path: str, module: ModuleType) -> None:
    """Put `module`, and packages above it that the table does not name, where imports find them."""
    parent_path, _, name = path.rpartition(".")
    sys.modules[f"{__name__}.{path}"] = module
    parent = sys.modules.get(f"{__name__}.{parent_path}" if parent_path else __name__)
    if parent is None:
        parent = _Module(f"{__name__}.{parent_path}", CookbookModule())
        _register(parent_path, parent)
    parent.__dict__[name] = module


for _path, _described in sorted(MODULES.items()):
    _register(_path, _Module(f"{__name__}.{_path}", _described))
for _path, _reason in REFUSED.items():
    _register(_path, _Module(f"{__name__}.{_path}", CookbookModule(), _reason))
