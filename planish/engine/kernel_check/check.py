"""The check of compiled kernels, for C++ and Triton: forward, backward and decoding of a model.

The model is small in layers and vocabulary and has random weights. Each of its operations is
compared with torch in float64 (comparison.py). cpu.py and gpu.py are the programs. For each family
of kernels they make a backend that uses only this family.

The weights make mistakes visible. With ordinary attention scores, one key among a thousand changes
the output by less than a bf16 rounding error. So every second head has large queries: nearly the
whole weight of a row is at one or two keys. If a kernel misses such a key, or attends to a masked
one, its error is as large as the output itself. As there are many rows and heads, every kind of key
is such a key somewhere: the first or last of a block, and a masked one. The other heads have
ordinary queries, because a score of 0 that a kernel adds by mistake is visible only beside small
scores. Norms of queries would undo the difference, so models that check attention have none.
"""

# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from planish.engine.kernel_check.batch import GPU_SIZES, Batch, Sizes
from planish.engine.kernel_check.comparison import Pair, compare
from planish.engine.kernel_check.operation_check import TEMPERATURE, OperationCheck
from planish.model.architecture.weight_shapes import expected_shapes
from planish.model.decoder.decoder import Decoder
from planish.model.decoder.head import exact_logits, head_logits, scored_logprobs
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.interface.parts import AdapterBatch, Attend
from planish.model.kernels.self_test.process import WrongResultError
from planish.model.layers.lora import (
    AdapterRange,
    HeadAdapterRange,
    LoraLayout,
    LoraMatrices,
    LoraWeights,
)
from planish.model.layers.recurrence import RecurrentState, StateSegment
from planish.model.sequences.kv_cache import SlotOwner
from planish.model.sequences.prefix_tree import pack
from planish.types import LoraConfig

_QUERY_SCALE = 6.0
"""The standard deviation of attention scores of every second head; that of the others is 1."""


