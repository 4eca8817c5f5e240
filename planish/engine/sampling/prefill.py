"""The prefill of prompts: from the cached prefix to the hidden state of the last token.

A prompt starts with the chunks of its prefix that are in the prefix cache. Each step then computes
some of its remaining tokens. A complete prompt is added to the prefix cache. The scores that a
request wants of its prompt are computed along the way.
"""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planish.engine.release_memory import clear_frames
from planish.engine.sampling.plan import RowLayout, StepPlan
from planish.engine.sampling.prefix_cache import PrefixCache
from planish.engine.sampling.requests import Prompt, PromptTensors, Request
from planish.engine.sampling.sampling_head import SamplingHead
from planish.engine.sampling.settings import SamplerSettings
from planish.engine.sampling.slots import Slots
from planish.model.decoder.base_decoder import BaseDecoder
from planish.model.layers.lora import AdapterRange
from planish.model.layers.recurrence import RecurrentState, StateSegment, state_bytes
from planish.model.sequences.kv_cache import KVChunk, PrefillSpan
from planish.model.sequences.positions import CHUNK, STATE_CHUNK


@dataclass(frozen=True, eq=False)
class CachedChunk:
    """One chunk of a cached prefix."""

    keys_values: KVChunk
    """The keys and values of the chunk's positions."""
    hidden: Tensor
    """The final hidden states [chunk, D]. They give the logprobs of a cached prefix without another
    prefill.
    """
    state: RecurrentState | None
    """The recurrent state after the chunk; None if the model has none."""


