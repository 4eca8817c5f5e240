"""Constrained decoding: masks against brute force over the vocabulary, and samples in batches."""

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex
import torch
from backends import CPU, load_on, with_tiling
from json_schema_samples import Case, check

import planish
from planish.engine.constraints import cache as cache_module
from planish.engine.constraints.cache import GrammarCache
from planish.engine.constraints.grammar import (
    Grammar,
    GrammarState,
    SampledTokens,
    wait_for_masks,
)
from planish.engine.sampling.model_runner import EagerRunner
from planish.engine.sampling.plan import StepOutput, StepPlan
from planish.engine.sampling.sampler import Sampler
from planish.engine.sampling.settings import SamplerSettings
from planish.errors import UserError
from planish.model.decoder.decoder import Decoder
from planish.model.kernels.reference.token_sampling import unpacked
from planish.model.layers.row_tiling import FIXED
from planish.model.sources.resolve import DEFAULT_MODEL, resolve_model
from planish.service import Sample
from planish.testing import EOS_TOKEN_ID, VOCAB_SIZE, save_byte_tokenizer, tiny_model
from planish.tokenizer import load_tokenizer
from planish.types import (
    MAX_STOP_STRINGS,
    Constraint,
    ModelInput,
    SampledSequence,
    SampleResponse,
    SamplingParams,
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Constraint("json_schema", json.dumps(SCHEMA))
EXPLOSIVE = Constraint("regex", "[xy]((a{1000}){1000}){1000}")
"""llguidance's limits end it after its first or second token."""


def text_of(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model(path, family="qwen3")
    return path


@pytest.fixture(scope="module")
def decoder(model_dir) -> Decoder:
    return load_on(model_dir, torch.float32, CPU)


@pytest.fixture(scope="module")
def cache(model_dir) -> GrammarCache:
    return GrammarCache(lambda: load_tokenizer(model_dir), VOCAB_SIZE)


@pytest.fixture
def sampler(decoder, cache) -> Sampler:
    return Sampler(decoder, SamplerSettings(), text_of, cache)


def request(prompt: Sequence[int], n: int = 1, owner: str = "", **params: Any) -> Sample:
    options = SamplingParams(**{"max_tokens": 60, "stop": [EOS_TOKEN_ID], "seed": 0, **params})
    return Sample("sampler", ModelInput.from_ints(prompt), n, options, owner=owner)


def start(sampler: Sampler, *ops: Sample) -> list[Future[SampleResponse]]:
    futures: list[Future[SampleResponse]] = []
    for op in ops:
        sampler.validate(op)
        futures.append(Future())
        sampler.submit(op, None, "base", futures[-1])
    return futures


def run(sampler: Sampler, *ops: Sample) -> list[SampleResponse]:
    futures = start(sampler, *ops)
    for _ in range(5000):
        if not sampler.busy:
            break
        sampler.step()
    assert not sampler.busy
    return [future.result(timeout=0) for future in futures]


def bits(response: SampleResponse) -> list[tuple[list[int], list[float]]]:
    return [(sequence.tokens, sequence.logprobs) for sequence in response.sequences]


def text(sequence: SampledSequence) -> str:
    return text_of(sequence.tokens)


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def ready(state: GrammarState) -> GrammarState:
    wait_for_masks([state], 120, for_all=True)
    if state.error is not None:
        raise state.error
    return state


def allowed_after(state: GrammarState) -> tuple[np.ndarray, bool]:
    """The tokens that may come next, bool [V], and whether the text is complete."""
    forced, mask = ready(state).forced_tokens, state.mask
    if forced:
        return np.arange(VOCAB_SIZE) == forced[0], False
    assert mask is not None
    bits = unpacked(torch.from_numpy(mask.bits.view(np.int32))[None], VOCAB_SIZE)[0].numpy()
    assert mask.is_empty == (not bits.any())
    return bits, mask.is_complete


def take(cache: GrammarCache, state: GrammarState, token: int) -> None:
    """Continue the text with a token, as the sampler does."""
    if state.forced_tokens:
        assert state.forced_tokens.pop(0) == token
    else:
        cache.advance([(state, token)])


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (Constraint("regex", "[a-c]{2,4}x|(yes|no)+"), "[a-c]{2,4}x|(yes|no)+"),
        (Constraint("regex", "é+[0-9]"), "(é)+[0-9]"),
        (Constraint("choice", choices=["ab", "abc", 'q"\n\\', "日"]), 'ab|abc|q"\n\\\\|日'),
        (Constraint("lark", 'start: "a" b*\nb: "b" | "c"'), "a[bc]*"),
        (Constraint("json_schema", '{"enum": [1, "x"]}'), '1|"x"'),
    ],
)
def test_masks_equal_brute_force_over_the_vocabulary(cache, constraint, pattern):
    """`regex` can tell whether bytes are the beginning of a match."""
    raw = regex.compile(pattern.encode())
    rng = np.random.default_rng(0)
    for _ in range(20):
        state, written = cache.new_state(constraint, ""), b""
        for _ in range(12):
            allowed, is_complete = allowed_after(state)
            expected = [
                bool(raw.fullmatch(written + bytes([byte]), partial=True)) for byte in range(256)
            ]
            assert allowed[:256].tolist() == expected
            assert not allowed[256:].any()
            assert is_complete == bool(raw.fullmatch(written))
            if not allowed.any():
                break
            token = int(rng.choice(np.flatnonzero(allowed)))
            written += bytes([token])
            take(cache, state, token)


