"""An open checkpoint, of any format: its contents, and any part of any tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from msgspec.structs import replace

from ckptool.api.arguments import AnyDType, AnyPath, Keywords, location, with_keywords
from ckptool.api.containers import Containers
from ckptool.api.html import checkpoint_html
from ckptool.api.index import Index, parse_index
from ckptool.api.keywords import OpenKeywords
from ckptool.api.listing import TensorListing
from ckptool.api.read import cast_entry, installed_library, read_numpy, read_torch
from ckptool.commands.inspect.report import step_of
from ckptool.commands.model.assets import require_unquantized
from ckptool.commands.open import OpenedCheckpoint, no_collecting, open_checkpoint, require_sound
from ckptool.commands.options.read import ReadOptions
from ckptool.commands.options.rewrite import RewriteOptions
from ckptool.commands.rewrite import rewrite
from ckptool.core.box import Box
from ckptool.core.casts import as_type
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.mesh import Mesh
from ckptool.core.quantization.names import quantized_names
from ckptool.core.quantization.scale_names import Scales
from ckptool.core.sharding.coverage import coverage_problem
from ckptool.core.state_category import state_category
from ckptool.core.subscript import Pick, take
from ckptool.core.text import did_you_mean, plural
from ckptool.engine.read.tiles import require_unchanged
from ckptool.errors import Changed, CkptoolError, Damaged, NoSuchName, Refusal, UsageError, refused
from ckptool.storage.place import full_name
from ckptool.storage.url import Location

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ckptool.engine.read.tensors import BoxMemory, FillRequest


class Checkpoint(Mapping[str, Any]):
    """A checkpoint whose metadata was read; tensors are read on request.

    ``named`` is the place at which it was opened, ``options`` are the keywords. As a mapping it
    maps names to tensors and values, which are read anew on each access.

    Threads may share one. Nothing is unpickled. It can be pickled: the copy opens the same place
    again, and raises Changed if the files there have changed.
    """

    def __init__(
        self, opened: OpenedCheckpoint, catalog: Catalog, named: Location, options: OpenKeywords
    ) -> None:
        self._opened = opened
        self._catalog: Catalog | None = catalog
        self.named = named
        self.options = options
        self._complete: set[str] = set()
        self._containers = Containers(opened, catalog)

    def __repr__(self) -> str:
        known = self._catalog
        content = "closed" if known is None else plural(len(known.tensors), "tensor")
        return f"<ckptool.Checkpoint {self.path} {self.format}: {content}>"

    def _repr_html_(self) -> str:
        return escape(repr(self)) if self._catalog is None else checkpoint_html(self)

    def __reduce__(self) -> tuple[Callable[..., Checkpoint], tuple[str, OpenKeywords, str]]:
        return reopen, (full_name(self.named), self.options, self.version())

    def version(self) -> str:
        """Return a text that changes when a file of the checkpoint does."""
        files = self._opened.catalog.files
        return self._opened.source.fingerprint([*files, *self._opened.catalog.companions])

    @property
    def path(self) -> Location:
        """Return the checkpoint's path, which may be below the path that was given."""
        return self._opened.path

    @property
    def format(self) -> str:
        """Return the name of its format, as ``ckptool formats`` lists it."""
        return self._opened.format.name

    @property
    def opened(self) -> OpenedCheckpoint:
        """Return its source, its format and the catalog of what was selected."""
        return replace(self._opened, catalog=self.catalog)

    @property
    def catalog(self) -> Catalog:
        """Return everything that its metadata says, as every command sees it.

        Raises UsageError if the checkpoint was closed: without its names it would seem empty.
        """
        if self._catalog is None:
            raise UsageError(f"{self.path}: the checkpoint was closed")
        return self._catalog

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Return tensors by name: ``dtype``, ``shape``, ``placements``, ``mesh``, ``chunks``."""
        return TensorListing(self.catalog.tensors)

    @property
    def objects(self) -> Mapping[str, Any]:
        """Return each non-tensor value: plain data, or records of objects not unpickled."""
        return MappingProxyType({n: entry.value for n, entry in self.catalog.objects.items()})

    @property
    def mesh(self) -> Mesh | None:
        """Return the device mesh that it was written on, as far as that is known."""
        return self.catalog.mesh

    @property
    def step(self) -> int | None:
        """Return the training step, from a value or the folder's name; None if neither has one."""
        self.catalog  # noqa: B018 (raises if it was closed)
        return step_of(self.path, self._opened.catalog)

    @cached_property
    def _quantized(self) -> set[str]:
        return quantized_names(self.catalog)

    @cached_property
    def _scales(self) -> Scales:
        return Scales(self.catalog.tensors)

    # As a mapping

    def __getitem__(self, key: str | tuple[Any, ...]) -> Any:
        """Read a tensor, or a part of it if an index follows the name; or return a value.

        ``checkpoint["w"]`` reads all of it, ``checkpoint["w", :8, ..., 0]`` reads a part. Raises
        NoSuchName, a KeyError, for an unknown name, and whatever ``read`` raises.
        """
        name, *index = key if isinstance(key, tuple) else (key,)
        if index or name not in self.catalog.objects:
            return self.read(name, tuple(index))
        from ckptool.api.values import rebuild

        return rebuild(self.catalog.objects[name])

    def __iter__(self) -> Iterator[str]:
        """Yield the names of tensors, of values, and of what cannot be read."""
        yield from self.catalog.tensors
        yield from self.catalog.objects
        yield from self._unread

    def __len__(self) -> int:
        return len(self.catalog.tensors) + len(self.catalog.objects) + len(self._unread)

    @property
    def _unread(self) -> list[str]:
        """The names of tensors of unsupported kinds."""
        return [name for name, why in self.catalog.conflicts.items() if isinstance(why, Refusal)]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.has(name)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def state_dict(self, *, device: torch.device | str | int | None = None) -> Mapping[str, Any]:
        """Return a mapping that reads each tensor onto a device when it is accessed.

        For ``model.load_state_dict(checkpoint.state_dict(), assign=True)``, also of a model on the
        meta device: the tensors become its parameters, without a second copy.
        """
        return LazyStateDict(self, device)

    # As a resource

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the metadata that was read; nothing can be read afterwards.

        No file stays open between reads, so this only frees memory.
        """
        released = replace(self._opened.catalog, tensors={}, objects={}, conflicts={})
        self._opened = replace(self._opened, catalog=released)
        self._catalog, self._containers = None, Containers(self._opened, released)

    # Reading

    @overload
    def read(
        self,
        name: str,
        index: Index | None = None,
        *,
        as_: Literal["torch"] = ...,
        device: torch.device | str | int | None = None,
        dtype: AnyDType | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    @overload
    def read(
        self,
        name: str,
        index: Index | None = None,
        *,
        as_: Literal["numpy"],
        dtype: AnyDType | None = None,
        out: np.ndarray[Any, Any] | None = None,
    ) -> np.ndarray[Any, np.dtype[Any]]: ...
    def read(
        self,
        name: str,
        index: Index | None = None,
        *,
        as_: Literal["torch", "numpy"] | None = None,
        device: torch.device | str | int | None = None,
        dtype: AnyDType | None = None,
        out: Any = None,
    ) -> Any:
        """Read a tensor or a part of it, across its chunks; only the bytes it needs are read.

        ``index`` has integers, slices with positive steps and ``...``, as torch takes them. The
        tensor is read onto ``device``, cast to the floating type ``dtype``, or into ``out``, a
        tensor or array of its shape and type. Without torch it is a numpy array, with a warning.

        A checksum is verified if all bytes that it covers are read. Raises NoSuchName for an
        unknown name, UsageError for an index outside the shape, Unsupported if numpy and
        ml_dtypes lack the element type or ``out`` does not fit, Damaged if the tensor is
        incomplete.
        """
        entry = self.entry(name) if dtype is None else cast_entry(self, name, dtype)
        picks = parse_index(entry, index)
        as_ = as_ or installed_library()
        if as_ == "torch":
            return read_torch(self, entry, picks, device, out)
        if as_ != "numpy":
            raise UsageError(f"as_={as_!r}: torch or numpy")
        if device is not None:
            raise UsageError(f"device={device!r}: numpy has no devices")
        return read_numpy(self, entry, picks, out)

    def entry(self, name: str, dtype: DType | None = None) -> TensorEntry:
        """Return a tensor whose chunks tile it exactly, cast if another floating type is given.

        These are never cast: non-floating types, quantized tensors and their scales, and tensors
        without dims outside the model, such as step counters. Raises UsageError for an unknown
        name, Damaged if chunks are missing or ranks contradict one another, Unsupported for a cast
        of floats of 8 bits and less beside what may be their scale.
        """
        self._require(name)
        entry = self.catalog.tensors[name]
        if name not in self._complete:
            problem = coverage_problem(entry)
            if problem is not None:
                raise Damaged(problem, hint="a shard is missing, or its metadata is wrong")
            self._complete.add(name)
        if dtype is None or dtype == entry.dtype or {dtype.kind, entry.dtype.kind} != {"float"}:
            return entry
        if name in self._quantized or not (entry.shape or state_category(entry) == "model"):
            return entry
        self._scales.require_none(entry)
        if entry.source_dtype.itemsize == 1:
            require_unquantized(self._opened, None, entry)
        return as_type(entry, dtype)

    def has(self, name: str) -> bool:
        """Return whether a tensor or a value has this name."""
        catalog = self.catalog
        return name in catalog.tensors or name in catalog.objects or name in catalog.conflicts

    def fill(self, wanted: Sequence[FillRequest], workers: int | None = None) -> None:
        """Read boxes of tensors into memory; see ``engine.read.tensors.fill``.

        A container is opened only if a box needs its contents.
        """
        with no_collecting():
            located = self._containers.locate(wanted)
        self._fill(located, workers)

    def fill_part(self, entry: TensorEntry, picks: Sequence[Pick], memory: BoxMemory) -> None:
        """Read the wanted elements of a tensor into memory of the same shape."""
        from ckptool.engine.read.tensors import FillRequest

        spans = [pick.indexes for pick in picks]
        if not all(spans):
            return
        hull = Box(tuple(span[0] for span in spans), tuple(span[-1] + 1 for span in spans))
        if [*map(Pick, map(range, entry.shape))] == [*picks]:
            self.fill([FillRequest(entry, hull, memory)])
            return
        (located,) = self._containers.locate([FillRequest(entry, hull, memory)])
        part = take(located.entry, picks)
        self._fill([FillRequest(part, Box.whole(part.shape), memory)])

    def _fill(self, located: Sequence[FillRequest], workers: int | None = None) -> None:
        from ckptool.engine.read.tensors import fill

        threads = self._opened.source.policy.load_workers if workers is None else workers
        if threads < 1:
            raise UsageError(f"workers {threads}: at least 1")
        fill(located, self._opened.source, threads)

    def require_unchanged(self) -> None:
        """Raise Changed if a file was written or replaced since the checkpoint was opened."""
        require_unchanged(self.catalog, self._opened.source)

    def _require(self, name: str) -> None:
        if name in self.catalog.conflicts:
            raise _refusal_of(self.catalog.conflicts[name])
        if name in self.catalog.objects:
            raise NoSuchName(f"{self.path}: {name} is a value, not a tensor", hint="objects has it")
        if name not in self.catalog.tensors:
            hint = did_you_mean(str(name), self.catalog.tensors)
            raise NoSuchName(f"{self.path}: no tensor named {name!r}", hint=hint)


def _refusal_of(why: str) -> CkptoolError:
    """Return the error for a name that cannot be read: Unsupported for an unsupported kind."""
    if isinstance(why, Refusal):
        return refused([why], subject="")
    return Damaged(why, hint="per_rank=True keeps each rank's as NAME@rankR")


class LazyStateDict(Mapping[str, Any]):
    """The tensors and values of a checkpoint, each read when it is accessed."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device | str | int | None) -> None:
        self._checkpoint = checkpoint
        self._device = device

    def __repr__(self) -> str:
        return f"<ckptool.LazyStateDict of {self._checkpoint!r}>"

    def __getitem__(self, name: str) -> Any:
        if name in self._checkpoint.tensors:
            return self._checkpoint.read(name, device=self._device)
        return self._checkpoint[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def __len__(self) -> int:
        return len(self._checkpoint)

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint


@with_keywords(OpenKeywords)
def open(path: AnyPath, **options: Unpack[OpenKeywords]) -> Checkpoint:
    """Open the checkpoint at ``path``: of any format, from its metadata alone.

    The keywords say how to read it, what to select, and how to rename and cast that.
    Raises NotFound, Unrecognized, Damaged, Hostile, UsageError or Unsupported.
    """
    keywords = Keywords("open", options, OpenKeywords)
    place = location(path)
    opened = open_checkpoint(place, keywords.options(ReadOptions), whole=False)
    catalog = rewrite(opened, keywords.options(RewriteOptions), check=require_sound).catalog
    return Checkpoint(opened, catalog, place, options)


def reopen(place: str, options: OpenKeywords, version: str) -> Checkpoint:
    """Open a checkpoint as it was opened in another process; Changed if it is another now."""
    checkpoint = open(place, **options)
    if checkpoint.version() != version:
        raise Changed(f"{checkpoint.path}: it was changed since it was opened first")
    return checkpoint


def checkpoint_at(path: AnyPath | Checkpoint, **options: Unpack[OpenKeywords]) -> Checkpoint:
    """Return an open checkpoint as it is, or open that at a path."""
    if not isinstance(path, Checkpoint):
        return open(path, **options)
    if options:
        raise TypeError(f"{next(iter(options))} is for opening a checkpoint: give it to open()")
    return path
