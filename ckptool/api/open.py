"""An open checkpoint: what it holds, and any part of any tensor.

Containers of chunks are opened when a box needs what is in them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from ckptool.api.arguments import AnyPath, Keywords, location, with_keywords
from ckptool.api.keywords import OpenKeywords
from ckptool.commands.open import OpenedCheckpoint, no_collecting, open_checkpoint
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.rewrite import RewriteOptions
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
from ckptool.errors import Changed, Damaged, Unsupported, UsageError
from ckptool.storage.local import Files, LocalSource
from ckptool.storage.url import Location

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ckptool.engine.read.tensors import FillRequest


class Checkpoint:
    """A checkpoint whose metadata was read; its tensors are read when they are asked for.

    Threads may share one. Nothing is unpickled. It can be pickled itself: what comes of that opens
    the same place anew, and is Changed where that is no longer what it was.
    """

    def __init__(
        self, opened: OpenedCheckpoint, catalog: Catalog, named: Location, options: OpenKeywords
    ) -> None:
        self._opened = opened
        self._catalog = catalog
        self._named = named
        self._options = options
        self._complete: set[str] = set()
        self._containers = _Containers(opened, catalog)

    def __repr__(self) -> str:
        return f"<ckptool.Checkpoint {self.path} {self.format}: {len(self.tensors):,} tensors>"

    def __reduce__(self) -> tuple[Callable[..., Checkpoint], tuple[str, OpenKeywords, str]]:
        named = self._named
        place = os.path.abspath(named) if isinstance(named, Path) else named.url
        return _reopen, (place, self._options, self._version())

    def _version(self) -> str:
        """Return what changes when a file of the checkpoint does."""
        files = self._opened.catalog.files
        return self._opened.source.fingerprint([*files, *self._opened.catalog.companions])

    @property
    def path(self) -> Location:
        """Return where it lies, which may be below the path that was given."""
        return self._opened.path

    @property
    def format(self) -> str:
        """Return the name of its format, as ``ckptool formats`` lists it."""
        return self._opened.format.name

    @property
    def catalog(self) -> Catalog:
        """Return all that its metadata says, as every command sees it."""
        return self._catalog

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Return tensors by name: ``dtype``, ``shape``, ``placements``, ``mesh``, ``chunks``."""
        return MappingProxyType(self._catalog.tensors)

    @property
    def objects(self) -> Mapping[str, Any]:
        """Return each non-tensor value: plain data, or records of what was not unpickled."""
        return MappingProxyType({n: entry.value for n, entry in self._catalog.objects.items()})

    @property
    def mesh(self) -> Mesh | None:
        """Return the device mesh it was written on, as far as it is known."""
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
        """Read a tensor or a part of it, whatever chunks it lies in; only their bytes are read.

        Checksums are verified where all that they cover is read. Raises UsageError for an unknown
        name or a box outside the shape, Unsupported where numpy has no such element type, Damaged
        where the tensor is not complete.
        """
        entry = self.entry(name)
        where = box_of(entry, box)
        if as_ == "torch":
            return self._read_torch(entry, where)
        if as_ == "numpy":
            return self._read_numpy(entry, where)
        raise UsageError(f"as_={as_!r}: torch or numpy")

    def entry(self, name: str, dtype: DType | None = None) -> TensorEntry:
        """Return a tensor whose chunks tile it exactly, cast where another floating type is given.

        Other types are never cast, nor are quantised tensors and their scales, nor what has no
        dims and is none of the model, such as a step counter. Raises UsageError for an unknown
        name, and Damaged where chunks are missing or ranks contradict one another.
        """
        self._require(name)
        entry = self._catalog.tensors[name]
        if name not in self._complete:
            problem = coverage_problem(entry)
            if problem is not None:
                raise Damaged(problem, hint="a shard is missing, or its metadata is wrong")
            self._complete.add(name)
        if dtype is None or dtype == entry.dtype or {dtype.kind, entry.dtype.kind} != {"float"}:
            return entry
        if name in self._quantised or not (entry.shape or state_category(entry) == "model"):
            return entry
        return as_type(entry, dtype)

    def has(self, name: str) -> bool:
        """Return whether a tensor or a value has this name."""
        catalog = self._catalog
        return name in catalog.tensors or name in catalog.objects or name in catalog.conflicts

    def fill(self, wanted: Sequence[FillRequest], workers: int | None = None) -> None:
        """Read boxes of tensors into memory; see ``engine.read.tensors.fill``.

        Containers are opened only where a box needs what is in them.
        """
        from ckptool.engine.read.tensors import fill

        threads = workers_of_this_rank(self._opened.source) if workers is None else workers
        if threads < 1:
            raise UsageError(f"workers {threads}: at least 1")
        with no_collecting():
            located = self._containers.locate(wanted)
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
            raise UsageError(f"{self.path}: no tensor named {name!r}", hint=hint)

    def _read_torch(self, entry: TensorEntry, box: Box) -> Any:
        import torch

        from ckptool.api.tensors import Staging, torch_dtype
        from ckptool.engine.read.tensors import FillRequest

        tensor = torch.empty(box.shape, dtype=torch_dtype(entry.dtype.name))
        self.fill([FillRequest(entry, box, Staging().memory(tensor))])
        return tensor

    def _read_numpy(self, entry: TensorEntry, box: Box) -> Any:
        import numpy as np

        from ckptool.engine.read.gather import unit
        from ckptool.engine.read.tensors import ArrayMemory, FillRequest

        if entry.dtype.name not in np.sctypeDict:
            raise Unsupported(f"{entry.name}: numpy has no {entry.dtype}", hint="read it as torch")
        bits: Any = np.empty(box.shape, unit(entry.dtype.itemsize))
        self.fill([FillRequest(entry, box, ArrayMemory(bits))])
        return bits.view(entry.dtype.name)


