"""Downloads of checkpoints. A client requests URLs with its key, and then reads them without a key,
like the signed URLs of an object store. A URL is valid for an hour, even if the server restarts in
between. Newer SDKs request one URL per file. Older SDKs request one archive, a tar file that is
made while it is sent.

A download that broke off can be resumed, for example with `curl -C -`. Files and archives have a
strong ETag, and the server supports the headers Range (one range of bytes), If-Range and
If-None-Match. The ETag of a checkpoint that is saved again differs, so a client that sends If-Range
never joins parts of two checkpoints. An encrypted download is encrypted anew each time, so it has
no ETag and cannot be resumed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import tarfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import BinaryIO
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from planish.errors import PlanishError
from planish.server.durable.checkpoints import CheckpointFiles
from planish.server.http.context import API, Json, RequestContext, endpoint, error_response
from planish.server.http.routes_checkpoints import CHECKPOINT_PATH, checkpoint_path
from planish.server.results import NotFound

_LINK_SECONDS = 3600
_BLOCK_BYTES = 1 << 20
_ARCHIVE = "archive.tar"
_COMPLETE_FILE = "checkpoint_complete"
"""The name of the empty file at the end of an archive. Older SDKs check that this file exists."""
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")


async def external_weights_urls(context: RequestContext) -> Json:
    """Answer with a URL for each file of a checkpoint."""
    path = checkpoint_path(context)
    files = await context.server.downloads.files(context.tenant, path)
    base, expires = _download_base(context, path)
    return {
        "urls": {name: f"{base}/{quote(name)}" for name in files.names},
        "expires": expires.isoformat(),
    }


async def archive(context: RequestContext) -> Response:
    """Redirect to a tar file of the checkpoint."""
    path = checkpoint_path(context)
    await context.server.downloads.files(context.tenant, path)
    base, expires = _download_base(context, path)
    headers = {"Location": f"{base}/{_ARCHIVE}", "Expires": format_datetime(expires, usegmt=True)}
    return Response(status_code=302, headers=headers)


def _download_base(context: RequestContext, path: str) -> tuple[str, datetime]:
    token = context.server.downloads.token(context.tenant, path, _LINK_SECONDS)
    return f"{public_url(context)}{API}/downloads/{quote(token)}", datetime.now(UTC) + timedelta(
        seconds=_LINK_SECONDS
    )


def public_url(context: RequestContext) -> str:
    """Return the URL at which this client reaches the server, without a slash at the end.

    It is `HttpSettings.public_url`, or else the URL of the request. Behind a proxy, the proxy must
    pass on the client's Host. For a proxy on this machine, uvicorn takes the scheme from the header
    X-Forwarded-Proto.
    """
    return (context.state.settings.public_url or str(context.request.base_url)).rstrip("/")


async def download(request: Request) -> Response:
    """Send a file, or the archive, to the holder of a token."""
    name, state = request.path_params["name"], request.app.state.http
    try:
        tenant, files = await state.server.downloads.files_of_token(request.path_params["token"])
        if name != _ARCHIVE and name not in files.names:
            raise NotFound(f"there is no file {name[:100]!r} in this checkpoint")
        with state.downloads.slot(tenant) as slot:
            names = files.names if name == _ARCHIVE else [name]
            opened = await asyncio.to_thread(_open_files, files, names)
            headers = request.headers.mutablecopy()
            if request.method != "GET":
                del headers["range"]  # RFC 9110 defines ranges for GET only
            return download_response(
                opened, slot.pop_all(), name == _ARCHIVE, not files.recipients, headers
            )
    except PlanishError as error:
        return error_response(error)


@dataclass(frozen=True)
class OpenFile:
    """A file that can be read to its end even if its checkpoint is deleted or replaced."""

    name: str
    file: BinaryIO
    size: int
    modified: int = 0
    """When the content was last changed, in nanoseconds since 1970."""


def _open_files(files: CheckpointFiles, names: Sequence[str]) -> list[OpenFile]:
    with ExitStack() as stack:
        try:
            handles = {name: stack.enter_context(files.open(name)) for name in names}
        except FileNotFoundError:
            raise NotFound("the checkpoint was deleted") from None
        opened: list[OpenFile] = []
        for name, file in handles.items():
            status = os.fstat(file.fileno())
            opened.append(OpenFile(name, file, status.st_size, status.st_mtime_ns))
        stack.pop_all()
        return opened


@dataclass(frozen=True)
class _Part:
    """A part of a download: bytes, or the whole content of a file."""

    content: bytes | OpenFile

    @property
    def size(self) -> int:
        return self.content.size if isinstance(self.content, OpenFile) else len(self.content)


def download_response(
    files: Sequence[OpenFile],
    slot: ExitStack,
    is_archive: bool,
    is_resumable: bool,
    headers: Headers,
) -> Response:
    """Return the response with the content of open files, or with the part that the request's
    `headers` ask for. `slot` is the download's slot. The response releases it and closes the files.
    """
    parts = _archive_parts(files) if is_archive else [_Part(files[0])]
    size = sum(part.size for part in parts)
    tag = _etag(files)
    status, start, end = 200, 0, size
    sent_headers = {"Accept-Ranges": "bytes" if is_resumable else "none"}
    if is_resumable:
        sent_headers["ETag"] = tag
        if _matches(headers.get("if-none-match"), tag):
            status, end = 304, 0
        elif headers.get("range") is not None and headers.get("if-range", tag) == tag:
            status, start, end = _range(headers["range"], size)
            if status != 200:
                shown = f"{start}-{end - 1}" if status == 206 else "*"
                sent_headers["Content-Range"] = f"bytes {shown}/{size}"
    if status != 304:
        sent_headers["Content-Length"] = str(end - start)
    media_type = "application/x-tar" if is_archive else "application/octet-stream"
    return _Download(parts, files, slot, (start, end), status, sent_headers, media_type)


def _etag(files: Sequence[OpenFile]) -> str:
    identity = "\0".join(f"{file.name}\0{file.size}\0{file.modified}" for file in files)
    return f'"{hashlib.sha256(identity.encode()).hexdigest()[:32]}"'


def _matches(header: str | None, tag: str) -> bool:
    """Return whether an If-None-Match header names the tag."""
    tags = [one.strip().removeprefix("W/") for one in (header or "").split(",")]
    return tag in tags or tags == ["*"]


def _range(header: str, size: int) -> tuple[int, int, int]:
    """Return (status, start, end) for a Range header. Headers that are invalid, or that ask for
    several ranges, are ignored, as RFC 9110 permits.
    """
    match = _RANGE.fullmatch(header.replace(" ", ""))
    if match is None or not (match[1] or match[2]):
        return 200, 0, size
    if match[1]:
        start, end = int(match[1]), min(int(match[2] or size) + 1, size)
        if match[2] and int(match[2]) < start:
            return 200, 0, size
    else:
        start, end = max(0, size - int(match[2])), size
    return (206, start, end) if start < end else (416, 0, 0)


class _Download(StreamingResponse):
    """A response with a range of bytes of its parts. The files are closed when the response ends,
    even if it fails.
    """

    def __init__(
        self,
        parts: Sequence[_Part],
        files: Sequence[OpenFile],
        slot: ExitStack,
        byte_range: tuple[int, int],
        status: int,
        headers: dict[str, str],
        media_type: str,
    ) -> None:
        super().__init__(_read(parts, *byte_range), status, headers, media_type)
        self._parts = parts
        self._files = files
        self._slot = slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":
            self.body_iterator = _read(self._parts, 0, 0)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._slot.close()
            for opened in self._files:
                opened.file.close()


async def _read(parts: Sequence[_Part], start: int, end: int) -> AsyncIterator[bytes]:
    """Yield the bytes from `start` to `end` of the parts, in pieces of at most 1 MiB. Files are
    read in a thread.
    """
    offset = 0
    for part in parts:
        first, last = max(start - offset, 0), min(end - offset, part.size)
        offset += part.size
        if first >= last:
            continue
        if isinstance(part.content, bytes):
            yield part.content[first:last]
            continue
        part.content.file.seek(first)
        while first < last:
            piece = await asyncio.to_thread(part.content.file.read, min(_BLOCK_BYTES, last - first))
            if not piece:
                raise OSError(f"{part.content.name} became shorter while it was sent")
            first += len(piece)
            yield piece


def _archive_parts(files: Sequence[OpenFile]) -> list[_Part]:
    """Return the parts of a tar file of `files`."""
    parts: list[_Part] = []
    for file in files:
        padding = bytes(-file.size % tarfile.BLOCKSIZE)
        parts += [_Part(_tar_header(file.name, file.size)), _Part(file), _Part(padding)]
    return [*parts, _Part(_tar_header(_COMPLETE_FILE, 0) + bytes(2 * tarfile.BLOCKSIZE))]


def _tar_header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.USTAR_FORMAT)


ROUTES = [
    endpoint(CHECKPOINT_PATH + "/external_weights_urls", external_weights_urls, "GET"),
    endpoint(CHECKPOINT_PATH + "/archive", archive, "GET"),
    Route(API + "/downloads/{token}/{name}", download, methods=["GET"]),
]
