"""The batches of a kernel check: its sizes, and slots with random keys and values."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from dataclasses import dataclass

import torch

from planish.model.kernels.interface.backend import Backend
from planish.model.sequences.kv_cache import KVPool, KVPools, PrefillSpan, SlotOwner
from planish.model.sequences.positions import SPAN, capacity_for


@dataclass(frozen=True)
class Sizes:
    """The sizes of the check's batches. The defaults are for a GPU."""

    segment_lengths: tuple[int, ...] = (150, 80, 60)
    """The number of tokens of each segment in the prefix tree, by level."""
    branches: tuple[int, ...] = (2, 3, 2)
    """The number of branches at each node of the prefix tree, by level."""
    prompt_lengths: tuple[int, ...] = (1500, 130, 3)
    """The number of positions of each prompt in the KV cache."""
    samples_per_prompt: tuple[int, ...] = (9, 2, 1)
    """The number of samples of each prompt."""
    max_sampled_tokens: int = 300
    """The maximum number of sampled tokens of a sample."""
    lora_ranks: tuple[int, int] = (32, 5)
    """The ranks of the two adapters."""
    lora_rows: tuple[int, ...] = (70, 600)
    """Batch sizes for adapters alone.

    In the smaller batch, several programs of the Triton kernel share one sum (split-K). In the
    larger one, each sum belongs to one program.
    """
    quantized_rows: tuple[int, ...] = (1, 21, 37, 150, 521)
    """Batch sizes for quantized weights.

    Each has another tile, and with the last one the weights are dequantized first.
    """


GPU_SIZES = Sizes()


@dataclass(eq=False)
class _Prompt:
    length: int
    slot: int = -1


@dataclass(eq=False)
class _Sample:
    prompt: _Prompt
    num_stored: int
    capacity: int
    slot: int = -1


class Batch:
    """A batch of prompts and samples, whose slots contain random keys and values."""

    def __init__(
        self,
        backend: Backend,
        sizes: Sizes,
        generator: torch.Generator,
        pool_class: type[KVPool] = KVPool,
    ) -> None:
        self._generator = generator
        self.prompt_pools = KVPools(backend.kv_spec, pool_class)
        self.sample_pools = KVPools(backend.kv_spec, pool_class)
        self.prompts: list[_Prompt] = []
        self.running: list[_Sample] = []
        for length, count in zip(sizes.prompt_lengths, sizes.samples_per_prompt, strict=True):
            tokens = torch.randint(sizes.max_sampled_tokens, (count,), generator=generator)
            self.add_prompt(length, [sizes.max_sampled_tokens, *tokens.tolist()][:count])

    def add_prompt(self, length: int, token_counts: list[int]) -> None:
        """Add a prompt of `length` tokens, and one sample for each of `token_counts`."""
        prompt = _Prompt(length)
        self.prompts.append(prompt)
        self._allocate(self.prompt_pools.pool_for(capacity_for(length)), prompt)
        for count in token_counts:
            num_stored = length % SPAN + count
            sample = _Sample(prompt, num_stored, capacity_for(num_stored + SPAN))
            self._allocate(self.sample_pools.pool_for(sample.capacity), sample)
            self.running.append(sample)

    def remove_sample(self, sample: _Sample) -> None:
        """Free the slot of a sample and remove the sample."""
        self.sample_pools.pool_for(sample.capacity).free(sample)
        self.running.remove(sample)

    def prefill_spans(self) -> tuple[list[PrefillSpan], int]:
        """Return spans for all prompts, whose first third is cached, and the number of rows.

        A padding row precedes each prompt.
        """
        spans, row = list[PrefillSpan](), 0
        for prompt in self.prompts:
            start = prompt.length // 3
            pool = self.prompt_pools.pool_for(capacity_for(prompt.length))
            spans.append(PrefillSpan(pool, prompt.slot, row + 1, start, prompt.length - start))
            row += 1 + prompt.length - start
        return spans, row

    def _allocate(self, pool: KVPool, owner: SlotOwner) -> None:
        pool.allocate(owner)
        for tensor in (*pool.keys, *pool.values):
            is_empty = ~tensor.flatten(1).any(1)
            random = torch.randn(tensor.shape, generator=self._generator)
            random = random.to(device=tensor.device, dtype=tensor.dtype)
            tensor[is_empty] = random[is_empty]
