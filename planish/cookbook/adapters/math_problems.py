"""The mathematics of the cookbook's recipes: answers in a box, and the published datasets."""

from functools import cache
from typing import Any

import chz

from planish.datasets.grading import Grader, extract_boxed as boxed_in
from planish.datasets.gsm8k import read_problem
from planish.datasets.math_problems import COLLECTIONS
from planish.errors import UserError
from planish.rl.environments.boxed_problems import BoxedProblemDatasetBuilder, BoxedProblemEnv
from planish.rl.types import RLDataset, RLDatasetBuilder

MathEnv = BoxedProblemEnv


def extract_boxed(text: str) -> str:
    """Return the content of the last \\boxed{...}. Raises ValueError if there is none."""
    found = boxed_in(text)
    if found is None:
        raise ValueError("no boxed answer in the text")
    return found


def extract_gsm8k_final_answer(text: str) -> str:
    """Return the text after #### in a worked solution. Raises ValueError if there is none."""
    return read_problem({"question": "?", "answer": text}, "the solution").answer


@cache
def _grader() -> Grader:
    return Grader()


def grade_answer(given_answer: str, ground_truth: str) -> bool:
    """Return whether planish's grader treats two answers as equal."""
    return _grader().equal(given_answer, ground_truth)


def grade_answer_math_verify(given_answer: str, ground_truth: str) -> bool:
    """Same as `grade_answer`, whose grader uses math-verify."""
    return grade_answer(given_answer, ground_truth)


@chz.chz
class _CollectionBuilder(RLDatasetBuilder):
    """A published dataset, which planish's own builder reads."""

    batch_size: int
    model_name_for_tokenizer: str
    renderer_name: str
    group_size: int
    convo_prefix: Any = "standard"
    seed: int = 0
    collection: str = ""

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        if self.convo_prefix != "standard":
            raise UserError("convo_prefix: the worked example is fixed; leave it out")
        return await BoxedProblemDatasetBuilder(
            collection=self.collection,
            model_name=self.model_name_for_tokenizer,
            renderer_name=self.renderer_name,
            batch_size=self.batch_size,
            group_size=self.group_size,
            seed=self.seed,
        )()


@chz.chz
class Gsm8kDatasetBuilder(_CollectionBuilder):
    """GSM8K."""

    collection: str = "gsm8k"


@chz.chz
class MathDatasetBuilder(_CollectionBuilder):
    """MATH, evaluated on MATH-500."""

    collection: str = "math"


@chz.chz
class PolarisDatasetBuilder(_CollectionBuilder):
    """POLARIS."""

    collection: str = "polaris"


@chz.chz
class DeepMathDatasetBuilder(_CollectionBuilder):
    """DeepMath."""

    collection: str = "deepmath"


def get_math_dataset_builder(
    dataset_name: str,
    batch_size: int,
    model_name_for_tokenizer: str,
    renderer_name: str,
    group_size: int,
    seed: int = 0,
) -> RLDatasetBuilder:
    """Return the builder of math, polaris, deepmath or gsm8k."""
    if dataset_name not in COLLECTIONS:
        raise UserError(f"dataset_name={dataset_name!r}: give one of {', '.join(COLLECTIONS)}")
    return _CollectionBuilder(
        batch_size=batch_size,
        model_name_for_tokenizer=model_name_for_tokenizer,
        renderer_name=renderer_name,
        group_size=group_size,
        seed=seed,
        collection=dataset_name,
    )
