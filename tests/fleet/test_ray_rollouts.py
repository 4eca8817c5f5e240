"""Group rollouts in workers on a real Ray cluster of this machine."""

import asyncio
import importlib.metadata
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs planish[ray]; run by make test-extras")

from fleet_runs import WAIT, reproducible
from rollout_fakes import Draws, Files, Group, Stuck, bad
from test_rollout_pool import is_alive, wait_for

from planish.errors import UserError
from planish.processes import ray_cluster as cluster_module
from planish.processes.ray_cluster import import_ray, leave_cluster, start_cluster
from planish.recipes import rl_basic
from planish.rl.rollout.processes import process as process_module, ray_worker
from planish.rl.rollout.processes.pool import RolloutPool
from planish.rl.rollout.processes.process import NoRoomError, ProcessDiedError
from planish.rl.rollout.processes.ray_actor import RolloutActor
from planish.rl.rollout.processes.ray_worker import RayWorker
from planish.rl.rollout.rollouts import do_group_rollout
from planish.rl.rollout.strategy import RetryOnFailure

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    start_cluster(num_cpus=2, num_gpus=0, object_store_bytes=100 << 20)
    yield
    leave_cluster()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def pool(runner, cluster) -> Iterator[RolloutPool]:
    context = RolloutPool.open("ray")
    pool = runner.run(context.__aenter__())
    assert pool is not None
    assert pool.max_workers == 2
    yield pool
    runner.run(context.__aexit__(None, None, None))


def roll_out(runner, do_rollout: Any) -> list[Any]:
    """Roll out groups at the same time; return the results and the seeds of the samples."""

    async def run() -> list[Any]:
        policies = [Draws() for _ in range(6)]
        plans = [[[""]] * 4, bad("flaky", at=2), [[""]] * 8]
        builders = [Group(plan=plan, turns=turns) for turns in (2, 4) for plan in plans]
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(do_rollout(builder, policy, RetryOnFailure(), seed=seed))
                for seed, (builder, policy) in enumerate(zip(builders, policies, strict=True))
            ]
        return [
            (task.result(), sorted(policy.calls))
            for task, policy in zip(running, policies, strict=True)
        ]

    return runner.run(run())


def test_groups_on_a_cluster_equal_those_in_local_processes_and_in_this_one(runner, pool):
    async def with_local_processes(*arguments: Any, **keywords: Any) -> Any:
        return await local.do_group_rollout(*arguments, **keywords)

    local = RolloutPool(1)
    runner.run(local.__aenter__())
    try:
        expected = roll_out(runner, with_local_processes)
    finally:
        runner.run(local.close())
    assert roll_out(runner, pool.do_group_rollout) == expected
    assert roll_out(runner, do_group_rollout) == expected


def test_a_worker_that_dies_fails_its_groups_and_is_replaced(runner, pool, tmp_path):
    with pytest.raises(ProcessDiedError, match=r"SIGKILL, perhaps for lack of memory, on the mach"):
        runner.run(pool.do_group_rollout(Group(plan=bad("killed")), Draws()))
    builder = Files(plan=bad("once"), directory=str(tmp_path))
    group = runner.run(pool.do_group_rollout(builder, Draws(), RetryOnFailure(), seed=7))
    assert [error.error_type for error in group.rollout_errors] == ["ProcessDiedError"]
    assert len(group.trajectories_G) == 4


def test_the_death_of_an_actor_is_that_of_its_worker(runner, pool, tmp_path):
    policy = Stuck()

    async def run() -> BaseException | None:
        group = asyncio.create_task(pool.do_group_rollout(Files(directory=str(tmp_path)), policy))
        while not policy.calls:
            await asyncio.sleep(0.01)
        (busy,) = (process for process in pool._processes if process.groups)
        assert isinstance(busy._worker, RayWorker)
        busy._worker.kill()
        await asyncio.wait([group], timeout=WAIT)
        return group.exception()

    error = runner.run(run())
    assert isinstance(error, ProcessDiedError)
    assert "its Ray actor has ended" in str(error)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_alive(pid))
    assert len(runner.run(pool.do_group_rollout(Group(), Draws())).trajectories_G) == 4


def test_a_worker_without_a_place_is_not_replaced(runner, pool, monkeypatch, caplog):
    async def lose_one() -> None:
        pool._processes[0]._worker.kill()
        await asyncio.wait([pool._processes[0]._supervising])

    before = list(pool._processes)
    monkeypatch.setattr(ray_worker, "wait_for_devices", lambda kind, needed: 0)
    runner.run(lose_one())
    assert len(runner.run(pool.do_group_rollout(Group(), Draws())).trajectories_G) == 4
    assert pool._processes == before[1:]
    assert "no CPU of the Ray cluster is free" in caplog.text
    runner.run(lose_one())
    with pytest.raises(NoRoomError, match="give rollout_processes=N"):
        runner.run(pool.do_group_rollout(Group(), Draws()))
    monkeypatch.undo()
    assert len(runner.run(pool.do_group_rollout(Group(), Draws())).trajectories_G) == 4
    assert len(pool._processes) == 1


