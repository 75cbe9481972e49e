"""Pickles of many records, and what is read of them."""

from __future__ import annotations

import struct
from typing import Any
from unittest import mock

from ckptool.errors import SourceError
from ckptool.serialization.pickle import row_reader
from ckptool.serialization.pickle.instances import InstanceReader
from ckptool.serialization.pickle.load import read_pickle
from ckptool.serialization.pickle.records import Call
from ckptool.serialization.pickle.rows import expand_rows


class Index:
    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__ |= fields


SHARED = [f"shared {number}" for number in range(400)]


def seen(value: Any, depth: int = 0) -> Any:
    """Records by what they are, so that they can be compared."""
    if depth > 12:
        return "deep"
    if isinstance(value, Call):
        inner = [value.function, value.args, value.state, value.is_new, value.items, value.entries]
        return [seen(item, depth + 1) for item in inner]
    if isinstance(value, dict):
        pairs = zip(expand_rows([*value]), expand_rows([*value.values()]), strict=True)
        return [(seen(key, depth + 1), seen(item, depth + 1)) for key, item in pairs]
    if isinstance(value, list | tuple):
        return type(value), [seen(item, depth + 1) for item in expand_rows([*value])]
    return type(value), repr(value) if isinstance(value, int | float | str) else ""


def outcome(data: bytes, *, at_once: bool = True, rows: bool = False) -> Any:
    """What the pickle holds, or the kind of error."""
    with (
        mock.patch.object(
            InstanceReader,
            "read",
            InstanceReader.read if at_once else lambda self, pos, end, most: (pos, 0),
        ),
        mock.patch.object(row_reader, "LEAST", 3),
    ):
        try:
            return seen(read_pickle(data, what="p", rows=rows).value)
        except SourceError as error:
            return type(error)


def framed(opcodes: bytes, size: int) -> bytes:
    """Opcodes in a frame of this size."""
    return b"\x95" + struct.pack("<Q", size) + opcodes


def steps(data: bytes) -> int:
    """How many instances were read at once."""
    counts: list[int] = []
    plain = InstanceReader.read

    def read(self: InstanceReader, pos: int, end: int, most: int) -> tuple[int, int]:
        after, count = plain(self, pos, end, most)
        counts.append(count)
        return after, count

    with mock.patch.object(InstanceReader, "read", read):
        read_pickle(data, what="p")
    return sum(counts)


HEAD = (
    b"\x80\x04\x8c\x01m\x94\x8c\x01C\x94\x93\x94\x8c\x01x\x94"
    b"\x8c\x05torch\x94\x8c\x04Size\x94\x93\x94"
)
"""Memo: 0 "m", 1 "C", 2 the class, 3 "x", 4 "torch", 5 "Size", 6 torch.Size."""


def instance(value: bytes) -> bytes:
    return b"h\x02)\x81\x94}\x94(h\x03" + value + b"ub"
