"""The scheduler of the sampler: it decides which requests, prompts and samples run in a step.

This module makes decisions only and touches no tensors. Owners take turns: the first waiting
request of each owner comes before the second of any other. Requests of one owner are admitted in
their order of arrival. When a sample starts, the scheduler reserves memory for its maximum length,
so no running sample is ever preempted. Requests that do not fit wait.

A request first waits until it fits. Then its prompt becomes active and is prefilled in one or more
steps, except for the cached prefix. Then its samples run, and at last its response is delivered.
Requests with the same prompt and the same weights share one active prompt.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from planish.engine.sampling.prefix_cache import PrefixCache
from planish.engine.sampling.randomness import UniformStream
from planish.engine.sampling.requests import Prompt, Request, RunningSample
from planish.model.positions import CHUNK, capacity_for, sample_capacity

if TYPE_CHECKING:
    from planish.model.lora import LoraWeights  # This class holds tensors.

_MAX_ALT_TOKENS_PER_STEP = 1 << 18
"""The maximum number of alternative tokens (prompt_alt_tokens_k per prompt position) that one step
samples. Sampling this many tokens takes some tenths of a second. If a single chunk of a prompt
exceeds the limit, the step samples its tokens nevertheless, because a chunk cannot be divided.
"""

_MAX_NEW_PROMPTS_PER_STEP = 16
"""The maximum number of prompts that become active in one step. Each costs up to a millisecond
besides its tokens (slots, scores, first tokens), during which all other samples wait.
"""


class Scheduler:
    """Admission of requests under a limit of running samples and a budget of KV cache positions."""

    def __init__(
        self,
        max_batch: int,
        max_positions: int,
        max_prefill_tokens_per_step: int,
        chunk_size: int = CHUNK,
        num_state_positions: int = 0,
    ) -> None:
        """Create a scheduler without requests.

        `max_batch` limits the running samples, `max_positions` the reserved KV cache positions, and
        `max_prefill_tokens_per_step` the prompt tokens of one step. `chunk_size`: the positions of
        one prefix cache entry. `num_state_positions`: the number of KV cache positions that take as
        much memory as one recurrent state. Each prompt and each sample reserves this many
        additional positions.
        """
        self.chunk_size, self.num_state_positions = chunk_size, num_state_positions
        self.max_batch = max_batch
        self.max_positions = max_positions
        self.max_prefill_tokens_per_step = max_prefill_tokens_per_step
        self.waiting: list[Request] = []
        self.prompts: list[Prompt] = []
        self.running: list[RunningSample] = []
        self._num_reserved_positions = 0

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.prompts or self.running)

    @property
    def has_several_owners(self) -> bool:
        """Whether the open requests belong to several owners (`Sample.cache_owner`)."""
        owners = {request.op.cache_owner for request in self.waiting}
        return len(owners | {sample.request.op.cache_owner for sample in self.running}) > 1

    def num_needed_positions(
        self, prompt_length: int, max_tokens: int, is_constrained: bool = False
    ) -> int:
        """Return the KV cache positions that a request with one sample reserves."""
        return self._num_prompt_positions(prompt_length) + (
            self._num_sample_positions(prompt_length, max_tokens, is_constrained)
            if max_tokens
            else 0
        )

    def _num_prompt_positions(self, prompt_length: int) -> int:
        """Return the positions that a prompt reserves for its keys, values and state."""
        return capacity_for(prompt_length) + self.num_state_positions

    def _num_sample_positions(
        self, prompt_length: int, max_tokens: int, is_constrained: bool
    ) -> int:
        """Return the positions that a sample reserves for its keys, values and state. A sample with
        a constraint has two states: that before its last token, in case the mask is late, and that
        after it.
        """
        num_states = 2 if is_constrained else 1
        return sample_capacity(prompt_length, max_tokens) + num_states * self.num_state_positions

    def admit(self, cache: PrefixCache[Any]) -> list[Prompt]:
        """Start the requests that fit, in order, and return the prompts that became active. These
        are at most `_MAX_NEW_PROMPTS_PER_STEP`; further requests wait for the next step.

        A request whose prompt is active but whose samples have not all started comes first, because
        its prompt occupies memory until its last sample has ended. There is at most one such
        request. It cannot starve: one of its samples fits at the latest when all other requests
        have ended.
        """
        new_prompts: list[Prompt] = []
        for request in self._order_of_admission():
            if len(new_prompts) == _MAX_NEW_PROMPTS_PER_STEP:
                break
            if request.prompt is None:
                if self._awaits_shared_prefix(request, cache):
                    continue
                if not self._activate(request, new_prompts):
                    break
            self._start_samples(request)
            if request.num_started_samples == request.num_samples:
                self.waiting.remove(request)
            else:
                break
        return new_prompts

    def _order_of_admission(self) -> list[Request]:
        """Return the waiting requests in the order in which they are admitted."""
        num_before: Counter[str] = Counter()
        """The number of earlier requests of each owner."""
        order: list[tuple[bool, int, Request]] = []
        for request in self.waiting:
            owner = request.op.cache_owner
            order.append((request.prompt is None, num_before[owner], request))
            num_before[owner] += 1
        return [request for *_, request in sorted(order, key=lambda item: item[:2])]

    def prefill_batch(self) -> list[tuple[Prompt, int]]:
        """Return the prompts to prefill in this step, each with its number of tokens.

        The numbers are multiples of `chunk_size`, except at the end of a prompt. The batch has at
        most `max_batch` adapters. Alternative tokens have a separate limit
        (`_MAX_ALT_TOKENS_PER_STEP`), so a prompt with many alternative tokens does not delay other
        prompts.
        """
        tokens_left, alt_tokens_left = self.max_prefill_tokens_per_step, _MAX_ALT_TOKENS_PER_STEP
        adapters: set[LoraWeights | None] = set()
        batch = []
        for prompt in self.prompts:
            if prompt.weights not in adapters and len(adapters) == self.max_batch:
                continue
            remaining = prompt.length - prompt.num_computed_tokens
            count = min(remaining, tokens_left)
            if prompt.num_alt_tokens:
                # The batch's first prompt with alternatives gets at least one chunk. Otherwise a
                # prompt with very many alternatives would never be prefilled.
                min_tokens = self.chunk_size if alt_tokens_left == _MAX_ALT_TOKENS_PER_STEP else 0
                count = min(count, max(alt_tokens_left // prompt.num_alt_tokens, min_tokens))
            if count < remaining:
                count -= count % self.chunk_size
            if count > 0:
                batch.append((prompt, count))
                adapters.add(prompt.weights)
                tokens_left -= count
                alt_tokens_left -= count * prompt.num_alt_tokens
        return batch

    def finish(self, sample: RunningSample) -> None:
        """Remove a sample from the batch and end its reservation."""
        self.running.remove(sample)
        self._num_reserved_positions -= self._num_sample_positions(
            sample.prompt.length, sample.request.max_tokens, sample.request.is_constrained
        )
        sample.prompt.num_pending_samples -= 1

    def release(self, prompt: Prompt) -> None:
        """Remove a prompt that no sample or response needs and end its reservation."""
        self.prompts.remove(prompt)
        self._num_reserved_positions -= self._num_prompt_positions(prompt.length)

    def withdraw(self, request: Request) -> list[RunningSample]:
        """Withdraw a request that was cancelled or failed, and return its running samples.

        The caller must call `finish` for each of these samples.
        """
        if request in self.waiting:
            self.waiting.remove(request)
        if request.prompt is not None:
            request.prompt.num_pending_samples -= request.num_samples - request.num_started_samples
            if not request.num_samples:
                request.prompt.num_pending_samples -= 1
        return [sample for sample in self.running if sample.request is request]

    def _activate(self, request: Request, new_prompts: list[Prompt]) -> bool:
        """Assign a prompt to the request, and return whether the request has a prompt now.

        The request shares an active prompt if possible. Otherwise it gets a new prompt, which is
        appended to `new_prompts`, provided that the new prompt and one sample fit into the budget.
        """
        prompt = next((p for p in self.prompts if self._can_share(p, request)), None)
        if prompt is None:
            if (
                self._num_reserved_positions
                + self.num_needed_positions(
                    len(request.tokens), request.max_tokens, request.is_constrained
                )
                > self.max_positions
            ):
                return False
            if request.num_samples and len(self.running) >= self.max_batch:
                return False
            prompt = Prompt(
                request.input,
                request.cache_namespace,
                request.weights,
                request if request.prompt_scores else None,
            )
            self._num_reserved_positions += self._num_prompt_positions(prompt.length)
            self.prompts.append(prompt)
            new_prompts.append(prompt)
        prompt.num_pending_samples += request.num_samples or 1
        request.prompt = prompt
        return True

    def _start_samples(self, request: Request) -> None:
        """Start as many of the request's samples as fit."""
        assert request.prompt is not None
        while (
            request.num_started_samples < request.num_samples and len(self.running) < self.max_batch
        ):
            positions = self._num_sample_positions(
                request.prompt.length, request.max_tokens, request.is_constrained
            )
            if self._num_reserved_positions + positions > self.max_positions:
                return
            self._num_reserved_positions += positions
            index, prompt = request.num_started_samples, request.prompt
            stream = UniformStream(request.seed, index)
            grammar = (
                request.make_grammar_state() if request.make_grammar_state is not None else None
            )
            self.running.append(RunningSample(request, index, prompt, stream, grammar))
            request.num_started_samples += 1

    def _can_share(self, prompt: Prompt, request: Request) -> bool:
        """Return whether the request can share this prompt."""
        unscored = prompt.scores_request is None and request.prompt_scores is None
        return (
            unscored
            and prompt.cache_namespace == request.cache_namespace
            and prompt.tokens == request.tokens
        )

    def _awaits_shared_prefix(self, request: Request, cache: PrefixCache[Any]) -> bool:
        """Return whether a prompt in prefill will soon provide a longer cached prefix.

        The request then waits for that prompt instead of computing the same prefix again.
        """
        in_prefill = [
            p
            for p in self.prompts
            if not p.is_ready and p.cache_namespace == request.cache_namespace
        ]
        if not in_prefill or any(self._can_share(p, request) for p in in_prefill):
            return False
        shared_length = (
            len(cache.find(request.cache_namespace, request.tokens)) + 1
        ) * self.chunk_size
        if request.op.prompt_alt_tokens_k or shared_length > len(request.tokens) - 1:
            return False
        return any(
            p.length >= shared_length and p.tokens[:shared_length] == request.tokens[:shared_length]
            for p in in_prefill
        )
