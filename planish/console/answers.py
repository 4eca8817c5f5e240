"""The data of each view, as plain values for JSON. `routes.py` serves them over HTTP, and
`export.py` writes them into a page.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from planish.console.advice import RunFacts, findings
from planish.console.catalog import PLACE_OPTIONS, RunCatalog, sweeps
from planish.console.checkpoint_rows import checkpoint_rows
from planish.console.evaluations import evaluations
from planish.console.recorded_command import command_text
from planish.console.rollout_table import Filter, histogram
from planish.console.row_tail import Row
from planish.console.run_reader import RunReader, config_text
from planish.files import short_path

MAX_POINTS = 5000
_MAX_SEARCHED = 3000
"""The number of rollouts whose texts one search reads."""
_SNIPPET = 200
MAIN_METRICS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("env/all/reward/total", "reward/total"), "does the policy learn what is rewarded?"),
    (
        ("test/env/all/correct", "test/env/all/reward/total"),
        "does it learn the intended task?",
    ),
    (("env/all/by_group/frac_mixed",), "is there anything to learn from?"),
    (("optim/entropy", "entropy"), "does it still try different answers?"),
    (("env/all/ac_tokens_per_turn",), "do answers end?"),
    (
        ("optim/kl_sample_train_v2", "kl_sample_train_v2"),
        "do sampler and trainer compute the same policy?",
    ),
    (("train_mean_nll", "loss_per_token"), "does it fit the training data?"),
    (("test/nll",), "does it fit data that it has not seen?"),
    (("accuracy",), "are pairs told apart?"),
    (("margin",), "how far apart are the rewards of a pair?"),
    (("env/all/correct",), "are answers right?"),
    (("env/all/stop/max_tokens",), "are answers cut off?"),
    (("optim/grad_norm", "grad_norm"), "are single steps far larger than others?"),
    (("optim/lr", "learning_rate"), "how large are the steps?"),
    (("time/total",), "how long does a step take?"),
    (("num_tokens",), "how much data does a step have?"),
)
"""The metrics of the first charts with their questions: the first six that a run has."""
_NUM_MAIN_METRICS = 6


class BadRequest(ValueError):
    """A request with a wrong parameter; the message says which."""


class Parameters:
    """The parameters of a request."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = pairs

    def all(self, name: str) -> list[str]:
        """Return all values of a parameter."""
        return [value for key, value in self._pairs if key == name]

    def text(self, name: str, default: str = "") -> str:
        """Return the first value of a parameter."""
        return next(iter(self.all(name)), default)

    def number(self, name: str, default: float) -> float:
        """Return a number. Raises BadRequest for any other text."""
        text = self.text(name)
        if text == "":
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise BadRequest(f"{name}={text[:100]!r}: give a number")
        return value

    def count(self, name: str, default: int, most: int) -> int:
        """Return a whole number from 0 to `most`. Raises BadRequest for any other text."""
        value = self.number(name, float(default))
        if not (value.is_integer() and 0 <= value <= most):
            raise BadRequest(f"{name}={value:g}: give a whole number from 0 to {most}")
        return int(value)


