"""The names of the public tinker_cookbook, for code that has to run without that package.

    sed -i s/tinker_cookbook/planish.cookbook/ my_recipe.py

The modules are made from one table (planish/cookbook/table.py). It maps each name to a name of
planish or to a small adapter. Importing any other name raises RefusedNameError.
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
    """A module of the table. The target of a name is imported at the first use of the name."""

    def __init__(self, name: str, entry: CookbookModule, reason: str | None = None) -> None:
        super().__init__(name, entry.difference)
        self.__path__ = []  # this makes it a package, whose submodules are not files
        self._entry = entry
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._look_up(name)
        self.__dict__[name] = value
        return value

    def _look_up(self, name: str) -> Any:
        target = self._entry.names.get(name)
        if target is not None:
            module, _, attribute = target.partition(":")
            return getattr(importlib.import_module(module), attribute)
        if self._entry.fallback is not None:
            module = importlib.import_module(self._entry.fallback)
            if hasattr(module, name):
                return getattr(module, name)
        reason = self._reason or "docs/reference/porting.md lists what planish has of the cookbook"
        raise RefusedNameError(f"{self.__name__}.{name} is not offered: {reason}")


def _register(path: str, module: ModuleType) -> None:
    """Add `module` to sys.modules, with its parent packages if the table does not have them."""
    parent_path, _, name = path.rpartition(".")
    sys.modules[f"{__name__}.{path}"] = module
    parent = sys.modules.get(f"{__name__}.{parent_path}" if parent_path else __name__)
    if parent is None:
        parent = _Module(f"{__name__}.{parent_path}", CookbookModule())
        _register(parent_path, parent)
    parent.__dict__[name] = module


for _path, _entry in sorted(MODULES.items()):
    _register(_path, _Module(f"{__name__}.{_path}", _entry))
for _path, _reason in REFUSED.items():
    _register(_path, _Module(f"{__name__}.{_path}", CookbookModule(), _reason))
