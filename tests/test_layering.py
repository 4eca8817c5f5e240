"""Imports between planish's modules point down, make no cycle, and hide in no function.

Imports for types only count too.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import planish

PACKAGE = Path(planish.__file__).parent

# Lowest first; a module may import from its own row and those before it.
LAYERS = (
    (
        "errors",
        "images",
        "tensors",
        "types",
        "service",
        "files",
        "tokenizer",
        "detokenizer",
        "testing",
        "testing_quantized",
        "testing_recurrent",
        "testing_vision",
    ),
    ("processes", "logtree", "sandbox"),
    ("datasets",),
    ("wire",),
    ("model",),
    ("renderers",),
    ("engine",),
    ("fleet",),
    ("client", "server"),
    ("planish",),
    ("completers", "runlog"),
    ("rl", "supervised"),
    ("reports", "rubric", "tool_use"),
    ("training",),
    ("distillation",),
    ("preference",),
    ("evaluation",),
    ("integrations", "export", "console"),
    ("tinker", "import_shims"),
    ("commands", "cookbook", "doctor", "recipes"),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Beyond the order of layers: what never may know of the engine.
ABOVE_THE_SEAM = (
    "rl",
    "supervised",
    "preference",
    "distillation",
    "rubric",
    "renderers",
    "datasets",
    "training",
    "evaluation",
    "recipes",
    "tool_use",
)
FORBIDDEN = {(part, lower) for part in ABOVE_THE_SEAM for lower in ("engine", "fleet")}
FORBIDDEN |= {("server", "client"), ("client", "server")}
IN_FUNCTIONS = {
    ("planish.commands.checkpoints", "planish.export"),
    ("planish.commands.doctor", "planish.doctor"),
    ("planish.client.local", "planish.engine"),
    ("planish.client.local", "planish.fleet"),
    ("planish.commands.models", "planish.model"),
    ("planish.commands.run", "planish.server"),
    ("planish.doctor.gpu.measurements", "planish.doctor"),
}
"""For whom torch would be loaded in vain: clients of a server, and a list of models. The doctor
loads transformers only to create a random model.
"""


@dataclass(frozen=True)
class Arrow:
    source: str
    target: str
    in_function: bool


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("planish", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def arrows_of(source: str, node: ast.AST, in_function: bool = False) -> Iterator[Arrow]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # An expression contains no import.
            continue
        inner = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        names: list[str] = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{source} has a relative import"
            joined = [f"{child.module}.{alias.name}" for alias in child.names]
            names = [name if name in MODULES else child.module or "" for name in joined]
        yield from (
            Arrow(source, n, in_function)
            for n in dict.fromkeys(names)
            if n.split(".")[0] == "planish"
        )
        yield from arrows_of(source, child, inner)


@pytest.fixture(scope="module", name="arrows")
def _arrows() -> list[Arrow]:
    return [
        arrow
        for name, path in MODULES.items()
        for arrow in arrows_of(name, ast.parse(path.read_text(encoding="utf-8")))
    ]


def part(module: str) -> str:
    """Return the layer of a module: "planish.engine.training.trainer" -> "engine"."""
    return module.split(".")[1] if "." in module else module


@pytest.mark.slow
def test_every_module_has_a_layer(arrows):
    assert {part(name) for name in MODULES} <= set(LEVEL)
    assert len(arrows) > 100


def test_imports_point_down(arrows):
    up = [
        a
        for a in arrows
        if LEVEL[part(a.target)] > LEVEL[part(a.source)]
        or (part(a.source), part(a.target)) in FORBIDDEN
    ]
    assert up == []


def test_no_import_hides_in_a_function(arrows):
    hidden = [a for a in arrows if a.in_function]
    assert {(a.source, ".".join(a.target.split(".")[:2])) for a in hidden} == IN_FUNCTIONS


def test_there_is_no_cycle(arrows):
    """Imports for types only count too."""
    graph = {name: {a.target for a in arrows if a.source == name} for name in MODULES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def test_the_interface_of_the_kernels_knows_no_implementation(arrows):
    kernels = "planish.model.kernels"
    implementations = tuple(f"{kernels}.{name}" for name in ("cpp", "reference", "triton"))
    known = {
        a.target
        for a in arrows
        if a.source.startswith(f"{kernels}.interface.") and a.target.startswith(implementations)
    }
    assert not known


def test_only_the_local_client_and_records_of_this_machine_reach_the_engine(arrows):
    reaching = {
        a.source for a in arrows if part(a.source) == "client" and part(a.target) == "engine"
    }
    assert reaching == {"planish.client.local", "planish.client.checkpoint_records"}


def test_no_two_test_files_have_one_name():
    """pytest imports test files by their name alone, so two files of one name end the
    collection.
    """
    files = Path(__file__).parent.rglob("test_*.py")
    counts = Counter(path.name for path in files)
    assert not [name for name, count in counts.items() if count > 1]


NO_MIRROR = {"", "benchmarks", "engine/gpu", "upgrade"}
"""Folders of tests without a folder of the package: tests of the package as a whole, of
benchmarks/, of the engine on a CUDA device, and of what earlier releases wrote.
"""


def test_the_folders_of_tests_mirror_those_of_the_package():
    root = Path(__file__).parent
    folders = {path.parent.relative_to(root).as_posix() for path in root.rglob("test_*.py")}
    folders = {"" if folder == "." else folder for folder in folders}
    assert not [name for name in folders - NO_MIRROR if not (PACKAGE / name).is_dir()]
