"""Run directories for tests of the console, written by the classes that write real ones."""

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_samples import group, single

from planish.reports.rollout_files import RolloutFiles
from planish.reports.rollout_records import TrainedTokens
from planish.rl.rollout.rollouts import GroupRollout
from planish.runlog.run_directory import CheckpointRecord, RunDirectory
from planish.tokenizer import ModelTokenizer

CONFIG = {
    "model_name": "some/tiny-model",
    "recipe_name": "rl_basic",
    "learning_rate": 1e-4,
    "seed": 0,
    "max_tokens": 64,
    "base_url": None,
    "load_checkpoint_path": None,
    "dataset_builder": {"group_size": 4, "batch_size": 2},
}
Metrics = Mapping[str, float]


def reward_curve(step: int, last_rise: int = 40, noise: float = 0.01) -> float:
    """Return a reward that rises until a step and then stays, with reproducible noise."""
    level = 0.1 + 0.7 * min(1.0, step / last_rise)
    return level + noise * random.Random(step).uniform(-1, 1)


def rl_metrics(step: int, num_steps: int, **others: float) -> dict[str, float]:
    """Return the metrics of one step of a run of RL."""
    reward = reward_curve(step)
    return {
        "progress/batch": step,
        "progress/done_frac": (step + 1) / num_steps,
        "env/all/reward/total": reward,
        "env/all/correct": reward,
        "env/all/by_group/frac_mixed": 0.6,
        "env/all/by_group/frac_all_bad": 0.2,
        "env/all/by_group/frac_all_good": 0.2,
        "env/all/ac_tokens_per_turn": 20 + 4 * math.sin(step),
        "env/all/stop/max_tokens": 0.02,
        "optim/entropy": 1.2 * math.exp(-step / 100),
        "optim/kl_sample_train_v2": 0.0,
        "optim/grad_norm": 50.0,
        "time/total": 2.0,
        **others,
    }


def questions_of_step(step: int, groups: int = 2, size: int = 4) -> list[GroupRollout]:
    """Return groups of which more and more answers are right."""
    rollouts = []
    for number in range(groups):
        trajectories = []
        for index in range(size):
            is_right = random.Random(f"{step} {number} {index}").random() < reward_curve(step)
            text = f"It is {number + 2 if is_right else number + 9}."
            reward = float(is_right)
            trajectories.append(single(f"What is {number} + 2?", text, reward, {"correct": reward}))
        rollouts.append(group(number, trajectories, sampler_step=step))
    return rollouts


def advantages_of(rollouts: Sequence[GroupRollout]) -> list[list[float | None]]:
    rewards_P = [rollout.group.get_total_rewards() for rollout in rollouts]
    return [[reward - sum(rewards) / len(rewards) for reward in rewards] for rewards in rewards_P]


def write_run(
    path: Path,
    tokenizer: ModelTokenizer | None = None,
    *,
    steps: int = 6,
    num_steps: int | None = None,
    metrics: Callable[[int, int], Metrics] = rl_metrics,
    rollouts: Callable[[int], list[GroupRollout]] = questions_of_step,
    trained: Mapping[tuple[int, int], TrainedTokens] | None = None,
    eval_every: int = 0,
    checkpoint_at: int | None = None,
    is_final: bool = True,
    **options: Any,
) -> Path:
    """Write a run with `steps` of `num_steps` steps. With a tokenizer, it has rollouts too."""
    total = steps if num_steps is None else num_steps
    with RunDirectory(path, {**CONFIG, **options, "log_path": str(path)}) as run:
        files = None if tokenizer is None else RolloutFiles(path, "flat", 1, True, tokenizer)
        for step in range(steps):
            row = dict(metrics(step, total))
            if files is not None:
                groups = rollouts(step)
                files.write("train", step, groups, advantages_of(groups), trained=trained)
                if eval_every and step % eval_every == 0:
                    files.write("eval/test", step, rollouts(step), None)
                    row["test/env/all/correct"] = reward_curve(step)
            run.log(step, row)
        batch = steps if checkpoint_at is None else checkpoint_at
        if batch:
            name = "final" if is_final else f"{batch:06d}"
            run.log_checkpoint(
                CheckpointRecord(
                    name,
                    batch,
                    f"tinker://abc:train:0/weights/{name}",
                    f"tinker://abc:train:0/sampler_weights/{name}",
                    final=is_final or None,
                )
            )
    return path


def write_index(
    path: Path, steps: int, groups: int, size: int, num_bytes: int | None = None
) -> None:
    """Write an index of rollouts without texts into a run directory."""
    rows = [
        {"step": step, "split": "train", "group": group, "sample": sample, "ending": "completed"}
        | {"reward": (group + sample) % 2, "tags": [], "errors": [], "bytes": num_bytes}
        for step in range(steps)
        for group in range(groups)
        for sample in range(size)
    ]
    (path / "rollouts").mkdir()
    (path / "rollouts/index.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
