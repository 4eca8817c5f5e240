"""The simulation of benchmarks/fleet.py: which part of a step does not shrink with the replicas."""

import pytest
from fleet import NETWORK_BYTES_PER_SECOND, StepCosts, simulate

COSTS = StepCosts(
    compute_seconds=100.0,
    head_seconds=0.65,
    head_seconds_per_replica=0.01,
    export_seconds=0.1,
    version_bytes=int(NETWORK_BYTES_PER_SECOND),  # one second over the network
    gradient_bytes=int(2 * NETWORK_BYTES_PER_SECOND),
    home_seconds=0.2,
)


def test_one_replica_sends_nothing():
    step = simulate(COSTS, 1)
    assert step.parts["object store"] == 0.1
    assert step.parts["home"] == 0.2
    assert step.efficiency == pytest.approx(100 / (100 + 0.65 + 0.1 + 0.2))


@pytest.mark.parametrize("replicas", [8, 64, 512])
def test_the_home_receives_the_gradients_of_all_replicas(replicas):
    step = simulate(COSTS, replicas)
    assert step.parts["replicas"] == 100 / replicas
    assert step.parts["home"] == pytest.approx(0.2 + 2 * (replicas - 1))
    assert step.bottleneck == "home"
    assert step.seconds == pytest.approx(sum(step.parts.values()))


def test_a_version_reaches_the_replicas_along_a_tree():
    assert [simulate(COSTS, count).parts["object store"] for count in (2, 8, 512)] == [
        1.1,
        3.1,
        9.1,
    ]
