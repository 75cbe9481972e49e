"""Tensors in which those of layers or experts are stacked, each looked at by itself."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, product

from msgspec import Struct
from msgspec.structs import replace

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


class Slice(Struct, frozen=True):
    """What is ``at`` an index of a tensor; all of it if that is empty.

    ``numbered`` is the name that the layer's or expert's own would have.
    """

    numbered: str
    name: str
    at: Index = ()

    @property
    def label(self) -> str:
        """The name, with the index if there is one."""
        return f"{self.name}{list(self.at)}" if self.at else self.name


class Slices:
    """Tensors by the ``names`` that they have if none are stacked, and ``others``, so called."""

    def __init__(self, tensors: Mapping[str, TensorEntry], others: Iterable[Slice] = ()) -> None:
        self._slices = {each.numbered: each for each in chain(_slices_of(tensors), others)}
        stacked = {each.name for each in self._slices.values()}
        whole = [name for name in tensors if name not in stacked] if stacked else tensors
        self.names = [*whole, *self._slices]

    def __getitem__(self, name: str) -> Slice:
        return self._slices.get(name) or Slice(name, name)

    def tensor(self, name: str) -> str:
        """Return the name of the tensor that what has a name is, or is a part of."""
        each = self._slices.get(name)
        return name if each is None else each.name

    def shape(self, name: str, tensors: Mapping[str, TensorEntry]) -> Index:
        """Return the shape of what has a name."""
        each = self._slices.get(name)
        return tensors[name].shape if each is None else tensors[each.name].shape[len(each.at) :]

    def probes(self, found: Mapping[str, Probe]) -> dict[str, Probe]:
        """Return what looks at each tensor, of what looks at some of the names."""
        if not self._slices:
            return dict(found)
        slices = ((self._slices[name], found[name]) for name in found if name in self._slices)
        whole = {name: probe for name, probe in found.items() if name not in self._slices}
        return whole | probes_of((each.name, each.at, probe) for each, probe in slices)


class Entries(dict[str, TensorEntry]):
    """What has the names of ``slices`` among tensors: made when asked for, called by its label."""

    def __init__(self, slices: Slices, tensors: Mapping[str, TensorEntry]) -> None:
        self._slices, self._tensors = slices, tensors
        self._chunks: dict[str, Mapping[Index, Sequence[Chunk]]] = {}

    def __missing__(self, name: str) -> TensorEntry:
        each = self._slices[name]
        entry = self._tensors[each.name]
        if each.at:
            if each.name not in self._chunks:
                self._chunks[each.name] = _by_index(entry, len(each.at))
            own = replace(entry, chunks=tuple(self._chunks[each.name][each.at]))
            entry = replace(part_at(own, each.at), name=each.label)
        self[name] = entry
        return entry


def _by_index(entry: TensorEntry, depth: int) -> Mapping[Index, Sequence[Chunk]]:
    """Return the chunks that have a part of each index of the first dims: there may be many."""
    found: dict[Index, list[Chunk]] = defaultdict(list)
    for chunk in entry.chunks:
        for index in product(*map(range, chunk.box.lo[:depth], chunk.box.hi[:depth])):
            found[index].append(chunk)
    return found


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

    All that is named so has as many layers, or experts; what differs is not stacked. What a layer
    has is no single number: as many biases are those of a convolution's filters.
    """
    heads: dict[str, list[str]] = defaultdict(list)
    for name in tensors:
        for end in {found[1]: found.end() for found in _STACK.finditer(name)}.values():
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
    """Return what looks at each tensor: at all of it, or at what is at some indexes of it."""
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
        outer, box = part.box.shape[:depth], Box(part.box.lo[depth:], part.box.hi[depth:])
        inner = Part(part.shape[depth:], box, part.dtype)
        end = first + len(data) // itemsize
        at = first
        while at < end:
            number, inside = divmod(at, box.volume)
            count = min(box.volume - inside, end - at)
            probe = self._probes.get(_index(number, outer, part.box.lo))
            if probe is not None and inner.shape:
                start = (at - first) * itemsize
                probe.take(data[start : start + count * itemsize], inner, inside)
            at += count


def _index(number: int, shape: Index, low: Index) -> Index:
    """Return the index of the so-manyth of a box of ``shape`` that begins at ``low``."""
    index = []
    for dim in range(len(shape) - 1, -1, -1):
        number, at = divmod(number, shape[dim])
        index.append(at + low[dim])
    return tuple(reversed(index))
