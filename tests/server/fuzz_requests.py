"""Valid requests to every endpoint, with ids that exist, existed, belong to another tenant or point
elsewhere. The fuzzer starts from these.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import orjson

from planish.service import ForwardBackward
from planish.types import Datum, ModelInput
from planish.wire.training import forward_backward_to_message

API = "/api/v1"
_MAX_IDS_OF_A_KIND = 64
# Each names a file beside the data directory in another way; the fuzzer looks for its text in every
# answer.
SECRET_FILE = "secret.txt"
ODD_IDS = (
    *("", "x", "..", ".", "0", "-1", "a b", "\n", "\u0000", "é", "\U0001f600", "\u202e", "s" * 5000, "weights", "tinker://"),
    *(f"../{SECRET_FILE}", f"../../{SECRET_FILE}", f"../../../{SECRET_FILE}", f"..\\..\\{SECRET_FILE}", f"/{SECRET_FILE}"),
    *("../../etc/passwd", "/etc/passwd", "a/b", "a/../b", "%2e%2e%2f", "%252e%252e%252f", "..;/", "file:///etc/passwd"),
    *("..%c0%af", "．．／", "a\u0000.txt", "CON", "~root", "$HOME", "`id`", "'; DROP TABLE requests; --", "{0}", "%s%n"),
)  # fmt: skip


@dataclass
class KnownIds:
    """Ids with a meaning."""

    base_model: str
    sessions: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)

    def learn(self, answer: Mapping[str, Any]) -> None:
        """Keep the ids in an answer, the latest of each kind."""
        fields = {
            "session_id": self.sessions, "model_id": self.models, "sampling_session_id": self.samplers,
            "request_id": self.requests, "path": self.paths, "tinker_path": self.paths,
        }  # fmt: skip
        for name, ids in fields.items():
            if isinstance(answer.get(name), str) and answer[name] not in ids:
                ids.append(answer[name])
                del ids[:-_MAX_IDS_OF_A_KIND]
        urls = answer.get("urls")
        if isinstance(urls, dict):
            self.downloads = [str(url).partition(API)[2] for url in urls.values()]


class RequestGenerator:
    """Chooses valid requests. `others` are the ids of a tenant that must not be affected."""

    def __init__(self, rng: random.Random, known: KnownIds, others: KnownIds) -> None:
        self.random = rng
        self._known = known
        self._others = others
        self._numbers: dict[str, int] = {}

    def learn(self, answer: bytes) -> None:
        """Use the ids of an answer in later requests."""
        if answer.startswith(b"{"):
            self._known.learn(orjson.loads(answer))

    def json_request(self) -> tuple[str, Any]:
        """Return path and body of a POST."""
        bodies = self._bodies()
        path = self.random.choice(list(bodies))
        return path, bodies[path]

    def protobuf_request(self) -> bytes:
        """Return a body of /forward_backward."""
        tokens = [
            self.random.choice((0, 1, 200, 271, 272, 2**31 - 1))
            for _ in range(self.random.choice((0, 1, 4)))
        ]
        inputs = {"target_tokens": tokens, "weights": [1.0] * len(tokens)} if tokens else {}
        if self.random.random() < 0.3:
            inputs["advantages"] = [float(self.random.choice((0, 1, -1))) for _ in tokens]
        model = self._model()
        operation = ForwardBackward(
            model,
            [Datum(ModelInput.from_ints(tokens), inputs)] * self.random.choice((0, 1, 2)),
            self.random.choice(
                ("cross_entropy", "cross_entropy", "ppo", "stable_reinforce", "custom", "", "é")
            ),
            forward_only=self.random.random() < 0.5,
        )
        if self.random.random() < 0.2:
            # The operation itself would reject some of these, but a client may send them.
            config = {"clip_low_threshold": self.random.choice((0.8, -1.0, float("nan")))}
            object.__setattr__(operation, "loss_fn_config", config)
        return forward_backward_to_message(operation, max(1, min(self._number(model), 2**31 - 1)))

    def rest_request(self) -> tuple[str, str, bytes]:
        """Return method, quoted path and body."""
        run, _, checkpoint = self._path().removeprefix("tinker://").partition("/")
        run = run if self.random.random() < 0.6 else self._model()
        checkpoint = (
            checkpoint if self.random.random() < 0.6 else f"weights/{self.random.choice(ODD_IDS)}"
        )
        checkpoint_url = f"{API}/training_runs/{quote(run, safe=':')}"
        item = f"{checkpoint_url}/checkpoints/{quote(checkpoint)}"
        session = quote(self._session(), safe="")
        sampler = quote(self._id(self._known.samplers, self._others.samplers), safe="")
        download = self.random.choice(
            [*self._known.downloads, f"/downloads/{quote(self._odd_id(), safe='')}/x"]
        )
        name = self.random.choice((self._known.base_model, self._path(), self._odd_id()))
        method, path = self.random.choice(
            [
                ("GET", f"{API}/training_runs"), ("GET", checkpoint_url), ("GET", f"{checkpoint_url}/checkpoints"), ("GET", f"{API}/checkpoints"),
                ("DELETE", item), ("POST", f"{item}/publish"), ("DELETE", f"{item}/publish"), ("PUT", f"{item}/ttl"),
                ("GET", f"{item}/archive"), ("GET", f"{item}/external_weights_urls"), ("GET", f"{API}{download}"),
                ("GET", f"{API}{download.rpartition('/')[0]}/{quote(self._odd_id(), safe='')}"),
                ("GET", f"{API}/sessions"), ("GET", f"{API}/sessions/{session}"), ("PUT", f"{API}/sessions/{session}/project"),
                ("GET", f"{API}/sessions/{session}/trace_export"), ("GET", f"{API}/samplers/{sampler}"),
                ("GET", f"{API}/get_server_capabilities"), ("GET", f"{API}/tokenizer?base_model={quote(name)}"), ("GET", f"{API}/healthz"),
                ("GET", f"{API}/audit"), ("GET", f"{API}/billing/usage/events"), ("GET", f"{API}/auth/apikey/me"),
                ("GET", "/v1/models"), ("GET", f"/v1/models/{quote(name)}"), ("GET", "/healthz"), ("GET", "/metrics"),
            ]
        )  # fmt: skip
        ttl = self.random.choice(("3600", "null", "-1", '"a"', "0", "1e400"))
        return method, path, b'{"ttl_seconds": %b}' % ttl.encode() if method == "PUT" else b""

    def _bodies(self) -> dict[str, Any]:
        return {API + path: body for path, body in self._session_bodies().items()} | {
            **{API + path: body for path, body in self._training_bodies().items()},
            **{API + path: body for path, body in self._sampling_bodies().items()},
            **self._openai_bodies(),
        }

    def _session_bodies(self) -> dict[str, Any]:
        session = self._session()
        ended = self._odd_id() if self.random.random() < 0.9 else session
        return {
            "/client/config": {"sdk_version": "0.38.0"},
            "/client/dynamic_config": {"sdk_version": "0.38.0"},
            "/create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "1", "type": "create_session"},
            "/session_heartbeat": {"session_id": session},
            f"/sessions/{quote(ended, safe='')}/finish": {"reason": {"type": "success"}, "detail": None},
            "/sessions/search": {"user_metadata": {}, "limit": 5, "owner": {"type": "own"}, "display_name": "a"},
            "/checkpoints/search": {"user_metadata": {}, "limit": 5, "owner": {"type": "own"}, "checkpoint_type": "sampler", "base_models": ["x"]},
            "/telemetry": {"events": [{"event": "SESSION_START"}], "platform": "x", "session_id": session},
            "/auth/token": {}, "/create_custom_loss": {}, "/join_sampling_session": {}, "/retrieve_futures": {},
        }  # fmt: skip

    def _training_bodies(self) -> dict[str, Any]:
        session, model, path = self._session(), self._model(), self._path()
        number = self._number(model)
        model_and_seq_id = {"model_id": model, "seq_id": number}
        datum = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]}
            },
        }
        given = {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": {}}
        name = self.random.choice(("a", "b", f"n{number}", self._odd_id()))
        return {
            "/create_model": {
                "session_id": session, "model_seq_id": number, "base_model": self._known.base_model,
                "lora_config": {"rank": 4, "seed": 1, "train_mlp": True}, "optimizer_config": {"type": "adamw"},
            },
            "/get_info": {"model_id": model},
            "/forward_backward": {**model_and_seq_id, "forward_backward_input": given},
            "/forward": {**model_and_seq_id, "forward_input": given},
            "/optim_step": {**model_and_seq_id, "adam_params": {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}},
            "/save_weights": {**model_and_seq_id, "path": name, "ttl_seconds": 3600, "overwrite": True},
            "/save_weights_for_sampler": {**model_and_seq_id, "path": name, "kind": "snapshot"},
            "/save_weights_external": {**model_and_seq_id, "path": name},
            "/load_weights": {"session_id": session, "model_seq_id": number, "path": path, "optimizer": True},
            "/unload_model": {"model_id": model},
            "/weights_info": {"tinker_path": path},
            "/copy_weights": {"source_path": path, "session_id": session, "model_seq_id": number, "ttl_seconds": 3600},
        }  # fmt: skip

    def _sampling_bodies(self) -> dict[str, Any]:
        sampler = self._id(self._known.samplers, self._others.samplers)
        request = self._id(self._known.requests, self._others.requests)
        sample = {
            "sampling_session_id": sampler, "seq_id": self.random.randrange(10**6), "num_samples": 2,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 3, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop": [0], "seed": 1},
            "prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2, "prompt_alt_tokens_k": 1,
            "target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}, "prompt_logprobs_last_n": 1,
        }  # fmt: skip
        return {
            "/create_sampling_session": {
                "session_id": self._session(), "sampling_session_seq_id": self.random.randrange(8),
                "base_model": self._known.base_model, "model_path": self.random.choice((None, self._path())),
            },
            "/asample": sample,
            "/retrieve_future": {"request_id": request, "allow_metadata_only": True},
            "/cancel_future": {"request_id": request},
            "/planish/draw": {"requests": [sample, {**sample, "seq_id": self.random.randrange(10**6)}]},
            "/planish/release": {"sampler_id": sampler if self.random.random() < 0.05 else self._odd_id()},
        }  # fmt: skip

    def _openai_bodies(self) -> dict[str, Any]:
        model = self.random.choice(
            (self._known.base_model, self._known.base_model, self._path(), self._odd_id())
        )
        options = {
            "model": model, "max_tokens": 3, "temperature": 1.0, "top_p": 1.0, "n": 1, "seed": 1, "stop": ["a"],
            "stream": self.random.random() < 0.5,
        }  # fmt: skip
        return {
            "/v1/chat/completions": {
                **options,
                "messages": [{"role": "user", "content": "hi"}],
                "logprobs": True,
            },
            "/v1/completions": {
                **options,
                "prompt": self.random.choice(("hi", [1, 2, 3], ["a", "b"])),
                "logprobs": 2,
            },
            "/v1/responses": {
                "model": model,
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                    {"type": "reasoning", "summary": [], "content": []},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "x"},
                ],
                "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
                "max_output_tokens": 3,
                "reasoning": {"summary": "auto"},
                "include": ["message.output_text.logprobs"],
                "stream": options["stream"],
            },
        }

    def _number(self, model: str) -> int:
        """Return the model's next number most of the time, so that its requests run; otherwise any
        number.
        """
        if self.random.random() < 0.3:
            return self.random.choice((0, 1, 2, 1000, 2**63 - 1))
        self._numbers[model] = self._numbers.get(model, 8) + 1
        return self._numbers[model]

    def _session(self) -> str:
        return self._id(self._known.sessions, self._others.sessions)

    def _model(self) -> str:
        return self._id(self._known.models, self._others.models)

    def _path(self) -> str:
        odd = [
            f"tinker://{self._odd_id()}/weights/{self._odd_id()}",
            "tinker://../weights/../..",
            "/etc/passwd",
        ]
        return self._id(self._known.paths, [*self._others.paths, *odd])

    def _odd_id(self) -> str:
        return self.random.choice(ODD_IDS)

    def _id(self, known: Sequence[str], others: Sequence[str]) -> str:
        """Return a known id most of the time, sometimes another tenant's, sometimes an invalid
        one.
        """
        pick = self.random.random()
        if pick < 0.7 and known:
            return self.random.choice(known)
        return self.random.choice(others) if pick < 0.85 and others else self._odd_id()
