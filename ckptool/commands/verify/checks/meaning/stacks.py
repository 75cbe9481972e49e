"""Tensors in which those of several layers or experts are stacked, and each of these by itself."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, product
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from ckptool.commands.verify.checks.elements import Elements
from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, TensorEntry
from ckptool.core.views import part_at
from ckptool.engine.check.spans import Part, Probe

_STACK = re.compile(r"\b(layers|experts)\.(?!\d)")
"""Where a name lacks the number of a layer, or of an expert: Megatron's torch_dist; transformers
4.51 to 5.24, torchtitan, vLLM (``mlp.experts.gate_up_proj``, ``experts.w13_weight``)."""

_DIMS = 2
_KERNEL = 8
"""A dim of a matrix that is smaller may be that of a convolution's kernel."""
_MOST = 1 << 12
"""Layers of a model, or experts of a layer, that are not the rows of a table."""
_LAYERS = "layers."
_LEAST = 64
"""Elements of a matrix that are not equal by chance."""

Index = tuple[int, ...]


@lru_cache(maxsize=1024)
def is_matrix(shape: Index) -> bool:
    """Return whether a tensor is a matrix, or more, of elements that are not equal by chance."""
    return sum(size > 1 for size in shape) > 1 and math.prod(shape) >= _LEAST


class Counting(Protocol):
    """A probe that counts the ``elements`` that it has seen."""

    elements: int


class Slice(Struct, frozen=True):
    """The part ``at`` an index of a tensor; all of it if the index is empty.

    ``numbered`` is the name that a layer's or an expert's tensor would have if it was not stacked.
    """

    numbered: str
    name: str
    at: Index = ()

    @property
    def label(self) -> str:
        """The name, with the index if there is one."""
        return f"{self.name}{list(self.at)}" if self.at else self.name


class Slices:
    """Tensors by the ``names`` that they have if none are stacked, and ``extra`` slices."""

    def __init__(self, tensors: Mapping[str, TensorEntry], extra: Iterable[Slice] = ()) -> None:
        self._slices = {part.numbered: part for part in chain(_slices_of(tensors), extra)}
        stacked = {part.name for part in self._slices.values()}
        whole = [name for name in tensors if name not in stacked] if stacked else tensors
        self.names = [*whole, *self._slices]

    def __getitem__(self, name: str) -> Slice:
        return self._slices.get(name) or Slice(name, name)

    def tensor(self, name: str) -> str:
        """Return the name of the tensor that has a name, or that contains the slice with it."""
        part = self._slices.get(name)
        return name if part is None else part.name

    def shape(self, name: str, tensors: Mapping[str, TensorEntry]) -> Index:
        """Return the shape of the tensor or slice with a name."""
        part = self._slices.get(name)
        return tensors[name].shape if part is None else tensors[part.name].shape[len(part.at) :]

    def seen_whole(self, probes: Mapping[str, Counting], elements: Elements) -> dict[str, Index]:
        """Return the shapes of those tensors and slices of which probes have seen all, by name."""
        located = elements.located
        shapes = {n: self.shape(n, located) for n in probes if elements.are_sound(self.tensor(n))}
        return {n: shape for n, shape in shapes.items() if probes[n].elements == math.prod(shape)}

    def probes(self, by_name: Mapping[str, Probe]) -> dict[str, Probe]:
        """Return the probes of tensors, made of those of names, which may be of slices."""
        if not self._slices:
            return dict(by_name)
        slices = ((self._slices[n], probe) for n, probe in by_name.items() if n in self._slices)
        whole = {name: probe for name, probe in by_name.items() if name not in self._slices}
        return whole | probes_of((part.name, part.at, probe) for part, probe in slices)


class Entries(dict[str, TensorEntry]):
    """Tensors and slices by the names of ``slices``; entries are made when asked for."""

    def __init__(self, slices: Slices, tensors: Mapping[str, TensorEntry]) -> None:
        self._slices, self._tensors = slices, tensors
        self._chunks: dict[str, Mapping[Index, Sequence[Chunk]]] = {}

    def __missing__(self, name: str) -> TensorEntry:
        part = self._slices[name]
        entry = self._tensors[part.name]
        if part.at:
            if part.name not in self._chunks:
                self._chunks[part.name] = _by_index(entry, len(part.at))
            stack = replace(entry, chunks=tuple(self._chunks[part.name][part.at]))
            entry = replace(part_at(stack, part.at), name=part.label)
        self[name] = entry
        return entry


