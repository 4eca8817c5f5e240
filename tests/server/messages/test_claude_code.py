"""Claude Code, a coding agent, on a planish server. make test-extras installs it from npm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import BASE, CHAT, KEYS, THINKER, Served, serving

from planish.service import Sample
from planish.testing import tiny_model

pytestmark = pytest.mark.slow
CONTEXT = 1 << 17
SYSTEM_FIRST = "HuggingFaceTB/SmolLM3-3B"
"""A model whose chat format has a system message at the start only."""


@pytest.fixture(scope="module")
def program() -> Path:
    """The program in the environment of make test-extras."""
    packages = Path(sys.prefix) / "node_modules/@anthropic-ai"
    found = sorted(packages.glob("claude-code-*/claude"))
    if not found:
        pytest.skip("Claude Code is not installed; make test-extras installs it")
    return found[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    """A server whose model has room for the prompt of the agent, of about 50,000 bytes."""
    model = tiny_model(tmp_path_factory.mktemp("model"), max_context=CONTEXT)
    data = tmp_path_factory.mktemp("agent")
    with serving(dict.fromkeys((BASE, CHAT, THINKER, SYSTEM_FIRST), model), data) as served:
        yield served


def run_agent(program: Path, served: Served, home: Path, *arguments: str) -> dict[str, Any]:
    """Return the report of a run of the agent in the folder `home`/work."""
    work = home / "work"
    work.mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_API_KEY": next(iter(KEYS)),
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": CHAT,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    command = [str(program), "-p", "Write the file.", "--output-format", "json", *arguments]
    ended = subprocess.run(
        command,
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return json.loads(ended.stdout)


@pytest.mark.parametrize("model", [CHAT, THINKER, SYSTEM_FIRST])
def test_the_agent_writes_a_file_with_its_tool(program, served, tmp_path, monkeypatch, model):
    path = tmp_path / "work/hello.txt"
    arguments = json.dumps({"file_path": str(path), "content": "hello\n"}, separators=(",", ":"))
    calls = f'<tool_call>\n{{"name": "Write", "arguments": {arguments}}}\n</tool_call>'
    thought = "<think>\nI write it.\n</think>\n\n" if model != CHAT else ""
    script = [f"{thought}I write the file.\n{calls}", f"{thought}Done."]
    prompts: list[list[int]] = []
    submit = served.engine.submit

    def submit_and_record(operation: Any) -> Any:
        if isinstance(operation, Sample):
            prompts.append(operation.prompt.to_ints())
        return submit(operation)

    monkeypatch.setattr(served.engine, "submit", submit_and_record)
    with served.engine.saying_in_turn(script, served.tokenizer):
        report = run_agent(
            program, served, tmp_path, "--model", model, "--permission-mode", "acceptEdits"
        )
    assert path.exists(), str(report)
    assert path.read_text() == "hello\n"
    assert (report["is_error"], report["result"], report["num_turns"]) == (False, "Done.", 2)
    first, second = (served.tokenizer.decode(prompt) for prompt in prompts)
    # The call comes back as it was sampled, and the cached prefix is the same.
    assert calls in second
    assert second.startswith(first.removesuffix("<|im_start|>assistant\n"))
    assert "x-anthropic-billing-header" not in first
    assert report["usage"]["input_tokens"] + report["usage"]["cache_read_input_tokens"] > 20_000


def test_the_agent_understands_that_its_prompt_is_too_long(program, served, tmp_path):
    report = run_agent(
        program,
        served,
        tmp_path,
        "--model",
        CHAT,
        "--append-system-prompt",
        "x" * (CONTEXT - 10_000),
    )
    assert report["is_error"]
    assert report["result"].startswith("Prompt is too long")
