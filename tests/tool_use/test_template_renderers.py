"""Episodes with tools whose prompts are written by a model's own chat template."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from test_agent_env import QUESTION, TOOLS, UNREADABLE, Reward, Scripted, says

from planish.renderers import get_renderer
from planish.rl.data_processing import trajectory_to_data
from planish.rl.rollout.rollouts import do_single_rollout
from planish.tool_use import build_agent_tool_env

TEMPLATES = Path(__file__).parents[1] / "renderers/chat_templates"
XML_CALL = (
    "Wait.\n<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n"
    "</parameter>\n</function>\n</tool_call><|im_end|>"
)


def play(renderer: Any, *answers: str) -> tuple[Any, list[str], Reward]:
    reward = Reward()
    policy = Scripted(renderer, list(answers))
    env = build_agent_tool_env(renderer, TOOLS, QUESTION, reward)
    return asyncio.run(do_single_rollout(policy, env)), policy.prompts, reward


def by_template(renderer: Any, name: str) -> Any:
    tokenizer = renderer.tokenizer
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    kept, tokenizer.chat_template = tokenizer.chat_template, source
    try:
        return get_renderer("template", tokenizer)
    finally:
        tokenizer.chat_template = kept


@pytest.mark.parametrize("first", [says("I add.", ("add", {"a": 2, "b": 3})), UNREADABLE])
def test_an_episode_equals_that_of_the_own_renderer(renderer, first):
    other = by_template(renderer, "qwen3_instruct_2507")
    episodes = [play(one, first, says("5")) for one in (renderer, other)]
    (own, own_prompts, own_reward), (made, prompts, reward) = episodes
    assert prompts == own_prompts
    assert reward.seen == own_reward.seen
    [ours], [theirs] = (trajectory_to_data(one, 1.0) for one in (own, made))
    assert ours.tokens_N.tolist() == theirs.tokens_N.tolist()
    assert ours.mask_N.tolist() == theirs.mask_N.tolist()


def test_calls_in_another_syntax_are_run(renderer):
    trajectory, prompts, reward = play(by_template(renderer, "qwen3_coder"), XML_CALL, says("5"))
    assert trajectory.stop_reason == "completed"
    assert prompts[1].startswith(prompts[0] + XML_CALL)
    assert "<tool_response>\n5\n</tool_response>" in prompts[1]
    assert reward.roles() == "suata"
    assert len(trajectory_to_data(trajectory, 1.0)) == 1


def test_the_reasoning_of_a_tool_step_is_kept(renderer):
    """Qwen3's template drops reasoning only after the next message of the user."""
    thought = "<think>\nI add.\n</think>\n\n"
    call = thought + says(("add", {"a": 2, "b": 3}))
    trajectory, prompts, _ = play(by_template(renderer, "qwen3"), call, f"{thought}{says('5')}")
    assert prompts[1].startswith(prompts[0] + call)
    assert len(trajectory_to_data(trajectory, 1.0)) == 1
