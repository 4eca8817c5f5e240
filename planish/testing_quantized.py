"""Quantized checkpoints of tiny random models for tests (see testing.py)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from planish.testing import save_weights


def use_mxfp4(directory: Path) -> Path:
    """Replace the experts' matrices of a gpt_oss model by random ones in mxfp4. Return `directory`.

    The model must be a single file.
    """
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if ".experts." not in name or name.endswith("_bias"):
            tensors[name] = tensor
            continue
        experts, fan_in, fan_out = tensor.shape
        shape = (experts, fan_out, fan_in // 32)
        # With these scales, the numbers are as large as the other weights.
        scales = torch.randint(121, 124, shape, generator=generator)
        blocks = torch.randint(256, (*shape, 16), generator=generator)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
        tensors[f"{name}_blocks"] = blocks.to(torch.uint8)
    return _save_quantized(directory, tensors, {"quant_method": "mxfp4"})


def use_fp8(
    directory: Path, config: Mapping[str, Any], block: tuple[int, int] | None, scale: str
) -> Path:
    """Store the linears of a model's layers in fp8, with their scales. Return `directory`.

    The model must be a single file. `config`: the `quantization_config`. `block`: the numbers of
    outputs and inputs that share a scale; None: all of a weight. `scale`: the name of the scales,
    "weight_scale_inv" or "weight_scale".
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        height, width = block or tensor.shape
        # With one scale per output channel, a block is as wide as the weight.
        width = min(width, tensor.shape[1])
        rows, columns = (
            -(-size // part) for size, part in zip(tensor.shape, (height, width), strict=True)
        )
        padded = torch.zeros(rows * height, columns * width)
        padded[: tensor.shape[0], : tensor.shape[1]] = tensor.float()
        blocks = padded.view(rows, height, columns, width)
        scales = (blocks.abs().amax((1, 3)) / 448).bfloat16()
        codes = (blocks / scales.float()[:, None, :, None]).to(torch.float8_e4m3fn)
        codes = codes.view(padded.shape)[: tensor.shape[0], : tensor.shape[1]]
        tensors[name] = codes.contiguous()
        module = name.removesuffix("weight")
        tensors[module + scale] = scales if block is not None else scales.view(())
        tensors[f"{module}input_scale"] = torch.ones(())
    return _save_quantized(directory, tensors, config)


def _save_quantized(
    directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> Path:
    save_weights(directory, tensors)
    path = directory / "config.json"
    fields = json.loads(path.read_text()) | {"quantization_config": dict(config)}
    path.write_text(json.dumps(fields, indent=2))
    return directory
