"""The image processor of a model: from an image to the patches that the vision tower reads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planish.errors import DamagedFileError, UnsupportedError, UserError
from planish.images import ImageChunk
from planish.model.hf_config.vision_config import VisionConfig
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
    """The image processor of Qwen's models, as in transformers, with Pillow."""

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

    def patches(self, image: Any) -> tuple[Tensor, Tensor]:
        """Return the patches of an image, float32 [patches, numbers], and their grid, int64 [1, 3].

        `image`: a PIL.Image.Image in RGB. The grid has the numbers of times, rows and columns.
        """
        features = self._processor(images=[image], return_tensors="pt")
        return features["pixel_values"], features["image_grid_thw"].long()

    @cached_property
    def _processor(self) -> Any:
        """transformers' image processor.

        Raises DamagedFileError if its file is missing or does not fit the model.
        """
        try:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
                Qwen2VLImageProcessorPil,
            )
        except ImportError as error:
            raise UnsupportedError(
                f"images need Pillow and a newer transformers ({error}); install "
                "planish[images] and transformers 5.23"
            ) from error
        path = self.directory / PROCESSOR_FILES[0]
        if not has_image_processor(self.directory):
            raise DamagedFileError(
                f"{path} is missing, and images cannot be read without it; download the model again"
            )
        try:
            processor: Any = Qwen2VLImageProcessorPil.from_pretrained(
                self.directory, local_files_only=True
            )
        except Exception as error:  # The loader raises many kinds of errors.
            raise DamagedFileError(f"{path} is no image processor of Qwen ({error})") from error
        vision = self._vision
        if vision is None:
            return processor
        found = (processor.patch_size, processor.temporal_patch_size, processor.merge_size)
        expected = (vision.patch_size, vision.temporal_patch_size, vision.merge_size)
        if found != expected:
            raise DamagedFileError(
                f"{path} has patch_size, temporal_patch_size and merge_size {found}, and "
                f"config.json has {expected}; download both files of one model"
            )
        return processor
