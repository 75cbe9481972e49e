"""Read what torch.save wrote: the pickle's value, and the place of each storage.

Zip archives (torch 1.6 to 2.13) contain ``<root>/data.pkl`` and one record per storage in
``<root>/data/<key>``, in the order of bytes that the record ``byteorder`` says (since 2.1); the
legacy stream (before 1.6) is five pickles, then each storage's element count and bytes, which are
little-endian on all machines (``writeFileRaw``).
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.catalog import Container
from ckptool.core.codec import decode
from ckptool.core.mesh import Mesh
from ckptool.errors import CkptoolError, Damaged, Problem, Unrecognized, coded
from ckptool.serialization.archive.templates import (
    ArchiveTemplate,
    Sibling,
    Templates,
    is_compared,
)
from ckptool.serialization.archive.tensors import read_storage
from ckptool.serialization.file_kinds import not_a, unrecognized_zip
from ckptool.serialization.pickle.load import Loaded, Truncated, read_pickle, require_harmless
from ckptool.serialization.pickle.records import Call, Global, PickleValue
from ckptool.serialization.source import LARGEST, NearReads, Source
from ckptool.serialization.state_dict.values import collect_globals
from ckptool.serialization.zip import (
    DEFLATED,
    Region,
    ZipRecord,
    has_checksums,
    read_directory,
)

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_HEAD = re.compile(
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\n\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\.", re.DOTALL
)
"""The magic number as the pickle protocols 2 to 5 write it, the later ones in a frame."""

_UNTYPED, _OF_BYTES = Global("torch.storage", "UntypedStorage"), Global("torch", "ByteStorage")

_SMALL = 4096
"""Bytes of a pickle that is remembered: those of a DCP folder's items are a few that repeat."""
_PIECE = 1 << 16
_MOST_INFLATED = 100
"""What deflate makes of a sound pickle; it reaches 1,032, so that 500 KB would become 500 MB."""


class StoredBytes(NamedTuple):
    """The place of a storage's bytes: in the file, or in a deflated blob (``codec``).

    ``nbytes`` is the size of the bytes in the file, ``size`` once decoded.
    """

    file: str
    offset: int
    nbytes: int
    size: int
    crc32: int | None = None
    codec: str | None = None


class TorchFile(Struct, frozen=True):
    """A torch.save file: its value, its storages by key, and its byte order.

    ``pickled`` is the size in bytes of its pickle, ``meshes`` its device meshes as read, with the
    rank that pickled each: most tensors share one record. ``inert`` is its value whatever that
    names; ``hostile`` has the problem of each global in it that can run code. ``packed`` is the
    zstd blob that it was in, if any, and its decoded size in bytes.
    """

    what: str
    inert: PickleValue
    storages: Mapping[str, StoredBytes]
    byteorder: str
    pickled: int
    hostile: Mapping[Global, Problem] = field(default_factory=dict)
    meshes: dict[Call, tuple[Mesh, int | None]] = field(default_factory=dict)
    packed: tuple[Container, int] | None = None

    @property
    def value(self) -> PickleValue:
        """Return the value of the file; Hostile if it names a global that can run code."""
        require_harmless(self.hostile)
        return self.inert

    def narrowed(self, part: PickleValue) -> TorchFile:
        """Return the file as if it had only a part of its value and its hostile globals."""
        if not self.hostile:
            return replace(self, inert=part)
        names = collect_globals(part)
        hostile = {item: why for item, why in self.hostile.items() if item in names}
        return replace(self, inert=part, hostile=hostile)


def is_zip(head: bytes) -> bool:
    """Return whether a file with this beginning is a zip archive."""
    return head[:4] == b"PK\x03\x04"


def is_legacy(head: bytes) -> bool:
    """Return whether a file with this beginning is a legacy stream."""
    return _LEGACY_HEAD.match(head) is not None


def read_torch_file(source: Source, file: str) -> TorchFile:
    """Open a whole file that torch.save wrote, zip or legacy. No tensor byte is read."""
    size = source.files[file]
    head = source.read(file, 0, min(size, 64))
    if is_legacy(head):
        with coded("legacy-stream", file=file):
            return _read_legacy(source, file)
    if is_zip(head):
        return read_torch_zip(Region(NearReads(source), file, 0, size))
    if not size:
        raise Damaged(f"{file}: the file is empty (0 bytes)", "file-empty", file=file)
    raise not_a("a torch.save file", source, file)


def read_torch_zip(region: Region) -> TorchFile:
    """Open the torch.save archive that fills a region."""
    with coded("archive-content", file=region.file):
        return OpenArchive(region, _TEMPLATES).read()


_TEMPLATES = Templates(reads=False)
"""Archives that were read: those of a DCP folder's items are alike, mostly (torch 2.1 to 2.13)."""


