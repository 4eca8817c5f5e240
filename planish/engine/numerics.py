"""A description of a base model's numerics.

It names the kernels, says whether they are batch-invariant, and gives the expected difference
between the logprobs of sampler and trainer.
"""

from dataclasses import dataclass

import torch

from planish.model.kernels.interface.backend import Backend


@dataclass(frozen=True)
class Numerics:
    """The numerics of one base model on one device, as `describe_numerics` found them."""

    device: str
    dtype: str
    """The dtype of the matmuls: "bfloat16" or "float32"."""
    kernels: str
    """The kernels in use, such as "C++ kernels (AVX512_BF16)" or "torch"."""
    torch_families: tuple[str, ...]
    """The kernel families that torch replaces here (see FAMILIES in cpp/self_test.py and
    triton/families.py).
    """
    is_batch_invariant: bool
    """Whether the bits of a sample with a seed do not depend on other work of the engine.

    With torch's matmuls, LoRA adapters of some ranks may be an exception. A warning names each such
    rank.
    """
    expected_kl: float
    """The approximate maximum of `optim/kl_sample_train_v2` in a correct on-policy step; 0 means
    exactly 0.
    """
    alarm_kl: float
    """If `optim/kl_sample_train_v2` exceeds this value, rounding alone cannot be the cause."""
    quantize: str | None = None
    """The quantization scheme of the base weights, or None."""
    architecture: str | None = None
    """The class in transformers whose code computes the layers. None: our own decoder does."""
    measured_difference: float | None = None
    """The largest difference between sampled and trained logprobs of a few tokens, in nats,
    measured when the model was loaded. None: not measured.
    """

    @property
    def summary(self) -> str:
        """The numerics in one line, for logs."""
        replaced = f", torch for {', '.join(self.torch_families)}" if self.torch_families else ""
        weights = f" with {self.quantize} weights" if self.quantize else ""
        invariant = (
            "batch-invariant"
            if self.is_batch_invariant
            else "not batch-invariant: other requests may change the tokens of a seed "
            "(deterministic=True prevents that, but is slower)"
        )
        code = ""
        if self.architecture is not None:
            code = f", layers by transformers' {self.architecture}"
        measured = ""
        if self.measured_difference is not None:
            measured = (
                "; sampled and trained logprobs of some tokens differ by at most "
                f"{self.measured_difference:.2g}"
            )
        if self.architecture is not None and self.is_batch_invariant:
            invariant = (
                "batch-invariant except for norms, RoPE and activations, which torch computes"
            )
        expected = f"up to about {self.expected_kl:g}" if self.expected_kl else "0"
        return (
            f"{self.dtype}{weights} on {self.device}, {self.kernels}{replaced}{code}; "
            f"{invariant}{measured}; "
            f"on-policy kl_sample_train_v2 is {expected}, and above {self.alarm_kl:g} something is "
            "wrong"
        )


def describe_numerics(
    backend: Backend, quantize: str | None = None, measured_difference: float | None = None
) -> Numerics:
    """Return the numerics of the backend's model.

    `quantize`: the scheme of its weights. `measured_difference`: see `Numerics`.
    """
    replaced, tiling = backend.torch_families, backend.tiling
    if not backend.uses_main_memory:
        # The kernels of a GPU are checked, and so used, only if the model has work for them.
        config = backend.config
        if not config.num_experts:
            replaced -= {"experts"}
        if not (quantize or config.fp8 or config.mxfp4_experts):
            replaced -= {"quantized"}
    # The trainer never computes in fixed tiles. So if the sampler does, their matmuls may sum in
    # different orders.
    hf = backend.config.hf
    has_equal_order = backend.uses_compiled_kernels or (tiling is not None and tiling.tile is None)
    if has_equal_order:
        # Torch's log-sum-exp may differ in its last bit. If several logits are equal, sampler
        # and trainer may also recompute different ones of them in float32.
        expected, alarm = (
            (0.0, 1e-6) if backend.uses_compiled_kernels and not replaced else (1e-8, 1e-4)
        )
    else:
        expected, alarm = (1e-3, 1e-2) if backend.dtype == torch.bfloat16 else (1e-8, 1e-4)
    if hf is not None:
        # torch computes norms, RoPE and activations, whose last bits may depend on the batch.
        expected, alarm = max(expected, 1e-8), max(alarm, 1e-4)
    if measured_difference is not None:
        # The kl is half the mean squared difference. More tokens may differ by more.
        largest_kl = measured_difference**2 / 2
        expected, alarm = max(expected, largest_kl), max(alarm, 100 * largest_kl)
    return Numerics(
        device=str(backend.device),
        dtype=str(backend.dtype).removeprefix("torch."),
        kernels=backend.name,
        torch_families=tuple(sorted(replaced)),
        is_batch_invariant=tiling is not None or backend.uses_compiled_kernels,
        expected_kl=expected,
        alarm_kl=alarm,
        quantize=quantize,
        architecture=None if hf is None else hf.architecture,
        measured_difference=measured_difference,
    )
