"""Constrained decoding: the tokens that can continue a sample whose text must match a grammar.

`llguidance` compiles the grammars and computes the masks, on the CPU. Both happen in threads of
their own, which release the interpreter lock: a mask is computed while the decoder runs the next
step. llguidance's own limits (`_PARSER_LIMITS`) end most of these computations after some tenths of
a second. Some grammars take minutes to compile nevertheless. So each owner (such as a server's
tenant) has compile threads of its own, and the threads that compute masks compile nothing.

Where only one text can follow, such as a property name, llguidance returns the tokens of that text.
These *forced tokens* are not sampled. The sampler feeds them to the decoder together, in one step.

llguidance's masks have one bit per token of the vocabulary, and one bit for an end token. Only
llguidance knows the end token; the model never sees it. The end token's bit says whether the text
is complete.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from planish.errors import UnsupportedError, UserError
from planish.types import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

COMPILE_TIMEOUT_SECONDS = 5.0
"""The maximum time that `GrammarCache.check` waits until a grammar is compiled."""
MAX_GRAMMARS_PER_OWNER = 32
MAX_GRAMMARS = 512
MAX_COMPILE_THREADS_PER_OWNER = 4
"""The maximum numbers of cached grammars of one owner, of cached grammars of all owners, and of
threads that compile grammars of one owner.
"""
_NUM_MASK_WORKERS = min(4, os.cpu_count() or 1)

_PARSER_LIMITS = {
    # The first limit is a third of llguidance's default. At the default, one step of the regular
    # expression ((a{1000}){1000}){1000} takes 0.7 s and 190 MB; at this limit, 0.2 s.
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
_JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""JSON is written in one line, with at most one space after each comma and colon. If any whitespace
were allowed, a model could write nothing else up to `max_tokens`.
"""
_END_TOKEN = "<|planish: end of the text|>"


