"""The state of a request: the request itself, its prompt and its samples.

These classes hold tensors for other modules, and do not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from planish.engine.sampling.randomness import UniformStream
from planish.engine.sampling.stopping import StopCondition, StopMatcher
from planish.model.sequences.positions import SPAN, capacity_for, sample_capacity
from planish.model.vision.image_tokens import FIRST_IMAGE_TOKEN, InputTokens
from planish.service import Sample
from planish.types import SampledSequence, SampleResponse, StopReason

if TYPE_CHECKING:
    from torch import Tensor

    from planish.engine.constraints.grammar import GrammarState
    from planish.engine.sampling.prompt_scores import PromptScores
    from planish.model.layers.lora import LoraWeights
    from planish.model.layers.recurrence import RecurrentState


@dataclass(eq=False)
class Request:
    """One `Sample` operation and its progress."""

    op: Sample
    number: int
    input: InputTokens
    max_tokens: int
    """The maximum tokens per sample. 0: the request samples nothing and scores its prompt only."""
    weights: LoraWeights | None
    cache_namespace: Hashable
    """The pair (version of the weights, owner) under which the request's prefixes are cached. The
    owner is "" if all owners share prefixes. Requests with different pairs do not share an active
    prompt either. Otherwise a fast response or its count of cached tokens would reveal another
    owner's prompt.
    """
    stop_condition: StopCondition
    seed: int
    prompt_scores: PromptScores | None
    future: Future[SampleResponse]
    is_adjusted: bool = False
    """Whether its tokens are sampled from adjusted logits (see adjustments.py)."""
    make_grammar_state: Callable[[], GrammarState] | None = None
    """Returns the grammar state of a new sample; None without a constraint."""
    prompt: Prompt | None = None
    num_started_samples: int = 0
    """The number of samples that have started."""
    sequences: dict[int, SampledSequence] = field(default_factory=dict[int, SampledSequence])
    """The finished samples by their index."""
    is_answered: bool = False
    """Whether the request was answered, or its cancellation was noticed."""
    _stop_bits: np.ndarray | None = None
    _allowed_bits: np.ndarray | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens of the prompt, with the ids of images."""
        return self.input.tokens

    @property
    def is_constrained(self) -> bool:
        """Whether the samples must match a constraint."""
        return self.make_grammar_state is not None

    def stop_bits(self, vocab_size: int) -> np.ndarray:
        """Return the stop tokens as bits (see `Adjustment.allowed_bits`)."""
        if self._stop_bits is None:
            self._stop_bits = _bits(self.stop_condition.token_ids, vocab_size)
        return self._stop_bits

    def allowed_bits(self, vocab_size: int, may_stop: bool) -> np.ndarray | None:
        """Return the tokens that a sample without a grammar may have next (see
        `Adjustment.allowed_bits`). Unless it `may_stop`, these are no stop tokens, except if
        nothing else is allowed.
        """
        allowed_ids = self.op.sampling_params.allowed_token_ids
        if self._allowed_bits is None and allowed_ids:
            self._allowed_bits = _bits(allowed_ids, vocab_size)
        if may_stop:
            return self._allowed_bits
        others = ~self.stop_bits(vocab_size)
        if self._allowed_bits is not None:
            others &= self._allowed_bits
        return others if others.any() else self._allowed_bits

    @property
    def num_samples(self) -> int:
        """The number of samples to generate: 0 if the request only scores its prompt."""
        return self.op.num_samples if self.max_tokens else 0

    def claim_response(self) -> bool:
        """Claim the right to answer this request. Return True at most once per request.

        Return False if the request was claimed before or its future was cancelled. After True the
        caller must set the result or the exception of the future.
        """
        if self.is_answered:
            return False
        self.is_answered = True
        return self.future.set_running_or_notify_cancel()

    def fail(self, error: BaseException) -> None:
        """Set `error` on the future, unless the request was answered or cancelled."""
        if self.claim_response():
            self.future.set_exception(error)


@dataclass
class PromptTensors:
    """What the prefill of a prompt has computed so far, besides the keys and values in its slot."""

    last_hidden: Tensor | None = None
    """The final hidden state [1, D] of the prompt's last token; None until the prompt is ready."""
    chunk_hidden: list[Tensor] = field(default_factory=lambda: [])
    """The final hidden states [chunk, D] of each complete chunk, until the prompt is ready."""
    rest_hidden: Tensor | None = None
    """The final hidden states of the computed positions after the last complete chunk, until the
    prompt is ready; None if there are none.
    """
    state: RecurrentState | None = None
    """The recurrent state after the last computed position. It is never changed in place. None if
    the model has no recurrent state.
    """
    chunk_states: list[RecurrentState] = field(default_factory=lambda: [])
    """The recurrent state after each complete chunk that the prefix cache can hold, until the
    prompt is ready.
    """


