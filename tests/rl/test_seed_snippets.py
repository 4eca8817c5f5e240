"""The parsing snippets of the published documentation, verbatim, on a run directory of planish."""

import asyncio
import warnings

import matplotlib
import pandas as pd
import pytest
from digest_service import FakeService
from digit_env import DigitsBuilder

from planish.training.rl_config import Config
from planish.training.train_rl import main

METRICS = """
df = pd.read_json("path/to/metrics.jsonl", lines=True)
df.plot(x="progress/batch", y="env/all/reward/total")
"""

SUMMARIES = """
with open("train_iteration_000010_rollout_summaries.jsonl") as f:
    trajectories = [json.loads(line) for line in f]
# Each trajectory has:
# - metadata: schema_version, split, iteration, group_idx, traj_idx
# - episode totals: total_reward, final_reward, trajectory_metrics
# - steps: list of {step_idx, ob_len, ac_len, reward, episode_done, metrics}
"""

LOGTREE = """
def find_conversations(node):
    results = []
    if isinstance(node, dict):
        if node.get("data", {}).get("type") == "conversation":
            results.append(node["data"])
        for child in node.get("children", []):
            if isinstance(child, dict):
                results.extend(find_conversations(child))
    return results
with open("eval_test_iteration_000020_logtree.json") as f:
    trace = json.load(f)
for conv in find_conversations(trace["root"]):
    for msg in conv["messages"]:
        print(f"{msg['role']}: {msg['content'][:100]}")
"""


@pytest.fixture(scope="module")
def directory(tokenizer, tmp_path_factory):
    """Make a run of 20 steps in path/to, evaluated before every tenth step and at the end."""
    directory = tmp_path_factory.mktemp("docs")
    config = Config(
        learning_rate=0.1,
        dataset_builder=DigitsBuilder(batches=20, groups=2, tests=2),
        model_name="tiny",
        max_tokens=8,
        log_path=str(directory / "path" / "to"),
        eval_every=10,
    )
    asyncio.run(main(config, FakeService(tokenizer)))  # pyright: ignore[reportArgumentType]
    return directory


def run(snippet, **names):
    exec(compile("import json\n" + snippet, "snippet", "exec"), names)
    return names


@pytest.mark.slow
def test_the_published_metrics_snippet_runs(directory, monkeypatch):
    monkeypatch.chdir(directory)
    matplotlib.use("Agg")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of pandas and matplotlib
        frame = run(METRICS, pd=pd)["df"]
    assert frame["progress/batch"].tolist() == list(range(21))
    assert frame["env/all/reward/total"].notna().sum() == 20


def test_the_published_summaries_snippet_runs(directory, monkeypatch):
    monkeypatch.chdir(directory / "path" / "to")
    trajectories = run(SUMMARIES)["trajectories"]
    assert len(trajectories) == 8
    for trajectory in trajectories:
        assert {
            "schema_version",
            "split",
            "iteration",
            "group_idx",
            "traj_idx",
        } <= trajectory.keys()
        assert {"total_reward", "final_reward", "trajectory_metrics"} <= trajectory.keys()
        for step in trajectory["steps"]:
            assert {
                "step_idx",
                "ob_len",
                "ac_len",
                "reward",
                "episode_done",
                "metrics",
            } <= step.keys()


def test_the_published_logtree_snippet_runs(directory, monkeypatch, capsys):
    monkeypatch.chdir(directory / "path" / "to")
    run(LOGTREE)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 8
    assert all(": " in line for line in lines)
