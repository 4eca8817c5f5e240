"""Supervised training on conversations, or on the worked solutions of questions.

    python -m planish.recipes.sl_loop dataset=DIR      your own rows, in one of the forms below
    python -m planish.recipes.sl_loop preset=seed      sizes and model of the published recipe

A row with "messages" is a conversation (docs/reference/data.md lists other layouts). All its
assistant messages are trained on. A worked solution of GSM8K, an "answer" that ends with #### and a
number, becomes the prompt of rl_loop, then the solution with its result in \\boxed{}. So sl_loop
can teach a model this answer format before rl_loop trains it. The prompt begins with a worked
example, whose answer is trained on too.

The learning rate falls linearly to 0. The order of each epoch depends on the seed only, so an
interrupted run resumes with the next batch and sees each batch once.
"""

import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz

from planish import AdamParams, Datum, ServiceClient, TrainingClient
from planish.datasets.gsm8k import is_gsm8k, problem_prompt, read_problem
from planish.datasets.layouts import CONVERSATIONS, WORKED_SOLUTION, conversation_of, find_layout
from planish.datasets.messages import Conversation, PlainText, location_of
from planish.datasets.row_digests import recorded_rows
from planish.datasets.row_files import Row
from planish.datasets.rows import load_rows, warn_of_partial_batch
from planish.datasets.split_names import SplitNames
from planish.datasets.unused_columns import UnusedColumns
from planish.errors import UserError
from planish.model.sources.resolve import DEFAULT_MODEL
from planish.recipes import training_run
from planish.renderers import Renderer, TrainOnWhat, datum_from_weights
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
from planish.supervised.answer_counts import AnswerCounts
from planish.supervised.rendering import check_conversation, plain_text_example
from planish.training.option_rules import POSITIVE, at_least, check_fields, require, zero_for
from planish.training.run_loop import start_run
from planish.training.run_options import ENGINE_OPTIONS, CheckpointOptions, StartOptions
from planish.types import ForwardBackwardOutput

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
Example = Sequence[Mapping[str, Any]] | PlainText
TRAINED_MESSAGES = TrainOnWhat.ALL_ASSISTANT_MESSAGES
RESUMABLE_OPTIONS = (*ENGINE_OPTIONS, "save_every", "ttl_seconds")
"""Options that may differ when a run is resumed. max_steps may not, since the learning rate depends
on it.
"""
CONSOLE_METRICS = {
    "train_mean_nll": "nll {:.4f}",
    "test/nll": "test nll {:.4f}",
    "optim/lr": "lr {:.1e}",
    "time/total": "{:.1f} s",
}


@chz.chz
class Config(SplitNames, CheckpointOptions, StartOptions):
    """Options of the recipe."""

    model_name: str = DEFAULT_MODEL
    dataset: str = chz.field(default="openai/gsm8k", doc="hub name, local directory or file")
    log_path: str = chz.field(
        default="/tmp/planish-examples/sl-loop", doc="directory of the run's files"
    )
    batch_size: int = chz.field(default=16, doc="examples per step", metadata=at_least(1))
    learning_rate: float = chz.field(
        default=2e-4,
        doc="learning rate of the first step; it falls linearly to 0",
        metadata=POSITIVE,
    )
    max_length: int = chz.field(
        default=1024,
        doc="maximum tokens in an example; longer ones are truncated and counted",
        metadata=at_least(2),
    )
    num_epochs: int = chz.field(default=1, metadata=at_least(1))
    max_steps: int | None = chz.field(
        default=None, doc="maximum number of steps; none = num_epochs passes", metadata=at_least(1)
    )
    eval_examples: int = chz.field(
        default=0,
        doc="number of test examples whose NLL is measured before and after training; 0 = none",
        metadata=zero_for("none"),
    )


def main(config: Config) -> Path:
    """Train, in this process or on a server, and return the run directory."""
    check_fields(config)
    with ServiceClient(**config.client_options) as service_client:
        return train(config, service_client)


