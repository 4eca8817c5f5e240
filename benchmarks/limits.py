"""The limit of a work on this machine: its matrix products alone, one after the other, as fast as
torch does them.

    python benchmarks/compare.py name=limits peers=limit works=all

It is a peer like the others (peers/serving.py), so that it is measured in the same run. What it
times are the products of the base model's linears that the work cannot do without, in bf16 (in
float32 on a CPU that has no instructions for it) with distinct weights for every layer, by the
fastest of torch's ways for each shape:

* decoding: at every step one product a linear for all running samples, and the head;
* prompts: every distinct token once, what prompts share once for all, no head;
* training: forward, gradients with respect to inputs but none with respect to base weights, LoRA's
  own products, and the head forward and backward on the distinct scored rows. Every distinct token
  once: what sequences share is shared;
* one sequence alone: reading the weights once a token at the bandwidth that memory was measured to
  have;
* an iteration: its rollouts (without the adapter's products) and its training.

Attention, norms, rotations, sampling and all else count nothing here, so no implementation reaches
it. A pass through all layers is timed a few times, and the median multiplied by the number of
passes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from peers.serving import Peer, quickest_dtype, serve
from torch import Tensor

from planish.model.config import ModelConfig
from planish.model.lora import LAYER_SITES, linear_shape

REPEATS = 3
RANK = 32
TRIED_LAYERS = 6
"""Of which torch's ways are compared: more weights than a cache holds."""
ROW_TILES = (512, 1024, 2048)
"""Rows of one product, where a work has more rows than that; the best is taken."""
HEAD_COLUMNS = 8192
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BANDWIDTH_BYTES = 1 << (30 if DEVICE.type == "cpu" else 32)
"""More than any cache holds, and on a GPU enough that starting a kernel counts little."""

Product = Callable[[Tensor], Any]


def load(path: str) -> Peer:
    limit = Limit(ModelConfig.from_directory(path))
    works = {
        "W1": limit.rollouts,
        "W1b": limit.alone,
        "W1c": limit.rollouts,
        "W2": limit.training,
        "W3": limit.iteration,
    }
    return Peer(
        {name: partial(answer, run) for name, run in works.items()}, {"torch": torch.__version__}
    )


def answer(run: Callable[[Mapping[str, Any]], float], work: Mapping[str, Any]) -> dict[str, Any]:
    with torch.inference_mode():
        return {"seconds": run(work)}


@dataclass(frozen=True)
class Counts:
    """Rows of products that a work needs."""

    samples: int
    prompt_rows: int
    """Distinct tokens of prompts."""
    answer_rows: int
    """Tokens of answers that are inputs: all but the last of each."""
    scored_rows: int
    """Distinct rows from which a token of an answer is predicted: the last of a prompt is one row
    for all of its samples.
    """

    @classmethod
    def of(cls, work: Mapping[str, Any]) -> Counts:
        prompts, shared = work["prompts"], work["shared_tokens"]
        samples = len(prompts) * work["samples"]
        answer_rows = samples * (work["new_tokens"] - 1)
        own = sum(len(prompt) - shared for prompt in prompts)
        return cls(samples, shared + own, answer_rows, answer_rows + len(prompts))


class Limit:
    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._parts = [[linear_shape(config, name) for name in site] for site in LAYER_SITES]
        """(out, in) of the linears of each site; those of one site are one product."""
        shapes = [(sum(out for out, _ in parts), parts[0][1]) for parts in self._parts]
        self._weights = [
            [random_matrix(*shape) for _ in range(config.num_layers)] for shape in shapes
        ]
        self._head = random_matrix(config.vocab_size, config.hidden_size)
        self._forward = cache(lambda rows: [fastest(weights, rows) for weights in self._weights])
        self._backward = cache(
            lambda rows: [
                fastest([w.t().contiguous() for w in weights], rows) for weights in self._weights
            ]
        )
        self._head_forward = cache(lambda rows: fastest([self._head], rows, HEAD_COLUMNS))
        self._head_backward = cache(lambda rows: fastest([self._head.t().contiguous()], rows))

    def rollouts(self, work: Mapping[str, Any]) -> float:
        counts = Counts.of(work)
        step = self.layers_seconds(counts.samples) + self._head_seconds(counts.samples)
        return (work["new_tokens"] - 1) * step + self._prompts(work)

    def alone(self, work: Mapping[str, Any]) -> float:
        weights = [w for site in self._weights for w in site] + [self._head]
        read = sum(w.numel() * torch.bfloat16.itemsize for w in weights) / read_bandwidth()
        return (work["new_tokens"] - 1) * read + self._prompts(work)

    def training(self, work: Mapping[str, Any]) -> float:
        counts = Counts.of(work)
        layers = over_rows(counts.prompt_rows + counts.answer_rows, self._training_seconds)
        return layers + over_rows(counts.scored_rows, self._head_training_seconds)

    def iteration(self, work: Mapping[str, Any]) -> float:
        return self.rollouts(work) + self.training(work)

    def _prompts(self, work: Mapping[str, Any]) -> float:
        """The prompts, and the head for the first token of the answers to each."""
        return over_rows(Counts.of(work).prompt_rows, self.layers_seconds) + self._head_seconds(
            len(work["prompts"])
        )

    def layers_seconds(self, rows: int) -> float:
        """Of the layers' products, forward, for so many rows."""
        return seconds(self._runner(rows, self._forward(rows)))

    def _head_seconds(self, rows: int) -> float:
        return seconds(
            self._applied(self._head_forward(rows), random_matrix(rows, self._config.hidden_size))
        )

    def _training_seconds(self, rows: int) -> float:
        passes = [
            *self._runner(rows, self._forward(rows)),
            *self._runner(rows, self._backward(rows), is_backward=True),
        ]
        lora = [partial(lora_products, rows, parts) for parts in self._parts]
        return seconds(passes) + self._config.num_layers * sum(seconds([site()]) for site in lora)

    def _head_training_seconds(self, rows: int) -> float:
        grad = random_matrix(rows, self._config.vocab_size)
        return self._head_seconds(rows) + seconds(self._applied(self._head_backward(rows), grad))

    def _runner(
        self, rows: int, products: Sequence[Sequence[Product]], is_backward: bool = False
    ) -> list[Callable[[], Any]]:
        """Every site of every layer once, in their order."""
        widths = [weights[0].shape[0 if is_backward else 1] for weights in self._weights]
        inputs = [random_matrix(rows, width) for width in widths]
        return [
            partial(product, x)
            for layer in zip(*products, strict=True)
            for product, x in zip(layer, inputs, strict=True)
        ]

    def _applied(self, products: Sequence[Product], x: Tensor) -> list[Callable[[], Any]]:
        return [partial(product, x) for product in products]


