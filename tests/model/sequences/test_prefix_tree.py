"""Packing: the forest reproduces every datum, its mask is the ancestor relation, and the budget
counts shared tokens once.
"""

import sys
import time

import numpy as np
import pytest
from dense_attention import attention_mask
from hypothesis import given, settings, strategies as st

from planish.model.sequences.prefix_tree import MicroBatch, pack

sequences_of_few_tokens = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=14
)


def arrays(sequences: list[list[int]]) -> list[np.ndarray]:
    return [np.array(sequence, np.int64) for sequence in sequences]


def forest_size(sequences: list[list[int]]) -> int:
    return len({tuple(s[: i + 1]) for s in sequences for i in range(len(s))})


@settings(max_examples=150, deadline=None)
@given(sequences_of_few_tokens, st.integers(1, 40))
def test_each_datum_is_packed_once_and_its_rows_have_its_tokens(
    sequences: list[list[int]], budget: int
):
    micro_batches = pack(arrays(sequences), budget)
    assert sorted(datum for micro_batch in micro_batches for datum in micro_batch.datums) == list(
        range(len(sequences))
    )
    for micro_batch in micro_batches:
        for datum, rows in zip(micro_batch.datums, micro_batch.datum_rows, strict=True):
            assert micro_batch.tokens[rows].tolist() == sequences[datum]
            assert micro_batch.positions[rows].tolist() == list(range(len(sequences[datum])))
        # A replica of a fleet packs the datums of a micro-batch alone.
        (alone,) = pack(arrays([sequences[datum] for datum in micro_batch.datums]), sys.maxsize)
        assert alone.tokens.tolist() == micro_batch.tokens.tolist()
        assert str(alone.datum_rows) == str(micro_batch.datum_rows)


@settings(max_examples=150, deadline=None)
@given(sequences_of_few_tokens, st.integers(1, 40))
def test_the_mask_is_the_ancestor_relation(sequences: list[list[int]], budget: int):
    for micro_batch in pack(arrays(sequences), budget):
        allowed = np.zeros((len(micro_batch), len(micro_batch)), bool)
        for rows in micro_batch.datum_rows:
            for i, row in enumerate(rows):
                allowed[row, rows[: i + 1]] = True
        assert np.array_equal(attention_mask(micro_batch), allowed)


@settings(max_examples=150, deadline=None)
@given(sequences_of_few_tokens, st.integers(1, 40))
def test_the_budget_counts_each_shared_token_once(sequences: list[list[int]], budget: int):
    for micro_batch in pack(arrays(sequences), budget):
        members = [sequences[datum] for datum in micro_batch.datums]
        assert len(micro_batch) == forest_size(members)
        assert len(micro_batch) <= max(budget, max(len(member) for member in members))


@settings(max_examples=100, deadline=None)
@given(sequences_of_few_tokens)
def test_segments_cover_the_rows_and_name_their_ancestors(sequences: list[list[int]]):
    (micro_batch,) = pack(arrays(sequences), 1000)
    assert [s.start for s in micro_batch.segments] == [
        0,
        *(s.end for s in micro_batch.segments[:-1]),
    ]
    assert micro_batch.segments[-1].end == len(micro_batch)
    for segment in micro_batch.segments:
        above = {row for start, end in segment.ancestors for row in range(start, end)}
        assert above == set(
            np.flatnonzero(attention_mask(micro_batch)[segment.start][: segment.start])
        )
        assert set(micro_batch.subtree_end[segment.start : segment.end]) == {segment.subtree_end}


@settings(max_examples=60, deadline=None)
@given(sequences_of_few_tokens, st.integers(1, 40), st.randoms())
def test_micro_batches_do_not_depend_on_the_order_of_the_datums(sequences, budget, random):
    def contents(micro_batches: list[MicroBatch], order: list[int]) -> set:
        return {
            tuple(sorted(tuple(sequences[order[d]]) for d in micro_batch.datums))
            for micro_batch in micro_batches
        }

    order = list(range(len(sequences)))
    plain = contents(pack(arrays(sequences), budget), order)
    random.shuffle(order)
    assert contents(pack(arrays([sequences[i] for i in order]), budget), order) == plain


def test_groups_that_share_a_prompt_stay_together():
    rng = np.random.default_rng(0)
    groups = [rng.integers(0, 1000, 60) for _ in range(6)]
    sequences = [
        np.concatenate([prompt, rng.integers(0, 1000, 20)]) for prompt in groups for _ in range(4)
    ]
    # A group has 140 rows, so two fit. Greedy filling would split the third group.
    micro_batches = pack(sequences, 300)
    assert [len({d // 4 for d in micro_batch.datums}) for micro_batch in micro_batches] == [2, 2, 2]
    assert sum(len(micro_batch) for micro_batch in micro_batches) == 6 * 140


@settings(max_examples=100, deadline=None)
@given(sequences_of_few_tokens, st.integers(1, 40))
def test_the_cut_has_minimal_cost(sequences: list[list[int]], budget: int):
    ordered = sorted(sequences)
    # least[i]: (micro-batches, rows) of the first i sequences. A micro-batch costs more than any
    # prefix here.
    least = [(0, 0)]
    for stop in range(1, len(ordered) + 1):
        candidates = ((start, forest_size(ordered[start:stop])) for start in range(stop))
        fitting = [
            (s, rows) for s, rows in candidates if rows <= max(budget, *map(len, ordered[s:stop]))
        ]
        least.append(min((least[start][0] + 1, least[start][1] + rows) for start, rows in fitting))
    micro_batches = pack(arrays(sequences), budget)
    assert (len(micro_batches), sum(map(len, micro_batches))) == least[-1]


def test_a_datum_longer_than_the_budget_gets_its_own_micro_batch():
    long, short = np.arange(50), np.array([7, 8])
    micro_batches = pack([short, long, short], 10)
    assert [micro_batch.datums for micro_batch in micro_batches] == [(0, 2), (1,)]
    assert [len(micro_batch) for micro_batch in micro_batches] == [2, 50]


@pytest.mark.slow
def test_packing_thousands_of_datums_with_a_long_prefix_is_fast():
    prefix = np.arange(16_000)
    sequences = [np.concatenate([prefix, [i, i + 1]]) for i in range(1500)]
    start = time.process_time()
    micro_batches = pack(sequences, 16_600)
    assert time.process_time() - start < 20
    assert (
        sum(len(micro_batch) for micro_batch in micro_batches) == 16_000 * len(micro_batches) + 3000
    )


def test_packing_many_tiny_datums_is_fast():
    sequences = [np.array([i % 270, i // 270]) for i in range(20_000)]
    start = time.process_time()
    assert sum(map(len, pack(sequences, 4096))) < 21_000
    assert time.process_time() - start < 4


def test_invalid_packing_input_is_rejected():
    with pytest.raises(ValueError, match="micro_batch_tokens"):
        pack([np.array([1])], 0)
    with pytest.raises(ValueError, match="empty"):
        pack([np.array([], np.int64)], 10)
