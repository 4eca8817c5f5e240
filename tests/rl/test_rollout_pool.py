"""Group rollouts in worker processes: equal results, errors, cancellation and dead processes.

Most tests share a pool, because a process takes a second or two to start.
"""

import asyncio
import faulthandler
import functools
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
import types
from pathlib import Path
from typing import Any

import pytest
from rollout_fakes import Draws, Duel, Files, Flaky, Group, Locked, Plain, Refusing, Stuck, bad

from planish import logtree
from planish.errors import EngineClosedError, UserError
from planish.rl.rollout.group_rollout import during_time_limit
from planish.rl.rollout.processes import process as process_module
from planish.rl.rollout.processes.loop_watch import LoopWatch
from planish.rl.rollout.processes.peer import RolloutProcessError
from planish.rl.rollout.processes.pool import RolloutPool
from planish.rl.rollout.processes.process import ProcessDiedError, RolloutProcess
from planish.rl.rollout.rollouts import do_group_rollout
from planish.rl.rollout.strategy import FailFast, MinViableGroup, RetryOnFailure
from planish.rl.types import RolloutError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def pool(runner):
    pool = RolloutPool(2)
    runner.run(pool.__aenter__())
    yield pool
    runner.run(pool.__aexit__(None, None, None))


@pytest.fixture
def play(runner, pool):
    def play(builder, policy=None, strategy=None, termination=None, *, seed=7, **options):
        work = pool.do_group_rollout(
            builder, policy or Draws(), strategy, termination, seed=seed, **options
        )
        return runner.run(work)

    return play


async def with_tree(rollout, *arguments, **options) -> Any:
    with logtree.capture("Group") as tree:
        group = await rollout(*arguments, **options)
    body: Any = tree.children[1]
    return group, body.children


SAME = {
    "plain": (Group(), FailFast()),
    "long": (Group(plan=[[""]] * 16, turns=5), FailFast()),
    "rolled out again": (Group(plan=bad("flaky", at=2)), RetryOnFailure()),
    "smaller": (Group(plan=bad("flaky", at=2, again="flaky")), MinViableGroup(max_retries=0)),
    "dropped": (Group(plan=[["flaky"]] * 3), MinViableGroup()),
    "together": (Duel(plan=[["flaky", ""], ["hangs", ""]]), RetryOnFailure()),
    "timed out": (Group(plan=bad("hangs")), RetryOnFailure(per_rollout_timeout=10.0)),
}


@pytest.mark.parametrize("name", SAME)
def test_groups_in_a_pool_equal_groups_in_this_process(runner, pool, name):
    builder, strategy = SAME[name]
    here, there = Draws(), Draws()
    heard_here, heard_there = [], []
    builder.made = 0
    group, tree = runner.run(
        with_tree(do_group_rollout, builder, here, strategy, seed=1, on_turn=heard_here.append)
    )
    builder.made = 0
    other, [part] = runner.run(
        with_tree(
            pool.do_group_rollout, builder, there, strategy, seed=1, on_turn=heard_there.append
        )
    )
    assert group == other
    assert (group is None) == (name == "dropped")
    assert part.tag == "div"
    if name in (
        "dropped",
        "together",
    ):  # the progress of the other trajectories at the failure varies
        return
    if name in ("plain", "long", "smaller"):  # the other strategies log failures with tracebacks
        assert part.children == tree
    assert titles_of(part.children) == titles_of(tree)
    assert sorted(here.calls) == sorted(there.calls)
    assert sorted(map(repr, heard_here)) == sorted(map(repr, heard_there))


def titles_of(nodes) -> list[str]:
    return [node.children[0].children[0] for node in nodes if node.tag == "section"]


def test_many_groups_run_concurrently_in_a_pool(runner, pool):
    async def run(rollout):
        async with asyncio.TaskGroup() as tasks:
            playing = [
                tasks.create_task(rollout(Group(), Draws(), seed=seed)) for seed in range(40)
            ]
        return [task.result() for task in playing]

    assert runner.run(run(pool.do_group_rollout)) == runner.run(run(do_group_rollout))


def test_a_group_goes_to_the_process_with_the_fewest_groups(runner, pool, tmp_path):
    async def run():
        async with asyncio.TaskGroup() as tasks:
            for _ in range(6):
                tasks.create_task(pool.do_group_rollout(Files(directory=str(tmp_path)), Draws()))

    runner.run(run())
    pids = [int(line) for line in (tmp_path / "pid").read_text().split()]
    assert sorted(pids.count(pid) for pid in set(pids)) == [3, 3]
    assert sorted(set(pids)) == sorted(pool.pids)
    assert os.getpid() not in pids


