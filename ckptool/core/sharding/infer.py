"""Which mesh and placements a set of chunks came from, for formats that do not record them.

DCP (torch 2.1 to 2.13) stores, for each tensor, boxes and the file of the rank that wrote each. A
chunk that several ranks hold is written by one of them. Empty chunks are listed at the end of the
dim, once for each offset; FSDP1's ShardedTensor leaves them out.

The search is exact: a mesh is reported only where it explains every tensor, and no other shape with
as few dims does. Tensor dims are cut independently, so each is explained on its own by the mesh
dims that cut it, in some order; a tensor fits where its dims can do with different mesh dims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.box import spans_of
from ckptool.core.catalog import Catalog, TensorEntry
from ckptool.core.chunks import Spans, chunks_of
from ckptool.core.mesh import Mesh, Placements, Replicate, StridedShard
from ckptool.core.sharding.cuts import Cut, Order, chunk_bounds, placements_of, table_index
from ckptool.core.text import plural

_MOST_DIMS = 3
_MOST_RANKS = 1 << 17


class Inference(Struct, frozen=True):
    """What the chunks determine.

    ``placements`` are all that explain a tensor and put different rows on a rank: several if the
    chunks do not decide, none of any tensor if ``mesh`` is None. A tensor stored whole counts as
    replicated, and a mesh dim outside a tensor's own mesh as one that replicates it, as the chunks
    show no difference.

    ``ambiguous`` are the mesh shapes between which the chunks do not decide; empty if they do, or
    if no mesh explains all tensors: ``unexplained`` says that it is so although each is a grid.
    """

    mesh: Mesh | None
    placements: dict[str, tuple[Placements, ...]]
    ambiguous: tuple[tuple[int, ...], ...] = ()
    unexplained: bool = False


def infer(tensors: Iterable[TensorEntry], world_size: int) -> Inference:
    """Return the mesh and placements of ``tensors``, so far as their chunks determine them.

    ``world_size`` is the number of ranks seen; the mesh is taken to hold exactly these, or as many
    as the highest writing rank needs. Meshes have up to three dims, none of size 1 (but for a
    world of one rank), and up to 131,072 ranks. A single tensor that is no DTensor grid, such as a
    ragged ShardedTensor or one of Megatron's, leaves no mesh: the chunks of the others may fit one
    by chance.
    """
    signatures = {entry.name: (entry.shape, chunks_of(entry).spans) for entry in tensors}
    evidence = {signature: _evidence(*signature) for signature in set(signatures.values())}
    grids = {signature: grid for signature, grid in evidence.items() if grid is not None}
    world = _world(evidence, world_size)
    search = _Search(set(grids.values()))
    explicable = len(grids) == len(evidence) and world <= _MOST_RANKS
    shapes = search.shapes(world) if explicable else ()
    if len(shapes) != 1:
        return Inference(None, {}, shapes, explicable and not shapes)
    fits = {signature: search.placements(grid, shapes[0]) for signature, grid in grids.items()}
    return Inference(Mesh.of(shapes[0]), {name: fits[s] for name, s in signatures.items()})


def _world(signatures: Iterable[_Signature], world_size: int) -> int:
    writers = (rank for _, stored in signatures for rank in stored.ranks if rank is not None)
    return max(world_size, 1 + max(writers, default=0))


_Shape = tuple[int, ...]
_Span = tuple[int, int]
_Signature = tuple[_Shape, Spans]
"""A tensor's shape, and its boxes with the ranks that wrote each (None if unknown)."""


class _CutDim(Struct, frozen=True):
    """The known facts about a tensor dim that is cut.

    ``spans`` are the distinct non-empty row ranges, ``writers`` says which rank wrote which,
    ``idle`` are ranks that wrote an empty chunk; ``leaves_empty`` is true if there is such a chunk.
    """

    length: int
    spans: frozenset[_Span]
    writers: frozenset[tuple[int, _Span]]
    idle: frozenset[int]
    leaves_empty: bool

    def is_possible(self) -> bool:
        """Return whether the spans tile the dim and no rank wrote two of them."""
        ordered = sorted(self.spans)
        edges = [0, *(high for _, high in ordered)]
        tiled = [low for low, _ in ordered] == edges[:-1] and edges[-1] == self.length
        ranks = {rank for rank, _ in self.writers} | self.idle
        return tiled and len(ranks) == len(self.writers) + len(self.idle)


_Evidence = tuple[_CutDim | None, ...]
"""For each tensor dim how it is cut, None if it is whole."""


