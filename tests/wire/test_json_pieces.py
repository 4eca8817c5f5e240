"""`parse_in_pieces` accepts the same texts as orjson, and returns the same values."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from itertools import pairwise
from typing import Any

import orjson
import pytest

from planish.errors import UserError
from planish.wire.fields import MAX_CONTAINER_ITEMS, Fields
from planish.wire.json_pieces import (
    InvalidJsonError,
    JsonLimits,
    TooDeepError,
    TooManyContainersError,
    TooManyItemsError,
    parse_in_pieces,
)

WIDE = JsonLimits(1000, 10**6, 10**6)
PIECES = (1, 2, 3, 5, 8, 13, 40, 200)
TEXTS = ("", "a", ",", '"', "\\", "[", "{", "}]", "é\U0001f600", '\\",[', "\\\\", "\n", "x" * 30)


def value_of(source: random.Random, depth: int) -> Any:
    kind = source.random()
    if depth and kind < 0.35:
        return [value_of(source, depth - 1) for _ in range(source.randrange(6))]
    if depth and kind < 0.65:
        names = (source.choice(TEXTS) for _ in range(source.randrange(6)))
        return {name: value_of(source, depth - 1) for name in names}
    return source.choice((0, -1, 2**40, 0.5, 1e-30, True, None, *TEXTS))


def text_of(source: random.Random, value: Any) -> bytes:
    """Return a JSON text with spaces and with keys that occur several times in an object."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=source.random() < 0.5).encode()
    space = source.choice((b"", b"", b" ", b"\n\t"))
    if isinstance(value, list):
        return b"[" + (space + b",").join(text_of(source, item) for item in value) + space + b"]"
    if isinstance(value, dict):
        names = [*value, *(name for name in value if source.random() < 0.3)]
        source.shuffle(names)
        pairs = [
            b"%b%b:%b%b" % (text_of(source, name), space, space, text_of(source, value[name]))
            for name in names
        ]
        return b"{" + (b"," + space).join(pairs) + space + b"}"
    return json.dumps(value).encode()


def outcome(text: bytes, piece: int) -> Any:
    try:
        return orjson.dumps(parse_in_pieces(text, WIDE, piece))
    except InvalidJsonError:
        return "invalid"


def expected(text: bytes) -> Any:
    try:
        return orjson.dumps(orjson.loads(text))
    except orjson.JSONDecodeError:
        return "invalid"


def test_random_texts_have_the_values_that_orjson_reads():
    source = random.Random(1)
    for _ in range(1000):
        text, piece = text_of(source, value_of(source, 4)), source.choice(PIECES)
        assert outcome(text, piece) == expected(text), (text, piece)


def test_damaged_texts_are_rejected_where_orjson_rejects_them():
    source = random.Random(2)
    accepted = 0
    for _ in range(2000):
        text = bytearray(text_of(source, value_of(source, 3)))
        for _ in range(source.randrange(1, 3)):
            at = source.randrange(len(text) + 1)
            damage = source.choice(
                (b"[", b"]", b"{", b"}", b",", b'"', b"\\", b":", b" ", b"1", b"")
            )
            text[at : at + source.randrange(2)] = damage
        want = expected(bytes(text))
        accepted += want != "invalid"
        piece = source.choice(PIECES)
        assert outcome(bytes(text), piece) == want, (text, piece)
    assert accepted > 100


@pytest.mark.parametrize(
    "text",
    [
        *(
            b"",
            b",",
            b"[1,]",
            b"[,1]",
            b"[1,,2]",
            b'{"a":1,}',
            b'{,"a":1}',
            b"[1],[2]",
            b"[1,2},[3]",
        ),
        *(b"][", b"[1,2", b'["a,b', b'{"a":1,"b"', b"[1,2]]", b"[1 2,3]", b"\xff,\xfe"),
        b'["\xff",1]',
    ],
)
def test_what_is_not_json(text):
    assert expected(text) == "invalid"
    for piece in PIECES:
        assert outcome(text, piece) == "invalid"


def test_the_last_of_several_equal_keys_counts():
    text = b'{"a":[1,2,3],"b":{"c":4,"d":5},"a":[6,7,{"x":8,"y":9}],"b":{"c":[10,11],"c":12}}'
    for piece in PIECES:
        assert parse_in_pieces(text, WIDE, piece) == orjson.loads(text)


def test_a_deep_text_is_rejected():
    for depth, fails in ((64, False), (65, True)):
        text = b"[" * depth + b"1,2" + b"]" * depth
        for piece in (*PIECES, 1 << 16):
            if fails:
                with pytest.raises(TooDeepError):
                    parse_in_pieces(text, JsonLimits(64, 100, 100), piece)
            else:
                assert parse_in_pieces(text, JsonLimits(64, 100, 100), piece) == orjson.loads(text)


@pytest.mark.parametrize("containers", [100, 101])
def test_brackets_in_strings_are_not_counted(containers):
    text = b"[" + b'["[{,{["],' * (containers - 1) + b"1]"
    if containers > 100:
        with pytest.raises(TooManyContainersError):
            parse_in_pieces(text, JsonLimits(9, 100, 1000), 16)
    else:
        assert parse_in_pieces(text, JsonLimits(9, 100, 1000), 16) == orjson.loads(text)


@pytest.mark.parametrize("items", [100, 101])
def test_only_lists_of_numbers_are_long(items):
    for item in (b'"a"', b"[]", b"{}", b"null"):
        text = b"[" + b",".join([item] * items) + b"]"
        if items > 100:
            with pytest.raises(TooManyItemsError):
                parse_in_pieces(text, JsonLimits(9, 1000, 100), 16)
        else:
            assert parse_in_pieces(text, JsonLimits(9, 1000, 100), 16) == orjson.loads(text)
    text = orjson.dumps({str(i): i for i in range(items)})
    if items > 100:
        with pytest.raises(TooManyItemsError):
            parse_in_pieces(text, JsonLimits(9, 1000, 100), 16)
    assert parse_in_pieces(b"[" + b"1,2.5," * items + b"3]", JsonLimits(9, 9, 100), 16)[-1] == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'{"a":[' + b'"",' * MAX_CONTAINER_ITEMS + b'""]}',
            "more than 131,072 items that are not numbers",
        ),
        (b'{"a":[' + b"1," * (1 << 17) + b"]}", "not JSON: a comma without a value near byte"),
        (b'{"a":[' + b"1," * (1 << 17) + b"1}}", "not JSON: unexpected character.*near byte"),
        (b'{"a":' + b"[" * (1 << 18) + b"]" * (1 << 18) + b"}", "more than 64 levels deep"),
    ],
)
def test_errors_of_large_bodies(body, message):
    with pytest.raises(UserError, match=message):
        Fields.of(body)


def test_other_threads_run_while_a_large_body_is_parsed():
    """On a busy machine the other thread may lack a core, so nine runs of ten may be slow."""
    body = b'{"a":[' + b"0," * (1 << 22) + b"0]}"
    assert any(longest_wait_beside_parsing(body) < 0.04 for _ in range(10))


def longest_wait_beside_parsing(body: bytes) -> float:
    """Return the longest time without another thread, in processor seconds of the parsing one."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    seen: list[float] = []
    clock = time.pthread_getcpuclockid(threading.get_ident())
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(time.clock_gettime(clock))
            time.sleep(1e-4)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert len(Fields.of(body).array("a", 1 << 23)) == (1 << 22) + 1
    finally:
        done.set()
        watcher.join()
        sys.setswitchinterval(before)
    return max(b - a for a, b in pairwise(seen))