def test_the_policy_runs_in_the_main_process(play):
    assert play(Group(), Locked()) == play(Group(), Draws())


def test_a_pool_works_without_an_open_logtree(runner, pool):
    assert len(runner.run(pool.do_group_rollout(Group(), Draws())).trajectories_G) == 4


def test_a_policy_without_seeding_is_called_directly(runner, pool):
    policy = Draws(seed=3)
    runner.run(pool.do_group_rollout(Group(), policy))
    assert policy.calls == [3] * 8


def test_environment_errors_keep_type_message_location_and_traceback(play):
    with pytest.raises(Flaky, match="the sandbox is gone") as caught:
        play(Group(plan=bad("flaky")))
    text = "".join(traceback.format_exception(caught.value))
    assert "in Trajectory 1 of Group(" in text
    assert "rollout_fakes.py" in text
    assert 'raise Flaky("the sandbox is gone")' in text


@pytest.mark.parametrize(
    ("what", "message"),
    [("odd", "rollout_fakes.Odd: this: that"), ("lambda", "rollout_fakes.Flaky")],
)
def test_unpicklable_errors_are_named(play, what, message):
    with pytest.raises(RolloutProcessError, match=message) as caught:
        play(Group(plan=bad(what)))
    assert "rollout_fakes.py" in "".join(traceback.format_exception(caught.value))


def test_an_unrequested_cancellation_in_a_pool_is_an_error(play):
    with pytest.raises(RuntimeError, match="CancelledError"):
        play(Group(plan=bad("cancelled")))


@pytest.mark.parametrize(
    "error", [UserError("the prompt has 9000 tokens"), EngineClosedError("closed")]
)
def test_policy_errors_reach_the_caller_unchanged(play, error):
    with pytest.raises(type(error), match=str(error)):
        play(Group(), Refusing([error]), RetryOnFailure())


def test_strategies_receive_policy_errors(play):
    group = play(Group(), Refusing([Flaky("busy"), ConnectionError("gone")]), RetryOnFailure())
    assert sorted(error.error_type for error in group.rollout_errors) == [
        "ConnectionError",
        "Flaky",
    ]


def test_base_exceptions_of_the_policy_leave_the_pool(runner, pool, tmp_path):
    class Killed(BaseException):
        pass

    class Killing(Draws):
        async def __call__(self, model_input, stop, *, max_tokens=None):
            raise Killed

    with pytest.raises(Killed):
        runner.run(pool.do_group_rollout(Files(directory=str(tmp_path)), Killing()))
    wait_for(lambda: (tmp_path / "cleaned").exists())


def test_an_abandoned_policy_call_is_cancelled(play):
    policy = Stuck()
    assert play(Group(), policy, MinViableGroup(per_rollout_timeout=5.0, max_retries=1)) is None
    assert policy.events.count("cancelled") == policy.calls >= 4


def test_a_policy_call_can_be_cancelled_without_its_group(play):
    policy = Stuck(times=1)
    play(Group(plan=[[""]]), policy, RetryOnFailure(per_rollout_timeout=10.0))
    assert policy.events == ["call", "cancelled", "call", "call"]


def test_a_cancelled_group_runs_its_cleanup(runner, pool, tmp_path):
    policy, cleaned = Stuck(), tmp_path / "cleaned"

    async def run():
        task = asyncio.create_task(
            pool.do_group_rollout(Files(directory=str(tmp_path)), policy, RetryOnFailure())
        )
        while policy.calls < 4:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        # The worker creates the file first and writes its line later.
        while not (cleaned.exists() and cleaned.read_text()):
            await asyncio.sleep(0.005)

    runner.run(run())
    assert cleaned.read_text() == "1\n"
    assert policy.events.count("cancelled") == 4


@pytest.mark.parametrize(
    ("tags", "part"),
    [
        ([lambda: 0], "Group.tags[0]"),
        (
            [{"thunk": functools.partial(dict, end=lambda: 0)}],
            "Group.tags[0]['thunk'].keywords['end']",
        ),
    ],
)
def test_an_unpicklable_builder_is_named(play, tags, part):
    with pytest.raises(UserError, match="cannot be sent to a rollout process because of") as caught:
        play(Group(tags=tags))
    assert part in str(caught.value)


