"""The quantization schemes of base weights, and their reference implementation in torch.

A quantized weight has codes of 8 or 4 bits and float32 scales. Dequantizing it gives a weight in
the model's dtype. Every matmul gives bit for bit the result of a matmul with that dequantized
weight. So a quantized model is exactly the model of its dequantized weights. Sampler and trainer
read the same codes.

The linears of the decoder layers are quantized. Embeddings, head, norms, biases and routers keep
the model's dtype.

int8 (`Int8Weight`): each output channel has the scale max |w| / 127, and the code of a weight is
the nearest integer to w / scale.

nf4 (`Nf4Weight`, Dettmers et al. 2023): each output channel is divided into blocks of 64 weights.
The scale of a block is its max |w|. The code of a weight is the index of the value nearest to w /
scale, among 16 fixed values. The scales are quantized too. The mean of all scales is subtracted,
and groups of 256 scales share a float32 scale of their own. Their codes are indices into 256 fixed
values. Codes and values are those of bitsandbytes.

mxfp4 (`Mxfp4Weight`, Open Compute Project 2023): the experts of gpt-oss are published in this
scheme, and planish reads their codes from the checkpoint. It quantizes no weights with mxfp4
itself. The code of a weight is the index of one of 16 fixed values, and each block of 32 inputs of
an output channel has a power of 2 as its scale. bf16 represents the dequantized weights exactly.

fp8 (`Fp8Weight`): some checkpoints store their linears in 8-bit floats, float8_e4m3fn, with one
scale for each weight, output channel or block (architecture/hf_config/fp8_config.py). planish
quantizes no weights with fp8 itself.

Shapes: out, in: outputs and inputs of a linear.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from planish.errors import UserError
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.weight_sizes import NF4_BLOCK_SIZE, SCHEMES, quantized_shapes

_MIN_SCALE = 2.0**-100
"""Channels with smaller scales become zero, because kernels do not support denormal numbers."""
_DEQUANTIZED_AT_ONCE = 1 << 23
"""The maximum number of weights that `dequantized` dequantizes at a time."""
DEQUANTIZATION_BYTES = 16 * _DEQUANTIZED_AT_ONCE
"""The maximum bytes of temporary tensors in `dequantized`, in addition to its result.

A weight takes at most 16 bytes there: its code as an integer, its value in float32 and its scale.
"""
_SCALE_GROUP_SIZE = 256
"""The number of nf4 scales that share a scale of their own."""
_CPU = torch.device("cpu")
NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The values of the nf4 codes: quantiles of a normal distribution, and exactly 0."""
_POSITIVE_MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_VALUES = (*_POSITIVE_MXFP4, *(-value for value in _POSITIVE_MXFP4))
"""The values of the mxfp4 codes: numbers with one sign, two exponent and one mantissa bit."""


class QuantizedWeight(ABC):
    """A quantized weight [out, in]."""

    codes: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight: (out, in)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def row_multiple(self) -> int:
        """The number of outputs to a multiple of which `rows` can divide the weight."""
        return 1

    @abstractmethod
    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """Return the outputs start .. stop - 1 as views. `start`: a multiple of `row_multiple`."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in]: value times scale in float32, rounded to `dtype`."""


class FourBitWeight(QuantizedWeight):
    """A weight [out, in] with codes of 4 bits, which are indices into 16 values.

    One byte of `codes` [out, in / 2] has the codes of two adjacent inputs.
    """

    is_high_first: ClassVar[bool]
    """Whether the higher four bits of a byte are the code of the first of the two inputs."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight: (out, in)."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    @abstractmethod
    def scales(self) -> Tensor:
        """The scales of the blocks of inputs: float32 [out, blocks]."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in `dtype`."""
        high, low, scales = self.codes >> 4, self.codes & 15, self.scales
        codes = torch.stack((high, low) if self.is_high_first else (low, high), 2).int()
        values = four_bit_values(type(self), codes.device)[codes.view(-1)]
        blocks = values.view(*scales.shape, -1)
        return blocks.mul_(scales[..., None]).view(self.shape).to(dtype)