def test_control_tokens_are_allowed_only_where_a_grammar_names_them(cache):
    free = cache.new_state(Constraint("lark", "start: /(.|\\n)*/"), "")
    assert not allowed_after(free)[0][256:].any()
    named = cache.new_state(Constraint("lark", 'start: <|im_start|> "a"'), "")
    assert np.flatnonzero(allowed_after(named)[0]).tolist() == [257]


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint("regex", "(("), "unclosed group"),
        (Constraint("regex", "(?=a)b"), "look-around"),
        (Constraint("json_schema", '{"type": "strin"}'), "strin"),
        (Constraint("json_schema", '{"not": {}}'), "not"),
        (Constraint("json_schema", "false"), "nsatisfiable"),
        (Constraint("lark", "start: x"), "unknown name"),
        (Constraint("lark", 'start: "a" <|nosuch|>'), "unknown special token"),
        (Constraint("regex", "(" * 5000 + ")" * 5000), "invalid regex"),
        (Constraint("regex", "((a{1000}){1000}){1000}"), "too many expressions|MiB of memory"),
    ],
)
def test_an_invalid_grammar_is_an_error_of_the_request(sampler, constraint, reason):
    with pytest.raises(UserError, match=reason) as caught:
        sampler.validate(request(tokens(5), constraint=constraint))
    assert "SamplingParams.constraint" in str(caught.value)


def test_samples_match_their_constraint(sampler):
    ops = [
        request(tokens(40), 8, constraint=JSON),
        request(tokens(40), 4, constraint=Constraint("regex", "[a-z]{3}-[0-9]{2}")),
        request(tokens(30, 1), 4, constraint=Constraint("choice", choices=["yes", "no"])),
        request(tokens(30, 1), 4, constraint=Constraint("json_object"), max_tokens=100),
        request(tokens(30, 1), 4),
    ]
    answers, ids, words, objects, free = run(sampler, *ops)
    for sequence in answers.sequences:
        assert sequence.stop_reason == "stop"
        assert sequence.tokens[-1] == EOS_TOKEN_ID
        jsonschema.validate(json.loads(text(sequence)), SCHEMA)
    assert all(regex.fullmatch("[a-z]{3}-[0-9]{2}", text(s)) for s in ids.sequences)
    assert {text(s) for s in words.sequences} <= {"yes", "no"}
    assert all(text(s).startswith("{") for s in objects.sequences)
    for sequence in objects.sequences:
        if sequence.stop_reason == "stop":
            assert isinstance(json.loads(text(sequence)), dict)
    assert any(not text(s).isascii() for s in free.sequences)


