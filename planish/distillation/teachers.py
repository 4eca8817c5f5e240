"""The teachers of distillation.

A teacher is a base model or a checkpoint, used through a sampling client. It scores the student's
token ids, so both must have the same vocabulary. This is checked before training.
"""

import asyncio
import logging
from typing import Any

import chz

from planish import ServiceClient
from planish.runlog.checkpoint_info import find_checkpoint, recorded_renderer_name
from planish.runlog.checkpoints import choose_renderer
from planish.runlog.run_directory import checkpoint_of
from planish.training.scoring_models import KLReferenceConfig, scoring_client

logger = logging.getLogger(__name__)


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
    teacher: TeacherConfig,
    service_client: ServiceClient,
    student_model: str,
    renderer_name: str | None,
    option: str,
) -> Any:
    """Return a sampling client of the teacher. Raise UserError, which names `option`, if the
    vocabulary is not the student's.

    `renderer_name` is the chat format of the student's prompts; None = that of `student_model`. A
    warning reports that the teacher has another chat format, because it then scores texts that it
    was not trained on.
    """
    client = await scoring_client(teacher, service_client, student_model, option)
    student_format, teacher_format = await asyncio.to_thread(
        _renderer_names, teacher, client, service_client, student_model, renderer_name
    )
    if student_format != teacher_format:
        logger.warning(
            "%s: the prompts have the chat format %s, and the teacher %s has %s: the teacher "
            "scores texts in a format that is not its own; give renderer_name, or another teacher",
            option,
            student_format,
            teacher.load_checkpoint_path or teacher.base_model,
            teacher_format,
        )
    return client


def _renderer_names(
    teacher: TeacherConfig,
    teacher_client: Any,
    service_client: ServiceClient,
    student_model: str,
    renderer_name: str | None,
) -> tuple[str, str]:
    """Return the names of the student's and the teacher's renderers. A checkpoint has the renderer
    that its run recorded.
    """
    tokenizer = teacher_client.get_tokenizer()
    recorded_name = None
    if teacher.load_checkpoint_path is not None:
        path = checkpoint_of(teacher.load_checkpoint_path)
        recorded_name = recorded_renderer_name(find_checkpoint(service_client, path))
    # The vocabularies are equal, so either tokenizer does.
    student = choose_renderer(renderer_name, student_model, tokenizer)
    return student.name, choose_renderer(recorded_name, teacher.base_model, tokenizer).name
