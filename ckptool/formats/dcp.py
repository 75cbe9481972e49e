"""torch.distributed.checkpoint folders: ``.metadata`` and ``__{rank}_{n}.distcp`` files.

Read: torch 2.1 to 2.13, by any writer that keeps to it (FSDP1 and 2, torchtitan, Lightning with its
``meta.pt``, nvidia-resiliency-ext), several files a rank, one file an item, zstd stream
extension, and saves without collectives (one ``__{rank}.metadata`` a rank). Each item is a
torch.save archive of one chunk or one value. Written: as torch 2.13 does, one file a rank.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise

from ckptool.core.box import Box
from ckptool.core.catalog import (
    UNREAD,
    Catalog,
    Chunk,
    Extent,
    Item,
    ObjectEntry,
    Packed,
    Path,
    Place,
    TensorEntry,
    merge_copies,
    places,
)
from ckptool.core.view import part_of_place
from ckptool.errors import UNCODED, CkptoolError, Damaged, Problem, coded, damaged
from ckptool.formats import _dcp_metadata
from ckptool.formats._archives import item_region
from ckptool.formats._assemble import assemble
from ckptool.formats._dcp_metadata import DcpMetadata, TensorMetadata
from ckptool.formats._flat_params import HINT, is_flat, members_of, taken_apart
from ckptool.formats._frameworks import framework_info, with_tensor_parallelism
from ckptool.formats._infer import with_inferred_mesh
from ckptool.formats._leaves import Assembled, Leaf, PlainLeaf, read_leaves
from ckptool.formats._storage import place_of, plain_tensor
from ckptool.formats._torch_file import TorchFile, is_zip, read_torch_file, read_torch_zip
from ckptool.formats._values import type_name
from ckptool.formats.base import (
    Format,
    ScanOptions,
    Source,
    expect_edges,
    first_missing,
    read_metadata,
    require,
    require_rank,
)
from ckptool.formats.torch_save import unread_notes

_METADATA = ".metadata"
_RANK_METADATA = re.compile(r"__([0-9]{1,9})\.metadata")
_DATA = re.compile(r"[^/]*?__([0-9]{1,9})_([0-9]+)\.distcp")
_LIGHTNING = "meta.pt"
_ZSTD = "stream.zstd/1"


def _probe(source: Source) -> bool:
    names = [name for name in source.files if "/" not in name]
    return any(
        name in (_METADATA, f"{_METADATA}.tmp")
        or name.endswith(".distcp")
        or _RANK_METADATA.fullmatch(name)
        for name in names
    )


@dataclass(slots=True)
class _Found:
    """What the metadata files say together, before it is a catalog."""

    types: dict[str, TensorMetadata] = field(default_factory=dict)
    chunks: dict[str, list[Chunk]] = field(default_factory=lambda: defaultdict(list))
    values: dict[str, list[tuple[int, Item]]] = field(default_factory=lambda: defaultdict(list))
    paths: dict[str, Path] = field(default_factory=dict)
    extents: list[tuple[str, int, int, str]] = field(default_factory=list)
    archives: list[Item] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, ObjectEntry] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, more: Assembled) -> None:
        self.problems += [*more.problems, *more.conflicts.values()]
        self.problems += [
            Problem(f"{name}: a tensor, and one inside another value", tensor=name)
            for name in more.tensors.keys() & self.tensors.keys()
        ]
        self.notes += more.notes
        self.tensors |= more.tensors
        self.objects |= more.objects


def _scan(source: Source, options: ScanOptions) -> Catalog:
    catalog, _ = read_folder(source, options, values=options.values)
    return _apart(source, with_inferred_mesh(catalog), options)


def scan_folder(source: Source, options: ScanOptions) -> Catalog:
    """What the metadata of a folder that is laid out as DCP does says."""
    return with_tensor_parallelism(with_inferred_mesh(read_folder(source, options)[0]))


def read_folder(
    source: Source, options: ScanOptions, *, values: bool = True
) -> tuple[Catalog, dict[str, DcpMetadata]]:
    """The catalog of a DCP folder, with no mesh yet, and its metadata files as they were read.

    Without ``values`` nothing is read but metadata: values are ``UNREAD``.
    """
    found = _Found()
    parsed = _metadata_files(source, options)
    for file, metadata in parsed.items():
        _collect(source, file, metadata, found)
    found.problems += _shared_bytes(found.extents)
    found.problems += [
        Problem(
            f"{name}: a tensor in one rank's metadata, a value in another's",
            "ranks-disagree",
            tensor=name,
        )
        for name in found.values
        if name in found.types
    ]
    options.report(found.problems, subject=source.root, hint=_HINT)
    found.problems = []
    for name, entry in found.types.items():
        path = found.paths.get(name, (name,))
        chunks = merge_copies(found.chunks[name])
        found.tensors[name] = TensorEntry(name, path, entry.dtype, entry.shape, chunks)
    if not values and found.values:
        _leave_unread(found)
    held = [item for items in found.values.values() for _, item in items]
    expect_edges(source, ((item.file, item.offset, item.nbytes) for item in held))
    for name, items in found.values.items():
        path = found.paths.get(name, (name,))
        found.add(options.attempt(partial(_read_values, source, name, items, path)) or Assembled())
    if _LIGHTNING in source.files:
        found.add(options.attempt(partial(_read_lightning, source)) or Assembled())
    options.report(found.problems, subject=source.root, hint=_HINT)
    return _catalog(source, parsed, found), parsed


def _leave_unread(found: _Found) -> None:
    for name in found.values:
        path = found.paths.get(name, (name,))
        found.objects[name] = ObjectEntry(name, path, UNREAD)
    found.notes.append(
        f"{len(found.values):,} values lie among the data and were not read; --values reads them"
    )
    found.values.clear()


def _apart(source: Source, catalog: Catalog, options: ScanOptions) -> Catalog:
    """The catalog with FSDP1's flat parameters taken apart, or a note that they are there."""
    flats = {name: entry for name, entry in catalog.tensors.items() if is_flat(name)}
    if not flats:
        return catalog
    if not options.flat_params:
        note = f"FSDP1 flat parameters stay as they are ({', '.join(flats)}); {HINT}"
        return replace(catalog, notes=(*catalog.notes, note))
    tensors = {name: e for name, e in catalog.tensors.items() if name not in flats}
    members = members_of(flats, options.flat_params)
    for name, entry in locate(source, catalog.with_tensors(flats)).tensors.items():
        tensors |= {part.name: part for part in taken_apart(entry, members[name])}
    return with_inferred_mesh(replace(catalog, tensors=tensors, mesh=None))


