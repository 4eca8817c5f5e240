"""Direct preference optimization (Rafailov et al. 2023): the policy as its own reward model.

    reward(answer) = beta * (log p(answer) - log p_reference(answer))
    loss           = mean over pairs of -log sigmoid(reward(chosen) - reward(rejected))

log p(answer) is the sum over the answer's tokens, its end mark included. The reference is a model or a checkpoint that is named when
the run begins; it is written down (reference.json), and a run that is resumed takes that one, never the weights it resumes with.
The loop, its files and its resume are those of planish/supervised.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz
import numpy as np
import torch

from planish import ServiceClient
from planish.errors import UserError
from planish.evaluators import TrainingClientEvaluator
from planish.preference.datasets import pairs_of
from planish.runs import REFERENCE, checkpoint_of, write_whole
from planish.supervised import config as supervised
from planish.supervised.nll import DATUMS_PER_CALL
from planish.supervised.objective import Metrics
from planish.supervised.train import train
from planish.supervised.types import SupervisedDataset
from planish.types import Datum, ForwardBackwardOutput, ModelInput

SHOWN = {
    "dpo_loss": "loss {:.4f}",
    "accuracy": "accuracy {:.3f}",
    "margin": "margin {:.4f}",
    "test/accuracy": "test accuracy {:.3f}",
    "test/margin": "test margin {:.4f}",
    "learning_rate": "lr {:.1e}",
    "time/total": "{:.1f} s",
}
MEASURES = ("dpo_loss", "accuracy", "margin", "chosen_reward", "rejected_reward")


@chz.chz
class Config(supervised.Config):
    """`dataset_builder` gives pairs (planish/preference/datasets.py)."""

    learning_rate: float = 1e-5
    dpo_beta: float = chz.field(default=0.1, doc="how dear it is to leave the reference")
    reference_model_name: str | None = chz.field(default=None, doc="base model of the reference; none = model_name")
    reference_checkpoint_path: str | None = chz.field(
        default=None, doc="checkpoint or run directory of the reference; none = load_checkpoint_path, or the base model"
    )


async def main(config: Config, service_client: Any = None) -> Path:
    """Train, in this process, on a server (`base_url`) or with a given service client; returns the run directory."""
    check(config)
    if service_client is not None:
        return await _run(config, service_client)
    with ServiceClient(base_url=config.base_url) as own_client:
        return await _run(config, own_client)


async def _run(config: Config, service_client: Any) -> Path:
    def objective_of(training_client: Any) -> "DPO":
        return DPO(reference_client(config, service_client), config.dpo_beta)

    return await train(config, service_client, objective_of, SHOWN)


def check(config: Config) -> None:
    """UserError for an option that cannot be right, before anything is loaded."""
    supervised.check(config)
    if not config.dpo_beta > 0:
        raise UserError(f"dpo_beta={config.dpo_beta}: give a number above 0, such as 0.1")
    if config.reference_model_name is not None and config.reference_checkpoint_path is not None:
        raise UserError("reference_model_name and reference_checkpoint_path are two references; give one of them")


def reference_client(config: Config, service_client: Any) -> Any:
    """A sampling client of the reference: that of the run's beginning, whatever was saved or trained since."""
    path = Path(config.log_path).expanduser() / REFERENCE
    if not path.exists():
        checkpoint = config.reference_checkpoint_path
        if checkpoint is None and config.reference_model_name is None:
            checkpoint = config.load_checkpoint_path
        if checkpoint is not None:
            named = {"model_path": checkpoint_of(checkpoint)}
        else:
            named = {"base_model": config.reference_model_name or config.model_name}
        write_whole(path, json.dumps(named) + "\n")
    return service_client.create_sampling_client(**json.loads(path.read_text()))


