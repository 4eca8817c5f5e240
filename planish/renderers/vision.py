"""Renderers of models with images, such as Qwen's: <|vision_start|> image <|vision_end|>.

Every chat format works with text. So each image is first written as a random mark within the text
of its message. The codec then replaces the mark by the tokens around an image and a negative id,
which stands for the image. At the end, each negative id becomes an image chunk. A text cannot
contain a mark, because marks are random numbers that are new for each conversation.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from planish.datasets.image_parts import image_chunk
from planish.errors import UserError
from planish.images import MAX_IMAGES, ImageChunk
from planish.model.architecture.inspection.vision import may_read_images
from planish.model.vision.processing import ImageProcessor, has_image_processor, image_processor
from planish.renderers.chatml import ChatML
from planish.renderers.codec import Codec, Control, Piece, counts_tokens
from planish.renderers.messages import Capabilities
from planish.renderers.renderer import Messages, Renderer
from planish.renderers.train_on import TrainOnWhat
from planish.tokenizer import ModelTokenizer
from planish.types import EncodedTextChunk, ModelInput, ModelInputChunk


@dataclass(frozen=True)
class ImageMarks:
    """What a chat format writes around each image."""

    before: tuple[Piece, ...]
    after: tuple[Piece, ...]
    trims_text: bool = False
    """Whether the chat template trims each text of a message with images."""
    user_only: bool = False
    """Whether the chat template writes images only in the place where a user's message has them."""

    @property
    def controls(self) -> tuple[str, ...]:
        """The control tokens."""
        return tuple(
            piece.text for piece in (*self.before, *self.after) if isinstance(piece, Control)
        )


QWEN = ImageMarks((Control("<|vision_start|>"),), (Control("<|vision_end|>"),))
GEMMA3 = ImageMarks(
    ("\n\n", Control("<start_of_image>")), (Control("<end_of_image>"), "\n\n"), trims_text=True
)

GEMMA4 = ImageMarks((Control("<|image>"),), (Control("<image|>"),), trims_text=True, user_only=True)


@dataclass(frozen=True)
class QwenVL(ChatML):
    """The ChatML of Qwen3-VL, which needs the marks of images."""

    @property
    def capabilities(self) -> Capabilities:
        """What the format can express, and the tokens that it requires."""
        capabilities = super().capabilities
        return replace(capabilities, required=(*capabilities.required, *QWEN.controls))


@dataclass
class _Images:
    """The images of the conversation that is being rendered, by their marks."""

    chunks: list[ImageChunk] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def add(self, chunk: ImageChunk, where: str) -> str:
        """Add an image, and return its mark. Raise UserError if there are too many images."""
        if len(self.chunks) == MAX_IMAGES:
            raise UserError(
                f"{where} is image number {MAX_IMAGES + 1}; give at most {MAX_IMAGES} images in a "
                "conversation"
            )
        mark = f"\U0010fffd{secrets.token_hex(16)}\U0010fffd"
        self.numbers[mark] = len(self.chunks)
        self.chunks.append(chunk)
        return mark

    def split(self, text: str) -> list[str]:
        """Return the texts and the marks of `text`, in turn."""
        return re.split("(" + "|".join(self.numbers) + ")", text)


_current: ContextVar[_Images | None] = ContextVar("images", default=None)


@dataclass
class _VisionCodec(Codec):
    """A codec that writes the marks of images as negative ids."""

    marks: ImageMarks = QWEN

    def encode(self, pieces: Iterable[Piece], after: int | None = None) -> list[int]:
        """Return the ids of `pieces`. The id of image i is -(i + 1)."""
        images = _current.get()
        if images is None or not images.numbers:
            return super().encode(pieces, after)
        ids: list[int] = []
        before_image: list[Piece] = []
        for piece in pieces:
            texts: list[Piece] = [piece] if isinstance(piece, Control) else [*images.split(piece)]
            for part in texts:
                number = images.numbers.get(part) if isinstance(part, str) else None
                if number is None:
                    before_image.append(part)
                    continue
                before_image += self.marks.before
                ids += super().encode(before_image, ids[-1] if ids else after)
                before_image = [*self.marks.after]
                is_bound = counts_tokens()
                ids += [0] * images.chunks[number].length if is_bound else [-number - 1]
        return ids + super().encode(before_image, ids[-1] if ids else after)


