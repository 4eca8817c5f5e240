"""Constraints that an owner cannot use for a while, because their process was ended."""

import hashlib
import threading
import time
from collections import OrderedDict

from planish.types import Constraint

REFUSAL_SECONDS = 600.0
"""How long a constraint is refused after its process has ended."""
MAX_REFUSALS = 4096
"""The maximum number of refused constraints of all owners. The oldest ones are forgotten."""


class Refusals:
    """The refused constraints of all owners. All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: OrderedDict[tuple[str, bytes], tuple[float, str]] = OrderedDict()
        """For each owner and digest of a constraint: the end of the refusal and its reason."""

    def add(self, owner: str, constraint: Constraint, reason: str) -> None:
        """Refuse a constraint from now on."""
        key = owner, _digest(constraint)
        with self._lock:
            self._refused[key] = time.monotonic() + REFUSAL_SECONDS, reason
            self._refused.move_to_end(key)
            if len(self._refused) > MAX_REFUSALS:
                self._refused.popitem(last=False)

    def reason(self, owner: str, constraint: Constraint) -> str | None:
        """Return why a constraint is refused, or None if it is not."""
        if not self._refused:
            return None
        key = owner, _digest(constraint)
        with self._lock:
            end, reason = self._refused.get(key, (0.0, ""))
            if end > time.monotonic():
                return reason
            self._refused.pop(key, None)
            return None


def _digest(constraint: Constraint) -> bytes:
    return hashlib.sha256(
        repr((constraint.kind, constraint.text, constraint.choices)).encode()
    ).digest()
