"""The parts of a fleet that decide: who samples what, who computes what, and who is lost."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from planish import Constraint, SamplingParams, ServiceClient, StorageError, UserError
from planish.fleet import plan
from planish.fleet.accepted import AcceptedSamples
from planish.fleet.link import EngineStatus
from planish.fleet.ray_link import describe_end
from planish.fleet.replica import Watch, check_same
from planish.fleet.routing import PrefixTable
from planish.fleet.samplers import prefix_keys
from planish.fleet.spread_call import divide
from planish.fleet.versions import SharedVersions
from planish.images import ImageChunk
from planish.recipes import rl_basic
from planish.service import Sample
from planish.types import EncodedTextChunk, ModelInput

PROMPT = list(range(640))


def test_a_request_follows_its_prefix_while_that_saves_more_than_waiting_costs():
    table = PrefixTable()
    assert table.choose(PROMPT, "v1", 100, {0: 0, 1: 0}) == (0, 740)
    # 640 cached tokens are worth more than 500 tokens of waiting, and less than 700.
    assert table.choose([*PROMPT, 7], "v1", 100, {0: 500, 1: 0}) == (0, 101)
    assert table.choose([*PROMPT, 7], "v1", 100, {0: 700, 1: 0}) == (1, 741)
    # Now both have it.
    assert table.choose(PROMPT, "v1", 0, {0: 700, 1: 0}) == (1, 0)


def test_a_version_that_cannot_be_stored_has_no_use():
    def fail(_: object) -> None:
        raise StorageError("the object store is full")

    unused: Any = None
    versions = SharedVersions(fail, unused, unused)
    version: Any = SimpleNamespace(name="v1")
    for _ in range(2):  # The second call must not take the version for stored.
        with pytest.raises(StorageError):
            versions.share(version)
    assert not +versions._uses
    assert not versions._stored


def test_a_prefix_belongs_to_one_version_and_is_lost_with_its_replica():
    table = PrefixTable()
    table.choose(PROMPT, "v1", 0, {1: 0})
    assert table.choose(PROMPT, "v2", 0, {0: 0, 1: 0}) == (0, 640)
    table.forget(1)
    assert table.choose(PROMPT, "v1", 0, {1: 0}) == (1, 640)


def test_images_are_part_of_a_prefix():
    """An image may come without its number of tokens, which an engine computes."""

    def keys(data: bytes, expected_tokens: int | None) -> list[int]:
        image = ImageChunk(data, "png", expected_tokens)
        return prefix_keys(ModelInput([EncodedTextChunk([5]), image, EncodedTextChunk([7])]))

    assert len(keys(b"a", 4)) == 6
    assert keys(b"a", None) == keys(b"a", 1)
    assert keys(b"a", None) != keys(b"b", None)
    assert prefix_keys(ModelInput.from_ints(PROMPT)) == PROMPT


def test_short_prompts_go_to_the_replica_with_the_least_work():
    table = PrefixTable()
    loads = {0: 0, 1: 0, 2: 0}
    for number in range(9):
        replica, work = table.choose([1, 2, number], "base", 10, loads)
        loads[replica] += work
    assert loads == {0: 39, 1: 39, 2: 39}


@pytest.mark.parametrize("num_rows", range(1, 12))
@pytest.mark.parametrize("count", range(1, 6))
def test_micro_batches_are_divided_into_ranges_without_gaps(num_rows, count):
    rows = [(7 * index) % 5 + 1 for index in range(num_rows)]
    ranges = divide(rows, count)
    assert [index for indices in ranges for index in indices] == list(range(num_rows))
    assert len(ranges) == min(count, num_rows)
    assert all(ranges)


def test_the_work_is_about_equal():
    assert divide([10] * 12, 3) == [range(4), range(4, 8), range(8, 12)]
    assert divide([100, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10], 2) == [range(1), range(1, 11)]


class SilentLink:
    """A link whose process answers only when the test says so."""

    def __init__(self) -> None:
        self.answer = threading.Event()

    def request(self, name: str) -> None:
        assert name == "ping"
        assert self.answer.wait(60)


class SilentReplica:
    def __init__(self) -> None:
        self.link = SilentLink()
        self.number, self.status, self.num_signs = 0, EngineStatus(), 0


def test_a_replica_is_given_up_when_it_is_silent_for_too_long():
    now = [0.0]
    watch = Watch(silent_seconds=10.0, stall_seconds=900.0, clock=lambda: now[0])
    replica = SilentReplica()
    assert watch.tick([replica]) == []  # pyright: ignore[reportArgumentType]
    for _ in range(3):
        now[0] += 3.0
        assert watch.tick([replica]) == []  # pyright: ignore[reportArgumentType]
    now[0] += 3.0
    assert watch.tick([replica]) == [replica]  # pyright: ignore[reportArgumentType]
    replica.link.answer.set()


def test_a_replica_is_given_up_when_its_engine_hangs():
    now = [0.0]
    watch = Watch(silent_seconds=10.0, stall_seconds=60.0, clock=lambda: now[0])
    replica = SilentReplica()
    for sign in range(1, 61):
        # The process answers, and the engine has work and makes no progress.
        replica.status, replica.num_signs = EngineStatus(progress=7), sign
        assert watch.tick([replica]) == []  # pyright: ignore[reportArgumentType]
        now[0] += 1.0
    replica.num_signs += 1
    assert watch.tick([replica]) == [replica]  # pyright: ignore[reportArgumentType]
    replica.status, replica.num_signs = EngineStatus(progress=8), 62
    assert watch.tick([replica]) == []  # pyright: ignore[reportArgumentType]
    replica.link.answer.set()


def test_a_pause_of_this_process_is_no_silence_of_a_replica():
    now = [0.0]
    watch = Watch(silent_seconds=10.0, stall_seconds=900.0, clock=lambda: now[0])
    replica = SilentReplica()
    watch.tick([replica])  # pyright: ignore[reportArgumentType]
    now[0] += 3600.0
    assert watch.tick([replica]) == []  # pyright: ignore[reportArgumentType]
    replica.link.answer.set()


def test_only_a_process_that_ray_ends_for_lack_of_memory_is_called_so():
    for detail, is_memory in (
        ("OOM kill reason: Memory usage 9136902144B exceeded threshold of 25276060B", True),
        ("Worker exit detail: causes include: (1) the process was killed by the OOM killer", False),
    ):
        message = describe_end(RuntimeError(f"The actor died.\n\tclass_name: Actor\n{detail}"))
        assert ("lower kv_cache_bytes" in message) == is_memory
        assert detail in message


def test_replicas_with_other_versions_or_weights_are_rejected():
    check_same("the devices", {0: "a", 1: "a"})
    with pytest.raises(UserError, match="the devices differ between replicas.*replica 1: b"):
        check_same("the devices", {0: "a", 1: "b"})


def recipe_options(**options: Any) -> rl_basic.Options:
    return rl_basic.Options(model_name="tiny", dataset="missing", **options)


def test_recipes_pass_on_where_their_engine_is():
    assert recipe_options().client_options == {}
    given = {"base_url": "http://a", "replicas": 2, "ray": "auto", "tensor_parallel": 2}
    given["sampler"] = "http://b"
    assert recipe_options(**given).client_options == given


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"replicas": 2}, "leave out either tensor_parallel, or replicas and ray"),
        ({"ray": "auto"}, "leave out either tensor_parallel, or replicas and ray"),
        ({"sampler": "http://b"}, "tensor_parallel=2 divides the engine's own sampler too"),
        ({"base_url": "http://a"}, "tensor_parallel configures an engine in this process"),
    ],
)
def test_tensor_parallel_excludes_other_places_of_the_engine(other, message):
    with pytest.raises(UserError, match=message):
        ServiceClient(**recipe_options(tensor_parallel=2, **other).client_options)


def test_rollouts_on_a_cluster_need_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"rollout_processes=ray need Ray.*pip install 'planish\["):
        rl_basic.main(recipe_options(rollout_processes="ray"))


@pytest.mark.parametrize("value", [-1, "all"])
def test_rollout_processes_are_a_number_or_ray(value):
    with pytest.raises((UserError, TypeError), match="rollout_processes"):
        rl_basic.main(recipe_options(rollout_processes=value))


def test_replicas_on_gpus_do_not_wait_for_cpus_that_the_cluster_lacks(monkeypatch):
    free = {"GPU": 8, "CPU": 3}
    for name, function in {
        "import_ray": lambda: None,
        "join_cluster": lambda address: False,
        "has_gpus": lambda: True,
        "free_devices": lambda kind: free[kind],
        "free_by_machine": lambda kind: [free[kind]],
        "wait_for_devices": lambda kind, needed: free[kind],
    }.items():
        monkeypatch.setattr(plan, name, function)
    with pytest.raises(UserError, match="replicas=8: each replica needs a CPU beside its GPU"):
        plan.plan_fleet("auto", None, "auto")
    assert plan.plan_fleet("auto", 3, "auto").num_replicas == 3


def test_a_sample_is_known_to_be_accepted_if_a_larger_one_with_its_options_was():
    def sample(tokens: list[int], last_n: int | None = None, **options: Any) -> Sample:
        params = SamplingParams(**{"max_tokens": 8, "seed": len(tokens), **options})
        prompt = ModelInput.from_ints(tokens)
        return Sample("s", prompt, 2, params, prompt_logprobs_last_n=last_n)

    accepted = AcceptedSamples()
    assert not accepted.covers(sample([1, 9]), "tiny")
    for tokens in ([1, 2, 3], [9]):
        accepted.add(sample(tokens), "tiny")
    assert accepted.covers(sample([1, 9, 9]), "tiny")
    for tokens in ([1, 2, 3, 4], [10], [-1], []):
        assert not accepted.covers(sample(tokens), "tiny")
    assert not accepted.covers(sample([1]), "other")
    options: dict[str, Any]
    for options in ({"max_tokens": 9}, {"stop": ["a"]}, {"temperature": 0.5}, {"last_n": 1}):
        assert not accepted.covers(sample([1], **options), "tiny")
    for options in ({"max_tokens": None}, {"constraint": Constraint("regex", "a")}):
        accepted.add(sample([1], **options), "tiny")
        assert not accepted.covers(sample([1], **options), "tiny")
