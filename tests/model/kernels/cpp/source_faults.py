"""The self-test finds the faults in the sources of the C++ kernels that docs/lab/log.md records.

Each fault changes one line of a copy of the sources, which is then compiled and tested.

Usage: python tests/model/kernels/cpp/source_faults.py [FAULT ...]
"""

import shutil
import sys
import tempfile
from pathlib import Path

from planish.model.kernels.cpp import build, ops
from planish.model.kernels.cpp.self_test import verdicts_of
from planish.model.kernels.self_test.verdicts import Verdict

FAULTS = {
    "own keys are not masked at their end": (
        "attention",
        "attention.h",
        "mask_from(row, own_range.count - extent.skip_own, width - shared_width);",
        "",
    ),
    "the log-sum-exp of a row lacks its max": (
        "log_sum_exp",
        "head.h",
        "(float)(max_logit + std::log(total.total()))",
        "(float)std::log(total.total())",
    ),
    "the copy of an AMX input lacks its last column": (
        "attention",
        "attention_matmuls.h",
        "x + (row * a.group + i % a.group) * a.e, 2 * a.e)",
        "x + (row * a.group + i % a.group) * a.e, 2 * a.e - 2)",
    ),
}


def verdict_with(fault: str, directory: Path) -> Verdict:
    """Return the verdict of the self-test on the family whose source has this fault."""
    family, name, right, wrong = FAULTS[fault]
    sources = directory / "src"
    shutil.copytree(build.SOURCE.parent, sources)
    text = (sources / name).read_text()
    assert text.count(right) == 1, f"{name} has changed: {right}"
    (sources / name).write_text(text.replace(right, wrong))
    build.SOURCE = sources / build.SOURCE.name
    is_amx = "AMX" in fault
    emulated = ["-DEMULATED_TILES"] if is_amx else []
    build.FLAGS = (*("-O1" if flag == "-O3" else flag for flag in build.FLAGS), *emulated)
    library = build.compiled_library(directory / "kernels", ops.instructions())
    (found,) = (each for each in verdicts_of(library, is_amx) if each.family == family)
    return found


def main(*faults: str) -> int:
    """Print what the self-test says about each fault. Return 1 if it misses one, else 0."""
    missed = 0
    original = build.SOURCE, build.FLAGS
    for fault in faults or FAULTS:
        build.SOURCE, build.FLAGS = original
        with tempfile.TemporaryDirectory() as directory:
            verdict = verdict_with(fault, Path(directory))
        missed += verdict.passed
        print(f"{fault}: {'MISSED' if verdict.passed else verdict.reason}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
