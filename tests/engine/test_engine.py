"""The engine: order of operations, fairness, versions, isolation of failures, cancellation and
shutdown.
"""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import planish.engine.settings as settings_module
from planish.engine.base_models import BaseModel
from planish.engine.checkpoints.files import ADAPTER_FILE, MANIFEST_FILE, Manifest, _stored_file
from planish.engine.engine import Engine
from planish.engine.engine_thread import EngineThread
from planish.engine.settings import EngineSettings, choose_dtype
from planish.errors import CheckpointError, EngineClosedError, NonFiniteError, UserError
from planish.service import (
    CreateModel,
    CreateSampler,
    DeferredForwardBackward,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    PublishSampler,
    ReleaseSampler,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
    UnloadModel,
)
from planish.testing import tiny_model
from planish.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams, TensorData

STEP = AdamParams(learning_rate=1e-2)
LORA = LoraConfig(rank=4, seed=1)
WAIT = 60.0


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("models")
    tiny_model(path / "llama")
    tiny_model(path / "qwen", family="qwen3", seed=5)
    return {"llama": str(path / "llama"), "qwen": str(path / "qwen")}


@pytest.fixture
def engines(model_dirs, tmp_path):
    """Return a function that creates engines which share a data directory."""
    made: list[Engine] = []

    def make(**settings) -> Engine:
        made.append(
            Engine(
                model_dirs, tmp_path / "data", EngineSettings(**{"dtype": "float32", **settings})
            )
        )
        return made[-1]

    yield make
    for engine in made:
        engine.close(finish=False)


@pytest.fixture
def engine(engines) -> Engine:
    return engines()


def create(
    engine: Engine, model_id: str = "a", base: str = "llama", lora: LoraConfig = LORA, **more: Any
) -> None:
    engine.submit(CreateModel(model_id, base, lora, **more)).result(WAIT)


def datum(length: int = 8, start: int = 0, weight: float = 1.0) -> Datum:
    tokens = [(start * 31 + i * 7) % 256 for i in range(length + 1)]
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "weights": [weight] * length},
    )


def step(engine: Engine, model_id: str, *data: Datum) -> tuple[Future[Any], Future[Any]]:
    """Submit a forward_backward and an optim_step without waiting for the first."""
    backward = engine.submit(ForwardBackward(model_id, list(data), "cross_entropy"))
    return backward, engine.submit(OptimStep(model_id, STEP))


def loss(engine: Engine, model_id: str) -> float:
    out = engine.submit(
        ForwardBackward(model_id, [datum()], "cross_entropy", forward_only=True)
    ).result(WAIT)
    return out.metrics["loss:sum"]


def request(sampler_id: str, max_tokens: int = 8, n: int = 1, **params: Any) -> Sample:
    prompt = ModelInput.from_ints(list(b"a prompt"))
    return Sample(
        sampler_id,
        prompt,
        n,
        SamplingParams(max_tokens=max_tokens, stop=[], **{"seed": 3, **params}),
    )


def tokens(engine: Engine, sampler_id: str) -> list[int]:
    return engine.submit(request(sampler_id)).result(WAIT).sequences[0].tokens


# Order


def test_pipelined_steps_equal_steps_that_are_awaited(engine):
    create(engine, "a")
    create(engine, "b")
    pairs = [step(engine, "a", datum(start=i)) for i in range(4)]
    pipelined = [(f.result(WAIT).metrics["loss:sum"], o.result(WAIT)) for f, o in pairs]
    one_by_one = []
    for i in range(4):
        backward, update = step(engine, "b", datum(start=i))
        one_by_one.append((backward.result(WAIT).metrics["loss:sum"], update.result(WAIT)))
    assert pipelined == one_by_one
    assert [o.metrics["adam_step"] for _, o in pipelined] == [1, 2, 3, 4]


def test_models_trained_concurrently_equal_models_trained_alone(engines):
    def train(engine: Engine, names: Sequence[tuple[str, str]]) -> dict[str, list[float]]:
        for name, base in names:
            create(engine, name, base, LoraConfig(rank=4 + ord(name[0]) % 3, seed=ord(name[0])))
        pairs = {
            name: [step(engine, name, datum(40, i), datum(40, i + 9)) for i in range(3)]
            for name, _ in names
        }
        samplers = [engine.submit(CreateSampler(f"s:{name}", base)) for name, base in names]
        for future in samplers:
            future.result(WAIT)
        answers = [engine.submit(request(f"s:{name}", 30, 3)) for name, _ in names]
        for answer in answers:
            answer.result(WAIT)
        return {
            name: [f.result(WAIT).metrics["loss:sum"] for f, _ in pairs[name]] for name, _ in names
        }

    names = [("a", "llama"), ("b", "llama"), ("c", "qwen")]
    together = train(engines(micro_batch_tokens=50), names)
    for name in names:
        assert train(engines(micro_batch_tokens=50), [name]) == {name[0]: together[name[0]]}


