"""Constrained decoding: the tokens that can continue a sample whose text must match a grammar.

`llguidance` compiles the grammars and computes the masks, on the CPU. Both happen in processes of
their own (see worker.py): a mask is computed while the decoder runs the next step. The kernel ends
a process that takes too much memory or CPU time. Then the requests with this constraint fail, and
their owner (such as a server's tenant) cannot use the constraint for a while.

Where only one text can follow, such as a property name, llguidance returns the tokens of that text.
These *forced tokens* are not sampled. The sampler feeds them to the decoder together, in one step.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import TYPE_CHECKING

from planish.engine.constraints.fair_pool import FairPool
from planish.engine.constraints.grammar import Grammar, GrammarState, MaskLayout
from planish.engine.constraints.processes import (
    ConstraintProcess,
    ProcessEndedError,
    ProcessStoppedError,
    ProcessTemplate,
    TokenizerSpec,
)
from planish.engine.constraints.refusals import REFUSAL_SECONDS, Refusals
from planish.engine.constraints.tokenizer_spec import tokenizer_spec
from planish.engine.constraints.worker import ProcessLimits
from planish.errors import UserError
from planish.types import Constraint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHECK_TIMEOUT_SECONDS = 30.0
"""The maximum time that a request waits for the compilation of its constraint. Other constraints
of its owner may be compiled first.
"""
MAX_GRAMMARS_PER_OWNER = 16
MAX_GRAMMARS = 64
"""The maximum numbers of cached grammars of one owner and of all owners."""
MAX_RESTING_BYTES = 256 << 20
"""The maximum memory of all constraint processes together between their requests, without the
allowance for the tokens of samples.
"""
NUM_COMPILE_THREADS, MAX_COMPILE_JOBS_PER_OWNER = 4, 2
NUM_MASK_THREADS, MAX_MASK_JOBS_PER_OWNER = 4, 2
"""The maximum numbers of processes that run at the same time, of all owners and of one owner. A
running process may take up to `ProcessLimits.memory_bytes`.
"""
_DEFAULT_LIMITS = ProcessLimits()


class _Compilation:
    """A grammar that is compiled, or will be."""

    def __init__(self) -> None:
        self.future: Future[Grammar] = Future()
        self.num_waiting = 0
        """The number of requests that wait for the grammar. If none is left, the compilation is
        ended.
        """
        self.process: ConstraintProcess | None = None
        """The process while it compiles the grammar."""
        self.is_abandoned = False


class GrammarCache:
    """The compiled grammars of one base model.

    The cache is an LRU cache with a limit for each owner, such as a server's tenant. Owners do not
    share entries. Otherwise a fast response would reveal that another owner uses the same grammar.
    All methods are thread-safe.
    """

    def __init__(
        self,
        tokenizer: Callable[[], PreTrainedTokenizerBase],
        vocab_size: int,
        limits: ProcessLimits = _DEFAULT_LIMITS,
    ) -> None:
        """Create an empty cache for a model with `vocab_size` logits.

        `tokenizer` is called at the first use of a grammar. `limits` are those of each process.
        """
        self._load_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()
        self._compilations: OrderedDict[tuple[str, Constraint], _Compilation] = OrderedDict()
        self._refusals = Refusals()
        self._grammars: weakref.WeakValueDictionary[tuple[str, Constraint], Grammar] = (
            weakref.WeakValueDictionary()
        )
        """All grammars whose process runs, including those of running samples that are no longer
        cached.
        """
        self._template = template = ProcessTemplate(limits)
        self._compile_pool, self._mask_pool = (
            FairPool("planish-grammar", *sizes, template.close)
            for sizes in (
                (NUM_COMPILE_THREADS, MAX_COMPILE_JOBS_PER_OWNER),
                (NUM_MASK_THREADS, MAX_MASK_JOBS_PER_OWNER),
            )
        )
        weakref.finalize(self, _close, self._compile_pool, self._mask_pool, template)

    def __len__(self) -> int:
        """Return the number of grammars in the cache."""
        return len(self._compilations)

    def check(self, constraint: Constraint, owner: str) -> None:
        """Compile a grammar, unless it is cached. Raise UserError if it cannot be compiled."""
        future = self.prepare(constraint, owner)
        try:
            future.result(CHECK_TIMEOUT_SECONDS)
        except TimeoutError:
            raise timeout_error(constraint) from None
        finally:
            future.cancel()

    def prepare(self, constraint: Constraint, owner: str) -> Future[Grammar]:
        """Compile a grammar, unless it is cached. The future fails with UserError if the grammar
        cannot be compiled. If all futures of a grammar are cancelled, its compilation is ended.

        The grammar stays compiled while the caller keeps the result.
        """
        prepared: Future[Grammar] = Future()
        reason = self._refusals.reason(owner, constraint)
        if reason is not None:
            prepared.set_exception(_refused_error(constraint, reason))
            return prepared
        compilation = self._compilation(constraint, owner)
        prepared.add_done_callback(
            partial(_leave, weakref.ref(self), (owner, constraint), compilation)
        )
        compilation.future.add_done_callback(partial(_copy_outcome, prepared))
        return prepared

    def new_state(self, constraint: Constraint, owner: str) -> GrammarState:
        """Return the state of a new sample."""
        state = GrammarState()
        reason = self._refusals.reason(owner, constraint)
        if reason is not None:
            state.error = _refused_error(constraint, reason)
            state.mask_future.set_result(None)
        else:
            # No thread waits for the grammar. A callback fills the state: in the thread that
            # completes the grammar, or here if it is cached.
            self._compilation(constraint, owner).future.add_done_callback(
                partial(_set_first_mask, state)
            )
        return state

    def advance(self, sampled_tokens: Sequence[tuple[GrammarState, int]]) -> None:
        """Start computing the masks that follow the sampled tokens.

        `sampled_tokens` has the state and the newest token of each sample. The samples of a grammar
        form one job. So a slow grammar does not delay the samples of others.
        """
        by_grammar: dict[Grammar, list[tuple[GrammarState, int]]] = {}
        for state, token in sampled_tokens:
            assert state.grammar is not None
            by_grammar.setdefault(state.grammar, []).append((state, token))
        for grammar, sampled in by_grammar.items():
            grammar.advance(sampled, partial(self._schedule, grammar))

    def _schedule(self, grammar: Grammar) -> None:
        self._mask_pool.submit(grammar.owner, partial(self._run, grammar))

    def _run(self, grammar: Grammar) -> None:
        try:
            grammar.run(partial(self._schedule, grammar))
        except ProcessEndedError as error:
            self._refuse(grammar.owner, grammar.constraint, error)
        self._limit_memory()

    def _refuse(self, owner: str, constraint: Constraint, error: ProcessEndedError) -> None:
        """Forget a grammar whose process has ended. Refuse it if it is to blame."""
        if not isinstance(error, ProcessStoppedError):
            self._refusals.add(owner, constraint, str(error))
        with self._lock:
            self._compilations.pop((owner, constraint), None)
            self._grammars.pop((owner, constraint), None)

    def _compilation(self, constraint: Constraint, owner: str) -> _Compilation:
        """Return the compilation of a grammar, for one more request. Start it if necessary."""
        key = (owner, constraint)
        with self._lock:
            compilation = self._compilations.get(key)
            if compilation is not None:
                self._compilations.move_to_end(key)
                compilation.num_waiting += 1
                return compilation
            compilation = self._compilations[key] = _Compilation()
            compilation.num_waiting = 1
            grammar = self._grammars.get(key)
            if grammar is not None:
                compilation.future.set_result(grammar)
            of_owner = [other for other in self._compilations if other[0] == owner]
            if len(of_owner) > MAX_GRAMMARS_PER_OWNER:
                del self._compilations[of_owner[0]]
            if len(self._compilations) > MAX_GRAMMARS:
                self._compilations.popitem(last=False)
        if grammar is None:
            self._compile_pool.submit(owner, partial(self._compile, key, compilation))
        return compilation

    def leave(self, key: tuple[str, Constraint], compilation: _Compilation) -> None:
        """End a compilation if its last request was cancelled."""
        with self._lock:
            compilation.num_waiting -= 1
            if compilation.num_waiting or compilation.future.done():
                return
            compilation.is_abandoned = True
            if self._compilations.get(key) is compilation:
                del self._compilations[key]
            process = compilation.process
        if process is not None:
            process.stop("no request waits for it any more")

    def _compile(self, key: tuple[str, Constraint], compilation: _Compilation) -> None:
        owner, constraint = key
        try:
            compilation.future.set_result(self._new_grammar(owner, constraint, compilation))
        except BaseException as error:
            if isinstance(error, ProcessEndedError):
                self._refuse(owner, constraint, error)
                error = _unusable_error(constraint, str(error))
            elif not isinstance(error, UserError):
                with self._lock:
                    self._compilations.pop(key, None)
            compilation.future.set_exception(error)
        self._limit_memory()

    def _new_grammar(
        self, owner: str, constraint: Constraint, compilation: _Compilation
    ) -> Grammar:
        with self._tokenizer_lock:
            spec = self._tokenizer_spec
        process = self._template.start(spec)
        with self._lock:
            compilation.process = process
            is_abandoned = compilation.is_abandoned
        if is_abandoned:
            process.stop("no request waits for it any more")
        try:
            answer, data = process.ask(
                {
                    "kind": constraint.kind,
                    "text": constraint.text,
                    "choices": list(constraint.choices),
                }
            )
        finally:
            compilation.process = None
        if "error" in answer:
            raise _unusable_error(constraint, answer["error"])
        layout = MaskLayout(self._vocab_size, spec.n_vocab, spec.end_token)
        grammar = Grammar(owner, constraint, process, layout, answer["forced"], data)
        with self._lock:
            self._grammars[owner, constraint] = grammar
        return grammar

    def _limit_memory(self) -> None:
        """End processes while they take more than MAX_RESTING_BYTES together: first those that no
        sample uses, then the largest one of the owner whose processes take the most memory.
        """
        with self._lock:
            grammars = [*self._grammars.values()]
            excess = sum(grammar.process.memory_bytes for grammar in grammars) - MAX_RESTING_BYTES
            if excess <= 0:
                return
            for key in [*self._compilations]:
                grammar = self._grammars.get(key)
                if grammar is not None and not grammar.is_in_use and excess > 0:
                    excess -= grammar.process.memory_bytes
                    del self._compilations[key]
                    grammars.remove(grammar)
        if excess <= 0:
            return
        bytes_of_owners: Counter[str] = Counter()
        for grammar in grammars:
            bytes_of_owners[grammar.owner] += grammar.process.memory_bytes
        largest = max(
            grammars,
            key=lambda grammar: (bytes_of_owners[grammar.owner], grammar.process.memory_bytes),
        )
        largest.process.stop(
            f"the constraints of all requests need more than {MAX_RESTING_BYTES >> 20} MiB of "
            "memory, and this is the largest one; send fewer requests at a time"
        )

    @cached_property
    def _tokenizer_spec(self) -> TokenizerSpec:
        return tokenizer_spec(self._load_tokenizer(), self._vocab_size)


def timeout_error(constraint: Constraint) -> UserError:
    """Return the error for a constraint that was not compiled in CHECK_TIMEOUT_SECONDS."""
    return UserError(
        f"SamplingParams.constraint of kind {constraint.kind} was not compiled within "
        f"{CHECK_TIMEOUT_SECONDS:g} s; give a simpler one, or send fewer different ones at a time"
    )


_REASONS = {
    "NoExtensionBias": "a `$ref` in the schema leads back to itself, and there is no object or array "
    "in between that could end the recursion; let it refer to a schema with a type",
    "coerce_one_of": "the alternatives of a `oneOf` may overlap, which a strict schema cannot "
    "express; use `anyOf`, or leave strict out, which treats `oneOf` as `anyOf`",
}
"""Explanations of llguidance's messages that do not name the cause in the schema. The keys are
parts of its messages.
"""


def _unusable_error(constraint: Constraint, reason: str) -> UserError:
    known = next((text for part, text in _REASONS.items() if part in reason), reason)
    return UserError(f"SamplingParams.constraint of kind {constraint.kind} cannot be used: {known}")


def _refused_error(constraint: Constraint, reason: str) -> UserError:
    return UserError(
        f"SamplingParams.constraint of kind {constraint.kind} is refused for "
        f"{REFUSAL_SECONDS / 60:g} min after its process was ended, because {reason}; give a "
        "simpler one"
    )


def _leave(
    cache_reference: weakref.ref[GrammarCache],
    key: tuple[str, Constraint],
    compilation: _Compilation,
    prepared: Future[Grammar],
) -> None:
    cache = cache_reference()  # a strong reference would be a cycle, and delay the cache's end
    if cache is not None and prepared.cancelled():
        cache.leave(key, compilation)


def _copy_outcome(prepared: Future[Grammar], compiled: Future[Grammar]) -> None:
    if not prepared.set_running_or_notify_cancel():
        return
    error = compiled.exception()
    if error is not None:
        prepared.set_exception(error)
    else:
        prepared.set_result(compiled.result())


def _set_first_mask(state: GrammarState, compiled: Future[Grammar]) -> None:
    try:
        compiled.result().begin(state)
    except Exception as error:
        state.error = error
    state.mask_future.set_result(None)


def _close(compile_pool: FairPool, mask_pool: FairPool, template: ProcessTemplate) -> None:
    compile_pool.close()
    mask_pool.close()
    template.close()
