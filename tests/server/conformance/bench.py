"""One probe for each method of the SDKs, and for each option that decides what the server does:
what a probe is, and what it has at hand.

Nothing here needs planish, so it runs in any environment that has an SDK. A probe works if it
raises nothing; its assertions are about what only the server can get wrong. A probe that is
`refused` must raise an error with a sentence in it, and soon. What an SDK has no method or argument
for is not applicable.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

TIMEOUT = 300
SOON = 60.0
"""A refusal takes seconds; more than that on a machine that does something else, too."""

WORKS, REFUSED, NOT_APPLICABLE, FAILED = "works", "refused", "n/a", "FAILED"


class NotApplicable(Exception):
    """The SDK has no such thing."""


@dataclass(frozen=True)
class Probe:
    method: str
    what: str
    run: Callable[[Bench], object]
    is_refused: bool = False

    @property
    def name(self) -> str:
        return f"{self.method}: {self.what}" if self.what else self.method


@dataclass(frozen=True)
class Outcome:
    name: str
    status: str
    note: str = ""
    seconds: float = 0.0


PROBES: dict[str, Probe] = {}
Run = Callable[["Bench"], object]


def probe(method: str, what: str = "", refused: bool = False) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        added = Probe(method, what, run, refused)
        assert added.name not in PROBES, added.name
        PROBES[added.name] = added
        return run

    return add


def value(pending: Any) -> Any:
    """The result of what may be a future."""
    return pending.result(timeout=TIMEOUT) if hasattr(pending, "result") else pending


def awaited(coroutine: Any) -> Any:
    """The result of an async method, and of the future that it may answer."""

    async def both() -> Any:
        answer = await coroutine
        return await answer if hasattr(answer, "__await__") else answer

    return value(asyncio.run(asyncio.wait_for(both(), TIMEOUT)))


class Bench:
    """Clients of one SDK, each made when it is first needed."""

    def __init__(self, module: str, base_model: str) -> None:
        self.sdk = importlib.import_module(module)
        self.types = self.sdk.types
        self.base_model = base_model
        self._names = 0

    @cached_property
    def service(self) -> Any:
        return self.sdk.ServiceClient(user_metadata={"purpose": "conformance"})

    @cached_property
    def training(self) -> Any:
        return self.new_training()

    def new_training(self, **options: Any) -> Any:
        return value(
            self.service.create_lora_training_client(self.base_model, rank=4, seed=1, **options)
        )

    @cached_property
    def sampler(self) -> Any:
        return value(self.service.create_sampling_client(base_model=self.base_model))

    @cached_property
    def rest(self) -> Any:
        direct = getattr(self.sdk, "RestClient", None)
        return direct() if direct is not None else self.service.create_rest_client()

    @cached_property
    def admin(self) -> Any:
        return self.of("AdminClient")()

    @cached_property
    def state(self) -> str:
        """The path of a training checkpoint."""
        return value(self.training.save_state(self.name())).path

    @cached_property
    def weights(self) -> str:
        """The path of a sampler checkpoint."""
        return value(self.training.save_weights_for_sampler(self.name())).path

    @cached_property
    def external(self) -> str:
        return value(self.training.save_weights_external(self.name())).path

    def of(self, name: str) -> Any:
        """A class of the SDK or of its types."""
        for place in (self.sdk, self.types):
            if hasattr(place, name):
                return getattr(place, name)
        raise NotApplicable(name)

    def name(self) -> str:
        self._names += 1
        return f"c-{time.time_ns()}-{self._names}"

    def run_of(self, path: str) -> str:
        return path.removeprefix("tinker://").split("/")[0]

    def prompt(self, *tokens: int) -> Any:
        return self.types.ModelInput.from_ints(list(tokens or (1, 2, 3, 4)))

    def params(self, **options: Any) -> Any:
        return self.types.SamplingParams(**{"max_tokens": 4, "seed": 1, **options})

    def sample(
        self, num_samples: int = 1, sampler: Any = None, params: Any = None, **options: Any
    ) -> Any:
        client = sampler or self.sampler
        return value(client.sample(self.prompt(), num_samples, params or self.params(), **options))

    def datum(self, **inputs: Any) -> Any:
        return self.types.Datum(
            model_input=self.prompt(), loss_fn_inputs={"target_tokens": [2, 3, 4, 5], **inputs}
        )

    def rl_datum(self, **inputs: Any) -> Any:
        return self.datum(
            **{"logprobs": [-1.0, -2.0, -3.0, -4.0], "advantages": [0.0, 1.0, 1.0, -1.0], **inputs}
        )

    def fails(self, pending: Any, kind: str, text: str) -> None:
        """A result is an error of the SDK whose class and words have these in them."""
        try:
            value(pending)
            failure = None
        except Exception as error:
            failure = error
        assert kind in type(failure).__name__, repr(failure)
        assert text in f"{failure} {getattr(failure, 'category', '')}", repr(failure)

    def trained(self, loss_fn: str, data: list[Any], config: Any = None, client: Any = None) -> Any:
        output = value((client or self.training).forward_backward(data, loss_fn, config))
        assert math.isfinite(output.metrics["loss:sum"])
        assert len(output.loss_fn_outputs) == len(data)
        return output


def check(probe: Probe, bench: Bench) -> Outcome:
    """Run one probe; an exception is the outcome, not the caller's."""
    began = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            probe.run(bench)
        status, note = WORKS, ""
    except Exception as error:
        status, note = _failure(probe, error, time.monotonic() - began)
    if status == WORKS and probe.is_refused:
        status, note = FAILED, "it was expected to be refused, and was not"
    return Outcome(probe.name, status, note, round(time.monotonic() - began, 2))


def _failure(probe: Probe, error: Exception, seconds: float) -> tuple[str, str]:
    if _is_missing(error):
        return NOT_APPLICABLE, ""
    sentence = f"{type(error).__name__}: {error}"
    if probe.is_refused and seconds < SOON and len(str(error)) > 20 and "Timeout" not in sentence:
        return REFUSED, sentence
    return FAILED, sentence


_NO_SUCH_MEMBER = re.compile(
    r"(module '(tinker|logits)|'\w*Client\w*' object|type object '\w*Client\w*')"
)


def _is_missing(error: Exception) -> bool:
    """Whether the SDK, not the server, has no such method, type or argument."""
    text = str(error)
    return (
        isinstance(error, NotApplicable)
        or (isinstance(error, TypeError) and "unexpected keyword argument" in text)
        or (isinstance(error, AttributeError) and _NO_SUCH_MEMBER.match(text) is not None)
        or (isinstance(error, ModuleNotFoundError) and "tinker.types" in text)
    )


CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")


def unprobed(bench: Bench) -> list[str]:
    """The public methods of the SDK's clients that no probe is for."""
    probed = {one.method for one in PROBES.values()}
    found = []
    for name in CLIENTS:
        client = getattr(bench.sdk, name, None) or _older_client(name)
        methods = (
            []
            if client is None
            else [member for member in dir(client) if not member.startswith("_")]
        )
        found += [f"{name}.{member}" for member in methods if f"{name}.{member}" not in probed]
    return found


def _older_client(name: str) -> Any:
    """Older SDKs have RestClient only inside."""
    try:
        return getattr(importlib.import_module("tinker.lib.public_interfaces"), name, None)
    except ModuleNotFoundError:
        return None
