"""GRPO on questions with known answers: the whole run, from a dataset to a reward curve.

    python -m planish.recipes.rl_loop                  the default model, GSM8K from the hub
    python -m planish.recipes.rl_loop dataset=DIR      train.jsonl and test.jsonl of your own
    python -m planish.recipes.rl_loop preset=seed      model and batch sizes of the published recipe

Each step takes the next `batch_size` problems and samples `group_size` answers to each from the
current weights. The reward is 1 if the \\boxed{} result is correct, else 0.
The advantage of an answer is its reward minus the mean reward of its group. There is no division by
the standard deviation, which would favour problems that are nearly always or nearly never solved
(Dr. GRPO, Liu et al. 2025). A group whose rewards are all equal has no gradient and is left out.
The sampled tokens and their logprobs go to the trainer unchanged; no text is tokenised again.
The same command started again resumes after the last checkpoint, and metrics.jsonl has each step
exactly once. This is the loop to read first: it leaves out multi-turn environments, asynchronous
rollouts and KL penalties.
Legend: P problems of a batch, G answers of a group, T tokens of an answer, D datums.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz

import planish
from planish import AdamParams, Datum, ModelInput, SamplingParams
from planish.completers import derived_seed
from planish.datasets.grading import Grader, GradingError
from planish.datasets.gsm8k import Problem, problem_prompt
from planish.datasets.math_problems import load_problems
from planish.datasets.row_digests import recorded_rows
from planish.datasets.rows import warn_of_partial_batch
from planish.datasets.split_names import SplitNames
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.processes.interruption import StopRequest
from planish.recipes import training_run
from planish.renderers import Renderer, get_text_content
from planish.rl.answers import (
    Answer,
    AnswerGroup,
    answer_datum,
    answer_metrics,
    pass_metrics,
    sampler_trainer_kl,
)
from planish.rl.environments.prompt_selection import require_prompt_fits, select_problems
from planish.runlog.checkpoints import (
    TRAINING_STAGE,
    RunCheckpoints,
    choose_renderer,
    save_when_stopped,
)
from planish.runlog.console import StepDisplay, step_line
from planish.runlog.plotting import draw_curve
from planish.runlog.run_directory import RunDirectory
from planish.runlog.spans import Spans
from planish.training.option_rules import (
    GROUP_SIZE,
    NOT_NEGATIVE,
    POSITIVE,
    SAMPLING_TEMPERATURE,
    at_least,
    check_fields,
    one_of,
    require,
    zero_for,
)
from planish.training.rl_config import RL_LOSSES
from planish.training.run_loop import start_run
from planish.training.run_options import (
    ENGINE_OPTIONS,
    RESUMABLE_CHECKPOINT_OPTIONS,
    EvaluationOptions,
    RetainedCheckpointOptions,
    StartOptions,
    check_kept_checkpoints,
)
from planish.types import SampledSequence, with_seed

Metrics = dict[str, float]
PRESETS: dict[str, dict[str, Any]] = {
    "seed": {"model_name": "Qwen/Qwen3-8B", "batch_size": 128, "group_size": 16},
}
RESUMABLE_OPTIONS = (
    *RESUMABLE_CHECKPOINT_OPTIONS,
    *ENGINE_OPTIONS,
    "max_steps",
    "eval_problems",
    "eval_samples",
    "eval_temperature",
)
"""Options that may differ when a run is resumed."""
CONSOLE_METRICS = {
    "reward/total": "reward {:.3f}",
    "test/env/all/correct": "test {:.3f}",
    "env/all/by_group/frac_mixed": "mixed groups {:.0%}",
    "optim/kl_sample_train_v2": "kl {:.1e}",
    "time/total": "{:.1f} s",
}


@chz.chz
class Config(SplitNames, EvaluationOptions, RetainedCheckpointOptions, StartOptions):
    """Options of the recipe."""

    model_name: str = chz.field(default=DEFAULT_MODEL, doc="base model: a name or a directory")
    dataset: str = chz.field(default="openai/gsm8k", doc="hub name, local directory or file")
    log_path: str = chz.field(
        default="/tmp/planish-examples/rl-loop", doc="directory of the run's files"
    )
    batch_size: int = chz.field(default=16, doc="problems per step", metadata=at_least(1))
    group_size: int = chz.field(default=8, doc="answers per problem", metadata=GROUP_SIZE)
    learning_rate: float = chz.field(default=4e-5, metadata=POSITIVE)
    max_tokens: int = chz.field(
        default=256, doc="maximum number of tokens in an answer", metadata=at_least(1)
    )
    max_prompt_tokens: int | None = chz.field(
        default=None,
        doc="maximum tokens in a prompt; problems with longer prompts are left out and counted; "
        "none = no limit",
        metadata=at_least(1),
    )
    temperature: float = chz.field(
        default=1.0, doc="temperature of sampling and of the loss", metadata=SAMPLING_TEMPERATURE
    )
    loss_fn: str = chz.field(
        default="importance_sampling",
        doc=f"one of {', '.join(RL_LOSSES)}",
        metadata=one_of(RL_LOSSES),
    )
    max_steps: int | None = chz.field(
        default=None,
        doc="maximum number of steps; none = one pass through the data",
        metadata=at_least(1),
    )
    eval_problems: int = chz.field(
        default=0,
        doc="number of test problems, answered before and after training; 0 = none",
        metadata=zero_for("none"),
    )
    eval_every: int = chz.field(
        default=0, doc="steps between evaluations during training; 0 = none"
    )
    eval_temperature: float = chz.field(
        default=0.0, doc="sampling temperature in evaluations; 0 = greedy", metadata=NOT_NEGATIVE
    )
    eval_samples: int = chz.field(
        default=1,
        doc="answers per test problem; more than 1 adds the metrics avg@n and pass@k",
        metadata=at_least(1),
    )


def main(config: Config) -> Path:
    """Train, in this process or on a server, and return the run directory."""
    check_options(config)
    with planish.ServiceClient(**config.client_options) as service_client:
        return train(config, service_client)


def train(config: Config, service_client: planish.ServiceClient) -> Path:
    """Train with a given service client and return the run directory."""
    with recorded_rows() as rows:
        problems, test_problems = load_problems(config.dataset, config.train_split or "train"), []
        if config.eval_problems:
            test_problems = load_problems(config.dataset, config.test_split or "test")
            test_problems = test_problems[: config.eval_problems]
    require_batch(config, problems)
    with RunDirectory.of_options(config, RESUMABLE_OPTIONS) as run, Grader() as grader:
        start = start_run(config, service_client, run, rows, len(problems), "rl_loop")
        client = start.training_client
        renderer = choose_renderer(config.renderer_name, config.model_name, client.get_tokenizer())
        context_window = service_client.get_server_capabilities().context_length_of(
            config.model_name
        )
        problems = fitting_problems(config, problems, "train", renderer, context_window)
        test_problems = fitting_problems(config, test_problems, "test", renderer, context_window)
        require_batch(config, problems)
        warn_of_partial_batch(len(problems), config.batch_size, "problems")
        all_steps = len(problems) // config.batch_size
        steps = all_steps if config.max_steps is None else min(all_steps, config.max_steps)
        if start.batch >= steps:
            draw_reward_curve(config, run)
            is_all = start.batch == all_steps
            remedy = "; raise max_steps to continue"
            if is_all:
                remedy = ", which is one pass through the training problems"
            print(f"{run.path}: all {start.batch} steps are done{remedy}")
            return run.path
        run.resume_at(start.batch)
        checkpoints = RunCheckpoints(
            start,
            run,
            config.ttl_seconds,
            service_client=service_client,
            retention=config.retention,
        )
        # Only the best checkpoints are chosen for sampling, so only they need sampling weights.
        save = checkpoints.save_periodic if config.keep_best else checkpoints.save_state_only
        with (
            StepDisplay(steps, start.batch) as display,
            save_when_stopped(checkpoints, display) as stop,
        ):
            display.say(
                f"{config.model_name} on {config.dataset}: steps {start.batch} to {steps}, written "
                f"to {run.path}"
            )
            runner = StepRunner(config, client, renderer, grader, display, stop)
            for step in range(start.batch, steps):
                if config.save_every and step % config.save_every == 0 and step > start.batch:
                    save(step)
                if step == 0:
                    is_test_due = config.eval_on_start
                else:
                    is_test_due = config.eval_every > 0 and step % config.eval_every == 0
                # When a finished run is extended, resume_at drops the row of its final evaluation
                # from metrics.jsonl. Evaluate again to replace that row.
                is_test_due |= step == start.batch and start.was_finished
                batch = problems[step * config.batch_size : (step + 1) * config.batch_size]
                metrics = runner.step(step, batch, test_problems if is_test_due else [])
                metrics |= {"progress/batch": step, "progress/done_frac": (step + 1) / steps}
                run.log(step, metrics)
                display.step_done(step_line(step, steps, metrics, CONSOLE_METRICS))
            if test_problems:
                metrics = runner.evaluate(
                    client.save_weights_and_get_sampling_client(), test_problems
                )
                run.log(steps, {"progress/batch": steps, "progress/done_frac": 1.0, **metrics})
                display.say(step_line(steps, steps, metrics, CONSOLE_METRICS))
            record = checkpoints.save_final(steps)
            draw_reward_curve(config, run)
            display.say(f"weights for sampling: {record.sampler_path}")
            for line in checkpoints.describe_best():
                display.say(line)
            display.say(f"reward curve: {run.path / 'reward.png'}")
        return run.path


def require_batch(config: Config, problems: Sequence[Problem]) -> None:
    """Raise UserError unless the training problems fill a batch."""
    require(
        config,
        batch_size=(
            config.batch_size <= len(problems),
            f"at most {len(problems)}, the number of training problems",
        ),
    )


def fitting_problems(
    config: Config,
    problems: Sequence[Problem],
    split: str,
    renderer: Renderer,
    context_window: int | None,
) -> Sequence[Problem]:
    """Return the problems whose prompts have at most `max_prompt_tokens` tokens. A warning counts
    the others. Raises UserError if a prompt leaves no room for an answer.
    """
    selection = select_problems(
        problems,
        lambda problem: renderer.build_generation_prompt(problem_prompt(problem)),
        lambda index: problems[index].location,
        split=split,
        max_prompt_tokens=config.max_prompt_tokens,
    )
    if selection.lengths is not None:
        require_prompt_fits(
            selection.lengths.longest, context_window, config.model_name, config.max_tokens
        )
    return selection.problems


@dataclass
class StepRunner:
    """Runs the steps: sample, grade, train."""

    config: Config
    training_client: planish.TrainingClient
    renderer: Renderer
    grader: Grader
    display: StepDisplay
    stop: StopRequest

    def step(
        self, step: int, problems_P: Sequence[Problem], test_problems: Sequence[Problem]
    ) -> Metrics:
        """Sample, grade and train on one batch, and return the metrics. If `test_problems` is
        not empty, evaluate on them first.
        """
        config, spans, test_metrics = self.config, Spans(), {}
        sampling_client = self.training_client.save_weights_and_get_sampling_client()
        if test_problems:
            with spans.measure("evaluation"):
                test_metrics = self.evaluate(sampling_client, test_problems)
        with spans.measure("sampling"):
            seeds_P = [derived_seed(config.seed, step, index) for index in range(len(problems_P))]
            groups_P = self.sample(sampling_client, problems_P, seeds_P, config.group_size)
        self.display.next_stage(TRAINING_STAGE)
        with spans.measure("training"):
            # With a temperature other than 1, the loss has to scale the logits by the same
            # temperature, or training is off-policy.
            loss_config = None if config.temperature == 1.0 else {"temperature": config.temperature}
            adam = AdamParams(learning_rate=config.learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)
            examples_D = training_examples(groups_P, config.loss_fn)
            training_metrics = train_step(
                self.training_client, examples_D, config.loss_fn, loss_config, adam
            )
        times = spans.metrics()
        answers = [answer for group in groups_P for answer in group.answers_G]
        logprobs = [logprob for answer in answers for logprob in answer.logprobs_T]
        num_trained_tokens = sum(datum.model_input.length for _, datum in examples_D)
        return {
            "reward/total": sum(group.mean_reward for group in groups_P) / len(groups_P),
            "optim/lr": config.learning_rate,
            "optim/entropy": -sum(logprobs) / len(logprobs),
            **training_metrics,
            **answer_metrics(groups_P),
            **test_metrics,
            "tokens/sampled": len(logprobs),
            "tokens/trained": num_trained_tokens,
            "tokens_per_second/sampled": len(logprobs) / times["time/sampling"],
            "tokens_per_second/trained": num_trained_tokens / times["time/training"],
            **times,
        }

    def evaluate(self, client: planish.SamplingClient, problems: Sequence[Problem]) -> Metrics:
        """Answer each problem `eval_samples` times, and return the metrics test/env/all/....

        Every evaluation has the same seeds, so random numbers do not favour one policy.
        """
        seeds_P = [derived_seed(self.config.seed, index) for index in range(len(problems))]
        num_samples = self.config.eval_samples
        groups_P = self.sample(client, problems, seeds_P, num_samples, is_test=True)
        metrics = answer_metrics(groups_P, "test/env/all")
        if num_samples > 1:
            verdicts_P_G = [
                [answer.metrics["correct"] == 1 for answer in group.answers_G] for group in groups_P
            ]
            values = pass_metrics(verdicts_P_G)
            metrics |= {f"test/env/all/{name}": value for name, value in values.items()}
        if self.config.retention is not None:
            self.config.retention.require_metric(metrics)
        return metrics

    def sample(
        self,
        sampling_client: planish.SamplingClient,
        problems_P: Sequence[Problem],
        seeds_P: Sequence[int],
        group_size: int,
        is_test: bool = False,
    ) -> list[AnswerGroup]:
        """Return `group_size` graded answers to each problem."""
        self.display.next_stage("testing" if is_test else "sampling", len(problems_P))
        build = self.renderer.build_generation_prompt
        params = SamplingParams(
            max_tokens=self.config.max_tokens,
            temperature=self.config.eval_temperature if is_test else self.config.temperature,
            stop=self.renderer.get_stop_sequences(),
        )
        # Ctrl-C ends sampling at once. The lost answers were not trained on yet, and a resumed
        # run samples them again.
        with self.stop.interruptible():
            return sample_groups(
                sampling_client,
                [build(problem_prompt(problem)) for problem in problems_P],
                lambda p, answer: grade_answer(self.renderer, self.grader, problems_P[p], answer),
                group_size=group_size,
                params=params,
                seeds_P=seeds_P,
                on_group=self.display.advance,
            )


def sample_groups(
    sampling_client: planish.SamplingClient,
    prompts_P: Sequence[ModelInput],
    grade: Callable[[int, SampledSequence], tuple[float, Metrics]],
    *,
    group_size: int,
    params: SamplingParams,
    seeds_P: Sequence[int],
    on_group: Callable[[], None],
) -> list[AnswerGroup]:
    """Return `group_size` graded answers to each prompt; all requests are in flight at once.
    `grade(p, sequence)` returns reward and metrics of an answer to prompt p.
    """
    futures_P = [
        sampling_client.sample(
            prompt=prompt, num_samples=group_size, sampling_params=with_seed(params, seed)
        )
        for prompt, seed in zip(prompts_P, seeds_P, strict=True)
    ]
    groups_P = []
    for p, future in enumerate(futures_P):
        response = future.result()
        answers_G = [
            Answer(sequence.tokens, sequence.logprobs, sequence.stop_reason, *grade(p, sequence))
            for sequence in response.sequences
        ]
        groups_P.append(AnswerGroup(prompts_P[p], answers_G, response.prompt_cache_hit_tokens))
        on_group()
    return groups_P


def grade_answer(
    renderer: Renderer, grader: Grader, problem: Problem, sequence: SampledSequence
) -> tuple[float, Metrics]:
    """Return (reward, metrics). The reward is 1 if the \\boxed{} result is correct, else 0. An
    answer that the grader cannot judge counts as wrong; env/all/unjudged counts such answers.
    """
    text = get_text_content(renderer.parse_response(sequence.tokens).message)
    try:
        grade = grader.grade(text, problem.answer)
    except GradingError:
        return 0.0, {"correct": 0.0, "format": 1.0, "unjudged": 1.0}
    correct, has_box = float(grade.correct), float(grade.boxed is not None)
    return correct, {"correct": correct, "format": has_box, "unjudged": 0.0}


def training_examples(groups_P: Sequence[AnswerGroup], loss_fn: str) -> list[tuple[Answer, Datum]]:
    """Return (answer, datum) for each answer of the groups whose rewards differ. The advantage of
    an answer is its reward minus the mean reward of its group.
    """
    examples_D = []
    for group in groups_P:
        if not group.is_constant:
            for answer in group.answers_G:
                advantage = answer.reward - group.mean_reward
                datum = answer_datum(
                    group.prompt, answer.tokens_T, answer.logprobs_T, advantage, loss_fn
                )
                examples_D.append((answer, datum))
    return examples_D


def train_step(
    training_client: planish.TrainingClient,
    examples_D: Sequence[tuple[Answer, Datum]],
    loss_fn: str,
    loss_fn_config: Mapping[str, float] | None,
    adam: AdamParams,
) -> Metrics:
    """Make one gradient step and return its metrics; {} without examples."""
    if not examples_D:
        return {}
    data = [datum for _, datum in examples_D]
    # Both operations are submitted before either is waited for, so the engine is never idle.
    backward = training_client.forward_backward(data, loss_fn, loss_fn_config=loss_fn_config)
    update = training_client.optim_step(adam)
    output = backward.result()
    metrics = output.metrics | update.result().metrics
    trainer_logprobs_D = [tensors["logprobs"].tolist() for tensors in output.loss_fn_outputs]
    return {
        **{f"optim/{name}": value for name, value in metrics.items()},
        **sampler_trainer_kl([answer.logprobs_T for answer, _ in examples_D], trainer_logprobs_D),
    }


def draw_reward_curve(config: Config, run: RunDirectory) -> None:
    """Draw the reward curve, reward.png."""
    title = f"GRPO: {config.model_name} on {config.dataset}"
    draw_curve(run.path / "reward.png", run.metrics(), title=title)


def check_options(config: Config) -> None:
    """Raise UserError for an invalid option, before anything is loaded."""
    can_evaluate = config.eval_every == 0 or (config.eval_every > 0 and config.eval_problems > 0)
    check_fields(config)
    require(
        config,
        eval_samples=(
            config.eval_samples == 1 or config.eval_temperature > 0,
            "1, or an eval_temperature above 0: greedy answers to a problem are all the same",
        ),
        eval_every=(can_evaluate, "0, or a number of at least 1 together with eval_problems"),
    )
    check_kept_checkpoints(config)


if __name__ == "__main__":
    training_run.run_command(main, Config, PRESETS, sys.argv[1:])
