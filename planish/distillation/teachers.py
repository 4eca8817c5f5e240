"""The teachers of distillation.

A teacher is a base model or a checkpoint, used through a sampling client. It scores the student's
token ids, so both must have the same vocabulary. This is checked before training.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import chz

from planish import ServiceClient
from planish.errors import UserError
from planish.runlog.run_directory import checkpoint_of
from planish.training.rl_config import KLReferenceConfig
from planish.training.train_rl import policy_client


@chz.chz
class TeacherConfig(KLReferenceConfig):
    """The model whose token probabilities the student learns."""


def pin_checkpoint(teacher: TeacherConfig) -> TeacherConfig:
    """Return the config with a run directory replaced by its newest checkpoint. The directory may
    have a newer checkpoint when the student's run is resumed, and the teacher must not change.
    """
    if teacher.load_checkpoint_path is None:
        return teacher
    return chz.replace(teacher, load_checkpoint_path=checkpoint_of(teacher.load_checkpoint_path))


async def teacher_client(
    teacher: TeacherConfig, service_client: ServiceClient, student_model: str, option: str
) -> Any:
    """Return a sampling client of the teacher. Raise UserError, which names `option`, if the
    vocabulary is not the student's.
    """
    client = await policy_client(teacher, service_client, option)
    await require_one_vocabulary(student_model, teacher.base_model, service_client, option)
    return client


async def require_one_vocabulary(
    student_model: str, other_model: str, service_client: ServiceClient, option: str
) -> None:
    """Raise UserError, which names `option`, unless the base models `student_model` and
    `other_model` have the same vocabulary.
    """
    if other_model == student_model:
        return
    clients = [
        await service_client.create_sampling_client_async(base_model=name)
        for name in (student_model, other_model)
    ]
    tokenizers = [await asyncio.to_thread(client.get_tokenizer) for client in clients]
    difference = vocabulary_difference(*(tokenizer.get_vocab() for tokenizer in tokenizers))
    if difference is not None:
        raise UserError(
            f"{option}: the vocabulary of {student_model} is not that of {other_model} "
            f"({difference}); give a model with the tokenizer of model_name"
        )


def vocabulary_difference(first: Mapping[str, int], second: Mapping[str, int]) -> str | None:
    """Describe the differing token with the lowest id. None if the vocabularies are equal."""
    differing = first.items() ^ second.items()
    if not differing:
        return None
    token, _ = min(differing, key=lambda item: (item[1], item[0]))
    ids = [str(vocabulary.get(token, "missing")) for vocabulary in (first, second)]
    return f"the id of token {token!r} is {ids[0]} in the first and {ids[1]} in the second"
