"""Compiled grammars, and the positions of samples in them."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from planish.engine.constraints.processes import ConstraintProcess
from planish.errors import UserError
from planish.types import Constraint


@dataclass(frozen=True)
class MaskLayout:
    """The bit positions of the model's tokens and of the end token in llguidance's masks."""

    vocab_size: int
    """The number of the model's logits."""
    num_bits: int
    """The number of bits in a mask: one for each token of the model and of its tokenizer."""
    end_token: int
    """The id of the end token, which is also the position of its bit. Only llguidance knows this
    token; the model never sees it. Its bit says whether the text may end.
    """

    def read_masks(self, data: bytes) -> list[Mask]:
        """Return the masks that a constraint process has sent."""
        words = np.frombuffer(data, np.uint32).reshape(-1, self._num_words)
        return [self._read_mask(row) for row in words]

    def check_tokens(self, tokens: Any) -> list[int]:
        """Return the forced tokens that a constraint process has sent. Raise ValueError if they are
        not tokens of the model.
        """
        if not all(type(token) is int and 0 <= token < self.vocab_size for token in tokens):
            raise ValueError(f"forced tokens are not token ids below {self.vocab_size}")
        return list(tokens)

    @property
    def _num_words(self) -> int:
        return -(-self.num_bits // 32)

    def _read_mask(self, words: np.ndarray) -> Mask:
        is_complete = bool(words[self.end_token // 32] >> np.uint32(self.end_token % 32) & 1)
        bits = words[: -(-self.vocab_size // 32)].copy()
        if self.end_token // 32 < len(bits):
            bits[self.end_token // 32] &= ~np.uint32(1 << self.end_token % 32)
        if self.vocab_size % 32:
            bits[-1] &= np.uint32((1 << self.vocab_size % 32) - 1)
        return Mask(bits, is_complete, not bits.any())


@dataclass(frozen=True, eq=False)
class Mask:
    """The tokens that may come next."""

    bits: np.ndarray
    """uint32 [(V + 31) // 32], one bit per token, with bit 0 of word 0 first. Read-only."""
    is_complete: bool
    """Whether the text may end here."""
    is_empty: bool
    """Whether no token may come next."""


class GrammarState:
    """The position of one sample in its grammar.

    The future `mask_future` completes when the next mask is computed. Until then the other
    attributes must not be read, except `is_late`. Only the sampler sets `is_late`, and takes tokens
    from `forced_tokens`.
    """

    def __init__(self) -> None:
        """Create a state whose first mask is not computed yet."""
        self.mask_future: Future[None] = Future()
        self.grammar: Grammar | None = None
        self.number = -1
        """The number of the sample in the grammar's process."""
        self.forced_tokens: list[int] = []
        """The tokens that must come next, in this order."""
        self.mask: Mask | None = None
        """The mask of the token after `forced_tokens`."""
        self.error: Exception | None = None
        """Why no further token can be sampled."""
        self.is_late = False
        """Whether a decoding step ended without a token for this sample, because its mask was
        missing.
        """

    @property
    def is_ready(self) -> bool:
        """Whether the next mask is computed, or its computation has failed."""
        return self.mask_future.done()


SampledTokens = Sequence[tuple[GrammarState, int]]
"""The states of samples, and the token that was sampled for each."""


class Grammar:
    """A compiled grammar. Its process computes the masks of all samples of one owner and one
    constraint, and ends when neither the cache nor a sample uses the grammar.
    """

    def __init__(
        self,
        owner: str,
        constraint: Constraint,
        process: ConstraintProcess,
        layout: MaskLayout,
        forced_tokens: Any,
        masks: bytes,
    ) -> None:
        """`forced_tokens` begin every text, and `masks` has the mask of the token after them. Both
        come from `process`.
        """
        self.owner = owner
        self.constraint = constraint
        self.process = process
        self._layout = layout
        self._forced_tokens = layout.check_tokens(forced_tokens)
        [self._mask] = layout.read_masks(masks)
        self._numbers = itertools.count()
        self._samples: set[int] = set()
        self._ended: deque[int] = deque()
        """The samples that have ended since the last request to the process."""
        self._lock = threading.Lock()
        self._waiting: list[tuple[SampledTokens, Future[None]]] = []
        self._is_scheduled = False

    @property
    def is_in_use(self) -> bool:
        """Whether any sample uses the grammar."""
        return bool(self._samples)

    def begin(self, state: GrammarState) -> None:
        """Set the position of a new sample, before its first token."""
        state.grammar, state.number = self, next(self._numbers)
        state.forced_tokens, state.mask = list(self._forced_tokens), self._mask
        self._samples.add(state.number)
        finalizer = weakref.finalize(state, _end_sample, state.number, self._samples, self._ended)
        finalizer.atexit = False

    def advance(self, sampled: SampledTokens, schedule: Callable[[], None]) -> None:
        """Let the masks after the sampled tokens be computed. `schedule` is called if `run` must be
        called once more, by another thread.
        """
        future: Future[None] = Future()
        for state, _ in sampled:
            state.mask_future = future
        with self._lock:
            self._waiting.append((sampled, future))
            must_schedule, self._is_scheduled = not self._is_scheduled, True
        if must_schedule:
            schedule()

    def run(self, schedule: Callable[[], None]) -> None:
        """Compute the masks of all waiting samples. Raise ProcessEndedError if the process has
        ended; the states of the samples have the error, too.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
        failure: Exception | None = None
        try:
            self._advance([pair for sampled, _ in waiting for pair in sampled])
        except Exception as error:
            failure = error
            for sampled, _ in waiting:
                for state, _ in sampled:
                    state.error = self._error(error)
        for _, future in waiting:
            future.set_result(None)
        with self._lock:
            self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            schedule()
        if failure is not None:
            raise failure

    def _advance(self, sampled: SampledTokens) -> None:
        for state, _ in sampled:
            state.mask = None
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        tokens = [[state.number, token] for state, token in sampled]
        answer, data = self.process.ask({"tokens": tokens, "ended": ended})
        masks = self._layout.read_masks(data)
        for (state, _), step in zip(sampled, answer["steps"], strict=True):
            if "error" in step:
                state.error = self._error(step["error"])
            else:
                state.forced_tokens = self._layout.check_tokens(step["forced"])
                state.mask = masks[step["mask"]]

    def _error(self, reason: object) -> UserError:
        return UserError(
            f"SamplingParams.constraint became too complex at one of the sampled tokens: {reason}; "
            "give a simpler constraint"
        )


def wait_for_masks(
    states: Sequence[GrammarState], seconds: float | None, for_all: bool = False
) -> None:
    """Wait until one state (or with `for_all` every state) is ready, but at most `seconds`.

    If `seconds` is None, wait without a limit.
    """
    wait(
        [state.mask_future for state in states],
        seconds,
        ALL_COMPLETED if for_all else FIRST_COMPLETED,
    )


def _end_sample(number: int, samples: set[int], ended: deque[int]) -> None:
    samples.discard(number)
    ended.append(number)
