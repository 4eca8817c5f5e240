"""Write the tables of docs/lab/performance.md from the recorded results.

    python benchmarks/report.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. Its data are NAME.json in
benchmarks/results; without that file it is empty. A test keeps the page and the results equal.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "lab" / "performance.md"
END = "<!-- end -->"

TITLES = {
    "ours": "planish",
    "ours-int8": 'planish, `quantize="int8"`',
    "ours-nf4": 'planish, `quantize="nf4"`',
    "limit": "matmuls alone (limit)",
    "generate": "transformers `generate`",
    "generate-repeated": "transformers, prompts once, cache repeated by hand",
    "vllm": "vLLM for CPU",
    "llama": "llama.cpp, 4 bits",
    "llama-bf16": "llama.cpp, bf16",
    "peft": "transformers + PEFT, eager",
    "peft-compiled": "transformers + PEFT, `torch.compile`",
    "trl": "TRL GRPOTrainer",
    **{
        f"peft-{size}": f"transformers + PEFT, eager, {size} sequences at a time"
        for size in (4, 8, 16, 32)
    },
}
Row = Sequence[str]
FLEET_PARTS = ("replicas", "head", "object store", "home")
"""The parts of a simulated step, as fleet.py names them."""
SIMULATION_HEADS = ("replicas, simulated", "seconds", "samples/s", *FLEET_PARTS, "efficiency")


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")


def with_tables(page: str, results: Path) -> str:
    """Return the page with every table written again."""
    for name, table in TABLES.items():
        begin, file = f"<!-- table: {name} -->\n", results / f"{name}.json"
        before, mark, rest = page.partition(begin)
        if mark:
            _, end, after = rest.partition(END)
            table_text = (
                table(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else ""
            )
            page = before + mark + table_text + end + after
    return page


def peers_table(report: Mapping[str, Any]) -> str:
    """Systems by workloads. "x 8.00" is a system's median divided by planish's, so that it takes
    eight times as long as planish.
    """
    works = report["works"]
    names = list(dict.fromkeys(name for peers in works.values() for name in peers))
    rows = []
    for name in names:
        cells = []
        for peers in works.values():
            if (peer := peers.get(name)) is None:
                cells.append("")
            elif name == "ours" or "ours" not in peers:
                cells.append(spread(peer))
            else:
                ratio = peer["median_seconds"] / peers["ours"]["median_seconds"]
                cells.append(f"{spread(peer)}, x {ratio:.2f}")
        memory = ", ".join(
            f"{peers[name]['peak_gib']:.1f}" for peers in works.values() if name in peers
        )
        rows.append([TITLES.get(name, name), *cells, memory])
    return provenance(report) + table(("system", *works, "peak memory, GiB"), rows)


def busy_table(report: Mapping[str, Any]) -> str:
    """Speed beside a busy process as a share of that on an idle machine: 0.5 takes twice as
    long.
    """
    rows = []
    for workload, spins in report["works"].items():
        for spin, loads in spins.items():
            idle, busy = (loads[load]["median_seconds"] for load in ("idle", "busy"))
            rows.append(
                [
                    workload,
                    spin,
                    *("given up" if median is None else f"{median:.2f}" for median in (idle, busy)),
                    f"{idle / busy:.0%}" if idle and busy else "",
                ]
            )
    heads = (
        "workload",
        "GOMP_SPINCOUNT",
        "seconds idle, median",
        "beside a busy process",
        "speed kept",
    )
    return provenance(report) + table(heads, rows)


def growth_table(report: Mapping[str, Any]) -> str:
    rows = [
        [
            workload,
            str(point["groups"]),
            spread(point),
            f"{1e3 * point['median_seconds'] / point['tokens']:.3f}",
            f"{point['peak_gib']:.2f}",
        ]
        for workload, points in report["works"].items()
        for point in points
    ]
    heads = (
        "workload",
        "groups",
        "seconds, median (min to max)",
        "milliseconds per new token",
        "peak memory, GiB",
    )
    return provenance(report) + table(heads, rows)


def contexts_table(report: Mapping[str, Any]) -> str:
    points = report["contexts"]
    first = points[0]
    rows = []
    for point in points:
        extra_seconds = point["step_seconds"] - first["step_seconds"]
        extra_flops = point["attention_flops"] - first["attention_flops"]
        extra_bytes = point["attention_bytes"] - first["attention_bytes"]
        rows.append(
            [
                f"{point['context']:,}",
                f"{1e3 * point['step_seconds']:.1f}",
                f"{point['attention_flops'] / 1e9:.2f}",
                f"{extra_flops / extra_seconds / 1e9:.1f}"
                if extra_seconds > 0 and extra_flops
                else "",
                f"{extra_bytes / extra_seconds / 1e9:.1f}"
                if extra_seconds > 0 and extra_flops
                else "",
            ]
        )
    heads = (
        "context, tokens",
        "milliseconds per step",
        "attention, GFLOP per step",
        "GFLOP/s, additional to the first row",
        "GB/s of keys and values, additional",
    )
    return provenance(report) + table(heads, rows)


def start_table(report: Mapping[str, Any]) -> str:
    rows = [[name.replace("_", " "), spread(part)] for name, part in report["parts"].items()]
    return provenance(report) + table(
        ("until", "seconds since process start, median (min to max)"), rows
    )


def overheads_table(report: Mapping[str, Any]) -> str:
    rows = [
        [part["title"], f"{part['median']:.2f}", part["unit"]] for part in report["parts"].values()
    ]
    return provenance(report) + table(("what", "median", "unit"), rows)


def adapters_table(report: Mapping[str, Any]) -> str:
    """Medians of rounds. A ratio of 0.9 means 10% slower than one adapter."""
    rows = []
    for point in report["points"]:
        ratios = [
            alone / took
            for alone, took in zip(point["alone_seconds"], point["seconds"], strict=True)
        ]
        rows.append(
            [
                f"{point['samples']} = {point['adapters']} x "
                f"{point['samples'] // point['adapters']}",
                spread(point),
                f"{point['tokens'] / point['median_seconds']:,.0f}",
                f"{statistics.median(ratios):.2f}" if point["adapters"] > 1 else "",
                f"{1e3 * point['median_seconds'] / point['new_tokens']:.1f}",
                f"{1e3 * point['read_seconds_a_step']:.1f}",
            ]
        )
    heads = (
        "samples = adapters x answers",
        "seconds, median (min to max)",
        "tokens per second",
        "relative to one adapter, same requests",
        "milliseconds per step, including prompts",
        "milliseconds to read all adapters' weights",
    )
    new, used = (1e3 * statistics.median(report["first_tokens"][name]) for name in ("new", "used"))
    first = (
        f"\nFirst token of a new version, which includes packing its weights: {new:.1f} ms; first "
        f"token for another prompt after that: {used:.1f} ms.\n"
    )
    return provenance(report) + table(heads, rows) + first


def fleet_table(report: Mapping[str, Any]) -> str:
    """Medians of rounds, and the simulation of larger fleets from the measured costs."""
    rows = [
        [
            name,
            f"{system['seconds']:.1f}",
            f"{system['tokens_per_second']:.0f}",
            f"{system['ratio']:.2f}",
            f"{1e3 * system['publish_seconds']:.0f}",
            ", ".join(f"{size / 2**30:.1f}" for size in system["replica_bytes"]),
        ]
        for name, system in report["systems"].items()
    ]
    heads = (
        "fleet",
        "seconds of a step",
        "tokens per second",
        "relative to one engine with one thread",
        "publishing, ms",
        "GiB of each replica",
    )
    simulated = [
        [
            str(step["replicas"]),
            f"{step['seconds']:.2f}",
            f"{step['samples_per_second']:.1f}",
            *(f"{step['parts'][part]:.2f}" for part in FLEET_PARTS),
            f"{step['efficiency']:.0%}",
        ]
        for step in report["simulation"]
    ]
    return "\n".join(
        (
            provenance(report) + table(heads, rows),
            provenance(report.get("head", report)) + table(SIMULATION_HEADS, simulated),
        )
    )


def gpu_table(report: Mapping[str, Any]) -> str:
    """Measurements of gpu.py, with their shares of the GPU's limits."""
    rows = [
        [
            row["what"],
            f"{_three_digits(row['value'])} ({_three_digits(min(row['values']))} to "
            f"{_three_digits(max(row['values']))})",
            row["unit"],
            f"{row['share']:.0%} of {row['of']}" if row["share"] is not None else "",
        ]
        for part in report["parts"].values()
        for row in part["rows"]
    ]
    gpu, commits = report["gpu"], sorted({part["commit"] for part in report["parts"].values()})
    heading = (
        f"{gpu['name']}, {gpu['memory_gib']:.0f} GiB; torch {gpu['torch']}, CUDA {gpu['cuda']}, "
        f"Triton {gpu['triton']}; {report['date']}, commit {', '.join(commits)}\n\n"
    )
    return heading + table(("what", "median (min to max)", "unit", "share"), rows)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(peer: Mapping[str, Any]) -> str:
    """Return the median, and the minimum and maximum of several rounds."""
    seconds = peer["seconds"]
    digits = 2 if peer["median_seconds"] >= 1 else 3
    median = f"{peer['median_seconds']:.{digits}f}"
    if len(seconds) == 1:
        return median
    return f"{median} ({min(seconds):.{digits}f} to {max(seconds):.{digits}f})"


def provenance(report: Mapping[str, Any]) -> str:
    """Return the line above a table that describes the machine and the commit."""
    machine = report["machine"]
    flags = ", ".join(machine["flags"]) or "no AVX2"
    return (
        f"{machine['cpu']}, {machine['cores']} cores ({flags}), {machine['memory_gib']:.0f} GiB; "
        f"{report['date']}, commit {report['commit']}, load average before "
        f"{report['load_average_before']:.1f}\n\n"
    )


def table(heads: Row, rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]]) + "\n"


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "bench": peers_table,
    "amx": peers_table,
    "avx2": peers_table,
    "avx2-iteration": peers_table,
    "peers": peers_table,
    "constrained": peers_table,
    "llama": peers_table,
    "iteration": peers_table,
    "quantized": peers_table,
    "busy": busy_table,
    "growth": growth_table,
    "contexts": contexts_table,
    "adapters": adapters_table,
    "start": start_table,
    "overheads": overheads_table,
    "fleet": fleet_table,
    "gpu-qwen3-8b": gpu_table,
    "gpu-qwen3-0.6b": gpu_table,
    "gpu-smollm2-135m-instruct": gpu_table,
}


if __name__ == "__main__":
    main()
