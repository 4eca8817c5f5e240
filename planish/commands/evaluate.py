"""`planish eval`: evaluate a model or checkpoint on a task."""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path

from planish.client.service_client import ServiceClient
from planish.commands.runs import add_quantize_argument, add_server_arguments
from planish.errors import UserError, as_user_errors
from planish.evaluation import TASKS, Results, Sampling, Task, evaluate, load_task, open_model
from planish.evaluation.evaluate import CONCURRENCY, resolve_sampling
from planish.evaluation.files import RESULTS, SAMPLES
from planish.files import read_rows
from planish.processes.arguments import argument_adder
from planish.processes.interruption import Terminated, sigterm_as_interrupt
from planish.renderers import FORMATS
from planish.runlog.console import StepDisplay

INTERRUPTED_EXIT_STATUS, TERMINATED_EXIT_STATUS = 130, 143
"""The exit statuses after Ctrl-C and SIGTERM."""
SAMPLING_OPTIONS = ("samples", "max_tokens", "temperature", "seed")
"""The names of the sampling options."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `planish eval`."""
    add = argument_adder(parser)
    default = Sampling()
    add("TASK", f"task to evaluate: {', '.join(TASKS)}", choices=TASKS)
    add(
        "--model NAME",
        "base model, checkpoint (tinker://...) or run directory to evaluate",
        required=True,
    )
    add(
        "--data PLACE",
        "questions: a file, a directory with test.jsonl, or a hub name",
    )
    add("--split NAME", "name of the split of --data (default: test)")
    add("--limit N", "evaluate only the first N questions (default: all)", type=int)
    add("--samples N", f"number of answers per question (default: {default.samples})", type=int)
    add("--k K,...", "values of k for pass@k (default: 1)", type=_parse_k_values)
    add(
        "--max-tokens N",
        f"maximum number of tokens in an answer (default: {default.max_tokens})",
        type=int,
    )
    add(
        "--temperature T",
        f"sampling temperature; 0 = greedy (default: {default.temperature:g})",
        type=float,
    )
    add("--seed S", f"seed of sampling (default: {default.seed})", type=int)
    add("--renderer", "chat format (default: the checkpoint's, else the model's)", choices=FORMATS)
    add_server_arguments(add)
    add_quantize_argument(add)
    add("--concurrency N", "number of questions in progress at the same time", default=CONCURRENCY)
    add(
        "--out DIR",
        "directory of the answers; a repeated command resumes from them "
        "(default: evaluations/TASK-MODEL)",
        type=Path,
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the evaluation and print its metrics. Return the exit status."""
    task = load_task(arguments.task, arguments.data, limit=arguments.limit, split=arguments.split)
    sampling = _sampling_options(arguments)
    # Check the options before a model is loaded.
    resolve_sampling(task, sampling, arguments.k, arguments.concurrency)
    out = arguments.out or Path("evaluations") / f"{task.name}-{_file_name(arguments.model)}"
    try:
        with sigterm_as_interrupt():
            results = _evaluate(arguments, task, sampling, out)
    except (KeyboardInterrupt, Terminated) as end:
        rows = read_rows(out / SAMPLES)
        answered = len(
            {row["question"] for row in rows} & {question.number for question in task.questions}
        )
        print(
            f"stopped: {answered} of {len(task.questions)} questions are answered in {out}; the "
            "same command resumes"
        )
        return TERMINATED_EXIT_STATUS if isinstance(end, Terminated) else INTERRUPTED_EXIT_STATUS
    print("\n".join(summary(results)))
    print(f"{out / RESULTS}; the answers are in {SAMPLES}")
    return 0


def _evaluate(
    arguments: argparse.Namespace, task: Task, sampling: Sampling | None, out: Path
) -> Results:
    with as_user_errors("--base-url"):
        client = ServiceClient(
            base_url=arguments.base_url,
            api_key=arguments.api_key,
            data_dir=arguments.data_dir,
            quantize=arguments.quantize,
        )
    with client as service_client:
        with as_user_errors("--model"):
            model = open_model(service_client, arguments.model, arguments.renderer)
        with StepDisplay(len(task.questions), unit="questions") as display:
            evaluation = evaluate(
                model.sampling_client,
                task,
                sampling,
                k=arguments.k,
                renderer=model.renderer,
                context_window=model.context_window,
                concurrency=arguments.concurrency,
                out=out,
                model_name=model.name,
                weights=model.weights,
                display=display,
            )
            return asyncio.run(evaluation)


def summary(results: Results) -> list[str]:
    """Return a headline with the task and the model, then one line for each metric. A metric's line
    includes its standard error, if it has one.
    """
    model = f"{results.model['name']} ({results.model['renderer']})"
    lines = [
        f"{results.task['name']}, {results.task['num_questions']} questions of "
        f"{results.task['source']}, {model}"
    ]
    for name, value in results.metrics.items():
        if name.endswith("_stderr"):
            continue
        error = results.metrics.get(f"{name}_stderr")
        value_text = f"{value:.4f}" if isinstance(value, float) else str(value)
        error_text = f" ± {error:.4f}" if error is not None else ""
        lines.append(f"  {name:24} {value_text}{error_text}")
    return lines


def _sampling_options(arguments: argparse.Namespace) -> Sampling | None:
    """Return the sampling options that were given. If no option was given, return None, because
    tasks that do not sample reject sampling options.
    """
    options = {
        name: value for name in SAMPLING_OPTIONS if (value := getattr(arguments, name)) is not None
    }
    return Sampling(**options) if options else None


def _parse_k_values(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give whole numbers separated by commas, such as 1,4,8"
        ) from None


def _file_name(model: str) -> str:
    """Return a file name for a model: the last part of the model's name or path, or all parts of
    a checkpoint's `tinker://` path.
    """
    parts = model.rstrip("/").split("/")
    name = "-".join(parts[2:]) if "://" in model else parts[-1]
    if not name:
        raise UserError(
            f"--model {model!r} is not the name of a model; give a base model or a checkpoint"
        )
    return re.sub(r"[^\w.-]", "_", name)