def test_a_batch_changes_no_bits(sampler):
    """Neither those of constrained rows nor those of the others."""
    ops = [
        request(tokens(70), 3, seed=1),
        request(tokens(70), 3, seed=1, constraint=JSON),
        request(tokens(64, 2), 2, seed=2, top_p=0.8, constraint=JSON),
        request(tokens(33, 3), 2, seed=3, min_tokens=30),
        request(tokens(33, 3), 2, seed=3, repetition_penalty=1.5, presence_penalty=0.5),
        request(tokens(33, 3), 2, seed=3, top_k=4),
        request(tokens(20, 4), 2, temperature=0.0, constraint=JSON),
    ]
    together = run(sampler, *ops)
    for op, response in zip(ops, together, strict=True):
        assert bits(run(sampler, op)[0]) == bits(response)


def test_forced_tokens_change_no_bits_however_many_fit_into_a_step(decoder, cache):
    """A step decodes several of them if its batch has room, else one."""
    decoder = with_tiling(decoder, FIXED)
    long = {"type": "object", "properties": {"a_long_property": {"enum": ["first", "last"]}}}
    fixed = Constraint("json_schema", json.dumps({**long, "required": ["a_long_property"]}))
    ops = [
        request(tokens(70), 2, constraint=JSON),
        request(tokens(33, 1), 1, constraint=fixed),
        request(tokens(33, 1), 1, constraint=fixed, max_tokens=9, seed=4),
        request(tokens(33, 1), 1, constraint=fixed, stop=["_prop"], seed=5),
        request(tokens(33, 1), 1, constraint=fixed, stop=[], repetition_penalty=1.4),
        request(tokens(33, 1), 1),
    ]
    found, steps = [], []
    for max_batch in (7, 9, 256):
        sampler = Sampler(decoder, SamplerSettings(max_batch=max_batch), text_of, cache)
        found.append([bits(response) for response in run(sampler, *ops)])
        sampler = Sampler(decoder, SamplerSettings(max_batch=max_batch), text_of, cache)
        start(sampler, ops[1])
        steps.append(0)
        while sampler.busy:
            sampler.step()
            steps[-1] += 1
    assert found[0] == found[1] == found[2]
    ((written, _),) = found[0][1]
    assert text_of(written) in ('{"a_long_property":"first"}', '{"a_long_property":"last"}')
    assert len(found[0][2][0][0]) == 9
    assert text_of(found[0][3][0][0]).endswith("_prop")
    assert steps[2] < len(written) / 2


def test_a_step_has_no_more_rows_than_the_batch(decoder, cache, monkeypatch):
    rows = []
    original = EagerRunner.run

    def counted(self: EagerRunner, plan: StepPlan) -> StepOutput:
        if plan.sampled.samples:  # a decoding step
            rows.append(len(plan.tokens))
        return original(self, plan)

    monkeypatch.setattr(EagerRunner, "run", counted)
    sampler = Sampler(decoder, SamplerSettings(max_batch=10), text_of, cache)
    words = Constraint("regex", "a{50}[bc]d{50}")
    run(sampler, request(tokens(9), 8, constraint=words, max_tokens=200))
    assert max(rows) == 10
    assert sum(rows) >= 8 * 100


