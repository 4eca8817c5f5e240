"""The clock by which expired data are deleted.

Data expire by the system's clock. This clock may be wrong when the server starts, or jump while the
server runs, and it is usually corrected soon. So expired data are deleted only after the server has
run for some time, during which the system's clock always said that they had expired.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import orjson

from planish.server.durable.store import Store, Transaction

_JUMP_SECONDS = 60.0
"""The system's clock has jumped if it advanced, since the last reading, by at least this much more
or less than the monotonic clock.
"""
_REPORTED_GAP_SECONDS = 3600.0
_PRECISION = 0.05
"""How exact the uptimes of old readings are, as a share of their age."""
_KEY = "clock_readings"
"""A key in the table `meta`: the readings when they were last written."""

_log = logging.getLogger(__name__)


class ExpiryClock:
    """The readings of the system's clock, and the uptime in which servers made them.

    The uptime, in seconds, is the time for which servers have used the data directory. It does not
    jump.
    """

    def __init__(
        self,
        clock: Callable[[], float] = lambda: time.time(),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` returns the system's time and `monotonic` a time without jumps, in seconds."""
        self._clock, self._monotonic = clock, monotonic
        self._last_monotonic, self._last_wall = monotonic(), clock()
        self._uptime = 0.0
        self._readings = [(0.0, self._last_wall)]
        """Each entry is an uptime, and the smallest reading from then until the next entry. The
        gaps between entries grow with their age, so there are only some hundred entries.
        """

    async def begin(self, store: Store) -> None:
        """Continue with what is in the database. Call this before the first cleanup."""
        query = f"SELECT value FROM meta WHERE key = '{_KEY}'"
        row = await store.read(lambda connection: connection.execute(query).fetchone())
        if row is not None:
            self.resume([(uptime, wall) for uptime, wall in orjson.loads(row["value"])])

    def resume(self, readings: list[tuple[float, float]]) -> None:
        """Continue with the readings of an earlier process."""
        self._uptime, last_wall = readings[-1]
        self._readings = [*readings, (self._uptime, self._last_wall)]
        gap = self._last_wall - last_wall
        if gap > _REPORTED_GAP_SECONDS:
            _log.warning(
                "by the system's clock, this data directory was last used %.1f days ago. If the "
                "clock is wrong, correct it: data that it calls expired are deleted only after the "
                "server has run for a while",
                gap / 86400,
            )
        elif gap < -_JUMP_SECONDS:
            _log.warning(
                "the system's clock is %.0f seconds behind the last use of this data directory. "
                "Correct it if it is wrong",
                -gap,
            )

    def read(self) -> None:
        """Read the clocks. Call this often, because a date between two readings is not seen."""
        now, wall = self._monotonic(), self._clock()
        elapsed, self._last_monotonic = now - self._last_monotonic, now
        jump, self._last_wall = wall - self._last_wall - elapsed, wall
        if abs(jump) > _JUMP_SECONDS:
            _log.warning(
                "the system's clock has jumped by %+.0f seconds, or the machine was suspended; "
                "data that now have expired are deleted only after the server has run for a while",
                jump,
            )
        self._uptime += elapsed
        kept: list[tuple[float, float]] = []
        for reading in (*self._readings, (self._uptime, wall)):
            max_gap = _PRECISION * (self._uptime - reading[0])
            if len(kept) > 1 and reading[0] - kept[-2][0] <= max_gap:
                _, wall_between = kept.pop()
                uptime_before, wall_before = kept.pop()
                kept.append((uptime_before, min(wall_before, wall_between)))
            kept.append(reading)
        self._readings = kept

    def before(self, seconds: float) -> float:
        """Return the smallest reading of the last `seconds` of uptime. What the system's clock
        dated before it has existed for at least `seconds` of uptime. Return minus infinity if
        servers have not run for `seconds` yet.
        """
        self.read()
        begin = self._uptime - seconds
        index = sum(uptime <= begin for uptime, _ in self._readings)
        return -math.inf if not index else min(wall for _, wall in self._readings[index - 1 :])

    def record(self, transaction: Transaction) -> None:
        """Write the readings to the database."""
        transaction.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            [_KEY, orjson.dumps(self._readings)],
        )
