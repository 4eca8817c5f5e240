"""The directory of an evaluation, which can be resumed after a crash.

    config.json     the task, the model and the sampling options; written first
    samples.jsonl   one row for each answer, appended when a question is answered
    results.json    settings, versions and metrics; written when all questions are answered

Invariants: all answers to a question are appended at once. If a crash left only some of them, the
question is asked again. Answers depend only on the seed and the question's number, so the new
answers equal the lost ones.

A directory belongs to one evaluation. It is rejected for other questions, another model, other
weights under the same name, or other sampling options. `limit` and `k` may change, because they
only select from the saved answers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from planish.errors import DamagedFileError, UserError
from planish.evaluation.types import ChoiceTask, ChosenAnswer, SampledAnswer, ScoredChoice, Task
from planish.files import Row, RowFile, differences, lock_directory, read_rows, write_atomically

CONFIG = "config.json"
SAMPLES = "samples.jsonl"
RESULTS = "results.json"

Answers = Sequence[SampledAnswer] | Sequence[ChosenAnswer]
"""All answers to one question."""


class EvaluationDirectory:
    """The files of one evaluation, locked by this process until the `with` block ends."""

    def __init__(self, path: str | Path, config: Mapping[str, Any]) -> None:
        """Create the directory, or resume the evaluation in it.

        Raise UserError if it holds another evaluation, or if another process uses it.
        """
        self.path = Path(path).expanduser()
        self._lock = lock_directory(self.path, "out", "there")
        try:
            self._check_config(json.loads(json.dumps(config)))
            self._rows = RowFile(self.path / SAMPLES)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()
        self._lock.release()

    def answers(self, task: Task, num_samples: int) -> dict[int, Answers]:
        """Return the saved answers by the number of the question.

        Questions with fewer than `num_samples` answers are removed from the file.
        """
        rows = read_rows(self.path / SAMPLES)
        try:
            rows_by_question: dict[int, list[Row]] = {}
            for row in rows:
                rows_by_question.setdefault(row["question"], []).append(row)
            complete_rows = {
                number: question_rows
                for number, question_rows in rows_by_question.items()
                if len(question_rows) == num_samples
            }
            self._rows.keep(lambda row: row["question"] in complete_rows)
            read_answers = _read_chosen if isinstance(task, ChoiceTask) else _read_sampled
            return {
                number: read_answers(question_rows)
                for number, question_rows in sorted(complete_rows.items())
            }
        except (KeyError, TypeError) as error:
            raise DamagedFileError(
                f"{self.path / SAMPLES} has rows that do not belong to this evaluation "
                f"({error!r}); give another out"
            ) from error

    def append(self, answers: Answers) -> None:
        """Save all answers to one question."""
        self._rows.append(*(asdict(answer) for answer in answers))

    def write_results(self, results: Mapping[str, Any]) -> None:
        """Flush the answers to disk and write results.json."""
        self._rows.sync()
        write_atomically(
            self.path / RESULTS, json.dumps(results, indent=2, ensure_ascii=False) + "\n"
        )

    def _check_config(self, config: Mapping[str, Any]) -> None:
        config_path, samples_path = self.path / CONFIG, self.path / SAMPLES
        if samples_path.exists() and samples_path.stat().st_size:
            try:
                saved_config = json.loads(config_path.read_bytes())
            except (OSError, ValueError) as error:
                raise UserError(
                    f"out={self.path} has a file {SAMPLES}, but its {CONFIG} cannot be read "
                    f"({error}); give another directory"
                ) from error
            if changed := differences(saved_config, dict(config)):
                raise UserError(
                    f"out={self.path} has an evaluation with other options: {changed}; give its "
                    "options to continue it, or another directory"
                )
        write_atomically(config_path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _read_sampled(rows: list[dict[str, Any]]) -> list[SampledAnswer]:
    return sorted((SampledAnswer(**row) for row in rows), key=lambda answer: answer.sample)


def _read_chosen(rows: list[dict[str, Any]]) -> list[ChosenAnswer]:
    return [
        ChosenAnswer(**{**row, "choices": [ScoredChoice(**choice) for choice in row["choices"]]})
        for row in rows
    ]