def test_logprobs_are_those_of_the_unconstrained_distribution(sampler):
    prompt = tokens(40)
    op = Sample(
        "sampler",
        ModelInput.from_ints(prompt),
        1,
        SamplingParams(max_tokens=60, seed=0, stop=[EOS_TOKEN_ID], constraint=JSON),
        topk_sample_logprobs=3,
    )
    (sequence,) = run(sampler, op)[0].sequences
    scored = Sample(
        "sampler",
        ModelInput.from_ints(prompt + sequence.tokens),
        1,
        SamplingParams(max_tokens=1),
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        prompt_only=True,
    )
    response = run(sampler, scored)[0]
    assert response.prompt_logprobs is not None
    assert response.topk_prompt_logprobs is not None
    assert response.prompt_logprobs[len(prompt) :] == pytest.approx(sequence.logprobs, abs=1e-4)
    assert sequence.topk_logprobs is not None
    ids = [[token for token, _ in row or []] for row in sequence.topk_logprobs]
    expected = response.topk_prompt_logprobs[len(prompt) :]
    assert ids == [[token for token, _ in row or []] for row in expected]


@pytest.mark.parametrize("stop", [[], ["\n\n"]])
def test_without_stop_tokens_a_sample_ends_where_its_text_is_complete(sampler, stop):
    words = Constraint("choice", choices=["yes", "no"])
    for sequence in run(sampler, request(tokens(30), 4, stop=stop, constraint=words))[0].sequences:
        assert text(sequence) in ("yes", "no")
        assert len(sequence.tokens) == len(text(sequence))
        assert sequence.stop_reason == "stop"


def test_an_empty_text_is_a_sample_without_tokens(sampler):
    op = request(tokens(30), stop=[], constraint=Constraint("regex", "a{0}"))
    (sequence,) = run(sampler, op)[0].sequences
    assert sequence.tokens == []
    assert sequence.stop_reason == "stop"


def test_min_tokens_keeps_stop_tokens_and_strings_from_ending_a_sample(sampler):
    often = [EOS_TOKEN_ID, *range(0, 256, 2)]
    for sequence in run(sampler, request(tokens(9), 6, stop=often, min_tokens=20))[0].sequences:
        assert len(sequence.tokens) > 20
        assert not set(sequence.tokens[:20]) & set(often)
        assert sequence.tokens[-1] in often
    strings = [chr(byte) for byte in range(32, 64)][:MAX_STOP_STRINGS]
    early = run(sampler, request(tokens(9), 6, stop=strings))[0]
    late = run(sampler, request(tokens(9), 6, stop=strings, min_tokens=20))[0]
    for first, second in zip(early.sequences, late.sequences, strict=True):
        assert len(second.tokens) > 20
        assert second.tokens[: len(first.tokens)] == first.tokens[: len(second.tokens)]
    assert any(len(sequence.tokens) < 20 for sequence in early.sequences)


def test_a_complete_text_ends_before_min_tokens(sampler):
    """Nothing but the stop token is allowed after it."""
    words = Constraint("choice", choices=["yes", "no"])
    (sequence,) = run(sampler, request(tokens(9), min_tokens=20, constraint=words))[0].sequences
    assert text(sequence) in ("yes", "no")
    assert sequence.tokens[-1] == EOS_TOKEN_ID
    longer = Constraint("regex", "[ab]*")
    (sequence,) = run(sampler, request(tokens(9), min_tokens=20, constraint=longer))[0].sequences
    assert len(sequence.tokens) > 20


