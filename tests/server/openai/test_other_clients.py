"""pydantic-ai, instructor, LangChain, LiteLLM, Inspect, verifiers and lm-eval, each unmodified, on
the embedded model. They are installed by make test-extras.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from answers import MIX, MODEL, QUESTION, TOKENS, Anything, Colour, mix

ATTEMPTS = 10
"""How often a test may ask where the constraint does not bound the answer."""
pytestmark = [
    pytest.mark.slow,
    # The packages' own warnings.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True, scope="module")
def _leaked_connections() -> Iterator[None]:
    """Some clients leave connections open. Their warnings would fail the run when it ends."""
    yield
    with warnings.catch_warnings(action="ignore"):
        for _ in range(3):
            gc.collect()


@pytest.mark.parametrize("kind", ["type", "tool", "native"])
def test_pydantic_ai_gets_its_output(base_url, kind):
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent, NativeOutput, ToolOutput

    kinds: Any = {"type": Colour, "tool": ToolOutput(Colour), "native": NativeOutput(Colour)}
    settings: Any = {"max_tokens": TOKENS}
    agent = Agent(f"openai-chat:{MODEL}", output_type=kinds[kind], model_settings=settings)
    assert isinstance(agent.run_sync("Which colour has the sea?").output, Colour)


def test_pydantic_ai_gets_a_prompted_output(base_url):
    """Such an output is constrained to JSON, but not to its schema, so its length is not
    bounded.
    """
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent, PromptedOutput
    from pydantic_ai.exceptions import OutputTokenLimitExceeded

    agent = Agent(f"openai-chat:{MODEL}", output_type=PromptedOutput(Anything), retries=5)
    for seed in range(ATTEMPTS):
        settings: Any = {"max_tokens": 600, "seed": seed}
        with suppress(OutputTokenLimitExceeded):
            result = agent.run_sync("Which colour has the sea?", model_settings=settings)
            assert isinstance(result.output, Anything)
            return
    raise AssertionError(f"none of {ATTEMPTS} outputs was complete")


def test_a_pydantic_ai_agent_calls_a_tool(base_url):
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent, Tool
    from pydantic_ai.messages import ToolReturnPart

    async def once(context: Any, tool: Any) -> Any:
        """Hide the tool after the first step, because the model would call it again and again."""
        return tool if context.run_step == 1 else None

    settings: Any = {"max_tokens": TOKENS, "parallel_tool_calls": False}
    for seed in range(ATTEMPTS):
        agent = Agent(
            f"openai-chat:{MODEL}", output_type=Colour, tools=[Tool(mix, prepare=once)], retries=5
        )
        result = agent.run_sync("Mix red with yellow.", model_settings={**settings, "seed": seed})
        assert isinstance(result.output, Colour)
        parts = [part for message in result.all_messages() for part in message.parts]
        if any(isinstance(part, ToolReturnPart) and part.tool_name == "mix" for part in parts):
            return
    raise AssertionError(f"none of {ATTEMPTS} runs called the tool first")


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "JSON"])
def test_instructor_gets_its_response_model(base_url, mode):
    """In the mode JSON, instructor sends no schema, so the length of the answer is not bounded."""
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    client = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode[mode])
    model, tokens = (Anything, 600) if mode == "JSON" else (Colour, TOKENS)
    for seed in range(ATTEMPTS if mode == "JSON" else 1):
        try:
            answer = client.create(
                model=MODEL,
                messages=QUESTION,
                response_model=model,
                max_tokens=tokens,
                max_retries=0,
                seed=seed,
            )
        except instructor.exceptions.IncompleteOutputException:
            continue
        assert isinstance(answer, model)
        return
    raise AssertionError(f"no answer was complete in mode {mode}")


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_gets_its_structured_output(base_url, method):
    langchain_openai = pytest.importorskip("langchain_openai")
    schema = Anything if method == "json_mode" else Colour
    model = langchain_openai.ChatOpenAI(
        model=MODEL, max_tokens=600 if method == "json_mode" else TOKENS
    )
    structured = model.with_structured_output(schema, method=method).with_retry(
        stop_after_attempt=ATTEMPTS, wait_exponential_jitter=False
    )
    assert isinstance(structured.invoke("Which colour has the sea? Answer with JSON."), schema)


@pytest.mark.parametrize("choice", ["any", "mix"])
def test_langchain_calls_a_tool(base_url, choice):
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(model=MODEL, max_tokens=TOKENS)
    bound = model.bind_tools([MIX], tool_choice=choice, parallel_tool_calls=False)
    for message in (bound.invoke("Mix red."), sum_of(bound.stream("Mix red."))):
        [call] = message.tool_calls
        mix(**call["args"])


def sum_of(chunks: Any) -> Any:
    total = next(chunks)
    for chunk in chunks:
        total += chunk
    return total


def test_litellm_calls_tools_and_gets_json(base_url):
    litellm = pytest.importorskip("litellm")
    options: Any = {
        "model": f"openai/{MODEL}",
        "api_base": base_url,
        "messages": QUESTION,
        "max_tokens": TOKENS,
    }
    tools = {"tools": [MIX], "tool_choice": "required", "parallel_tool_calls": False}
    whole = litellm.completion(**options, **tools)
    chunks = list(litellm.completion(**options, **tools, stream=True))
    for answer in (whole, litellm.stream_chunk_builder(chunks)):
        [call] = answer.choices[0].message.tool_calls
        mix(**json.loads(call.function.arguments))
    answer = litellm.completion(**options, response_format=Colour)
    Colour.model_validate_json(answer.choices[0].message.content)


def test_inspect_runs_tool_tasks(base_url, tmp_path):
    pytest.importorskip("inspect_ai")
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import basic_agent, generate, use_tools
    from inspect_ai.tool import tool
    from inspect_ai.util import json_schema

    @tool
    def mixer() -> Any:
        async def mix_colours(colour: str) -> str:
            """Mix a colour with yellow.

            Args:
                colour: the colour
            """
            return f"{colour} and yellow"

        return mix_colours

    model = get_model(f"openai/{MODEL}", responses_api=False)

    def run(solver: Any, **config: Any) -> Any:
        sample = Sample(input="Mix red with yellow.", target="orange")
        task = Task(dataset=[sample], solver=solver, scorer=includes())
        options: Any = {"log_dir": str(tmp_path), "display": "none", "max_tokens": TOKENS}
        [log] = eval(task, model=model, **options, **config)
        assert log.status == "success", log.error
        return log.samples[0].messages

    messages = run([use_tools(mixer(), tool_choice="any"), generate(tool_calls="single")])
    assert any(message.role == "tool" for message in messages)
    run([use_tools(mixer()), generate()])
    run([basic_agent(tools=[mixer()], message_limit=6)])
    schema = ResponseSchema(name="colour", json_schema=json_schema(Colour))
    config = GenerateConfig(response_schema=schema)
    task_messages = run([generate()], **config.model_dump(exclude_none=True))
    Colour.model_validate_json(task_messages[-1].text)


def test_verifiers_plays_a_tool_environment(base_url):
    vf = pytest.importorskip("verifiers")
    from datasets import Dataset

    async def mix_colours(colour: str) -> str:
        """Mix a colour with yellow.

        Args:
            colour: the colour
        """
        return f"{colour} and yellow"

    async def one(completion: Any) -> float:
        return 1.0

    dataset = Dataset.from_list([{"question": "Mix red with yellow.", "answer": "orange"}])
    environment = vf.ToolEnv(
        dataset=dataset, tools=[mix_colours], rubric=vf.Rubric(funcs=[one]), max_turns=3
    )
    client = vf.ClientConfig(api_base_url=base_url, api_key_var="OPENAI_API_KEY")
    for options in ({}, {"tool_choice": "required", "parallel_tool_calls": False}):
        outputs = environment.evaluate_sync(
            client=client,
            model=MODEL,
            sampling_args={"max_tokens": TOKENS, **options},
            num_examples=1,
            rollouts_per_example=2,
        )["outputs"]
        assert [output["error"] for output in outputs] == [None, None]
        assert all(
            (output["metrics"]["total_tool_calls"] > 0) >= bool(options) for output in outputs
        )


def test_lm_eval_scores_and_generates(base_url):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from planish.model.sources.resolve import resolve_model

    model = LocalCompletionsAPI(
        base_url=f"{base_url}/completions",
        model=MODEL,
        tokenizer=str(resolve_model(MODEL)),
        tokenizer_backend="huggingface",
        max_length=2048,
    )
    requests: Any = [
        Instance("loglikelihood", {}, ("The sea is", ending), number)
        for number, ending in enumerate((" blue", " potato"))
    ]
    (likely, _), (unlikely, _) = model.loglikelihood(requests)
    assert 0 > likely > unlikely
    until = {"until": ["."], "max_gen_toks": 10, "do_sample": False}
    [text] = model.generate_until([Instance("generate_until", {}, ("The sea is", until), 0)])
    assert text
