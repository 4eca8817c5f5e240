"""Group rollouts: running, grading, cleanup, and strategies for failures."""

import asyncio
import logging
import pickle
import traceback
from typing import Any

import chz
import pytest
from rollout_fakes import PROMPT, Breaking, Draws, Duel, Flaky, Group, Plain, bad
from virtual_time import run_in_virtual_time

from planish import logtree
from planish.completers import TokensWithLogprobs, derived_seed
from planish.errors import EngineClosedError, NonFiniteError, UserError
from planish.rl.limits import TerminationRewardPolicy
from planish.rl.rollout.rollouts import do_group_rollout, do_single_rollout
from planish.rl.rollout.strategy import FailFast, MinViableGroup, RetryOnFailure, strategy_from
from planish.rl.types import Env, RolloutError, StepResult, StopReason

STRATEGIES = [FailFast(), RetryOnFailure(), MinViableGroup()]
FLAKY = RolloutError("Flaky", "the sandbox is gone")


def play(builder, strategy=None, policy=None, **options) -> Any:
    return run_in_virtual_time(
        do_group_rollout(
            builder, policy or Draws(), strategy, seed=options.pop("seed", 7), **options
        )
    )


def tokens_of(group):
    return [
        [turn.ac.tokens for turn in trajectory.transitions] for trajectory in group.trajectories_G
    ]


def alone(index, attempt=0, seed=7):
    """Return the tokens of a trajectory that runs alone."""
    place = (index, attempt) if attempt else (index,)
    trajectory = asyncio.run(do_single_rollout(Draws().seeded(derived_seed(seed, *place)), Plain()))
    return [turn.ac.tokens for turn in trajectory.transitions]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_group_without_failures_has_all_trajectories(strategy):
    group = play(builder := Group(), strategy)
    assert tokens_of(group) == [alone(index) for index in range(4)]
    assert group.final_rewards_G == [0.0, 0.5, 1.0, 1.5]
    assert group.metrics_G == [{"place": index} for index in range(4)]
    assert group.rollout_errors == []
    assert (builder.events, builder.graded, builder.cleaned) == (["make", "clean"], [4], 1)


def test_group_rewards_are_zero_without_group_grading():
    class Ungraded(Group):
        compute_group_rewards = Group.__bases__[0].compute_group_rewards

    group = play(Ungraded())
    assert (group.final_rewards_G, group.metrics_G) == ([0.0] * 4, [{}] * 4)


def test_without_a_seed_the_policy_is_not_seeded():
    policy = Draws(seed=3)
    asyncio.run(do_group_rollout(Group(), policy))
    assert policy.calls == [3] * 8


def test_samples_do_not_depend_on_other_rollouts():
    """The samples also do not change if other rollouts are slow or retried."""
    whole = tokens_of(play(Group()))
    again = tokens_of(play(Group(plan=bad("flaky", at=2)), RetryOnFailure()))
    assert [again[index] for index in (0, 1, 3)] == [whole[index] for index in (0, 1, 3)]
    assert again[2] == alone(2, attempt=1) != whole[2]


def test_trajectories_of_a_group_run_concurrently():
    class Meeting(Plain):
        async def step(self, action, *, extra=None):
            await barrier.wait()
            return await super().step(action)

    class Meetings(Group):
        def _env(self, what):
            return Meeting()

    async def run() -> Any:
        global barrier
        barrier = asyncio.Barrier(4)
        async with asyncio.timeout(5):
            return await do_group_rollout(Meetings(), Draws())

    assert len(run_in_virtual_time(run()).trajectories_G) == 4


def test_fail_fast_names_the_trajectory_and_cancels_the_rest():
    builder = Group(plan=[["hangs"], ["hangs"], ["flaky"]], tags=("codeforces",))
    with pytest.raises(Flaky, match="the sandbox is gone") as caught:
        play(builder, FailFast())
    text = "".join(traceback.format_exception(caught.value))
    assert "in Trajectory 2 of Group(plan=[['hangs'], ['hangs'], ['flaky']]" in text
    assert "tags=('codeforces',)" in text
    assert builder.events == ["make", "clean"]
    assert builder.graded == []


