"""The vision tower of a model: transformers' own frozen module, with a cache of its results.

Shapes: T rows of a pass, n tokens of an image, D the hidden size of the text model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planish.images import MAX_IMAGE_PIXELS
from planish.model.architecture.inspection.vision_config import VisionConfig
from planish.model.vision.decoding import decode_image
from planish.model.vision.image_tokens import FIRST_IMAGE_TOKEN, Image, ImageRegistry

MAX_FEATURE_BYTES = 256 << 20
"""The maximum size of the cached features. One image may exceed it."""


_VALUES_PER_FEATURE = 16
"""An estimate of the numbers that a layer of the tower stores for each hidden feature: the states
around the attention and the MLP.
"""


def workspace_bytes(vision: VisionConfig, itemsize: int) -> int:
    """Return an estimate of the memory of a tower beside the weights of `expected_shapes`, in bytes.

    It is that of the other weights, the cached features and one pass with the largest image.
    `itemsize`: the bytes of an element of the model's dtype.
    """
    num_patches = MAX_IMAGE_PIXELS // vision.patch_size**2
    num_values = num_patches * vision.hidden_size * _VALUES_PER_FEATURE
    return MAX_FEATURE_BYTES + (vision.num_weights + num_values) * itemsize


@dataclass(frozen=True)
class EmbeddedRows:
    """The inputs of a text model: embeddings of text, and features of images."""

    embeddings: Tensor
    """[T, D] in the model's dtype."""
    is_image: Tensor
    """bool [T]: whether each row is a part of an image."""
    deepstack: list[Tensor]
    """The features of the n rows of images that are added after each of the first layers: [n, D]
    each (Qwen3-VL).
    """


class VisionTower:
    """The features of images, each computed once while it is in the cache."""

    def __init__(self, model: nn.Module, registry: ImageRegistry) -> None:
        """`model`: the multimodal model of transformers below the head, on its device."""
        self._model: Any = model
        self._registry = registry
        self._cache: OrderedDict[Image, Tensor] = OrderedDict()
        self._cached_bytes = 0
        self.num_runs = 0
        """The number of images that the tower has computed."""

    def embed(self, tokens: Tensor, embedding: Callable[[Tensor], Tensor]) -> EmbeddedRows:
        """Return the inputs of the text model's first layer, and those of further layers.

        `tokens`: int64 [T], with the ids of images. `embedding`: that of the text model.
        """
        is_image = tokens >= FIRST_IMAGE_TOKEN
        embeddings = embedding(tokens.masked_fill(is_image, self._registry.image_token))
        if not bool(is_image.any()):
            return EmbeddedRows(embeddings, is_image, [])
        features = self._features_of(tokens[is_image].tolist(), embeddings)
        size = embeddings.shape[-1]
        embeddings = embeddings.clone()
        first, *others = features.split(size, 1)
        embeddings[is_image] = first.to(embeddings.dtype)
        return EmbeddedRows(embeddings, is_image, others)

    def inputs(self, tokens: Tensor, embedding: nn.Module) -> dict[str, Any]:
        """Return the arguments of transformers' text model for rows with images.

        `tokens`, `embedding`: see `embed`.
        """
        rows = self.embed(tokens, embedding)
        arguments: dict[str, Any] = {"inputs_embeds": rows.embeddings[None]}
        stand_in = self._registry.vision.per_layer_token
        if stand_in is not None:
            text = tokens.masked_fill(rows.is_image, stand_in)
            arguments["per_layer_inputs"] = self._model.language_model.get_per_layer_inputs(
                text[None]
            )
        if rows.deepstack:
            arguments["visual_pos_masks"] = rows.is_image[None]
            arguments["deepstack_visual_embeds"] = rows.deepstack
        return arguments

    def _features_of(self, tokens: list[int], like: Tensor) -> Tensor:
        """Return the features of these image tokens, a row for each, on the device of `like`."""
        positions: OrderedDict[Image, list[tuple[int, int]]] = OrderedDict()
        for row, token in enumerate(tokens):
            image, position = self._registry.find(token)
            positions.setdefault(image, []).append((row, position))
        parts, rows = [], []
        for image, places in positions.items():
            index = torch.tensor([position for _, position in places], device=like.device)
            parts.append(self.features(image)[index])
            rows += [row for row, _ in places]
        return torch.cat(parts)[torch.tensor(rows, device=like.device).argsort()]

    def features(self, image: Image) -> Tensor:
        """Return the features of an image: [n, D], or [n, D * (1 + L)] if the tower also has
        features for the first L layers of the text model (deepstack).
        """
        if image in self._cache:
            self._cache.move_to_end(image)
            return self._cache[image]
        # Tensors of inference mode could not be used in training.
        with torch.inference_mode(False), torch.no_grad():
            features = self._compute(image)
        self._cache[image] = features
        self._cached_bytes += features.nbytes
        while self._cached_bytes > MAX_FEATURE_BYTES and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.nbytes
        return features

    def _compute(self, image: Image) -> Tensor:
        inputs = self._registry.processor.inputs(decode_image(image.chunk, "the image"))
        device = next(self._model.parameters()).device
        output = self._model.get_image_features(
            **{name: tensor.to(device) for name, tensor in inputs.items()}, return_dict=True
        )
        self.num_runs += 1
        deepstack = getattr(output, "deepstack_features", None) or ()
        return torch.cat([output.pooler_output[0], *(part[0] for part in deepstack)], -1)
