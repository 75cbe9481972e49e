"""Where the bytes of ByteCheckpoint's tensors lie: bare in its files, strided as a pickle says.

``.metadata`` holds for each item the pickle of its tensor without the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from ckptool.core.catalog import Catalog, Chunk, Item, Place, TensorEntry, places
from ckptool.errors import Damaged, Problem, coded
from ckptool.formats import _pickle
from ckptool.formats._pickle import Call
from ckptool.formats._storage import StoredTensor, natural, place_of, plain_tensor, sizes
from ckptool.formats._torch_file import StoredBytes, TorchFile
from ckptool.formats.base import ScanOptions

Skeletons = Mapping[tuple[str, int, int], bytes]
"""For the file, offset and length of an item, the pickle of the tensor without its bytes."""


def skeletons_of(fields: Mapping[str, Mapping[str, Any]], parts: Mapping[str, str]) -> Skeletons:
    found: dict[tuple[str, int, int], bytes] = {}
    for name, family in parts.items():
        told = fields[name]
        try:
            pickles = {_key(k): v for k, v in (told["all_tensor_metadata"] or {}).items()}
            for index, info in told["storage_data"].items():
                where = info.fields
                file = "/".join(filter(None, (family, where["relative_path"])))
                pickled = pickles.get(_key(index))
                if isinstance(pickled, bytes):
                    found[file, natural(where["offset"]), natural(where["length"])] = pickled
        except (KeyError, TypeError, AttributeError):
            message = f"{name}: not as ByteCheckpoint writes it"
            raise Damaged(Problem(message, "metadata-unreadable", file=name)) from None
    return found


def _key(index: Call) -> tuple[str, tuple[int, ...] | None]:
    offset = index.fields.get("offset")
    return str(index.fields["fqn"]), None if offset is None else sizes(offset)


def placed(catalog: Catalog, skeletons: Skeletons, options: ScanOptions) -> Catalog:
    """With the place of every element, checked against the metadata, for each item."""
    tensors = {}
    for name, entry in catalog.tensors.items():
        chunks = options.attempt(partial(_chunks, entry, skeletons))
        if chunks is not None:
            tensors[name] = replace(entry, chunks=chunks)
    bare = {at.file for entry in tensors.values() for at in places(entry)}
    return replace(catalog, tensors=tensors, bare=frozenset(bare), archives=())


def _chunks(entry: TensorEntry, skeletons: Skeletons) -> tuple[Chunk, ...]:
    with coded("item-mismatch", tensor=entry.name):
        return tuple(_chunk(entry, chunk, skeletons) for chunk in entry.chunks)


def _chunk(entry: TensorEntry, chunk: Chunk, skeletons: Skeletons) -> Chunk:
    copies = tuple(
        replace(copy, at=_place(entry, chunk, copy.at, skeletons)) for copy in chunk.copies
    )
    return replace(chunk, at=_place(entry, chunk, chunk.at, skeletons), copies=copies)


def _place(entry: TensorEntry, chunk: Chunk, at: Place, skeletons: Skeletons) -> Place:
    if not isinstance(at, Item):
        return at
    what = f"{entry.name} {chunk.box} at byte {at.offset:,} of {at.file}"
    pickled = skeletons.get((at.file, at.offset, at.nbytes))
    if pickled is None:
        raise Damaged(
            Problem(
                f"{what}: .metadata does not say how its bytes are strided", "metadata-unreadable"
            )
        )
    tensor = _skeleton(pickled)
    if tensor is None or (tensor.dtype, tensor.shape) != (entry.source_dtype, chunk.box.shape):
        raise Damaged(
            Problem(
                f"{what}: no {entry.source_dtype} {list(chunk.box.shape)}, as it should be",
                "item-mismatch",
            )
        )
    stored = StoredBytes(at.file, at.offset, at.nbytes, at.nbytes)
    file = TorchFile(what, None, {tensor.storage.key: stored}, "little", {}, len(pickled))
    return place_of(tensor, file)


@lru_cache(maxsize=4096)
def _skeleton(pickled: bytes) -> StoredTensor | None:
    """The tensor that a pickle describes; many are alike."""
    return plain_tensor(_pickle.load(pickled, what="a tensor's record in .metadata").value)
