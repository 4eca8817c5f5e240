"""Tokenizers in the hub's cache, so that scripts of the official SDK find them on a machine without
a network.

`SamplingClient.get_tokenizer()` of that SDK knows nothing but the base model's name, and asks the
hub for it; a training client is told a directory (routes_training.get_info). The files that are put
here are those of the model that is served, under a revision of their own, and only where the cache
knows nothing of the name. A program with a network still gets the hub's own files; the weights are
not there, so nobody takes this for the model.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from planish.files import write_whole
from planish.model.sources import HUB_NAME
from planish.server.routes_downloads import tokenizer_files

_log = logging.getLogger("planish.server")


_LLAMA_3 = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"


def asked_names(name: str) -> tuple[str, ...]:
    """The repositories in which clients look for the tokenizer of `name`: for Llama 3, whose own
    are gated, the SDK asks one for all of them.
    """
    return (name, _LLAMA_3) if name.startswith("meta-llama/Llama-3") else (name,)


def keep_tokenizer(name: str, directory: Path, cache: Path | None = None) -> Path | None:
    """Put the tokenizer of `directory` into the hub's cache as that of `name`; the directory it is
    in, or None if the cache knows the name.
    """
    if not HUB_NAME.fullmatch(name):
        _log.info(
            "%s is no name of the hub, so its tokenizer is not put into the hub's cache", name
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
        write_whole(snapshot / file, text)
    reference.parent.mkdir(parents=True, exist_ok=True)
    write_whole(reference, revision)
    return snapshot