_HINT = "the save was interrupted, or files were lost or mixed with those of another save"


def _metadata_files(source: Source, options: ScanOptions) -> dict[str, DcpMetadata]:
    names = [name for name in source.files if _RANK_METADATA.fullmatch(name)]
    if _METADATA in source.files:
        names = [_METADATA]
    if not names:
        left = f"{_METADATA}.tmp"
        state = f"only {left} is there" if left in source.files else f"there is no {_METADATA}"
        message = (
            f"{source.root}: a DCP folder whose save never finished: {state}; nothing else names"
            f" what its data files hold ({_data_files(source)})"
        )
        raise Damaged(
            Problem(message, "save-unfinished"),
            hint="take the checkpoint before it; .metadata is written last, once all data is safe",
        )
    names.sort(key=lambda name: [int(n) for n in re.findall("[0-9]+", name)])
    _require_ranks(source)
    if names == [_METADATA]:
        return {_METADATA: _parsed(source, _METADATA)}
    problems = _missing_ranks([int(name[2:].partition(".")[0]) for name in names], source)
    options.report(problems, subject=source.root)
    found = {name: options.attempt(partial(_parsed, source, name)) for name in names}
    return {name: parsed for name, parsed in found.items() if parsed is not None}


def _data_files(source: Source) -> str:
    """How many data files there are, of which ranks as far as names say, and their bytes."""
    sizes = {name: size for name, size in source.files.items() if name.endswith(".distcp")}
    ranks = {int(match[1]) for name in sizes if (match := _DATA.fullmatch(name))}
    empty = sum(not size for size in sizes.values())
    words = [f"{len(sizes):,} files", f"{len(ranks):,} ranks", f"{sum(sizes.values()):,} bytes"]
    return ", ".join([*words, f"{empty:,} files empty"] if empty else words)


