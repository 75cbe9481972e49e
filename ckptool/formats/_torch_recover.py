"""What is left of a torch.save archive that was cut: its records in order, up to where it ends.

A zip's directory lies at its end. torch.save (torch 1.6 to 2.13) writes ``data.pkl`` first, then
the storages, each behind a header with its name and, where it is not empty, before a descriptor
with its CRC-32 and size. The header has no size; ``data.pkl`` ends where its pickle does, and says
how large each storage is.
"""

from __future__ import annotations

import struct
import zlib

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, ObjectEntry, Path, TensorEntry
from ckptool.errors import CkptoolError, Damaged, Problem
from ckptool.formats import _pickle
from ckptool.formats._dtensor import sharded_share
from ckptool.formats._pickle import Loaded
from ckptool.formats._storage import place_of, plain_tensor, storage_of
from ckptool.formats._torch_file import StoredBytes, TorchFile, is_zip
from ckptool.formats._tree import leaves, unique_names
from ckptool.formats.base import Source

_HEADER = struct.Struct("<4s5H3L2H")
_DESCRIPTOR = struct.Struct("<4s3L")
_DESCRIPTOR64 = struct.Struct("<4sL2Q")
_HAS_DESCRIPTOR = 0x08
_SMALL = 1024
_PIECE = 1 << 16
_ZIP64 = 0xFFFFFFFF


def recovered(source: Source, file: str) -> tuple[Catalog, list[Problem]]:
    """The catalog of what a cut archive still holds, and a problem for each name that it lost.

    Raises Damaged where not even its pickle is whole.
    """
    opened = _Cut(source, file).opened()
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    problems: list[Problem] = []
    named = unique_names(leaves(opened.value, what=file, pickled=opened.pickled), what=file)
    for name, (path, value) in named.items():
        try:
            entry = _entry(name, path, value, opened, source)
        except CkptoolError as error:
            problems.append(error.message.within(name, tensor=name))
            continue
        if isinstance(entry, TensorEntry):
            tensors[name] = entry
        else:
            objects[name] = entry
    files = {file: source.files[file]}
    return Catalog("torch-save", tensors, objects, files, world_size=1), problems


def _entry(
    name: str, path: Path, value: object, opened: TorchFile, source: Source
) -> TensorEntry | ObjectEntry:
    tensor = plain_tensor(value)
    if tensor is not None:
        chunk = Chunk(Box.whole(tensor.shape), place_of(tensor, opened), 0)
        return TensorEntry(name, path, tensor.dtype, tensor.shape, (chunk,))
    if sharded_share(value, opened, source) is not None:
        raise Damaged("one rank's part of a sharded tensor")
    return ObjectEntry(name, path, value)


class _Cut:
    """The records of a cut archive, read one behind the other."""

    def __init__(self, source: Source, file: str) -> None:
        self._source, self._file = source, file
        self._size = source.files[file]
        self._loaded: Loaded | None = None
        self._sizes: dict[str, int] = {}
        self._storages: dict[str, StoredBytes] = {}
        self._byteorder = "little"

    def opened(self) -> TorchFile:
        """What the records that are whole say. Damaged where the first is no whole pickle."""
        try:
            self._walk()
        except CkptoolError:
            if self._loaded is None:
                raise
        if self._loaded is None:
            raise Damaged(f"{self._file}: no torch.save archive: it does not begin with a pickle")
        return TorchFile(
            self._file,
            self._loaded.value,
            self._storages,
            self._byteorder,
            self._loaded.globals,
            self._loaded.end,
        )

    def _walk(self) -> None:
        position = 0
        while is_zip(self._source.read(self._file, position, 4)):
            header = _HEADER.unpack(self._source.read(self._file, position, _HEADER.size))
            flags, name_length, extra_length = header[2], header[9], header[10]
            name = self._read(position + _HEADER.size, name_length).decode("utf-8", "replace")
            start = position + _HEADER.size + name_length + extra_length
            position = self._record(name.partition("/")[2], start, bool(flags & _HAS_DESCRIPTOR))

    def _read(self, position: int, nbytes: int) -> bytes:
        return self._source.read(self._file, position, nbytes)

    def _record(self, name: str, start: int, described: bool) -> int:
        """Take in the record whose bytes begin at ``start``; returns where the next begins."""
        size = self._size_of(name, start) if described else 0
        crc, end = self._descriptor(name, start, size) if described else (None, start)
        if name.startswith("data/"):
            self._storages[name[5:]] = StoredBytes(self._file, start, size, size, crc)
        elif name == "data.pkl":
            self._require_crc(name, start, size, crc)
            self._loaded = self._load(start)
            self._sizes = {s.key: s.nbytes for s in map(storage_of, self._loaded.persistent)}
        elif name == "byteorder":
            self._byteorder = self._read(start, size).decode("ascii", "replace")
        return end

    def _size_of(self, name: str, start: int) -> int:
        if name == "data.pkl":
            return self._load(start).end
        if name.startswith("data/"):
            if name[5:] not in self._sizes:
                raise Damaged(f"{self._file}: a storage that its pickle does not know: {name!r}")
            return self._sizes[name[5:]]
        found = self._read(start, min(_SMALL, self._size - start)).find(b"PK\x07\x08")
        if found < 0:
            raise Damaged(f"{self._file}: record {name!r} has no end")
        return found

    def _load(self, start: int) -> Loaded:
        """The pickle that begins at ``start``, read in growing pieces until it ends."""
        length = min(self._size - start, _PIECE)
        while True:
            try:
                return _pickle.load(self._read(start, length), what=f"{self._file} (data.pkl)")
            except _pickle.Truncated:
                if length >= min(self._size - start, _pickle.LARGEST):
                    raise
                length = min(self._size - start, length * 4, _pickle.LARGEST)

    def _descriptor(self, name: str, start: int, size: int) -> tuple[int, int]:
        """The CRC-32 that stands behind a record, and where the next record begins."""
        large = size >= _ZIP64 or start >= _ZIP64
        form = _DESCRIPTOR64 if large else _DESCRIPTOR
        mark, crc, stored, plain = form.unpack(self._read(start + size, form.size))
        if mark != b"PK\x07\x08" or (stored, plain) != (size, size):
            raise Damaged(f"{self._file}: record {name!r} does not end where it should")
        return int(crc), start + size + form.size

    def _require_crc(self, name: str, start: int, size: int, crc: int | None) -> None:
        if crc and zlib.crc32(self._read(start, size)) != crc:
            raise Damaged(f"{self._file}: record {name!r} differs from its recorded CRC-32")
