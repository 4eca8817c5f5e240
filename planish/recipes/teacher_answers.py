"""Options of the recipes that train on a teacher's answers, and the stage that samples the answers.

The answers are stored in the run's directory as sampled.jsonl (planish/distillation/sampling.py). A
resumed run does not sample them again.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.datasets.messages import Message
from planish.datasets.row_digests import digest_of
from planish.distillation.prompts import load_prompts
from planish.distillation.sampling import TeacherSampler, sample_conversations
from planish.distillation.teachers import TeacherConfig
from planish.errors import UserError
from planish.files import lock_directory
from planish.recipes import training_run
from planish.recipes.sl_options import SLOptions, chat_builder
from planish.recipes.sum_tasks import generated_sum_prompts, sum_test
from planish.renderers import TrainOnWhat
from planish.runlog.model_renderer import model_renderer
from planish.supervised.datasets import FromRowsBuilder
from planish.training.option_rules import NOT_NEGATIVE, at_least, check_fields, require
from planish.training.scoring_models import pin_checkpoint, scoring_client

SUMS = "sums"
MAX_OPERAND = 20
SAMPLED_ANSWERS_FILE = "sampled.jsonl"


@chz.chz
class TeacherModelOptions:
    """The weights of the teacher."""

    teacher_model: str | None = chz.field(
        default=None, doc="base model of the teacher; none = model_name"
    )
    teacher_checkpoint: str | None = chz.field(
        default=None, doc="checkpoint or run directory of the teacher; none = the base model"
    )


@chz.chz
class TeacherOptions(TeacherModelOptions, SLOptions):
    """Options of recipes that train on a teacher's answers."""

    dataset: str = chz.field(
        default=SUMS, doc="hub name, local directory or file; sums = generated questions"
    )
    test_size: int | None = chz.field(
        default=64,
        doc="number of test conversations; none = the whole test split, 0 = no evaluation",
    )
    batch_size: int = 16
    max_length: int = 1024
    max_tokens: int = chz.field(
        default=256,
        doc="maximum number of tokens in an answer of the teacher",
        metadata=at_least(1),
    )
    temperature: float = chz.field(
        default=1.0, doc="sampling temperature of the teacher's answers", metadata=NOT_NEGATIVE
    )
    num_prompts: int | None = chz.field(
        default=None,
        doc="number of prompts that the teacher answers; none = all, or 512 sums",
        metadata=at_least(1),
    )
    max_operand: int | None = chz.field(
        default=None, doc=f"sums: largest operand; none = {MAX_OPERAND}", metadata=at_least(1)
    )

    @property
    def largest_operand(self) -> int:
        """The largest number that is added in generated sums."""
        return MAX_OPERAND if self.max_operand is None else self.max_operand


def teacher_config(options: Any) -> TeacherConfig:
    """Return the config of the teacher of options that derive from `TeacherModelOptions`."""
    return TeacherConfig(
        base_model=options.teacher_model or options.model_name,
        load_checkpoint_path=options.teacher_checkpoint,
    )


def check(options: TeacherOptions) -> None:
    """Raise UserError for an invalid option."""
    check_sums(options)
    training_run.reject_unused(
        options,
        ("test_split",),
        "is not used, because test conversations are held out of the teacher's answers; leave it "
        "out",
    )
    check_fields(options)
    require(
        options,
        train_on_what=(
            options.train_on_what is TrainOnWhat.ALL_ASSISTANT_MESSAGES,
            "its default, because only the teacher's answer is trained on",
        ),
    )


def check_sums(options: TeacherOptions) -> None:
    """Raise UserError if an option for generated sums is set, but the dataset is not `sums`."""
    if options.dataset != SUMS:
        training_run.reject_unused(
            options, ("max_operand",), f"is for sums, and dataset={options.dataset}; leave it out"
        )
    else:
        training_run.reject_unused(
            options, ("train_split",), f"is not used with dataset={SUMS}; leave it out"
        )


def answers_path(options: TeacherOptions) -> Path:
    """Return the path of the file with the teacher's answers."""
    return Path(options.log_path).expanduser() / SAMPLED_ANSWERS_FILE


