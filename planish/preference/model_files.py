"""Save a trained preference model as preference_model.json in its run directory, and load it again.

The file holds all that the model needs to judge as it did in training: kind, base model,
checkpoint, chat format, question and temperature. It also holds the metrics on held-out
comparisons.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import chz

from planish import ServiceClient
from planish.errors import DamagedFileError, UserError
from planish.files import write_atomically
from planish.preference.bradley_terry import QUESTION
from planish.preference.forms import Kind, form_of
from planish.preference.preference_models import LogOddsModel, PreferenceModelBuilder
from planish.runlog.checkpoint_info import (
    find_checkpoint,
    recorded_renderer_name,
    require_base_model,
)
from planish.runlog.model_renderer import learn_renderer
from planish.runlog.run_directory import PREFERENCE_MODEL


@chz.chz
class TrainedPreferenceModelBuilder(PreferenceModelBuilder):
    """The options of a trained preference model, chat or Bradley-Terry."""

    kind: Kind
    model_name: str = chz.field(doc="base model")
    model_path: str | None = chz.field(default=None, doc="checkpoint; none = the base model itself")
    renderer_name: str | None = chz.field(
        default=None, doc="chat format; none = that of the checkpoint's run, or the model's own"
    )
    question: str = chz.field(
        default=QUESTION, doc="bradley_terry: question that is asked about an answer"
    )
    temperature: float = 1.0
    base_url: str | None = chz.field(
        default=None, doc="URL of a server, used without a service client; none = this process"
    )

    def __call__(self, service_client: ServiceClient | None = None) -> LogOddsModel:
        service_client = service_client or ServiceClient(base_url=self.base_url)
        renderer_name = self.renderer_name
        if self.model_path is None:
            sampling_client = service_client.create_sampling_client(base_model=self.model_name)
        else:
            sampling_client = service_client.create_sampling_client(model_path=self.model_path)
            require_base_model(sampling_client, self.model_name, self.model_path, "model_name")
            checkpoint = find_checkpoint(service_client, self.model_path)
            renderer_name = renderer_name or recorded_renderer_name(checkpoint)
        renderer = learn_renderer(service_client, self.model_name, renderer_name)
        form = form_of(self.kind, renderer, self.question)
        models = service_client.get_server_capabilities()
        return form.model(
            sampling_client, self.temperature, models.context_length_of(self.model_name)
        )


@chz.chz
class PreferenceModelBuilderFromRun(PreferenceModelBuilder):
    """The preference model that a run of planish/preference/model_training.py has produced."""

    path: str = chz.field(doc="directory of the run's files")
    base_url: str | None = chz.field(
        default=None, doc="URL of a server, used without a service client; none = this process"
    )

    def __call__(self, service_client: ServiceClient | None = None) -> LogOddsModel:
        return PreferenceModelFile.read(self.path).builder(self.base_url)(service_client)


@dataclass(frozen=True)
class PreferenceModelFile:
    """The content of preference_model.json."""

    kind: Kind
    model_name: str
    model_path: str
    renderer_name: str
    question: str
    temperature: float
    calibration_pairs: int
    test: Mapping[str, float] = field(default_factory=dict)
    """The metrics on held-out comparisons after calibration (planish/preference/judgments.py)."""

    @classmethod
    def read(cls, run: str | Path) -> Self:
        """Read the file of a run. Raises UserError if it is missing, and DamagedFileError if it
        cannot be read.
        """
        path = Path(run).expanduser() / PREFERENCE_MODEL
        if not path.is_file():
            raise UserError(
                f"{path} is not there; give the directory of a finished run of preference_model"
            )
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise DamagedFileError(
                f"{path} does not describe a preference model ({error}); train it again"
            ) from error

    def write(self, run: str | Path) -> None:
        """Write the file into the directory of a run."""
        write_atomically(
            Path(run).expanduser() / PREFERENCE_MODEL, json.dumps(asdict(self), indent=2) + "\n"
        )

    def builder(self, base_url: str | None = None) -> TrainedPreferenceModelBuilder:
        """Return the options that make this model."""
        return TrainedPreferenceModelBuilder(
            kind=self.kind,
            model_name=self.model_name,
            model_path=self.model_path,
            renderer_name=self.renderer_name,
            question=self.question,
            temperature=self.temperature,
            base_url=base_url,
        )
