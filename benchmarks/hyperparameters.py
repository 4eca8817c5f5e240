"""Measure the effect of a run's options, changing one at a time in `math_rl env=arithmetic` on the
embedded model.

    python benchmarks/hyperparameters.py RUNS [NAME ...]     make the runs (of the named tables)
        under the directory RUNS
    python benchmarks/hyperparameters.py RUNS --tables       write the tables of
        docs/guide/hyperparameters.md from them

An existing run is resumed or read. Each run is deterministic given its seed; the tables contain no
times.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from planish.files import read_rows, write_atomically

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "hyperparameters.md"
BASE_OPTIONS = {
    "env": "arithmetic",
    "max_operand": 20,
    "batch_size": 8,
    "group_size": 8,
    "learning_rate": 5e-4,
    "lora_rank": 32,
    "max_steps": 12,
    "eval_every": 12,
    "eval_problems": 50,
    "num_groups_to_log": 1,
}
SWEEPS: Mapping[str, Sequence[Mapping[str, object]]] = {
    "learning rate": [{"learning_rate": rate} for rate in (1e-4, 5e-4, 2e-3)],
    "group size": [{"batch_size": 64 // size, "group_size": size} for size in (4, 8, 16)],
    "LoRA rank": [{"lora_rank": rank} for rank in (2, 32)],
    "KL penalty": [{"kl_penalty_coef": coefficient} for coefficient in (0.0, 0.3)],
    "async lag": [{"max_steps_off_policy": lag} for lag in (0, 4)],
}
COLUMNS = (
    "reward, first 4 steps",
    "next 4",
    "last 4",
    "test",
    "entropy, last 4",
    "kl v2, largest",
)


def main(arguments: Sequence[str]) -> None:
    directory, *names = arguments
    if names == ["--tables"]:
        write_atomically(PAGE, fill_tables(PAGE.read_text(encoding="utf-8"), Path(directory)))
        return
    for name in names or SWEEPS:
        for changes in SWEEPS[name]:
            make_run(run_path(Path(directory), changes), changes)


def run_path(directory: Path, changes: Mapping[str, object]) -> Path:
    non_default = {
        key: value
        for key, value in changes.items()
        if value != BASE_OPTIONS.get(key, default_of(key))
    }
    return directory / (
        "_".join(f"{key}={value}" for key, value in sorted(non_default.items())) or "base"
    )


def default_of(key: str) -> object:
    return {"kl_penalty_coef": 0.0, "max_steps_off_policy": 0}.get(key)


def make_run(path: Path, changes: Mapping[str, object]) -> None:
    options = {**BASE_OPTIONS, **changes, "log_path": path}
    command = [
        sys.executable,
        "-m",
        "planish.recipes.math_rl",
        *(f"{key}={value}" for key, value in options.items()),
    ]
    print(" ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def fill_tables(page: str, directory: Path) -> str:
    """Return the page with the table of each sweep between its marks, if all its runs exist."""
    for name, variants in SWEEPS.items():
        begin, end = f"<!-- sweep: {name} -->\n", "<!-- end -->"
        before, mark, rest = page.partition(begin)
        if mark:
            _, end, after = rest.partition(end)
            page = before + mark + table(variants, directory) + end + after
    return page


def table(variants: Sequence[Mapping[str, object]], directory: Path) -> str:
    lines = [
        "| " + " | ".join([", ".join(variants[0]), *COLUMNS]) + " |",
        "|" + "---|" * (len(COLUMNS) + 1),
    ]
    for changes in variants:
        rows = read_rows(run_path(directory, changes) / "metrics.jsonl")
        values = ", ".join(
            f"{value:g}" if isinstance(value, float) else str(value) for value in changes.values()
        )
        lines.append("| " + " | ".join([values, *metric_cells(rows)]) + " |")
    return "\n".join(lines) + "\n"


def metric_cells(rows: Sequence[Mapping[str, float]]) -> list[str]:
    steps = [row for row in rows if "env/all/reward/total" in row]
    rewards = [row["env/all/reward/total"] for row in steps]
    tests = [row["test/env/all/correct"] for row in rows if "test/env/all/correct" in row]
    entropies = [row["optim/entropy"] for row in steps[-4:] if "optim/entropy" in row]
    gaps = [row["optim/kl_sample_train_v2"] for row in steps if "optim/kl_sample_train_v2" in row]
    return [
        f"{fmean(rewards[:4]):.2f}",
        f"{fmean(rewards[4:8]):.2f}",
        f"{fmean(rewards[-4:]):.2f}",
        f"{tests[-1]:.2f}",
        f"{fmean(entropies):.2f}" if entropies else "",
        f"{max(gaps):.0e}",
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
