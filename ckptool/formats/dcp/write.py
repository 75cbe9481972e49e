"""Lay out a DCP folder as torch 2.13 does: ``.distcp`` files of each rank, then ``.metadata``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.layout import Data, Layout, Part
from ckptool.errors import Unsupported
from ckptool.formats.base import Request
from ckptool.formats.dcp.cuts import FileSplit, ItemBoxes, ItemFile, WrittenItems
from ckptool.formats.dcp.pickling import MetadataFile, WrittenAt, WrittenValue
from ckptool.formats.dcp.splits import split_files
from ckptool.formats.dcp.whole import join_whole, without_empty_dicts
from ckptool.formats.lightning import split_meta
from ckptool.formats.writing import CARRIED, WriterAssignment, lay_out_companions, note_tied
from ckptool.serialization.archive.write import lay_out_archive
from ckptool.serialization.state_dict.loadable import root_problem, with_loadable_paths
from ckptool.serialization.state_dict.mappings import enter_mappings
from ckptool.serialization.state_dict.values import NUMPY, Foreign, Repeated


def lay_out(catalog: Catalog, request: Request) -> Layout:
    """Lay out a DCP folder: cut for the request's mesh, or in the source's own chunks."""
    classes = Foreign()
    objects = {n: e for n, e in catalog.objects.items() if not isinstance(e.value, Repeated)}
    catalog, meta_files = split_meta(replace(catalog, objects=objects))
    in_meta = [entry for name, entry in objects.items() if name not in catalog.objects]
    catalog = enter_mappings(catalog)
    written = [*in_meta, *catalog.objects.values()]
    foreign = sorted({*chain(*(classes.of(entry.value) for entry in written))} - {NUMPY})
    _require_text([*catalog.tensors, *catalog.objects])
    changed_root = root_problem(catalog)
    catalog, notes = without_empty_dicts(join_whole(with_loadable_paths(catalog)))
    parts: list[Part] = []
    values: list[WrittenValue] = []
    cuts, placed = _cut_all(catalog, WriterAssignment(request)), request.placed
    split = FileSplit() if placed is None else split_files(cuts, placed.mesh.size)
    nbytes = 0
    for value in catalog.objects.values():
        archive = lay_out_archive(value.value)
        parts += archive
        length = sum(part.nbytes for part in archive)
        values.append((value, WrittenAt(split.path(0), nbytes, length)))
        nbytes += length
    chunks = WrittenItems(cuts, nbytes, split)
    files = sorted({*chunks.written, *([0] if values else [])}, key=split.unit)
    layouts = [*lay_out_companions(catalog), *meta_files]
    layouts += [ItemFile(chunks, file, () if file else parts) for file in files]
    layouts.append(MetadataFile(chunks, values))
    notes += [*([changed_root] if changed_root else []), *note_tied(catalog)]
    if foreign:
        notes.append(f"{CARRIED}: {', '.join(foreign)}")
    elsewhere = [*parts, *chain(*(file.parts for file in meta_files))]
    holds_tensors = any(isinstance(part, Data) for part in elsewhere)
    tables = None if holds_tensors else chunks.tables()
    return Layout(tuple(layouts), folder=True, notes=tuple(notes), tables=tables)


def _require_text(names: Iterable[str]) -> None:
    """Raise Unsupported for a name that is not text, such as half of a surrogate pair."""
    for name in names:
        try:
            name.isascii() or name.encode()
        except UnicodeEncodeError:
            raise Unsupported(
                f"DCP cannot store a name that is not Unicode: {name!a}",
                hint="--rename or --drop it",
            ) from None


def _cut_all(catalog: Catalog, assignment: WriterAssignment) -> list[tuple[TensorEntry, ItemBoxes]]:
    """Return all tensors with their cuts, one object for those that are cut alike."""
    cuts: dict[tuple[int, str], tuple[Mapping[Box, int], ItemBoxes]] = {}
    tensors = []
    for entry in catalog.tensors.values():
        boxes = assignment.boxes(entry)
        key = id(boxes), entry.dtype.name
        if key not in cuts:
            cuts[key] = boxes, ItemBoxes.of(entry, boxes)
        tensors.append((entry, cuts[key][1]))
    return tensors
