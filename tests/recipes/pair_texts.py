"""The texts of labeled comparisons."""

from collections.abc import Iterable, Iterator

from planish.preference.types import LabeledComparison


def answers_of(pairs: Iterable[LabeledComparison]) -> Iterator[tuple[str, ...]]:
    """Yield (preferred answer, other answer) of each pair."""
    for pair in pairs:
        assert pair.ranked is not None
        yield tuple(answer[0]["content"] for answer in pair.ranked)


def question_of(pair: LabeledComparison) -> str:
    """Return the question of a pair."""
    return pair.comparison.prompt_conversation[0]["content"]