def _parsed(source: Source, file: str) -> DcpMetadata:
    return _dcp_metadata.parse(read_metadata(source, file), file)


def _require_ranks(source: Source) -> None:
    for name in source.files:
        match = _DATA.fullmatch(name) or _RANK_METADATA.fullmatch(name)
        if match:
            require_rank(int(match[1]), name)


def _missing_ranks(ranks: list[int], source: Source) -> list[Problem]:
    seen = {int(m[1]) for name in source.files if (m := _DATA.fullmatch(name))}
    missing = first_missing(set(ranks), max([*ranks, *seen]) + 1)
    if not missing:
        return []
    message = f"{source.root}: __{missing[0]}.metadata is missing (ranks {missing})"
    return [Problem(message, "rank-missing")]


def _collect(source: Source, file: str, metadata: DcpMetadata, found: _Found) -> None:
    found.paths |= metadata.paths
    used: set[tuple[str, tuple[int, ...] | None]] = set()
    for name, entry in metadata.tensors.items():
        known = found.types.setdefault(name, entry)
        if (known.dtype, known.shape) != (entry.dtype, entry.shape):
            message = f"{name}: {file} says {entry.dtype} {list(entry.shape)}, another"
            message += f" {known.dtype} {list(known.shape)}"
            found.problems.append(Problem(message, "ranks-disagree", file=file, tensor=name))
        for box in entry.chunks:
            spot = name, box.lo
            item = metadata.items.get(spot)
            if item is None:
                message = f"{name}: chunk {box} has no data ({file} says where of none)"
                found.problems.append(Problem(message, "data-missing", file=file, tensor=name))
                continue
            used.add(spot)
            _has_its_bytes(source, file, name, item, found)
            found.chunks[name].append(Chunk(box, item, _rank_of(item.file)))
    for name in metadata.bytes_names:
        item = metadata.items.get((name, None))
        if item is None:
            message = f"{name}: has no data ({file} does not say where it lies)"
            found.problems.append(Problem(message, "data-missing", file=file, tensor=name))
            continue
        used.add((name, None))
        if _has_its_bytes(source, file, name, item, found):
            found.values[name].append((_rank_of(item.file) or 0, item))
        else:
            message = f"{name}: a value whose data in {item.file} is lost"
            found.problems.append(Problem(message, "data-missing", file=item.file, tensor=name))
    for name, offset in metadata.items.keys() - used:
        message = f"{name}: {file} stores an item at {offset} that no chunk claims"
        found.problems.append(Problem(message, "data-unclaimed", file=file, tensor=name))


def _has_its_bytes(source: Source, file: str, name: str, item: Item, found: _Found) -> bool:
    """Whether an item can be opened as an archive; where not, it is noted why."""
    found.extents.append((item.file, item.offset, item.nbytes, name))
    size = source.files.get(item.file)
    is_read = not item.transforms or set(item.transforms) == {_ZSTD}
    if size and item.offset + item.nbytes <= size and is_read:
        found.archives.append(item)
        return True
    problem = _why_lost(source, file, name, item)
    is_of_file = problem.tensor is None
    if not (is_of_file and item.file in found.lost):
        found.problems.append(problem)
    if is_of_file:
        found.lost.add(item.file)
    return False


def _why_lost(source: Source, file: str, name: str, item: Item) -> Problem:
    """Why an item cannot be opened; one of no tensor is about the whole file."""
    try:
        size = require(source, item.file, wanted_by=file)
    except Damaged as error:
        return error.message
    if not size:
        message = f"{item.file}: the file is empty (0 bytes); {file} puts {name} into it"
        return Problem(message, "file-empty", file=item.file)
    end = item.offset + item.nbytes
    if end > size:
        message = f"{name}: {file} puts it at bytes {item.offset:,} to"
        message += f" {end:,} of {item.file}, which has {size:,} bytes"
        return Problem(message, "file-truncated", file=item.file, tensor=name)
    unknown = [step for step in item.transforms if step != _ZSTD]
    message = f"{name}: stored through {unknown[0]!r}, which ckptool cannot undo"
    return Problem(message, "transform-unknown", file=item.file, tensor=name)


