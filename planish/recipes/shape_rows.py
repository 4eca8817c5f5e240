"""Write pictures of shapes as rows for supervised training, and a tiny model that can learn them.

    python -m planish.recipes.shape_rows directory=/tmp/shapes               the rows
    python -m planish.recipes.shape_rows directory=/tmp/shapes model=true    a tiny random model too

The directory gets `train.jsonl`, `test.jsonl` and the folder `pictures`. `model=true` also writes a
random model with the architecture of Qwen3-VL into the folder `model`: two layers, and a vision
tower with two layers. It learns to count in minutes on a CPU. docs/recipes/count_shapes.md has the
whole run.
"""

import json
import random
import sys
from pathlib import Path

import chz

from planish.recipes import training_run
from planish.recipes.shapes import held_out_shapes, question, random_shapes
from planish.testing_vision import tiny_vision_model
from planish.training.option_rules import at_least, check_fields, require


@chz.chz
class Options:
    """Options of the command."""

    directory: str = chz.field(default="/tmp/planish-examples/shapes", doc="directory of the files")
    rows: int = chz.field(default=256, doc="number of pictures to train on", metadata=at_least(1))
    test_rows: int = chz.field(default=64, doc="number of test pictures", metadata=at_least(1))
    largest: int = chz.field(
        default=4, doc="largest number of shapes in a picture", metadata=at_least(1)
    )
    cells: int = chz.field(
        default=2,
        doc="rows and columns of a picture; a cell has a shape or none",
        metadata=at_least(1),
    )
    seed: int = 0
    model: bool = chz.field(default=False, doc="write a tiny random model with images too")


def main(options: Options) -> Path:
    """Write the files, and return the directory."""
    check_fields(options)
    require(options, largest=(options.largest <= options.cells**2, "at most cells * cells"))
    directory = Path(options.directory).expanduser()
    (directory / "pictures").mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"shapes:{options.seed}")
    splits = {
        "train": [random_shapes(rng, options.largest, options.cells) for _ in range(options.rows)],
        "test": held_out_shapes(options.test_rows, options.largest, options.cells),
    }
    for split, pictures in splits.items():
        rows = []
        for number, shapes in enumerate(pictures):
            name = f"pictures/{split}-{number}.png"
            (directory / name).write_bytes(shapes.png())
            answer = {"role": "assistant", "content": str(shapes.count)}
            rows.append(json.dumps({"messages": [question(name), answer]}) + "\n")
        (directory / f"{split}.jsonl").write_text("".join(rows), "utf-8")
    if options.model:
        tiny_vision_model(directory / "model")
    print(f"{directory}: {options.rows} rows to train on, {options.test_rows} test rows")
    return directory


if __name__ == "__main__":
    training_run.run_command(main, Options, {}, sys.argv[1:], "writes the files again")
