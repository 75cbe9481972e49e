"""Archives in a file without an index, and the records of a truncated or broken one.

A zip's directory is at its end. torch.save (torch 1.6 to 2.13) writes ``data.pkl`` first, then the
storages, each after a header with its name and, if not empty, before a descriptor with its CRC-32
and size. The header has no size; ``data.pkl`` ends where its pickle does, which records the size of
each storage.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from msgspec import Struct

from ckptool.core.catalog import Container
from ckptool.errors import CkptoolError, Damaged
from ckptool.serialization.archive.read import is_zip, read_growing, read_legacy_pickles
from ckptool.serialization.archive.tensors import read_storage
from ckptool.serialization.pickle.load import Loaded, read_pickle
from ckptool.serialization.source import Source
from ckptool.serialization.zip import (
    END,
    END64,
    IN_EXTRA,
    LOCAL,
    LOCATOR64,
    STREAMED,
    ZipRecord,
)

_DESCRIPTOR = struct.Struct("<4s3L")
_DESCRIPTOR64 = struct.Struct("<4sL2Q")
_SMALL = 1024
"""Bytes in which a record ends that is neither the pickle nor a storage: torch's have up to 40."""
_PIECE = 1 << 16
_LOCATOR, _END = b"PK\x06\x07", b"PK\x05\x06"
_BLOCK = 1 << 22


def find_archives(source: Source, file: str) -> list[Container]:
    """Return every complete archive in a file, in order, whatever is between them.

    The zip64 locator that torch always writes (torch 1.6 to 2.13) records the position of the end
    record, counted from the archive's first byte; where that is correct, an archive ends. One
    inside the data of another is a part of it.
    """
    archives: list[Container] = []
    for where, at in _ends(source, file):
        start = at - END64.size - where
        end = at + LOCATOR64.size + END.size
        is_inside = start >= 0 and end <= source.files[file]
        if not is_inside or not is_zip(source.read(file, start, 4)):
            continue
        while archives and archives[-1].offset >= start:
            archives.pop()
        if not archives or archives[-1].offset + archives[-1].nbytes <= start:
            archives.append(Container(file, start, end - start))
    return archives


def _ends(source: Source, file: str) -> Iterator[tuple[int, int]]:
    """Yield the position in each locator, and that of the locator."""
    size = source.files[file]
    for block in range(0, size, _BLOCK):
        data = source.read(file, block, min(_BLOCK + LOCATOR64.size + len(_END), size - block))
        at = data.find(_LOCATOR)
        while 0 <= at < _BLOCK:
            if data.startswith(_END, at + LOCATOR64.size):
                yield LOCATOR64.unpack_from(data, at)[2], block + at
            at = data.find(_LOCATOR, at + 1)


class Recovered(Struct, frozen=True):
    """The records of an archive that have the position and length in its pickle.

    ``lost`` maps the names of the other storages to their expected bytes.
    """

    records: tuple[ZipRecord, ...]
    lost: dict[str, int]


def recover_records(source: Source, file: str) -> Recovered:
    """Read the records of a truncated or broken archive; Damaged if its pickle is incomplete."""
    return _RecordScan(source, file).run()


def read_legacy_counts(source: Source, file: str) -> tuple[int, dict[int, bytes]]:
    """Return the size in bytes of a truncated legacy stream, and its storages' counts by place.

    A count is the 8 bytes before a storage: its number of elements, as in its pickle. Raises
    Damaged if that is incomplete, or contradicts an existing count.
    """
    *_, value, keys = read_legacy_pickles(source, file)
    storages = {s.key: s for s in map(read_storage, value.persistent)}
    position, counts = keys.end, {}
    for key in map(str, keys.value if isinstance(keys.value, list) else []):
        storage = storages.get(key)
        if storage is None:
            raise Damaged(f"{file}: storage not in the pickle: {key[:40]!r}")
        counts[position] = struct.pack("<q", storage.numel)
        size = min(8, source.files[file] - position)
        if size > 0 and not counts[position].startswith(source.read(file, position, size)):
            raise Damaged(f"{file}: storage {key} has a different size from its pickle")
        position += 8 + storage.nbytes
    return position, counts


