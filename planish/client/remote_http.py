"""An HTTP connection pool for one server, based on httpx2.

httpx2 is imported when the first pool is made, to keep `import planish` fast. Every failure before
a response is complete becomes a NoAnswerError, so no other module depends on httpx2.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from planish.errors import UserError

if TYPE_CHECKING:
    from httpx2 import Response

# Less than the idle timeout of servers (uvicorn: 5 s), so that requests rarely meet a connection
# which the server is closing.
_KEEP_ALIVE_SECONDS = 4.0
_CONNECT_TIMEOUT_SECONDS, _READ_TIMEOUT_SECONDS = 5.0, 60.0


class NoAnswerError(Exception):
    """The server sent no response, or an incomplete one. The cause is the error of httpx2."""


class HttpClient:
    """A connection pool without a size limit, for use in one event loop."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Create a pool for `url`, with `headers` on every request. Raise UserError if `url` is
        invalid.
        """
        import httpx2  # takes 0.1 s, so import it only for a server

        try:
            self._client = httpx2.AsyncClient(
                base_url=url,
                headers=headers,
                timeout=httpx2.Timeout(
                    _READ_TIMEOUT_SECONDS, connect=_CONNECT_TIMEOUT_SECONDS, pool=None
                ),
                limits=httpx2.Limits(
                    max_connections=None,
                    max_keepalive_connections=None,
                    keepalive_expiry=_KEEP_ALIVE_SECONDS,
                ),
                # The environment's proxy settings do not apply to a server on this machine.
                trust_env=not is_this_machine(url),
            )
        except httpx2.InvalidURL as error:
            raise UserError(f"base_url={url!r}: {error}") from None

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def request(self, method: str, path: str, **options: Any) -> Response:
        """Return the complete response. `options` are the keyword arguments of httpx2."""
        with _raises_no_answer():
            return await self._client.request(method, path, **options)

    @asynccontextmanager
    async def stream(self, method: str, path: str, **options: Any) -> AsyncGenerator[Response]:
        """Yield a response whose body is read in the block, where NoAnswerError may be raised
        too.
        """
        with _raises_no_answer():
            async with self._client.stream(method, path, **options) as response:
                yield response


def is_this_machine(url: str) -> bool:
    """Return whether the host of `url` is this machine by a loopback name or address."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


@contextmanager
def _raises_no_answer() -> Generator[None]:
    import httpx2

    try:
        yield
    except httpx2.RequestError as error:
        name = type(error).__name__
        raise NoAnswerError(f"{name}: {error}" if str(error) else name) from error
