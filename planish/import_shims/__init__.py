"""Directories for PYTHONPATH, in which `tinker` and `tinker_cookbook` are packages of planish.

`planish run` puts `sdk` on PYTHONPATH, and `cookbook` too if the official cookbook is missing.
"""

import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType

SDK_DIRECTORY = Path(__file__).parent / "sdk"
COOKBOOK_DIRECTORY = Path(__file__).parent / "cookbook"


class _Redirect(MetaPathFinder, Loader):
    """An import hook: NAME and its submodules are the same module objects as those of TARGET."""

    def __init__(self, name: str, target: str) -> None:
        self._name = name
        self._target = target

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{self._name}."):
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        target = self._target + module.__name__.removeprefix(self._name)
        try:
            sys.modules[module.__name__] = importlib.import_module(target)
        except ModuleNotFoundError as error:
            if error.name != target:
                raise
            raise ModuleNotFoundError(
                f"planish has no {target}, so there is no {module.__name__} here", name=target
            ) from None


def redirect(name: str, target: str) -> None:
    """Make imports of the package `name` return the package `target` in this process."""
    sys.modules[name] = importlib.import_module(target)
    sys.meta_path.insert(0, _Redirect(name, target))
