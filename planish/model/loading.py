"""Load a base model with the decoder that fits it."""

from __future__ import annotations

from pathlib import Path

from planish.model.decoder.base_decoder import BaseDecoder
from planish.model.decoder.decoder import Decoder
from planish.model.hf.decoder import TransformersDecoder
from planish.model.hf.vision_tower import image_registry, load_tower
from planish.model.kernels.interface.backend import Backend
from planish.model.sources.weights import load_weights


def load_decoder(directory: Path, backend: Backend, quantize: str | None = None) -> BaseDecoder:
    """Load the model in `directory`, whose config is `backend.config`.

    `quantize`: the scheme of the layers' linears, or None.
    """
    if backend.config.hf is not None:
        return TransformersDecoder(directory, backend, quantize)
    decoder = Decoder(load_weights(directory, backend.config), backend, quantize)
    if backend.config.vision is not None:
        images = image_registry(directory, backend.config.vision, backend.config.vocab_size)
        decoder.vision = load_tower(directory, images, backend.dtype, backend.device)
        decoder.images = None if decoder.vision is None else images
    return decoder
