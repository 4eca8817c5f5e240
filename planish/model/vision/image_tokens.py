"""The tokens and positions of images in a sequence.

Each position of an image has a token id of its own, beyond all vocabularies. Equal ids stand for
the same part of the same image. So a comparison of token ids also compares images, in a prefix
tree, in the prefix cache and for a shared prompt. The decoder replaces the ids by the features of
the image (tower.py).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from weakref import WeakValueDictionary

import numpy as np

from planish.errors import UnsupportedError, UserError
from planish.images import ImageChunk
from planish.model.architecture.inspection.vision_config import VisionConfig
from planish.model.vision.decoding import decode_image
from planish.model.vision.processing import ImageProcessor
from planish.types import ModelInput

FIRST_IMAGE_TOKEN = 1 << 32
"""The smallest token id of an image. Each image has a range of `_IDS_PER_IMAGE` ids."""
_IDS_PER_IMAGE = 1 << 20
_MAX_KEPT_IMAGES = 1024
_MAX_KEPT_BYTES = 128 << 20


@dataclass(frozen=True, eq=False)
class Image:
    """A checked image of a base model's inputs."""

    chunk: ImageChunk
    first_token: int
    """The token id of its first position. Those of the next positions follow."""
    grid: tuple[int, int]
    """The numbers of rows and columns of its tokens."""

    @property
    def num_tokens(self) -> int:
        """The number of positions."""
        return self.grid[0] * self.grid[1]


@dataclass(frozen=True, eq=False)
class InputTokens:
    """The input of a model as token ids, with its images."""

    tokens: list[int]
    """The token ids. Those of images are at least FIRST_IMAGE_TOKEN."""
    images: tuple[Image, ...] = ()
    """The images, which must not be freed while the tokens are in use."""
    rope_positions: np.ndarray | None = None
    """The RoPE positions, int64 [3, N]: time, height and width. None without images."""
    blocks: tuple[tuple[int, int], ...] = ()
    """The ranges of positions of images whose tokens also attend to later ones of the same image."""

    @cached_property
    def rope_offset(self) -> int:
        """The difference of the RoPE position and the position of each token that follows."""
        if self.rope_positions is None:
            return 0
        return int(self.rope_positions.max()) + 1 - len(self.tokens)

    def extended(self, tokens: Sequence[int]) -> InputTokens:
        """Return this input with tokens of text after it."""
        positions = self.rope_positions
        if positions is not None:
            added = len(self.tokens) + self.rope_offset + np.arange(len(tokens))
            positions = np.concatenate([positions, np.tile(added, (3, 1))], 1)
        return replace(self, tokens=[*self.tokens, *tokens], rope_positions=positions)


class ImageRegistry:
    """The images of one base model by their content. The class is thread-safe.

    While an image is in use, the same content gives the same `Image`. The most recent images are
    kept after that too.
    """

    def __init__(self, processor: ImageProcessor, vocab_size: int, vision: VisionConfig) -> None:
        """Create a registry without images. `vision`: the model's vision tower."""
        self.processor, self.vocab_size, self.vision = processor, vocab_size, vision
        self.image_token = vision.image_token
        self._lock = threading.Lock()
        self._next_number = 0
        self._by_content: WeakValueDictionary[tuple[str, bytes], Image] = WeakValueDictionary()
        self._by_number: WeakValueDictionary[int, Image] = WeakValueDictionary()
        self._recent: OrderedDict[Image, None] = OrderedDict()
        self._recent_bytes = 0

    def image(self, chunk: ImageChunk, name: str) -> Image:
        """Return the image of a chunk, after a check of its file.

        `name`: the argument that errors name. Raises UserError (or a subclass) if the image is
        invalid, or if it has another number of tokens than expected.
        """
        key = (chunk.format, sha256(chunk.data).digest())
        with self._lock:
            image = self._by_content.get(key)
        if image is None:
            grid = self.processor.grid(decode_image(chunk, name).size, name)
            image = self._add(key, chunk, grid)
        if chunk.expected_tokens not in (None, image.num_tokens):
            raise UserError(
                f"{name} has {image.num_tokens} tokens, and expected_tokens is "
                f"{chunk.expected_tokens}; give the number of the model's image processor, or None"
            )
        self._keep(image)
        return image

    def find(self, token: int) -> tuple[Image, int]:
        """Return the image of a token id that is in use, and the number of its position."""
        number, position = divmod(token - FIRST_IMAGE_TOKEN, _IDS_PER_IMAGE)
        return self._by_number[number], position

    def _add(self, key: tuple[str, bytes], chunk: ImageChunk, grid: tuple[int, int]) -> Image:
        with self._lock:
            image = self._by_content.get(key)  # Another thread may have been faster.
            if image is None:
                number = self._next_number
                self._next_number += 1
                image = Image(chunk, FIRST_IMAGE_TOKEN + number * _IDS_PER_IMAGE, grid)
                assert image.num_tokens <= _IDS_PER_IMAGE
                self._by_content[key] = self._by_number[number] = image
            return image

    def _keep(self, image: Image) -> None:
        """Make an image the most recent one, and drop old images beyond the limits."""
        with self._lock:
            if image not in self._recent:
                self._recent_bytes += len(image.chunk.data)
            self._recent[image] = None
            self._recent.move_to_end(image)
            while len(self._recent) > _MAX_KEPT_IMAGES or self._recent_bytes > _MAX_KEPT_BYTES:
                dropped, _ = self._recent.popitem(last=False)
                self._recent_bytes -= len(dropped.chunk.data)


