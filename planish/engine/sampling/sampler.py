"""The sampler of one base model and its adapters: continuous batching over shared prompts.

Each step has four parts. It admits the requests that fit, and it prefills a limited number of
prompt tokens. It samples the first tokens of the prompts that are ready. Then one decoder pass
samples one token for every running sample of every adapter, or for the samples of some owners
(decoding_turns.py).

Both passes of a step are a plan, a run and an apply. A `StepPlan` (plan.py) has the rows of the
pass. A model runner (model_runner.py) turns the plan into hidden states and logits. Then `Prefill`
(prefill.py) records the hidden states of prompts, and `Selection` (selection.py) appends tokens to
samples. On a GPU, the tokens of a decoding step are appended after the next step was launched
(decoding_steps.py). `OpenRequests` (delivery.py) sends the responses.

Rows are grouped by adapter. Samples of one prompt share its keys and values. Prompts with a common
prefix compute that prefix only once.

Deterministic mode is batch-invariant: the bits of a sample's tokens and logprobs do not depend on
the rest of the batch or on the prefix cache. For this, torch's matmuls are padded to row counts at
which they are batch-invariant on this machine (see probe.py). Attention adds its terms in the
order of positions (see ordered_attention.py). The trainer follows the same two rules, so it
reproduces the sampler's logprobs.
"""

import itertools
import secrets
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from time import perf_counter

import torch

from planish.detokenizer import Detokenizer
from planish.engine.constraints.cache import GrammarCache
from planish.engine.sampling.active_batch import ActiveBatch
from planish.engine.sampling.adjustments import is_adjusted
from planish.engine.sampling.cuda_graph_runner import CudaGraphRunner
from planish.engine.sampling.decoding_steps import DecodingSteps
from planish.engine.sampling.decoding_turns import DecodingTurns
from planish.engine.sampling.delivery import OpenRequests
from planish.engine.sampling.masks import set_row_counts, wait_for_late_masks
from planish.engine.sampling.model_runner import EagerRunner, ModelRunner
from planish.engine.sampling.plan import RowLayout, SampleRows, StepOutput
from planish.engine.sampling.prefill import Prefill
from planish.engine.sampling.prompt_scores import PromptScores, wants_prompt_scores
from planish.engine.sampling.requests import Prompt, Request, RunningSample
from planish.engine.sampling.sampling_head import SamplingHead
from planish.engine.sampling.scheduler import Scheduler
from planish.engine.sampling.selection import Selection
from planish.engine.sampling.settings import SamplerSettings
from planish.engine.sampling.slots import Slots
from planish.engine.sampling.stopping import StopCondition
from planish.engine.sampling.validation import check_sample, max_tokens_of
from planish.errors import UserError
from planish.model.decoder.base_decoder import BaseDecoder
from planish.model.layers.lora import LoraWeights
from planish.model.layers.recurrence import state_bytes
from planish.model.sequences.positions import GPU_BLOCK, SPAN
from planish.model.vision.image_tokens import InputTokens, read_input, with_image_token
from planish.service import Sample
from planish.types import SampleResponse


