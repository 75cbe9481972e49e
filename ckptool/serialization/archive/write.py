"""Lay out what torch.save would write, including DTensors, without torch or tensor bytes.

The archive follows torch 2.13: stored records, data aligned to 64 bytes by an ``FB`` extra field,
CRC-32 and sizes in a descriptor after the data and in the central directory, zip64 end records. Its
pickle uses protocol 2.
"""

from __future__ import annotations

import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from ckptool.core.catalog import TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.layout import FileLayout, Literal, Part, Patch
from ckptool.core.mesh import Mesh, Placement, Replicate, Shard, StridedShard
from ckptool.core.sharding.dtensor import LocalShard
from ckptool.errors import Damaged, NotFound, Unsupported
from ckptool.serialization.archive.device_mesh import MeshRecord, record_mesh
from ckptool.serialization.pickle.records import Call, Global, new_object
from ckptool.serialization.pickle.write import (
    Content,
    TensorRef,
    contiguous_strides,
    dtype_global,
    dump,
)
from ckptool.serialization.source import NearReads, Source
from ckptool.serialization.zip import (
    CENTRAL,
    CRC32_AT,
    END,
    END64,
    IN_EXTRA,
    LOCAL,
    LOCATOR64,
    STREAMED,
    Region,
    read_directory,
)

_ALIGNMENT = 64
_UTF8 = 0x800
ROOT = "archive"
"""The name of the folder of records that torch.save gives to a stream."""
_IDENTITY = ".data/serialization_id"
_OF_PICKLE = slice(20, 40)
_LARGEST_FILE = 1 << 63


def lay_out_archive(value: Any, *, root: str = ROOT) -> list[Part]:
    """Lay out a torch.save zip of ``value``, whose tensors are references."""
    data, storages = dump(value)
    return _lay_out(data, storages, root, _identity(zlib.crc32(data)))


def archive_file(
    path: str, value: Any, *, root: str | None = None, rank: int | None = None
) -> FileLayout:
    """Lay out a file that is a torch.save zip, whose records are named after it or its ``root``."""
    stem = path.rpartition("/")[2].rpartition(".")[0]
    return FileLayout(path, tuple(lay_out_archive(value, root=root or stem)), rank)


def lay_out_side(value: Any, partner: bytes) -> tuple[list[Part], str]:
    """Lay out a torch.save zip that goes with others; return its identity, too.

    ``partner`` describes the content of those; they are to name the identity.
    """
    from hashlib import sha256

    data, storages = dump(value)
    mark = int.from_bytes(sha256(partner + data).digest()[:8]) or 1
    identity = _identity(zlib.crc32(data), mark)
    return _lay_out(data, storages, ROOT, identity), identity.decode()


def _lay_out(data: bytes, storages: Iterable[Content], root: str, identity: bytes) -> list[Part]:
    archive = _Archive(root)
    archive.literal("data.pkl", data)
    archive.literal(".format_version", b"1")
    archive.literal(".storage_alignment", str(_ALIGNMENT).encode())
    archive.literal("byteorder", b"little")
    for key, content in enumerate(storages):
        archive.storage(f"data/{key}", content)
    archive.literal("version", b"3\n")
    archive.literal(_IDENTITY, identity)
    return archive.finished()


def _identity(crc: int, mark: int = 0) -> bytes:
    """Return the serialization id of an archive, from its pickle's CRC-32.

    ``mark`` is 0 unless the archive goes with others. torch (2.13) writes two hashes of 20 digits
    there: of the names, and of all CRC-32.
    """
    return f"{mark:020d}{crc:020d}".encode()


def is_written_here(source: Source, file: str) -> bool:
    """Return whether ``lay_out_archive`` or ``lay_out_side`` wrote a file, with the default root.

    False for what torch saved, or saved again, and for anything unreadable, such as a folder.
    """
    return read_identity(source, file) is not None


def read_identity(source: Source, file: str) -> str | None:
    """Return the identity of an archive with the default root; None if another program wrote it."""
    try:
        records = read_directory(Region(NearReads(source), file, 0, source.files[file]))
    except (Damaged, NotFound):
        return None
    pickle, mark = (records.get(f"{ROOT}/{name}") for name in ("data.pkl", _IDENTITY))
    expected = b"" if pickle is None else _identity(pickle.crc32)
    if mark is None or mark.stored != len(expected):
        return None
    identity = source.read(file, mark.offset, mark.stored)
    is_ours = identity.isdigit() and identity[_OF_PICKLE] == expected[_OF_PICKLE]
    return identity.decode() if is_ours else None