@dataclass(eq=False)
class Prompt:
    """An active prompt, whose keys and values are shared by all samples that continue it."""

    input: InputTokens
    cache_namespace: Hashable
    weights: LoraWeights | None
    scores_request: Request | None
    """The request that wants scores of this prompt; None without such a request. A prompt with
    scores is not shared with other requests. It still starts from the cached prefix, unless the
    request wants alternative tokens sampled at each position of the prompt.
    """
    slot: int = -1
    """The slot's index in its pool; -1 without a slot."""
    num_computed_tokens: int = 0
    """The number of positions in the KV cache so far, including the cached prefix."""
    num_cached_tokens: int = 0
    """The number of positions taken from the prefix cache."""
    num_pending_samples: int = 0
    """The number of samples (or prompt-only responses) still to come. The prompt is freed at 0."""
    tensors: PromptTensors = field(default_factory=PromptTensors)
    """Empty again when the prompt is freed."""

    @property
    def last_hidden(self) -> Tensor:
        """The final hidden state [1, D] of the last token. The prompt must be ready."""
        assert self.tensors.last_hidden is not None
        return self.tensors.last_hidden

    @property
    def tokens(self) -> list[int]:
        """The tokens of the prompt, with the ids of images."""
        return self.input.tokens

    @property
    def length(self) -> int:
        """The number of tokens of the prompt."""
        return len(self.tokens)

    @property
    def is_ready(self) -> bool:
        """Whether all positions are computed, so that samples can continue the prompt."""
        return self.num_computed_tokens == len(self.tokens)

    @cached_property
    def distinct_tokens(self) -> np.ndarray:
        """The distinct tokens of the prompt's text: int64, ascending."""
        tokens = np.unique(np.array(self.tokens, np.int64))
        return tokens[tokens < FIRST_IMAGE_TOKEN]

    @property
    def num_alt_tokens(self) -> int:
        """The number of tokens to sample at each position of the prompt (prompt_alt_tokens_k)."""
        return self.scores_request.op.prompt_alt_tokens_k if self.scores_request is not None else 0

    @property
    def capacity(self) -> int:
        """The capacity of the prompt's slot in positions."""
        return capacity_for(len(self.tokens))


@dataclass(eq=False)
class RunningSample:
    """One sample in progress.

    Its slot contains the prompt's last `length % SPAN` positions and all sampled tokens except the
    last. The last token's keys and values are computed when it goes through the decoder.

    A preempted sample has no slot. When it resumes, it continues a new prompt: the request's prompt
    and all of its own tokens except the last. Its slot then contains only the tokens that it
    samples after that.
    """

    request: Request
    index: int
    prompt: Prompt
    """The prompt that the sample continues: that of its request until it is preempted."""
    uniform_stream: UniformStream
    grammar: GrammarState | None = None
    """The sample's position in the grammar of its constraint; None without a constraint."""
    recurrent_state: RecurrentState | None = None
    """The recurrent state after the positions in the slot. None before the second token, and if the
    model has no recurrent state.
    """
    next_state: RecurrentState | None = None
    """The second state of a constrained sample. If a step begins before the sample's mask is
    computed, it has `writes_next_state` and writes the new state here. After the step,
    `use_next_state` swaps the two states. If the mask is late, it does not, so the next step can
    decode the same token again from the old state. Other steps change `recurrent_state` in place.
    """
    writes_next_state: bool = False
    slot: int = -1
    capacity: int = 0
    reserved_capacity: int = 0
    """The capacity that is reserved for its slot, which gets it in the next decoding step. 0 when
    the sample has ended or is preempted.
    """
    num_prefilled_tokens: int = 0
    """The number of its tokens that are in `prompt`, because it was preempted."""
    num_preemptions: int = 0
    num_rows: int = 1
    """The number of batch rows in the current decoding step: the last token, and forced tokens of
    the grammar that follow it.
    """
    num_pending_tokens: int = 0
    """The number of tokens that were sampled after `tokens` and are on the device only: 1 or 0 (see
    decoding_steps.py).
    """
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top_tokens: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """For each token the tokens that are reported with it: int32 [k]. Empty if k is 0."""
    top_logprobs: list[np.ndarray] = field(default_factory=list[np.ndarray])
    """Their logprobs: float32 [k]."""
    stop_reason: StopReason | None = None
    """Why the sample ended; None while it runs."""
    stop_matcher: StopMatcher = field(init=False)

    def __post_init__(self) -> None:
        self.stop_matcher = StopMatcher(self.request.stop_condition, self.request.op.stop_gate)

    @property
    def num_stored(self) -> int:
        """The number of positions in the slot before the last token goes through the decoder."""
        return self.prompt.length % SPAN + self.num_tokens - self.num_prefilled_tokens - 1

    @property
    def num_tokens(self) -> int:
        """The number of sampled tokens, with the pending one."""
        return len(self.tokens) + self.num_pending_tokens

    @property
    def can_decode(self) -> bool:
        """Whether a decoding step can sample its next token."""
        return (
            bool(self.tokens) and self.prompt.is_ready and self.num_tokens < self.request.max_tokens
        )

    @property
    def max_capacity(self) -> int:
        """The capacity of its slot at its maximum length."""
        return sample_capacity(
            self.prompt.length, self.request.max_tokens - self.num_prefilled_tokens
        )

    def use_next_state(self) -> None:
        """Continue from the state that a decoding step wrote (see `next_state`)."""
        is_late = self.grammar is not None and self.grammar.is_late
        if self.writes_next_state and not is_late and self.recurrent_state is not None:
            self.recurrent_state, self.next_state = self.next_state, self.recurrent_state

    def free_states(self) -> None:
        """Free the recurrent states of a sample that has ended or is preempted."""
        self.recurrent_state = self.next_state = None

    @property
    def forced_tokens(self) -> Sequence[int]:
        """The known tokens that must come next, because no other text matches the constraint."""
        grammar = self.grammar
        if grammar is None or not grammar.is_ready or grammar.error is not None:
            return ()
        return grammar.forced_tokens

    @property
    def awaits_mask(self) -> bool:
        """Whether no token can be sampled in this step, because the mask is missing.

        The first token is sampled only after the first mask is computed. Later masks are computed
        while the decoder runs, so a step may begin before the sample's mask is ready. If the mask
        is still missing at the end of that step, no token is sampled until it is ready.
        """
        grammar = self.grammar
        if grammar is None or grammar.is_ready:
            return False
        return not self.tokens or grammar.is_late

    @property
    def position(self) -> int:
        """The RoPE position of the last token."""
        return len(self.request.tokens) + self.num_tokens - 1 + self.request.input.rope_offset


def _bits(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)
    return bits
