"""Stop conditions: tokens, strings, strings across token borders, and none."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from planish.detokenizer import Detokenizer
from planish.engine.sampling.stopping import StopCondition, StopMatcher
from planish.service import StopGate, TextEnd
from planish.testing import tiny_model
from planish.tokenizer import load_tokenizer
from planish.types import SamplingParams


def decode(tokens: Sequence[int]) -> str:
    """Decode byte tokens; tokens from 300 on are control tokens without text."""
    return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


def as_written(token: int) -> str | None:
    """Return byte tokens as SentencePiece vocabularies write them."""
    return f"<0x{token:02X}>" if token < 256 else None


TEXTS = Detokenizer(decode, as_written)


def condition_of(
    stop: Any = None, eos: Sequence[int] = (), texts: Detokenizer = TEXTS, min_tokens: int = 0
) -> StopCondition:
    return StopCondition.from_params(
        SamplingParams(stop=stop, min_tokens=min_tokens), eos_token_ids=eos, detokenizer=texts
    )


def end_of(tokens: Sequence[int], condition: StopCondition) -> int | None:
    """Return the number of tokens up to the one that meets the stop condition."""
    matcher = StopMatcher(condition)
    return next((n for n in range(1, len(tokens) + 1) if matcher.text_end(tokens[:n])), None)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, 3),
        ([], None),
        ([300], 6),
        ([98, 300], 2),
        ("b", 2),
        (["zz", "c"], 4),
        ("ab", 2),
        ("nothing", None),
    ],
)
def test_stops(stop, expected):
    tokens = [97, 98, 301, 99, 100, 300, 101]
    assert end_of(tokens, condition_of(stop, [301])) == expected


def test_a_stop_string_is_found_across_token_borders():
    text = b"Human: hi\n\nUser: what"
    stop = b"\n\nUser:"
    assert end_of(list(text), condition_of(stop.decode())) == text.index(stop) + len(stop)


def test_a_multibyte_stop_string_is_found_at_its_last_byte():
    text = "x" * 50 + "日本€" + "y"
    assert end_of(list(text.encode()), condition_of("本€")) == len(text.encode()) - 1


def sentencepiece(tokens: Sequence[int]) -> str:
    """Decode byte tokens as SentencePiece models with byte fallback do: drop a space at the start,
    and replace every byte of a run that is not valid UTF-8.
    """
    try:
        text = bytes(tokens).decode()
    except UnicodeDecodeError:
        text = "\ufffd" * len(tokens)
    return text.removeprefix(" ")


@pytest.mark.parametrize("vocabulary", [as_written, lambda _: None])
@pytest.mark.parametrize(
    ("text", "stop"), [("What?  User:", " User:"), ("😀€", "€"), ("éé€", "€"), ("€€😀", "😀")]
)
def test_a_stop_string_is_found_with_a_sentencepiece_tokenizer(
    text: str, stop: str, vocabulary: Callable[[int], str | None]
):
    tokens = list(text.encode())
    matcher = StopMatcher(condition_of(stop, texts=Detokenizer(sentencepiece, vocabulary)))
    met = [matcher.text_end(tokens[:n]) is not None for n in range(1, len(tokens) + 1)]
    assert met == [False] * (len(tokens) - 1) + [True]


def test_an_explicit_stop_replaces_the_end_of_sequence_tokens():
    assert end_of([301, 97], condition_of("a", [301])) == 2


def words(tokens: Sequence[int]) -> str:
    """Decode tokens as words with a space before each, of which the first is dropped."""
    return " ".join(["abc", "de", "f", "g", "hi", "a"][token % 6] for token in tokens)


@pytest.mark.parametrize("vocabulary", [as_written, lambda _: None])
@pytest.mark.parametrize("decoder", [decode, sentencepiece, words])
def test_matching_bytes_never_misses_a_stop_string(
    decoder: Callable[[Sequence[int]], str], vocabulary: Callable[[int], str | None]
):
    """The reference searches the bytes of the whole text, and where bytes are unknown, decodes the
    whole window after every token.
    """
    source = random.Random(1)
    alphabet = list("ab é€😀".encode())
    texts = Detokenizer(decoder, vocabulary)
    met = 0
    for _ in range(400):
        tokens = [source.choice(alphabet) for _ in range(40)]
        text = decoder(tokens)
        strings = [
            text[start : start + source.randint(1, 9)]
            for start in (source.randrange(len(text)) for _ in range(source.randint(1, 4)))
        ]
        stop = [string for string in strings if "\ufffd" not in string] or ["b"]
        condition = condition_of(stop, texts=texts, min_tokens=source.choice((0, 0, 5)))
        matcher = StopMatcher(condition)
        for end in range(1, len(tokens) + 1):
            searched = [texts.token_bytes(token) for token in tokens[condition.min_tokens : end]]
            known = []
            while searched and searched[-1] is not None:
                known.insert(0, searched.pop())
            reference = any(string.encode() in b"".join(known) for string in stop)
            if searched and not reference:
                found = condition.find_in_text(tokens[:end], condition.min_tokens)
                reference = found is not None
            assert (matcher.text_end(tokens[:end]) is not None) == reference, (stop, tokens[:end])
            met += reference
            if reference:
                break
    assert met > 200


@pytest.mark.parametrize("vocabulary", [as_written, lambda _: None])
@pytest.mark.parametrize(
    ("text", "stop", "min_tokens", "kept"),
    [
        ("one two", " two", 0, "one"),
        ("two two two", "two", 1, "two "),
        ("héé!", "é!", 0, "hé"),
        ("xabcab", ["bc", "abc", "c"], 0, "x"),
    ],
)
def test_the_matcher_says_where_the_text_ends(vocabulary, text, stop, min_tokens, kept):
    texts = Detokenizer(decode, vocabulary)
    tokens = list(text.encode())
    end = end_of(tokens, condition_of(stop, texts=texts, min_tokens=min_tokens))
    assert end is not None
    matcher = StopMatcher(condition_of(stop, texts=texts, min_tokens=min_tokens))
    found = [matcher.text_end(tokens[:n]) for n in range(1, end + 1)][-1]
    assert found is not None
    assert decode(tokens[: found.token]) == kept
    assert found.num_bytes == 0
    assert found.stop in ([stop] if isinstance(stop, str) else stop)


def test_a_match_may_begin_within_a_token_and_span_tokens_without_text():
    words = {0: "good-b", 1: "ye all", 2: ""}
    texts = Detokenizer(lambda tokens: "".join(words[token] for token in tokens))
    matcher = StopMatcher(condition_of("-bye", texts=texts))
    assert matcher.text_end([0]) is None
    assert matcher.num_unsettled([0]) == 1
    assert matcher.text_end([0, 2]) is None
    assert matcher.num_unsettled([0, 2]) == 2
    assert matcher.text_end([0, 2, 1]) == TextEnd(0, 4, "-bye")


def test_a_stop_token_ends_the_text_before_it():
    assert StopMatcher(condition_of([300])).text_end([97, 300]) == TextEnd(1, 0, 300)


def test_a_held_back_end_covers_every_later_match():
    """Whatever was settled is never removed."""
    source = random.Random(2)
    for _ in range(300):
        tokens = [source.choice(b"ab ") for _ in range(30)]
        stop = ["".join(source.choice("ab ") for _ in range(4)) for _ in range(2)]
        matcher = StopMatcher(condition_of(stop))
        num_settled = 0
        for n in range(1, len(tokens) + 1):
            end = matcher.text_end(tokens[:n])
            if end is not None:
                assert end.token >= num_settled
                break
            num_settled = max(num_settled, n - matcher.num_unsettled(tokens[:n]))


def test_stop_strings_sleep_while_the_gate_is_closed():
    """The gate opens with the token `|`. The stop token 300 always ends the sample."""
    gate = StopGate(lambda: lambda token: token == ord("|"), frozenset({300}))
    params = SamplingParams(stop=["ab"], stop_token_ids=[99, 300])
    condition = StopCondition.from_params(params, (), TEXTS)
    tokens = list(b"abcab|xab")
    matcher = StopMatcher(condition, gate)
    ends = [matcher.text_end(tokens[:n]) for n in range(1, len(tokens) + 1)]
    assert ends == [None] * (len(tokens) - 1) + [TextEnd(7, 0, "ab")]
    assert StopMatcher(condition, gate).text_end([97, 300]) == TextEnd(1, 0, 300)


@pytest.mark.parametrize(
    ("decoder", "vocabulary", "expected"),
    [
        (decode, as_written, b"\xc3"),
        (decode, lambda token: {0xC3: "Ã", 0x20: "Ġ"}.get(token), b"\xc3"),
        (decode, lambda _: None, None),
        (decode, lambda _: "日", None),
    ],
)
def test_the_bytes_of_a_part_of_a_character_are_in_the_vocabulary(
    decoder: Callable[[Sequence[int]], str], vocabulary: Any, expected: bytes | None
):
    texts = Detokenizer(decoder, vocabulary)
    assert texts.token_bytes(0xC3) == expected
    assert texts.token_bytes(0x61) == b"a"
    assert texts.token_bytes(300) == b""


def test_a_space_that_only_the_start_of_a_text_loses_belongs_to_the_token():
    assert Detokenizer(words).token_bytes(0) == b" abc"
    assert Detokenizer(sentencepiece).token_bytes(0x20) == b" "


def test_tokens_without_text_do_not_hide_a_stop_string():
    tokens = [97, 300, 301, 302, 303, 304, 98]
    assert end_of(tokens, condition_of("ab")) == len(tokens)


def test_the_text_is_decoded_only_where_a_stop_string_ends():
    """The adversarial text almost matches at every token."""
    calls: list[int] = []

    def counted(tokens: Sequence[int]) -> str:
        calls.append(len(tokens))
        return decode(tokens)

    near = [f"{index:02}" + "é" * 63 for index in range(32)]
    for stop, text in [
        (["\n\nUser:", "x" * 100], b"The cat sat on the mat: " * 20),
        (near, "é".encode() * 300),
    ]:
        matcher = StopMatcher(condition_of(stop, texts=Detokenizer(counted, as_written)))
        assert not any(matcher.text_end(text[:end]) for end in range(1, len(text) + 1))
        assert sum(calls) <= 3 * len(set(text))
        calls.clear()


def test_a_real_tokenizer_has_the_bytes_of_every_token(tmp_path: Path):
    tokenizer = load_tokenizer(tiny_model(tmp_path))
    texts = Detokenizer.of_tokenizer(tokenizer)
    for text in ("a é日€😀\n\n", "".join(map(chr, range(32, 400)))):
        tokens = tokenizer.encode(text)
        found = [texts.token_bytes(token) for token in tokens]
        assert b"".join(part or b"?" for part in found) == text.encode()