def _evidence(shape: _Shape, stored: Spans) -> _Evidence | None:
    """Return the evidence of the chunks for each tensor dim; None if no mesh cuts a tensor so."""
    boxes, ranks = stored
    if not boxes or any(len(box.lo) != len(shape) for box in boxes):
        return None
    if not math.prod(shape):
        return (None,) * len(shape)
    columns = spans_of(boxes)
    dims = tuple(_cut_dim(n, spans, ranks) for n, spans in zip(shape, columns, strict=True))
    cut = [(dim, spans) for dim, spans in zip(dims, columns, strict=True) if dim is not None]
    cells = set(zip(*(spans for _, spans in cut), strict=True))
    solid = sum(all(low < high for low, high in cell) for cell in cells)
    if solid != math.prod(len(dim.spans) for dim, _ in cut) and cut:
        return None
    return dims if all(dim.is_possible() for dim, _ in cut) else None


def _cut_dim(length: int, spans: list[_Span], ranks: Sequence[int | None]) -> _CutDim | None:
    distinct = set(spans)
    if distinct == {(0, length)}:
        return None
    written = {(rank, span) for rank, span in zip(ranks, spans, strict=True) if rank is not None}
    solid = frozenset((low, high) for low, high in distinct if low < high)
    writers = frozenset((rank, span) for rank, span in written if span in solid)
    idle = frozenset(rank for rank, span in written if span not in solid)
    return _CutDim(length, solid, writers, idle, len(solid) < len(distinct))


class _Search:
    """The evidence of all tensors, to be tried on mesh shapes."""

    def __init__(self, tensors: set[_Evidence]) -> None:
        self._cut = [tensor for tensor in tensors if any(tensor)]
        self._orders_known: dict[tuple[_CutDim, _Shape], tuple[Order, ...]] = {}
        dims = itertools.chain.from_iterable(self._cut)
        self._lists_empty = any(dim.leaves_empty for dim in dims if dim is not None)

    def shapes(self, world: int) -> tuple[_Shape, ...]:
        """Return the shapes with fewest dims that explain every tensor."""
        for dims in range(1, _MOST_DIMS + 1):
            shapes = _factorizations(world, dims)
            accepted = tuple(shape for shape in shapes if self._explains_all(shape))
            if accepted:
                return accepted
        return ()

    def _explains_all(self, shape: _Shape) -> bool:
        """Return whether all tensors fit. One that does not is tried first on the next shape."""
        for index, tensor in enumerate(self._cut):
            if next(self._fits(tensor, shape), None) is None:
                self._cut.insert(0, self._cut.pop(index))
                return False
        return True

    def placements(self, tensor: _Evidence, shape: _Shape) -> tuple[Placements, ...]:
        """Return all placements that fit, of those with the same rows on each rank the simplest."""
        fits = list(self._fits(tensor, shape))
        if len(fits) == 1:
            return (placements_of(fits[0], shape),)
        return self._simplest(fits, tensor, shape)

    def _simplest(
        self, fits: Iterable[tuple[Order, ...]], tensor: _Evidence, shape: _Shape
    ) -> tuple[Placements, ...]:
        """Return the simplest placements of those orders that give ranks the same rows."""
        simplest: dict[object, Placements] = {}
        for orders in fits:
            rows = tuple(
                _rank_rows(dim.length, shape, order) if dim is not None else None
                for dim, order in zip(tensor, orders, strict=True)
            )
            placements = placements_of(orders, shape)
            simplest[rows] = min(simplest.get(rows, placements), placements, key=_complexity)
        return tuple(sorted(simplest.values(), key=_complexity))

    def _fits(self, tensor: _Evidence, shape: _Shape) -> Iterator[tuple[Order, ...]]:
        """Yield one order per tensor dim, no mesh dim in two of them."""
        options = [((),) if dim is None else self._orders(dim, shape) for dim in tensor]
        for orders in itertools.product(*options):
            used = list(itertools.chain.from_iterable(orders))
            if len(used) == len(set(used)):
                yield orders

    def _orders(self, dim: _CutDim, shape: _Shape) -> tuple[Order, ...]:
        """Return the orders of mesh dims that give the dim's spans and agree with its writers."""
        key = (dim, shape)
        if key not in self._orders_known:
            orders = (order for order in _all_orders(len(shape)) if self._cuts(dim, shape, order))
            self._orders_known[key] = tuple(orders)
        return self._orders_known[key]

    def _cuts(self, dim: _CutDim, shape: _Shape, order: Order) -> bool:
        """Return whether the order gives the spans, and each rank what it wrote.

        If the writer lists empty chunks, there must be some exactly where it lists one.
        """
        sizes = tuple(shape[mesh_dim] for mesh_dim in order)
        if not _may_give(dim, sizes):
            return False
        bounds = frozenset(chunk_bounds(dim.length, sizes))
        leaves_empty = (dim.length, dim.length) in bounds
        if bounds - {(dim.length, dim.length)} != dim.spans:
            return False
        if self._lists_empty and leaves_empty != dim.leaves_empty:
            return False
        return _agrees(dim, shape, order)