def read_input(
    model_input: ModelInput, registry: ImageRegistry | None, name: str = "prompt"
) -> InputTokens:
    """Return the tokens of a model input, after a check of its images.

    `registry`: None for a model that reads only text. `name`: the argument that errors name. The
    tokens of text are checked only if there are images. Raises UserError (or a subclass) for the
    first invalid image.
    """
    if not model_input.images:
        return InputTokens(model_input.to_ints())
    if registry is None:
        raise UnsupportedError(
            f"{name} contains an image, and this model reads only text; leave the image out, or "
            "use a model with images (docs/reference/models.md)"
        )
    tokens: list[int] = []
    images: list[Image] = []
    for index, chunk in enumerate(model_input.chunks):
        if isinstance(chunk, ImageChunk):
            image = registry.image(chunk, f"the image in {name}.chunks[{index}]")
            images.append(image)
            tokens += range(image.first_token, image.first_token + image.num_tokens)
        else:
            invalid = [token for token in chunk.tokens if not 0 <= token < registry.vocab_size]
            if invalid:
                raise UserError(
                    f"{name}.chunks[{index}] contains token id {invalid[0]}, which is outside the "
                    f"vocabulary; give token ids from 0 to {registry.vocab_size - 1}"
                )
            tokens += chunk.tokens
    vision = registry.vision
    if not vision.mrope_section:
        positions = np.tile(np.arange(len(tokens)), (3, 1))
        blocks = _blocks(tokens, images, name) if vision.two_way_layers else ()
        return InputTokens(tokens, tuple(images), positions, blocks)
    return InputTokens(tokens, tuple(images), rope_positions(tokens, images))


def _blocks(
    tokens: Sequence[int], images: Sequence[Image], name: str
) -> tuple[tuple[int, int], ...]:
    """Return the range of positions of each image. Raise UserError if an image follows another one
    without text between them, because the model would read them as one.
    """
    starts = image_starts(tokens, images)
    blocks = [
        (start, start + image.num_tokens) for start, image in zip(starts, images, strict=True)
    ]
    for number, (block, following) in enumerate(pairwise(blocks)):
        if block[1] == following[0]:
            raise UserError(
                f"image {number + 1} of {name} (from 0) follows image {number} without a token of text; "
                "give the model's tokens around each image as text"
            )
    return tuple(blocks)


def image_starts(tokens: Sequence[int], images: Sequence[Image]) -> list[int]:
    """Return the position of the first token of each image."""
    first_tokens = [image.first_token for image in images]
    return np.flatnonzero(np.isin(np.array(tokens), first_tokens)).tolist()


def rope_positions(tokens: Sequence[int], images: Sequence[Image]) -> np.ndarray:
    """Return the RoPE positions of Qwen's models with images: int64 [3, N].

    The three positions of text are equal. All tokens of an image have the same time. Their height
    and width count from the image's first position. The text after an image begins one after the
    largest position in the image.
    """
    positions = np.empty((3, len(tokens)), np.int64)
    done = next_position = 0
    for start, image in zip(image_starts(tokens, images), images, strict=True):
        rows, columns = image.grid
        positions[:, done:start] = next_position + np.arange(start - done)
        next_position += start - done
        done = start + image.num_tokens
        positions[0, start:done] = next_position
        positions[1, start:done] = next_position + np.arange(rows).repeat(columns)
        positions[2, start:done] = next_position + np.tile(np.arange(columns), rows)
        next_position += max(rows, columns)
    positions[:, done:] = next_position + np.arange(len(tokens) - done)
    return positions


def with_image_token(tokens: list[int], image_token: int) -> list[int]:
    """Return `tokens` with the vocabulary's `image_token` in the place of the ids of images."""
    return [token if token < FIRST_IMAGE_TOKEN else image_token for token in tokens]