@dataclass(frozen=True)
class DPO:
    """The objective of a supervised loop whose batches hold chosen and rejected alternately."""

    reference: Any
    """A sampling client."""
    beta: float

    async def submit(self, training_client: Any, data: Sequence[Datum]) -> "DPOGradient":
        reference_D = await reference_logprobs(self.reference, data)

        def loss(data: Sequence[Datum], logprobs_D: list[torch.Tensor]) -> tuple[torch.Tensor, Metrics]:
            return dpo_loss(data, logprobs_D, reference_D, self.beta)

        return DPOGradient(len(pairs_of(data)), await training_client.forward_backward_custom_async(data, loss))

    def test(self, test_set: SupervisedDataset) -> "DPOEvaluator":
        test_set.set_epoch(0)
        data = [datum for index in range(len(test_set)) for datum in test_set.get_batch(index)]
        return DPOEvaluator(data, self.reference, self.beta)


@dataclass(frozen=True)
class DPOGradient:
    num_pairs: int
    pending: Any

    async def metrics(self) -> Metrics:
        output = await self.pending
        found = {name: output.metrics[name] for name in MEASURES}
        served = {f"optim/{name}": value for name, value in output.metrics.items() if name not in MEASURES}
        return {"num_pairs": self.num_pairs, **found, **served}


class DPOEvaluator(TrainingClientEvaluator):
    """NAME/dpo_loss, /accuracy, /margin and the rewards of held-out pairs, and NAME/nll of their chosen answers."""

    def __init__(self, data: Sequence[Datum], reference: Any, beta: float, name: str = "test") -> None:
        self.data = data
        self.reference = reference
        self.beta = beta
        self.name = name
        self._reference_D: list[float] | None = None

    async def __call__(self, training_client: Any) -> Metrics:
        if self._reference_D is None:
            self._reference_D = await reference_logprobs(self.reference, self.data)
        parts = [self.data[start : start + DATUMS_PER_CALL] for start in range(0, len(self.data), DATUMS_PER_CALL)]
        pending = [await training_client.forward_async(part, "cross_entropy") for part in parts]
        outputs: list[ForwardBackwardOutput] = [await result for result in pending]
        logprobs_D = [tensors["logprobs"].to_torch() for output in outputs for tensors in output.loss_fn_outputs]
        _, measured = dpo_loss(self.data, logprobs_D, self._reference_D, self.beta)
        chosen = [answer_logprob(datum, logprobs) for datum, logprobs in zip(self.data, logprobs_D, strict=True)][::2]
        tokens = sum(float(pair.chosen.loss_fn_inputs["weights"].to_numpy().sum()) for pair in pairs_of(self.data))
        measured["nll"] = -sum(float(logprob) for logprob in chosen) / tokens
        return {f"{self.name}/{name}": value for name, value in measured.items()}


def dpo_loss(
    data: Sequence[Datum], logprobs_D: Sequence[torch.Tensor], reference_D: Sequence[float], beta: float
) -> tuple[torch.Tensor, Metrics]:
    """The loss and its measures; `logprobs_D` are the policy's by target, `reference_D` the reference's of whole answers."""
    answers_D = torch.stack([answer_logprob(datum, each) for datum, each in zip(data, logprobs_D, strict=True)])
    rewards_D = beta * (answers_D - torch.tensor(reference_D, dtype=answers_D.dtype))
    chosen, rejected = rewards_D[::2], rewards_D[1::2]
    margins = chosen - rejected
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    measured = (loss, (margins > 0).float().mean(), margins.mean(), chosen.mean(), rejected.mean())
    return loss, {name: float(value.detach()) for name, value in zip(MEASURES, measured, strict=True)}


def answer_logprob(datum: Datum, logprobs: torch.Tensor) -> torch.Tensor:
    """The sum over the targets that have a weight."""
    return (datum.loss_fn_inputs["weights"].to_torch() * logprobs).sum()


async def reference_logprobs(reference: Any, data: Sequence[Datum]) -> list[float]:
    """The reference's logprob of each datum's answer; all requests in flight at once."""
    return list(await asyncio.gather(*(_reference_logprob(reference, datum) for datum in data)))


async def _reference_logprob(reference: Any, datum: Datum) -> float:
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    last = int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])
    whole = ModelInput.from_ints([*datum.model_input.to_ints(), last])
    logprobs = (await reference.compute_logprobs_async(whole))[1:]
    return float(np.dot(weights, np.array(logprobs, dtype=np.float64)))
