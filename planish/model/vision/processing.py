"""The image processor of a model: from an image to the patches that the vision tower reads."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from functools import cached_property
from hashlib import sha256
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planish.errors import DamagedFileError, UnsupportedError, UserError
from planish.images import ImageChunk
from planish.model.architecture.inspection.vision_config import VisionConfig
from planish.model.vision.decoding import decode_image

if TYPE_CHECKING:
    from torch import Tensor

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""The files that may have the options of the image processor."""
MAX_KEPT_COUNTS = 1 << 16
"""The maximum number of images whose number of tokens is kept. Each takes about 200 bytes."""


def has_image_processor(directory: Path) -> bool:
    """Return whether a model directory has the options of an image processor."""
    return any((directory / name).is_file() for name in PROCESSOR_FILES)


class ImageProcessor:
    """The image processor of a model, as in transformers, with Pillow. This class is that of Qwen's
    models.
    """

    def __init__(self, directory: Path, vision: VisionConfig | None = None) -> None:
        """Create a processor. `directory` is read when the first image comes.

        `vision`: the vision tower, which the processor's files must fit. None: it is not known.
        """
        self.directory, self._vision = directory, vision
        self._counts: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self._lock = threading.Lock()

    def num_tokens(self, chunk: ImageChunk, name: str) -> int:
        """Return the number of tokens of an image, after a check of its file.

        The numbers of the most recent images are kept by content, so an image in many prompts is
        decoded once. Raises UserError (or a subclass), which begins with `name`, for an invalid
        image.
        """
        key = (chunk.format, sha256(chunk.data).digest())
        with self._lock:
            count = self._counts.pop(key, None)
        if count is None:
            rows, columns = self.grid(decode_image(chunk, name).size, name)
            count = rows * columns
        with self._lock:
            self._counts[key] = count
            while len(self._counts) > MAX_KEPT_COUNTS:
                self._counts.popitem(last=False)
        return count

    def grid(self, size: tuple[int, int], name: str) -> tuple[int, int]:
        """Return the numbers of rows and columns of an image's tokens.

        `size`: width and height in pixels. Raises UserError for an image that is too narrow; its
        message begins with `name`.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        processor = self._processor
        limits, unit = processor.size, processor.patch_size * processor.merge_size
        try:
            height, width = smart_resize(
                size[1],
                size[0],
                unit,
                min_pixels=limits["shortest_edge"],
                max_pixels=limits["longest_edge"],
            )
        except ValueError as error:
            raise UserError(f"{name} has {size[0]} x {size[1]} pixels: {error}") from error
        return height // unit, width // unit

    def inputs(self, image: Any) -> dict[str, Tensor]:
        """Return the arguments of the tower for an image: its patches, float32 [patches, numbers],
        and their grid, int64 [1, 3], with the numbers of times, rows and columns.

        `image`: a PIL.Image.Image in RGB.
        """
        features = self._processor(images=[image], return_tensors="pt")
        return {
            "pixel_values": features["pixel_values"],
            "image_grid_thw": features["image_grid_thw"].long(),
        }

    @cached_property
    def _processor(self) -> Any:
        """transformers' image processor.

        Raises DamagedFileError if its file is missing or does not fit the model.
        """
        path = self.directory / PROCESSOR_FILES[0]
        if not has_image_processor(self.directory):
            raise DamagedFileError(
                f"{path} is missing, and images cannot be read without it; download the model again"
            )
        try:
            processor = self._class.from_pretrained(self.directory, local_files_only=True)
        except ImportError as error:
            raise UnsupportedError(
                f"images need Pillow and a newer transformers ({error}); install "
                "planish[images] and transformers 5.23"
            ) from error
        except Exception as error:  # The loader raises many kinds of errors.
            raise DamagedFileError(
                f"{path} has no options of {self._class.__name__} ({error}); download it again"
            ) from error
        if self._vision is not None:
            self._check(processor, self._vision, path)
        self._adapt(processor)
        return processor

    def _adapt(self, processor: Any) -> None:
        """Change options of a checked processor."""

    @property
    def _class(self) -> Any:
        """transformers' class of the image processor."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        return Qwen2VLImageProcessorPil

    def _check(self, processor: Any, vision: VisionConfig, path: Path) -> None:
        """Raise DamagedFileError if the processor's options do not fit the tower."""
        found = (processor.patch_size, processor.temporal_patch_size, processor.merge_size)
        expected = (vision.patch_size, vision.temporal_patch_size, vision.merge_size)
        if found != expected:
            raise DamagedFileError(
                f"{path} has patch_size, temporal_patch_size and merge_size {found}, and "
                f"config.json has {expected}; download both files of one model"
            )


