"""Images in the rows of a dataset: in parts of messages, and in the columns `images` and `image`.

A part of a content may have its image itself. Or the images are in a column, and the messages say
where they belong, in one of the three ways that other trainers have:

* parts {"type": "image"} without an image, as in TRL
* the text "<image>", as in LLaMA-Factory, verl and ms-swift
* nothing: the images come first in the first user message, as in TRL and ms-swift

Each image must have a place, and each place an image. A text "<image>" in a row without images is
ordinary text.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from planish.datasets.image_parts import image_chunk
from planish.datasets.messages import IMAGE_PART_KEYS, Message, list_of
from planish.datasets.row_files import Row
from planish.errors import UserError
from planish.images import ImageChunk

IMAGE_COLUMNS = ("images", "image")
PLACEHOLDER = "<image>"
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_SOURCES = ("image", "url", "path")
"""The keys of a part of type "image" that may have the image."""

RowImage = ImageChunk | Path
"""An image of a row. A Path is the file of an image, which is read when the row is rendered."""


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a content of the messages has an image."""
    return any(_is_image(part) for message in messages for part in list_of(message, "content"))


def image_place(value: Any, place: str) -> str | None:
    """Return the place of the first image in messages, such as '"chosen"[1]["content"][0]'; None if
    there is none.

    `value`: messages, or objects and lists that contain them. `place`: its name.
    """
    if _is_image(value):
        return place
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = ((f'"{key}"', each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    found = (image_place(each, f"{place}[{key}]") for key, each in items)
    return next(filter(None, found), None)


def with_images(messages: list[Message], row: Mapping[str, Any], where: str) -> list[Message]:
    """Return the messages of a row with each image as {"type": "image", "image": RowImage}.

    Raises UserError, which begins with `where`, for an image that cannot be found, and unless each
    image of the row has a place in the messages.
    """
    return _RowImages(row, where).placed(messages)


class _RowImages:
    """The images in the columns of a row, and which of them have a place."""

    def __init__(self, row: Mapping[str, Any], where: str) -> None:
        self._where = where
        self._directory = row.directory if isinstance(row, Row) else None
        given = [name for name in IMAGE_COLUMNS if row.get(name) not in (None, "", [], {})]
        if len(given) > 1:
            raise UserError(f'{where}: there are "images" and "image"; keep one of the columns')
        self._column = given[0] if given else IMAGE_COLUMNS[0]
        self._images = [
            self._read(each, f'{where}, "{self._column}"[{number}]')
            for number, each in enumerate(_values(row[self._column]) if given else [])
        ]
        self._num_places = 0
        self._placed: set[int] = set()

    def placed(self, messages: list[Message]) -> list[Message]:
        """Return the messages with all images."""
        has_parts = has_images(messages)
        has_marks = self._images and not has_parts and any(map(_has_mark, messages))
        if self._images and not has_parts and not has_marks:
            messages = self._with_images_first(messages)
        elif has_parts or has_marks:
            messages = [
                self._message(message, f"{self._where}: messages[{index}]", bool(has_marks))
                for index, message in enumerate(messages)
            ]
        if len(self._placed) < len(self._images):
            raise self._count_error()
        return messages

    def _message(self, message: Message, where: str, has_marks: bool) -> Message:
        content = message.get("content")
        if has_marks and isinstance(content, str) and PLACEHOLDER in content:
            return {**message, "content": self._split(content)}
        parts: list[Any] = []
        for number, part in enumerate(list_of(message, "content")):
            if _is_image(part):
                parts.append(self._part(part, f"{where}, content[{number}]"))
            elif has_marks and PLACEHOLDER in str(part.get("text")):
                parts += self._split(part["text"])
            else:
                parts.append(part)
        return {**message, "content": parts} if parts else message

    def _part(self, part: Mapping[str, Any], where: str) -> Message:
        """Return a part with its image: that of the part itself, or the next one of the column."""
        sources = _sources(part, where)
        if len(sources) > 1:
            raise UserError(f"{where} has {len(sources)} images; give each image a part of its own")
        if not sources:
            return self._next_part(part.get("index"), where)
        if part.get("index") is not None:
            raise UserError(f'{where} has an image and an "index"; remove one of the two')
        return _part_of(self._read(sources[0], where))

    def _next_part(self, index: Any, where: str) -> Message:
        """Return a part with the image of the column at `index`; None = the next one."""
        number = self._num_places if index is None else index
        self._num_places += 1
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise UserError(
                f'{where} has "index": {number!r}; give the position of an image, from 0'
            )
        if number >= len(self._images):
            if index is None:
                raise self._count_error()
            raise UserError(
                f'{where} has "index": {number}, and the row has {len(self._images)} images; give the '
                "position of an image, from 0"
            )
        self._placed.add(number)
        return _part_of(self._images[number])

    def _split(self, text: str) -> list[Message]:
        """Return the parts of a text in which images take the place of "<image>"."""
        parts: list[Message] = []
        for number, each in enumerate(text.split(PLACEHOLDER)):
            if number:
                parts.append(self._next_part(None, self._where))
            if each:
                parts.append({"type": "text", "text": each})
        return parts

    def _with_images_first(self, messages: list[Message]) -> list[Message]:
        """Return the messages with all images at the start of the first user message."""
        user = next((i for i, each in enumerate(messages) if each.get("role") == "user"), None)
        if user is None:
            raise UserError(
                f"{self._where}: the row has images and no user message to show them in"
            )
        content = messages[user].get("content")
        rest = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        self._placed.update(range(len(self._images)))
        shown = {**messages[user], "content": [*map(_part_of, self._images), *rest]}
        return [*messages[:user], shown, *messages[user + 1 :]]

    def _read(self, value: Any, where: str) -> RowImage:
        if isinstance(value, Mapping):  # the feature Image of `datasets`
            unknown = sorted(key for key in value if key not in ("bytes", "path"))
            if unknown:
                raise UserError(
                    f"{where} is an image with {unknown}; give a path, a data URL, or an object with "
                    '"bytes" or "path"'
                )
            value = value["path"] if value.get("bytes") is None else value["bytes"]
        if isinstance(value, str) and value[:5].lower() != "data:":
            return self._path(value, where)
        return image_chunk(value, where)

    def _path(self, name: str, where: str) -> Path:
        address = _ADDRESS.match(name)
        if address is not None and address[1].lower() != "file":
            raise UserError(
                f"{where} has the address {name[:200]!r}, and images are never fetched; download the "
                "image and give the path of its file"
            )
        path = Path(name[len("file://") :] if address is not None else name)
        if not path.is_absolute() and self._directory is None:
            raise UserError(
                f"{where} is the path {name[:200]!r}, and the row is from no directory; give an "
                "absolute path, or the image itself"
            )
        path = (self._directory or Path()) / path
        try:
            found = path.is_file()
        except OSError:  # for instance, a name that is too long
            found = False
        if not found:
            raise UserError(
                f"{where}: there is no image file {str(path)[:300]}; give a path from the directory "
                "of the data file"
            )
        return path

    def _count_error(self) -> UserError:
        return UserError(
            f'{self._where}: the column "{self._column}" has {len(self._images)} images, and the '
            "messages do not have as many places for them; give each image one part {'type': "
            f"'image'}} or one text {PLACEHOLDER!r}, and no other place"
        )


def _values(column: Any) -> Sequence[Any]:
    """Return the images of a column: a list, JSON text of a list (in CSV files), or one image."""
    if isinstance(column, str) and column.startswith("["):
        try:
            column = json.loads(column)
        except ValueError:
            return [column]  # a path
    return column if isinstance(column, list | tuple) else [column]


def _sources(part: Mapping[str, Any], where: str) -> list[Any]:
    """Return what a part has as its image."""
    if part["type"] == "image":
        return [part[key] for key in _SOURCES if part.get(key) is not None]
    image = part.get("image_url")
    if isinstance(image, str):
        return [image]
    if not isinstance(image, Mapping) or image.get("url") is None:
        raise UserError(
            f"{where} has no address; give {{'type': 'image_url', 'image_url': {{'url': ...}}}}"
        )
    options = [key for key in image if key != "url" and image[key] not in (None, "auto")]
    if options:
        raise UserError(
            f"{where} has {options}, which planish does not use; resize the image to the detail that "
            "the model should see, and remove the key"
        )
    return [image["url"]]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PART_KEYS


def _has_mark(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    texts = [part.get("text") for part in list_of(message, "content") if isinstance(part, Mapping)]
    return any(PLACEHOLDER in text for text in [content, *texts] if isinstance(text, str))


def _part_of(image: RowImage) -> Message:
    return {"type": "image", "image": image}