def find_template(region: Region) -> ArchiveTemplate | None:
    """Return the template that the archive in a region, and similar ones, match, if one was read.

    None if its pickle is not compared: that of the next may say another shape, or be hostile.
    """
    sibling = _TEMPLATES.find(region)
    return sibling.template if sibling is not None and sibling.template.file is not None else None


class OpenArchive:
    """An archive of which only what is beside the storages was read.

    It is judged by one of the ``templates``, or they learn from it. Raises CkptoolError if
    torch.save did not write it.
    """

    def __init__(self, region: Region, templates: Templates) -> None:
        self._region = region
        sibling = templates.find(region)
        if sibling is None:
            records = read_directory(region)
            folder = _folder(region, records)
            archive = Sibling(ArchiveTemplate.of(records.values(), folder))
            sibling = templates.learn(region, records.values()) or archive
        self.sibling = sibling

    @classmethod
    def of(cls, source: Source, file: str, templates: Templates) -> OpenArchive:
        """Open a whole file."""
        return cls(Region(NearReads(source), file, 0, source.files[file]), templates)

    @property
    def file(self) -> str:
        """The file that contains the archive."""
        return self._region.file

    @cached_property
    def pickle(self) -> bytes:
        """The bytes of its pickle; Damaged if they do not match their checksum."""
        return self._bytes_of(self._at("data.pkl"))

    def read(self) -> TorchFile:
        """Read the pickle, unless that of a similar archive was; return the file."""
        template, what = self.sibling.template, self._region.what
        if template.file is not None:
            return replace(template.file, what=what, storages=self.storages(), meshes={})
        loaded = _unpickle(self.pickle, f"{what} (data.pkl)")
        _require_in_value(loaded)
        _require_one_type(loaded, what)
        order, hostile = self.byteorder(), loaded.hostile
        file = TorchFile(what, loaded.value, self.storages(), order, loaded.end, hostile)
        if not hostile and is_compared(self._at("data.pkl")):
            template.file = file
        return file

    def storages(self, keys: Iterable[str] | None = None) -> dict[str, StoredBytes]:
        """Return the place of each storage, by its key, or only of those with these keys."""
        numbers, are_checked = self.sibling.template.storages, self.sibling.has_sums
        keys = numbers if keys is None else [key for key in keys if key in numbers]
        stored = ((key, self.sibling.record(numbers[key])) for key in keys)
        return {key: _locate(self._region, record, are_checked) for key, record in stored}

    def byteorder(self) -> str:
        """Return ``little`` or ``big``; Damaged if it is neither."""
        try:
            record = self._at("byteorder")
        except KeyError:
            return "little"
        order = self._bytes_of(record).decode("ascii", "replace")
        if order not in ("little", "big"):
            raise Damaged(f"{self._region.what}: unknown byte order {order!r}")
        return order

    def _at(self, name: str) -> ZipRecord:
        """Return a record by its name in the root; KeyError if there is none."""
        return self.sibling.record(self.sibling.template.names[name])

    def _bytes_of(self, record: ZipRecord) -> bytes:
        return record_bytes(self._region, record, has_checksums(self.sibling.template.records))


def _unpickle(data: bytes, what: str) -> Loaded:
    """Read a pickle. A DCP folder has a pickle per item, most of them the same few."""
    if len(data) <= _SMALL:
        with suppress(CkptoolError):
            return _unpickle_small(data)
    return read_pickle(data, what=what, judges=False)


@lru_cache(maxsize=1024)
def _unpickle_small(data: bytes) -> Loaded:
    return read_pickle(data, what="")


def _require_in_value(loaded: Loaded) -> None:
    """Raise Hostile for code in no value, which no selection could exclude."""
    if loaded.hostile:
        names = collect_globals(loaded.value)
        require_harmless({g: why for g, why in loaded.hostile.items() if g not in names})


def _require_one_type(loaded: Loaded, what: str) -> None:
    """Raise Damaged if a storage has two types: torch takes the first for all its tensors.

    It takes a storage without a type for one of bytes, as it saves float8 and a view of its bytes.
    """
    first: dict[str, tuple[Global, int]] = {}
    for item in loaded.persistent:
        value = item.value
        if not isinstance(value, tuple) or len(value) < 5:
            continue
        cls, key, numel = value[1], value[2], value[4]
        if not (isinstance(cls, Global) and isinstance(key, str | int) and type(numel) is int):
            continue
        cls = _OF_BYTES if cls == _UNTYPED else cls
        known = first.setdefault(str(key), (cls, numel))
        if known != (cls, numel) and numel:
            require_harmless(loaded.hostile)
            message = f"{what}: storage {key!r} is {known[0]} of {known[1]:,} to one tensor"
            raise Damaged(f"{message}, {cls} of {numel:,} to another", "storage-mismatch")


