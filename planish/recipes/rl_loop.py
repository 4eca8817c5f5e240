"""GRPO on questions with known answers: the whole run, from a dataset to a reward curve.

    python -m planish.recipes.rl_loop                                   the embedded model, GSM8K
        from the hub
    python -m planish.recipes.rl_loop dataset=DIRECTORY max_steps=50    train.jsonl and test.jsonl
        of your own
    python -m planish.recipes.rl_loop preset=seed                       sizes and model of the
        published recipe

Each step takes the next `batch_size` problems, samples `group_size` answers to each from the
current weights, rewards an answer with 1 if its box holds the right answer and 0 if not, and makes
one gradient step (planish/recipes/grpo.py). The same command started again goes on after the last
checkpoint, with each step in metrics.jsonl exactly once.

Left out on purpose: environments of several turns, asynchronous rollouts, KL penalties. This is the
loop to read first.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import chz

from planish import AdamParams, SamplingParams, ServiceClient
from planish.completers import derived_seed
from planish.datasets.grading import Grader, GradingError
from planish.datasets.gsm8k import Problem, load_problems, problem_prompt
from planish.model.sources import DEFAULT_MODEL
from planish.processes.interruption import Interrupted, StopRequest
from planish.recipes import training_run
from planish.recipes.grpo import (
    Judgement,
    Metrics,
    RolloutGroup,
    Stopwatch,
    rollout_metrics,
    sample_groups,
    sampling_entropy,
    train_step,
    training_examples,
)
from planish.renderers import Renderer, get_text_content
from planish.runlog.checkpoints import (
    RunCheckpoints,
    choose_renderer,
    origin_metadata,
    start_training,
)
from planish.runlog.console import StepDisplay, step_line
from planish.runlog.plotting import draw_curve
from planish.runlog.run_directory import RunDirectory
from planish.training.rl_config import RL_LOSSES
from planish.types import TTL_REMEDY, SampledSequence, is_ttl

PRESETS: dict[str, dict[str, Any]] = {
    "seed": {"model_name": "Qwen/Qwen3-8B", "batch_size": 128, "group_size": 16},
}
MAY_CHANGE = ("base_url", "max_steps", "save_every", "ttl_seconds")
"""Options that may differ when a run is resumed."""
SHOWN = {
    "reward/total": "reward {:.3f}",
    "test/env/all/correct": "test {:.3f}",
    "env/all/by_group/frac_mixed": "mixed groups {:.0%}",
    "optim/kl_sample_train_v2": "kl {:.1e}",
    "time/total": "{:.1f} s",
}


@chz.chz
class Config:
    model_name: str = chz.field(
        default=DEFAULT_MODEL, doc="base model: a name or a local directory"
    )
    dataset: str = chz.field(default="openai/gsm8k", doc="hub name, local directory or JSONL file")
    log_path: str = chz.field(
        default="/tmp/planish-examples/rl-loop", doc="directory of the run's files"
    )
    base_url: str | None = chz.field(default=None, doc="a server; none = train in this process")
    load_checkpoint_path: str | None = chz.field(
        default=None, doc="weights to begin with: a checkpoint or a run directory"
    )
    renderer_name: str | None = chz.field(default=None, doc="chat format; none = the model's own")
    batch_size: int = chz.field(default=16, doc="problems a step")
    group_size: int = chz.field(default=8, doc="answers to each problem")
    learning_rate: float = 4e-5
    lora_rank: int = 32
    max_tokens: int = chz.field(default=256, doc="longest answer")
    temperature: float = chz.field(
        default=1.0, doc="of sampling; the loss is computed at the same one"
    )
    loss_fn: str = chz.field(default="importance_sampling", doc=f"one of {', '.join(RL_LOSSES)}")
    seed: int = 0
    max_steps: int | None = chz.field(default=None, doc="none = once through the data")
    save_every: int = chz.field(default=20, doc="steps between checkpoints; 0 = only the last")
    ttl_seconds: int | None = chz.field(
        default=604800, doc="life of the checkpoints before the last"
    )
    eval_problems: int = chz.field(
        default=0, doc="test problems answered greedily before and after; 0 = none"
    )
    eval_every: int = chz.field(
        default=0, doc="also test every so many steps; 0 = only before and after"
    )


def main(config: Config) -> Path:
    """Train, here or on a server; returns the run directory."""
    check(config)
    with ServiceClient(base_url=config.base_url) as service_client:
        return train(config, service_client)


def train(config: Config, service_client: Any) -> Path:
    problems = load_problems(config.dataset, "train")
    tests = (
        load_problems(config.dataset, "test")[: config.eval_problems]
        if config.eval_problems
        else []
    )
    steps = len(problems) // config.batch_size
    training_run.require(
        config, batch_size=(steps > 0, f"at most {len(problems)}, the number of training problems")
    )
    steps = steps if config.max_steps is None else min(steps, config.max_steps)
    with (
        RunDirectory(config.log_path, chz.asdict(config), may_change=MAY_CHANGE) as run,
        Grader() as grader,
    ):
        start = start_training(
            service_client,
            run,
            model_name=config.model_name,
            lora_rank=config.lora_rank,
            seed=config.seed,
            load_checkpoint_path=config.load_checkpoint_path,
            data_size=len(problems),
            user_metadata=origin_metadata("rl_loop", config.renderer_name),
        )
        if start.batch >= steps:
            draw(config, run)
            is_all = start.batch == len(problems) // config.batch_size
            remedy = "that is once through the data" if is_all else "give more max_steps to go on"
            print(f"{run.path}: all {start.batch} steps are done; {remedy}")
            return run.path
        run.resume_at(start.batch)
        training_client = start.training_client
        checkpoints = RunCheckpoints.after(start, run, config.ttl_seconds)
        renderer = choose_renderer(
            config.renderer_name, config.model_name, training_client.get_tokenizer()
        )
        with StepDisplay(steps, start.batch) as display, StopRequest(display.say) as stop:
            display.say(
                f"{config.model_name} on {config.dataset}: steps {start.batch} to {steps}, written to {run.path}"
            )
            loop = Loop(config, training_client, renderer, grader, display, stop)
            done = saved = start.batch
            try:
                for step in range(start.batch, steps):
                    if config.save_every and step % config.save_every == 0 and step > start.batch:
                        checkpoints.state_only(step)
                        saved = step
                    # A run that was finished ended in a test, whose row makes place for this step's.
                    is_first = step == 0 or (step == start.batch and start.was_finished)
                    is_test_due = is_first or (
                        config.eval_every > 0 and step % config.eval_every == 0
                    )
                    batch = problems[step * config.batch_size : (step + 1) * config.batch_size]
                    metrics = loop.step(step, batch, tests if is_test_due else [])
                    metrics |= {"progress/batch": step, "progress/done_frac": (step + 1) / steps}
                    run.log(step, metrics)
                    display.step_done(step_line(step, steps, metrics, SHOWN))
                    done = step + 1
                if tests:
                    metrics = loop.test(
                        training_client.save_weights_and_get_sampling_client(), tests
                    )
                    run.log(steps, {"progress/batch": steps, "progress/done_frac": 1.0, **metrics})
                    display.say(step_line(steps, steps, metrics, SHOWN))
            except Interrupted:
                if done > saved:
                    checkpoints.state_only(done)
                display.say(
                    f"stopped after {done} of {steps} steps; the same command goes on from there"
                )
                raise stop.ending from None
            record = checkpoints.final(steps)
            draw(config, run)
            display.say(
                f"weights for sampling: {record.sampler_path}\nreward curve: {run.path / 'reward.png'}"
            )
        return run.path


class Loop:
    """What one step needs besides its problems."""

    def __init__(
        self,
        config: Config,
        training_client: Any,
        renderer: Renderer,
        grader: Grader,
        display: StepDisplay,
        stop: StopRequest,
    ) -> None:
        self.config = config
        self.training_client = training_client
        self.renderer = renderer
        self.grader = grader
        self.display = display
        self.stop = stop
        self.adam = AdamParams(learning_rate=config.learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)

    def step(self, step: int, problems_P: Sequence[Problem], tests: Sequence[Problem]) -> Metrics:
        """Sample, grade and train on one batch; before that answer `tests`, if there are any."""
        config, watch = self.config, Stopwatch.start()
        sampling_client = self.training_client.save_weights_and_get_sampling_client()
        test_metrics = self.test(sampling_client, tests) if tests else {}
        if tests:
            watch.lap("evaluation")
        seeds_P = [derived_seed(config.seed, step, row) for row in range(len(problems_P))]
        groups_P = self.sample(
            sampling_client,
            problems_P,
            seeds_P,
            "sampling",
            config.group_size,
            temperature=config.temperature,
        )
        sampling_seconds = watch.lap("sampling")
        self.display.stage("training")
        examples_D = training_examples(groups_P, config.loss_fn)
        training_metrics = train_step(
            self.training_client,
            examples_D,
            loss_fn=config.loss_fn,
            loss_fn_config=loss_config(config),
            adam=self.adam,
        )
        training_seconds = watch.lap("training")
        sampled = sum(len(rollout.tokens_T) for group in groups_P for rollout in group.rollouts_G)
        trained = sum(example.datum.model_input.length for example in examples_D)
        return {
            "reward/total": sum(group.mean_reward for group in groups_P) / len(groups_P),
            "optim/lr": config.learning_rate,
            "optim/entropy": sampling_entropy(groups_P),
            **training_metrics,
            **rollout_metrics(groups_P),
            **test_metrics,
            "tokens/sampled": sampled,
            "tokens/trained": trained,
            "tokens_per_second/sampled": sampled / sampling_seconds,
            "tokens_per_second/trained": trained / training_seconds,
            **watch.metrics(),
        }

    def test(self, sampling_client: Any, problems: Sequence[Problem]) -> Metrics:
        """One greedy answer to each problem, as test/env/all/..."""
        groups = self.sample(
            sampling_client, problems, [0] * len(problems), "testing", 1, temperature=0.0
        )
        return rollout_metrics(groups, "test/env/all")

    def sample(
        self,
        sampling_client: Any,
        problems_P: Sequence[Problem],
        seeds_P: Sequence[int],
        stage: str,
        group_size: int,
        *,
        temperature: float,
    ) -> list[RolloutGroup]:
        self.display.stage(stage, len(problems_P))
        with self.stop.at_once():  # answers that are not trained on may be left undone
            return sample_groups(
                sampling_client,
                [
                    self.renderer.build_generation_prompt(problem_prompt(problem))
                    for problem in problems_P
                ],
                lambda index, sequence: judge(
                    self.renderer, self.grader, problems_P[index], sequence
                ),
                group_size=group_size,
                params=SamplingParams(
                    max_tokens=self.config.max_tokens,
                    temperature=temperature,
                    stop=self.renderer.get_stop_sequences(),
                ),
                seeds_P=seeds_P,
                on_group=self.display.advance,
            )


def draw(config: Config, run: RunDirectory) -> None:
    draw_curve(
        run.path / "reward.png",
        run.metrics(),
        title=f"GRPO: {config.model_name} on {config.dataset}",
    )


def judge(
    renderer: Renderer, grader: Grader, problem: Problem, sequence: SampledSequence
) -> Judgement:
    """1 for the right answer in a box, else 0; an answer that cannot be judged is counted in
    env/all/unjudged.
    """
    text = get_text_content(renderer.parse_response(sequence.tokens).message)
    try:
        grade = grader.grade(text, problem.answer)
    except GradingError:
        return Judgement(0.0, {"correct": 0.0, "format": 1.0, "unjudged": 1.0})
    correct = float(grade.correct)
    return Judgement(
        correct, {"correct": correct, "format": float(grade.boxed is not None), "unjudged": 0.0}
    )


def loss_config(config: Config) -> Mapping[str, float] | None:
    """Rollouts at another temperature are on-policy only if the loss scales its logits alike."""
    return None if config.temperature == 1.0 else {"temperature": config.temperature}


def check(config: Config) -> None:
    """UserError for an option that cannot be right, before anything is loaded."""
    training_run.require(
        config,
        batch_size=(config.batch_size >= 1, "a whole number of at least 1"),
        group_size=(config.group_size >= 2, "at least 2: answers are compared within their group"),
        max_tokens=(config.max_tokens >= 1, "a whole number of at least 1"),
        temperature=(
            0 < config.temperature < math.inf,
            "a number above 0: greedy answers to a problem are all the same",
        ),
        loss_fn=(config.loss_fn in RL_LOSSES, f"one of {', '.join(RL_LOSSES)}"),
        max_steps=(
            config.max_steps is None or config.max_steps >= 1,
            "a whole number of at least 1",
        ),
        save_every=(config.save_every >= 0, "a whole number, 0 for never"),
        ttl_seconds=(is_ttl(config.ttl_seconds), TTL_REMEDY),
        eval_problems=(config.eval_problems >= 0, "a whole number, 0 for none"),
        eval_every=(
            config.eval_every == 0 or (config.eval_every > 0 and config.eval_problems > 0),
            "eval_problems too",
        ),
        learning_rate=(0 < config.learning_rate < math.inf, "a number above 0"),
    )


if __name__ == "__main__":
    training_run.run_command(main, Config, PRESETS, sys.argv[1:])
