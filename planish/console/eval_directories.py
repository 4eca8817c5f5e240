"""Evaluations without a run: the directories that `planish eval` writes (evaluation/files.py)."""

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np

from planish.console.answers import BadRequest, Parameters
from planish.console.catalog import Catalog
from planish.console.row_tail import Row, RowTail, parse_object
from planish.evaluation.files import CONFIG, RESULTS, SAMPLES

_MAX_COMPARED = 4
_MAX_QUESTIONS = 2000
_SNIPPET = 200


class EvaluationReader:
    """Reads one directory again and again while the evaluation writes it."""

    def __init__(self, path: Path, eval_id: str) -> None:
        self.path, self.id = path, eval_id
        self.answers: dict[int, list[Row]] = {}
        """Rows of samples.jsonl by question."""
        self.num_invalid = 0
        self._rows = RowTail(path / SAMPLES)
        self._generation = 0
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Read new answers."""
        with self._lock:
            rows = self._rows.read()
            if self._rows.generation != self._generation:
                self._generation = self._rows.generation
                self.answers, self.num_invalid = {}, 0
            for row in rows:
                if type(row.get("question")) is int:
                    self.answers.setdefault(row["question"], []).append(row)
                else:
                    self.num_invalid += 1

    def summary(self) -> Row:
        """Return what the list of evaluations shows."""
        config, results = self._object(CONFIG), self._object(RESULTS)
        means = [mean for rows in self.answers.values() if (mean := _mean(rows)) is not None]
        count = len(means)
        metrics = (results or {}).get("metrics")
        problems = self._rows.problems()
        if config is None:
            problems.append(f"{CONFIG} is missing or not a JSON object")
        if self.num_invalid:
            problems.append(f"{self.num_invalid} rows of {SAMPLES} have no question")
        return {
            "id": self.id,
            "task": str((config or {}).get("task", "")),
            "model": str((config or {}).get("name", "")),
            "is_finished": results is not None,
            "questions": count,
            "answers": sum(map(len, self.answers.values())),
            "errors": sum(bool(row.get("error")) for rows in self.answers.values() for row in rows),
            "mean": float(np.mean(means)) if count else None,
            "stderr": float(np.std(means, ddof=1) / math.sqrt(count)) if count > 1 else None,
            "metrics": metrics if isinstance(metrics, dict) else {},
            "problems": problems,
        }

    def _object(self, name: str) -> Row | None:
        try:
            return parse_object((self.path / name).read_bytes())
        except OSError:
            return None


class EvaluationAnswers:
    """Answers the requests of the pages about evaluations without a run."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._readers: dict[str, EvaluationReader] = {}

    def evals(self, parameters: Parameters) -> Row:
        """Return the list of evaluations."""
        return {"evals": [reader.summary() for reader in _refreshed(self._all())]}

    def eval_questions(self, parameters: Parameters) -> Row:
        """Return each question of some evaluations with its mean reward in each of them; null where
        it has no answers. Questions whose reward fell most from the first to the last come first.
        """
        chosen = self._chosen(parameters)
        numbers = sorted({number for reader in chosen for number in reader.answers})
        rows = []
        for number in numbers:
            first = next(found[0] for reader in chosen if (found := reader.answers.get(number)))
            means = [_mean(reader.answers.get(number, [])) for reader in chosen]
            prompt = " ".join(str(first.get("prompt", ""))[-4 * _SNIPPET :].split())
            rows.append({"question": number, "prompt": prompt[-_SNIPPET:], "means": means})
        rows.sort(key=lambda row: _change(row["means"]))
        return {
            "evals": [reader.summary() for reader in chosen],
            "questions": rows[:_MAX_QUESTIONS],
            "num_questions": len(rows),
        }

    def eval_question(self, parameters: Parameters) -> Row:
        """Return all answers to one question in some evaluations."""
        number = parameters.count("question", 0, 1 << 40)
        chosen = self._chosen(parameters)
        return {
            "question": number,
            "evals": [
                {"id": reader.id, "answers": reader.answers.get(number, [])} for reader in chosen
            ],
        }

    def _chosen(self, parameters: Parameters) -> list[EvaluationReader]:
        by_id = {reader.id: reader for reader in self._all()}
        names = parameters.all("eval")
        if not 1 <= len(names) <= _MAX_COMPARED:
            raise BadRequest(f"eval: give 1 to {_MAX_COMPARED} evaluations")
        for name in names:
            if name not in by_id:
                raise LookupError(f"there is no evaluation {name[:200]!r}")
        return _refreshed([by_id[name] for name in names])

    def _all(self) -> list[EvaluationReader]:
        found = self._catalog.evaluations()
        self._readers = {
            eval_id: self._readers.get(eval_id) or EvaluationReader(path, eval_id)
            for eval_id, path in found.items()
        }
        return [self._readers[eval_id] for eval_id in sorted(self._readers)]


def _refreshed(readers: list[EvaluationReader]) -> list[EvaluationReader]:
    """Read the new rows of some evaluations."""
    for reader in readers:
        reader.refresh()
    return readers


def _mean(rows: list[Row]) -> float | None:
    rewards: list[Any] = [row.get("reward") for row in rows]
    numbers = [float(reward) for reward in rewards if isinstance(reward, int | float)]
    return sum(numbers) / len(numbers) if numbers else None


def _change(means: list[float | None]) -> float:
    first, last = means[0], means[-1]
    return 0.0 if first is None or last is None else last - first
