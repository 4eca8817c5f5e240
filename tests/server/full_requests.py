"""Every POST and PUT of both wires and of /v1, with every field set: what the size fuzzer enlarges,
and what the test of docs/operators/limits.md walks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from planish.wire.messages import (
    FLOAT32,
    INT64,
    PROTOBUF,
    ForwardBackwardRequestMessage,
)

API = "/api/v1"
JSON = "application/json"


@dataclass
class Ids:
    """Ids of one tenant that exist, and the next numbers of its requests."""

    base_model: str
    session: str
    model: str
    sampler: str
    path: str
    """A training checkpoint."""
    request: str
    numbers: dict[str, int] = field(default_factory=dict)

    def next(self, counter: str) -> int:
        """Return the next number of a counter: 1, 2, ..."""
        self.numbers[counter] = self.numbers.get(counter, 0) + 1
        return self.numbers[counter]


@dataclass(frozen=True)
class FullRequest:
    """One endpoint in one of its forms."""

    name: str
    """Names the form; unique."""
    method: str
    path: str
    body: Any
    """A JSON object, or a protobuf message."""
    route: str = ""
    """The path of the route, if it has parameters."""

    @property
    def content_type(self) -> str:
        return JSON if isinstance(self.body, dict) else PROTOBUF

    def encoded_body(self) -> bytes:
        if isinstance(self.body, dict):
            return orjson.dumps(self.body)
        return self.body.SerializeToString()


def full_requests(ids: Ids) -> list[FullRequest]:
    """Return one request for each form of each endpoint, with ids and numbers that are valid
    now.
    """
    builders: list[Callable[[Ids], list[FullRequest]]] = [
        _session_requests,
        _model_requests,
        _save_requests,
        _upload_requests,
        _sampling_requests,
        _openai_requests,
    ]
    return [request for build in builders for request in build(ids)]


def _post(name: str, body: Any, path: str = "", route: str = "") -> FullRequest:
    return FullRequest(name, "POST", path or f"{API}/{name}", body, route and API + route)


def _session_requests(ids: Ids) -> list[FullRequest]:
    description = {"user_metadata": {"key": "value"}, "display_name": "name"}
    return [
        _post("client/config", {"sdk_version": "0.38.0"}),
        _post("client/dynamic_config", {"sdk_version": "0.38.0"}),
        _post(
            "create_session",
            {
                "tags": ["a"],
                "sdk_version": "1",
                "project_id": "p",
                "type": "create_session",
                **description,
            },
        ),
        _post("session_heartbeat", {"session_id": ids.session, "type": "session_heartbeat"}),
        _post(
            "sessions/finish",
            {"reason": {"type": "success"}, "detail": "why"},
            f"{API}/sessions/{'0' * 16}/finish",
            "/sessions/{session_id}/finish",
        ),
        _post(
            "sessions/search",
            {
                "session_id": ids.session,
                "owner": {"type": "own"},
                "project_ids": ["default"],
                "statuses": [{"type": "active", "reasons": []}],
                "limit": 5,
                "cursor": {"last_created_at": "2030-01-01T00:00:00+00:00", "last_session_id": "x"},
                **description,
            },
        ),
        _post("telemetry", {"events": [{"event": "SESSION_START"}], "platform": "x"}),
    ]


def _model_requests(ids: Ids) -> list[FullRequest]:
    session_id = {"session_id": ids.session}
    optimizer = {"optimizer_config": {"type": "adamw", "version": 1}}
    user_metadata = {"user_metadata": {"key": "value"}}
    lora = {"rank": 2, "seed": 1, "train_mlp": True, "train_attn": True, "train_unembed": False}
    creation = {**session_id, "base_model": ids.base_model, **optimizer, **user_metadata}
    tensor = {"data": [2, 3], "dtype": "int64", "shape": [2]}
    csr = {
        "data": [1.0, 1.0], "dtype": "float32", "shape": [2, 1],
        "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 0],
    }  # fmt: skip
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "loss_fn_inputs": {"target_tokens": tensor, "weights": csr},
        "model_input_spans": [],
        "loss_fn_input_spans": [],
    }
    inputs = {
        "data": [datum],
        "loss_fn": "cross_entropy",
        "loss_fn_config": {"option": 1.0},
    }
    adam = {
        "learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12,
        "weight_decay": 0.1, "grad_clip_norm": 1.0,
    }  # fmt: skip
    return [
        _post(
            "create_model",
            {**creation, "type": "x", "model_seq_id": 10 + ids.next("models"), "lora_config": lora},
        ),
        _post(
            "load_weights",
            {**creation, "type": "x", "model_seq_id": 10 + ids.next("models"), "path": ids.path,
             "optimizer": True},
        ),
        _post(
            "load_weights of a model",
            {**_next_ids(ids), "type": "x", "path": ids.path, "optimizer": True, **optimizer},
            f"{API}/load_weights",
        ),
        _post("get_info", {"model_id": ids.model, "type": "get_info"}),
        _post("forward_backward", {**_next_ids(ids), "forward_backward_input": inputs}),
        _post("forward", {**_next_ids(ids), "forward_input": inputs}),
        _post("forward_backward as protobuf", _gradient_message(ids), f"{API}/forward_backward"),
        _post("optim_step", {**_next_ids(ids), "type": "optim_step", "adam_params": adam}),
        _post("unload_model", {"model_id": f"{ids.session}:train:9999", "type": "unload_model"}),
    ]  # fmt: skip


def _next_ids(ids: Ids) -> dict[str, Any]:
    return {"model_id": ids.model, "seq_id": ids.next(ids.model)}


def _gradient_message(ids: Ids) -> Any:
    message = ForwardBackwardRequestMessage(
        **_next_ids(ids), loss_fn="cross_entropy", forward_only=False
    )
    message.loss_fn_config["option"] = 1.0
    message.loss_fn_config_v2["option"].number = 1.0
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = b"\1\0\0\0\2\0\0\0"
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dtype, targets.dense = INT64, b"\2\0\0\0\0\0\0\0\3\0\0\0\0\0\0\0"
    targets.shape.append(2)
    weights = datum.loss_fn_inputs["weights"]
    weights.dtype = FLOAT32
    weights.shape.extend((2, 1))
    weights.sparse_csr.values = b"\0\0\x80?\0\0\x80?"
    weights.sparse_csr.crow_indices = bytes(8) + b"\1" + bytes(7) + b"\2" + bytes(7)
    weights.sparse_csr.col_indices = bytes(16)
    for spans in (datum.model_input_spans, datum.loss_fn_input_spans):
        spans.add().prompt_tokens.sequence_id = "a"
        spans[0].prompt_tokens.offset = 0
        spans[0].prompt_tokens.length = 2
    return message


def _save_requests(ids: Ids) -> list[FullRequest]:
    def save_body(*, options: bool = True) -> dict[str, Any]:
        body = {**_next_ids(ids), "type": "x", "path": f"n{ids.next('saves') % 8}"}
        user_metadata = {"overwrite": True, "user_metadata": {"key": "value"}} if options else {}
        return {**body, "ttl_seconds": 3600, **user_metadata}

    sampler_number = {"sampling_session_seq_id": 10 + ids.next("samplers")}
    recipients = {"age_encryption_recipients": []}
    run_id, _, checkpoint = ids.path.removeprefix("tinker://").partition("/")
    return [
        _post("save_weights", save_body()),
        _post("save_weights_for_sampler", {**save_body(), "kind": "snapshot"}),
        _post(
            "save_weights_for_sampler without a name",
            {**_next_ids(ids), "type": "x", "kind": "snapshot", **sampler_number},
            f"{API}/save_weights_for_sampler",
        ),
        _post("save_weights_external", {**save_body(options=False), **recipients}),
        _post("weights_info", {"tinker_path": ids.path}),
        _post(
            "checkpoints/search",
            {
                "owner": {"type": "own"},
                "project_ids": ["default"],
                "user_metadata": {"key": "value"},
                "checkpoint_type": "sampler",
                "base_models": [ids.base_model],
                "limit": 5,
                "cursor": {
                    "last_created_at": "2030-01-01T00:00:00+00:00", "last_checkpoint_uuid": "x",
                },
            },
        ),
        _post(
            "copy_weights",
            {"source_path": ids.path, "session_id": ids.session, "ttl_seconds": 60,
             "model_seq_id": 10 + ids.next("models")},
        ),
        _post(
            "copy_weights into a project",
            {"source_path": ids.path, "destination_project_id": "p"},
            f"{API}/copy_weights",
        ),
        FullRequest(
            "ttl", "PUT", f"{API}/training_runs/{run_id}/checkpoints/{checkpoint}/ttl",
            {"ttl_seconds": 3600}, API + "/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/ttl",
        ),
    ]  # fmt: skip


def _upload_requests(ids: Ids) -> list[FullRequest]:
    lora = {"rank": 2, "seed": 1, "train_mlp": True, "train_attn": True, "train_unembed": False}
    files = ["adapter_config.json", "adapter_model.safetensors"]
    return [
        _post(
            "external_weights_upload_start",
            {"base_model": ids.base_model, "lora_config": lora, "destination_project_id": "p"},
        ),
        _post("external_weights_upload_finish", {"upload_id": "0" * 16}),
        _post(
            "planish/import_start",
            {"base_model": ids.base_model, "name": "a", "files": files, "quantize": "int8",
             "source": "b"},
        ),
        _post("planish/import_finish", {"upload_id": "0" * 16}),
    ]  # fmt: skip


def _sampling_requests(ids: Ids) -> list[FullRequest]:
    def sample_body() -> dict[str, Any]:
        params = {
            "max_tokens": 2, "seed": 1, "stop": ["a"], "temperature": 1.0, "top_k": 5, "top_p": 0.9,
            "min_p": 0.1,
        }  # fmt: skip
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        targets = {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}
        return {
            "sampling_session_id": ids.sampler, "seq_id": ids.next("samples"), "num_samples": 2,
            "type": "sample", "prompt": prompt, "sampling_params": params, "prompt_logprobs": True,
            "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2, "prompt_alt_tokens_k": 1,
            "target_prompt_logprobs": targets, "prompt_logprobs_last_n": 3,
            "record_stability_info": False, "prompt_only": False,
        }  # fmt: skip

    return [
        _post(
            "create_sampling_session",
            {"session_id": ids.session, "sampling_session_seq_id": 10 + ids.next("samplers"),
             "base_model": ids.base_model, "type": "x"},
        ),
        _post(
            "create_sampling_session of a checkpoint",
            {"session_id": ids.session, "sampling_session_seq_id": 10 + ids.next("samplers"),
             "model_path": ids.path.replace("/weights/", "/sampler_weights/"), "type": "x"},
            f"{API}/create_sampling_session",
        ),
        _post("asample", sample_body()),
        _post("planish/draw", {"requests": [sample_body()]}),
        _post("planish/release", {"sampler_id": f"{ids.session}:sample:9999"}),
        _post("retrieve_future", {"request_id": ids.request, "allow_metadata_only": True}),
        _post("cancel_future", {"request_id": "x"}),
    ]  # fmt: skip


def _openai_requests(ids: Ids) -> list[FullRequest]:
    options = {
        "model": ids.base_model, "max_tokens": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 5,
        "min_p": 0.1, "n": 2, "seed": 1, "stop": ["a"], "stream": False, "user": "u",
        "metadata": {"a": "b"}, "logit_bias": {}, "frequency_penalty": 0, "presence_penalty": 0,
    }  # fmt: skip
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"},
        {"role": "assistant", "content": "x", "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "content": "t", "tool_call_id": "c"},
        {"role": "user", "content": "go"},
    ]
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "auto"}
    return [
        _post(
            "v1/chat/completions",
            {**options, "messages": messages, "logprobs": True, "top_logprobs": 2,
             "max_completion_tokens": 2, "stream_options": None},
            "/v1/chat/completions",
        ),
        _post(
            "v1/chat/completions with tools",
            {**options, "messages": messages, **tools},
            "/v1/chat/completions",
        ),
        _post(
            "v1/chat/completions as a stream",
            {**options, "messages": messages[:2], "stream": True, "stream_options": {"include_usage": True}},
            "/v1/chat/completions",
        ),
        _post(
            "v1/completions",
            {**options, "prompt": ["hi", "you"], "echo": True, "logprobs": 2, "suffix": "", "best_of": 1},
            "/v1/completions",
        ),
        _post(
            "v1/responses",
            {"model": ids.base_model, "input": [
                {"type": "message", "id": "m", "role": "user", "status": "completed",
                 "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": ""}],
                 "content": [], "encrypted_content": None, "status": "completed"},
                {"type": "message", "role": "assistant", "phase": "final_answer",
                 "content": [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "t"}],
             "instructions": "s", "max_output_tokens": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 5,
             "min_p": 0.1, "seed": 1, "tools": [{"type": "function", "strict": False, **function}],
             "tool_choice": "auto", "parallel_tool_calls": True,
             "text": {"format": {"type": "text"}, "verbosity": "medium"},
             "reasoning": {"effort": None, "summary": None}, "include": [], "top_logprobs": 0,
             "stream": False, "store": False, "metadata": {"a": "b"}, "user": "u", "truncation": "auto",
             "prompt_cache_key": "k", "safety_identifier": "i", "truncate_max_tokens": True},
            "/v1/responses",
        ),
        *_messages_requests(ids),
        _post("v1/completions of tokens", {**options, "prompt": [1, 2, 3]}, "/v1/completions"),
        _post(
            "v1/load_lora_adapter",
            {"lora_name": "adapter", "lora_path": _directory(ids.path), "load_inplace": True,
             "base_model_name": ids.base_model},
            "/v1/load_lora_adapter",
        ),
        _post(
            "v1/unload_lora_adapter",
            {"lora_name": f"adapter-{ids.next('adapters')}", "lora_int_id": 1},
            "/v1/unload_lora_adapter",
        ),
        _post(
            "tokenize",
            {"model": ids.base_model, "messages": messages, "tools": tools["tools"],
             "add_generation_prompt": True, "return_token_strs": True},
            "/tokenize",
        ),
        _post(
            "tokenize a prompt",
            {"model": ids.base_model, "prompt": "hi", "add_special_tokens": True},
            "/tokenize",
        ),
        _post("detokenize", {"model": ids.base_model, "tokens": [1, 2, 3]}, "/detokenize"),
    ]  # fmt: skip


def _messages_requests(ids: Ids) -> list[FullRequest]:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    counted = {
        "model": ids.base_model,
        "system": [{"type": "text", "text": "s", **cached}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", **cached}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "", "signature": "planish"},
                {"type": "text", "text": "x"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1.0]}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "is_error": False,
                 "content": [{"type": "text", "text": "t"}]},
                {"type": "text", "text": "go"}]},
        ],
        "tools": [
            {"type": "custom", "name": "f", "description": "d", "strict": False,
             "input_schema": {"type": "object", "properties": {}}, "input_examples": [{}],
             "defer_loading": False, "eager_input_streaming": True, "allowed_callers": ["direct"],
             **cached},
        ],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        **cached,
    }  # fmt: skip
    options = {
        "max_tokens": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "stop_sequences": ["a"],
        "stream": False, "service_tier": "auto", "metadata": {"user_id": "u"},
    }  # fmt: skip
    return [
        _post("v1/messages", {**counted, **options}, "/v1/messages"),
        _post("v1/messages/count_tokens", counted, "/v1/messages/count_tokens"),
    ]


def _directory(path: str) -> str:
    """Return the directory of the sampler checkpoint beside a training checkpoint, relative to the
    server's data directory.
    """
    return path.removeprefix("tinker://").replace("/weights/", "/sampler_weights/")
