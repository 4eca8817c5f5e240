"""Groups that are drawn, as many as one wants: the generator of a group is a function of (seed,
batch, place in the batch).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planish.rl.types import EnvGroupBuilder, RLDataset

BATCHES = 1000
"""More than a run of these recipes takes; num_epochs goes beyond."""
ENDLESS = 1_000_000
"""As good as no end."""


@dataclass(frozen=True)
class GeneratedDataset(RLDataset):
    draw_group: Callable[[random.Random], EnvGroupBuilder]
    groups_per_batch: int
    seed: int
    batches: int = BATCHES

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [
            self.draw_group(random.Random(f"{self.seed}:{index}:{place}"))
            for place in range(self.groups_per_batch)
        ]

    def __len__(self) -> int:
        return self.batches
