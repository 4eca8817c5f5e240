"""Train a preference model: supervised training on comparisons, then calibration, then evaluation.

The three sets of comparisons (training, calibration, evaluation) share no prompt. Evaluations
during training use the model without a temperature. After training, the temperature is fitted on
the calibration set, and the calibrated model judges the evaluation set. The result is saved as
preference_model.json (planish/preference/model_files.py). The training loop, its files and its
resume are those of planish/supervised. A run that stopped between training and calibration
calibrates when it is resumed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import chz

from planish import SamplingClient, ServiceClient, TrainingClient
from planish.errors import UserError
from planish.preference.calibration import fit_temperature
from planish.preference.forms import Form
from planish.preference.judgments import PreferenceModelEvaluator, log_odds_of_chosen
from planish.preference.model_datasets import ComparisonDataset, PreferenceDatasetBuilder
from planish.preference.model_files import PreferenceModelFile
from planish.preference.preference_models import LogOddsModel
from planish.preference.types import LabeledComparison
from planish.runlog.checkpoints import RunStart
from planish.runlog.run_directory import PREFERENCE_MODEL, weights_of
from planish.supervised.objective import PendingGradient
from planish.supervised.types import SupervisedDataset
from planish.training import supervised_config as supervised
from planish.training.run_loop import open_client
from planish.training.script_errors import message_only
from planish.training.supervised_context import limit_to_context
from planish.training.train_supervised import train
from planish.types import Datum

CONSOLE_METRICS = {
    "train_mean_nll": "nll {:.4f}",
    "bradley_terry_loss": "loss {:.4f}",
    "accuracy": "accuracy {:.3f}",
    "test/accuracy": "test accuracy {:.3f}",
    "test/log_loss": "test log loss {:.4f}",
    "learning_rate": "lr {:.1e}",
    "time/total": "{:.1f} s",
}


EXTRA_REQUEST_TOKENS = 2
"""A judge's request has this many tokens more than a datum: an answer token and a sampled one."""


@chz.chz
class Config(supervised.Config):
    """The options of a supervised run whose dataset holds comparisons."""

    dataset_builder: PreferenceDatasetBuilder


@dataclass(frozen=True)
class PreferenceObjective:
    """The objective of a supervised loop whose rows are comparisons."""

    form: Form
    max_length: int | None

    async def submit(
        self, training_client: TrainingClient, data: Sequence[Datum]
    ) -> PendingGradient:
        """Submit a gradient on one batch."""
        return await self.form.submit(training_client, data)

    def evaluator(self, test_set: SupervisedDataset) -> PreferenceModelEvaluator:
        """Return the evaluator of held-out comparisons."""
        assert isinstance(test_set, ComparisonDataset)
        return held_out_evaluator(self.form, test_set.rows, self.max_length)


async def main(config: Config, service_client: ServiceClient | None = None) -> Path:
    """Train and calibrate a preference model, and return the run directory.

    The run uses `service_client` if given, else the server at `base_url`, else this process.
    """
    with message_only():
        check(config)
        with open_client(config, service_client) as client:
            return await _run(config, client)


def check(config: Config) -> None:
    """Raise UserError for an invalid option, before anything is loaded."""
    supervised.check(config)
    size = config.dataset_builder.calibration_size
    if size < 0:
        raise UserError(f"calibration_size={size}: give a whole number, 0 for no calibration")


async def _run(config: Config, service_client: ServiceClient) -> Path:
    config = await limit_to_context(
        config, service_client, [(config.model_name, EXTRA_REQUEST_TOKENS)]
    )
    builder = config.dataset_builder

    def make_objective(start: RunStart) -> PreferenceObjective:
        return PreferenceObjective(builder.form, builder.common_config.max_length)

    run = await train(config, service_client, make_objective, CONSOLE_METRICS)
    model_path = weights_of(str(run))
    if (run / PREFERENCE_MODEL).is_file() and PreferenceModelFile.read(
        run
    ).model_path == model_path:
        return run
    model_file = await calibrate(config, service_client, model_path)
    model_file.write(run)
    print(summary_line(model_file))
    return run


async def calibrate(
    config: Config, service_client: ServiceClient, model_path: str
) -> PreferenceModelFile:
    """Fit the temperature of a trained model and evaluate the calibrated model."""
    builder = config.dataset_builder
    form, splits = builder.form, builder.splits()
    sampling_client = await service_client.create_sampling_client_async(model_path=model_path)
    max_length = builder.common_config.max_length
    calibration = comparisons_that_fit(form, splits.calibration, max_length)
    chosen_log_odds = await log_odds_of_chosen(
        form.model(sampling_client), calibration, both_orders=form.depends_on_order
    )
    temperature = fit_temperature(chosen_log_odds, len(calibration))
    evaluator = held_out_evaluator(form, splits.test, max_length, temperature)
    metrics = await evaluator(sampling_client) if splits.test else {}
    return PreferenceModelFile(
        kind=builder.kind,
        model_name=config.model_name,
        model_path=model_path,
        renderer_name=builder.renderer.name,
        question=builder.question,
        temperature=temperature,
        calibration_pairs=len(calibration),
        test={name.removeprefix("test/"): value for name, value in metrics.items()},
    )


def held_out_evaluator(
    form: Form,
    comparisons: Sequence[LabeledComparison],
    max_length: int | None,
    temperature: float = 1.0,
) -> PreferenceModelEvaluator:
    """Return an evaluator on the comparisons that fit into `max_length` tokens."""
    fitting = comparisons_that_fit(form, comparisons, max_length)

    def make_model(sampling_client: SamplingClient) -> LogOddsModel:
        return form.model(sampling_client, temperature)

    return PreferenceModelEvaluator(
        fitting,
        make_model,
        both_orders=form.depends_on_order,
        num_left_out=len(comparisons) - len(fitting),
    )


def comparisons_that_fit(
    form: Form, comparisons: Sequence[LabeledComparison], max_length: int | None
) -> list[LabeledComparison]:
    """Return the comparisons that fit into `max_length` tokens."""
    return [labeled for labeled in comparisons if form.to_batch(labeled, max_length)]


def summary_line(model_file: PreferenceModelFile) -> str:
    """Return a one-line summary of temperature and metrics."""
    calibration_text = (
        f"temperature {model_file.temperature:.3g}, fitted on {model_file.calibration_pairs} pairs"
    )
    test = model_file.test
    if not test:
        return calibration_text
    if "num_pairs" not in test:
        return (
            f"{calibration_text}; each of {test['num_left_out']:.0f} held-out pairs is longer than "
            "max_length"
        )
    error = f" +- {test['accuracy_stderr']:.3f}" if "accuracy_stderr" in test else ""
    return (
        f"{calibration_text}; on {test['num_pairs']:.0f} held-out pairs: accuracy "
        f"{test['accuracy']:.3f}{error}, log loss {test['log_loss']:.3f}, Brier "
        f"{test['brier']:.3f}, ECE {test['ece']:.3f}"
    )
