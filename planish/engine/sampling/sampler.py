"""The sampler of one base model and its adapters: continuous batching over shared prompts.

Each step has four parts. It admits the requests that fit, and it prefills a limited number of
prompt tokens. It samples the first tokens of the prompts that are ready. Then one decoder pass
samples one token for every running sample of every adapter.

Rows are grouped by adapter. Samples of one prompt share its keys and values. Prompts with a common
prefix compute that prefix only once.

Deterministic mode is batch-invariant: the bits of a sample's tokens and logprobs do not depend on
the rest of the batch or on the prefix cache. For this, torch's matmuls are padded to row counts at
which they are batch-invariant on this machine (see probe.py). Attention adds its terms in the
order of positions (see ordered_attention.py). The trainer follows the same two rules, so it
reproduces the sampler's logprobs.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.detokenizer import Detokenizer
from planish.engine.constraints.cache import GrammarCache
from planish.engine.constraints.grammar import GrammarState, wait_for_masks
from planish.engine.release_memory import clear_frames
from planish.engine.sampling.adjustments import Adjustment, is_adjusted, sample_batch
from planish.engine.sampling.cuda_graph_runner import CudaGraphRunner
from planish.engine.sampling.model_runner import EagerRunner, InputBatch
from planish.engine.sampling.prefix_cache import PrefixCache
from planish.engine.sampling.prompt_scores import (
    MAX_SCORED_ROWS,
    PromptScores,
    wants_prompt_scores,
)
from planish.engine.sampling.sampling_head import RowLayout, SamplingHead
from planish.engine.sampling.scheduler import Prompt, Request, RunningSample, Scheduler
from planish.engine.sampling.stopping import StopCondition
from planish.engine.sampling.token_sampling import sample_tokens, top_logprobs
from planish.engine.sampling.validation import check_sample, max_tokens_of
from planish.errors import NonFiniteError, UserError
from planish.model.decoder import Decoder
from planish.model.delta_net import (
    RecurrentState,
    StateSegment,
    sampling_workspace_bytes,
    state_bytes,
)
from planish.model.head import token_logprobs
from planish.model.kernels.backend import Backend
from planish.model.kernels.reference.adapter_stacks import shape_of
from planish.model.kv_cache import (
    GappedKVPool,
    KVBudget,
    KVPool,
    KVPools,
    PrefillSpan,
    SlotOwner,
    max_pool_bytes,
)
from planish.model.lora import AdapterRange, LoraWeights
from planish.model.positions import CHUNK, SPAN, STATE_CHUNK, grown_capacity, sample_capacity
from planish.model.transfer import on_device
from planish.service import Sample, SampledToken, TextEnd
from planish.types import SampledSequence, SampleResponse, TopkLogprobs

_MAX_MASK_WAIT_SECONDS = 0.02
"""The maximum time that a step waits for the grammar masks of constrained samples. A sample whose
mask is still missing gets no token in this step, so that other samples do not wait any longer.
"""
_MAX_FORCED_WAIT_SECONDS, _MAX_FORCED_WAIT_SAMPLES = 0.002, 16
"""The limits of the wait for forced tokens before a decoding step. Forced tokens are the tokens
that a grammar determines completely, so they are not sampled. The grammar's process computes them
together with the mask. If masks of at most _MAX_FORCED_WAIT_SAMPLES samples are pending, the step
waits for these masks up to _MAX_FORCED_WAIT_SECONDS. The step then decodes their forced tokens too.
If more masks are pending, the step does not wait, because the processes would need longer than
that.
"""
_NO_TOKENS = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class _CachedChunk:
    """One chunk of a cached prefix."""

    keys: Tensor
    """The keys [layers, heads, chunk, head_dim]. `values` has the same shape."""
    values: Tensor
    hidden: Tensor
    """The final hidden states [chunk, D]. They give the logprobs of a cached prefix without another
    prefill.
    """
    state: RecurrentState | None
    """The recurrent state after the chunk; None if the model has none."""


@dataclass(slots=True)
class _TokenToSample:
    """A token to sample, or a forced token to take, in one step."""

    sample: RunningSample
    row: int
    """The batch row whose logits the token is sampled from."""
    index: int
    """The token's index within its sample."""
    adjustment: Adjustment | None = None
    """How the logits are adjusted first. None: the logits are used as they are."""


@dataclass(frozen=True)
class SamplerSettings:
    """The memory and batch limits of one sampler.

    The defaults here suit a CPU. memory.py has the defaults for a GPU and for little memory.
    """

    kv_cache_bytes: int = 4 << 30
    """The maximum bytes that running requests may reserve for keys and values. The KV
    pools may allocate one eighth more for freed slots (see `max_pool_bytes`).
    """
    prefix_cache_bytes: int = 1 << 30
    """The maximum bytes of the prefix cache, in addition to `kv_cache_bytes`."""
    max_batch: int = 256
    """The maximum number of samples that run at the same time."""
    max_prefill_tokens_per_step: int = 2048
    """The maximum number of prompt tokens that one step prefills."""

    def workspace_bytes(self, backend: Backend) -> int:
        """Estimate the workspace of one step, in bytes.

        The workspace has the activations of prompts, the attention scores, and the logits that
        tokens are sampled from. It does not include the KV cache.
        """
        config = backend.config
        # There are three float32 logits tensors: the logits of the step, the copy that tokens are
        # sampled from, and the logits of the prompts' last positions.
        logits_bytes = 3 * 4 * config.vocab_size * max(self.max_batch, MAX_SCORED_ROWS)
        query_size, kv_size = (
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        )
        mlp_size = 3 * config.intermediate_size
        if config.num_experts:
            # Each token is computed by several experts, so the experts' inputs and outputs have one
            # row per pair of a token and one of its experts.
            expert_size = 3 * config.expert_size + 3 * config.hidden_size
            experts_size = config.experts_per_token * expert_size
            if config.has_shared_expert:
                mlp_size += experts_size
            else:
                mlp_size = max(mlp_size if config.dense_layers else 0, experts_size)
        values_per_token = 4 * config.hidden_size + 3 * query_size + 4 * kv_size + mlp_size
        return (
            logits_bytes
            + backend.workspace_bytes
            + self.max_prefill_tokens_per_step
            * (8 * config.hidden_size + backend.dtype.itemsize * values_per_token)
            + sampling_workspace_bytes(
                config, backend.dtype, self.max_batch, self.max_prefill_tokens_per_step
            )
        )


