"""The sampling requests that an engine is known to accept."""

from planish.service import Sample

_MAX_SENT_TOKENS = 16_384
"""The longest prompt that is sent without an answer. Ray puts larger arguments of a call into its
object store, where they can be lost.
"""
_MAX_OPTIONS = 256


class AcceptedSamples:
    """The sizes of the prompts that an engine has accepted, by the options of the requests.

    An engine compares the length and the token ids of a text prompt with limits. So it accepts a
    request whose prompt is no larger than accepted ones with the same options.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[int, int]] = {}

    def add(self, operation: Sample, base_model: str) -> None:
        """Note that the engine has accepted a request."""
        options, length, token = _describe(operation, base_model)
        if len(self._sizes) >= _MAX_OPTIONS:
            self._sizes.clear()
        old_length, old_token = self._sizes.get(options, (0, 0))
        self._sizes[options] = max(length, old_length), max(token, old_token)

    def covers(self, operation: Sample, base_model: str) -> bool:
        """Return whether the engine is known to accept a request."""
        options, length, token = _describe(operation, base_model)
        max_length, max_token = self._sizes.get(options, (0, 0))
        return 0 < length <= max_length and token <= max_token


def _describe(operation: Sample, base_model: str) -> tuple[str, int, int]:
    """Return a text that is equal for requests with the same options, the length of the prompt, and
    its largest token id. The length is 0 for a request that an engine checks in other ways too.
    """
    params = operation.sampling_params
    tokens = [] if operation.prompt.images else operation.prompt.to_ints()
    if (
        not 0 < len(tokens) <= _MAX_SENT_TOKENS
        or min(tokens) < 0
        # The default depends on the length of the prompt.
        or params.max_tokens is None
        # The engine may still have to compile the constraint.
        or params.constraint is not None
        or operation.target_prompt_logprobs is not None
        or operation.stop_gate is not None
    ):
        return "", 0, 0
    options = {"sampling_params": {**vars(params), "seed": None}, "sampler_id": base_model}
    return repr({**vars(operation), **options, "prompt": None}), len(tokens), max(tokens)
