"""Random groups without end. A group depends only on (seed, batch, position in the batch)."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planish.rl.types import EnvGroupBuilder, RLDataset

BATCHES = 1000
"""Default number of batches, more than a run of these recipes takes. `num_epochs` gives more."""
ENDLESS = 1_000_000
"""Number of batches of a dataset that should never end."""


@dataclass(frozen=True)
class GeneratedDataset(RLDataset):
    """Batches of groups that `draw_group` makes from a seeded random generator."""

    draw_group: Callable[[random.Random], EnvGroupBuilder]
    groups_per_batch: int
    seed: int
    batches: int = BATCHES

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [
            self.draw_group(random.Random(f"{self.seed}:{index}:{position}"))
            for position in range(self.groups_per_batch)
        ]

    def __len__(self) -> int:
        return self.batches
