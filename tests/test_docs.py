"""The guides are run: every block of Python, in the order of its page, with a tiny random model in
the place of the embedded one.

The blocks of a page share one namespace, as if the page were one script; it runs in an empty
directory. Where a block is followed at once by a block of `text`, it prints just that. A page in
`NOT_RUN` shows fragments. Documented commands are not run, but each must be one that its recipe
takes.
"""

import argparse
import contextlib
import importlib
import io
import re
import shlex
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

import pytest

from planish.commands.cli import command_module
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.recipes.training_run import read_options
from planish.runlog import model_renderer
from planish.testing import tiny_model

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
RECIPES = sorted((DOCS.parent / "planish" / "recipes").glob("[!_]*.py"))
"""Their docstrings have commands too."""
WITH_README = [DOCS.parent / "README.md", *(DOCS / page for page in PAGES)]
NOT_RUN = {
    "reference/renderers.md": "a fragment: the client and the sample come from elsewhere",
    "reference/models.md": "a conversion of the reader's own model",
    "recipes/verifiers_rl.md": "it needs planish[verifiers]: tests/rl/test_verifiers_env.py runs "
    "such environments",
    "reference/sandbox.md": "it needs a sandbox: tests/sandbox/test_program_tests.py runs it "
    "where there is one",
}