@pytest.mark.parametrize("group", [Group, Duel])
@pytest.mark.parametrize(
    ("others", "note"),
    [
        ([["odd"], [""]], "another task failed with: Odd('this: that')"),
        ([["odd"], ["odd"]], "2 more tasks failed, the first of them with: Odd('this: that')"),
    ],
)
def test_an_error_tells_of_rollouts_that_failed_at_the_same_time(group, others, note):
    with pytest.raises(Flaky) as caught:
        play(group(plan=[["flaky"], *others]), FailFast())
    assert note in caught.value.__notes__


def test_error_messages_describe_the_builder_briefly_and_lazily():
    class Large(Group):
        told = 0

        def __repr__(self):
            self.told += 1
            return "Large(" + "word " * 1000 + ")"

    play(builder := Large())
    assert builder.told == 0
    with pytest.raises(Flaky) as caught:
        play(Large(plan=bad("flaky")))
    [note] = caught.value.__notes__
    assert len(note) < 250
    assert note.endswith("word ...")


def test_retry_repeats_the_failed_trajectory():
    builder = Group(plan=bad("flaky", at=1))
    group = play(builder, RetryOnFailure())
    assert tokens_of(group) == [alone(0), alone(1, attempt=1), alone(2), alone(3)]
    assert group.rollout_errors == [FLAKY]
    assert (builder.events, builder.graded) == (["make", "make", "clean"], [4])


@pytest.mark.parametrize("retries", [0, 2])
def test_retries_are_limited_per_group(retries):
    builder = Group(plan=bad("flaky", at=1, again="flaky"))
    with pytest.raises(Flaky):
        play(builder, RetryOnFailure(max_retries=retries))
    assert builder.events == ["make"] * (1 + retries) + ["clean"]
    two = Group(plan=[["flaky", ""], ["flaky", "", ""], [""]])
    if retries == 2:
        assert len(play(two, RetryOnFailure(max_retries=retries)).rollout_errors) == 2


def test_min_viable_group_continues_without_failed_trajectories():
    builder = Group(plan=bad("flaky", at=1, again="flaky"))
    group = play(builder, MinViableGroup(max_retries=1))
    assert tokens_of(group) == [alone(0), alone(2), alone(3)]
    assert group.rollout_errors[-1] == FLAKY
    assert builder.graded == [3]
    assert group.final_rewards_G == [0.0, 0.5, 1.0]


def test_min_viable_group_retries_only_while_too_small():
    class Late(Breaking):
        async def breaks(self):
            await asyncio.sleep(0.2)
            await super().breaks()

    class Last(Group):
        def _env(self, what):
            return Late(what=what) if what else Plain()

    group = play(builder := Last(plan=bad("flaky")), MinViableGroup())
    assert len(group.trajectories_G) == 3
    assert builder.events == ["make", "clean"]


def test_min_viable_group_drops_a_group_that_is_too_small(caplog):
    builder = Group(plan=[["flaky"], ["flaky"], [""], [""]])
    with caplog.at_level(logging.WARNING):
        assert play(builder, MinViableGroup(max_retries=0), failures=(failures := [])) is None
    assert failures == [FLAKY, FLAKY]
    assert "a group was dropped: Flaky('the sandbox is gone')" in caplog.text
    assert (builder.cleaned, builder.graded) == (1, [])
    assert (
        len(
            play(
                Group(plan=builder.plan), MinViableGroup(min_successful=2, max_retries=0)
            ).trajectories_G
        )
        == 2
    )


def test_a_group_that_cannot_become_viable_is_cancelled():
    builder = Group(plan=[["flaky"], ["hangs"], ["hangs"], ["flaky"]])

    async def run():
        async with asyncio.timeout(5):
            return await do_group_rollout(builder, Draws(), MinViableGroup(max_retries=0))

    assert run_in_virtual_time(run()) is None


