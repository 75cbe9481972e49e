"""Where the tensors of a TorchSnapshot folder lie: raw bytes, or archives of torch.save."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Chunk, Extent, Place
from ckptool.core.dtype import BY_NAME, DType
from ckptool.errors import Damaged, Problem
from ckptool.formats._quantised import INTEGERS, quantised_parts
from ckptool.formats._snapshot_manifest import METADATA, Fields
from ckptool.formats._storage import natural, place_of, plain_tensor, sizes
from ckptool.formats._torch_file import TorchFile, read_torch_zip
from ckptool.formats._zip import Region
from ckptool.formats.base import Source, require

_RAW = "buffer_protocol"
_ARCHIVE = "torch_save"
QUANTISED = {"torch.qint8": "int8", "torch.quint8": "uint8", "torch.qint32": "int32"}


@dataclass(slots=True)
class Places:
    """Finds what entries of a manifest refer to.

    ``used`` fills up with the files, ``archives`` with those that torch.save wrote.
    """

    source: Source
    used: set[str] = field(default_factory=set)
    archives: set[str] = field(default_factory=set)

    def chunks(self, rank: int, shards: list[Fields]) -> list[Chunk]:
        """Where the shards of one rank lie; none for those of no plain tensor."""
        chunks = []
        for shard in shards:
            box = Box.at(sizes(shard["offsets"]), sizes(shard["sizes"]))
            place = self._place(shard["tensor"], box.shape)
            if place is not None:
                chunks.append(Chunk(box, place, rank))
        return chunks

    def _place(self, entry: Fields, shape: tuple[int, ...]) -> Place | None:
        """Where a tensor's bytes lie; None where they are those of no plain tensor."""
        dtype = element_type(entry["dtype"])
        file, start, length = self.span(entry)
        if dtype is None or entry["serializer"] not in (_RAW, _ARCHIVE):
            return None
        if entry["serializer"] == _ARCHIVE:
            return self._archived(file, start, length, dtype, shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if length != nbytes:
            message = f"{dtype} {list(shape)} needs {nbytes:,} bytes, {file} has {length:,} for it"
            raise Damaged(Problem(message, "file-truncated", file=file))
        return Extent(file, start, row_major_strides(shape, dtype.itemsize))

    def span(self, entry: Fields) -> tuple[str, int, int]:
        """The file, offset and length in bytes of what an entry refers to."""
        file = str(entry["location"])
        size = require(self.source, file, wanted_by=METADATA)
        self.used.add(file)
        start, stop = map(natural, entry.get("byte_range") or (0, size))
        if not start <= stop <= size:
            message = f"bytes {start:,} to {stop:,} of {file}, which has {size:,} bytes"
            raise Damaged(Problem(message, "file-truncated", file=file))
        return file, start, stop - start

    def _archived(
        self, file: str, start: int, length: int, dtype: DType, shape: tuple[int, ...]
    ) -> Place:
        opened = self.opened(file, start, length)
        parts = quantised_parts(opened.value)
        tensor = plain_tensor(parts[INTEGERS] if parts else opened.value)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, shape):
            raise Damaged(
                Problem(
                    f"{file} holds no {dtype} {list(shape)}, as the manifest says", "item-mismatch"
                )
            )
        return place_of(tensor, opened)

    def opened(self, file: str, start: int, length: int) -> TorchFile:
        """The torch.save archive that lies there."""
        self.archives.add(file)
        return read_torch_zip(Region(self.source, file, start, length))


def element_type(said: str) -> DType | None:
    """The element type that an entry names; of quantised tensors that of their integers."""
    return BY_NAME.get(QUANTISED.get(said, said.removeprefix("torch.")))
