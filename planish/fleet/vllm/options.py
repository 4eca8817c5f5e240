"""The options of vLLM as a sampler."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from planish.errors import UserError
from planish.processes.stall_watch import SILENT_SECONDS, STALL_SECONDS

PYTHON_VARIABLE = "PLANISH_VLLM_PYTHON"
ARGUMENTS_VARIABLE = "PLANISH_VLLM_ARGUMENTS"
TOLERANCE_VARIABLE = "PLANISH_VLLM_TOLERANCE"
ADAPTERS_VARIABLE = "PLANISH_VLLM_ADAPTERS"
DEFAULT_TOLERANCE = 0.1


def _default_arguments() -> tuple[str, ...]:
    return tuple(shlex.split(os.environ.get(ARGUMENTS_VARIABLE, "")))


def _default_adapter_dir() -> Path | None:
    path = os.environ.get(ADAPTERS_VARIABLE)
    return Path(path) if path else None


def _default_tolerance() -> float:
    text = os.environ.get(TOLERANCE_VARIABLE, str(DEFAULT_TOLERANCE))
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{TOLERANCE_VARIABLE}={text!r}: give a number above 0") from None


@dataclass(frozen=True)
class VllmSampler:
    """Samples come from vLLM. Raises UserError for an invalid value."""

    urls: Sequence[str] = ()
    """The URLs of running vLLM servers. Without any, one server is started on this machine for each
    base model that is used.
    """
    python: str = field(default_factory=lambda: os.environ.get(PYTHON_VARIABLE, sys.executable))
    """The interpreter of the environment in which vLLM is installed. By default that of
    PLANISH_VLLM_PYTHON, else this one.
    """
    arguments: Sequence[str] = field(default_factory=_default_arguments)
    """More arguments of `vllm serve`, for a server that is started. They replace those of planish.
    By default those of PLANISH_VLLM_ARGUMENTS.
    """
    tolerance: float = field(default_factory=_default_tolerance)
    """The largest mean absolute difference, in nats, between the logprobs of vLLM and of planish
    with which a version of an adapter counts as published. By default that of
    PLANISH_VLLM_TOLERANCE, else 0.1.
    """
    adapter_dir: Path | None = field(default_factory=_default_adapter_dir)
    """The directory for the adapters, which all vLLM servers must be able to read. By default that
    of PLANISH_VLLM_ADAPTERS, else a temporary directory of this machine.
    """

    silent_seconds: float = SILENT_SECONDS
    """A server with requests that does not answer for so long is lost."""
    stall_seconds: float = STALL_SECONDS
    """A server with requests whose counters of tokens stay the same for so long is lost."""

    def __post_init__(self) -> None:
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise UserError(
                    f"sampler={url!r}: give 'engine', 'vllm', or the URLs of running vLLM servers, "
                    "such as 'http://127.0.0.1:8000', with commas between them"
                )
        if not self.tolerance > 0:
            raise UserError(
                f"tolerance={self.tolerance!r} of vLLM's logprobs: give a number above 0"
            )


def checked_sampler(
    sampler: str | VllmSampler, replicas: int | None, ray: str | None, engine: str = "thread"
) -> VllmSampler | None:
    """Read the option `sampler`: "engine" (None is returned), "vllm", or URLs with commas between
    them. Raise UserError for another value, and with options of several engines.
    """
    if sampler == "engine":
        return None
    if isinstance(sampler, str):
        sampler = VllmSampler(() if sampler == "vllm" else tuple(sampler.split(",")))
    if replicas is not None or ray is not None or engine != "thread":
        raise UserError(
            "sampler='vllm' is for one engine in this process: leave out replicas, ray and engine. "
            "For several vLLM servers, give their URLs as the sampler"
        )
    return sampler
