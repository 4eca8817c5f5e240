"""Questions whose final answer is in \\boxed{}: the environment of rl_basic and of most envs of
math_rl.

    reward = correct + 0.1 * (format - 1)

`correct`: the value in the last box equals the known answer (planish/datasets/grading.py).
`format`: there is a box, and the message ends with a stop sequence.
"""

import chz

from planish.datasets.grading import extract_boxed
from planish.datasets.gsm8k import QUESTION_SUFFIX, Problem, worked_example
from planish.datasets.math_problems import COLLECTIONS, load_splits
from planish.datasets.process_grader import process_grader
from planish.datasets.split_names import SplitNames
from planish.renderers import Renderer
from planish.rl.environments.problem_datasets import ProblemDatasetBuilder
from planish.rl.environments.problem_env import ProblemEnv
from planish.rl.types import RLDataset


class BoxedProblemEnv(ProblemEnv):
    """One question, asked after a worked example."""

    def __init__(self, renderer: Renderer, problem: Problem, suffix: str = QUESTION_SUFFIX) -> None:
        super().__init__(renderer, convo_prefix=worked_example(suffix))
        self.problem = problem
        self.suffix = suffix

    def get_question(self) -> str:
        """Return the question and the instruction on the answer's format."""
        return self.problem.question + self.suffix

    def check_format(self, sample_str: str) -> bool:
        """Return whether the text has a \\boxed{} result."""
        return extract_boxed(sample_str) is not None

    async def check_answer(self, sample_str: str) -> bool:
        """Return whether the last \\boxed{} result equals the known answer. The check runs in a
        grading process.
        """
        return (await process_grader().grade(sample_str, self.problem.answer)).correct

    def get_reference_answer(self) -> str:
        """Return the known answer."""
        return self.problem.answer


@chz.chz
class BoxedProblemDatasetBuilder(SplitNames, ProblemDatasetBuilder):
    """The problems of a collection of planish/datasets/math_problems.py. Training samples
    `group_size` answers to each problem, and an evaluation one answer to each test problem.
    """

    collection: str
    dataset: str | None = chz.field(
        default=None, doc="hub name, local directory or file; none = the published one"
    )
    eval_problems: int | None = chz.field(
        default=None, doc="number of test problems; none = the whole test split"
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return (training dataset, test dataset). Without test problems, the latter is None."""
        splits = load_splits(
            COLLECTIONS[self.collection],
            self.dataset,
            eval_problems=self.eval_problems,
            seed=self.seed,
            train_split=self.train_split,
            test_split=self.test_split,
        )
        for note in splits.notes:
            print(note)
        return self.shuffled(splits.train), self.evaluation(splits.test)

    def make_env(self, problem: Problem) -> BoxedProblemEnv:
        """Return the environment of one answer."""
        return BoxedProblemEnv(self.renderer, problem, COLLECTIONS[self.collection].suffix)

    def tag(self) -> str:
        """Return the name of the collection."""
        return self.collection
