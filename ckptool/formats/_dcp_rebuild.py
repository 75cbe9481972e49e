"""What ``.distcp`` files say by themselves, when the ``.metadata`` that describes them is gone.

torch.distributed.checkpoint (torch 2.1 to 2.13) writes each item as a torch.save archive of a local
tensor or a value, one behind the other. An item records element type, shape, strides and
checksums; its name, its place in the global tensor and the global shape lie in ``.metadata`` alone.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, ObjectEntry, TensorEntry
from ckptool.errors import CkptoolError, Problem
from ckptool.formats._storage import place_of, plain_tensor
from ckptool.formats._torch_file import read_torch_zip
from ckptool.formats._zip import Region
from ckptool.formats.base import Source

END_RECORD = b"PK\x05\x06"
"""What the last record of a zip archive begins with."""
DATA_FILE = re.compile(r"([^/]*?__([0-9]{1,9})_[0-9]+)\.distcp")

_END64_SIZE, _LOCATOR_SIZE, _END_SIZE = 56, 20, 22

Extent = tuple[int, int]
"""Where an archive lies in its file: offset and length in bytes."""


def archives(source: Source, file: str, ends: Iterable[int]) -> list[Extent]:
    """The archives of a file, in order, whose end records lie at ``ends``.

    torch.save always writes a zip64 end record and its locator, which tell where the archive
    begins. An archive inside another one is a part of it.
    """
    found: list[Extent] = []
    for end in ends:
        start = _start_of(source, file, end)
        if start is None:
            continue
        while found and found[-1][0] >= start:
            found.pop()
        if not found or sum(found[-1]) <= start:
            found.append((start, end + _END_SIZE - start))
    return found


def _start_of(source: Source, file: str, end: int) -> int | None:
    """Where the archive begins that ends with the record at ``end``; None where none does."""
    before = _LOCATOR_SIZE + _END64_SIZE
    if end < before or end + _END_SIZE > source.files[file]:
        return None
    tail = source.read(file, end - before, before)
    if tail[:4] != b"PK\x06\x06" or tail[_END64_SIZE : _END64_SIZE + 4] != b"PK\x06\x07":
        return None
    start = end - before - int(struct.unpack_from("<Q", tail, _END64_SIZE + 8)[0])
    if start < 0 or source.read(file, start, 4) != b"PK\x03\x04":
        return None
    return start


def rebuilt(source: Source, found: dict[str, list[Extent]]) -> tuple[Catalog, list[Problem]]:
    """A catalog of the items that archives hold, each under the name of its place.

    ``__0_0.item3`` is the fourth archive of ``__0_0.distcp``. The second value are the items that
    cannot be read, and the spans of files that are no whole archive.
    """
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    problems: list[Problem] = []
    for file, extents in found.items():
        problems += _gaps(source, file, extents)
        for number, (start, nbytes) in enumerate(extents):
            name = f"{_stem(file)}.item{number}"
            try:
                entry = _item(Region(source, file, start, nbytes), name)
            except CkptoolError as error:
                problems.append(error.message.within(name, tensor=name))
                continue
            if isinstance(entry, TensorEntry):
                tensors[name] = entry
            else:
                objects[name] = entry
    files = {file: source.files[file] for file in found}
    return Catalog("dcp", tensors, objects, files), problems


def _gaps(source: Source, file: str, extents: list[Extent]) -> Iterator[Problem]:
    position = 0
    for start, nbytes in [*extents, (source.files[file], 0)]:
        if start > position:
            message = f"{file}: bytes {position:,} to {start:,} are no whole item"
            yield Problem(message, "bytes-unclaimed", file=file)
        position = start + nbytes


def _item(region: Region, name: str) -> TensorEntry | ObjectEntry:
    opened = read_torch_zip(region)
    tensor = plain_tensor(opened.value)
    if tensor is None:
        return ObjectEntry(name, (name,), opened.value)
    chunk = Chunk(Box.whole(tensor.shape), place_of(tensor, opened), _rank(region.file))
    return TensorEntry(name, (name,), tensor.dtype, tensor.shape, (chunk,))


def _stem(file: str) -> str:
    return file.removesuffix(".distcp")


def _rank(file: str) -> int | None:
    match = DATA_FILE.fullmatch(file)
    return int(match[2]) if match else None
