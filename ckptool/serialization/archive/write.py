"""Lay out what torch.save would write, without torch and without the tensors' bytes.

The archive follows torch 2.13: stored records, data aligned to 64 bytes by an ``FB`` extra field,
CRC-32 and sizes in a descriptor after the data and in the central directory, zip64 end records.
Its pickle uses protocol 2.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptool.core.layout import Literal, Part, Patch
from ckptool.serialization.pickle.write import Content, pickled

_ALIGNMENT = 64
_FOUR_GIB = 0xFFFFFFFF
_FLAGS_DESCRIPTOR, _FLAGS_EMPTY = 0x0808, 0x0800


def torch_archive(value: Any, *, root: str = "archive") -> list[Part]:
    """The parts of a torch.save zip of ``value``, whose tensors are references."""
    data, storages = pickled(value, 2)
    archive = _Archive(root)
    archive.literal("data.pkl", data)
    archive.literal(".format_version", b"1")
    archive.literal(".storage_alignment", str(_ALIGNMENT).encode())
    archive.literal("byteorder", b"little")
    for key, content in enumerate(storages):
        archive.storage(f"data/{key}", content)
    archive.literal("version", b"3\n")
    archive.literal(".data/serialization_id", f"{zlib.crc32(data):040d}".encode())
    return archive.finished()


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes
    offset: int
    nbytes: int
    crc: int | None
    part: int


class _Archive:
    """Collects the parts of a zip of stored records, front to back."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._parts: list[Part] = []
        self._position = 0
        self._entries: list[_Entry] = []

    def literal(self, name: str, data: bytes) -> None:
        self._record(name, Literal(data), zlib.crc32(data))

    def storage(self, name: str, content: Content) -> None:
        crc = zlib.crc32(content.data) if isinstance(content, Literal) else None
        self._record(name, content, crc)

    def finished(self) -> list[Part]:
        """All parts, with the central directory and the end records."""
        start, length = self._position, 0
        for entry in self._entries:
            central, crc_at = _central_header(entry)
            patches = (Patch(crc_at, entry.part),) if entry.crc is None else ()
            self._add(Literal(central, patches))
            length += len(central)
        self._add(Literal(_end_records(len(self._entries), length, start)))
        return _merged(self._parts)

    def _record(self, name: str, content: Content, crc: int | None) -> None:
        encoded = f"{self._root}/{name}".encode()
        offset, nbytes = self._position, content.nbytes
        self._add(Literal(_local_header(encoded, offset, nbytes)))
        part = self._add(content)
        self._entries.append(_Entry(encoded, offset, nbytes, crc, part))
        if nbytes:
            wide = nbytes >= _FOUR_GIB or offset >= _FOUR_GIB
            sizes = struct.pack("<2Q" if wide else "<2L", nbytes, nbytes)
            patches = (Patch(4, part),) if crc is None else ()
            self._add(Literal(b"PK\x07\x08" + struct.pack("<L", crc or 0) + sizes, patches))

    def _add(self, part: Part) -> int:
        self._parts.append(part)
        self._position += part.nbytes
        return len(self._parts) - 1


def _local_header(name: bytes, offset: int, nbytes: int) -> bytes:
    """The header of a record at ``offset``, padded so that its data is aligned."""
    wide = b""
    if nbytes >= _FOUR_GIB:
        wide += struct.pack("<2H2Q", 1, 16, 0, 0)
    size_field = _FOUR_GIB if wide else 0
    end = offset + 30 + len(name) + len(wide) + 4
    padding = -end % _ALIGNMENT
    extra = wide + b"FB" + struct.pack("<H", padding) + b"Z" * padding
    flags = _FLAGS_DESCRIPTOR if nbytes else _FLAGS_EMPTY
    head = struct.pack(
        "<4s5H3L2H",
        b"PK\x03\x04",
        0,
        flags,
        0,
        0,
        0,
        0,
        size_field,
        size_field,
        len(name),
        len(extra),
    )
    return head + name + extra


def _central_header(entry: _Entry) -> tuple[bytes, int]:
    """The directory's record of an entry, and where its CRC-32 stands."""
    big = entry.nbytes >= _FOUR_GIB
    far = entry.offset >= _FOUR_GIB
    values = [entry.nbytes, entry.nbytes] * big + [entry.offset] * far
    extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    size = _FOUR_GIB if big else entry.nbytes
    flags = _FLAGS_DESCRIPTOR if entry.nbytes else _FLAGS_EMPTY
    head = struct.pack(
        "<4s6H3L5H2L",
        *(b"PK\x01\x02", 0, 0, flags, 0, 0, 0),
        *(entry.crc or 0, size, size, len(entry.name), len(extra), 0, 0, 0, 0),
        _FOUR_GIB if far else entry.offset,
    )
    return head + entry.name + extra, 16


def _end_records(count: int, length: int, start: int) -> bytes:
    end64 = struct.pack(
        "<4sQ2H2L4Q", b"PK\x06\x06", 44, 0x031E, 0x002D, 0, 0, count, count, length, start
    )
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, start + length, 1)
    short = min(count, 0xFFFF)
    end = struct.pack(
        "<4s4H2LH",
        b"PK\x05\x06",
        0,
        0,
        short,
        short,
        min(length, _FOUR_GIB),
        min(start, _FOUR_GIB),
        0,
    )
    return end64 + locator + end


def _merged(parts: list[Part]) -> list[Part]:
    """Adjoining literals as one, with their patches moved along and renumbered."""
    numbers: dict[int, int] = {}
    groups: list[list[Part]] = []
    for old, part in enumerate(parts):
        literal = isinstance(part, Literal)
        if not (literal and groups and isinstance(groups[-1][0], Literal)):
            groups.append([])
        groups[-1].append(part)
        numbers[old] = len(groups) - 1
    return [_renumbered(_one(group), numbers) for group in groups]


def _one(group: list[Part]) -> Part:
    literals = [part for part in group if isinstance(part, Literal)]
    if not literals:
        return group[0]
    patches: list[Patch] = []
    length = 0
    for literal in literals:
        patches += [Patch(patch.at + length, patch.part) for patch in literal.patches]
        length += literal.nbytes
    return Literal(b"".join(literal.data for literal in literals), tuple(patches))


def _renumbered(part: Part, numbers: Mapping[int, int]) -> Part:
    if not isinstance(part, Literal) or not part.patches:
        return part
    return Literal(part.data, tuple(Patch(p.at, numbers[p.part]) for p in part.patches))


def offset_parts(parts: list[Part], by: int) -> list[Part]:
    """The same parts when ``by`` others come before them in a file."""
    numbers = {
        patch.part: patch.part + by
        for part in parts
        if isinstance(part, Literal)
        for patch in part.patches
    }
    return [_renumbered(part, numbers) for part in parts]
