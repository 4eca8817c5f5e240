"""RL datasets for distillation from several teachers.

A dataset has several parts, each with its own teacher, and each of its groups stores the name of
its teacher. A batch consists of one batch of each part, so every step learns from every teacher. An
epoch has as many batches as the shortest part, and the next epoch restarts all parts. The test set
concatenates the test sets of the parts. Groups keep the logging tags of the original dataset, so
metrics (env/TAG/...) are reported per part only if the parts have different tags.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import chz

from planish.distillation.teachers import TeacherConfig
from planish.errors import UserError
from planish.rl.environments.datasets import ConcatenatedRLDataset, rebatch
from planish.rl.types import (
    EnvGroupBuilder,
    RLDataset,
    RLDatasetBuilder,
    WrappedGroup,
    smallest_group_size_of,
)


@chz.chz
class DistillationDatasetConfig:
    """One part: a dataset and its teacher."""

    dataset_builder: RLDatasetBuilder
    teacher_config: TeacherConfig
    groups_per_batch: int | None = chz.field(
        default=None, doc="groups per batch; none = the dataset's own batches"
    )


def teacher_name(index: int) -> str:
    """Return the name of the teacher of part `index`, as used in metrics and in groups."""
    return f"dataset_{index}"


@dataclass(frozen=True)
class TaughtGroup(WrappedGroup):
    """A group with the name of its teacher. All calls are forwarded to `inner`."""

    name: str
    """The name of the teacher."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plays_together", self.inner.plays_together)

    def teacher(self) -> str:
        """Return the name of the teacher."""
        return self.name


@dataclass(frozen=True)
class TaughtDataset(RLDataset):
    """A dataset whose batches join one batch of each part."""

    parts: Sequence[RLDataset]

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Return the groups of a batch: those of each dataset, with the name of its teacher."""
        return [
            TaughtGroup(builder, teacher_name(index))
            for index, part in enumerate(self.parts)
            for builder in part.get_batch(index)
        ]

    def __len__(self) -> int:
        return min(len(part) for part in self.parts)

    def require_full_batch(self) -> None:
        """Raise UserError if a batch of a part is larger than that part."""
        for part in self.parts:
            part.require_full_batch()

    def inner_datasets(self) -> Sequence[RLDataset]:
        """Return the parts."""
        return self.parts


@chz.chz
class DistillationDatasetBuilder(RLDatasetBuilder):
    """Builds the datasets of all parts. Raises UserError if `parts` is empty."""

    parts: Sequence[DistillationDatasetConfig]

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        if not self.parts:
            raise UserError("parts is empty; give at least one dataset with its teacher")
        datasets = [(part, *await part.dataset_builder()) for part in self.parts]
        train_sets = [rebatch(dataset, part.groups_per_batch) for part, dataset, _ in datasets]
        test_sets = [test for _, _, test in datasets if test is not None]
        return TaughtDataset(train_sets), ConcatenatedRLDataset(test_sets) if test_sets else None

    def smallest_group_size(self) -> int | None:
        """Return the smallest group size of the parts; None if it is unknown."""
        return smallest_group_size_of([part.dataset_builder for part in self.parts])
