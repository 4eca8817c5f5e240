"""The delivery of results: tokens to the callback of a request, and responses to its future."""

from collections.abc import Callable

import numpy as np

from planish.engine.sampling.requests import Request, RunningSample
from planish.errors import NonFiniteError
from planish.service import SampledToken, TextEnd
from planish.types import SampledSequence, SampleResponse, TopkLogprobs

_NO_TOP_TOKENS, _NO_TOP_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class OpenRequests:
    """The requests of a sampler that have no response yet."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        """Return the number of open requests."""
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Add a new request."""
        self._requests.append(request)

    def finish_sample(self, sample: RunningSample) -> None:
        """Build the sequence of an ended sample. Deliver the response after the last one."""
        assert sample.stop_reason is not None
        request = sample.request
        k = request.op.num_scored_tokens
        top = None
        if k:
            top = TopkLogprobs(
                np.array(sample.top_tokens, np.int32).reshape(-1, k),
                np.array(sample.top_logprobs, np.float32).reshape(-1, k),
            )
        request.sequences[sample.index] = SampledSequence(
            stop_reason=sample.stop_reason,
            sequence_id=f"{request.op.sampler_id}:{request.number}:{sample.index}",
            tokens_np=np.array(sample.tokens, np.int32),
            logprobs_np=np.array(sample.logprobs, np.float32),
            topk_logprobs_np=top,
        )
        if len(request.sequences) == request.num_samples:
            self.deliver(request)

    def deliver(self, request: Request) -> None:
        """Set the response of a complete request on its future."""
        scores = request.prompt_scores
        assert request.prompt is not None
        if scores is not None and not scores.is_finite:
            self._requests.remove(request)
            request.fail(non_finite_error(request.op.sampler_id))
            return
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

    def pop_done(self) -> list[Request]:
        """Remove and return the requests whose futures are done: they were cancelled or failed."""
        done = [request for request in self._requests if request.future.done()]
        for request in done:
            # Without this call, concurrent.futures.wait() would never see a cancellation.
            request.claim_response()
            self._requests.remove(request)
        return done

    def fail_all(self, error: Exception) -> None:
        """Fail every open request with `error`."""
        requests, self._requests = self._requests, []
        for request in requests:
            request.fail(error)


def call_on_token(
    sample: RunningSample, text_end: TextEnd | None, on_token: Callable[[SampledToken], None]
) -> None:
    """Call `on_token` with the sample's newest token. `text_end` is where the text ends, if the
    token ends it.

    An exception in the callback fails this request only, not the batch.
    """
    if sample.request.future.done():
        return
    top_tokens = sample.top_tokens[-1] if sample.top_tokens else _NO_TOP_TOKENS
    top_logprobs = sample.top_logprobs[-1] if sample.top_logprobs else _NO_TOP_LOGPROBS
    num_unsettled = 0 if sample.stop_reason else sample.stop_matcher.num_unsettled(sample.tokens)
    token, logprob = sample.tokens[-1], sample.logprobs[-1]
    try:
        on_token(
            SampledToken(
                sample.index, token, logprob, top_tokens, top_logprobs, num_unsettled, text_end
            )
        )
    except BaseException as error:  # asyncio.CancelledError does not derive from Exception.
        sample.request.fail(error)


def non_finite_error(sampler_id: str) -> NonFiniteError:
    """Return the error of a request whose logits are not finite."""
    return NonFiniteError(
        f"sampler_id={sampler_id!r}: the logits are not finite, so there are no tokens and logprobs. "
        "The sampler's weights are too large, or NaN; load an earlier checkpoint and lower "
        "learning_rate, or another base model"
    )
