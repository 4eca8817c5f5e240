"""Puts the tokenizers of the served base models into the Hugging Face hub cache."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from planish.files import write_atomically
from planish.model.sources.resolve import HUB_NAME
from planish.server.http.routes_checkpoints import tokenizer_files

_log = logging.getLogger(__name__)

_LLAMA_3 = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"


def hub_names(name: str) -> tuple[str, ...]:
    """Return the hub repositories in which clients look for the tokenizer of `name`. The
    repositories of Llama 3 are gated, so the SDK loads all their tokenizers from one open
    repository.
    """
    return (name, _LLAMA_3) if name.startswith("meta-llama/Llama-3") else (name,)


def cache_tokenizer(name: str, directory: Path, cache: Path | None = None) -> Path | None:
    """Copy the tokenizer in `directory` into the Hugging Face hub cache under `name`. Return the
    directory in the cache. Return None if the cache already has this name, or if `name` is not a
    name of the hub.

    `SamplingClient.get_tokenizer()` of the official SDK knows only the name of the base model, and
    loads the tokenizer from the hub. (A training client gets a directory from the server, see
    routes_training.get_info.) The cache gets a new revision that contains the tokenizer's files and
    no weights. A program with a network connection still loads the files from the hub.
    """
    if not HUB_NAME.fullmatch(name):
        _log.info(
            "%s is not a name of the hub, so its tokenizer is not put into the hub's cache", name
        )
        return None
    repository = (cache or Path(constants.HF_HUB_CACHE)) / repo_folder_name(
        repo_id=name, repo_type="model"
    )
    reference = repository / "refs" / "main"
    if reference.exists():
        return None
    files = tokenizer_files(directory)
    revision = hashlib.sha1(
        "\0".join(f"{name}\0{text}" for name, text in files.items()).encode()
    ).hexdigest()
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        write_atomically(snapshot / file, text)
    reference.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(reference, revision)
    return snapshot
