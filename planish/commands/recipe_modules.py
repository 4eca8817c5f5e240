"""The module of a recipe that a command names, and its options."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from planish.errors import UserError
from planish.recipes.training_run import read_options


def import_recipe(recipe: str) -> ModuleType:
    """Import and return the module of a recipe: one of planish's (math_rl), a dotted name, or a .py
    file. Modules next to the recipe can be imported afterwards, as when `python` runs it.
    """
    path = Path(recipe)
    sys.path.insert(0, str(path.parent.absolute() if path.suffix == ".py" else Path.cwd()))
    if path.suffix == ".py":
        return _import_file(path)
    name = module_name(recipe)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the recipe imports is missing
        raise UserError(
            f"RECIPE {recipe}: there is no such recipe; give a name such as guess_number, a "
            "module, or a .py file"
        ) from error


def module_name(recipe: str) -> str:
    """Return the name of the module of a recipe that is not a file."""
    return recipe if "." in recipe else f"planish.recipes.{recipe}"


def options_type(module: ModuleType) -> Any:
    """Return the class of a recipe's options; None if it has none."""
    return getattr(module, "Options", None) or getattr(module, "Config", None)


def read_recipe_options(module: ModuleType, words: Sequence[str]) -> Any:
    """Return the options of a recipe from words such as seed=1. Raises UserError for a wrong one."""
    presets = getattr(module, "PRESETS", {})
    if hasattr(module, "with_env_defaults"):
        presets, words = module.with_env_defaults(words)
    return read_options(options_type(module), presets, words)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"RECIPE {path}: there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # option classes are looked up by their module's name
    spec.loader.exec_module(module)
    return module
