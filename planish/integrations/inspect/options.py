# pyright: reportMissingImports=false
"""Inspect's generation options: which planish supports, ignores with a warning, or rejects.

An option that changes what is sampled is never ignored. Otherwise an evaluation would report
numbers for other settings than it requested. Some options are hints that only some providers use
(reasoning, verbosity, prompt caching). Each of them causes one warning, as in Inspect's own
providers. Other options are handled by Inspect itself, before or after a request. All remaining
options, including those of later versions of Inspect, are rejected.
"""

from logging import getLogger

from inspect_ai.model import GenerateConfig

from planish.errors import UnsupportedError
from planish.types import SamplingParams

logger = getLogger(__name__)

IGNORED_OPTIONS = (
    "parallel_tool_calls",
    "cache_prompt",
    "verbosity",
    "effort",
    "reasoning_effort",
    "reasoning_mode",
    "reasoning_tokens",
    "reasoning_summary",
)
SUPPORTED_OPTIONS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop_seqs",
    "seed",
    "num_choices",
    "logprobs",
    "top_logprobs",
)
INSPECT_OPTIONS = (
    "max_retries",
    "timeout",
    "attempt_timeout",
    "stream_idle_timeout",
    "max_connections",
    "adaptive_connections",
    "system_message",
    "internal_tools",
    "max_tool_output",
    "fail_on_refusal",
    "reasoning_history",
    "cache",
)

_warned_options: set[str] = set()


def check_options(config: GenerateConfig) -> None:
    """Raise UnsupportedError for options that planish does not support. Log one warning per process
    for each hint that is ignored.
    """
    set_options = {
        name
        for name, value in config.model_dump(exclude_none=True).items()
        if value not in (False, {}, [])
    }
    for name in sorted(set_options.intersection(IGNORED_OPTIONS) - _warned_options):
        _warned_options.add(name)
        logger.warning("planish ignores the option %s=%r", name, getattr(config, name))
    unsupported = sorted(set_options - {*SUPPORTED_OPTIONS, *IGNORED_OPTIONS, *INSPECT_OPTIONS})
    if unsupported:
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in unsupported)
        raise UnsupportedError(
            f"{values}: planish does not support this; leave it out of the task's generate config"
        )


def sampling_params(
    config: GenerateConfig, max_tokens: int, stop: list[str] | list[int]
) -> SamplingParams:
    """Return planish's sampling parameters for Inspect's options."""
    return SamplingParams(
        max_tokens=max_tokens,
        seed=config.seed,
        stop=stop,
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=-1 if config.top_k is None else config.top_k,
        top_p=1.0 if config.top_p is None else config.top_p,
    )
