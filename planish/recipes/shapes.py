"""Pictures of shapes, and the question how many there are: the data of the recipe count_shapes.

planish/recipes/shape_rows.py writes them as rows for supervised training.
"""

import io
import random
from dataclasses import dataclass

from planish.errors import UnsupportedError
from planish.renderers import Message

QUESTION = "How many shapes?"
CELL = 16
"""The width and height of a cell of the picture in pixels. A cell has at most one shape."""
COLORS = ("red", "green", "blue", "black", "orange", "purple")


@dataclass(frozen=True)
class Shapes:
    """A picture of `count` shapes, with `cells` rows of as many cells. The same seed gives the same
    picture.
    """

    count: int
    seed: str
    cells: int = 2

    @property
    def question(self) -> Message:
        """The question with the picture."""
        return question(self.png())

    def png(self) -> bytes:
        """Return the picture as the bytes of a PNG file."""
        try:
            from PIL import Image, ImageDraw
        except ImportError as error:
            raise UnsupportedError(
                "pictures need Pillow; install it with pip install 'planish[images]'"
            ) from error
        rng = random.Random(f"{self.seed}:{self.count}")
        image = Image.new("RGB", (CELL * self.cells, CELL * self.cells), "white")
        draw = ImageDraw.Draw(image)
        for cell in rng.sample(range(self.cells**2), self.count):
            row, column = divmod(cell, self.cells)
            size = rng.randint(CELL // 2, CELL - 4)
            left, top = (CELL * place + rng.randint(1, CELL - size - 1) for place in (column, row))
            right, bottom, color = left + size, top + size, rng.choice(COLORS)
            match rng.choice(("circle", "square", "triangle")):
                case "circle":
                    draw.ellipse((left, top, right, bottom), color)
                case "square":
                    draw.rectangle((left, top, right, bottom), color)
                case _:
                    points = [(left, bottom), (right, bottom), ((left + right) // 2, top)]
                    draw.polygon(points, color)
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()


def question(image: object) -> Message:
    """Return the question about an image, in a form that a row or a renderer takes."""
    return {
        "role": "user",
        "content": [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}],
    }


def random_shapes(rng: random.Random, largest: int, cells: int) -> Shapes:
    """Return a random picture of 1 to `largest` shapes for training."""
    return Shapes(rng.randint(1, largest), f"train:{rng.getrandbits(48)}", cells)


def held_out_shapes(count: int, largest: int, cells: int) -> list[Shapes]:
    """Return `count` pictures for the test, with each number of shapes equally often."""
    return [Shapes(1 + number % largest, f"test:{number}", cells) for number in range(count)]
