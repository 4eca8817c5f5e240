"""Image functions, which refuse."""

from typing import Any, NoReturn

from planish.errors import UnsupportedError


def get_image_processor(model_name: str, **options: Any) -> NoReturn:
    """Refused: planish reads text only."""
    raise UnsupportedError("get_image_processor is not offered: planish reads text only")


def resize_image(image: Any, *arguments: Any, **options: Any) -> NoReturn:
    """Refused: planish reads text only."""
    raise UnsupportedError("resize_image is not offered: planish reads text only")
