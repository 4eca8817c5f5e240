"""The clock by which expired data are deleted.

The system's clock may be wrong when the server starts, or jump while the server runs. The server
cannot know which time is right. So it keeps a lower and an upper bound of the true time. The lower
bound counts only the time during which a server ran, and never exceeds the system's time. Time
synchronization or an operator usually corrects a wrong clock within days.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from planish.server.durable.records import SessionRow, select
from planish.server.durable.store import Store, Transaction
from planish.types import LONGEST_TTL_SECONDS

_JUMP_SECONDS = 60.0
"""The system's clock has jumped if it advanced, since the last check, by at least this much more or
less than the monotonic clock.
"""
_REPORTED_GAP_SECONDS = 3600.0
_MAX_BEHIND_SECONDS = 7 * 86400.0
"""A clock that is further behind than this is certainly wrong, so it changes no bound."""
_KEY = "clock"
"""A key in the table `meta`: the bounds of the time when they were last written."""

_log = logging.getLogger(__name__)


class ExpiryClock:
    """The bounds of the true time, in seconds since 1970. `earliest` advances while a server runs,
    and never exceeds the system's time. `latest` is never below the system's time. Both become the
    system's time when the system's clock has run for `expiry_delay` without a jump.
    """

    def __init__(
        self,
        expiry_delay: float,
        clock: Callable[[], float] = lambda: time.time(),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` returns the system's time and `monotonic` a time without jumps, in seconds."""
        self._expiry_delay = expiry_delay
        self._clock, self._monotonic = clock, monotonic
        self._checked = self._steady_since = monotonic()
        self._wall = clock()
        self._earliest = self._latest = self._wall

    def resume(self, earliest: float, latest: float) -> None:
        """Continue with the bounds that an earlier process recorded."""
        gap = self._wall - earliest
        if gap > _REPORTED_GAP_SECONDS:
            _log.warning(
                "by the system's clock, this data directory was last used %.1f days ago. If the "
                "clock is wrong, correct it: this time counts for the deletion of expired data "
                "only when the clock has run for expiry_delay without a jump",
                gap / 86400,
            )
        elif gap < -_JUMP_SECONDS:
            _log.warning(
                "the system's clock is %.0f seconds behind the last use of this data directory. "
                "Correct it if it is wrong",
                -gap,
            )
        self._earliest, self._latest = earliest, latest
        self._widen()

    def _widen(self) -> None:
        """Let the bounds include the system's time."""
        if self._earliest - self._wall <= _MAX_BEHIND_SECONDS:
            self._earliest = min(self._earliest, self._wall)
        self._latest = max(self._latest, self._wall)

    def earliest(self) -> float:
        """Return a time that has certainly passed. Call this often, because each call compares the
        clocks with the previous call. A suspended machine counts as a jump.
        """
        now, wall = self._monotonic(), self._clock()
        elapsed, self._checked = now - self._checked, now
        jump, self._wall = wall - self._wall - elapsed, wall
        if abs(jump) > _JUMP_SECONDS:
            self._steady_since = now
            _log.warning(
                "the system's clock has jumped by %+.0f seconds, or the machine was suspended; the "
                "jump counts for the deletion of expired data only when the clock has run for "
                "expiry_delay without another jump",
                jump,
            )
        if now - self._steady_since >= self._expiry_delay:
            self._earliest = self._latest = wall
        else:
            self._earliest += elapsed
            self._latest += elapsed
            self._widen()
        return min(self._earliest, wall)

    def before(self, seconds: float) -> float:
        """Return a time T. Everything that the system's clock dated before T is at least `seconds`
        old.
        """
        earliest = self.earliest()
        is_steady = self._checked - self._steady_since >= seconds
        return (self._wall if is_steady else earliest) - seconds

    def extended(self, ttl_seconds: int | None) -> int | None:
        """Return the time to live to give to the engine, which adds it to the system's time. If the
        system's clock is behind that of an earlier process, the result is longer than `ttl_seconds`
        by the difference, because the clock may be corrected.
        """
        if ttl_seconds is None:
            return None
        self.earliest()
        behind = int(self._latest - self._wall)
        if behind > _MAX_BEHIND_SECONDS:
            return ttl_seconds
        return min(ttl_seconds + behind, LONGEST_TTL_SECONDS)

    async def begin(self, store: Store) -> None:
        """Resume the bounds in the database. Call this before the first cleanup."""
        query = f"SELECT value FROM meta WHERE key = '{_KEY}'"
        row = await store.read(lambda connection: connection.execute(query).fetchone())
        if row is not None:
            earliest, latest = (float(bound) for bound in row["value"].split())
            self.resume(earliest, latest)
            return
        # An older version has recorded only the times of requests.
        last = "1 ORDER BY seen DESC LIMIT 1"
        for session in await store.read(select, SessionRow, last, omit="spec"):
            self.resume(session.seen, session.seen)

    def record(self, transaction: Transaction) -> None:
        """Write the bounds to the database."""
        bounds = f"{self._earliest} {self._latest}".encode()
        transaction.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            [_KEY, bounds],
        )
