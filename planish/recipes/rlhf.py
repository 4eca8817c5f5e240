"""Reinforcement learning from human feedback (RLHF) in three stages, in one command that can be
interrupted at any time and resumes.

    python -m planish.recipes.rlhf                                                  generated sums,
                                                                                    embedded model
    python -m planish.recipes.rlhf sft.dataset=chats.jsonl preference.dataset=pairs.jsonl
    python -m planish.recipes.rlhf rl.kl_penalty_coef=0.02 rl.max_steps=40

    sft/                supervised training on demonstrations (planish/supervised)
    preference_model/   training of a model that predicts which of two answers is better, on
                        comparisons (planish/preference)
    rl/                 RL that starts with the SFT policy and rewards answers that the preference
                        model prefers (planish/rl)
    evaluation/         comparison of the RL policy with the SFT policy on held-out prompts

Each stage is a run with a directory of its own. The same command resumes the interrupted stage at
its last checkpoint and skips finished stages. With generated sums (planish/recipes/wordy_sums.py),
the rule that labelled the comparisons is known, so the rule compares the policies too. A gain that
only the preference model reports is then an error of that model.
"""

import json
import sys
from pathlib import Path
from typing import Any

import chz

from planish import ServiceClient
from planish.files import write_atomically
from planish.preference import model_training
from planish.preference.comparison_evaluator import ComparisonResults
from planish.preference.model_files import PreferenceModelFile
from planish.recipes import training_run
from planish.recipes.rlhf_options import (
    EVALUATION,
    Options,
    TrainedModels,
    check,
    check_data,
    comparison_evaluator_builder,
    preference_config,
    rl_config,
    sft_config,
)
from planish.runlog.model_renderer import learn_renderer
from planish.runlog.run_directory import RunDirectory, checkpoint_of, resume_points
from planish.training import train_rl, train_supervised
from planish.training.run_loop import open_client

PRESETS: dict[str, dict[str, Any]] = {
    "seed": {
        "lora_rank": 64,
        "sft.dataset": "HuggingFaceH4/no_robots",
        "sft.learning_rate": 2e-4,
        "preference.kind": "chat",
        "preference.learning_rate": 3e-4,
        "rl.learning_rate": 1e-5,
        "rl.max_tokens": 1024,
    },
}
"""Learning rates, sizes and chats (no_robots) of the published recipe. This preset also needs the
option preference.dataset.
"""
COMPARISONS_FILE = "comparisons.jsonl"


def main(options: Options, service_client: ServiceClient | None = None) -> Path:
    """Run all stages and return the run directory."""
    check(options)
    with open_client(options, service_client) as client:
        return run_stages(options, client)


def run_stages(options: Options, service_client: ServiceClient) -> Path:
    """Run all stages with a given service client and return the run directory."""
    renderer = learn_renderer(service_client, options.model_name, options.renderer_name)
    options = chz.replace(options, renderer_name=renderer.name)
    check_data(options, renderer, service_client)
    say("1 of 4: supervised training of the policy")
    sft = training_run.run_coroutine(train_supervised.main(sft_config(options), service_client))
    say("2 of 4: training of the preference model")
    judge = training_run.run_coroutine(
        model_training.main(preference_config(options), service_client)
    )
    # Keep the path of the checkpoint, not of the run directory. If the first stage is extended
    # later, its directory gets newer checkpoints, but the next stages must start from the same one.
    trained_models = TrainedModels(
        checkpoint_of(str(sft)), PreferenceModelFile.read(judge).builder()
    )
    say("3 of 4: reinforcement learning against the preference model")
    policy = training_run.run_coroutine(
        train_rl.main(rl_config(options, trained_models, service_client), service_client)
    )
    say("4 of 4: comparison of the policy with that of the first stage")
    evaluate(options, trained_models, policy, service_client)
    return Path(options.log_path).expanduser()


def evaluate(
    options: Options, trained_models: TrainedModels, policy: Path, service_client: ServiceClient
) -> None:
    """Compare the RL policy with the SFT policy, and write metrics and answers. The comparison is
    done once for each number of RL steps.
    """
    newest = resume_points(policy)[0]
    build = comparison_evaluator_builder(options, trained_models, service_client, options.seed + 1)
    config = chz.asdict(build, shallow=True, include_type=True)
    with RunDirectory(
        options.stage_path(EVALUATION),
        {**config, "policy": newest.state_path},
        may_change=("policy",),
    ) as run:
        if all(row["step"] != newest.batch for row in run.metrics()):
            client = service_client.create_sampling_client(model_path=newest.state_path)
            results = training_run.run_coroutine(build().compare(client))
            write_atomically(run.path / COMPARISONS_FILE, comparison_rows(results))
            run.log(newest.batch, results.metrics("test"))
        print(summary(run.metrics()[-1], run.path))


def comparison_rows(results: ComparisonResults) -> str:
    """Return JSON lines with the prompt, both answers, and each judge's result."""
    wins = zip(*results.wins.values(), strict=True)
    rows = [
        {
            "prompt": comparison.prompt_conversation,
            "reference": comparison.completion_A,
            "policy": comparison.completion_B,
            "wins": dict(zip(results.wins, won, strict=True)),
        }
        for comparison, won in zip(results.comparisons, wins, strict=True)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def summary(row: dict[str, float], path: Path) -> str:
    """Return the last lines of the output: the win rate by each judge."""
    lines = [f"after {row['step']} steps of RL, against the SFT policy on held-out prompts:"]
    for name, rate in row.items():
        if name.startswith("test/win_rate/"):
            judge = name.rpartition("/")[2]
            error = row.get(f"test/win_rate_stderr/{judge}")
            lines.append(
                f"  win rate by the {judge}: {rate:.3f}"
                + (f" +- {error:.3f}" if error is not None else "")
            )
    return "\n".join([*lines, f"  both policies' answers: {path / COMPARISONS_FILE}"])


def say(stage: str) -> None:
    """Print which stage begins."""
    print(f"stage {stage}", flush=True)


if __name__ == "__main__":
    training_run.run_command(main, Options, PRESETS, sys.argv[1:])
