"""RL datasets made of problems, or of other datasets.

Each dataset is a function of the batch index: the same index gives the same batch in every process,
so a run can resume at any batch. Builders are made anew for each batch and never cached, because a
builder may keep state of its group. Only the orders of epochs are cached.
"""

import bisect
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Generic, TypeVar

import chz
import numpy as np

from planish.datasets.rows import check_shuffle_seed
from planish.errors import UserError
from planish.rl.environments.prompt_selection import PromptLengths
from planish.rl.types import (
    EnvGroupBuilder,
    PromptLength,
    RLDataset,
    RLDatasetBuilder,
    smallest_group_size_of,
)

P = TypeVar("P")

DEFAULT_NUM_BATCHES = 1000
"""Default number of batches of a GeneratedDataset, more than most runs need. A run with
`num_epochs` > 1 repeats them.
"""
ENDLESS_NUM_BATCHES = 1_000_000
"""Number of batches for a dataset that should outlast any run."""


@dataclass(eq=False)
class ProblemDataset(RLDataset, Generic[P]):
    """One group for each of a list of problems, made by `make_group(problem)`.

    A batch can hold the end of one epoch and the beginning of the next, so only the very last batch
    can be smaller than the others. With a seed, each epoch has its own order. The order of the
    first epoch is that of `datasets.Dataset.shuffle(seed)`, as in published runs.
    """

    problems: Sequence[P]
    make_group: Callable[[P], EnvGroupBuilder]
    groups_per_batch: int
    _: KW_ONLY
    num_epochs: int = 1
    shuffle_seed: int | None = None
    lengths: PromptLengths[P] | None = None
    """The lengths of the prompts; None if they are not known."""
    check_answers: Callable[[int], None] | None = None
    """Raises UserError if a model that grades the answers cannot read answers of so many tokens."""

    def __post_init__(self) -> None:
        _at_least_one(groups_per_batch=self.groups_per_batch, num_epochs=self.num_epochs)
        check_shuffle_seed(self.shuffle_seed)
        # A batch spans two epochs at most, unless it is larger than the dataset.
        self._order = lru_cache(maxsize=2)(self._make_order)

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Return new builders for the problems of batch `index`."""
        _check_index(index, len(self))
        start = index * self.groups_per_batch
        stop = min(start + self.groups_per_batch, self._num_groups)
        return [self.make_group(self._problem(position)) for position in range(start, stop)]

    def __len__(self) -> int:
        return -(-self._num_groups // self.groups_per_batch)

    def data_size(self) -> int:
        """Return the number of problems."""
        return len(self.problems)

    def require_full_batch(self) -> None:
        """Raise UserError if a batch is larger than all epochs together."""
        _require_full_batch(self.groups_per_batch, self._num_groups)

    def longest_prompt(self, above: int = 0) -> PromptLength | None:
        """Return the longest prompt of more than `above` tokens; None if there is none, or if the
        lengths are not known.
        """
        return None if self.lengths is None else self.lengths.longest(above)

    def require_answers_fit(self, max_tokens: int) -> None:
        """Raise UserError if `check_answers` does."""
        if self.check_answers is not None:
            self.check_answers(max_tokens)

    @property
    def _num_groups(self) -> int:
        return len(self.problems) * self.num_epochs

    def _problem(self, position: int) -> P:
        epoch, index_in_epoch = divmod(position, len(self.problems))
        return self.problems[self._order(epoch)[index_in_epoch]]

    def _make_order(self, epoch: int) -> Sequence[int]:
        if self.shuffle_seed is None:
            return range(len(self.problems))
        seed = self.shuffle_seed if epoch == 0 else (self.shuffle_seed, epoch)
        return np.random.default_rng(seed).permutation(len(self.problems)).tolist()


def evaluation_dataset(
    problems: Sequence[P],
    make_group: Callable[[P], EnvGroupBuilder],
    lengths: PromptLengths[P] | None = None,
) -> ProblemDataset[P] | None:
    """Return all problems as one batch, for evaluation; None if there are none. `lengths` are those
    of their prompts, if they are known.
    """
    if not len(problems):
        return None
    return ProblemDataset(problems, make_group, len(problems), lengths=lengths)


@dataclass(frozen=True)
class GeneratedDataset(RLDataset):
    """Randomly generated groups. `sample_group` makes a group from a random generator, which is
    seeded by (seed, batch, position in the batch).
    """

    sample_group: Callable[[random.Random], EnvGroupBuilder]
    groups_per_batch: int
    seed: int
    num_batches: int = DEFAULT_NUM_BATCHES

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Return the groups of batch `index`, which depend on `seed` and `index` only."""
        return [
            self.sample_group(random.Random(f"{self.seed}:{index}:{position}"))
            for position in range(self.groups_per_batch)
        ]

    def __len__(self) -> int:
        return self.num_batches


