"""Decisions about every checkpoint that all writers share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from ckptool.core.box import Box, hull
from ckptool.core.catalog import Catalog, ObjectEntry, Path, TensorEntry, tied_names
from ckptool.core.chunks import chunks_of
from ckptool.core.layout import FileLayout, Verbatim
from ckptool.core.sharding.index import as_key
from ckptool.core.sharding.placement import PlacedTensors
from ckptool.core.text import list_some
from ckptool.errors import Problem, Unsupported
from ckptool.formats.base import Request
from ckptool.formats.companions import TRAINER_FILES, companion_targets
from ckptool.serialization.pickle.write import TensorRef
from ckptool.serialization.state_dict.tree import nest
from ckptool.serialization.state_dict.values import (
    NOT_CARRIED,
    NUMPY,
    Foreign,
    Repeated,
    type_name,
)

CARRIED = "carried as they are, for those who trust the source"
"""The beginning of a note on values that are written as in the source, classes and all."""


def select_plain(catalog: Catalog, *, numpy: bool = True) -> tuple[list[ObjectEntry], list[str]]:
    """Return the values that are plain data, and one note for each other one, which is dropped.

    ``numpy`` means that its arrays, scalars and generators count as plain. Values that contain
    themselves need no note: the catalog has one for each.
    """
    plain: list[ObjectEntry] = []
    notes: list[str] = []
    of_numpy: list[str] = []
    carried = {NUMPY} if numpy else set()
    classes = Foreign()
    for entry in catalog.objects.values():
        foreign = classes.of(entry.value)
        if isinstance(entry.value, Repeated):
            continue
        if foreign - carried:
            what = f"{entry.name} ({type_name(entry.value)})"
            classes_in = ", ".join(sorted(foreign - carried))
            note = f"not carried: {what}: torch.load(weights_only=True) refuses {classes_in}"
            notes.append(Problem(note, NOT_CARRIED, tensor=entry.name))
            continue
        plain.append(entry)
        of_numpy += [entry.name] * bool(foreign)
    if of_numpy:
        notes.append(
            f"contains numpy data, as the source does: {list_some(of_numpy)};"
            " torch.load(weights_only=True) needs torch.serialization.add_safe_globals for it"
        )
    return plain, notes


def nest_state(tensors: list[TensorEntry], objects: list[ObjectEntry]) -> Any:
    """Return the nested state dict of the source, with a ``TensorRef`` for each whole tensor.

    Tied tensors become one reference, so that they share a storage again.
    """
    refs = {entry.name: TensorRef.whole(entry) for entry in tensors}
    for first, *ties in tied_names(Catalog("", {entry.name: entry for entry in tensors}, {}, {})):
        refs |= dict.fromkeys(ties, refs[first])
    leaves: list[tuple[Path, Any]] = [(entry.path, refs[entry.name]) for entry in tensors]
    leaves += [(entry.path, entry.value) for entry in objects]
    return nest(leaves)


def note_companions(catalog: Catalog) -> list[str]:
    """Return one note on the companions, if the output is one file."""
    files = ", ".join(catalog.companions)
    return [f"not carried into one file: {files}"] if files else []


def lay_out_companions(catalog: Catalog, *, of_trainer: bool = False) -> list[FileLayout]:
    """Lay out config.json, tokenizer files and similar ones, unchanged.

    Those with a trainer's progress are only for the trainer's own format, ``of_trainer``.
    """
    return [
        FileLayout(path, (Verbatim(name, catalog.companions[name]),))
        for path, name in companion_targets(catalog).items()
        if of_trainer or name not in TRAINER_FILES
    ]


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_Item = TypeVar("_Item", bound=_Sized)


def group_by_size(items: Iterable[_Item], limit: int) -> list[list[_Item]]:
    """Group items in order, as many per file as fit ``limit`` bytes; a larger one has its own file.

    At least one group, which is empty if there is no item.
    """
    groups: list[list[_Item]] = [[]]
    nbytes = 0
    for item in items:
        if groups[-1] and nbytes + item.nbytes > limit:
            groups.append([])
            nbytes = 0
        groups[-1].append(item)
        nbytes += item.nbytes
    return groups


def note_tied(catalog: Catalog) -> list[str]:
    """Return one note for each group of tied tensors, which a flat format writes once per name.

    Scalars, such as the step of all parameters of a group, are not worth one.
    """
    return [
        f"tied: {' = '.join(names)} share their bytes in the source; each is written in full"
        for names in tied_names(catalog)
        if catalog.tensors[names[0]].elements > 1
    ]


_FEW_BOXES = 4


class WriterAssignment:
    """Decides which box of each tensor which rank writes, replicas once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._load: dict[int, int] = defaultdict(int)
        self._kinds: dict[object, _PlacedKind] = {}
        self._alike: dict[object, Mapping[Box, int]] = {}
        self._uncounted: list[_PlacedKind] = []

    def boxes(self, entry: TensorEntry) -> Mapping[Box, int]:
        """Return boxes that tile the tensor, each with the rank that writes it.

        The same object for tensors that are cut alike, if no rank was chosen. The boxes are
        those of the request's mesh if there is one, else the source's own chunks. A tensor is whole
        on rank 0 if it has no elements or no chunks, its ranks are unknown, or one is requested.
        """
        placed = self._request.placed
        if placed is not None and entry.elements:
            return self._placed_boxes(entry, placed)
        chunks = chunks_of(entry)
        boxes, ranks = chunks.boxes, chunks.ranks
        if placed is not None or self._request.one_rank or None in ranks or not ranks:
            return self._alike.setdefault(entry.shape, {Box.whole(entry.shape): 0})
        key = as_key(boxes), tuple(ranks), len(entry.shape)
        if key not in self._alike:
            self._alike[key] = _source_boxes(list(boxes), ranks, entry.shape)
        return self._alike[key]

    def _placed_boxes(self, entry: TensorEntry, placed: PlacedTensors) -> dict[Box, int]:
        """Return the mesh's boxes; of several ranks the one with the fewest bytes so far writes."""
        key = (entry.shape, placed.placements[entry.name])
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _PlacedKind.of(entry, placed)
        if kind.writers is not None:
            if not kind.not_counted:
                self._uncounted.append(kind)
            kind.not_counted += entry.dtype.itemsize
            return kind.writers
        self._count_loads()
        writers = {}
        for box, ranks in kind.holders:
            rank = ranks[0]
            if len(ranks) > 1:
                rank = min(ranks, key=lambda rank: (self._load[rank], rank))
            self._load[rank] += box.volume * entry.dtype.itemsize
            writers[box] = rank
        return writers

    def _count_loads(self) -> None:
        """Add up the bytes that ranks write of tensors whose writers were not chosen."""
        for kind in self._uncounted:
            for box, (rank,) in kind.holders:
                self._load[rank] += box.volume * kind.not_counted
            kind.not_counted = 0
        self._uncounted.clear()


