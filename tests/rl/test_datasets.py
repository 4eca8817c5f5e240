"""Datasets of problems, and datasets of other datasets: the order of groups at any batch index."""

import asyncio
import pickle
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial

import chz
import datasets
import pytest
from hypothesis import given, strategies as st

from planish.errors import UserError
from planish.rl.environments.datasets import (
    ConcatenatedRLDataset,
    EpochCycledRLDataset,
    InterleavedRLDataset,
    InterleavedRLDatasetBuilder,
    ProblemDataset,
    RebatchedRLDataset,
    assign_positions,
)
from planish.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder


@dataclass(frozen=True)
class Group(EnvGroupBuilder):
    name: object

    async def make_envs(self):
        return []


@dataclass(frozen=True)
class Batches(RLDataset):
    """A dataset with given batches of names."""

    batches: tuple[tuple[object, ...], ...]

    def get_batch(self, index):
        return [Group(name) for name in self.batches[index]]

    def __len__(self):
        return len(self.batches)


def names(dataset):
    return [batch_names(dataset, index) for index in range(len(dataset))]


def batch_names(dataset, index):
    return [group.name for group in dataset.get_batch(index)]


def flat(dataset):
    return [name for batch in names(dataset) for name in batch]


def numbers(count, size, **options):
    return ProblemDataset(range(count), Group, size, **options)