def _folder(region: Region, records: Mapping[str, ZipRecord]) -> str:
    """Return the folder of an archive's records, with a slash; CkptoolError if not torch.save's.

    There is none in an archive that was unpacked, and packed again from inside its folder.
    """
    folders = [n[: -len("data.pkl")] for n in records if f"/{n}".endswith("/data.pkl")]
    if any(name.split("/", 1)[-1] == "constants.pkl" for name in records):
        raise Unrecognized(
            f"{region.what}: a TorchScript archive (a program, not a state dict)",
            hint="in torch: torch.save(torch.jit.load(FILE).state_dict(), 'state.pt')",
        )
    if not folders and any(name.endswith("/.data/serialization_id") for name in records):
        message = f"{region.what}: torch.save failed before it wrote the object: the archive has"
        message += f" {len(records)} records but no data.pkl; nothing can be salvaged"
        raise Damaged(message, "save-incomplete", file=region.file, hint="use another checkpoint")
    if len(folders) != 1:
        raise unrecognized_zip(records, region.what)
    _require_no_twins(region, records, folders[0])
    return folders[0]


def _require_no_twins(region: Region, records: Iterable[str], folder: str) -> None:
    """Raise Damaged if torch, to which upper and lower case are one, may take another record."""
    by_name = {f"{folder}{name}".lower(): f"{folder}{name}" for name in ("byteorder", "version")}
    for name in records:
        twin = by_name.setdefault(name.lower(), name)
        if twin != name:
            message = f"{region.what}: torch may read record {name!r} in place of {twin!r}"
            raise Damaged(message)


def record_bytes(region: Region, record: ZipRecord, has_crc: bool) -> bytes:
    """Return a small record, decoded; Damaged if it is too large or does not match its checksum.

    ``has_crc`` means that its archive has checksums: without any, all are 0.
    """
    if record.size > LARGEST:
        raise Damaged(
            f"{region.what}: record {record.name!r} has {record.size:,} bytes; ckptool reads"
            f" pickles up to {LARGEST:,}"
        )
    if record.size > _MOST_INFLATED * record.stored + (1 << 20):
        raise Damaged(
            f"{region.what}: record {record.name!r} claims to inflate {record.stored:,} bytes to"
            f" {record.size:,}"
        )
    data = region.read(record.offset, record.stored)
    if record.method == DEFLATED:
        what = f"{region.what}: {record.name}"
        data = bytes(decode(data, "deflate", record.size, what=what))
    if len(data) != record.size or (has_crc and zlib.crc32(data) != record.crc32):
        message = f"{region.what}: record {record.name!r} does not match its CRC-32"
        raise Damaged(message, "crc-mismatch", file=region.file)
    return data


def _locate(region: Region, record: ZipRecord, has_crc: bool) -> StoredBytes:
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
    loaded = read_legacy_pickles(source, file, judges=False)
    *heads, content, last = loaded
    for pickle in (*heads, last):
        require_harmless(pickle.hostile)
    _require_in_value(content)
    magic, version, system, value, keys = (pickle.value for pickle in loaded)
    if magic != LEGACY_MAGIC or version != 1001 or not isinstance(system, dict):
        raise Damaged(f"{file}: not a legacy torch.save file of version 1001")
    _require_one_type(content, file)
    try:
        sizes = {s.key: s.itemsize for s in map(read_storage, content.persistent)}
    except Damaged:
        require_harmless(content.hostile)
        raise
    storages: dict[str, StoredBytes] = {}
    position = last.end
    if not isinstance(keys, list):
        raise Damaged(f"{file}: the list of storage keys after the object is missing")
    for key in map(str, keys):
        count = struct.unpack("<q", source.read(file, position, 8))[0]
        nbytes = count * sizes.get(key, 1)
        position += 8
        if count < 0 or position + nbytes > size:
            raise Damaged(
                f"{file}: storage {key} needs {nbytes:,} bytes at {position:,},"
                f" but the file has {size:,} bytes"
            )
        storages[key] = StoredBytes(file, position, nbytes, nbytes)
        position += nbytes
    # even of a machine that says ``little_endian: False``: torch writes counts and bytes swapped
    return TorchFile(file, value, storages, "little", content.end, content.hostile)


def read_legacy_pickles(source: Source, file: str, *, judges: bool = True) -> list[Loaded]:
    """Read the five pickles at the file's start.

    If it ``judges``, raises Hostile at a global that can run code.
    """

    def read(length: int) -> list[Loaded]:
        data = source.read(file, 0, length)
        pickles: list[Loaded] = []
        for _ in range(5):
            start = pickles[-1].end if pickles else 0
            pickles.append(read_pickle(data, what=file, start=start, judges=judges))
        return pickles

    return read_growing(read, source.files[file])


_T = TypeVar("_T")


def read_growing(read: Callable[[int], _T], size: int) -> _T:
    """Return ``read`` of the first of ``size`` bytes, with more of them if it ends early.

    Raises as ``read`` does; Truncated if all of them, or ``LARGEST``, are not enough.
    """
    length = min(size, _PIECE)
    while True:
        try:
            return read(length)
        except Truncated:
            if length >= min(size, LARGEST):
                raise
            length = min(size, length * 4, LARGEST)
