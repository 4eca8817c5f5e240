"""Stop conditions: tokens, strings, strings across token borders, and none."""

from collections.abc import Sequence

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
