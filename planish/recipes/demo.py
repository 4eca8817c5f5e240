"""`make demo`: the embedded model learns to add in a few minutes, and a reward curve shows it.

The demo runs GRPO through the public API, on sums of two numbers. The untrained model gets most of
them wrong. Held-out sums are tested before and after training. All files are written to runs/demo;
a new run replaces the old one.
"""

import os
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import chz

from planish import AdamParams, SamplingParams, ServiceClient, TrainingClient
from planish.completers import derived_seed
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.recipes import training_run
from planish.recipes.rl_loop import sample_groups, train_step, training_examples
from planish.recipes.sums import EXAMPLE_PAIRS, EXAMPLE_SUMS, Sum, all_sums
from planish.renderers import Renderer, get_renderer, get_text_content
from planish.rl.answers import AnswerGroup, Metrics, answer_metrics, sampling_entropy
from planish.runlog.checkpoints import RunCheckpoints, RunStart, recipe_metadata
from planish.runlog.console import StepDisplay, step_line
from planish.runlog.plotting import draw_curve
from planish.runlog.run_directory import RunDirectory, remove_run
from planish.runlog.spans import Spans
from planish.training.option_rules import GROUP_SIZE, POSITIVE, at_least, check_fields, require
from planish.training.run_options import LoraOptions
from planish.types import LoraConfig, SampledSequence

WARMUP_STEPS = 4
RENDERER = "role_colon"
LOSS = "importance_sampling"
CONSOLE_METRICS = {
    "reward/total": "reward {:.3f}",
    "optim/kl_sample_train_v2": "kl {:.1e}",
    "time/total": "{:.1f} s",
}


@chz.chz
class Config(LoraOptions):
    """Options of the demo."""

    model_name: str = DEFAULT_MODEL
    log_path: str = "runs/demo"
    steps: int = chz.field(default=24, metadata=at_least(1))
    batch_size: int = chz.field(default=16, metadata=at_least(1))
    group_size: int = chz.field(default=16, metadata=GROUP_SIZE)
    learning_rate: float = chz.field(
        default=2.5e-4,
        doc=f"peak learning rate, reached after {WARMUP_STEPS} steps; then it falls to a fifth",
        metadata=POSITIVE,
    )
    largest: int = chz.field(default=10, doc="largest operand", metadata=at_least(1))
    max_seconds: float = chz.field(
        default=290, doc="time limit: no step begins after this much training time"
    )
    quantize: str | None = chz.field(
        default=None, doc="quantization of the base weights: int8, nf4, or None"
    )
    held_out: int = chz.field(
        default=20, doc="number of test sums, which are never trained on", metadata=at_least(1)
    )
    seed: int = 0


def main(config: Config) -> Path:
    """Train and return the run directory."""
    check_fields(config)
    require(
        config,
        largest=(
            (config.largest + 1) ** 2 > 2 * config.held_out,
            "more, so that sums are left to train on",
        ),
    )
    remove_run(config.log_path)
    checkpoints = Path(config.log_path) / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    with ServiceClient(data_dir=checkpoints, quantize=config.quantize) as service_client:
        run = train(config, service_client)
    quantize = f" --quantize {config.quantize}" if config.quantize else ""
    print(f"talk:    {python()} -m planish chat --model {run} --data-dir {checkpoints}{quantize}")
    return run


def python() -> str:
    """Return the path of this Python, relative to the current directory if that is shorter."""
    return min(sys.executable, os.path.relpath(sys.executable), key=len)


def train(config: Config, service_client: ServiceClient) -> Path:
    """Train with a given service client and return the run directory."""
    training_client = service_client.create_lora_training_client(
        base_model=config.model_name,
        rank=config.lora_rank or LoraConfig().rank,
        seed=config.seed,
        **config.lora_switches,
        user_metadata=recipe_metadata("demo", RENDERER),
    )
    renderer = get_renderer(RENDERER, training_client.get_tokenizer())
    test_sums, train_sums = split_sums(config)
    with (
        RunDirectory(config.log_path, chz.asdict(config)) as run,
        StepDisplay(config.steps) as display,
    ):
        display.say(
            f"GRPO on sums: {config.model_name}, {config.steps} steps, {config.batch_size} x "
            f"{config.group_size}"
        )
        demo = Demo(config, training_client, renderer, display)
        accuracy_before = demo.accuracy(test_sums)
        trained_seconds = 0.0
        for step in range(config.steps):
            if trained_seconds > config.max_seconds:
                display.say(
                    f"stopping after {step} steps: {trained_seconds:.0f} s of training are enough "
                    "for a demo"
                )
                break
            metrics = demo.step(step, batch_at(train_sums, config, step))
            trained_seconds += metrics["time/total"]
            run.log(step, metrics)
            display.step_done(step_line(step, config.steps, metrics, CONSOLE_METRICS))
        accuracy_after = demo.accuracy(test_sums)
        RunCheckpoints(RunStart(training_client), run).save_final(len(run.metrics()))
        draw_curve(run.path / "reward.png", run.metrics(), title="GRPO on sums of two numbers")
        display.say(summary(run, len(test_sums), accuracy_before, accuracy_after))
    return run.path