@dataclass(frozen=True)
class Int8Weight(QuantizedWeight):
    """A weight [out, in] with codes of 8 bits and one scale per output channel."""

    codes: Tensor
    """int8 [out, in], between -127 and 127."""
    scales: Tensor
    """float32 [out]."""

    @classmethod
    def quantize(cls, weight: Tensor) -> Int8Weight:
        """Quantize a weight [out, in] of any float dtype."""
        weight_float32 = weight.float()
        scales = weight_float32.abs().amax(1) / 127
        scales = scales.where(scales >= _MIN_SCALE, 0.0)
        codes = (weight_float32 / scales.where(scales > 0, 1.0)[:, None]).round_().clamp_(-127, 127)
        return cls(codes.where(scales[:, None] > 0, 0.0).to(torch.int8), scales)

    def rows(self, start: int, stop: int) -> Int8Weight:
        """Return the outputs start .. stop - 1 as views."""
        return Int8Weight(self.codes[start:stop], self.scales[start:stop])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in `dtype`."""
        return self.codes.float().mul_(self.scales[:, None]).to(dtype)


@dataclass(frozen=True)
class Nf4Weight(FourBitWeight):
    """A weight [out, in] with codes of 4 bits, and quantized scales of blocks of 64 inputs."""

    is_high_first = True
    codes: Tensor
    """uint8 [out, in / 2]."""
    scale_codes: Tensor
    """uint8 [out, in / 64]: indices into `dynamic_values`."""
    scale_scales: Tensor
    """float32 [blocks / 256, rounded up]: the scale of each group of 256 scales, in block order."""
    offset: Tensor
    """float32, a scalar: the mean of the scales."""

    @classmethod
    def quantize(cls, weight: Tensor) -> Nf4Weight:
        """Quantize a weight [out, in] of any float dtype. `in` must be a multiple of 64."""
        blocks = weight.float().view(len(weight), -1, NF4_BLOCK_SIZE)
        maxima = blocks.abs().amax(2)
        codes = _nearest_index(
            _divide_by_max(blocks, maxima), four_bit_values(cls, weight.device)
        ).view(len(weight), -1, 2)
        # In float64, the mean does not depend on the number of threads. bitsandbytes computes it in
        # float32, so its last bit depends on the device.
        offset = maxima.double().mean().float()
        centred_scales = (maxima - offset).view(-1)
        groups = F.pad(centred_scales, (0, -len(centred_scales) % _SCALE_GROUP_SIZE)).view(
            -1, _SCALE_GROUP_SIZE
        )
        scale_scales = groups.abs().amax(1)
        scale_codes = _nearest_index(
            _divide_by_max(groups, scale_scales), dynamic_values(weight.device)
        )
        return cls(
            codes[..., 0] << 4 | codes[..., 1],
            scale_codes.view(-1)[: len(centred_scales)].view(maxima.shape),
            scale_scales,
            offset,
        )

    @property
    def row_multiple(self) -> int:
        """The number of outputs whose scales are whole groups."""
        return _SCALE_GROUP_SIZE // gcd(_SCALE_GROUP_SIZE, self.scale_codes.shape[1])

    def rows(self, start: int, stop: int) -> Nf4Weight:
        """Return the outputs start .. stop - 1 as views. `start`: a multiple of `row_multiple`."""
        blocks = self.scale_codes.shape[1]
        first, last = start * blocks, stop * blocks
        groups = slice(first // _SCALE_GROUP_SIZE, -(-last // _SCALE_GROUP_SIZE))
        return Nf4Weight(
            self.codes[start:stop],
            self.scale_codes[start:stop],
            self.scale_scales[groups],
            self.offset,
        )

    @property
    def scales(self) -> Tensor:
        """The dequantized scales of the blocks: float32 [out, in / 64]."""
        values = dynamic_values(self.codes.device)[self.scale_codes.int()].view(-1)
        groups = self.scale_scales[:, None].expand(-1, _SCALE_GROUP_SIZE).reshape(-1)[: len(values)]
        return values.mul_(groups).add_(self.offset).view(self.scale_codes.shape)


@dataclass(frozen=True)
class Mxfp4Weight(FourBitWeight):
    """A weight [out, in] in mxfp4, with the codes and exponents of the checkpoint."""

    is_high_first = False
    codes: Tensor
    """uint8 [out, in / 2]."""
    exponents: Tensor
    """uint8 [out, in / 32]: indices into `mxfp4_scales`."""

    def rows(self, start: int, stop: int) -> Mxfp4Weight:
        """Return the outputs start .. stop - 1 as views."""
        return Mxfp4Weight(self.codes[start:stop], self.exponents[start:stop])

    @property
    def scales(self) -> Tensor:
        """The scales of the blocks: float32 [out, in / 32]."""
        return mxfp4_scales(self.exponents.device)[self.exponents.int()]


@dataclass(frozen=True)
class Fp8Weight(QuantizedWeight):
    """A weight [out, in] in fp8, with the codes and scales of the checkpoint."""

    codes: Tensor
    """float8_e4m3fn [out, in]."""
    scales: Tensor
    """float32 [out / block[0], in / block[1]], rounded up."""
    block: tuple[int, int]
    """The numbers of outputs and inputs that share a scale."""

    @classmethod
    def from_stored(cls, codes: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Fp8Weight:
        """Return the weight with these codes [out, in] and scales of a checkpoint.

        `block`: the block of the checkpoint's layout, which applies if there is neither one scale
        for the weight nor one for each output channel.
        """
        fan_out, fan_in = codes.shape
        if scales.numel() == 1:
            block = (fan_out, fan_in)
        elif scales.numel() == fan_out:
            block = (1, fan_in)
        assert block is not None, "the weights are checked when they are loaded"
        grid = (-(-fan_out // block[0]), -(-fan_in // block[1]))
        return cls(codes, scales.to(codes.device, torch.float32).reshape(grid), block)

    @property
    def row_multiple(self) -> int:
        """The number of outputs that share a scale; 1 if all outputs do."""
        return 1 if self.block[0] >= self.shape[0] else self.block[0]

    def rows(self, start: int, stop: int) -> Fp8Weight:
        """Return the outputs start .. stop - 1 as views. `start`: a multiple of `row_multiple`."""
        height, width = self.block
        scales = self.scales[start // height : -(-stop // height)]
        return Fp8Weight(self.codes[start:stop], scales, (min(height, stop - start), width))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in `dtype`."""
        (fan_out, fan_in), (rows, columns) = self.shape, self.scales.shape
        height, width = self.block
        weight = self.codes.float()
        padding = (0, columns * width - fan_in, 0, rows * height - fan_out)
        if any(padding):
            weight = F.pad(weight, padding)
        weight.view(rows, height, columns, width).mul_(self.scales[:, None, :, None])
        return weight[:fan_out, :fan_in].contiguous().to(dtype)