def test_no_token_is_pending_while_another_model_takes_a_turn(engine, monkeypatch):
    """On a GPU the tokens of a step are appended in the next step. Here the steps overlap too."""
    create(engine)
    engine.submit(CreateSampler("s", "llama")).result(WAIT)
    sampled = request("s", 60, 2)
    alone = engine.submit(sampled).result(WAIT)
    sampler, pending = engine._base_models.get("llama").sampler, []
    sampler._steps.overlap = True
    queues = engine._thread._training_queues
    training_turn, run = queues.run_turn, sampler._steps.run

    def checked(*arguments: Any) -> Any:
        pending.append(sampler._steps.has_pending_tokens)
        return training_turn(*arguments)

    def trained(*arguments: Any) -> Any:
        if len(backwards) < 3:
            backwards.append(engine.submit(ForwardBackward("a", [datum(40)], "cross_entropy")))
        return run(*arguments)

    backwards: list[Future[Any]] = []
    monkeypatch.setattr(queues, "run_turn", checked)
    monkeypatch.setattr(sampler._steps, "run", trained)
    beside = engine.submit(sampled).result(WAIT)
    for backward in backwards:
        backward.result(WAIT)
    assert len(pending) >= 3
    assert not any(pending)
    for one, other in zip(beside.sequences, alone.sequences, strict=True):
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


@pytest.mark.slow
def test_a_long_training_call_does_not_block_sampling(engines, monkeypatch):
    engine = engines(micro_batch_tokens=64)
    create(engine)
    engine.submit(CreateSampler("s", "llama")).result(WAIT)
    fast = slow_micro_batches(engine, monkeypatch)
    training = engine.submit(
        ForwardBackward("a", [datum(60, i) for i in range(120)], "cross_entropy")
    )
    for _ in range(3):
        engine.submit(request("s")).result(WAIT)
    assert not training.done()
    fast.set()
    training.result(WAIT)


