"""Count the shapes in a picture: RL with images, and a program as the grader.

    python -m planish.recipes.count_shapes                     Qwen3-VL 2B from the hub
    python -m planish.recipes.count_shapes model_name=/tmp/shapes/model load_checkpoint_path=RUN
                                                               the tiny model of
                                                               planish/recipes/shape_rows.py after a
                                                               warm start

The reward is correct + 0.1 * (format - 1): 1 for the right number, and 0.1 less if the answer is
more than a number. Each training picture is new. The test has pictures that are never trained on,
with each number of shapes equally often. docs/recipes/count_shapes.md has the whole run.
"""

import sys
from functools import partial
from pathlib import Path

import chz

from planish import ServiceClient
from planish.recipes import training_run
from planish.recipes.arithmetic_expressions import last_number
from planish.recipes.rl_options import RLOptions, run
from planish.recipes.shapes import Shapes, held_out_shapes, random_shapes
from planish.renderers import Content, Renderer
from planish.rl.environments.datasets import ENDLESS_NUM_BATCHES
from planish.rl.environments.problem_datasets import ProblemDatasetBuilder
from planish.rl.environments.problem_env import ProblemEnv
from planish.rl.types import RLDataset
from planish.training.option_rules import GROUP_SIZE, at_least, check_fields, require, zero_for


class ShapesEnv(ProblemEnv):
    """One picture."""

    def __init__(self, renderer: Renderer, shapes: Shapes) -> None:
        super().__init__(renderer)
        self.shapes = shapes

    def get_question(self) -> Content:
        """Return the picture and the question."""
        return self.shapes.question["content"]

    def check_format(self, sample_str: str) -> bool:
        """Return whether the text is a number alone."""
        return sample_str.strip().isdecimal()

    def check_answer(self, sample_str: str) -> bool:
        """Return whether the last number of the text is the number of shapes."""
        return last_number(sample_str) == self.shapes.count

    def get_reference_answer(self) -> str:
        """Return the number of shapes."""
        return str(self.shapes.count)


@chz.chz
class ShapesDatasetBuilder(ProblemDatasetBuilder):
    """Groups for random pictures without end, and held-out pictures for the test."""

    largest: int = 4
    cells: int = 2
    eval_problems: int = 64

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return (training dataset, test dataset). Without test pictures, the latter is None."""
        sample = partial(random_shapes, largest=self.largest, cells=self.cells)
        test = held_out_shapes(self.eval_problems, self.largest, self.cells)
        return self.generated(sample, ENDLESS_NUM_BATCHES), self.evaluation(test)

    def make_env(self, problem: Shapes) -> ShapesEnv:
        """Return the environment of one answer."""
        return ShapesEnv(self.renderer, problem)

    def tag(self) -> str:
        """Return "shapes"."""
        return "shapes"


@chz.chz
class Options(RLOptions):
    """Options of the recipe."""

    model_name: str = "Qwen/Qwen3-VL-2B-Instruct"
    log_path: str = "/tmp/planish-examples/count_shapes"
    largest: int = chz.field(
        default=4, doc="largest number of shapes in a picture", metadata=at_least(1)
    )
    cells: int = chz.field(
        default=2,
        doc="rows and columns of a picture; a cell has a shape or none",
        metadata=at_least(1),
    )
    batch_size: int = chz.field(default=16, doc="pictures per step", metadata=at_least(1))
    group_size: int = chz.field(default=8, doc="answers per picture", metadata=GROUP_SIZE)
    eval_problems: int = chz.field(
        default=64, doc="number of test pictures; 0 = none", metadata=zero_for("no evaluation")
    )
    learning_rate: float = 3e-4
    max_tokens: int = 8
    max_steps: int | None = 40
    eval_every: int = 10


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    check_fields(options)
    require(options, largest=(options.largest <= options.cells**2, "at most cells * cells"))
    builder = training_run.build(ShapesDatasetBuilder, options)
    return run(options, builder, recipe_name="count_shapes", service_client=service_client)


if __name__ == "__main__":
    training_run.run_command(main, Options, {}, sys.argv[1:])