def test_a_builder_that_cannot_be_imported_is_named(play, monkeypatch):
    module = types.ModuleType("only_here")
    monkeypatch.setitem(sys.modules, "only_here", module)
    module.Hidden = type("Hidden", (Group,), {"__module__": "only_here"})  # type: ignore[attr-defined]
    with pytest.raises(
        UserError,
        match=r"Hidden.* cannot be made in a rollout process: ModuleNotFoundError: .*only_here",
    ):
        play(module.Hidden())


class LoggingCode(Plain):
    async def step(self, action, *, extra=None):
        result = await super().step(action, extra=extra)
        result.logs["score"] = lambda: 0  # type: ignore[assignment]
        return result


class Unsendable(Group):
    def _env(self, what):
        return LoggingCode()


def test_unpicklable_results_raise(play):
    with pytest.raises(UserError, match="cannot be sent back from its process.*metrics and logs"):
        play(Unsendable())


def test_a_dead_process_fails_only_its_groups_and_is_replaced(runner, pool, tmp_path):
    before = set(pool.pids)

    async def run():
        policy = Stuck()
        waiting = [asyncio.create_task(pool.do_group_rollout(Group(), policy)) for _ in range(2)]
        while policy.calls < 8:
            await asyncio.sleep(0.005)
        dying = asyncio.create_task(pool.do_group_rollout(Group(plan=bad("killed")), Draws()))
        async with asyncio.timeout(60):
            while sum(task.done() for task in [dying, *waiting]) < 2:
                await asyncio.sleep(0.005)
        await asyncio.wait([dying, *waiting], timeout=0.5)
        errors = [task.exception() for task in [dying, *waiting] if task.done()]
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        return errors

    errors = runner.run(run())
    assert len(errors) == 2, "the group that died, and the one beside it"
    for error in errors:
        assert isinstance(error, ProcessDiedError)
        assert "ended during its rollouts (SIGKILL, perhaps for lack of memory)" in str(error)
        assert "Group(" in error.__notes__[0]
    builder = Files(plan=bad("once"), directory=str(tmp_path))
    group = runner.run(pool.do_group_rollout(builder, Draws(), RetryOnFailure(), seed=7))
    assert [error.error_type for error in group.rollout_errors] == ["ProcessDiedError"]
    assert len(group.trajectories_G) == 4
    assert len(before & set(pool.pids)) < 2


def test_two_processes_that_die_are_both_replaced(runner, pool, monkeypatch):
    first, second = pool._processes
    start = RolloutProcess.start

    async def end(process):
        os.kill(process.pid, signal.SIGKILL)
        while not process.has_ended:
            await asyncio.sleep(0.005)

    async def start_as_the_first_dies(start_worker):
        monkeypatch.setattr(RolloutProcess, "start", start)
        await end(first)
        return await start(start_worker)

    async def run():
        await end(second)
        monkeypatch.setattr(RolloutProcess, "start", start_as_the_first_dies)
        return await pool.do_group_rollout(Group(), Draws())

    assert len(runner.run(run()).trajectories_G) == 4


def test_a_pool_can_be_closed_while_a_process_is_replaced(runner, monkeypatch):
    start, started = RolloutProcess.start, []

    async def run():
        async with RolloutPool(1) as pool:
            os.kill(pool.pids[0], signal.SIGKILL)
            while not pool._processes[0].has_ended:
                await asyncio.sleep(0.005)
            starting = asyncio.Event()

            async def slow_start(start_worker):
                starting.set()
                await asyncio.sleep(0.05)
                started.append(await start(start_worker))
                return started[0]

            monkeypatch.setattr(RolloutProcess, "start", slow_start)
            group = asyncio.create_task(pool.do_group_rollout(Group(), Draws(), FailFast()))
            await starting.wait()
        with pytest.raises(RolloutProcessError):
            await group
        assert started[0].has_ended

    runner.run(run())


def test_a_strategy_can_drop_the_groups_of_a_dead_process(play, caplog):
    with caplog.at_level(logging.WARNING):
        strategy = MinViableGroup(max_retries=0)
        assert play(Group(plan=bad("exits")), strategy=strategy, failures=(failures := [])) is None
    assert "exit code 3" in caplog.text
    assert [error.error_type for error in failures] == ["ProcessDiedError"]


def test_failures_of_a_dropped_group_are_returned(play):
    failures: list[RolloutError] = []
    assert (
        play(Group(plan=[["flaky"]] * 4), strategy=MinViableGroup(max_retries=1), failures=failures)
        is None
    )
    assert {error.error_type for error in failures} == {"Flaky"}
    assert len(failures) >= 2


def test_a_dead_process_is_detected_although_its_socket_is_open(play):
    with pytest.raises(ProcessDiedError):
        play(Group(plan=bad("forks")))