class ModelCheck(OperationCheck):
    """The check of a backend, also with the parts of a model.

    Each method raises WrongResultError if an operation differs from torch.
    """

    def __init__(
        self,
        backend: Backend,
        family: str,
        sizes: Sizes = GPU_SIZES,
        *,
        is_batch_invariant: bool = False,
    ) -> None:
        super().__init__(backend, family, sizes, is_batch_invariant=is_batch_invariant)
        self._weights = {
            name: weight.to(backend.dtype) for name, weight in self._random_weights().items()
        }
        self.decoder = Decoder(self._weights, self.backend)
        self.adapters = [self._random_adapter(rank) for rank in sizes.lora_ranks]

    def tested_decoder(self) -> Decoder:
        """Return the model with the backend under test alone, whose operations are not compared."""
        return Decoder(self._weights, self._tested)

    def _random_weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for name, shape in expected_shapes(self.config).items():
            weight = torch.randn(shape, generator=self.generator)
            if name.endswith("norm.weight"):
                weight = 1 + 0.2 * weight
            elif len(shape) > 1 and name != "model.embed_tokens.weight":
                weight *= shape[-1] ** -0.5
            if name.endswith(("q_proj.weight", "qkv_proj.weight")):
                config = self.config
                rows = config.num_heads * config.head_dim * (2 if config.output_gate else 1)
                weight[:rows].unflatten(0, (config.num_heads, -1))[::2] *= _QUERY_SCALE
            weights[name] = weight
        return weights

    def _random_adapter(self, rank: int, *, requires_grad: bool = False) -> LoraWeights:
        """Return an adapter whose outputs have the magnitude of the base model's outputs."""
        layout = LoraLayout(self.config, LoraConfig(rank=rank))
        flat = torch.randn(layout.size, generator=self.generator)
        for entry in layout.entries:
            scale = rank**-0.5 / layout.scaling if entry.is_b else entry.shape[-1] ** -0.5
            flat[entry.offset : entry.offset + entry.size] *= scale
        return LoraWeights(layout, flat, self.backend, requires_grad)

    def train(self) -> None:
        """Check a forward and backward pass over a prefix tree, with an adapter."""
        sequences = [np.array(sequence) for sequence in self._tree_sequences()]
        (micro_batch,) = pack(sequences, 1 << 20)
        num_rows, device = len(micro_batch), self.backend.device
        tokens = self.random_ints(self.config.vocab_size, num_rows)
        adapter = self._random_adapter(self.sizes.lora_ranks[0], requires_grad=True)
        hidden = self.decoder.forward(
            tokens,
            torch.from_numpy(micro_batch.positions).to(device),
            self.backend.tree_attention(micro_batch),
            adapter,
            recurrence=self.backend.tree_recurrence(micro_batch),
        )
        # Some rows have no target, and others have two.
        rows = torch.arange(num_rows, device=device).repeat_interleave(
            torch.arange(num_rows, device=device) % 3
        )
        targets = self.random_ints(self.config.vocab_size, len(rows))
        logprobs = scored_logprobs(
            self.backend, hidden, self.decoder.head, adapter.head, rows, targets, TEMPERATURE
        )
        (logprobs * self.random(len(rows), dtype=logprobs.dtype)).sum().backward()
        if not all(leaf.grad is not None for leaf in adapter.leaves):
            raise WrongResultError("the backward pass reaches no adapter")

    def _tree_sequences(self) -> Iterator[list[int]]:
        """Return token sequences that share prefixes, one per leaf of the tree in `sizes`."""
        numbers, sizes = iter(range(1, 1 << 30)), self.sizes

        def extend(level: int, prefix: list[int]) -> Iterator[list[int]]:
            for _ in range(sizes.branches[level]):
                path = prefix + [next(numbers) for _ in range(sizes.segment_lengths[level])]
                if level + 1 == len(sizes.segment_lengths):
                    yield path
                else:
                    yield from extend(level + 1, path)

        return extend(0, [])

    @torch.no_grad()
    def sample(self) -> None:
        """Check a prefill and decoding steps of several samples and adapters."""
        batch = Batch(self.backend, self.sizes, self.generator)
        spans, num_rows = batch.prefill_spans()
        prefilled = self._forward(
            [range(span.start, span.start + span.count) for span in spans],
            [span.row for span in spans],
            num_rows,
            self.backend.prefill_attention(spans),
        )
        if not {"head", "sampling"}.isdisjoint(self._parts):
            self._head(prefilled[[span.row + span.count - 1 for span in spans]])
        self._decode(batch)

    def _decode(self, batch: Batch) -> None:
        """Run one decoding step, in which some samples have two rows and the last row is unused."""
        row_counts: dict[SlotOwner, int] = {
            sample: 1 + (i % 5 == 1) for i, sample in enumerate(batch.running)
        }
        first_rows: dict[SlotOwner, int] = {}
        num_rows = 0
        for sample in batch.running:
            first_rows[sample] = num_rows
            num_rows += row_counts[sample]
        attend = self.backend.decode_attention(
            first_rows, batch.prompt_pools, batch.sample_pools, row_counts
        )
        positions = [
            range(sample.num_stored, sample.num_stored + row_counts[sample])
            for sample in batch.running
        ]
        self._forward(positions, list(first_rows.values()), num_rows + 1, attend)

    def _forward(
        self,
        positions: Sequence[range],
        first_rows: Sequence[int],
        num_rows: int,
        attend: Attend,
    ) -> Tensor:
        """Return the hidden states of sequences at these positions, with adapters."""
        device = self.backend.device
        all_positions = torch.zeros(num_rows, dtype=torch.int64)
        for row, of_sequence in zip(first_rows, positions, strict=True):
            all_positions[row : row + len(of_sequence)] = torch.tensor(of_sequence)
        segments: list[StateSegment] = []
        if self.config.recurrence is not None:
            for row, of_sequence in zip(first_rows, positions, strict=True):
                state = RecurrentState(self.config.recurrence, self.backend.dtype, device)
                segments.append(StateSegment(row, row + len(of_sequence), state, state))
        return self.decoder.forward(
            self.random_ints(self.config.vocab_size, num_rows),
            all_positions.to(device),
            attend,
            self.backend.adapter_batch(self._ranges(num_rows)),
            recurrence=self.backend.sequence_recurrence(segments, num_rows),
        )

    def _ranges(self, num_rows: int) -> list[AdapterRange]:
        """Divide the rows among the first adapter, the base model and the second adapter."""
        first = num_rows // 3
        return [
            AdapterRange(0, first, self.adapters[0]),
            AdapterRange(first, first + 1, None),
            AdapterRange(first + 1, num_rows, self.adapters[1]),
        ]

    def _head(self, hidden: Tensor) -> None:
        """Check the logits of these hidden states, with and without adapters."""
        ranges = [
            (i, i + 1, adapter.head)
            for i, adapter in enumerate(self.adapters)
            if i < len(hidden) and adapter.head is not None
        ]
        for adapters in (ranges, []):
            logits = head_logits(self.backend, hidden, self.decoder.head, adapters)
            rows = torch.arange(len(hidden), device=hidden.device).repeat_interleave(3)
            tokens = self.random_ints(self.config.vocab_size, len(rows))
            exact_logits(self.backend, hidden, self.decoder.head, rows, tokens, adapters)
            self.choose(logits)

    @torch.no_grad()
    def adapt(self, add_head: Callable[[AdapterBatch, Tensor, Tensor], None] | None = None) -> None:
        """Check adapters of several batch sizes alone, in the target modules of the first layer.

        Only the first batch size is checked in all target modules and in the head.

        `add_head(batch, hidden, logits)`: adds the outputs of the head adapters of a batch, if the
        sampler has a kernel of its own for them.
        """
        matrices = {
            name: lora
            for name, lora in self.adapters[0].layers[0].modules.items()
            if lora is not None
        }
        for num_rows in self.sizes.lora_rows:
            ranges = self._ranges(num_rows)
            batch = self.backend.adapter_batch(ranges)
            is_first = num_rows == self.sizes.lora_rows[0]
            for name, lora in list(matrices.items())[: None if is_first else 1]:
                out_sizes = [len(b) for b in lora.b_matrices]
                x = self.random(num_rows, lora.a.shape[-1])
                batch.add_(x, self.random(num_rows, sum(out_sizes)), out_sizes, 0, name)
            if add_head is not None and is_first:
                hidden = self.random(num_rows, self.config.hidden_size)
                logits = self.random(num_rows, self.config.vocab_size, dtype=torch.float32)
                heads: list[HeadAdapterRange] = [
                    (each.start, each.stop, each.weights.head)
                    for each in ranges
                    if each.weights is not None and each.weights.head is not None
                ]
                expected = logits.double()
                self._reference.head_adapters(
                    [
                        (start, stop, LoraMatrices(lora.a.double(), (lora.b_matrices[0].double(),)))
                        for start, stop, lora in heads
                    ],
                    hidden.double(),
                ).add_(expected)
                add_head(batch, hidden, logits)
                # The product with A is rounded to the dtype of the weights.
                compare("LoRA of the head", logits.to(self.backend.dtype), expected)

    @torch.no_grad()
    def decode_pass(self) -> None:
        """Check the forward pass of a decoding step that runs all layers in one call."""
        reference = Decoder(self._weights, self._reference)
        batch = Batch(self.backend, self.sizes, self.generator)
        first_rows: dict[SlotOwner, int] = {s: row for row, s in enumerate(batch.running)}
        positions = torch.tensor([sample.num_stored for sample in batch.running])
        tokens = self.random_ints(self.config.vocab_size, len(positions))
        attend, adapters = (
            self.backend.decode_attention(first_rows, batch.prompt_pools, batch.sample_pools),
            self.backend.adapter_batch(self._ranges(len(positions))),
        )
        assert isinstance(attend, Pair)
        assert isinstance(adapters, Pair)
        run = self.backend.decode_pass(self.decoder)
        if run is None:
            raise WrongResultError("the kernel does not support the test's model")
        found = run(tokens, positions, attend.tested, adapters.tested)
        expected = reference.forward(tokens, positions, attend.reference, adapters.reference)
        # Two layers round to bf16 about twenty times, so the tolerance is larger.
        compare("decode pass", found, expected, 2)
        if not torch.equal(run(tokens, positions, attend.tested, adapters.tested), found):
            raise WrongResultError("decode pass: repeating it changes its bits")
