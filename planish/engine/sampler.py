"""Continuous batching: at every step requests may join, prompts are computed, and each running
sample gets one token.

One step admits what fits, computes some rows of new prompts, draws the first tokens of those that
are ready, and then one token for every running sample of every tenant, in one pass of the decoder.
Rows are grouped by adapter; samples of one prompt share its keys and values, prompts with a common
beginning share the computation of it.

Deterministic mode: a sample's tokens and logprobs have the same bits whatever else is in the batch
and whatever the cache holds. Every product then has a number of rows for which this machine's
products are known to give the same bits (see row_tiling.py), and attention sums in the order of
positions (see ordered_attention.py). The trainer does the same, so that it finds the sampler's
logprobs again.
"""

from __future__ import annotations

import math
import os
import secrets
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planish.engine.adapter_stacks import shape_of
from planish.engine.drawing import SORTING_BYTES, draw, top_logprobs
from planish.engine.graph_passes import GraphPasses
from planish.engine.heap import let_go
from planish.engine.kv_cache import GappedKVPool, KVPool, KVPools, KVRoom, KVShape, held_bytes
from planish.engine.native_attention import ATTENDED_ROWS
from planish.engine.passes import Passes, PlainPasses, Rows
from planish.engine.positions import CHUNK, SPAN, grown_capacity, sample_capacity
from planish.engine.prefix_cache import PrefixCache
from planish.engine.prompt_scores import SCORED_ROWS, PromptScores, asked
from planish.engine.row_tiling import RowTiling
from planish.engine.sample_checks import check_sample, max_tokens_of
from planish.engine.sampling_attention import PrefillSpan
from planish.engine.sampling_head import RowLayout, SamplingHead
from planish.engine.scheduler import Prompt, Request, RunningSample, Scheduler
from planish.engine.sending import on_device
from planish.engine.stopping import StopCondition
from planish.errors import NonFiniteError, UserError
from planish.model.config import ModelConfig
from planish.model.decoder import Decoder
from planish.model.lora import AdapterRows, LoraWeights
from planish.service import DrawnToken, Sample
from planish.types import SampledSequence, SampleResponse, TopkLogprobs


