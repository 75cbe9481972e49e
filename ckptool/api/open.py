"""An open checkpoint: what it holds, and any part of any tensor.

Which part of a tensor is meant.

Where the chunks of an open checkpoint lie: containers are opened when a box needs them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from ckptool.api.commands import no_collecting
from ckptool.api.keywords import Opening
from ckptool.api.options import AnyPath, Keywords, documented, location
from ckptool.commands.open import Opened, open_checkpoint
from ckptool.commands.options.source import ReadOptions, RewriteOptions
from ckptool.commands.rewrite import rewrite
from ckptool.core.box import Box
from ckptool.core.casts import as_type
from ckptool.core.catalog import Catalog, Chunk, TensorEntry, coverage_problem
from ckptool.core.dtype import DType
from ckptool.core.mesh import Mesh
from ckptool.core.plan import ChunkIndex
from ckptool.core.quantization import quantised_names
from ckptool.core.state_category import state_category
from ckptool.engine.read.tiles import require_unchanged
from ckptool.errors import Damaged, Unsupported, UsageError
from ckptool.storage.local import Files, LocalSource
from ckptool.storage.url import Location

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ckptool.engine.read.fill import Wanted


class Checkpoint:
    """A checkpoint whose metadata was read; its tensors are read when they are asked for.

    Threads may share one. Nothing is unpickled.
    """

    def __init__(self, opened: Opened, catalog: Catalog) -> None:
        self._opened = opened
        self._catalog = catalog
        self._whole: set[str] = set()
        self._places = Places(opened, catalog)

    def __repr__(self) -> str:
        return f"<ckptool.Checkpoint {self.path} {self.format}: {len(self.tensors):,} tensors>"

    @property
    def path(self) -> Location:
        """Where it lies, which may be below the path that was given."""
        return self._opened.path

    @property
    def format(self) -> str:
        """The name of its format, as ``ckptool formats`` lists it."""
        return self._opened.format.name

    @property
    def catalog(self) -> Catalog:
        """All that its metadata says, as every command sees it."""
        return self._catalog

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Each tensor by name: ``dtype``, ``shape``, ``placements``, ``mesh``, ``chunks``."""
        return MappingProxyType(self._catalog.tensors)

    @property
    def objects(self) -> Mapping[str, Any]:
        """Each value that is no tensor: plain data, or records of what was not unpickled."""
        return MappingProxyType({n: entry.value for n, entry in self._catalog.objects.items()})

    @property
    def mesh(self) -> Mesh | None:
        """The device mesh it was written on, as far as it is known."""
        return self._catalog.mesh

    @cached_property
    def _quantised(self) -> set[str]:
        return quantised_names(self._catalog)

    @overload
    def read(self, name: str, box: Index | None = None) -> torch.Tensor: ...
    @overload
    def read(
        self, name: str, box: Index | None = None, *, as_: Literal["torch"]
    ) -> torch.Tensor: ...
    @overload
    def read(
        self, name: str, box: Index | None = None, *, as_: Literal["numpy"]
    ) -> np.ndarray[Any, np.dtype[Any]]: ...
    def read(
        self, name: str, box: Index | None = None, *, as_: Literal["torch", "numpy"] = "torch"
    ) -> Any:
        """A tensor or a part of it, whatever chunks it lies in; only the bytes of these are read.

        Checksums are verified where all that they cover is read. Raises UsageError for an unknown
        name or a box outside the shape, Unsupported where numpy has no such element type, Damaged
        where the tensor is not whole.
        """
        entry = self.entry(name)
        where = box_of(entry, box)
        if as_ == "torch":
            return self._read_torch(entry, where)
        if as_ == "numpy":
            return self._read_numpy(entry, where)
        raise UsageError(f"as_={as_!r}: torch or numpy")

    def entry(self, name: str, dtype: DType | None = None) -> TensorEntry:
        """A tensor whose chunks tile it exactly, cast where another floating type is given.

        Other types are never cast, nor are quantised tensors and their scales, nor what has no
        dims and is none of the model, such as a step counter. Raises UsageError for an unknown
        name, and Damaged where chunks are missing or ranks contradict one another.
        """
        self._require(name)
        found = self._catalog.tensors[name]
        if name not in self._whole:
            problem = coverage_problem(found)
            if problem is not None:
                raise Damaged(problem, hint="a shard is missing, or its metadata is wrong")
            self._whole.add(name)
        if dtype is None or dtype == found.dtype or {dtype.kind, found.dtype.kind} != {"float"}:
            return found
        if name in self._quantised or not (found.shape or state_category(found) == "model"):
            return found
        return as_type(found, dtype)

    def has(self, name: str) -> bool:
        """Whether a tensor or a value is called so."""
        catalog = self._catalog
        return any(name in held for held in (catalog.tensors, catalog.objects, catalog.conflicts))

    def fill(self, wanted: Sequence[Wanted], workers: int | None = None) -> None:
        """Read boxes of tensors into memory; see ``engine.boxes.fill``.

        Containers are opened only where a box needs what is in them.
        """
        from ckptool.engine.read.fill import fill

        threads = workers_of_this_rank(self._opened.source) if workers is None else workers
        if threads < 1:
            raise UsageError(f"workers {threads}: at least 1")
        with no_collecting():
            located = self._places.located(wanted)
        fill(located, self._opened.source, threads)

    def require_unchanged(self) -> None:
        """Raise Changed where its files were written or replaced since it was opened."""
        require_unchanged(self._catalog, self._opened.source)

    def _require(self, name: str) -> None:
        if name in self._catalog.conflicts:
            raise Damaged(
                self._catalog.conflicts[name],
                hint="per_rank=True keeps each rank's as NAME@rankR",
            )
        if name not in self._catalog.tensors:
            close = get_close_matches(name, self._catalog.tensors, n=1)
            hint = f"did you mean {close[0]!r} ?" if close else None
            raise UsageError(f"{self.path}: no tensor is called {name!r}", hint=hint)

    def _read_torch(self, entry: TensorEntry, box: Box) -> Any:
        import torch

        from ckptool.api.staging import Staging, torch_dtype
        from ckptool.engine.read.fill import Wanted

        tensor = torch.empty(box.shape, dtype=torch_dtype(entry.dtype.name))
        self.fill([Wanted(entry, box, Staging().memory(tensor))])
        return tensor

    def _read_numpy(self, entry: TensorEntry, box: Box) -> Any:
        import numpy as np

        from ckptool.engine.read.fill import ArrayMemory, Wanted
        from ckptool.engine.read.gather import unit

        if entry.dtype.name not in np.sctypeDict:
            raise Unsupported(f"{entry.name}: numpy has no {entry.dtype}", hint="read it as torch")
        bits: Any = np.empty(box.shape, unit(entry.dtype.itemsize))
        self.fill([Wanted(entry, box, ArrayMemory(bits))])
        return bits.view(entry.dtype.name)