class Answers:
    """Answers the requests of the console's pages."""

    def __init__(self, catalog: RunCatalog, *, clock: Callable[[], float] = time.time) -> None:
        self.catalog = catalog
        self._clock = clock
        self._sweeps: tuple[tuple[str, ...], list[dict[str, Any]]] = ((), [])

    def runs(self, parameters: Parameters) -> Row:
        """Return the list of runs, and the groups of runs that differ in one option."""
        readers = self.catalog.refreshed_runs()
        summaries = [reader.summary() for reader in readers]
        summaries.sort(key=lambda run: (run["state"] != "running", -(run["updated"] or 0)))
        return {
            "runs": summaries,
            "sweeps": self._find_sweeps(readers),
            "roots": list(map(str, self.catalog.roots)),
            "is_cut": self.catalog.is_cut,
        }

    def _find_sweeps(self, readers: Sequence[RunReader]) -> list[dict[str, Any]]:
        version = tuple(f"{reader.id} {reader.config_version}" for reader in readers)
        if version != self._sweeps[0]:
            configs = {reader.id: reader.flat_config() for reader in readers}
            self._sweeps = version, sweeps(configs)
        return self._sweeps[1]

    def run(self, parameters: Parameters) -> Row:
        """Return the metrics and options of one run."""
        reader = self._run(parameters.text("run"))
        names = reader.metrics.columns
        main = [
            {"name": name, "question": question}
            for choices, question in MAIN_METRICS
            if (name := next((name for name in choices if name in names), None)) is not None
        ]
        return {
            "id": reader.id,
            "path": str(reader.path),
            "metrics": [{"name": name} for name in sorted(names)],
            "main_metrics": main[:_NUM_MAIN_METRICS],
            "config": {name: config_text(value) for name, value in reader.flat_config().items()},
            "place_options": sorted(PLACE_OPTIONS),
            "code_diff": reader.code_diff(),
            "problems": reader.problems(),
        }

    def curves(self, parameters: Parameters) -> Row:
        """Return series of metrics: every `metric` of every `run`."""
        axis = parameters.text("axis", "step")
        if axis not in ("step", "time"):
            raise BadRequest(f'axis={axis[:100]!r}: give "step" or "time"')
        points = max(1, parameters.count("points", 1000, MAX_POINTS))
        low = parameters.number("from", -math.inf)
        high = parameters.number("to", math.inf)
        runs, series = [], []
        for run_id in parameters.all("run"):
            reader = self._run(run_id)
            with reader.lock:
                runs.append(
                    {
                        "run": run_id,
                        "problems": reader.problems(),
                        "is_partial": reader.is_partly_read(),
                    }
                )
                for metric in parameters.all("metric"):
                    found = reader.metrics.series(
                        metric, points, by_time=axis == "time", low=low, high=high
                    )
                    series.append({"run": run_id, "metric": metric, **found.to_json()})
        return {"runs": runs, "series": series}

    def rollouts(self, parameters: Parameters) -> Row:
        """Return the rollouts that pass filters, one page of them with snippets of their texts."""
        reader = self._run(parameters.text("run"))
        chosen = _filter(parameters)
        limit, offset = parameters.count("limit", 100, 1000), parameters.count("offset", 0, 1 << 40)
        with reader.lock:
            reader.refresh_rollouts()
            table = reader.rollouts
            live = table.live_rows()
            candidates = table.ordered(table.select(chosen), parameters.text("sort"))
            word = parameters.text("text")
            matched, searched = candidates, len(candidates)
            if word:
                matched, searched = _search(reader, candidates, word)
            without_reward = _search_scope(table.select(_any_reward(chosen)), matched, bool(word))
            rewards, steps = table.column("reward"), table.column("step")[live]
            finite = rewards[live][np.isfinite(rewards[live])]
            rows = [_with_snippets(reader, table.row(row)) for row in matched[offset:][:limit]]
            return {
                "total": len(live),
                "matched": len(matched),
                "candidates": len(candidates),
                "searched": searched,
                "rows": rows,
                "histogram": histogram(rewards[without_reward]),
                "reward_range": [finite.min(), finite.max()] if len(finite) else [0.0, 0.0],
                "steps": [steps.min(), steps.max()] if len(steps) else [None, None],
                "choices": {
                    "split": table.choices("split"),
                    "ending": table.choices("ending"),
                    "tag": table.choices("tags"),
                    "error": table.choices("errors"),
                },
                "problems": reader.problems(),
            }

    def group(self, parameters: Parameters) -> Row:
        """Return all rollouts of one group with their texts, and its neighbours in the batch."""
        reader = self._run(parameters.text("run"))
        split = parameters.text("split", "train")
        step, number = parameters.number("step", 0.0), parameters.count("group", 0, 1 << 40)
        with reader.lock:
            reader.refresh_rollouts()
            table = reader.rollouts
            batch = table.select(Filter(split=split, step_from=step, step_to=step))
            groups = table.column("group")[batch]
            rows = [table.row(row) for row in batch[groups == number]]
            numbers = np.unique(groups).astype(int).tolist()
        before = [group for group in numbers if group < number]
        after = [group for group in numbers if group > number]
        place = {"split": split, "step": step}
        first = rows[0] if rows else {}
        return {
            "path": short_path(reader.path),
            "rollouts": [with_texts(reader, row) for row in rows],
            "tags": first.get("tags", ()),
            "prompt_id": first.get("prompt_id"),
            "sampler_step": first.get("sampler_step"),
            "previous": {**place, "group": before[-1]} if before else None,
            "next": {**place, "group": after[0]} if after else None,
        }

    def evaluations(self, parameters: Parameters) -> Row:
        """Return the scores of evaluations, and each question before and after."""
        reader = self._run(parameters.text("run"))
        with reader.lock:
            reader.refresh_rollouts()
            return evaluations(reader.metrics, reader.rollouts)

    def checkpoints(self, parameters: Parameters) -> Row:
        """Return the checkpoints of a run with the commands that use them."""
        reader = self._run(parameters.text("run"))
        state = reader.summary()["state"]
        return {**checkpoint_rows(reader), "state": state, "command": command_text(reader.path)}

    def findings(self, parameters: Parameters) -> Row:
        """Return what is wrong with a run."""
        reader = self._run(parameters.text("run"))
        summary = reader.summary()
        with reader.lock:
            updated = summary["updated"]
            facts = RunFacts(
                reader.metrics,
                summary["state"],
                None if updated is None else self._clock() - updated,
                reader.config,
            )
            found = [asdict(finding) for finding in findings(facts)]
            watch = self.run(parameters)["main_metrics"]
            return {
                "findings": found,
                "num_steps": reader.metrics.num_rows,
                "watch": [metric["name"] for metric in watch],
                "problems": reader.problems(),
            }

    def _run(self, run_id: str) -> RunReader:
        reader = self.catalog.run(run_id)
        reader.refresh_metrics()
        return reader


