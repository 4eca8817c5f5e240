"""Hooks of schemathesis, with which most of its requests reach the model, and ask for few tokens.

    planish serve --port 8000 &
    SCHEMATHESIS_HOOKS=tests/server/openai/schemathesis_hooks.py schemathesis run \\
        http://127.0.0.1:8000/openapi.json -c not_a_server_error -c content_type_conformance \\
        -c response_schema_conformance -n 4000 --max-time 420 --continue-on-failure -w 2
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import random
from typing import Any

import schemathesis

_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The default model. It is not imported, because the environment of schemathesis has no planish."""
_LIMITS = {"max_tokens": 3, "max_completion_tokens": 3, "max_output_tokens": 3, "n": 2}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Name the served model in nine of ten requests, and lower what makes a request long."""
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("model"), str) and random.random() < 0.9:
        body["model"] = _MODEL
    if context.operation.path.startswith("/v1"):
        for name, limit in _LIMITS.items():
            if isinstance(body.get(name), (int, float)) and body[name] > limit:
                body[name] = limit
        is_response = context.operation.path.endswith("/responses")
        body.setdefault("max_output_tokens" if is_response else "max_tokens", 2)
    return body
