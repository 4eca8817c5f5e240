"""Former module names return the same modules with a warning, and planish itself uses none of
them.
"""

import ast
import importlib
import sys

import pytest
from test_layering import MODULES, arrows_of

import planish.files
from planish.moved_modules import MOVED, current_name
from planish.runlog.run_directory import RunDirectory


@pytest.mark.parametrize("former", MOVED)
def test_a_former_name_is_the_same_module(former, monkeypatch):
    monkeypatch.delitem(sys.modules, f"planish.{former}", raising=False)
    if "inspect" in former:
        pytest.importorskip("inspect_ai")
    if "triton" in former:
        pytest.importorskip("triton")
    module = importlib.import_module(f"planish.{MOVED[former]}")
    with pytest.warns(DeprecationWarning, match=f"is now planish.{MOVED[former]}$"):
        found = importlib.import_module(f"planish.{former}")
    assert found is module
    spec = module.__spec__
    assert spec is not None
    assert spec.name == module.__name__ == f"planish.{MOVED[former]}"


def test_the_warning_names_the_line_that_imports(monkeypatch):
    monkeypatch.delitem(sys.modules, "planish.runs", raising=False)
    program = compile("\n\nfrom planish.runs import read_rows", "a_script.py", "exec")
    names = {}
    with pytest.warns(DeprecationWarning, match="planish.runs is now") as caught:
        exec(program, names)
    assert names["read_rows"] is planish.files.read_rows
    assert (caught[0].filename, caught[0].lineno) == ("a_script.py", 3)


def test_a_run_with_classes_under_their_former_names_is_resumed(tmp_path):
    def began_with(name: str) -> RunDirectory:
        return RunDirectory(tmp_path, {"builder": {"__chz_type__": name}})

    with began_with("planish.rl.config:Config") as run:
        run.log(0, {"reward": 1.0})
    with began_with("planish.training.rl_config:Config") as run:
        assert len(run.metrics()) == 1


@pytest.mark.slow
def test_planish_itself_uses_no_former_name():
    former = {f"planish.{name}" for name in MOVED}
    used = {
        (arrow.source, arrow.target)
        for name, path in MODULES.items()
        for arrow in arrows_of(name, ast.parse(path.read_text(encoding="utf-8")))
        if arrow.target in former
    }
    assert not used
    assert not former & set(MODULES)


def test_dotted_names_are_brought_up_to_date():
    assert current_name("planish.rl.config:Config") == "planish.training.rl_config:Config"
    assert current_name("planish.problems.gsm8k.Problem") == "planish.datasets.gsm8k.Problem"
    assert current_name("planish.types.Datum") == "planish.types.Datum"
    former = "planish.recipes.shorter:DrawnPrompts"
    assert current_name(former) == "planish.recipes.shorter:GeneratedPrompts"
    assert current_name("my.own") == "my.own"
