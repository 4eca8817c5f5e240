"""planish.cookbook has the names that the official cookbook's own recipes import."""

import ast
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planish.cookbook.table import MODULES, REFUSED
from planish.errors import UnsupportedError
from planish.tinker.refused import Refused

NAMES = (Path(__file__).parent / "names.txt").read_text().split()
"""What the recipes of tinker-cookbook 0.6.1 import from the cookbook and the SDK."""
WITH_AN_EXTRA = {"tinker_cookbook.eval.inspect_evaluators.InspectEvaluatorBuilder": "inspect_ai"}
CANNOT_BE_MADE = {
    "tinker_cookbook.distillation.sdft",
    "tinker_cookbook.image_processing_utils.get_image_processor",
    "tinker_cookbook.renderers.tml_v0.TmlV0Renderer",
    "tinker_cookbook.sandbox.modal_sandbox.ModalSandbox",
    "tinker_cookbook.sandbox.modal_sandbox.ModalSandboxPool",
}
"""They can be imported, and say why they are not offered when they are used."""


def found(name: str):
    """Return the object that an import of `name` gives by the porting rule."""
    package, _, rest = name.partition(".")
    mapped = f"planish.{'cookbook' if package == 'tinker_cookbook' else 'tinker'}"
    full = f"{mapped}.{rest}" if rest else mapped
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as error:
        if error.name != full:
            raise
    module, _, attribute = full.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_recipes_can_be_imported(name):
    needed = WITH_AN_EXTRA.get(name)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}; make test-extras runs it")
    value = found(name)
    refused = isinstance(value, type) and issubclass(value, Refused)
    assert not refused or name in CANNOT_BE_MADE


@pytest.mark.parametrize("name", sorted(CANNOT_BE_MADE))
def test_an_unsupported_name_explains_itself_when_used(name):
    value: Any = found(name)
    with pytest.raises(UnsupportedError, match=r"is not offered: .{10,}"):
        value.Config if name.endswith("sdft") else value("x")


def test_at_least_96_of_100_names_do_their_work():
    assert len(NAMES) == 133
    assert len(CANNOT_BE_MADE) / len(NAMES) < 0.04


def test_every_target_of_the_table_is_there():
    for path, module in MODULES.items():
        made = importlib.import_module(f"planish.cookbook.{path}")
        if path == "eval.inspect_evaluators":
            continue
        for name in module.names:
            assert getattr(made, name) is not None
        if module.fallback is not None:
            importlib.import_module(module.fallback)


@pytest.mark.parametrize("path", sorted(REFUSED))
def test_an_unsupported_module_explains_itself(path):
    module = importlib.import_module(f"planish.cookbook.{path}")
    with pytest.raises(ImportError, match=f"planish.cookbook.{path}.main is not offered: "):
        module.main  # noqa: B018


def test_an_unknown_name_is_rejected_with_a_link_to_the_list():
    module = importlib.import_module("planish.cookbook.rl.types")
    with pytest.raises(
        ImportError, match=r"rl\.types\.Nothing is not offered: docs/reference/porting\.md"
    ):
        module.Nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("planish.cookbook.nothing")


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in ("tinker", "tinker_cookbook"))


def test_the_names_are_those_of_the_installed_cookbook():
    spec = importlib.util.find_spec("tinker_cookbook")
    if spec is None or spec.origin is None or "planish" in spec.origin:
        pytest.skip("needs tinker-cookbook; make test-extras runs it")
    files = (Path(spec.origin).parent / "recipes").rglob("*.py")
    names = {
        name for path in files if not path.name.endswith("_test.py") for name in imported(path)
    }
    assert {n for n in names if not n.startswith("tinker_cookbook.recipes")} == set(NAMES)


def test_nothing_is_loaded_before_it_is_asked_for():
    program = (
        "import sys, planish.cookbook.rl.train; "
        "assert not {'torch', 'datasets', 'planish.training'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def rows_of_the_page() -> list[str]:
    """Return the table that docs/reference/porting.md must contain. Modules without a difference
    share the last row.
    """
    rows, equal = [], []
    for path, module in MODULES.items():
        ours = module.fallback or "planish.cookbook"
        place = "compatibility code" if ours.startswith("planish.cookbook") else f"`{ours}`"
        if module.difference:
            rows.append(f"| `{path}` | {place} | {module.difference} |")
        else:
            equal.append(f"`{path}`")
    return [*rows, f"| {', '.join(equal)} | `planish.cookbook` | |"]


def test_the_page_has_the_table():
    page = (Path(__file__).parents[2] / "docs/reference/porting.md").read_text()
    table = page.partition("<!-- modules -->\n")[2].partition("\n<!-- end of modules -->")[0]
    assert table.splitlines()[2:] == rows_of_the_page()
    for path, reason in REFUSED.items():
        assert f"| `{path}` | {reason} |" in page
