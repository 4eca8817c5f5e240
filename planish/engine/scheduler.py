"""Who runs next: requests wait in order, prompts are computed once for all who share them, samples
join and leave at any step.

Plain decisions, no tensors. Memory is reserved for the longest that a sample may become when it is
admitted, so nothing that runs is ever thrown out for want of memory; what does not fit waits.

A request waits -> its prompt is active (computed in one or more steps, its known prefix taken from
the cache) -> its samples run -> it is answered. Requests with the same prompt and weights share one
active prompt.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from planish.engine.positions import CHUNK, SPAN, capacity_for, sample_capacity
from planish.engine.prefix_cache import PrefixCache
from planish.engine.randomness import UniformStream
from planish.engine.stopping import StopCondition
from planish.service import Sample
from planish.types import SampledSequence, SampleResponse

if TYPE_CHECKING:  # tensors, which nothing here looks into
    from planish.engine.prompt_scores import PromptScores
    from planish.model.lora import LoraWeights

_DRAWS = 1 << 18
"""Most tokens drawn at positions of prompts in one step, which take some tenths of a second; beyond
it, one chunk of one prompt.
"""


@dataclass(eq=False)
class Request:
    """One `Sample` operation and what is done of it."""

    op: Sample
    number: int
    tokens: list[int]
    max_tokens: int
    """0 = nothing is drawn; the request is about its prompt only."""
    weights: LoraWeights | None
    version: Hashable
    """Equal for equal weights only: the key of the prefix cache."""
    stop: StopCondition
    seed: int
    scores: PromptScores | None
    future: Future[SampleResponse]
    prompt: Prompt | None = None
    started: int = 0
    sequences: dict[int, SampledSequence] = field(default_factory=dict)
    is_answered: bool = False
    """Or cancelled, and that is noted."""

    @property
    def num_samples(self) -> int:
        return self.op.num_samples if self.max_tokens else 0

    def claim(self) -> bool:
        """Whether there is no answer yet, and nobody gave up waiting for one: then the caller gives
        it. True once only.
        """
        if self.is_answered:
            return False
        self.is_answered = True
        return self.future.set_running_or_notify_cancel()

    def fail(self, error: BaseException) -> None:
        """Answer with `error`, unless it was cancelled or answered."""
        if self.claim():
            self.future.set_exception(error)


@dataclass(eq=False)
class Prompt:
    """A prompt whose keys and values are in memory, shared by all samples that continue it."""

    tokens: list[int]
    version: Hashable
    weights: LoraWeights | None
    scored_for: Request | None
    """A prompt with questions about it is computed for that request alone, from its known prefix
    on; whole if tokens are drawn at its positions.
    """
    slot: int = -1
    computed: int = 0
    cached: int = 0
    waiting: int = 0
    """Samples (or answers) still to be delivered; the prompt leaves memory at 0."""

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def ready(self) -> bool:
        return self.computed == len(self.tokens)

    @property
    def draws(self) -> int:
        """Tokens drawn at each of its positions."""
        return self.scored_for.op.prompt_alt_tokens_k if self.scored_for is not None else 0

    @property
    def capacity(self) -> int:
        return capacity_for(len(self.tokens))


@dataclass(eq=False)
class RunningSample:
    """One sample being drawn. Its slot holds the end of the prompt and all drawn tokens but the
    last, which has no keys yet.
    """

    request: Request
    index: int
    prompt: Prompt
    stream: UniformStream
    slot: int = -1
    capacity: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)

    @property
    def stored(self) -> int:
        """Positions in the sample's slot before its last token goes through the decoder."""
        return self.prompt.length % SPAN + len(self.tokens) - 1

    @property
    def position(self) -> int:
        """Of the last token, within the sequence."""
        return self.prompt.length + len(self.tokens) - 1


