"""Images in the input of a model, and the limits of images. This module does not decode them."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal, get_args

import numpy as np

from planish.errors import UserError

ImageFormat = Literal["png", "jpeg"]

MAX_IMAGE_BYTES = 16 << 20
"""The maximum number of bytes of an image's file."""
MAX_IMAGE_PIXELS = 1 << 24
"""The maximum number of pixels of an image. An image of 4096 x 4096 pixels has as many."""
MAX_IMAGE_SIDE = 1 << 15
"""The maximum width and height of an image in pixels."""
MAX_IMAGE_TOKENS = 1 << 15
"""What an image without `expected_tokens` counts in limits, before its tokens are known."""
MAX_IMAGES = 64
"""The maximum number of images in the input of one sequence."""


@dataclass(frozen=True)
class ImageChunk:
    """An image in the input of a model. It takes the place of the model's image tokens.

    The text around the image, with tokens such as "<|vision_start|>", is in the chunks before and
    after the image.
    """

    data: bytes
    """The content of a PNG or JPEG file."""
    format: ImageFormat
    expected_tokens: int | None = None
    """The number of tokens of the image. The engine computes this number from the image and rejects
    another number. None: the engine's number.
    """
    type: Literal["image"] = "image"

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes):
            raise UserError(
                f"ImageChunk.data is a {type(self.data).__name__}; give the bytes of a PNG or JPEG "
                "file"
            )
        if self.format not in get_args(ImageFormat):
            raise UserError(f"ImageChunk.format={self.format!r}: give 'png' or 'jpeg'")
        if not 0 < len(self.data) <= MAX_IMAGE_BYTES:
            raise UserError(
                f"ImageChunk.data has {len(self.data):,} bytes; give an image of 1 to "
                f"{MAX_IMAGE_BYTES:,} bytes"
            )
        expected: Any = self.expected_tokens
        if expected is not None:
            is_integer = isinstance(expected, int | np.integer) and not isinstance(expected, bool)
            if not is_integer or not 0 < expected < 1 << 31:
                raise UserError(
                    f"ImageChunk.expected_tokens={expected!r}: give a whole number of at least 1, "
                    "or None"
                )
            object.__setattr__(self, "expected_tokens", int(expected))

    def __repr__(self) -> str:
        return (
            f"ImageChunk(data=<{len(self.data):,} bytes>, format={self.format!r}, "
            f"expected_tokens={self.expected_tokens})"
        )

    def keys(self) -> list[int]:
        """Return a negative number for each token, which follows from the content of the image."""
        digest = sha256(f"{self.format}:".encode() + self.data).digest()
        first = int.from_bytes(digest[:6], "little") >> 2 << 15
        return [-1 - first - number for number in range(self.length)]

    @property
    def length(self) -> int:
        """The number of tokens. Raise UserError if `expected_tokens` is None."""
        if self.expected_tokens is None:
            raise UserError(
                "the number of tokens of an ImageChunk without expected_tokens is known to the "
                "engine only; give expected_tokens"
            )
        return self.expected_tokens
