"""The prefix cache: exact keys, LRU eviction, and no chunk without its predecessors."""

from hypothesis import given, settings, strategies as st

from planish.engine.sampling.prefix_cache import PrefixCache


def store(cache: PrefixCache[tuple], version: str, tokens: list[int]) -> None:
    cache.add(
        version,
        tokens,
        [tuple(tokens[: (i + 1) * 2]) for i in cache.missing_chunks(version, tokens)],
    )


def test_find_returns_the_longest_cached_prefix_without_the_last_token():
    cache: PrefixCache[tuple] = PrefixCache(2, 100)
    store(cache, "a", [1, 2, 3, 4, 5, 6])
    assert cache.find("a", [1, 2, 3, 4, 9, 9]) == [(1, 2), (1, 2, 3, 4)]
    assert cache.find("a", [1, 2, 3, 4]) == [(1, 2)]
    assert cache.find("a", [1, 2]) == []
    assert cache.find("a", [2, 2, 3, 4]) == []


def test_versions_share_no_chunks_and_can_be_evicted():
    cache: PrefixCache[tuple] = PrefixCache(2, 100)
    store(cache, "a", [1, 2, 3])
    store(cache, "b", [1, 2, 3])
    cache.evict(lambda version: version == "a")
    assert cache.find("a", [1, 2, 3]) == []
    assert cache.find("b", [1, 2, 3]) == [(1, 2)]


def test_equal_chunks_after_different_prefixes_are_different():
    cache: PrefixCache[tuple] = PrefixCache(2, 100)
    store(cache, "a", [1, 1, 7, 7])
    assert cache.find("a", [2, 2, 7, 7, 0]) == []
    assert cache.find("a", [7, 7, 0]) == []


def test_the_least_recently_used_chunks_are_evicted_first():
    cache: PrefixCache[tuple] = PrefixCache(2, 3)
    store(cache, "a", [1, 1, 2, 2])
    store(cache, "a", [3, 3])
    cache.find("a", [1, 1, 2, 2, 0])
    store(cache, "a", [4, 4])
    assert cache.find("a", [1, 1, 2, 2, 0]) == [(1, 1), (1, 1, 2, 2)]
    assert cache.find("a", [3, 3, 0]) == []
    assert cache.find("a", [4, 4, 0]) == [(4, 4)]
    store(cache, "a", [5, 5])
    assert cache.find("a", [1, 1, 2, 2, 0]) == [(1, 1)]  # evicted after its successors


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=25), st.integers(1, 6)
)
def test_only_true_prefixes_are_found_and_capacity_is_respected(
    prompts: list[list[int]], capacity: int
):
    cache: PrefixCache[tuple] = PrefixCache(2, capacity)
    for tokens in prompts:
        for i, value in enumerate(cache.find("v", tokens)):
            assert value == tuple(tokens[: (i + 1) * 2])
        store(cache, "v", tokens)
        assert len(cache) <= capacity
        whole = min(len(tokens) // 2, capacity)
        assert len(cache.find("v", [*tokens, 0])) >= whole if len(tokens) % 2 == 0 else True