def test_problems_keep_their_order_and_the_last_batch_may_be_smaller():
    assert names(numbers(7, 3)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_the_first_epoch_is_shuffled_as_in_published_runs():
    published = datasets.Dataset.from_dict({"n": list(range(50))}).shuffle(seed=3)["n"]
    assert flat(numbers(50, 8, shuffle_seed=3)) == list(published)


def test_batches_cross_epoch_borders_and_each_epoch_is_reshuffled():
    dataset = numbers(10, 4, num_epochs=3, shuffle_seed=0)
    assert [len(batch) for batch in names(dataset)] == [4] * 7 + [2]
    epochs = [flat(dataset)[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@given(
    st.integers(1, 30),
    st.integers(1, 12),
    st.integers(1, 4),
    st.none() | st.integers(0, 5),
    st.randoms(),
)
def test_a_batch_does_not_depend_on_earlier_batches(count, size, epochs, seed, rng):
    dataset = numbers(count, size, num_epochs=epochs, shuffle_seed=seed)
    expected = names(dataset)
    index = rng.randrange(len(dataset))
    fresh = numbers(count, size, num_epochs=epochs, shuffle_seed=seed)
    assert batch_names(fresh, index) == expected[index]
    assert Counter(flat(dataset)) == dict.fromkeys(range(count), epochs)


def test_no_problems_give_no_batches():
    assert len(numbers(0, 4)) == 0


def test_a_batch_index_beyond_the_end_is_rejected():
    for dataset in (
        numbers(4, 2),
        EpochCycledRLDataset(numbers(4, 2), 1),
        RebatchedRLDataset(numbers(4, 2), 1),
    ):
        with pytest.raises(IndexError, match="index 4"):
            dataset.get_batch(4)
        with pytest.raises(IndexError):
            dataset.get_batch(-1)


def test_problem_groups_can_be_pickled():
    assert pickle.loads(pickle.dumps(numbers(3, 3).get_batch(0))) == [Group(0), Group(1), Group(2)]


def test_epochs_repeat_the_batches():
    assert names(EpochCycledRLDataset(numbers(5, 2), 2)) == [[0, 1], [2, 3], [4]] * 2


def test_a_seed_shuffles_the_batches_of_each_epoch():
    inner = numbers(40, 4)
    dataset = EpochCycledRLDataset(inner, 3, shuffle_seed=7)
    order = list(range(10))
    random.Random("7:1").shuffle(order)
    assert [dataset.get_batch(10 + rank) for rank in range(10)] == [
        inner.get_batch(index) for index in order
    ]
    assert [sorted(flat(dataset)[start : start + 40]) for start in (0, 40, 80)] == [
        list(range(40))
    ] * 3


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_rebatching_keeps_all_groups_in_order(count, before, after):
    dataset = RebatchedRLDataset(numbers(count, before), after)
    assert flat(dataset) == list(range(count))
    assert [len(batch) for batch in names(dataset)][:-1] == [after] * (len(dataset) - 1)


def test_rebatching_computes_only_the_requested_batches():
    made = []

    class Counting(Batches):
        def get_batch(self, index):
            made.append(index)
            return super().get_batch(index)

    dataset = RebatchedRLDataset(Counting(tuple((n, n) for n in range(1000))), 3)
    made.clear()
    assert batch_names(dataset, 100) == [150, 150, 151]
    assert made == [150, 151]


@pytest.mark.parametrize(
    "batches", [(("a", "b"), ("c",), ("d", "e")), (("a",), ("b", "c")), (("a",), ())]
)
def test_rebatching_rejects_batches_of_different_sizes(batches):
    with pytest.raises(UserError, match="batch 1 of Batches has . groups and batch 0 has"):
        flat(RebatchedRLDataset(Batches(batches), 2))


def test_rebatching_an_empty_dataset_is_rejected():
    with pytest.raises(UserError, match="no batches"):
        RebatchedRLDataset(Batches(()), 2)
    with pytest.raises(UserError, match="batch 0 of Batches has no groups"):
        RebatchedRLDataset(Batches(((),)), 2)


def lettered(letter, count, size):
    return ProblemDataset([f"{letter}{n}" for n in range(count)], Group, size)


def test_interleaved_groups_keep_their_source_order_and_repeat():
    dataset = InterleavedRLDataset([lettered("a", 5, 2), lettered("b", 3, 3)], [1, 1], 4, 4, seed=0)
    by_source = {letter: [name for name in flat(dataset) if name[0] == letter] for letter in "ab"}
    places = {letter: sorted(set(names)) for letter, names in by_source.items()}
    assert places == {"a": ["a0", "a1", "a2", "a3", "a4"], "b": ["b0", "b1", "b2"]}
    # Places are shuffled within a batch, so only the order of batches is defined.
    for letter, count in (("a", 5), ("b", 3)):
        taken = 0
        for batch in names(dataset):
            drawn = [name for name in batch if name[0] == letter]
            assert sorted(drawn) == sorted(
                f"{letter}{(taken + n) % count}" for n in range(len(drawn))
            )
            taken += len(drawn)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=5), st.integers(1, 300))
def test_interleaving_distributes_places_by_weight(weights, count):
    places = assign_positions(weights, count)
    got = Counter(source for source, _ in places)
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        # Every source is within half a place of its weighted share.
        most = (1 - share) / 2 + share * (len(weights) - 1) / 2
        assert abs(got[source] - count * share) <= most + 1e-6
        ranks = [rank for place_source, rank in places if place_source == source]
        assert ranks == list(range(len(ranks)))


def test_interleaving_shuffles_within_a_batch_by_seed():
    def mixed(seed):
        return names(
            InterleavedRLDataset([numbers(50, 5), lettered("b", 50, 5)], [3, 1], 8, 6, seed)
        )

    assert all(sum(isinstance(name, str) for name in batch) == 2 for batch in mixed(0))
    assert mixed(0) == mixed(0)
    assert mixed(0) != mixed(1)
    assert len({tuple(isinstance(name, str) for name in batch) for batch in mixed(0)}) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1.0]}, "2 sources and 1 weights"),
        ({"weights": [1.0, 0.0]}, "above 0"),
        ({"weights": [1.0, float("inf")]}, "finite"),
        ({"sources": [], "weights": []}, "sources is empty"),
        ({"groups_per_batch": 0}, "groups_per_batch=0"),
        ({"total_batches": 0}, "total_batches=0"),
    ],
)
def test_invalid_interleaving_is_rejected(options, message):
    usual = {
        "sources": [numbers(4, 2), numbers(4, 2)],
        "weights": [1.0, 1.0],
        "groups_per_batch": 2,
        "total_batches": 2,
    }
    with pytest.raises(UserError, match=message):
        InterleavedRLDataset(**{**usual, **options})


