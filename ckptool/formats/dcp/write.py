"""Lay out a DCP folder as torch 2.13 writes it: one ``.distcp`` file a rank, then ``.metadata``.

A checkpoint may be cut into millions of chunks. So an archive's frame is made once for each
element type and chunk shape, and a file's parts are put together only when the file is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, ObjectEntry, TensorEntry
from ckptool.core.dtype import BY_NAME
from ckptool.core.layout import Data, FileLayout, Layout, Literal, Part
from ckptool.core.rewrite import root_problem, with_loadable_paths
from ckptool.formats.base import Request
from ckptool.formats.dcp.metadata_write import (
    WrittenChunk,
    WrittenTensor,
    WrittenValue,
    metadata_pickle,
)
from ckptool.formats.writing import WriterAssignment, companion_files, tied_notes
from ckptool.serialization.archive.write import offset_parts, torch_archive
from ckptool.serialization.pickle.write import TensorRef
from ckptool.serialization.state_dict.values import NUMPY, UNREAD_TENSOR, Foreign


@dataclass(slots=True)
class _File:
    """One rank's data file: values in full, then chunks of tensors by name."""

    name: str
    values: list[Part] = field(default_factory=list)
    chunks: list[tuple[TensorEntry, Box]] = field(default_factory=list)
    nbytes: int = 0

    def add_value(self, entry: ObjectEntry) -> WrittenValue:
        """Append a value; must come before any chunk."""
        parts = torch_archive(entry.value)
        self.values += offset_parts(parts, len(self.values))
        offset, nbytes = self.nbytes, _length(parts)
        self.nbytes = offset + nbytes
        return WrittenValue(entry.name, entry.path, self.name, offset, nbytes)

    def add_chunk(self, entry: TensorEntry, box: Box) -> WrittenChunk:
        """Append a chunk of a tensor."""
        self.chunks.append((entry, box))
        offset, nbytes = self.nbytes, _frame(entry.dtype.name, box.shape).nbytes
        self.nbytes = offset + nbytes
        return WrittenChunk(box, self.name, offset, nbytes)

    def parts(self) -> tuple[Part, ...]:
        """All parts of the file, made anew."""
        return tuple(self._parts())

    def _parts(self) -> Iterator[Part]:
        yield from self.values
        count = len(self.values)
        for entry, box in self.chunks:
            for part in _frame(entry.dtype.name, box.shape).filled(entry, box, count):
                yield part
                count += 1


@dataclass(frozen=True, slots=True)
class _Frame:
    """The archive of one tensor, whatever tensor it is."""

    parts: tuple[Part, ...]
    nbytes: int

    def filled(self, entry: TensorEntry, box: Box, before: int) -> Iterator[Part]:
        """The parts for one tensor, when ``before`` parts precede them in the file."""
        for part in offset_parts(list(self.parts), before):
            yield Data(entry.name, box, part.itemsize) if isinstance(part, Data) else part


@lru_cache(maxsize=4096)
def _frame(dtype: str, shape: tuple[int, ...]) -> _Frame:
    stand_in = TensorEntry("", (), BY_NAME[dtype], shape, ())
    parts = tuple(torch_archive(TensorRef(stand_in, Box.whole(shape))))
    return _Frame(parts, _length(parts))


def _length(parts: list[Part] | tuple[Part, ...]) -> int:
    return sum(part.nbytes for part in parts)


def lay_out(catalog: Catalog, request: Request) -> Layout:
    """The files of a DCP folder: cut for the request's mesh, or in the source's own chunks."""
    changed_root = root_problem(catalog)
    catalog = with_loadable_paths(catalog)
    files: dict[int, _File] = {}

    def file_of(rank: int) -> _File:
        if rank not in files:
            files[rank] = _File(f"__{rank}_0.distcp")
        return files[rank]

    known = Foreign()
    values = [
        file_of(0).add_value(entry)
        for entry in catalog.objects.values()
        if UNREAD_TENSOR not in known.of(entry.value)
    ]
    names = {name for entry in catalog.objects.values() for name in known.of(entry.value)}
    foreign = sorted(names - {UNREAD_TENSOR, NUMPY})
    assignment = WriterAssignment(request)
    tensors = []
    for entry in catalog.tensors.values():
        boxes = assignment.boxes(entry)
        chunks = [file_of(rank).add_chunk(entry, box) for box, rank in boxes.items()]
        tensors.append(WrittenTensor(entry, chunks))
    layouts = companion_files(catalog)
    layouts += [
        FileLayout.lazy(files[rank].name, files[rank].nbytes, files[rank].parts, rank)
        for rank in sorted(files)
    ]
    layouts.append(FileLayout(".metadata", (Literal(metadata_pickle(tensors, values)),)))
    notes = [*([changed_root] if changed_root else []), *tied_notes(catalog)]
    if foreign:
        notes.append(f"carried as they are, for those who trust the source: {', '.join(foreign)}")
    return Layout(tuple(layouts), folder=True, notes=tuple(notes))