@documented(Opening)
def open(path: AnyPath, **options: Unpack[Opening]) -> Checkpoint:
    """Open the checkpoint at ``path``: of any format, from its metadata alone.

    The keywords say how to read it, what to take of it, how to call that, and as which numbers.
    Raises NotFound, Unrecognised, Damaged, Hostile, UsageError or Unsupported.
    """
    keywords = Keywords("open", options, Opening)
    with no_collecting():
        opened = open_checkpoint(location(path), keywords.options(ReadOptions), whole=False)
    return Checkpoint(opened, rewrite(opened, keywords.options(RewriteOptions)).catalog)


def checkpoint_at(path: AnyPath | Checkpoint, **options: Unpack[Opening]) -> Checkpoint:
    """An open checkpoint as it is, else that at the path."""
    if not isinstance(path, Checkpoint):
        return open(path, **options)
    if options:
        raise TypeError(f"{next(iter(options))} says how to open a checkpoint: give open() it")
    return path


def workers_of_this_rank(source: Files) -> int:
    """Threads for this process: the ranks that torchrun started here share a disk's, no store's."""
    if not isinstance(source, LocalSource):
        return source.workers
    beside = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, source.workers // int(beside if beside.isdecimal() else 1))


Index = Box | slice | Sequence[slice]
"""A box of a tensor, or slices of its first dims as in ``tensor[2:4, :8]``, without steps."""


