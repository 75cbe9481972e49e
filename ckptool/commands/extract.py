"""Extract tensors or slices of them from a checkpoint of any format: into a file, or to look at.

Only the bytes they need are read.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.commands.open import (
    PART_NAMED,
    OpenedCheckpoint,
    no_collecting,
    open_checkpoint,
    require_agreement,
)
from ckptool.commands.options.extract import ExtractOptions
from ckptool.commands.options.rewrite import RewriteOptions, Selection
from ckptool.commands.rewrite import rewrite
from ckptool.commands.transfer.report import TransferReport
from ckptool.commands.transfer.target import require_apart, resolve_target
from ckptool.commands.transfer.transfer import Transfer
from ckptool.core.box import Box
from ckptool.core.casts import Casts
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.dtype import DType
from ckptool.core.layout import Data, FileLayout, Layout, Literal
from ckptool.core.planning.plan import Plan
from ckptool.core.selection import is_glob, matching_names, unknown_tensor
from ckptool.core.sharding.coverage import coverage_problem
from ckptool.core.state_category import state_category
from ckptool.core.subscript import Pick, picks, split_subscript, take, without_other_chunks
from ckptool.core.text import list_some, plural
from ckptool.engine.read.gather import unit
from ckptool.engine.read.numbers import decode, part_of
from ckptool.engine.read.tensors import ArrayMemory, FillRequest, fill
from ckptool.engine.read.tiles import require_unchanged
from ckptool.errors import Problem, Unsupported, UsageError, damaged
from ckptool.serialization.safetensors import OutgoingSlice, lay_out_safetensors
from ckptool.serialization.safetensors_metadata import PLAIN, header_for, rewrite_texts
from ckptool.storage.url import Location

Array = np.ndarray[Any, np.dtype[Any]]
_ANY = "tensor"
"""A name before a subscript, for names that may themselves end like a subscript."""


class TensorSlice(Struct, frozen=True):
    """The wanted part of one tensor: ``subscript`` as written; ``of`` is the shape of the whole."""

    entry: TensorEntry
    subscript: str
    of: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return its JSON."""
        return {
            "name": self.entry.name,
            "slice": self.subscript,
            "dtype": self.entry.dtype.name,
            "shape": self.entry.shape,
            "of": self.of,
            "bytes": self.entry.nbytes,
        }


class Extraction(Struct, frozen=True):
    """An open checkpoint and what to extract from it: located and cast, not read yet.

    ``choices`` are notes on names of which one of several was chosen.
    """

    opened: OpenedCheckpoint
    catalog: Catalog
    slices: tuple[TensorSlice, ...]
    choices: tuple[str, ...]

    @property
    def notes(self) -> list[str]:
        """Return what must be said of the source, whatever is extracted from it, and choices."""
        notes = (note for note in self.opened.catalog.notes if isinstance(note, Problem))
        return [*(note for note in notes if note.code == PART_NAMED), *self.choices]


class ExtractReport(TransferReport, frozen=True, kw_only=True):
    """What was written, by its names in the checkpoint and in a safetensors file."""

    slices: tuple[TensorSlice, ...] = field(name="_slices")

    schema: ClassVar = "extract"

    def more(self) -> Mapping[str, object]:
        """Return what was extracted."""
        return {"tensors": [part.to_dict() for part in self.slices]}


@no_collecting()
def open_slices(source: Location, texts: Sequence[str], options: ExtractOptions) -> Extraction:
    """Find ``NAME`` or ``NAME[0:4, :8]`` in a checkpoint; no tensor byte is read.

    A name may be a glob, or a part that only one name has, or one of the model's. Raises
    UsageError if there is no such tensor or index, Damaged if its chunks do not tile it.
    """
    opened = open_checkpoint(source, options.read, whole=False, placements=False)
    subscripts, choices = _resolve(opened.catalog, texts)
    names = Selection(select=tuple(subscripts))
    casts = options.rewrite.casts
    if casts is not None and casts.model is not None:  # an exact name is meant, weight or not
        casts = Casts(None, (*casts.rules, ("*", casts.model)))
    rewriting = RewriteOptions(selection=names, casts=casts, dequantize=options.rewrite.dequantize)
    catalog = rewrite(opened, rewriting, check=require_agreement).catalog
    whole = catalog.tensors
    problems = [gap for name in subscripts if (gap := coverage_problem(whole[name])) is not None]
    if problems:
        raise damaged(problems, subject=str(opened.path))
    picks_of = {
        name: picks(name, whole[name].shape, split_subscript(f"{_ANY}{written}")[1])
        for name, written in subscripts.items()
    }
    catalog = _take(opened, catalog, picks_of)
    slices = tuple(
        TensorSlice(catalog.tensors[name], written, whole[name].shape)
        for name, written in subscripts.items()
    )
    return Extraction(opened, catalog, slices, choices)


