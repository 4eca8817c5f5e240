"""The accuracy of one base model's results on this machine."""

from __future__ import annotations

from collections.abc import Iterator

from planish.doctor.findings import Finding
from planish.doctor.preparation import PreparationResult


def numerics(prepared: PreparationResult | None) -> Iterator[Finding]:
    """Yield the numerics of the base model. The findings have no remedies, because the results are
    correct on every path.

    `prepared` is None if the preparation was not done in time.
    """
    found = prepared.numerics if prepared is not None else None
    if found is None:
        missing = "no base model is on this machine, or a kernel failed"
        reason = "the check did not finish in time" if prepared is None else missing
        yield Finding("batch_invariant", f"not known: {reason}", {})
        return
    replaced = (
        f"; torch for {', '.join(found.replaced_families)}" if found.replaced_families else ""
    )
    yield Finding(
        "kernels", f"{found.kernels}{replaced}", {"replaced": list(found.replaced_families)}
    )
    if found.is_batch_invariant:
        text = "yes: a sample with a seed does not depend on what else runs"
    else:
        text = (
            "no: the tokens of a seed may depend on other requests in the batch; "
            "deterministic=True (--deterministic) prevents this, but is slower"
        )
    yield Finding("batch_invariant", text, found.is_batch_invariant)
    expected = f"up to about {found.expected_kl:g}" if found.expected_kl else "exactly 0"
    text = (
        f"{expected} between sampler and trainer on-policy; a value above {found.alarm_kl:g} "
        "means a fault"
    )
    value = {"expected": found.expected_kl, "alarm": found.alarm_kl}
    yield Finding("kl_sample_train_v2", text, value)
