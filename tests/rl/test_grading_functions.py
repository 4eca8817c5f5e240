"""Graders that users write: plain functions in threads, their copies of rows, and answers from
which they abstain.
"""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import chz
import pytest
from byte_chat import END, ScriptedPolicy
from digest_service import FakeService
from digit_env import DigitEnv, DigitGroup, Digits, DigitsBuilder

from planish import logtree
from planish.errors import AbstainError, UserError
from planish.files import read_rows
from planish.renderers import get_renderer
from planish.rl.advantages import ADVANTAGES
from planish.rl.data_processing import compute_advantages
from planish.rl.environments.problem_env import ProblemEnv
from planish.rl.environments.reward_env import RewardEnv
from planish.rl.rewards import read_graded
from planish.rl.rollout.metrics import environment_metrics, repeated_sample_metrics
from planish.rl.rollout.rollouts import GroupRollout, do_group_rollout
from planish.rl.rollout.strategy import MinViableGroup, RetryOnFailure, RolloutStrategy
from planish.rl.types import EnvGroupBuilder, StepResult
from planish.runlog.evaluators import SamplingClientEvaluator
from planish.tool_use import build_agent_tool_env
from planish.training.rl_config import Config
from planish.training.train_rl import main

WAIT_SECONDS = 60.0
"""A limit for threads that wait, which no working code reaches."""
QUESTION: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def renderer(tokenizer):
    return get_renderer("qwen3_instruct", tokenizer)


@dataclass(frozen=True)
class Group(EnvGroupBuilder):
    make_env: Callable[[], Any]
    size: int

    async def make_envs(self):
        return [self.make_env() for _ in range(self.size)]


class Checked(ProblemEnv):
    def __init__(self, renderer, check):
        super().__init__(renderer)
        self.check = check

    def get_question(self):
        return "Hi"

    def check_answer(self, sample_str):
        return self.check(sample_str)

    def check_format(self, sample_str):
        return True

    def get_reference_answer(self):
        return ""


def reward_env(renderer, function):
    return RewardEnv(renderer, QUESTION, {}, lambda answer, row: function(answer))


def tool_env(renderer, function):
    return build_agent_tool_env(
        renderer, [], QUESTION, lambda messages: function(messages[-1]["content"])
    )


KINDS = {"reward": reward_env, "problem": Checked, "tools": tool_env}


def rolled_out(renderer, kind, function, answers: Sequence[str], **options):
    policy = ScriptedPolicy(renderer, [answer + END for answer in answers])
    builder = Group(partial(KINDS[kind], renderer, function), len(answers))
    group = asyncio.run(do_group_rollout(builder, policy, **options))
    assert group is not None
    return group


@pytest.mark.parametrize("kind", KINDS)
def test_plain_graders_run_at_the_same_time(renderer, kind):
    """Each call waits for the calls for all other answers."""
    barrier = threading.Barrier(6)

    def grade(text):
        barrier.wait(WAIT_SECONDS)
        return text == "3"

    group = rolled_out(renderer, kind, grade, "012345")
    assert [reward > 0.5 for reward in group.get_total_rewards()] == [
        text == "3" for text in "012345"
    ]


class StillLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still until the test moves it. The loop still waits for
    threads.
    """

    def __init__(self):
        self.seconds = 0.0
        super().__init__()

    def time(self):
        return self.seconds

    def advance(self, seconds):
        self.seconds += seconds


@dataclass(eq=False)
class Counted(RewardEnv):
    when_graded: Callable[[], None] = lambda: None

    async def step(self, action, *, extra=None) -> StepResult:
        result = await super().step(action, extra=extra)
        self.when_graded()
        return result


def test_a_time_limit_ends_the_trajectory_of_the_slow_grader_only(renderer):
    release, num_graded = threading.Event(), 0

    def grade(answer, row):
        if answer == "slow":
            release.wait(WAIT_SECONDS)
        return float(answer == "good")

    def count():
        nonlocal num_graded
        num_graded += 1
        if num_graded == 7:  # all but the slow one
            loop = asyncio.get_running_loop()
            assert isinstance(loop, StillLoop)
            loop.advance(11.0)

    answers = ["good", "bad", "slow", "bad", "good", "bad", "bad", "good"]
    policy = ScriptedPolicy(renderer, [answer + END for answer in answers])
    builder = Group(lambda: Counted(renderer, QUESTION, {}, grade, count), len(answers))
    strategy = MinViableGroup(max_retries=0, per_rollout_timeout=10, min_successful=1)
    try:
        with asyncio.Runner(loop_factory=StillLoop) as runner:
            group = runner.run(do_group_rollout(builder, policy, strategy))
    finally:
        release.set()
    assert group is not None
    assert group.get_total_rewards() == [1, 0, 0, 1, 0, 0, 1]
    assert [error.error_type for error in group.rollout_errors] == ["TimeoutError"]


@pytest.mark.parametrize("is_async", [False, True])
def test_each_answer_has_its_own_copy_of_the_row(renderer, is_async):
    row = {"prompt": "Hi", "answers": ["3", "4"]}

    def grade(answer, row):
        row.pop("prompt")
        return float(row["answers"].pop(0) == answer)

    async def grade_later(answer, row):
        return grade(answer, row)

    reward = grade_later if is_async else grade
    policy = ScriptedPolicy(renderer, ["3" + END] * 3)
    builder = Group(lambda: RewardEnv(renderer, QUESTION, row, reward), 3)
    group = asyncio.run(do_group_rollout(builder, policy))
    assert group is not None
    assert group.get_total_rewards() == [1.0, 1.0, 1.0]
    assert row == {"prompt": "Hi", "answers": ["3", "4"]}


def test_a_grader_of_conversations_gets_a_copy(renderer):
    def grade(messages):
        messages[-1]["content"] = "changed"
        return 1.0

    env = build_agent_tool_env(renderer, [], QUESTION, grade)
    group = asyncio.run(
        do_group_rollout(Group(lambda: env, 1), ScriptedPolicy(renderer, ["a" + END]))
    )
    assert group is not None
    assert env.message_env.history[-1]["content"] == "a"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"grade returned reward=None; return a number \(a function without a return"),
        ("1.5", r"grade returned reward='1.5'; return a number"),
        ([1.0], r"grade returned reward=\[1.0\]; return a number"),
        ((1.0,), r"grade returned \(1.0,\); return a number, or a pair"),
        ((None, {}), r"grade returned reward=None"),
        ((1.0, None), r"grade returned None as metrics"),
        ({}, r"grade returned no number"),
        ({"a": "x"}, r"grade, a returned reward='x'"),
        ({"score": 1.0, "acc": True}, r"sum would be the reward; return a pair .* part 'score'"),
        ({"total": 1, "length": 0.5}, r"sum would be the reward; return a pair .* part 'total'"),
        ({"length": 3, "reward": 1}, r"sum would be the reward; return a pair .* part 'reward'"),
    ],
)
def test_a_reward_that_is_no_number_names_the_function(renderer, returned, message):
    def grade(text):
        return returned

    with pytest.raises(UserError, match=message):
        read_graded(returned, "grade")
    for kind in ("reward", "tools"):
        with pytest.raises(UserError, match="returned"):
            rolled_out(renderer, kind, grade, "a")


def test_named_numbers_are_summed():
    assert read_graded({"score": 0.5}, "grade") == (0.5, {"score": 0.5})
    assert read_graded({"right": True, "short": 0.5}, "grade") == (1.5, {"right": 1, "short": 0.5})
    assert read_graded((1.0, {"acc": 1.0}), "grade") == (1.0, {"acc": 1.0})


def test_a_tool_environment_names_its_reward_function(renderer):
    def forgets(messages):
        pass

    builder = Group(partial(build_agent_tool_env, renderer, [], QUESTION, cast(Any, forgets)), 1)
    with pytest.raises(UserError, match=r"forgets returned reward=None; return a number"):
        asyncio.run(do_group_rollout(builder, ScriptedPolicy(renderer, ["a" + END])))


def abstaining(text):
    if text == "x":
        raise AbstainError("the judge did not reply")
    return text == "3"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", [None, RetryOnFailure(), MinViableGroup(min_successful=4)])
def test_an_answer_is_left_out_if_its_grader_abstains(
    renderer, kind, strategy: RolloutStrategy | None
):
    group = rolled_out(renderer, kind, abstaining, ["3", "x", "4", "x"], strategy=strategy)
    assert group.get_total_rewards() == [1.0, 0.0]
    assert (group.num_abstained, group.rollout_errors) == (2, [])
    assert compute_advantages([group]) == [[0.5, -0.5]]
    metrics = environment_metrics([GroupRollout(0, [], group, None, None)])
    assert metrics["env/all/abstained"] == 0.5
    assert metrics["env/all/reward/total"] == 0.5
    assert metrics["env/all/total_episodes"] == 2


@pytest.mark.parametrize("estimator", ADVANTAGES)
def test_a_group_may_lose_all_its_answers(renderer, estimator):
    group = rolled_out(renderer, "problem", abstaining, "xx")
    other = rolled_out(renderer, "problem", abstaining, "34")
    assert group.trajectories_G == []
    assert compute_advantages([group], estimator) == [[]]
    rollouts = [GroupRollout(i, [], g, 0, None) for i, g in enumerate([group, other])]
    assert environment_metrics(rollouts[:1]) == {"env/all/abstained": 1.0}
    metrics = environment_metrics(rollouts) | repeated_sample_metrics(rollouts)
    assert metrics["env/all/abstained"] == 0.5
    assert metrics["env/all/avg@2"] == metrics["env/all/correct"] == 0.5


def test_an_abstention_shows_in_the_log(renderer):
    with logtree.init_trace("test") as trace:
        rolled_out(renderer, "reward", abstaining, "3x")
    texts = [text for node in trace.root.walk() for text in node.children if isinstance(text, str)]
    assert "A grader abstained, so trajectory 1 is left out: the judge did not reply" in texts


@dataclass(frozen=True)
class Compared(Group):
    raises: bool = False

    async def compute_group_rewards(self, trajectory_group, env_group):
        if self.raises:
            raise AbstainError("no judge")
        pairs: list[Any] = [(float(i), {"i": i}) for i in range(len(env_group))]
        return [*pairs[:1], AbstainError("a tie"), *pairs[2:]]


@pytest.mark.parametrize("raises", [False, True])
def test_the_grader_of_a_group_can_abstain(renderer, raises):
    env = partial(reward_env, renderer, lambda text: 0.0)
    policy = ScriptedPolicy(renderer, [letter + END for letter in "abc"])
    group = asyncio.run(do_group_rollout(Compared(env, 3, raises), policy, RetryOnFailure()))
    assert group is not None
    assert group.rollout_errors == []
    if raises:
        assert (group.trajectories_G, group.num_abstained) == ([], 3)
    else:
        assert (group.get_total_rewards(), group.num_abstained) == ([0.0, 2.0], 1)
        assert group.metrics_G == [{"i": 0}, {"i": 2}]


@dataclass(frozen=True)
class Together(Group):
    plays_together = True


def test_environments_that_interact_are_left_out_together(renderer):
    """The second player waits for a move of the first one, whose grader abstains."""

    async def grade(text):
        if text == "b":
            await asyncio.Event().wait()
        raise AbstainError("no judge")

    policy = ScriptedPolicy(renderer, [letter + END for letter in "ab"])
    builder = Together(partial(reward_env, renderer, grade), 2)
    group = asyncio.run(do_group_rollout(builder, policy))
    assert group is not None
    assert (group.trajectories_G, group.num_abstained) == ([], 2)


@dataclass
class AbstainingEnv(DigitEnv):
    """A digit environment whose grader abstains for some digits, and for all of group 0."""

    async def step(self, action, *, extra=None):
        if self.number == 0 or action[-1] < 51:
            raise AbstainError("the judge did not reply")
        return await super().step(action, extra=extra)


@dataclass(frozen=True)
class AbstainingGroup(DigitGroup):
    async def make_envs(self):
        return [AbstainingEnv(self.number) for _ in range(self.size)]


class AbstainingDigits(Digits):
    def _group(self, number):
        return AbstainingGroup(number, size=8)


@chz.chz
class AbstainingBuilder(DigitsBuilder):
    async def __call__(self):
        return AbstainingDigits(2, 3), AbstainingDigits(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["mean", "std"])
def test_a_run_trains_on_the_other_answers(tokenizer, tmp_path, advantage):
    service = FakeService(tokenizer)
    config = Config(
        dataset_builder=AbstainingBuilder(),
        model_name="tiny",
        learning_rate=0.1,
        max_tokens=8,
        advantage=advantage,
        log_path=str(tmp_path),
        eval_every=1,
    )
    asyncio.run(main(config, cast(Any, service)))
    rows = read_rows(tmp_path / "metrics.jsonl")
    episodes = [row["env/all/total_episodes"] for row in rows[:2]]
    assert [row["env/all/abstained"] for row in rows[:2]] == [(24 - n) / 24 for n in episodes]
    assert service.clients[-1].calls == episodes
    assert rows[0]["test/env/all/abstained"] >= 0.5
    assert "rollout_errors/total" not in rows[1]
    assert "left out" in (tmp_path / "train_iteration_000000.html").read_text()


class PlainEvaluator(SamplingClientEvaluator):
    """An evaluator without async code, which waits for the event loop."""

    name = "plain"

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def __call__(self, sampling_client):  # type: ignore[override]
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result(WAIT_SECONDS)
        return {"plain/score": 1.0}


def test_a_plain_evaluator_runs_in_a_thread(tokenizer, tmp_path):
    async def run():
        config = Config(
            dataset_builder=DigitsBuilder(batches=1),
            model_name="tiny",
            learning_rate=0.1,
            max_tokens=8,
            log_path=str(tmp_path),
            eval_every=1,
            evaluator_builders=(partial(PlainEvaluator, asyncio.get_running_loop()),),
            num_groups_to_log=0,
        )
        await main(config, cast(Any, FakeService(tokenizer)))

    asyncio.run(run())
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["plain/score"] for row in rows] == [1.0, 1.0]


PROGRAM = """
import asyncio, json, sys, time
from pathlib import Path
from planish.rl.environments.reward_env import RewardDatasetBuilder
from planish.testing import tiny_model
from planish.training.rl_config import Config
from planish.training.train_rl import main

