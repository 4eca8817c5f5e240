"""Models with random weights in the shapes of known models. They take as much time and memory as
those and need no download.

A directory is an ordinary Hugging Face one in bf16. It is created once in a minute or less, and is
complete or absent. Matrices have standard deviation 1 / sqrt(in), so every matmul preserves the
scale of its input. The logits then vary like a standard normal distribution, so samples do not
settle on a few tokens. The tokenizer is a byte tokenizer, and most ids have no text.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, Qwen3Config, Qwen3MoeConfig

from planish.model.architecture.config import ModelConfig
from planish.model.architecture.weight_shapes import expected_shapes
from planish.model.sources.weights import INDEX_FILE
from planish.testing import EOS_TOKEN_ID, save_byte_tokenizer

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    "Qwen3-30B-A3B-slice": {
        "hidden_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 8192,
        "tie_word_embeddings": False,
    },
    "tiny-experts": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}
"""Fields of config.json. "tiny" and "tiny-experts" are for quick checks on a CPU. The slice has two
layers and half of the experts of Qwen3-30B-A3B.
"""
MAX_CONTEXT = 40960
ROPE_THETA = 1e6
SHARD_BYTES = 2 << 30
WRITERS = 4
"""Shards that are made at once. Each takes twice its size in memory while it is written."""


def random_model(name: str, home: Path, device: torch.device) -> Path:
    """Return the directory of a model of SHAPES below `home`. Creates it if necessary, with random
    numbers from `device`.
    """
    directory = home / name
    if directory.is_dir():
        return directory
    unfinished = directory.with_name(f".{name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    _write_config(unfinished, SHAPES[name])
    _write_weights(unfinished, expected_shapes(ModelConfig.from_directory(unfinished)), device)
    save_byte_tokenizer(unfinished)
    return unfinished.rename(directory)


def num_bytes(name: str) -> int:
    """Return the bytes of the weights of a model of SHAPES."""
    with config_directory(name) as directory:
        return sum(map(_bytes, expected_shapes(ModelConfig.from_directory(directory)).values()))


@contextmanager
def config_directory(name: str) -> Iterator[Path]:
    """Yield a temporary directory with the config of a model of SHAPES, without weights."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        _write_config(directory, SHAPES[name])
        yield directory


def _write_config(directory: Path, shape: Mapping[str, Any]) -> None:
    """Write config.json and generation_config.json of a model in one of SHAPES."""
    has_experts = "num_experts" in shape
    config = (Qwen3MoeConfig if has_experts else Qwen3Config)(
        **shape,
        max_position_embeddings=MAX_CONTEXT,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=256,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM" if has_experts else "Qwen3ForCausalLM"],
    )
    config.save_pretrained(directory)
    GenerationConfig(eos_token_id=EOS_TOKEN_ID, pad_token_id=256).save_pretrained(directory)


def _write_weights(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], device: torch.device
) -> None:
    shards = _shards(shapes)
    files = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]

    def write(file: str, names: Sequence[str]) -> None:
        tensors = {name: _random_tensor(name, shapes[name], device) for name in names}
        save_file(tensors, directory / file, metadata={"format": "pt"})

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, files, shards))
    index = {
        "metadata": {"total_size": sum(map(_bytes, shapes.values()))},
        "weight_map": {
            name: file for file, names in zip(files, shards, strict=True) for name in names
        },
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2))


def _shards(shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """Divide the names into shards of about SHARD_BYTES each."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        if size >= SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _bytes(shape)
    return shards


def _bytes(shape: tuple[int, ...]) -> int:
    return 2 * math.prod(shape)


def _random_tensor(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a tensor on the CPU. The numbers are always the same on one kind of device; norm
    scales are 1.
    """
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(
        int.from_bytes(name.encode(), "little") % (1 << 63)
    )
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return tensor.normal_(0, shape[1] ** -0.5, generator=generator).cpu()
