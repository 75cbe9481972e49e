"""Lay out a DCP folder as torch 2.13 writes it: one ``.distcp`` file a rank, then ``.metadata``.

A checkpoint may be cut into millions of chunks. So an archive's frame is made once for each
element type and chunk shape, and a file's parts are put together only when the file is written.
Of the records of ``.metadata``, classes, names and sizes are pickled once and fetched from the
memo, and a record is a few joined byte strings. torch 2.4 to 2.13 load it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Index, ObjectEntry, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import Data, FileLayout, Layout, Literal, Part
from ckptool.core.selection import keep_names, root_problem, with_loadable_paths
from ckptool.formats.base import Request
from ckptool.formats.lightning import split_meta
from ckptool.formats.writing import WriterAssignment, lay_out_companions, note_tied
from ckptool.serialization.archive.write import lay_out_archive, offset_parts
from ckptool.serialization.pickle.write import TensorRef
from ckptool.serialization.state_dict.values import NUMPY, UNREAD_TENSOR, Foreign

_METADATA = "torch.distributed.checkpoint.metadata"
_BATCH = 1000
_ITS_OWN = {UNREAD_TENSOR, NUMPY}
_END = pickle.SETITEMS + pickle.BUILD


class _WrittenAt(NamedTuple):
    """Where a chunk or a value was put: ``length`` bytes of ``file`` from ``offset``."""

    file: str
    offset: int
    length: int


_WrittenTensor = tuple[TensorEntry, list[tuple[Box, _WrittenAt]]]
_WrittenValue = tuple[ObjectEntry, _WrittenAt]


def lay_out(catalog: Catalog, request: Request) -> Layout:
    """Lay out a DCP folder: cut for the request's mesh, or in the source's own chunks."""
    classes = Foreign()
    made_of = {name: classes.of(entry.value) for name, entry in catalog.objects.items()}
    foreign = sorted({name for names in made_of.values() for name in names} - _ITS_OWN)
    catalog = keep_names(catalog, lambda name: UNREAD_TENSOR not in made_of.get(name, ()))
    catalog, beside = split_meta(catalog)
    changed_root = root_problem(catalog)
    catalog = with_loadable_paths(catalog)
    files: dict[int, _RankData] = {}

    def file_of(rank: int) -> _RankData:
        if rank not in files:
            files[rank] = _RankData(f"__{rank}_0.distcp")
        return files[rank]

    values = [(entry, file_of(0).add_value(entry)) for entry in catalog.objects.values()]
    assignment = WriterAssignment(request)
    tensors = []
    for entry in catalog.tensors.values():
        boxes = assignment.boxes(entry)
        tensors.append(
            (entry, [(box, file_of(rank).add_chunk(entry, box)) for box, rank in boxes.items()])
        )
    layouts = [*lay_out_companions(catalog), *beside]
    layouts += [
        FileLayout.lazy(files[rank].name, files[rank].nbytes, files[rank].parts, rank)
        for rank in sorted(files)
    ]
    metadata = _MetadataPickler().dump(tensors, values)
    layouts.append(FileLayout(".metadata", (Literal(metadata),)))
    notes = [*([changed_root] if changed_root else []), *note_tied(catalog)]
    if foreign:
        notes.append(f"carried as they are, for those who trust the source: {', '.join(foreign)}")
    return Layout(tuple(layouts), folder=True, notes=tuple(notes))


@dataclass(slots=True)
class _RankData:
    """One rank's data file: values in full, then chunks of tensors by name."""

    name: str
    values: list[Part] = field(default_factory=list)
    chunks: list[tuple[TensorEntry, Box]] = field(default_factory=list)
    nbytes: int = 0

    def add_value(self, entry: ObjectEntry) -> _WrittenAt:
        """Append a value; must come before any chunk."""
        parts = lay_out_archive(entry.value)
        self.values += offset_parts(parts, len(self.values))
        return self._append(sum(part.nbytes for part in parts))

    def add_chunk(self, entry: TensorEntry, box: Box) -> _WrittenAt:
        """Append a chunk of a tensor."""
        self.chunks.append((entry, box))
        return self._append(_frame(entry.dtype.name, box.shape)[1])

    def _append(self, nbytes: int) -> _WrittenAt:
        span = _WrittenAt(self.name, self.nbytes, nbytes)
        self.nbytes += nbytes
        return span

    def parts(self) -> tuple[Part, ...]:
        """Return all parts of the file, made anew."""
        parts = list(self.values)
        for entry, box in self.chunks:
            frame, _ = _frame(entry.dtype.name, box.shape)
            parts += [
                Data(entry.name, box, part.itemsize) if isinstance(part, Data) else part
                for part in offset_parts(frame, len(parts))
            ]
        return tuple(parts)


