# pyright: reportMissingImports=false
"""The generated pages of the site: the Python API, and the command line from its `--help`."""

import argparse
import contextlib
import importlib
import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HELP_COLUMNS = "88"


@dataclass(frozen=True)
class ApiPage:
    """A page of the Python reference: modules and names, each with all its public members."""

    title: str
    text: str
    names: tuple[str, ...]


API_PAGES: Mapping[str, ApiPage] = {
    "clients": ApiPage(
        "Clients",
        "The entry points of `import planish`. Every method has a form that ends in `_async`, with "
        "the same arguments: it is awaited, and returns what the plain method returns. "
        "[The guide](../guide/clients.md) shows them at work.",
        (
            "planish.ServiceClient",
            "planish.TrainingClient",
            "planish.SamplingClient",
            "planish.RestClient",
            "planish.APIFuture",
        ),
    ),
    "types": ApiPage(
        "Types",
        "Arguments and results of the clients. `planish.Datum` is `planish.types.Datum`, and so "
        "on.",
        ("planish.types", "planish.tensors"),
    ),
    "errors": ApiPage(
        "Errors",
        "Every error of planish is a `PlanishError`. Its message names the argument, what was "
        "wrong and what to give.",
        ("planish.errors",),
    ),
    "rl": ApiPage(
        "Reinforcement learning",
        "[The guide to environments](../guide/environments.md) has examples of each.",
        (
            "planish.rl.types",
            "planish.rl.environments.reward_env",
            "planish.rl.environments.problem_env",
            "planish.rl.environments.problem_datasets",
            "planish.rl.environments.message_env",
            "planish.rl.environments.self_play",
            "planish.tool_use.tools",
            "planish.tool_use.agent_env",
            "planish.rl.answers",
            "planish.rl.advantages",
            "planish.rl.data_processing",
            "planish.rl.rollout.rollouts",
            "planish.rl.rollout.strategy",
            "planish.rl.rollout.play",
            "planish.rl.limits",
            "planish.completers",
            "planish.logtree",
        ),
    ),
    "training": ApiPage(
        "Training runs",
        "The loop of an RL run, its options, and the files of a run.",
        (
            "planish.training.train_rl",
            "planish.training.rl_config",
            "planish.training.run_options",
            "planish.training.learning_rates",
            "planish.files.read_rows",
            "planish.runlog.checkpoints",
            "planish.runlog.curves",
            "planish.runlog.evaluators",
            "planish.runlog.model_renderer",
            "planish.runlog.run_directory.RunDirectory",
            "planish.reports.rollout_files.RolloutFiles",
        ),
    ),
    "supervised": ApiPage(
        "Supervised training",
        "[The guide](../guide/supervised.md) has an example that runs.",
        (
            "planish.training.train_supervised",
            "planish.training.supervised_config",
            "planish.supervised.types",
            "planish.supervised.datasets",
        ),
    ),
    "preference": ApiPage(
        "Preferences and rubrics",
        "Training on comparisons of answers, and on the scores of a judge.",
        (
            "planish.preference.types",
            "planish.preference.datasets",
            "planish.preference.dpo",
            "planish.preference.preference_models",
            "planish.preference.model_files",
            "planish.preference.preference_envs",
            "planish.preference.comparison_evaluator",
            "planish.rubric.rubrics",
            "planish.rubric.grading",
        ),
    ),
    "distillation": ApiPage(
        "Distillation",
        "[The guide](../guide/distillation.md) compares the methods.",
        (
            "planish.distillation.on_policy",
            "planish.distillation.off_policy",
            "planish.distillation.datasets",
            "planish.distillation.prompts",
            "planish.distillation.teachers",
        ),
    ),
    "data": ApiPage(
        "Renderers and data",
        "Chat messages as tokens ([formats](../reference/renderers.md)), and rows of files "
        "([layouts](../reference/data.md)).",
        (
            "planish.renderers.registry",
            "planish.renderers.recommend",
            "planish.renderers.renderer",
            "planish.renderers.chat_format",
            "planish.renderers.codec",
            "planish.renderers.messages",
            "planish.renderers.datums",
            "planish.renderers.train_on",
            "planish.renderers.termination",
            "planish.datasets.rows",
            "planish.datasets.layouts",
        ),
    ),
    "evaluation": ApiPage(
        "Evaluation and export",
        "[Evaluation](../guide/evaluation.md) and [export](../guide/export.md) have examples.",
        (
            "planish.evaluation.evaluate",
            "planish.evaluation.evaluator",
            "planish.evaluation.models",
            "planish.evaluation.tasks",
            "planish.evaluation.types",
            "planish.export.weights",
            "planish.console.replay",
        ),
    ),
    "machine": ApiPage(
        "Sandbox and models",
        "Programs of a model in isolation ([why](../reference/sandbox.md)), where base models come "
        "from ([the order](../reference/models.md)), and tiny models for tests.",
        (
            "planish.sandbox.sandbox",
            "planish.sandbox.limits",
            "planish.sandbox.program_tests",
            "planish.sandbox.errors",
            "planish.model.sources.resolve",
            "planish.model.sources.embedded",
            "planish.testing",
        ),
    ),
}


