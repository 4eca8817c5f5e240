"""Connections to one server, by httpx2, which is loaded with the first of them: `import planish` is
to cost little.

Whatever goes wrong before an answer is whole is NoAnswerError, so nothing else here knows the
library.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from planish.errors import UserError

if TYPE_CHECKING:
    from httpx2 import Response

# Below the time after which servers close a connection that nobody uses, so that a request seldom
# meets a closed one.
_KEEP_ALIVE_SECONDS = 4.0
_CONNECT_SECONDS, _SILENCE_SECONDS = 5.0, 60.0


class NoAnswerError(Exception):
    """Nobody answered, or not to the end; the cause is the library's error."""


class Http:
    """A pool of connections that has no limit. Its methods are for one event loop."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """UserError for a URL that cannot be one."""
        import httpx2  # a tenth of a second, which only those pay who have a server

        try:
            self._client = httpx2.AsyncClient(
                base_url=url,
                headers=headers,
                timeout=httpx2.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS, pool=None),
                limits=httpx2.Limits(
                    max_connections=None,
                    max_keepalive_connections=None,
                    keepalive_expiry=_KEEP_ALIVE_SECONDS,
                ),
                # A proxy of the environment is for the world outside.
                trust_env=not is_this_machine(url),
            )
        except httpx2.InvalidURL as error:
            raise UserError(f"base_url={url!r}: {error}") from None

    async def close(self) -> None:
        await self._client.aclose()

    async def request(self, method: str, path: str, **options: Any) -> Response:
        """The whole answer. `options` are those of httpx2."""
        with _no_answer():
            return await self._client.request(method, path, **options)

    @asynccontextmanager
    async def stream(self, method: str, path: str, **options: Any) -> AsyncIterator[Response]:
        """An answer whose body is still to come; NoAnswerError also for what is read of it in the
        block.
        """
        with _no_answer():
            async with self._client.stream(method, path, **options) as response:
                yield response


def is_this_machine(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


@contextmanager
def _no_answer() -> Iterator[None]:
    import httpx2

    try:
        yield
    except httpx2.RequestError as error:
        name = type(error).__name__
        raise NoAnswerError(f"{name}: {error}" if str(error) else name) from error