def test_only_allowed_tokens_are_sampled(sampler):
    """A stop token is one of them, or it does not end a sample."""
    letters = list(b"abc")
    (response,) = run(sampler, request(tokens(9), 4, allowed_token_ids=letters, top_p=0.9))
    for sequence in response.sequences:
        assert set(sequence.tokens) <= set(letters)
        assert len(sequence.tokens) == 60
    may_end = [*letters, EOS_TOKEN_ID]
    op = request(tokens(9), 8, allowed_token_ids=may_end, min_tokens=5)
    for sequence in run(sampler, op)[0].sequences:
        assert sequence.tokens[-1] == EOS_TOKEN_ID
        assert len(sequence.tokens) > 5
        assert set(sequence.tokens[:-1]) <= set(letters)
    # Nothing else is allowed, so min_tokens does not help.
    (sequence,) = run(sampler, request(tokens(9), allowed_token_ids=[EOS_TOKEN_ID], min_tokens=3))[
        0
    ].sequences
    assert sequence.tokens == [EOS_TOKEN_ID]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_makes_tokens_certain_or_impossible(sampler, temperature):
    prompt = tokens(9)
    base = {"temperature": temperature, "max_tokens": 5}
    op = request(prompt, logit_bias={ord("a"): 100.0}, **base)
    (sequence,) = run(sampler, op)[0].sequences
    assert sequence.tokens == [ord("a")] * 5
    scored = Sample(
        "sampler",
        ModelInput.from_ints(prompt + sequence.tokens),
        1,
        SamplingParams(max_tokens=1),
        prompt_logprobs=True,
        prompt_only=True,
    )
    expected = run(sampler, scored)[0].prompt_logprobs
    assert expected is not None
    # The logprobs are those of the model without the bias.
    assert expected[len(prompt) :] == pytest.approx(sequence.logprobs, abs=1e-4)
    plain = run(sampler, request(prompt, 8, **base))[0].sequences
    banned = {token: -100.0 for sequence in plain for token in sequence.tokens[:1]}
    for sequence in run(sampler, request(prompt, 8, logit_bias=banned, **base))[0].sequences:
        assert sequence.tokens[0] not in banned


def test_a_bias_chooses_among_the_tokens_of_a_constraint(sampler):
    op = request(
        tokens(9), 8, constraint=Constraint("regex", "[ab]{20}"), logit_bias={ord("b"): 100.0}
    )
    assert {text(sequence) for sequence in run(sampler, op)[0].sequences} == {"b" * 20}


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias contains token id"),
        ({"allowed_token_ids": [1, VOCAB_SIZE]}, "allowed_token_ids contains token id"),
    ],
)
def test_tokens_outside_of_the_vocabulary_are_rejected(sampler, params, reason):
    with pytest.raises(UserError, match=reason):
        sampler.validate(request(tokens(5), **params))


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"logit_bias": {"a": 1.0}}, r"logit_bias\['a'\]=1.0"),
        ({"logit_bias": {1: 101}}, "-100 to 100"),
        ({"logit_bias": {1: float("nan")}}, "-100 to 100"),
        ({"logit_bias": [1]}, "give a dictionary"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "at most 1024"),
        ({"allowed_token_ids": "ab"}, "give a list"),
        ({"allowed_token_ids": [-1]}, "give a list"),
        ({"allowed_token_ids": [1.5]}, "give a list"),
        ({"allowed_token_ids": range(40_000)}, "at most 32768"),
        ({"allowed_token_ids": [1], "constraint": JSON}, "give one"),
    ],
)
def test_invalid_biases_and_allowed_tokens_are_rejected(params, reason):
    with pytest.raises(UserError, match=reason):
        SamplingParams(**params)


def test_a_grammar_that_explodes_fails_its_request_only(sampler, cache):
    """Its time is limited, and the samples of others do not wait for it."""
    ops = [request(tokens(40), 2), request(tokens(40), 2, constraint=JSON)]
    expected = [bits(response) for response in run(sampler, *ops)]
    began = time.monotonic()
    bad, *futures = start(sampler, request(tokens(8), owner="x", constraint=EXPLOSIVE), *ops)
    while sampler.busy:
        sampler.step()
    assert [bits(future.result(timeout=0)) for future in futures] == expected
    with pytest.raises(UserError, match="too complex"):
        bad.result(timeout=0)
    assert time.monotonic() - began < 100