class _RecordScan:
    """Reads the records of an archive in sequence, without its directory."""

    def __init__(self, source: Source, file: str) -> None:
        self._source, self._file = source, file
        self._size = source.files[file]
        self._root = ""
        self._sizes: dict[str, int] | None = None
        self._records: dict[str, ZipRecord] = {}
        self._repeated: set[str] = set()
        self._next: int | None = None

    def run(self) -> Recovered:
        """Read all records, and return those that are complete and named once."""
        for position in self._positions():
            try:
                if is_zip(self._read(position, 4)):
                    self._read_record(position)
            except CkptoolError:
                if self._sizes is None:
                    raise
        if self._sizes is None:
            raise Damaged(f"{self._file}: not a torch.save archive: does not begin with a pickle")
        records = {n: record for n, record in self._records.items() if n not in self._repeated}
        sizes = {f"{self._root}/data/{key}": size for key, size in self._sizes.items()}
        missing = {name: size for name, size in sizes.items() if name not in records}
        return Recovered(tuple(records.values()), missing)

    def _positions(self) -> Iterator[int]:
        """Yield where headers begin: after the previous record, or else the next one found."""
        position: int | None = 0
        while position is not None and position + LOCAL.size <= self._size:
            self._next = None
            yield position
            position = self._next if self._next is not None else self._header_after(position)

    def _header_after(self, position: int) -> int | None:
        """Return the next place that looks like a header, in the rest of the file."""
        for start in range(position + 4, self._size, _PIECE):
            data = self._read(start, min(_PIECE + 3, self._size - start))
            at = data.find(b"PK\x03\x04")
            if at >= 0:
                return start + at
        return None

    def _read_record(self, position: int) -> None:
        """Read the record whose header begins here; Damaged if it is incomplete."""
        header = LOCAL.unpack(self._read(position, LOCAL.size))
        name = self._read(position + LOCAL.size, header[9]).decode("utf-8", "replace")
        start = position + LOCAL.size + header[9] + header[10]
        described = bool(header[2] & STREAMED)
        size = self._size_of(name, start) if described else header[7]
        crc, end = header[6], start + size
        if described:
            wide = size >= IN_EXTRA or position >= IN_EXTRA
            crc, end = self._descriptor(name, end, size, _DESCRIPTOR64 if wide else _DESCRIPTOR)
        if name.endswith("/data.pkl") and self._sizes is None:
            self._read_sizes(name, start, size, crc)
        self._require_named(name, size, end)
        if name in self._records:
            self._repeated.add(name)
        self._records[name] = ZipRecord(name, 0, crc, size, size, start, position, header[2])
        self._next = end

    def _read_sizes(self, name: str, start: int, size: int, crc: int) -> None:
        """Read the sizes of the storages from this record, the pickle."""
        if crc and zlib.crc32(self._read(start, size)) != crc:
            raise Damaged(f"{self._file}: record {name!r} does not match its CRC-32")
        self._root = name.removesuffix("/data.pkl")
        storages = map(read_storage, self._load(start).persistent)
        self._sizes = {storage.key: storage.nbytes for storage in storages}

    def _require_named(self, name: str, size: int, end: int) -> None:
        """Raise Damaged if it is not a record of this archive, or its pickle gives another size."""
        root, _, inner = name.partition("/")
        folder, _, key = inner.partition("/")
        sizes = self._sizes or {}
        if root != self._root or end > self._size:
            raise Damaged(f"{self._file}: {name!r} is not a complete record")
        if folder == "data" and key and sizes.get(key) != size:
            raise Damaged(f"{self._file}: a storage that its pickle does not name: {name!r}")

    def _read(self, position: int, nbytes: int) -> bytes:
        return self._source.read(self._file, position, nbytes)

    def _size_of(self, name: str, start: int) -> int:
        """Return the size in bytes of a record whose descriptor alone has it."""
        if name.endswith("/data.pkl"):
            return self._load(start).end
        key = name.partition("/data/")[2]
        if key:
            if self._sizes is None or key not in self._sizes:
                raise Damaged(f"{self._file}: a storage that its pickle does not name: {name!r}")
            return self._sizes[key]
        size = self._read(start, min(_SMALL, self._size - start)).find(b"PK\x07\x08")
        if size < 0:
            raise Damaged(f"{self._file}: record {name!r} has no end")
        return size

    def _load(self, start: int) -> Loaded:
        """Read the pickle that begins at ``start``, as many bytes as it needs."""

        def read(length: int) -> Loaded:
            return read_pickle(self._read(start, length), what=f"{self._file} (data.pkl)")

        return read_growing(read, self._size - start)

    def _descriptor(self, name: str, at: int, size: int, form: struct.Struct) -> tuple[int, int]:
        """Return the CRC-32 after a record, and where the next record begins."""
        mark, crc, stored, plain = form.unpack(self._read(at, form.size))
        if mark != b"PK\x07\x08" or (stored, plain) != (size, size):
            raise Damaged(f"{self._file}: record {name!r} does not end where it should")
        return int(crc), at + form.size