FENCE = re.compile(r"^```(?P<kind>\w*)[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"python -m (planish\.recipes\.\w+)((?:\\\n|[^\n`])*)")


@dataclass(frozen=True)
class Block:
    line: int
    code: str
    output: str | None
    """What it prints, if the page says so."""


def blocks_of(text: str) -> list[Block]:
    fences = list(FENCE.finditer(text))
    blocks = []
    for fence, after in zip_longest(fences, fences[1:]):
        if fence["kind"] == "python":
            is_output = (
                after is not None
                and after["kind"] == "text"
                and not text[fence.end() : after.start()].strip()
            )
            output = after["body"] if after is not None and is_output else None
            blocks.append(Block(text.count("\n", 0, fence.start("body")), fence["body"], output))
    return blocks


def commands_of(text: str) -> list[tuple[str, list[str]]]:
    """Return (recipe, options) of each command. Comments after two spaces, and words that the shell
    keeps from the recipe, are left out.
    """
    found = []
    for module, rest in COMMAND.findall(text):
        words = shlex.split(re.split(r"\s{2,}", re.sub(r"\s*\\\n\s*", " ", rest))[0], comments=True)
        options = [word for word in words if re.match(r"[a-z_.]+=", word)]
        found.append(
            (module, [option for option in options if not re.search(r"=\.\.\.|=[A-Z]+$", option)])
        )
    return found


def run_page(text: str, path: Path, name: str) -> None:
    """Run the blocks as a module of that name, so that their definitions can be pickled."""
    module = ModuleType(name)
    sys.modules[name] = module
    try:
        for block in blocks_of(text):
            printed = io.StringIO()
            code = compile("\n" * block.line + block.code, str(path), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, module.__dict__)
            if block.output is not None:
                assert printed.getvalue() == block.output, (
                    f"{path}, line {block.line}, prints something else"
                )
    finally:
        del sys.modules[name]


@pytest.fixture
def reader(tmp_path_factory, tmp_path, monkeypatch):
    """A directory for a reader who tries a page."""
    model = tiny_model(tmp_path_factory.mktemp("model"))
    monkeypatch.setenv("PLANISH_MODELS", f"{DEFAULT_MODEL}={model}")
    monkeypatch.setenv("PLANISH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_renderer, "_RENDERERS", {})
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=f"{page}: {len(blocks)} blocks")
        for page in PAGES
        if page not in NOT_RUN and (blocks := blocks_of((DOCS / page).read_text()))
    ],
)
def test_every_block_of_the_page_runs(page, reader):
    run_page((DOCS / page).read_text(), DOCS / page, "page_" + re.sub(r"\W", "_", page))


def test_no_two_pages_write_the_same_file_or_run():
    """A reader may try several pages in one directory."""
    pages = defaultdict[str, set[str]](set)
    for page in [*WITH_README, *(DOCS.parent / "examples").glob("*.py")]:
        text = page.read_text()
        code = text if page.suffix == ".py" else "".join(block.code for block in blocks_of(text))
        for name in re.findall(r'(?:Path|open)\(f?"([^"]+\.jsonl)"[,)]|log_path="([^"]+)"', code):
            pages["".join(name)].add(page.stem)
    # The README shows a part of an example.
    shared = {name: by for name, by in pages.items() if len(by - {"README"}) > 1}
    assert len(pages) > 20
    assert shared == {}


@pytest.mark.slow
def test_the_page_of_clients_prints_the_same_where_checkpoints_lie_already(reader):
    page = DOCS / "guide/clients.md"
    for again in range(2):
        run_page(page.read_text(), page, f"page_clients_{again}")


@pytest.mark.parametrize("page", [*WITH_README, *RECIPES], ids=lambda page: page.name)
def test_every_command_of_a_recipe_is_one_that_it_takes(page):
    for name, arguments in commands_of(page.read_text()):
        recipe = importlib.import_module(name)
        config_type = getattr(recipe, "Options", None) or recipe.Config
        presets = getattr(recipe, "PRESETS", {})
        if hasattr(recipe, "with_env_defaults"):
            presets, arguments = recipe.with_env_defaults(arguments)
        read_options(config_type, presets, arguments)


@pytest.mark.parametrize(
    "page", sorted((DOCS / "recipes").glob("*.md")), ids=lambda page: page.stem
)
def test_the_page_of_a_recipe_shows_a_recorded_run(page):
    """It has the recorded command, the facts about the run, and its curve."""
    measured = page.read_text().partition("\n## Measured\n")[2]
    rows = dict(re.findall(r"^\| ([\w, ]+) \| (.+) \|$", measured, re.MULTILINE))
    assert {"model, machine", "steps", "time", "result"} <= rows.keys()
    pictures = re.findall(r"!\[.+\]\((.+\.(?:png|svg))\)", measured)
    assert pictures
    assert all((page.parent / picture).is_file() for picture in pictures)
    assert any(COMMAND.search(fence["body"]) for fence in FENCE.finditer(measured))


def test_every_recipe_has_a_page():
    programs = {path.stem for path in RECIPES if '\nif __name__ == "__main__":' in path.read_text()}
    others = {"rubric_judge", "shape_rows"}  # they make the data of rubric and count_shapes
    assert programs - others == {path.stem for path in (DOCS / "recipes").glob("*.md")}


def test_pages_that_are_not_run_exist_and_have_blocks():
    for page in NOT_RUN:
        assert blocks_of((DOCS / page).read_text()), (
            f"{page} has nothing that could be run: take it off the list"
        )


def planish_commands_of(text: str) -> list[list[str]]:
    """Return the arguments of each line that begins with `planish`, without comments and what only
    the shell reads.
    """
    lines = [
        line
        for fence in FENCE.finditer(text)
        for line in fence["body"].replace("\\\n", " ").splitlines()
    ]
    said = [
        re.split(r"\s[#<>&]|\s{2,}(?=[a-z])", line)[0]
        for line in lines
        if line.startswith("planish ")
    ]
    return [shlex.split(words)[1:] for words in said]


@pytest.mark.parametrize("page", WITH_README, ids=lambda page: page.stem)
def test_every_command_of_planish_is_one_that_it_takes(page):
    for name, *arguments in planish_commands_of(page.read_text()):
        parser = argparse.ArgumentParser(prog=f"planish {name}")
        command_module(name).add_arguments(parser)
        parser.parse_args(arguments)


PAGE = """
```python
x = 1
print(x)
```
```text
1
```

```python
class Here: pass
```

```
not python
```
python -m planish.recipes.demo steps=3 \\
    largest=5 log_path=RUN  # a comment
"""


def test_blocks_and_commands_are_found(tmp_path):
    assert [(block.line, block.output) for block in blocks_of(PAGE)] == [(2, "1\n"), (10, None)]
    assert commands_of(PAGE) == [("planish.recipes.demo", ["steps=3", "largest=5"])]
    listed = (
        "```\nplanish runs RUN  of this one\nplanish eval gsm8k --k 1,2 \\\n    --limit 3 < "
        "q.jsonl  # all\n```\nplanish chat"
    )
    assert planish_commands_of(listed) == [
        ["runs", "RUN"],
        ["eval", "gsm8k", "--k", "1,2", "--limit", "3"],
    ]
    run_page(PAGE, tmp_path, "page_of_a_test")
    with pytest.raises(AssertionError, match="line 2, prints something else"):
        run_page(PAGE.replace("x = 1", "x = 2"), tmp_path, "page_of_a_test")
    with pytest.raises(NameError):
        run_page(PAGE.replace("x = 1", "y = 1"), tmp_path, "page_of_a_test")


def test_the_versions_of_clients_are_those_of_the_tests():
    """docs/operators/conformance.md names the versions of clients that the tests install."""
    root = DOCS.parent
    page, makefile = (
        (root / name).read_text() for name in ("docs/operators/conformance.md", "Makefile")
    )
    pins = "".join(
        (root / name).read_text() for name in ("constraints.txt", "constraints-extras.txt")
    )
    versions = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", pins, re.MULTILINE))
    versions["pydantic-ai"] = versions["pydantic-ai-slim"]
    programs = dict(re.findall(r"@[\w-]+/([\w-]+)@([\d.]+)", makefile))
    versions |= {"Codex": programs["codex"], "Claude Code": programs["claude-code"]}
    rows = re.findall(r"^\| ([\w -]+?)(?: \(.*?\))? \| ([\d.]+) \|", page, re.MULTILINE)
    named = {name: version for name, version in rows if name in versions}
    assert named.keys() >= {
        "openai",
        "anthropic",
        "litellm",
        "openai-agents",
        "Codex",
        "Claude Code",
    }
    assert named == {name: versions[name] for name in named}
