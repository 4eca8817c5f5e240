"""Stop conditions: tokens, strings, strings across token borders, and none."""

import random
from collections.abc import Callable, Sequence

import pytest

from planish.engine.sampling.stopping import StopCondition
from planish.types import SamplingParams


def decode(tokens: Sequence[int]) -> str:
    """Decode byte tokens; tokens from 300 on are control tokens without text."""
    return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


def end_of(tokens: Sequence[int], stop: StopCondition) -> int | None:
    """Return the number of tokens up to the one that meets the stop condition."""
    return next((n for n in range(1, len(tokens) + 1) if stop.is_met(tokens[:n], decode)), None)


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
    assert (
        end_of(tokens, StopCondition.from_params(SamplingParams(stop=stop), eos_token_ids=[301]))
        == expected
    )


def test_a_stop_string_is_found_across_token_borders():
    text = b"Human: hi\n\nUser: what"
    assert end_of(
        list(text), StopCondition.from_params(SamplingParams(stop="\n\nUser:"), ())
    ) == text.index(b"\n\nUser:") + len("\n\nUser:")


def test_a_multibyte_stop_string_is_found_at_its_last_byte():
    text = "x" * 50 + "日本€" + "y"
    assert end_of(
        list(text.encode()), StopCondition.from_params(SamplingParams(stop="本€"), ())
    ) == len(("x" * 50 + "日本€").encode())


def sentencepiece(tokens: Sequence[int]) -> str:
    """Decode byte tokens as SentencePiece models with byte fallback do: drop a space at the start,
    and replace every byte of a run that is not valid UTF-8.
    """
    try:
        text = bytes(tokens).decode()
    except UnicodeDecodeError:
        text = "\ufffd" * len(tokens)
    return text.removeprefix(" ")


@pytest.mark.parametrize(
    ("text", "stop"), [("What?  User:", " User:"), ("😀€", "€"), ("éé€", "€"), ("€€😀", "😀")]
)
def test_a_stop_string_is_found_with_a_sentencepiece_tokenizer(text: str, stop: str):
    tokens = list(text.encode())
    condition = StopCondition.from_params(SamplingParams(stop=stop), ())
    met = [condition.is_met(tokens[:n], sentencepiece) for n in range(1, len(tokens) + 1)]
    assert met == [False] * (len(tokens) - 1) + [True]


def test_an_explicit_stop_replaces_the_end_of_sequence_tokens():
    assert (
        end_of([301, 97], StopCondition.from_params(SamplingParams(stop="a"), eos_token_ids=[301]))
        == 2
    )


def words(tokens: Sequence[int]) -> str:
    """Decode tokens as words with a space before each, of which the first is dropped."""
    return " ".join(["abc", "de", "f", "g", "hi", "a"][token % 6] for token in tokens)


@pytest.mark.parametrize("decoder", [decode, sentencepiece, words])
def test_the_fast_test_never_misses_a_stop_string(decoder: Callable[[Sequence[int]], str]):
    """The reference decodes the whole window after every token."""
    source = random.Random(1)
    alphabet = list("ab é€😀".encode())
    met = 0
    for _ in range(400):
        tokens = [source.choice(alphabet) for _ in range(40)]
        text = decoder(tokens)
        strings = [
            text[start : start + source.randint(1, 9)]
            for start in (source.randrange(len(text)) for _ in range(source.randint(1, 4)))
        ]
        stop = [string for string in strings if "\ufffd" not in string] or ["b"]
        least = source.choice((0, 0, 5))
        fast = StopCondition.from_params(SamplingParams(stop=stop), ())
        for end in range(1, len(tokens) + 1):
            recent = tokens[max(least, end - fast._window) : end]
            reference = end > least and fast._search(recent, decoder)
            assert fast.is_met(tokens[:end], decoder, least) == reference, (stop, tokens[:end])
            met += reference
            if reference:
                break
    assert met > 200


def test_most_tokens_need_no_text():
    calls: list[int] = []

    def counted(tokens: Sequence[int]) -> str:
        calls.append(len(tokens))
        return decode(tokens)

    condition = StopCondition.from_params(SamplingParams(stop=["\n\nUser:", "x" * 100]), ())
    text = b"The cat sat on the mat: " * 20
    assert not any(condition.is_met(text[:end], counted) for end in range(1, len(text) + 1))
    assert sum(calls) < len(text)
