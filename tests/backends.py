"""Backends for tests of single operations, which need no model's files."""

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from planish.model.architecture.config import ModelConfig
from planish.model.architecture.hf_config.rope_config import RopeConfig
from planish.model.decoder.base_decoder import BaseDecoder
from planish.model.decoder.decoder import Decoder
from planish.model.kernels.choose import choose_backend, fastest_backend, reference_backend
from planish.model.kernels.interface.backend import Backend
from planish.model.layers.quantization import check_quantizable
from planish.model.layers.row_tiling import RowTiling
from planish.model.sources.weights import load_weights

CPU = torch.device("cpu")
AnyDecoder = TypeVar("AnyDecoder", bound=BaseDecoder)
CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(10000.0, None),
    max_context=512,
    tied_head=True,
    qk_norm=True,
    qkv_bias=False,
    eos_token_ids=(),
)


def backend_of(
    dtype: torch.dtype = torch.float32, device: torch.device = CPU, **changes: int
) -> Backend:
    """Return the backend of this machine for a small model; `changes`: fields of its config."""
    return choose_backend(replace(CONFIG, **changes), dtype, device, deterministic=False)


def torch_backend(
    dtype: torch.dtype = torch.float32, device: torch.device = CPU, **changes: int
) -> Backend:
    """Return the reference implementation for the same model."""
    return reference_backend(replace(CONFIG, **changes), dtype, device)


def load_on(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool | None = False,
    quantize: str | None = None,
) -> Decoder:
    """Load the model in `directory` with the fastest kernels of this machine."""
    config = ModelConfig.from_directory(directory)
    check_quantizable(config, quantize)
    backend = choose_backend(config, dtype, device, deterministic)
    return Decoder(load_weights(directory, config), backend, quantize)


def with_tiling(decoder: AnyDecoder, tiling: RowTiling | None) -> AnyDecoder:
    """Return the same decoder with a backend that uses this row tiling."""
    decoder_copy, backend = copy(decoder), decoder.backend
    decoder_copy.backend = fastest_backend(
        backend.config, backend.dtype, backend.device, backend.families, tiling
    )
    return decoder_copy
