"""Image chunks in both encodings: bytes in protobuf, base64 in JSON."""

from __future__ import annotations

import base64
from typing import Any

from planish.errors import UnsupportedError, UserError
from planish.images import MAX_IMAGE_BYTES, ImageChunk
from planish.wire.fields import Fields

MAX_IMAGE_CHARACTERS = -(-MAX_IMAGE_BYTES // 3) * 4
"""The maximum length of an image in base64."""


def image_from_message(message: Any, path: str) -> ImageChunk:
    """Read an image chunk from its protobuf message. Errors begin with `path`."""
    if message.HasField("override_dimensions"):
        raise UnsupportedError(
            f"{path}.override_dimensions is not supported; resize the image, or leave it out"
        )
    expected_tokens = message.expected_tokens if message.HasField("expected_tokens") else None
    return _image(message.data, message.format, expected_tokens, path)


def write_image(chunk: ImageChunk, message: Any) -> None:
    """Write an image chunk into its protobuf message."""
    message.data, message.format = chunk.data, chunk.format
    if chunk.expected_tokens is not None:
        message.expected_tokens = chunk.expected_tokens


def image_from_json(fields: Fields) -> ImageChunk:
    """Read an image chunk from its JSON object, whose `type` has been read."""
    text = fields.text("data", MAX_IMAGE_CHARACTERS)
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise UserError(f"{fields.path('data')} is not base64; encode the image's file") from error
    expected_tokens = fields.optional(fields.integer, "expected_tokens")
    return _image(data, fields.text("format"), expected_tokens, fields.path("data"))


def image_to_json(chunk: ImageChunk) -> dict[str, Any]:
    """Return an image chunk as a JSON object."""
    fields: dict[str, Any] = {
        "type": "image",
        "data": base64.b64encode(chunk.data).decode(),
        "format": chunk.format,
    }
    if chunk.expected_tokens is not None:
        fields["expected_tokens"] = chunk.expected_tokens
    return fields


def unsupported_chunk(path: str, kind: str | None) -> UserError:
    """Return the error for a chunk that is neither text nor an image."""
    if kind == "image_asset_pointer":
        return UnsupportedError(
            f"{path} names a stored image, and this server stores none; send the bytes of the "
            "image as an ImageChunk"
        )
    if kind == "dmel":
        return UnsupportedError(
            f"{path} is audio, and the models of this server read text and images; send "
            "encoded_text and image chunks"
        )
    return UserError(f"{path} is no known chunk; send encoded_text and image chunks")


def _image(data: bytes, file_format: Any, expected_tokens: int | None, path: str) -> ImageChunk:
    try:
        return ImageChunk(data, file_format, expected_tokens)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
