"""The teachers of distillation.

A teacher is a base model or a checkpoint, used through a sampling client. It scores the student's
token ids, so both must have the same vocabulary, which `scoring_client` checks before training.
"""

import chz

from planish.training.scoring_models import KLReferenceConfig


@chz.chz
class TeacherConfig(KLReferenceConfig):
    """The model whose token probabilities the student learns."""
