"""The metrics of an evaluation. docs/guide/evaluation.md defines each key.

Every standard error is over problems (see planish/runlog/statistics.py). An answer that could not
be graded, or a question that could not be asked, counts as wrong and adds to num_errors.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from planish.errors import UserError
from planish.evaluation.types import ChosenAnswer, SampledAnswer
from planish.runlog.statistics import Mean, pass_at_k

Metrics = dict[str, float]


def sampled_metrics(problems: Sequence[Sequence[SampledAnswer]], k: Sequence[int]) -> Metrics:
    """Return the metrics of sampled answers. Every problem must have equally many answers."""
    answers = [answer for problem in problems for answer in problem]
    num_answers = len(answers)
    num_correct = [sum(answer.reward > 0 for answer in problem) for problem in problems]
    metrics = Mean.from_values(
        [num_right / len(problem) for num_right, problem in zip(num_correct, problems, strict=True)]
    ).as_metrics("score")
    for k_value in k:
        estimates = [
            pass_at_k(len(problem), num_right, k_value)
            for num_right, problem in zip(num_correct, problems, strict=True)
        ]
        metrics |= Mean.from_values(estimates).as_metrics(f"pass@{k_value}")
    return metrics | {
        "num_correct": sum(num_correct),
        "num_examples": len(problems),
        "num_samples": num_answers,
        "num_errors": sum(answer.error is not None for answer in answers),
        "ended": sum(answer.stop_reason == "stop" for answer in answers) / num_answers,
        "cut_off": sum(answer.stop_reason == "length" for answer in answers) / num_answers,
        "answered": sum(answer.extracted is not None for answer in answers) / num_answers,
        "tokens_per_answer": sum(len(answer.tokens) for answer in answers) / num_answers,
    }


def choice_metrics(answers: Sequence[ChosenAnswer]) -> Metrics:
    """Return the metrics of answers that were chosen by their logprobs."""
    normalized = Mean.from_values([answer.reward_length_normalized for answer in answers])
    return (
        Mean.from_values([answer.reward for answer in answers]).as_metrics("score")
        | normalized.as_metrics("score_length_normalized")
        | {
            "num_correct": sum(answer.reward > 0 for answer in answers),
            "num_examples": len(answers),
            "num_errors": sum(answer.error is not None for answer in answers),
        }
    )


def metrics_of(problems: Sequence[Sequence[Any]], k: Sequence[int]) -> Metrics:
    """Return the metrics of answers of either kind; there must be at least one problem."""
    if isinstance(problems[0][0], ChosenAnswer):
        return choice_metrics([answer for [answer] in problems])
    return sampled_metrics(cast(Sequence[Sequence[SampledAnswer]], problems), k)


def check_k(k: Sequence[int], num_samples: int) -> None:
    """Raise UserError unless the values of k are distinct and from 1 to `num_samples`."""
    invalid_values = [size for size in k if not 1 <= size <= num_samples]
    if invalid_values or len(set(k)) < len(k):
        raise UserError(
            f"k={list(k)} with samples={num_samples}: give each k once, from 1 to the number of "
            f"samples"
        )


def with_log_names(task: str, metrics: Mapping[str, float]) -> Metrics:
    """Return the metrics under their names in a training log: eval/TASK/score, ..."""
    return {f"eval/{task}/{name}": value for name, value in metrics.items()}
