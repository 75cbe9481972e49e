"""Codecs that decode a blob whole, and never to more than was promised."""

from __future__ import annotations

import zlib
from contextlib import suppress

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckptool.core.codec import decode
from ckptool.errors import Damaged


def deflated(data: bytes) -> bytes:
    machine = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return machine.compress(data) + machine.flush()


ENCODERS = {"deflate": deflated, "zstd": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("codec", ENCODERS)
@given(data=st.binary(max_size=500))
def test_round_trip(codec: str, data: bytes) -> None:
    assert decode(ENCODERS[codec](data), codec, len(data), what="test") == data


@pytest.mark.parametrize("codec", ENCODERS)
def test_a_bomb_stops_at_the_limit(codec: str) -> None:
    with pytest.raises(Damaged, match=r"more than 1,000 bytes"):
        decode(ENCODERS[codec](bytes(50_000_000)), codec, 1000, what="test")


@pytest.mark.parametrize("codec", ENCODERS)
@given(data=st.binary(max_size=40))
def test_any_bytes_are_decoded_or_damaged(codec: str, data: bytes) -> None:
    with suppress(Damaged):
        assert len(decode(data, codec, 1000, what="test")) <= 1000
