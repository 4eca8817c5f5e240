"""The embedded engine, which implements `Service` in this process.

    submit   checks an operation against the model, the vocabulary and the disk in the caller's
             thread, then queues it
    engine_thread.py runs all operations in the engine thread

`close()` finishes the queued operations and then frees the device. `close(finish=False)` fails all
operations with EngineClosedError: the queued ones at once, and the running one at its next matmul.

When the program ends, the engine first waits up to one minute for requested checkpoints. It then
closes like `close(finish=False)`. A checkpoint that is being written is always finished.
"""

from __future__ import annotations

import importlib
import logging
import weakref
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from planish.engine.base_models import BaseModel, BaseModels
from planish.engine.checkpoints.files import Manifest
from planish.engine.checkpoints.store import (
    CheckpointStore,
    SaveRequest,
    checkpoint_record,
    data_directory,
    name_taken_error,
)
from planish.engine.constraints.grammar import Grammar
from planish.engine.engine_thread import EngineThread
from planish.engine.memory import DeviceMemory, adapter_bytes
from planish.engine.settings import EngineSettings, choose_device, choose_dtype
from planish.engine.training_models import (
    LoadedAdapter,
    QueuedCreation,
    QueuedDeferredForwardBackward,
    QueuedForwardBackward,
    QueuedLoad,
    QueuedOperation,
    QueuedPublish,
    QueuedSample,
    QueuedSamplerCreation,
    QueuedSampling,
    QueuedSave,
    QueuedTraining,
    SamplerSession,
    TrainingModel,
)
from planish.engine.training_operations import TrainingOperations
from planish.errors import CheckpointError, EngineClosedError, UnsupportedError, UserError
from planish.model.config import ModelConfig
from planish.model.kernels.choose import choose_backend
from planish.model.listing import list_models
from planish.model.lora import LoraLayout
from planish.model.sources import checked_mapping, models_from_env_var
from planish.model.weights import weights_fingerprint
from planish.processes.threads import limit_threads
from planish.service import (
    SUBSTITUTE_REMEDY,
    AdapterBytes,
    CheckpointInfo,
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
    SamplerInfo,
    SaveWeights,
    SaveWeightsForSampler,
    UnloadModel,
)
from planish.types import (
    Checkpoint,
    CheckpointPath,
    GetServerCapabilitiesResponse,
    LoraConfig,
    SupportedModel,
    check_name,
)

R = TypeVar("R")

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


