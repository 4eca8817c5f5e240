"""Environments of questions whose answers a program grades."""

import asyncio
import pickle
import re
from functools import partial

import numpy as np
import pytest
import torch
from byte_chat import END, ScriptedPolicy, tokens_of

from planish import logtree
from planish.errors import UnjudgedAnswerError, UserError
from planish.renderers import get_renderer
from planish.rl.environments.problem_env import ProblemEnv, ProblemGroupBuilder
from planish.rl.rollout.rollouts import do_single_rollout
from planish.rl.types import StopReason


class Sum(ProblemEnv):
    def __init__(self, left: int, right: int, renderer, **options):
        super().__init__(renderer, **options)
        self.left, self.right = left, right

    def get_question(self):
        return f"{self.left} + {self.right} = ?"

    def check_answer(self, sample_str):
        if "tower" in sample_str:
            raise UnjudgedAnswerError("too large")
        return str(self.left + self.right) in sample_str

    def check_format(self, sample_str):
        return sample_str.startswith("=")

    def get_reference_answer(self):
        return str(self.left + self.right)


class PatientSum(Sum):
    async def check_answer(self, sample_str):  # type: ignore[override]
        await asyncio.sleep(0)
        return super().check_answer(sample_str)


@pytest.fixture
def renderer(tokenizer):
    return get_renderer("qwen3_instruct", tokenizer)


def answered(env: ProblemEnv, text: str, **extra):
    return asyncio.run(env.step(tokens_of(env.renderer, text), extra=extra or None))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Sum, PatientSum])
@pytest.mark.parametrize(
    ("text", "reward", "form", "correct"),
    [
        (f"= 5{END}", 1.0, 1.0, 1.0),
        (f"5{END}", 0.9, 0.0, 1.0),
        (f"= 6{END}", 0.0, 1.0, 0.0),
        (f"6{END}", -0.1, 0.0, 0.0),
        ("= 5", 0.9, 0.0, 1.0),
        ("= 5<|endoftext|>", 0.9, 0.0, 1.0),
        (f"= 5{END} and", 0.9, 0.0, 1.0),
    ],
)
def test_the_reward_combines_correctness_and_format(renderer, kind, text, reward, form, correct):
    step = answered(kind(2, 3, renderer), text)
    assert step.reward == pytest.approx(reward)
    assert step.metrics == {"format": form, "correct": correct, "unjudged": 0.0}
    assert step.episode_done


def test_an_end_of_sequence_token_can_end_an_answer(renderer):
    env = Sum(2, 3, renderer, require_stop_sequence_for_format=False, format_coef=0.5)
    assert answered(env, "= 5<|endoftext|>").reward == 1.0
    assert answered(env, "= 5").reward == 0.5


@pytest.mark.parametrize("kind", [Sum, PatientSum])
def test_an_ungradable_answer_is_wrong_and_counted(renderer, kind):
    step = answered(kind(2, 3, renderer), f"= tower{END}")
    assert step.reward == 0.0
    assert step.metrics == {"format": 1.0, "correct": 0.0, "unjudged": 1.0}


def test_an_error_of_the_grader_is_raised(renderer):
    class Faulty(Sum):
        def check_answer(self, sample_str):
            return sample_str.no_such_method()

    with pytest.raises(AttributeError, match="no_such_method"):
        answered(Faulty(2, 3, renderer), f"= 5{END}")


class Judged(Sum):
    """Returns the given verdict."""

    def __init__(self, verdict, renderer):
        super().__init__(2, 3, renderer)
        self.verdict = verdict

    def check_answer(self, sample_str):
        return self.verdict


class Formed(Judged):
    """Returns the given verdict on the format."""

    def check_answer(self, sample_str):
        return True

    def check_format(self, sample_str):
        return self.verdict