def slow_micro_batches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let each micro-batch of the model "llama" take at least 0.05 s until the returned event is
    set, so that a long training call outlasts a pause of the test's own thread.
    """
    trainer, fast = engine._base_models.get("llama").trainer, threading.Event()
    run = trainer._run_micro_batch

    def slow(*arguments: Any) -> Any:
        fast.wait(0.05)
        return run(*arguments)

    monkeypatch.setattr(trainer, "_run_micro_batch", slow)
    return fast


def slow_sample(sampler_id: str, max_tokens: int) -> Sample:
    """Return a request that takes at least 0.01 s per token."""
    return replace(request(sampler_id, max_tokens), on_token=lambda _: time.sleep(0.01))


def test_a_long_sample_does_not_block_training(engine):
    create(engine)
    engine.submit(CreateSampler("s", "llama")).result(WAIT)
    sample = engine.submit(slow_sample("s", 1500))
    for _ in range(3):
        for future in step(engine, "a", datum()):
            future.result(WAIT)
    assert not sample.done()
    sample.cancel()


@pytest.mark.slow
def test_device_time_after_a_call_returns_is_charged_to_that_call(engines, monkeypatch):
    """A GPU still computes after a call has returned. Here each micro-batch leaves 0.5 s of work,
    for which the next decoding step waits.
    """
    engine = engines(micro_batch_tokens=64)
    create(engine)
    engine.submit(CreateSampler("s", "llama")).result(WAIT)
    base, left, steps = engine._base_models.get("llama"), [], []
    train, sample = base.trainer._run_micro_batch, base.sampler.step

    def synchronize(_: BaseModel) -> None:
        time.sleep(0.5 * len(left))
        left.clear()

    def micro_batch(*given: Any) -> Any:
        left.append(1)
        return train(*given)

    def decode() -> None:
        synchronize(base)
        steps.append(1)
        sample()

    monkeypatch.setattr(BaseModel, "synchronize", synchronize)
    monkeypatch.setattr(base.trainer, "_run_micro_batch", micro_batch)
    monkeypatch.setattr(base.sampler, "step", decode)
    future = engine.submit(request("s", 1900))
    wait_until(lambda: bool(steps))
    engine.submit(ForwardBackward("a", [datum(60, i) for i in range(3)], "cross_entropy")).result(
        WAIT
    )
    assert len(steps) > 12
    future.cancel()


@pytest.mark.slow
def test_two_models_share_training_time(engines, monkeypatch):
    engine = engines(micro_batch_tokens=64)
    create(engine, "long")
    create(engine, "short")
    fast = slow_micro_batches(engine, monkeypatch)
    long = engine.submit(
        ForwardBackward("long", [datum(60, i) for i in range(150)], "cross_entropy")
    )
    for _ in range(3):
        for future in step(engine, "short", datum()):
            future.result(WAIT)
    assert not long.done()
    fast.set()
    assert long.result(WAIT).metrics["micro_batches:sum"] > 100


# Versions


def test_a_published_sampler_keeps_its_weights_during_training(engine):
    create(engine)
    engine.submit(PublishSampler("a", "before")).result(WAIT)
    before = tokens(engine, "before")
    for i in range(3):
        for future in step(engine, "a", datum(start=i)):
            future.result(WAIT)
    engine.submit(PublishSampler("a", "after")).result(WAIT)
    assert tokens(engine, "before") == before
    assert tokens(engine, "after") != before
    engine.submit(UnloadModel("a")).result(WAIT)
    assert tokens(engine, "before") == before


def test_loading_a_base_model_does_not_block_other_base_models(engine, monkeypatch):
    engine.submit(CreateSampler("s", "llama")).result(WAIT)
    began, go_on, load = threading.Event(), threading.Event(), BaseModel.__init__

    def slow(self, directory, settings, memory):
        began.set()
        assert go_on.wait(WAIT)
        load(self, directory, settings, memory)

    monkeypatch.setattr(BaseModel, "__init__", slow)
    with ThreadPoolExecutor() as callers:
        slow_ones = [
            callers.submit(engine.submit, CreateSampler(name, "qwen")) for name in ("t", "u")
        ]
        assert began.wait(WAIT)
        callers.submit(engine.check_sample, "llama", request("s")).result(WAIT)
        assert tokens(engine, "s")
        assert not any(caller.done() for caller in slow_ones)
        go_on.set()
        for caller in slow_ones:
            caller.result(WAIT).result(WAIT)
    assert (
        engine.preparation.sampler_sessions["t"].base
        is engine.preparation.sampler_sessions["u"].base
    )


def test_a_sample_request_waits_for_a_sampler_being_published(engine):
    create(engine)
    step(engine, "a", datum())
    published = engine.submit(PublishSampler("a", "s"))
    early = engine.submit(request("s"))
    assert published.result(WAIT) == "s"
    assert early.result(WAIT).sequences[0].tokens == tokens(engine, "s")


def test_a_publication_has_exactly_the_steps_submitted_before_it(engine):
    create(engine)
    engine.submit(PublishSampler("a", "zero"))
    step(engine, "a", datum())
    engine.submit(PublishSampler("a", "one"))
    step(engine, "a", datum(start=4))
    engine.submit(PublishSampler("a", "two"))
    drawn = [tuple(tokens(engine, name)) for name in ("zero", "one", "two")]
    assert len(set(drawn)) == 3


def test_a_released_sampler_finishes_its_requests_and_frees_its_cache(engine):
    create(engine)
    for future in step(engine, "a", datum()):
        future.result(WAIT)
    engine.submit(PublishSampler("a", "s")).result(WAIT)
    long_prompt = ModelInput.from_ints(list(range(200)))
    asked = engine.submit(Sample("s", long_prompt, 2, SamplingParams(max_tokens=100, stop=[])))
    engine.submit(ReleaseSampler("s")).result(WAIT)
    with pytest.raises(UserError, match="released"):
        engine.submit(request("s"))
    assert len(asked.result(WAIT).sequences) == 2
    cache = engine._base_models.get("llama").sampler._prefill.prefix_cache
    wait_until(lambda: len(cache) == 0)
    assert engine._thread._sampler_sessions._sessions == []


def test_samplers_of_one_version_share_cached_prefixes_until_both_are_released(engine):
    create(engine)
    for name in ("s", "t"):
        engine.submit(PublishSampler("a", name)).result(WAIT)
    long_prompt = ModelInput.from_ints(list(range(200)))
    hits = [
        engine.submit(Sample(name, long_prompt, 1, SamplingParams(max_tokens=2)))
        .result(WAIT)
        .prompt_cache_hit_tokens
        for name in ("s", "t")
    ]
    assert hits[0] == 0
    assert hits[1] > 100
    cache = engine._base_models.get("llama").sampler._prefill.prefix_cache
    engine.submit(ReleaseSampler("s")).result(WAIT)
    assert len(cache) > 0
    engine.submit(ReleaseSampler("t")).result(WAIT)
    assert len(cache) == 0


def test_a_reused_model_id_gets_no_cached_prefix_of_the_old_model(engine):
    drawn = []
    for seed in (1, 2):
        create(engine, "a", lora=LoraConfig(rank=4, seed=seed))
        for future in step(engine, "a", datum()):
            future.result(WAIT)
        engine.submit(PublishSampler("a", f"s{seed}")).result(WAIT)
        prompt = ModelInput.from_ints(list(range(100)))
        answer = engine.submit(Sample(f"s{seed}", prompt, 1, SamplingParams(max_tokens=2))).result(
            WAIT
        )
        drawn.append(answer.prompt_cache_hit_tokens)
        engine.submit(UnloadModel("a")).result(WAIT)
    assert drawn == [0, 0]


# Failures


def test_an_error_fails_only_its_own_operation(engine):
    create(engine, "a")
    create(engine, "b")
    nothing = engine.submit(OptimStep("a", STEP))
    other = step(engine, "b", datum())
    mine = step(engine, "a", datum())
    with pytest.raises(ValueError, match="no gradient to apply"):
        nothing.result(WAIT)
    for future in (*other, *mine):
        future.result(WAIT)


def test_a_failed_forward_backward_fails_the_next_optim_step(engine):
    create(engine)
    before = loss(engine, "a")
    good = engine.submit(ForwardBackward("a", [datum()], "cross_entropy"))
    bad = engine.submit(
        ForwardBackward("a", [datum(weight=3e38), datum(weight=3e38)], "cross_entropy")
    )
    update = engine.submit(OptimStep("a", STEP))
    good.result(WAIT)
    with pytest.raises(NonFiniteError):
        bad.result(WAIT)
    with pytest.raises(NonFiniteError, match="forward_backward before it failed"):
        update.result(WAIT)
    assert loss(engine, "a") == before
    for future in step(engine, "a", datum()):
        future.result(WAIT)


def test_later_operations_on_a_model_name_why_its_creation_failed(engine, tmp_path):
    create(engine)
    path = engine.submit(SaveWeightsForSampler("a", "x")).result(WAIT).path
    directory = tmp_path / "data" / "a" / "sampler_weights" / "x"
    tensors = load_file(directory / ADAPTER_FILE)
    next(iter(tensors.values())).fill_(float("nan"))
    save_file(tensors, directory / ADAPTER_FILE)
    fields = Manifest.from_json((directory / MANIFEST_FILE).read_text())
    files = {**fields.files, ADAPTER_FILE: _stored_file(directory / ADAPTER_FILE)}
    (directory / MANIFEST_FILE).write_text(Manifest(**{**vars(fields), "files": files}).to_json())
    gate: Future[Any] = Future()
    engine.submit(DeferredForwardBackward("a", gate, "cross_entropy"))
    created = engine.submit(CreateModel("b", from_path=path))
    with pytest.raises(CheckpointError, match="NaN"):
        created.result(WAIT)
    with pytest.raises(UserError, match="'b'.*could not be created.*NaN"):
        engine.submit(OptimStep("b", STEP))
    engine.submit(UnloadModel("b")).result(WAIT)
    create(engine, "b")


def test_operations_queued_on_a_failed_creation_name_its_error(engine, monkeypatch):
    import planish.engine.training_operations as operations

    def refuse(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(operations, "Adapter", refuse)
    with device_held(engine):
        created = engine.submit(CreateModel("b", "llama", LORA))
        backward, update = step(engine, "b", datum())
        published = engine.submit(PublishSampler("b", "t"))
        sample = engine.submit(request("t"))
    with pytest.raises(RuntimeError, match="out of memory"):
        created.result(WAIT)
    for future in (backward, update, published, sample):
        with pytest.raises(UserError, match="out of memory"):
            future.result(WAIT)


def test_an_error_in_a_decoding_step_fails_only_the_running_requests(engine, monkeypatch):
    create(engine)
    engine.submit(CreateSampler("s", "llama")).result(WAIT)
    expected = tokens(engine, "s")
    base = engine._base_models.get("llama")
    with monkeypatch.context() as patch:
        patch.setattr(base.sampler, "_decoding_step", lambda _: 1 / 0)
        failing = [engine.submit(request("s")) for _ in range(3)]
        for future in failing:
            with pytest.raises(ZeroDivisionError):
                future.result(WAIT)
    assert tokens(engine, "s") == expected
    for future in step(engine, "a", datum()):
        future.result(WAIT)


def test_a_stored_error_references_no_tensors(engine, monkeypatch):
    """After an out-of-memory error, the next pass needs the memory of the failed one."""
    create(engine)
    engine.submit(CreateSampler("s", "llama")).result(WAIT)
    base, hidden = engine._base_models.get("llama"), []

    def too_much(*given: object, **_: object) -> None:
        hidden.append(weakref.ref(next(x for x in given if isinstance(x, torch.Tensor))))
        del given
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("planish.model.decoder.head._logits", too_much)
        patch.setattr(base.sampler._head, "logits", too_much)
        scored = replace(request("s"), prompt_logprobs=True)
        operations = (request("s"), scored, ForwardBackward("a", [datum()], "cross_entropy"))
        errors = [engine.submit(operation).exception(WAIT) for operation in operations]
    assert [type(error) for error in errors] == [MemoryError] * 3
    assert len(hidden) >= 3
    assert not any(found() is not None for found in hidden)


@pytest.mark.parametrize(
    "lack",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError("main memory is full"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
            "memory"
        ),
    ],
)
def test_an_out_of_memory_error_names_the_settings_to_lower(engines, monkeypatch, lack):
    engine = engines(micro_batch_tokens=64, kv_cache_bytes=1 << 30)
    create(engine)
    engine.submit(CreateSampler("s", "llama")).result(WAIT)

    def full(*_: object, **__: object) -> None:
        raise type(lack)(*lack.args)

    with monkeypatch.context() as patch:
        patch.setattr("planish.model.decoder.head._logits", full)
        patch.setattr(engine._base_models.get("llama").sampler._head, "logits", full)
        for operation in (request("s"), ForwardBackward("a", [datum()], "cross_entropy")):
            error = engine.submit(operation).exception(WAIT)
            assert type(error) is type(lack)
            (note,) = error.__notes__
            assert "micro_batch_tokens (now 64)" in note
            assert "kv_cache_bytes (now 1,073,741,824)" in note


def test_an_error_in_the_engine_loop_fails_all_requests(engine, monkeypatch):
    create(engine)
    engine.submit(CreateSampler("s", "llama")).result(WAIT)
    running = engine.submit(slow_sample("s", 1000))
    waiting = engine.submit(DeferredForwardBackward("a", Future(), "cross_entropy"))

    def broken(self: EngineThread) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(EngineThread, "_run_turn", broken)
    for future in (running, waiting):
        with pytest.raises(EngineClosedError, match="a bug"):
            future.result(WAIT)
    with pytest.raises(EngineClosedError, match="a bug"):
        engine.submit(OptimStep("a", STEP))


@pytest.mark.parametrize("side", ["sampling", "training"])
def test_a_lost_gpu_closes_the_engine(engine, monkeypatch, side):
    """After an illegal memory access, every later call on the GPU fails."""
    for name in "ab":
        create(engine, name)
    engine.submit(CreateSampler("s", "llama")).result(WAIT)

    def lost(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    base = engine._base_models.get("llama")
    monkeypatch.setattr(base, "is_lost", lambda: True)
    with pytest.raises(UserError):  # the error did not occur on the device
        engine.submit(OptimStep("a", STEP)).result(WAIT)
    monkeypatch.setattr(base.sampler, "_decoding_step", lost)
    monkeypatch.setattr(base.trainer, "_run_micro_batch", lost)
    operation = (
        request("s") if side == "sampling" else ForwardBackward("a", [datum()], "cross_entropy")
    )
    waiting = engine.submit(DeferredForwardBackward("b", Future(), "cross_entropy"))
    # A server does not answer requests that end with EngineClosedError, so it repeats all of these.
    for future in (engine.submit(operation), waiting):
        with pytest.raises(EngineClosedError, match="illegal memory access.*start the program"):
            future.result(WAIT)
    with pytest.raises(EngineClosedError, match="start the program again"):
        engine.submit(request("s"))


# Cancellation


def test_cancelling_a_running_sample_frees_its_memory(engine):
    engine.submit(CreateSampler("s", "llama")).result(WAIT)
    sampler = engine._base_models.get("llama").sampler
    sample = engine.submit(replace(slow_sample("s", 1900), num_samples=4))
    wait_until(lambda: bool(sampler._slots.sample_pools.pools_in_use()))
    assert sample.cancel()
    wait_until(lambda: not sampler.busy)
    wait_until(lambda: not sampler._slots.sample_pools.pools_in_use())
    wait_until(lambda: not sampler._slots.prompt_pools.pools_in_use())
    with pytest.raises(CancelledError):
        sample.result(WAIT)
    tokens(engine, "s")


def test_a_cancelled_forward_backward_fails_the_next_optim_step(engine):
    create(engine)
    before = loss(engine, "a")
    gate: Future[Any] = Future()
    first = engine.submit(DeferredForwardBackward("a", gate, "cross_entropy"))
    second, update = step(engine, "a", datum())
    assert second.cancel()
    gate.set_result([datum(start=2)])
    first.result(WAIT)
    with pytest.raises(UserError, match="before it failed .the forward_backward was cancelled"):
        update.result(WAIT)
    assert loss(engine, "a") == before


def test_a_cancelled_publication_fails_the_requests_waiting_for_it(engine):
    create(engine)
    gate: Future[Any] = Future()
    engine.submit(DeferredForwardBackward("a", gate, "cross_entropy"))
    published = engine.submit(PublishSampler("a", "s"))
    early = engine.submit(request("s"))
    assert published.cancel()
    gate.set_result([datum()])
    with pytest.raises(UserError, match="cancelled"):
        early.result(WAIT)


def test_a_cancelled_sampler_creation_fails_its_requests_and_frees_the_id(engine):
    with device_held(engine):
        created = engine.submit(CreateSampler("s", "llama"))
        early = engine.submit(request("s"))
        assert created.cancel()
    for asked in (early, engine.submit(request("s"))):
        with pytest.raises(UserError, match="'s'.*cancelled; create another"):
            asked.result(WAIT)
    engine.submit(ReleaseSampler("s")).result(WAIT)
    engine.submit(CreateSampler("s", "llama")).result(WAIT)
    tokens(engine, "s")


def test_a_cancelled_model_creation_fails_its_operations_until_unload(engine):
    with device_held(engine):
        created = engine.submit(CreateModel("a", "llama", LORA))
        early = engine.submit(OptimStep("a", STEP))
        assert created.cancel()
    with pytest.raises(UserError, match="'a'.*cancelled; create another"):
        early.result(WAIT)
    with pytest.raises(UserError, match="'a'.*cancelled; create another"):
        engine.submit(OptimStep("a", STEP))
    engine.submit(UnloadModel("a")).result(WAIT)
    create(engine, "a")


@contextmanager
def device_held(engine: Engine) -> Iterator[None]:
    """Block the engine thread for the duration of the block."""
    is_held, go_on = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        is_held.set()
        go_on.wait(WAIT)

    engine.submit(CreateSampler("holding", "llama")).result(WAIT)
    held = engine.submit(replace(request("holding", 1), on_token=hold))
    assert is_held.wait(WAIT)
    try:
        yield
    finally:
        go_on.set()
        held.result(WAIT)


# Delayed data


def test_delayed_data_keep_their_position_in_the_queue(engine):
    create(engine, "a")
    create(engine, "b")
    gate: Future[Any] = Future()
    first = engine.submit(DeferredForwardBackward("a", gate, "cross_entropy"))
    update = engine.submit(OptimStep("a", STEP))
    for future in step(engine, "b", datum()):
        future.result(WAIT)
    assert not first.done()
    assert not update.done()
    gate.set_result([datum()])
    assert update.result(WAIT).metrics["adam_step"] == 1
    assert loss(engine, "a") == loss(engine, "b")


def test_failed_delayed_data_fail_the_next_optim_step(engine):
    create(engine)
    before = loss(engine, "a")
    gate: Future[Any] = Future()
    engine.submit(ForwardBackward("a", [datum()], "cross_entropy"))
    failing = engine.submit(DeferredForwardBackward("a", gate, "cross_entropy"))
    update = engine.submit(OptimStep("a", STEP))
    gate.set_exception(KeyError("no reward"))
    with pytest.raises(KeyError, match="no reward"):
        failing.result(WAIT)
    with pytest.raises(UserError, match="no reward") as refused:
        update.result(WAIT)
    assert not isinstance(refused.value, NonFiniteError)
    assert loss(engine, "a") == before


# Checkpoints


def test_training_resumed_in_a_new_engine_ends_bitwise_identical(engines):
    engine = engines()
    create(engine, "whole")
    create(engine, "half")
    for i in range(4):
        step(engine, "whole", datum(start=i), datum(start=i + 7))
        if i < 2:
            step(engine, "half", datum(start=i), datum(start=i + 7))
    path = engine.submit(SaveWeights("half", "at-2")).result(WAIT).path
    whole = engine.preparation.training_models["whole"]
    loss(engine, "whole")
    fresh = engines()
    fresh.submit(CreateModel("resumed", from_path=path, with_optimizer=True)).result(WAIT)
    for i in (2, 3):
        step(fresh, "resumed", datum(start=i), datum(start=i + 7))
    assert loss(fresh, "resumed") == loss(engine, "whole")
    ours, theirs = (
        whole.adapter.state(),
        fresh.preparation.training_models["resumed"].adapter.state(),
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert int(ours["step"]) == 4


def test_load_weights_replaces_weights_and_optionally_the_optimizer(engine):
    create(engine)
    for i in range(2):
        step(engine, "a", datum(start=i))
    path = engine.submit(SaveWeights("a", "x")).result(WAIT).path
    saved = loss(engine, "a")
    step(engine, "a", datum(start=5))
    assert loss(engine, "a") != saved
    for with_optimizer, steps in ((False, 1), (True, 3)):
        assert engine.submit(LoadWeights("a", path, with_optimizer)).result(WAIT).path == path
        assert loss(engine, "a") == saved
        assert step(engine, "a", datum(start=5))[1].result(WAIT).metrics["adam_step"] == steps


def test_a_checkpoint_has_exactly_the_steps_submitted_before_it(engine):
    create(engine)
    step(engine, "a", datum())
    first = engine.submit(SaveWeights("a", "one"))
    for i in range(5):
        step(engine, "a", datum(start=i))
    assert engine.checkpoint_info(first.result(WAIT).path).checkpoint.user_metadata is None
    state = engine._store.manifest(engine_path(first))
    assert state.step == 1


def test_a_checkpoint_sampler_samples_the_same_as_the_published_one(engine):
    create(engine)
    step(engine, "a", datum())
    for_sampler = (
        engine.submit(SaveWeightsForSampler("a", "x", user_metadata={"k": "v"})).result(WAIT).path
    )
    training = engine.submit(SaveWeights("a", "x")).result(WAIT).path
    engine.submit(PublishSampler("a", "s")).result(WAIT)
    for sampler_id, path in (("t", for_sampler), ("u", training)):
        engine.submit(CreateSampler(sampler_id, model_path=path)).result(WAIT)
        assert tokens(engine, sampler_id) == tokens(engine, "s")
        assert engine.sampler_info(sampler_id).base_model == "llama"
    assert engine.checkpoint_info(for_sampler).checkpoint.user_metadata == {"k": "v"}


def test_a_checkpoint_of_another_base_model_is_rejected(engines, model_dirs, tmp_path):
    tiny_model(tmp_path / "second", seed=9)
    engine = Engine(
        {**model_dirs, "second": str(tmp_path / "second")},
        tmp_path / "data",
        EngineSettings(dtype="float32"),
    )
    try:
        create(engine)
        path = engine.submit(SaveWeights("a", "x")).result(WAIT).path
        for other, lora in (
            ("second", LORA),
            ("qwen", LORA),
            ("llama", LoraConfig(rank=8)),
            ("llama", LoraConfig(4, train_mlp=False)),
        ):
            create(engine, "b", other, lora)
            with pytest.raises(CheckpointError, match="base model|rank 4"):
                engine.submit(LoadWeights("b", path))
            engine.submit(UnloadModel("b")).result(WAIT)
        engine.submit(CreateModel("c", "second", from_path=path)).result(WAIT)
        for operation in (
            CreateModel("d", "qwen", from_path=path),
            CreateSampler("s", "qwen", path),
        ):
            with pytest.raises(CheckpointError, match="'llama', whose architecture"):
                engine.submit(operation)
    finally:
        engine.close()


# Shutdown


def test_close_finishes_queued_operations(engines):
    engine = engines()
    create(engine)
    futures = [future for i in range(5) for future in step(engine, "a", datum(start=i))]
    saved = engine.submit(SaveWeights("a", "last"))
    engine.close()
    assert all(future.done() and future.exception() is None for future in futures)
    assert engines().checkpoint_info(saved.result(0).path).lora.rank == 4


def test_close_without_finish_fails_queued_operations(engine):
    create(engine)
    engine.submit(CreateSampler("s", "llama")).result(WAIT)
    gate: Future[Any] = Future()
    futures = [
        engine.submit(DeferredForwardBackward("a", gate, "cross_entropy")),
        engine.submit(OptimStep("a", STEP)),
    ]
    futures += [engine.submit(slow_sample("s", 1900)), engine.submit(SaveWeights("a", "x"))]
    engine.close(finish=False)
    for future in futures:
        with pytest.raises(EngineClosedError):
            future.result(0)
    with pytest.raises(EngineClosedError):
        engine.submit(OptimStep("a", STEP))
    engine.close()


def test_close_does_not_wait_for_data_that_no_thread_computes(engine):
    create(engine)
    waiting = engine.submit(DeferredForwardBackward("a", Future(), "cross_entropy"))
    engine.close()
    with pytest.raises(EngineClosedError):
        waiting.result(0)


def test_close_waits_for_data_that_a_thread_computes(engine):
    create(engine)
    data: Future[Any] = Future()
    data.set_running_or_notify_cancel()
    futures = [
        engine.submit(DeferredForwardBackward("a", data, "cross_entropy")),
        engine.submit(OptimStep("a", STEP)),
    ]
    futures.append(engine.submit(SaveWeights("a", "last")))
    threading.Timer(0.2, data.set_result, [[datum()]]).start()
    engine.close()
    assert [future.exception(0) for future in futures] == [None] * 3


def test_close_without_finish_interrupts_waiting_for_data(engine):
    create(engine)
    data: Future[Any] = Future()
    data.set_running_or_notify_cancel()
    waiting = engine.submit(DeferredForwardBackward("a", data, "cross_entropy"))
    engine._thread.stop(finish=True)
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    engine.close(finish=False)
    with pytest.raises(EngineClosedError):
        waiting.result(0)


@pytest.mark.slow
def test_submitting_while_closing_never_hangs(engines):
    for _ in range(20):
        engine = engines()
        engine.submit(CreateSampler("s", "llama")).result(WAIT)
        answers: list[Any] = []

        def ask(engine: Engine = engine, answers: list[Any] = answers) -> None:
            while True:
                try:
                    future = engine.submit(request("s", 2))
                except EngineClosedError:
                    return
                answers.append(future.exception(WAIT))

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.01)
        engine.close(finish=False)
        asking.join(WAIT)
        assert not asking.is_alive()
        assert all(a is None or isinstance(a, EngineClosedError) for a in answers)


@pytest.mark.slow
def test_an_unreferenced_engine_stops_its_thread(model_dirs, tmp_path):
    engine = Engine(model_dirs, tmp_path, EngineSettings(dtype="float32"))
    create(engine)
    thread, base = engine._thread._thread, weakref.ref(engine._base_models.get("llama"))
    del engine
    gc.collect()
    thread.join(WAIT)
    assert not thread.is_alive()
    wait_until(lambda: gc.collect() >= 0 and base() is None)


@pytest.mark.parametrize("fault", [None, RuntimeError("CUDA error: unspecified launch failure")])
def test_is_lost_is_true_if_synchronize_fails(engine, monkeypatch, fault):
    create(engine)
    base = engine._base_models.get("llama")
    assert not base.is_lost()
    waited: list[object] = []

    def wait(device: torch.device) -> None:
        waited.append(device)
        if fault is not None:
            raise fault

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(base.backend, "device", torch.device("cuda", 1))
    assert base.is_lost() == (fault is not None)
    assert waited == [torch.device("cuda", 1)]


@pytest.mark.slow
def test_close_frees_the_weights_without_garbage_collection(model_dirs, tmp_path):
    """The next engine of the process divides the GPU memory that is free at that time, so close
    must not leave the weights to the garbage collector.
    """
    engine = Engine(model_dirs, tmp_path, EngineSettings(dtype="float32"))
    create(engine)
    engine.submit(CreateSampler("s", "llama")).result(WAIT)
    tokens(engine, "s")
    base = weakref.ref(engine._base_models.get("llama"))
    gc.collect()
    gc.disable()
    try:
        engine.close()
        assert base() is None
    finally:
        gc.enable()


EXIT = """
import logging, sys
logging.getLogger("planish.model.kernels").setLevel("ERROR")  # a machine may lack kernels, which is told
from planish.engine.engine import Engine
from planish.engine.settings import EngineSettings
from planish.service import *
from planish.types import *
engine = Engine({"m": sys.argv[1]}, sys.argv[2], EngineSettings(dtype="float32", micro_batch_tokens=64))
engine.submit(CreateModel("a", "m", LoraConfig(rank=4))).result()
engine.submit(CreateSampler("s", "m")).result()
prompt = ModelInput.from_ints(list(range(60)))
data = [Datum(prompt, {"target_tokens": list(range(60))}) for _ in range(3000)]
engine.submit(Sample("s", prompt, 8, SamplingParams(max_tokens=1900, stop=[])))
engine.submit(ForwardBackward("a", data, "cross_entropy"))
print("leaving", flush=True)
"""


@pytest.mark.slow
def test_the_interpreter_exits_quickly_without_close(model_dirs, tmp_path):
    command = [sys.executable, "-X", "faulthandler", "-c", EXIT, model_dirs["llama"], str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "leaving\n"
        start = time.monotonic()
        output, errors = program.communicate()
    assert (program.returncode, output, errors) == (0, "", "")
    assert time.monotonic() - start < 40


# Settings and names


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float16"},
        {"dtype": "int8"},
        {"device": "tpu"},
        {"device": "cuda:99"},
        {"device": "meta"},
        {"deterministic": "yes"},
        {"micro_batch_tokens": 0},
        {"kv_cache_bytes": -1},
        {"max_batch": 1.5},
    ],
)
def test_invalid_settings_are_named_in_the_error(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        EngineSettings(**settings)


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_dtype_is_bfloat16_where_the_cpu_multiplies_it(monkeypatch, native, dtype):
    monkeypatch.setattr(settings_module, "_cpu_multiplies_bfloat16", lambda: native)
    assert choose_dtype("auto", torch.device("cpu")) is dtype
    assert choose_dtype("float32", torch.device("cpu")) is torch.float32


def test_model_names_with_one_directory_share_weights(model_dirs, tmp_path):
    engine = Engine(
        {"x": model_dirs["llama"], "y": model_dirs["llama"]},
        tmp_path,
        EngineSettings(dtype="float32"),
    )
    try:
        assert engine._base_models.get("x") is engine._base_models.get("y")
        assert engine._base_models.get("x") is engine._base_models.get(model_dirs["llama"])
    finally:
        engine.close()


def test_a_model_or_sampler_id_in_use_is_rejected(engine):
    create(engine)
    with pytest.raises(UserError, match="in use"):
        engine.submit(CreateModel("a", "llama"))
    engine.submit(CreateSampler("s", "llama")).result(WAIT)
    with pytest.raises(UserError, match="in use"):
        engine.submit(PublishSampler("a", "s"))


def test_capabilities_list_the_configured_models(engine):
    models = {model.model_name: model for model in engine.capabilities().supported_models}
    assert models["llama"].max_context_length == 2048


def test_capabilities_list_loaded_models(engine, model_dirs):
    assert model_dirs["llama"] not in {
        model.model_name for model in engine.capabilities().supported_models
    }
    engine.submit(CreateSampler("s", model_dirs["llama"])).result(WAIT)
    models = {model.model_name: model for model in engine.capabilities().supported_models}
    assert models[model_dirs["llama"]].max_context_length == models["llama"].max_context_length


def test_changing_the_data_list_after_submit_has_no_effect(engine):
    create(engine, "a")
    create(engine, "b")
    gate: Future[Any] = Future()
    held = engine.submit(DeferredForwardBackward("a", gate, "cross_entropy"))
    data = [datum()]
    result = engine.submit(ForwardBackward("a", data, "cross_entropy"))
    data[0] = datum(start=9)
    data.append(datum())
    gate.set_result([datum()])
    held.result(WAIT)
    assert result.result(WAIT).metrics["loss:sum"] == loss(engine, "b")


def engine_path(future: Future[Any]) -> Any:
    from planish.types import CheckpointPath

    return CheckpointPath.parse(future.result(WAIT).path)


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_targets_with_several_candidates_give_logprobs_of_that_shape(engine):
    create(engine)
    targets = TensorData([[1, 2], [3, 4], [5, 6]], "int64")
    data = [
        Datum(
            ModelInput.from_ints([1, 2, 3]),
            {"target_tokens": targets, "weights": torch.full((3, 2), 0.5)},
        )
    ]
    out = engine.submit(ForwardBackward("a", data, "cross_entropy")).result(WAIT)
    assert out.loss_fn_outputs[0]["logprobs"].shape == [3, 2]
    assert Path(engine.tokenizer_directory("llama")).is_dir()