def _filter(parameters: Parameters) -> Filter:
    number = parameters.number
    group = parameters.text("group")
    return Filter(
        split=parameters.text("split"),
        step_from=number("step_from", -math.inf),
        step_to=number("step_to", math.inf),
        reward_from=number("reward_from", -math.inf),
        reward_to=number("reward_to", math.inf),
        tag=parameters.text("tag"),
        ending=parameters.text("ending"),
        error=parameters.text("error"),
        group=parameters.count("group", 0, 1 << 40) if group else None,
        prompt_id=parameters.text("prompt_id"),
    )


def _any_reward(chosen: Filter) -> Filter:
    return Filter(**{**asdict(chosen), "reward_from": -math.inf, "reward_to": math.inf})


def _search_scope(rows: np.ndarray, matched: np.ndarray, is_search: bool) -> np.ndarray:
    """Return the rows of the histogram. It ignores the range of rewards, so that another bar can be
    chosen; but only the texts of `matched` rows were searched.
    """
    return matched if is_search else rows


def _search(reader: RunReader, rows: np.ndarray, word: str) -> tuple[np.ndarray, int]:
    """Return the rows whose texts contain `word`, ignoring case, and how many rows were read."""
    wanted, found = word.lower(), []
    for row in rows[:_MAX_SEARCHED]:
        try:
            texts = reader.texts(reader.rollouts.row(row))
        except LookupError:
            continue
        if any(wanted in text.lower() for text in _strings(texts.get("turns"))):
            found.append(row)
    return np.array(found, np.int64), min(len(rows), _MAX_SEARCHED)


def _strings(value: Any) -> list[str]:
    """Return all texts in a value: prompts, answers and logs."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for part in value.values() for text in _strings(part)]
    return [text for part in value for text in _strings(part)] if isinstance(value, list) else []


def _with_snippets(reader: RunReader, row: Row) -> Row:
    try:
        turns = reader.texts(row).get("turns") or [{}]
    except LookupError:
        return row
    return {
        **row,
        "question": " ".join(str(turns[0].get("observation", ""))[-4 * _SNIPPET :].split())[
            -_SNIPPET:
        ],
        "answer": " ".join(str(turns[-1].get("answer", ""))[-4 * _SNIPPET :].split())[-_SNIPPET:],
    }


def with_texts(reader: RunReader, row: Row) -> Row:
    """Return a row of the table of rollouts with its `texts`, or with the `problem` of reading them."""
    try:
        return {**row, "texts": reader.texts(row), "problem": None}
    except LookupError as error:
        return {**row, "texts": None, "problem": str(error)}
