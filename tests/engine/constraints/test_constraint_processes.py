"""The processes that compile constraints: their limits, and what is left when they end."""

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from constraint_search import search
from tokenizers import AddedToken, Tokenizer

from planish.engine.constraints import cache as cache_module, refusals as refusals_module
from planish.engine.constraints.cache import GrammarCache
from planish.engine.constraints.fair_pool import FairPool
from planish.engine.constraints.grammar import GrammarState, wait_for_masks
from planish.engine.constraints.worker import MAX_FORCED_TOKENS, ProcessLimits
from planish.errors import PlanishError, UserError
from planish.model.kernels.reference.token_sampling import unpacked
from planish.testing import VOCAB_SIZE, save_byte_tokenizer
from planish.tokenizer import load_tokenizer
from planish.types import Constraint

HUGE = Constraint("json_schema", json.dumps({"type": "integer", "multipleOf": 9999991}))
"""llguidance's automaton for the multiples of a number has as many states as the number."""
SMALL = Constraint("regex", "[ab]{3}")
ROOMY = ProcessLimits(memory_bytes=4 << 30, compile_seconds=600.0)
"""Limits that a test does not reach."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    return load_tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def cache(tokenizer) -> GrammarCache:
    return GrammarCache(lambda: tokenizer, VOCAB_SIZE)


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """The process ids of the children of a process that have not ended."""
    names = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in map(int, names) if is_running(child)]


def template_pid(cache: GrammarCache) -> int:
    process = cache._template._process
    assert process is not None
    return process.pid


def ready(state: GrammarState) -> GrammarState:
    wait_for_masks([state], 60, for_all=True)
    assert state.is_ready
    return state


def first_allowed(state: GrammarState) -> int:
    if ready(state).error is not None:
        raise state.error  # type: ignore[misc]
    if state.forced_tokens:
        return state.forced_tokens[0]
    assert state.mask is not None
    bits = unpacked(torch.from_numpy(state.mask.bits.view(np.int32))[None], VOCAB_SIZE)[0].numpy()
    return int(np.flatnonzero(bits)[0])


def take(cache: GrammarCache, state: GrammarState) -> int:
    """Continue a sample with the first allowed token."""
    token = first_allowed(state)
    if state.forced_tokens:
        state.forced_tokens.pop(0)
    else:
        cache.advance([(state, token)])
    return token


def text_of(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode()


@pytest.mark.parametrize("num_logits", [270, 272, 288, 320])
@pytest.mark.parametrize("num_added", [0, 40, 100])
def test_a_model_may_have_more_or_fewer_logits_than_its_tokenizer_has_tokens(
    tmp_path, num_logits: int, num_added: int
):
    """Models pad their logits, mostly to a multiple of 32 or more, and a tokenizer may have tokens
    that the model cannot sample.
    """
    directory = save_byte_tokenizer(tmp_path)
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_tokens([AddedToken(f"xx{n}", normalized=False) for n in range(num_added)])
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = load_tokenizer(directory)
    cache = GrammarCache(lambda: tokenizer, num_logits)
    for constraint, text in (
        (Constraint("choice", choices=("xx1xx39",)), "xx1xx39"),
        (Constraint("regex", "xx1[0-1]b"), "xx10b"),
        (Constraint("json_schema", '{"const": {"a": "xx2"}}'), '{"a": "xx2"}'),
    ):
        state = cache.new_state(constraint, "first")
        tokens: list[int] = []
        while not (mask := ready(state).mask) or state.forced_tokens or not mask.is_complete:
            if state.error is not None:
                raise state.error
            # The token with the longest text that continues the wanted text.
            token = (
                state.forced_tokens[0]
                if state.forced_tokens
                else _longest(state, tokenizer, text[len(tokenizer.decode(tokens)) :])
            )
            assert token < num_logits
            if state.forced_tokens:
                state.forced_tokens.pop(0)
            else:
                cache.advance([(state, token)])
            tokens.append(token)
        assert tokenizer.decode(tokens) == text


def _longest(state: GrammarState, tokenizer: Any, rest: str) -> int:
    """Return the allowed token with the longest text that begins `rest`."""
    assert state.mask is not None
    bits = np.unpackbits(state.mask.bits.view(np.uint8), bitorder="little")
    allowed = np.flatnonzero(bits).tolist()
    texts = {token: tokenizer.decode([token]) for token in allowed}
    return max(
        (token for token in allowed if rest.startswith(texts[token])),
        key=lambda token: len(texts[token]),
    )


@pytest.mark.parametrize(
    "limits",
    [ProcessLimits(memory_bytes=16 << 20), ProcessLimits(4 << 30, compile_seconds=0.2)],
    ids=["memory", "time"],
)
def test_a_limit_ends_a_compilation_and_nothing_else(tokenizer, limits):
    cache = GrammarCache(lambda: tokenizer, VOCAB_SIZE, limits)
    other = cache.new_state(SMALL, "first")
    assert first_allowed(other) == ord("a")
    peak = "16 MiB of memory" if limits.compile_seconds == 5 else r"0\.2 s of CPU time"
    with pytest.raises(UserError, match=rf"json_schema cannot be used: it .*{peak}"):
        cache.check(HUGE, "first")
    with pytest.raises(UserError, match=rf"is refused for 10 min .*{peak}"):
        cache.check(HUGE, "first")
    refused = ready(cache.new_state(HUGE, "first"))
    assert "is refused" in str(refused.error)
    assert "".join(chr(take(cache, other)) for _ in range(3)) == "aaa"
    with pytest.raises(UserError, match="cannot be used"):  # owners have refusals of their own
        cache.check(HUGE, "second")


def test_a_refusal_ends(tokenizer, monkeypatch):
    monkeypatch.setattr(refusals_module, "REFUSAL_SECONDS", 0.0)
    cache = GrammarCache(lambda: tokenizer, VOCAB_SIZE, ProcessLimits(memory_bytes=8 << 20))
    for _ in range(2):
        with pytest.raises(UserError, match="cannot be used"):
            cache.check(HUGE, "first")


def test_a_compilation_ends_with_the_last_request_that_waits_for_it(tokenizer):
    cache = GrammarCache(lambda: tokenizer, VOCAB_SIZE, ROOMY)
    cache.check(SMALL, "first")
    first, second = cache.prepare(HUGE, "first"), cache.prepare(HUGE, "first")
    wait_until(lambda: len(children(template_pid(cache))) == 2)
    first.cancel()
    assert len(children(template_pid(cache))) == 2
    second.cancel()
    wait_until(lambda: len(children(template_pid(cache))) == 1)
    assert len(cache) == 1
    # It was within its limits, so it is not refused.
    third = cache.prepare(HUGE, "first")
    wait_until(lambda: len(children(template_pid(cache))) == 2)
    third.cancel()


def test_waiting_has_a_limit(tokenizer, monkeypatch):
    monkeypatch.setattr(cache_module, "CHECK_TIMEOUT_SECONDS", 0.01)
    cache = GrammarCache(lambda: tokenizer, VOCAB_SIZE, ROOMY)
    with pytest.raises(UserError, match=r"was not compiled within 0\.01 s"):
        cache.check(HUGE, "first")
    wait_until(lambda: cache._template._process is None or not children(template_pid(cache)))


def test_tokens_have_a_limit_of_cpu_time(tokenizer):
    limits = ProcessLimits(step_seconds=-1.0, seconds_per_token=0.0)  # exceeded from the start
    cache = GrammarCache(lambda: tokenizer, VOCAB_SIZE, limits)
    state, other = cache.new_state(SMALL, "first"), cache.new_state(SMALL, "second")
    take(cache, state)
    assert "-1 s for its tokens" in str(ready(state).error)
    assert first_allowed(other) == ord("a")
    with pytest.raises(UserError, match="is refused"):
        cache.check(SMALL, "first")


def test_tokens_add_to_the_limits(tokenizer):
    """A long text is not cut off because its process has worked for long."""
    limits = ProcessLimits(step_seconds=0.5, seconds_per_token=0.5)
    cache = GrammarCache(lambda: tokenizer, VOCAB_SIZE, limits)
    state = cache.new_state(Constraint("json_schema", '{"type": "string"}'), "")
    used = time.process_time()
    for _ in range(300):
        take(cache, state)
        assert ready(state).error is None
    assert time.process_time() - used < 60


def test_a_grammar_that_is_in_use_is_not_compiled_again(cache, monkeypatch):
    monkeypatch.setattr(cache_module, "MAX_GRAMMARS", 1)
    state = cache.new_state(SMALL, "")
    first_allowed(state)
    cache.check(Constraint("regex", "other"), "")
    assert len(cache) == 1
    processes = children(template_pid(cache))
    again = cache.new_state(SMALL, "")
    assert first_allowed(again) == ord("a")
    assert again.grammar is state.grammar
    assert set(children(template_pid(cache))) <= set(processes)


def test_processes_end_with_their_grammars(tokenizer):
    cache = GrammarCache(lambda: tokenizer, VOCAB_SIZE)
    state = cache.new_state(SMALL, "")
    first_allowed(state)
    pid = template_pid(cache)
    assert len(children(pid)) == 1
    del cache
    gc.collect()
    wait_until(lambda: not is_running(pid))


def test_all_processes_together_have_a_limit(cache, monkeypatch):
    """Unused ones end first. Then the largest one of the owner that takes the most memory ends."""
    idle, used, other = (Constraint("regex", f"[ab{letter}]+") for letter in "xyz")
    cache.check(idle, "first")
    states = [cache.new_state(used, "first"), cache.new_state(other, "second")]
    for state in states:
        first_allowed(state)
    grammars = [state.grammar for state in states]
    assert all(grammars)
    monkeypatch.setattr(cache_module, "MAX_RESTING_BYTES", 100)

    def limit_memory(*sizes: int) -> None:
        for grammar, size in zip(grammars, sizes, strict=True):
            assert grammar is not None
            grammar.process.memory_bytes = size
        cache._limit_memory()

    cache._grammars["first", idle].process.memory_bytes = 60
    limit_memory(50, 45)
    assert [constraint for _, constraint in cache._compilations] == [used, other]
    limit_memory(70, 50)
    for state in states:
        take(cache, state)
        ready(state)
    assert "more than 0 MiB of memory" in str(states[0].error)
    assert states[1].error is None
    cache.check(used, "first")  # it was within its own limits, so it is not refused


@pytest.mark.parametrize("victim", ["process", "template"])
def test_a_process_that_is_killed_fails_its_samples_only(cache, victim):
    """As by the kernel, when the machine has no memory left."""
    state = cache.new_state(SMALL, "first")
    first_allowed(state)
    [killed] = children(template_pid(cache))
    other = cache.new_state(SMALL, "second")
    first_allowed(other)
    template = template_pid(cache)
    os.kill(template if victim == "template" else killed, signal.SIGKILL)
    wait_until(lambda: not is_running(template if victim == "template" else killed))
    take(cache, state)
    error = ready(state).error
    if victim == "template":  # the constraint processes continue, and a new template starts
        assert error is None
    else:
        assert isinstance(error, UserError)
    take(cache, other)
    assert ready(other).error is None
    cache.check(Constraint("regex", "new"), "first")


def test_a_tokenizer_that_llguidance_cannot_read_is_an_error(tokenizer):
    cache = GrammarCache(lambda: tokenizer, VOCAB_SIZE)
    cache.__dict__["_tokenizer_spec"] = replace(cache._tokenizer_spec, text='{"model": {}}')
    with pytest.raises(PlanishError, match="cannot read the model's tokenizer"):
        cache.check(SMALL, "")


@pytest.mark.parametrize(
    ("constraint", "texts"),
    [
        (Constraint("regex", r"a<\|im_end\|>b"), ["a<|im_end|>b"]),
        (Constraint("choice", choices=["<|im_start|>x"]), ["<|im_start|>x"]),
        (Constraint("choice", choices=["<|im_start|>x", "<|im_end|>y"]), ["<|im_end|>y"]),
        (Constraint("regex", "<think>[a-z]{3}</think>b"), ["<think>aaa</think>b"]),
        (Constraint("json_schema", '{"const": "<|im_end|>"}'), ['"<|im_end|>"']),
        (Constraint("regex", r"[ab]<\|im_end\|>{2}c"), ["a<|im_end|>>c"]),
        (
            Constraint("regex", r"<\|planish: end of the text\|>"),
            ["<|planish: end of the text|>"],
        ),
    ],
)
def test_the_text_of_a_special_token_is_text(tokenizer, constraint, texts):
    """It consists of other tokens. The special token would be markup, or end the sample."""
    from transformers import PreTrainedTokenizerFast

    thinking = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    thinking.add_tokens(["<think>", "</think>"])
    cache = GrammarCache(lambda: thinking, VOCAB_SIZE)
    state, written = cache.new_state(constraint, ""), []
    while not (ready(state).mask is not None and state.mask.is_empty and not state.forced_tokens):  # type: ignore[union-attr]
        written.append(take(cache, state))
    assert [text_of(written)] == texts
    assert state.mask is not None
    assert state.mask.is_complete


def test_a_long_forced_text_comes_in_parts(cache):
    length = MAX_FORCED_TOKENS + 300
    state = cache.new_state(Constraint("regex", f"a{{{length}}}"), "")
    counts = []
    written = []
    while not (ready(state).mask.is_empty and not state.forced_tokens):  # type: ignore[union-attr]
        counts.append(len(state.forced_tokens))
        written.append(take(cache, state))
    assert max(counts) == MAX_FORCED_TOKENS
    assert text_of(written) == "a" * length


def test_owners_take_turns():
    done: list[str] = []
    release, finished = threading.Event(), threading.Event()
    pool = FairPool("test", 2, 1, stop=lambda: None)
    is_blocked = threading.Event()

    def block() -> None:
        is_blocked.set()
        assert release.wait(60)
        done.append("slow")

    def last() -> None:
        done.append("second slow")
        finished.set()

    pool.submit("slow", block)
    assert is_blocked.wait(60)
    pool.submit("slow", last)
    quick = threading.Event()
    pool.submit("quick", quick.set)
    assert quick.wait(60)
    assert not done
    release.set()
    assert finished.wait(60)
    assert done == ["slow", "second slow"]
    pool.close()


@pytest.mark.slow
def test_random_constraints_stay_within_their_limits():
    """constraint_search.py tries 2,000 of them."""
    report, faults = search(60)
    assert not faults
    assert report.outcomes.total() == 60
    assert any(outcome.endswith("used") for outcome in report.outcomes)
