"""Files of checkpoints, to whoever holds a token for them, and tokenizers.

A client asks with its key for URLs, and reads from those without one, as from a store of signed
URLs. The newer SDK asks for one URL a file; the older for one archive, which is a tar file made
while it is sent.
"""

from __future__ import annotations

import asyncio
import os
import tarfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from planish.errors import PlanishError
from planish.server.age_files import CheckpointFiles
from planish.server.errors import NoSuchBaseModel, NotFound
from planish.server.exchange import API, Exchange, answered, endpoint, refused
from planish.server.routes_checkpoints import CHECKPOINT, checkpoint_path

_VALID_SECONDS = 3600
_BLOCK = 1 << 20
_COMPLETE = "checkpoint_complete"
"""An empty member that older SDKs look for, the last one of an archive."""


async def external_weights_urls(exchange: Exchange) -> Response:
    path = checkpoint_path(exchange)
    files = await exchange.core.checkpoint_files(exchange.tenant, path)
    base, expires = _download_base(exchange, path)
    return answered(
        {
            "urls": {name: f"{base}/{quote(name)}" for name in files.names},
            "expires": expires.isoformat(),
        }
    )


async def archive(exchange: Exchange) -> Response:
    path = checkpoint_path(exchange)
    await exchange.core.checkpoint_files(exchange.tenant, path)
    base, expires = _download_base(exchange, path)
    headers = {"Location": f"{base}/archive.tar", "Expires": format_datetime(expires, usegmt=True)}
    return Response(status_code=302, headers=headers)


def _download_base(exchange: Exchange, path: str) -> tuple[str, datetime]:
    token = exchange.core.download_token(exchange.tenant, path, _VALID_SECONDS)
    root = str(exchange.request.base_url).rstrip("/")
    return f"{root}{API}/downloads/{quote(token)}", datetime.now(UTC) + timedelta(
        seconds=_VALID_SECONDS
    )


async def download(request: Request) -> Response:
    name = request.path_params["name"]
    try:
        files = await request.app.state.http.core.files_of_token(request.path_params["token"])
        if name != "archive.tar" and name not in files.names:
            raise NotFound(f"there is no file {name[:100]!r} in this checkpoint")
        opened = await asyncio.to_thread(
            _opened, files, files.names if name == "archive.tar" else [name]
        )
    except PlanishError as error:
        return refused(error)
    if name == "archive.tar":
        size = sum(tar_size(file.size) for file in opened) + tar_size(0) + 2 * tarfile.BLOCKSIZE
        return _streamed(tar_of(opened), size, "application/x-tar")
    return _streamed(pieces_of(opened[0]), opened[0].size, "application/octet-stream")


def _streamed(pieces: AsyncIterator[bytes], size: int, media_type: str) -> Response:
    return StreamingResponse(pieces, media_type=media_type, headers={"Content-Length": str(size)})


@dataclass(frozen=True)
class OpenFile:
    """A file that is read to its end even if its checkpoint is deleted or replaced meanwhile."""

    name: str
    file: BinaryIO
    size: int


def _opened(files: CheckpointFiles, names: Sequence[str]) -> list[OpenFile]:
    try:
        handles = {name: files.open(name) for name in names}
    except FileNotFoundError:
        raise NotFound("the checkpoint was deleted") from None
    return [OpenFile(name, file, os.fstat(file.fileno()).st_size) for name, file in handles.items()]


async def pieces_of(opened: OpenFile) -> AsyncIterator[bytes]:
    with opened.file as file:
        while piece := await asyncio.to_thread(file.read, _BLOCK):
            yield piece


def tar_size(content: int) -> int:
    """Of one member: its header, and its content filled up to whole blocks."""
    return tarfile.BLOCKSIZE * (1 + -(-content // tarfile.BLOCKSIZE))


async def tar_of(files: Sequence[OpenFile]) -> AsyncIterator[bytes]:
    """A tar file of `files`, piece by piece."""
    for file in files:
        yield _header(file.name, file.size)
        async for piece in pieces_of(file):
            yield piece
        yield bytes(-file.size % tarfile.BLOCKSIZE)
    yield _header(_COMPLETE, 0)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.USTAR_FORMAT)


async def tokenizer(exchange: Exchange) -> Response:
    """The files of a base model's tokenizer, by name: the official SDK asks a hub, a client of ours
    can ask here.
    """
    name = exchange.request.query_params.get("base_model", "")
    directory = exchange.state.settings.tokenizer_directories.get(name)
    if directory is None:
        raise NoSuchBaseModel(
            f"base_model={name[:100]!r}: give one of {', '.join(exchange.state.settings.tokenizer_directories)}"
        )
    return answered(
        {"base_model": name, "files": await asyncio.to_thread(tokenizer_files, directory)}
    )


def tokenizer_files(directory: Path) -> dict[str, str]:
    """The text of each file of `directory` from which a tokenizer is loaded."""
    found = {
        path.name: path
        for pattern in _TOKENIZER_FILES
        for path in directory.glob(pattern)
        if path.is_file()
    }
    return {name: path.read_text(encoding="utf-8") for name, path in sorted(found.items())}


_TOKENIZER_FILES = (
    "config.json",  # without it transformers does not know what kind of tokenizer the others are
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)

ROUTES = [
    endpoint(CHECKPOINT + "/external_weights_urls", external_weights_urls, "GET"),
    endpoint(CHECKPOINT + "/archive", archive, "GET"),
    endpoint("/tokenizer", tokenizer, "GET"),
    Route(API + "/downloads/{token}/{name}", download, methods=["GET"]),
]