def reward(answer, row):
    print("the reward is computed", flush=True)
    time.sleep(600)
    return 0.0

home = Path(sys.argv[1])
model = str(tiny_model(home / "tiny"))
(home / "rows.jsonl").write_text(json.dumps({"prompt": "Hi"}) + "\\n")
builder = RewardDatasetBuilder(
    dataset=str(home / "rows.jsonl"), reward=reward, model_name=model, batch_size=1, group_size=2
)
asyncio.run(main(Config(
    dataset_builder=builder, model_name=model, learning_rate=1e-3, max_tokens=4, lora_rank=4,
    log_path=str(home / "run"), eval_every=0,
)))
"""


@pytest.mark.slow
def test_control_c_ends_a_run_while_a_plain_grader_computes(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell lets background jobs ignore SIGINT, and the program would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as program:
        try:
            assert program.stdout is not None
            # Two rewards print at the same time, so both texts may be on one line.
            assert any("the reward is computed" in line for line in program.stdout)
            program.send_signal(signal.SIGINT)
            output, _ = program.communicate(timeout=120)
        finally:
            program.kill()
    assert "Ctrl-C: stopping where the run can be resumed" in output
    assert "stopped after 0 of 1 steps; the same command resumes there" in output
    assert "Traceback" not in output
    assert program.returncode == 130
