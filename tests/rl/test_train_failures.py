"""RL runs with errors, interruptions and dropped groups, and how they resume."""

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import chz
import digest_service
import pytest
from digest_service import FakeService, FakeTrainingClient
from digit_env import DigitsBuilder
from eventful_env import AtGroup, Eventful, EventfulBuilder, nothing
from variants import slow_after

from planish.errors import CheckpointError, DamagedFileError, NonFiniteError, UserError
from planish.files import read_rows
from planish.processes.interruption import run_in_thread
from planish.rl.rollout.strategy import MinViableGroup
from planish.rl.types import RLDatasetBuilder
from planish.runlog.evaluators import SamplingClientEvaluator
from planish.training import run_loop, train_rl
from planish.training.rl_config import AsyncConfig, Config, StreamMinibatchConfig


@pytest.fixture(autouse=True)
def _no_git(monkeypatch):
    monkeypatch.setattr(run_loop, "code_diff", lambda paths: "")


@pytest.fixture(autouse=True)
def _control_c():
    """Enable SIGINT, because a shell lets background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def config_of(path, builder: RLDatasetBuilder | None = None, **changes):
    options = {
        "learning_rate": 0.1,
        "dataset_builder": builder or EventfulBuilder(happening=nothing, at_test=nothing),
        "model_name": "tiny",
        "max_tokens": 8,
        "log_path": str(path),
        "eval_every": 0,
        "num_groups_to_log": 0,
        "rollout_json_export": False,
        **changes,
    }
    return Config(**options)


def train(service, path, builder=None, **changes):
    return asyncio.run(train_rl.main(config_of(path, builder, **changes), service))


def rows_of(path):
    return read_rows(path / "metrics.jsonl")


def steps_of(path):
    return [row["step"] for row in rows_of(path)]


def saved(path):
    return [(record["name"], record["batch"]) for record in read_rows(path / "checkpoints.jsonl")]


def broken() -> None:
    raise RuntimeError("the sandbox is gone")


# Errors.


def test_an_error_names_its_step_and_finished_steps_are_saved(service, tmp_path):
    builder = EventfulBuilder(happening=AtGroup(5, broken))  # the second group of step 2
    with pytest.raises(RuntimeError, match="the sandbox is gone") as caught:
        train(service, tmp_path, builder)
    assert "in group 1 of step 2" in caught.value.__notes__
    assert saved(tmp_path) == [("000002", 2)]
    train(whole := FakeService(service.tokenizer), tmp_path / "whole", builder)
    train(service, tmp_path, builder)
    assert steps_of(tmp_path) == [0, 1, 2, 3]
    assert service.clients[-1].weights == whole.clients[-1].weights


def test_a_run_whose_group_always_fails_resumes_with_another_tolerance(service, tmp_path, capsys):
    builder = EventfulBuilder(happening=AtGroup(5, broken, times=1000), tests=1, at_test=nothing)
    with pytest.raises(RuntimeError, match="the sandbox is gone"):
        train(service, tmp_path, builder)
    message = "failed after 2 of 4 steps; once the cause is removed, the same command resumes there"
    assert message in capsys.readouterr().out.replace("\n", " ")
    changes = {
        "rollout_error_tolerance": MinViableGroup(min_successful=1),
        "eval_every": 2,
        "eval_on_start": False,
        "eval_samples": 2,
        "eval_temperature": 0.5,
    }
    train(service, tmp_path, builder, **changes)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[2]["rollout_errors/groups_skipped"] == 1
    evaluated = [row["step"] for row in rows if "test/env/all/total_episodes" in row]
    assert evaluated == [2, 4]


def test_a_dataset_error_names_its_batch_and_finished_steps_are_saved(
    service, tmp_path, monkeypatch
):
    def get_batch(self, index):
        return [gone[index]] if index == 2 else made(self, index)

    gone, made = {}, Eventful.get_batch
    monkeypatch.setattr(Eventful, "get_batch", get_batch)
    with pytest.raises(KeyError) as caught:
        train(service, tmp_path)
    assert "in batch 2 of Eventful" in caught.value.__notes__
    assert saved(tmp_path) == [("000002", 2)]


def test_a_builder_without_a_dataset_is_rejected(service, tmp_path):
    @chz.chz
    class Empty(RLDatasetBuilder):
        async def __call__(self) -> Any:
            return None, None

    with pytest.raises(UserError, match="returned None for training"):
        train(service, tmp_path, Empty())


def test_the_first_of_several_errors_names_its_step(service, tmp_path):
    async def several() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(asyncio.to_thread(broken))

    with pytest.raises(RuntimeError, match="the sandbox is gone") as caught:
        train(service, tmp_path, EventfulBuilder(happening=AtGroup(5, several)))
    assert "in group 1 of step 2" in caught.value.__notes__
    assert saved(tmp_path) == [("000002", 2)]


def test_system_exit_in_an_environment_saves_the_finished_steps(service, tmp_path):
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        train(service, tmp_path, EventfulBuilder(happening=AtGroup(5, partial(sys.exit, 3))))
    assert saved(tmp_path) == [("000002", 2)]


def test_an_error_between_substeps_saves_nothing(service, tmp_path):
    """After the first of two substeps, the weights belong to no step."""

    async def slow(number):
        if number == 3:
            while service.operations.count("optim_step") < 3:
                await asyncio.sleep(0.001)
            broken()

    builder = EventfulBuilder(happening=slow)
    stream = StreamMinibatchConfig(num_minibatches=1)
    with pytest.raises(RuntimeError):
        train(service, tmp_path, builder, num_substeps=2, stream_minibatch_config=stream)
    assert saved(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "options", "left"),
    [
        (NonFiniteError("the gradient is not finite"), {}, [("000002", 2)]),
        (ConnectionError("no answer: the step may be done or not"), {}, []),
        (NonFiniteError("the second of two substeps"), {"num_substeps": 2}, []),
    ],
)
def test_a_rejected_optimizer_step_saves_the_earlier_steps(
    service, tmp_path, monkeypatch, error, options, left
):
    class FailingTrainer(FakeTrainingClient):
        async def optim_step_async(self, params):
            if len(self.rates) < (5 if options else 2):
                return await super().optim_step_async(params)
            (pending := asyncio.get_running_loop().create_future()).set_exception(error)
            return pending

    monkeypatch.setattr(digest_service, "FakeTrainingClient", FailingTrainer)
    with pytest.raises(type(error), match=str(error)):
        train(service, tmp_path, **options)
    assert steps_of(tmp_path) == [0, 1]
    assert saved(tmp_path) == left


def test_an_error_in_a_later_batch_lets_the_current_step_finish(service, tmp_path, monkeypatch):
    """With staleness, a group may fail while the trainer works on the previous step."""
    training = asyncio.Event()

    class SlowTrainer(FakeTrainingClient):
        async def optim_step_async(self, params):
            return self.later(await super().optim_step_async(params))

        async def later(self, pending):
            if len(self.rates) == 2:
                training.set()
                await asyncio.sleep(0.05)  # let the error reach the loop
            return await pending

    async def fail_while_training(number):
        if number == 4:
            await training.wait()
            broken()

    monkeypatch.setattr(digest_service, "FakeTrainingClient", SlowTrainer)
    builder = EventfulBuilder(happening=fail_while_training)
    with pytest.raises(RuntimeError, match="the sandbox is gone"):
        train(service, tmp_path, builder, async_config=AsyncConfig(max_steps_off_policy=1))
    assert steps_of(tmp_path) == [0, 1]
    assert saved(tmp_path) == [("000002", 2)]


def test_an_error_in_a_later_batch_lets_the_checkpoint_finish(service, tmp_path):
    """With staleness, a group may fail while another thread saves the state."""
    saving, failed, loops = threading.Event(), threading.Event(), []

    async def fail_while_saving(number):
        if number == 4:
            await asyncio.to_thread(saving.wait, 60)
            loops.append(asyncio.get_running_loop())
            failed.set()
            broken()

    async def let_the_error_reach_the_loop():
        for _ in range(100):
            await asyncio.sleep(0)

    count = service.count

    def slow_save(operation):
        count(operation)
        if operation == "save_state":
            saving.set()
            assert failed.wait(60)
            work = let_the_error_reach_the_loop()
            asyncio.run_coroutine_threadsafe(work, loops[0]).result(60)

    service.count = slow_save
    builder = EventfulBuilder(happening=fail_while_saving)
    with pytest.raises(RuntimeError, match="the sandbox is gone"):
        train(
            service,
            tmp_path,
            builder,
            save_every=1,
            async_config=AsyncConfig(max_steps_off_policy=2),
        )
    assert saved(tmp_path) == [("000001", 1)]
    assert read_rows(tmp_path / "checkpoints.jsonl")[0]["state_path"] in service.states


def test_an_evaluator_error_names_the_evaluator(service, tmp_path):
    class Judge(SamplingClientEvaluator):
        async def __call__(self, sampling_client):
            if sampling_client.weights.steps == 2:
                raise RuntimeError("no more credits")
            return {}

    with pytest.raises(RuntimeError, match="no more credits") as caught:
        train(service, tmp_path, evaluator_builders=[Judge], eval_every=2)
    assert any("Judge" in note for note in caught.value.__notes__)
    assert saved(tmp_path) == [("000002", 2)]


async def leak_a_cancellation(*_):
    """Raise CancelledError, as code does that awaits its own cancelled task."""
    inner = asyncio.create_task(asyncio.sleep(60))
    inner.cancel()
    await inner


@pytest.mark.parametrize("where", ["environment", "evaluator"])
def test_an_unrequested_cancellation_is_reported_and_finished_steps_are_saved(
    service, tmp_path, where
):
    class Judge(SamplingClientEvaluator):
        async def __call__(self, sampling_client):
            if where == "evaluator" and sampling_client.weights.steps == 2:
                await leak_a_cancellation()
            return {}

    happening = AtGroup(5, leak_a_cancellation) if where == "environment" else nothing
    with pytest.raises(RuntimeError, match="CancelledError"):
        train(
            service,
            tmp_path,
            EventfulBuilder(happening=happening),
            evaluator_builders=[Judge],
            eval_every=2,
        )
    assert saved(tmp_path) == [("000002", 2)]


@pytest.mark.parametrize("given", [None, {"score": "high"}])
def test_an_evaluator_with_invalid_metrics_is_named(service, tmp_path, given):
    class Judge(SamplingClientEvaluator):
        async def __call__(self, sampling_client):
            return given

    with pytest.raises(UserError, match="Judge"):
        train(service, tmp_path, evaluator_builders=[Judge], eval_every=1)


@dataclass
class Scores(SamplingClientEvaluator):
    metrics: dict[str, float]

    async def __call__(self, sampling_client):
        return self.metrics


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"score": 0.9}, "metric 'score', which is that of another"),
        ({"step": 77}, "metric 'step', which is the row's"),
    ],
)
def test_evaluator_metrics_must_not_overwrite_others(service, tmp_path, second, message):
    builders = [partial(Scores, {"score": 0.1}), partial(Scores, second)]
    with pytest.raises(UserError, match=f"the evaluator Scores returned the {message}"):
        train(service, tmp_path, evaluator_builders=builders, eval_every=1)


def test_a_non_finite_metric_is_omitted_with_a_warning(service, tmp_path, capsys):
    class Judge(SamplingClientEvaluator):
        async def __call__(self, sampling_client):
            return {"score": float("nan"), "others": 1.0}

    train(service, tmp_path, evaluator_builders=[Judge], eval_every=1, max_steps=2)
    rows = rows_of(tmp_path)
    assert [row["others"] for row in rows] == [1.0] * 3
    assert not any("score" in row for row in rows)
    assert "score is nan" in capsys.readouterr().out


# Dropped groups.


def test_dropped_groups_are_counted_and_not_averaged_as_zero(service, tmp_path):
    async def all_of_step_1(number):
        if number in (2, 3):
            broken()

    builder = EventfulBuilder(
        happening=all_of_step_1, tests=2, at_test=AtGroup(0, broken, times=1000)
    )
    strategy = MinViableGroup(max_retries=0)
    train(
        service,
        tmp_path,
        builder,
        rollout_error_tolerance=strategy,
        eval_every=4,
        rollout_json_export=True,
    )
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert "env/all/reward/total" not in rows[1]
    assert rows[1]["rollout_errors/groups_skipped"] == 2
    assert rows[1]["rollout_errors/RuntimeError"] == rows[1]["rollout_errors/total"] >= 2
    assert service.clients[0].weights.steps == 3
    assert rows[0]["test/env/all/total_episodes"] == 2
    assert rows[0]["test/rollout_errors/groups_skipped"] == 1


def test_an_evaluation_without_remaining_groups_has_no_score(service, tmp_path):
    async def always(number):
        broken()

    builder = EventfulBuilder(happening=nothing, tests=2, at_test=always)
    train(
        service,
        tmp_path,
        builder,
        rollout_error_tolerance=MinViableGroup(max_retries=0),
        eval_every=4,
    )
    [first, *_, last] = rows_of(tmp_path)
    for row in (first, last):
        assert row["test/rollout_errors/groups_skipped"] == 2
        assert not any(name.startswith("test/env") for name in row)


def test_failure_handling_and_evaluations_may_change_when_a_run_resumes(service, tmp_path):
    builder = EventfulBuilder(happening=nothing, tests=2, at_test=nothing)
    train(service, tmp_path, builder, max_steps=1)
    changes = {
        "rollout_error_tolerance": MinViableGroup(max_retries=0),
        "eval_every": 1,
        "eval_samples": 2,
        "eval_temperature": 0.5,
        "eval_on_start": False,
    }
    train(service, tmp_path, builder, max_steps=2, **changes)
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2]
    assert rows_of(tmp_path)[-1]["test/env/all/total_episodes"] == 8, "four environments, twice"
    with pytest.raises(UserError, match="max_tokens was 8, is 9"):
        train(service, tmp_path, builder, max_steps=3, max_tokens=9, **changes)


# Interruptions.


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_soon() -> None:
    threading.Timer(0.05, interrupt).start()


def interrupting_at(service, operation, occurrence):
    """Send Ctrl-C before the nth operation of this name."""
    count = service.count

    def counting(name):
        if name == operation and service.operations.count(name) == occurrence:
            interrupt()
        count(name)

    return counting


PHASES = {
    "sampling": ("sample", 6),
    "training": ("forward_backward", 1),
    "saving": ("save_state", 0),
    "final": ("save_state", 1),
    "loading": ("create", 0),
    "publishing": ("publish", 1),
    "testing": ("sample", 0),
    "updating": ("optim_step", 1),
    "saving weights": ("save_weights_for_sampler", 0),
    "last tests": ("publish", 4),
}


@pytest.mark.parametrize("phase", slow_after(4, list(PHASES)))
def test_control_c_in_every_phase_saves_the_finished_steps(service, tmp_path, phase, monkeypatch):
    builder = EventfulBuilder(happening=nothing, tests=2, at_test=nothing)
    options = {"eval_every": 3, "save_every": 3}
    train(whole := FakeService(service.tokenizer), tmp_path / "whole", builder, **options)
    with monkeypatch.context() as patch:
        patch.setattr(service, "count", interrupting_at(service, *PHASES[phase]))
        try:
            train(service, tmp_path / "run", builder, **options)
        except KeyboardInterrupt:
            assert phase != "final"
        else:
            assert phase == "final"
    done = len([row for row in rows_of(tmp_path / "run") if "optim/lr" in row])
    assert (saved(tmp_path / "run") or [("", 0)])[-1][1] == done, "nothing that was trained is lost"
    train(service, tmp_path / "run", builder, **options)
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole")
    assert service.clients[-1].weights == whole.clients[-1].weights
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_control_c_ends_the_run_immediately(service, tmp_path, capsys):
    """The second Ctrl-C comes while rollouts are cancelled, which would take a minute."""

    async def press_twice():
        interrupt()
        try:
            await asyncio.sleep(60)
        finally:
            threading.Timer(0.1, interrupt).start()
            await asyncio.sleep(60)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train(service, tmp_path, EventfulBuilder(happening=AtGroup(2, press_twice)))
    assert time.monotonic() - began < 30
    assert "Ctrl-C" in capsys.readouterr().out
    assert steps_of(tmp_path) == [0]
    train(service, tmp_path, EventfulBuilder(happening=AtGroup(-1, interrupt)))
    assert steps_of(tmp_path) == [0, 1, 2, 3]


def test_control_c_in_a_notebook_saves_the_finished_steps(service, tmp_path):
    async def press_and_wait():
        interrupt()
        await asyncio.sleep(60)

    config = config_of(
        tmp_path, EventfulBuilder(happening=AtGroup(2, press_and_wait)), save_every=100
    )
    with pytest.raises(KeyboardInterrupt):
        run_in_thread(train_rl.main(config, service))
    assert steps_of(tmp_path) == [0]
    assert [batch for _, batch in saved(tmp_path)] == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    train(service, tmp_path, EventfulBuilder(happening=AtGroup(-1, press_and_wait)), save_every=100)
    assert steps_of(tmp_path) == [0, 1, 2, 3]


def test_an_ignored_sigint_stays_ignored(service, tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        train(service, tmp_path, EventfulBuilder(happening=AtGroup(2, interrupt)))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps_of(tmp_path) == [0, 1, 2, 3]


async def tasks_left(work):
    """Return the tasks that still run after `work` has failed."""
    with pytest.raises(BaseException) as caught:
        await work
    return caught.value, asyncio.all_tasks() - {asyncio.current_task()}


def test_a_stopped_evaluation_leaves_no_running_tasks(service, tmp_path):
    """Ctrl-C during an evaluation cancels its groups, which have ended when the run ends."""
    begun, ended = [], []

    async def wait_for_ever(number):
        begun.append(number)
        if len(begun) == 4:  # all of them
            interrupt_soon()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(number)

    builder = EventfulBuilder(happening=nothing, tests=2, at_test=wait_for_ever)
    error, left = asyncio.run(
        tasks_left(train_rl.main(config_of(tmp_path, builder, eval_every=1), service))
    )
    assert isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
    assert sorted(ended) == [0, 0, 1, 1]
    assert left == set()


@pytest.mark.slow
def test_an_error_cancels_a_concurrent_evaluation(service, tmp_path):
    """With staleness, one trajectory of a group fails during the evaluation. The cancelled tasks do
    not count as further failures.
    """
    testing = asyncio.Event()
    has_failed = False

    async def fail_in_the_test(number):
        nonlocal has_failed
        if number == 4:
            await testing.wait()
            if has_failed:
                await asyncio.sleep(60)
            has_failed = True
            broken()

    async def wait_in_the_second_test(number):
        if service.operations.count("publish") > 1:
            testing.set()
            await asyncio.sleep(60)

    builder = EventfulBuilder(happening=fail_in_the_test, tests=1, at_test=wait_in_the_second_test)
    config = config_of(
        tmp_path, builder, eval_every=1, async_config=AsyncConfig(max_steps_off_policy=2)
    )
    error, left = asyncio.run(tasks_left(train_rl.main(config, service)))
    assert isinstance(error, RuntimeError)
    assert not any("failed with" in note or "more tasks" in note for note in error.__notes__)
    assert left == set()
    gc.collect()  # an error that is never retrieved would be a warning


def test_an_error_while_stopping_still_saves_a_checkpoint(service, tmp_path):
    async def fail_when_cancelled():
        interrupt_soon()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            broken()

    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        train(service, tmp_path, EventfulBuilder(happening=AtGroup(3, fail_when_cancelled)))
    assert saved(tmp_path) == [("000001", 1)]


# Resuming.


def test_the_staleness_bound_holds_after_a_resume(service, tmp_path):
    """The first step after a resume samples from the newest weights, and the bound still holds."""
    started: list[int] = []
    fail = AtGroup(7, broken)

    async def note(number):
        started.append(number)
        await fail(number)

    builder = EventfulBuilder(batches=6, happening=note, size=2)
    options = {"async_config": AsyncConfig(max_steps_off_policy=2), "save_every": 2}
    with pytest.raises(RuntimeError):
        train(service, tmp_path, builder, **options)
    [*_, (_, done)] = saved(tmp_path)
    started.clear()
    train(service, tmp_path, builder, **options)
    assert started[::2] == list(range(2 * done, 12))
    rows = rows_of(tmp_path)
    assert steps_of(tmp_path) == list(range(6))
    assert [row["async/staleness_max"] for row in rows[done:]] == [0, 1, 2, 2, 2, 2][: 6 - done]


def test_an_expired_state_is_skipped_on_resume(tokenizer, tmp_path):
    """Rolling states live for hours. After a night, the run resumes from an earlier state."""
    options = {"save_every": 2, "rolling_save_every": 1}
    train(whole := FakeService(tokenizer), tmp_path / "whole", **options)
    service = FakeService(tokenizer)
    with pytest.raises(RuntimeError):
        train(service, tmp_path / "run", EventfulBuilder(happening=AtGroup(7, broken)), **options)
    assert saved(tmp_path / "run")[-1] == ("rolling-000003", 3)
    del service.states[read_rows(tmp_path / "run" / "checkpoints.jsonl")[-1]["state_path"]]
    train(
        service, tmp_path / "run", EventfulBuilder(happening=AtGroup(7, broken, times=0)), **options
    )
    assert steps_of(tmp_path / "run") == [0, 1, 2, 3]
    names = saved(tmp_path / "run")
    assert len(set(names)) == len(names)
    assert service.clients[-1].weights == whole.clients[-1].weights


def test_a_damaged_state_is_skipped_on_resume(tokenizer, tmp_path, monkeypatch):
    options = {"save_every": 1}
    train(whole := FakeService(tokenizer), tmp_path / "whole", **options)
    train(service := FakeService(tokenizer), tmp_path / "run", max_steps=3, **options)
    newest = read_rows(tmp_path / "run" / "checkpoints.jsonl")[-1]["state_path"]
    load = FakeService.create_training_client_from_state_with_optimizer

    def damaged(self, path, *rest, **named):
        if path == newest:
            raise DamagedFileError(f"{path}: optimizer.safetensors is not the file that was saved")
        return load(self, path, *rest, **named)

    monkeypatch.setattr(FakeService, "create_training_client_from_state_with_optimizer", damaged)
    train(service, tmp_path / "run", **options)
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole")
    assert service.clients[-1].weights == whole.clients[-1].weights


def test_a_run_without_a_usable_state_is_rejected(service, tmp_path):
    train(service, tmp_path, save_every=1, max_steps=2)
    service.states.clear()
    with pytest.raises(CheckpointError, match="there is no checkpoint.*final-000002") as caught:
        train(service, tmp_path, save_every=1)
    assert any("another log_path" in note for note in caught.value.__notes__)
    assert steps_of(tmp_path) == [0, 1]


def test_checkpoints_of_a_resumed_run_have_its_metadata(service, tmp_path):
    options = {"recipe_name": "sums", "renderer_name": "chatml"}
    train(service, tmp_path, max_steps=1, **options)
    train(service, tmp_path, **options)
    noted = options | {"log_path": str(tmp_path)}
    assert [client.metadata for client in service.clients] == [noted, noted]


def test_a_rolling_state_is_deleted_after_a_newer_one_is_recorded(service, tmp_path):
    train(service, tmp_path, save_every=3, rolling_save_every=1)
    assert {path.rsplit("/")[-1] for path in service.states} == {"000003", "final-000004"}


def test_a_run_with_more_epochs_continues_where_fewer_ended(tokenizer, tmp_path):
    """The order of the first epoch does not depend on the number of epochs."""
    started: list[int] = []

    async def note(number):
        started.append(number)

    builder = EventfulBuilder(happening=note, size=2)
    service = FakeService(tokenizer)
    train(service, tmp_path, builder, max_steps=2)
    train(service, tmp_path, builder, num_epochs=3)
    groups = started[::2]
    assert groups[:8] == list(range(8))
    assert sorted(groups[8:16]) == sorted(groups[16:]) == list(range(8))
    assert groups[8:16] != groups[16:]


def test_options_can_change_until_a_checkpoint_is_recorded(service, tmp_path):
    class Refusing(FakeService):
        def create_lora_training_client(self, base_model, rank, seed, user_metadata=None):
            raise UserError(f"no source has {base_model}")

    with pytest.raises(UserError, match="no source has tinny"):
        train(Refusing(service.tokenizer), tmp_path, model_name="tinny")
    train(service, tmp_path, max_steps=1)
    with pytest.raises(UserError, match="model_name was 'tiny'"):
        train(service, tmp_path, model_name="tinny")


def test_a_run_directory_can_be_moved(service, tmp_path, monkeypatch):
    train(service, tmp_path / "here", max_steps=1)
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    assert steps_of(train(service, "there")) == [0, 1, 2, 3]


def test_other_data_are_rejected_on_resume(service, tmp_path):
    """Other data are detected although their options are equal."""

    @chz.chz
    class Others(DigitsBuilder):
        pass

    train(service, tmp_path, DigitsBuilder(), max_steps=1)
    with pytest.raises(UserError, match="dataset_builder.__chz_type__ was"):
        train(service, tmp_path, Others())


def test_evaluation_answers_fit_into_the_context(service, tmp_path):
    service.context = 2 + 4
    train(service, tmp_path, DigitsBuilder(tests=1), eval_every=1, max_steps=1)
    assert [row["test/env/all/total_episodes"] for row in rows_of(tmp_path)] == [4, 4]
