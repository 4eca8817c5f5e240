"""The check of operations that need no model: log-sum-exp, sampling, and quantized matmuls."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from planish.engine.kernel_check.batch import GPU_SIZES, Sizes
from planish.engine.kernel_check.comparison import Comparison, compare
from planish.model.architecture.weight_sizes import SCHEMES
from planish.model.kernels.choose import reference_backend
from planish.model.kernels.interface.backend import Backend
from planish.model.kernels.self_test.process import WrongResultError
from planish.model.layers.lora import LoraMatrices
from planish.model.layers.quantization import Fp8Weight, Mxfp4Weight, QuantizedWeight, quantize
from planish.types import SamplingParams

_PARTS = {
    "matmul": ("matmuls",),
    "lora": ("lora", "head"),
    "attention": ("attention",),
    "tree attention": ("attention",),
    "norms": ("norms", "qk_norm_rope"),
    "rope": ("rope", "qk_norm_rope"),
    "swiglu": ("activations",),
    "log_sum_exp": ("log_sum_exp", "head", "sampling"),
    "sampling": ("head", "sampling"),
    "decode": ("attention", "lora"),
    "delta_net": ("recurrences",),
    "quantized": ("matmuls",),
    "graphs": (),
}
"""The parts of a backend with kernels of each family. Their operations are compared."""
TEMPERATURE = 0.7
_NUM_SAMPLED = 4
"""The number of most likely tokens of each row that the check samples."""


class OperationCheck:
    """The check of a backend: each method runs some operations and compares them.

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

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normally distributed numbers in the dtype of the model.

        They are generated on the CPU, so that a failure can be reproduced on any machine.
        """
        values = torch.randn(shape, generator=self.generator)
        return values.to(device=self.backend.device, dtype=dtype or self.backend.dtype)

    def random_ints(self, high: int, *shape: int) -> Tensor:
        """Return random integers from 0 to `high` - 1, int64."""
        return torch.randint(high, shape, generator=self.generator).to(self.backend.device)

    @torch.no_grad()
    def logits(self, vocab_sizes: Sequence[int]) -> None:
        """Check log-sum-exp and sampling of logits at these vocabulary sizes."""
        for vocab_size in vocab_sizes:
            logits = 4 * self.random(9, vocab_size, dtype=torch.float32)
            # A kernel with a wrong bound misses the last logit of row 0, or reads the first one of
            # row 1.
            logits[0, -1], logits[1, 0] = 40.0, 40.0
            self._log_sum_exp(logits)
            self._exact_logits(vocab_size)
            self.choose(logits[2:].contiguous())
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
            logits.double(), torch.full_like(temperatures, TEMPERATURE).double()
        )
        targets = self.random_ints(vocab_size, int(first[-1]))
        grads = self.random(len(targets), dtype=torch.float32)
        self.backend.log_sum_exp_backward_(
            logits.clone(), TEMPERATURE, total.float(), first, targets, grads
        )

    def _exact_logits(self, vocab_size: int) -> None:
        """Check single logits, and the log-sum-exp of rounded logits in which they replace others.

        Some values are far from the logits that they replace.
        """
        width, rank, num_rows = self.config.hidden_size, 8, 9
        backend, hidden = self.backend, self.random(num_rows, width)
        head = backend.pack([self.random(vocab_size, width) * width**-0.5])
        rows = torch.arange(num_rows, device=hidden.device).repeat_interleave(2)
        tokens = self.random_ints(vocab_size, len(rows))
        tokens[:2] = torch.tensor([0, vocab_size - 1])
        tokens[3::2] = (tokens[2::2] + vocab_size // 2) % vocab_size  # no row has a token twice
        a, b = self.random(rank, width) * width**-0.5, self.random(vocab_size, rank)
        for adapters in (
            None,
            backend.head_adapters([(0, num_rows, LoraMatrices(a, (b,)))], hidden),
            backend.head_adapters([(1, num_rows - 2, LoraMatrices(a, (b,)))], hidden),
        ):
            values = backend.token_logits(hidden, head, adapters, rows, tokens)
        exact = tokens.view(num_rows, 2), values.float().view(num_rows, 2) + 8
        logits = (4 * self.random(num_rows, vocab_size)).to(backend.training_logits_dtype)
        temperatures = torch.full((num_rows,), TEMPERATURE, device=logits.device)
        total = backend.log_sum_exp(logits, temperatures, exact)
        first = 2 * torch.arange(num_rows + 1, device=logits.device)
        grads = self.random(len(rows), dtype=torch.float32)
        operands = (TEMPERATURE, total, first, tokens.flip(0), grads, exact)
        backend.log_sum_exp_backward_(logits, *operands)

    def choose(self, logits: Tensor) -> None:
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
    def quantized(self) -> None:
        """Check matmuls with quantized weights of each scheme, forward and backward."""
        # nf4 has blocks of 64 inputs.
        fan_in = -(-self.config.hidden_size // 64) * 64
        config = self.config
        sizes = [config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim]
        dense = [self.random(size, fan_in) * fan_in**-0.5 for size in sizes]
        bias = self.random(sum(sizes))
        has_fp8 = not self.backend.uses_main_memory
        for weights in weights_in_each_scheme(dense, self.generator, has_fp8=has_fp8):
            plain = self.backend.pack_quantized(weights, [None] * len(sizes))
            biased = self.backend.pack_quantized(weights, list(bias.split(sizes)))
            for num_rows in self.sizes.quantized_rows:
                self.backend.matmul(self.random(num_rows, fan_in), plain)
                self.backend.matmul(self.random(num_rows, fan_in), biased)
                self.backend.matmul_backward(self.random(num_rows, sum(sizes)), plain)


def weights_in_each_scheme(
    dense: Sequence[Tensor], generator: torch.Generator, *, has_fp8: bool
) -> Iterator[list[QuantizedWeight]]:
    """Yield the weights [out_i, in] in each scheme. `has_fp8`: also yield them in fp8."""
    for scheme in SCHEMES:
        yield [quantize(weight, scheme) for weight in dense]
    fan_in, device = dense[0].shape[1], dense[0].device
    if has_fp8:
        fp8: list[QuantizedWeight] = []
        for weight in dense:
            grid = (-(-len(weight) // 128), -(-fan_in // 128))
            scales = 0.01 + 0.1 * torch.rand(grid, generator=generator)
            codes = (weight * fan_in**0.5 * 30).to(torch.float8_e4m3fn)
            fp8.append(Fp8Weight.from_stored(codes, scales.to(device), (128, 128)))
        yield fp8

    def random_bytes(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8).to(device)

    yield [
        Mxfp4Weight(
            random_bytes(0, 256, len(weight), fan_in // 2),
            random_bytes(118, 124, len(weight), fan_in // 32),
        )
        for weight in dense
    ]