def train(config: Config, service_client: ServiceClient) -> Path:
    """Train with a given service client and return the run directory."""
    with recorded_rows() as rows:
        conversations = load_conversations(config.dataset, config.train_split or "train")
        test_conversations = []
        if config.eval_examples:
            test_conversations = load_conversations(config.dataset, config.test_split or "test")
            test_conversations = test_conversations[: config.eval_examples]
    steps_per_epoch = len(conversations) // config.batch_size
    require(
        config,
        batch_size=(steps_per_epoch > 0, f"at most {len(conversations)}, the number of examples"),
    )
    warn_of_partial_batch(len(conversations), config.batch_size, "examples")
    steps = config.num_epochs * steps_per_epoch
    steps = steps if config.max_steps is None else min(steps, config.max_steps)
    # The tokenizer suffices to check the rows, before the model is loaded.
    tokenizer = service_client.get_tokenizer(config.model_name)
    renderer = choose_renderer(config.renderer_name, config.model_name, tokenizer)
    check_data(conversations, renderer, config, "train")
    check_data(test_conversations, renderer, config, "test")
    with RunDirectory.of_options(config, RESUMABLE_OPTIONS) as run:
        start = start_run(config, service_client, run, rows, len(conversations), "sl_loop")
        if start.batch >= steps:
            draw_loss_curve(config, run)
            print(f"{run.path}: all {start.batch} steps are done")
            return run.path
        run.resume_at(start.batch)
        training_client = start.training_client
        checkpoints = RunCheckpoints(start, run, config.ttl_seconds)
        with (
            StepDisplay(steps, start.batch) as display,
            save_when_stopped(checkpoints, display) as stop,
        ):
            display.say(
                f"{config.model_name} on {config.dataset}: steps {start.batch} to {steps}, written "
                f"to {run.path}"
            )
            for step in range(start.batch, steps):
                stop.check()
                if config.save_every and step % config.save_every == 0 and step > start.batch:
                    checkpoints.save_state_only(step)
                test_metrics = {}
                if test_conversations and step == 0:
                    test_metrics = evaluate(training_client, test_conversations, renderer, config)
                epoch, index = divmod(step, steps_per_epoch)
                order = epoch_order(len(conversations), config.seed, epoch)
                row_indices = order[index * config.batch_size : (index + 1) * config.batch_size]
                batch = [conversations[i] for i in row_indices]
                display.next_stage(TRAINING_STAGE)
                learning_rate = config.learning_rate * (1 - step / steps)
                metrics = train_step(
                    training_client, batch, renderer, config.max_length, learning_rate
                )
                metrics |= {
                    "progress/batch": step,
                    "progress/done_frac": (step + 1) / steps,
                    "epoch": epoch,
                    **test_metrics,
                }
                run.log(step, metrics)
                display.step_done(step_line(step, steps, metrics, CONSOLE_METRICS))
            if test_conversations:
                metrics = evaluate(training_client, test_conversations, renderer, config)
                run.log(steps, {"progress/batch": steps, **metrics})
                display.say(step_line(steps, steps, run.metrics()[-1], CONSOLE_METRICS))
            record = checkpoints.save_final(steps)
            draw_loss_curve(config, run)
            display.say(f"state to resume from: {record.state_path}")
            display.say(f"weights for sampling: {record.sampler_path}")
        return run.path


def train_step(
    training_client: TrainingClient,
    batch: Sequence[Example],
    renderer: Renderer,
    max_length: int,
    learning_rate: float,
) -> Metrics:
    """Make one gradient step on the summed loss of a batch and return its metrics. If `render`
    leaves out all conversations of the batch, there is no step.
    """
    spans = Spans()
    with spans.measure("training"):
        examples = render(batch, renderer, max_length)
        data = examples.data
        training_metrics = (
            forward_backward_and_step(training_client, data, learning_rate) if data else {}
        )
    times = spans.metrics()
    tokens = sum(datum.model_input.length for datum in data)
    return {
        "optim/lr": learning_rate,
        "num_sequences": len(data),
        "num_tokens": tokens,
        "num_loss_tokens": sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in data),
        "num_truncated": examples.num_truncated,
        "num_left_out": examples.num_left_out,
        "tokens_per_second/trained": tokens / times["time/training"],
        **training_metrics,
        **times,
    }