class Gemma3ImageProcessor(ImageProcessor):
    """The image processor of Gemma 3, which resizes every image to one square size."""

    def grid(self, size: tuple[int, int], name: str) -> tuple[int, int]:
        """Return the numbers of rows and columns of an image's tokens, which are always the same."""
        vision = self._vision
        if vision is not None and vision.image_size is not None:
            side = vision.image_size // (vision.patch_size * vision.merge_size)
        else:
            side = isqrt(_option_of(self.directory, "image_seq_length") or 256)
        return side, side

    def inputs(self, image: Any) -> dict[str, Tensor]:
        """Return the argument of the tower for an image: its pixels, float32 [1, 3, size, size]."""
        return {
            "pixel_values": self._processor(images=[image], return_tensors="pt")["pixel_values"]
        }

    @property
    def _class(self) -> Any:
        """transformers' class of the image processor."""
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil

    def _check(self, processor: Any, vision: VisionConfig, path: Path) -> None:
        """Raise an error if the processor's options do not fit the tower."""
        if processor.do_pan_and_scan:
            raise UnsupportedError(
                f"do_pan_and_scan is true in {path}; planish reads each image as one, so set it to "
                "false"
            )
        size = (processor.size["width"], processor.size["height"])
        if size != (vision.image_size, vision.image_size):
            raise DamagedFileError(
                f"{path} resizes images to {size[0]} x {size[1]} pixels, and image_size in "
                f"config.json is {vision.image_size}; download both files of one model"
            )


class Gemma4ImageProcessor(ImageProcessor):
    """The image processor of Gemma 4, which resizes an image of any size to about as many tokens."""

    def grid(self, size: tuple[int, int], name: str) -> tuple[int, int]:
        """Return the numbers of rows and columns of an image's tokens."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import (
            get_aspect_ratio_preserving_size,
        )

        processor = self._processor
        patch_size, merge_size = processor.patch_size, processor.pooling_kernel_size
        max_patches = processor.max_soft_tokens * merge_size**2
        try:
            height, width = get_aspect_ratio_preserving_size(
                size[1], size[0], patch_size, max_patches, merge_size
            )
        except ValueError as error:
            raise UserError(f"{name} has {size[0]} x {size[1]} pixels: {error}") from error
        return height // (patch_size * merge_size), width // (patch_size * merge_size)

    def inputs(self, image: Any) -> dict[str, Tensor]:
        """Return the arguments of the tower for an image: its patches, float32 [1, N, numbers],
        and their columns and rows, int64 [1, N, 2]. Those of padding are -1.
        """
        features = self._processor(images=[image], return_tensors="pt")
        return {name: features[name] for name in ("pixel_values", "image_position_ids")}

    @property
    def _class(self) -> Any:
        """transformers' class of the image processor."""
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        return Gemma4ImageProcessorPil

    def _check(self, processor: Any, vision: VisionConfig, path: Path) -> None:
        """Raise an error if the processor's options do not fit the tower."""
        if not processor.do_resize:
            raise UnsupportedError(f"do_resize is false in {path}; set it to true")
        found = (processor.patch_size, processor.pooling_kernel_size)
        if found != (vision.patch_size, vision.merge_size):
            raise DamagedFileError(
                f"{path} has patch_size and pooling_kernel_size {found}, and config.json has "
                f"{(vision.patch_size, vision.merge_size)}; download both files of one model"
            )


class Gemma4UnifiedImageProcessor(Gemma4ImageProcessor):
    """The image processor of the unified models of Gemma 4, whose patches have the size of a token.

    transformers' own class for them needs torchvision. It reads small patches and joins those of a
    token, which gives large patches.
    """

    def _adapt(self, processor: Any) -> None:
        """Make the patches large."""
        processor.patch_size *= processor.pooling_kernel_size
        processor.pooling_kernel_size = 1


_CLASSES: dict[str, type[ImageProcessor]] = {
    "qwen": ImageProcessor,
    "gemma3": Gemma3ImageProcessor,
    "gemma4": Gemma4ImageProcessor,
    "gemma4_unified": Gemma4UnifiedImageProcessor,
}
"""The classes by `VisionConfig.processor`."""
_KINDS = (("Gemma4Unified", "gemma4_unified"), ("Gemma4", "gemma4"), ("Gemma3", "gemma3"))
"""The beginnings of `image_processor_type`, and the kinds of processor. The first one counts."""


def image_processor(directory: Path, vision: VisionConfig | None = None) -> ImageProcessor:
    """Return the image processor in a directory. `vision`: the vision tower, if it is known."""
    if vision is not None:
        return _CLASSES[vision.processor](directory, vision)
    name = str(_option_of(directory, "image_processor_type"))
    kind = next((kind for beginning, kind in _KINDS if name.startswith(beginning)), "qwen")
    return _CLASSES[kind](directory)


def _option_of(directory: Path, option: str) -> Any:
    """Return an option of the image processor in a directory, or None."""
    for name in PROCESSOR_FILES:
        try:
            fields = json.loads((directory / name).read_text("utf-8"))
        except (OSError, ValueError):  # transformers' loader reports a damaged file
            continue
        nested = fields.get("image_processor") if isinstance(fields, dict) else None
        for part in (fields, nested):
            if isinstance(part, dict) and option in part:
                return part[option]
    return None
