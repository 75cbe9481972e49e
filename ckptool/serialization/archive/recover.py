"""What is left of a torch.save archive that was cut or broken: its records, one after the other.

A zip's directory lies at its end. torch.save (torch 1.6 to 2.13) writes ``data.pkl`` first, then
the storages, each behind a header with its name and, where it is not empty, before a descriptor
with its CRC-32 and size. The header has no size; ``data.pkl`` ends where its pickle does, and says
how large each storage is.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from ckptool.errors import CkptoolError, Damaged
from ckptool.serialization.archive.read import is_zip, legacy_pickles
from ckptool.serialization.archive.tensors import storage_of
from ckptool.serialization.pickle.load import Loaded, Truncated, read_pickle
from ckptool.serialization.source import LARGEST, Source
from ckptool.serialization.zip import ZipRecord

_HEADER = struct.Struct("<4s5H3L2H")
_DESCRIPTOR = struct.Struct("<4s3L")
_DESCRIPTOR64 = struct.Struct("<4sL2Q")
_HAS_DESCRIPTOR = 0x08
_SMALL = 1024
_PIECE = 1 << 16
_ZIP64 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Recovered:
    """The records of an archive that are where and as long as its pickle says.

    ``lost`` maps the names of the other storages to the bytes that they should have.
    """

    records: tuple[ZipRecord, ...]
    lost: dict[str, int]


def recovered(source: Source, file: str) -> Recovered:
    """The records of a cut or broken archive. Damaged where not even its pickle is whole."""
    return _Walk(source, file).result()


def legacy_counts(source: Source, file: str) -> tuple[int, dict[int, bytes]]:
    """The size of a legacy stream that was cut, and what stood at which place before its storages.

    That is each storage's number of elements, as its pickle says it. Raises Damaged where that is
    not whole, or contradicts a number that is there.
    """
    *_, value, keys = legacy_pickles(source, file)
    storages = {s.key: s for s in map(storage_of, value.persistent)}
    position, found = keys.end, {}
    for key in map(str, keys.value if isinstance(keys.value, list) else []):
        storage = storages.get(key)
        if storage is None:
            raise Damaged(f"{file}: storage not in the pickle: {key[:40]!r}")
        found[position] = struct.pack("<q", storage.numel)
        left = min(8, source.files[file] - position)
        if left > 0 and not found[position].startswith(source.read(file, position, left)):
            raise Damaged(f"{file}: storage {key} has a different size from its pickle")
        position += 8 + storage.nbytes
    return position, found


class _Walk:
    """The records of an archive, read one behind the other, without its directory."""

    def __init__(self, source: Source, file: str) -> None:
        self._source, self._file = source, file
        self._size = source.files[file]
        self._root = ""
        self._sizes: dict[str, int] | None = None
        self._found: dict[str, ZipRecord] = {}
        self._twice: set[str] = set()
        self._next: int | None = None

    def result(self) -> Recovered:
        """What the walk meets."""
        for position in self._positions():
            self._found_at(position)
        if self._sizes is None:
            raise Damaged(f"{self._file}: not a torch.save archive: does not begin with a pickle")
        whole = {name: one for name, one in self._found.items() if name not in self._twice}
        named = {f"{self._root}/data/{key}": size for key, size in self._sizes.items()}
        lost = {name: size for name, size in named.items() if name not in whole}
        return Recovered(tuple(whole.values()), lost)

    def _positions(self) -> Iterator[int]:
        """Where headers begin: behind the record before, or else wherever the next one is."""
        position: int | None = 0
        while position is not None and position + _HEADER.size <= self._size:
            self._next = None
            yield position
            position = self._next if self._next is not None else self._header_after(position)

    def _header_after(self, position: int) -> int | None:
        """The next place that looks like a header, in the rest of the file."""
        for start in range(position + 4, self._size, _PIECE):
            data = self._read(start, min(_PIECE + 3, self._size - start))
            at = data.find(b"PK\x03\x04")
            if at >= 0:
                return start + at
        return None

    def _found_at(self, position: int) -> None:
        """Take in the record whose header begins here, if one does and it is whole."""
        try:
            if is_zip(self._read(position, 4)):
                self._take(position)
        except CkptoolError:
            if self._sizes is None:
                raise

    def _take(self, position: int) -> None:
        header = _HEADER.unpack(self._read(position, _HEADER.size))
        name = self._read(position + _HEADER.size, header[9]).decode("utf-8", "replace")
        start = position + _HEADER.size + header[9] + header[10]
        described = bool(header[2] & _HAS_DESCRIPTOR)
        size = self._size_of(name, start) if described else header[7]
        crc, end = header[6], start + size
        if described:
            wide = size >= _ZIP64 or position >= _ZIP64
            crc, end = self._descriptor(name, end, size, _DESCRIPTOR64 if wide else _DESCRIPTOR)
        if name.endswith("/data.pkl") and self._sizes is None:
            self._open(name, start, size, crc)
        self._require_named(name, size, end)
        if name in self._found:
            self._twice.add(name)
        self._found[name] = ZipRecord(name, 0, crc, size, size, start, position, header[2])
        self._next = end

    def _open(self, name: str, start: int, size: int, crc: int) -> None:
        if crc and zlib.crc32(self._read(start, size)) != crc:
            raise Damaged(f"{self._file}: record {name!r} does not match its CRC-32")
        self._root = name.removesuffix("/data.pkl")
        storages = map(storage_of, self._load(start).persistent)
        self._sizes = {storage.key: storage.nbytes for storage in storages}

    def _require_named(self, name: str, size: int, end: int) -> None:
        """Damaged where it is none of this archive, or of another size than its pickle says."""
        root, _, inner = name.partition("/")
        folder, _, key = inner.partition("/")
        sizes = self._sizes or {}
        if root != self._root or end > self._size:
            raise Damaged(f"{self._file}: {name!r} is not a complete record")
        if folder == "data" and key and sizes.get(key) != size:
            raise Damaged(f"{self._file}: a storage that its pickle does not know: {name!r}")

    def _read(self, position: int, nbytes: int) -> bytes:
        return self._source.read(self._file, position, nbytes)

    def _size_of(self, name: str, start: int) -> int:
        if name.endswith("/data.pkl"):
            return self._load(start).end
        key = name.partition("/data/")[2]
        if key:
            if self._sizes is None or key not in self._sizes:
                raise Damaged(f"{self._file}: a storage that its pickle does not know: {name!r}")
            return self._sizes[key]
        found = self._read(start, min(_SMALL, self._size - start)).find(b"PK\x07\x08")
        if found < 0:
            raise Damaged(f"{self._file}: record {name!r} has no end")
        return found

    def _load(self, start: int) -> Loaded:
        """The pickle that begins at ``start``, read in growing pieces until it ends."""
        length = min(self._size - start, _PIECE)
        while True:
            try:
                return read_pickle(self._read(start, length), what=f"{self._file} (data.pkl)")
            except Truncated:
                if length >= min(self._size - start, LARGEST):
                    raise
                length = min(self._size - start, length * 4, LARGEST)

    def _descriptor(self, name: str, at: int, size: int, form: struct.Struct) -> tuple[int, int]:
        """The CRC-32 that stands behind a record, and where the next record begins."""
        mark, crc, stored, plain = form.unpack(self._read(at, form.size))
        if mark != b"PK\x07\x08" or (stored, plain) != (size, size):
            raise Damaged(f"{self._file}: record {name!r} does not end where it should")
        return int(crc), at + form.size
