"""What Python reads otherwise, or not at all, is not read as something."""

from __future__ import annotations

import io
import pickle
from contextlib import suppress

import pytest
from serialization.pickle.pickled_instances import framed

from ckptool.errors import Damaged
from ckptool.serialization.pickle.load import read_pickle

INTEGERS = [*"5 -5 0 -0 00 01 010 -010 0x10 0b1 1_0 +5 5L 5LL".split(), "", " 5", "5 "]
FLOATS = [*"0.5 -1. 1e+300 1e-5 1e999 -1e999 inf -inf 1_0.5 0x1 .5 1e L".split(), "", " 0.5"]


@pytest.mark.parametrize(
    "data",
    [
        *(f"{opcode}{text}\n.".encode() for opcode in "IL" for text in INTEGERS),
        *(f"F{text}\n.".encode() for text in FLOATS),
        *(framed(b"N.", size) for size in (0, 1, 2, 3, 1 << 62, (1 << 64) - 1)),
        framed(b"N0" + framed(b"N.", 3), 2),
        framed(b"N0" + framed(b"N.", 2), 20),
        framed(b"N0" + framed(b"X\4\0\0\0N0N0.", 10), 11),
        *(framed(b"X\4\0\0\0N0N0" + framed(b"0N.", 3), size) for size in range(13)),
        *(framed(b"](K\1M\1\1K\2e.", size) for size in range(13)),
    ],
)
def test_numbers_and_frames(data: bytes) -> None:
    """Python reads a file piece by piece, so that a frame can hide bytes from it."""
    try:
        expected = pickle.load(io.BytesIO(data))
    except (ValueError, OverflowError, pickle.UnpicklingError, EOFError):
        with pytest.raises(Damaged):
            read_pickle(data, what="test")
    else:
        with suppress(Damaged):
            assert repr(read_pickle(data, what="test").value) == repr(expected)


@pytest.mark.parametrize(
    "data",
    [b"U\2\xc3\xa9.", b"T\2\0\0\0\xc3\xa9.", b"S'\\xc3\\xa9'\n.", b"S'\\t\\\\u\\''\n."],
)
def test_texts_of_python_2_are_utf_8_as_to_torch(data: bytes) -> None:
    assert read_pickle(data, what="test").value == pickle.loads(data, encoding="utf-8")


@pytest.mark.parametrize("data", [b"S 'a'\n.", b"S'a' \n.", b"S'a\n.", b"K\1)R.", b"})\x81."])
def test_what_python_refuses(data: bytes) -> None:
    with pytest.raises((pickle.UnpicklingError, TypeError)):
        pickle.loads(data)
    with pytest.raises(Damaged):
        read_pickle(data, what="test")


@pytest.mark.parametrize("data", [b"I-5\n.", b"L5L\n.", b"L5\n.", b"F-1e-05\n.", b"F-inf\n."])
def test_numbers_as_python_writes_them(data: bytes) -> None:
    assert read_pickle(data, what="test").value == pickle.loads(data)