@dataclass
class Demo:
    """Runs the steps: sample, grade, train."""

    config: Config
    training_client: TrainingClient
    renderer: Renderer
    display: StepDisplay

    def step(self, step: int, sums_P: Sequence[Sum]) -> Metrics:
        """Sample, grade and train on one batch, and return the metrics."""
        spans = Spans()
        with spans.measure("sampling"):
            seeds_P = [derived_seed(self.config.seed, step, row) for row in range(len(sums_P))]
            groups_P = self.sample(sums_P, seeds_P, self.config.group_size)
        self.display.next_stage("training")
        with spans.measure("training"):
            rate = learning_rate(self.config, step)
            adam = AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8)
            examples_D = training_examples(groups_P, LOSS)
            training_metrics = train_step(self.training_client, examples_D, LOSS, None, adam)
        return {
            **training_metrics,
            "reward/total": mean_reward(groups_P),
            "optim/lr": rate,
            "optim/entropy": sampling_entropy(groups_P),
            **answer_metrics(groups_P),
            **spans.metrics(),
        }

    def accuracy(self, test_sums: Sequence[Sum]) -> float:
        """Return the fraction of sums that greedy answers get right."""
        return mean_reward(self.sample(test_sums, [0] * len(test_sums), 1, is_test=True))

    def sample(
        self,
        sums_P: Sequence[Sum],
        seeds_P: Sequence[int],
        group_size: int,
        is_test: bool = False,
    ) -> list[AnswerGroup]:
        """Return `group_size` graded answers of the current weights to each sum."""
        sampling_client = self.training_client.save_weights_and_get_sampling_client()
        self.display.next_stage("testing" if is_test else "sampling", len(sums_P))
        # An answer is one line. Text after that line would only add noise to the gradient.
        params = SamplingParams(max_tokens=8, temperature=0.0 if is_test else 1.0, stop=["\n"])

        def grade(p: int, sequence: SampledSequence) -> tuple[float, Metrics]:
            text = get_text_content(self.renderer.parse_response(sequence.tokens).message)
            correct = float(text.strip() == str(sums_P[p].answer))
            return correct, {"correct": correct}

        return sample_groups(
            sampling_client,
            [self.renderer.build_generation_prompt(conversation(problem)) for problem in sums_P],
            grade,
            group_size=group_size,
            params=params,
            seeds_P=seeds_P,
            on_group=self.display.advance,
        )


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of a step: it rises for WARMUP_STEPS steps, then falls linearly to a
    fifth. Large steps at the beginning or the end make the reward curve jump.
    """
    return config.learning_rate * min((step + 1) / WARMUP_STEPS, 1 - 0.8 * step / config.steps)


def split_sums(config: Config) -> tuple[list[Sum], list[Sum]]:
    """Return (test sums, training sums). No pair of numbers is in both, in either order."""
    problems = [
        problem for problem in all_sums(config.largest) if problem.pair not in EXAMPLE_PAIRS
    ]
    rng = random.Random(config.seed)
    rng.shuffle(problems)
    sums = [problem if rng.random() < 0.5 else problem.orders[-1] for problem in problems]
    return sums[: config.held_out], sums[config.held_out :]


def batch_at(train_sums: Sequence[Sum], config: Config, step: int) -> list[Sum]:
    """Return the sums of a step. Every epoch goes through the whole pool in a new order."""
    batch = []
    for position in range(step * config.batch_size, (step + 1) * config.batch_size):
        epoch, index = divmod(position, len(train_sums))
        batch.append(
            random.Random(f"{config.seed}:{epoch}").sample(train_sums, len(train_sums))[index]
        )
    return batch


def conversation(problem: Sum) -> list[dict[str, str]]:
    """Return the question after two worked examples."""
    messages = []
    for example in EXAMPLE_SUMS:
        messages.append({"role": "user", "content": question(example)})
        messages.append({"role": "assistant", "content": str(example.answer)})
    return [*messages, {"role": "user", "content": question(problem)}]


def question(problem: Sum) -> str:
    """Return the question, an equation to complete."""
    return f"{problem.terms} ="


def mean_reward(groups_P: Sequence[AnswerGroup]) -> float:
    """Return the mean over groups of their mean reward."""
    return sum(group.mean_reward for group in groups_P) / len(groups_P)


def summary(run: RunDirectory, count: int, accuracy_before: float, accuracy_after: float) -> str:
    """Return the last lines of the demo's output. `count` is the number of test sums."""
    rewards = [row["reward/total"] for row in run.metrics()]
    first, last = rewards[:3], rewards[-3:]
    return "\n".join(
        [
            f"reward: {sum(first) / len(first):.2f} in the first three steps, "
            f"{sum(last) / len(last):.2f} in the last three",
            f"correct on {count} sums that were never trained on: {accuracy_before:.0%} before, "
            f"{accuracy_after:.0%} after",
            f"metrics: {run.path / 'metrics.jsonl'}",
            f"curve:   {run.path / 'reward.png'}",
            f"weights: {run.path / 'checkpoints.jsonl'} names the checkpoint",
        ]
    )


if __name__ == "__main__":
    training_run.run_command(main, Config, {}, sys.argv[1:], on_restart="begins anew")
