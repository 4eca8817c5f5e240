"""The sampler's passes on a GPU: a decoding step is a CUDA graph, recorded once for each of a few
numbers of rows and launched as a whole.

A step is some hundreds of kernels of a few microseconds each; launched one by one from Python they
take several times as long as they run. A graph names addresses and sizes once and for all, so
everything that changes from step to step lies in tables that keep their places: tokens, positions,
who attends to what (gpu_attention.py) and whose adapter is added where (gpu_adapters.py). Rows that
a step has not are computed and thrown away; they see no keys.

Sums depend on the number of rows and on how attention is cut, as everywhere on a GPU: the last bits
of a logprob depend on the batch. With deterministic=True the sampler runs PlainPasses instead.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from planish.engine.gpu_adapters import AdapterTables
from planish.engine.gpu_attention import DecodeTables, GpuPrefill, PoolBases
from planish.engine.heap import let_go
from planish.engine.kv_cache import KVPools, KVShape
from planish.engine.passes import Rows
from planish.engine.sampling_attention import PrefillSpan
from planish.engine.sending import on_device
from planish.engine.settings import head_shape
from planish.model.decoder import Decoder
from planish.model.head import base_product
from planish.model.lora import AdapterRows
from planish.native import kernels

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of rows that graphs are recorded for, up to the largest batch; beyond these, its
multiples of 256.
"""

_RECORDING = threading.Lock()
"""torch records one graph at a time in a process, and waits for the whole GPU before, which another
recording does not survive.
"""

Step = Callable[[], tuple[Tensor, Tensor]]
"""Hidden states and logits of what the tables say."""


class GraphPasses:
    def __init__(
        self, decoder: Decoder, shape: KVShape, max_batch: int, prefill_tokens: int
    ) -> None:
        config, device = decoder.config, decoder.device
        self._decoder = decoder
        self._sizes = graph_sizes(max_batch)
        self._bases = PoolBases(shape, config.max_context)
        self._attention = DecodeTables(self._bases, self._sizes[-1], config.num_heads)
        self._adapters = AdapterTables(config, decoder.dtype, device, self._sizes[-1], max_batch)
        self._prefill_adapters = AdapterTables(
            config, decoder.dtype, device, prefill_tokens, max_batch
        )
        self._places = torch.zeros(2, self._sizes[-1], dtype=torch.int64, device=device)
        self._logits: Tensor | None = None
        """Of every step: as each graph's own they would take its rows times the vocabulary, for
        good.
        """
        self._steps: dict[tuple[int, bool, bool], Step] = {}
        heads = head_shape(config, decoder.dtype)
        records = (
            device.type == "cuda"
            and kernels.wants_graphs()
            and kernels.triton_attends("graphs", heads, device)
        )
        self.recorder = GraphRecorder(device) if records else None
        """None: steps run eagerly, kernel by kernel."""

    @staticmethod
    def serve(decoder: Decoder) -> bool:
        """Whether the GPU's kernels take this model."""
        heads = head_shape(decoder.config, decoder.dtype)
        return all(
            kernels.triton_attends(family, heads, decoder.device)
            for family in ("attention", "lora")
        )

    def multiple(self, adapters: int) -> int:
        return 1

    def prefill(self, rows: Rows, spans: Sequence[PrefillSpan]) -> Tensor:
        tokens, positions = on_device(
            [rows.tokens, rows.positions], torch.int64, self._decoder.device
        )
        adapters = _adapted(rows)
        self._prefill_adapters.fill(adapters)
        given = self._prefill_adapters if adapters else ()
        attention = GpuPrefill(spans, self._bases, self._decoder.config.num_heads)
        return self._decoder.hidden(tokens, positions, attention, given)

    def decode(
        self, rows: Rows, row_of: dict[int, int], prompts: KVPools, samples: KVPools
    ) -> tuple[Tensor, Tensor]:
        count = len(rows.tokens)
        size = self._sizes[bisect_left(self._sizes, count)]
        adapters = _adapted(rows)
        self._places[:, :count] = on_device(
            [rows.tokens, rows.positions], torch.int64, self._places.device
        )
        self._attention.fill(row_of, prompts, samples)
        self._adapters.fill(adapters)
        kind = (
            size,
            bool(adapters),
            any(a.weights is not None and a.weights.head is not None for a in adapters),
        )
        if kind not in self._steps:  # adapters of layers alone are recorded when first met
            self._steps[kind] = self._recorded(*kind)
        hidden, logits = self._steps[kind]()
        return hidden[:count], logits[:count]

    @torch.inference_mode()
    def record(self) -> None:
        """Record the graphs of all sizes, the largest first: without adapters, and with adapters of
        layers and head. A size that is recorded when it is first met would stop all samples for a
        tenth of a second or more. If one fails, steps run eagerly, and a warning says so.

        Before the first pass: the tables name no sample, so a step touches no keys and values.
        """
        if self.recorder is None:
            return
        for size in reversed(self._sizes):
            for adapted in (False, True):
                try:
                    self._steps[size, adapted, adapted] = self._recorded(size, adapted, adapted)
                except RuntimeError as error:
                    let_go(error)
                    self._steps.clear()
                    self.recorder = None
                    reason = str(error).strip().split("\n")[0]
                    logging.getLogger(__name__).warning(
                        "decoding steps run without CUDA graphs, slower: recording one of %d rows "
                        "failed (%s). PLANISH_GRAPHS=0 silences this",
                        size,
                        reason,
                    )
                    return

    def rest(self) -> None:
        self._adapters.fill(())
        self._prefill_adapters.fill(())

    def _recorded(self, size: int, adapted: bool, head_adapted: bool) -> Step:
        tokens, positions = self._places[:, :size]
        if self._logits is None:
            vocab, device = self._decoder.config.vocab_size, self._decoder.device
            self._logits = torch.empty(self._sizes[-1], vocab, dtype=torch.float32, device=device)
        logits = self._logits[:size]

        def step() -> tuple[Tensor, Tensor]:
            given = self._adapters if adapted else ()
            hidden = self._decoder.hidden(tokens, positions, self._attention, given)
            logits.copy_(base_product(hidden, self._decoder.head))
            if head_adapted:
                self._adapters.add_head_(hidden, logits)
            return hidden, logits

        return step if self.recorder is None else self.recorder.recorded(step)