def test_a_slow_mask_delays_only_its_own_sample(sampler, cache, monkeypatch):
    release = threading.Event()
    advance = Grammar._advance

    def slow(self: Grammar, sampled: SampledTokens) -> None:
        if self.owner == "slow":
            assert release.wait(120)
        advance(self, sampled)

    delayed = request(tokens(40), 2, owner="slow", constraint=JSON)
    expected = bits(run(sampler, delayed)[0])
    monkeypatch.setattr(Grammar, "_advance", slow)
    waiting, other, plain = start(
        sampler,
        delayed,
        request(tokens(40), 2, owner="quick", constraint=JSON),
        request(tokens(40), 2),
    )
    deadline = time.monotonic() + 60
    while not (other.done() and plain.done()):
        assert time.monotonic() < deadline
        sampler.step()
    assert not waiting.done()
    release.set()
    while sampler.busy:
        sampler.step()
    assert bits(waiting.result(timeout=0)) == expected


def test_a_cancelled_request_leaves_nothing(sampler):
    (future,) = start(sampler, request(tokens(8), 3, constraint=JSON))
    for _ in range(5):
        sampler.step()
    future.cancel()
    sampler.step()
    assert not sampler.busy


def test_owners_share_no_grammars_and_each_has_a_limit(model_dir):
    cache = GrammarCache(lambda: load_tokenizer(model_dir), VOCAB_SIZE)
    cache.check(Constraint("regex", "a"), "first")
    cache.check(Constraint("regex", "a"), "second")
    assert len(cache) == 2
    for number in range(cache_module.MAX_GRAMMARS_PER_OWNER + 5):
        cache.check(Constraint("regex", f"a{number}"), "second")
    assert len(cache) == cache_module.MAX_GRAMMARS_PER_OWNER + 1
    # A grammar that was evicted after the check is compiled again.
    assert allowed_after(cache.new_state(Constraint("regex", "a0"), "second"))[0].sum() == 1


def test_grammars_that_compile_without_end_delay_nobody(model_dir, monkeypatch):
    cache = GrammarCache(lambda: load_tokenizer(model_dir), VOCAB_SIZE)
    monkeypatch.setattr(cache_module, "CHECK_TIMEOUT_SECONDS", 0.05)
    release = threading.Event()
    new_grammar = GrammarCache._new_grammar

    def slow(self: GrammarCache, owner: str, constraint: Constraint, *rest: Any) -> Any:
        if constraint.text.startswith("slow"):
            assert release.wait(120)
        return new_grammar(self, owner, constraint, *rest)

    monkeypatch.setattr(GrammarCache, "_new_grammar", slow)
    slow_ones = [
        Constraint("regex", f"slow{number}")
        for number in range(cache_module.MAX_COMPILE_JOBS_PER_OWNER)
    ]
    waiting = [cache.prepare(constraint, "first") for constraint in slow_ones]
    with pytest.raises(UserError, match=r"not compiled within 0\.05 s"):
        cache.check(Constraint("regex", "a"), "first")
    monkeypatch.setattr(cache_module, "CHECK_TIMEOUT_SECONDS", 120)
    cache.check(Constraint("regex", "a"), "second")
    release.set()
    for future in waiting:
        future.result(timeout=120)
    cache.check(Constraint("regex", "a"), "first")


def test_the_cache_has_a_limit_for_all_owners(model_dir, monkeypatch):
    monkeypatch.setattr(cache_module, "MAX_GRAMMARS", 3)
    cache = GrammarCache(lambda: load_tokenizer(model_dir), VOCAB_SIZE)
    for owner in "abcde":
        cache.check(Constraint("regex", "a"), owner)
    assert len(cache) == 3


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("constraint", JSON),
        ("min_tokens", 2),
        ("frequency_penalty", 1.0),
        ("logit_bias", {1: 2.0}),
        ("allowed_token_ids", [1]),
    ],
)
def test_options_that_would_have_no_effect_are_rejected(sampler, option, value):
    params = SamplingParams(max_tokens=4, **{option: value})
    prompt = ModelInput.from_ints([1, 2, 3])
    options: list[dict[str, Any]] = [
        {"prompt_only": True, "prompt_logprobs": True},
        {"prompt_alt_tokens_k": 2},
    ]
    for rest in options:
        with pytest.raises(
            UserError, match="constraint, min_tokens, logit_bias, allowed_token_ids or pen"
        ):
            sampler.validate(Sample("sampler", prompt, 1, params, **rest))