def _resolve(catalog: Catalog, texts: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the requested subscript of each tensor, as it was written, and notes on choices."""
    known_names = dict.fromkeys((*catalog.tensors, *catalog.conflicts))
    subscripts: dict[str, str] = {}
    choices = []
    for text in texts:
        is_name = text in known_names or text in catalog.objects
        name = text if is_name else split_subscript(text)[0]
        names = [] if name in catalog.objects else matching_names(known_names, name)
        if len(names) > 1 and not is_glob(name):
            names, rest = _of_model(catalog, name, names)
            choices.append(f"{plural(len(rest), 'other name')} with {name}: {list_some(rest, 1)}")
        if not names:
            raise _no_tensor(catalog, name)
        for full in names:
            if subscripts.setdefault(full, text[len(name) :]) != text[len(name) :]:
                raise UsageError(f"{full}: requested twice", hint="one slice of a tensor at a time")
    return subscripts, tuple(choices)


def _of_model(catalog: Catalog, name: str, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the model's tensor among all that have a part, and the others.

    Raises UsageError if not exactly one is the model's.
    """
    whole = catalog.tensors
    model = [one for one in names if one in whole and state_category(whole[one]) == "model"]
    if len(model) != 1:
        hint = f"give one full name, or match all: '*{name}*'"
        raise UsageError(f"{name!r} is in {len(names):,} names: {list_some(names, 3)}", hint=hint)
    return model, [one for one in names if one != model[0]]


def _no_tensor(catalog: Catalog, name: str) -> UsageError:
    if "[" in name and "]" not in name:
        closed = f"{name}{'...' if name.endswith('[') else ''}]"
        return UsageError(f"{name!r}: the bracket is not closed", hint=f"'{closed}'")
    head, bracket, inner = name.rpartition("[")
    if bracket and head in catalog.tensors and name not in catalog.objects:
        return UsageError(
            f"{name!r}: {f'[{inner}'!r} is no subscript",
            hint=f"whole numbers and slices, one for each dim: '{head}[0:4, -1]'",
        )
    return unknown_tensor(f"no tensor named {name!r}", name, catalog)


def _take(
    opened: OpenedCheckpoint, catalog: Catalog, picks_of: Mapping[str, Sequence[Pick]]
) -> Catalog:
    """Return a catalog of only the picked elements; containers without any are not opened."""
    entries = {n: without_other_chunks(catalog.tensors[n], at) for n, at in picks_of.items()}
    located = opened.open_tensors(replace(catalog, tensors=entries, objects={}))
    return located.with_tensors({n: take(located.tensors[n], at) for n, at in picks_of.items()})


# Into a file


def prepare_extract(
    source: Location, texts: Sequence[str], target: Location, options: ExtractOptions
) -> Transfer[ExtractReport]:
    """Plan to write tensors to a ``.npy`` or ``.safetensors`` file, which must not exist yet."""
    target = resolve_target(target)
    suffix = target.suffix
    if suffix not in _LAYOUTS:
        raise UsageError(
            f"{target}: file name must end in {' or '.join(_LAYOUTS)}",
            hint=f"--out {target.with_name(target.name.removesuffix(suffix) + '.npy')}",
        )
    if target.exists():
        hint = "name another file, or remove this one: extract never overwrites a file"
        raise Unsupported(f"{target} already exists", hint=hint)
    extraction = open_slices(source, texts, options)
    require_apart(extraction.opened, target)
    catalog = extraction.catalog
    if catalog.metadata:
        catalog = rewrite_texts(extraction.opened.catalog, catalog)
    layout = Layout((_LAYOUTS[suffix](target.name, catalog),), folder=False)
    plan = Plan(catalog, layout)
    report = ExtractReport.of(
        extraction.opened,
        plan,
        target,
        suffix.removeprefix("."),
        options.transfer,
        notes=(*catalog.notes, *extraction.choices),
        map=None,
        slices=extraction.slices,
    )
    decided = (suffix, [(part.subscript, part.of) for part in extraction.slices])
    return Transfer(extraction.opened, plan, target, options.transfer, report, decided)


def _lay_out_npy(path: str, catalog: Catalog) -> FileLayout:
    """Lay out a NumPy file of one array."""
    entries = [*catalog.tensors.values()]
    if len(entries) > 1:
        raise UsageError(f"{path}: a .npy file holds one array, not {len(entries)}")
    (entry,) = entries
    if not is_of_numpy(entry.dtype):
        raise Unsupported(
            f"{entry.name}: numpy has no {entry.dtype}, so no .npy file can hold it as it is",
            hint=_instead(entry.dtype),
        )
    header = io.BytesIO()
    described = {"descr": np.dtype(entry.dtype.name).str, "fortran_order": False}
    np.lib.format.write_array_header_1_0(header, {**described, "shape": entry.shape})
    whole = Data.of(entry.name, Box.whole(entry.shape), entry.dtype.itemsize)
    return FileLayout(path, (Literal(header.getvalue()), whole))


def _instead(dtype: DType) -> str:
    """Return the alternatives for an element type that numpy lacks."""
    keep = "write a .safetensors file" if dtype.safetensors else "`ckptool convert --to torch-save`"
    exact = "--dtype fp32 holds the same numbers; " if dtype.kind == "float" else ""
    return f"{exact}to keep the bits, {keep}"


def is_of_numpy(dtype: DType) -> bool:
    """Return whether numpy itself has an element type; ml_dtypes adds types under its own names."""
    kind = np.sctypeDict.get(dtype.name)
    return kind is not None and np.dtype(kind).isbuiltin == 1


def _lay_out_safetensors(path: str, catalog: Catalog) -> FileLayout:
    entries = catalog.tensors.values()
    for entry in entries:
        if entry.dtype.safetensors is None:
            hint = "a .npy file can hold it" if is_of_numpy(entry.dtype) else _instead(entry.dtype)
            raise Unsupported(f"{entry.name}: safetensors has no {entry.dtype}", hint=hint)
    header = PLAIN | header_for(catalog, entries, path)
    return lay_out_safetensors(path, map(OutgoingSlice.whole, entries), header)


_LAYOUTS = {".npy": _lay_out_npy, ".safetensors": _lay_out_safetensors}
SUFFIXES = tuple(_LAYOUTS)
"""The ends of the names of files that are written."""


# To look at

_FULL = 1000
"""Elements up to which a tensor is shown in full."""
_EDGE = 3
"""Indices shown at each end of a dim of a larger tensor."""


class Values(Struct, frozen=True):
    """The numbers of one slice; if not ``full``, only those at its edges.

    A longer dim has its first and last ``edge`` indices, and one between them.
    """

    slice: TensorSlice
    numbers: Array
    full: bool
    edge: int = _EDGE


def read_values(
    extraction: Extraction, most: int = _FULL, workers: int | None = None
) -> list[Values]:
    """Read slices of at most ``most`` elements, and only the edges of larger ones.

    ``workers`` threads do so, or as many as suit the source. Raises Damaged if checksums do not
    match, Changed if files were written to meanwhile.
    """
    read: list[Values] = []
    requests: list[FillRequest] = []
    for part in extraction.slices:
        entry, full = part.entry, part.entry.elements <= most
        edges = [[(0, n)] if full or n <= 2 * _EDGE else _edges(n) for n in entry.shape]
        shape = [sum(hi - lo for lo, hi in dim) for dim in edges]
        bits: Array = np.empty(shape, unit(entry.dtype.itemsize))
        for box, at in _boxes(edges):
            requests.append(FillRequest(entry, box, ArrayMemory(part_of(bits, at))))
        read.append(Values(part, bits, full))
    source = extraction.opened.source
    fill(requests, source, workers or source.policy.workers)
    require_unchanged(extraction.opened.catalog, source)
    return [replace(v, numbers=_numbers(v.numbers, v.slice.entry.dtype)) for v in read]


def _edges(size: int) -> list[tuple[int, int]]:
    return [(0, _EDGE + 1), (size - _EDGE, size)]


def _boxes(edges: Sequence[Sequence[tuple[int, int]]]) -> Iterator[tuple[Box, Box]]:
    """Yield each box at the edges of a tensor's dims, and where it goes."""
    placed = []
    for dim in edges:
        starts = [sum(hi - lo for lo, hi in dim[:at]) for at in range(len(dim))]
        placed.append([(lo, hi, at) for (lo, hi), at in zip(dim, starts, strict=True)])
    for choice in product(*placed):
        box = Box(tuple(lo for lo, _, _ in choice), tuple(hi for _, hi, _ in choice))
        yield box, Box.at([at for _, _, at in choice], box.shape)


def _numbers(bits: Array, dtype: DType) -> Array:
    """Return stored bits as numbers that numpy has; those of packed types unchanged."""
    if is_of_numpy(dtype):
        return bits.view(dtype.name)
    if dtype.name == "complex32":
        halves = bits.reshape(-1).view(np.float16).astype(np.float32)
        return halves.view(np.complex64).reshape(bits.shape)
    if not dtype.is_numeric:
        return bits
    return decode(bits.reshape(-1), dtype).reshape(bits.shape)
