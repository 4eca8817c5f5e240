"""Tasks of reasoning-gym as environments.

    pip install planish[reasoning-gym]
    python -m planish.recipes.math_rl env=reasoning_gym:chain_sum task.max_digits=1

    reward = score + 0.1 * (format - 1)

The answer is the text between <answer> and </answer>, which reasoning-gym scores from 0 to 1.
`format` is 1 if the message has both tags and ends with a stop sequence. The metric `correct` is 1
if the score is 1. Test problems and the worked examples of the prompt are never trained on.
"""

import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import chz

from planish import logtree
from planish.errors import UserError
from planish.recipes.reasoning_tasks import Entry, Task, task_process
from planish.renderers import Message, Renderer
from planish.rl.environments.datasets import ENDLESS_NUM_BATCHES
from planish.rl.environments.problem_datasets import ProblemDatasetBuilder
from planish.rl.environments.problem_env import ProblemEnv
from planish.rl.types import Action, ActionExtra, RLDataset, StepResult

NUM_TEST_ENTRIES = 100
ANSWER_INSTRUCTION = "\nWrite the final answer between <answer> and </answer>."
TAGS = "<answer>", "</answer>"
FULL_SCORE = 1 - 1e-6


def tagged_answers(text: str) -> list[str]:
    """Return the text between <answer> and the next </answer>, without white space around it.

    A regular expression for this takes cubic time on a text of spaces.
    """
    answers, position = [], 0
    before, after = TAGS
    while True:
        start = text.find(before, position)
        end = text.find(after, start + len(before))
        if start < 0 or end < 0:
            return answers
        answers.append(text[start + len(before) : end].strip())
        position = end + len(after)


@dataclass(frozen=True)
class TaskProblem:
    """One entry of a task, and the worked examples that come before it."""

    entry: Entry
    shown: tuple[Entry, ...] = ()


class TaskEnv(ProblemEnv):
    """One entry of a task, scored by reasoning-gym."""

    def __init__(self, renderer: Renderer, problem: TaskProblem) -> None:
        super().__init__(
            renderer,
            convo_prefix=[message for shown in problem.shown for message in worked_example(shown)],
        )
        self.entry = problem.entry
        self.score = 0.0

    def get_question(self) -> str:
        """Return the question with instructions on the format of the answer."""
        return question_of(self.entry)

    def check_format(self, sample_str: str) -> bool:
        """Return whether the text has an answer between tags."""
        return bool(tagged_answers(sample_str))

    async def check_answer(self, sample_str: str) -> bool:
        """Score the last answer between tags, and return whether it has the full score."""
        answers = tagged_answers(sample_str)
        if answers:
            self.score = await task_process(self.entry.task).score(self.entry.index, answers[-1])
        return self.score >= FULL_SCORE

    def get_reference_answer(self) -> str:
        """Return a right answer, or "not named" if the task names none."""
        return "not named" if self.entry.answer is None else self.entry.answer

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Grade the answer. A score between 0 and 1 is added to the reward, although the answer
        does not count as correct.
        """
        result = await super().step(action, extra=extra)
        result = replace(result, metrics={**result.metrics, "score": self.score})
        if not 0 < self.score < FULL_SCORE:
            return result
        reward = result.reward + self.score
        with logtree.scope_header("Partial credit"):
            logtree.table_from_dict({"score": self.score, "reward with it": reward})
        return replace(result, reward=reward)


def question_of(entry: Entry) -> str:
    """Return the question with instructions on the format of the answer."""
    return entry.question.rstrip() + ANSWER_INSTRUCTION


def worked_example(entry: Entry) -> list[Message]:
    """Return a worked example as a question and its answer."""
    return [
        {"role": "user", "content": question_of(entry)},
        {"role": "assistant", "content": f"<answer>{entry.answer}</answer>"},
    ]


@chz.chz
class TaskDatasetBuilder(ProblemDatasetBuilder):
    """Groups for random entries of a task, and held-out entries for the test."""

    task_name: str
    task: Mapping[str, Any] = chz.field(
        default_factory=dict, doc="options of the task, such as task.max_terms=3"
    )
    shown_examples: int = chz.field(
        default=2, doc="number of worked examples in the prompt; 0 for tasks without known answers"
    )
    eval_problems: int | None = chz.field(
        default=None, doc=f"number of test problems; none = {NUM_TEST_ENTRIES}"
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return (training dataset, test dataset). Without test entries, the latter is None."""
        task = Task.of(self.task_name, self.task, self.seed)
        rng = random.Random(f"{self.seed}:test")
        held_out: set[str] = set()
        examples = sample_entries(task, rng, self.shown_examples, held_out)
        shown = tuple(entry for entry in examples if entry.answer is not None)
        count = NUM_TEST_ENTRIES if self.eval_problems is None else self.eval_problems
        tests = sample_entries(task, rng, count, held_out)

        def sample_problem(rng: random.Random) -> TaskProblem:
            return TaskProblem(sample_entry(task, rng, held_out), shown)

        test_problems = [TaskProblem(entry, shown) for entry in tests]
        return self.generated(sample_problem, ENDLESS_NUM_BATCHES), self.evaluation(test_problems)

    def make_env(self, problem: TaskProblem) -> TaskEnv:
        """Return the environment of one answer."""
        return TaskEnv(self.renderer, problem)

    def tag(self) -> str:
        """Return the name of the task."""
        return self.task_name


def sample_entries(
    task: Task, rng: random.Random, count: int, held_out: set[str]
) -> Sequence[Entry]:
    """Return `count` entries with different questions that are not in `held_out`, and add their
    questions to it.
    """
    entries = []
    for _ in range(count):
        entries.append(sample_entry(task, rng, held_out))
        held_out.add(entries[-1].question)
    return entries


def sample_entry(task: Task, rng: random.Random, held_out: Set[str]) -> Entry:
    """Return a random entry whose question is not in `held_out`. Raises UserError if none is
    found.
    """
    for _ in range(1000):
        entry = task_process(task).entry(rng.randrange(task.num_entries))
        if entry.question not in held_out:
            return entry
    raise UserError(
        f"env={task.name}: hardly any question remains besides the {len(held_out)} held-out "
        "questions; give fewer eval_problems, or options of the task that make more questions"
    )