def is_marked(identity: str) -> bool:
    """Return whether an identity is of ``lay_out_side``: others then name it."""
    return identity[: _OF_PICKLE.start].strip("0") != ""


class _Entry(Struct, frozen=True):
    name: bytes
    offset: int
    nbytes: int
    crc: int | None
    part: int


class _Archive:
    """Collects the parts of a zip of stored records, front to back."""

    def __init__(self, root: str) -> None:
        self._root = root.encode(errors="replace").decode()  # a file's name may not be Unicode
        self._parts: list[Part] = []
        self._joined, self._patches = bytearray(), list[Patch]()
        self._position = 0
        self._entries: list[_Entry] = []

    def literal(self, name: str, data: bytes) -> None:
        self._record(name, Literal(data), zlib.crc32(data))

    def storage(self, name: str, content: Content) -> None:
        crc = zlib.crc32(content.data) if isinstance(content, Literal) else None
        self._record(name, content, crc)

    def finished(self) -> list[Part]:
        """Return all parts, with the central directory and the end records."""
        start, length = self._position, 0
        for entry in self._entries:
            central = _central_header(entry)
            patches = (self._patch(CRC32_AT, entry.part),) if entry.crc is None else ()
            self._add(Literal(central, patches))
            length += len(central)
        self._add(Literal(end_records(len(self._entries), length, start)))
        self._end_literal()
        return self._parts

    def _record(self, name: str, content: Content, crc: int | None) -> None:
        encoded = f"{self._root}/{name}".encode()
        offset, nbytes = self._position, content.nbytes
        if offset + nbytes >= _LARGEST_FILE:
            raise Unsupported(f"{name}: ends at byte {offset + nbytes:,}: no file can hold it")
        self._add(Literal(_local_header(encoded, offset, nbytes)))
        part = self._add(content)
        self._entries.append(_Entry(encoded, offset, nbytes, crc, part))
        if nbytes:
            wide = nbytes >= IN_EXTRA or offset >= IN_EXTRA
            sizes = struct.pack("<2Q" if wide else "<2L", nbytes, nbytes)
            patches = (self._patch(4, part),) if crc is None else ()
            self._add(Literal(b"PK\x07\x08" + struct.pack("<L", crc or 0) + sizes, patches))

    def _patch(self, at: int, part: int) -> Patch:
        """Return the patch of a part at a byte of the literal that is added next."""
        return Patch(at, len(self._parts) - part)

    def _add(self, part: Part) -> int:
        """Add a part, a literal to the one before it; return the number of the last other part."""
        self._position += part.nbytes
        if isinstance(part, Literal):
            begin = len(self._joined)
            self._patches += [Patch(begin + at, distance) for at, distance in part.patches]
            self._joined += part.data
        else:
            self._end_literal()
            self._parts.append(part)
        return len(self._parts) - 1

    def _end_literal(self) -> None:
        if self._joined:
            self._parts.append(Literal(bytes(self._joined), tuple(self._patches)))
        self._joined, self._patches = bytearray(), []


def _local_header(name: bytes, offset: int, nbytes: int) -> bytes:
    """Return the header of a record at ``offset``, padded so that its data is aligned."""
    wide = struct.pack("<2H2Q", 1, 16, 0, 0) if nbytes >= IN_EXTRA else b""
    size = IN_EXTRA if wide else 0
    end = offset + LOCAL.size + len(name) + len(wide) + 4
    padding = -end % _ALIGNMENT
    extra = wide + b"FB" + struct.pack("<H", padding) + b"Z" * padding
    flags = _UTF8 | STREAMED if nbytes else _UTF8
    fields = (0, flags, 0, 0, 0, 0, size, size, len(name), len(extra))
    return LOCAL.pack(b"PK\x03\x04", *fields) + name + extra


def _central_header(entry: _Entry) -> bytes:
    """Return the directory's entry of a record."""
    big, far = entry.nbytes >= IN_EXTRA, entry.offset >= IN_EXTRA
    values = [entry.nbytes, entry.nbytes] * big + [entry.offset] * far
    extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    size = IN_EXTRA if big else entry.nbytes
    flags = _UTF8 | STREAMED if entry.nbytes else _UTF8
    fields = (0, 0, flags, 0, 0, 0, entry.crc or 0, size, size, len(entry.name), len(extra))
    offset = IN_EXTRA if far else entry.offset
    return CENTRAL.pack(b"PK\x01\x02", *fields, 0, 0, 0, 0, offset) + entry.name + extra


