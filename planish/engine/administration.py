"""What a server needs of an engine besides operations: checkpoints, fingerprints and sizes."""

from pathlib import Path

from planish.engine.base_models import BaseModels
from planish.engine.checkpoints.store import CheckpointStore, SaveRequest
from planish.engine.memory import adapter_bytes
from planish.engine.settings import EngineSettings, choose_device, choose_dtype
from planish.model.architecture.config import ModelConfig
from planish.model.kernels.choose import choose_backend
from planish.model.sources.weights import weights_fingerprint
from planish.service import AdapterBytes
from planish.types import CheckpointPath, LoraConfig


class Administration:
    """The checkpoints of an engine as files, and facts about its base models."""

    def __init__(
        self, base_models: BaseModels, store: CheckpointStore, settings: EngineSettings
    ) -> None:
        self._base_models = base_models
        self._store = store
        self._settings = settings

    def preemptions(self) -> tuple[int, int]:
        """Return the number of preemptions of samples so far, and the number of preempted samples
        that wait for memory.
        """
        samplers = [base.sampler for base in self._base_models.loaded()]
        return (
            sum(sampler.num_preemptions for sampler in samplers),
            sum(sampler.num_preempted_samples for sampler in samplers),
        )

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
        metadata: dict[str, str] | None = None if keep_metadata else {}
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

    def clear_leftovers(self) -> None:
        """Remove the temporary checkpoint files of crashed processes."""
        self._store.clear_leftovers()

    def checkpoint_files(self, path: str) -> dict[str, Path]:
        """Return the path of each file of a checkpoint by file name."""
        return self._store.files(CheckpointPath.parse(path))
