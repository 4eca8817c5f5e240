"""The scheduler of the sampler: it decides which requests, prompts and samples run in a step.

This module makes decisions only and touches no tensors. Owners take turns: the first waiting
request of each owner comes before the second of any other. Requests of one owner are admitted in
their order of arrival. When a sample starts, the scheduler reserves memory for its expected length
(reservations.py). Requests that do not fit wait.

If the running samples need more memory than there is, the scheduler preempts some of them. Among
the samples of the owner with the most memory, it chooses the one that arrived last. A preempted
sample leaves its slot and waits. Samples that wait so come before their owner's new requests. When
there is memory again, the sample's tokens are prefilled like a prompt, and it continues. Prefill
and decoding give the same bits, so its tokens and logprobs are the same as without a preemption.
After `MAX_PREEMPTIONS` preemptions, a sample resumes when there is memory for its maximum length,
and is not preempted again.

A request first waits until it fits. Then its prompt becomes active and is prefilled in one or more
steps, except for the cached prefix. Then its samples run, and at last its response is delivered.
Requests with the same prompt and the same weights share one active prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from planish.engine.sampling.prefix_cache import PrefixCache
from planish.engine.sampling.randomness import UniformStream
from planish.engine.sampling.requests import Prompt, Request, RunningSample
from planish.engine.sampling.reservations import MAX_PREEMPTIONS, Reservations
from planish.model.sequences.positions import CHUNK, SPAN, sample_capacity

if TYPE_CHECKING:
    from planish.model.layers.lora import LoraWeights  # This class holds tensors.
    from planish.model.vision.image_tokens import InputTokens

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
        block: int = SPAN,
    ) -> None:
        """Create a scheduler without requests.

        `max_batch` limits the running samples, `max_positions` the reserved KV cache positions, and
        `max_prefill_tokens_per_step` the prompt tokens of one step. `chunk_size`: the positions of
        one prefix cache entry. `num_state_positions`: the number of KV cache positions that take as
        much memory as one recurrent state. Each prompt and each sample reserves this many
        additional positions. `block`: the minimum growth of a sample's slot, in positions.
        """
        self.chunk_size = chunk_size
        self.max_batch = max_batch
        self.max_prefill_tokens_per_step = max_prefill_tokens_per_step
        self._memory = max_positions, num_state_positions, block
        self.clear()

    def clear(self) -> None:
        """Drop all requests and reservations."""
        self.reservations = Reservations(*self._memory)
        self.waiting: list[Request] = []
        self.prompts: list[Prompt] = []
        self.running: list[RunningSample] = []
        self.preempted: list[RunningSample] = []
        """The preempted samples, which wait until they can resume."""

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.prompts or self.running or self.preempted)

    @property
    def has_several_owners(self) -> bool:
        """Whether the open requests belong to several owners (`Sample.owner`)."""
        requests = [*self.waiting, *(s.request for s in (*self.running, *self.preempted))]
        return len({request.op.owner for request in requests}) > 1

    def num_needed_positions(
        self, prompt_length: int, max_tokens: int, is_constrained: bool = False
    ) -> int:
        """Return the KV cache positions that a request with one sample needs at most."""
        positions = self.reservations.num_prompt_positions(prompt_length)
        if max_tokens:
            capacity = sample_capacity(prompt_length, max_tokens)
            positions += self.reservations.num_sample_positions(capacity, is_constrained)
        return positions

    def admit(self, cache: PrefixCache[Any]) -> list[Prompt]:
        """Start the requests and resume the preempted samples that fit, in order. Return the
        prompts that became active. These are at most `_MAX_NEW_PROMPTS_PER_STEP`; further requests
        and samples wait for the next step.

        A request whose prompt is active but whose samples have not all started comes before all
        other requests, because its prompt occupies memory until its last sample has ended. There is
        at most one such request. It cannot starve: one of its samples fits at the latest when no
        other sample is running.
        """
        new_prompts: list[Prompt] = []
        for waiting in self._order_of_admission():
            if len(new_prompts) == _MAX_NEW_PROMPTS_PER_STEP:
                break
            if isinstance(waiting, RunningSample):
                if not self._resume(waiting, new_prompts):
                    break
                continue
            request = waiting
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

    def _order_of_admission(self) -> list[Request | RunningSample]:
        """Return the preempted samples and the waiting requests in the order of admission.

        Owners take turns. A request that has started comes before other requests. It comes before
        preempted samples too if no sample is running. Otherwise it comes after them, because its
        new samples would take the memory that the preempted ones wait for.
        """
        has_started_request = any(request.prompt is not None for request in self.waiting)
        num_before: Counter[str] = Counter()
        """The number of earlier samples and requests of each owner."""
        order: list[tuple[int, int, Request | RunningSample]] = []
        for waiting in (*sorted(self.preempted, key=_arrival), *self.waiting):
            rank = 0
            if isinstance(waiting, RunningSample):
                owner = waiting.request.op.owner
                rank = int(has_started_request and not self.running)
            else:
                owner = waiting.op.owner
                if waiting.prompt is not None:
                    rank = int(bool(self.running))
                elif has_started_request:
                    rank = 2
            order.append((rank, num_before[owner], waiting))
            num_before[owner] += 1
        return [waiting for *_, waiting in sorted(order, key=lambda item: item[:2])]

    def prefill_batch(self) -> list[tuple[Prompt, int]]:
        """Return the prompts to prefill in this step, each with its number of tokens.

        The numbers are multiples of `chunk_size`, except at the end of a prompt and around an image
        whose tokens attend to one another (see `InputTokens.blocks`). The batch has at
        most `max_batch` adapters. Alternative tokens have a separate limit
        (`_MAX_ALT_TOKENS_PER_STEP`), so a prompt with many alternative tokens does not delay other
        prompts.
        """
        tokens_left, alt_tokens_left = self.max_prefill_tokens_per_step, _MAX_ALT_TOKENS_PER_STEP
        adapters: set[LoraWeights | None] = set()
        batch: list[tuple[Prompt, int]] = []
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
                count = _with_whole_blocks(prompt, count, tokens_left)
            if count > 0:
                batch.append((prompt, count))
                adapters.add(prompt.weights)
                tokens_left -= count
                alt_tokens_left -= count * prompt.num_alt_tokens
        return batch

    def reserve_or_pick_victim(self, samples: Sequence[RunningSample]) -> RunningSample | None:
        """Reserve the positions that these running samples need for their next rows.

        Return None if all of them fit. Otherwise return the sample that the caller must preempt
        before it calls this method again.
        """
        if all(self.reservations.grow(sample) for sample in sorted(samples, key=_arrival)):
            return None
        positions_of_owner: Counter[str] = Counter()
        for sample in self.running:
            positions_of_owner[sample.request.op.owner] += sample.reserved_capacity
        # A sample that must grow is among the candidates, because a sample that cannot be preempted
        # has a reservation for its maximum length.
        candidates = [
            sample
            for sample in self.running
            if sample.num_preemptions < MAX_PREEMPTIONS and sample.prompt.is_ready
        ]
        return max(
            candidates,
            key=lambda sample: (
                positions_of_owner[sample.request.op.owner],
                _arrival(sample),
            ),
        )

    def preempt(self, sample: RunningSample) -> None:
        """Remove a sample from the batch until there is memory for it again."""
        self.finish(sample)
        sample.num_preemptions += 1
        self.preempted.append(sample)

    def finish(self, sample: RunningSample) -> None:
        """Remove a sample from the batch and end its reservation."""
        self.running.remove(sample)
        self.reservations.remove_sample(sample)
        sample.prompt.num_pending_samples -= 1

    def release(self, prompt: Prompt) -> None:
        """Remove a prompt that no sample or response needs and end its reservation."""
        self.prompts.remove(prompt)
        self.reservations.remove_prompt(prompt)

    def withdraw(self, request: Request) -> list[RunningSample]:
        """Withdraw a request that was cancelled or failed, and return its running samples.

        The caller must call `finish` for each of these samples.
        """
        self.preempted = [sample for sample in self.preempted if sample.request is not request]
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
        prompt = next((p for p in self.prompts if _can_share(p, request)), None)
        if prompt is None:
            length, reservations = len(request.tokens), self.reservations
            positions = reservations.num_prompt_positions(length)
            if request.num_samples:
                capacity = reservations.first_capacity(request, length)
                positions += reservations.num_sample_positions(capacity, request.is_constrained)
                if len(self.running) >= self.max_batch:
                    return False
            if not reservations.fits(positions):
                return False
            scores_request = request if request.prompt_scores else None
            prompt = self._add_prompt(request, request.input, scores_request)
            new_prompts.append(prompt)
        prompt.num_pending_samples += request.num_samples or 1
        request.prompt = prompt
        return True

    def _add_prompt(
        self, request: Request, model_input: InputTokens, scores_request: Request | None
    ) -> Prompt:
        prompt = Prompt(model_input, request.cache_namespace, request.weights, scores_request)
        self.reservations.add_prompt(prompt)
        self.prompts.append(prompt)
        return prompt

    def _resume(self, sample: RunningSample, new_prompts: list[Prompt]) -> bool:
        """Let a preempted sample continue a prompt with its own tokens, and return whether it fits.

        The prompt ends before the sample's last token, which goes through the decoder in the next
        decoding step.
        """
        request, num_prefilled = sample.request, max(0, len(sample.tokens) - 1)
        length, reservations = len(request.tokens) + num_prefilled, self.reservations
        capacity = reservations.first_capacity(request, length, sample)
        positions = reservations.num_prompt_positions(length)
        positions += reservations.num_sample_positions(capacity, request.is_constrained)
        if len(self.running) >= self.max_batch or not reservations.fits(positions):
            return False
        model_input = request.input.extended(sample.tokens[:num_prefilled])
        prompt = self._add_prompt(request, model_input, None)
        new_prompts.append(prompt)
        prompt.num_pending_samples = 1
        sample.prompt, sample.num_prefilled_tokens = prompt, num_prefilled
        self.preempted.remove(sample)
        reservations.add_sample(sample, capacity)
        self.running.append(sample)
        return True

    def _start_samples(self, request: Request) -> None:
        """Start as many of the request's samples as fit."""
        assert request.prompt is not None
        while (
            request.num_started_samples < request.num_samples and len(self.running) < self.max_batch
        ):
            index, prompt = request.num_started_samples, request.prompt
            capacity = self.reservations.first_capacity(request, prompt.length)
            if not self.reservations.fits(
                self.reservations.num_sample_positions(capacity, request.is_constrained)
            ):
                return
            stream = UniformStream(request.seed, index)
            grammar = (
                request.make_grammar_state() if request.make_grammar_state is not None else None
            )
            sample = RunningSample(request, index, prompt, stream, grammar)
            self.reservations.add_sample(sample, capacity)
            self.running.append(sample)
            request.num_started_samples += 1

    def _awaits_shared_prefix(self, request: Request, cache: PrefixCache[Any]) -> bool:
        """Return whether a prompt in prefill will soon provide a longer cached prefix.

        The request then waits for that prompt instead of computing the same prefix again.
        """
        in_prefill = [
            p
            for p in self.prompts
            if not p.is_ready and p.cache_namespace == request.cache_namespace
        ]
        if not in_prefill or any(_can_share(p, request) for p in in_prefill):
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


def _with_whole_blocks(prompt: Prompt, count: int, max_count: int) -> int:
    """Return a number of next tokens of a prompt that does not divide an image's block.

    It is at most `count` if there are tokens before the block. Otherwise it includes the whole
    block, or is 0 if the block has more than `max_count` tokens.
    """
    start = prompt.num_computed_tokens
    for block_start, block_stop in prompt.input.blocks:
        if block_start < start + count < block_stop or block_start <= start < block_stop:
            whole = block_stop - start
            if count >= whole:
                continue
            if block_start > start:
                return block_start - start
            return whole if whole <= max_count else 0
    return count


def _can_share(prompt: Prompt, request: Request) -> bool:
    """Return whether the request can share this prompt."""
    unscored = prompt.scores_request is None and request.prompt_scores is None
    return (
        unscored
        and prompt.cache_namespace == request.cache_namespace
        and prompt.tokens == request.tokens
    )


def _arrival(sample: RunningSample) -> tuple[int, int]:
    """Return a key that sorts samples by the arrival of their requests."""
    return sample.request.number, sample.index