class Sampler:
    """A sampler for one base model and any number of its adapters.

    All methods except `validate` must be called from one thread.
    """

    def __init__(
        self,
        decoder: BaseDecoder,
        settings: SamplerSettings,
        decode_text: Callable[[Sequence[int]], str],
        grammars: GrammarCache | None = None,
        shares_prefixes: bool = False,
        vocabulary_entry: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        """Create a sampler. It is deterministic (batch-invariant) if the decoder's backend is.

        `decode_text` turns tokens into text, to look for stop strings. `vocabulary_entry` returns
        the raw vocabulary entry of a token (see `Detokenizer`). Requests with a constraint need
        `grammars`. With `shares_prefixes`, requests of different owners (`Sample.owner`) use
        each other's cached prefixes.
        """
        self.settings = settings
        self._shares_prefixes = shares_prefixes
        self._grammars = grammars
        self._decoder = decoder
        self._backend = decoder.backend
        self._detokenizer = Detokenizer(decode_text, vocabulary_entry)
        self._head = SamplingHead(decoder)
        self._runner = _model_runner(decoder, self._head, settings)
        self._slots = Slots(self._backend.kv_spec, settings.kv_cache_bytes, self._runner.pool_class)
        self._prefill = Prefill(decoder, self._head, self._slots, settings)
        self._selection = Selection(decoder, self._head, grammars)
        self._scheduler = _scheduler(decoder, settings, self._prefill.chunk_size)
        self._batch = ActiveBatch(self._scheduler, self._slots)
        self._requests = OpenRequests()
        self._turns = DecodingTurns()
        self._steps = DecodingSteps(
            self._runner, self._slots, self._backend, self._selection, self._turns
        )
        self._request_numbers = itertools.count()
        self.num_preemptions = 0
        """The number of preemptions so far."""
        self._next_prefill_time = 0.0
        """When the next prompts may be prefilled (perf_counter). While requests of several owners
        are open, at most half of the time is spent on prompts, so that the requests of one owner do
        not hold up the samples of another.
        """

    def record_cuda_graphs(self) -> None:
        """Record the CUDA graphs of decoding steps if this model uses them, else do nothing."""
        self._runner.record()

    def disable_cuda_graphs(self) -> bool:
        """Run further decoding steps kernel by kernel. Return whether they were CUDA graphs."""
        return self._runner.disable_graphs()

    @property
    def num_preempted_samples(self) -> int:
        """The number of preempted samples that wait for memory."""
        return len(self._scheduler.preempted)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return self._scheduler.busy

    def validate(self, op: Sample) -> None:
        """Raise UserError if the model or the KV cache cannot serve the request.

        This method may be called from any thread.
        """
        config, model_input = self._decoder.config, read_input(op.prompt, self._decoder.images)
        check_sample(op, model_input, config)
        _check_image_sizes(model_input, self.settings.max_prefill_tokens_per_step)
        prompt_length = len(model_input.tokens)
        max_tokens = max_tokens_of(op, prompt_length, config)
        constraint = op.sampling_params.constraint
        positions = self._scheduler.num_needed_positions(
            prompt_length, max_tokens, constraint is not None
        )
        if positions > self._scheduler.reservations.max_positions:
            raise UserError(
                f"a prompt of {prompt_length} tokens with max_tokens={max_tokens} needs "
                f"{positions * self._slots.spec.bytes_per_position:,} bytes for keys and values, "
                f"more than the limit kv_cache_bytes={self.settings.kv_cache_bytes:,}; lower "
                "max_tokens or raise kv_cache_bytes"
            )
        if constraint is not None:
            if self._grammars is None:
                raise UserError("SamplingParams.constraint needs a tokenizer; leave it out")
            self._grammars.check(constraint, op.owner)

    def submit(
        self,
        op: Sample,
        weights: LoraWeights | None,
        version: Hashable,
        future: Future[SampleResponse],
    ) -> None:
        """Queue a validated request. Its response is set on `future`; cancel it to withdraw the
        request.

        `version` identifies the weights in the prefix cache. `weights` is None for the base model.
        """
        images, params = self._decoder.images, op.sampling_params
        model_input = read_input(op.prompt, images)
        tokens = model_input.tokens
        if images is not None:
            tokens = with_image_token(tokens, images.image_token)
        make_grammar_state = None
        if params.constraint is not None and self._grammars is not None:
            make_grammar_state = partial(self._grammars.new_state, params.constraint, op.owner)
        seed = params.seed if params.seed is not None else secrets.randbits(64)
        request = Request(
            op=op,
            number=next(self._request_numbers),
            input=model_input,
            is_adjusted=is_adjusted(params),
            max_tokens=max_tokens_of(op, len(tokens), self._decoder.config),
            weights=weights,
            cache_namespace=(version, "" if self._shares_prefixes else op.owner),
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
        self._requests.add(request)
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
        decoding_samples = [sample for sample in self._scheduler.running if sample.can_decode]
        # A sample whose mask is missing is decoded too: if the mask is still missing after the
        # pass, the sample's logits are discarded, and a later step decodes it again.
        if decoding_samples and not all(sample.awaits_mask for sample in decoding_samples):
            self._decoding_step(decoding_samples)
        elif self._steps.has_pending_tokens:
            self.finish_step()
        elif not has_prefilled:
            # No sample can be decoded now, so prefilling a prompt would not delay any sample.
            self._next_prefill_time = 0.0
            wait_for_late_masks(self._scheduler.running)
        if not self.busy:
            self._steps.discard_pending_tokens()  # Their samples have ended.
            self._runner.release_adapters()

    def finish_step(self) -> None:
        """Append the pending tokens of the last decoding step. Without such tokens, do nothing."""
        self._end_samples(self._steps.finish())

    def _prefill_step(self) -> bool:
        """Start the requests that fit, prefill prompts, and sample their first tokens. Return
        whether there was anything to do.
        """
        self._prefill.start(self._scheduler.admit(self._prefill.prefix_cache))
        batch = self._scheduler.prefill_batch()
        if batch:
            self._prefill_pass(batch)
        new_samples = [
            sample
            for sample in self._scheduler.running
            if not sample.tokens and sample.prompt.is_ready and not sample.awaits_mask
        ]
        if new_samples:
            self.finish_step()
            self._sample_first_tokens(new_samples)
        return bool(new_samples or batch)

    def _prefill_pass(self, batch: Sequence[tuple[Prompt, int]]) -> None:
        """Compute the next `count` tokens of each (prompt, count) in one decoder pass."""
        batch = sorted(batch, key=lambda item: id(item[0].weights))
        plan = self._prefill.plan(batch)
        hidden = self._runner.run(plan).hidden
        for (prompt, count), row in zip(batch, plan.layout.first_rows, strict=True):
            self._prefill.apply(prompt, hidden[row : row + count])
            request = prompt.scores_request
            if prompt.is_ready and request is not None and not request.num_samples:
                prompt.num_pending_samples -= 1
                self._requests.deliver(request)
                self._batch.release_unused([prompt])

    def _sample_first_tokens(self, samples: Sequence[RunningSample]) -> None:
        """Sample the first token of each sample from its prompt's last hidden state.

        The LM head runs once per prompt, not once per sample.
        """
        samples = sorted(samples, key=lambda s: (id(s.prompt.weights), id(s.prompt)))
        row_of_prompt: dict[Prompt, int] = {}
        for sample in samples:
            row_of_prompt.setdefault(sample.prompt, len(row_of_prompt))
        adapters = RowLayout([(prompt.weights, 1) for prompt in row_of_prompt]).adapters
        hidden = torch.cat([prompt.last_hidden for prompt in row_of_prompt])
        rows = SampleRows(samples, [row_of_prompt[sample.prompt] for sample in samples], adapters)
        output = StepOutput(hidden, self._head.logits(hidden, adapters))
        self._end_samples(self._selection.append(self._selection.select(rows, output)))

    def _decoding_step(self, decoding_samples: Sequence[RunningSample]) -> None:
        """Sample the next token of all of these samples, or of those whose turn it is.

        The last token of each sample goes through the decoder, with the forced tokens of its
        grammar. If the rows do not fit into the KV cache, some running samples are preempted first.
        """
        chosen_samples = self._turns.choose(decoding_samples)
        set_row_counts(chosen_samples, self.settings.max_batch)
        samples = self._preempt_for(chosen_samples)
        if samples:
            is_small = len(chosen_samples) < len(decoding_samples)
            self._end_samples(self._steps.run(samples, is_small))

    def _preempt_for(self, samples: Sequence[RunningSample]) -> Sequence[RunningSample]:
        """Preempt running samples until the next rows of `samples` fit. Return those of `samples`
        that are still running.
        """
        while (victim := self._scheduler.reserve_or_pick_victim(samples)) is not None:
            if self._steps.has_pending_tokens:
                self.finish_step()  # If some samples have ended, perhaps all others fit.
            else:
                self._batch.preempt(victim)
                self.num_preemptions += 1
            # Samples that have ended or were preempted have no reservation.
            samples = [sample for sample in samples if sample.reserved_capacity]
        return samples

    def _end_samples(self, samples: Sequence[RunningSample]) -> None:
        """Remove samples that have ended, and deliver the responses that are complete."""
        self._batch.remove(samples)
        for sample in samples:
            self._requests.finish_sample(sample)

    def _drop_finished_requests(self) -> None:
        """Remove the requests whose futures are done: cancelled requests and failed requests."""
        for request in self._requests.pop_done():
            self._batch.withdraw(request)

    def evict_prefixes(self, version: Hashable) -> None:
        """Free the cached prefixes of a version of the weights that is no longer in use."""
        self._prefill.prefix_cache.evict(lambda key: key[0] == version)

    def abort_all(self, error: Exception) -> None:
        """Fail every request with `error` and reset the scheduler and the KV cache.

        The engine calls this method when it closes, and after an exception in `step`, which may
        leave the scheduler or the slots inconsistent. The tokens of the last step are delivered
        first if they can be.
        """
        with suppress(Exception):
            self.finish_step()
        self._batch.clear()
        self._requests.fail_all(error)


def _check_image_sizes(model_input: InputTokens, max_tokens: int) -> None:
    """Raise UserError if a model that reads an image in one step cannot read one of these."""
    longest = max((stop - start for start, stop in model_input.blocks), default=0)
    if longest > max_tokens:
        raise UserError(
            f"an image has {longest} tokens, and this model reads all of them in one step, of at "
            f"most {max_tokens} tokens; leave the image out, or raise max_prefill_tokens_per_step"
        )


def _scheduler(decoder: BaseDecoder, settings: SamplerSettings, chunk_size: int) -> Scheduler:
    """Return a scheduler for the decoder's KV cache."""
    bytes_per_position = decoder.backend.kv_spec.bytes_per_position
    return Scheduler(
        settings.max_batch,
        settings.kv_cache_bytes // bytes_per_position,
        settings.max_prefill_tokens_per_step,
        chunk_size,
        -(-state_bytes(decoder.config, decoder.dtype) // bytes_per_position),
        SPAN if decoder.backend.uses_main_memory else GPU_BLOCK,
    )


def _model_runner(
    decoder: BaseDecoder, head: SamplingHead, settings: SamplerSettings
) -> ModelRunner:
    """Return the model runner for the decoder's device and kernels."""
    if not CudaGraphRunner.supports(decoder):
        return EagerRunner(decoder, head)
    spec = decoder.backend.kv_spec
    return CudaGraphRunner(decoder, spec, settings.max_batch, settings.max_prefill_tokens_per_step)