@dataclass(frozen=True)
class MaskLayout:
    """The bit positions of the model's tokens and of the end token in llguidance's masks."""

    vocab_size: int
    end_token: int
    """The id of the end token, which is also the position of its bit."""

    def compute_mask(self, matcher: LLMatcher) -> Mask:
        """Compute the mask of a matcher's next token."""
        words = np.frombuffer(matcher.compute_bitmask(), np.uint32)
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


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar."""

    matcher: LLMatcher
    """The matcher after the first forced tokens. It is copied for each sample, never changed."""
    mask_layout: MaskLayout
    forced_tokens: Sequence[int]
    """The tokens that every text begins with."""
    mask: Mask
    """The mask of the token after `forced_tokens`."""


class GrammarState:
    """The position of one sample in its grammar.

    The future `mask_future` completes when the next mask is computed. Until then the other
    attributes must not be read, except `is_late`. Only the sampler sets `is_late`, and takes tokens
    from `forced_tokens`.
    """

    def __init__(self, owner: str) -> None:
        """Create a state whose first mask is not computed yet."""
        self.owner = owner
        self.mask_future: Future[None] = Future()
        self.matcher: LLMatcher | None = None
        self.mask_layout: MaskLayout | None = None
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


class GrammarCache:
    """The compiled grammars of one base model, and the workers that compute their masks.

    The cache is an LRU cache with a limit for each owner, such as a server's tenant. Owners do not
    share entries. Otherwise a fast response would reveal that another owner uses the same grammar.
    `check` is thread-safe.
    """

    def __init__(self, tokenizer: Callable[[], PreTrainedTokenizerBase], vocab_size: int) -> None:
        """Create an empty cache for a model with `vocab_size` logits.

        `tokenizer` is called at the first use of a grammar.
        """
        self._load_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()
        self._grammars: OrderedDict[tuple[str, Constraint], Future[Grammar]] = OrderedDict()
        self._num_compile_threads: Counter[str] = Counter()
        """The number of threads that compile grammars of each owner."""
        self._compile_queues: dict[str, deque[tuple[Constraint, Future[Grammar]]]] = {}
        self._mask_workers = ThreadPoolExecutor(
            _NUM_MASK_WORKERS, thread_name_prefix="planish-grammar"
        )
        weakref.finalize(self, self._mask_workers.shutdown, wait=False)

    def __len__(self) -> int:
        """Return the number of grammars in the cache."""
        return len(self._grammars)

    def check(self, constraint: Constraint, owner: str) -> None:
        """Compile a grammar, unless it is cached. Raise UserError if it cannot be compiled."""
        future = self._grammar_future(constraint, owner)
        try:
            future.result(COMPILE_TIMEOUT_SECONDS)
        except TimeoutError:
            raise UserError(
                f"SamplingParams.constraint of kind {constraint.kind} took more than "
                f"{COMPILE_TIMEOUT_SECONDS:g} s to compile; give a simpler one"
            ) from None

    def new_state(self, constraint: Constraint, owner: str) -> GrammarState:
        """Return the state of a new sample."""
        state = GrammarState(owner)
        # No worker may wait for a grammar, because it would delay the masks of other owners. So a
        # callback fills the state: in the thread that completes the grammar, or here if it is
        # cached.
        self._grammar_future(constraint, owner).add_done_callback(
            lambda grammar: _set_first_mask(state, grammar)
        )
        return state

    def advance(self, sampled_tokens: Sequence[tuple[GrammarState, int]]) -> None:
        """Start computing the masks that follow the sampled tokens.

        `sampled_tokens` has the state and the newest token of each sample. All samples of an owner
        form one job. So a slow grammar does not delay the samples of other owners while a worker is
        free.
        """
        by_owner: dict[str, list[tuple[GrammarState, int]]] = {}
        for state, token in sampled_tokens:
            by_owner.setdefault(state.owner, []).append((state, token))
        for group in by_owner.values():
            mask_future = self._mask_workers.submit(_advance, group)
            for state, _ in group:
                state.mask_future = mask_future

    def _grammar_future(self, constraint: Constraint, owner: str) -> Future[Grammar]:
        """Return the future of a compiled grammar. If it is not cached, start to compile it."""
        key = (owner, constraint)
        with self._lock:
            future = self._grammars.get(key)
            if future is None:
                future = self._grammars[key] = self._start_compiling(constraint, owner)
                owner_keys = [other for other in self._grammars if other[0] == owner]
                if len(owner_keys) > MAX_GRAMMARS_PER_OWNER:
                    del self._grammars[owner_keys[0]]
                if len(self._grammars) > MAX_GRAMMARS:
                    self._grammars.popitem(last=False)
            else:
                self._grammars.move_to_end(key)
            return future

    def _start_compiling(self, constraint: Constraint, owner: str) -> Future[Grammar]:
        """Compile a grammar in one of at most MAX_COMPILE_THREADS_PER_OWNER threads of its owner.

        llguidance's limits do not bound the compile time of some grammars, such as a thousand
        overlapping patterns, and a thread cannot be ended. Such a grammar delays only grammars of
        its owner. The threads are daemons, so they do not keep the process from exiting.
        """
        future: Future[Grammar] = Future()
        queue = self._compile_queues.setdefault(owner, deque())
        queue.append((constraint, future))
        if self._num_compile_threads[owner] < MAX_COMPILE_THREADS_PER_OWNER:
            self._num_compile_threads[owner] += 1
            threading.Thread(
                target=self._compile_all, args=(owner, queue), name="planish-grammar", daemon=True
            ).start()
        return future

    def _compile_all(self, owner: str, queue: deque[tuple[Constraint, Future[Grammar]]]) -> None:
        """Compile the grammars of an owner until none is left."""
        while True:
            with self._lock:
                if not queue:
                    self._num_compile_threads[owner] -= 1
                    if not self._num_compile_threads[owner]:
                        del self._num_compile_threads[owner], self._compile_queues[owner]
                    return
                constraint, future = queue.popleft()
            try:
                future.set_result(self._compile(constraint))
            except BaseException as error:
                future.set_exception(error)

    def _compile(self, constraint: Constraint) -> Grammar:
        # The import of llguidance takes time and memory, so only constrained requests cause it.
        from llguidance import LLMatcher, LLParserLimits

        with self._tokenizer_lock:
            tokenizer = self._tokenizer
        matcher = LLMatcher(
            tokenizer,
            _grammar_text(constraint),
            log_level=0,
            limits=LLParserLimits(**_PARSER_LIMITS),
        )
        if not matcher.is_error():
            mask_layout = MaskLayout(self._vocab_size, tokenizer.eos_token)
            forced_tokens = _consume_forced_tokens(matcher)
            # The state of a matcher changes while it computes a mask.
            mask_matcher = matcher.deep_copy()
            mask = mask_layout.compute_mask(mask_matcher)
            if not mask_matcher.is_error():
                return Grammar(matcher, mask_layout, forced_tokens, mask)
            matcher = mask_matcher
        raise UserError(
            f"SamplingParams.constraint of kind {constraint.kind} cannot be used: "
            f"{_error_message(matcher)}"
        )

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer
        from tokenizers import AddedToken, Tokenizer

        backend: Any = getattr(self._load_tokenizer(), "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedError(
                "SamplingParams.constraint needs a tokenizer with a tokenizer.json, and this model "
                "has none; convert its tokenizer, or leave the constraint out"
            )
        tokenizer = Tokenizer.from_str(backend.to_str())
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.add_special_tokens([AddedToken(_END_TOKEN, special=True, normalized=False)])
        end_token = tokenizer.token_to_id(_END_TOKEN)
        assert end_token is not None
        return LLTokenizer(
            tokenizer.to_str(), n_vocab=max(self._vocab_size, end_token + 1), eos_token=end_token
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


def _set_first_mask(state: GrammarState, grammar_future: Future[Grammar]) -> None:
    try:
        grammar = grammar_future.result()
        state.matcher, state.mask_layout = grammar.matcher.deep_copy(), grammar.mask_layout
        state.forced_tokens, state.mask = list(grammar.forced_tokens), grammar.mask
    except Exception as error:
        state.error = error
    state.mask_future.set_result(None)


def _advance(sampled_tokens: Sequence[tuple[GrammarState, int]]) -> None:
    for state, token in sampled_tokens:
        try:
            assert state.matcher is not None
            assert state.mask_layout is not None
            state.mask = None
            if state.matcher.consume_token(token):
                state.forced_tokens = _consume_forced_tokens(state.matcher)
                state.mask = state.mask_layout.compute_mask(state.matcher)
            if state.matcher.is_error():
                state.error = UserError(
                    "SamplingParams.constraint became too complex at one of the sampled tokens: "
                    f"{_error_message(state.matcher)}; give a simpler constraint"
                )
        except Exception as error:
            state.error = error


def _consume_forced_tokens(matcher: LLMatcher) -> list[int]:
    """Consume and return the tokens that must come next."""
    forced_tokens = matcher.compute_ff_tokens()
    if forced_tokens:
        matcher.consume_tokens(forced_tokens)
    return forced_tokens


def _error_message(matcher: LLMatcher) -> str:
    """Return llguidance's error message without the dump of its state.

    The message may quote the whole grammar, so its middle is cut out beyond 600 characters.
    """
    message = matcher.get_error().partition("\n<")[0].strip()
    return message if len(message) <= 600 else f"{message[:300]} ... {message[-300:]}"


def _grammar_text(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    match constraint.kind:
        case "json_object":
            return _json_grammar('{"type": "object"}')
        case "json_schema":
            return _json_grammar(constraint.text)
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "choice":
            quoted = (json.dumps(choice, ensure_ascii=False) for choice in constraint.choices)
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(quoted)}")
        case "lark":
            return LLMatcher.grammar_from_lark(constraint.text)


def _json_grammar(schema: str) -> str:
    from llguidance import LLMatcher

    if schema.strip() in ("true", "false"):
        # grammar_from_json_schema accepts objects only.
        schema = "{}" if schema.strip() == "true" else '{"enum": []}'
    return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_OPTIONS)
