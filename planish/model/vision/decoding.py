"""The decoding of image files by Pillow, in bounded memory."""

from __future__ import annotations

import io
import threading
from typing import Any

from planish.errors import UnsupportedError, UserError
from planish.images import MAX_IMAGE_PIXELS, MAX_IMAGE_SIDE, ImageChunk

MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")
"""The color modes of Pillow that are decoded. The others have more than 8 bits per channel."""
_MAX_DECODERS = 2
_decoders = threading.BoundedSemaphore(_MAX_DECODERS)
"""Limits the images that are decoded at a time, and so the memory for their pixels."""


def decode_image(chunk: ImageChunk, name: str) -> Any:
    """Return the image of a chunk as a PIL.Image.Image in RGB, upright.

    The size is checked before any pixel is decoded. As in transformers, the orientation in the
    file's EXIF data is applied, and an alpha channel is dropped. `name`: the argument that errors
    name. Raises UserError if the file is no image of its format or exceeds a limit, and
    UnsupportedError if Pillow is missing, or for an animation or a mode that is not in `MODES`.
    """
    pillow, image_ops = _pillow()
    with _decoders:
        try:
            image = pillow.open(io.BytesIO(chunk.data), formats=[chunk.format.upper()])
        except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
            raise UserError(f"{name} is too large ({error}); {_limits()}") from error
        except Exception as error:  # Pillow's plugins raise many kinds of errors.
            raise UserError(f"{name} is no {chunk.format} file that Pillow can read") from error
        with image:
            width, height = image.size
            if width * height > MAX_IMAGE_PIXELS or max(width, height) > MAX_IMAGE_SIDE:
                raise UserError(f"{name} has {width:,} x {height:,} pixels; {_limits()}")
            # The second image of a photo's JPEG file is a preview or a map of brightness.
            if chunk.format == "png" and getattr(image, "n_frames", 1) > 1:
                raise UnsupportedError(
                    f"{name} is an animation of {image.n_frames} images; give single images"
                )
            if image.mode not in MODES:
                raise UnsupportedError(
                    f"{name} has the color mode {image.mode!r}; convert it to RGB with 8 bits per "
                    "channel"
                )
            try:
                image.load()
                return image_ops.exif_transpose(image).convert("RGB")
            except Exception as error:
                raise UserError(f"{name} is damaged ({error}); send the whole file") from error


def _limits() -> str:
    return (
        f"give at most {MAX_IMAGE_PIXELS:,} pixels, and at most {MAX_IMAGE_SIDE:,} in width and "
        "height"
    )


def _pillow() -> tuple[Any, Any]:
    """Return the modules PIL.Image and PIL.ImageOps."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise UnsupportedError(
            "images need Pillow; install it with pip install 'planish[images]'"
        ) from error
    return Image, ImageOps
