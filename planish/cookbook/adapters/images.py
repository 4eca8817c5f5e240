"""Image functions of the cookbook."""

from typing import TYPE_CHECKING, Any, NoReturn

from planish.errors import UnsupportedError, UserError

if TYPE_CHECKING:
    from PIL.Image import Image


def get_image_processor(model_name: str, **options: Any) -> NoReturn:
    """Raise UnsupportedError: renderers find the image processor themselves."""
    raise UnsupportedError(
        "get_image_processor is not offered: renderers use the image processor in the directory of "
        "the tokenizer"
    )


def resize_image(image: "Image", max_size: int) -> "Image":
    """Return the image, shrunk to at most `max_size` pixels on its longer side."""
    from PIL.Image import Resampling

    if max_size < 1:
        raise UserError(f"max_size={max_size}: give at least 1")
    longest = max(image.size)
    if longest <= max_size:
        return image
    width, height = (max(1, side * max_size // longest) for side in image.size)
    return image.resize((width, height), Resampling.LANCZOS)
