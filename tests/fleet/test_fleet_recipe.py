"""A recipe on replicas that is disturbed, and resumed by the same command, computes what one engine
computes.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs planish[ray]; run by make test-extras")

from fleet_runs import WAIT, reproducible

from planish.files import read_rows
from planish.processes.ray_cluster import import_ray, leave_cluster, start_cluster
from planish.recipes import rl_basic
from planish.rl.environments.boxed_problems import BoxedProblemEnv

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]

PROGRAM = f"""
import os, runpy, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from fleet_runs import WAIT, home_of, pid_of
from planish.fleet.fleet import Fleet
from planish.processes.ray_cluster import import_ray
from planish.rl.environments.boxed_problems import BoxedProblemEnv
from planish.runlog.run_directory import RunDirectory
from test_fleet_recipe import chance

loss = sys.argv.pop(1)
fleets, start, log = [], Fleet.__init__, RunDirectory.log

def started(self, *arguments, **keywords):
    start(self, *arguments, **keywords)
    fleets.append(self)

def logged(self, step, metrics):
    log(self, step, metrics)
    (fleet,) = fleets
    if loss == "head" and step == 2:
        (head,) = import_ray()._private.worker._global_node.all_processes["gcs_server"]
        head.process.kill()
        fleet.replicas._thread.join(WAIT)  # it ends when the loss of the head is known
    if loss == "program" and step == 4:
        (other,) = (r for r in fleet.replicas.replicas if r is not home_of(fleet))
        os.kill(pid_of(other), signal.SIGKILL)
    if loss == "program" and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)

Fleet.__init__, RunDirectory.log, BoxedProblemEnv.check_answer = started, logged, chance
runpy.run_module("planish.recipes.rl_basic", run_name="__main__", alter_sys=True)
"""
"""rl_basic, which loses the head of its cluster, or a replica and then itself."""


async def chance(env: object, sample_str: str) -> bool:
    """Grade an answer of an untrained model so that some are correct."""
    return sum(sample_str.encode()) % 2 == 0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    start_cluster(num_cpus=4, num_gpus=0, object_store_bytes=100 << 20)
    yield
    leave_cluster()


def run(loss: str, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run the recipe in a program of its own, which suffers a loss."""
    arguments = [f"{name}={value}" for name, value in options.items()]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, loss, *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def final_weights(run_directory: Path, data_dir: Path) -> bytes:
    path = read_rows(run_directory / "checkpoints.jsonl")[-1]["state_path"]
    (file,) = (data_dir / path.removeprefix("tinker://")).glob("adapter_model.safetensors")
    return file.read_bytes()


def test_a_run_that_loses_head_replica_and_program_equals_an_undisturbed_one(
    model_dir, dataset, tmp_path, monkeypatch
):
    data_dir = tmp_path / "data"
    monkeypatch.setenv("PLANISH_DATA", str(data_dir))
    monkeypatch.setattr(BoxedProblemEnv, "check_answer", chance)
    options = {
        "model_name": str(model_dir),
        "dataset": str(dataset),
        "log_path": str(tmp_path / "run"),
        "batch_size": 4,
        "group_size": 4,
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "max_tokens": 8,
        "max_steps": 8,
        "save_every": 2,
        "eval_problems": 0,
        "eval_every": 0,
        "replicas": 2,
    }
    lost_head = run("head", options)
    assert lost_head.returncode == 1, lost_head.stderr
    assert "the head of the Ray cluster" in lost_head.stderr
    assert "load the last checkpoint" in lost_head.stderr
    assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 3

    options["ray"] = import_ray().get_runtime_context().gcs_address
    killed = run("program", options)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(read_rows(tmp_path / "run" / "metrics.jsonl")) == 6

    resumed = rl_basic.main(rl_basic.Options(**options))
    alone = {"replicas": None, "ray": None, "log_path": str(tmp_path / "alone")}
    undisturbed = rl_basic.main(rl_basic.Options(**{**options, **alone}))
    rows = reproducible(undisturbed)
    assert all(row["tokens/trained"] > 0 for row in rows[:8])
    assert reproducible(resumed) == rows
    assert final_weights(resumed, data_dir) == final_weights(undisturbed, data_dir)
