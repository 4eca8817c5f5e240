"""The accuracy of one base model's results on this machine."""

from __future__ import annotations

from collections.abc import Iterator

from planish.doctor.findings import Finding
from planish.doctor.preparation import PreparationResult


def numerics_findings(preparation: PreparationResult | None) -> Iterator[Finding]:
    """Yield the numerics of the base model. The findings have no remedies, because the results are
    correct on every path.

    `preparation` is None if the preparation was not done in time.
    """
    result = preparation.numerics if preparation is not None else None
    if result is None:
        missing = "no base model is on this machine, or a kernel failed"
        reason = "the check did not finish in time" if preparation is None else missing
        yield Finding("batch_invariant", f"not known: {reason}", {})
        return
    replaced = f"; torch for {', '.join(result.torch_families)}" if result.torch_families else ""
    yield Finding(
        "kernels", f"{result.kernels}{replaced}", {"replaced": list(result.torch_families)}
    )
    text = "planish's own decoder"
    if result.architecture is not None:
        text = f"transformers' {result.architecture} with planish's attention and linears"
    yield Finding("layers", text, {"architecture": result.architecture})
    if result.is_batch_invariant and result.architecture is not None:
        text = "yes, except for norms, RoPE and activations, which torch computes"
    elif result.is_batch_invariant:
        text = "yes: a sample with a seed does not depend on what else runs"
    else:
        text = (
            "no: the tokens of a seed may depend on other requests in the batch; "
            "deterministic=True (--deterministic) prevents this, but is slower"
        )
    yield Finding("batch_invariant", text, result.is_batch_invariant)
    if result.measured_difference is not None:
        text = (
            f"logprobs of some sampled tokens differ by at most {result.measured_difference:.2g} "
            "between sampler and trainer"
        )
        yield Finding("measured_difference", text, result.measured_difference)
    expected = f"up to about {result.expected_kl:g}" if result.expected_kl else "exactly 0"
    text = (
        f"{expected} between sampler and trainer on-policy; a value above {result.alarm_kl:g} "
        "means a fault"
    )
    value = {"expected": result.expected_kl, "alarm": result.alarm_kl}
    yield Finding("kl_sample_train_v2", text, value)