@pytest.mark.parametrize(
    "strategy", [RetryOnFailure(per_rollout_timeout=2.0), MinViableGroup(per_rollout_timeout=2.0)]
)
def test_a_rollout_that_exceeds_its_timeout_fails(strategy):
    group = play(Group(plan=bad("hangs")), strategy)
    assert group.rollout_errors == [
        RolloutError("TimeoutError", "it took longer than per_rollout_timeout=2.0 s")
    ]
    assert len(group.trajectories_G) >= 3


def test_other_timeout_errors_keep_their_message():
    class Own(Breaking):
        async def breaks(self):
            raise TimeoutError("no answer from the judge")

    class Owns(Group):
        def _env(self, what):
            return Own()

    with pytest.raises(TimeoutError, match="no answer from the judge"):
        play(Owns(), RetryOnFailure(per_rollout_timeout=60))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_closed_engine_is_never_tolerated(strategy):
    builder = Group(plan=bad("engine closed"))
    with pytest.raises(EngineClosedError):
        play(builder, strategy)
    assert builder.events == ["make", "clean"]


def test_user_errors_are_not_retried():
    builder = Group(plan=bad("user error"))
    with pytest.raises(UserError, match="temperature=-1"):
        play(builder, RetryOnFailure())
    assert builder.events == ["make", "clean"]


def test_user_errors_drop_the_trajectory_but_not_the_group():
    assert len(play(Group(plan=bad("user error")), MinViableGroup()).trajectories_G) == 3
    with pytest.raises(UserError, match="temperature=-1"):
        play(Group(plan=[["user error"]] * 4), MinViableGroup())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["playing", "make_envs", "grading"])
def test_cancellation_is_not_a_failure(strategy, where):
    class Waiting(Group):
        async def make_envs(self):
            if where == "make_envs":
                await asyncio.sleep(60)
            return await super().make_envs()

        async def compute_group_rewards(self, trajectory_group, env_group):
            if where == "grading":
                await asyncio.sleep(60)
            raise AssertionError

    builder = Waiting(plan=bad("hangs" if where == "playing" else ""))

    async def run():
        task = asyncio.create_task(do_group_rollout(builder, Draws(), strategy))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert run_in_virtual_time(run())
    assert builder.cleaned == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_base_exceptions_are_never_caught(strategy):
    builder = Group(plan=bad("interrupted"))
    with pytest.raises(KeyboardInterrupt):
        play(builder, strategy)
    assert builder.cleaned == 1
    assert builder.made == 1


@pytest.mark.parametrize("where", ["playing", "make_envs", "grading", "cleanup"])
def test_an_unrequested_cancellation_is_a_failure(where):
    """asyncio would treat it as a cancellation of the rollout's task, and the run would end
    silently.
    """

    class Leaking(Group):
        def leaks(self, here):
            if here == where:
                raise asyncio.CancelledError

        async def make_envs(self):
            envs = await super().make_envs()
            if self.made == 1:
                self.leaks("make_envs")
            return envs

        async def compute_group_rewards(self, trajectory_group, env_group):
            grades = await super().compute_group_rewards(trajectory_group, env_group)
            if len(self.graded) == 1:
                self.leaks("grading")
            return grades

        async def cleanup(self):
            await super().cleanup()
            self.leaks("cleanup")

    plan = bad("cancelled") if where == "playing" else Group().plan
    builder = Leaking(plan=plan)
    with pytest.raises(RuntimeError, match="CancelledError") as caught:
        play(builder)
    assert "Leaking(" in caught.value.__notes__[0]
    assert builder.cleaned == 1
    group = play(builder := Leaking(plan=plan), RetryOnFailure())
    assert [error.error_type for error in group.rollout_errors] == ["RuntimeError"] * (
        where != "cleanup"
    )
    assert (len(group.trajectories_G), builder.cleaned) == (4, 1)


