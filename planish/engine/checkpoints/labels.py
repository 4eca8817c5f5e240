"""What a caller says about a checkpoint, checked before anything is written.

Names are letters, digits and _ . - : and so can be part of a path on any disk and of a URL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from planish.errors import UserError
from planish.types import TTL_REMEDY, CheckpointPath, is_ttl

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")


@dataclass(frozen=True)
class Label:
    """What the caller says about a checkpoint."""

    path: CheckpointPath
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Mapping[str, str] | None = None

    def expires_at(self, now: datetime) -> datetime | None:
        return None if self.ttl_seconds is None else now + timedelta(seconds=self.ttl_seconds)


def is_name(name: object) -> bool:
    """Whether `name` can name a checkpoint or a run."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_name(argument: str, name: object) -> None:
    """UserError unless `is_name`."""
    if not is_name(name):
        raise UserError(
            f"{argument}={name!r}: give up to 200 letters, digits and _ . - : without a slash, not beginning with a dot or dash"
        )


def check_label(label: Label) -> None:
    """UserError for a label that cannot be right."""
    check_name("name", label.path.name)
    check_ttl(label.ttl_seconds)
    check_metadata(label.user_metadata)


def check_ttl(ttl: object) -> None:
    """UserError unless it is a time to live in seconds, or None."""
    if not is_ttl(ttl):
        raise UserError(f"ttl_seconds={ttl!r}: give {TTL_REMEDY}")


def check_metadata(user_metadata: object) -> None:
    """UserError unless it is a mapping of strings to strings."""
    if user_metadata is None:
        return
    if not isinstance(user_metadata, Mapping) or not all(
        isinstance(key, str) and isinstance(value, str) for key, value in user_metadata.items()
    ):
        raise UserError(f"user_metadata={user_metadata!r}: give a dictionary of strings to strings")
