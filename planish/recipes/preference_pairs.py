"""Pairs that a program draws, for trying preference training without data: sums, where the answer alone is preferred to a wordy one.

Chosen and rejected hold the same result, which is right, so what can be learned is the style. Held-out pairs have sums that are
in no pair for training.
"""

import random

from planish.preference.types import Comparison, LabeledComparison

OPENINGS = (
    "That is a good question. Let me think about it step by step.",
    "Sure, I would be happy to help you with this sum.",
    "To find the answer, we begin with the first number and count on.",
    "Thank you for asking. There are several ways to look at this.",
)
CLOSINGS = (
    "Please let me know if there is anything else that I can do for you.",
    "I hope that this explanation was helpful.",
    "It is always a good idea to check such a result once more.",
)


def drawn_pairs(largest: int, test_size: int, seed: int) -> tuple[list[LabeledComparison], list[LabeledComparison]]:
    """All sums of two numbers from 0 to `largest`, in an order drawn by `seed`: (for training, `test_size` for tests)."""
    generator = random.Random(f"pairs:{seed}")
    sums = [(first, second) for first in range(largest + 1) for second in range(largest + 1)]
    generator.shuffle(sums)
    pairs = [_pair(first, second, generator) for first, second in sums]
    return pairs[test_size:], pairs[:test_size]


def _pair(first: int, second: int, generator: random.Random) -> LabeledComparison:
    short = f"{first} + {second} = {first + second}"
    wordy = f"{generator.choice(OPENINGS)} The result of {first} + {second} is {first + second}. {generator.choice(CLOSINGS)}"
    prompt = [{"role": "user", "content": f"What is {first} + {second}?"}]
    answers = ([{"role": "assistant", "content": text}] for text in (short, wordy))
    return LabeledComparison(Comparison(prompt, *answers), "A")
