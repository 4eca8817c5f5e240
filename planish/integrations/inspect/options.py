# pyright: reportMissingImports=false
"""Inspect's options of generation: what planish takes, what it refuses, what it says that it
ignores.

An option that changes what is drawn is never ignored: an evaluation would report numbers of other
settings than it asked for. Those that Inspect documents as hints for some providers (reasoning,
verbosity, caching of prompts) are named in one warning each, as its own providers do. Some are
Inspect's own business, before or after a request. All others, those of later versions of Inspect
too, are refused.
"""

from logging import getLogger

from inspect_ai.model import GenerateConfig

from planish.errors import UnsupportedError
from planish.types import SamplingParams

logger = getLogger(__name__)

HINTS = (
    "parallel_tool_calls",
    "cache_prompt",
    "verbosity",
    "effort",
    "reasoning_effort",
    "reasoning_mode",
    "reasoning_tokens",
    "reasoning_summary",
)
TAKEN = (
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
INSPECTS_OWN = (
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

_warned: set[str] = set()


def check_options(config: GenerateConfig) -> None:
    """UnsupportedError for what would be drawn otherwise than asked; a warning, once, for a hint
    that is not taken.
    """
    given = {
        name
        for name, value in config.model_dump(exclude_none=True).items()
        if value not in (False, {}, [])
    }
    for name in sorted(given.intersection(HINTS) - _warned):
        _warned.add(name)
        logger.warning("planish has no %s=%r; it is ignored", name, getattr(config, name))
    refused = sorted(given - {*TAKEN, *HINTS, *INSPECTS_OWN})
    if refused:
        named = ", ".join(f"{name}={getattr(config, name)!r}" for name in refused)
        raise UnsupportedError(
            f"{named}: planish does not offer this; leave it out of the task's generate config"
        )


def sampling_params(
    config: GenerateConfig, max_tokens: int, stop: list[str] | list[int]
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        seed=config.seed,
        stop=stop,
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=-1 if config.top_k is None else config.top_k,
        top_p=1.0 if config.top_p is None else config.top_p,
    )
