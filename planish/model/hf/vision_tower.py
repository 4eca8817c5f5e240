"""The vision tower of a model whose text model has its own decoder (decoder/decoder.py)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from planish.errors import DamagedFileError
from planish.model.architecture.inspection.probing import quiet
from planish.model.architecture.inspection.vision_config import VisionConfig
from planish.model.sources.weights import VISION_PARTS, weight_files
from planish.model.vision.image_tokens import ImageRegistry
from planish.model.vision.processing import image_processor
from planish.model.vision.tower import VisionTower

_SMALL_TEXT = {"num_hidden_layers": 1, "vocab_size": 8, "layer_types": None}
"""The sizes of the text model that is created beside the tower and dropped again."""


def load_tower(
    directory: Path, registry: ImageRegistry, dtype: torch.dtype, device: torch.device
) -> VisionTower | None:
    """Return the frozen vision tower in `directory`, or None if the directory has no such weights.

    Raises DamagedFileError if the weights do not fit config.json.
    """
    weights = _vision_weights(directory)
    if not weights:
        return None
    with quiet():
        try:
            model = _model_without_text(directory)
            # Weights that are stored in another dtype are converted. The others stay mapped.
            converted = {name: weight.to(dtype) for name, weight in weights.items()}
            model.load_state_dict(converted, assign=True)
        except Exception as error:  # Model classes raise many kinds of errors.
            raise DamagedFileError(
                f"the weights of the vision tower in {directory} do not fit its config.json "
                f"({' '.join(str(error).split())[:300]}); download the weights and config.json of one model"
            ) from error
    return VisionTower(model.to(device).eval().requires_grad_(False), registry)


def image_registry(directory: Path, vision: VisionConfig, vocab_size: int) -> ImageRegistry:
    """Return a registry for the images of the model in `directory`."""
    return ImageRegistry(image_processor(directory, vision), vocab_size, vision)


def _vision_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the vision tower, memory-mapped, by their names below "model."."""
    weights: dict[str, torch.Tensor] = {}
    for file in weight_files(directory):
        with safe_open(directory / file, framework="pt", device="cpu") as handle:
            for stored_name in handle.keys():  # noqa: SIM118 - a handle is no mapping
                name = stored_name.removeprefix("model.")
                if name.startswith(VISION_PARTS):
                    weights[name] = handle.get_tensor(stored_name)
    return weights


def _model_without_text(directory: Path) -> Any:
    """Return transformers' multimodal model below the head, without its text model. Its weights are
    not initialized.
    """
    from transformers import AutoConfig, AutoModel
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    config = copy.deepcopy(config)
    for name, value in _SMALL_TEXT.items():
        setattr(config.text_config, name, value)
    config.text_config.pad_token_id = None
    config.text_config.__post_init__()
    with no_init_weights():
        model: Any = AutoModel.from_config(config)
    del model.language_model
    return model
