"""The checks of operations in the caller's thread, before the engine thread runs them.

`Preparation` knows the training models and samplers of an engine by their ids. It looks up or loads
everything that an operation names, so that a mistake is an error of the call that made it.
"""

import importlib
import logging
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from planish.engine.base_models import BaseModel, BaseModels
from planish.engine.checkpoint_loading import CheckpointLoader
from planish.engine.checkpoints.store import CheckpointStore, name_taken_error
from planish.engine.replication import (
    AdapterVersion,
    ComputePart,
    CreateVersionSampler,
    ExportWeights,
    FinishParts,
    RejectNextStep,
)
from planish.engine.training.trainer import TrainingBatch
from planish.engine.training_models import (
    AddedVersion,
    QueuedCreation,
    QueuedDeferredForwardBackward,
    QueuedFinish,
    QueuedForwardBackward,
    QueuedLoad,
    QueuedOperation,
    QueuedPart,
    QueuedPublish,
    QueuedSample,
    QueuedSamplerCreation,
    QueuedSampling,
    QueuedSave,
    QueuedTraining,
    SamplerSession,
    TrainingModel,
)
from planish.errors import UnsupportedError, UserError
from planish.model.layers.lora import LoraLayout
from planish.service import (
    SUBSTITUTE_REMEDY,
    CreateModel,
    CreateSampler,
    DeferredForwardBackward,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    PublishSampler,
    ReleaseSampler,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
    UnloadModel,
)
from planish.types import CheckpointPath, check_name

_log = logging.getLogger(__name__)

_PRELOADED_MODULES = (
    "numpy.ma",
    "safetensors.torch",
    "torch.fx.experimental.symbolic_shapes",
)
"""Modules that training would otherwise import at their first use, in the engine thread.

They are imported in the caller's thread instead. An import takes a second or more and cannot be
interrupted when the program ends. It can also change the exit status. After Ctrl-C, an import in
another thread makes CPython forget that the program was interrupted.
"""


