"""A model that scores answers reads each answer once when it judges many comparisons, and returns
the same preferences as one by one.
"""

import asyncio
import math
from itertools import permutations

import pytest

from planish.preference.judging import judge_comparisons
from planish.preference.preference_models import ScoringPreferenceModel
from planish.preference.types import Comparison


class Scoring:
    """A model that scores longer answers higher, and even higher after longer prompts."""

    def __init__(self):
        self.read = []

    async def __call__(self, comparison):
        prompt = comparison.prompt_conversation
        return self.preference_between(
            await self.score(prompt, comparison.completion_A),
            await self.score(prompt, comparison.completion_B),
        )

    async def score(self, prompt, answer):
        await asyncio.sleep(0)
        self.read.append((prompt[0]["content"], answer[0]["content"]))
        return 0.1 * len(prompt[0]["content"]) * len(answer[0]["content"])

    def preference_between(self, score_a, score_b):
        return math.tanh(score_b - score_a)


def comparisons():
    answers = ([{"role": "assistant", "content": text}] for text in ("a", "ab", "ab", "abcd"))
    pairs = list(permutations(answers, 2))
    return [
        Comparison([{"role": "user", "content": prompt}], *pair)
        for prompt in ("x", "xyz")
        for pair in pairs
    ]


def test_each_answer_is_scored_once_with_equal_preferences():
    at_once, one_by_one = Scoring(), Scoring()
    assert isinstance(at_once, ScoringPreferenceModel)
    found = asyncio.run(judge_comparisons(at_once, comparisons()))
    assert found == [asyncio.run(one_by_one(comparison)) for comparison in comparisons()]
    assert sorted(at_once.read) == sorted({*one_by_one.read})
    assert len(one_by_one.read) == 48


def test_a_scoring_error_is_raised_unchanged():
    class Away(Scoring):
        async def score(self, prompt, answer):
            raise ConnectionError("the judge is away")

    with pytest.raises(ConnectionError, match="the judge is away"):
        asyncio.run(judge_comparisons(Away(), comparisons()))
