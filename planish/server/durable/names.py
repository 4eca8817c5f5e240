"""Checkpoints that the server makes for itself, in the runs of its models and samplers, under names
that clients cannot give.

tinker://MODEL/weights/_planish.snapshot.SEQ          the model after request SEQ, for a restart
tinker://MODEL/KIND/_planish.loaded.SEQ               what request SEQ loaded, as it was then
tinker://MODEL/sampler_weights/_planish.sampler.SEQ   a sampler that request SEQ published without a
    name
tinker://SAMPLER/sampler_weights/_planish.source      what a sampler was made of, as it was then
"""

from __future__ import annotations

from planish.errors import UserError
from planish.types import CheckpointPath

PRIVATE_PREFIX = "_planish."


def snapshot_name(seq: int) -> str:
    return f"{PRIVATE_PREFIX}snapshot.{seq}"


def sampler_name(seq: int) -> str:
    return f"{PRIVATE_PREFIX}sampler.{seq}"


def loaded_path(model_id: str, seq: int, source: str) -> str:
    """Of the same kind as `source`."""
    return str(
        CheckpointPath(
            model_id, CheckpointPath.parse(source).checkpoint_type, f"{PRIVATE_PREFIX}loaded.{seq}"
        )
    )


def source_path(sampler_id: str) -> str:
    return str(CheckpointPath(sampler_id, "sampler", f"{PRIVATE_PREFIX}source"))


def is_private(path: str) -> bool:
    return CheckpointPath.parse(path).name.startswith(PRIVATE_PREFIX)


def loading_seq(path: str) -> int | None:
    """The request that loaded it, if it is a copy that was made for one."""
    name = CheckpointPath.parse(path).name
    return int(name.rpartition(".")[2]) if name.startswith(f"{PRIVATE_PREFIX}loaded.") else None


def is_superseded(path: str, seq: int) -> bool:
    """Whether a snapshot of request `seq` takes the place of this private checkpoint of its model."""
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
            f"path={name[:200]!r}: names that begin with {PRIVATE_PREFIX!r} are the server's own; give another"
        )


EXTERNAL_PREFIX = "external:"
_SHOWN, _STORED = "/external_weights/", f"/sampler_weights/{EXTERNAL_PREFIX}"


def stored_path(path: str) -> str:
    """The path under which a checkpoint is kept, from the one that clients use."""
    stored = path.replace(_SHOWN, _STORED, 1)
    parsed = CheckpointPath.parse(stored)
    if stored == path:
        check_name_is_not_external(parsed.name)
    return str(parsed)


def shown_path(path: str) -> str:
    """The inverse of `stored_path`."""
    return path.replace(_STORED, _SHOWN, 1)


def is_external(path: str) -> bool:
    """Whether the checkpoint that is kept under `path` is external weights."""
    return _STORED in path


def check_name_is_not_external(name: str) -> None:
    """UserError for a name that is kept for external weights."""
    if name.startswith(EXTERNAL_PREFIX):
        raise UserError(
            f"path={name[:200]!r}: names that begin with {EXTERNAL_PREFIX!r} are those of external weights"
        )
