"""Admission and preemption: every request that fits alone is served, memory is never reserved
twice, and owners share it.
"""

from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planish.detokenizer import Detokenizer
from planish.engine.sampling import reservations
from planish.engine.sampling.prefix_cache import PrefixCache
from planish.engine.sampling.requests import Prompt, Request, RunningSample
from planish.engine.sampling.scheduler import Scheduler
from planish.engine.sampling.stopping import StopCondition
from planish.model.sequences.positions import CHUNK, SPAN
from planish.model.vision.image_tokens import InputTokens
from planish.service import Sample
from planish.types import ModelInput, SamplingParams

COMMON = np.random.default_rng(0).integers(0, 256, 400).tolist()


def request(
    number: int,
    tokens: list[int],
    n: int = 1,
    max_tokens: int = 8,
    alternatives: int = 0,
    owner: str = "",
) -> Request:
    """Return a request; with `max_tokens` 0, for prompt logprobs only."""
    params = SamplingParams(max_tokens=max_tokens or None)
    op = Sample(
        "s",
        ModelInput.from_ints(tokens),
        n,
        params,
        prompt_alt_tokens_k=alternatives,
        owner=owner,
    )
    scores: Any = (
        None if max_tokens else SimpleNamespace(begins=0 if alternatives else len(tokens) // 2)
    )
    return Request(
        op,
        number,
        InputTokens(tokens),
        max_tokens,
        None,
        "base",
        StopCondition(Detokenizer(str)),
        0,
        scores,
        Future(),
    )


class Run:
    """Drives a scheduler as a sampler does, but without a model."""

    def __init__(self, scheduler: Scheduler, cached_chunks: int = 100) -> None:
        self.scheduler = scheduler
        self.cache: PrefixCache[int] = PrefixCache(CHUNK, cached_chunks)
        self.preemptions: list[RunningSample] = []
        self.answered: list[int] = []
        self._left: dict[Request, int] = {}

    def ask(self, asked: Request) -> None:
        assert (
            self.scheduler.num_needed_positions(len(asked.tokens), asked.max_tokens)
            <= self.scheduler.reservations.max_positions
        )
        self._left[asked] = asked.num_samples or 1
        self.scheduler.waiting.append(asked)

    def withdraw(self, asked: Request) -> None:
        for sample in self.scheduler.withdraw(asked):
            self.scheduler.finish(sample)
        del self._left[asked]
        if asked.prompt is not None:
            self._release(asked.prompt)

    @property
    def unanswered(self) -> list[Request]:
        return list(self._left)

    def step(self) -> None:
        scheduler = self.scheduler
        for prompt in scheduler.admit(self.cache):
            prompt.num_computed_tokens = (
                len(self.cache.find(prompt.cache_namespace, prompt.tokens)) * CHUNK
            )
        # A sample that continues alone after a preemption may need one span more.
        spare = SPAN if len(scheduler.running) == 1 else 0
        kept = scheduler.reservations
        assert kept.num_reserved <= kept.max_positions + spare
        assert len(scheduler.running) <= scheduler.max_batch
        for prompt, count in scheduler.prefill_batch():
            prompt.num_computed_tokens += count
            if prompt.is_ready:
                self.cache.add(
                    prompt.cache_namespace,
                    prompt.tokens,
                    self.cache.missing_chunks(prompt.cache_namespace, prompt.tokens),
                )
                for asked in [
                    asked
                    for asked in self._left
                    if asked.prompt is prompt and not asked.num_samples
                ]:
                    prompt.num_pending_samples -= 1
                    self._count(asked)
                self._release(prompt)
        ready = [sample for sample in scheduler.running if sample.prompt.is_ready]
        while (
            victim := scheduler.reserve_or_pick_victim([s for s in ready if s.tokens])
        ) is not None:
            scheduler.preempt(victim)
            self._release(victim.prompt)
            self.preemptions.append(victim)
            ready.remove(victim)
        for sample in ready:
            sample.tokens.append(0)
            if len(sample.tokens) == sample.request.max_tokens:
                sample.stop_reason = "length"
                scheduler.finish(sample)
                self._release(sample.prompt)
                self._count(sample.request)

    def finish(self, most_steps: int = 20_000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.busy:
                break
            self.step()
        assert not self._left, f"{len(self._left)} requests wait for ever"
        assert not self.scheduler.busy
        assert self.scheduler.reservations.num_reserved == 0

    def _count(self, asked: Request) -> None:
        self._left[asked] -= 1
        if not self._left[asked]:
            del self._left[asked]
            self.answered.append(asked.number)

    def _release(self, prompt: Prompt) -> None:
        if not prompt.num_pending_samples and prompt in self.scheduler.prompts:
            self.scheduler.release(prompt)


def test_waiting_for_a_prefix_does_not_block_a_started_request():
    """Request 1 waits for the prefix of request 0. Of request 2, only some samples fit meanwhile,
    and its prompt stays in memory.
    """
    run = Run(Scheduler(max_batch=64, max_positions=512, max_prefill_tokens_per_step=2048))
    run.ask(request(0, COMMON[:60]))
    run.ask(request(1, COMMON[:32] + [1] * 168))
    run.ask(request(2, [2] * 200, n=8))
    run.finish()
    assert run.answered == [0, 2, 1]


@pytest.mark.parametrize("seed", range(10, 20))
def test_every_request_that_fits_alone_is_served(seed: int, monkeypatch):
    monkeypatch.setattr(reservations, "_FIRST_EXPECTED_TOKENS", 1)
    random = np.random.default_rng(seed)
    scheduler = Scheduler(int(random.integers(1, 9)), 512, int(random.choice([32, 100, 2048])))
    run = Run(scheduler, cached_chunks=int(random.integers(0, 9)))
    for number in range(30):
        common = COMMON[: 32 * random.integers(0, 4)]
        tokens = common + [number] * int(random.integers(1, 250 - len(common)))
        n, max_tokens = int(random.integers(1, 9)), int(random.choice([0, 1, 5, 20, 80, 200]))
        owner = str(random.choice(["one", "two", "three"]))
        run.ask(request(number, tokens, n, max_tokens, owner=owner))
        for _ in range(random.choice([0, 0, 0, 3])):
            run.step()
        if run.unanswered and random.random() < 0.15:
            run.withdraw(run.unanswered[random.integers(0, len(run.unanswered))])
    run.finish()
    assert run.preemptions or scheduler.max_batch == 1
    assert max(Counter(run.preemptions).values(), default=0) <= reservations.MAX_PREEMPTIONS


def test_a_step_samples_a_limited_number_of_alternative_prompt_tokens():
    scheduler = Scheduler(max_batch=64, max_positions=100_000, max_prefill_tokens_per_step=2048)
    asked = [
        request(i, [i] * 500, max_tokens=0, alternatives=k)
        for i, k in enumerate([40_000, 100, 0, 1])
    ]
    scheduler.waiting += asked
    scheduler.admit(PrefixCache[int](CHUNK, 0))
    assert [(prompt.tokens[0], count) for prompt, count in scheduler.prefill_batch()] == [
        (0, CHUNK),
        (2, 500),
    ]
    scheduler.prompts.pop(0)
    assert [(prompt.tokens[0], count) for prompt, count in scheduler.prefill_batch()] == [
        (1, 500),
        (2, 500),
        (3, 500),
    ]


def test_prompts_in_one_step_use_at_most_max_batch_adapters():
    """Requests for prompt logprobs only do not count towards a decoding batch."""
    run = Run(Scheduler(max_batch=2, max_positions=100_000, max_prefill_tokens_per_step=2048))
    for number in range(6):
        asked = request(number, [number] * 9, max_tokens=0)
        asked.weights = f"adapter {number // 2}"  # type: ignore[assignment]
        run.ask(asked)
    run.step()
    assert run.answered == [0, 1, 2, 3]
    run.finish()


def test_samples_reserve_multiples_of_span():
    """A request of 201 + 180 positions reserves 256 for the prompt and 192 for each sample. Powers
    of two would reserve 256.
    """
    scheduler = Scheduler(
        max_batch=64, max_positions=256 + 10 * 192 + 191, max_prefill_tokens_per_step=512
    )
    assert scheduler.num_needed_positions(201, 180) == 256 + 192
    scheduler.waiting.append(request(0, COMMON[:201], n=20, max_tokens=180))
    scheduler.admit(PrefixCache(CHUNK, 100))
    assert len(scheduler.running) == 10


def test_owners_take_turns():
    """A request does not wait for all earlier requests of another owner."""
    scheduler = Scheduler(max_batch=3, max_positions=10**6, max_prefill_tokens_per_step=64)
    many = [request(i, [i], owner="many") for i in range(10)]
    one = request(10, [10], owner="one")
    scheduler.waiting += [*many, one]
    scheduler.admit(PrefixCache(CHUNK, 0))
    assert {sample.request for sample in scheduler.running} == {many[0], many[1], one}


def test_a_step_starts_a_limited_number_of_prompts():
    """Other samples wait while the slots and scores of new prompts are made."""
    scheduler = Scheduler(max_batch=256, max_positions=10**6, max_prefill_tokens_per_step=2048)
    scheduler.waiting += [request(i, [i]) for i in range(100)]
    cache: PrefixCache[int] = PrefixCache(CHUNK, 0)
    counts = [len(scheduler.admit(cache)) for _ in range(8)]
    assert counts == [16] * 6 + [4, 0]
    assert len(scheduler.running) == 100


def test_requests_with_one_prompt_start_together():
    scheduler = Scheduler(max_batch=256, max_positions=10**6, max_prefill_tokens_per_step=2048)
    scheduler.waiting += [request(i, [1, 2, 3]) for i in range(100)]
    scheduler.admit(PrefixCache(CHUNK, 0))
    assert len(scheduler.running) == 100


def test_short_samples_with_long_limits_run_together():
    """Each of 40 samples uses 200 of its 4,096 tokens. Reserved for 4,096 tokens, two would fit."""
    run = Run(Scheduler(max_batch=64, max_positions=10_000, max_prefill_tokens_per_step=2048))
    for number in range(40):
        run.ask(request(number, [number] * 20, max_tokens=4096))
    found = 0
    while run.scheduler.busy:
        run.step()
        found = max(found, len(run.scheduler.running))
        for sample in [s for s in run.scheduler.running if len(s.tokens) == 200]:
            sample.stop_reason = "stop"
            run.scheduler.finish(sample)
            run._release(sample.prompt)
            run._count(sample.request)
    run.finish()
    assert found > 25
    assert not run.preemptions


def test_samples_of_the_owner_with_the_most_memory_are_preempted_the_latest_first(monkeypatch):
    monkeypatch.setattr(reservations, "_FIRST_EXPECTED_TOKENS", 1)
    run = Run(Scheduler(max_batch=64, max_positions=64 * 15, max_prefill_tokens_per_step=2048))
    run.ask(request(0, [0], max_tokens=150, owner="one"))
    for number in range(1, 5):
        run.ask(request(number, [number], max_tokens=150, owner="many"))
    run.finish()
    assert [sample.request.number for sample in run.preemptions][:2] == [4, 3]
    assert all(sample.request.op.owner == "many" for sample in run.preemptions)


def test_a_preempted_sample_comes_before_its_owners_new_requests(monkeypatch):
    monkeypatch.setattr(reservations, "_FIRST_EXPECTED_TOKENS", 1)
    run = Run(Scheduler(max_batch=64, max_positions=64 * 6, max_prefill_tokens_per_step=2048))
    for number in range(12):
        run.ask(request(number, [number], max_tokens=150))
    run.finish()
    assert run.preemptions
    # A later request may end before the two that are preempted, but no more than those at once.
    assert all(abs(place - number) <= 3 for place, number in enumerate(run.answered))


def test_expected_lengths_are_learned_from_ended_samples():
    """After samples that used their 500 tokens, samples reserve 500 tokens at their start, so none
    is preempted.
    """
    run = Run(Scheduler(max_batch=64, max_positions=3000, max_prefill_tokens_per_step=2048))
    for number in range(20):
        run.ask(request(number, [number] * 20, max_tokens=500))
    for _ in range(1000):
        run.step()
    first = len(run.preemptions)
    assert first > 0
    run.finish()
    assert len(run.preemptions) == first