def end_records(count: int, length: int, start: int) -> bytes:
    """Return the end of an archive whose directory has ``length`` bytes at ``start``."""
    end64 = END64.pack(b"PK\x06\x06", 44, 0x031E, 0x002D, 0, 0, count, count, length, start)
    locator = LOCATOR64.pack(b"PK\x06\x07", 0, start + length, 1)
    short, sizes = min(count, 0xFFFF), (min(length, IN_EXTRA), min(start, IN_EXTRA))
    return end64 + locator + END.pack(b"PK\x05\x06", 0, 0, short, short, *sizes, 0)


_SPEC = "torch.distributed.tensor._dtensor_spec"
_DTENSOR = Global("torch.distributed.tensor", "DTensor")
_REBUILD = Global("torch._tensor", "_rebuild_from_type_v2")
_REBUILD_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_PLACEMENTS = "torch.distributed.tensor.placement_types"

_Key = tuple[DType, tuple[int, ...], tuple[Placement, ...]]
"""Element type, shape and placements of a DTensor."""


class RankRecords:
    """Makes the records that a line of torch's versions writes for the DTensors of a rank's file.

    The mesh need not exist: a record is what ``torch.save`` writes in a job whose first groups are
    those of its one mesh. Hashes are left to be recomputed, as torch does if it finds None: a
    recorded one would be wrong in another process. All DTensors share one record of the mesh, and
    those that differ only in their values (a layer's and the next one's, a weight's and its
    moments') share everything else, as torch's operators do.
    """

    def __init__(self, mesh: Mesh, rank: int, how: MeshRecord = MeshRecord.AXES) -> None:
        self._mesh = record_mesh(mesh, rank, how)
        self._has_order = how is not MeshRecord.RANKS
        self._layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        self._device = Call(Global("torch", "device"), ("cpu",))
        self._records: dict[_Key, tuple[tuple[Any, ...], Call]] = {}

    def dtensor(
        self, entry: TensorEntry, shard: LocalShard, placements: tuple[Placement, ...]
    ) -> Call:
        """Return the call that rebuilds this rank's share of a tensor."""
        key = (entry.dtype, entry.shape, placements)
        if key not in self._records:
            self._records[key] = self._wrapper(*key[:2]), self._spec(*key)
        wrapper, spec = self._records[key]
        state = {"_local_tensor": TensorRef.of_shard(entry, shard), "_spec": spec}
        return Call(_REBUILD, (_REBUILD_WRAPPER, _DTENSOR, wrapper, (None, state)))

    def _wrapper(self, dtype: DType, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the arguments that create the DTensor itself, which has no values."""
        strides = contiguous_strides(shape)
        return (_DTENSOR, dtype_global(dtype), shape, strides, 0, self._layout, self._device, False)

    def _spec(
        self, dtype: DType, shape: tuple[int, ...], placements: tuple[Placement, ...]
    ) -> Call:
        """Return a ``DTensorSpec`` in the state that its ``__post_init__`` leaves."""
        strided = any(isinstance(item, StridedShard) for item in placements)
        size = Call(Global("torch", "Size"), (shape,))
        meta = (size, contiguous_strides(shape), dtype_global(dtype))
        order: dict[str, Any] = {
            "shard_order": None if strided else _default_order(placements, len(shape)),
            "use_strided_shard_as_shard_order": strided,
        }
        return new_object(
            Global(_SPEC, "DTensorSpec"),
            mesh=self._mesh,
            placements=tuple(_placement(item, len(shape)) for item in placements),
            tensor_meta=Call(Global(_SPEC, "TensorMeta"), meta, is_new=True),
            **(order if self._has_order else {}),
            _hash=None,
        )


def _placement(item: Placement, rank: int) -> Call:
    """Return the record of a placement; its dim counts from the front, as torch records it."""
    if isinstance(item, Shard):
        return new_object(Global(_PLACEMENTS, "Shard"), dim=item.dim % rank)
    if isinstance(item, StridedShard):
        cls = Global(_PLACEMENTS, "_StridedShard")
        return new_object(cls, dim=item.dim % rank, split_factor=item.split_factor)
    if isinstance(item, Replicate):
        return new_object(Global(_PLACEMENTS, "Replicate"))
    raise Unsupported(f"{item}: values that are partial sums cannot be written")


def _default_order(placements: Sequence[Placement], rank: int) -> tuple[Call, ...]:
    """Return the cuts of each tensor dim from left to right (``compute_default_shard_order``)."""
    by_dim: dict[int, list[int]] = defaultdict(list)
    for mesh_dim, item in enumerate(placements):
        if isinstance(item, Shard):
            by_dim[item.dim % rank].append(mesh_dim)
    cls = Global(_SPEC, "ShardOrderEntry")
    return tuple(Call(cls, (dim, tuple(by_dim[dim])), is_new=True) for dim in sorted(by_dim))
