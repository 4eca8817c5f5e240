"""`make demo`: the embedded model learns to add, in a few minutes, and a reward curve shows it.

GRPO through the public API on sums of two numbers, most of which the untrained model gets wrong.
Numbers that are tested before and after are kept out of training. Everything is written to
runs/demo; a new run takes the place of the old one.
"""

import os
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import chz

from planish import AdamParams, SamplingClient, SamplingParams, ServiceClient
from planish.completers import derived_seed
from planish.model.sources import DEFAULT_MODEL
from planish.recipes import training_run
from planish.recipes.rl_loop import sample_groups, train_step, training_examples
from planish.renderers import Renderer, get_renderer, get_text_content
from planish.rl.answers import AnswerGroup, Metrics, answer_metrics, sampling_entropy
from planish.runlog.checkpoints import RunCheckpoints, origin_metadata
from planish.runlog.console import StepDisplay, step_line
from planish.runlog.plotting import draw_curve
from planish.runlog.run_directory import RunDirectory, remove_run
from planish.runlog.spans import Spans
from planish.training.run_options import LoraOptions
from planish.types import SampledSequence

WARM_UP = 4
RENDERER = "role_colon"
CONSOLE_METRICS = {
    "reward/total": "reward {:.3f}",
    "optim/kl_sample_train_v2": "kl {:.1e}",
    "time/total": "{:.1f} s",
}


@dataclass(frozen=True)
class Sum:
    left: int
    right: int

    @property
    def question(self) -> str:
        return f"{self.left} + {self.right} ="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)


EXAMPLES = (Sum(4, 3), Sum(12, 25))


@chz.chz
class Config(LoraOptions):
    model_name: str = DEFAULT_MODEL
    log_path: str = "runs/demo"
    steps: int = 24
    batch_size: int = 16
    group_size: int = 16
    learning_rate: float = chz.field(
        default=2.5e-4, doc=f"the highest: reached after {WARM_UP} steps, then falls to a fifth"
    )
    largest: int = chz.field(default=10, doc="the largest operand")
    max_seconds: float = chz.field(
        default=290, doc="no step begins after so much training, on a slow machine"
    )
    held_out: int = chz.field(default=20, doc="sums that are tested and never trained on")
    seed: int = 0


def main(config: Config) -> Path:
    """Train; returns the run directory."""
    training_run.require(
        config,
        steps=(config.steps >= 1, "a whole number of at least 1"),
        batch_size=(config.batch_size >= 1, "a whole number of at least 1"),
        group_size=(config.group_size >= 2, "at least 2: answers are compared within their group"),
        held_out=(config.held_out >= 1, "a whole number of at least 1"),
        largest=(
            (config.largest + 1) ** 2 > 2 * config.held_out,
            "more, so that sums are left to train on",
        ),
    )
    remove_run(config.log_path)
    checkpoints = Path(config.log_path) / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    with ServiceClient(data_dir=checkpoints) as service_client:
        run = train(config, service_client)
    print(f"talk:    {python()} -m planish chat --model {run} --data-dir {checkpoints}")
    return run


def python() -> str:
    """This one, as a command to be typed here."""
    return min(sys.executable, os.path.relpath(sys.executable), key=len)


def train(config: Config, service_client: ServiceClient) -> Path:
    training_client = service_client.create_lora_training_client(
        base_model=config.model_name,
        rank=config.lora_rank,
        seed=config.seed,
        **config.lora_switches,
        user_metadata=origin_metadata("demo", RENDERER),
    )
    renderer = get_renderer(RENDERER, training_client.get_tokenizer())
    tests, pool = split_sums(config)
    with (
        RunDirectory(config.log_path, chz.asdict(config)) as run,
        StepDisplay(config.steps) as display,
    ):
        display.say(
            f"GRPO on sums: {config.model_name}, {config.steps} steps, {config.batch_size} x {config.group_size}"
        )
        before = accuracy(
            training_client.save_weights_and_get_sampling_client(), renderer, tests, display
        )
        trained_seconds = 0.0
        for step in range(config.steps):
            if trained_seconds > config.max_seconds:
                display.say(
                    f"stopping after {step} steps: {trained_seconds:.0f} s of training are enough for a demo"
                )
                break
            spans = Spans()
            with spans.measure("sampling"):
                sums_P = batch_of(pool, config, step)
                seeds_P = [derived_seed(config.seed, step, row) for row in range(len(sums_P))]
                groups_P = sample(
                    training_client.save_weights_and_get_sampling_client(),
                    renderer,
                    sums_P,
                    seeds_P,
                    config.group_size,
                    1.0,
                    display,
                    "sampling",
                )
            display.stage("training")
            with spans.measure("training"):
                rate = learning_rate(config, step)
                adam = AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8)
                examples_D = training_examples(groups_P, "importance_sampling")
                metrics = train_step(training_client, examples_D, "importance_sampling", None, adam)
            metrics |= {
                "reward/total": sum(group.mean_reward for group in groups_P) / len(groups_P),
                "optim/lr": rate,
                "optim/entropy": sampling_entropy(groups_P),
                **answer_metrics(groups_P),
                **spans.metrics(),
            }
            trained_seconds += metrics["time/total"]
            run.log(step, metrics)
            display.step_done(step_line(step, config.steps, metrics, CONSOLE_METRICS))
        after = accuracy(
            training_client.save_weights_and_get_sampling_client(), renderer, tests, display
        )
        RunCheckpoints(training_client, run).final(len(run.metrics()))
        draw_curve(run.path / "reward.png", run.metrics(), title="GRPO on sums of two numbers")
        display.say(summary(run, len(tests), before, after))
    return run.path


