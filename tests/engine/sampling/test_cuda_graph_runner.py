"""The GPU's model runner equals the eager one on a small model. Without a GPU, the kernels are
interpreted, and captured steps are computed again instead of replayed.
"""

import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from backends import load_on
from test_sampler import adapter, request, run, tokens

from planish.engine.sampling import reservations, sampler as sampler_module
from planish.engine.sampling.cuda_graph_runner import CudaGraphRunner, GraphRecorder, graph_sizes
from planish.engine.sampling.model_runner import EagerRunner
from planish.engine.sampling.plan import StepOutput, StepPlan
from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.model.decoder.decoder import Decoder
from planish.model.sequences.kv_cache import GappedKVPool, KVPool
from planish.model.sequences.positions import SPAN
from planish.testing import tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    # The interpreter takes seconds per layer, so there is one layer. The tests of the tables cover
    # several layers.
    return tiny_model(tmp_path_factory.mktemp("model"), family="qwen3", layers=1)


@pytest.fixture(scope="module")
def decoder(directory) -> Decoder:
    return load_on(directory, torch.float32, DEVICE)


def sampler_of(decoder: Decoder, **settings) -> Sampler:
    return Sampler(decoder, SamplerSettings(**settings), lambda _: "")


@pytest.fixture
def with_kernels(directory, monkeypatch):
    def switch(kernels: str) -> Decoder:
        monkeypatch.setenv("PLANISH_KERNELS", kernels)
        return load_on(directory, torch.float32, DEVICE)

    return switch


@pytest.mark.slow
def test_the_gpu_sampler_samples_the_same_tokens_as_the_eager_one(decoder, with_kernels):
    """The batch has several adapters and the base model, shared prompt prefixes, samples that end
    early and samples that join late, and more rows than one graph.
    """
    tenants = [None, adapter(decoder, 1), adapter(decoder, 2, rank=4)]
    jobs = []
    for index in range(6):
        prompt = tokens(70 if index % 2 else 40) + tokens(index, seed=index)
        op = request(
            prompt, 1 + index % 3, max_tokens=2 + index % 4, seed=index, topk_sample_logprobs=2
        )
        jobs.append((op, tenants[index % 3], f"version {index % 3}"))
    answers = []
    for kernels, passes in (("torch", EagerRunner), ("triton", CudaGraphRunner)):
        decoder = with_kernels(kernels)
        sampler = sampler_of(decoder, max_batch=5, max_prefill_tokens_per_step=64)
        assert isinstance(sampler._runner, passes)
        answers.append([s for response in run(sampler, *jobs) for s in response.sequences])
    for plain, graphs in zip(*answers, strict=True):
        assert graphs.tokens == plain.tokens
        assert graphs.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
        for ours, theirs in zip(graphs.topk_logprobs, plain.topk_logprobs, strict=True):
            assert [token for token, _ in ours] == [token for token, _ in theirs]


@pytest.mark.slow
def test_samples_on_a_gpu_move_to_larger_slots_and_resume(decoder, with_kernels, monkeypatch):
    """Slots grow by one span here instead of 1,024 positions. One sample is preempted."""
    monkeypatch.setattr(sampler_module, "GPU_BLOCK", SPAN)
    for name in ("_FIRST_EXPECTED_TOKENS", "_MIN_HEADROOM_TOKENS"):
        monkeypatch.setattr(reservations, name, 1)
    ops = [request(tokens(60, seed=seed), 1, max_tokens=8, seed=seed) for seed in range(2)]
    answers, moved = [], []
    move = GappedKVPool.move

    def noted(pool: GappedKVPool, owners: list, target: KVPool) -> None:
        moved.extend(owners)
        move(pool, owners, target)

    monkeypatch.setattr(GappedKVPool, "move", noted)
    positions = 2 * (64 + 128) - 64
    for kernels, count in (("torch", 10_000), ("triton", positions)):
        decoder = with_kernels(kernels)
        bytes_per_position = decoder.backend.kv_spec.bytes_per_position
        sampler = sampler_of(
            decoder, kv_cache_bytes=count * bytes_per_position, prefix_cache_bytes=0
        )
        answers.append([s for response in run(sampler, *ops) for s in response.sequences])
    assert moved
    assert sampler.num_preemptions == 1
    for plain, graphs in zip(*answers, strict=True):
        assert graphs.tokens == plain.tokens
        assert graphs.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


@pytest.mark.slow
def test_an_idle_gpu_sampler_references_no_adapter(decoder, with_kernels):
    decoder = with_kernels("triton")
    sampler = sampler_of(decoder, max_batch=2)
    run(sampler, (request(tokens(5), max_tokens=2), adapter(decoder, 1), "one"))
    assert isinstance(sampler._runner, CudaGraphRunner)
    assert not sampler._runner._adapters._slots
    assert not sampler._runner._prefill_adapters._slots


@pytest.mark.slow
def test_steps_of_all_batch_sizes_write_logits_to_one_buffer(decoder, with_kernels, monkeypatch):
    decoder = with_kernels("triton")
    sampler, found = sampler_of(decoder, max_batch=2), []

    def noted(plan: StepPlan) -> StepOutput:
        output = original(plan)
        if output.logits is not None:  # a decoding step
            found.append(output.logits)
        return output

    original = sampler._runner.run
    monkeypatch.setattr(sampler._runner, "run", noted)
    run(sampler, *(request(tokens(5), seed=seed, max_tokens=3 + seed) for seed in range(2)))
    assert {len(logits) for logits in found} == {1, 2}
    assert len({logits.data_ptr() for logits in found}) == 1


