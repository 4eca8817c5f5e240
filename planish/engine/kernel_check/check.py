"""The check of compiled kernels, for C++ and Triton: forward, backward and decoding of a model.

The model is small in layers and vocabulary and has random weights. Each of its operations is
compared with torch in float64 (comparison.py). cpu.py and gpu.py are the programs. For each family of kernels they make a backend that uses only this family.

The weights make mistakes visible. With ordinary attention scores, one key among a thousand changes
the output by less than a bf16 rounding error. So every second head has large queries: nearly the
whole weight of a row is at one or two keys. If a kernel misses such a key, or attends to a masked
one, its error is as large as the output itself. As there are many rows and heads, every kind of key
is such a key somewhere: the first or last of a block, and a masked one. The other heads have
ordinary queries, because a score of 0 that a kernel adds by mistake is visible only beside small
scores. Norms of queries would undo the difference, so models that check attention have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from planish.engine.kernel_check.comparison import Comparison, Pair, compare
from planish.model.decoder import Decoder
from planish.model.delta_net import RecurrentState, StateSegment
from planish.model.head import exact_logits, head_logits, scored_logprobs
from planish.model.kernels.backend import Backend
from planish.model.kernels.choose import reference_backend
from planish.model.kernels.interface import AdapterBatch, Attend
from planish.model.kernels.self_test_process import WrongResultError
from planish.model.kv_cache import KVPool, KVPools, PrefillSpan, SlotOwner
from planish.model.lora import AdapterRange, HeadAdapterRange, LoraLayout, LoraMatrices, LoraWeights
from planish.model.positions import SPAN, capacity_for
from planish.model.prefix_tree import pack
from planish.model.quantization import Fp8Weight, Mxfp4Weight, QuantizedWeight, quantize
from planish.model.weight_sizes import SCHEMES
from planish.model.weights import expected_shapes
from planish.types import LoraConfig, SamplingParams

_QUERY_SCALE = 6.0
"""The standard deviation of attention scores of every second head; that of the others is 1."""
_PARTS = {
    "matmul": ("matmuls",),
    "lora": ("lora", "head"),
    "attention": ("attention",),
    "tree attention": ("attention",),
    "norms": ("norms", "qk_norm_rope"),
    "rope": ("rope", "qk_norm_rope"),
    "swiglu": ("activations",),
    "log_sum_exp": ("log_sum_exp", "sampling"),
    "sampling": ("head", "sampling"),
    "decode": ("attention", "lora"),
    "delta_net": ("recurrences",),
    "quantized": ("matmuls",),
    "graphs": (),
}
"""The parts of a backend with kernels of each family. Their operations are compared."""
_TEMPERATURE = 0.7
_NUM_SAMPLED = 4
"""The number of most likely tokens of each row that the check samples."""


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


@dataclass(eq=False)
class _Prompt:
    length: int
    slot: int = -1


@dataclass(eq=False)
class _Sample:
    prompt: _Prompt
    stored: int
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
            stored = length % SPAN + count
            sample = _Sample(prompt, stored, capacity_for(stored + SPAN))
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


class ModelCheck:
    """The check of a backend: each method runs a part of the model and compares all operations.

    Each method raises WrongResultError if an operation differs from torch.
    """

    def __init__(
        self,
        backend: Backend,
        family: str,
        sizes: Sizes = Sizes(),
        *,
        is_batch_invariant: bool = False,
    ) -> None:
        """`family`: the family of kernels that the backend uses, whose operations are compared.

        `is_batch_invariant`: whether the results of a row must not depend on other rows.
        """
        config = backend.config
        self._tested = backend
        self._reference = reference_backend(config, torch.float64, backend.device)
        self._parts = _PARTS[family]
        self._comparison = Comparison(
            backend, self._reference, self._parts, is_batch_invariant=is_batch_invariant
        )
        self.backend, self.config, self.sizes = self._comparison.backend, config, sizes
        self.generator = torch.Generator().manual_seed(0)
        self._weights = {
            name: weight.to(backend.dtype) for name, weight in self._random_weights().items()
        }
        self.decoder = Decoder(self._weights, self.backend)
        self.adapters = [self._random_adapter(rank) for rank in sizes.lora_ranks]

    def tested_decoder(self) -> Decoder:
        """Return the model with the backend under test alone, whose operations are not compared."""
        return Decoder(self._weights, self._tested)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normally distributed numbers in the dtype of the model.

        They are generated on the CPU, so that a failure can be reproduced on any machine.
        """
        values = torch.randn(shape, generator=self.generator)
        return values.to(device=self.backend.device, dtype=dtype or self.backend.dtype)

    def random_ints(self, high: int, *shape: int) -> Tensor:
        """Return random integers from 0 to `high` - 1, int64."""
        return torch.randint(high, shape, generator=self.generator).to(self.backend.device)

    def _random_weights(self) -> dict[str, Tensor]:
        weights = {}
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
            self.backend, hidden, self.decoder.head, adapter.head, rows, targets, _TEMPERATURE
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
            range(sample.stored, sample.stored + row_counts[sample]) for sample in batch.running
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
        segments = []
        if self.config.delta_net is not None:
            for row, of_sequence in zip(first_rows, positions, strict=True):
                state = RecurrentState(self.config.delta_net, self.backend.dtype, device)
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
            self._choose(logits)

    @torch.no_grad()
    def logits(self, vocab_sizes: Sequence[int]) -> None:
        """Check log-sum-exp and sampling of logits at these vocabulary sizes."""
        for vocab_size in vocab_sizes:
            logits = 4 * self.random(9, vocab_size, dtype=torch.float32)
            # A kernel with a wrong bound misses the last logit of row 0, or reads the first one of
            # row 1.
            logits[0, -1], logits[1, 0] = 40.0, 40.0
            self._log_sum_exp(logits)
            self._choose(logits[2:].contiguous())
            self._sample_weights(vocab_size)
        self._filter(vocab_sizes[0])

    def _log_sum_exp(self, logits: Tensor) -> None:
        """Check the log-sum-exp, the weights exp(logit - max), and the gradient."""
        num_rows, vocab_size = logits.shape
        temperatures = torch.linspace(0.5, 2, num_rows).to(logits.device)
        rounded = logits.to(self.backend.logits_dtype)
        self.backend.log_sum_exp(rounded, temperatures, weights=torch.empty_like(logits))
        with_nan = logits.clone()
        with_nan[0, 0] = float("nan")
        if bool(self._tested.log_sum_exp(with_nan, temperatures)[0].isfinite()):
            raise WrongResultError("log-sum-exp of a row with a NaN is finite")
        counts = torch.arange(num_rows, device=logits.device) % 3
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        total = self._reference.log_sum_exp(
            logits.double(), torch.full_like(temperatures, _TEMPERATURE).double()
        )
        targets = self.random_ints(vocab_size, int(first[-1]))
        grads = self.random(len(targets), dtype=torch.float32)
        self.backend.log_sum_exp_backward_(
            logits.clone(), _TEMPERATURE, total.float(), first, targets, grads
        )

    def _choose(self, logits: Tensor) -> None:
        """Check sampling at uniform numbers in the middle of the most likely tokens."""
        num_rows, vocab_size = logits.shape
        temperatures = torch.linspace(0.6, 1.4, num_rows).to(logits.device)
        weights = (logits.double() / temperatures.double()[:, None]).softmax(1)
        ends = weights.cumsum(1)
        tokens = weights.topk(min(_NUM_SAMPLED, vocab_size)).indices
        middles = (ends - weights / 2).gather(1, tokens)
        for column in range(tokens.shape[1]):
            self.backend.sample(logits, None, temperatures, middles[:, column].contiguous())
        allowed = torch.rand(weights.shape, generator=self.generator) < 0.1
        allowed[0] = False
        allowed[1:].scatter_(1, tokens[1:, -1:].cpu(), True)
        packed = np.packbits(
            F.pad(allowed, (0, -vocab_size % 32)).numpy(), axis=1, bitorder="little"
        )
        words = torch.from_numpy(packed.view(np.int32)).to(logits.device)
        kept = weights * allowed.to(logits.device)
        middles = (kept.cumsum(1) - kept / 2).gather(1, kept.argmax(1, keepdim=True))
        uniforms = (middles / kept.sum(1, keepdim=True)).squeeze(1).nan_to_num(0.5)
        self.backend.sample(logits, None, temperatures, uniforms, words)

    def _sample_weights(self, vocab_size: int) -> None:
        """Check that each uniform number gives the token of the cumulative distribution.

        The weights are powers of two. Their sums are exact, so exactly one token is correct.
        """
        num_rows, device = 9, self.backend.device
        weights = torch.exp2(-self.random_ints(12, num_rows, vocab_size).float())
        weights[:, -1] = 0.0
        weights[0] = 0.0
        weights[0, vocab_size // 2] = 1.0
        uniforms = torch.rand(num_rows, 1, generator=self.generator, dtype=torch.float64)
        # These two numbers must give the first and the last token with a nonzero weight.
        uniforms[1], uniforms[2] = 0.0, 1 - 2.0**-53
        self.backend.sample_from_weights(weights, uniforms.to(device))

    def _filter(self, vocab_size: int) -> None:
        """Check that top_k, top_p and min_p keep exactly the same tokens as torch.

        Every second row has few distinct weights, so a filter keeps some of several equal weights.
        """
        params = [
            SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
            for top_k, top_p, min_p in (
                (77, 1.0, 0.0), (77, 0.97, 0.01), (-1, 0.3, 0.0), (-1, 0.999, 0.0), (-1, 1.0, 0.0),
                (-1, 1.0, 0.2),
            )
        ]  # fmt: skip
        logits = 4 * self.random(len(params), vocab_size, dtype=torch.float32)
        logits[::2] = (logits[::2] / 4).round()
        weights = (logits - logits.amax(1, keepdim=True)).exp()
        expected = weights.clone()
        self._tested.filter_(weights, params)
        self._reference.filter_(expected, params)
        compare("filtered weights", weights, expected, exact=True)

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
    def quantized(self) -> None:
        """Check matmuls with quantized weights of each scheme, forward and backward."""
        # nf4 has blocks of 64 inputs.
        fan_in = -(-self.config.hidden_size // 64) * 64
        config = self.config
        sizes = [config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim]
        dense = [self.random(size, fan_in) * fan_in**-0.5 for size in sizes]
        bias = self.random(sum(sizes))
        for weights in self._quantized_weights(dense):
            plain = self.backend.pack_quantized(weights, [None] * len(sizes))
            biased = self.backend.pack_quantized(weights, list(bias.split(sizes)))
            for num_rows in self.sizes.quantized_rows:
                self.backend.matmul(self.random(num_rows, fan_in), plain)
                self.backend.matmul(self.random(num_rows, fan_in), biased)
                self.backend.matmul_backward(self.random(num_rows, sum(sizes)), plain)

    def _quantized_weights(self, dense: Sequence[Tensor]) -> Iterator[list[QuantizedWeight]]:
        """Yield the weights [out_i, in] in each scheme."""
        for scheme in SCHEMES:
            yield [quantize(weight, scheme) for weight in dense]
        fan_in = dense[0].shape[1]
        if not self.backend.uses_main_memory:
            fp8: list[QuantizedWeight] = []
            for weight in dense:
                scales = 0.01 + 0.1 * torch.rand(
                    -(-len(weight) // 128), -(-fan_in // 128), generator=self.generator
                )
                codes = (weight * fan_in**0.5 * 30).to(torch.float8_e4m3fn)
                fp8.append(Fp8Weight.from_stored(codes, scales.to(weight.device), (128, 128)))
            yield fp8
        yield [
            Mxfp4Weight(
                self.random_ints(256, len(weight), fan_in // 2).to(torch.uint8),
                (118 + self.random_ints(6, len(weight), fan_in // 32)).to(torch.uint8),
            )
            for weight in dense
        ]

    @torch.no_grad()
    def decode_pass(self) -> None:
        """Check the forward pass of a decoding step that runs all layers in one call."""
        reference = Decoder(self._weights, self._reference)
        batch = Batch(self.backend, self.sizes, self.generator)
        first_rows: dict[SlotOwner, int] = {s: row for row, s in enumerate(batch.running)}
        positions = torch.tensor([sample.stored for sample in batch.running])
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
