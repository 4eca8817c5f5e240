"""Random weights in each scheme of quantization."""

import torch

from planish.model.layers.quantization import Fp8Weight, Mxfp4Weight, QuantizedWeight, quantize

FAN_IN = 192


def weights_of(
    scheme: str, sizes: list[int], dtype: torch.dtype, device: torch.device
) -> list[QuantizedWeight]:
    """Return weights [size, FAN_IN]. `scheme`: also "fp8", "fp8 blocks" or "fp8 channels"."""
    generator = torch.Generator().manual_seed(0)
    found: list[QuantizedWeight] = []
    for size in sizes:
        weight = torch.randn(size, FAN_IN, generator=generator).to(device, dtype)
        if scheme.startswith("fp8"):
            codes = (weight.float() * 60).to(torch.float8_e4m3fn)
            grids = {"fp8 blocks": (-(-size // 128), 2), "fp8 channels": (size, 1), "fp8": (1, 1)}
            scales = torch.rand(grids[scheme], generator=generator).to(device) / 60
            found.append(Fp8Weight.from_stored(codes, scales, (128, 128)))
        elif scheme == "mxfp4":
            codes = torch.randint(256, (size, FAN_IN // 2), generator=generator)
            exponents = torch.randint(120, 128, (size, FAN_IN // 32), generator=generator)
            found.append(
                Mxfp4Weight(codes.to(device, torch.uint8), exponents.to(device, torch.uint8))
            )
        else:
            found.append(quantize(weight, scheme))
    return found
