"""Catalog x layout -> tiles: which bytes of the source fill which range of which output file."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from ckptool.core.box import Box, is_run
from ckptool.core.casts import stored_tensors
from ckptool.core.catalog import (
    Catalog,
    Chunk,
    Computed,
    EncodedBlob,
    Place,
    TensorEntry,
    stored_places,
)
from ckptool.core.chunks import chunks_of
from ckptool.core.layout import (
    Data,
    Layout,
    Part,
    WrittenChunks,
    written_entries,
)
from ckptool.core.planning.groups import (
    Group,
    LayoutPart,
    Tile,
    group_of_rows,
    group_parts,
    is_small,
    rows_of,
    tiles_of_group,
)
from ckptool.core.sharding.coverage import coverage_problems
from ckptool.core.sharding.index import ChunkIndex
from ckptool.errors import Unsupported, damaged

_BATCH = 16
"""Files of which the parts exist at the same time, unless more are made of the same rows."""
_PIECES = 12 << 20
"""Bytes that a tile which is computed in pieces takes more than others."""


class Plan:
    """A checked pairing of a source's catalog with the layout of all of its tensors.

    Raises Damaged if the chunks of a tensor do not tile it exactly, Unsupported if two files have
    the same path.
    """

    def __init__(self, catalog: Catalog, layout: Layout) -> None:
        self.catalog = catalog
        self.layout = layout
        self.entries = list(catalog.tensors.values())
        self.numbers = {file.path: number for number, file in enumerate(layout.files)}
        self._indexes: dict[str, ChunkIndex] = {}
        self._cuts: dict[object, ChunkIndex] = {}
        if len(self.numbers) < len(layout.files):
            paths = Counter(file.path for file in layout.files)
            raise Unsupported(f"duplicate output file name {paths.most_common(1)[0][0]}")
        problems = coverage_problems(self.entries)
        if problems:
            raise damaged(
                problems,
                subject="the chunks",
                hint="a shard is missing or its metadata is wrong; see `ckptool inspect"
                " --shards NAME`, or use --drop NAME to exclude the tensor",
            )

    @property
    def read_bytes(self) -> int:
        """Bytes of all tensors, once, in the source's types."""
        stored = (tensor for entry in self.entries for tensor in stored_tensors(entry))
        return sum(tensor.elements * tensor.source_dtype.itemsize for tensor in stored)

    @property
    def compared_bytes(self) -> int:
        """Bytes of all tensors in the types that are written, for either side."""
        return 2 * sum(entry.nbytes for entry in self.entries)

    @cached_property
    def largest_blob(self) -> int:
        """Bytes of the largest blob that must be decoded completely, stored plus decoded.

        A computed tensor needs a blob of each tensor that it is computed of, and what it keeps.
        """
        return max((sum(_memory_of_tensor(entry)) for entry in self.entries), default=0)

    def batches(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """Yield files of the layout, a few at a time, whose parts are to exist together.

        Files that are made of the same rows are in one batch.
        """
        batch: list[int] = []
        for _, group in groupby(numbers, lambda number: self.layout.files[number].unit):
            unit = [*group]
            if batch and len(batch) + len(unit) > _BATCH:
                yield batch
                batch = []
            batch += unit
        if batch:
            yield batch

    def groups(self, files: Mapping[int, Sequence[Part]], limit: int) -> list[Group]:
        """Group the tensor parts of some files: those that share the rows of a tensor.

        One tensor comes after the other, whatever files its rows go to: the source is then read in
        its own order, and what a disk reads ahead is used. ``files`` are indices in the layout with
        their parts, ``limit`` the bytes of a tile.
        """
        by_tensor = defaultdict[str, dict[object, list[LayoutPart]]](lambda: defaultdict(list))
        tensors, small = self.catalog.tensors, dict[str, bool]()
        for number, parts in files.items():
            offset = 0
            for position, part in enumerate(parts):
                nbytes = part.nbytes
                if isinstance(part, Data):
                    place, name = LayoutPart(number, position, offset, part), part.name
                    if name not in small:
                        small[name] = is_small(tensors[name], limit)
                    rows = name if small[name] else rows_of(place)
                    by_tensor[name][rows].append(place)
                offset += nbytes
        return [
            group
            for name, by_rows in by_tensor.items()
            for places in by_rows.values()
            for group in self._groups(places, limit, at_once=small[name])
        ]

    def groups_of(self, name: str, table: WrittenChunks, limit: int) -> list[Group]:
        """Group the parts of one tensor as ``groups`` does for each of the ``batches``."""
        by_rows: dict[object, list[LayoutPart]] = {}
        at_once = is_small(self.catalog.tensors[name], limit)
        for at, chunk in enumerate(table):
            number = self.numbers[chunk.at.file]
            part = Data.of(name, chunk.box, table.itemsize)
            place = LayoutPart(number, at, chunk.at.offset, part)
            shared = self._batch_of[number], name if at_once else rows_of(place)
            by_rows.setdefault(shared, []).append(place)
        return [
            group
            for places in by_rows.values()
            for group in self._groups(places, limit, at_once=at_once)
        ]

    @cached_property
    def _batch_of(self) -> dict[int, int]:
        """The batch that each file is in, if one process writes all of them."""
        batches = enumerate(self.batches(range(len(self.layout.files))))
        return {number: batch for batch, numbers in batches for number in numbers}

    def _groups(self, places: list[LayoutPart], limit: int, *, at_once: bool) -> list[Group]:
        """Return the groups of parts that are written together.

        A small tensor is read ``at_once``, if as much of it is written.
        """
        entry = self.catalog.tensors[places[0].part.name]
        if not at_once:
            return group_parts(places, entry, self.index(entry), limit)
        solid = [(place, nbytes) for place in places if (nbytes := place.part.nbytes)]
        if sum([nbytes for _, nbytes in solid]) >= entry.nbytes:
            return [Group(tuple([place for place, _ in solid]), band=Box.whole(entry.shape))]
        by_rows: dict[object, list[LayoutPart]] = {}
        for place in places:
            by_rows.setdefault(rows_of(place), []).append(place)
        index = self.index(entry)
        return [
            group for parts in by_rows.values() for group in group_parts(parts, entry, index, limit)
        ]

    def jobs(self, group: Group, limit: int) -> Iterator[list[Tile]]:
        """Yield the tiles of a group by job, in order; the tiles of a job read the same rows."""
        entry = self.entry_of(group)
        return tiles_of_group(group, entry, self.index, limit)

    def entry_of(self, group: Group) -> TensorEntry:
        """Return the tensor that a group has parts of."""
        return self.catalog.tensors[group.parts[0].part.name]

    def chunks(
        self, parts: Iterable[Part], names: Container[str] | None = None
    ) -> Iterator[tuple[TensorEntry, Chunk]]:
        """Yield the chunks, with their tensors, that some parts of files are made from.

        With ``names`` only the chunks of these tensors.
        """
        for part in parts:
            if isinstance(part, Data) and (names is None or part.name in names):
                entry = self.catalog.tensors[part.name]
                index = self.index(entry)
                yield from (
                    (entry, overlap.chunk) for box, _ in part.pieces for overlap in index.find(box)
                )

    def files_with(self, entry: TensorEntry, box: Box) -> list[int]:
        """Return the files, by index in the layout, that contain part of a box."""
        written = (overlap.chunk.at for overlap in self._cut_of(entry).find(box))
        return sorted({self.numbers[at.file] for place in written for at in stored_places(place)})

    def is_cut_in_runs(self, entry: TensorEntry, box: Box) -> bool:
        """Return whether each part of a box that a chunk of the output has is one run of the box.

        A run is adjoining elements in row-major order, such as some of the rows. The chunk must
        have whole rows of the run, too: only such parts are read as runs.
        """
        return all(
            is_run(part, box) and chunk.box.shape[1:] == part.shape[1:]
            for chunk, part, _, _ in self._cut_of(entry).find(box)
        )

    def _cut_of(self, entry: TensorEntry) -> ChunkIndex:
        """Return the index of a tensor's chunks in the output; one for all that are cut alike."""
        tables = self.layout.tables
        cut: object = entry.name if tables is None else tables[entry.name].cut
        if cut not in self._cuts:
            self._cuts[cut] = ChunkIndex(self.written[entry.name])
        return self._cuts[cut]

    @cached_property
    def written(self) -> dict[str, TensorEntry]:
        """The places of tensors in the output, by name, of those that have more than one chunk."""
        cut = {entry.name: entry for entry in self.entries if not chunks_of(entry).bare}
        return written_entries(self.layout, cut)

    def cut_by_rows(self, place: LayoutPart, nbytes: int) -> Group | None:
        """Return a part as it is cut out of whole rows of its chunks, ``nbytes`` at a time.

        None if the rows are the part's own, larger than ``nbytes``, or scattered.
        """
        entry = self.catalog.tensors[place.part.name]
        return group_of_rows(place, entry, self.index(entry), nbytes)

    def index(self, entry: TensorEntry) -> ChunkIndex:
        """Return the index of a tensor's chunks, made once."""
        if entry.name not in self._indexes:
            self._indexes[entry.name] = ChunkIndex(entry)
        return self._indexes[entry.name]


class _Memory(NamedTuple):
    """Bytes that are kept to read elements, and those of a blob until it is decoded."""

    kept: int = 0
    packed: int = 0


def _memory_of_tensor(entry: TensorEntry) -> _Memory:
    """Return the memory that reading any chunk of a tensor takes at most."""
    chunks = chunks_of(entry)
    memories = () if chunks.plain else [_memory_of(chunk.at) for chunk in chunks.opened]
    return _Memory(*map(max, zip(*memories, strict=True)))


def _memory_of(at: Place) -> _Memory:
    """Return the memory that reading elements of a place takes.

    It is a decoded blob of each stored tensor, and what computing the elements keeps.
    """
    if isinstance(at, EncodedBlob):
        return _Memory(at.size, at.nbytes)
    if isinstance(at, Computed):
        memories = [_memory_of_tensor(entry) for entry in at.stored]
        nbytes = at.kept + (_PIECES if at.in_pieces else 0)
        kept, packed = zip(*memories, strict=True)
        return _Memory(nbytes + sum(kept), max(packed))
    return _Memory()
