"""Off-policy distillation: a student is trained on the teacher's token distributions in given
answers.

    python -m planish.recipes.off_policy_distillation teacher_checkpoint=runs/teacher
        generated sums
    python -m planish.recipes.off_policy_distillation dataset=chats.jsonl teacher_model=Qwen/Qwen3-8B
    python -m planish.recipes.off_policy_distillation dataset=prompts.jsonl teacher_answers=True teacher_checkpoint=runs/teacher

By default, the answers are read from `dataset`. With `teacher_answers=True`, and for generated
sums, the teacher samples the answers first, and they are stored in the run's directory. The target
at each token is the teacher's distribution over its `topk` likeliest tokens
(planish/distillation/off_policy.py).
"""

import sys
from pathlib import Path

import chz

from planish import ServiceClient
from planish.distillation import off_policy
from planish.errors import UserError
from planish.recipes import teacher_answers, training_run
from planish.recipes.sl_options import chat_builder, learning_rate
from planish.recipes.teacher_answers import SUMS, TeacherOptions, teacher_config
from planish.recipes.training_run import run_main
from planish.training.option_rules import at_least

SAMPLING_OPTION_DEFAULTS = {"max_tokens": 256, "temperature": 1.0, "num_prompts": None}
"""Options that apply only to sampled answers, with their defaults."""


@chz.chz
class Options(TeacherOptions):
    """Options of the recipe."""

    log_path: str = "/tmp/planish-examples/off_policy_distillation"
    teacher_answers: bool = chz.field(
        default=False,
        doc="let the teacher answer the prompts of dataset, and ignore the answers in dataset",
    )
    topk: int = chz.field(
        default=20,
        doc="number of the teacher's most likely tokens that are learned at each position",
        metadata=at_least(1),
    )


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Train and return the run directory."""
    check(options)
    config = distillation_config(options)
    off_policy.check(config)

    async def answered(config: off_policy.Config, service_client: ServiceClient) -> Path:
        if is_sampled(options):
            await teacher_answers.write_answers(options, service_client, shows_examples=True)
        return await off_policy.main(config, service_client)

    return run_main(answered, config, service_client, [options.teacher_model])


def is_sampled(options: Options) -> bool:
    """Return whether the teacher samples the answers."""
    return options.teacher_answers or options.dataset == SUMS


def distillation_config(options: Options) -> off_policy.Config:
    """Return the config of `planish.distillation.off_policy`."""
    if is_sampled(options):
        builder = teacher_answers.answers_builder(options)
    else:
        builder = chat_builder(options, options.dataset)
    return training_run.build(
        off_policy.Config,
        options,
        learning_rate=learning_rate(options),
        dataset_builder=builder,
        evaluator_builders=teacher_answers.evaluators(options, shows_examples=True),
        teacher_config=teacher_config(options),
        recipe_name="off_policy_distillation",
    )


def check(options: Options) -> None:
    """Raise UserError for an option that is invalid or would be ignored."""
    if options.teacher_model is None and options.teacher_checkpoint is None:
        raise UserError("there is no teacher; give teacher_checkpoint, teacher_model, or both")
    if is_sampled(options):
        teacher_answers.check(options)
        return
    teacher_answers.check_sums(options)
    for name, default in SAMPLING_OPTION_DEFAULTS.items():
        if getattr(options, name) != default:
            raise UserError(
                f"{name}={getattr(options, name)} has no effect, because the answers come from "
                f"dataset={options.dataset}; leave it out, or give teacher_answers=True"
            )


if __name__ == "__main__":
    training_run.run_command(main, Options, {}, sys.argv[1:])