class Preparation:
    """The training models and samplers of one engine, and the checks of operations on them."""

    def __init__(
        self, base_models: BaseModels, store: CheckpointStore, substitutes: Mapping[str, str]
    ) -> None:
        """`substitutes`: the losses to compute in place of other losses."""
        self._base_models = base_models
        self._store = store
        self._loader = CheckpointLoader(base_models, store)
        self._substitutes = dict(substitutes)
        for name, substitute in self._substitutes.items():
            _log.warning(
                "substitute_losses: requests with loss_fn=%r compute %r instead", name, substitute
            )
        self.substitutions: Counter[tuple[str, str]] = Counter()
        """Number of operations with a substituted loss, by (requested loss, substitute)."""
        self.training_models: dict[str, TrainingModel] = {}
        self.sampler_sessions: dict[str, SamplerSession] = {}
        self.versions: dict[str, AddedVersion] = {}
        """The versions of adapters of other engines by name."""
        self.created_model_ids: set[str] = set()
        """Ids of all training models that were ever created."""

    def clear(self) -> None:
        """Forget all training models and samplers."""
        self.training_models.clear()
        self.sampler_sessions.clear()
        self.versions.clear()

    def prepare(self, op: Operation[Any], future: Future[Any]) -> QueuedOperation:
        """Check an operation, and return it with what the engine thread needs to run it.

        Raises UserError (or a subclass) on invalid input. This method may load a base model or
        read a checkpoint.
        """
        match op:
            case CreateModel():
                return self._prepare_model(op, future)
            case CreateSampler():
                return self._prepare_sampler(op, future)
            case PublishSampler():
                model = self._model_by_id(op.model_id)
                session = self._new_session(op.sampler_id, model.base, model.base_model, None)
                return QueuedPublish(op, future, model, session)
            case ReleaseSampler():
                released = self.sampler_sessions.pop(op.sampler_id, None)
                return QueuedSampling(op, future, released or self.session_by_id(op.sampler_id))
            case UnloadModel():
                unloaded = self.training_models.pop(op.model_id, None)
                return QueuedTraining(op, future, unloaded or self._model_by_id(op.model_id))
            case Sample():
                session = self.session_by_id(op.sampler_id)
                self.check_sample(session.base, op)
                return QueuedSample(op, future, session)
            case SaveWeights() | SaveWeightsForSampler():
                return self._prepare_save(op, future)
            case LoadWeights():
                model = self._model_by_id(op.model_id)
                path = CheckpointPath.parse(op.path)
                loaded_adapter = self._loader.read(
                    path, model.base, model.layout, model.base_model, op.with_optimizer
                )
                return QueuedLoad(op, future, model, loaded_adapter)
            case ForwardBackward():
                model = self._model_by_id(op.model_id)
                self._loss_to_compute(op.loss_fn)  # counts a substitution
                return QueuedForwardBackward(op, future, model, self._read_batch(model, op))
            case DeferredForwardBackward():
                loss_fn = self._loss_to_compute(op.loss_fn)
                return QueuedDeferredForwardBackward(
                    op, future, self._model_by_id(op.model_id), loss_fn
                )
            case OptimStep() | ExportWeights() | RejectNextStep():
                return QueuedTraining(op, future, self._model_by_id(op.model_id))
            case ComputePart():
                return self._prepare_part(op, future)
            case FinishParts():
                return QueuedFinish(
                    op, future, self._model_by_id(op.model_id), self._loss_to_compute(op.loss_fn)
                )
            case CreateVersionSampler():
                added = self._version_by_name(op.version)
                session = self._new_session(
                    op.sampler_id, added.model.base, added.model.base_model, None
                )
                return QueuedSamplerCreation(op, future, session, added)
            case _:
                raise TypeError(
                    f"operation is a {type(op).__name__}, which the engine does not support"
                )

    def add_version(self, version: AdapterVersion) -> None:
        """Make a version of another engine's adapter known (see replication.py), for
        `CreateVersionSampler` and `ComputePart`.
        """
        base = self._base_models.get(version.base_model)
        base.check_rank(version.lora.rank)
        layout = LoraLayout(base.config, version.lora)
        vector = version.vector()
        found = AdapterVersion.from_vector(
            version.base_model, base.fingerprint, version.lora, vector
        )
        if found.name != version.name or vector.dtype != base.backend.dtype:
            raise UserError(
                f"base_model={version.base_model!r}: the weights or their dtype here differ from "
                "those on the engine that sent a version of an adapter; give all machines the same "
                "files, and kinds of devices that support the same dtype"
            )
        model = TrainingModel(f"version:{version.name}", base, version.base_model, layout, {})
        model.failure = "it is trained by another engine"
        self.versions[version.name] = AddedVersion(version.name, model, vector)

    def drop_version(self, name: str) -> None:
        """Forget a version. Samplers that were created from the version keep its weights."""
        self.versions.pop(name, None)

    def read_checkpoint(self, path: str, base_model: str | None) -> AdapterVersion:
        """Return the adapter of the checkpoint at a tinker:// path as a version."""
        base, name, loaded = self._loader.open(path, base_model, with_optimizer=False)
        vector = loaded.state["master"].to(base.backend.dtype)
        return AdapterVersion.from_vector(name, base.fingerprint, loaded.layout.lora_config, vector)

    def micro_batches(self, op: ForwardBackward) -> list[tuple[int, tuple[int, ...]]]:
        """Check an operation, and return the number of computed tokens and the datums of each of
        its micro-batches. The computation is not started.
        """
        model = self._model_by_id(op.model_id)
        return model.base.trainer.micro_batches(self._read_batch(model, op))

    def _read_batch(self, model: TrainingModel, op: ForwardBackward | ComputePart) -> TrainingBatch:
        loss_fn = self._substitutes.get(op.loss_fn, op.loss_fn)
        return model.base.trainer.read_batch(op.data, loss_fn, op.loss_fn_config, op.forward_only)

    def _version_by_name(self, name: str) -> AddedVersion:
        added = self.versions.get(name)
        if added is None:
            raise UserError(f"version={name!r} is unknown to this engine; add it first")
        return added

    def _prepare_part(self, op: ComputePart, future: Future[Any]) -> QueuedPart:
        added = None if op.version is None else self._version_by_name(op.version)
        model = self._model_by_id(op.model_id or "") if added is None else added.model
        return QueuedPart(op, future, model, self._read_batch(model, op), added)

    def _loss_to_compute(self, loss_fn: str) -> str:
        """Return the loss to compute for `loss_fn`: `loss_fn` itself, or its substitute.

        Each substitution is counted in `substitutions`.
        """
        if loss_fn not in self._substitutes:
            return loss_fn
        substitute = self._substitutes[loss_fn]
        self.substitutions[loss_fn, substitute] += 1
        return substitute

    def _model_by_id(self, model_id: str) -> TrainingModel:
        model = self.training_models.get(model_id)
        if model is None:
            raise UserError(
                f"model_id={model_id!r}: there is no such model, or it was unloaded; create one"
            )
        if model.failure is not None:
            raise UserError(f"model_id={model_id!r}: {model.failure}")
        return model

    def session_by_id(self, sampler_id: str) -> SamplerSession:
        """Return an open sampler. Raises UserError if there is none of this id."""
        session = self.sampler_sessions.get(sampler_id)
        if session is None:
            raise UserError(
                f"sampler_id={sampler_id!r}: there is no such sampler, or it was released; "
                "create one"
            )
        return session

    def _prepare_model(self, op: CreateModel, future: Future[Any]) -> QueuedCreation:
        for module in _PRELOADED_MODULES:
            importlib.import_module(module)
        check_name("model_id", op.model_id)
        if op.model_id in self.training_models:
            raise UserError(f"model_id={op.model_id!r} is already in use; choose another id")
        if op.from_path is not None:
            base, name, loaded_adapter = self._loader.open(
                op.from_path, op.base_model, op.with_optimizer
            )
            layout = loaded_adapter.layout
        else:
            assert op.base_model is not None
            name, loaded_adapter = op.base_model, None
            base = self._base_models.get(name)
            base.check_rank(op.lora.rank)
            layout = LoraLayout(base.config, op.lora)
        model = TrainingModel(op.model_id, base, name, layout, dict(op.user_metadata))
        if self.training_models.setdefault(op.model_id, model) is not model:
            raise UserError(f"model_id={op.model_id!r} is already in use; choose another id")
        self.created_model_ids.add(op.model_id)
        return QueuedCreation(op, future, model, loaded_adapter)

    def _prepare_sampler(self, op: CreateSampler, future: Future[Any]) -> QueuedSamplerCreation:
        if op.model_path is not None:
            base, name, loaded_adapter = self._loader.open(
                op.model_path, op.base_model, with_optimizer=False
            )
        else:
            assert op.base_model is not None
            name, loaded_adapter = op.base_model, None
            base = self._base_models.get(name)
        session = self._new_session(op.sampler_id, base, name, op.model_path)
        return QueuedSamplerCreation(op, future, session, loaded_adapter)

    def _new_session(
        self, sampler_id: str, base: BaseModel, name: str, model_path: str | None
    ) -> SamplerSession:
        check_name("sampler_id", sampler_id)
        session = SamplerSession(sampler_id, base, name, model_path)
        if self.sampler_sessions.setdefault(sampler_id, session) is not session:
            raise UserError(f"sampler_id={sampler_id!r} is already in use; choose another id")
        return session

    def check_sample(self, base: BaseModel, op: Sample) -> None:
        """Raise UserError if the base model would reject this request."""
        if op.record_stability_info and not self._substitutes:
            raise UnsupportedError(
                "record_stability_info is for loss_fn='stable_reinforce', whose formula is not "
                f"public; leave it out and {SUBSTITUTE_REMEDY}"
            )
        base.sampler.validate(op)
        stop = op.sampling_params.stop
        if isinstance(stop, str) or any(isinstance(item, str) for item in stop or ()):
            _ = base.tokenizer  # load it now, so that a missing tokenizer fails this call

    def _prepare_save(
        self, op: SaveWeights | SaveWeightsForSampler, future: Future[Any]
    ) -> QueuedSave:
        model = self._model_by_id(op.model_id)
        path = CheckpointPath(
            op.model_id, "training" if isinstance(op, SaveWeights) else "sampler", op.name
        )
        if isinstance(op, SaveWeights) and not op.overwrite and self._store.exists(path):
            raise name_taken_error(path)
        return QueuedSave(op, future, model, path)
