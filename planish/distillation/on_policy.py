"""On-policy distillation: the student samples, and the teacher scores each sampled token.

    d            = log p_student(token) - log p_teacher(token)
    advantage   += -kl_penalty_coef * d            for each sampled token that is trained on

In expectation, this term is the gradient of the reverse KL divergence at every position that the
student reaches. So the student learns from its own mistakes what the teacher would do (Agarwal et
al. 2023, GKD; Gu et al. 2023, MiniLLM; Lu et al. 2025, "On-Policy Distillation"). Each token has
its own term, which is not compared within a group. With `advantage` "none", the default, nothing
else is learned. Any other value adds the environments' rewards.

The training loop, the run's files and resuming are those of RL runs. Teachers with another
tokenizer are not supported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import chz

from planish import ServiceClient
from planish.distillation.datasets import DistillationDatasetBuilder, teacher_name
from planish.errors import UnsupportedError, UserError
from planish.rl.data_processing import TrainingSequence
from planish.rl.kl import add_kl_term, log_ratios, mean_log_ratio
from planish.rl.types import Metrics
from planish.training import rl_config as rl
from planish.training.run_loop import open_client
from planish.training.scoring_models import pin_checkpoint, scoring_client
from planish.training.script_errors import message_only
from planish.training.train_rl import train


@chz.chz
class Config(rl.Config):
    """The options of a run. Each part of `dataset_builder` names its teacher."""

    dataset_builder: DistillationDatasetBuilder
    advantage: str = chz.field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default="none",
        doc="none = only report rewards, mean = learn from rewards too",
        metadata=rl.ADVANTAGE_RULE,
        converter=rl.advantage_name,
    )
    kl_penalty_coef: float = chz.field(
        default=1.0, doc="coefficient of the teachers' KL term in the advantages"
    )

    def scoring_models(self) -> dict[str, str]:
        """Return the base models of the teachers, by the option that names each."""
        return {
            teacher_option(index): part.teacher_config.base_model
            for index, part in enumerate(self.dataset_builder.parts)
        }


def teacher_option(index: int) -> str:
    """Return the name of the option with the teacher of part `index`."""
    return f"dataset_builder.parts.{index}.teacher_config"


async def main(config: Config, service_client: ServiceClient | None = None) -> Path:
    """Train in this process, on a server (`base_url`), or with the given service client. Return the
    run directory.
    """
    with message_only():
        check(config)
        teachers = [part.teacher_config.base_model for part in config.dataset_builder.parts]
        with open_client(config, service_client, teachers) as client:
            return await _run(config, client)


async def _run(config: Config, service_client: ServiceClient) -> Path:
    parts = [
        chz.replace(part, teacher_config=pin_checkpoint(part.teacher_config, teacher_option(index)))
        for index, part in enumerate(config.dataset_builder.parts)
    ]
    config = chz.replace(config, dataset_builder=chz.replace(config.dataset_builder, parts=parts))
    clients: dict[str, Any] = {}
    for index, part in enumerate(parts):
        clients[teacher_name(index)] = await scoring_client(
            part.teacher_config,
            service_client,
            config.model_name,
            config.renderer_name,
            teacher_option(index),
        )
    return await train(
        config,
        service_client,
        TeacherKL(clients, config.kl_penalty_coef, config.kl_discount_factor),
    )


def check(config: Config) -> None:
    """Raise UserError for an invalid option, and UnsupportedError for one that distillation does
    not have. It runs before anything is loaded.
    """
    rl.check_all_but_reference(config)
    if not config.dataset_builder.parts:
        raise UserError(
            "dataset_builder.parts is empty; give at least one dataset with its teacher"
        )
    if config.kl_penalty_coef == 0:
        raise UserError(
            "kl_penalty_coef=0: the teachers would have no effect; give a number above 0, such as 1"
        )
    if config.kl_reference_config is not None:
        raise UserError(
            "kl_reference_config is given, but the teachers are the reference; leave it out"
        )
    if config.remove_constant_reward_groups:
        raise UserError(
            "remove_constant_reward_groups: a teacher also trains on groups of equal rewards; "
            "leave it out"
        )
    if config.temperature != 1.0:
        raise UnsupportedError(
            f"temperature={config.temperature}: a teacher's logprobs are those at temperature 1; "
            "sample at temperature 1"
        )
    if config.stream_minibatch_config is not None:
        raise UnsupportedError(
            "stream_minibatch_config: the teachers score a batch as a whole; leave it out"
        )


@dataclass(frozen=True)
class TeacherKL:
    """Adds -coefficient * d to the advantage of each trained token. Each group has its teacher."""

    teachers: Mapping[str, Any]
    """The sampling clients of the teachers, by name."""
    coefficient: float
    discount: float
    timing_name: ClassVar[str] = "teacher_logprobs"

    async def __call__(
        self, data_D: Sequence[TrainingSequence]
    ) -> tuple[list[TrainingSequence], Metrics]:
        log_ratios_D = await log_ratios(data_D, self._teacher_of)
        sequences_and_ratios_D = list(zip(data_D, log_ratios_D, strict=True))
        shaped_D = [
            add_kl_term(sequence, log_ratio_N, self.coefficient, self.discount)
            for sequence, log_ratio_N in sequences_and_ratios_D
        ]
        parts = {"teacher_kl": sequences_and_ratios_D}
        if len(self.teachers) > 1:
            parts |= {
                f"teacher_kl/{name}": [
                    pair for pair in sequences_and_ratios_D if pair[0].teacher == name
                ]
                for name in self.teachers
            }
        means = {
            key: mean_log_ratio(
                [sequence for sequence, _ in part], [log_ratio_N for _, log_ratio_N in part]
            )
            for key, part in parts.items()
        }
        return shaped_D, {key: mean for key, mean in means.items() if mean is not None}

    def _teacher_of(self, sequence: TrainingSequence) -> Any:
        assert sequence.teacher is not None, "every group of a TaughtDataset has a teacher"
        return self.teachers[sequence.teacher]
