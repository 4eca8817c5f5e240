"""A server with the OpenAI-compatible endpoints on a real socket, whose engine can be told what to
sample.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
from http_thread import serving_app

from planish import ModelInput, SamplingParams
from planish.detokenizer import Detokenizer
from planish.engine.engine import Engine
from planish.engine.sampling.stopping import StopCondition, StopMatcher
from planish.engine.settings import EngineSettings
from planish.server.http import routes_sampling
from planish.server.http.app import create_app
from planish.server.openai import routes
from planish.server.openai.models import OpenAIModels
from planish.server.server import Server
from planish.server.settings import HttpSettings
from planish.service import CreateSampler, Operation, Sample, SampledToken
from planish.testing import EOS_TOKEN_ID
from planish.tokenizer import load_tokenizer
from planish.types import SampledSequence, SampleResponse

BASE, CHAT, THINKER = "tiny/base", "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-8B"
EFFORTS = "Qwen/Qwen3.8-27B"
KEYS = {"tml-first": "first", "tml-second": "second"}
HELLO: Any = [{"role": "user", "content": "Hello"}]
WAIT = 60.0


class ScriptedEngine(Engine):
    """Draws as it is told, where it is told."""

    script: list[int] | None = None
    error: Exception | None = None
    last_prompt: list[int] | None = None
    """The prompt of the last sample."""
    paused_after: int | None = None
    """The engine waits for `resumed` after this many tokens."""
    resumed: threading.Event
    later_scripts: Sequence[list[int]] = ()
    """What the engine draws for the next samples."""

    def submit(self, operation: Operation[Any]) -> Future[Any]:
        if isinstance(operation, Sample):
            self.last_prompt = operation.prompt.to_ints()
        if not isinstance(operation, Sample) or self.script is None:
            return super().submit(operation)
        answer: Future[Any] = Future()
        if self.paused_after is None:
            script = self.script
            if self.later_scripts:
                self.script, *self.later_scripts = self.later_scripts
            self._say(operation, answer, script)
        else:
            threading.Thread(target=self._say, args=(operation, answer, self.script)).start()
        return answer

    def _say(self, operation: Sample, answer: Future[Any], script: list[int]) -> None:
        texts = Detokenizer.of_tokenizer(load_tokenizer(self.tokenizer_directory(BASE)))
        condition = StopCondition.from_params(operation.sampling_params, (), texts)
        matcher = StopMatcher(condition, operation.stop_gate)
        sampled: list[int] = []
        for token in script:
            if len(sampled) == self.paused_after:
                assert self.resumed.wait(WAIT)
            sampled.append(token)
            text_end = matcher.text_end(sampled)
            if operation.on_token is not None:
                num_unsettled = matcher.num_unsettled(sampled)
                operation.on_token(
                    SampledToken(0, token, -1.0, num_unsettled=num_unsettled, text_end=text_end)
                )
            if text_end is not None:
                break
        if self.error is not None:
            answer.set_exception(self.error)
        else:
            logprobs = np.full(len(sampled), -1.0, np.float32)
            sequence = SampledSequence("stop", "", np.array(sampled, np.int64), logprobs)
            answer.set_result(SampleResponse(sequences=[sequence]))

    @contextmanager
    def saying(
        self,
        text: str,
        tokenizer: Any,
        error: Exception | None = None,
        paused_after: int | None = None,
    ) -> Iterator[None]:
        self.paused_after, self.resumed = paused_after, threading.Event()
        self.error = error
        try:
            with self.saying_in_turn([text], tokenizer):
                yield
        finally:
            self.error = self.paused_after = None

    @contextmanager
    def saying_in_turn(self, texts: Sequence[str], tokenizer: Any) -> Iterator[None]:
        """Draw one text after the other, and the last one from then on."""
        self.script, *self.later_scripts = [
            [*tokenizer.encode(text, add_special_tokens=False), EOS_TOKEN_ID] for text in texts
        ]
        try:
            yield
        finally:
            self.script, self.later_scripts = None, ()


@dataclass(frozen=True)
class Served:
    url: str
    server: Server
    engine: ScriptedEngine
    tokenizer: Any

    def client(self, key: str = "tml-first", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT, **options
        )

    def client_async(self, key: str = "tml-first") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT
        )

    def http(self, key: str = "tml-first") -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=WAIT)

    def drawn(
        self, model: str, prompt: list[int], params: SamplingParams, n: int = 1
    ) -> SampleResponse:
        """What the engine draws when it is asked directly."""
        name = f"direct-{time.monotonic_ns()}"
        self.engine.submit(CreateSampler(name, base_model=model)).result(WAIT)
        return self.engine.submit(Sample(name, ModelInput.from_ints(prompt), n, params)).result(
            WAIT
        )

    def is_idle(self) -> bool:
        server = self.server
        return (
            server.sampling_queue.used_slots == 0
            and not server.tenant_limits.unanswered_by_tenant()
        )


@contextmanager
def serving(
    models: Mapping[str, Path],
    data: Path,
    aliases: Mapping[str, str] = {},
    **settings: Any,
) -> Iterator[Served]:
    """Serve `models`, whose directories have one tokenizer, with the data directory `data`.
    `settings` are those of HttpSettings.
    """
    engine = ScriptedEngine(
        {name: str(path) for name, path in models.items()},
        data,
        EngineSettings(dtype="float32", deterministic=True),
    )
    server = Server(engine, data, list(models))
    openai_models = OpenAIModels(server, models, aliases)
    more = [*routes_sampling.PLANISH_ROUTES, *routes.routes(openai_models)]
    app = create_app(
        server, HttpSettings(tokenizer_directories=models, tenants_by_key=KEYS, **settings), more
    )
    with serving_app(app, lifespan="on", log_level="warning") as url:
        yield Served(url, server, engine, load_tokenizer(next(iter(models.values()))))
        app.state.http.ending.set()