def _shared_bytes(extents: list[tuple[str, int, int, str]]) -> list[Problem]:
    problems: list[Problem] = []
    extents.sort()
    for (file, offset, length, name), (next_file, next_offset, _, other) in pairwise(extents):
        if next_offset < offset + length and file == next_file:
            message = f"{other}: begins at byte {next_offset:,} of {file}, inside the item of"
            message += f" {name} ({offset:,} to {offset + length:,})"
            problems.append(Problem(message, "items-overlap", file=file, tensor=other))
    return problems


@lru_cache(maxsize=4096)
def _rank_of(file: str) -> int | None:
    match = _DATA.fullmatch(file)
    return int(match[1]) if match else None


# Values


@dataclass(frozen=True, slots=True)
class _Opened:
    """The torch.save archive of one item; ``size`` is that of the decoded item in bytes."""

    file: TorchFile
    item: Item
    size: int

    def place(self, inner: Place) -> Place:
        """Where a tensor of the archive lies, seen from the folder."""
        if not self.item.transforms:
            return inner
        if not isinstance(inner, Extent):
            raise Damaged(f"{self.item.file}: a compressed record inside a compressed item")
        item = self.item
        return Packed(
            item.file, item.offset, item.nbytes, "zstd", self.size, inner.offset, inner.strides,
            inner.ops, inner.record,
        )  # fmt: skip


_LARGEST_VALUE = 1 << 26
_EDGE = 1 << 16
_OVERHEAD = 1 << 20


def _open(source: Source, item: Item, what: str, limit: int, edge: int) -> _Opened:
    """Open the archive of one item.

    One that is packed is decoded, to ``limit`` bytes at most; the first and last ``edge`` of them
    are kept.
    """
    region = item_region(source, item, what, limit, edge)
    head = region.read(0, min(region.nbytes, 9))
    if not item.transforms and not is_zip(head):
        kind = (
            " (safetensors data, which torch itself cannot read back)" if head[8:] == b"{" else ""
        )
        message = f"{what}: no torch.save archive at byte {item.offset:,} of {item.file}{kind}"
        raise Damaged(Problem(message, "item-mismatch", file=item.file))
    return _Opened(read_torch_zip(region), item, region.nbytes)


def _read_values(source: Source, name: str, items: list[tuple[int, Item]], path: Path) -> Assembled:
    """Read a bytes item, of one rank or of each. Tensors inside become tensors of their own."""
    ranks: dict[int, dict[str, Leaf]] = {}
    for rank, item in items:
        with coded(UNCODED, tensor=name):
            opened = _open(source, item, name, _LARGEST_VALUE, _LARGEST_VALUE)
            leaves = read_leaves(opened.file, source, prefix=path)
        if any(isinstance(leaf.value, PlainLeaf) for leaf in leaves.values()):
            ranks[rank] = {n: _placed(leaf, opened) for n, leaf in leaves.items()}
        else:
            ranks[rank] = {name: Leaf(path, opened.file.value)}
    return assemble(ranks)


def _placed(leaf: Leaf, opened: _Opened) -> Leaf:
    if not isinstance(leaf.value, PlainLeaf):
        return leaf
    return replace(leaf, value=replace(leaf.value, place=opened.place(leaf.value.place)))


def _read_lightning(source: Source) -> Assembled:
    """Lightning's ``meta.pt``, a family of its own beside the DCP files."""
    file = read_torch_file(source, _LIGHTNING)
    return assemble({0: read_leaves(file, source, prefix=("meta",))})


