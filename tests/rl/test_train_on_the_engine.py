"""The RL loop on a real engine with a tiny random model. In deterministic mode, resumed runs end
bitwise identical.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from digit_env import DigitsBuilder
from safetensors.numpy import load_file

from planish import ServiceClient
from planish.files import read_rows
from planish.testing import tiny_model
from planish.training.rl_config import AsyncConfig, Config
from planish.training.train_rl import main
from planish.types import CheckpointPath

TIMING = ("time/", "tokens/prefill", "tokens/cumulative/prefill", "env/all/total_cached_ob_tokens")
"""Metrics that depend on timing, such as prefix cache hits."""
STEPS = 4
SCRIPT = """
import asyncio, sys
sys.path.insert(0, {here!r})
from test_train_on_the_engine import train
try:
    train({model!r}, {data!r}, {log!r})
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


def config_of(log_path, **changes):
    options = {
        "learning_rate": 1e-2,
        "dataset_builder": DigitsBuilder(batches=STEPS, turns=2, tests=2),
        "model_name": "tiny",
        "lora_rank": 4,
        "max_tokens": 6,
        "log_path": str(log_path),
        "eval_every": 2,
        "save_every": 2,
        "num_groups_to_log": 1,
        "temperature": 1.3,
        **changes,
    }
    return Config(**options)


def train(model: str, data_dir, log_path, **changes):
    with ServiceClient(
        models={"tiny": model}, data_dir=data_dir, dtype="float32", deterministic=True
    ) as client:
        return asyncio.run(main(config_of(log_path, **changes), client))


def final_state(data_dir, log_path):
    path = CheckpointPath.parse(read_rows(Path(log_path) / "checkpoints.jsonl")[-1]["state_path"])
    directory = Path(data_dir) / path.run_id / "weights" / path.name
    return {
        f"{file.name}:{name}": tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert len(left) > 10
    for name, tensor in left.items():
        np.testing.assert_array_equal(tensor, right[name], err_msg=name)


def untimed(log_path):
    rows = read_rows(Path(log_path) / "metrics.jsonl")
    return [
        {name: value for name, value in row.items() if not name.startswith(TIMING)} for row in rows
    ]


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    train(model, directory / "data", directory / "run")
    return directory


def test_trained_logprobs_equal_sampled_logprobs(whole):
    rows = [row for row in untimed(whole / "run") if "optim/lr" in row]
    assert len(rows) == STEPS
    for row in rows:
        assert row["optim/kl_sample_train_v2"] < 1e-8
        assert row["env/all/turns_per_episode"] == 2
        assert row["optim/grad_norm"] > 0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_metrics_file(model, whole, tmp_path):
    train(model, tmp_path / "data", tmp_path / "run")
    assert untimed(tmp_path / "run") == untimed(whole / "run")
    assert_equal(
        final_state(tmp_path / "data", tmp_path / "run"), final_state(whole / "data", whole / "run")
    )


@pytest.mark.slow
def test_a_resumed_run_ends_bitwise_identical(model, whole, tmp_path):
    train(model, tmp_path / "data", tmp_path / "run", max_steps=1)
    train(model, tmp_path / "data", tmp_path / "run")
    assert_equal(
        final_state(tmp_path / "data", tmp_path / "run"), final_state(whole / "data", whole / "run")
    )
    assert [row["step"] for row in untimed(tmp_path / "run")] == list(range(STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_stopped_or_killed_process_resumes_bitwise_identically(model, whole, tmp_path, end):
    here, data, log = str(Path(__file__).parent), str(tmp_path / "data"), str(tmp_path / "run")
    script = SCRIPT.format(here=here, model=model, data=data, log=log)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdout=subprocess.DEVNULL,
        # A shell lets background jobs ignore SIGINT, and the program would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline, has_ended = time.monotonic() + 120, False
    while len(read_rows(metrics)) < 2:
        assert time.monotonic() < deadline
        assert not has_ended
        time.sleep(0.005)
        has_ended = process.poll() is not None  # before the rows are read again
    process.send_signal(end)
    code = process.wait(timeout=120)
    if end == signal.SIGINT and code == 130:  # it may already have ended
        saved = read_rows(tmp_path / "run" / "checkpoints.jsonl")[-1]["batch"]
        assert saved == len([row for row in read_rows(metrics) if "optim/lr" in row])
    train(model, tmp_path / "data", tmp_path / "run")
    assert_equal(final_state(data, log), final_state(whole / "data", whole / "run"))
    assert untimed(log) == untimed(whole / "run")


@pytest.mark.slow
def test_asynchronous_and_streaming_runs_train_on_the_engine(model, tmp_path):
    train(
        model,
        tmp_path / "data",
        tmp_path / "run",
        async_config=AsyncConfig(max_steps_off_policy=1),
        eval_every=0,
    )
    rows = untimed(tmp_path / "run")
    assert [row["async/staleness_max"] for row in rows] == [0, 1, 1, 1]
