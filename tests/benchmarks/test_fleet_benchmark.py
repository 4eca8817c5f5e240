"""The simulation of benchmarks/fleet.py: which part of a step grows with the replicas."""

from dataclasses import replace

import pytest
from fleet import NETWORK_BYTES_PER_SECOND, StepCosts, simulate

COSTS = StepCosts(
    export_seconds=0.1,
    version_bytes=int(NETWORK_BYTES_PER_SECOND),  # one second over the network
    gradient_bytes=int(2 * NETWORK_BYTES_PER_SECOND),
    home_seconds=0.2,
    compute_seconds=100.0,
    samples=128,
    head_seconds=0.5,
    head_idle_share=0.0,
)


def test_one_replica_sends_nothing():
    step = simulate(COSTS, 1)
    assert step.parts["object store"] == 0.1
    assert step.parts["home"] == 0.2
    assert step.efficiency == pytest.approx(100 / (100 + 0.5 + 0.1 + 0.2))
    assert step.samples_per_second == pytest.approx(128 / step.seconds)


@pytest.mark.parametrize("replicas", [8, 64, 512])
def test_the_home_receives_the_gradients_of_all_replicas(replicas):
    step = simulate(COSTS, replicas)
    assert step.parts["replicas"] == 100.0
    assert step.parts["head"] == replicas / 2
    assert step.parts["home"] == pytest.approx(0.2 + 2 * (replicas - 1))
    assert step.bottleneck == "home"
    assert step.seconds == pytest.approx(sum(step.parts.values()))
    assert step.samples_per_second == pytest.approx(replicas * 128 / step.seconds)


def test_signs_of_life_slow_the_head_down():
    costs = replace(COSTS, head_idle_share=0.001)
    assert simulate(costs, 500).parts["head"] == pytest.approx(
        2 * simulate(COSTS, 500).parts["head"]
    )


def test_a_version_reaches_the_replicas_along_a_tree():
    assert [simulate(COSTS, count).parts["object store"] for count in (2, 8, 512)] == [
        1.1,
        3.1,
        9.1,
    ]