@pytest.mark.parametrize("where", ["step", "make_envs", "compute_group_rewards", "cleanup"])
def test_system_exit_in_an_environment_is_a_failure(where):
    """A grader that executes model output may call `exit()`."""

    class Leaving(Plain):
        async def step(self, action, *, extra=None):
            leave("step")
            return await super().step(action, extra=extra)

    class Exits(Group):
        def _env(self, what):
            return Leaving()

        async def make_envs(self):
            leave("make_envs")
            return await super().make_envs()

        async def compute_group_rewards(self, trajectory_group, env_group):
            leave("compute_group_rewards")
            return await super().compute_group_rewards(trajectory_group, env_group)

        async def cleanup(self):
            await super().cleanup()
            leave("cleanup")

    def leave(here):
        if here == where:
            raise SystemExit(3)

    builder = Exits()
    with pytest.raises(RuntimeError, match="SystemExit: 3") as caught:
        play(builder)
    assert "Exits(" in caught.value.__notes__[0]
    assert builder.cleaned == 1


def test_environments_of_one_game_may_propagate_a_cancellation():
    builder = Duel(plan=[["cancelled", ""], ["hangs", ""]])
    assert len(play(builder, RetryOnFailure()).rollout_errors) == 1


def test_cleanup_finishes_despite_cancellation():
    class Slow(Group):
        async def cleanup(self):
            await may_end.wait()
            await super().cleanup()

    async def run():
        task = asyncio.create_task(do_group_rollout(builder, Draws()))
        await asyncio.sleep(0.02)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        may_end.set()
        await asyncio.wait([task])
        return task.cancelled()

    may_end = asyncio.Event()
    builder = Slow(plan=bad("hangs"))
    assert run_in_virtual_time(run())
    assert builder.events == ["make", "clean"]


class BadCleanup(Group):
    async def cleanup(self):
        await super().cleanup()
        raise OSError("the container would not stop")


def test_a_cleanup_error_is_raised_unless_failures_are_tolerated(caplog):
    with pytest.raises(OSError, match="would not stop"):
        play(BadCleanup())
    assert len(play(builder := BadCleanup(), RetryOnFailure()).trajectories_G) == 4
    assert builder.cleaned == 1
    assert "would not stop" in caplog.text


def test_a_cleanup_error_does_not_hide_an_earlier_error(caplog):
    with pytest.raises(Flaky):
        play(BadCleanup(plan=bad("flaky")))
    assert "would not stop" in caplog.text


class BadStart(Group):
    failures = 1

    async def make_envs(self):
        envs = await super().make_envs()
        if self.made <= self.failures:
            raise Flaky("no container is free")
        return envs


def test_an_error_of_make_envs_is_handled_like_a_rollout_error():
    builder = BadStart()
    with pytest.raises(Flaky) as caught:
        play(builder)
    assert "in make_envs of BadStart(" in "".join(caught.value.__notes__)
    assert builder.events == ["make", "clean"]
    group = play(builder := BadStart(), RetryOnFailure())
    assert group.rollout_errors == [RolloutError("Flaky", "no container is free")]
    assert builder.events == ["make", "make", "clean"]


def test_a_group_without_environments_is_rejected():
    with pytest.raises(UserError, match="make_envs of Group returned no environments"):
        play(Group(plan=[]), MinViableGroup())


def test_a_retry_must_keep_the_group_size():
    class Shrinking(Group):
        async def make_envs(self):
            return (await super().make_envs())[: 4 if self.made == 1 else 2]

    with pytest.raises(UserError, match="returned 2 environments, and 4 before"):
        play(Shrinking(plan=bad("flaky")), RetryOnFailure())


def test_new_groups_for_retries_are_made_one_at_a_time():
    class Careful(Group):
        is_making = False

        async def make_envs(self):
            assert not self.is_making
            self.is_making = True
            await asyncio.sleep(0.01)
            self.is_making = False
            return await super().make_envs()

    assert len(play(Careful(plan=[["flaky", ""]] * 3), RetryOnFailure()).rollout_errors) == 3


def test_environments_of_one_game_are_retried_together():
    builder = Duel(plan=[["flaky", ""], ["hangs", ""]])
    group = play(builder, RetryOnFailure())
    assert tokens_of(group) == [alone(0, attempt=1), alone(1, attempt=1)]
    assert group.rollout_errors == [FLAKY]
    assert builder.events == ["make", "make", "clean"]
    assert play(Duel(plan=[["flaky"], ["hangs"]]), MinViableGroup(max_retries=1)) is None
    with pytest.raises(Flaky):
        play(Duel(plan=[["flaky"], ["hangs"]]))


