"""The performance page contains the recorded measurements."""

import json

import pytest
from report import PAGE, RESULTS, TABLES, with_tables

MACHINE = {"cpu": "A CPU", "cores": 2, "flags": ["amx_bf16"], "memory_gib": 7.6}
HEADER = {
    "date": "2026-01-02",
    "commit": "0123456789ab",
    "machine": MACHINE,
    "load_average_before": 0.25,
}


def peer(seconds: float) -> dict[str, object]:
    return {
        "median_seconds": seconds,
        "seconds": [seconds, 2 * seconds],
        "peak_gib": 1.5,
        "load_seconds": 3.0,
    }


def test_the_page_is_what_the_results_make():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page, RESULTS) == page


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_every_table(name):
    assert PAGE.read_text(encoding="utf-8").count(f"<!-- table: {name} -->\n") == 1


def test_every_result_has_its_table():
    assert {path.stem for path in RESULTS.glob("*.json")} <= set(TABLES)


def test_a_peer_is_compared_with_planish_on_the_same_work(tmp_path):
    report = {
        **HEADER,
        "works": {
            "W1": {"ours": peer(2.0), "limit": peer(1.0), "generate": peer(20.0)},
            "W2": {"ours": {**peer(4.0), "seconds": [4.0]}},
        },
    }
    (tmp_path / "bench.json").write_text(json.dumps(report))
    page = with_tables("before\n<!-- table: bench -->\nold\n<!-- end -->\nafter\n", tmp_path)
    assert page.startswith(
        "before\n<!-- table: bench -->\nA CPU, 2 cores (amx_bf16), 8 GiB; 2026-01-02, commit "
        "0123456789ab"
    )
    assert page.endswith("<!-- end -->\nafter\n")
    assert "old" not in page
    assert "| system | W1 | W2 | peak memory, GiB |" in page
    assert "| planish | 2.00 (2.00 to 4.00) | 4.00 | 1.5, 1.5 |" in page
    assert "| transformers `generate` | 20.00 (20.00 to 40.00), x 10.00 |  | 1.5 |" in page
    assert "| matmuls alone (limit) | 1.00 (1.00 to 2.00), x 0.50 |  | 1.5 |" in page


def test_what_was_not_measured_is_no_table(tmp_path):
    page = "<!-- table: bench -->\nold\n<!-- end --> <!-- table: start -->\nold\n<!-- end -->"
    assert (
        with_tables(page, tmp_path)
        == "<!-- table: bench -->\n<!-- end --> <!-- table: start -->\n<!-- end -->"
    )


def test_a_longer_context_is_charged_for_what_it_adds(tmp_path):
    points = [
        {"context": 256, "step_seconds": 0.010, "attention_flops": 1e9, "attention_bytes": 1e8},
        {"context": 4096, "step_seconds": 0.030, "attention_flops": 5e9, "attention_bytes": 5e8},
    ]
    (tmp_path / "contexts.json").write_text(json.dumps({**HEADER, "contexts": points}))
    page = with_tables("<!-- table: contexts -->\n<!-- end -->", tmp_path)
    assert "| 256 | 10.0 | 1.00 |  |  |" in page
    assert "| 4,096 | 30.0 | 5.00 | 200.0 | 20.0 |" in page


def test_a_fleet_is_beside_the_engine_and_simulated(tmp_path):
    system = {
        "seconds": 20.0,
        "tokens_per_second": 400.4,
        "publish_seconds": 0.012,
        "replica_bytes": [3 << 29, 1 << 30],
        "ratio": 1.784,
    }
    parts = {"replicas": 2.5, "head": 0.5, "object store": 0.25, "home": 0.75}
    step = {
        **{"replicas": 8, "seconds": 4.0, "samples_per_second": 256.0},
        **{"parts": parts, "efficiency": 0.625},
    }
    report = {**HEADER, "systems": {"2 replicas": system}, "simulation": [step]}
    (tmp_path / "fleet.json").write_text(json.dumps(report))
    page = with_tables("<!-- table: fleet -->\n<!-- end -->", tmp_path)
    assert "| 2 replicas | 20.0 | 400 | 1.78 | 12 | 1.5, 1.0 |" in page
    assert "| 8 | 4.00 | 256.0 | 2.50 | 0.50 | 0.25 | 0.75 | 62% |" in page


def test_adapters_are_compared_round_by_round(tmp_path):
    point = {
        "samples": 64,
        "tokens": 2048,
        "new_tokens": 32,
        "median_seconds": 4.0,
        "seconds": [4.0, 5.0, 4.0],
    }
    many = {**point, "adapters": 8, "alone_seconds": [3.0, 3.0, 2.0], "read_seconds_a_step": 0.005}
    one = {**point, "adapters": 1, "alone_seconds": [4.0, 4.0, 4.0], "read_seconds_a_step": 0.0005}
    first = {"new": [0.020, 0.030, 0.100], "used": [0.012, 0.010, 0.011]}
    (tmp_path / "adapters.json").write_text(
        json.dumps({**HEADER, "points": [one, many], "first_tokens": first})
    )
    page = with_tables("<!-- table: adapters -->\n<!-- end -->", tmp_path)
    assert "| 64 = 1 x 64 | 4.00 (4.00 to 5.00) | 512 |  | 125.0 | 0.5 |" in page
    assert "| 64 = 8 x 8 | 4.00 (4.00 to 5.00) | 512 | 0.60 | 125.0 | 5.0 |" in page
    assert (
        "First token of a new version, which includes packing its weights: 30.0 ms; first token "
        "for another prompt after that: 11.0 ms." in page
    )