@dataclass(eq=False)
class EpochCycledRLDataset(RLDataset):
    """The batches of a dataset, repeated `num_epochs` times; with a seed, each epoch has its own
    order.
    """

    inner: RLDataset
    num_epochs: int
    shuffle_seed: int | None = None

    def __post_init__(self) -> None:
        _at_least_one(num_epochs=self.num_epochs)
        self._order = lru_cache(maxsize=1)(self._make_order)

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Return new builders for batch `index`, counted over all epochs."""
        _check_index(index, len(self))
        epoch, index_in_epoch = divmod(index, len(self.inner))
        return self.inner.get_batch(self._order(epoch)[index_in_epoch])

    def __len__(self) -> int:
        return self.num_epochs * len(self.inner)

    def require_full_batch(self) -> None:
        """Raise UserError if a batch of the inner dataset is larger than the dataset."""
        self.inner.require_full_batch()

    def inner_datasets(self) -> Sequence[RLDataset]:
        """Return the repeated dataset."""
        return [self.inner]

    def _make_order(self, epoch: int) -> Sequence[int]:
        if self.shuffle_seed is None:
            return range(len(self.inner))
        order = list(range(len(self.inner)))
        random.Random(f"{self.shuffle_seed}:{epoch}").shuffle(order)
        return order


class GroupSequence:
    """The groups of a dataset as one sequence.

    Every batch must have as many groups as the first; only the last may have fewer. A batch of
    another size raises UserError. With equal batches, the batch of a group follows from its
    position, so only the first batch, the last one and the requested ones are made.
    """

    def __init__(self, dataset: RLDataset) -> None:
        if len(dataset) == 0:
            raise UserError(
                f"{type(dataset).__name__} has no batches; give a dataset with at least one"
            )
        self.dataset = dataset
        self._batch_size = len(dataset.get_batch(0))
        if self._batch_size == 0:
            raise UserError(
                f"batch 0 of {type(dataset).__name__} has no groups; give at least one in each"
            )
        last = len(dataset) - 1
        self._num_groups = last * self._batch_size + len(self._batch(last))

    def __len__(self) -> int:
        return self._num_groups

    def groups_at(self, positions: Sequence[int]) -> list[EnvGroupBuilder]:
        """Return the groups at these positions. A position that occurs twice gives two builders."""
        batches: dict[tuple[int, int], Sequence[EnvGroupBuilder]] = {}
        occurrences: Counter[int] = Counter()
        groups: list[EnvGroupBuilder] = []
        for position in positions:
            index, offset = divmod(position, self._batch_size)
            key = index, occurrences[position]
            if key not in batches:
                batches[key] = self._batch(index)
            occurrences[position] += 1
            groups.append(batches[key][offset])
        return groups

    def _batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        batch = self.dataset.get_batch(index)
        is_last = index == len(self.dataset) - 1
        if len(batch) != self._batch_size and not (is_last and 0 < len(batch) < self._batch_size):
            raise UserError(
                f"batch {index} of {type(self.dataset).__name__} has {len(batch)} groups and "
                f"batch 0 has {self._batch_size}: groups can be rearranged only if every batch but "
                "the last has the same size; leave groups_per_batch at the dataset's own, or give "
                "a dataset of equal batches"
            )
        return batch


class RebatchedRLDataset(RLDataset):
    """The groups of a dataset in their order, in batches of another size. The last batch may be
    smaller.
    """

    def __init__(self, inner: RLDataset, groups_per_batch: int) -> None:
        _at_least_one(groups_per_batch=groups_per_batch)
        self.groups_per_batch = groups_per_batch
        self._groups = GroupSequence(inner)

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Return new builders for up to `groups_per_batch` groups."""
        _check_index(index, len(self))
        start = index * self.groups_per_batch
        return self._groups.groups_at(
            range(start, min(start + self.groups_per_batch, len(self._groups)))
        )

    def __len__(self) -> int:
        return -(-len(self._groups) // self.groups_per_batch)

    def require_full_batch(self) -> None:
        """Raise UserError if a batch is larger than the dataset."""
        _require_full_batch(self.groups_per_batch, len(self._groups))

    def inner_datasets(self) -> Sequence[RLDataset]:
        """Return the dataset with other batches."""
        return [self._groups.dataset]


def rebatch(dataset: RLDataset, groups_per_batch: int | None) -> RLDataset:
    """Return the dataset in batches of `groups_per_batch` groups; None = its own batches."""
    return dataset if groups_per_batch is None else RebatchedRLDataset(dataset, groups_per_batch)


@dataclass(eq=False)
class InterleavedRLDataset(RLDataset):
    """Batches that mix the groups of several datasets in proportion to `weights`.

    Positions are assigned to sources by the Sainte-Laguë method: each position goes to the source
    with the largest weight / (2 x its positions so far + 1). After every batch, the number of
    positions of each of n sources differs from its exact share by at most max(1, n - 1) / 2. Within
    a batch, the groups are shuffled by (seed, index of the batch). A source gives its groups in
    order, and starts again with its first group when all are used.
    """

    sources: Sequence[RLDataset]
    weights: Sequence[float]
    groups_per_batch: int
    total_batches: int
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least_one(groups_per_batch=self.groups_per_batch, total_batches=self.total_batches)
        check_weights(self.sources, self.weights)
        self._sources = [GroupSequence(source) for source in self.sources]
        self._positions = assign_positions(self.weights, self.groups_per_batch * self.total_batches)

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Return new builders for `groups_per_batch` groups of all sources, in a shuffled order."""
        _check_index(index, len(self))
        start = index * self.groups_per_batch
        positions = self._positions[start : start + self.groups_per_batch]
        iterators: list[Iterator[EnvGroupBuilder]] = []
        for source_index, source in enumerate(self._sources):
            source_indices = [
                index_in_epoch % len(source) for s, index_in_epoch in positions if s == source_index
            ]
            iterators.append(iter(source.groups_at(source_indices)))
        groups = [next(iterators[source]) for source, _ in positions]
        order = random.Random(f"{self.seed}:{index}").sample(range(len(groups)), len(groups))
        return [groups[position] for position in order]

    def __len__(self) -> int:
        return self.total_batches

    def inner_datasets(self) -> Sequence[RLDataset]:
        """Return the sources."""
        return self.sources


class ConcatenatedRLDataset(RLDataset):
    """The batches of several datasets, one dataset after the other."""

    def __init__(self, datasets: Sequence[RLDataset]) -> None:
        self.datasets = datasets
        self._ends = list(accumulate(len(dataset) for dataset in datasets))

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """Return new builders for batch `index`, counted over all datasets."""
        _check_index(index, len(self))
        dataset_index = bisect.bisect_right(self._ends, index)
        return self.datasets[dataset_index].get_batch(
            index - self._ends[dataset_index] + len(self.datasets[dataset_index])
        )

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def require_full_batch(self) -> None:
        """Raise UserError if a batch of a dataset is larger than that dataset."""
        for dataset in self.datasets:
            dataset.require_full_batch()

    def inner_datasets(self) -> Sequence[RLDataset]:
        """Return the datasets, in order."""
        return self.datasets


@chz.chz
class InterleavedRLDatasetBuilder(RLDatasetBuilder):
    """Several datasets as one: `InterleavedRLDataset` of their training sets.

    The test set is the concatenation of all test sets, whatever the weights. The metrics by tag
    report each source.
    """

    sources: Sequence[RLDatasetBuilder]
    groups_per_batch: int
    total_batches: int
    weights: Sequence[float] | None = chz.field(
        default=None, doc="shares of the sources; none = equal shares"
    )
    seed: int = 0

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return (training dataset, test dataset). The test dataset is None if no source has one.
        Invalid weights raise UserError.
        """
        weights = [1.0] * len(self.sources) if self.weights is None else self.weights
        check_weights(self.sources, weights)
        train_and_test_sets = [await source() for source in self.sources]
        test_sets = [test for _, test in train_and_test_sets if test is not None]
        train = InterleavedRLDataset(
            [train for train, _ in train_and_test_sets],
            weights,
            self.groups_per_batch,
            self.total_batches,
            self.seed,
        )
        return train, ConcatenatedRLDataset(test_sets) if test_sets else None

    def smallest_group_size(self) -> int | None:
        """Return the smallest group size of the sources; None if it is unknown."""
        return smallest_group_size_of(self.sources)


def assign_positions(weights: Sequence[float], count: int) -> list[tuple[int, int]]:
    """Return (source, rank) for each of `count` positions. The rank is the number of earlier
    positions with the same source.
    """
    num_assigned = [0] * len(weights)
    positions: list[tuple[int, int]] = []
    for _ in range(count):
        source = max(range(len(weights)), key=lambda s: weights[s] / (2 * num_assigned[s] + 1))
        positions.append((source, num_assigned[source]))
        num_assigned[source] += 1
    return positions


def check_weights(sources: Sequence[object], weights: Sequence[float]) -> None:
    """Raise UserError unless there is a finite weight above 0 for each source."""
    if not sources:
        raise UserError("sources is empty; give at least one dataset")
    if len(weights) != len(sources):
        raise UserError(
            f"there are {len(sources)} sources and {len(weights)} weights; give one weight for "
            "each source"
        )
    for weight in weights:
        if not 0 < weight < float("inf"):
            raise UserError(
                f"weights={list(weights)}: give finite numbers above 0, or leave the source out"
            )


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"{name}={count}: give a whole number of at least 1")


def _require_full_batch(groups_per_batch: int, num_groups: int) -> None:
    if 0 < num_groups < groups_per_batch:
        raise UserError(
            f"batch_size={groups_per_batch} (or groups_per_batch): there are {num_groups} groups "
            "to train on; give at most that number, or more data"
        )


def _check_index(index: int, length: int) -> None:
    if not 0 <= index < length:
        raise IndexError(f"index {index} is not in 0..{length - 1}")
