"""The rubric environment: one question, one answer, graded by a judge.

    reward = weighted mean of the judge's scores, each from 0 to 1

An answer that was cut off or did not end properly is not shown to the judge; its reward is
`unfinished_reward`. If a program can check a criterion (`Criterion.truth_regex`), metrics measure
the judge against it. The reward comes from the judge alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import chz

from planish import logtree
from planish.errors import UserError
from planish.renderers import Message, get_text_content
from planish.rl.environments.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from planish.rl.environments.problem_datasets import ProblemDatasetBuilder
from planish.rl.rollout.metrics import mean
from planish.rl.types import Metrics, RLDataset
from planish.rubric.grading import Grade, Grader
from planish.rubric.judge_limits import answer_check
from planish.rubric.rubrics import RubricRow, RubricRows

UNFINISHED_REWARD = -0.1


@dataclass
class RubricEnv(MessageEnv):
    """The episode of one graded answer."""

    row: RubricRow
    grader: Grader

    async def initial_observation(self) -> list[Message]:
        return list(self.row.messages)

    async def step(self, message: Message) -> MessageStepResult:
        answer = get_text_content(message)
        grade = await self.grader.grade(self.row, answer)
        with logtree.scope_header("Judge"):
            for verdict in grade.verdicts:
                criterion = verdict.criterion
                logtree.table_from_dict(
                    {
                        "criterion": criterion.rubric_str,
                        "weight": criterion.weight,
                        "judge's reply": verdict.reply,
                        "score": verdict.score,
                        "met, according to truth_regex": criterion.is_met(answer),
                    }
                )
        return MessageStepResult(
            reward=grade.score,
            episode_done=True,
            next_messages=[*self.row.messages, message],
            metrics=grade_metrics(grade, answer),
        )


def grade_metrics(grade: Grade, answer: str) -> Metrics:
    """Return the metrics of one answer. docs/reference/metrics.md defines each key."""
    metrics: Metrics = {
        "rubric_score": grade.score,
        "judge/asked_again": mean([float(verdict.was_retried) for verdict in grade.verdicts]),
    }
    for verdict in grade.verdicts:
        metrics[f"rubric/{verdict.criterion.name}"] = verdict.score
    checkable_scores = [
        (verdict.score, is_met)
        for verdict in grade.verdicts
        if (is_met := verdict.criterion.is_met(answer)) is not None
    ]
    if checkable_scores:
        metrics["judge/truth"] = mean([float(is_met) for _, is_met in checkable_scores])
        metrics["judge/agreement"] = mean(
            [1 - abs(score - float(is_met)) for score, is_met in checkable_scores]
        )
    for name, kind in (("judge/score_if_met", True), ("judge/score_if_not_met", False)):
        scores = [score for score, is_met in checkable_scores if is_met is kind]
        if scores:
            metrics[name] = mean(scores)
    return metrics


@chz.chz
class RubricDatasetBuilder(ProblemDatasetBuilder):
    """A dataset of rubric rows: groups for training, single answers for tests. With rollouts in
    worker processes, `rows` and the grader's judge must be picklable.
    """

    rows: Callable[[], RubricRows] = chz.field(
        doc="function without arguments that always returns the same rows"
    )
    grader: Grader
    judge_name: str = chz.field(
        doc="name of the judge, for config.json; a resumed run must have the same judge"
    )
    unfinished_reward: float = chz.field(
        default=UNFINISHED_REWARD, doc="reward of an answer that is truncated"
    )

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        rows = self.rows()
        if not rows.train:
            raise UserError("rows: there is no row to train on; give at least one")
        train, test = self.shuffled(rows.train), self.evaluation(rows.test)
        graded = [*train.problems, *(test.problems if test is not None else ())]
        check = await answer_check(self.grader.judge, self.judge_name, graded)
        return replace(train, check_answers=check), test

    def make_env(self, problem: RubricRow) -> EnvFromMessageEnv:
        """Return the environment of one answer."""
        return EnvFromMessageEnv(
            self.renderer,
            RubricEnv(problem, self.grader),
            failed_parse_reward=self.unfinished_reward,
            context_overflow_reward=self.unfinished_reward,
        )

    def tag(self) -> str:
        """Return "rubric"."""
        return "rubric"
