"""Reading of adapters from checkpoints, with checks that a checkpoint fits its base model."""

from planish.engine.base_models import BaseModel, BaseModels
from planish.engine.checkpoints.files import Manifest
from planish.engine.checkpoints.store import CheckpointStore
from planish.engine.training_models import LoadedAdapter
from planish.errors import CheckpointError
from planish.model.layers.lora import LoraLayout
from planish.types import CheckpointPath, LoraConfig


class CheckpointLoader:
    """Reads adapters from the checkpoints of one store, for the base models of one engine."""

    def __init__(self, base_models: BaseModels, store: CheckpointStore) -> None:
        self._base_models = base_models
        self._store = store

    def open(
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
            self.read(path, base, layout, name, with_optimizer, allow_other_weights),
        )

    def read(
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
