"""Off-policy distillation: the student learns a teacher's distribution at every token of given
conversations.

    loss = -sum over learned tokens, and over the teacher's `topk` likeliest tokens there,
           of w p_teacher log p_student

w is the weight of the learned token. p_teacher is normalised to sum to 1 over the `topk` tokens
(planish/distillation/soft_targets.py).
Up to a constant, the loss is the forward KL divergence from this truncated distribution to the
student (Hinton et al. 2015; Agarwal et al. 2023).

The conversations may come from any source. planish/distillation/sampling.py writes conversations
with the teacher's own answers. A distribution contains more information at each token than one
written answer. But the student is never corrected on its own mistakes, as it is in
planish/distillation/on_policy.py.

The training loop, the run's files and resuming are those of supervised training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient, TrainingClient
from planish.distillation.soft_targets import SoftTargetData, soft_targets
from planish.distillation.teachers import TeacherConfig
from planish.errors import UserError
from planish.runlog.checkpoints import RunStart
from planish.runlog.evaluators import TrainingClientEvaluator
from planish.supervised.nll import NLLEvaluator, held_out_data
from planish.supervised.objective import CrossEntropy, Metrics, PendingGradient
from planish.supervised.types import SupervisedDataset
from planish.tokenizer import ModelTokenizer
from planish.training import supervised_config as supervised
from planish.training.option_rules import at_least
from planish.training.run_loop import open_client
from planish.training.scoring_models import model_info, pin_checkpoint, scoring_client
from planish.training.script_errors import message_only
from planish.training.supervised_context import limit_to_context
from planish.training.train_supervised import CONSOLE_METRICS, train
from planish.types import Datum, ModelInput, SamplingParams

EXTRA_REQUEST_TOKENS = 2
"""A request to the teacher has this many tokens more than a datum has positions: the last target,
and one sampled token.
"""
TEACHER_CONSOLE_METRICS = {
    "teacher_kl": "teacher kl {:.4f}",
    "test/teacher_kl": "test teacher kl {:.4f}",
}


@chz.chz
class Config(supervised.Config):
    """The options of a run. `dataset_builder` returns conversations, as in supervised training."""

    teacher_config: TeacherConfig
    topk: int = chz.field(
        default=20,
        doc="number of the teacher's most likely tokens that are learned at each position",
        metadata=at_least(1, "a whole number of at least {}, such as 20"),
    )


async def main(config: Config, service_client: ServiceClient | None = None) -> Path:
    """Train in this process, on a server (`base_url`), or with the given service client. Return the
    run directory.
    """
    with message_only():
        check(config)
        teacher_models = [config.teacher_config.base_model]
        with open_client(config, service_client, teacher_models) as client:
            return await _run(config, client)


async def _run(config: Config, service_client: ServiceClient) -> Path:
    config = chz.replace(
        config, teacher_config=pin_checkpoint(config.teacher_config, "teacher_config")
    )
    teacher = await scoring_client(
        config.teacher_config,
        service_client,
        config.model_name,
        config.renderer_name,
        "teacher_config",
    )
    await require_topk(teacher, config.topk)
    num_ids = await student_ids(config, service_client)
    config = await limit_to_context(
        config, service_client, [(config.teacher_config.base_model, EXTRA_REQUEST_TOKENS)]
    )

    def make_objective(start: RunStart) -> "SoftCrossEntropy":
        tokenizer = start.training_client.get_tokenizer()
        return SoftCrossEntropy(tokenizer, teacher, config.topk, num_ids)

    return await train(
        config, service_client, make_objective, CONSOLE_METRICS | TEACHER_CONSOLE_METRICS
    )


def check(config: Config) -> None:
    """Raise UserError for an invalid option. It runs before anything is loaded."""
    supervised.check(config)


async def require_topk(teacher: Any, topk: int) -> None:
    """Raise UserError if the teacher does not return the logprobs of `topk` tokens per position.
    This sends one short request before any training.
    """
    try:
        await teacher.sample_async(
            prompt=ModelInput.from_ints([0, 0]),
            num_samples=1,
            sampling_params=SamplingParams(max_tokens=1),
            topk_prompt_logprobs=topk,
        )
    except ValueError as error:
        raise UserError(f"topk={topk}: the teacher rejected it: {error}") from error


async def student_ids(config: Config, service_client: ServiceClient) -> int | None:
    """Return the student's number of token ids if the teacher has more; None if it has not, or if
    the service does not know the numbers. A printed line says which ids are left out. Raise
    UserError if `topk` exceeds the student's number.
    """
    teacher_model = config.teacher_config.base_model
    student, teacher = [
        (await model_info(service_client, name)).vocab_size
        for name in (config.model_name, teacher_model)
    ]
    if student is None or teacher is None or teacher <= student:
        return None
    if config.topk > student:
        raise UserError(
            f"topk={config.topk}: {config.model_name} has only {student} token ids; give fewer"
        )
    print(
        f"teacher_config: {teacher_model} has {teacher} token ids, and {config.model_name} only "
        f"{student}, because their embedding tables are padded to different sizes; the ids of the "
        "padding are left out of the teacher's distributions"
    )
    return student


@dataclass(frozen=True)
class SoftCrossEntropy:
    """The objective whose loss is the cross entropy to the teacher's distributions."""

    tokenizer: ModelTokenizer
    teacher: Any
    """A sampling client of the teacher."""
    topk: int
    num_ids: int | None = None
    """The student's number of token ids if the teacher has more; None if it has not."""

    async def submit(
        self, training_client: TrainingClient, data: Sequence[Datum]
    ) -> "SoftGradient":
        """Ask the teacher for the soft targets of a batch, and submit the student's gradient."""
        targets = await soft_targets(data, self.teacher, self.topk, self.num_ids)
        return SoftGradient(
            targets, await CrossEntropy(self.tokenizer).submit(training_client, targets.data)
        )

    def evaluator(self, test_set: SupervisedDataset) -> "SoftEvaluator":
        """Return the evaluator of held-out data, with soft targets of the same teacher."""
        return SoftEvaluator(held_out_data(test_set), self.teacher, self.topk, self.num_ids)


@dataclass(frozen=True)
class SoftGradient:
    """The submitted gradient of a batch, with the teacher's distributions."""

    targets: SoftTargetData
    gradient: PendingGradient

    async def metrics(self) -> Metrics:
        """Return the metrics of the step, and those of its soft targets."""
        metrics = await self.gradient.metrics()
        return metrics | self.targets.metrics(metrics.get("train_mean_nll"))


@dataclass(eq=False)
class SoftEvaluator(TrainingClientEvaluator):
    """Measures held-out conversations: NAME/nll, which is the cross entropy to the teacher's
    distributions, and NAME/teacher_kl, NAME/teacher_entropy and NAME/teacher_topk_mass.
    """

    data: Sequence[Datum]
    teacher: Any
    """A sampling client of the teacher."""
    topk: int
    num_ids: int | None = None
    """The student's number of token ids if the teacher has more; None if it has not."""
    name: str = "test"
    _targets: SoftTargetData | None = field(default=None, init=False)

    async def __call__(self, training_client: TrainingClient) -> Metrics:
        if self._targets is None:
            self._targets = await soft_targets(self.data, self.teacher, self.topk, self.num_ids)
        metrics = dict(await NLLEvaluator(self._targets.data, self.name)(training_client))
        return metrics | self._targets.metrics(metrics.get(f"{self.name}/nll"), f"{self.name}/")
