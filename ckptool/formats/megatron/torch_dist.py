"""From the DCP folder that Megatron-core writes to the tensors and values it holds.

Tensors that Megatron-core up to 0.15 stored reformulated, because ranks held flat ranges.

A tensor ``[X, Y]`` whose ranks hold ``[x, y]`` is stored as ``[X/x, Y/y, x*y]``, whose last dim the
data-parallel ranks cut anywhere (``sharded_tensor_to_torch_sharded_tensor``, 0.7 to 0.15). The
``mcore_data`` of ``.metadata`` keeps the shape ``[X, Y]``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import Catalog, Chunk, TensorEntry
from ckptool.core.sharding.infer import with_inferred_mesh
from ckptool.core.views import pieces_of_run
from ckptool.errors import Damaged, Problem, Unrecognised
from ckptool.formats.base import ScanOptions
from ckptool.formats.dcp import DcpMetadata, read_folder
from ckptool.formats.megatron.arguments import (
    arguments_among,
    require_common,
    with_common,
    with_plain_names,
)
from ckptool.formats.megatron.optimizer.named import with_named_state
from ckptool.serialization.source import Source

FORMAT_NAME = "megatron-torch_dist"
CONFIG = "metadata.json"


def scan(source: Source, config: dict[str, Any] | None, options: ScanOptions) -> Catalog:
    """The catalog of a ``torch_dist`` folder; ``config`` is its ``metadata.json``, if any."""
    backend = (config or {}).get("sharded_backend", "torch_dist")
    if backend != "torch_dist":
        raise Unrecognised(
            f"{source.root}: a Megatron-core checkpoint of the backend {str(backend)[:80]!r};"
            " ckptool reads torch_dist",
            hint="Megatron-core up to 0.13 loads it and saves it with --ckpt-format torch_dist",
        )
    catalog, parsed = read_folder(source, options)
    require_common(source, catalog, options)
    catalog = with_common(source, with_plain_names(_reshaped(catalog, parsed)))
    plans = [plan for metadata in parsed.values() for plan in metadata.plans or ()]
    catalog = _described(source, with_named_state(source, catalog, plans))
    return with_inferred_mesh(
        catalog if config is not None else _unfinished(source, catalog, options)
    )


def _reshaped(catalog: Catalog, parsed: dict[str, DcpMetadata]) -> Catalog:
    """With the shapes that tensors had before they were reformulated."""
    tensors = dict(catalog.tensors)
    for name, shape in chain(*(metadata.reformulated.items() for metadata in parsed.values())):
        if name not in tensors:
            raise Damaged(
                Problem(
                    f"{name}: mcore_data gives it the shape {list(shape)}, nothing stores it",
                    "data-missing",
                )
            )
        tensors[name] = unflattened(tensors[name], shape)
    return catalog.with_tensors(tensors)


def _described(source: Source, catalog: Catalog) -> Catalog:
    info = catalog.info | {"writer": "Megatron-core torch_dist"}
    info |= arguments_among(catalog.objects.values()).info()
    files = catalog.files | {n: source.files[n] for n in (CONFIG,) if n in source.files}
    return replace(catalog, format=FORMAT_NAME, info=info, files=files)


def _unfinished(source: Source, catalog: Catalog, options: ScanOptions) -> Catalog:
    """A save whose last file is not there: a note where all else can be read, damage to verify."""
    if CONFIG in source.files:
        message = f"{CONFIG} names no backend, as Megatron's does: it is damaged"
        raise Damaged(Problem(message, "metadata-unreadable", file=CONFIG))
    message = f"{CONFIG} is missing, which Megatron writes last: the save never finished"
    if options.found is not None:
        options.report([Problem(message, "save-unfinished", file=CONFIG)], subject=source.root)
    return replace(catalog, notes=(*catalog.notes, message))


def unflattened(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """The tensor in its own ``shape``; Damaged where it is not stored reformulated from it."""
    grid = entry.shape[:-1]
    local = tuple(size // parts for size, parts in zip(shape, grid, strict=False))
    whole = tuple(size * parts for size, parts in zip(local, grid, strict=False))
    if len(grid) != len(shape) or whole != shape or math.prod(local) != entry.shape[-1]:
        raise Damaged(
            Problem(
                f"{entry.name}: stored as {list(entry.shape)}, which is no way to reformulate the"
                f" {list(shape)} that mcore_data states",
                "tensor-record",
            )
        )
    chunks = [piece for chunk in entry.chunks for piece in _pieces(entry, chunk, local)]
    return replace(entry, shape=shape, chunks=tuple(chunks))


def _pieces(entry: TensorEntry, chunk: Chunk, local: tuple[int, ...]) -> Iterator[Chunk]:
    """The boxes of a stored chunk, which is a flat range of one rank's part."""
    *cell, start = chunk.box.lo
    stop = chunk.box.hi[-1]
    if math.prod(chunk.box.shape[:-1]) != 1:
        raise Damaged(
            Problem(
                f"{entry.name}: chunk {chunk.box} spans several ranks' parts", "sharding-unknown"
            )
        )
    origin = tuple(index * size for index, size in zip(cell, local, strict=True))
    itemsize = entry.source_dtype.itemsize
    for box, at in pieces_of_run(chunk.at, chunk.box.shape, start, stop, local, itemsize):
        lo = tuple(index + first for index, first in zip(box.lo, origin, strict=True))
        yield Chunk(Box.at(lo, box.shape), at, chunk.rank)