class BadGrades(Group):
    answers: object = None

    async def compute_group_rewards(self, trajectory_group, env_group):
        return self.answers


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (None, "returned a NoneType; return one"),
        ([(0.0, {})] * 3, "returned 3 rewards for 4 trajectories"),
        ([0.0] * 4, "returned 0.0 for trajectory 0; return one"),
        ([(0.0, {})] * 3 + [(0.0, None)], r"returned \(0.0, None\) for trajectory 3"),
        (
            [(0.0, {}), (0.0, {"won": [1]})] * 2,
            r"for trajectory 1, returned the metric won=\[1\]; return a number",
        ),
        ([("much", {})] * 4, "returned reward='much' for trajectory 0"),
        ([(0.0, {}), (float("nan"), {})] * 2, "returned reward=nan for trajectory 1"),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_invalid_group_grades_are_rejected(answers, message, strategy):
    builder = BadGrades()
    builder.answers = answers
    with pytest.raises(
        UserError, match=f"compute_group_rewards of BadGrades,? {message}"
    ) as caught:
        play(builder, strategy)
    assert isinstance(caught.value, NonFiniteError) == ("nan" in message)


def test_failed_group_grading_is_retried():
    class Moody(Group):
        async def compute_group_rewards(self, trajectory_group, env_group):
            grades = await super().compute_group_rewards(trajectory_group, env_group)
            if len(self.graded) < 3:
                raise Flaky("the judge is busy")
            return grades

    for strategy in (RetryOnFailure(), MinViableGroup()):
        builder = Moody()
        assert len(play(builder, strategy).rollout_errors) == 2
        assert builder.events == ["make", "clean"]
    assert play(Moody(), MinViableGroup(max_retries=1)) is None
    with pytest.raises(Flaky, match="busy"):
        play(Moody())


def test_group_grading_that_exceeds_its_timeout_fails():
    class Hanging(Group):
        async def compute_group_rewards(self, trajectory_group, env_group):
            await asyncio.sleep(60)
            raise AssertionError

    termination = TerminationRewardPolicy(grader_timeout_seconds=0.02)
    builder = Hanging()
    with pytest.raises(TimeoutError, match="grader_timeout_seconds=0.02"):
        play(builder, termination=termination)
    assert builder.cleaned == 1
    assert play(Hanging(), MinViableGroup(), termination=termination) is None


class Ending(Env):
    def __init__(self, reason, reward):
        self.reason, self.reward = reason, reward

    async def initial_observation(self):
        return PROMPT, [10]

    async def step(self, action, *, extra=None):
        return StepResult(self.reward, True, PROMPT, [10], stop_reason=self.reason)


class Endings(Group):
    """A group whose episodes end by time, turns, completion and time, with rewards 0.3, 0.3, 0.3
    and -2 before group grading adds 0, 0.5, ...
    """

    async def make_envs(self) -> list[Env]:
        reasons = (
            StopReason.ROLLOUT_TIMEOUT,
            StopReason.MAX_TURNS,
            None,
            StopReason.ROLLOUT_TIMEOUT,
        )
        return [
            Ending(reason, reward)
            for reason, reward in zip(reasons, (0.3, 0.3, 0.3, -2.0), strict=True)
        ]


@pytest.mark.parametrize(
    ("termination", "totals", "graded"),
    [
        (None, [0.3, 0.8, 1.3, -0.5], 4),
        (TerminationRewardPolicy(), [0.3, 0.8, 1.3, -0.5], 4),
        (TerminationRewardPolicy(zero_reward_on_limit=True), [0.0, 0.0, 1.3, -0.5], 4),
        (
            TerminationRewardPolicy(zero_reward_on_limit=True, limit_stop_reasons=("max_turns",)),
            [0.3, 0.0, 1.3, -0.5],
            4,
        ),
        (
            TerminationRewardPolicy(zero_reward_on_limit=True, skip_grading_on_timeout=True),
            [0.0, 0.0, 0.8, -2.0],
            2,
        ),
    ],
)
def test_a_limit_clamps_the_total_reward(termination, totals, graded):
    group = play(builder := Endings(), termination=termination)
    assert group.get_total_rewards() == pytest.approx(totals, abs=1e-12)
    assert builder.graded == [graded]
    assert [trajectory.step_rewards for trajectory in group.trajectories_G] == [0.3, 0.3, 0.3, -2.0]
    # Clamped rewards are exactly 0, so a group of them has constant rewards.
    assert all(
        total == 0.0
        for total, wanted in zip(group.get_total_rewards(), totals, strict=True)
        if wanted == 0.0
    )


