"""RL on answers that a judge model grades by a rubric.

    python -m planish.recipes.rubric                                                 generated sums,
        graded by the base model itself
    python -m planish.recipes.rubric judge_checkpoint=runs/judge shown_verdicts=0    graded by a
        trained judge (planish/recipes/rubric_judge.py)
    python -m planish.recipes.rubric dataset=rows.jsonl judge_url=http://127.0.0.1:8000/v1 judge_model=Qwen/Qwen3-8B
    python -m planish.recipes.rubric dataset=rows.jsonl judge_url=https://api.openai.com/v1 judge_model=... judge_key_env=OPENAI_API_KEY

The reward is the mean of the judge's scores, weighted by their criteria. The judge is a base model
or a checkpoint on the engine of the run, or a model behind an OpenAI-compatible endpoint. It is
sampled greedily. If the judge fails or writes no score, the answer does not get a score of 0: the
rollout fails and is retried. planish/rubric/rubrics.py describes the rows.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.completers import TinkerMessageCompleter
from planish.datasets.split_names import SplitNames
from planish.errors import UserError
from planish.evaluation.models import open_model
from planish.integrations.openai_endpoint import ChatEndpoint
from planish.recipes import training_run
from planish.recipes.rl_options import RLOptions, run
from planish.recipes.sum_tasks import NUM_EXAMPLE_VERDICTS, generated_rubrics
from planish.rubric.env import UNFINISHED_REWARD, RubricDatasetBuilder
from planish.rubric.grading import Grader
from planish.rubric.rubrics import RUBRICS, RubricRows, read_rubric_row
from planish.runlog.checkpoint_info import require_base_model
from planish.runlog.run_directory import checkpoint_of
from planish.supervised.datasets import read_splits, row_splits
from planish.training.option_rules import GROUP_SIZE, at_least, check_fields, rule, zero_for
from planish.training.run_loop import open_client

DEFAULT_LARGEST = 20
ENDPOINT_OPTIONS = {
    "judge_key_env": "api_key_env",
    "judge_timeout": "timeout_seconds",
    "judge_retries": "max_retries",
    "judge_concurrency": "max_concurrent",
    "judge_extra": "extra",
}
"""Options that only a judge behind an endpoint has, with the argument of ChatEndpoint for each."""


@chz.chz
class JudgeOptions:
    """Which model judges, and how it is called."""

    judge_model: str | None = chz.field(
        default=None, doc="base model of the judge, or the endpoint's model; none = model_name"
    )
    judge_checkpoint: str | None = chz.field(
        default=None, doc="weights of the judge: a checkpoint or a run directory"
    )
    judge_renderer_name: str | None = chz.field(
        default=None,
        doc="chat format of the judge; none = that of the checkpoint's run, or the model's own",
    )
    judge_max_tokens: int = chz.field(
        default=64,
        doc="maximum number of tokens in the judge's reply, reasoning included",
        metadata=at_least(1),
    )
    judge_url: str | None = chz.field(
        default=None,
        doc="URL of an OpenAI-compatible endpoint, ending in /v1; none = the run's own engine",
    )
    judge_key_env: str | None = chz.field(
        default=None, doc="endpoint: environment variable that contains the API key"
    )
    judge_timeout: float | None = chz.field(
        default=None, doc="endpoint: seconds until an attempt times out; none = 120"
    )
    judge_retries: int | None = chz.field(default=None, doc="endpoint: number of retries; none = 5")
    judge_concurrency: int | None = chz.field(
        default=None, doc="endpoint: number of concurrent requests; none = 16"
    )
    judge_extra: dict[str, Any] = chz.field(
        default_factory=dict,
        doc="endpoint: additional fields of a request, such as judge_extra.reasoning_effort=low",
    )


@chz.chz
class Options(JudgeOptions, SplitNames, RLOptions):
    """Options of the recipe."""

    log_path: str = "/tmp/planish-examples/rubric"
    dataset: str | None = chz.field(
        default=None, doc="hub name, local directory or file; none = generated sums"
    )
    test_size: int | None = chz.field(
        default=64,
        doc="number of test rows; none = the whole test split, 0 = no evaluation; without a test "
        "split they are held out of training",
        metadata=zero_for("no evaluation"),
    )
    largest: int | None = chz.field(
        default=None,
        doc=f"generated sums: largest operand; none = {DEFAULT_LARGEST}",
        metadata=at_least(1),
    )
    shown_verdicts: int | None = chz.field(
        default=None,
        doc="generated sums: number of example verdicts in the judge's prompt, 0 to "
        f"{NUM_EXAMPLE_VERDICTS}; none = all",
        metadata=rule(
            lambda value: 0 <= value <= NUM_EXAMPLE_VERDICTS, f"0 to {NUM_EXAMPLE_VERDICTS}"
        ),
    )
    unfinished_reward: float = chz.field(
        default=UNFINISHED_REWARD, doc="reward of an answer that is truncated"
    )
    batch_size: int = chz.field(default=8, doc="questions per step", metadata=at_least(1))
    group_size: int = chz.field(default=8, doc="answers per question", metadata=GROUP_SIZE)

    learning_rate: float = 2e-4
    max_tokens: int = 16
    max_steps: int | None = 20
    eval_every: int = 10
    rollout_error_tolerance: bool = chz.field(
        default=True,
        doc="retry rollouts that fail, for example because the judge failed, instead of ending "
        "the run",
    )


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    check(options)
    rows = make_row_reader(options)
    models = [options.judge_model] if options.judge_url is None else []
    with open_client(options, service_client, models) as client:
        return train(options, rows, client)


def train(options: Options, rows: Callable[[], RubricRows], service_client: ServiceClient) -> Path:
    """Train with a judge on the same engine or server, or behind an endpoint."""
    has_endpoint = options.judge_url is not None
    judge = endpoint_of(options) if has_endpoint else engine_judge(options, service_client)
    builder = training_run.build(
        RubricDatasetBuilder,
        options,
        rows=rows,
        grader=Grader(judge),
        judge_name=judge_name(options),
    )
    return run(options, builder, recipe_name="rubric", service_client=service_client)


def endpoint_of(options: Options) -> ChatEndpoint:
    """Return the judge behind `judge_url`."""
    assert options.judge_url is not None
    endpoint_options = {
        argument: getattr(options, option)
        for option, argument in ENDPOINT_OPTIONS.items()
        if getattr(options, option) is not None
    }
    model = options.judge_model or options.model_name
    return ChatEndpoint(
        options.judge_url, model, max_tokens=options.judge_max_tokens, **endpoint_options
    )


def engine_judge(options: Options, service_client: ServiceClient) -> TinkerMessageCompleter:
    """Return the judge that runs on the engine of the run. A checkpoint has the chat format that
    its run recorded, unless `judge_renderer_name` names another one.
    """
    is_own = options.judge_model is None and options.judge_checkpoint is None
    judge = open_model(
        service_client,
        options.judge_checkpoint or options.judge_model or options.model_name,
        options.judge_renderer_name or (options.renderer_name if is_own else None),
    )
    if options.judge_checkpoint is not None and options.judge_model is not None:
        require_base_model(
            judge.sampling_client, options.judge_model, options.judge_checkpoint, "judge_model"
        )
    return TinkerMessageCompleter(
        judge.sampling_client,
        judge.renderer,
        options.judge_max_tokens,
        temperature=0.0,
        context_window=judge.context_window,
    )


def judge_name(options: Options) -> str:
    """Return a text with everything that the judge's verdicts depend on. It names the checkpoint of
    a run directory, since that directory may get later checkpoints.
    """
    model = options.judge_model or options.model_name
    location = options.judge_url or (
        checkpoint_of(options.judge_checkpoint) if options.judge_checkpoint else None
    )
    parts = [
        model,
        f"of {location}" if location else "",
        f"greedy, at most {options.judge_max_tokens} tokens",
    ]
    parts += [f"{name}={value}" for name, value in sorted(options.judge_extra.items())]
    parts += [options.judge_renderer_name or ""]
    return ", ".join(part for part in parts if part)


def make_row_reader(options: Options) -> Callable[[], RubricRows]:
    """Return a function that returns the rows. They are read once here, so that errors in the data
    are raised before a model is loaded.
    """
    if options.dataset is None:
        largest = DEFAULT_LARGEST if options.largest is None else options.largest
        test_size = 64 if options.test_size is None else options.test_size
        shown = NUM_EXAMPLE_VERDICTS if options.shown_verdicts is None else options.shown_verdicts
        rows = partial(
            generated_rubrics,
            largest=largest,
            test_size=test_size,
            seed=options.seed,
            shown_verdicts=shown,
        )
    else:
        rows = partial(
            rows_of_dataset,
            options.dataset,
            test_size=options.test_size,
            seed=options.seed,
            train_split=options.train_split,
            test_split=options.test_split,
        )
    rows()
    return rows


def rows_of_dataset(
    dataset: str,
    *,
    test_size: int | None,
    seed: int,
    train_split: str | None = None,
    test_split: str | None = None,
) -> RubricRows:
    """Return the rows of a dataset. Without a test split, `test_size` rows are held out."""
    splits = row_splits(dataset, test_size, seed, train_split, test_split)
    return RubricRows(*read_splits(dataset, splits, read_rubric_row, RUBRICS))


def check(options: Options) -> None:
    """Raise UserError for an option that is invalid or would be ignored."""
    check_fields(options)
    if options.dataset is None:
        training_run.reject_unused(options, *training_run.SPLITS_OF_DATASET)
    else:
        training_run.reject_unused(
            options,
            ("largest", "shown_verdicts"),
            "is for generated sums, and dataset is given; leave it out",
        )
    if options.judge_url is None:
        training_run.reject_unused(
            options,
            ENDPOINT_OPTIONS,
            "is for a judge behind judge_url; give judge_url, or leave it out",
        )
        if options.rollout_processes != 0:
            raise UserError(
                f"rollout_processes={options.rollout_processes}: a judge without judge_url runs in "
                "this process; give 0"
            )
    else:
        engine_options = ("judge_checkpoint", "judge_renderer_name")
        training_run.reject_unused(
            options,
            engine_options,
            "is for a judge on the engine of the run; leave it out with judge_url",
        )
        endpoint_of(options)


if __name__ == "__main__":
    training_run.run_command(main, Options, {}, sys.argv[1:])
