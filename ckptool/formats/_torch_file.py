"""What torch.save wrote: the pickle's value, and where each storage lies.

Zip archives (torch 1.6 to 2.13) hold ``<root>/data.pkl`` and one record a storage in
``<root>/data/<key>``; the legacy stream (before 1.6) is five pickles, then each storage's element
count and bytes.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from ckptool.core.codec import decode
from ckptool.core.mesh import Mesh
from ckptool.errors import CkptoolError, Damaged, Problem, Unrecognised, coded
from ckptool.formats import _pickle
from ckptool.formats._alike import Traced, known, learn
from ckptool.formats._file_kinds import not_a, unrecognised_zip
from ckptool.formats._pickle import Call, Global, Loaded
from ckptool.formats._storage import storage_of
from ckptool.formats._values import globals_in
from ckptool.formats._zip import DEFLATED, Region, ZipRecord, has_checksums, read_directory
from ckptool.formats.base import Source

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_HEAD = re.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\n\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\.", re.DOTALL
)
"""The magic number as the pickle protocols 2 to 5 write it, the later ones in a frame."""

_SMALL = 4096
_MOST_INFLATED = 100


class StoredBytes(NamedTuple):
    """Where a storage's bytes lie: in the file, or in a deflated blob (``codec``).

    ``nbytes`` is the size of the bytes in the file, ``size`` once decoded.
    """

    file: str
    offset: int
    nbytes: int
    size: int
    crc32: int | None = None
    codec: str | None = None


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A torch.save file: what it holds, its storages by key, and its byte order.

    ``pickled`` is the size in bytes of its pickle, ``meshes`` what its device meshes were read as,
    with the rank that pickled each: most tensors share one record. ``inert`` is what it holds
    whatever that names; ``hostile`` says of each global in it that can run code what is wrong.
    """

    what: str
    inert: object
    storages: Mapping[str, StoredBytes]
    byteorder: str
    globals: Mapping[Global, int]
    pickled: int
    hostile: Mapping[Global, Problem] = field(default_factory=dict)
    meshes: dict[Call, tuple[Mesh, int | None]] = field(default_factory=dict, compare=False)

    @property
    def value(self) -> object:
        """What the file holds; Hostile where it names a global that can run code."""
        _pickle.require_harmless(self.hostile)
        return self.inert

    def narrowed(self, part: object) -> TorchFile:
        """Return the file as if it held a part of its value alone, with what is hostile in that."""
        if not self.hostile:
            return replace(self, inert=part)
        inside = globals_in(part)
        hostile = {item: why for item, why in self.hostile.items() if item in inside}
        return replace(self, inert=part, hostile=hostile)


def is_zip(head: bytes) -> bool:
    return head[:4] == b"PK\x03\x04"


def is_legacy(head: bytes) -> bool:
    return _LEGACY_HEAD.match(head) is not None


def read_torch_file(source: Source, file: str) -> TorchFile:
    """Open a whole file that torch.save wrote, zip or legacy. No tensor byte is read."""
    size = source.files[file]
    head = source.read(file, 0, min(size, 64))
    if is_legacy(head):
        with coded("legacy-stream", file=file):
            return _read_legacy(source, file)
    if is_zip(head):
        return read_torch_zip(Region(source, file, 0, size))
    if not size:
        raise Damaged(Problem(f"{file}: the file is empty (0 bytes)", "file-empty", file=file))
    raise not_a("a torch.save file", source, file)


def read_torch_zip(region: Region) -> TorchFile:
    """Open the torch.save archive that fills a region."""
    with coded("archive-content", file=region.file):
        return known(region) or _read_archive(region)


def _read_archive(region: Region) -> TorchFile:
    traced = Traced(region)
    records = read_directory(traced)
    root = _root(region, records)
    data_pkl = records[f"{root}/data.pkl"]
    has_crc = has_checksums(records.values())
    loaded = _unpickled(record_bytes(traced, data_pkl, has_crc), f"{region.what} (data.pkl)")
    _require_in_value(loaded)
    prefix = f"{root}/data/"
    stored = {name[len(prefix) :]: r for name, r in records.items() if name.startswith(prefix)}
    are_checked = has_checksums(stored.values())
    storages = {key: _stored(region, record, are_checked) for key, record in stored.items()}
    order = records.get(f"{root}/byteorder")
    byteorder = "little"
    if order:
        byteorder = record_bytes(traced, order, has_crc).decode("ascii", "replace")
    if byteorder not in ("little", "big"):
        raise Damaged(f"{region.what}: unknown byte order {byteorder!r}")
    found = TorchFile(
        region.what, loaded.value, storages, byteorder, loaded.globals, loaded.end, loaded.hostile
    )
    if data_pkl.crc32 and not loaded.hostile:
        unread = [record for record in records.values() if record not in (data_pkl, order)]
        learn(traced, found, stored, unread)
    return found


def _unpickled(data: bytes, what: str) -> Loaded:
    """A pickle's content. A DCP folder has a pickle an item, most of them the same few."""
    if len(data) <= _SMALL:
        with suppress(CkptoolError):
            return _read_before(data)
    return _pickle.load(data, what=what, judges=False)