def forward_backward_and_step(
    training_client: TrainingClient, data: Sequence[Datum], learning_rate: float
) -> Metrics:
    """Make one gradient step and return the mean NLL before the step, and the engine's metrics."""
    # Both operations are submitted before either is waited for, so the engine is never idle.
    backward = training_client.forward_backward(data, "cross_entropy")
    adam = AdamParams(learning_rate=learning_rate, beta1=0.9, beta2=0.95, eps=1e-8)
    update = training_client.optim_step(adam)
    output = backward.result()
    metrics = {"train_mean_nll": mean_nll(data, output)}
    for name, value in (output.metrics | update.result().metrics).items():
        metrics[f"optim/{name}"] = value
    return metrics


def evaluate(
    training_client: TrainingClient,
    test_conversations: Sequence[Example],
    renderer: Renderer,
    config: Config,
) -> Metrics:
    """Return the mean NLL of `test_conversations` with the current weights."""
    data = render(test_conversations, renderer, config.max_length).data
    return {"test/nll": mean_nll(data, training_client.forward(data, "cross_entropy").result())}


def mean_nll(data: Sequence[Datum], output: ForwardBackwardOutput) -> float:
    """Return -sum(weight * logprob) / sum(weight), in nats per trained token."""
    total, weight = 0.0, 0.0
    for datum, tensors in zip(data, output.loss_fn_outputs, strict=True):
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        total -= math.fsum(weights * tensors["logprobs"].to_numpy())
        weight += math.fsum(weights)
    return total / weight


@dataclass(frozen=True)
class Examples:
    """The rendered conversations of a batch."""

    data: list[Datum]
    num_truncated: int
    """Number of conversations whose end was cut off."""
    num_left_out: int
    """Number of conversations without a trained token within `max_length`."""


def render(batch: Sequence[Example], renderer: Renderer, max_length: int) -> Examples:
    """Return one datum per conversation, with weight 1 for each assistant token, and for each token
    of a plain text. Conversations without such a token within `max_length` are left out.
    """
    data, num_truncated = [], 0
    for example in batch:
        if isinstance(example, PlainText):
            tokens, weights = plain_text_example(example, renderer)
        else:
            tokens, weights = renderer.build_supervised_example(example, TRAINED_MESSAGES)
        if weights[1 : max_length + 1].any():
            data.append(datum_from_weights(tokens, weights, max_length, reduction="none"))
            num_truncated += tokens.length - 1 > max_length
    return Examples(data, num_truncated, len(batch) - len(data))


def load_conversations(dataset: str, split: str) -> list[Example]:
    """Return the rows of a split as conversations. A warning names columns that are not used."""
    rows, unused = load_rows(dataset, split), UnusedColumns(dataset)
    examples = [read_row(row) for row in rows]
    for row in rows:
        unused.add_layout(row, CONVERSATIONS, row.location)
    unused.warn()
    return examples


def read_row(row: Row) -> Example:
    """Return the conversation of a row. A worked solution of GSM8K follows a worked example."""
    conversation = conversation_of(row, row.location)
    if find_layout(row, CONVERSATIONS, row.location) is not WORKED_SOLUTION or not is_gsm8k(row):
        return conversation
    problem = read_problem(row, row.location)
    answer = {"role": "assistant", "content": problem.solution}
    return Conversation([*problem_prompt(problem), answer], row.location)


def check_data(
    conversations: Sequence[Example], renderer: Renderer, config: Config, split: str
) -> None:
    """Raise UserError if `max_length` cuts off every answer, or if a conversation cannot be trained
    on. In the second case, the message names its row.
    """
    answers = AnswerCounts()
    for each in conversations:
        check_conversation(each, renderer, TRAINED_MESSAGES, location_of(each))
        answers.add(each, TRAINED_MESSAGES, location_of(each))
    answers.warn(f"of {len(conversations)} {split} conversations")
    if conversations and not any(
        render([each], renderer, config.max_length).data for each in conversations
    ):
        raise UserError(
            f"max_length={config.max_length}: in every {split} row, the answer begins after that "
            "many tokens; give a larger max_length"
        )


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """Return the indices of `count` conversations in the order of an epoch."""
    order = list(range(count))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def draw_loss_curve(config: Config, run: RunDirectory) -> None:
    """Draw the loss curve, nll.png."""
    title = f"supervised: {config.model_name} on {config.dataset}"
    draw_curve(run.path / "nll.png", run.metrics(), ("train_mean_nll", "test/nll"), title=title)


if __name__ == "__main__":
    training_run.run_command(main, Config, PRESETS, sys.argv[1:])