def graph_sizes(max_batch: int) -> list[int]:
    """The numbers of rows that a step may have, rising; the last holds the largest batch."""
    sizes = [size for size in _SIZES if size < max_batch]
    sizes += range(_SIZES[-1] + 256, max_batch, 256)
    return [*sizes, max_batch]


def _adapted(rows: Rows) -> list[AdapterRows]:
    return [adapter for adapter in rows.layout.adapters if adapter.weights is not None]


class GraphRecorder:
    """Records steps as CUDA graphs of one GPU, which share memory: what is computed on the way is
    overwritten by the next that is launched.
    """

    def __init__(self, device: torch.device) -> None:
        # Not torch's own, which belongs to whichever GPU was the first to record.
        self._stream = torch.cuda.Stream(device)
        self._memory: Any = None

    def recorded(self, step: Step) -> Step:
        """`step`, to be launched as a whole. It returns the same tensors each time."""
        with _RECORDING:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            # Torch's own context of a recording that fails may leave its stream the current one;
            # this one does not.
            with torch.cuda.stream(self._stream):
                # compiles its kernels and has libraries make their workspaces, which must not
                # happen while it is recorded
                step()
                graph = torch.cuda.CUDAGraph()
                # A pool that a failed recording leaves without graphs is none that torch takes
                # again.
                memory = self._memory or torch.cuda.graph_pool_handle()
                try:
                    # Other threads of this process may use the GPU meanwhile: only what this one
                    # does is recorded.
                    with torch.cuda.graph(
                        graph, pool=memory, stream=self._stream, capture_error_mode="thread_local"
                    ):
                        out = step()
                except BaseException:
                    self._end_pool(memory)
                    raise
                self._memory = memory

        def launch() -> tuple[Tensor, Tensor]:
            graph.replay()
            return out

        return launch

    def _end_pool(self, memory: Any) -> None:
        """After a recording that failed: torch keeps its pool open, and with it all that was
        allocated (pytorch issue 190308). A pool with other graphs is closed, but not given back.
        """
        index = self._stream.device.index
        # Which of these are due depends on how far the recording came.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, memory)
        if memory != self._memory:
            with suppress(RuntimeError):
                torch._C._cuda_releasePool(index, memory)
