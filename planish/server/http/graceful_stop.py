"""How a server stops: it listens until its work is done.

1. `HttpState.stopping` is set. New work gets status 503 with Retry-After, and so do /healthz
   and /readyz. Requests that only wait for memory or for their turn end with the same status.
2. For up to STOP_SECONDS, the engine finishes its current operations and downloads continue.
   Polls are held, so that clients still get results. Then the unfinished samples of
   OpenAI clients end with status 503, or with an error event in a stream.
3. `HttpState.ending` is set. All polls end, and the server closes its port. Responses that are
   not complete after RESPONSE_SECONDS are cut off.
"""

from __future__ import annotations

import asyncio
import time

from planish.server.http.context import HttpState

STOP_SECONDS = 30
"""How long a shutdown waits for running requests, in seconds."""
RESPONSE_SECONDS = 5
"""How long a shutdown waits for the last responses to be sent, in seconds."""
_DOWNLOAD_CHECK_SECONDS = 0.1


async def drain(http: HttpState) -> None:
    """Do the first two steps of a stop, and begin the third: the caller closes the port next."""
    deadline = time.monotonic() + STOP_SECONDS
    http.stopping.set()
    await http.server.drain(STOP_SECONDS)
    while http.downloads.running.total() and time.monotonic() < deadline:
        await asyncio.sleep(_DOWNLOAD_CHECK_SECONDS)
    http.ending.set()