def test_a_sentencepiece_tokenizer_writes_the_text_of_the_grammar(tmp_path):
    """Its tokens mark a space by a character, and unknown bytes by tokens of single bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {token: 259 + i for i, token in enumerate(["▁", "a", "b", "▁a", "ab", "▁ab"])}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    cache = GrammarCache(lambda: fast, 272)
    state, seen = cache.new_state(Constraint("regex", "a ab日"), ""), []
    for token in tokenizer.encode("a ab日").ids:
        allowed, is_complete = allowed_after(state)
        assert allowed[token]
        assert not is_complete
        seen.append(token)
        take(cache, state, token)
    allowed, is_complete = allowed_after(state)
    assert is_complete
    assert not allowed.any()
    assert seen == [260, 264, *(3 + byte for byte in "日".encode())]


def test_a_model_without_tokenizer_json_has_no_constraints():
    cache = GrammarCache(lambda: object(), VOCAB_SIZE)  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        cache.check(Constraint("regex", "a"), "")


def test_the_byte_tokenizer_has_no_end_of_text_token(tmp_path):
    """The end of a text is a token of the grammar, not one of the model."""
    tokenizer = load_tokenizer(save_byte_tokenizer(tmp_path))
    before = len(tokenizer)
    cache = GrammarCache(lambda: tokenizer, VOCAB_SIZE)
    allowed, is_complete = allowed_after(cache.new_state(Constraint("regex", "a?"), ""))
    assert np.flatnonzero(allowed).tolist() == [ord("a")]
    assert is_complete
    assert len(tokenizer) == before


@pytest.mark.slow
def test_the_embedded_model_writes_valid_json_at_temperature_1():
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20, "pattern": "^[A-Z]"},
            "born": {"type": "string", "format": "date"},
            "height": {"type": "number", "minimum": 0, "maximum": 3},
            "pets": {
                "type": "array",
                "items": {"anyOf": [{"enum": ["cat", "dog"]}, {"type": "null"}]},
                "maxItems": 3,
            },
        },
        "required": ["name", "pets"],
        "additionalProperties": False,
    }
    with planish.ServiceClient() as service_client:
        client = service_client.create_sampling_client(base_model=DEFAULT_MODEL)
        tokenizer = client.get_tokenizer()
        prompt = ModelInput.from_ints(tokenizer.encode("A person, as JSON:\n"))
        constraint = Constraint("json_schema", json.dumps(schema))
        params = SamplingParams(max_tokens=200, seed=0, constraint=constraint)
        response = client.sample(prompt, 100, params).result()
        finished = [s for s in response.sequences if s.stop_reason == "stop"]
        assert len(finished) >= 90  # a number may have any count of digits
        for sequence in finished:
            written = json.loads(str(tokenizer.decode(sequence.tokens, skip_special_tokens=True)))
            jsonschema.validate(written, schema)
            # llguidance allows February 29 in every year.
            assert regex.fullmatch(
                r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", written.get("born", "2000-02-29")
            )


@pytest.mark.slow
def test_samples_of_public_schemas_are_valid():
    """json_schema_samples.py takes 2,000 samples of the whole test suite."""
    path = Path(__file__).parent / "json_schemas.json"
    cases = [
        Case("draft2020-12", given["place"], given["schema"])
        for given in json.loads(path.read_text())["schemas"]
    ]
    report = check(cases, resolve_model(DEFAULT_MODEL), len(cases))
    assert not report.wrong
    assert report.compiled == len(cases)
    assert report.valid > len(cases) / 2