class Engine:
    """The engine of this process: base models, adapters, samplers and checkpoints."""

    def __init__(
        self,
        models: Mapping[str, str] | None = None,
        data_dir: str | Path | None = None,
        settings: EngineSettings | None = None,
        memory: DeviceMemory | None = None,
        only_these_models: bool = False,
    ) -> None:
        """Create an engine and start its thread; base models are loaded at their first use.

        `models` maps names of base models to directories or .gguf files. `data_dir` is the
        directory of the checkpoints. `memory` divides the device's memory among the base models.

        Without `memory`, each base model reserves memory when it is loaded. On a GPU, that is all
        free memory if `models` and PLANISH_MODELS together name at most one directory. If they name
        several, each base model leaves a third of the free memory for further base models, provided
        that a base model of the same size fits into that third.

        With `only_these_models`, every base model outside of `models` is unknown. A server needs
        this: otherwise a name in a request could be a path on its machine, or start a download.
        """
        limit_threads()
        self._settings = settings or EngineSettings()
        mapping = checked_mapping(models)
        known_directories = {*mapping.values(), *models_from_env_var().values()}
        memory = memory or DeviceMemory(
            self._settings, reserves_for_next=len(known_directories) > 1
        )
        # An entry that maps a name to itself gives no directory, so it is dropped here. It has been
        # counted in `known_directories` above, because its base model uses the memory too.
        if not only_these_models:
            mapping = {name: path for name, path in mapping.items() if name != path}
        self._base_models = BaseModels(mapping, self._settings, memory, only_these_models)
        self._store = CheckpointStore(data_directory(data_dir))
        self._training_models: dict[str, TrainingModel] = {}
        self._sampler_sessions: dict[str, SamplerSession] = {}
        self._created_model_ids: set[str] = set()
        """Ids of all training models that this engine created."""
        self._is_closed = False
        self.substitutions: Counter[tuple[str, str]] = Counter()
        """Number of operations with a substituted loss, by (requested loss, substitute)."""
        self._substitutes = dict(self._settings.substitute_losses or {})
        for name, substitute in self._substitutes.items():
            _log.warning(
                "substitute_losses: requests with loss_fn=%r compute %r instead", name, substitute
            )
        disk = ThreadPoolExecutor(1, thread_name_prefix="planish-disk")
        self._thread = EngineThread(TrainingOperations(self._store, disk), on_end=disk.shutdown)
        # Free the device when the engine is garbage-collected. At exit the engine thread frees it.
        weakref.finalize(self, self._thread.stop, False).atexit = False

    def submit(self, operation: Operation[R]) -> Future[R]:
        """Check and queue `operation`; return the future of its result.

        Raises UserError (or a subclass) on invalid input, and EngineClosedError after `close`.
        Creating a model or sampler and loading weights may take seconds, because the call loads
        the base model or the checkpoint.
        """
        self._check_open()
        future: Future[R] = Future()
        queued = self._prepare_operation(operation, future)
        # Keep the engine alive until the result is set. After
        # `ServiceClient().create_sampling_client(...).sample(...)` the caller has only the future.
        keep_alive = [self]
        future.add_done_callback(lambda _: keep_alive.clear())
        self._thread.put(queued)
        return future

    def capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the available base models.

        The response also has loaded base models that a caller named in another way, such as by a
        directory.
        """
        self._check_open()
        usable_models = [
            entry for entry in list_models(self._base_models.mapping) if entry.problem is None
        ]
        configs = {
            entry.name: _config_of(entry.path) for entry in usable_models
        } | self._base_models.loaded_configs()
        return GetServerCapabilitiesResponse(
            [_supported_model(name, config) for name, config in configs.items()]
        )

    def sampler_info(self, sampler_id: str) -> SamplerInfo:
        """Return a sampler's base model and checkpoint. Available after `close` too."""
        session = self._session_by_id(sampler_id)
        return SamplerInfo(session.sampler_id, session.base_model, session.model_path)

    def tokenizer_directory(self, base_model: str) -> Path:
        """Return the directory with the base model's tokenizer files."""
        self._check_open()
        return self._base_models.directory(base_model)

    def checkpoints(self, run_id: str | None = None) -> list[Checkpoint]:
        """Return saved checkpoints, newest first. Raises CheckpointError if the run is unknown."""
        self._check_open()
        if (
            run_id is not None
            and run_id not in self._created_model_ids
            and not self._store.has_run(run_id)
        ):
            raise CheckpointError(
                f"training_run_id={run_id!r}: this engine has no such run, and "
                f"{self._store.directory} has no checkpoint of it; check the id and data_dir"
            )
        return self._store.records(run_id)

    def checkpoint_info(self, path: str) -> CheckpointInfo:
        """Return the base model and adapter shape of the checkpoint at a tinker:// path."""
        self._check_open()
        parsed = CheckpointPath.parse(path)
        manifest = self._store.manifest(parsed)
        return CheckpointInfo(
            manifest.base_model, manifest.lora, checkpoint_record(parsed, manifest)
        )

    def delete_checkpoint(self, path: str) -> None:
        """Delete the checkpoint at a tinker:// path."""
        self._check_open()
        self._store.delete(CheckpointPath.parse(path))

    # The methods from here to `checkpoint_files` are for the server.

    def check_sample(self, base_model: str, operation: Sample) -> None:
        """Raise UserError if the base model would reject this request; load the model if needed."""
        self._check_request(self._base_models.get(base_model), operation)

    def prepare_constraint(
        self, operation: Sample, base_model: str | None = None
    ) -> Future[Grammar]:
        """Compile the constraint of a request. While the caller keeps the result, neither
        `check_sample` nor `submit` waits for the compilation.

        `base_model` is loaded if needed. None: that of the request's sampler. If the future is
        cancelled and no other request waits for the constraint, the compilation is ended.
        """
        constraint = operation.sampling_params.constraint
        assert constraint is not None
        base = (
            self._session_by_id(operation.sampler_id).base
            if base_model is None
            else self._base_models.get(base_model)
        )
        return base.grammars.prepare(constraint, operation.cache_owner)

    def weights_fingerprint(self, base_model: str) -> str:
        """Return the fingerprint of the base model's weight files, which need not be loaded.

        The quantization scheme follows, if there is one: "FINGERPRINT int8".
        """
        fingerprint = weights_fingerprint(self._base_models.directory(base_model))
        return (
            f"{fingerprint} {self._settings.quantize}" if self._settings.quantize else fingerprint
        )

    def adapter_bytes(self, base_model: str, lora: LoraConfig) -> AdapterBytes:
        """Return the memory that an adapter of this shape needs for training and for sampling."""
        config = ModelConfig.from_directory(self._base_models.directory(base_model))
        device = choose_device(self._settings.device)
        dtype = choose_dtype(self._settings.dtype, device)
        return adapter_bytes(choose_backend(config, dtype, device, deterministic=False), lora)

    def copy_checkpoint(
        self,
        source: str,
        destination: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        keep_metadata: bool = True,
    ) -> None:
        """Copy a checkpoint to another tinker:// path, with hard links where possible."""
        metadata = None if keep_metadata else {}
        self._store.copy(
            CheckpointPath.parse(source),
            SaveRequest(CheckpointPath.parse(destination), ttl_seconds, overwrite, metadata),
        )

    def set_checkpoint_ttl(self, path: str, ttl_seconds: int | None) -> None:
        """Make a checkpoint expire `ttl_seconds` from now; None keeps it forever."""
        self._store.set_ttl(CheckpointPath.parse(path), ttl_seconds)

    def keep_expired_checkpoints(self) -> None:
        """From now on, keep expired checkpoints.

        Reads do not remove them, and a save replaces one only with `overwrite`.
        `set_checkpoint_ttl` may extend an expired one.
        """
        self._store.removes_expired = False

    def checkpoint_paths(self) -> list[str]:
        """Return the paths of all checkpoints on disk, without reading them."""
        return [str(path) for path in self._store.paths()]

    def progress(self) -> int | None:
        """Return a number that stays the same while the engine thread hangs; None without work."""
        return self._thread.progress()

    def thread_stack(self) -> str:
        """Return what the engine thread is doing."""
        return self._thread.stack()

    def clear_leftovers(self) -> None:
        """Remove the temporary checkpoint files of crashed processes."""
        self._store.clear_leftovers()

    def checkpoint_files(self, path: str) -> dict[str, Path]:
        """Return the path of each file of a checkpoint by file name."""
        return self._store.files(CheckpointPath.parse(path))

    def close(self, finish: bool = True) -> None:
        """Reject further operations and free the device.

        With `finish`, queued operations run first; otherwise they fail with EngineClosedError.
        """
        self._is_closed = True
        self._thread.close(finish)
        self._training_models.clear()
        self._sampler_sessions.clear()
        self._base_models.clear()

    # The methods below check an operation before `submit` queues it.

    def _prepare_operation(self, op: Operation[Any], future: Future[Any]) -> QueuedOperation:
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
                released = self._sampler_sessions.pop(op.sampler_id, None)
                return QueuedSampling(op, future, released or self._session_by_id(op.sampler_id))
            case UnloadModel():
                unloaded = self._training_models.pop(op.model_id, None)
                return QueuedTraining(op, future, unloaded or self._model_by_id(op.model_id))
            case Sample():
                session = self._session_by_id(op.sampler_id)
                self._check_request(session.base, op)
                return QueuedSample(op, future, session)
            case SaveWeights() | SaveWeightsForSampler():
                return self._prepare_save(op, future)
            case LoadWeights():
                model = self._model_by_id(op.model_id)
                path = CheckpointPath.parse(op.path)
                loaded_adapter = self._read_adapter(
                    path, model.base, model.layout, model.base_model, op.with_optimizer
                )
                return QueuedLoad(op, future, model, loaded_adapter)
            case ForwardBackward():
                model = self._model_by_id(op.model_id)
                loss_fn = self._loss_to_compute(op.loss_fn)
                batch = model.base.trainer.read_batch(op.data, loss_fn, op.loss_fn_config)
                return QueuedForwardBackward(op, future, model, batch)
            case DeferredForwardBackward():
                loss_fn = self._loss_to_compute(op.loss_fn)
                return QueuedDeferredForwardBackward(
                    op, future, self._model_by_id(op.model_id), loss_fn
                )
            case OptimStep():
                return QueuedTraining(op, future, self._model_by_id(op.model_id))
        raise TypeError(f"operation is a {type(op).__name__}, which the engine does not support")

    def _loss_to_compute(self, loss_fn: str) -> str:
        """Return the loss to compute for `loss_fn`: `loss_fn` itself, or its substitute.

        Each substitution is counted in `substitutions`.
        """
        if loss_fn not in self._substitutes:
            return loss_fn
        substitute = self._substitutes[loss_fn]
        self.substitutions[loss_fn, substitute] += 1
        return substitute

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine is closed; make a new ServiceClient")

    def _model_by_id(self, model_id: str) -> TrainingModel:
        model = self._training_models.get(model_id)
        if model is None:
            raise UserError(
                f"model_id={model_id!r}: there is no such model, or it was unloaded; create one"
            )
        if model.failure is not None:
            raise UserError(f"model_id={model_id!r}: {model.failure}")
        return model

    def _session_by_id(self, sampler_id: str) -> SamplerSession:
        session = self._sampler_sessions.get(sampler_id)
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
        if op.model_id in self._training_models:
            raise UserError(f"model_id={op.model_id!r} is already in use; choose another id")
        if op.from_path is not None:
            base, name, loaded_adapter = self._open_checkpoint(
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
        if self._training_models.setdefault(op.model_id, model) is not model:
            raise UserError(f"model_id={op.model_id!r} is already in use; choose another id")
        self._created_model_ids.add(op.model_id)
        return QueuedCreation(op, future, model, loaded_adapter)

    def _prepare_sampler(self, op: CreateSampler, future: Future[Any]) -> QueuedSamplerCreation:
        if op.model_path is not None:
            base, name, loaded_adapter = self._open_checkpoint(
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
        if self._sampler_sessions.setdefault(sampler_id, session) is not session:
            raise UserError(f"sampler_id={sampler_id!r} is already in use; choose another id")
        return session

    def _check_request(self, base: BaseModel, op: Sample) -> None:
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

    def _open_checkpoint(
        self, checkpoint: str, base_model: str | None, with_optimizer: bool
    ) -> tuple[BaseModel, str, LoadedAdapter]:
        """Read the checkpoint at a tinker:// path; return the base model, its name and the adapter.

        `base_model`: the base model that the caller named; None means the checkpoint's base model.
        """
        path = CheckpointPath.parse(checkpoint)
        manifest = self._store.manifest(path)
        name = base_model or manifest.base_model
        base = self._base_models.get(name)
        base.check_rank(manifest.lora.rank)
        layout = LoraLayout(base.config, manifest.lora)
        allow_other_weights = base_model is not None
        return (
            base,
            name,
            self._read_adapter(path, base, layout, name, with_optimizer, allow_other_weights),
        )

    def _read_adapter(
        self,
        path: CheckpointPath,
        base: BaseModel,
        layout: LoraLayout,
        name: str,
        with_optimizer: bool,
        allow_other_weights: bool = False,
    ) -> LoadedAdapter:
        """Read the adapter state of a checkpoint for `base`.

        `allow_other_weights`: accept a checkpoint of other base weights with the same architecture.
        Raises CheckpointError if the base model or the adapter's shape does not match.
        """

        def check_fits(manifest: Manifest) -> None:
            if manifest.architecture != base.config.fingerprint():
                difference = "architecture differs from that"
            elif manifest.weights != base.fingerprint and not allow_other_weights:
                difference = "weights differ from those"
            else:
                difference = ""
            if difference:
                raise CheckpointError(
                    f"{path} was saved from the base model {manifest.base_model!r}, whose "
                    f"{difference} of {name!r} in this engine; load it on its own base model. "
                    "models={NAME: PATH} sets the directory of a base model"
                )
            if manifest.quantize != base.quantize and not allow_other_weights:
                raise CheckpointError(
                    f"{path} was saved from {_describe_weights(manifest.quantize)}, but this "
                    f"engine has {_describe_weights(base.quantize)}; start the engine with "
                    f"quantize={manifest.quantize!r}, or give base_model={name!r} to use the "
                    "checkpoint on these weights"
                )
            checkpoint_shape = _describe_shape(manifest.lora)
            model_shape = _describe_shape(layout.lora_config)
            if checkpoint_shape != model_shape:
                raise CheckpointError(
                    f"{path} has an adapter of {checkpoint_shape}, but the model's adapter has "
                    f"{model_shape}; "
                    "create the model with the rank and the train_* options of the checkpoint"
                )

        state, version = self._store.read(path, layout, with_optimizer, check_fits)
        return LoadedAdapter(state, with_optimizer, layout, version)


def _describe_weights(scheme: str | None) -> str:
    return (
        f"base weights quantized with {scheme}" if scheme else "base weights without quantization"
    )


def _describe_shape(lora: LoraConfig) -> str:
    module_groups = [
        name for name in ("train_attn", "train_mlp", "train_unembed") if getattr(lora, name)
    ]
    return f"rank {lora.rank} with {', '.join(module_groups)}"


def _config_of(path: Path | None) -> ModelConfig | None:
    return ModelConfig.from_directory(path) if path is not None and path.is_dir() else None


def _supported_model(name: str, config: ModelConfig | None) -> SupportedModel:
    if config is None:
        return SupportedModel(name)
    return SupportedModel(name, config.max_context, vocab_size=config.vocab_size)
