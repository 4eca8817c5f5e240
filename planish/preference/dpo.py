"""Direct preference optimization (Rafailov et al. 2023) and related losses: the policy is its own
reward model.

    reward(answer) = beta * (log p(answer) - log p_reference(answer))
    loss           = mean over pairs of -log sigmoid(reward(chosen) - reward(rejected))

Two related losses differ from these formulas (planish/preference/losses.py). IPO replaces
-log sigmoid by another function of the difference of the rewards. SimPO defines the reward without
a reference, and subtracts a margin from the difference.

The reference is a base model or a checkpoint, chosen when the run begins and recorded in
reference.json. A resumed run uses the recorded reference, not the weights that it resumes from. DPO
uses the loop of supervised training (planish/training/train_supervised.py). Apart from
reference.json, a DPO run writes the files of a supervised run, and it resumes in the same way.
"""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chz
import numpy as np
import torch

from planish import ServiceClient, TrainingClient
from planish.errors import UserError
from planish.files import write_atomically
from planish.preference.datasets import PairGradient, pairs_of
from planish.preference.losses import AnswerLogprobs, DPOLoss, IPOLoss, PairLoss, SimPOLoss
from planish.processes.interruption import gather_or_cancel
from planish.runlog.checkpoints import RunStart
from planish.runlog.evaluators import TrainingClientEvaluator
from planish.runlog.run_directory import REFERENCE, checkpoint_of, model_argument
from planish.supervised.nll import forward_in_batches, held_out_data
from planish.supervised.objective import Metrics
from planish.supervised.types import SupervisedDataset
from planish.training import supervised_config as supervised
from planish.training.option_rules import NOT_NEGATIVE, one_of, rule
from planish.training.run_loop import open_client
from planish.training.scoring_models import (
    KLReferenceConfig,
    require_one_vocabulary,
    warn_of_other_format,
)
from planish.training.script_errors import message_only
from planish.training.supervised_context import limit_to_context
from planish.training.train_supervised import train
from planish.types import Datum, ModelInput

CONSOLE_METRICS = {
    "accuracy": "accuracy {:.3f}",
    "margin": "margin {:.4f}",
    "test/accuracy": "test accuracy {:.3f}",
    "test/margin": "test margin {:.4f}",
    "learning_rate": "lr {:.1e}",
    "time/total": "{:.1f} s",
}
LOSSES = ("dpo", "ipo", "simpo")
"""The values of `loss`."""
DEFAULT_BETAS = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0}
"""The default of `dpo_beta` by loss, from the papers."""
DEFAULT_SIMPO_GAMMA = 1.0
"""The default of `simpo_gamma`, from the paper."""
PAIR_METRICS = ("accuracy", "margin", "chosen_reward", "rejected_reward")
"""The metrics of `pair_loss`."""


@chz.chz
class PairLossOptions:
    """The loss of a pair, and the reference model that it compares with."""

    loss: str = chz.field(default="dpo", doc=f"one of {', '.join(LOSSES)}", metadata=one_of(LOSSES))
    dpo_beta: float | None = chz.field(
        default=None,
        doc="weight of the KL constraint to the reference; none = 0.1, or 2 with loss=simpo, "
        "where it scales rewards",
        metadata=rule(lambda value: 0 < value < math.inf, "a number above 0, such as 0.1"),
    )
    label_smoothing: float = chz.field(
        default=0.0,
        doc="dpo: probability that a label is wrong (label smoothing)",
        metadata=rule(lambda value: 0 <= value < 0.5, "a number from 0 to below 0.5"),
    )
    simpo_gamma: float | None = chz.field(
        default=None, doc="simpo: target margin; none = 1", metadata=NOT_NEGATIVE
    )
    reference_model_name: str | None = chz.field(
        default=None, doc="base model of the reference; none = model_name"
    )
    reference_checkpoint_path: str | None = chz.field(
        default=None,
        doc="checkpoint or run directory of the reference; none = load_checkpoint_path, or the "
        "base model",
    )


@chz.chz
class Config(PairLossOptions, supervised.Config):
    """The options of a supervised run on pairs; `dataset_builder` gives the pairs
    (planish/preference/datasets.py).
    """

    learning_rate: float = 1e-5


async def main(config: Config, service_client: ServiceClient | None = None) -> Path:
    """Train on preference pairs, and return the run directory.

    The run uses `service_client` if given, else the server at `base_url`, else this process.
    """
    with message_only():
        check(config)
        with open_client(config, service_client) as client:
            return await _run(config, client)


