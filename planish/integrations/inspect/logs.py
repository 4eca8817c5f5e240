# pyright: reportMissingImports=false
"""Evaluations as log files of Inspect, which `inspect view` shows.

    write_logs("out/gsm8k", "logs")        a directory of `planish eval`: one log
    write_logs("runs/mine", "logs")        a run: one log for each evaluation of each step

A log has each question with its answers (epochs), the reference, the grade and the tokens' number.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inspect_ai.log import (
    EvalConfig,
    EvalDataset,
    EvalLog,
    EvalMetric,
    EvalResults,
    EvalSample,
    EvalScore,
    EvalSpec,
    write_eval_log,
)
from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ModelOutput
from inspect_ai.scorer import Score

from planish.console.rollout_table import Filter
from planish.console.run_reader import RunReader
from planish.errors import UserError
from planish.evaluation.files import CONFIG, RESULTS, SAMPLES
from planish.files import Row, read_object, read_rows
from planish.runlog.run_directory import METRICS

_SCORER = "reward"


@dataclass
class _Evaluation:
    """One evaluation, before it becomes a log."""

    name: str
    model: str
    created: datetime
    samples: list[EvalSample]
    metrics: Mapping[str, float]
    options: Mapping[str, Any] = field(default_factory=dict)


def write_logs(path: str | Path, log_dir: str | Path) -> list[Path]:
    """Write the evaluations of a directory of `planish eval`, or of a run, and return the paths of
    the logs. Raises UserError if the directory has none.
    """
    directory, target = Path(path).expanduser(), Path(log_dir).expanduser()
    if (directory / SAMPLES).is_file():
        found = [_of_evaluation(directory)]
    elif (directory / METRICS).is_file():
        found = list(_of_run(directory))
    else:
        raise UserError(
            f"{directory} has neither {SAMPLES} nor {METRICS}; give a directory of `planish eval` "
            "or of a run"
        )
    if not found:
        raise UserError(f"{directory} has no rollouts of evaluations; runs write them")
    target.mkdir(parents=True, exist_ok=True)
    return [_write(evaluation, target) for evaluation in found]


def _write(evaluation: _Evaluation, directory: Path) -> Path:
    name = f"{evaluation.created:%Y-%m-%dT%H-%M-%S}_{_file_name(evaluation.name)}.eval"
    epochs = max((sample.epoch for sample in evaluation.samples), default=1)
    spec = EvalSpec(
        created=evaluation.created.isoformat(),
        task=evaluation.name,
        dataset=EvalDataset(
            name=evaluation.name, samples=len({sample.id for sample in evaluation.samples})
        ),
        model=evaluation.model,
        config=EvalConfig(epochs=epochs),
        metadata=dict(evaluation.options),
    )
    metrics = {key: EvalMetric(name=key, value=value) for key, value in evaluation.metrics.items()}
    log = EvalLog(
        eval=spec,
        status="success",
        results=EvalResults(
            total_samples=len(evaluation.samples),
            completed_samples=len(evaluation.samples),
            scores=[EvalScore(name=_SCORER, scorer=_SCORER, metrics=metrics)],
        ),
        samples=evaluation.samples,
    )
    path = directory / name
    write_eval_log(log, str(path))
    return path


def _file_name(name: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-." else "-" for sign in name)


def _of_evaluation(directory: Path) -> _Evaluation:
    config = read_object(directory / CONFIG)
    results = read_object(directory / RESULTS) if (directory / RESULTS).is_file() else {}
    samples = [
        _sample(
            row["question"],
            row.get("sample", 0),
            config["name"],
            [("user", row["prompt"]), ("assistant", row["answer"] or "")],
            row["reference"],
            row["reward"],
            error=row.get("error"),
            notes={
                key: row[key] for key in ("extracted", "stop_reason", "choices") if row.get(key)
            },
        )
        for row in read_rows(directory / SAMPLES)
    ]
    metrics = results.get("metrics") or _mean_reward(samples)
    created = datetime.fromtimestamp((directory / CONFIG).stat().st_mtime, UTC)
    return _Evaluation(config["task"], config["name"], created, samples, metrics, config)


def _of_run(directory: Path) -> Iterator[_Evaluation]:
    reader = RunReader(directory, directory.name)
    reader.refresh_metrics()
    reader.refresh_rollouts()
    table = reader.rollouts
    model = str(reader.config.get("model_name") or "unknown")
    created = datetime.fromtimestamp(reader.updated() or 0.0, UTC)
    for split, _ in table.choices("split"):
        if not split.startswith("eval/"):
            continue
        rows = [table.row(index) for index in table.select(Filter(split=split))]
        for step in sorted({row["step"] for row in rows}):
            samples = [_of_rollout(reader, row, model) for row in rows if row["step"] == step]
            name = f"{split.removeprefix('eval/')}-step-{step}"
            options = {"run": directory.name, "step": step, **reader.flat_config()}
            yield _Evaluation(name, model, created, samples, _mean_reward(samples), options)


def _of_rollout(reader: RunReader, row: Row, model: str) -> EvalSample:
    turns = reader.texts(row)["turns"]
    messages = [
        (role, turn[key])
        for turn in turns
        for role, key in (("user", "observation"), ("assistant", "answer"))
        if turn[key]
    ]
    logs = turns[-1]["logs"] if turns else {}
    target = next(
        (str(logs[name]) for name in ("truth", "reference", "target") if name in logs), ""
    )
    notes = {
        "ending": row["ending"],
        "tokens": row["tokens"],
        "seed": row["seed"],
        **logs,
        **(turns[-1]["metrics"] if turns else {}),
    }
    return _sample(row["group"], row["sample"], model, messages, target, row["reward"], notes=notes)


def _sample(
    question: int,
    number: int,
    model: str,
    messages: Sequence[tuple[str, str]],
    target: str,
    reward: float | None,
    *,
    error: str | None = None,
    notes: Mapping[str, Any],
) -> EvalSample:
    answers = [text for role, text in messages if role == "assistant"]
    classes = {"user": ChatMessageUser, "assistant": ChatMessageAssistant}
    answer = answers[-1] if answers else ""
    value = 0.0 if reward is None else float(reward)
    return EvalSample(
        id=question,
        epoch=number + 1,
        input=next((text for role, text in messages if role == "user"), ""),
        target=target,
        messages=[classes[role](content=text) for role, text in messages],
        output=ModelOutput.from_content(model, answer),
        scores={_SCORER: Score(value=value, answer=answer, explanation=error)},
        metadata=dict(notes),
    )


def _mean_reward(samples: Sequence[EvalSample]) -> dict[str, float]:
    values = [float(sample.scores[_SCORER].value) for sample in samples if sample.scores]  # type: ignore[arg-type]
    return {"mean": sum(values) / len(values)} if values else {}