def api_page_text(page: ApiPage) -> str:
    """Return the Markdown of a page, in which mkdocstrings replaces each `:::` by a docstring."""
    blocks = "\n".join(f"::: {name}\n" for name in page.names)
    return f"# {page.title}\n\n{page.text}\n\n{blocks}"


def read_package() -> Any:
    """Return griffe's tree of the package planish, read from its sources."""
    import griffe

    return griffe.load("planish", search_paths=[str(ROOT)])


def api_twin_text(page: ApiPage, package: Any) -> str:
    """Return a page as plain Markdown: the signature and the docstring of each public name.
    `package` is the result of `read_package`.
    """
    parts = [f"# {page.title}", page.text]
    for name in page.names:
        found = package[name.removeprefix("planish.")]
        parts += _twin_parts(found.final_target if found.is_alias else found, 2)
    return "\n\n".join(parts) + "\n"


def _twin_parts(found: Any, level: int) -> Iterator[str]:
    yield f"{'#' * level} {found.path}"
    if found.is_function:
        yield f"```python\n{found.signature()}\n```"
    elif found.is_attribute and found.annotation is not None:
        yield f"```python\n{found.name}: {found.annotation}\n```"
    if found.docstring is not None:
        yield found.docstring.value
    if not (found.is_module or found.is_class):
        return
    for name, member in found.members.items():
        is_public = not name.startswith("_") and not name.endswith("_async")
        if is_public and not member.is_alias and not member.is_module:
            yield from _twin_parts(member, level + 1)


def command_line_text() -> str:
    """Return the page of the command line: the help of `planish` and of each subcommand."""
    from planish.commands.cli import COMMANDS, command_module

    sections = []
    with _help_width():
        for name, summary in COMMANDS.items():
            parser = argparse.ArgumentParser(
                prog=f"planish {name}", description=f"{summary[0].upper()}{summary[1:]}."
            )
            command_module(name).add_arguments(parser)
            sections.append(f"## planish {name}\n\n```text\n{parser.format_help()}```\n")
            for inner_name, inner in _subcommands(parser):
                sections.append(
                    f"### planish {name} {inner_name}\n\n```text\n{inner.format_help()}```\n"
                )
    opening = (
        "# Command line\n\n"
        "This page is generated from the commands' `--help`. Exit status: 0 on success, 1 after an "
        "error with a message on stderr, 2 for a wrong option, 130 after Ctrl-C.\n"
        "[The options of recipes](recipe-options.md) are on a page of their own.\n"
    )
    return "\n".join([opening, *sections])


def recipe_options_text() -> str:
    """Return the page of recipes' options: the `--help` of each."""
    sections = []
    with _help_width():
        for path in sorted((ROOT / "planish" / "recipes").glob("[!_]*.py")):
            if "if __name__ ==" not in path.read_text(encoding="utf-8"):
                continue
            name = f"planish.recipes.{path.stem}"
            sections.append(f"## {path.stem}\n\n{_table_of_options(_help_of_recipe(name))}")
    opening = (
        "# Options of the recipes\n\n"
        "This page is generated from `python -m planish.recipes.NAME --help`. Options are written "
        "`name=value`. The pages of the recipes explain the important ones.\n"
    )
    return "\n".join([opening, *sections])


def _help_of_recipe(name: str) -> str:
    from planish.recipes.training_run import read_options

    recipe = importlib.import_module(name)
    config_type = getattr(recipe, "Options", None) or recipe.Config
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        read_options(config_type, getattr(recipe, "PRESETS", {}), ["--help"])
    return printed.getvalue()


def _table_of_options(help_text: str) -> str:
    """Return the options of a recipe's help as a table."""
    rows = ["| option | type | default | |\n|---|---|---|---|\n"]
    for line in help_text.splitlines():
        cells = re.split(r"\s{2,}", line.strip().replace("|", "\\|"))
        if line.startswith("  ") and len(cells) >= 3:
            name, kind, default, *text = cells
            value = re.sub(r"\s*\(default\)$", "", default)
            rows.append(f"| `{name}` | {kind} | `{value}` | {' '.join(text)} |\n")
    return "".join(rows)


def _subcommands(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


@contextlib.contextmanager
def _help_width() -> Iterator[None]:
    """Make argparse, which asks the terminal for its width, write lines of a fixed width."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = HELP_COLUMNS
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


GENERATED = {
    "reference/command-line.md": command_line_text,
    "reference/recipe-options.md": recipe_options_text,
}
"""The other generated pages, each with the function that returns its text."""


def write_reference(pages: Path) -> None:
    """Write the generated pages below a directory of Markdown pages."""
    (pages / "api").mkdir(parents=True, exist_ok=True)
    for name, page in API_PAGES.items():
        (pages / "api" / f"{name}.md").write_text(api_page_text(page), encoding="utf-8")
    for path, text in GENERATED.items():
        (pages / path).write_text(text(), encoding="utf-8")
