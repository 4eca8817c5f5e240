"""Supervised training on conversations, or on the worked solutions of questions.

    python -m planish.recipes.sl_loop dataset=DIR      rows with "messages", or "question" and "answer"
    python -m planish.recipes.sl_loop preset=seed      sizes and model of the published recipe

A row with "messages" is a conversation (other forms: planish/supervised/conversations.py); all its
assistant messages are learned. A row with only "question" and "answer" becomes the prompt that
rl_loop asks with, and the worked solution with its result in a box: the warm start for a model that
never saw such a box. The learning rate falls linearly to 0. Each epoch has its own order, a
function of the seed alone, so a run that was killed goes on with the very next batch, once.
"""

import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz

from planish import AdamParams, Datum, ServiceClient, TrainingClient
from planish.datasets.gsm8k import problem_prompt, read_problem
from planish.datasets.rows import load_rows
from planish.errors import UserError
from planish.model.sources import DEFAULT_MODEL
from planish.recipes import training_run
from planish.renderers import Renderer, TrainOnWhat, datum_from_weights
from planish.runlog.checkpoints import RunCheckpoints, choose_renderer, save_when_stopped
from planish.runlog.console import StepDisplay, step_line
from planish.runlog.plotting import draw_curve
from planish.runlog.run_directory import RunDirectory
from planish.runlog.spans import Spans
from planish.supervised.conversations import Conversation, Row, conversation_of, is_worked_solution
from planish.supervised.datasets import check_rows
from planish.training.run_loop import start_run
from planish.training.run_options import CheckpointOptions, StartOptions
from planish.types import TTL_REMEDY, ForwardBackwardOutput, is_ttl

PRESETS: dict[str, dict[str, Any]] = {
    "seed": {
        "model_name": "Qwen/Qwen3-8B",
        "dataset": "HuggingFaceH4/no_robots",
        "batch_size": 128,
        "learning_rate": 1e-4,
        "max_length": 32768,
    },
}
Metrics = dict[str, float]
LEARNED = TrainOnWhat.ALL_ASSISTANT_MESSAGES
RESUMABLE_OPTIONS = ("base_url", "save_every", "ttl_seconds")
"""Options that may differ when a run is resumed; not max_steps, by which the learning rate falls.
"""
CONSOLE_METRICS = {
    "train_mean_nll": "nll {:.4f}",
    "test/nll": "test nll {:.4f}",
    "optim/lr": "lr {:.1e}",
    "time/total": "{:.1f} s",
}


@chz.chz
class Config(CheckpointOptions, StartOptions):
    model_name: str = chz.field(
        default=DEFAULT_MODEL, doc="base model: a name or a local directory"
    )
    dataset: str = chz.field(default="openai/gsm8k", doc="hub name, local directory or JSONL file")
    log_path: str = chz.field(
        default="/tmp/planish-examples/sl-loop", doc="directory of the run's files"
    )
    batch_size: int = chz.field(default=16, doc="examples a step")
    learning_rate: float = chz.field(default=2e-4, doc="of the first step; falls linearly to 0")
    max_length: int = chz.field(
        default=1024, doc="longest example in tokens; what is beyond is cut off and counted"
    )
    num_epochs: int = 1
    max_steps: int | None = chz.field(default=None, doc="none = num_epochs times through the data")
    eval_examples: int = chz.field(
        default=0, doc="test examples whose nll is measured before and after; 0 = none"
    )


def main(config: Config) -> Path:
    """Train, here or on a server; returns the run directory."""
    check(config)
    with ServiceClient(base_url=config.base_url) as service_client:
        return train(config, service_client)


def train(config: Config, service_client: ServiceClient) -> Path:
    conversations = load_conversations(config.dataset, "train")
    tests = (
        load_conversations(config.dataset, "test")[: config.eval_examples]
        if config.eval_examples
        else []
    )
    batches = len(conversations) // config.batch_size
    training_run.require(
        config, batch_size=(batches > 0, f"at most {len(conversations)}, the number of examples")
    )
    steps = config.num_epochs * batches
    steps = steps if config.max_steps is None else min(steps, config.max_steps)
    with RunDirectory(config.log_path, chz.asdict(config), may_change=RESUMABLE_OPTIONS) as run:
        start = start_run(config, service_client, run, len(conversations), "sl_loop")
        if start.batch >= steps:
            draw(config, run)
            print(f"{run.path}: all {start.batch} steps are done")
            return run.path
        run.resume_at(start.batch)
        training_client = start.training_client
        checkpoints = RunCheckpoints.after(start, run, config.ttl_seconds)
        renderer = choose_renderer(
            config.renderer_name, config.model_name, training_client.get_tokenizer()
        )
        check_data(conversations, renderer, config, "train")
        check_data(tests, renderer, config, "test")
        with (
            StepDisplay(steps, start.batch) as display,
            save_when_stopped(checkpoints, display) as stop,
        ):
            display.say(
                f"{config.model_name} on {config.dataset}: steps {start.batch} to {steps}, written to {run.path}"
            )
            for step in range(start.batch, steps):
                stop.check()
                if config.save_every and step % config.save_every == 0 and step > start.batch:
                    checkpoints.state_only(step)
                test_metrics = (
                    evaluate(training_client, tests, renderer, config)
                    if tests and step == 0
                    else {}
                )
                epoch, batch = divmod(step, batches)
                chosen = epoch_order(len(conversations), config.seed, epoch)[
                    batch * config.batch_size :
                ][: config.batch_size]
                display.stage("training")
                metrics = train_step(
                    training_client,
                    [conversations[i] for i in chosen],
                    renderer,
                    config,
                    1 - step / steps,
                )
                metrics |= {
                    "progress/batch": step,
                    "progress/done_frac": (step + 1) / steps,
                    "epoch": epoch,
                    **test_metrics,
                }
                run.log(step, metrics)
                display.step_done(step_line(step, steps, metrics, CONSOLE_METRICS))
            if tests:
                run.log(
                    steps,
                    {"progress/batch": steps, **evaluate(training_client, tests, renderer, config)},
                )
                display.say(step_line(steps, steps, run.metrics()[-1], CONSOLE_METRICS))
            record = checkpoints.final(steps)
            draw(config, run)
            display.say(
                f"state to go on from: {record.state_path}\nweights for sampling: {record.sampler_path}"
            )
        return run.path