async def _run(config: Config, service_client: ServiceClient) -> Path:
    loss_fn = make_pair_loss(config)
    if loss_fn.needs_reference:
        option = (
            "reference_model_name"
            if config.reference_checkpoint_path is None
            else "reference_checkpoint_path"
        )
        base_model = await reference_base_model(config, service_client)
        await require_one_vocabulary(config.model_name, base_model, service_client, option)
        if base_model != config.model_name or config.reference_checkpoint_path is not None:
            reference = KLReferenceConfig(
                base_model=base_model, load_checkpoint_path=config.reference_checkpoint_path
            )
            await asyncio.to_thread(
                warn_of_other_format,
                reference,
                service_client,
                config.model_name,
                config.renderer_name,
                option,
            )
        # The last target is not part of the datum's input, but the reference reads it as input. So
        # the reference needs a context of one more token than the policy.
        config = await limit_to_context(config, service_client, [(base_model, 1)])
    else:
        config = await limit_to_context(config, service_client)

    def make_objective(start: RunStart) -> "PairObjective":
        reference_sampler = (
            reference_client(config, service_client, start) if loss_fn.needs_reference else None
        )
        return PairObjective(config.loss, loss_fn, reference_sampler)

    return await train(
        config,
        service_client,
        make_objective,
        {f"{config.loss}_loss": "loss {:.4f}", **CONSOLE_METRICS},
    )


def make_pair_loss(config: Config) -> PairLoss:
    """Return the loss that the options ask for."""
    beta = DEFAULT_BETAS[config.loss] if config.dpo_beta is None else config.dpo_beta
    match config.loss:
        case "dpo":
            return DPOLoss(beta, config.label_smoothing)
        case "ipo":
            return IPOLoss(beta)
        case _:
            return SimPOLoss(
                beta, DEFAULT_SIMPO_GAMMA if config.simpo_gamma is None else config.simpo_gamma
            )


def check(config: Config) -> None:
    """Raise UserError for an invalid option, before anything is loaded."""
    supervised.check(config)
    _check_unused(config)


def _check_unused(config: Config) -> None:
    """Raise UserError for an option that the chosen loss does not use, or for two references."""
    if config.label_smoothing and config.loss != "dpo":
        raise UserError(
            f"label_smoothing={config.label_smoothing}: loss={config.loss} has no label smoothing; "
            "leave label_smoothing out"
        )
    if config.simpo_gamma is not None and config.loss != "simpo":
        raise UserError(
            f"simpo_gamma={config.simpo_gamma}: loss={config.loss} has no target margin; leave it "
            "out"
        )
    references = (config.reference_model_name, config.reference_checkpoint_path)
    if config.loss == "simpo" and any(reference is not None for reference in references):
        raise UserError(
            "loss=simpo has no reference; leave reference_model_name and reference_checkpoint_path "
            "out"
        )
    if all(reference is not None for reference in references):
        raise UserError(
            "reference_model_name and reference_checkpoint_path name two references; give one of "
            "them"
        )


async def reference_base_model(config: Config, service_client: ServiceClient) -> str:
    """Return the name of the reference's base model."""
    if config.reference_checkpoint_path is None:
        return config.reference_model_name or config.model_name
    path = checkpoint_of(config.reference_checkpoint_path)
    client = await service_client.create_sampling_client_async(model_path=path)
    return await client.get_base_model_async()


def reference_client(config: Config, service_client: ServiceClient, start: RunStart) -> Any:
    """Return a sampling client of the run's reference, and record the reference when the run
    begins.

    A run that stopped before its first checkpoint starts over. It records the reference again,
    because the user may have changed the options in the meantime.
    """
    path = Path(config.log_path).expanduser() / REFERENCE
    if start.record is None or not path.exists():
        checkpoint = config.reference_checkpoint_path
        if checkpoint is None and config.reference_model_name is None:
            checkpoint = config.load_checkpoint_path
        base_model = config.reference_model_name or config.model_name
        write_atomically(path, json.dumps(model_argument(base_model, checkpoint)) + "\n")
    return service_client.create_sampling_client(**json.loads(path.read_text()))


@dataclass(frozen=True)
class PairObjective:
    """The objective of a supervised loop whose batches alternate between chosen and rejected
    answers.
    """

    name: str
    """The name of the loss: its metric is NAME_loss."""
    loss_fn: PairLoss
    reference_sampler: Any | None
    """A sampling client of the reference; None for a loss that needs none."""

    async def submit(
        self, training_client: TrainingClient, data: Sequence[Datum]
    ) -> "PairGradient":
        """Score the batch with the reference, then submit the gradient computation."""
        reference_logprobs_D = await self.reference_logprobs(data)

        def custom_loss(
            data: Sequence[Datum], logprobs_D: list[torch.Tensor]
        ) -> tuple[torch.Tensor, Metrics]:
            return self.loss_and_metrics(data, logprobs_D, reference_logprobs_D)

        pending = await training_client.forward_backward_custom_async(data, custom_loss)
        return PairGradient(len(pairs_of(data)), (f"{self.name}_loss", *PAIR_METRICS), pending)

    async def reference_logprobs(self, data: Sequence[Datum]) -> list[float] | None:
        """Return the reference's logprob of each answer in nats; None without a reference."""
        return (
            None
            if self.reference_sampler is None
            else await reference_logprobs(self.reference_sampler, data)
        )

    def loss_and_metrics(
        self,
        data: Sequence[Datum],
        logprobs_D: Sequence[torch.Tensor],
        reference_logprobs_D: Sequence[float] | None,
    ) -> tuple[torch.Tensor, Metrics]:
        """Return the loss, a scalar, and all metrics of the batch by name."""
        loss, metrics = pair_loss(self.loss_fn, data, logprobs_D, reference_logprobs_D)
        return loss, {f"{self.name}_loss": float(loss.detach()), **metrics}

    def evaluator(self, test_set: SupervisedDataset) -> "PairEvaluator":
        """Return the evaluator of held-out pairs."""
        return PairEvaluator(held_out_data(test_set), self)