NO_VERDICTS = [
    *(0.5, 2, -1, np.float32(0.25), float("nan"), 1 + 0j),
    *("No", "", "True", b"", None, re.match("a", "a"), re.match("a", "b"), object()),
    *((False, "why"), (True,), [0.0], [], {"correct": False}, {}, {1}, range(1)),
    *(np.array([True]), np.array([[0]]), torch.tensor([1.0]), torch.tensor(0.5)),
]


@pytest.mark.parametrize("verdict", NO_VERDICTS, ids=repr)
def test_a_verdict_must_be_a_bool(renderer, verdict):
    with pytest.raises(UserError, match=r"Judged.check_answer returned .*return True or False"):
        answered(Judged(verdict, renderer), f"= 5{END}")
    with pytest.raises(UserError, match=r"Formed.check_format returned .*return True or False"):
        answered(Formed(verdict, renderer), f"= 5{END}")


@pytest.mark.parametrize("verdict", [1, 1.0, True, np.bool_(True), np.int8(1), torch.tensor(True)])
def test_a_true_verdict_counts_as_correct(renderer, verdict):
    assert answered(Judged(verdict, renderer), f"= 5{END}").reward == 1.0


@pytest.mark.parametrize("verdict", [0, 0.0, False, np.bool_(False), torch.tensor(0)])
def test_a_false_verdict_counts_as_wrong(renderer, verdict):
    assert answered(Judged(verdict, renderer), f"= 5{END}").reward == 0.0


def test_a_check_without_a_return_statement_is_named(renderer):
    with pytest.raises(UserError, match=r"Judged\.check_answer returned None.*without a return st"):
        answered(Judged(None, renderer), f"= 5{END}")


def test_the_stop_reason_of_a_problem_is_reported(renderer):
    assert answered(Sum(2, 3, renderer), f"= 5{END}").stop_reason is StopReason.COMPLETED
    assert (
        answered(Sum(2, 3, renderer), "= 5", stop_reason="length").stop_reason
        is StopReason.MAX_TOKENS
    )


def test_the_prompt_is_the_conversation_prefix_and_the_question(renderer):
    prefix = [{"role": "user", "content": "1 + 1 = ?"}, {"role": "assistant", "content": "= 2"}]
    env = Sum(2, 3, renderer, convo_prefix=prefix)
    prompt, stop = asyncio.run(env.initial_observation())
    question = {"role": "user", "content": "2 + 3 = ?"}
    assert prompt == renderer.build_generation_prompt([*prefix, question])
    assert stop == renderer.get_stop_sequences()


def test_the_report_shows_question_answer_and_reward(renderer):
    with logtree.init_trace("test") as trace:
        answered(Sum(2, 3, renderer), f"= 5{END}")
    headings = [
        node.children[0]
        for node in trace.root.walk()
        if node.tag.startswith("h") and node.tag != "h1"
    ]
    assert headings == ["Prompt", "Policy Response", "Reward"]
    cells = [node.children[0] for node in trace.root.walk() if node.tag == "td"]
    assert cells[::2] == ["reference_answer", "format_valid", "correct", "format_coef", "reward"]
    assert cells[1::2] == ["5", "True", "True", "0.1", "1.0"]


def test_a_group_repeats_one_question(renderer):
    builder = ProblemGroupBuilder(partial(Sum, 2, 3, renderer), num_envs=4, dataset_name="sums")
    copy = pickle.loads(pickle.dumps(builder))
    for made in (builder, copy):
        envs = asyncio.run(made.make_envs())
        assert len({id(env) for env in envs}) == 4
        assert made.logging_tags() == ["sums"]
    script = ScriptedPolicy(renderer, [f"= 5{END}"])
    trajectory = asyncio.run(do_single_rollout(script, asyncio.run(copy.make_envs())[0]))
    assert trajectory.step_rewards == 1.0
    assert trajectory.stop_reason == "completed"


def test_an_empty_group_is_rejected():
    with pytest.raises(UserError, match="num_envs=0"):
        ProblemGroupBuilder(partial(Sum, 2, 3, None), num_envs=0)