def learning_rate(config: Config, step: int) -> float:
    """Up in WARM_UP steps, then linearly down to a fifth: large steps at first or at the end make
    the curve jump.
    """
    return config.learning_rate * min((step + 1) / WARM_UP, 1 - 0.8 * step / config.steps)


def split_sums(config: Config) -> tuple[list[Sum], list[Sum]]:
    """Held-out sums and those to train on; no pair of numbers is in both, in either order."""
    pairs = [(a, b) for a in range(config.largest + 1) for b in range(a, config.largest + 1)]
    shown = {(min(s.left, s.right), max(s.left, s.right)) for s in EXAMPLES}
    pairs = [pair for pair in pairs if pair not in shown]
    draw = random.Random(config.seed)
    draw.shuffle(pairs)
    sums = [Sum(*(pair if draw.random() < 0.5 else pair[::-1])) for pair in pairs]
    return sums[: config.held_out], sums[config.held_out :]


def batch_of(pool: Sequence[Sum], config: Config, step: int) -> list[Sum]:
    """The next sums of a pool that is gone through again and again, each time in another order."""
    batch = []
    for position in range(step * config.batch_size, (step + 1) * config.batch_size):
        epoch, index = divmod(position, len(pool))
        batch.append(random.Random(f"{config.seed}:{epoch}").sample(pool, len(pool))[index])
    return batch


def sample(
    sampling_client: SamplingClient,
    renderer: Renderer,
    sums_P: Sequence[Sum],
    seeds_P: Sequence[int],
    group_size: int,
    temperature: float,
    display: StepDisplay,
    stage: str,
) -> list[AnswerGroup]:
    display.stage(stage, len(sums_P))
    # An answer is one line: what a model says after it would only be noise in the gradient.
    params = SamplingParams(max_tokens=8, temperature=temperature, stop=["\n"])
    prompts_P = [renderer.build_generation_prompt(conversation(problem)) for problem in sums_P]

    def grade(p: int, sequence: SampledSequence) -> tuple[float, Metrics]:
        text = get_text_content(renderer.parse_response(sequence.tokens).message)
        correct = float(text.strip() == sums_P[p].answer)
        return correct, {"correct": correct}

    return sample_groups(
        sampling_client,
        prompts_P,
        grade,
        group_size=group_size,
        params=params,
        seeds_P=seeds_P,
        on_group=display.advance,
    )


def conversation(problem: Sum) -> list[dict[str, str]]:
    shown = [
        message
        for example in EXAMPLES
        for message in (
            {"role": "user", "content": example.question},
            {"role": "assistant", "content": example.answer},
        )
    ]
    return [*shown, {"role": "user", "content": problem.question}]


def accuracy(
    sampling_client: SamplingClient, renderer: Renderer, tests: Sequence[Sum], display: StepDisplay
) -> float:
    """Fraction of sums that the likeliest answer gets right."""
    groups = sample(sampling_client, renderer, tests, [0] * len(tests), 1, 0.0, display, "testing")
    return sum(group.mean_reward for group in groups) / len(groups)


def summary(run: RunDirectory, count: int, before: float, after: float) -> str:
    rewards = [row["reward/total"] for row in run.metrics()]
    first, last = rewards[:3], rewards[-3:]
    return "\n".join(
        [
            f"reward: {sum(first) / len(first):.2f} in the first three steps, {sum(last) / len(last):.2f} in the last three",
            f"right on {count} sums that were never trained on: {before:.0%} before, {after:.0%} after",
            f"metrics: {run.path / 'metrics.jsonl'}",
            f"curve:   {run.path / 'reward.png'}",
            f"weights: {run.path / 'checkpoints.jsonl'} names the checkpoint",
        ]
    )


if __name__ == "__main__":
    training_run.run_command(main, Config, {}, sys.argv[1:], again="begins anew")
