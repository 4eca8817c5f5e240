"""The sampler's model runners: each runs the plan of a step and returns hidden states and logits.

`EagerRunner` is the eager model runner for any device. cuda_graph_runner.py has the model runner
with CUDA graphs, for GPUs on which planish's Triton kernels support the model.
"""

from collections.abc import Sequence
from typing import Protocol

from planish.engine.sampling.plan import StepOutput, StepPlan, tokens_and_positions
from planish.engine.sampling.sampling_head import SamplingHead
from planish.engine.sampling.slots import SampleSlots
from planish.model.decoder.base_decoder import BaseDecoder
from planish.model.kernels.reference.adapter_stacks import ROWS, AdapterStacks
from planish.model.layers.lora import AdapterRange, AdapterStackRange
from planish.model.sequences.kv_cache import KVPool


class ModelRunner(Protocol):
    """What the sampler needs to run the decoder on a device."""

    pool_class: type[KVPool]
    """The class of the KV cache pools that the attention of this model runner reads."""

    def run(self, plan: StepPlan) -> StepOutput:
        """Run the rows of a plan through the decoder, and store their keys and values."""
        ...

    def row_multiple(self, num_adapters: int) -> int:
        """Return the multiple to which the rows of each adapter in a decoding step are padded.

        `num_adapters`: the number of adapters in the step. 1: no padding.
        """
        ...

    def record(self) -> None:
        """Record the steps that this model runner can replay; an eager one records nothing."""

    def disable_graphs(self) -> bool:
        """Run all further steps eagerly, and return whether they were CUDA graphs until now."""
        ...

    def release_adapters(self) -> None:
        """Free the adapter weights kept from step to step; called when no request is running."""


class EagerRunner:
    """The eager model runner, for any device. It is batch-invariant if the backend is."""

    def __init__(self, decoder: BaseDecoder, head: SamplingHead) -> None:
        """Create a model runner for `decoder` whose logits come from `head`."""
        self._decoder, self._backend = decoder, decoder.backend
        self.pool_class = decoder.backend.pool_class
        self._head = head
        self._stacks = AdapterStacks()
        self._decode_pass = decoder.decode_pass() or decoder.forward

    def run(self, plan: StepPlan) -> StepOutput:
        """Run the rows of a plan through the decoder, and store their keys and values."""
        if isinstance(plan.slots, SampleSlots):
            return self._decode(plan, plan.slots)
        attention = self._backend.prefill_attention(plan.slots)
        adapter_batch = self._backend.adapter_batch(plan.layout.adapters)
        hidden = self._decoder.forward(
            *tokens_and_positions(plan.inputs(self._backend.device)),
            attention,
            adapter_batch,
            recurrence=plan.recurrence,
        )
        return StepOutput(hidden, None)

    def _decode(self, plan: StepPlan, slots: SampleSlots) -> StepOutput:
        adapters = plan.layout.adapters
        decode_adapters: Sequence[AdapterRange | AdapterStackRange] = adapters
        if self.row_multiple(len(adapters)) > 1:
            decode_adapters = self._stacks.of(adapters, self._backend.can_stack)
        else:
            self._stacks.forget()
        attention = self._backend.decode_attention(
            slots.first_rows, slots.prompt_pools, slots.sample_pools, slots.row_counts
        )
        adapter_batch = self._backend.adapter_batch(decode_adapters)
        tokens, positions = tokens_and_positions(plan.inputs(self._backend.device))
        if plan.recurrence is not None:
            hidden = self._decoder.forward(
                tokens, positions, attention, adapter_batch, recurrence=plan.recurrence
            )
        else:
            hidden = self._decode_pass(tokens, positions, attention, adapter_batch)
        return StepOutput(hidden, self._head.logits(hidden, adapters))

    def row_multiple(self, num_adapters: int) -> int:
        """Return the multiple to which the rows of each adapter in a decoding step are padded.

        Adapters with the same number of rows can share a batched matmul, and padding makes this
        likelier. The result is 1 (no padding) for a single adapter, and if a compiled kernel
        applies the adapters.
        """
        return ROWS if num_adapters > 1 and not self._backend.packs_layer_adapters else 1

    def record(self) -> None:
        """Do nothing, because every step runs eagerly."""

    def disable_graphs(self) -> bool:
        """Return False, because every step runs eagerly."""
        return False

    def release_adapters(self) -> None:
        """Free the stacked adapter weights."""
        self._stacks.forget()
