"""An HTTP connection that sends anything, even what no client library would: raw bytes in paths,
broken headers, partial requests.
"""

import asyncio
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

RESPONSE_TIMEOUT = 300.0
"""A request without an answer after this time hangs. A busy machine needs some time."""
_STATUSES_WITHOUT_BODY = (204, 304)


class NoResponse(Exception):
    """No answer came."""


@dataclass(frozen=True)
class RawRequest:
    """One request."""

    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    is_broken: bool = False
    """Not an HTTP request: `target` is sent as it is, and the connection is closed after the
    answer, if there is one.
    """

    def __str__(self) -> str:
        return f"{self.method} {self.target[:200]!r} {self.headers} {self.body[:400]!r}"

    def encoded(self, host: bytes, key_headers: bytes) -> bytes:
        if self.is_broken:
            return self.target
        lines = b"".join(b"%b: %b\r\n" % header for header in self.headers)
        head = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%b" % (
            self.method.encode(),
            self.target,
            host,
            key_headers,
            lines,
        )
        return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(self.body), self.body)


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    seconds: float


class Connection:
    """A connection that is opened when it is needed, and reopened after the server closed it."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._address = parts.hostname, parts.port
        self._host = parts.netloc.encode()
        self._key_headers = f"x-api-key: {key}\r\nauthorization: Bearer {key}\r\n".encode()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: RawRequest) -> Answer | None:
        """Return the answer. None where the server closed the connection upon a broken request, as it
        may.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(RESPONSE_TIMEOUT):
                status, body = await self._exchange(request)
        except TimeoutError:
            await self.close()
            raise NoResponse(f"no answer in {RESPONSE_TIMEOUT:g} s") from None
        except (ConnectionError, asyncio.IncompleteReadError):
            await self.close()
            if request.is_broken:
                return None
            raise
        if request.is_broken:
            await self.close()
        return Answer(status, body, time.monotonic() - began)

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _exchange(self, request: RawRequest) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=1 << 20)
        reader, writer = self._streams
        writer.write(request.encoded(self._host, self._key_headers))
        if request.is_broken and writer.can_write_eof():
            writer.write_eof()
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        status = int(lines[0].split()[1])
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(b":") for line in lines[1:])
        }
        body = await _body(reader, request.method, status, headers)
        if headers.get(b"connection", b"").lower() == b"close":
            await self.close()
        return status, body


async def _body(
    reader: asyncio.StreamReader, method: str, status: int, headers: dict[bytes, bytes]
) -> bytes:
    if method == "HEAD" or status in _STATUSES_WITHOUT_BODY:
        return b""
    if b"content-length" in headers:
        return await reader.readexactly(int(headers[b"content-length"]))
    if headers.get(b"transfer-encoding", b"").lower() != b"chunked":
        return await reader.read()
    pieces = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        pieces.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return b"".join(pieces)
