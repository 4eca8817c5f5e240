"""The embedded engine, which implements `Service` in this process.

    preparation.py      checks an operation against the model, the vocabulary and the disk in the
                        caller's thread
    engine_thread.py    runs all operations in the engine thread
    administration.py   what a server needs besides operations

`close()` finishes the queued operations and then frees the device. `close(finish=False)` fails all
operations with EngineClosedError: the queued ones at once, and the running one at its next matmul.

When the program ends, the engine first waits up to one minute for requested checkpoints. It then
closes like `close(finish=False)`. A checkpoint that is being written is always finished.
"""

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from planish.engine.administration import Administration
from planish.engine.base_models import BaseModels
from planish.engine.checkpoints.store import CheckpointStore, checkpoint_record, data_directory
from planish.engine.constraints.grammar import Grammar
from planish.engine.engine_thread import EngineThread
from planish.engine.memory import DeviceMemory, ModelMemory
from planish.engine.preparation import Preparation
from planish.engine.settings import EngineSettings
from planish.engine.training_operations import TrainingOperations
from planish.errors import CheckpointError, EngineClosedError
from planish.model.architecture.config import ModelConfig
from planish.model.sources.listing import list_models
from planish.model.sources.resolve import checked_mapping, models_from_env_var
from planish.processes.threads import limit_threads
from planish.service import (
    CheckpointInfo,
    Operation,
    Sample,
    SamplerInfo,
    Service,
)
from planish.types import (
    Checkpoint,
    CheckpointPath,
    GetServerCapabilitiesResponse,
    SupportedModel,
)

R = TypeVar("R")


class HostedEngine(Service, Protocol):
    """What a server needs of an engine: an `Engine`, or the fleet of fleet/served.py."""

    @property
    def administration(self) -> Administration:
        """What a server needs besides operations."""
        ...

    @property
    def checks_inline(self) -> bool:
        """Whether `check_sample` is so fast that the event loop may call it."""
        ...

    @property
    def substitutions(self) -> Counter[tuple[str, str]]:
        """See `Engine.substitutions`."""
        ...

    def check_sample(self, base_model: str, operation: Sample) -> None:
        """See `Engine.check_sample`."""

    def prepare_constraint(self, operation: Sample, base_model: str | None = None) -> Future[Any]:
        """See `Engine.prepare_constraint`."""
        ...

    def progress(self) -> int | None:
        """See `Engine.progress`."""
        ...

    def thread_stack(self) -> str:
        """See `Engine.thread_stack`."""
        ...


class Engine:
    """The engine of this process: base models, adapters, samplers and checkpoints."""

    checks_inline = True

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
        from_environment = models_from_env_var()
        known_directories = {
            *(from_environment.get(path, path) for path in mapping.values()),
            *from_environment.values(),
        }
        memory = memory or DeviceMemory(
            self._settings, reserves_for_next=len(known_directories) > 1
        )
        # An entry that maps a name to itself gives no directory, so it is dropped here. It has been
        # counted in `known_directories` above, because its base model uses the memory too.
        if not only_these_models:
            mapping = {name: path for name, path in mapping.items() if name != path}
        self._base_models = BaseModels(mapping, self._settings, memory, only_these_models)
        self._store = CheckpointStore(data_directory(data_dir))
        self.preparation = Preparation(
            self._base_models, self._store, self._settings.substitute_losses or {}
        )
        """A fleet also gives it the versions of other engines' adapters."""
        self.administration = Administration(self._base_models, self._store, self._settings)
        self._is_closed = False
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
        queued = self.preparation.prepare(operation, future)
        # Keep the engine alive until the result is set. After
        # `ServiceClient().create_sampling_client(...).sample(...)` the caller has only the future.
        keep_alive = [self]
        future.add_done_callback(lambda _: keep_alive.clear())
        self._thread.put(queued)
        return future

    @property
    def substitutions(self) -> Counter[tuple[str, str]]:
        """Number of operations with a substituted loss, by (requested loss, substitute)."""
        return self.preparation.substitutions

    def check_memory(self, base_models: Sequence[str]) -> dict[str, ModelMemory]:
        """Return the memory of these base models, by name. Raise UserError unless they fit on the
        device together. Call it before one is loaded.
        """
        return self._base_models.check_memory(base_models)

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
        session = self.preparation.session_by_id(sampler_id)
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
            and run_id not in self.preparation.created_model_ids
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

    def check_sample(self, base_model: str, operation: Sample) -> None:
        """Raise UserError if the base model would reject this request; load the model if needed."""
        self.preparation.check_sample(self._base_models.get(base_model), operation)

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
            self.preparation.session_by_id(operation.sampler_id).base
            if base_model is None
            else self._base_models.get(base_model)
        )
        return base.grammars.prepare(constraint, operation.owner)

    def load_base_model(self, name: str) -> str:
        """Load a base model, unless it is loaded, and return the fingerprint of its weights."""
        self._check_open()
        return self._base_models.get(name).fingerprint

    def check(self, operation: Operation[Any]) -> None:
        """Raise UserError if `submit` would reject this operation of a training model."""
        self._check_open()
        self.preparation.prepare(operation, Future())

    def progress(self) -> int | None:
        """Return a number that stays the same while the engine thread hangs; None without work."""
        return self._thread.progress()

    def thread_stack(self) -> str:
        """Return what the engine thread is doing."""
        return self._thread.stack()

    def close(self, finish: bool = True) -> None:
        """Reject further operations and free the device.

        With `finish`, queued operations run first; otherwise they fail with EngineClosedError.
        """
        self._is_closed = True
        self._thread.close(finish)
        self.preparation.clear()
        self._base_models.clear()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineClosedError("the engine is closed; make a new ServiceClient")


def _config_of(path: Path | None) -> ModelConfig | None:
    return ModelConfig.from_directory(path) if path is not None and path.is_dir() else None


def _supported_model(name: str, config: ModelConfig | None) -> SupportedModel:
    if config is None:
        return SupportedModel(name)
    return SupportedModel(name, config.max_context, vocab_size=config.vocab_size)