class Sampler:
    """A sampler for one base model and any number of its adapters.

    All methods except `validate` must be called from one thread.
    """

    def __init__(
        self,
        decoder: Decoder,
        settings: SamplerSettings,
        decode_text: Callable[[Sequence[int]], str],
        grammars: GrammarCache | None = None,
        shares_prefixes: bool = False,
        vocabulary_entry: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        """Create a sampler. It is deterministic (batch-invariant) if the decoder's backend is.

        `decode_text` turns tokens into text, to look for stop strings. `vocabulary_entry` returns
        the raw vocabulary entry of a token (see `Detokenizer`). Requests with a constraint need
        `grammars`. With `shares_prefixes`, requests of different owners (`Sample.cache_owner`) use
        each other's cached prefixes.
        """
        self._shares_prefixes = shares_prefixes
        self._grammars = grammars
        self._decoder = decoder
        self._detokenizer = Detokenizer(decode_text, vocabulary_entry)
        self._backend = decoder.backend
        self._head = SamplingHead(decoder)
        self._kv_spec = decoder.backend.kv_spec
        self._runner: EagerRunner | CudaGraphRunner
        if CudaGraphRunner.supports(decoder):
            self._runner = CudaGraphRunner(
                decoder, self._kv_spec, settings.max_batch, settings.max_prefill_tokens_per_step
            )
        else:
            self._runner = EagerRunner(decoder, self._head)
        self.settings = settings
        self._state_bytes = state_bytes(decoder.config, decoder.dtype)
        self._chunk_size = self._prefix_chunk_size()
        self._scheduler = self._make_scheduler()
        self._make_pools()
        hidden_bytes = decoder.config.hidden_size * decoder.dtype.itemsize
        chunk_bytes = (self._kv_spec.bytes_per_position + hidden_bytes) * self._chunk_size
        self._prefix_cache: PrefixCache[_CachedChunk] = PrefixCache(
            self._chunk_size, settings.prefix_cache_bytes // (chunk_bytes + self._state_bytes)
        )
        self._recurrent_states: dict[Prompt | RunningSample, RecurrentState] = {}
        """The recurrent states of active prompts and of samples after their first token. The states
        of prompts are never changed in place.
        """
        self._next_states: dict[RunningSample, RecurrentState] = {}
        """The second state of constrained samples. If a step begins before the mask of a sample is
        computed, it writes the new state here. If the mask is late, the next step can then decode
        the same token again from the old state.
        """
        self._chunk_states: dict[Prompt, list[RecurrentState]] = {}
        """For each prompt in prefill, the recurrent state after each complete chunk. The entry is
        removed when the prompt is ready.
        """
        self._chunk_hidden: dict[Prompt, list[Tensor]] = {}
        """For each prompt in prefill, the final hidden states of each complete chunk. The entry is
        removed when the prompt is ready.
        """
        self._last_hidden: dict[Prompt, Tensor] = {}
        """The hidden state [1, D] of each ready prompt's last token."""
        self._requests: list[Request] = []
        self._next_request_number = 0
        self._next_prefill_time = 0.0
        """When the next prompts may be prefilled (perf_counter). While requests of several owners
        are open, at most half of the time is spent on prompts, so that the requests of one owner do
        not hold up the samples of another.
        """

    def _prefix_chunk_size(self) -> int:
        """Return the number of positions in one prefix cache entry."""
        if not self._state_bytes:
            return CHUNK
        # A step must be able to prefill a whole chunk.
        largest_chunk = self.settings.max_prefill_tokens_per_step // CHUNK * CHUNK
        return min(STATE_CHUNK, max(CHUNK, largest_chunk))

    def _make_scheduler(self) -> Scheduler:
        bytes_per_position = self._kv_spec.bytes_per_position
        return Scheduler(
            self.settings.max_batch,
            self.settings.kv_cache_bytes // bytes_per_position,
            self.settings.max_prefill_tokens_per_step,
            self._chunk_size,
            -(-self._state_bytes // bytes_per_position),
        )

    def record_cuda_graphs(self) -> None:
        """Record the CUDA graphs of decoding steps if this model uses them, else do nothing."""
        if isinstance(self._runner, CudaGraphRunner):
            self._runner.record()

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return self._scheduler.busy

    def validate(self, op: Sample) -> None:
        """Raise UserError if the model or the KV cache cannot serve the request.

        This method may be called from any thread.
        """
        check_sample(op, self._decoder.config)
        prompt_length, max_tokens = op.prompt.length, max_tokens_of(op, self._decoder.config)
        constraint = op.sampling_params.constraint
        positions = self._scheduler.num_needed_positions(
            prompt_length, max_tokens, constraint is not None
        )
        if positions > self._scheduler.max_positions:
            raise UserError(
                f"a prompt of {prompt_length} tokens with max_tokens={max_tokens} needs "
                f"{positions * self._kv_spec.bytes_per_position:,} bytes for keys and values, more "
                f"than the limit kv_cache_bytes={self.settings.kv_cache_bytes:,}; "
                "lower max_tokens or raise kv_cache_bytes"
            )
        if constraint is not None:
            if self._grammars is None:
                raise UserError("SamplingParams.constraint needs a tokenizer; leave it out")
            self._grammars.check(constraint, op.cache_owner)

    def submit(
        self,
        op: Sample,
        weights: LoraWeights | None,
        version: Hashable,
        future: Future[SampleResponse],
    ) -> None:
        """Queue a validated request. Its response is set on `future`.

        To withdraw the request, cancel `future`.

        `version` identifies the weights in the prefix cache. `weights` is None for the base model.
        """
        tokens = op.prompt.to_ints()
        params = op.sampling_params
        make_grammar_state = None
        if params.constraint is not None and self._grammars is not None:
            make_grammar_state = partial(
                self._grammars.new_state, params.constraint, op.cache_owner
            )
        seed = params.seed if params.seed is not None else secrets.randbits(64)
        request = Request(
            op=op,
            number=self._next_request_number,
            tokens=tokens,
            is_adjusted=is_adjusted(params),
            max_tokens=max_tokens_of(op, self._decoder.config),
            weights=weights,
            cache_namespace=(version, "" if self._shares_prefixes else op.cache_owner),
            stop_condition=StopCondition.from_params(
                params, self._decoder.config.eos_token_ids, self._detokenizer
            ),
            seed=seed,
            prompt_scores=PromptScores(op, tokens, seed, self._backend)
            if wants_prompt_scores(op)
            else None,
            make_grammar_state=make_grammar_state,
            future=future,
        )
        self._next_request_number += 1
        self._requests.append(request)
        self._scheduler.waiting.append(request)

    @torch.inference_mode()
    def step(self) -> None:
        """Start the requests that fit, prefill prompts, and sample the next tokens."""
        self._drop_finished_requests()
        start_time = perf_counter()
        has_prefilled = (
            start_time >= self._next_prefill_time or not self._scheduler.has_several_owners
        ) and self._prefill_step()
        if has_prefilled:
            end_time = perf_counter()
            self._next_prefill_time = end_time + (end_time - start_time)
        decoding_samples = [sample for sample in self._scheduler.running if sample.tokens]
        # The runner decodes every sample that has a slot. This includes a sample whose mask is
        # missing: its logits are discarded, and a later step decodes it again.
        if decoding_samples and not all(sample.awaits_mask for sample in decoding_samples):
            self._decode(decoding_samples)
        elif not has_prefilled:
            # No sample can be decoded now, so prefilling a prompt would not delay any sample.
            self._next_prefill_time = 0.0
            self._wait_for_masks()
        if not self.busy:
            self._runner.release_adapters()

    def _prefill_step(self) -> bool:
        """Start the requests that fit, prefill prompts, and sample their first tokens. Return
        whether there was anything to do.
        """
        new_prompts = self._scheduler.admit(self._prefix_cache)
        self._prompt_pools.ensure_free_slots(prompt.capacity for prompt in new_prompts)
        for prompt in new_prompts:
            self._allocate_prompt(prompt)
        batch = self._scheduler.prefill_batch()
        if batch:
            self._prefill(batch)
        new_samples = [
            sample
            for sample in self._scheduler.running
            if not sample.tokens and sample.prompt.is_ready and not sample.awaits_mask
        ]
        if new_samples:
            self._sample_first_tokens(new_samples)
        return bool(new_samples or batch)

    def evict_prefixes(self, version: Hashable) -> None:
        """Free the cached prefixes of a version of the weights that is no longer in use."""
        self._prefix_cache.evict(lambda key: key[0] == version)

    def abort_all(self, error: Exception) -> None:
        """Fail every request with `error` and reset the scheduler and the pools.

        The engine calls this method when it closes, and after an exception in `step`, which may
        leave the scheduler or the pools inconsistent.
        """
        requests, self._requests = self._requests, []
        self._scheduler = self._make_scheduler()
        self._make_pools()
        for per_prompt in (
            self._last_hidden,
            self._chunk_hidden,
            self._recurrent_states,
            self._next_states,
            self._chunk_states,
        ):
            per_prompt.clear()
        for request in requests:
            request.fail(error)

    def _make_pools(self) -> None:
        pool_class = GappedKVPool if isinstance(self._runner, CudaGraphRunner) else KVPool
        self._kv_budget = KVBudget(
            max_pool_bytes(self.settings.kv_cache_bytes) // self._kv_spec.bytes_per_position
        )
        self._prompt_pools, self._sample_pools = (
            KVPools(self._kv_spec, pool_class, self._kv_budget) for _ in range(2)
        )

    # Prompts

    def _allocate_prompt(self, prompt: Prompt) -> None:
        """Assign a slot to a new prompt and fill it with the cached prefix."""
        pool = self._prompt_pools.pool_for(prompt.capacity)
        pool.allocate(prompt)
        cached_chunks = (
            self._prefix_cache.find(prompt.cache_namespace, prompt.tokens)
            if not prompt.num_alt_tokens
            else []
        )
        request = prompt.scores_request
        first_scored_chunk = (
            len(cached_chunks)
            if request is None or request.prompt_scores is None
            else request.prompt_scores.first_position // self._chunk_size
        )
        # Cached positions that need scores are all scored in this step, while other requests wait.
        # So their number is limited to `max_prefill_tokens_per_step`. The rest of the cache hit is
        # discarded, and later steps prefill those positions again.
        cached_chunks = cached_chunks[
            : first_scored_chunk + self.settings.max_prefill_tokens_per_step // self._chunk_size
        ]
        if cached_chunks:
            pool.write(
                prompt.slot,
                0,
                (
                    torch.cat([chunk.keys for chunk in cached_chunks], 2),
                    torch.cat([chunk.values for chunk in cached_chunks], 2),
                ),
            )
        hidden = self._chunk_hidden[prompt] = [chunk.hidden for chunk in cached_chunks]
        if self._state_bytes:
            states = [chunk.state for chunk in cached_chunks if chunk.state is not None]
            self._chunk_states[prompt] = states
            self._recurrent_states[prompt] = states[-1] if states else self._new_state()
        if request is not None and hidden[first_scored_chunk:]:
            self._add_prompt_scores(
                request,
                first_scored_chunk * self._chunk_size,
                torch.cat(hidden[first_scored_chunk:]),
            )
        prompt.num_computed_tokens = prompt.num_cached_tokens = (
            len(cached_chunks) * self._chunk_size
        )

    def _new_state(self) -> RecurrentState:
        """Return the recurrent state before position 0."""
        config = self._decoder.config.delta_net
        assert config is not None
        return RecurrentState(config, self._decoder.dtype, self._decoder.device)

    def _prefill_state_segments(self, prompt: Prompt, row: int, count: int) -> list[StateSegment]:
        """Split the next `count` positions of a prompt into segments for the recurrent layers.

        The first of these positions is at batch row `row`, and the others follow. Return an empty
        list if the model has no recurrent state.

        Each segment ends at the end of a chunk, or at the last of these positions.
        `_recurrent_states` receives the state after the last segment. `_chunk_states` receives the
        state after each complete chunk, up to as many chunks as the prefix cache can hold.
        """
        if not self._state_bytes:
            return []
        start, stop = prompt.num_computed_tokens, prompt.num_computed_tokens + count
        first_boundary = (start // self._chunk_size + 1) * self._chunk_size
        ends = [*range(first_boundary, stop, self._chunk_size), stop]
        state_segments, chunk_states = [], self._chunk_states[prompt]
        for end in ends:
            next_state = self._new_state()
            state_segments.append(
                StateSegment(row, row + end - start, self._recurrent_states[prompt], next_state)
            )
            self._recurrent_states[prompt] = next_state
            if (
                end % self._chunk_size == 0
                and end // self._chunk_size <= self._prefix_cache.capacity
            ):
                chunk_states.append(next_state)
            row, start = row + end - start, end
        return state_segments

    def _prefill(self, batch: list[tuple[Prompt, int]]) -> None:
        """Compute the next `count` tokens of each (prompt, count) in one decoder pass."""
        batch = sorted(batch, key=lambda item: id(item[0].weights))
        layout = RowLayout([(prompt.weights, count) for prompt, count in batch])
        tokens, positions = [0] * layout.num_rows, [0] * layout.num_rows
        spans, state_segments = [], []
        for (prompt, count), row in zip(batch, layout.first_rows, strict=True):
            start = prompt.num_computed_tokens
            state_segments += self._prefill_state_segments(prompt, row, count)
            tokens[row : row + count] = prompt.tokens[start : start + count]
            positions[row : row + count] = range(start, start + count)
            spans.append(
                PrefillSpan(
                    self._prompt_pools.pool_for(prompt.capacity), prompt.slot, row, start, count
                )
            )
        recurrence = self._backend.sequence_recurrence(state_segments, layout.num_rows)
        hidden = self._runner.prefill(InputBatch(tokens, positions, layout, recurrence), spans)
        for (prompt, count), row in zip(batch, layout.first_rows, strict=True):
            self._add_hidden_states(prompt, hidden[row : row + count])

    def _add_hidden_states(self, prompt: Prompt, hidden: Tensor) -> None:
        """Record newly computed hidden states [count, D] of a prompt.

        A prompt that is complete now is added to the prefix cache.
        """
        request = prompt.scores_request
        if request is not None:
            self._add_prompt_scores(request, prompt.num_computed_tokens, hidden)
        chunk_hidden = self._chunk_hidden[prompt]
        chunk_size = self._chunk_size
        chunk_hidden += [
            chunk.clone() for chunk in hidden.split(chunk_size) if len(chunk) == chunk_size
        ]
        prompt.num_computed_tokens += hidden.shape[0]
        if not prompt.is_ready:
            return
        del self._chunk_hidden[prompt]
        self._last_hidden[prompt] = hidden[-1:].clone()
        tokens, states = prompt.tokens, self._chunk_states.pop(prompt, [])
        if self._state_bytes:
            # A chunk is of no use in the cache without its recurrent state, so only the chunks with
            # a kept state are added.
            tokens = tokens[: len(states) * chunk_size]
        missing_chunks = self._prefix_cache.missing_chunks(prompt.cache_namespace, tokens)
        pool = self._prompt_pools.pool_for(prompt.capacity)
        chunks = [
            _CachedChunk(
                *pool.read(prompt.slot, i * chunk_size, (i + 1) * chunk_size),
                chunk_hidden[i],
                states[i] if states else None,
            )
            for i in missing_chunks
        ]
        self._prefix_cache.add(prompt.cache_namespace, tokens, chunks)
        if request is not None and not request.num_samples:
            prompt.num_pending_samples -= 1
            self._deliver_response(request)
            self._release_unused_prompts([prompt])

    def _add_prompt_scores(self, request: Request, start: int, hidden: Tensor) -> None:
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

    def _release_unused_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Free the slots of all `prompts` that no sample or response needs any more."""
        unused = [
            p
            for p in dict.fromkeys(prompts)
            if p.num_pending_samples == 0 and p in self._scheduler.prompts
        ]
        _free_slots(self._prompt_pools, unused)
        for prompt in unused:
            self._scheduler.release(prompt)
            self._last_hidden.pop(prompt, None)
            self._chunk_hidden.pop(prompt, None)
            self._recurrent_states.pop(prompt, None)
            self._chunk_states.pop(prompt, None)

    # Samples

    def _sample_first_tokens(self, samples: list[RunningSample]) -> None:
        """Sample the first token of each sample from its prompt's last hidden state.

        The LM head runs once per prompt, not once per sample.
        """
        samples = sorted(samples, key=lambda s: (id(s.prompt.weights), id(s.prompt)))
        prompts = list(dict.fromkeys(sample.prompt for sample in samples))
        layout = RowLayout([(prompt.weights, 1) for prompt in prompts])
        hidden = torch.zeros(
            layout.num_rows,
            self._decoder.config.hidden_size,
            dtype=self._decoder.dtype,
            device=self._decoder.device,
        )
        row_of_prompt = dict(zip(prompts, layout.first_rows, strict=True))
        for prompt in prompts:
            hidden[row_of_prompt[prompt]] = self._last_hidden[prompt][0]
        logits = self._head.logits(hidden, layout.adapters)
        rows = [row_of_prompt[sample.prompt] for sample in samples]
        self._sample_tokens(samples, rows, hidden, logits, layout.adapters)

    def _decode(self, samples: list[RunningSample]) -> None:
        """Run each sample's last token through the decoder and sample its next token.

        The forced tokens of a sample's grammar go through the decoder in the same step.
        """
        self._set_row_counts(samples)
        self._ensure_slots(samples)
        rows_per_adapter: Counter[LoraWeights | None] = Counter()
        for sample in samples:
            rows_per_adapter[sample.prompt.weights] += sample.num_rows
        row_multiple = self._runner.row_multiple(len(rows_per_adapter))

        def batch_order(sample: RunningSample) -> tuple[Any, ...]:
            weights = sample.prompt.weights
            return (
                shape_of(weights),
                -rows_per_adapter[weights] // row_multiple,
                id(weights),
                sample.capacity,
                sample.slot,
            )

        # Adapters that can share a batched matmul become neighbours. The rows of an adapter are in
        # the order of their slots. Attention can then read adjacent slots without copying them.
        samples = sorted(samples, key=batch_order)
        layout = RowLayout(
            [(sample.prompt.weights, sample.num_rows) for sample in samples], row_multiple
        )
        tokens, positions = [0] * layout.num_rows, [0] * layout.num_rows
        row_counts: dict[SlotOwner, int] = {}
        for sample, row in zip(samples, layout.first_rows, strict=True):
            tokens[row] = sample.tokens[-1]
            positions[row] = sample.position
            if sample.num_rows > 1:
                stop = row + sample.num_rows
                tokens[row + 1 : stop] = sample.forced_tokens[: sample.num_rows - 1]
                positions[row + 1 : stop] = range(
                    sample.position + 1, sample.position + sample.num_rows
                )
                row_counts[sample] = sample.num_rows
        first_rows: dict[SlotOwner, int] = dict(zip(samples, layout.first_rows, strict=True))
        segments = self._decode_state_segments(samples, layout.first_rows)
        recurrence = self._backend.sequence_recurrence(segments, layout.num_rows)
        hidden, logits = self._runner.decode(
            InputBatch(tokens, positions, layout, recurrence),
            first_rows,
            self._prompt_pools,
            self._sample_pools,
            row_counts,
        )
        self._sample_tokens(samples, layout.first_rows, hidden, logits, layout.adapters)
        self._use_next_states(samples, segments)

    def _use_next_states(
        self, samples: Sequence[RunningSample], segments: Sequence[StateSegment]
    ) -> None:
        """Let each sample that has got a token continue from its new state."""
        for sample, segment in zip(samples, segments, strict=bool(segments)):
            is_late = sample.grammar is not None and sample.grammar.is_late
            is_running = sample in self._recurrent_states
            if segment.final_state is not segment.initial_state and is_running and not is_late:
                self._recurrent_states[sample] = segment.final_state
                self._next_states[sample] = segment.initial_state

    def _set_row_counts(self, samples: Sequence[RunningSample]) -> None:
        """Set the number of rows of each sample in the next decoding step.

        Forced tokens add rows only while the whole step has at most `max_batch` rows.
        """
        constrained = [sample for sample in samples if sample.grammar is not None]
        pending = [s.grammar for s in constrained if s.grammar and not s.grammar.is_ready]
        if 0 < len(pending) <= _MAX_FORCED_WAIT_SAMPLES:
            wait_for_masks(pending, _MAX_FORCED_WAIT_SECONDS, for_all=True)
        for sample in samples:
            sample.num_rows = 1
        rows_left = self.settings.max_batch - len(samples)
        for sample in constrained:
            tokens_left = sample.request.max_tokens - len(sample.tokens) - 1
            num_forced = min(len(sample.forced_tokens), tokens_left, rows_left)
            sample.num_rows, rows_left = 1 + num_forced, rows_left - num_forced

    def _decode_state_segments(
        self, samples: Sequence[RunningSample], first_rows: Sequence[int]
    ) -> list[StateSegment]:
        """Return the segments of a decoding step, one per sample.

        Each segment updates the recurrent state of its sample in place, or writes to `_next_states`
        if the sample's mask is not computed yet. `first_rows`: the first row of each sample.
        """
        if not self._state_bytes:
            return []
        segments = []
        for sample, row in zip(samples, first_rows, strict=True):
            if sample not in self._recurrent_states:
                self._recurrent_states[sample] = self._recurrent_states[sample.prompt].copy()
            state = final_state = self._recurrent_states[sample]
            if sample.grammar is not None and not sample.grammar.is_ready:
                if sample not in self._next_states:
                    self._next_states[sample] = self._new_state()
                final_state = self._next_states[sample]
            segments.append(StateSegment(row, row + sample.num_rows, state, final_state))
        return segments

    def _ensure_slots(self, samples: list[RunningSample]) -> None:
        """Ensure that each sample has a slot with space for the keys and values of its rows.

        A sample's first slot also receives a copy of the keys and values of the prompt's last
        `length % SPAN` positions. Samples share only whole spans of SPAN prompt positions.
        """
        needed_capacities = [(sample, self._needed_capacity(sample)) for sample in samples]
        needed_capacities = [
            (sample, capacity)
            for sample, capacity in needed_capacities
            if capacity > sample.capacity
        ]
        if self._kv_budget.fits(sum(capacity for _, capacity in needed_capacities)):
            self._grow_slots(needed_capacities)
            return
        # A sample being moved occupies its old and its new slot at the same time. Memory is short
        # here, so one eighth of the samples move at a time.
        self._grow_slots(
            [(sample, capacity) for sample, capacity in needed_capacities if not sample.capacity]
        )
        moving = [(sample, capacity) for sample, capacity in needed_capacities if sample.capacity]
        size = max(1, len(moving) // 8)
        for first in range(0, len(moving), size):
            self._grow_slots(moving[first : first + size])

    def _grow_slots(self, needed_capacities: list[tuple[RunningSample, int]]) -> None:
        """Move each sample to a new slot of the given capacity, or assign its first slot."""
        self._sample_pools.ensure_free_slots(
            needed_capacity for _, needed_capacity in needed_capacities
        )
        new_groups: dict[tuple[int, int], list[RunningSample]] = {}
        moved_groups: dict[tuple[int, int], list[RunningSample]] = {}
        for sample, needed_capacity in needed_capacities:
            if sample.capacity:
                moved_groups.setdefault((needed_capacity, sample.capacity), []).append(sample)
            else:
                self._sample_pools.pool_for(needed_capacity).allocate(sample)
                new_groups.setdefault((needed_capacity, sample.prompt.capacity), []).append(sample)
            sample.capacity = needed_capacity
        for (capacity, old_capacity), group in moved_groups.items():
            self._sample_pools.pool_for(old_capacity).move(
                group, self._sample_pools.pool_for(capacity)
            )
        for (capacity, prompt_capacity), group in new_groups.items():
            lengths = [sample.prompt.length for sample in group]
            self._sample_pools.pool_for(capacity).copy_from(
                self._prompt_pools.pool_for(prompt_capacity),
                [sample.prompt.slot for sample in group],
                [length - length % SPAN for length in lengths],
                [sample.slot for sample in group],
                max(length % SPAN for length in lengths),
            )

    def _needed_capacity(self, sample: RunningSample) -> int:
        """Return the capacity of the slot that the sample needs for its next rows.

        On a CPU a slot grows with its sample. A slot of the final size would not take much memory
        at first, because the operating system provides memory only for positions that are written.
        But moving or clearing a slot writes all of its positions, also those that the sample never
        reaches.

        On a GPU the sample gets its final slot at once, because a move would take more kernel
        launches than a decoding step.
        """
        limit = sample_capacity(sample.prompt.length, sample.request.max_tokens)
        if self._backend.uses_main_memory:
            return grown_capacity(sample.stored + sample.num_rows, limit)
        return limit

    def _sample_tokens(
        self,
        samples: list[RunningSample],
        rows: list[int],
        hidden: Tensor,
        logits: Tensor,
        adapters: list[AdapterRange],
    ) -> None:
        """Sample one token for each of `samples`, append it, and finish samples that stop.

        Sample i has the rows rows[i] .. rows[i] + num_rows - 1 of `hidden` and `logits`. All but
        the last row give the logprobs of forced tokens, which are appended too. A logprob that is
        not finite fails its request.
        """
        tokens, exhausted_samples = self._tokens_to_sample(samples, rows)
        ended_samples = self._sample_and_append(tokens, hidden, logits, adapters) if tokens else []
        for sample in exhausted_samples:
            if sample.stop_reason is None:
                sample.stop_reason = "stop"
                ended_samples.append(sample)
        self._remove_samples(ended_samples)
        for sample in ended_samples:
            self._finish_sample(sample)

    def _sample_and_append(
        self,
        tokens: Sequence[_TokenToSample],
        hidden: Tensor,
        logits: Tensor,
        adapters: list[AdapterRange],
    ) -> list[RunningSample]:
        """Sample the tokens and append them to their samples. Return the samples that stop."""
        params = [token.sample.request.op.sampling_params for token in tokens]
        uniforms = [token.sample.uniform_stream.at(token.index) for token in tokens]
        rows = [token.row for token in tokens]
        adjustments = {
            i: token.adjustment for i, token in enumerate(tokens) if token.adjustment is not None
        }
        if adjustments:
            sampled = sample_batch(self._backend, logits, params, uniforms, rows, adjustments)
        else:
            sampled = sample_tokens(self._backend, logits, params, uniforms, rows)
        sampled_logits = self._head.sampled_logits(hidden, logits, rows, sampled.tokens, adapters)
        temperature = on_device(
            [p.temperature or 1.0 for p in params], torch.float32, logits.device
        )
        logprobs = token_logprobs(sampled_logits / temperature, sampled.log_normalizer).tolist()
        listed_values = self._head.listed_logprobs(
            hidden,
            logits,
            rows,
            [token.sample.request.op.logprob_token_ids for token in tokens],
            sampled.log_normalizer,
            temperature,
            adapters,
        )
        max_topk = max(token.sample.request.op.topk_sample_logprobs for token in tokens)
        if max_topk and rows != list(range(logits.shape[0])):
            logits = logits[on_device(rows, torch.int64, logits.device)]
        top_tensors = (
            top_logprobs(logits, sampled.log_normalizer, temperature, max_topk)
            if max_topk
            else None
        )
        top_ids, top_values = (
            (top_tensors[0].tolist(), top_tensors[1].tolist()) if top_tensors else ([], [])
        )
        stopped_samples: list[RunningSample] = []
        grammar_tokens: list[tuple[GrammarState, int]] = []
        for i, (token_id, logprob) in enumerate(
            zip(sampled.tokens.tolist(), logprobs, strict=True)
        ):
            sample = tokens[i].sample
            if sample.stop_reason is not None:
                continue  # The sample stopped at one of its forced tokens.
            if not math.isfinite(logprob):
                # Only this request fails: the rows of a batch are independent, so the NaN or inf
                # cannot have reached the other rows.
                sample.request.fail(_non_finite_error(sample.request.op.sampler_id))
                continue
            listed_ids = sample.request.op.logprob_token_ids
            k = sample.request.op.topk_sample_logprobs
            sample.tokens.append(token_id)
            sample.logprobs.append(logprob)
            if listed_ids:
                sample.top_logprobs.append(([*listed_ids], listed_values[i]))
            elif k:
                sample.top_logprobs.append((top_ids[i][:k], top_values[i][:k]))
            try:
                text_end = sample.stop_matcher.text_end(sample.tokens)
            except Exception as error:
                # The tokenizer failed on these tokens, which belong to this request alone.
                sample.request.fail(error)
                continue
            if text_end is not None:
                sample.stop_reason = "stop"
            elif len(sample.tokens) == sample.request.max_tokens:
                sample.stop_reason = "length"
            if sample.request.op.on_token is not None:
                _call_on_token(sample, text_end, sample.request.op.on_token)
            if sample.stop_reason is not None:
                stopped_samples.append(sample)
            elif sample.grammar is not None:
                if adjustments[i].forced_token is None:
                    grammar_tokens.append((sample.grammar, token_id))
                else:
                    del sample.grammar.forced_tokens[0]
        if grammar_tokens and self._grammars is not None:
            self._grammars.advance(grammar_tokens)
        return stopped_samples

    def _tokens_to_sample(
        self, samples: list[RunningSample], rows: list[int]
    ) -> tuple[list[_TokenToSample], list[RunningSample]]:
        """Return the tokens to sample in this step, and the exhausted samples.

        Sample i has the rows rows[i] .. rows[i] + num_rows - 1. A sample with forced tokens has
        several tokens. Samples whose mask is missing, and samples whose grammar failed, have none.
        The text of an exhausted sample is complete and cannot be continued.
        """
        pending_states = [
            s.grammar for s in samples if s.grammar is not None and not s.grammar.is_ready
        ]
        if pending_states:
            on_time = [state for state in pending_states if not state.is_late]
            wait_for_masks(on_time, _MAX_MASK_WAIT_SECONDS, for_all=True)
        tokens: list[_TokenToSample] = []
        exhausted_samples: list[RunningSample] = []
        for sample, row in zip(samples, rows, strict=True):
            index = len(sample.tokens)
            if not sample.request.is_adjusted:
                tokens.append(_TokenToSample(sample, row, index))
                continue
            if sample.grammar is not None and not _has_usable_mask(sample, sample.grammar):
                continue
            # Each row of the sample gives the logprob of one token. If the mask was computed during
            # this step, there may be more forced tokens than rows. The sample then takes one forced
            # token per row, and later steps take the others.
            forced_tokens = sample.forced_tokens[: sample.num_rows]
            for number, token in enumerate(forced_tokens):
                adjustment = Adjustment(None, _NO_TOKENS, (), token)
                tokens.append(_TokenToSample(sample, row + number, index + number, adjustment))
            if len(forced_tokens) == sample.num_rows:
                continue
            row, index = row + len(forced_tokens), index + len(forced_tokens)
            allowed_bits = self._allowed_tokens(sample, index)
            if allowed_bits is None and sample.grammar is not None:
                exhausted_samples.append(sample)
                continue
            penalty = sample.request.op.sampling_params.repetition_penalty
            prompt_tokens = sample.prompt.distinct_tokens if penalty != 1 else _NO_TOKENS
            previous_tokens = [*sample.tokens, *forced_tokens] if forced_tokens else sample.tokens
            adjustment = Adjustment(allowed_bits, prompt_tokens, previous_tokens)
            tokens.append(_TokenToSample(sample, row, index, adjustment))
        return tokens, exhausted_samples

    def _allowed_tokens(self, sample: RunningSample, token_index: int) -> np.ndarray | None:
        """Return the tokens that may become token number `token_index` (see `Adjustment.allowed`).

        For a sample without a constraint, None means that all tokens are allowed. For a sample with
        a constraint, None means that no token is allowed. This happens if the text is complete, the
        grammar allows no further text, and the request has no stop tokens.
        """
        vocab_size = self._decoder.config.vocab_size
        may_stop = token_index >= sample.request.op.sampling_params.min_tokens
        if sample.grammar is None:
            return sample.request.allowed_bits(vocab_size, may_stop)
        stop_tokens = sample.request.stop_bits(vocab_size)
        mask = sample.grammar.mask
        assert mask is not None
        if not may_stop:
            others = mask.bits & ~stop_tokens
            if others.any():
                return others
        if mask.is_complete and sample.request.stop_condition.token_ids:
            return mask.bits | stop_tokens
        return None if mask.is_empty else mask.bits

    def _wait_for_masks(self) -> None:
        """Wait a moment for the masks of samples that cannot run without them."""
        states = [s.grammar for s in self._scheduler.running if s.grammar and s.awaits_mask]
        if states:
            wait_for_masks(states, _MAX_MASK_WAIT_SECONDS)

    def _finish_sample(self, sample: RunningSample) -> None:
        """Build the sample's sequence. Deliver the response after the last one."""
        assert sample.stop_reason is not None
        request = sample.request
        k = request.op.num_scored_tokens
        top = None
        if k:
            top = TopkLogprobs(
                np.array([ids for ids, _ in sample.top_logprobs], np.int32).reshape(-1, k),
                np.array([values for _, values in sample.top_logprobs], np.float32).reshape(-1, k),
            )
        request.sequences[sample.index] = SampledSequence(
            stop_reason=sample.stop_reason,
            sequence_id=f"{request.op.sampler_id}:{request.number}:{sample.index}",
            tokens_np=np.array(sample.tokens, np.int32),
            logprobs_np=np.array(sample.logprobs, np.float32),
            topk_logprobs_np=top,
        )
        if len(request.sequences) == request.num_samples:
            self._deliver_response(request)

    def _remove_samples(self, samples: Sequence[RunningSample]) -> None:
        """Remove samples from the batch and free their slots and unused prompts."""
        _free_slots(self._sample_pools, [sample for sample in samples if sample.capacity])
        for sample in samples:
            self._scheduler.finish(sample)
            self._recurrent_states.pop(sample, None)
            self._next_states.pop(sample, None)
        self._release_unused_prompts([sample.prompt for sample in samples])

    def _deliver_response(self, request: Request) -> None:
        """Set the response on the request's future."""
        scores = request.prompt_scores
        assert request.prompt is not None
        response = SampleResponse(
            sequences=[request.sequences[i] for i in range(request.num_samples)],
            prompt_logprobs_np=scores.logprobs if scores else None,
            topk_prompt_logprobs_np=scores.top_logprobs if scores else None,
            target_prompt_logprobs=scores.target_logprobs if scores else None,
            prompt_alt_tokens=scores.alternatives if scores else None,
            prompt_cache_hit_tokens=request.prompt.num_cached_tokens,
        )
        self._requests.remove(request)
        if request.claim_response():
            request.future.set_result(response)

    def _drop_finished_requests(self) -> None:
        """Remove the requests whose futures are done: cancelled requests and failed requests."""
        for request in [request for request in self._requests if request.future.done()]:
            # Without this call, concurrent.futures.wait() would never see a cancellation.
            request.claim_response()
            self._requests.remove(request)
            self._remove_samples(self._scheduler.withdraw(request))
            if request.prompt is not None:
                self._release_unused_prompts([request.prompt])


def _free_slots(pools: KVPools, owners: Sequence[Prompt] | Sequence[RunningSample]) -> None:
    """Remove all owners from their pools with one call per pool.

    Removing the owners one by one could move slots or copy the pool each time.
    """
    by_capacity: dict[int, list[Prompt | RunningSample]] = {}
    for owner in owners:
        by_capacity.setdefault(owner.capacity, []).append(owner)
    for capacity, owners_of_capacity in by_capacity.items():
        pools.pool_for(capacity).free(*owners_of_capacity)


def _has_usable_mask(sample: RunningSample, grammar: GrammarState) -> bool:
    """Return whether the sample's next mask is computed. An error fails the sample's request."""
    grammar.is_late = not grammar.is_ready
    if grammar.error is not None and not grammar.is_late:
        sample.request.fail(grammar.error)
        return False
    return not grammar.is_late


def _call_on_token(
    sample: RunningSample, text_end: TextEnd | None, on_token: Callable[[SampledToken], None]
) -> None:
    """Call `on_token` with the sample's newest token. `text_end` is where the text ends, if the
    token ends it.

    An exception in the callback fails this request only, not the batch.
    """
    if sample.request.future.done():
        return
    top = list(zip(*sample.top_logprobs[-1], strict=True)) if sample.top_logprobs else []
    num_unsettled = 0 if sample.stop_reason else sample.stop_matcher.num_unsettled(sample.tokens)
    token, logprob = sample.tokens[-1], sample.logprobs[-1]
    try:
        on_token(SampledToken(sample.index, token, logprob, top, num_unsettled, text_end))
    except BaseException as error:  # asyncio.CancelledError does not derive from Exception.
        sample.request.fail(error)


def _non_finite_error(sampler_id: str) -> NonFiniteError:
    return NonFiniteError(
        f"sampler_id={sampler_id!r}: the logits are not finite, so no token can be sampled. The "
        "sampler's weights are too large; load an earlier checkpoint and lower learning_rate"
    )
