"""List the base models that can be loaded on this machine: the command `planish models`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from rich.console import Console
from rich.table import Table

from planish.errors import UserError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.weight_sizes import SCHEMES, weight_bytes
from planish.model.sources.embedded import GEMMA3, SMOLLM2, EmbeddedModel
from planish.model.sources.resolve import (
    hub_cache_directory,
    models_from_env_var,
    models_home,
)

_SIZE_COLUMNS = {"bf16": None, **{scheme: scheme for scheme in SCHEMES}}
"""The headings of the sizes, and their quantization schemes."""


@dataclass(frozen=True)
class ModelEntry:
    """One name that `resolve_model` accepts."""

    name: str
    source: str
    """"models", "PLANISH_MODELS", "planish cache", "hub cache" or "download"."""
    path: Path | None
    """The directory or .gguf file; None if it is not on this machine yet."""
    is_local: bool
    """Whether the model can be loaded without a network."""
    problem: str | None = None
    """Why the model cannot be loaded; None if it can."""


def list_models(models: Mapping[str, str] | None = None) -> list[ModelEntry]:
    """Return every known model: those of the mappings, the embedded models, and the hub's cache.
    Uses no network and converts nothing.

    If two sources have the same name, only the one that `resolve_model` uses is listed.
    """
    entries: dict[str, ModelEntry] = {}
    for entry in (
        *_mapped_entries(models or {}, "models"),
        *_mapped_entries(models_from_env_var(), "PLANISH_MODELS"),
        _embedded_entry(SMOLLM2),
        _embedded_entry(GEMMA3),
    ):
        entries.setdefault(entry.name, entry)
    for entry in _hub_cache_entries():
        entries.setdefault(entry.name, entry)
    return list(entries.values())


def print_models(models: Mapping[str, str] | None = None, console: Console | None = None) -> None:
    """Print `list_models` as a table."""
    table = Table()
    for heading in ("name", "source", "path", *_SIZE_COLUMNS):
        table.add_column(heading, overflow="fold")
    for entry in list_models(models):
        location = str(entry.path) if entry.path else "downloaded and cached at first use"
        if entry.problem:
            location += f"\n{entry.problem}"
        table.add_row(entry.name, entry.source, location, *_size_cells(entry))
    console = console or Console()
    console.print(table)
    console.print(
        "Sizes are those of one copy of the weights in GB; int8 and nf4 are values of quantize "
        "(docs/reference/models.md).\n"
        "For checkpoints in fp8 or mxfp4, the column bf16 has the size with their codes.\n"
        "Also: the path of any Hugging Face directory or .gguf file, and ORGANIZATION/MODEL on the "
        "hub."
    )


def _size_cells(entry: ModelEntry) -> list[str]:
    """Return the sizes of the weights in GB under each scheme, or nothing if they are not known."""
    if entry.problem or entry.path is None or not entry.path.is_dir():
        return []
    config = ModelConfig.from_directory(entry.path)
    return [
        "-"
        if scheme is not None and config.mxfp4_experts
        else f"{weight_bytes(config, 2, scheme) / 1e9:.2f}"
        for scheme in _SIZE_COLUMNS.values()
    ]


def _mapped_entries(mapping: Mapping[str, str], source: str) -> Iterator[ModelEntry]:
    for name, target in mapping.items():
        path = Path(target).expanduser()
        is_gguf = path.suffix.lower() == ".gguf" and path.is_file()
        problem = None if is_gguf else _config_problem(path)
        yield ModelEntry(name, source, path, is_local=problem is None, problem=problem)


def _embedded_entry(model: EmbeddedModel) -> ModelEntry:
    converted_directory = models_home() / model.directory_name
    if converted_directory.is_dir():
        return ModelEntry(model.name, "planish cache", converted_directory, is_local=True)
    hub_directory = hub_cache_directory(model.name)
    if hub_directory is not None:
        return ModelEntry(model.name, "hub cache", hub_directory, is_local=True)
    return ModelEntry(model.name, "download", None, is_local=False)


def _hub_cache_entries() -> Iterator[ModelEntry]:
    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for name in sorted(
        repository.repo_id for repository in repositories if repository.repo_type == "model"
    ):
        directory = hub_cache_directory(name)
        if directory is not None and _config_problem(directory) is None:
            yield ModelEntry(name, "hub cache", directory, is_local=True)


def _config_problem(directory: Path) -> str | None:
    try:
        ModelConfig.from_directory(directory)
    except UserError as error:
        return str(error)
    return None
