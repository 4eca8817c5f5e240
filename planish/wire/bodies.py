"""Compressed request bodies, opened under a cap: a small body that swells must not fill the memory."""

from __future__ import annotations

import zlib

import zstandard

from planish.errors import UserError

# A frame's window; the largest that zstd's own command opens without being asked.
_MAX_WINDOW = 1 << 27
# Of a compressed body at a time: it can hold 512 blocks of 128 KiB, so no more than 64 MiB come out
# before the size is looked at.
_SLICE = 1 << 11


class BodyTooLargeError(UserError):
    """The body is larger than the server takes."""


def too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body is larger than {limit // (1 << 20)} MiB; send fewer data in one call (fwdbwd_max_chunk_bytes_count)"
    )


def open_body(body: bytes, encoding: str, limit: int) -> bytes:
    """The body as it was before `Content-Encoding: encoding`; BodyTooLargeError above `limit`
    bytes.
    """
    match encoding.strip().lower():
        case "" | "identity":
            opened = body
        case "zstd":
            opened = _open_zstd(body, limit)
        case "gzip" | "x-gzip":
            opened = _open_gzip(body, limit)
        case other:
            raise UserError(
                f"Content-Encoding {other[:40]!r} is not taken; send zstd, gzip, or none"
            )
    if len(opened) > limit:
        raise too_large(limit)
    return opened


def _open_zstd(body: bytes, limit: int) -> bytes:
    reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
    pieces: list[bytes] = []
    size = start = 0
    try:
        while start < len(body) and not reader.eof:
            pieces.append(reader.decompress(body[start : start + _SLICE]))
            start += _SLICE
            size += len(pieces[-1])
            if size > limit:
                raise too_large(limit)
    except zstandard.ZstdError as error:
        raise UserError(
            f"Content-Encoding is zstd, but the body cannot be opened ({error})"
        ) from None
    if not reader.eof or reader.unused_data or start < len(body):
        raise UserError("Content-Encoding is zstd, but the body is no whole zstd frame")
    return b"".join(pieces)


def _open_gzip(body: bytes, limit: int) -> bytes:
    reader = zlib.decompressobj(wbits=31)
    try:
        opened = reader.decompress(body, limit + 1)
    except zlib.error as error:
        raise UserError(
            f"Content-Encoding is gzip, but the body cannot be opened ({error})"
        ) from None
    if len(opened) > limit:
        raise too_large(limit)
    if not reader.eof or reader.unused_data:
        raise UserError("Content-Encoding is gzip, but the body is no whole gzip stream")
    return opened