def _may_give(dim: _CutDim, sizes: tuple[int, ...]) -> bool:
    """Return whether there are enough chunks and the first has the right length: a cheap test."""
    first = dim.length
    for size in sizes:
        first = -(-first // size)
    return (0, first) in dim.spans and len(dim.spans) <= math.prod(sizes)


def _factorizations(number: int, count: int) -> Iterator[_Shape]:
    """Yield all ways to write ``number`` as an ordered product of ``count`` factors above 1."""
    if count == 1:
        yield (number,)
        return
    for factor in range(2, number // 2 + 1):
        if number % factor == 0:
            for rest in _factorizations(number // factor, count - 1):
                yield (factor, *rest)


@lru_cache(maxsize=_MOST_DIMS)
def _all_orders(dims: int) -> tuple[Order, ...]:
    return tuple(
        order
        for count in range(1, dims + 1)
        for order in itertools.permutations(range(dims), count)
    )


def _agrees(dim: _CutDim, shape: _Shape, order: Order) -> bool:
    """Return whether each rank holds what it wrote."""
    rows = _rank_rows(dim.length, shape, order)
    return all(rows[rank] == span for rank, span in dim.writers) and all(
        rows[rank][0] == rows[rank][1] for rank in dim.idle
    )


@lru_cache(maxsize=256)
def _rank_rows(length: int, shape: _Shape, order: Order) -> tuple[_Span, ...]:
    """Return the rows that each rank of a mesh of ``shape`` holds."""
    bounds = chunk_bounds(length, tuple(shape[mesh_dim] for mesh_dim in order))
    return tuple(bounds[index] for index in _chunk_numbers(shape, order))


@lru_cache(maxsize=256)
def _chunk_numbers(shape: _Shape, order: Order) -> tuple[int, ...]:
    """Return for each rank the number of its chunk, row-major in the order of the cuts."""
    cuts = tuple(Cut(mesh_dim, shape[mesh_dim], 1) for mesh_dim in order)
    return tuple(table_index(cuts, at) for at in itertools.product(*map(range, shape)))


def _complexity(placements: Placements) -> tuple[int, int, str]:
    """Return a sort key: few strided shards before many, then few shards, then by name."""
    strided = sum(isinstance(placement, StridedShard) for placement in placements)
    whole = sum(isinstance(placement, Replicate) for placement in placements)
    return strided, -whole, " ".join(map(str, placements))


def _explain_ambiguity(inference: Inference) -> Iterator[str]:
    """Yield why tensors get no placements: other ranks could have written the same chunks."""
    several = {name: fits for name, fits in inference.placements.items() if len(fits) > 1}
    for name, fits in itertools.islice(several.items(), 1):
        alternatives = " or ".join(" ".join(map(str, placements)) for placements in fits)
        yield (
            f"the placements of {plural(len(several), 'tensor')} are ambiguous: the ranks that"
            f" wrote {name} hold its chunks"
            f" with {alternatives}"
        )


def with_inferred_mesh(catalog: Catalog) -> Catalog:
    """Return the catalog with the mesh and placements that its chunks and writing ranks determine.

    A tensor without elements gets none: its chunks do not show how it was placed.
    """
    world = catalog.world_size or 1
    entries = [entry for entry in catalog.tensors.values() if entry.placements is None]
    if world < 2 or not entries or catalog.mesh is not None:
        return catalog
    inference = infer(entries, world)
    notes = catalog.notes
    if inference.ambiguous:
        shapes = " or ".join("x".join(map(str, shape)) for shape in inference.ambiguous)
        notes = (*notes, f"the device mesh is ambiguous: {shapes} explain the chunks equally well")
    if inference.unexplained:
        dims = f"no device mesh of up to {_MOST_DIMS} dims explains the chunks of all tensors"
        notes = (*notes, f"{dims}: their placements are not inferred")
    notes = (*notes, *_explain_ambiguity(inference))
    tensors = dict(catalog.tensors)
    for name, fits in inference.placements.items():
        if len(fits) == 1 and tensors[name].elements:
            tensors[name] = replace(tensors[name], placements=fits[0])
    return replace(
        catalog,
        tensors=tensors,
        mesh=inference.mesh,
        mesh_source="inferred" if inference.mesh else None,
        notes=notes,
    )