def test_a_group_with_only_skipped_trajectories_is_not_graded():
    class Timeouts(Endings):
        async def make_envs(self) -> list[Env]:
            return [Ending(StopReason.ROLLOUT_TIMEOUT, 0.5) for _ in range(2)]

    policy = TerminationRewardPolicy(zero_reward_on_limit=True, skip_grading_on_timeout=True)
    group = play(builder := Timeouts(), termination=policy)
    assert builder.graded == []
    assert group.get_total_rewards() == [0.0, 0.0]


def test_each_trajectory_has_its_section_in_the_logtree():
    async def run() -> Any:
        with logtree.capture("Group 0") as tree:
            await do_group_rollout(
                Group(plan=bad("flaky", size=2)), Draws(), RetryOnFailure(), seed=1
            )
        return tree

    [_, body] = asyncio.run(run()).children
    titles = [node.children[0].children[0] for node in body.children[:3]]
    assert titles == ["Trajectory 0", "Trajectory 1", "Trajectory 1, attempt 2"]
    for section in body.children[:3]:
        turns = [
            node.children[0].children[0]
            for node in section.children[1].children
            if node.tag == "section"
        ]
        assert turns == ["Turn 1", "Turn 2"]
    [failed] = [node for node in body.children[1].walk() if node.attrs.get("class") == "lt-exc"]
    assert "Flaky" in str(failed.children[0])
    assert body.children[3].children == ["graded 2"]


def test_on_turn_is_called_for_every_action():
    heard: list[TokensWithLogprobs] = []
    group = play(Group(plan=bad("flaky")), RetryOnFailure(), on_turn=heard.append)
    answers = [turn.ac for trajectory in group.trajectories_G for turn in trajectory.transitions]
    assert len(heard) == len(answers) + 2
    assert all(answer in heard for answer in answers)


def test_strategies_are_selected_by_name():
    assert strategy_from(None) == strategy_from(False) == FailFast()
    assert strategy_from(True) == RetryOnFailure(max_retries=3, per_rollout_timeout=0)
    assert strategy_from(given := MinViableGroup(min_successful=2)) is given
    with pytest.raises(UserError, match="rollout_error_tolerance='yes'"):
        strategy_from("yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RetryOnFailure(max_retries=-1), "RetryOnFailure.max_retries=-1"),
        (lambda: RetryOnFailure(max_retries=True), "RetryOnFailure.max_retries=True"),
        (lambda: RetryOnFailure(per_rollout_timeout=-1), "RetryOnFailure.per_rollout_timeout=-1"),
        (
            lambda: MinViableGroup(per_rollout_timeout=float("nan")),
            "MinViableGroup.per_rollout_timeout=nan",
        ),
        (lambda: MinViableGroup(min_successful=0), "MinViableGroup.min_successful=0"),
    ],
)
def test_invalid_strategy_options_are_rejected(make, message):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_can_be_pickled_and_logged(strategy):
    assert pickle.loads(pickle.dumps(strategy)) == strategy
    assert isinstance(chz.asdict(strategy), dict)


def test_the_default_min_group_size_is_three_quarters():
    fewest = {size: MinViableGroup().rules(size).min_successful for size in (1, 2, 4, 5, 8, 16)}
    assert fewest == {1: 1, 2: 2, 4: 3, 5: 4, 8: 6, 16: 12}
    assert MinViableGroup(min_successful=4).rules(1).min_successful == 1
