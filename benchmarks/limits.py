"""The lower limit of a workload's time on this machine: its matmuls alone, one after the other, as
fast as torch computes them.

    python benchmarks/compare.py name=limits peers=limit workloads=all

It is a peer like the others (peers/serving.py), so that it is measured in the same run. It times
the matmuls of the base model's linear modules that the workload cannot avoid. They run in bf16 (in
float32 on a CPU without bf16 instructions) with distinct weights for every layer, and with the
fastest of torch's functions for each shape:

* decoding: at every step one matmul per linear module for all running samples, and the head;
* prompts: every distinct token once, shared prefixes once for all prompts, no head;
* training: forward, gradients of inputs but not of base weights, LoRA's own matmuls, and the head
  forward and backward on the distinct scored rows; every distinct token once;
* a single sequence: reading the weights once per token at the measured memory bandwidth;
* an iteration: its rollouts (without the adapter's matmuls) and its training.

Attention, norms, RoPE, sampling and everything else count as zero, so no implementation can reach
the limit. A pass through all layers is timed a few times, and the median is multiplied by the
number of passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from peers.serving import Peer, fastest_dtype, serve
from torch import Tensor

from planish.doctor.gpu import machine_limits
from planish.model.architecture.config import ModelConfig
from planish.model.architecture.linears import distinct_fused_modules, linear_shape

RANK = 32
MAX_COMPARED_LAYERS = 6
"""Layers on which torch's functions are compared: more weights than a cache holds."""
ROW_TILE_SIZES = (512, 1024, 2048)
"""Rows of one matmul, for workloads with more rows. The fastest is used."""
HEAD_COLUMNS = 8192
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BANDWIDTH_BYTES = 1 << (30 if DEVICE.type == "cpu" else 32)
"""More than any cache holds; on a GPU enough that launch time counts little."""

Matmul = Callable[[Tensor], Any]


def load(path: str) -> Peer:
    limit = Limit(ModelConfig.from_directory(path))
    workloads = {
        "W1": limit.rollouts,
        "W1b": limit.single_sample,
        "W1c": limit.rollouts,
        "W2": limit.training,
        "W3": limit.iteration,
    }
    return Peer(
        {name: partial(run_round, run) for name, run in workloads.items()},
        {"torch": torch.__version__},
    )


def run_round(
    run: Callable[[Mapping[str, Any]], float], round_spec: Mapping[str, Any]
) -> dict[str, Any]:
    with torch.inference_mode():
        return {"seconds": run(round_spec)}


@dataclass(frozen=True)
class RowCounts:
    """Numbers of matmul rows that a workload needs."""

    num_samples: int
    prompt_rows: int
    """Distinct tokens of all prompts."""
    answer_rows: int
    """Answer tokens that are inputs: all but the last of each answer."""
    scored_rows: int
    """Distinct rows that predict an answer token. The last row of a prompt counts once for all of
    its samples.
    """

    @classmethod
    def of(cls, round_spec: Mapping[str, Any]) -> RowCounts:
        prompts, shared = round_spec["prompts"], round_spec["shared_tokens"]
        num_samples = len(prompts) * round_spec["samples"]
        answer_rows = num_samples * (round_spec["new_tokens"] - 1)
        num_own_tokens = sum(len(prompt) - shared for prompt in prompts)
        return cls(num_samples, shared + num_own_tokens, answer_rows, answer_rows + len(prompts))


class Limit:
    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._linear_shapes = [
            [linear_shape(config, name) for name in site] for site in distinct_fused_modules(config)
        ]
        """(out, in) of the linears of each site; those of one site are one product."""
        shapes = [
            (sum(out for out, _ in linear_shapes), linear_shapes[0][1])
            for linear_shapes in self._linear_shapes
        ]
        self._weights = [
            [random_matrix(*shape) for _ in range(config.num_layers)] for shape in shapes
        ]
        self._head = random_matrix(config.vocab_size, config.hidden_size)
        self._forward = cache(
            lambda rows: [fastest_matmuls(weights, rows) for weights in self._weights]
        )
        self._backward = cache(
            lambda rows: [
                fastest_matmuls([w.t().contiguous() for w in weights], rows)
                for weights in self._weights
            ]
        )
        self._head_forward = cache(lambda rows: fastest_matmuls([self._head], rows, HEAD_COLUMNS))
        self._head_backward = cache(
            lambda rows: fastest_matmuls([self._head.t().contiguous()], rows)
        )

    def rollouts(self, round_spec: Mapping[str, Any]) -> float:
        counts = RowCounts.of(round_spec)
        step = self.layers_seconds(counts.num_samples) + self._head_seconds(counts.num_samples)
        return (round_spec["new_tokens"] - 1) * step + self._prompts_seconds(round_spec)

    def single_sample(self, round_spec: Mapping[str, Any]) -> float:
        weights = [w for site in self._weights for w in site] + [self._head]
        read_seconds = (
            sum(w.numel() * torch.bfloat16.itemsize for w in weights) / measure_read_bandwidth()
        )
        return (round_spec["new_tokens"] - 1) * read_seconds + self._prompts_seconds(round_spec)

    def training(self, round_spec: Mapping[str, Any]) -> float:
        counts = RowCounts.of(round_spec)
        layers = seconds_for_rows(counts.prompt_rows + counts.answer_rows, self._training_seconds)
        return layers + seconds_for_rows(counts.scored_rows, self._head_training_seconds)

    def iteration(self, round_spec: Mapping[str, Any]) -> float:
        return self.rollouts(round_spec) + self.training(round_spec)

    def _prompts_seconds(self, round_spec: Mapping[str, Any]) -> float:
        """Return the seconds of the prompts, with the head for each prompt's first answer
        tokens.
        """
        return seconds_for_rows(
            RowCounts.of(round_spec).prompt_rows, self.layers_seconds
        ) + self._head_seconds(len(round_spec["prompts"]))

    def layers_seconds(self, rows: int) -> float:
        """Return the seconds of the forward matmuls of all layers for this number of rows."""
        return seconds(self._matmul_calls(rows, self._forward(rows)))

    def _head_seconds(self, rows: int) -> float:
        return seconds(
            self._calls_on(self._head_forward(rows), random_matrix(rows, self._config.hidden_size))
        )

    def _training_seconds(self, rows: int) -> float:
        matmul_calls = [
            *self._matmul_calls(rows, self._forward(rows)),
            *self._matmul_calls(rows, self._backward(rows), is_backward=True),
        ]
        lora_calls = [
            partial(lora_matmuls, rows, linear_shapes) for linear_shapes in self._linear_shapes
        ]
        return seconds(matmul_calls) + self._config.num_layers * sum(
            seconds([lora_call()]) for lora_call in lora_calls
        )

    def _head_training_seconds(self, rows: int) -> float:
        grad = random_matrix(rows, self._config.vocab_size)
        return self._head_seconds(rows) + seconds(self._calls_on(self._head_backward(rows), grad))

    def _matmul_calls(
        self, rows: int, matmuls: Sequence[Sequence[Matmul]], is_backward: bool = False
    ) -> list[Callable[[], Any]]:
        """Every site of every layer once, in their order."""
        widths = [weights[0].shape[0 if is_backward else 1] for weights in self._weights]
        inputs = [random_matrix(rows, width) for width in widths]
        return [
            partial(matmul, x)
            for layer in zip(*matmuls, strict=True)
            for matmul, x in zip(layer, inputs, strict=True)
        ]

    def _calls_on(self, matmuls: Sequence[Matmul], x: Tensor) -> list[Callable[[], Any]]:
        return [partial(matmul, x) for matmul in matmuls]