@lru_cache(maxsize=4096)
def _frame(dtype: str, shape: tuple[int, ...]) -> tuple[list[Part], int]:
    """Return the archive of one tensor, whatever tensor it is, and its bytes."""
    stand_in = TensorEntry("", (), BY_NAME[dtype], shape, ())
    parts = lay_out_archive(TensorRef.whole(stand_in))
    return parts, sum(part.nbytes for part in parts)


class _MetadataPickler:
    """Write opcodes of protocol 4. A method that returns bytes returns what pushes a value."""

    def __init__(self) -> None:
        self._head: list[bytes] = [pickle.PROTO + b"\x04"]
        self._memo: dict[object, bytes] = {}
        self._sizes: dict[tuple[int, ...], bytes] = {}
        self._files: dict[str, bytes] = {}

    def dump(self, tensors: list[_WrittenTensor], values: list[_WrittenValue]) -> bytes:
        state = {
            "state_dict_metadata": self._dict(self._entries(tensors, values)),
            "planner_data": self._dict(self._paths(tensors, values)),
            "storage_data": self._dict(self._storage(tensors, values)),
            "storage_meta": pickle.NONE,
            "version": self._text("1.0.0"),
        }
        body = self._object(_METADATA, "Metadata", **state)
        return b"".join([*self._head, body, pickle.STOP])

    def _entries(
        self, tensors: list[_WrittenTensor], values: list[_WrittenValue]
    ) -> Iterable[tuple[bytes, bytes]]:
        for entry, chunks in tensors:
            yield (
                self._text(entry.name),
                self._object(
                    _METADATA,
                    "TensorStorageMetadata",
                    properties=self._properties(entry.dtype.name),
                    size=self._size(entry.shape),
                    chunks=self._chunks(box for box, _ in chunks),
                ),
            )
        nothing = self._global(_METADATA, "BytesStorageMetadata")
        for value, _ in values:
            yield self._text(value.name), nothing + pickle.EMPTY_TUPLE + pickle.NEWOBJ

    def _chunks(self, boxes: Iterable[Box]) -> bytes:
        begin = self._begin(_METADATA, "ChunkStorageMetadata") + self._text("offsets")
        sizes = self._text("sizes")
        chunks = [begin + self._size(b.lo) + sizes + self._size(b.shape) + _END for b in boxes]
        return pickle.EMPTY_LIST + pickle.MARK + b"".join(chunks) + pickle.APPENDS

    def _properties(self, dtype: str) -> bytes:
        layout = self._call("torch.serialization", "_get_layout", self._text("torch.strided"))
        encoding = self._call(_METADATA, "_MEM_FORMAT_ENCODING", _integer(0))
        fields = (
            self._global("torch", dtype),
            layout,
            pickle.NEWFALSE,
            encoding,
            pickle.NEWFALSE,
        )
        state = pickle.MARK + b"".join(fields) + pickle.TUPLE
        cls = self._global(_METADATA, "TensorProperties")
        return cls + pickle.EMPTY_TUPLE + pickle.NEWOBJ + state + pickle.BUILD

    def _paths(
        self, tensors: list[_WrittenTensor], values: list[_WrittenValue]
    ) -> Iterable[tuple[bytes, bytes]]:
        """Pickle the path of each name, which torch's loader must be able to rebuild."""
        entries: list[TensorEntry | ObjectEntry] = [entry for entry, _ in tensors]
        entries += [entry for entry, _ in values]
        for entry in entries:
            steps = b"".join(
                _integer(step.position) if isinstance(step, Index) else self._text(str(step))
                for step in entry.path
            )
            yield self._text(entry.name), pickle.MARK + steps + pickle.TUPLE

    def _storage(
        self, tensors: list[_WrittenTensor], values: list[_WrittenValue]
    ) -> Iterable[tuple[bytes, bytes]]:
        for value, span in values:
            key = self._object(
                _METADATA, "MetadataIndex", fqn=self._text(value.name), index=pickle.NONE
            )
            yield key, self._storage_info(span)
        for entry, chunks in tensors:
            head = self._begin(_METADATA, "MetadataIndex") + self._text("fqn")
            head += self._text(entry.name) + self._text("index")
            offset_key = self._text("offset")
            for number, (box, span) in enumerate(chunks):
                key = head + _integer(number) + offset_key + self._size(box.lo) + _END
                yield key, self._storage_info(span)

    def _storage_info(self, span: _WrittenAt) -> bytes:
        file, offset, length = span
        ends = _integer(offset) + self._text("length") + _integer(length) + _END
        if file not in self._files:
            begin = self._begin("torch.distributed.checkpoint.filesystem", "_StorageInfo")
            path = self._text("relative_path") + self._text(file)
            self._files[file] = begin + path + self._text("offset")
        return self._files[file] + ends

    # Building blocks

    def _object(self, module: str, name: str, **fields: bytes) -> bytes:
        state = [self._text(key) + value for key, value in fields.items()]
        return b"".join([self._begin(module, name), *state, _END])

    def _begin(self, module: str, name: str) -> bytes:
        """Begin an object of a class, up to the fields of its state; ``_END`` ends it."""
        made = pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK
        return self._global(module, name) + made

    def _call(self, module: str, name: str, argument: bytes) -> bytes:
        return self._global(module, name) + argument + pickle.TUPLE1 + pickle.REDUCE

    def _dict(self, pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
        items = [key + value for key, value in pairs]
        batches = [
            pickle.MARK + b"".join(items[start : start + _BATCH]) + pickle.SETITEMS
            for start in range(0, len(items), _BATCH)
        ]
        return b"".join([pickle.EMPTY_DICT, *batches])

    def _size(self, shape: tuple[int, ...]) -> bytes:
        if shape not in self._sizes:
            sizes = pickle.MARK + b"".join(map(_integer, shape)) + pickle.TUPLE
            self._sizes[shape] = self._call("torch", "Size", sizes)
        return self._sizes[shape]

    def _global(self, module: str, name: str) -> bytes:
        if (module, name) not in self._memo:
            push = self._text(module) + self._text(name) + pickle.STACK_GLOBAL
            self._remember((module, name), push)
        return self._memo[module, name]

    def _text(self, text: str) -> bytes:
        if text not in self._memo:
            encoded = text.encode("utf-8", "surrogatepass")
            self._remember(text, pickle.BINUNICODE + len(encoded).to_bytes(4, "little") + encoded)
        return self._memo[text]

    def _remember(self, value: object, push: bytes) -> None:
        """Pickle a value at the head of the file, off the stack, to be fetched from the memo."""
        self._memo[value] = pickle.LONG_BINGET + len(self._memo).to_bytes(4, "little")
        self._head += [push, pickle.MEMOIZE, pickle.POP]


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 16:
        return pickle.BININT2 + value.to_bytes(2, "little")
    if 0 <= value < 1 << 31:
        return pickle.BININT + value.to_bytes(4, "little")
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return pickle.LONG1 + bytes([len(encoded)]) + encoded