def train_step(
    training_client: TrainingClient,
    batch: Sequence[Conversation],
    renderer: Renderer,
    config: Config,
    remaining: float,
) -> Metrics:
    """One gradient step on the summed loss of a batch; `remaining` is the fraction of the run that
    is left.

    A batch of which nothing is left changes nothing.
    """
    spans = Spans()
    rate = config.learning_rate * remaining
    with spans.measure("training"):
        examples = render(batch, renderer, config.max_length)
        data = examples.data
        learned = learn(training_client, data, rate) if data else {}
    times = spans.metrics()
    tokens = sum(datum.model_input.length for datum in data)
    return {
        "optim/lr": rate,
        "num_sequences": len(data),
        "num_tokens": tokens,
        "num_loss_tokens": sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in data),
        "num_truncated": examples.truncated,
        "num_left_out": examples.left_out,
        "tokens_per_second/trained": tokens / times["time/training"],
        **learned,
        **times,
    }


def learn(training_client: TrainingClient, data: Sequence[Datum], rate: float) -> Metrics:
    backward = training_client.forward_backward(data, "cross_entropy")
    update = training_client.optim_step(
        AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8)
    )
    output = backward.result()
    served = {
        f"optim/{name}": value for name, value in (output.metrics | update.result().metrics).items()
    }
    return {"train_mean_nll": mean_nll(data, output), **served}


def evaluate(
    training_client: TrainingClient,
    tests: Sequence[Conversation],
    renderer: Renderer,
    config: Config,
) -> Metrics:
    """The nll of `tests` under the present weights."""
    data = render(tests, renderer, config.max_length).data
    return {"test/nll": mean_nll(data, training_client.forward(data, "cross_entropy").result())}


def mean_nll(data: Sequence[Datum], output: ForwardBackwardOutput) -> float:
    """-sum(weight * logprob) / sum(weight): nats for a learned token."""
    total, weight = 0.0, 0.0
    for datum, tensors in zip(data, output.loss_fn_outputs, strict=True):
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        total -= math.fsum(weights * tensors["logprobs"].to_numpy())
        weight += math.fsum(weights)
    return total / weight


@dataclass(frozen=True)
class Examples:
    data: list[Datum]
    truncated: int
    """Conversations whose end was cut off."""
    left_out: int
    """Conversations of which nothing that is learned would have been left."""


def render(batch: Sequence[Conversation], renderer: Renderer, max_length: int) -> Examples:
    """One datum a conversation, weight 1 on what the assistant says."""
    data, truncated = [], 0
    for conversation in batch:
        tokens, weights = renderer.build_supervised_example(conversation, LEARNED)
        if weights[1 : max_length + 1].any():
            data.append(datum_from_weights(tokens, weights, max_length, reduction="none"))
            truncated += tokens.length - 1 > max_length
    return Examples(data, truncated, len(batch) - len(data))


def load_conversations(dataset: str, split: str) -> list[Conversation]:
    """Conversations, or worked solutions as conversations, by the keys of the rows."""
    return [
        read_row(row, f"dataset={dataset}, {split} row {number}")
        for number, row in enumerate(load_rows(dataset, split), start=1)
    ]


def read_row(row: Row, where: str) -> Conversation:
    """A conversation, or a question with its worked solution where the row has no conversation."""
    if is_worked_solution(row):
        problem = read_problem(row, where)
        return [*problem_prompt(problem), {"role": "assistant", "content": problem.solution}]
    return conversation_of(row, where)


def check_data(
    conversations: Sequence[Conversation], renderer: Renderer, config: Config, split: str
) -> None:
    """UserError for a conversation that cannot be trained on, by its row, or if each of them is too
    long.
    """
    rows = [{"messages": conversation} for conversation in conversations]
    check_rows(rows, conversation_of, renderer, LEARNED, f"dataset={config.dataset}, {split}")
    if rows and not any(render([each], renderer, config.max_length).data for each in conversations):
        raise UserError(
            f"max_length={config.max_length}: no answer begins that early in any {split} row; give more"
        )


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def draw(config: Config, run: RunDirectory) -> None:
    title = f"supervised: {config.model_name} on {config.dataset}"
    draw_curve(run.path / "nll.png", run.metrics(), ("train_mean_nll", "test/nll"), title=title)


def check(config: Config) -> None:
    """UserError for an option that cannot be right, before anything is loaded."""
    training_run.require(
        config,
        batch_size=(config.batch_size >= 1, "a whole number of at least 1"),
        max_length=(config.max_length >= 2, "a whole number of at least 2"),
        num_epochs=(config.num_epochs >= 1, "a whole number of at least 1"),
        max_steps=(
            config.max_steps is None or config.max_steps >= 1,
            "a whole number of at least 1",
        ),
        save_every=(config.save_every >= 0, "a whole number, 0 for never"),
        ttl_seconds=(is_ttl(config.ttl_seconds), TTL_REMEDY),
        eval_examples=(config.eval_examples >= 0, "a whole number, 0 for none"),
        learning_rate=(0 < config.learning_rate < math.inf, "a number above 0"),
    )


if __name__ == "__main__":
    training_run.run_command(main, Config, PRESETS, sys.argv[1:])