_QUANTIZE: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": Int8Weight.quantize,
    "nf4": Nf4Weight.quantize,
}


def quantize(weight: Tensor, scheme: str) -> QuantizedWeight:
    """Quantize a weight [out, in]. `scheme`: a name in SCHEMES."""
    return _QUANTIZE[scheme](weight)


def dequantized(weights: Sequence[QuantizedWeight], dtype: torch.dtype) -> Tensor:
    """Return the weights of linears that read the same input as one tensor [out, in].

    Large weights are dequantized a few outputs at a time, so that the temporary tensors take at
    most DEQUANTIZATION_BYTES.
    """
    sizes, fan_in = [weight.shape[0] for weight in weights], weights[0].shape[1]
    if len(weights) == 1 and sizes[0] * fan_in <= _DEQUANTIZED_AT_ONCE:
        return weights[0].dequantize(dtype)
    out = torch.empty(sum(sizes), fan_in, dtype=dtype, device=weights[0].codes.device)
    for weight, part in zip(weights, out.split(sizes), strict=True):
        multiple = weight.row_multiple
        step = max(1, _DEQUANTIZED_AT_ONCE // (multiple * fan_in)) * multiple
        for start in range(0, len(part), step):
            stop = min(start + step, len(part))
            part[start:stop] = weight.rows(start, stop).dequantize(dtype)
    return out


def check_quantizable(config: ModelConfig, scheme: str | None) -> None:
    """Raise UserError if the linears of this model cannot be quantized with `scheme`."""
    if scheme is not None and config.mxfp4_experts:
        raise UserError(
            f"quantize={scheme!r}: the experts of this checkpoint are quantized with mxfp4 "
            "already; omit quantize"
        )
    if scheme != "nf4":
        return
    for name, (_, fan_in) in quantized_shapes(config).items():
        if fan_in % NF4_BLOCK_SIZE:
            raise UserError(
                f"quantize='nf4': {name} has {fan_in} inputs, which is not a multiple of "
                f"{NF4_BLOCK_SIZE}; give quantize='int8'"
            )


# The tables are cached for each device, because a CUDA graph cannot record a copy to the GPU.
@cache
def four_bit_values(scheme: type[QuantizedWeight], device: torch.device) -> Tensor:
    """Return the values of the 16 codes of `Nf4Weight` or `Mxfp4Weight`: float32."""
    return torch.tensor(NF4_VALUES if scheme is Nf4Weight else MXFP4_VALUES, device=device)


@cache
def dynamic_values(device: torch.device = _CPU) -> Tensor:
    """Return the 256 values that the codes of nf4's scales stand for: float32, ascending.

    The values span seven orders of magnitude. Each order of magnitude has twice as many values as
    the next smaller one (Dettmers et al. 2022, as in bitsandbytes).
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        borders = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = (borders[:-1] + borders[1:]) / 2.0
        for sign in (1, -1):
            values += (sign * 10 ** (exponent - 6) * means).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def mxfp4_scales(device: torch.device = _CPU) -> Tensor:
    """Return the 256 scales of mxfp4 blocks: float32, 2 ** (code - 127).

    Scales below 2 ** -125 are 0, because the weights of such a block may be denormal numbers, which
    kernels do not support.
    """
    scales = 2.0 ** (torch.arange(256, dtype=torch.float64) - 127)
    return scales.where(scales >= 2.0**-125, 0.0).float().to(device)


def _divide_by_max(x: Tensor, maxima: Tensor) -> Tensor:
    """Return rows [..., n] divided by their maxima [...], within -1 .. 1."""
    # bitsandbytes multiplies by the reciprocal too. A division would round to other codes.
    return (x * (1.0 / maxima.clamp(min=1e-38))[..., None]).clamp_(-1, 1)


def _nearest_index(x: Tensor, values: Tensor) -> Tensor:
    """Return the index of the nearest of the ascending `values` to each number, as uint8."""
    borders = (values[:-1] + values[1:]) / 2
    return torch.bucketize(x, borders, out_int32=True).to(torch.uint8)


assert tuple(_QUANTIZE) == SCHEMES
