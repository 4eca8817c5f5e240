"""Agents that use /v1/responses: the OpenAI Agents SDK on the embedded model, and Codex on a model
whose answers are scripted. They are installed by make test-extras.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answers import MODEL, TOKENS, Colour, mix
from scripted_server import BASE, CHAT, Served, serving

from planish.service import Sample
from planish.testing import EOS_TOKEN_ID, tiny_model

pytestmark = [
    pytest.mark.slow,
    # The packages' own warnings.
    pytest.mark.filterwarnings("ignore"),
]


async def test_the_agents_sdk_calls_tools_and_parses_its_output(base_url):
    agents = pytest.importorskip("agents")
    import openai

    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=base_url, api_key="tml-any") as client:
        settings: Any = {
            "model": agents.OpenAIResponsesModel(model=MODEL, openai_client=client),
            "instructions": "Mix colours.",
        }
        tool_agent = agents.Agent(
            name="mixer",
            tools=[agents.function_tool(mix)],
            # The tool's output is the answer: the model would call the tool again and again.
            tool_use_behavior="stop_on_first_tool",
            model_settings=agents.ModelSettings(
                tool_choice="required", parallel_tool_calls=False, max_tokens=TOKENS
            ),
            **settings,
        )
        run = await agents.Runner.run(tool_agent, "Mix red with yellow.")
        assert run.final_output in ("orange", "green")
        # The whole conversation, with the call and its output, is the input of the next run.
        output_agent = agents.Agent(
            name="colours",
            output_type=Colour,
            model_settings=agents.ModelSettings(max_tokens=TOKENS),
            **settings,
        )
        question: Any = [*run.to_input_list(), {"role": "user", "content": "Which colour?"}]
        assert isinstance((await agents.Runner.run(output_agent, question)).final_output, Colour)
        streamed = agents.Runner.run_streamed(output_agent, question)
        events = [event.type async for event in streamed.stream_events()]
        assert isinstance(streamed.final_output, Colour)
        assert "raw_response_event" in events


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Served]:
    """Codex sends 40,000 bytes of instructions and tools, and here each byte is a token."""
    directory = tiny_model(tmp_path / "model", max_context=1 << 17)
    with serving({BASE: directory, CHAT: directory}, tmp_path / "data") as served:
        yield served


COMMAND = '{"name": "exec_command", "arguments": {"cmd": "echo planish-$((40 + 2))"}}'


def test_codex_runs_a_command(scripted: Served, tmp_path: Path, monkeypatch):
    codex = shutil.which("codex")
    if codex is None:
        pytest.skip("codex is not installed: npm install --global @openai/codex@0.171.0")
    turns = iter([f"I look.\n<tool_call>\n{COMMAND}\n</tool_call>", "It says 42."])
    prompts: list[str] = []
    submit = scripted.engine.submit

    def say_next(operation: Any) -> Any:
        if isinstance(operation, Sample):
            prompts.append(scripted.tokenizer.decode(operation.prompt.to_ints()))
            script = scripted.tokenizer.encode(next(turns), add_special_tokens=False)
            scripted.engine.script = [*script, EOS_TOKEN_ID]
        return submit(operation)

    monkeypatch.setattr(scripted.engine, "submit", say_next)
    home = tmp_path / "codex"
    home.mkdir()
    (home / "config.toml").write_text(
        f'model = "{CHAT}"\nmodel_provider = "planish"\nweb_search = "disabled"\n'
        "[model_providers.planish]\n"
        f'name = "planish"\nbase_url = "{scripted.url}/v1"\n'
        'env_key = "PLANISH_API_KEY"\nwire_api = "responses"\n'
    )
    options = ["--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox"]
    run = subprocess.run(
        [codex, "exec", *options, "-C", str(tmp_path), "Run the command."],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "CODEX_HOME": str(home), "PLANISH_API_KEY": "tml-first"},
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    events = [json.loads(line) for line in run.stdout.splitlines()]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    [command] = [item for item in items if item["type"] == "command_execution"]
    assert command["aggregated_output"] == "planish-42\n"
    messages = [item["text"] for item in items if item["type"] == "agent_message"]
    assert messages == ["I look.", "It says 42."]
    assert events[-1]["type"] == "turn.completed"
    # The second prompt continues the first one with the sampled call and its output.
    first, second = prompts
    assert second.startswith(f"{first}I look.\n<tool_call>\n{COMMAND}\n</tool_call>")
    assert "planish-42" in second.removeprefix(first)
