"""Select training problems by how often earlier answers to them were right.

    success rate of a problem = right answers / answers

The answers are those in the rollout summaries of a run (`*_rollout_summaries.jsonl`), of training
and of evaluations, or those of `planish eval` (`samples.jsonl`). An answer of a run is right if its
metric `correct` is 1. A problem and its answers are matched by the tokens of the first prompt
(`prompt_id`). So the earlier results need the same questions, instructions, worked examples and chat
format.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import chz

from planish.datasets.row_digests import record_rows
from planish.errors import DamagedFileError, UserError
from planish.files import read_rows
from planish.rl.rollout.metrics import verdict
from planish.rl.types import prompt_id
from planish.types import ModelInput

SUMMARIES, SAMPLES = "_rollout_summaries.jsonl", "samples.jsonl"

logger = logging.getLogger(__name__)


@chz.chz
class DifficultyOptions:
    """Which training problems are used, by the success rate of earlier answers."""

    difficulty_from: str | None = chz.field(
        default=None,
        doc="earlier results that select training problems: the directory of a run or of planish "
        "eval, or a file *_rollout_summaries.jsonl or samples.jsonl; none = use all problems",
    )
    min_success_rate: float = chz.field(
        default=0.0, doc="lowest success rate of problems selected by difficulty_from"
    )
    max_success_rate: float = chz.field(
        default=1.0, doc="highest success rate of problems selected by difficulty_from"
    )

    # A validator of chz would replace those of the other bases of a recipe's options.
    def check_success_rates(self) -> None:
        """Raise UserError unless the rates are a range, and are used."""
        low, high = self.min_success_rate, self.max_success_rate
        if not 0 <= low <= high <= 1:
            raise UserError(
                f"min_success_rate={low}, max_success_rate={high}: give numbers from 0 to 1, the "
                "lower one first"
            )
        if self.difficulty_from is None and (low, high) != (0, 1):
            raise UserError(
                f"min_success_rate={low}, max_success_rate={high}: give difficulty_from too, the "
                "earlier results, or leave them out"
            )


def select_by_difficulty(
    problems: Sequence[Any],
    prompt_of: Callable[[Any], ModelInput | None],
    options: DifficultyOptions,
) -> list[int]:
    """Return the indices of the problems whose success rate is from `min_success_rate` to
    `max_success_rate`. A warning counts the others.

    Raises UserError if there are no earlier results, or if no problem is left.
    """
    assert options.difficulty_from is not None
    rates = success_rates(options.difficulty_from)
    selected: list[int] = []
    num_unknown = 0
    for index, problem in enumerate(problems):
        prompt = prompt_of(problem)
        rate = rates.get(prompt_id(prompt)) if prompt is not None else None
        if rate is None:
            num_unknown += 1
        elif options.min_success_rate <= rate <= options.max_success_rate:
            selected.append(index)
    summary = (
        f"difficulty_from={options.difficulty_from}: of {len(problems)} training problems, "
        f"{len(selected)} are used, {len(problems) - len(selected) - num_unknown} have a success "
        f"rate outside {options.min_success_rate:g} to {options.max_success_rate:g}, and "
        f"{num_unknown} have no earlier answers and are left out"
    )
    if not selected:
        raise UserError(
            f"{summary}; give a wider range, or the results of a run with the same prompts"
        )
    logger.warning("%s", summary)
    record_rows(f"the problems that difficulty_from={options.difficulty_from} selects", selected)
    return selected


def success_rates(source: str) -> dict[str, float]:
    """Return the success rate of each prompt, by its id, in a directory or file of results. Raises
    UserError if there are none, or if no answer has a verdict.
    """
    verdicts: dict[str, list[bool | None]] = defaultdict(list)
    for path in _result_files(Path(source).expanduser()):
        for row in read_rows(path):
            try:
                found = _verdict_of(row)
            except (KeyError, TypeError) as error:
                raise DamagedFileError(
                    f"difficulty_from={source}: {path} has a row that is no rollout summary and no "
                    f"answer of an evaluation ({error!r}); give another file"
                ) from error
            if found is not None:
                prompt, is_right = found
                verdicts[prompt].append(is_right)
    if all(each is None for answers in verdicts.values() for each in answers):
        raise UserError(
            f"difficulty_from={source}: no answer there has the metric correct; give the results "
            "of environments that report it, or of planish eval"
        )
    return {prompt: answers.count(True) / len(answers) for prompt, answers in verdicts.items()}


def _verdict_of(row: Mapping[str, Any]) -> tuple[str, bool | None] | None:
    """Return the id of the prompt, and whether the answer is right (None: not known). Return None
    for a question that an evaluation could not ask. Raise KeyError or TypeError for other rows.
    """
    if "steps" in row:
        metrics = [*(step["metrics"] for step in row["steps"]), row["trajectory_metrics"]]
        return row["prompt_id"], verdict(metrics)
    is_right = row["reward"] == 1
    return (row["prompt_id"], is_right) if row["stop_reason"] is not None else None


def _result_files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    # A run in the flat layout also has links to these files in folders.
    files = sorted(source.glob(f"*{SUMMARIES}")) or sorted(source.glob(f"iteration_*/*{SUMMARIES}"))
    files += source.glob(SAMPLES)
    if not files:
        raise UserError(
            f"difficulty_from={source}: there is no file *{SUMMARIES} or {SAMPLES}; give the "
            "directory of a run with rollout_json_export, the directory of an evaluation by "
            "planish eval, or such a file"
        )
    return files