@with_keywords(OpenKeywords)
def open(path: AnyPath, **options: Unpack[OpenKeywords]) -> Checkpoint:
    """Open the checkpoint at ``path``: of any format, from its metadata alone.

    The keywords say how to read it, what to select, and how to rename and cast that.
    Raises NotFound, Unrecognised, Damaged, Hostile, UsageError or Unsupported.
    """
    keywords = Keywords("open", options, OpenKeywords)
    named = location(path)
    opened = open_checkpoint(named, keywords.options(ReadOptions), whole=False)
    catalog = rewrite(opened, keywords.options(RewriteOptions)).catalog
    return Checkpoint(opened, catalog, named, options)


def _reopen(place: str, options: OpenKeywords, version: str) -> Checkpoint:
    """Open a checkpoint as it was opened in another process; Changed where it is another now."""
    checkpoint = open(place, **options)
    if checkpoint._version() != version:
        raise Changed(f"{checkpoint.path}: it was changed since it was opened first")
    return checkpoint


def checkpoint_at(path: AnyPath | Checkpoint, **options: Unpack[OpenKeywords]) -> Checkpoint:
    """Return an open checkpoint as it is, or open that at a path."""
    if not isinstance(path, Checkpoint):
        return open(path, **options)
    if options:
        raise TypeError(f"{next(iter(options))} is for opening a checkpoint: give it to open()")
    return path


def workers_of_this_rank(source: Files) -> int:
    """Return the threads of this process: ranks of torchrun share a disk's, not a store's."""
    if not isinstance(source, LocalSource):
        return source.workers
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, source.workers // int(local_ranks if local_ranks.isdecimal() else 1))


Index = Box | slice | Sequence[slice]
"""A box of a tensor, or slices of its first dims as in ``tensor[2:4, :8]``, without steps."""


def box_of(entry: TensorEntry, index: Index | None) -> Box:
    """Return the box that an index means; UsageError where the tensor has no such box."""
    if index is None:
        return Box.whole(entry.shape)
    if isinstance(index, Box):
        box = index
    else:
        box = _sliced(entry, [index] if isinstance(index, slice) else index)
    fits = len(box.lo) == len(entry.shape) and Box.whole(entry.shape).contains(box)
    if not fits or any(map(int.__lt__, box.hi, box.lo)):
        raise UsageError(f"{entry.name}: box {box} does not fit shape {list(entry.shape)}")
    return box


def _sliced(entry: TensorEntry, slices: Sequence[slice]) -> Box:
    are_slices = isinstance(slices, Sequence) and all(isinstance(part, slice) for part in slices)
    if not are_slices or len(slices) > len(entry.shape):
        raise UsageError(
            f"{entry.name} {list(entry.shape)}: invalid box {slices!r}",
            hint="a slice for each dim, or for the first ones: (slice(0, 2), slice(8))",
        )
    if any(part.step not in (None, 1) for part in slices):
        raise UsageError(f"{entry.name}: slices with steps are not supported")
    rest = [slice(None)] * (len(entry.shape) - len(slices))
    bounds = [part.indices(n) for part, n in zip([*slices, *rest], entry.shape, strict=True)]
    return Box(tuple(lo for lo, _, _ in bounds), tuple(max(lo, hi) for lo, hi, _ in bounds))


class _Containers:
    """The containers of a checkpoint that were opened so far, for all threads alike."""

    def __init__(self, opened: OpenedCheckpoint, catalog: Catalog) -> None:
        self._opened = opened
        self._catalog = catalog
        self._indexes: dict[str, ChunkIndex] = {}
        self._located: dict[int, Chunk] = {}
        self._lock = threading.Lock()

    def locate(self, wanted: Sequence[FillRequest]) -> list[FillRequest]:
        """Return the same with only the chunks that hold the boxes, each at a place to read."""
        needed = [self._chunks(target) for target in wanted]
        with self._lock:
            self._open(
                {
                    (target.entry.name, id(chunk)): (target.entry, chunk)
                    for target, chunks in zip(wanted, needed, strict=True)
                    for chunk in chunks
                    if id(chunk) not in self._located
                }.values()
            )
        entries = (
            replace(target.entry, chunks=tuple(self._located[id(chunk)] for chunk in chunks))
            for target, chunks in zip(wanted, needed, strict=True)
        )
        return [w._replace(entry=entry) for w, entry in zip(wanted, entries, strict=True)]

    def _chunks(self, wanted: FillRequest) -> list[Chunk]:
        index = self._indexes.get(wanted.entry.name)
        if index is None:
            index = self._indexes[wanted.entry.name] = ChunkIndex(wanted.entry)
        return [chunk for chunk, _ in index.find(wanted.box)]

    def _open(self, closed: Iterable[tuple[TensorEntry, Chunk]]) -> None:
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
        located = self._opened.open_containers(self._catalog.with_tensors(alone)).tensors
        for name in alone:
            if name not in located:
                raise Unsupported(
                    f"{name}: a tensor subclass that wraps others, not a plain tensor",
                    hint="convert gives the tensors in it names of their own",
                )
            for chunk, place in zip(chunks[name], located[name].chunks, strict=True):
                self._located[id(chunk)] = place
