"""What ``.distcp`` files say by themselves, when the ``.metadata`` that describes them is gone.

torch.distributed.checkpoint (torch 2.1 to 2.13) writes each item as a torch.save archive of a local
tensor or a value, one behind the other. An item records element type, shape, strides and
checksums; its name, its place in the global tensor and the global shape lie in ``.metadata`` alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, Item, ObjectEntry, TensorEntry
from ckptool.errors import CkptoolError, Problem
from ckptool.formats._archives import find_archives
from ckptool.formats._dcp_collect import DATA, rank_of
from ckptool.formats._storage import place_of, plain_tensor
from ckptool.formats._torch_file import read_torch_zip
from ckptool.formats._zip import Region
from ckptool.formats.base import Source


def rebuilt(source: Source) -> tuple[Catalog, list[Problem]]:
    """A catalog of the items of all data files, each under the name of its place.

    ``__0_0.item3`` is the fourth archive of ``__0_0.distcp``. The second value are the items that
    cannot be read, and the spans of files that are no whole archive.
    """
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    problems: list[Problem] = []
    files = [file for file in sorted(source.files) if DATA.fullmatch(file)]
    for file in files:
        items = find_archives(source, file)
        problems += _gaps(source, file, items)
        for number, item in enumerate(items):
            name = f"{_stem(file)}.item{number}"
            try:
                entry = _entry(Region(source, file, item.offset, item.nbytes), name)
            except CkptoolError as error:
                problems.append(error.message.within(name, tensor=name))
                continue
            if isinstance(entry, TensorEntry):
                tensors[name] = entry
            else:
                objects[name] = entry
    return Catalog("dcp", tensors, objects, {f: source.files[f] for f in files}), problems


def _gaps(source: Source, file: str, items: list[Item]) -> Iterator[Problem]:
    position = 0
    for item in [*items, Item(file, source.files[file], 0)]:
        if item.offset > position:
            message = f"{file}: bytes {position:,} to {item.offset:,} are no whole item"
            yield Problem(message, "bytes-unclaimed", file=file)
        position = item.offset + item.nbytes


def _entry(region: Region, name: str) -> TensorEntry | ObjectEntry:
    opened = read_torch_zip(region)
    tensor = plain_tensor(opened.value)
    if tensor is None:
        return ObjectEntry(name, (name,), opened.value)
    chunk = Chunk(Box.whole(tensor.shape), place_of(tensor, opened), rank_of(region.file))
    return TensorEntry(name, (name,), tensor.dtype, tensor.shape, (chunk,))


def _stem(file: str) -> str:
    return file.removesuffix(".distcp")