@dataclass(frozen=True)
class VisionRenderer(Renderer):
    """A renderer whose messages of users, systems and tools may contain images.

    A part of a message's content is {"type": "image", "image": ...}, with the bytes of a PNG or JPEG
    file, the pathlib.Path of such a file, a PIL image, an ImageChunk or a data URL.
    """

    image_processor: ImageProcessor | None = field(default=None, repr=False, compare=False)
    """The model's image processor, which gives the number of an image's tokens. None: conversations
    with images are rejected.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        codec = _VisionCodec(self.tokenizer, marks=_marks_of(self.tokenizer) or QWEN)
        codec.require(codec.marks.controls, self.name)
        object.__setattr__(self, "codec", codec)

    def build_generation_prompt(
        self, messages: Messages, role: str = "assistant", prefill: str | None = None
    ) -> ModelInput:
        """Return the prompt for the next message (see `Renderer.build_generation_prompt`)."""
        with self._marked(messages) as marked:
            return _with_images(super().build_generation_prompt(marked, role, prefill), marked)

    def build_continued_prompt(self, messages: Messages) -> ModelInput:
        """Return the prompt whose last message the model continues."""
        with self._marked(messages) as marked:
            return _with_images(super().build_continued_prompt(marked), marked)

    def build_continuation(
        self, messages: Messages, answer: int, sampled: Sequence[int]
    ) -> ModelInput | None:
        """Return what is between an answer and the end of the next prompt, with its images."""
        with self._marked(messages) as marked:
            continuation = super().build_continuation(marked, answer, sampled)
            if continuation is None:
                return None
            return _with_images(continuation, marked[answer + 1 :])

    def check_prompt(self, messages: Messages) -> None:
        """Check the form of the messages of a prompt, and its images, without tokenising them."""
        with self._marked(messages) as marked:
            super().check_prompt(marked)

    def build_supervised_example(
        self,
        messages: Messages,
        train_on_what: TrainOnWhat | str = TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    ) -> tuple[ModelInput, torch.Tensor]:
        """Return the tokens and their weights. The weights of images are 0."""
        with self._marked(messages) as marked:
            model_input, weights = super().build_supervised_example(marked, train_on_what)
            return (
                _with_images(model_input, marked),
                _with_image_weights(model_input, weights),
            )

    def build_supervised_examples(
        self,
        messages: Messages,
        train_on_what: TrainOnWhat | str = TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    ) -> list[tuple[ModelInput, torch.Tensor]]:
        """Return examples in which each trained answer follows the prompt of sampling."""
        with self._marked(messages) as marked:
            return super().build_supervised_examples(marked, train_on_what)

    def check_supervised_examples(
        self,
        messages: Messages,
        train_on_what: TrainOnWhat | str = TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    ) -> None:
        """Check the form of the messages without tokenising them."""
        with self._marked(messages) as marked:
            super().check_supervised_examples(marked, train_on_what)

    @contextmanager
    def _marked(self, messages: Messages) -> Iterator[Messages]:
        """Replace images by marks, which the codec knows within the block."""
        images = _current.get() or _Images()
        token = _current.set(images)
        try:
            yield self._with_marks(messages, images)
        finally:
            _current.reset(token)

    @property
    def _marks(self) -> ImageMarks:
        assert isinstance(self.codec, _VisionCodec)
        return self.codec.marks

    def _with_marks(self, messages: Messages, images: _Images) -> Messages:
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            return messages  # The renderer rejects them.
        return [
            self._message_with_marks(message, f"messages[{index}]", images)
            for index, message in enumerate(messages)
        ]

    def _message_with_marks(self, message: Any, where: str, images: _Images) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, Sequence) or isinstance(content, str):
            return message
        parts: list[Any] = []
        has_image = any(
            isinstance(part, Mapping) and part.get("type") == "image" for part in content
        )
        for number, part in enumerate(content):
            if not isinstance(part, Mapping) or part.get("type") != "image":
                is_text = isinstance(part, Mapping) and isinstance(part.get("text"), str)
                trims = is_text and has_image and self._marks.trims_text
                parts.append({**part, "text": part["text"].strip()} if trims else part)
                continue
            place = f"{where}, content[{number}]"
            if message.get("role") == "assistant":
                raise UserError(f"{place} is an image of the assistant, which no model writes")
            if message.get("role") != "user" and self._marks.user_only:
                raise UserError(
                    f"{place} is an image of a {message.get('role')}, for which this model's chat "
                    "template has no place; give the image in a user's message"
                )
            if unknown := sorted(part.keys() - {"type", "image"}):
                raise UserError(f"{place} has the unknown key {unknown[0]!r}; remove it")
            chunk = self._counted(image_chunk(part.get("image"), place), place)
            parts.append({"type": "text", "text": images.add(chunk, place)})
        return {**message, "content": parts}

    def _counted(self, chunk: ImageChunk, where: str) -> ImageChunk:
        """Return an image with its number of tokens."""
        if self.image_processor is None:
            raise UserError(
                f"{where} is an image, and this is no model with images "
                "(docs/reference/models.md), or the directory of its tokenizer has no "
                "preprocessor_config.json; remove the image, or copy the file from the model"
            )
        return replace(chunk, expected_tokens=self.image_processor.num_tokens(chunk, where))


def image_processor_of(tokenizer: ModelTokenizer) -> ImageProcessor | None:
    """Return the image processor in the directory of a tokenizer, if planish reads images with its
    model. A directory without config.json, such as a copy of the tokenizer, is of no known model.
    """
    directory = Path(str(getattr(tokenizer, "name_or_path", "")))
    if _marks_of(tokenizer) is None or not has_image_processor(directory):
        return None
    return image_processor(directory) if may_read_images(directory) else None


def _marks_of(tokenizer: ModelTokenizer) -> ImageMarks | None:
    """Return the marks of images whose tokens a tokenizer has, or None."""
    vocabulary = getattr(tokenizer, "added_tokens_encoder", {})
    return next((m for m in (QWEN, GEMMA3, GEMMA4) if vocabulary.keys() >= set(m.controls)), None)


def _with_images(model_input: ModelInput, marked: Messages) -> ModelInput:
    """Return a model input with image chunks in the place of negative ids.

    `marked`: the messages with marks. Raises UserError if the chat format has not written each
    image once.
    """
    images = _current.get()
    if images is None or not images.chunks or counts_tokens():
        return model_input
    written = sorted(token for token in model_input.to_ints() if token < 0)
    texts = [part["text"] for message in marked for part in _text_parts(message)]
    given = sorted(-images.numbers[text] - 1 for text in texts if text in images.numbers)
    if written != given:
        raise UserError(
            f"the chat template wrote {len(written)} of {len(given)} images; use another renderer"
        )
    chunks: list[ModelInputChunk] = []
    text: list[int] = []
    for token in model_input.to_ints():
        if token >= 0:
            text.append(token)
            continue
        chunks += [EncodedTextChunk(text), images.chunks[-token - 1]]
        text = []
    return ModelInput([*chunks, EncodedTextChunk(text)])


def _text_parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]


def _with_image_weights(model_input: ModelInput, weights: torch.Tensor) -> torch.Tensor:
    """Return one weight for each token, with 0 for those of images."""
    images = _current.get()
    if images is None or not images.chunks:
        return weights
    tokens = torch.tensor(model_input.to_ints())
    counts = [1 if token >= 0 else images.chunks[-token - 1].length for token in tokens.tolist()]
    return (weights * (tokens >= 0)).repeat_interleave(torch.tensor(counts))
