"""The content of ``.distcp`` files alone, if the ``.metadata`` that describes them is lost.

torch.distributed.checkpoint (torch 2.1 to 2.13) writes each item as a torch.save archive of a local
tensor or a value, one after the other. An item records element type, shape, strides and checksums;
its name, its place in the global tensor and the global shape are only in ``.metadata``.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Container, ObjectEntry, TensorEntry
from ckptool.errors import CkptoolError, Problem
from ckptool.formats.base import Recovery, ScanOptions
from ckptool.formats.dcp import scan
from ckptool.formats.dcp.inventory import METADATA
from ckptool.formats.dcp.tables import DATA, rank_of
from ckptool.serialization.archive.read import read_torch_zip
from ckptool.serialization.archive.recover import find_archives
from ckptool.serialization.archive.tensors import locate_tensor, read_tensor
from ckptool.serialization.source import NearReads, Source
from ckptool.serialization.zip import Region

_UNCOMMITTED = f"{METADATA}.tmp"
_UNNAMED = (
    "names, which only .metadata records; each item is named after its file and position",
    "which items are chunks of one tensor, where in it they belong, and its shape",
    "whether files were lost, as only .metadata records how many there were",
)


def recover(source: Source) -> Recovery:
    """Return what uncommitted metadata describes, or else the items as they are."""
    return _by_uncommitted(source) or _by_items(source)


def _by_uncommitted(source: Source) -> Recovery | None:
    """Return the content of metadata that was written but never renamed, if it is complete."""
    if _UNCOMMITTED not in source.files or METADATA in source.files:
        return None
    problems: list[Problem] = []
    try:
        catalog = scan(source, ScanOptions(problems=problems), metadata=_UNCOMMITTED)
    except CkptoolError:
        return None
    files = {name: size for name, size in catalog.files.items() if name != _UNCOMMITTED}
    return Recovery(replace(catalog, files=files), tuple(problems))


def _by_items(source: Source) -> Recovery:
    """Return the items of all data files, each under a name made from its place.

    ``__0_0.item3`` is the fourth archive of ``__0_0.distcp``. Problems are unreadable items, and
    the spans of files that are not a complete archive.
    """
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    problems: list[Problem] = []
    reads = NearReads(source)
    files = [file for file in sorted(source.files) if DATA.fullmatch(file)]
    for file in files:
        items = find_archives(source, file)
        problems += _gaps(source, file, items)
        for number, item in enumerate(items):
            name = f"{file.removesuffix('.distcp')}.item{number}"
            try:
                entry = _entry(Region(reads, file, item.offset, item.nbytes), name)
            except CkptoolError as error:
                problems.append(error.message.within(name, tensor=name))
                continue
            if isinstance(entry, TensorEntry):
                tensors[name] = entry
            else:
                objects[name] = entry
    catalog = Catalog("dcp", tensors, objects, {file: source.files[file] for file in files})
    return Recovery(catalog, tuple(problems), _UNNAMED)


def _gaps(source: Source, file: str, items: list[Container]) -> Iterator[Problem]:
    position = 0
    for item in [*items, Container(file, source.files[file], 0)]:
        if item.offset > position:
            message = f"{file}: bytes {position:,} to {item.offset:,} are not a complete item"
            yield Problem(message, "bytes-unused", file=file)
        position = item.offset + item.nbytes


def _entry(region: Region, name: str) -> TensorEntry | ObjectEntry:
    opened = read_torch_zip(region)
    tensor = read_tensor(opened.value)
    if tensor is None:
        return ObjectEntry(name, (name,), opened.value)
    chunk = Chunk(Box.whole(tensor.shape), locate_tensor(tensor, opened), rank_of(region.file))
    return TensorEntry(name, (name,), tensor.dtype, tensor.shape, (chunk,))