def answers_builder(options: TeacherOptions) -> FromRowsBuilder:
    """Return the builder of the dataset of answers. The builder may be called only after the
    answers are sampled.
    """
    last = chz.replace(
        options, train_on_what=TrainOnWhat.LAST_ASSISTANT_MESSAGE, train_split=None, test_split=None
    )
    return chat_builder(last, str(answers_path(options)))


def evaluators(options: TeacherOptions, *, shows_examples: bool) -> Sequence[Any]:
    """Return the evaluators in addition to the loss on held-out answers. For generated sums, one
    evaluator grades the student's results; for other datasets, there is none.
    """
    if options.dataset != SUMS:
        return ()
    names = {"model_name": options.model_name, "renderer_name": options.renderer_name}
    return (
        partial(
            sum_test, max_operand=options.largest_operand, shows_examples=shows_examples, **names
        ),
    )


async def write_answers(
    options: TeacherOptions,
    service_client: ServiceClient,
    prefix: Sequence[Mapping[str, Any]] = (),
    *,
    shows_examples: bool,
) -> None:
    """Sample the teacher's answer to each prompt that has no answer in the file yet. The teacher
    sees the messages of `prefix` before each prompt. Raise UserError if there are too few prompts
    or too few complete answers for a training batch and the test set.

    The run's directory is locked meanwhile, as it is during training, since two processes must not
    append to the same file.
    """
    renderer = model_renderer(options.model_name, options.renderer_name)
    prompts = prompts_of(options, prefix, shows_examples=shows_examples)
    needed = options.batch_size + (options.test_size or 0)
    if len(prompts) < needed:
        raise UserError(
            f"there are {len(prompts)} prompts, and batch_size={options.batch_size} with "
            f"test_size={options.test_size or 0} needs {needed}; give more prompts, or smaller "
            "sizes"
        )
    teacher = pin_checkpoint(teacher_config(options), "teacher_checkpoint")
    origin = {
        "teacher": chz.asdict(teacher),
        "renderer": renderer.name,
        "prefix": list(prefix),
        "dataset": options.dataset,
        "prompts": len(prompts),
        "prompts_sha256": digest_of(prompts).sha256,
        **({"max_operand": options.largest_operand} if options.dataset == SUMS else {}),
        **{name: getattr(options, name) for name in ("max_tokens", "temperature", "seed")},
    }
    path = answers_path(options)
    lock = lock_directory(path.parent, "log_path", "this run")
    try:
        sampler = TeacherSampler(
            await scoring_client(
                teacher, service_client, options.model_name, renderer.name, "teacher_model"
            ),
            renderer,
            options.max_tokens,
            options.temperature,
            options.seed,
            prefix,
            (await service_client.get_server_capabilities_async()).context_length_of(
                teacher.base_model
            ),
        )
        sampled = await sample_conversations(sampler, prompts, path, origin)
    finally:
        lock.release()
    complete = sampled.num_done - sampled.num_left_out
    if complete < needed:
        raise UserError(
            f"the teacher completed {complete} of {sampled.num_done} answers within max_tokens="
            f"{options.max_tokens}, and batch_size={options.batch_size} with "
            f"test_size={options.test_size or 0} needs {needed}; give smaller sizes, or another "
            "log_path with a larger max_tokens or a teacher that ends its answers"
        )


def prompts_of(
    options: TeacherOptions, prefix: Sequence[Mapping[str, Any]], *, shows_examples: bool
) -> Sequence[list[Message]]:
    """Return the prompts that the teacher answers. Raise UserError if there are too few."""
    if options.dataset == SUMS:
        count = options.num_prompts or 512
        return generated_sum_prompts(
            count, options.largest_operand, options.seed, shows_examples=shows_examples
        )
    prompts = load_prompts(
        options.dataset,
        model_renderer(options.model_name, options.renderer_name),
        prefix,
        options.train_split,
    )
    if options.num_prompts is not None and options.num_prompts > len(prompts):
        raise UserError(
            f"num_prompts={options.num_prompts}: dataset={options.dataset} has {len(prompts)} "
            "prompts; give at most that number"
        )
    return prompts[: options.num_prompts]
