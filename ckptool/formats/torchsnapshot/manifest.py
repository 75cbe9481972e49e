"""The manifest of a TorchSnapshot folder: JSON with each rank's entries, and their places.

Tensors are raw bytes, or archives of torch.save.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from msgspec import Struct, field

from ckptool.core.box import Box, row_major_strides
from ckptool.core.catalog import Chunk, Extent, Index, Path, Place
from ckptool.core.dtype import BY_NAME, DType
from ckptool.errors import Damaged, Unrecognized, naming
from ckptool.serialization.archive.quantized import INTEGERS, split_quantized
from ckptool.serialization.archive.read import TorchFile, read_torch_zip
from ckptool.serialization.archive.tensors import (
    locate_tensor,
    read_natural,
    read_sizes,
    read_tensor,
)
from ckptool.serialization.source import NearReads, Source, read_metadata, require, require_rank
from ckptool.serialization.zip import Region

METADATA = ".snapshot_metadata"

Fields = Mapping[str, Any]
"""One entry of the manifest, as in JSON."""

CONTAINERS = ("dict", "OrderedDict", "list")
SHARDED = ("ShardedTensor", "DTensor")

_LONGEST_NUMBER = 20


class Manifest(Struct, frozen=True):
    """For each logical path of the state dicts, the entry of each rank that has one.

    ``version`` is that of the package that wrote it.
    """

    version: str
    world_size: int
    entries: dict[str, dict[int, Fields]]

    def path(self, logical: str, rank: int) -> Path:
        """Return the steps of a logical path; the rank's containers give the kind of each step."""
        tokens = logical.split("/")
        containers = ("/".join(tokens[:at]) for at in range(len(tokens)))
        return tuple(
            _step(unquote(token), self.entries.get(container, {}).get(rank, {}))
            for token, container in zip(tokens, containers, strict=True)
        )

    def leaves(self) -> Iterator[tuple[str, dict[int, Fields]]]:
        """Yield the logical paths of everything but non-empty containers."""
        inner = {logical.rpartition("/")[0] for logical in self.entries}
        for logical, entries in self.entries.items():
            if logical not in inner:
                yield logical, entries


def _step(text: str, container: Fields) -> Any:
    if container.get("type") == "list":
        return Index(int(text))
    keys = container.get("keys") or ()
    if text not in keys and len(text) < _LONGEST_NUMBER and text.lstrip("-").isdecimal():
        return int(text) if int(text) in keys else text
    return text


def read_manifest(source: Source) -> Manifest:
    """Read the manifest of a folder.

    Raises Damaged if it is not as TorchSnapshot 0.1 writes it, Unrecognized if it is YAML,
    as versions before wrote it.
    """
    text = read_metadata(source, METADATA)
    if text and not text.lstrip().startswith(b"{"):
        raise Unrecognized(
            f"{METADATA}: not the JSON that TorchSnapshot 0.1 writes",
            hint="where an older TorchSnapshot wrote YAML: load it with that, save it with 0.1",
        )
    try:
        content = json.loads(text)
        version = str(content.get("version", ""))
        world, manifest = content["world_size"], content["manifest"]
        entries: dict[str, dict[int, Fields]] = {}
        for key, entry in manifest.items():
            rank, _, logical = key.partition("/")
            entries.setdefault(logical, {})[int(rank)] = entry | {"type": str(entry["type"])}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message = f"{METADATA}: not a manifest as TorchSnapshot writes it"
        raise Damaged(message, "metadata-unreadable", file=METADATA) from None
    highest = max((rank for by_rank in entries.values() for rank in by_rank), default=0)
    if type(world) is not int or not 0 <= highest < world:
        message = f"{METADATA}: an entry of rank {highest} in a world of {world!r:.20}"
        raise Damaged(message, "metadata-unreadable", file=METADATA)
    require_rank(world, METADATA)
    return Manifest(version, world, entries)


VALUES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "str": str,
    "bool": {"True": True, "False": False}.__getitem__,
    "bytes": base64.b64decode,
    "float": lambda text: struct.unpack("<d", base64.b64decode(text))[0],
}
"""The value in ``serialized_value`` of a primitive entry, by the entry's type."""


_RAW = "buffer_protocol"
_ARCHIVE = "torch_save"
QUANTIZED = {"torch.qint8": "int8", "torch.quint8": "uint8", "torch.qint32": "int32"}


class Places(Struct):
    """Locates what entries of a manifest refer to.

    ``used`` collects the files, ``archives`` those that torch.save wrote.
    """

    source: Source
    used: set[str] = field(default_factory=set)
    archives: set[str] = field(default_factory=set)

    def chunks(self, rank: int, shards: list[Fields]) -> list[Chunk]:
        """Return the chunks of one rank's shards; none where it is not a plain tensor."""
        chunks = []
        for shard in shards:
            box = Box.at(read_sizes(shard["offsets"]), read_sizes(shard["sizes"]))
            place = self._place(shard["tensor"], box.shape)
            if place is not None:
                chunks.append(Chunk(box, place, rank))
        return chunks

    def _place(self, entry: Fields, shape: tuple[int, ...]) -> Place | None:
        """Return the place of a tensor's bytes; None if it is not a plain tensor."""
        dtype = element_type(entry["dtype"])
        file, start, length = self._span(entry)
        if dtype is None or entry["serializer"] not in (_RAW, _ARCHIVE):
            return None
        if entry["serializer"] == _ARCHIVE:
            return self._place_in_archive(entry, dtype, shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if length != nbytes:
            message = f"{dtype} {list(shape)} needs {nbytes:,} bytes, {file} has {length:,} for it"
            raise Damaged(message, "file-truncated", file=file)
        return Extent(file, start, row_major_strides(shape, dtype.itemsize))

    def _span(self, entry: Fields) -> tuple[str, int, int]:
        """Return the file, offset and length in bytes that an entry refers to."""
        file = str(entry["location"])
        size = require(self.source, file, wanted_by=METADATA)
        self.used.add(file)
        start, stop = map(read_natural, entry.get("byte_range") or (0, size))
        if not start <= stop <= size:
            message = f"bytes {start:,} to {stop:,} of {file}, which has {size:,} bytes"
            raise Damaged(message, "file-truncated", file=file, end=stop)
        return file, start, stop - start

    def _place_in_archive(self, entry: Fields, dtype: DType, shape: tuple[int, ...]) -> Place:
        opened = self.open(entry)
        with naming(opened.what):
            parts = split_quantized(opened.value)
            tensor = read_tensor(parts[INTEGERS] if parts else opened.value)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, shape):
            message = f"{entry['location']} holds no {dtype} {list(shape)}, as the manifest says"
            raise Damaged(message, "item-mismatch")
        return locate_tensor(tensor, opened)

    def open(self, entry: Fields) -> TorchFile:
        """Open the torch.save archive that an entry refers to."""
        file, start, length = self._span(entry)
        self.archives.add(file)
        return read_torch_zip(Region(NearReads(self.source), file, start, length))


def element_type(name: str) -> DType | None:
    """Return the element type of an entry; for quantized tensors that of their integers."""
    return BY_NAME.get(QUANTIZED.get(name, name.removeprefix("torch.")))
