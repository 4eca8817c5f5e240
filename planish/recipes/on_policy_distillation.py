"""On-policy distillation: the student samples answers, and the teacher's logprobs of their tokens
are the training signal.

    python -m planish.recipes.on_policy_distillation teacher_checkpoint=runs/teacher
        env=arithmetic
    python -m planish.recipes.on_policy_distillation env=prompts dataset=chats.jsonl teacher_model=Qwen/Qwen3-8B
    python -m planish.recipes.on_policy_distillation teacher_checkpoint=runs/a more.0.env=gsm8k more.0.teacher_checkpoint=runs/b

`env` is an env of math_rl, or `prompts` for the questions of `dataset`, which have no rewards.
Rewards are always reported, but trained on only if `advantage` is set.
planish/distillation/on_policy.py computes the teacher's term. Each entry of `more` is another
dataset with its own teacher.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.distillation import on_policy
from planish.distillation.datasets import DistillationDatasetBuilder, DistillationDatasetConfig
from planish.distillation.prompts import PromptOnlyDatasetBuilder
from planish.errors import UserError
from planish.recipes import math_rl, training_run
from planish.recipes.rl_options import sampling_ahead
from planish.recipes.teacher_answers import TeacherModelOptions, teacher_config
from planish.recipes.training_run import run_main
from planish.rl.types import RLDatasetBuilder
from planish.training.option_rules import at_least, check_fields, require
from planish.training.rl_config import ADVANTAGE_RULE, advantage_name

PROMPTS = "prompts"
DEFAULT_LOG_PATH = "/tmp/planish-examples/on_policy_distillation"
PROMPTS_DEFAULTS: dict[str, Any] = {"learning_rate": 1e-4, "max_tokens": 512}
"""Default sizes for `env=prompts`; other envs have those of math_rl."""


@chz.chz
class Source:
    """A dataset and its teacher. All other options are those of the run."""

    env: str = chz.field(default=math_rl.ARITHMETIC, doc="as in the run's own options")
    dataset: str | None = None
    train_split: str | None = None
    test_split: str | None = None
    max_operand: int | None = None
    task: dict[str, Any] = chz.field(default_factory=dict)
    shown_examples: int | None = None
    batch_size: int | None = chz.field(default=None, doc="problems per step; none = as in the run")
    teacher_model: str | None = None
    teacher_checkpoint: str | None = None


@chz.chz
class Options(TeacherModelOptions, math_rl.Options):
    """Options of the recipe. `options_for` makes them with the default sizes of an env."""

    env: str = chz.field(
        default=math_rl.ARITHMETIC,
        doc="environment: one of math_rl, or prompts = the prompts of dataset",
    )
    log_path: str = chz.field(
        default=DEFAULT_LOG_PATH,
        doc=f"directory of the run's files; the default is {DEFAULT_LOG_PATH}-ENV",
    )
    group_size: int = chz.field(default=4, metadata=at_least(1))
    max_prompt_tokens: int | None = chz.field(
        default=None,
        doc="maximum tokens in a prompt; problems with longer prompts are left out and counted; "
        "none = 1024 for env=prompts, else no limit",
    )
    more: tuple[Source, ...] = chz.field(
        default=(),
        doc="further datasets, each with its teacher, such as more.0.env=gsm8k "
        "more.0.teacher_checkpoint=RUN",
    )
    advantage: str = chz.field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default="none",
        doc="none = learn only from the teacher, mean = learn from rewards too",
        metadata=ADVANTAGE_RULE,
        converter=advantage_name,
    )
    kl_penalty_coef: float = chz.field(
        default=1.0, doc="coefficient of the teachers' KL term in the advantages"
    )
    remove_constant_reward_groups: bool = chz.field(
        default=False, doc="always False: groups with equal rewards have the teacher's KL term too"
    )


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    check(options)
    config = distillation_config(options)
    on_policy.check(config)
    teachers = [part.teacher_config.base_model for part in config.dataset_builder.parts]
    return run_main(on_policy.main, config, service_client, teachers)


def options_for(env: str, **changes: Any) -> Options:
    """Return the options of an env with its defaults, and with `changes`."""
    return Options(**{**defaults_for(env), "env": env, **changes})


def defaults_for(env: str) -> dict[str, Any]:
    """Return the defaults of an env."""
    defaults = PROMPTS_DEFAULTS if env == PROMPTS else math_rl.defaults_for(env)
    return {**defaults, "log_path": f"{DEFAULT_LOG_PATH}-{env.replace(':', '-')}"}


def sources_of(options: Options) -> list[Options]:
    """Return for each dataset the options of a run with that dataset only."""
    return [
        chz.replace(options, more=()),
        *(_as_only_source(options, source) for source in options.more),
    ]


def _as_only_source(options: Options, source: Source) -> Options:
    named = {name: getattr(source, name) for name in chz.chz_fields(Source)}
    return chz.replace(
        options, more=(), **(named | {"batch_size": source.batch_size or options.batch_size})
    )


def distillation_config(options: Options) -> on_policy.Config:
    """Return the config of `planish.distillation.on_policy`."""
    parts = [
        DistillationDatasetConfig(
            dataset_builder=dataset_builder(source), teacher_config=teacher_config(source)
        )
        for source in sources_of(options)
    ]
    return training_run.build(
        on_policy.Config,
        options,
        **sampling_ahead(options),
        dataset_builder=DistillationDatasetBuilder(parts=parts),
        recipe_name="on_policy_distillation",
    )


def dataset_builder(options: Options) -> RLDatasetBuilder:
    """Return the dataset builder of the env."""
    if options.env != PROMPTS:
        return math_rl.dataset_builder(options)
    assert options.dataset is not None, "`check` rejects env=prompts without a dataset"
    return training_run.build_with_defaults(PromptOnlyDatasetBuilder, options)


def check(options: Options) -> None:
    """Raise UserError for an option that is invalid or would be ignored."""
    training_run.reject_unused(
        options,
        ("kl_reference_model", "kl_reference_checkpoint"),
        "is given, but the teachers are the reference; leave it out",
    )
    sources = sources_of(options)
    for source in sources:
        check_source(source)
    envs = {source.env for source in sources}
    if envs == {PROMPTS}:
        reason = "is not used, because prompts have no tests; leave it out"
        training_run.reject_unused(options, ("eval_problems", "test_split"), reason)
    if options.advantage != "none" and envs == {PROMPTS}:
        raise UserError(f"advantage={options.advantage}: prompts have no rewards; leave it out")


def check_source(options: Options) -> None:
    """Raise UserError for an option of one dataset that is invalid or would be ignored."""
    if options.teacher_model is None and options.teacher_checkpoint is None:
        raise UserError(
            "there is no teacher; give teacher_checkpoint, teacher_model, or both, for each dataset"
        )
    if options.env != PROMPTS:
        math_rl.check(options)
        return
    training_run.reject_unused(
        options,
        ("max_operand", "task", "shown_examples"),
        "is no option of env=prompts; leave it out",
    )
    check_fields(options)
    require(
        options,
        dataset=(
            options.dataset is not None,
            "the prompts: a hub name, a local directory or a file",
        ),
    )


def with_env_defaults(arguments: Sequence[str]) -> tuple[training_run.Presets, list[str]]:
    """Treat `env=NAME` as a preset of the same name, as `math_rl.with_env_defaults` does."""
    return math_rl.with_env_defaults(arguments, defaults_for)


if __name__ == "__main__":
    training_run.run_command(main, Options, *with_env_defaults(sys.argv[1:]))