def over_rows(rows: int, of_tile: Callable[[int], float]) -> float:
    """Seconds for all rows, in the tiles that are best for this."""
    tiles = [tile for tile in ROW_TILES if tile < rows] or [rows]
    return min(of_tile(tile) * rows / tile for tile in tiles)


def fastest(weights: Sequence[Tensor], rows: int, columns: int | None = None) -> list[Product]:
    """For each weight [out, in] the function of x [rows, in] that gives x @ weight.T: of torch's
    ways the fastest over all of them.
    """
    x = random_matrix(rows, weights[0].shape[1])

    def tried(way: Callable[[Tensor], Product]) -> float:
        return seconds([partial(way(weight), x) for weight in weights[:TRIED_LAYERS]])

    best = min(ways(weights[0], rows, columns), key=tried)
    return [best(weight) for weight in weights]


def ways(weight: Tensor, rows: int, columns: int | None) -> Iterator[Callable[[Tensor], Product]]:
    """Each makes the product of a weight of this shape."""
    yield plain
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        yield partial(prepacked, rows=rows)
    if columns is not None and columns < weight.shape[0]:
        yield partial(in_columns, columns=columns)


def plain(weight: Tensor) -> Product:
    return lambda x: F.linear(x, weight)


def prepacked(weight: Tensor, rows: int) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def in_columns(weight: Tensor, columns: int) -> Product:
    """A product as large as the head's is faster in pieces, of which each is used before the next."""
    return partial(each_part, parts=weight.split(columns))


def each_part(x: Tensor, parts: Sequence[Tensor]) -> None:
    for part in parts:
        F.linear(x, part)


def lora_products(rows: int, parts: Sequence[tuple[int, int]]) -> Callable[[], None]:
    """Forward and backward of the adapters of the linears that read one input."""
    fan_in = parts[0][1]
    x, a = random_matrix(rows, fan_in), random_matrix(len(parts) * RANK, fan_in)
    bs = [random_matrix(out, RANK) for out, _ in parts]
    outs = [random_matrix(rows, out) for out, _ in parts]

    def run() -> None:
        lows = F.linear(x, a).chunk(len(parts), 1)
        grads = []
        for low, b, out in zip(lows, bs, outs, strict=True):
            torch.mm(low, b.t())
            grads.append(out @ b)
            torch.mm(out.t(), low)
        grad = torch.cat(grads, 1)
        torch.mm(grad.t(), x)
        torch.mm(grad, a)

    return run


def seconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Of all calls, one after the other: the median of some times, after one that is not counted."""
    times = []
    for _ in range(REPEATS + 1):
        synchronize()
        start = time.perf_counter()
        for call in calls:
            call()
        synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def synchronize() -> None:
    """Returns when the GPU, if there is one, has done what it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def read_bandwidth(size: int = BANDWIDTH_BYTES) -> float:
    """Bytes a second, by the fastest of torch's ways to read memory that no cache holds."""
    x = torch.ones(size // 4, device=DEVICE)
    readers = (
        partial(torch.sum, x),
        partial(torch.amax, x),
        partial(torch.dot, x[: x.numel() // 2], x[x.numel() // 2 :]),
    )
    return size / min(seconds([reader]) for reader in readers)


def random_matrix(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=quickest_dtype(), device=DEVICE).normal_(0, 0.02)


if __name__ == "__main__":
    serve(load)
