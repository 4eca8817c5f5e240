"""All probes on one server: python -m conformance.probes MODULE BASE_MODEL, in an environment that
has an SDK.

It drives the server at TINKER_BASE_URL with MODULE (`tinker` or `logits`), and writes one JSON line
a probe; one more, which failed, for each public method of the SDK that has no probe.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from conformance import rest_probes, sampling_probes, saving_probes, service_probes, training_probes
from conformance.bench import FAILED, PROBES, Bench, Outcome, check, unprobed

__all__ = ["MODULES", "PROBES"]

MODULES = (service_probes, training_probes, saving_probes, sampling_probes, rest_probes)
"""Each adds its probes to PROBES when it is imported."""


def outcomes(bench: Bench) -> Iterator[Outcome]:
    for probe in PROBES.values():
        yield check(probe, bench)
    for method in unprobed(bench):
        yield Outcome(method, FAILED, "the SDK has this method, and no probe is for it")


def main() -> None:
    module, base_model = sys.argv[1:]
    for outcome in outcomes(Bench(module, base_model)):
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