def test_another_version_of_planish_on_a_machine_is_an_error(runner, pool, monkeypatch):
    monkeypatch.setattr(ray_worker.importlib.metadata, "version", lambda name: "0.0.1")
    other = RolloutPool(1, RayWorker.start)
    runner.run(other.__aenter__())
    try:
        with pytest.raises(UserError, match=r"has planish .*, and the run has 0\.0\.1"):
            runner.run(other.do_group_rollout(Group(), Draws()))
    finally:
        runner.run(other.close())


def test_a_worker_that_waits_for_a_cpu_is_reported_and_can_be_ended(
    runner, pool, monkeypatch, caplog
):
    monkeypatch.setattr(ray_worker, "_SLOW_START_SECONDS", 0.01)
    monkeypatch.setattr(ray_worker, "wait_for_devices", lambda kind, needed: 1)
    monkeypatch.setattr(process_module, "GRACE_SECONDS", 0.1)
    occupying = import_ray().remote(num_cpus=1)(RolloutActor)
    version = importlib.metadata.version("planish")
    actors = [occupying.remote(version) for _ in range(2)]  # more than are free
    other = RolloutPool(1, RayWorker.start)
    runner.run(other.__aenter__())
    try:
        wait_for(lambda: "it waits for a free CPU in the cluster" in caplog.text, None, WAIT)
    finally:
        runner.run(other.close())
        for actor in actors:
            import_ray().kill(actor)


def test_a_cluster_without_a_free_cpu_is_an_error(monkeypatch):
    monkeypatch.setattr(ray_worker, "free_devices", lambda kind: 0)
    with pytest.raises(NoRoomError, match="no CPU of the Ray cluster is free"):
        ray_worker.open_cluster(None)


def test_options_without_a_cluster_are_errors_before_the_run(tmp_path, monkeypatch):
    options = rl_basic.Options(
        model_name=str(tmp_path), dataset=str(tmp_path), rollout_processes="ray", replicas=2
    )
    with pytest.raises(UserError, match="rollout_processes=ray with replicas=2"):
        rl_basic.main(options)
    no_cluster = SimpleNamespace(is_initialized=lambda: False, init=refuse)
    monkeypatch.setattr(cluster_module, "import_ray", lambda: no_cluster)
    options = rl_basic.Options(
        model_name=str(tmp_path), dataset=str(tmp_path), rollout_processes="ray"
    )
    with pytest.raises(UserError, match="no Ray cluster answers"):
        rl_basic.main(options)


def refuse(**_: Any) -> None:
    raise ConnectionError("Could not find any running Ray instance")


SCRIPT = """
import asyncio, dataclasses, sys
from rollout_fakes import Draws, Files, Stuck
from planish.rl.rollout.processes.pool import RolloutPool

@dataclasses.dataclass
class OwnGroup(Files):
    def logging_tags(self):
        return ["own"]

async def main():
    directory, address, policy = sys.argv[1:]
    async with RolloutPool.open("ray", address) as pool:
        group = await pool.do_group_rollout(OwnGroup(directory=directory), globals()[policy]())
        print(len(group.trajectories_G), "trajectories")

asyncio.run(main())
"""


def started(directory: Path, policy: str) -> subprocess.Popen[str]:
    """Start a script, which has a builder of its own and joins the cluster."""
    script = directory / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    address = import_ray().get_runtime_context().gcs_address
    return subprocess.Popen(
        [sys.executable, script, directory, address, policy],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.fixture
def free_cluster(runner, pool):
    """The cluster without the workers of the other tests."""
    runner.run(pool.close())


@pytest.mark.usefixtures("free_cluster")
def test_a_script_s_own_builder_needs_no_module(tmp_path):
    program = started(tmp_path, "Draws")
    output, errors = program.communicate(timeout=WAIT)
    assert output == "4 trajectories\n", errors
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_alive(pid))
    assert (tmp_path / "cleaned").read_text() == "1\n"


@pytest.mark.usefixtures("free_cluster")
def test_no_worker_survives_a_program_that_is_killed(tmp_path):
    program = started(tmp_path, "Stuck")
    wait_for(lambda: (tmp_path / "pid").exists(), program, WAIT)
    wait_for(lambda: (tmp_path / "pid").read_text().endswith("\n"))
    program.send_signal(signal.SIGKILL)
    program.communicate()
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_alive(pid))


@pytest.mark.usefixtures("free_cluster")
def test_a_recipe_on_a_cluster_equals_one_in_this_process(
    model_dir, dataset, tmp_path, monkeypatch
):
    monkeypatch.setenv("PLANISH_DATA", str(tmp_path / "data"))

    def run(name: str, **options: Any) -> list[dict[str, Any]]:
        return reproducible(
            rl_basic.main(
                rl_basic.Options(
                    model_name=str(model_dir),
                    dataset=str(dataset),
                    log_path=str(tmp_path / name),
                    batch_size=4,
                    group_size=4,
                    lora_rank=4,
                    max_tokens=8,
                    max_steps=2,
                    eval_every=0,
                    eval_problems=0,
                    **options,
                )
            )
        )

    assert run("cluster", rollout_processes="ray") == run("here")