class _PlacedKind(Struct):
    """How tensors of one shape and placement are cut: each box, and the ranks that hold it.

    ``writers`` are these ranks if each box has only one; ``not_counted`` are the bytes of an
    element, summed over all tensors that got these and were not counted yet.
    """

    holders: list[tuple[Box, list[int]]]
    writers: dict[Box, int] | None
    not_counted: int = 0

    @classmethod
    def of(cls, entry: TensorEntry, placed: PlacedTensors) -> _PlacedKind:
        """Return how a mesh cuts a tensor."""
        holders: dict[Box, list[int]] = {}
        for rank, shard in zip(placed.mesh.ranks, placed.shards(entry), strict=True):
            for piece in shard.pieces:
                holders.setdefault(piece.box, []).append(rank)
        is_unique = all(len(ranks) == 1 for ranks in holders.values())
        writers = {box: ranks[0] for box, ranks in holders.items()} if is_unique else None
        return cls([*holders.items()], writers)


def _source_boxes(
    source: list[Box], ranks: Sequence[int | None], shape: tuple[int, ...]
) -> dict[Box, int]:
    """Return the source's chunks; of several that begin at one place (empty ones), the largest.

    Parts of a rank's chunks after a rewrite are joined again if they fill a box. Chunks of other
    dims than the tensor's ``shape`` are not among them: a plan of these is refused.
    """
    if any(len(box.lo) != len(shape) for box in source):
        return {Box.whole(shape): 0}
    first: dict[tuple[int, ...], int] = {}
    for at in sorted(range(len(source)), key=lambda at: -source[at].volume):
        first.setdefault(source[at].lo, at)
    of_ranks: dict[int, list[Box]] = defaultdict(list)
    for at, (box, rank) in enumerate(zip(source, ranks, strict=True)):
        if first[box.lo] == at:
            of_ranks[rank or 0].append(box)
    return {box: rank for rank, boxes in of_ranks.items() for box in _join_boxes(boxes)}


def _join_boxes(boxes: list[Box]) -> list[Box]:
    """Return the one box that several fill together, as those of a permuted tensor do; or all."""
    if len(boxes) <= _FEW_BOXES:
        return boxes
    outline = hull(boxes)
    return [outline] if outline.volume == sum(box.volume for box in boxes) else boxes


def require_placed(request: Request) -> PlacedTensors:
    """Return the mesh and placements; Unsupported if rank files cannot have them."""
    placed = request.placed
    if placed is None:
        raise Unsupported("a file per rank needs a device mesh", hint="ckptool reshard --mesh 2x4")
    mesh = placed.mesh
    if set(mesh.ranks) != set(range(mesh.size)):
        raise Unsupported(f"a file per rank needs the ranks 0 to {mesh.size - 1}, not {mesh.ranks}")
    return placed
