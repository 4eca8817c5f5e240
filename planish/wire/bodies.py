"""Decompression of request bodies. A size limit keeps a small compressed body from filling the
memory.
"""

from __future__ import annotations

import zlib

import zstandard

from planish.errors import UserError

# The largest window of a zstd frame, in bytes. The zstd command has the same default.
_MAX_WINDOW_BYTES = 1 << 27
# The number of compressed bytes that are decompressed before each check of the size. A zstd block
# with content has at least 4 compressed bytes, and at most 128 KiB after decompression. So
# _SLICE_BYTES compressed bytes contain at most 512 such blocks, which decompress to at most 64 MiB.
_SLICE_BYTES = 1 << 11


class BodyTooLargeError(UserError):
    """The body is larger than the server accepts."""


def body_too_large(limit: int) -> BodyTooLargeError:
    """Return the error for a body above `limit` bytes."""
    return BodyTooLargeError(
        f"the body is larger than {limit // (1 << 20)} MiB; send less data in one call "
        "(the SDK's limit is fwdbwd_max_chunk_bytes_count)"
    )


def decompress_body(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the body, decompressed as `Content-Encoding` says. Raise BodyTooLargeError if the
    result has more than `limit` bytes, and UserError if the body cannot be decompressed.
    """
    match encoding.strip().lower():
        case "" | "identity":
            decompressed = body
        case "zstd":
            decompressed = _decompress_zstd(body, limit)
        case "gzip" | "x-gzip":
            decompressed = _decompress_gzip(body, limit)
        case other:
            raise UserError(
                f"Content-Encoding {other[:40]!r} is not supported; send zstd, gzip, or none"
            )
    if len(decompressed) > limit:
        raise body_too_large(limit)
    return decompressed


def _decompress_zstd(body: bytes, limit: int) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()
    pieces: list[bytes] = []
    size = start = 0
    try:
        while start < len(body) and not decompressor.eof:
            pieces.append(decompressor.decompress(body[start : start + _SLICE_BYTES]))
            start += _SLICE_BYTES
            size += len(pieces[-1])
            if size > limit:
                raise body_too_large(limit)
    except zstandard.ZstdError as error:
        raise UserError(
            f"Content-Encoding is zstd, but the body cannot be decompressed ({error})"
        ) from None
    if not decompressor.eof or decompressor.unused_data or start < len(body):
        raise UserError("Content-Encoding is zstd, but the body is not one complete zstd frame")
    return b"".join(pieces)


def _decompress_gzip(body: bytes, limit: int) -> bytes:
    decompressor = zlib.decompressobj(wbits=31)
    try:
        decompressed = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise UserError(
            f"Content-Encoding is gzip, but the body cannot be decompressed ({error})"
        ) from None
    if len(decompressed) > limit:
        raise body_too_large(limit)
    if not decompressor.eof or decompressor.unused_data:
        raise UserError("Content-Encoding is gzip, but the body is not one complete gzip stream")
    return decompressed