@pytest.mark.parametrize("what", ["computes once", "matches once"])
def test_an_environment_that_blocks_its_process_has_failed_after_the_time_limit(
    play, tmp_path, what
):
    builder = Files(plan=bad(what), directory=str(tmp_path))
    group = play(builder, Draws(), RetryOnFailure(per_rollout_timeout=10.0))
    (error,) = group.rollout_errors
    assert error.error_type == "ProcessDiedError"
    assert "an environment blocked it for longer than per_rollout_timeout" in error.error_message
    assert len(group.trajectories_G) == 4


def test_a_process_may_be_blocked_outside_of_time_limits(monkeypatch):
    armed: list[float | None] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda s, exit: armed.append(s))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: armed.append(None))
    watch = LoopWatch()
    with watch.group():
        assert armed[-1] is None  # make_envs
        during = during_time_limit.get()
        with during(3.0):
            assert armed[-1] == 8.0
            with during(4.0):
                assert armed[-1] == 9.0
            assert armed[-1] == 8.0
            with watch.group():
                assert armed[-1] is None  # the other group's make_envs
                with during_time_limit.get()(None):
                    assert armed[-1] is None
                with during_time_limit.get()(6.0):
                    assert armed[-1] == 11.0
            assert armed[-1] == 8.0
        assert armed[-1] is None


def test_a_pool_can_be_closed_while_an_environment_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(process_module, "GRACE_SECONDS", 0.3)

    async def run():
        async with RolloutPool(1) as pool:
            task = asyncio.create_task(
                pool.do_group_rollout(
                    Files(plan=bad("computes", size=2), directory=str(tmp_path)), Draws()
                )
            )
            while not (tmp_path / "pid").exists():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            task.cancel()
            await asyncio.wait([task])
            return pool.pids

    [pid] = asyncio.run(run())
    assert not is_alive(pid)


def test_an_invalid_pool_size_is_rejected():
    for size in (0, -1, 1.5, True):
        with pytest.raises(UserError, match=f"max_workers={size}"):
            RolloutPool(size)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="only in its `async with` block"):
        asyncio.run(RolloutPool(1).do_group_rollout(Group(), Draws()))

    async def run():
        async with RolloutPool.open(0) as pool:
            return pool

    assert asyncio.run(run()) is None


SCRIPT = """
    import asyncio, sys
    sys.path.insert(0, {here!r})
    from rollout_fakes import Files, Stuck
    from planish.rl.rollout.processes.pool import RolloutPool

    async def main():
        async with RolloutPool(1) as pool:
            await pool.do_group_rollout(Files(directory={directory!r}), Stuck())

    {guard}
        asyncio.run(main())
"""


def started(directory: Path, guard: str) -> subprocess.Popen[str]:
    script = directory / "script.py"
    script.write_text(
        textwrap.dedent(
            SCRIPT.format(here=str(Path(__file__).parent), directory=str(directory), guard=guard)
        )
    )
    return subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell lets background jobs ignore SIGINT, and the program would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.parametrize("by", ["ctrl-c", "sigterm", "kill"])
def test_no_worker_process_survives_the_run(tmp_path, by):
    program = started(tmp_path, "if __name__ == '__main__':")
    wait_for(
        lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"),
        program,
    )
    pid = int((tmp_path / "pid").read_text())
    if by == "ctrl-c":
        os.killpg(
            program.pid, signal.SIGINT
        )  # a terminal sends SIGINT to all processes of the group
    elif by == "sigterm":
        os.killpg(program.pid, signal.SIGTERM)
    else:
        program.kill()
    _, errors = program.communicate()
    wait_for(lambda: not is_alive(pid))
    assert (tmp_path / "cleaned").read_text() == "1\n"
    assert "worker.py" not in errors, "only the program itself says that it was interrupted"
    assert ("KeyboardInterrupt" in errors) == (by == "ctrl-c")


def test_a_script_without_a_main_guard_is_named(tmp_path):
    program = started(tmp_path, "if True:")
    _, errors = program.communicate()
    assert program.returncode == 1
    assert "its work must begin under `if __name__ == '__main__':`" in errors


def wait_for(
    condition, program: subprocess.Popen[str] | None = None, seconds: float = 60.0
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert program is None or program.poll() is None, program.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text() if Path("/proc").exists() else ""
        if status.rpartition(")")[2].split()[:1] == ["Z"]:
            return False
        os.kill(pid, 0)
    except (ProcessLookupError, FileNotFoundError):
        return False
    return True