def box_of(entry: TensorEntry, index: Index | None) -> Box:
    """The box that an index means; UsageError where it is none of this tensor."""
    if index is None:
        return Box.whole(entry.shape)
    if isinstance(index, Box):
        box = index
    else:
        box = _sliced(entry, [index] if isinstance(index, slice) else index)
    fits = len(box.lo) == len(entry.shape) and Box.whole(entry.shape).contains(box)
    if not fits or any(map(int.__lt__, box.hi, box.lo)):
        raise UsageError(f"{entry.name}: {box} is no box of shape {list(entry.shape)}")
    return box


def _sliced(entry: TensorEntry, slices: Sequence[slice]) -> Box:
    are_slices = isinstance(slices, Sequence) and all(isinstance(one, slice) for one in slices)
    if not are_slices or len(slices) > len(entry.shape):
        raise UsageError(
            f"{entry.name} {list(entry.shape)}: {slices!r} is no box of it",
            hint="a slice for each dim, or for the first ones: (slice(0, 2), slice(8))",
        )
    if any(one.step not in (None, 1) for one in slices):
        raise UsageError(f"{entry.name}: slices with steps are not read; take every element")
    rest = [slice(None)] * (len(entry.shape) - len(slices))
    bounds = [one.indices(n) for one, n in zip([*slices, *rest], entry.shape, strict=True)]
    return Box(tuple(lo for lo, _, _ in bounds), tuple(max(lo, hi) for lo, hi, _ in bounds))


class Places:
    """What was opened so far of a checkpoint's containers, for all threads alike."""

    def __init__(self, opened: Opened, catalog: Catalog) -> None:
        self._opened = opened
        self._catalog = catalog
        self._indexes: dict[str, ChunkIndex] = {}
        self._found: dict[int, Chunk] = {}
        self._lock = threading.Lock()

    def located(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """The same with the chunks alone that hold the boxes, each in a place that can be read."""
        needed = [self._chunks(one) for one in wanted]
        with self._lock:
            self._locate(
                {
                    (one.entry.name, id(chunk)): (one.entry, chunk)
                    for one, chunks in zip(wanted, needed, strict=True)
                    for chunk in chunks
                    if id(chunk) not in self._found
                }.values()
            )
        return [
            one._replace(entry=replace(one.entry, chunks=tuple(self._found[id(c)] for c in chunks)))
            for one, chunks in zip(wanted, needed, strict=True)
        ]

    def _chunks(self, wanted: Wanted) -> list[Chunk]:
        index = self._indexes.get(wanted.entry.name)
        if index is None:
            index = self._indexes[wanted.entry.name] = ChunkIndex(wanted.entry)
        return [chunk for chunk, _ in index.find(wanted.box)]

    def _locate(self, closed: Iterable[tuple[TensorEntry, Chunk]]) -> None:
        """Open the containers of chunks, by themselves and not those of their copies."""
        chunks: dict[str, list[Chunk]] = {}
        tensors: dict[str, TensorEntry] = {}
        for entry, chunk in closed:
            chunks.setdefault(entry.name, []).append(chunk)
            tensors[entry.name] = entry
        if not tensors:
            return
        alone = {
            n: replace(e, chunks=tuple(replace(c, copies=()) for c in chunks[n]))
            for n, e in tensors.items()
        }
        located = self._opened.located(self._catalog.with_tensors(alone)).tensors
        for name in alone:
            if name not in located:
                raise Unsupported(
                    f"{name}: a tensor subclass that wraps others, no plain tensor",
                    hint="convert gives the tensors in it names of their own",
                )
            for chunk, found in zip(chunks[name], located[name].chunks, strict=True):
                self._found[id(chunk)] = found
