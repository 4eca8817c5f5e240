"""Frames: many answers in one response body, each sent as soon as it exists.

A frame consists of two lengths (uint32, little-endian), a JSON header of the first length, and
content of the second length.

This is an addition of planish to the protocol: its client gets many samples with one request (POST
/planish/draw), where the public SDK needs two requests per sample.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from planish.errors import UserError
from planish.wire.json_pieces import JsonValue

MEDIA_TYPE = "application/x-planish-frames"
_LENGTHS = struct.Struct("<II")
_MAX_HEADER = 1 << 24


@dataclass(frozen=True)
class Frame:
    """A JSON header and bytes."""

    header: Mapping[str, Any]
    content: bytes = b""

    def to_bytes(self) -> bytes:
        """Encode the frame."""
        header = orjson.dumps(dict(self.header))
        return _LENGTHS.pack(len(header), len(self.content)) + header + self.content


@dataclass
class FrameReader:
    """Takes bytes as they arrive, and returns complete frames."""

    _buffer: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[Frame]:
        """Add bytes, and return the frames that they complete."""
        self._buffer += data
        frames: list[Frame] = []
        start = 0
        while (end := self._frame_end(start)) is not None:
            header_size, _ = _LENGTHS.unpack_from(self._buffer, start)
            content_start = start + _LENGTHS.size + header_size
            frames.append(
                Frame(
                    _header(bytes(self._buffer[start + _LENGTHS.size : content_start])),
                    bytes(self._buffer[content_start:end]),
                )
            )
            start = end
        del self._buffer[:start]
        return frames

    def _frame_end(self, start: int) -> int | None:
        """Return where the frame that begins at `start` ends; None if it is incomplete."""
        if len(self._buffer) - start < _LENGTHS.size:
            return None
        header_size, content_size = _LENGTHS.unpack_from(self._buffer, start)
        if header_size > _MAX_HEADER:
            raise UserError("the answer is not a sequence of frames")
        end = start + _LENGTHS.size + header_size + content_size
        return end if end <= len(self._buffer) else None


def _header(data: bytes) -> Mapping[str, Any]:
    try:
        header: JsonValue = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UserError(f"the header of a frame is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise UserError("the header of a frame is not an object")
    return header
