"""Patterns of adapters match as in PEFT, in linear time."""

import re
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings, strategies as st
from peft.utils.other import get_pattern_key

from planish.errors import DamagedFileError, UnsupportedError
from planish.export.module_patterns import ModulePatterns

NAME = "model.language_model.layers.11.self_attn.q_proj"
KEYS = [
    "q_proj", "self_attn.q_proj", "proj", "q_pro", NAME, NAME[6:], f"^{NAME}$", "^q_proj", r".*\.q_proj",
    r"layers\.(1|11)\..*", r"layers\.\d+\.self_attn\.[qkv]_proj", "q_proj|v_proj", r"language_model\..*",
    "layers.1.self_attn.q_proj", r"model\.layers.*q_proj", "layers.1..self_attn.q_proj", "(?:a|q)_proj$",
    "self-attn.q_proj", "q.proj", r"layers\.1{2}\.self_attn\.q_proj", r"[^.]*_proj", "",
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_a_key_matches_as_in_peft(key):
    expected = re.match(rf"(.*\.)?({key})$", NAME) is not None
    assert ModulePatterns("alpha_pattern", {key: 3}).value(NAME, None) == (3 if expected else None)


@settings(max_examples=25)
@given(st.lists(st.sampled_from(KEYS), max_size=4, unique=True))
def test_the_first_key_that_matches_decides(keys):
    patterns = ModulePatterns("alpha_pattern", {key: index for index, key in enumerate(keys)})
    theirs = get_pattern_key(keys, NAME)
    value = patterns.value(NAME, -1)
    assert value == (keys.index(theirs) if theirs in keys else -1)
    assert patterns.unused_keys == [key for index, key in enumerate(keys) if index != value]


@pytest.mark.parametrize(
    "key",
    [
        "(.*a)*b", "(a+)+b", "(a|a)*b", "(a|aa)+$", "(.*.*)*x", "((a{100}){100}){100}", "(.*a){300}b",
        "(a?){500}a{500}", "([ab]*[bc]*)*d", "(" * 400 + "a" + ")*" * 400 + "b",
    ],
)  # fmt: skip
def test_a_key_that_backtracking_cannot_match_takes_a_moment(key):
    start = time.process_time()
    with suppress(UnsupportedError):
        patterns = ModulePatterns("alpha_pattern", {key: 1})
        for length in (100, 1000):
            assert patterns.value("a" * length, 0) in (0, 1)
    # Python's re needs longer than the age of the universe.
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("values", "error", "told"),
    [
        ({"(?=q)q_proj": 1}, UnsupportedError, "without look-around"),
        ({r"(q)\1": 1}, UnsupportedError, "without look-around"),
        ({"(": 1}, UnsupportedError, "cannot be matched"),
        ({"x" * 3000: 1}, UnsupportedError, "3,000 characters"),
        ([1], DamagedFileError, "not an object"),
        ("q_proj", DamagedFileError, "not an object"),
    ],
)
def test_patterns_that_cannot_be_matched_are_rejected_by_name(values, error, told):
    with pytest.raises(error, match=f"rank_pattern.*{re.escape(told)}"):
        ModulePatterns("rank_pattern", values)


def test_too_many_keys_are_rejected(monkeypatch):
    with pytest.raises(UnsupportedError, match="600 regular expressions"):
        ModulePatterns("alpha_pattern", {f"layers.{i}.*": i for i in range(600)})
    monkeypatch.setattr("planish.export.module_patterns.MAX_WORK", 1500)
    patterns = ModulePatterns("alpha_pattern", {f"layers.{i}.q_proj": i for i in range(1000)})
    assert patterns.value("model.layers.7.q_proj", None) == 7
    with pytest.raises(UnsupportedError, match="1,000 keys"):
        patterns.value("model.layers.8.q_proj", None)
