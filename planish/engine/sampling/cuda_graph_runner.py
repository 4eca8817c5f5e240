"""The sampler's model runner for GPUs: decoding steps are CUDA graphs.

A decoding step has some hundreds of kernels of a few microseconds each. Launching them one by one
from Python takes several times as long as running them. So a step is recorded as a CUDA graph, once
for each of a few batch sizes, and launched as a whole.

A graph fixes all addresses and sizes. So everything that changes between steps is in tables at
fixed addresses: tokens, positions, the attended ranges (kernels/triton/sampling_attention.py) and
the adapters of the rows (kernels/triton/adapters.py). A batch is padded to the next recorded size.
The padding rows attend to no keys, and their results are discarded.

This model runner is not batch-invariant. The order of sums depends on the number of rows. In
attention, it also depends on how the positions of each slot are divided into pieces. So the last
bits of a logprob depend on the batch. With deterministic=True the sampler uses `EagerRunner`
instead.
"""

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from planish.engine.release_memory import clear_frames
from planish.engine.sampling.plan import StepOutput, StepPlan, tokens_and_positions
from planish.engine.sampling.slots import SampleSlots
from planish.model.decoder.base_decoder import BaseDecoder
from planish.model.device import Device
from planish.model.kernels.triton.adapters import AdapterTables
from planish.model.kernels.triton.families import wants_graphs
from planish.model.kernels.triton.sampling_attention import DecodeTables, GpuPrefill, PoolBases
from planish.model.layers.lora import AdapterRange
from planish.model.sequences.kv_cache import GappedKVPool, KVPool, KVSpec

_BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""The batch sizes that graphs are recorded for, up to `max_batch`. Above the last of these sizes,
the recorded sizes are 256 rows apart (see `graph_sizes`).
"""

_RECORDING_LOCK = threading.Lock()
"""torch can record only one graph at a time per process. Before a recording it synchronizes the
whole GPU, which makes any other recording in progress fail.
"""

DecodeStep = Callable[[], tuple[Tensor, Tensor]]
"""A function that runs a decoding step on the contents of the tables. It returns hidden states and
logits.
"""


class CudaGraphRunner:
    """The model runner for GPUs, with up to three CUDA graphs per batch size.

    One graph is for batches without adapters, one for adapters of the layers only, and one for
    adapters of layers and LM head.
    """

    def __init__(
        self,
        decoder: BaseDecoder,
        kv_spec: KVSpec,
        max_batch: int,
        max_prefill_tokens_per_step: int,
    ) -> None:
        """Allocate the tables.

        The tables have space for `max_batch` rows of a decoding step, and for
        `max_prefill_tokens_per_step` rows of a prefill.
        """
        config, device = decoder.config, decoder.device
        self.pool_class: type[KVPool] = GappedKVPool
        self._decoder = decoder
        self._batch_sizes = graph_sizes(max_batch)
        self._pool_bases = PoolBases(kv_spec, config.max_context)
        self._attention = DecodeTables(
            self._pool_bases, self._batch_sizes[-1], config.num_heads, config.attention_windows
        )
        self._adapters = AdapterTables(
            config, decoder.dtype, device, self._batch_sizes[-1], max_batch
        )
        self._prefill_adapters = AdapterTables(
            config, decoder.dtype, device, max_prefill_tokens_per_step, max_batch
        )
        self._no_adapters = decoder.backend.adapter_batch(())
        self._tokens_and_positions = torch.zeros(
            2, self._batch_sizes[-1], dtype=torch.int64, device=device
        )
        self._logits: Tensor | None = None
        """The logits of every step, in one buffer that all graphs share. Otherwise each graph would
        permanently allocate its own [rows, vocab_size].
        """
        self._steps: dict[tuple[int, bool, bool], DecodeStep] = {}
        uses_graphs = (
            Device(device).is_gpu and wants_graphs() and "graphs" in decoder.backend.families
        )
        self.recorder = GraphRecorder(device) if uses_graphs else None
        """The graph recorder. None: steps run eagerly, kernel by kernel."""

    @staticmethod
    def supports(decoder: BaseDecoder) -> bool:
        """Return whether the GPU kernels support this model."""
        return decoder.backend.supports_graph_runner

    def run(self, plan: StepPlan) -> StepOutput:
        """Run the rows of a plan through the decoder, and store their keys and values.

        A prefill runs eagerly, without a CUDA graph. The results of a decoding step are views of
        buffers that the next step overwrites.
        """
        adapters = [adapter for adapter in plan.layout.adapters if adapter.weights is not None]
        rows = plan.inputs(self._decoder.device)
        if isinstance(plan.slots, SampleSlots):
            return self._decode(rows, plan.slots, adapters)
        self._prefill_adapters.fill(adapters)
        adapter_batch = self._prefill_adapters if adapters else self._no_adapters
        config = self._decoder.config
        if any(span.blocks for span in plan.slots):
            attention = self._decoder.backend.prefill_attention(plan.slots)
        else:
            attention = GpuPrefill(
                plan.slots, self._pool_bases, config.num_heads, config.attention_windows
            )
        tokens, positions = tokens_and_positions(rows)
        return StepOutput(self._decoder.forward(tokens, positions, attention, adapter_batch), None)

    def _decode(
        self, rows: Tensor, slots: SampleSlots, adapters: Sequence[AdapterRange]
    ) -> StepOutput:
        """Run a decoding step. `rows`: the tokens and the positions of T rows, int64 [2, T]."""
        num_rows = rows.shape[1]
        size = self._batch_sizes[bisect_left(self._batch_sizes, num_rows)]
        self._tokens_and_positions[:, :num_rows] = rows
        self._attention.fill(
            slots.first_rows, slots.prompt_pools, slots.sample_pools, slots.row_counts
        )
        self._adapters.fill(adapters)
        graph_key = (
            size,
            bool(adapters),
            any(a.weights is not None and a.weights.head is not None for a in adapters),
        )
        # `record` leaves out batches whose adapters do not adapt the LM head. Their graph is
        # recorded at its first use.
        if graph_key not in self._steps:
            self._steps[graph_key] = self._make_step(*graph_key)
        hidden, logits = self._steps[graph_key]()
        return StepOutput(hidden[:num_rows], logits[:num_rows])

    def row_multiple(self, num_adapters: int) -> int:
        """Return 1: no padding is needed, because the kernels process several adapters at once."""
        return 1

    @torch.inference_mode()
    def record(self) -> None:
        """Record the graphs of all sizes, the largest first.

        Each size is recorded without adapters, and with adapters of layers and head. Recording a
        size at its first use would pause all samples for a tenth of a second or more. If a
        recording fails, all steps run eagerly, and a warning is logged.

        Call this method before the first pass. The tables are empty then, so the recorded steps
        write no keys and values.
        """
        if self.recorder is None:
            return
        for size in reversed(self._batch_sizes):
            for adapted in (False, True):
                try:
                    self._steps[size, adapted, adapted] = self._make_step(size, adapted, adapted)
                except RuntimeError as error:
                    clear_frames(error)
                    self.disable_graphs()
                    reason = str(error).strip().split("\n")[0]
                    logging.getLogger(__name__).warning(
                        "decoding steps run without CUDA graphs, slower: recording the graph for "
                        "%d rows failed (%s). PLANISH_GRAPHS=0 silences this",
                        size,
                        reason,
                    )
                    return

    def disable_graphs(self) -> bool:
        """Run all further steps eagerly, and return whether they were CUDA graphs until now."""
        had_graphs, self.recorder = self.recorder is not None, None
        self._steps.clear()
        return had_graphs

    def release_adapters(self) -> None:
        """Release the adapters that the tables refer to."""
        self._adapters.fill(())
        self._prefill_adapters.fill(())

    def _make_step(self, size: int, adapted: bool, head_adapted: bool) -> DecodeStep:
        """Return a decoding step of `size` rows: a CUDA graph, or an eager function."""
        tokens, positions = self._tokens_and_positions[:, :size]
        if self._logits is None:
            vocab, device = self._decoder.config.vocab_size, self._decoder.device
            self._logits = torch.empty(
                self._batch_sizes[-1], vocab, dtype=torch.float32, device=device
            )
        logits = self._logits[:size]

        def step() -> tuple[Tensor, Tensor]:
            adapter_batch = self._adapters if adapted else self._no_adapters
            hidden = self._decoder.forward(tokens, positions, self._attention, adapter_batch)
            logits.copy_(self._decoder.backend.base_logits(hidden, self._decoder.head))
            if head_adapted:
                self._adapters.add_head_(hidden, logits)
            return hidden, logits

        return step if self.recorder is None else self.recorder.record(step)


def graph_sizes(max_batch: int) -> list[int]:
    """Return the batch sizes that graphs are recorded for, ascending; `max_batch` is the last."""
    sizes = [size for size in _BATCH_SIZES if size < max_batch]
    sizes += range(_BATCH_SIZES[-1] + 256, max_batch, 256)
    return [*sizes, max_batch]


class GraphRecorder:
    """A recorder that turns steps into CUDA graphs of one GPU.

    All its graphs share one memory pool, so each launch may overwrite the results of the launch
    before it.
    """

    def __init__(self, device: torch.device) -> None:
        """Create a recorder with a stream of its own on `device`."""
        # torch's own capture stream belongs to the first GPU that recorded in this process. A
        # recorder for another GPU cannot use it.
        self._stream = torch.cuda.Stream(device)
        self._memory_pool: Any = None

    def record(self, step: DecodeStep) -> DecodeStep:
        """Record `step` and return a function that launches its graph.

        The function returns the same tensors at every launch.
        """
        with _RECORDING_LOCK:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            # After a failed recording, torch.cuda.graph may leave its stream as the current stream.
            # This context restores the previous one.
            with torch.cuda.stream(self._stream):
                # The first run compiles kernels and lets libraries allocate their workspaces.
                # Neither may happen during the recording.
                step()
                graph = torch.cuda.CUDAGraph()
                # If the first recording in a pool fails, torch does not accept that pool again. So
                # a pool is kept only after its first successful recording.
                memory_pool = self._memory_pool or torch.cuda.graph_pool_handle()
                try:
                    # Other threads of this process may use the GPU during the recording, so only
                    # the work of this thread is recorded.
                    with torch.cuda.graph(
                        graph,
                        pool=memory_pool,
                        stream=self._stream,
                        capture_error_mode="thread_local",
                    ):
                        outputs = step()
                except BaseException:
                    self._close_pool(memory_pool)
                    raise
                self._memory_pool = memory_pool

        def launch() -> tuple[Tensor, Tensor]:
            graph.replay()
            return outputs

        return launch

    def _close_pool(self, memory_pool: Any) -> None:
        """Close a memory pool after a failed recording.

        Otherwise torch keeps the pool open with all of its allocations (pytorch issue 190308). A
        pool that other graphs use is closed but not released.
        """
        index = self._stream.device.index
        # Which of these calls are necessary depends on where the recording failed. An unnecessary
        # call raises RuntimeError.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(  # pyright: ignore[reportPrivateUsage]
                index, memory_pool
            )
        if memory_pool != self._memory_pool:
            with suppress(RuntimeError):
                torch._C._cuda_releasePool(  # pyright: ignore[reportPrivateUsage]
                    index, memory_pool
                )