def _by_index(entry: TensorEntry, depth: int) -> Mapping[Index, Sequence[Chunk]]:
    """Return the chunks with a part of each index of the first dims: there may be many chunks."""
    chunks: dict[Index, list[Chunk]] = defaultdict(list)
    for chunk in entry.chunks:
        for index in product(*map(range, chunk.box.lo[:depth], chunk.box.hi[:depth])):
            chunks[index].append(chunk)
    return chunks


def _slices_of(tensors: Mapping[str, TensorEntry]) -> Iterator[Slice]:
    """Yield the matrices that are stacked in tensors.

    Kernels of a convolution have more dims, or one is small: its filters are no layers.
    """
    may_be = any(len(entry.shape) > _DIMS for entry in tensors.values())
    for name, ends in _stacked(tensors).items() if may_be else ():
        shape = tensors[name].shape
        if len(shape) == len(ends) + _DIMS and min(shape[-_DIMS:]) >= _KERNEL:
            for index in product(*map(range, shape[: len(ends)])):
                yield Slice(_numbered(name, ends, index), name, index)


def _stacked(tensors: Mapping[str, TensorEntry]) -> Mapping[str, Sequence[int]]:
    """Return where in a name the numbers belong that are the first dims of a stacked tensor.

    All tensors named so must have as many layers, or experts; else they are not stacked. A layer's
    part is no single number: a vector has the biases of a convolution's filters.
    """
    heads: dict[str, list[str]] = defaultdict(list)
    for name in tensors:
        for end in {match[1]: match.end() for match in _STACK.finditer(name)}.values():
            heads[name[:end]].append(name)
    places: dict[str, list[int]] = defaultdict(list)
    for head in sorted(heads, key=len):
        names = heads[head]
        dim = len(places[names[0]])
        shapes = {tensors[name].shape[dim:] for name in names}
        sizes = {shape[:1] for shape in shapes}
        has_biases = head.endswith(_LAYERS) and sizes <= shapes
        is_stack = len(names) > 1 and len(sizes) == 1 and (1,) < min(sizes) <= (_MOST,)
        if is_stack and not has_biases:
            for name in names:
                places[name].append(len(head))
    return {name: ends for name, ends in places.items() if ends}


def _numbered(name: str, ends: Sequence[int], index: Index) -> str:
    starts = [0, *ends]
    pieces = [name[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return "".join(f"{piece}{at}." for piece, at in zip(pieces, index, strict=False)) + pieces[-1]


def probes_of(parts: Iterable[tuple[str, Index, Probe]]) -> dict[str, Probe]:
    """Return the probe of each tensor, which looks at all of it or at parts at some indexes."""
    stacks: dict[str, dict[Index, Probe]] = defaultdict(dict)
    for name, index, probe in parts:
        stacks[name][index] = probe
    return {name: probes[()] if () in probes else _Stack(probes) for name, probes in stacks.items()}


class _Stack:
    """Shows each of the tensors that are stacked in one to its own probe, by its index."""

    def __init__(self, probes: Mapping[Index, Probe]) -> None:
        self._probes = probes
        self._depth = len(next(iter(probes)))

    def take(self, data: memoryview, part: Part, first: int) -> None:
        """Look at elements of a part, the first of which is its ``first``-th."""
        depth, itemsize = self._depth, part.dtype.itemsize
        stack_shape, box = part.box.shape[:depth], Box(part.box.lo[depth:], part.box.hi[depth:])
        inner = Part(part.shape[depth:], box, part.dtype)
        end = first + len(data) // itemsize
        at = first
        while at < end:
            number, inside = divmod(at, box.volume)
            count = min(box.volume - inside, end - at)
            probe = self._probes.get(_index(number, stack_shape, part.box.lo))
            if probe is not None and inner.shape:
                start = (at - first) * itemsize
                probe.take(data[start : start + count * itemsize], inner, inside)
            at += count


def _index(number: int, shape: Index, low: Index) -> Index:
    """Return the index of an element by its number in a box of ``shape`` that begins at ``low``."""
    index = []
    for dim in range(len(shape) - 1, -1, -1):
        number, at = divmod(number, shape[dim])
        index.append(at + low[dim])
    return tuple(reversed(index))
