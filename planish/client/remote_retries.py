"""The retry policy for requests: which failures are retried, after which delay, and for how
long.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planish.client.remote_errors import ServerUnreachableError, error_from_response

if TYPE_CHECKING:
    from httpx2 import Response

PATIENCE_SECONDS = 600.0
"""How long a server may be unreachable before its requests fail."""
RETRIED_STATUSES = (408, 425, 429, 503)
"""Statuses with which a server asks the client to retry later."""
_NOT_RETRIED_STATUSES = (501, 505)
_FIRST_DELAY, _MAX_DELAY, _MAX_RETRY_AFTER = 0.2, 5.0, 60.0
_MAX_SERVER_ERRORS = 5
"""Number of consecutive 500 responses that are retried. A restarting server sends other statuses.
"""


@dataclass
class RetryState:
    """The retry state of one request, or of one stream of requests."""

    max_seconds: float
    url: str
    _delay: float = _FIRST_DELAY
    _unavailable_since: float | None = None
    _num_server_errors: int = 0

    def reset(self) -> None:
        """Reset the state, because the server has answered."""
        self._delay, self._unavailable_since, self._num_server_errors = _FIRST_DELAY, None, 0

    async def wait_after_no_answer(self, error: Exception) -> None:
        """Wait before the next try. Raise ServerUnreachableError if there was no answer for
        `max_seconds`.
        """
        if self._is_time_over():
            raise ServerUnreachableError(
                f"no server answers at {self.url} ({error}); start one with `planish serve` or "
                "check the URL, or leave base_url out to run in this process"
            ) from error
        await self.pause()

    async def wait_after_error(self, response: Response) -> None:
        """Wait before the next try, or raise the response's error if it cannot be retried or the
        time is over. For a rate limit (429), no time limit applies.
        """
        status = response.status_code
        self._num_server_errors = self._num_server_errors + 1 if status == 500 else 0
        if (
            (status < 500 and status not in RETRIED_STATUSES)
            or status in _NOT_RETRIED_STATUSES
            or self._num_server_errors > _MAX_SERVER_ERRORS
        ):
            raise error_from_response(response)
        if status == 429:
            self._unavailable_since = None
        elif self._is_time_over():
            raise error_from_response(response)
        await self.pause(_retry_after(response))

    async def pause(self, min_seconds: float = 0.0) -> None:
        """Sleep for the current delay, and double it up to a maximum."""
        # Jitter, so that many waiting requests do not all retry at the same moment.
        await asyncio.sleep(max(min_seconds, self._delay) * random.uniform(1.0, 1.5))
        self._delay = min(2 * self._delay, _MAX_DELAY)

    def _is_time_over(self) -> bool:
        now = time.monotonic()
        self._unavailable_since = (
            now if self._unavailable_since is None else self._unavailable_since
        )
        return now - self._unavailable_since >= self.max_seconds


def _retry_after(response: Response) -> float:
    """Return the seconds of the Retry-After header; 0 if there is none."""
    try:
        return min(_MAX_RETRY_AFTER, max(0.0, float(response.headers.get("retry-after", "0"))))
    except ValueError:
        return 0.0