def _require_in_value(loaded: Loaded) -> None:
    """Raise Hostile for what can run code and lies in no value, so that none can be left out."""
    if loaded.hostile:
        inside = globals_in(loaded.value)
        _pickle.require_harmless({g: why for g, why in loaded.hostile.items() if g not in inside})


@lru_cache(maxsize=1024)
def _read_before(data: bytes) -> Loaded:
    return _pickle.load(data, what="")


def _root(region: Region, records: Mapping[str, ZipRecord]) -> str:
    roots = [n[: -len("/data.pkl")] for n in records if n.endswith("/data.pkl")]
    if any(name.split("/", 1)[-1] == "constants.pkl" for name in records):
        raise Unrecognised(
            f"{region.what}: a TorchScript archive: it holds a program, not a state dict",
            hint="in torch: torch.save(torch.jit.load(FILE).state_dict(), 'state.pt')",
        )
    if not roots and any(name.endswith("/.data/serialization_id") for name in records):
        message = f"{region.what}: torch.save failed before it wrote the object: the archive has"
        message += f" {len(records)} records, and no data.pkl; nothing of it can be salvaged"
        raise Damaged(
            Problem(message, "save-unfinished", file=region.file), hint="take another checkpoint"
        )
    if len(roots) != 1:
        raise unrecognised_zip(records, region.what)
    return roots[0]


def record_bytes(region: Region, record: ZipRecord, has_crc: bool) -> bytes:
    """A small record, decoded; Damaged where it is too large or not what was checksummed.

    ``has_crc`` says that its archive has checksums: where none is stored, all are 0.
    """
    if record.size > _pickle.LARGEST:
        raise Damaged(
            f"{region.what}: record {record.name!r} claims {record.size:,} bytes; ckptool reads"
            f" pickles up to {_pickle.LARGEST:,}"
        )
    if record.size > _MOST_INFLATED * record.stored + (1 << 20):
        raise Damaged(
            f"{region.what}: record {record.name!r} claims to inflate {record.stored:,} bytes to"
            f" {record.size:,}"
        )
    data = region.read(record.offset, record.stored)
    if record.method == DEFLATED:
        data = decode(data, "deflate", record.size, what=f"{region.what}: {record.name}")
    if len(data) != record.size or (has_crc and zlib.crc32(data) != record.crc32):
        message = f"{region.what}: record {record.name!r} differs from its recorded CRC-32"
        raise Damaged(Problem(message, "crc-mismatch", file=region.file))
    return data


def _stored(region: Region, record: ZipRecord, has_crc: bool) -> StoredBytes:
    return StoredBytes(
        region.file,
        region.offset + record.offset,
        record.stored,
        record.size,
        record.crc32 if has_crc else None,
        "deflate" if record.method == DEFLATED else None,
    )


def _read_legacy(source: Source, file: str) -> TorchFile:
    size = source.files[file]
    loaded = legacy_pickles(source, file, judges=False)
    for one in (*loaded[:3], loaded[4]):
        _pickle.require_harmless(one.hostile)
    _require_in_value(loaded[3])
    magic, version, system, value, keys = (item.value for item in loaded)
    if magic != LEGACY_MAGIC or version != 1001 or not isinstance(system, dict):
        raise Damaged(f"{file}: not a legacy torch.save file of version 1001")
    try:
        sizes = {s.key: s.itemsize for s in map(storage_of, loaded[3].persistent)}
    except Damaged:
        _pickle.require_harmless(loaded[3].hostile)
        raise
    storages: dict[str, StoredBytes] = {}
    position = loaded[4].end
    if not isinstance(keys, list):
        raise Damaged(f"{file}: no list of storage keys after the object")
    for key in map(str, keys):
        count = struct.unpack("<q", source.read(file, position, 8))[0]
        nbytes = count * sizes.get(key, 1)
        position += 8
        if count < 0 or position + nbytes > size:
            raise Damaged(
                f"{file}: storage {key} claims {nbytes:,} bytes at {position:,},"
                f" but the file has {size:,} bytes"
            )
        storages[key] = StoredBytes(file, position, nbytes, nbytes)
        position += nbytes
    byteorder = "little" if system.get("little_endian", True) else "big"
    return TorchFile(
        file, value, storages, byteorder, loaded[3].globals, loaded[3].end, loaded[3].hostile
    )


def legacy_pickles(source: Source, file: str, *, judges: bool = True) -> list[Loaded]:
    """The five pickles at the file's start; the file is read in growing pieces until they end.

    Where it ``judges``, it raises Hostile at a global that can run code.
    """
    size = source.files[file]
    length = min(size, 1 << 16)
    while True:
        data = source.read(file, 0, length)
        try:
            found: list[Loaded] = []
            start = 0
            for _ in range(5):
                found.append(_pickle.load(data, what=file, start=start, judges=judges))
                start = found[-1].end
            return found
        except _pickle.Truncated:
            if length >= min(size, _pickle.LARGEST):
                raise
            length = min(size, length * 4, _pickle.LARGEST)
