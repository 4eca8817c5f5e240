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

PREFIX = "_planish."


def snapshot_name(seq: int) -> str:
    return f"{PREFIX}snapshot.{seq}"


def sampler_name(seq: int) -> str:
    return f"{PREFIX}sampler.{seq}"


def loaded_path(model_id: str, seq: int, source: str) -> str:
    """Of the same kind as `source`."""
    return str(
        CheckpointPath(
            model_id, CheckpointPath.parse(source).checkpoint_type, f"{PREFIX}loaded.{seq}"
        )
    )


def source_path(sampler_id: str) -> str:
    return str(CheckpointPath(sampler_id, "sampler", f"{PREFIX}source"))


def is_private(path: str) -> bool:
    return CheckpointPath.parse(path).name.startswith(PREFIX)


def loading_seq(path: str) -> int | None:
    """The request that loaded it, if it is a copy that was made for one."""
    name = CheckpointPath.parse(path).name
    return int(name.rpartition(".")[2]) if name.startswith(f"{PREFIX}loaded.") else None


def is_superseded(path: str, seq: int) -> bool:
    """Whether a snapshot of request `seq` takes the place of this private checkpoint of its model."""
    loading = loading_seq(path)
    return (
        loading <= seq
        if loading is not None
        else CheckpointPath.parse(path).name != snapshot_name(seq)
    )


def check_name_is_free(name: str) -> None:
    """UserError for a name that clients cannot give."""
    if name.startswith(PREFIX):
        raise UserError(
            f"path={name[:200]!r}: names that begin with {PREFIX!r} are the server's own; give another"
        )