@dataclass(frozen=True)
class SamplerSettings:
    """With the defaults of a CPU; memory.py has those of a GPU, and those where memory is short."""

    kv_cache_bytes: int = 4 << 30
    """Most memory that keys and values of running requests may reserve; `held_bytes` of it is what
    they may take.
    """
    prefix_cache_bytes: int = 1 << 30
    """Most memory that known prefixes may take beside that."""
    max_batch: int = 256
    """Most samples that run at once."""
    prefill_tokens: int = 2048
    """Most prompt tokens computed in one step."""

    def step_bytes(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
        """Estimate of what a step takes besides: activations of prompts, the scores of attention,
        and what tokens are drawn from.
        """
        # Float32 logits of the step, those that are drawn from, and those of the prompts' ends.
        drawing = 3 * 4 * config.vocab_size * max(self.max_batch, SCORED_ROWS)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        if device.type == "cpu":  # whose threads are at most as many as it has
            scores = (
                4 * ATTENDED_ROWS * (queries // keys) * config.max_context * (os.cpu_count() or 1)
            )
        else:  # a CPU filters row by row
            scores, drawing = 0, drawing + SORTING_BYTES
        narrow = 4 * config.hidden_size + 3 * queries + 4 * keys + 3 * config.intermediate_size
        return (
            drawing
            + scores
            + self.prefill_tokens * (8 * config.hidden_size + dtype.itemsize * narrow)
        )


class Sampler:
    """Draws from one base model and any number of its adapters. All methods but `validate` belong
    to one thread.
    """

    def __init__(
        self,
        decoder: Decoder,
        settings: SamplerSettings,
        decode_text: Callable[[Sequence[int]], str],
        tiling: RowTiling | None,
    ) -> None:
        """`tiling`: given, the sampler is deterministic."""
        self._decoder = decoder
        self._decode_text = decode_text
        self._tiling = tiling
        self._head = SamplingHead(decoder, tiling)
        self._shape = KVShape.of(decoder.config, decoder.dtype, decoder.device)
        self._passes: Passes
        if tiling is None and GraphPasses.serve(decoder):
            self._passes = GraphPasses(
                decoder, self._shape, settings.max_batch, settings.prefill_tokens
            )
        else:
            self._passes = PlainPasses(decoder, tiling, self._head)
        per_position = self._shape.bytes_per_position
        self._scheduler = Scheduler(
            settings.max_batch, settings.kv_cache_bytes // per_position, settings.prefill_tokens
        )
        self.settings = settings
        self._make_pools()
        hidden_bytes = decoder.config.hidden_size * decoder.dtype.itemsize
        self._cache: PrefixCache[tuple[Tensor, Tensor, Tensor]] = PrefixCache(
            CHUNK, settings.prefix_cache_bytes // ((per_position + hidden_bytes) * CHUNK)
        )
        """Keys, values, and hidden states [CHUNK, D], from which logprobs of the prompt are made
        without computing it again.
        """
        self._hidden: dict[int, list[Tensor]] = {}
        """Hidden states of each whole chunk of a prompt so far, until it is ready, by id(prompt).
        """
        self._last_hidden: dict[int, Tensor] = {}
        """Hidden state [1, D] of each ready prompt's last token, by id(prompt)."""
        self._requests: list[Request] = []
        self._count = 0

    def record(self) -> None:
        """Record the CUDA graphs of decoding steps, on a GPU whose kernels serve; else nothing."""
        if isinstance(self._passes, GraphPasses):
            self._passes.record()

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    def validate(self, op: Sample) -> None:
        """UserError if the request cannot be served. May be called from any thread."""
        check_sample(op, self._decoder.config)
        tokens, max_tokens = op.prompt.length, max_tokens_of(op, self._decoder.config)
        needed = self._scheduler.positions_needed(tokens, max_tokens)
        if needed > self._scheduler.max_positions:
            raise UserError(
                f"a prompt of {tokens} tokens with max_tokens={max_tokens} needs "
                f"{needed * self._shape.bytes_per_position:,} bytes of keys and values, and kv_cache_bytes="
                f"{self.settings.kv_cache_bytes:,}; lower max_tokens or raise kv_cache_bytes"
            )

    def submit(
        self,
        op: Sample,
        weights: LoraWeights | None,
        version: Hashable,
        future: Future[SampleResponse],
    ) -> None:
        """Queue a validated request; its answer goes to `future`, whose cancellation withdraws it."""
        tokens = op.prompt.to_ints()
        params = op.sampling_params
        seed = params.seed if params.seed is not None else secrets.randbits(64)
        request = Request(
            op=op,
            number=self._count,
            tokens=tokens,
            max_tokens=max_tokens_of(op, self._decoder.config),
            weights=weights,
            version=version,
            stop=StopCondition.of(params.stop, self._decoder.config.eos_token_ids),
            seed=seed,
            scores=PromptScores(op, tokens, seed) if asked(op) else None,
            future=future,
        )
        self._count += 1
        self._requests.append(request)
        self._scheduler.waiting.append(request)

    @torch.inference_mode()
    def step(self) -> None:
        """Advance every running request by one token, and start what fits."""
        self._drop_ended()
        admitted = self._scheduler.admit(self._cache)
        self._prompts.reserve(prompt.capacity for prompt in admitted)
        for prompt in admitted:
            self._place(prompt)
        batch = self._scheduler.prefill_batch()
        if batch:
            self._prefill(batch)
        fresh = [
            sample
            for sample in self._scheduler.running
            if not sample.tokens and sample.prompt.ready
        ]
        if fresh:
            self._draw_first(fresh)
        going = [sample for sample in self._scheduler.running if sample.tokens]
        if going:
            self._decode(going)
        if not self.busy:
            self._passes.rest()

    def forget(self, version: Hashable) -> None:
        """Free the cached prefixes of a version that nobody will ask for again."""
        self._cache.forget(version)

    def fail(self, error: Exception) -> None:
        """Answer every request with `error` and start afresh; after a fault in `step`, whose state
        cannot be trusted.
        """
        requests, self._requests = self._requests, []
        settings = self._scheduler
        self._scheduler = Scheduler(
            settings.max_batch, settings.max_positions, settings.prefill_tokens
        )
        self._make_pools()
        self._last_hidden.clear()
        self._hidden.clear()
        for request in requests:
            request.fail(error)

    def _make_pools(self) -> None:
        kind = GappedKVPool if isinstance(self._passes, GraphPasses) else KVPool
        self._room = KVRoom(
            held_bytes(self.settings.kv_cache_bytes) // self._shape.bytes_per_position
        )
        self._prompts, self._samples = (KVPools(self._shape, kind, self._room) for _ in range(2))

    # Prompts

    def _place(self, prompt: Prompt) -> None:
        """Give a new prompt its slot, with what the cache knows of it."""
        pool = self._prompts.of(prompt.capacity)
        pool.add(prompt)
        known = self._cache.find(prompt.version, prompt.tokens) if not prompt.draws else []
        request = prompt.scored_for
        first = (
            len(known)
            if request is None or request.scores is None
            else request.scores.begins // CHUNK
        )
        # What is asked about is answered at once, and others wait for it: of a long prompt the rest
        # is computed again, a step at a time.
        known = known[: first + self.settings.prefill_tokens // CHUNK]
        if known:
            keys, values = (torch.cat([chunk[part] for chunk in known], 2) for part in (0, 1))
            pool.write(prompt.slot, 0, (keys, values))
        hidden = self._hidden[id(prompt)] = [chunk[2] for chunk in known]
        if request is not None and hidden[first:]:
            self._score(request, first * CHUNK, torch.cat(hidden[first:]))
        prompt.computed = prompt.cached = len(known) * CHUNK

    def _prefill(self, batch: list[tuple[Prompt, int]]) -> None:
        batch = sorted(batch, key=lambda item: id(item[0].weights))
        layout = RowLayout([(prompt.weights, count) for prompt, count in batch], self._tiling)
        tokens, positions = [0] * layout.total, [0] * layout.total
        spans = []
        for (prompt, count), row in zip(batch, layout.starts, strict=True):
            start = prompt.computed
            tokens[row : row + count] = prompt.tokens[start : start + count]
            positions[row : row + count] = range(start, start + count)
            spans.append(
                PrefillSpan(self._prompts.of(prompt.capacity), prompt.slot, row, start, count)
            )
        hidden = self._passes.prefill(Rows(tokens, positions, layout), spans)
        for (prompt, count), row in zip(batch, layout.starts, strict=True):
            self._computed(prompt, hidden[row : row + count])

    def _computed(self, prompt: Prompt, hidden: Tensor) -> None:
        """`hidden` [count, D] are the next rows of the prompt."""
        request = prompt.scored_for
        if request is not None:
            self._score(request, prompt.computed, hidden)
        known = self._hidden[id(prompt)]
        known += [chunk.clone() for chunk in hidden.split(CHUNK) if len(chunk) == CHUNK]
        prompt.computed += hidden.shape[0]
        if not prompt.ready:
            return
        del self._hidden[id(prompt)]
        self._last_hidden[id(prompt)] = hidden[-1:].clone()
        missing = self._cache.missing(prompt.version, prompt.tokens)
        pool = self._prompts.of(prompt.capacity)
        chunks = [(*pool.read(prompt.slot, i * CHUNK, (i + 1) * CHUNK), known[i]) for i in missing]
        self._cache.add(prompt.version, prompt.tokens, chunks)
        if request is not None and not request.num_samples:
            prompt.waiting -= 1
            self._deliver(request)
            self._release_unused([prompt])

    def _score(self, request: Request, start: int, hidden: Tensor) -> None:
        """Answer what the request asks of its prompt's positions start, start + 1, ..., whose
        hidden states [R, D] these are.
        """
        if request.scores is None:
            return
        weights, head = request.weights, self._head
        try:
            request.scores.add(
                start,
                hidden,
                lambda h: head.logits(h, [AdapterRows(0, len(h), weights)]),
                lambda h, rows, ids: head.exact(h, rows, ids, [AdapterRows(0, len(h), weights)]),
            )
        except Exception as error:  # memory, for instance, for more than others ask for
            let_go(error)
            request.fail(error)

    def _release_unused(self, prompts: Sequence[Prompt]) -> None:
        """Those of these that nobody waits for."""
        unused = [
            p for p in dict.fromkeys(prompts) if p.waiting == 0 and p in self._scheduler.prompts
        ]
        _remove(self._prompts, unused)
        for prompt in unused:
            self._scheduler.release(prompt)
            self._last_hidden.pop(id(prompt), None)
            self._hidden.pop(id(prompt), None)

    # Samples

    def _draw_first(self, samples: list[RunningSample]) -> None:
        """The first token of each sample, from its prompt's last hidden state; the head runs once a
        prompt.
        """
        samples = sorted(samples, key=lambda s: (id(s.prompt.weights), id(s.prompt)))
        prompts = list({id(sample.prompt): sample.prompt for sample in samples}.values())
        layout = RowLayout([(prompt.weights, 1) for prompt in prompts], self._tiling)
        hidden = torch.zeros(
            layout.total,
            self._decoder.config.hidden_size,
            dtype=self._decoder.dtype,
            device=self._decoder.device,
        )
        row_of = {id(prompt): row for prompt, row in zip(prompts, layout.starts, strict=True)}
        for prompt in prompts:
            hidden[row_of[id(prompt)]] = self._last_hidden[id(prompt)][0]
        logits = self._head.logits(hidden, layout.adapters)
        self._draw(
            samples,
            [row_of[id(sample.prompt)] for sample in samples],
            hidden,
            logits,
            layout.adapters,
        )

    def _decode(self, samples: list[RunningSample]) -> None:
        """One more token for each: its last token goes through the decoder."""
        self._make_room(samples)
        rows_of = Counter(sample.prompt.weights for sample in samples)
        multiple = self._passes.multiple(len(rows_of))

        def place(sample: RunningSample) -> tuple[Any, ...]:
            weights = sample.prompt.weights
            return (
                shape_of(weights),
                -rows_of[weights] // multiple,
                id(weights),
                sample.capacity,
                sample.slot,
            )

        # Adapters that can share products are neighbours; within one, rows are in the order of the
        # slots: attention then reads them in place.
        samples = sorted(samples, key=place)
        layout = RowLayout(
            [(sample.prompt.weights, 1) for sample in samples], self._tiling, multiple
        )
        tokens, positions = [0] * layout.total, [0] * layout.total
        for sample, row in zip(samples, layout.starts, strict=True):
            tokens[row] = sample.tokens[-1]
            positions[row] = sample.position
        rows = {id(sample): row for sample, row in zip(samples, layout.starts, strict=True)}
        hidden, logits = self._passes.decode(
            Rows(tokens, positions, layout), rows, self._prompts, self._samples
        )
        self._draw(samples, layout.starts, hidden, logits, layout.adapters)

    def _make_room(self, samples: list[RunningSample]) -> None:
        """Room for the keys of each sample's last token; at first, also a copy of its prompt's
        last, unfinished span.
        """
        needs = [(sample, self._room_for(sample)) for sample in samples]
        needs = [(sample, need) for sample, need in needs if need > sample.capacity]
        if self._room.has(sum(need for _, need in needs)):
            self._give_room(needs)
            return
        # Who moves has two slots while it does: where memory is short, an eighth of them at a time.
        self._give_room([(sample, need) for sample, need in needs if not sample.capacity])
        moving = [(sample, need) for sample, need in needs if sample.capacity]
        for first in range(0, len(moving), size := max(1, len(moving) // 8)):
            self._give_room(moving[first : first + size])

    def _give_room(self, needs: list[tuple[RunningSample, int]]) -> None:
        """Slots of these capacities."""
        self._samples.reserve(need for _, need in needs)
        fresh: dict[tuple[int, int], list[RunningSample]] = {}
        grown: dict[tuple[int, int], list[RunningSample]] = {}
        for sample, need in needs:
            if sample.capacity:
                grown.setdefault((need, sample.capacity), []).append(sample)
            else:
                self._samples.of(need).add(sample)
                fresh.setdefault((need, sample.prompt.capacity), []).append(sample)
            sample.capacity = need
        for (capacity, source), same in grown.items():
            self._samples.of(source).move(same, self._samples.of(capacity))
        for (capacity, source), same in fresh.items():
            lengths = [sample.prompt.length for sample in same]
            self._samples.of(capacity).copy(
                [sample.slot for sample in same],
                self._prompts.of(source),
                [sample.prompt.slot for sample in same],
                [length - length % SPAN for length in lengths],
                max(length % SPAN for length in lengths),
            )

    def _room_for(self, sample: RunningSample) -> int:
        """Return the capacity of the slot that the sample needs for its next position.

        On a CPU a slot grows with its sample, because memory costs nothing until it is touched. On
        a GPU the sample gets its final slot at once, because a move takes more launches than a step.
        """
        limit = sample_capacity(sample.prompt.length, sample.request.max_tokens)
        if self._decoder.device.type == "cpu":
            return grown_capacity(sample.stored + 1, limit)
        return limit

    def _draw(
        self,
        samples: list[RunningSample],
        rows: list[int],
        hidden: Tensor,
        logits: Tensor,
        adapters: list[AdapterRows],
    ) -> None:
        """Draw from row rows[i] of hidden and logits for samples[i], and note what came out."""
        params = [sample.request.op.sampling_params for sample in samples]
        drawn = draw(
            logits, params, [sample.stream.at(len(sample.tokens)) for sample in samples], rows
        )
        exact = self._head.drawn(hidden, logits, rows, drawn.tokens, adapters)
        temperature = on_device(
            [p.temperature or 1.0 for p in params], torch.float32, logits.device
        )
        logprobs = (exact / temperature - drawn.log_normalizer).tolist()
        most = max(sample.request.op.topk_sample_logprobs for sample in samples)
        if most and rows != list(range(logits.shape[0])):
            logits = logits[on_device(rows, torch.int64, logits.device)]
        tops = top_logprobs(logits, drawn.log_normalizer, temperature, most) if most else None
        top_ids, top_values = (tops[0].tolist(), tops[1].tolist()) if tops else ([], [])
        done: list[RunningSample] = []
        for i, (sample, token, logprob) in enumerate(
            zip(samples, drawn.tokens.tolist(), logprobs, strict=True)
        ):
            if not math.isfinite(logprob):
                # Others of its batch have rows of their own.
                sample.request.fail(_not_finite(sample.request.op.sampler_id))
                continue
            k = sample.request.op.topk_sample_logprobs
            sample.tokens.append(token)
            sample.logprobs.append(min(logprob, 0.0))
            if k:
                sample.top.append((top_ids[i][:k], top_values[i][:k]))
            if sample.request.op.on_token is not None:
                _tell(sample, sample.request.op.on_token)
            try:
                if self._stopped(sample) or len(sample.tokens) == sample.request.max_tokens:
                    done.append(sample)
            except Exception as error:
                # of the tokenizer: the text of these tokens is this request's alone
                sample.request.fail(error)
        self._take_out(done)
        for sample in done:
            self._finish(sample)

    def _stopped(self, sample: RunningSample) -> bool:
        return sample.request.stop.met(sample.tokens, self._decode_text)

    def _finish(self, sample: RunningSample) -> None:
        request = sample.request
        k = request.op.topk_sample_logprobs
        top = TopkLogprobs(
            np.array([ids for ids, _ in sample.top], np.int32),
            np.array([values for _, values in sample.top], np.float32),
        )
        request.sequences[sample.index] = SampledSequence(
            stop_reason="stop" if self._stopped(sample) else "length",
            sequence_id=f"{request.op.sampler_id}:{request.number}:{sample.index}",
            tokens_np=np.array(sample.tokens, np.int32),
            logprobs_np=np.array(sample.logprobs, np.float32),
            topk_logprobs_np=top if k else None,
        )
        if len(request.sequences) == request.num_samples:
            self._deliver(request)

    def _take_out(self, samples: Sequence[RunningSample]) -> None:
        _remove(self._samples, [sample for sample in samples if sample.capacity])
        for sample in samples:
            self._scheduler.finish(sample)
        self._release_unused([sample.prompt for sample in samples])

    def _deliver(self, request: Request) -> None:
        scores = request.scores
        assert request.prompt is not None
        response = SampleResponse(
            sequences=[request.sequences[i] for i in range(request.num_samples)],
            prompt_logprobs_np=scores.logprobs if scores else None,
            topk_prompt_logprobs_np=scores.top if scores else None,
            target_prompt_logprobs=scores.targets if scores else None,
            prompt_alt_tokens=scores.alternatives if scores else None,
            prompt_cache_hit_tokens=request.prompt.cached,
        )
        self._requests.remove(request)
        if request.claim():
            request.future.set_result(response)

    def _drop_ended(self) -> None:
        """Take out what was cancelled or has failed alone."""
        for request in [request for request in self._requests if request.future.done()]:
            request.claim()  # tells those who wait for several futures that this one was cancelled
            self._requests.remove(request)
            self._take_out(self._scheduler.withdraw(request))
            if request.prompt is not None:
                self._release_unused([request.prompt])


def _remove(pools: KVPools, owners: Sequence[Prompt] | Sequence[RunningSample]) -> None:
    """At once: one by one, each would close a gap or copy its pool."""
    by_capacity: dict[int, list[Prompt | RunningSample]] = {}
    for owner in owners:
        by_capacity.setdefault(owner.capacity, []).append(owner)
    for capacity, some in by_capacity.items():
        pools.of(capacity).remove(*some)


def _tell(sample: RunningSample, on_token: Callable[[DrawnToken], None]) -> None:
    """Hand on the newest token. An error of the listener's is the end of its own request, not of
    the batch.
    """
    if sample.request.future.done():
        return
    top = list(zip(*sample.top[-1], strict=True)) if sample.top else []
    try:
        on_token(DrawnToken(sample.index, sample.tokens[-1], sample.logprobs[-1], top))
    except BaseException as error:  # asyncio's CancelledError is no Exception
        sample.request.fail(error)


def _not_finite(sampler_id: str) -> NonFiniteError:
    return NonFiniteError(
        f"sampler_id={sampler_id!r}: its logits are not finite, so no token can be drawn; its weights are too large: "
        "go back to an earlier checkpoint and lower learning_rate"
    )