def _catalog(source: Source, parsed: dict[str, DcpMetadata], found: _Found) -> Catalog:
    used = {file for file, _, _, _ in found.extents} | set(parsed) | {_LIGHTNING}
    data = [name for name in source.files if _DATA.fullmatch(name)]
    stale = [name for name in data if name not in used and source.files[name]]
    ranks = {int(m[1]) for name in data if name not in stale and (m := _DATA.fullmatch(name))}
    planned = max((len(m.plans or ()) for m in parsed.values()), default=0)
    notes = [
        Problem(f"{name} is named by no metadata (left by another save)", "file-extra", file=name)
        for name in stale
    ]
    notes += [
        Problem(
            f"{name} is not read: {_METADATA} is there too, of another save",
            "file-extra",
            file=name,
        )
        for name in source.files
        if _RANK_METADATA.fullmatch(name) and name not in parsed and _METADATA in parsed
    ]
    version = next((m.version for m in parsed.values() if m.version), None)
    lightning = _LIGHTNING in source.files
    info = {"writer": "Lightning" if lightning else "torch.distributed.checkpoint"}
    info |= {"metadata version": version} if version else {}
    return Catalog(
        "dcp",
        found.tensors,
        found.objects,
        {name: source.files[name] for name in source.files if name in used or name in data},
        world_size=max([planned, *(rank + 1 for rank in ranks)], default=1),
        info=info | framework_info(found.objects),
        notes=(*notes, *found.notes, *unread_notes(found.objects)),
        archives=tuple(found.archives),
        named={file: metadata.named for file, metadata in parsed.items()},
    )


def locate(source: Source, catalog: Catalog) -> Catalog:
    """Open the items of the catalog's tensors and check them against the metadata."""
    problems: list[str] = []
    tensors = {}
    expect_edges(source, _items_of(catalog))
    for name, entry in catalog.tensors.items():
        chunks = []
        for chunk in entry.chunks:
            try:
                chunks.append(_located(source, entry, chunk))
            except CkptoolError as error:
                problems.append(error.message)
                error.message.tensor = name
        tensors[name] = replace(entry, chunks=tuple(chunks))
    if problems:
        raise damaged(problems, subject="the items", hint=_HINT)
    return catalog.with_tensors(tensors)


def _items_of(catalog: Catalog) -> Iterator[tuple[str, int, int]]:
    for entry in catalog.tensors.values():
        for at in places(entry):
            if isinstance(at, Item):
                yield at.file, at.offset, at.nbytes


def _located(source: Source, entry: TensorEntry, chunk: Chunk) -> Chunk:
    copies = tuple(
        replace(copy, at=_located_place(source, entry, chunk.box, copy.at)) for copy in chunk.copies
    )
    return replace(chunk, at=_located_place(source, entry, chunk.box, chunk.at), copies=copies)


def _located_place(source: Source, entry: TensorEntry, box: Box, at: Place) -> Place:
    if not isinstance(at, Item):
        return at
    what = f"{entry.name} {box}"
    dtype = entry.source_dtype
    shape = at.part.shape if at.part else box.shape
    limit = math.prod(shape) * dtype.itemsize * 2 + _OVERHEAD
    opened = _open(source, at, what, limit, _EDGE)
    tensor = plain_tensor(opened.file.value)
    if tensor is None:
        message = f"{what}: its item in {at.file} holds {type_name(opened.file.value)}"
        raise Damaged(Problem(f"{message}, no plain tensor", "item-mismatch", file=at.file))
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        message = f"{what}: its item at byte {at.offset:,} of {at.file} is {tensor.dtype}"
        message += f" {list(tensor.shape)}, the metadata says {dtype} {list(shape)}"
        raise Damaged(Problem(message, "item-mismatch", file=at.file))
    place = opened.place(place_of(tensor, opened.file))
    if at.part is None:
        return place
    try:
        start, strides = at.part.start, at.part.strides
        return part_of_place(place, shape, box.shape, start, strides, dtype.itemsize)
    except ValueError as error:
        message = f"{what}: its item in {at.file} is {error}"
        raise Damaged(Problem(message, "item-mismatch", file=at.file)) from None


FORMAT = Format(
    "dcp",
    "torch.distributed.checkpoint folder (.metadata and .distcp files)",
    _probe,
    _scan,
    locate=locate,
)
