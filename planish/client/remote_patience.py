"""When a request is repeated, and until when: a server may be restarted, or have too much to do,
but it is not waited for for ever.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planish.client.remote_errors import ServerUnreachableError, refusal

if TYPE_CHECKING:
    from httpx2 import Response

PATIENCE_SECONDS = 600.0
"""How long a server may be silent."""
LATER = (408, 425, 429, 503)
"""Statuses by which a server asks to be asked again."""
_NEVER = (501, 505)
_FIRST_DELAY, _LONGEST_DELAY, _LONGEST_WISH = 0.2, 5.0, 60.0
_MAX_FAULTS = 5
"""Answers 500 in a row: a server at fault says so a few times; one that restarts says something
else.
"""


@dataclass
class Patience:
    """Of one request, over its repetitions."""

    seconds: float
    url: str
    _delay: float = _FIRST_DELAY
    _silent_since: float | None = None
    _faults: int = 0

    def heard(self) -> None:
        """The server is there, and does its work."""
        self._delay, self._silent_since, self._faults = _FIRST_DELAY, None, 0

    async def after_silence(self, error: Exception) -> None:
        """Wait; ServerUnreachableError if that has been done for too long."""
        if self._is_over():
            raise ServerUnreachableError(
                f"no server answers at {self.url} ({error}); start one with `planish serve` or check the URL, "
                "or leave base_url out to run in this process"
            ) from error
        await self.pause()

    async def after_refusal(self, response: Response) -> None:
        """Wait if the answer means "later"; otherwise it is raised. A limit (429) is waited for as
        long as it takes.
        """
        status = response.status_code
        self._faults = self._faults + 1 if status == 500 else 0
        if (status < 500 and status not in LATER) or status in _NEVER or self._faults > _MAX_FAULTS:
            raise refusal(response)
        if status == 429:
            self._silent_since = None
        elif self._is_over():
            raise refusal(response)
        await self.pause(_retry_after(response))

    async def pause(self, at_least: float = 0.0) -> None:
        """Longer each time, until the server is heard."""
        # Many requests wait for one server: each at a moment of its own.
        await asyncio.sleep(max(at_least, self._delay) * random.uniform(1.0, 1.5))
        self._delay = min(2 * self._delay, _LONGEST_DELAY)

    def _is_over(self) -> bool:
        now = time.monotonic()
        self._silent_since = now if self._silent_since is None else self._silent_since
        return now - self._silent_since >= self.seconds


def _retry_after(response: Response) -> float:
    """Seconds that the server asks for."""
    try:
        return min(_LONGEST_WISH, max(0.0, float(response.headers.get("retry-after", "0"))))
    except ValueError:
        return 0.0
