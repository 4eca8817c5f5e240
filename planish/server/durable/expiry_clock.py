"""The clock by which expired data are deleted.

The system's clock may be wrong when the server starts, or jump while the server runs. The server
cannot know which time is right. So it also measures two times without the system's clock: a lower
bound of the true time, and the uptime, in which servers have used the data directory. Time
synchronization or an operator usually corrects a wrong clock within days.

A checkpoint that is saved before the system's clock has run for `expiry_delay` without a jump
expires by the uptime, since the clock may be corrected later. All others expire by the system's
clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from planish.server.durable.store import Store, Transaction

_JUMP_SECONDS = 60.0
"""The system's clock has jumped if it advanced, since the last check, by at least this much more or
less than the monotonic clock.
"""
_REPORTED_GAP_SECONDS = 3600.0
_KEY = "clock"
"""A key in the table `meta`: the lower bound and the uptime when they were last written."""

_log = logging.getLogger(__name__)


class ExpiryClock:
    """A lower bound of the true time, and the uptime of servers.

    `earliest` is the lower bound in seconds since 1970. It advances while a server runs, and never
    exceeds the system's time. It becomes the system's time when the system's clock has run for
    `expiry_delay` seconds without a jump. The uptime, in seconds, never jumps. Its origin is
    arbitrary.
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
        self._earliest, self._uptime = self._wall, 0.0

    def resume(self, earliest: float, uptime: float) -> None:
        """Continue with what an earlier process recorded."""
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
        self._earliest, self._uptime = min(earliest, self._wall), uptime

    def earliest(self) -> float:
        """Return a time that has certainly passed. Call this often, because each call compares the
        clocks with the previous call. A suspended machine counts as a jump.
        """
        self._advance()
        return self._earliest

    def _advance(self) -> None:
        """Read the clocks, and advance the lower bound and the uptime."""
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
        self._uptime += elapsed
        self._earliest = wall if self.is_trusted else min(self._earliest + elapsed, wall)

    @property
    def is_trusted(self) -> bool:
        """Whether the system's clock has run for `expiry_delay` without a jump."""
        return self._checked - self._steady_since >= self._expiry_delay

    def uptime(self) -> float:
        """Return the uptime."""
        self._advance()
        return self._uptime

    def before(self, seconds: float) -> float:
        """Return a time T. Everything that the system's clock dated before T is at least `seconds`
        old.
        """
        earliest = self.earliest()
        is_steady = self._checked - self._steady_since >= seconds
        return (self._wall if is_steady else earliest) - seconds

    def uptime_at(self, expires: float | None) -> float | None:
        """Return the uptime at the system's time `expires`, if no jump happens until then. Return
        None if the system's clock is trusted, or if `expires` is None.
        """
        self._advance()
        if expires is None or self.is_trusted:
            return None
        return self._uptime + expires - self._wall

    def time_at(self, uptime: float) -> float:
        """Return the system's time at an uptime, if no jump happens until then."""
        self._advance()
        return self._wall + uptime - self._uptime

    async def begin(self, store: Store) -> None:
        """Continue with what is in the database. Call this before the first cleanup."""
        query = f"SELECT value FROM meta WHERE key = '{_KEY}'"
        row = await store.read(lambda connection: connection.execute(query).fetchone())
        if row is not None:
            earliest, uptime = (float(value) for value in row["value"].split())
            self.resume(earliest, uptime)

    def record(self, transaction: Transaction) -> None:
        """Write the lower bound and the uptime to the database."""
        value = f"{self._earliest} {self._uptime}".encode()
        transaction.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            [_KEY, value],
        )
