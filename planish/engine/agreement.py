"""How far the logprobs of sampler and trainer are apart, measured when a model is loaded.

On a CPU our own decoder adds all numbers in one order, so its sampler and trainer agree
(docs/architecture.md). The difference is measured on a GPU, whose kernels no other check covers
together, and where transformers' code computes a part of the layers. The sampler decodes a few
tokens, and the trainer scores them.
"""

import logging
from concurrent.futures import Future

import numpy as np
import torch

from planish.engine.sampling.sampler import Sampler
from planish.engine.training.adapters import Adapter
from planish.engine.training.trainer import Trainer
from planish.errors import PlanishError, UnsupportedError, UserError
from planish.model.decoder.base_decoder import BaseDecoder
from planish.model.layers.lora import LoraLayout
from planish.service import Sample
from planish.types import (
    Datum,
    EncodedTextChunk,
    LoraConfig,
    ModelInput,
    SampleResponse,
    SamplingParams,
)

_CODE_ERRORS = (
    *(AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError),
)
"""The errors of modelling code that does something else than planish's decoder expects."""
MAX_DIFFERENCE = 1.0
"""The largest difference of logprobs, in nats, that rounding may cause. A larger one means that the
model's code combines positions in another way than by attention.
"""
ROUNDING_DIFFERENCES = {torch.bfloat16: 0.3, torch.float32: 0.03}
"""The largest difference of logprobs, in nats, that rounding explains with our own decoder."""
_PROMPT_LENGTHS = (3, 70)
_SAMPLES, _TOKENS = 2, 12
_RANK = 8
_logger = logging.getLogger(__name__)


def warn_of_difference(decoder: BaseDecoder, sampler: Sampler, trainer: Trainer) -> float | None:
    """Return the largest difference between sampled and trained logprobs, over a few tokens.

    Log a warning if rounding does not explain the difference. Return None if the KV cache has no
    space for the tokens.
    """
    difference = _difference(decoder, sampler, trainer)
    if difference is not None and not difference <= ROUNDING_DIFFERENCES[decoder.dtype]:
        _logger.warning(
            "sampled and trained logprobs of a few tokens differ by %.3g nats on %s, more than "
            "rounding explains, so training may be wrong. Please report it, with the file of "
            "`planish doctor --gpu-report`; PLANISH_KERNELS=torch uses torch instead of planish's "
            "kernels",
            difference,
            decoder.device,
        )
    return difference


def measure_difference(decoder: BaseDecoder, sampler: Sampler, trainer: Trainer) -> float | None:
    """Return the largest difference between sampled and trained logprobs, over a few tokens.

    The samples have two prompts of random tokens, one of which begins with the other, and a random
    adapter. Return None if the KV cache has no space for them. Raises UnsupportedError if the
    model's code fails, or if the difference exceeds MAX_DIFFERENCE.
    """
    try:
        difference = _difference(decoder, sampler, trainer)
    except (torch.OutOfMemoryError, PlanishError):
        raise
    except _CODE_ERRORS as error:
        raise UnsupportedError(
            f"the code of transformers for this model ({decoder.config.family}) fails with "
            f"planish's attention: {type(error).__name__}: {error}"
        ) from error
    if difference is not None and not difference <= MAX_DIFFERENCE:
        raise UnsupportedError(
            f"sampled and trained logprobs of this model ({decoder.config.family}) differ by "
            f"{difference:.3g} nats, so its code in transformers combines positions in another "
            "way than by attention. planish cannot run it"
        )
    return difference


def _difference(decoder: BaseDecoder, sampler: Sampler, trainer: Trainer) -> float | None:
    """Return the largest difference between sampled and trained logprobs, or None."""
    # Every expert of a model has matrices of its own, so a small rank makes a large adapter.
    rank = max(1, _RANK // max(1, decoder.config.experts_per_token))
    layout = LoraLayout(decoder.config, LoraConfig(rank=rank))
    noise = 0.02 * torch.randn(layout.size, generator=torch.Generator().manual_seed(0))
    adapter = Adapter(layout, decoder.backend, layout.init(0) + noise)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, decoder.config.vocab_size, max(_PROMPT_LENGTHS)).tolist()
    prompts = [ModelInput.from_ints(tokens[:length]) for length in _PROMPT_LENGTHS]
    params = SamplingParams(max_tokens=_TOKENS, stop=[], seed=0)
    requests = [Sample("agreement", prompt, _SAMPLES, params) for prompt in prompts]
    try:
        for request in requests:
            sampler.validate(request)
    except UserError:  # A request without space would wait for ever.
        return None
    futures: list[Future[SampleResponse]] = [Future() for _ in prompts]
    for request, future in zip(requests, futures, strict=True):
        sampler.submit(request, adapter.snapshot(), "agreement", future)
    while sampler.busy:
        sampler.step()
    sampler.evict_prefixes("agreement")
    data: list[Datum] = []
    sampled: list[np.ndarray] = []
    for prompt, future in zip(prompts, futures, strict=True):
        for sequence in future.result().sequences:
            pad = [0] * (prompt.length - 1)
            whole = prompt.append(EncodedTextChunk(sequence.tokens[:-1]))
            data.append(Datum(whole, {"target_tokens": pad + sequence.tokens}))
            sampled.append(np.array(sequence.logprobs))
    trained = _trained_logprobs(trainer, adapter, data)
    return max(
        float(np.abs(ours - theirs[-len(ours) :]).max())
        for ours, theirs in zip(sampled, trained, strict=True)
    )


def _trained_logprobs(trainer: Trainer, adapter: Adapter, data: list[Datum]) -> list[np.ndarray]:
    """Return the trainer's logprobs of all targets of each datum."""
    work = trainer.forward_backward(adapter, data, "cross_entropy", forward_only=True)
    while True:
        try:
            next(work)
        except StopIteration as end:
            return [output["logprobs"].to_numpy() for output in end.value.loss_fn_outputs]
