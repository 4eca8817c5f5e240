"""Constraints of clients that take too much: they end alone, and with their requests."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from http_thread import serving_app
from server_process import wait_until

from planish.engine.constraints.cache import GrammarCache
from planish.engine.constraints.worker import ProcessLimits
from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.server.http.app import create_app
from planish.server.openai import routes
from planish.server.openai.models import OpenAIModels
from planish.server.server import Server
from planish.server.settings import HttpSettings

BASE, CHAT = "tiny/base", "Qwen/Qwen3-4B-Instruct-2507"
KEYS = {"tml-first": "first", "tml-second": "second"}
WAIT = 60.0


@dataclass(frozen=True)
class Served:
    url: str
    grammars: GrammarCache

    def client(self, key: str = "tml-first") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT)

    def set_limits(self, limits: ProcessLimits) -> None:
        """Start a new template process with these limits at the next constraint."""
        template = self.grammars._template
        with template._lock:
            template._end()
            template.limits = limits

    def processes(self) -> list[int]:
        """The constraint processes that have not ended."""
        template = self.grammars._template._process
        if template is None:
            return []
        path = Path(f"/proc/{template.pid}/task/{template.pid}/children")
        found = []
        for pid in path.read_text().split():
            try:
                if "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                    found.append(int(pid))
            except OSError:
                continue
        return found


@pytest.fixture(scope="module")
def served(model_dir, tmp_path_factory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("constraints")
    models: dict[str, Path] = dict.fromkeys((BASE, CHAT), model_dir)
    engine = Engine(
        {name: str(path) for name, path in models.items()}, data, EngineSettings(dtype="float32")
    )
    server = Server(engine, data, list(models))
    app = create_app(
        server,
        HttpSettings(tokenizer_directories=models, tenants_by_key=KEYS),
        routes.routes(OpenAIModels(server, models)),
    )
    with serving_app(app, lifespan="on", log_level="warning") as url:
        yield Served(url, engine._base_models.get(BASE).grammars)
        app.state.http.stopping.set()


def multiples_of(number: int) -> dict[str, Any]:
    return {
        "model": BASE,
        "prompt": "A number: ",
        "max_tokens": 8,
        "extra_body": {"guided_json": {"type": "integer", "multipleOf": number}},
    }


def test_a_constraint_that_takes_too_much_fails_its_requests_only(served):
    """llguidance would take gigabytes for each, in the server's process."""
    served.set_limits(ProcessLimits(memory_bytes=16 << 20, compile_seconds=600.0))
    numbers = [9999991, 9999973, 9999971, 9999943]
    with (
        served.client() as client,
        served.client("tml-second") as other,
        ThreadPoolExecutor(4) as threads,
    ):

        def answered(number: int) -> str:
            with pytest.raises(openai.BadRequestError) as caught:
                client.completions.create(**multiples_of(number))
            assert caught.value.param == "guided_json"
            return str(caught.value)

        for first in threads.map(answered, numbers):
            assert "guided_json of kind json_schema cannot be used: it needs more than 16" in first
        assert "is refused for 10 min" in answered(numbers[0])
        # Another tenant neither knows nor suffers.
        choice = other.completions.create(**multiples_of(3)).choices[0]
        assert choice.finish_reason == "length" or int(choice.text) % 3 == 0
        with pytest.raises(openai.BadRequestError, match="cannot be used"):
            other.completions.create(**multiples_of(numbers[0]))


@pytest.mark.parametrize(("stream", "number"), [(False, 9999937), (True, 9999929)])
def test_a_compilation_ends_when_its_client_disconnects(served, stream, number):
    served.set_limits(ProcessLimits(memory_bytes=8 << 30, compile_seconds=600.0))
    options = multiples_of(number)
    constraint = options.pop("extra_body")
    body = json.dumps({**options, **constraint, "stream": stream}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-API-Key: tml-first\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    port = int(served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as connection:
        connection.sendall(head.encode() + body)
        wait_until(served.processes)
    wait_until(lambda: not served.processes())


@pytest.mark.parametrize("text", ["a</tool_call>b", "<tool_call>", '"</tool_call>\\', "<|im_end|>"])
def test_a_tag_in_an_argument_is_text(served, text):
    parameters = {"type": "object", "properties": {"s": {"const": text}}, "required": ["s"]}
    tool = {"type": "function", "function": {"name": "say", "parameters": parameters}}
    options: Any = {
        "model": CHAT,
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "say"}},
        "max_tokens": 200,
        "seed": 1,
    }
    with served.client() as client:
        [choice] = client.chat.completions.create(**options).choices
        chunks = list(client.chat.completions.create(**options, stream=True))
    [call] = choice.message.tool_calls
    assert json.loads(call.function.arguments)["s"] == text
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert not choice.message.content
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_biases_and_allowed_tokens_choose_the_text(served):
    """Their logprobs are those of the model without them."""
    a, b = ord("a"), ord("b")
    options: Any = {"model": BASE, "prompt": "Go", "max_tokens": 6, "logprobs": 2, "seed": 3}
    with served.client() as client:
        biased = client.completions.create(**options, logit_bias={str(b): 100}).choices[0]
        allowed = client.completions.create(
            **options, extra_body={"allowed_token_ids": [b]}
        ).choices[0]
        scored = client.completions.create(
            **options | {"prompt": "Gobbbbbb", "max_tokens": 0}, echo=True
        ).choices[0]
        chat = client.chat.completions.create(
            model=CHAT,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=4,
            logit_bias={str(a): 100},
        ).choices[0]
    assert biased.text == allowed.text == "bbbbbb"
    expected = pytest.approx(scored.logprobs.token_logprobs[2:], abs=1e-4)
    assert biased.logprobs.token_logprobs == expected
    assert allowed.logprobs.token_logprobs == expected
    assert chat.message.content == "aaaa"


@pytest.mark.parametrize("name", ['say "hi"', "a.b", "ä", "a" * 65, "a\n", ""])
def test_a_tool_has_a_name_of_letters_and_digits(served, name):
    tool: Any = {"type": "function", "function": {"name": name}}
    with served.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=CHAT, messages=[{"role": "user", "content": "Hello"}], tools=[tool]
        )
    assert caught.value.param == "tools"
    assert "tools[0].function.name=" in str(caught.value)
    assert "[a-zA-Z0-9_-]{1,64}" in str(caught.value)