class Prefill:
    """The prefill of the active prompts of one sampler, with its prefix cache."""

    def __init__(
        self, decoder: BaseDecoder, head: SamplingHead, slots: Slots, settings: SamplerSettings
    ) -> None:
        """Create an empty prefix cache. The keys and values of prompts are in `slots`."""
        self._decoder, self._head, self._slots = decoder, head, slots
        self._max_tokens_per_step = settings.max_prefill_tokens_per_step
        self._state_bytes = state_bytes(decoder.config, decoder.dtype)
        self.chunk_size = self._prefix_chunk_size()
        hidden_bytes = decoder.config.hidden_size * decoder.dtype.itemsize
        chunk_bytes = (slots.spec.bytes_per_position + hidden_bytes) * self.chunk_size
        self.prefix_cache: PrefixCache[CachedChunk] = PrefixCache(
            self.chunk_size, settings.prefix_cache_bytes // (chunk_bytes + self._state_bytes)
        )

    def _prefix_chunk_size(self) -> int:
        """Return the number of positions in one prefix cache entry."""
        if not self._state_bytes:
            return CHUNK
        # A step must be able to prefill a whole chunk.
        return min(STATE_CHUNK, max(CHUNK, self._max_tokens_per_step // CHUNK * CHUNK))

    def start(self, prompts: Sequence[Prompt]) -> None:
        """Assign slots to new prompts and fill them with the cached prefixes."""
        self._slots.allocate(prompts)
        for prompt in prompts:
            self._load_cached_prefix(prompt)

    def _load_cached_prefix(self, prompt: Prompt) -> None:
        cached_chunks = (
            self.prefix_cache.find(prompt.cache_namespace, prompt.tokens)
            if not prompt.num_alt_tokens
            else []
        )
        request = prompt.scores_request
        first_scored_chunk = (
            len(cached_chunks)
            if request is None or request.prompt_scores is None
            else request.prompt_scores.first_position // self.chunk_size
        )
        # Cached positions that need scores are all scored in this step, while other requests wait.
        # So their number is limited to `max_prefill_tokens_per_step`. The rest of the cache hit is
        # discarded, and later steps prefill those positions again.
        cached_chunks = cached_chunks[
            : first_scored_chunk + self._max_tokens_per_step // self.chunk_size
        ]
        if cached_chunks:
            self._slots.write(prompt, [chunk.keys_values for chunk in cached_chunks])
        hidden = [chunk.hidden for chunk in cached_chunks]
        states = [chunk.state for chunk in cached_chunks if chunk.state is not None]
        prompt.tensors = PromptTensors(chunk_hidden=hidden, chunk_states=states)
        if self._state_bytes:
            prompt.tensors.state = states[-1] if states else self._new_state()
        if request is not None and hidden[first_scored_chunk:]:
            self._add_scores(
                request,
                first_scored_chunk * self.chunk_size,
                torch.cat(hidden[first_scored_chunk:]),
            )
        prompt.num_computed_tokens = prompt.num_cached_tokens = len(cached_chunks) * self.chunk_size

    def plan(self, batch: Sequence[tuple[Prompt, int]]) -> StepPlan:
        """Plan a pass that computes the next `count` tokens of each (prompt, count).

        The prompts of each adapter must be neighbours.
        """
        layout = RowLayout([(prompt.weights, count) for prompt, count in batch])
        tokens, positions = [0] * layout.num_rows, [0] * layout.num_rows
        spans: list[PrefillSpan] = []
        state_segments: list[StateSegment] = []
        for (prompt, count), row in zip(batch, layout.first_rows, strict=True):
            start = prompt.num_computed_tokens
            if self._state_bytes:
                state_segments += self._state_segments(prompt, row, count)
            tokens[row : row + count] = prompt.tokens[start : start + count]
            positions[row : row + count] = range(start, start + count)
            spans.append(self._slots.prefill_span(prompt, row, count))
        rope_positions = _with_images(positions, batch, layout)
        backend = self._decoder.backend
        recurrence = backend.sequence_recurrence(state_segments, layout.num_rows)
        return StepPlan(tokens, rope_positions, layout, spans, recurrence)

    def _state_segments(self, prompt: Prompt, row: int, count: int) -> list[StateSegment]:
        """Split the next `count` positions of a prompt into segments for the recurrent layers.

        The first of these positions is at batch row `row`, and the others follow. Each segment ends
        at the end of a chunk, or at the last of these positions. `prompt.tensors` receives the
        state after the last segment, and the state after each complete chunk, up to as many chunks
        as the prefix cache can hold.
        """
        start, stop = prompt.num_computed_tokens, prompt.num_computed_tokens + count
        first_boundary = (start // self.chunk_size + 1) * self.chunk_size
        ends = [*range(first_boundary, stop, self.chunk_size), stop]
        state_segments: list[StateSegment] = []
        for end in ends:
            state, next_state = prompt.tensors.state, self._new_state()
            assert state is not None
            state_segments.append(StateSegment(row, row + end - start, state, next_state))
            prompt.tensors.state = next_state
            if end % self.chunk_size == 0 and end // self.chunk_size <= self.prefix_cache.capacity:
                prompt.tensors.chunk_states.append(next_state)
            row, start = row + end - start, end
        return state_segments

    def _new_state(self) -> RecurrentState:
        """Return the recurrent state before position 0."""
        config = self._decoder.config.recurrence
        assert config is not None
        return RecurrentState(config, self._decoder.dtype, self._decoder.device)

    def apply(self, prompt: Prompt, hidden: Tensor) -> None:
        """Record newly computed hidden states [count, D] of a prompt.

        A prompt that is complete now is added to the prefix cache.
        """
        request, tensors = prompt.scores_request, prompt.tensors
        if request is not None:
            self._add_scores(request, prompt.num_computed_tokens, hidden)
        prompt.num_computed_tokens += hidden.shape[0]
        if tensors.rest_hidden is not None:
            hidden = torch.cat([tensors.rest_hidden, hidden])
        chunks = [chunk.clone() for chunk in hidden.split(self.chunk_size)]
        tensors.rest_hidden = chunks.pop() if len(chunks[-1]) < self.chunk_size else None
        tensors.chunk_hidden += chunks
        if prompt.is_ready:
            prompt.tensors = PromptTensors(last_hidden=hidden[-1:].clone(), state=tensors.state)
            self._add_to_prefix_cache(prompt, tensors)

    def _add_to_prefix_cache(self, prompt: Prompt, tensors: PromptTensors) -> None:
        """Add the chunks of a complete prompt to the prefix cache."""
        tokens, states, chunk_size = prompt.tokens, tensors.chunk_states, self.chunk_size
        if self._state_bytes:
            # A chunk is of no use in the cache without its recurrent state, so only the chunks with
            # a kept state are added.
            tokens = tokens[: len(states) * chunk_size]
        missing_chunks = self.prefix_cache.missing_chunks(prompt.cache_namespace, tokens)
        chunks = [
            CachedChunk(
                self._slots.read(prompt, i * chunk_size, (i + 1) * chunk_size),
                tensors.chunk_hidden[i],
                states[i] if states else None,
            )
            for i in missing_chunks
        ]
        self.prefix_cache.add(prompt.cache_namespace, tokens, chunks)

    def _add_scores(self, request: Request, start: int, hidden: Tensor) -> None:
        """Compute the prompt scores that the request wants at positions start .. start + R - 1.

        `hidden` [R, D] has the hidden states of these positions. An error fails this request only.
        """
        if request.prompt_scores is None:
            return
        weights, head = request.weights, self._head
        try:
            request.prompt_scores.add(
                start,
                hidden,
                lambda h: head.logits(h, [AdapterRange(0, len(h), weights)]),
                lambda h, rows, ids: head.token_logits(
                    h, rows, ids, [AdapterRange(0, len(h), weights)]
                ),
            )
        except Exception as error:
            # This request may run out of memory because it wants unusually many scores. The batch's
            # other requests continue.
            clear_frames(error)
            request.fail(error)


def _with_images(
    positions: list[int], batch: Sequence[tuple[Prompt, int]], layout: RowLayout
) -> list[int] | np.ndarray:
    """Return `positions`, or the RoPE positions [3, T] if a prompt has images."""
    if not any(prompt.input.images for prompt, _ in batch):
        return positions
    rope_positions = np.tile(np.array(positions), (3, 1))
    for (prompt, count), row in zip(batch, layout.first_rows, strict=True):
        of_prompt = prompt.input.rope_positions
        if of_prompt is not None:
            start = prompt.num_computed_tokens
            rope_positions[:, row : row + count] = of_prompt[:, start : start + count]
    return rope_positions
