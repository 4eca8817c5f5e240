"""The docstrings of everything that the reference of the site shows: each module, class, function
and method says what it is, what its arguments mean, the shapes of its arrays, and its errors.

The sources are parsed and not imported, so that the whole check takes a second.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from site_reference import API_PAGES

import planish
import planish.errors

ROOT = Path(__file__).parents[1]
Function = ast.FunctionDef | ast.AsyncFunctionDef

OBVIOUS = {
    "api_key",
    "base_url",
    "batch_size",
    "dataset",
    "group_size",
    "index",
    "loss_fn",
    "model_name",
    "seed",
    "split",
    "step",
}
"""Arguments that mean the same everywhere, and that the guides explain."""
PLAIN = re.compile(r"(int|float|str|bool)( \| None)?")
"""Types that do not say what an argument is. The name of a class does."""
ARRAY = re.compile(r"\b(Tensor|ndarray)\b")
SHAPE = re.compile(r"\[[^\]]*\]|any shape|a scalar")
"""How a docstring gives a shape. An argument such as `rewards_G` has it in its name."""


def source_of(name: str) -> tuple[Path, str]:
    """Return the file of a module or of a class or function, and its name there ("" for a module)."""
    module, inner = name, ""
    if not (ROOT / f"{name.replace('.', '/')}.py").exists() and not is_package(name):
        module, _, inner = name.rpartition(".")
    if module == "planish":  # which imports the clients from elsewhere
        found = getattr(planish, inner)
        module, inner = found.__module__, found.__name__
    path = ROOT / module.replace(".", "/")
    return (path / "__init__.py" if is_package(module) else path.with_suffix(".py")), inner


def is_package(module: str) -> bool:
    return (ROOT / module.replace(".", "/") / "__init__.py").exists()


def public_names(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, node) of the public classes, functions and methods."""
    for node in body:
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
            if node.name.endswith("_async"):
                continue  # the page says that it is the method without _async
            yield f"{prefix}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public_names(node.body, f"{prefix}.{node.name}")


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """All nodes of the reference by name: modules, classes, functions and methods."""
    found: dict[str, Any] = {}
    for page in API_PAGES.values():
        for name in page.names:
            path, inner = source_of(name)
            tree = ast.parse(path.read_text(encoding="utf-8"))
            nodes = dict(public_names(tree.body, path.stem))
            if inner:
                start = f"{path.stem}.{inner}"
                nodes = {k: v for k, v in nodes.items() if k == start or k.startswith(f"{start}.")}
                assert nodes, f"{path} has no {inner}"
            else:
                nodes[path.stem] = tree
            found |= {f"{name} > {key}": node for key, node in nodes.items()}
    return found


def functions(nodes: dict[str, Any]) -> Iterator[tuple[str, Function, str]]:
    for name, node in nodes.items():
        if isinstance(node, Function):
            yield name, node, ast.get_docstring(node) or ""


def arguments(function: Function) -> list[ast.arg]:
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [each for each in every if each.arg not in ("self", "cls")]


def without_docstring(nodes: dict[str, Any]) -> list[str]:
    return [name for name, node in nodes.items() if not ast.get_docstring(node)]


def unexplained_arguments(nodes: dict[str, Any]) -> list[str]:
    """An argument needs a type. If this is a plain one, the docstring has a word of its name."""

    def stems(text: str) -> set[str]:
        return {word.rstrip("s") for word in re.findall("[a-z0-9]+", text.lower())}

    return [
        f"{name}({argument.arg})"
        for name, function, docstring in functions(nodes)
        for argument in arguments(function)
        if argument.annotation is None
        or (
            PLAIN.fullmatch(ast.unparse(argument.annotation))
            and argument.arg not in OBVIOUS
            and not stems(argument.arg) & stems(docstring)
        )
    ]


def arrays_without_shape(nodes: dict[str, Any]) -> list[str]:
    return [
        name
        for name, function, docstring in functions(nodes)
        if not SHAPE.search(docstring)
        and any(
            annotation is not None and ARRAY.search(ast.unparse(annotation))
            for annotation in (
                function.returns,
                *(
                    each.annotation
                    for each in arguments(function)
                    if not re.search("_[A-Z]", each.arg)
                ),
            )
        )
    ]


def unnamed_errors(nodes: dict[str, Any]) -> list[str]:
    """An error of planish that a function raises itself is named in its docstring."""
    return [
        f"{name}: {node.exc.func.id}"
        for name, function, docstring in functions(nodes)
        for node in ast.walk(function)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and hasattr(planish.errors, node.exc.func.id)
        and node.exc.func.id not in docstring
    ]


CHECKS = [without_docstring, unexplained_arguments, arrays_without_shape, unnamed_errors]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_public_name_says_what_it_is(check: Callable[..., list[str]], reference):
    assert len(reference) > 600
    assert check(reference) == []


def test_each_lack_is_found():
    source = '''
class Plain:
    """A class."""
    def blank(self): pass
    def steps(self, num_steps: int, size: int, untyped) -> "torch.Tensor":
        """Take `num_steps` steps. Raises StorageError."""
        if size: raise UserError("no")
        raise StorageError("full")
    def total(self, rewards_G: "torch.Tensor", seed: int) -> float:
        """Return the sum of the rewards."""
    def _hidden(self, size: int): raise UserError("no")
'''
    nodes = dict(public_names(ast.parse(source).body, "m"))
    assert without_docstring(nodes) == ["m.Plain.blank"]
    assert unexplained_arguments(nodes) == ["m.Plain.steps(size)", "m.Plain.steps(untyped)"]
    assert arrays_without_shape(nodes) == ["m.Plain.steps"]
    assert unnamed_errors(nodes) == ["m.Plain.steps: UserError"]
