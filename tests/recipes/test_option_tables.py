"""The defaults of options and presets in the recipes' pages equal those in the code. A cell is
compared if it contains as many values as its row has names, each a number or a word. Other cells,
such as `none` or "the test split", are for people.
"""

import importlib
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from planish.recipes.training_run import read_options

PAGES = Path(__file__).parents[2] / "docs" / "recipes"
NEEDED = {"verifiers_rl": ["env_id=anything"]}
"""Options that have no default."""


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows_of(text: str) -> Iterator[tuple[list[str], str, str]]:
    """Yield (names, heading of the column, cell) for each column of defaults of each row, in tables
    of options.
    """
    for table in re.findall(r"^\| option \|.*(?:\n\|.*)+", text, re.MULTILINE):
        heading, _, *lines = table.splitlines()
        for line in lines:
            first, *rest = cells(line)
            names = re.findall(r"`([\w.]+)`", first)
            for column, cell in zip(cells(heading)[1:], rest, strict=True):
                if names and (column == "default" or column.startswith("`preset=")):
                    yield names, column, cell


def options_of(recipe: Any, arguments: list[str]) -> Any:
    presets = getattr(recipe, "PRESETS", {})
    if hasattr(recipe, "with_env_defaults"):
        presets, arguments = recipe.with_env_defaults(arguments)
    options = recipe.Options if hasattr(recipe, "Options") else recipe.Config
    return read_options(options, presets, arguments)


def is_told(text: str, value: Any) -> bool:
    """Return whether the text states the value. For a computed default (None) the text may say
    anything.
    """
    if value is None or not re.fullmatch(r"`?[\w.+-]+`?", text):
        return True
    word = text.strip("`")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return word.casefold() == str(value).casefold() or (value in ((), "") and word == "none")
    return re.fullmatch(r"[\d.e+-]+", word) is not None and float(word) == value


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_defaults_are_those_of_the_code(page: Path):
    recipe = importlib.import_module(f"planish.recipes.{page.stem}")
    for names, column, cell in rows_of(page.read_text()):
        texts = cell.split(", ")
        if len(texts) != len(names) or not cell:
            continue
        options = options_of(
            recipe, [*NEEDED.get(page.stem, []), *re.findall(r"preset=\w+", column)]
        )
        for name, text in zip(names, texts, strict=True):
            value = reduce(lambda part, field: getattr(part, field, None), name.split("."), options)
            assert is_told(text, value), f"{page.name}: {name} is {value!r} by {column}, not {text}"


def test_a_wrong_number_would_be_seen():
    table = (
        "| option | default | `preset=hard` | |\n|---|---|---|---|\n| `steps`, `rate` | 3, 1e-4 | "
        "all | how many |\n"
    )
    assert list(rows_of(table)) == [
        (["steps", "rate"], "default", "3, 1e-4"),
        (["steps", "rate"], "`preset=hard`", "all"),
    ]
    assert is_told("1e-4", 0.0001)
    assert is_told("the test split", 64)
    assert is_told("false", False)
    assert not is_told("3", 4)
    assert not is_told("none", 4)
    assert not is_told("chat", "bradley_terry")
