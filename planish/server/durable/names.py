"""Names of checkpoints that have a special meaning.

Private checkpoints are made by the server for itself, in the runs of its models and samplers.
Clients cannot give these names:

    tinker://MODEL/weights/_planish.snapshot.SEQ          a snapshot of the model after request SEQ
    tinker://MODEL/KIND/_planish.loaded.SEQ               a copy of what request SEQ loaded
    tinker://MODEL/sampler_weights/_planish.sampler.SEQ   a sampler published by request SEQ
    tinker://SAMPLER/sampler_weights/_planish.source      a copy of the checkpoint of a sampler

External weights are adapters saved for other programs, in PEFT's layout. A sampler checkpoint of
planish has that layout already. So external weights NAME are stored as the sampler checkpoint
`external:NAME`, and shown under the kind and path that clients know.
"""

from __future__ import annotations

from planish.errors import UserError
from planish.types import CheckpointPath

PRIVATE_PREFIX = "_planish."


def snapshot_name(seq: int) -> str:
    """Return the name of the snapshot after request `seq`."""
    return f"{PRIVATE_PREFIX}snapshot.{seq}"


def sampler_name(seq: int) -> str:
    """Return the name of the sampler that request `seq` published."""
    return f"{PRIVATE_PREFIX}sampler.{seq}"


def loaded_path(model_id: str, seq: int, source: str) -> str:
    """Return the path of the private copy of what request `seq` loads, of the same kind as
    `source`.
    """
    return str(
        CheckpointPath(
            model_id, CheckpointPath.parse(source).checkpoint_type, f"{PRIVATE_PREFIX}loaded.{seq}"
        )
    )


def source_path(sampler_id: str) -> str:
    """Return the path of the private copy of a sampler's checkpoint."""
    return str(CheckpointPath(sampler_id, "sampler", f"{PRIVATE_PREFIX}source"))


def is_private(path: str) -> bool:
    """Return whether the server made the checkpoint for itself."""
    return CheckpointPath.parse(path).name.startswith(PRIVATE_PREFIX)


def loading_seq(path: str) -> int | None:
    """Return the request that a private copy was made for; None for any other checkpoint."""
    name = CheckpointPath.parse(path).name
    return int(name.rpartition(".")[2]) if name.startswith(f"{PRIVATE_PREFIX}loaded.") else None


def is_superseded(path: str, seq: int) -> bool:
    """Return whether a snapshot after request `seq` replaces this private checkpoint."""
    loading = loading_seq(path)
    return (
        loading <= seq
        if loading is not None
        else CheckpointPath.parse(path).name != snapshot_name(seq)
    )


def check_name_is_not_private(name: str) -> None:
    """UserError for a name that clients cannot give."""
    if name.startswith(PRIVATE_PREFIX):
        raise UserError(
            f"path={name[:200]!r}: names that begin with {PRIVATE_PREFIX!r} are reserved for the "
            "server; give another name"
        )


EXTERNAL_PREFIX = "external:"
_SHOWN, _STORED = "/external_weights/", f"/sampler_weights/{EXTERNAL_PREFIX}"


def stored_path(path: str) -> str:
    """Return the path under which a checkpoint is stored, from the path that clients use."""
    stored = path.replace(_SHOWN, _STORED, 1)
    parsed = CheckpointPath.parse(stored)
    if stored == path:
        check_name_is_not_external(parsed.name)
    return str(parsed)


def shown_path(path: str) -> str:
    """Return the path that clients use, from the stored one."""
    return path.replace(_STORED, _SHOWN, 1)


def is_external(path: str) -> bool:
    """Return whether a stored path is that of external weights."""
    return _STORED in path


def check_name_is_not_external(name: str) -> None:
    """UserError for a name that is reserved for external weights."""
    if name.startswith(EXTERNAL_PREFIX):
        raise UserError(
            f"path={name[:200]!r}: names that begin with {EXTERNAL_PREFIX!r} are reserved for "
            "external weights; give another name"
        )
