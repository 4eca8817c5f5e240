"""Requests of commands to the REST API of a server, and the transfer of files."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from planish.client.remote_connection import API, normalize_url
from planish.client.remote_errors import (
    ServerFaultError,
    ServerUnreachableError,
    error_from_response,
    json_body_of,
)
from planish.client.remote_http import HttpClient, NoAnswerError
from planish.errors import StorageError, as_user_errors
from planish.processes.interruption import run_coroutine

if TYPE_CHECKING:
    from httpx2 import Response

_MAX_FRUITLESS_TRIES = 5
_RETRY_SECONDS = 1.0
_BLOCK_BYTES = 1 << 20
_OWN_LINK = re.compile(rf"{API}/(downloads|uploads)/.*")


class RestConnection:
    """The URL and the key of a server."""

    def __init__(self, url: str, key: str | None) -> None:
        """`key` is the API key; None for a server without keys. Raise UserError for a wrong URL."""
        with as_user_errors("--base-url"):
            self._url = normalize_url(url)
        self._headers = {"X-API-Key": key} if key else {}

    def call(self, method: str, path: str, **options: Any) -> Mapping[str, Any]:
        """Send a request, and return the fields of the answer. Raise the error of an answer that
        reports one.
        """
        http = HttpClient(self._url, self._headers)
        return json_body_of(run_coroutine(self._send(http, method, API + path, **options)))

    def download(self, url: str, target: Path) -> Path:
        """Download a file from a link, and return its path. Raise StorageError if it cannot be
        written.
        """
        return run_coroutine(self._download_file(_own_path(url), target))

    def upload(self, url: str, file: Path) -> None:
        """Upload a file to a link."""
        run_coroutine(self._upload_file(_own_path(url), file))

    async def _send(self, http: HttpClient, method: str, path: str, **options: Any) -> Response:
        """Send one request, and close `http`. Raise the error of an answer that reports one."""
        try:
            response = await http.request(method, path, **options)
        except NoAnswerError as error:
            raise self._unreachable(error) from error
        finally:
            await http.close()
        if not response.is_success:
            raise error_from_response(response)
        return response

    async def _download_file(self, url: str, target: Path) -> Path:
        http, partial_file = HttpClient(self._url, {}), target.with_name(f".{target.name}.part")
        try:
            with open(partial_file, "wb") as file:
                await self._download(http, url, file)
            partial_file.replace(target)
        except NoAnswerError as error:
            raise self._unreachable(error) from error
        except OSError as error:
            raise StorageError(
                f"cannot write {target} ({error}); free space or give another --out"
            ) from error
        finally:
            with suppress(OSError):
                partial_file.unlink(missing_ok=True)
            await http.close()
        return target

    async def _download(self, http: HttpClient, url: str, file: BinaryIO) -> None:
        """Write the content of a URL to an empty file. If the connection breaks and the server
        supports ranges, continue from the last byte that arrived. Raise NoAnswerError if
        _MAX_FRUITLESS_TRIES tries in a row bring no byte.
        """
        tag, num_fruitless_tries = None, 0
        while True:
            start = file.tell()
            headers = {"Accept-Encoding": "identity"}
            if tag is not None:
                headers |= {"Range": f"bytes={start}-", "If-Range": tag}
            try:
                async with http.stream("GET", url, headers=headers) as response:
                    if not response.is_success:
                        await response.aread()
                        raise error_from_response(response)
                    file.seek(_first_byte(response, start))
                    file.truncate()
                    tag = response.headers.get("etag")
                    async for block in response.aiter_raw():
                        file.write(block)
                    return
            except NoAnswerError:
                num_fruitless_tries = 0 if file.tell() > start else num_fruitless_tries + 1
                if tag is None or num_fruitless_tries == _MAX_FRUITLESS_TRIES:
                    raise
                await asyncio.sleep(_RETRY_SECONDS)

    def _unreachable(self, error: Exception) -> ServerUnreachableError:
        return ServerUnreachableError(
            f"no server answers at {self._url} ({error}); check --base-url, or start one"
        )

    async def _upload_file(self, url: str, file: Path) -> None:
        async def blocks() -> AsyncIterator[bytes]:
            with open(file, "rb") as content:
                while block := content.read(_BLOCK_BYTES):
                    yield block

        headers = {"Content-Length": str(file.stat().st_size)}
        await self._send(HttpClient(self._url, {}), "PUT", url, content=blocks(), headers=headers)


def _first_byte(response: Response, requested: int) -> int:
    """Return the position in the file at which the body of a response begins. A proxy may answer
    with a whole file, or with a range that begins before the `requested` byte. Raise
    ServerFaultError for any other range.
    """
    if response.status_code != 206:
        return 0
    content_range = response.headers.get("content-range", "")
    match = re.match(r"bytes (\d{1,19})-", content_range)
    if match is None or int(match[1]) > requested:
        raise ServerFaultError(
            f"the server, or a proxy before it, sent the range {content_range[:100]!r} for the "
            f"bytes from {requested} on; download the checkpoint again"
        )
    return int(match[1])


def _own_path(url: str) -> str:
    """Return the path of a link of this server, for downloads or uploads. The client then uses the
    URL at which it reaches the server: behind a proxy, a link may name another host. Return the
    links of other stores as they are.
    """
    match = _OWN_LINK.search(url)
    return url if match is None else match[0]
