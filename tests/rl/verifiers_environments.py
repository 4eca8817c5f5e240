"""A module that verifiers' load_environment finds, with one environment of each kind."""

import asyncio
from typing import Any

import verifiers  # pyright: ignore[reportMissingImports]
from datasets import Dataset

CLEANED: list[str] = []
"""The prompts of the rollouts whose cleanup ran."""
WAITING: list[str] = []
"""The prompts of the rollouts that wait for a slow environment."""


def load_environment(
    kind: str = "single", rows: int = 6, eval_rows: int = 0, **options: Any
) -> Any:
    data = {"question": [f"say {n}" for n in range(rows)], "answer": [str(n) for n in range(rows)]}
    tests = {
        name: [f"{value} please" for value in values[:eval_rows]] for name, values in data.items()
    }
    rubric = verifiers.Rubric(funcs=[right, longest], weights=[1.0, 0.5])
    common: dict[str, Any] = {
        "dataset": Dataset.from_dict(data),
        "eval_dataset": Dataset.from_dict(tests) if eval_rows else None,
        "rubric": rubric,
        **options,
    }
    kinds: dict[str, Any] = {
        "single": verifiers.SingleTurnEnv,
        "multi": Countdown,
        "rewarding": Rewarding,
        "rewriting": Rewriting,
        "failing": Failing,
        "hungry": Hungry,
        "slow": Slow,
    }
    if kind == "tools":
        return verifiers.ToolEnv(tools=[add], max_turns=4, **common)
    return kinds[kind](**common)


def text_of(completion: Any) -> str:
    return completion[-1].content or ""


def right(completion: Any, answer: str) -> float:
    return float(answer in text_of(completion))


def longest(completions: Any, **_: Any) -> list[float]:
    """Return 1 for the longest answer of the group, which needs the whole group."""
    lengths = [len(text_of(completion)) for completion in completions]
    return [float(length == max(lengths)) for length in lengths]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


class Countdown(verifiers.MultiTurnEnv):
    """Answers with the number of remaining turns."""

    def __init__(self, **options: Any) -> None:
        super().__init__(max_turns=3, **options)

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [{"role": "user", "content": f"{self.max_turns - len(state['trajectory'])} left"}]

    @verifiers.stop
    async def done(self, state: Any) -> bool:
        return bool(state["trajectory"]) and "done" in text_of(
            state["trajectory"][-1]["completion"]
        )

    @verifiers.cleanup
    async def noted(self, state: Any) -> None:
        CLEANED.append(state["prompt"][-1].content)


class Rewarding(Countdown):
    """Rewards single turns, as the environments of gym in verifiers do."""

    async def env_response(self, messages: Any, state: Any, **options: Any) -> Any:
        state["trajectory"][-1]["reward"] = 0.5
        return await super().env_response(messages, state, **options)


class Rewriting(Countdown):
    """Drops the history of the conversation."""

    async def get_prompt_messages(self, state: Any) -> Any:
        return [verifiers.UserMessage(content=f"anew {len(state['trajectory'])}")]


class Failing(Countdown):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        raise verifiers.InfraError("the machine is gone")


class Hungry(Countdown):
    async def get_model_response(
        self, state: Any, prompt: Any, *arguments: Any, **options: Any
    ) -> Any:
        options["sampling_args"] = {"temperature": 0.1}
        return await super().get_model_response(state, prompt, *arguments, **options)


class Slow(Countdown):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        WAITING.append(state["prompt"][-1].content)
        await asyncio.sleep(60)
        return []