@dataclass(eq=False)
class PairEvaluator(TrainingClientEvaluator):
    """Evaluates held-out pairs. The names of its metrics begin with NAME/, where NAME is `name`.

    The evaluator returns the metrics of a training batch, and one more: NAME/nll, the mean NLL of
    the chosen answers in nats per token.
    """

    data: Sequence[Datum]
    objective: PairObjective
    name: str = "test"
    _reference_logprobs_D: list[float] | None = field(default=None, init=False)

    async def __call__(self, training_client: TrainingClient) -> Metrics:
        if self._reference_logprobs_D is None:
            self._reference_logprobs_D = await self.objective.reference_logprobs(self.data)
        logprobs_D = [
            tensors["logprobs"].to_torch()
            for _, output in await forward_in_batches(training_client, self.data)
            for tensors in output.loss_fn_outputs
        ]
        _, metrics = self.objective.loss_and_metrics(
            self.data, logprobs_D, self._reference_logprobs_D
        )
        chosen_logprobs = [
            answer_logprob(datum, logprobs)
            for datum, logprobs in zip(self.data, logprobs_D, strict=True)
        ][::2]
        num_tokens = sum(num_answer_tokens(pair.chosen) for pair in pairs_of(self.data))
        metrics["nll"] = -sum(float(logprob) for logprob in chosen_logprobs) / num_tokens
        return {f"{self.name}/{name}": value for name, value in metrics.items()}


def pair_loss(
    loss_fn: PairLoss,
    data: Sequence[Datum],
    logprobs_D: Sequence[torch.Tensor],
    reference_logprobs_D: Sequence[float] | None,
) -> tuple[torch.Tensor, Metrics]:
    """Return the loss, a scalar averaged over pairs, and its metrics.

    `data` alternates between chosen and rejected answers. `logprobs_D` are the policy's logprobs of
    each target. `reference_logprobs_D` are the reference's logprobs of whole answers.
    """
    answer_logprobs_D = torch.stack(
        [answer_logprob(datum, logprobs) for datum, logprobs in zip(data, logprobs_D, strict=True)]
    )
    reference_answer_logprobs_D = (
        None
        if reference_logprobs_D is None
        else torch.tensor(reference_logprobs_D, dtype=answer_logprobs_D.dtype)
    )
    num_tokens = torch.tensor(
        [num_answer_tokens(datum) for datum in data], dtype=answer_logprobs_D.dtype
    )
    rewards_D = loss_fn.rewards(
        AnswerLogprobs(answer_logprobs_D, reference_answer_logprobs_D, num_tokens)
    )
    chosen_rewards, rejected_rewards = rewards_D[::2], rewards_D[1::2]
    margins = chosen_rewards - rejected_rewards
    metrics = (
        (margins > 0).float().mean(),
        margins.mean(),
        chosen_rewards.mean(),
        rejected_rewards.mean(),
    )
    return loss_fn.losses(margins).mean(), {
        name: float(value.detach()) for name, value in zip(PAIR_METRICS, metrics, strict=True)
    }


def answer_logprob(datum: Datum, logprobs: torch.Tensor) -> torch.Tensor:
    """Return the sum, a scalar, of `logprobs` [N] over the weighted targets of `datum`."""
    return (datum.loss_fn_inputs["weights"].to_torch() * logprobs).sum()


def num_answer_tokens(datum: Datum) -> float:
    """Return the number of targets that are trained on: each has weight 1."""
    return float(datum.loss_fn_inputs["weights"].to_numpy().sum())


async def reference_logprobs(reference: Any, data: Sequence[Datum]) -> list[float]:
    """Return the reference's logprob of each datum's answer, with all requests in flight
    concurrently.
    """
    return await gather_or_cancel(_reference_logprob(reference, datum) for datum in data)


async def _reference_logprob(reference: Any, datum: Datum) -> float:
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    last_target = int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])
    model_input = ModelInput.from_ints([*datum.model_input.to_ints(), last_target])
    logprobs = (await reference.compute_logprobs_async(model_input))[1:]
    return float(np.dot(weights, np.array(logprobs, dtype=np.float64)))