@chz.chz
class Builder(RLDatasetBuilder):
    letter: str
    tests: int = 0

    async def __call__(self):
        return lettered(self.letter, 6, 2), lettered(
            f"{self.letter}t", self.tests, 2
        ) if self.tests else None


def test_test_sets_of_interleaved_sources_are_concatenated():
    builder = InterleavedRLDatasetBuilder(
        sources=[Builder(letter="a", tests=3), Builder(letter="b"), Builder(letter="c", tests=1)],
        weights=[5.0, 1.0, 1.0],
        groups_per_batch=7,
        total_batches=2,
    )
    train, test = asyncio.run(builder())
    assert len(train) == 2
    assert names(test) == [["at0", "at1"], ["at2"], ["ct0"]]
    assert Counter(name[0] for name in flat(train)) == {"a": 10, "b": 2, "c": 2}


def test_sources_without_test_sets_have_none_and_equal_weights():
    builder = InterleavedRLDatasetBuilder(
        sources=[Builder(letter="a"), Builder(letter="b")], groups_per_batch=4, total_batches=1
    )
    train, test = asyncio.run(builder())
    assert Counter(name[0] for name in flat(train)) == {"a": 2, "b": 2}
    assert test is None


def test_every_group_has_its_own_builder():
    """A shared builder would close in `cleanup` the resources that another group still uses."""
    small = Batches((("a", "b"),))
    mixed = InterleavedRLDataset(
        [small, Batches((("c",), ("d",)))], [1.0, 1.0], groups_per_batch=7, total_batches=2
    )
    rebatched = RebatchedRLDataset(Batches((("a", "b"), ("c", "d"))), 3)
    twice = ConcatenatedRLDataset([rebatched, EpochCycledRLDataset(rebatched, 1)])
    for dataset in (mixed, twice):
        groups = [group for index in range(len(dataset)) for group in dataset.get_batch(index)]
        assert len({id(group) for group in groups}) == len(groups)


def test_concatenated_datasets_have_all_batches():
    parts = [numbers(3, 2), numbers(0, 2), numbers(2, 2)]
    assert names(ConcatenatedRLDataset(parts)) == [[0, 1], [2], [0, 1]]
    assert len(ConcatenatedRLDataset([])) == 0


@pytest.mark.parametrize(
    "make",
    [
        partial(numbers, 4, 0),
        partial(numbers, 4, 2, num_epochs=0),
        partial(RebatchedRLDataset, numbers(4, 2), 0),
    ],
)
def test_counts_below_one_are_rejected(make):
    with pytest.raises(UserError, match="=0: give a whole number of at least 1"):
        make()


def test_an_invalid_shuffle_seed_is_rejected():
    with pytest.raises(UserError, match="shuffle_seed=-5: give a whole number of at least 0"):
        ProblemDataset([1, 2], Group, 1, shuffle_seed=-5)


@pytest.mark.parametrize(
    "dataset",
    [
        numbers(5, 8),
        numbers(2, 8, num_epochs=3),
        EpochCycledRLDataset(numbers(5, 8), 4),
        RebatchedRLDataset(numbers(5, 2), 8),
        ConcatenatedRLDataset([numbers(8, 8), numbers(5, 8)]),
    ],
    ids=["problems", "epochs", "cycled", "rebatched", "concatenated"],
)
def test_a_batch_larger_than_the_data_is_named(dataset):
    with pytest.raises(UserError, match=r"batch_size=8 .*there are [56] groups to train on"):
        dataset.require_full_batch()


@pytest.mark.parametrize(
    "dataset",
    [
        numbers(8, 8),
        numbers(9, 8),
        numbers(2, 8, num_epochs=4),
        RebatchedRLDataset(numbers(5, 8), 5),
        InterleavedRLDataset([numbers(3, 8)], [1.0], 4, 4),
        Batches(((1, 2), (3,))),
    ],
    ids=["equal", "more", "epochs", "rebatched", "interleaved", "own"],
)
def test_a_batch_that_the_data_fill_is_accepted(dataset):
    dataset.require_full_batch()
