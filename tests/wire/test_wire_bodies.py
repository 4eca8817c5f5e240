import contextlib
import gzip

import pytest
import zstandard
from hypothesis import given, strategies as st

from planish.errors import UserError
from planish.wire.bodies import BodyTooLargeError, decompress_body

LIMIT = 1 << 16


def zstd_without_size(data: bytes) -> bytes:
    writer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return writer.compress(data) + writer.flush()


PACKERS = {"zstd": zstandard.compress, "gzip": gzip.compress, "identity": bytes}


@pytest.mark.parametrize(
    ("encoding", "pack"), [*PACKERS.items(), ("ZSTD", zstd_without_size), ("", bytes)]
)
@pytest.mark.parametrize("size", [0, 1, 1000, LIMIT])
def test_a_body_is_decompressed_up_to_the_limit(encoding, pack, size):
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert decompress_body(pack(data), encoding, LIMIT) == data


@pytest.mark.parametrize(("encoding", "pack"), [*PACKERS.items(), ("zstd", zstd_without_size)])
def test_one_byte_above_the_limit_is_too_large(encoding, pack):
    with pytest.raises(BodyTooLargeError, match="larger than"):
        decompress_body(pack(bytes(LIMIT + 1)), encoding, LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("pack", [zstandard.compress, zstd_without_size])
def test_a_decompression_bomb_is_rejected_before_decompression(pack):
    packed = pack(bytes(1 << 28))
    assert len(packed) < 1 << 15
    with pytest.raises(BodyTooLargeError):
        decompress_body(packed, "zstd", LIMIT)


@pytest.mark.parametrize("pack", [zstandard.compress, zstd_without_size])
def test_a_truncated_or_extended_zstd_body_is_rejected(pack):
    packed = pack(b"some text " * 200)
    for broken in (packed[:-3], packed + b"x", packed + packed, packed[:2], b""):
        with pytest.raises(UserError, match="zstd"):
            decompress_body(broken, "zstd", LIMIT)


def test_a_truncated_or_extended_gzip_body_is_rejected():
    packed = gzip.compress(b"some text " * 200)
    for broken in (packed[:-3], packed + b"x", packed + packed, b""):
        with pytest.raises(UserError, match="gzip"):
            decompress_body(broken, "gzip", LIMIT)


def test_an_unknown_encoding_is_named():
    with pytest.raises(UserError, match="'br'"):
        decompress_body(b"", "br", LIMIT)


@given(st.binary(max_size=200), st.sampled_from(["zstd", "gzip", "identity"]))
def test_any_bytes_are_decompressed_or_rejected(data, encoding):
    with contextlib.suppress(UserError):
        assert isinstance(decompress_body(data, encoding, LIMIT), bytes)