class FakeCuda:
    """Fake CUDA streams and graphs, which log each call with its stream in `said`.

    A failed capture leaves its stream current, as in torch.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.said: list[tuple[str, object]] = []
        self.threads = threading.local()
        self.pools = 0
        for name in (
            "Stream",
            "stream",
            "current_stream",
            "graph",
            "CUDAGraph",
            "graph_pool_handle",
        ):
            patch.setattr(torch.cuda, name, getattr(self, f"_{name.lower()}"))
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            patch.setattr(torch._C, name, getattr(self, name.lower()), raising=False)

    @property
    def current(self) -> str:
        return getattr(self.threads, "stream", "default")

    def _stream(self, given) -> object:
        return self._entered(given.name) if hasattr(given, "name") else self._made(given)

    def _made(self, device: torch.device) -> object:
        name = f"stream of {device}"
        return SimpleNamespace(
            name=name,
            device=device,
            wait_stream=lambda other: self.said.append((f"{name} waits", other)),
        )

    @contextmanager
    def _entered(self, name: str):
        before, self.threads.stream = self.current, name
        try:
            yield
        finally:
            self.threads.stream = before

    def _current_stream(self, device: torch.device) -> str:
        return self.current

    @contextmanager
    def _graph(self, graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.threads.stream = stream.name
        self.said.append(("records", pool))
        yield
        self.said.append(("recorded", pool))

    def _cuda_endallocatetopool(self, device: int, pool: int) -> None:
        self.said.append(("closes", pool))

    def _cuda_releasepool(self, device: int, pool: int) -> None:
        self.said.append(("gives back", pool))

    def _cudagraph(self) -> object:
        return SimpleNamespace(replay=lambda: self.said.append(("launches", self.current)))

    def _graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.said.append(("computes", self.current))
        return torch.ones(1), torch.zeros(1)


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_a_step_runs_eagerly_once_before_capture_and_replay(cuda):
    recorder, here = GraphRecorder(torch.device("cuda", 1)), "stream of cuda:1"
    launch = recorder.record(cuda.step)
    recorder.record(cuda.step)
    first = [
        (f"{here} waits", "default"),
        ("computes", here),
        ("records", 1),
        ("computes", here),
        ("recorded", 1),
    ]
    assert cuda.said == [*first, *first]
    assert cuda.current == "default"
    assert launch()[0] is launch()[0]
    assert cuda.said[10:] == [("launches", "default")] * 2


def test_after_a_failed_capture_the_next_one_uses_a_new_memory_pool(cuda):
    recorder = GraphRecorder(torch.device("cuda", 0))
    computed = []

    def too_large() -> tuple[torch.Tensor, torch.Tensor]:
        computed.append(1)
        if len(computed) == 2:
            raise MemoryError
        return cuda.step()

    with pytest.raises(MemoryError):
        recorder.record(too_large)
    assert cuda.current == "default"
    for _ in range(2):
        recorder.record(cuda.step)
    assert [pool for what, pool in cuda.said if what == "records"] == [1, 2, 2]


def test_two_engines_in_one_process_capture_one_at_a_time(cuda):
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> tuple[torch.Tensor, torch.Tensor]:
        begun.set()
        assert go_on.wait(60)
        return cuda.step()

    recorders = [GraphRecorder(torch.device("cuda", number)) for number in range(2)]
    threads = [
        threading.Thread(target=recorder.record, args=(step,))
        for recorder, step in zip(recorders, (slow, cuda.step), strict=True)
    ]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    threads[1].join(0.2)
    assert not cuda.said[1:]
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert [what for what, _ in cuda.said if "record" in what] == ["records", "recorded"] * 2


def test_graph_sizes_cover_every_batch_with_little_padding():
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(256)[-3:] == [128, 192, 256]
    assert graph_sizes(1500)[-4:] == [768, 1024, 1280, 1500]


def test_a_failed_capture_frees_its_memory(cuda):
    """The pool is kept if another graph uses it."""
    recorder = GraphRecorder(torch.device("cuda", 0))
    computed = 0

    def fails_while_recorded() -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal computed
        computed += 1
        if computed % 2 == 0:
            raise RuntimeError("CUDA out of memory")
        return cuda.step()

    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            recorder.record(fails_while_recorded)
        recorder.record(cuda.step)
    ended = [said for said in cuda.said if said[0] in ("closes", "gives back")]
    assert ended == [("closes", 1), ("gives back", 1), ("closes", 2)]


def recorded_sizes(decoder, patch, record) -> CudaGraphRunner:
    """Return a model runner that has captured all its graphs with `record`."""
    passes = CudaGraphRunner(
        decoder,
        decoder.backend.kv_spec,
        max_batch=3,
        max_prefill_tokens_per_step=8,
    )
    passes.recorder = SimpleNamespace(record=record)  # type: ignore[assignment]
    passes.record()
    return passes


@pytest.mark.slow
def test_all_graph_sizes_are_captured_in_advance(decoder, with_kernels, monkeypatch):
    decoder = with_kernels("triton")
    rows = []

    def recorded(step):
        hidden, logits = step()
        assert not hidden.requires_grad
        rows.append(len(logits))
        return step

    passes = recorded_sizes(decoder, monkeypatch, recorded)
    assert rows == [3, 3, 2, 2, 1, 1]
    assert set(passes._steps) == {(n, a, a) for n in (1, 2, 3) for a in (False, True)}


def test_steps_run_eagerly_if_capture_fails(decoder, with_kernels, monkeypatch, caplog):
    decoder = with_kernels("triton")

    def fails(step):
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore.")

    passes = recorded_sizes(decoder, monkeypatch, fails)
    assert passes.recorder is None
    assert not passes._steps
    (line,) = caplog.messages
    assert "recording the graph for 3 rows failed (CUDA out of memory.)" in line
    assert "PLANISH_GRAPHS=0" in line
