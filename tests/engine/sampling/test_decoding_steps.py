"""Decoding steps that overlap, as on a GPU, give the same bits as steps one after another."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_sampler
import torch
from backends import CPU, load_on, with_tiling
from test_sampler import adapter, assert_nothing_left, text_of, tokens
from variants import slow_after

from planish.engine.constraints.cache import GrammarCache
from planish.engine.sampling import reservations
from planish.engine.sampling.decoding_steps import wants_overlap
from planish.engine.sampling.plan import RowLayout, StepOutput, StepPlan
from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.errors import NonFiniteError, UserError
from planish.model.decoder.decoder import Decoder
from planish.model.kernels.reference.probe import probe
from planish.model.layers.lora import LoraLayout, LoraWeights
from planish.model.layers.recurrence import state_bytes
from planish.model.layers.row_tiling import FIXED
from planish.service import Sample, SampledToken
from planish.testing import VOCAB_SIZE, tiny_model
from planish.tokenizer import load_tokenizer
from planish.types import Constraint, LoraConfig, SampleResponse

ALL_TOKENS = range(VOCAB_SIZE)
Job = tuple[Sample, LoraWeights | None]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def decoder(model_dir) -> Decoder:
    return with_same_bits(load_on(model_dir, torch.float32, CPU))


def with_same_bits(decoder: Decoder) -> Decoder:
    """Return a batch-invariant decoder: a dropped row makes a batch larger."""
    return with_tiling(decoder, probe(decoder.backend) or FIXED)


def request(prompt: list[int], n: int = 1, **options: Any) -> Sample:
    return test_sampler.request(prompt, n, **{"seed": 5, **options})


def sampler_of(decoder: Decoder, *, overlap: bool, **settings: Any) -> Sampler:
    grammars = settings.pop("grammars", None)
    sampler = Sampler(decoder, SamplerSettings(**settings), text_of, grammars)
    assert not sampler._steps.overlap  # on a CPU
    sampler._steps.overlap = overlap
    return sampler


class Run:
    """A sampler, the requests that it got, and what it told about each."""

    def __init__(self, decoder: Decoder, *, overlap: bool, **settings: Any) -> None:
        self.sampler = sampler_of(decoder, overlap=overlap, **settings)
        self.futures: list[Future[SampleResponse]] = []
        self.told: list[dict[int, list[Any]]] = []
        self.num_steps = self.num_pending = 0

    def submit(self, op: Sample, weights: LoraWeights | None = None) -> Future[SampleResponse]:
        told: dict[int, list[Any]] = {}

        def on_token(token: SampledToken) -> None:
            told.setdefault(token.sample, []).append(
                (token.token, token.logprob, token.top_tokens.tolist(), token.text_end)
            )

        self.sampler.validate(op)
        self.futures.append(Future())
        self.told.append(told)
        self.sampler.submit(replace(op, on_token=on_token), weights, id(weights), self.futures[-1])
        return self.futures[-1]

    def step(self) -> None:
        self.sampler.step()
        self.num_steps += 1
        self.num_pending += self.sampler._steps.has_pending_tokens

    def finish(self) -> None:
        for _ in range(5000):
            if not self.sampler.busy:
                break
            self.step()
        assert not self.sampler.busy
        assert not self.sampler._steps.has_pending_tokens
        assert_nothing_left(self.sampler)

    def responses(self) -> list[Any]:
        """Return the bits of each response, or the type of its error."""
        found: list[Any] = []
        for future in self.futures:
            if future.cancelled() or future.exception(timeout=0) is not None:
                found.append("cancelled" if future.cancelled() else type(future.exception()))
                continue
            found.append(
                [
                    (s.tokens, s.logprobs, s.stop_reason, s.topk_logprobs)
                    for s in future.result().sequences
                ]
            )
        return found

    def told_bits(self) -> list[Any]:
        return [{index: told[index] for index in sorted(told)} for told in self.told]


def compared(decoder: Decoder, work: Callable[[Run], None], **settings: Any) -> tuple[Run, Run]:
    """Do the work with steps one after another and with overlapping steps. Return both runs, whose
    tokens and logprobs are equal.
    """
    runs = [Run(decoder, overlap=overlap, **settings) for overlap in (False, True)]
    for run in runs:
        work(run)
        run.finish()
    plain, overlapping = runs
    assert plain.num_pending == 0
    assert overlapping.num_pending > 0
    assert overlapping.responses() == plain.responses()
    return plain, overlapping


def jobs_of(decoder: Decoder, count: int = 12, seed: int = 0) -> list[Job]:
    """Return random requests of two owners and three adapters. Most samples stop at a token."""
    random = np.random.default_rng(seed)
    adapters = [None, adapter(decoder, 1), adapter(decoder, 2, rank=4)]
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6, "top_k": 20},
        {"topk_sample_logprobs": 3},
        {"logprob_token_ids": (7, 3)},
        {"top_p": 0.8, "min_p": 0.01},
        {"temperature": 0.0},
    ]
    common = tokens(200, seed=9)
    return [
        (
            request(
                common[: random.integers(0, 150)] + tokens(int(random.integers(1, 80)), seed=i),
                int(random.integers(1, 4)),
                seed=i,
                max_tokens=int(random.integers(1, 60)),
                stop=random.choice(ALL_TOKENS, int(random.integers(0, 12)), False).tolist(),
                owner=f"owner {i % 2}",
                **options[i % len(options)],
            ),
            adapters[i % 3],
        )
        for i in range(count)
    ]


def at_once(jobs: Sequence[Job]) -> Callable[[Run], None]:
    def submit(run: Run) -> None:
        for op, weights in jobs:
            run.submit(op, weights)

    return submit


@pytest.mark.parametrize(
    ("family", "kernels", "dtype"),
    slow_after(
        1,
        [
            ("qwen3", "auto", torch.float32),
            ("qwen3", "auto", torch.bfloat16),
            ("qwen3", "torch", torch.float32),
            ("gemma3", "auto", torch.float32),
            ("gpt_oss", "torch", torch.float32),
            ("qwen3_moe", "auto", torch.bfloat16),
            ("qwen3_5", "auto", torch.float32),
            ("qwen3_5", "torch", torch.float32),
        ],
    ),
)
def test_overlapping_steps_have_the_same_bits(tmp_path, monkeypatch, family, kernels, dtype):
    monkeypatch.setenv("PLANISH_KERNELS", kernels)
    tiny_model(tmp_path, family, dtype=str(dtype).removeprefix("torch."), vocab_size=VOCAB_SIZE)
    decoder = with_same_bits(load_on(tmp_path, dtype, CPU))
    jobs = jobs_of(decoder)
    plain, overlapping = compared(
        decoder, at_once(jobs), max_batch=9, max_prefill_tokens_per_step=96
    )
    assert overlapping.told_bits() == plain.told_bits()
    reasons = {sequence[2] for response in plain.responses() for sequence in response}
    assert reasons == {"stop", "length"}


def noted_plans(run: Run) -> list[StepPlan]:
    """Return a list to which each plan of the run is added."""
    plans: list[StepPlan] = []
    original = run.sampler._runner.run

    def noted(plan: StepPlan) -> StepOutput:
        plans.append(plan)
        return original(plan)

    run.sampler._runner.run = noted  # type: ignore[method-assign]
    return plans


def test_a_sample_that_stops_has_one_more_row_which_is_dropped(decoder):
    op = request(tokens(30), seed=4, max_tokens=40)
    alone = Run(decoder, overlap=False)
    alone.submit(op)
    alone.finish()
    ((sampled, *_),) = alone.responses()[0]
    last = next(i for i in range(5, 40) if sampled[i] not in sampled[:i])
    plans: list[list[StepPlan]] = []

    def work(run: Run) -> None:
        plans.append(noted_plans(run))
        params = replace(op.sampling_params, stop=[sampled[last]])
        run.submit(replace(op, sampling_params=params))

    plain, overlapping = compared(decoder, work)
    assert overlapping.told_bits() == plain.told_bits()
    # One pass is the prefill, after which the first token needs no pass.
    assert [len(each) for each in plans] == [1 + last, 2 + last]


def test_max_tokens_needs_no_additional_row(decoder):
    plans: list[list[StepPlan]] = []

    def work(run: Run) -> None:
        plans.append(noted_plans(run))
        for max_tokens in (1, 2, 3, 9):
            run.submit(request(tokens(20, seed=max_tokens), max_tokens=max_tokens))

    compared(decoder, work)
    rows = [[len(plan.sampled.samples) for plan in each] for each in plans]
    assert rows[0] == rows[1] == [0, 3, 2, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("family", slow_after(1, ["qwen3", "qwen3_5"]))
def test_preempted_samples_have_the_same_bits(tmp_path, monkeypatch, family):
    """The small KV cache has space for about three samples, whose slots grow."""
    for name in ("_FIRST_EXPECTED_TOKENS", "_MIN_HEADROOM_TOKENS"):
        monkeypatch.setattr(reservations, name, 1)
    monkeypatch.setattr(reservations, "_WEIGHT_OF_LAST", 0)
    tiny_model(tmp_path, family, vocab_size=VOCAB_SIZE)
    decoder = with_same_bits(load_on(tmp_path, torch.float32, CPU))
    jobs = [
        (
            replace(op, sampling_params=replace(op.sampling_params, max_tokens=100)),
            weights,
        )
        for op, weights in jobs_of(decoder)
    ]
    per_position = decoder.backend.kv_spec.bytes_per_position
    positions = 700 + 7 * (state_bytes(decoder.config, decoder.dtype) // per_position)
    large, small = (
        {"kv_cache_bytes": count * per_position, "prefix_cache_bytes": 0}
        for count in (1 << 20, positions)
    )
    expected, _ = compared(decoder, at_once(jobs), **large)
    plain, overlapping = compared(decoder, at_once(jobs), **small)
    assert overlapping.sampler.num_preemptions > 0
    assert plain.responses() == expected.responses()
    assert overlapping.told_bits() == expected.told_bits()


@pytest.mark.parametrize("seed", slow_after(3, list(range(12))))
def test_arrivals_and_cancellations_at_any_time_change_no_other_sample(decoder, monkeypatch, seed):
    """Requests come and are withdrawn between any two steps, also while tokens are pending."""
    for name in ("_FIRST_EXPECTED_TOKENS", "_MIN_HEADROOM_TOKENS"):
        monkeypatch.setattr(reservations, name, 1)
    jobs = jobs_of(decoder, 16, seed)
    withdrawn = set(np.random.default_rng(seed).choice(16, 5, False).tolist())
    positions = 900 * decoder.backend.kv_spec.bytes_per_position

    def work(run: Run) -> None:
        random, left = np.random.default_rng(seed), [*range(len(jobs))]
        while left:
            for number in left[: random.integers(0, 4)]:
                run.submit(*jobs[number])
                left.remove(number)
            for _ in range(random.integers(1, 12)):
                run.step()
            for number in withdrawn:
                if number < len(run.futures) and random.random() < 0.5:
                    run.futures[number].cancel()

    runs = [Run(decoder, overlap=o, max_batch=7, kv_cache_bytes=positions) for o in (False, True)]
    for run in runs:
        work(run)
        run.finish()
    plain, overlapping = runs
    assert overlapping.num_pending > 0
    assert any(future.cancelled() for future in overlapping.futures)
    for number in set(range(len(jobs))) - withdrawn:
        assert overlapping.responses()[number] == plain.responses()[number]
        assert overlapping.told_bits()[number] == plain.told_bits()[number]
    for number in withdrawn:  # One of the two may have been told more before it was withdrawn.
        for index, told in overlapping.told[number].items():
            expected = plain.told[number].get(index, [])
            count = min(len(told), len(expected))
            assert told[:count] == expected[:count]


def test_adjusted_samples_join_and_leave_overlapping_ones(decoder, model_dir):
    """A step with masks, penalties or forced tokens is applied before the next one."""
    grammars = GrammarCache(lambda: load_tokenizer(model_dir), VOCAB_SIZE)
    constraint = Constraint("regex", "a[b-d]{2}hello[ef]{3}")
    others = [
        request(tokens(9), max_tokens=30, seed=1),
        request(tokens(30, seed=1), 2, max_tokens=50, seed=2),
    ]
    adjusted = [
        request(tokens(20, seed=2), seed=3, max_tokens=20),
        request(tokens(21, seed=3), seed=4, max_tokens=8),
    ]
    params = [
        replace(adjusted[0].sampling_params, constraint=constraint, stop=[5]),
        replace(adjusted[1].sampling_params, repetition_penalty=1.3, frequency_penalty=0.2),
    ]

    def work(run: Run) -> None:
        run.submit(others[0])
        for _ in range(6):
            run.step()
        for op, changed in zip(adjusted, params, strict=True):
            run.submit(replace(op, sampling_params=changed))
        run.submit(others[1])

    plain, overlapping = compared(decoder, work, grammars=grammars)
    assert overlapping.told_bits() == plain.told_bits()
    assert "hello" in text_of(plain.responses()[1][0][0])


def test_a_fault_in_a_step_delivers_the_tokens_of_the_step_before(decoder):
    """The samples that ended in the step before have their response, and the others the error."""
    runs = [Run(decoder, overlap=overlap) for overlap in (False, True)]
    for run in runs:
        for max_tokens in (4, 7, 30):
            run.submit(request(tokens(20, seed=max_tokens), max_tokens=max_tokens))
        original, calls = run.sampler._runner.run, []

        def fails(plan: StepPlan, original=original, calls=calls) -> StepOutput:
            calls.append(plan)
            if len(calls) == 8:  # The prefill was the first.
                raise ZeroDivisionError
            return original(plan)

        run.sampler._runner.run = fails  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError) as caught:
            run.finish()
        run.sampler.abort_all(caught.value)
        assert_nothing_left(run.sampler)
    plain, overlapping = runs
    assert overlapping.responses() == plain.responses()
    assert [r is ZeroDivisionError for r in plain.responses()] == [False, False, True]
    assert overlapping.told_bits() == plain.told_bits()
    for run in runs:
        run.submit(request(tokens(20)))
        run.finish()
    assert overlapping.responses()[-1] == plain.responses()[-1]


def test_tokens_of_a_failed_append_are_not_continued(decoder, monkeypatch):
    """If the tokens of a step cannot be appended, those of the next step are dropped."""
    run = Run(decoder, overlap=True)
    run.submit(request(tokens(20), max_tokens=30))
    for _ in range(5):
        run.step()
    count = len(run.told[0][0])
    with monkeypatch.context() as patch:
        patch.setattr(run.sampler._selection, "append", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError) as caught:
            run.step()
    run.sampler.abort_all(caught.value)
    assert len(run.told[0][0]) == count
    assert run.responses() == [ZeroDivisionError]


def test_logits_that_are_not_finite_fail_their_request_only(decoder):
    layout = LoraLayout(decoder.config, LoraConfig(rank=8))
    broken = LoraWeights(layout, layout.init(1) * 0 + torch.nan, decoder.backend)

    def work(run: Run) -> None:
        run.submit(request(tokens(9), max_tokens=20))
        for _ in range(4):
            run.step()
        run.submit(request(tokens(30), 2, max_tokens=20), broken)
        run.submit(request(tokens(40), 2, max_tokens=20))

    plain, _ = compared(decoder, work)
    assert plain.responses()[1] is NonFiniteError


def test_an_error_in_on_token_while_a_token_is_pending_fails_its_request_only(decoder):
    told: list[SampledToken] = []

    def fails(token: SampledToken) -> None:
        told.append(token)
        if len(told) == 4:
            raise ZeroDivisionError

    def work(run: Run) -> None:
        told.clear()
        run.submit(request(tokens(9), max_tokens=20))
        run.futures.append(Future())
        op = request(tokens(12), max_tokens=20, on_token=fails)
        run.sampler.submit(op, None, "base", run.futures[-1])

    plain, _ = compared(decoder, work)
    assert plain.responses()[1] is ZeroDivisionError
    assert len(told) == 4


def test_inputs_take_tokens_of_the_host_and_pending_ones():
    layout = RowLayout([(None, 4)])
    plan = StepPlan([5, 0, 7, 0], [1, 2, 3, 4], layout, [])
    assert plan.inputs(CPU).tolist() == [[5, 0, 7, 0], [1, 2, 3, 4]]
    pending = torch.tensor([40, 50, 60])
    plan = replace(plan, pending=pending, sources=[0, 6, 2, 4])
    assert plan.inputs(CPU).tolist() == [[5, 60, 7, 40], [1, 2, 3, 4]]


def test_planish_overlap_must_be_0_or_1(monkeypatch):
    assert wants_overlap()
    monkeypatch.setenv("PLANISH_OVERLAP", "0")
    assert not wants_overlap()
    monkeypatch.setenv("PLANISH_OVERLAP", "no")
    with pytest.raises(UserError, match="PLANISH_OVERLAP='no': give 0 or 1"):
        wants_overlap()
