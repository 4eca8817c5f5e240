"""Measure how large the parts of the code are, and compare the numbers with their limits.

    python tools/code_size.py           print the numbers; fail if one is above its limit
    python tools/code_size.py --lower   also write the numbers that fell as new limits

The limits are in code_size.json. They only fall: a change that needs a larger class or file splits
it. Type-only imports count as imports. request_trace.py measures the way of a request.
"""

import argparse
import ast
import io
import json
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = Path(__file__).with_suffix(".json")
MAX_FILE_LINES = 400
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
Graph = Mapping[str, set[str]]


@dataclass(frozen=True)
class Module:
    """A Python file of the package."""

    name: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.stmt]:
        """All statements, also those inside classes and functions."""
        return list(all_statements(ast.parse(self.text).body))

    @cached_property
    def docstrings(self) -> list[ast.Expr]:
        """All statements that are only a string."""
        return [
            node
            for node in self.nodes
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ]

    @property
    def statements(self) -> int:
        """The number of statements without docstrings."""
        return len(self.nodes) - len(self.docstrings)

    @property
    def is_large(self) -> bool:
        """Whether the file has more than MAX_FILE_LINES lines of code."""
        # Reading the tokens is slow, and a short file cannot be large.
        return self.text.count("\n") > MAX_FILE_LINES and self.code_lines > MAX_FILE_LINES

    @property
    def code_lines(self) -> int:
        """The number of lines without blank lines, comments and docstrings."""
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in LAYOUT_TOKENS:
                lines.update(range(token.start[0], token.end[0] + 1))
        for each in self.docstrings:
            lines.difference_update(range(each.lineno, (each.end_lineno or each.lineno) + 1))
        return len(lines)

    @property
    def classes(self) -> list[ast.ClassDef]:
        """All classes."""
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    def imports(self, modules: Mapping[str, object]) -> set[str]:
        """Return the modules of the package that this one imports."""
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                joined = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {name if name in modules else node.module for name in joined}
        return found & modules.keys() - {self.name}


def all_statements(body: Sequence[ast.AST]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, and those inside them."""
    for node in body:
        if isinstance(node, ast.stmt):
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from all_statements(getattr(node, name, ()))


def read_modules(package: Path) -> dict[str, Module]:
    """Return the modules of the package at this path by their full names."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        name = name.removesuffix(".__init__")
        modules[name] = Module(name, path.read_text(encoding="utf-8"))
    return modules


def components(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components, each after those that it points to (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for target in graph[name]:
            if target not in order:
                visit(target)
            if target in stack:
                low[name] = min(low[name], low[target])
        if low[name] == order[name]:
            start = stack.index(name)
            found.append(stack[start:])
            del stack[start:]

    for name in graph:
        if name not in order:
            visit(name)
    return found


def floors(graph: Graph) -> int:
    """Return the length of the longest chain of imports. A circle counts as one floor."""
    heights: dict[str, int] = {}
    for members in components(graph):
        below = {target for name in members for target in graph[name]} - set(members)
        height = 1 + max((heights[target] for target in below), default=0)
        heights.update(dict.fromkeys(members, height))
    return max(heights.values())


def model_parts(graph: Graph) -> Graph:
    """Return the imports between the parts of planish/model: its files, and the files and folders
    of planish/model/kernels.
    """

    def part(name: str) -> str | None:
        parts = name.split(".")
        if parts[:2] != ["planish", "model"] or len(parts) == 2:
            return None
        return ".".join(parts[2:4] if parts[2] == "kernels" else parts[2:3])

    arrows: dict[str, set[str]] = {}
    for source, targets in graph.items():
        if (from_part := part(source)) is not None:
            known = {to_part for to_part in map(part, targets) if to_part is not None}
            arrows.setdefault(from_part, set()).update(known - {from_part})
    return arrows


def words(*paths: Path) -> int:
    """Return the number of words in these files."""
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def measure() -> dict[str, int]:
    """Return all numbers that need no running program."""
    modules = read_modules(ROOT / "planish")
    graph = {name: module.imports(modules) for name, module in modules.items()}
    classes = [each for module in modules.values() for each in module.classes]
    model = model_parts(graph)
    tests = (ROOT / "tests").rglob("*.py")
    return {
        "modules in import circles": sum(
            len(members) for members in components(graph) if len(members) > 1
        ),
        "lines of the largest class": max(
            (each.end_lineno or 0) - each.lineno + 1 for each in classes
        ),
        "methods of the class with most": max(
            sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in each.body)
            for each in classes
        ),
        f"files over {MAX_FILE_LINES} lines of code": sum(
            module.is_large for module in modules.values()
        ),
        "uses of self._services": sum(
            module.text.count("self._services.") for module in modules.values()
        ),
        "imports between the parts of planish/model": sum(map(len, model.values())),
        "floors of planish/model": floors(model),
        "statements": sum(module.statements for module in modules.values()),
        "lines of tests": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests),
        "words of docs": words(*(ROOT / "docs").rglob("*.md")),
        "words of the changelog": words(ROOT / "CHANGELOG.md"),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the numbers, and return 1 if one is above its limit."""
    parser = argparse.ArgumentParser(description="Compare the sizes of the code with their limits.")
    parser.add_argument("--lower", action="store_true", help="write lower numbers as limits")
    options = parser.parse_args(arguments)
    numbers = measure()
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))
    above = []
    for name, number in numbers.items():
        print(f"{number:>7,} of {limits[name]:>7,}  {name}")
        if number > limits[name]:
            above.append(f"{name}: {number:,}, at most {limits[name]:,}")
    if options.lower:
        lower = {name: min(number, limits[name]) for name, number in numbers.items()}
        LIMITS.write_text(json.dumps(lower, indent=2) + "\n", encoding="utf-8")
    for line in above:
        print(f"over its limit (tools/code_size.json): {line}", file=sys.stderr)
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
