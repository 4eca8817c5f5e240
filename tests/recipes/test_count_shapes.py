"""Pictures of shapes: what is drawn, what is right, and that a tiny model learns to count them."""

import io
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from planish.datasets.layouts import conversation_of
from planish.datasets.rows import load_rows
from planish.errors import UserError
from planish.files import read_rows
from planish.recipes import chat_sl, count_shapes, shape_rows
from planish.recipes.count_shapes import ShapesEnv
from planish.recipes.shapes import CELL, Shapes, held_out_shapes, random_shapes
from planish.recipes.training_run import read_options
from planish.renderers import get_renderer
from planish.testing_vision import tiny_vision_model
from planish.tokenizer import load_tokenizer


def num_shapes(data: bytes, cells: int) -> int:
    """Return the number of cells of a picture that are not white."""
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert pixels.shape == (CELL * cells, CELL * cells, 3)
    grid = pixels.reshape(cells, CELL, cells, CELL, 3)
    return int((grid != 255).any(axis=(1, 3, 4)).sum())


@pytest.mark.parametrize("cells", [2, 4])
def test_a_picture_has_its_number_of_shapes(cells):
    rng = random.Random(3)
    pictures = [random_shapes(rng, cells**2, cells) for _ in range(40)]
    assert all(num_shapes(each.png(), cells) == each.count for each in pictures)
    assert {each.count for each in pictures} >= {1, 2, 3, 4}
    assert pictures[0].png() == Shapes(pictures[0].count, pictures[0].seed, cells).png()
    assert len({each.png() for each in pictures}) > 30
    test = held_out_shapes(8, 4, cells)
    assert [each.count for each in test] == [1, 2, 3, 4] * 2
    assert not {each.png() for each in test} & {each.png() for each in pictures}


def options(recipe: Any, *arguments: str) -> Any:
    return read_options(recipe.Options, {}, arguments)


def test_the_rows_have_the_pictures(tmp_path):
    shape_rows.main(options(shape_rows, f"directory={tmp_path}", "rows=6", "test_rows=4"))
    for split, number in (("train", 6), ("test", 4)):
        rows = load_rows(str(tmp_path), split)
        assert len(rows) == number
        for row in rows:
            conversation: Any = conversation_of(row, row.location)
            question, answer = conversation
            path = question["content"][0]["image"]
            assert num_shapes(Path(path).read_bytes(), 2) == int(answer["content"])


@pytest.mark.parametrize("recipe", [shape_rows, count_shapes])
def test_more_shapes_than_cells_are_an_error(recipe, tmp_path):
    name = "directory" if recipe is shape_rows else "log_path"
    with pytest.raises(UserError, match="largest=5: give at most cells . cells"):
        recipe.main(options(recipe, f"{name}={tmp_path}", "largest=5"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_vision_model(tmp_path_factory.mktemp("vision")))


@pytest.mark.parametrize(
    ("text", "is_right", "has_format"),
    [("3", True, True), ("It shows 3.", True, False), ("4", False, True), ("", False, False)],
)
def test_the_last_number_of_an_answer_is_graded(model, text, is_right, has_format):
    env = ShapesEnv(get_renderer("chatml", load_tokenizer(model)), Shapes(3, "a"))
    assert (env.check_answer(text), env.check_format(text)) == (is_right, has_format)


@pytest.mark.slow
def test_a_tiny_model_learns_to_count(tmp_path, monkeypatch):
    """A model that does not see the pictures has at least the NLL of a random one of four numbers.
    Half of an answer's two tokens is the number.
    """
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "data"))
    shapes, warm, log = tmp_path / "shapes", tmp_path / "warm", tmp_path / "run"
    shape_rows.main(options(shape_rows, f"directory={shapes}", "model=true", "test_rows=32"))
    common = [f"model_name={shapes / 'model'}", "lora_rank=32", "save_every=0"]
    chosen = ["learning_rate=5e-3", "lr_schedule=constant", "max_steps=30", "num_epochs=4"]
    sizes = [f"dataset={shapes}", f"log_path={warm}", "batch_size=32", "eval_every=30"]
    chat_sl.main(options(chat_sl, *common, *chosen, *sizes))
    nll = [row["test/nll"] for row in read_rows(warm / "metrics.jsonl") if "test/nll" in row]
    assert nll[-1] < 0.7 * math.log(4) / 2 < nll[0]
    steps = ["max_steps=2", "batch_size=8", "group_size=8", "eval_every=0"]
    count_shapes.main(
        options(count_shapes, *common, *steps, f"log_path={log}", f"load_checkpoint_path={warm}")
    )
    rows = read_rows(log / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[0]["env/all/correct"] > 0.25
    # A step whose groups all have constant rewards trains nothing.
    key = "optim/kl_sample_train_v2"
    gaps = [row[key] for row in rows if key in row]
    assert gaps
    assert max(map(abs, gaps)) < 1e-6
