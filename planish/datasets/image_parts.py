"""Read the image of a message's part as an ImageChunk."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

from planish.errors import UserError
from planish.images import MAX_IMAGE_BYTES, ImageChunk

_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}
_DATA_URL = re.compile(r"data:image/(png|jpeg|jpg);base64,(.*)", re.DOTALL | re.IGNORECASE)
MAX_DATA_URL_CHARACTERS = 64 + -(-MAX_IMAGE_BYTES // 3) * 4
"""The maximum length of a data URL."""


def image_chunk(image: Any, where: str) -> ImageChunk:
    """Return the image of a message's part as a chunk.

    `image`: the bytes of a PNG or JPEG file, the Path of such a file, a PIL image, an ImageChunk, or
    a data URL. `where`: the part, with which errors begin. Raises UserError for anything else. A
    string never names a file, and no address is fetched.
    """
    if isinstance(image, ImageChunk):
        return image
    if isinstance(image, str):
        return chunk_of_data_url(image, where)
    if isinstance(image, Path):
        image = _file_content(image, where)
    if hasattr(image, "convert") and hasattr(image, "save"):
        file = io.BytesIO()
        image.convert("RGB").save(file, "PNG")
        image = file.getvalue()
    if not isinstance(image, bytes):
        raise UserError(
            f"{where} has an image of type {type(image).__name__}; give the bytes of a PNG or JPEG "
            "file, a PIL image, or a data URL"
        )
    found = [kind for start, kind in _SIGNATURES.items() if image.startswith(start)]
    if not found:
        raise UserError(f"{where} has an image that is neither PNG nor JPEG; convert it")
    return _chunk(image, found[0], where)


def _file_content(path: Path, where: str) -> bytes:
    """Return the content of a file. At most one byte more than the limit is read."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"{where} has the image {path}, which cannot be read ({error.strerror}); check the path"
        ) from error


def chunk_of_data_url(url: str, where: str) -> ImageChunk:
    """Return the image of a data URL. Raises UserError, which begins with `where`, for any other
    address.
    """
    match = _DATA_URL.match(url[:64])
    if match is None:
        raise UserError(
            f"{where} has the address {url[:60]!r}, and images are never fetched or read from files; "
            "give the image itself, such as data:image/png;base64,..."
        )
    if len(url) > MAX_DATA_URL_CHARACTERS:
        raise UserError(
            f"{where} has a data URL of {len(url):,} characters; give at most "
            f"{MAX_DATA_URL_CHARACTERS:,}"
        )
    try:
        data = base64.b64decode(url[match.start(2) :], validate=True)
    except ValueError as error:
        raise UserError(f"{where} has a data URL that is not base64") from error
    return _chunk(data, "png" if match[1].lower() == "png" else "jpeg", where)


def _chunk(data: bytes, file_format: Any, where: str) -> ImageChunk:
    try:
        return ImageChunk(data, file_format)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
