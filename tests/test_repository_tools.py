"""The tools that measure the code and draw the README's curve."""

import json
from xml.etree import ElementTree

import code_size
import file_tree
import pytest
import reward_curve
from code_size import components, floors, measure, model_parts, read_modules

FILES = {
    "__init__.py": "",
    "top.py": '"""Doc."""\nfrom typing import TYPE_CHECKING\nfrom p import a\n'
    "if TYPE_CHECKING:\n    from p.b import B\n",
    "a.py": "class A:\n    def f(self):\n        # A comment.\n        return 1\n\n"
    "    def g(self): ...\n",
    "b.py": "from p.top import *\nB = 1\n",
}


@pytest.fixture
def modules(tmp_path):
    package = tmp_path / "p"
    package.mkdir()
    for name, text in FILES.items():
        (package / name).write_text(text)
    return read_modules(package)


def test_statements_lines_and_classes_are_counted(modules):
    assert list(modules) == ["p", "p.a", "p.b", "p.top"]
    a, top = modules["p.a"], modules["p.top"]
    assert (a.statements, a.code_lines, a.is_large) == (5, 4, False)
    assert (top.statements, top.code_lines) == (4, 4)
    assert [each.name for each in a.classes] == ["A"]


def test_type_only_imports_close_a_circle(modules):
    graph = {name: module.imports(modules) for name, module in modules.items()}
    assert graph["p.top"] == {"p.a", "p.b"}
    assert sorted(map(sorted, components(graph))) == [["p"], ["p.a"], ["p.b", "p.top"]]
    assert floors(graph) == 2


def test_parts_of_the_model_are_files_and_the_folders_of_kernels():
    graph = {
        "planish.model.loading": {"planish.model.kernels.cpp.ops", "planish.types"},
        "planish.model.kernels.cpp.ops": {"planish.model.kernels.cpp.build"},
        "planish.model.kernels.choose": {"planish.model.kernels.cpp.ops"},
    }
    assert model_parts(graph) == {
        "loading": {"kernels.cpp"},
        "kernels.cpp": set(),
        "kernels.choose": {"kernels.cpp"},
    }


@pytest.mark.slow
def test_a_number_above_its_limit_fails_and_limits_only_fall(tmp_path, monkeypatch, capsys):
    numbers = measure()
    name = "statements"
    limits = tmp_path / "limits.json"
    monkeypatch.setattr(code_size, "LIMITS", limits)
    monkeypatch.setattr(code_size, "measure", lambda: numbers)
    limits.write_text(json.dumps({**numbers, name: numbers[name] - 1, "lines of tests": 10**9}))
    assert code_size.main(["--lower"]) == 1
    assert f"{name}: {numbers[name]:,}, at most {numbers[name] - 1:,}" in capsys.readouterr().err
    assert json.loads(limits.read_text()) == {**numbers, name: numbers[name] - 1}
    limits.write_text(json.dumps(numbers))
    assert code_size.main([]) == 0


def test_the_curve_has_a_point_for_each_step(tmp_path):
    rows = [{"step": step, "reward/total": step / 4} for step in range(5)]
    lines = [json.dumps(row) + "\n" for row in [*rows, {"step": 5}]]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    reward_curve.main(str(tmp_path), str(tmp_path / "curve.svg"))
    root = ElementTree.parse(tmp_path / "curve.svg").getroot()
    [line] = root.iter("{http://www.w3.org/2000/svg}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert len(points) == 5
    assert points[0] == (48.0, 200.0)
    assert points[-1] == (624.0, 28.0)


def test_the_file_tree_is_that_of_today():
    page = file_tree.PAGE.read_text()
    assert page == file_tree.page_text(), "run `make docs`, or python tools/file_tree.py"