def seconds_for_rows(rows: int, tile_seconds: Callable[[int], float]) -> float:
    """Return the seconds for all rows, in the fastest tiles."""
    tiles = [tile for tile in ROW_TILE_SIZES if tile < rows] or [rows]
    return min(tile_seconds(tile) * rows / tile for tile in tiles)


def fastest_matmuls(
    weights: Sequence[Tensor], rows: int, columns: int | None = None
) -> list[Matmul]:
    """Return for each weight [out, in] a function of x [rows, in] that computes x @ weight.T, with
    the torch function that is fastest for all of them.
    """
    x = random_matrix(rows, weights[0].shape[1])

    def time_with(factory: Callable[[Tensor], Matmul]) -> float:
        return seconds([partial(factory(weight), x) for weight in weights[:MAX_COMPARED_LAYERS]])

    best_factory = min(matmul_factories(weights[0], rows, columns), key=time_with)
    return [best_factory(weight) for weight in weights]


def matmul_factories(
    weight: Tensor, rows: int, columns: int | None
) -> Iterator[Callable[[Tensor], Matmul]]:
    """Yield functions that make a matmul function of a weight of this shape."""
    yield plain_matmul
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        yield partial(prepacked_matmul, rows=rows)
    if columns is not None and columns < weight.shape[0]:
        yield partial(column_blocks_matmul, columns=columns)


def plain_matmul(weight: Tensor) -> Matmul:
    return lambda x: F.linear(x, weight)


def prepacked_matmul(weight: Tensor, rows: int) -> Matmul:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def column_blocks_matmul(weight: Tensor, columns: int) -> Matmul:
    """A matmul as large as the head's is faster in pieces, one after another."""
    return partial(run_blocks, blocks=weight.split(columns))


def run_blocks(x: Tensor, blocks: Sequence[Tensor]) -> None:
    for block in blocks:
        F.linear(x, block)


def lora_matmuls(rows: int, linear_shapes: Sequence[tuple[int, int]]) -> Callable[[], None]:
    """Return a function with the LoRA matmuls, forward and backward, of modules with one input."""
    fan_in = linear_shapes[0][1]
    x, lora_a = random_matrix(rows, fan_in), random_matrix(len(linear_shapes) * RANK, fan_in)
    lora_bs = [random_matrix(out, RANK) for out, _ in linear_shapes]
    outs = [random_matrix(rows, out) for out, _ in linear_shapes]

    def run() -> None:
        lora_hiddens = F.linear(x, lora_a).chunk(len(linear_shapes), 1)
        grads = []
        for lora_hidden, b, out in zip(lora_hiddens, lora_bs, outs, strict=True):
            torch.mm(lora_hidden, b.t())
            grads.append(out @ b)
            torch.mm(out.t(), lora_hidden)
        grad = torch.cat(grads, 1)
        torch.mm(grad.t(), x)
        torch.mm(grad, lora_a)

    return run


def seconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Return the seconds of all calls, one after the other (see machine_limits.py)."""
    return machine_limits.seconds(calls, DEVICE)


def measure_read_bandwidth(size: int = BANDWIDTH_BYTES) -> float:
    """Return the bytes per second for reading memory (see machine_limits.py)."""
    return machine_limits.read_bandwidth(DEVICE, size)


def random_matrix(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=fastest_dtype(), device=DEVICE).normal_(0, 0.02)


if __name__ == "__main__":
    serve(load)