class Scheduler:
    """Admission under a budget of rows and of key-value positions."""

    def __init__(self, max_batch: int, max_positions: int, prefill_tokens: int) -> None:
        self.max_batch = max_batch
        self.max_positions = max_positions
        self.prefill_tokens = prefill_tokens
        self.waiting: list[Request] = []
        self.prompts: list[Prompt] = []
        self.running: list[RunningSample] = []
        self._reserved = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prompts or self.running)

    def positions_needed(self, prompt_tokens: int, max_tokens: int) -> int:
        """Positions that a request with one sample reserves."""
        return capacity_for(prompt_tokens) + (
            sample_capacity(prompt_tokens, max_tokens) if max_tokens else 0
        )

    def admit(self, cache: PrefixCache[Any]) -> list[Prompt]:
        """Start what fits, in order; answers the prompts that became active.

        Who has a prompt comes first: it keeps memory that others wait for, until its last sample
        has started. So there is one such request at most, and one of its samples fits at the latest
        when nothing else is left.
        """
        active: list[Prompt] = []
        for request in sorted(self.waiting, key=lambda request: request.prompt is None):
            if request.prompt is None:
                if self._shares_what_is_being_computed(request, cache):
                    continue
                if not self._activate(request, active):
                    break
            self._start_samples(request)
            if request.started == request.num_samples:
                self.waiting.remove(request)
            else:
                break
        return active

    def prefill_batch(self) -> list[tuple[Prompt, int]]:
        """Prompts to compute now, each with its number of tokens: whole chunks, unless the prompt
        ends.

        Of at most `max_batch` adapters, and with a limit of its own for prompts at whose positions
        tokens are drawn: others go on beside them.
        """
        room, draws, adapters = self.prefill_tokens, _DRAWS, set()
        batch = []
        for prompt in self.prompts:
            if prompt.weights not in adapters and len(adapters) == self.max_batch:
                continue
            left = prompt.length - prompt.computed
            count = min(left, room)
            if prompt.draws:
                count = min(count, max(draws // prompt.draws, CHUNK if draws == _DRAWS else 0))
            if count < left:
                count -= count % CHUNK
            if count > 0:
                batch.append((prompt, count))
                adapters.add(prompt.weights)
                room -= count
                draws -= count * prompt.draws
        return batch

    def finish(self, sample: RunningSample) -> None:
        """Take a sample out of the batch."""
        self.running.remove(sample)
        self._reserved -= sample_capacity(sample.prompt.length, sample.request.max_tokens)
        sample.prompt.waiting -= 1

    def release(self, prompt: Prompt) -> None:
        """Take a prompt that nobody waits for out of memory."""
        self.prompts.remove(prompt)
        self._reserved -= prompt.capacity

    def withdraw(self, request: Request) -> list[RunningSample]:
        """Forget a cancelled request; answers its samples that are running, which the caller
        finishes.
        """
        if request in self.waiting:
            self.waiting.remove(request)
        if request.prompt is not None:
            request.prompt.waiting -= request.num_samples - request.started
            if not request.num_samples:
                request.prompt.waiting -= 1
        return [sample for sample in self.running if sample.request is request]

    def _activate(self, request: Request, active: list[Prompt]) -> bool:
        """Give the request a prompt: one that is active already, or a new one if it and one sample
        fit.
        """
        shared = next((p for p in self.prompts if self._same(p, request)), None)
        if shared is None:
            if (
                self._reserved + self.positions_needed(len(request.tokens), request.max_tokens)
                > self.max_positions
            ):
                return False
            if request.num_samples and len(self.running) >= self.max_batch:
                return False
            shared = Prompt(
                request.tokens,
                request.version,
                request.weights,
                request if request.scores else None,
            )
            self._reserved += shared.capacity
            self.prompts.append(shared)
            active.append(shared)
        shared.waiting += request.num_samples or 1
        request.prompt = shared
        return True

    def _start_samples(self, request: Request) -> None:
        assert request.prompt is not None
        while request.started < request.num_samples and len(self.running) < self.max_batch:
            need = sample_capacity(request.prompt.length, request.max_tokens)
            if self._reserved + need > self.max_positions:
                return
            self._reserved += need
            stream = UniformStream(request.seed, request.started)
            self.running.append(RunningSample(request, request.started, request.prompt, stream))
            request.started += 1

    def _same(self, prompt: Prompt, request: Request) -> bool:
        unscored = prompt.scored_for is None and request.scores is None
        return unscored and prompt.version == request.version and prompt.tokens == request.tokens

    def _shares_what_is_being_computed(self, request: Request, cache: PrefixCache[Any]) -> bool:
        """Whether a prompt under way will soon offer a longer known prefix than the cache does now:
        then wait for it.
        """
        under_way = [p for p in self.prompts if not p.ready and p.version == request.version]
        if not under_way or any(self._same(p, request) for p in under_way):
            return False
        longer = (len(cache.find(request.version, request.tokens)) + 1) * CHUNK
        if request.op.prompt_alt_tokens_k or longer > len(request.tokens) - 1:
            return False
        return any(
            p.length >= longer and p.tokens[:longer] == request.tokens[:longer] for p in under_way
        )
