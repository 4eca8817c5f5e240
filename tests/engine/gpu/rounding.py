"""When samples are the same but for rounding.

A token is drawn by one uniform number from a running sum. Where that number lies within rounding of
the border between two tokens, which happened once in some thirty thousand draws of these models,
the other one is drawn, and what follows is another text.
"""

from collections.abc import Iterable

import numpy as np

from planish.types import SampledSequence, SampleResponse

ROUNDING = 5e-5
"""Of a logprob in float32."""
DIVERGING = 0.05
"""Most of the samples that may go on with another token, or one."""


def assert_equal_but_for_rounding(
    found: Iterable[SampleResponse], expected: Iterable[SampleResponse]
) -> None:
    pairs = [
        pair
        for ours, theirs in zip(found, expected, strict=True)
        for pair in zip(ours.sequences, theirs.sequences, strict=True)
    ]
    diverging = [not _same_until_they_differ(*pair) for pair in pairs]
    assert sum(diverging) <= max(1, DIVERGING * len(pairs))


def _same_until_they_differ(ours: SampledSequence, theirs: SampledSequence) -> bool:
    """Whether they never differ."""
    assert ours.logprobs is not None
    assert theirs.logprobs is not None
    differs = [a != b for a, b in zip(ours.tokens, theirs.tokens, strict=True)]
    same = differs.index(True) if True in differs else len(differs)
    np.testing.assert_allclose(ours.logprobs[:same], theirs.logprobs[:same], atol=ROUNDING)
    return same == len(differs)
