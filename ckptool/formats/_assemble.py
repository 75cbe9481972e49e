"""Put the global tensors together from what each rank's file holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import (
    Chunk,
    Extent,
    ObjectEntry,
    Packed,
    Path,
    Place,
    RankStep,
    TensorEntry,
    flat_name,
    merge_copies,
)
from ckptool.core.mesh import Mesh, Partial
from ckptool.core.shards import LocalShard, local_shards
from ckptool.errors import CkptoolError, Damaged, Problem, coded
from ckptool.formats._dtensor import DTensorShare, ShardedShare, sharded_share
from ckptool.formats._pickle import Call
from ckptool.formats._quantised import quantised_notes
from ckptool.formats._storage import StoredTensor, place_of, plain_tensor
from ckptool.formats._torch_file import TorchFile
from ckptool.formats._tree import leaves, unique_names
from ckptool.formats.base import Source


@dataclass(frozen=True, slots=True)
class PlainLeaf:
    """A tensor in a rank's file that says nothing of sharding."""

    place: Place
    tensor: StoredTensor


@dataclass(frozen=True, slots=True)
class ShareLeaf:
    """A rank's part of a DTensor or ShardedTensor, with where each local tensor lies."""

    share: DTensorShare | ShardedShare
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One named value of one rank's file. ``rank_state`` marks state that belongs to a rank."""

    path: Path
    value: Any
    rank_state: bool = False


RankLeaves = Mapping[str, Leaf]


def read_leaves(
    file: TorchFile, source: Source, *, prefix: Path = (), rank_state: bool = False
) -> dict[str, Leaf]:
    """The named values of one file: tensors as leaves of their kind, all else as it is."""
    found: dict[str, Leaf] = {}
    if file.value == {}:
        return found
    found_leaves = leaves(file.value, what=file.what, pickled=file.pickled)
    named = unique_names(found_leaves, what=file.what)
    for name, (path, value) in named.items():
        full = (*prefix, *path)
        leaf = Leaf(full, _classified(value, file, source, name), rank_state)
        found[flat_name(full) or name] = leaf
    return found


def _classified(value: Any, file: TorchFile, source: Source, name: str) -> Any:
    try:
        with coded("tensor-record"):
            tensor = plain_tensor(value)
            if tensor is not None:
                return PlainLeaf(place_of(tensor, file), tensor)
        with coded("dtensor-contradiction"):
            share = sharded_share(value, file, source)
    except Damaged as error:
        raise error.within(name, tensor=name) from None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        message = f"{name}: {file.what}: a tensor record that contradicts itself"
        raise Damaged(Problem(message, "tensor-record", tensor=name)) from None
    if share is None:
        return value
    locals_ = [share.local] if isinstance(share, DTensorShare) else [t for _, t in share.local]
    return ShareLeaf(share, tuple(place_of(tensor, file) for tensor in locals_))


@dataclass(slots=True)
class Assembled:
    """What all ranks' files hold together.

    ``conflicts`` are plain tensors that differ between ranks, by name; ``problems`` are other
    contradictions. None is repaired.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, ObjectEntry] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    conflicts: dict[str, str] = field(default_factory=dict)
    meshes: list[Mesh] = field(default_factory=list)


def assemble(ranks: Mapping[int, RankLeaves], *, per_rank: bool = False) -> Assembled:
    """Merge the ranks' values by name.

    Sharded tensors are placed by their own records. Plain tensors and values that are the same
    on all ranks that hold them become one; values that differ are kept as ``NAME@rankR``; plain
    tensors that differ are a conflict, unless ``per_rank`` asks to keep them likewise.
    """
    result = Assembled()
    names = dict.fromkeys(name for found in ranks.values() for name in found)
    result.notes += quantised_notes(names)
    for name in names:
        held = {rank: found[name] for rank, found in ranks.items() if name in found}
        try:
            _merge(name, held, result, per_rank)
        except CkptoolError as error:
            result.problems.append(error.message.within(name, tensor=name))
    return result


def _merge(name: str, held: dict[int, Leaf], result: Assembled, per_rank: bool) -> None:
    kinds = {_kind(leaf.value) for leaf in held.values()}
    if len(kinds) > 1:
        message = f"is {' on some ranks, '.join(sorted(kinds))} on others"
        raise Damaged(Problem(message, "ranks-disagree"))
    first = next(iter(held.values()))
    if kinds == {"DTensor"}:
        with coded("dtensor-contradiction"):
            _merge_dtensor(name, held, result, per_rank or first.rank_state)
    elif kinds == {"ShardedTensor"}:
        with coded("dtensor-contradiction"):
            _merge_sharded(name, held, result)
    elif kinds == {"plain tensor"}:
        _merge_plain(name, held, result, per_rank or first.rank_state)
    else:
        _merge_object(name, held, result)


def _kind(value: Any) -> str:
    if isinstance(value, PlainLeaf):
        return "plain tensor"
    if isinstance(value, ShareLeaf):
        return "DTensor" if isinstance(value.share, DTensorShare) else "ShardedTensor"
    return "no tensor"


# DTensors


def _merge_dtensor(name: str, held: dict[int, Leaf], result: Assembled, keep: bool) -> None:
    first: DTensorShare = next(iter(held.values())).value.share
    partial = [p for p in first.placements if isinstance(p, Partial)]
    if partial:
        message = f"not read: {name} is {partial[0]}: each rank holds an addend, not the values"
        result.notes.append(Problem(message, "tensor-unread", tensor=name))
        return
    stages = _stages(held)
    if not _differ(stages):
        result.tensors[name] = _dtensor_entry(name, held)
    elif keep:
        for stage in stages:
            rank, leaf = next(iter(stage.items()))
            one = f"{name}@rank{rank}"
            entry = _dtensor_entry(one, stage)
            result.tensors[one] = replace(entry, path=_at_rank(leaf.path, rank))
    else:
        ranks = " and ".join(_listed(stage) for stage in stages)
        message = f"{name}: the DTensors of the device meshes of ranks {ranks} differ: pipeline"
        message += " stages with names of their own, or replicas that went apart"
        result.conflicts[name] = Problem(message, "replicas-differ", tensor=name)
    result.meshes += dict.fromkeys(leaf.value.share.mesh for leaf in held.values())


def _stages(held: dict[int, Leaf]) -> list[dict[int, Leaf]]:
    """The ranks by their device mesh, where no rank is in two; else all together."""
    by_mesh: dict[Mesh, dict[int, Leaf]] = {}
    for rank, leaf in held.items():
        by_mesh.setdefault(leaf.value.share.mesh, {})[rank] = leaf
    ranks = [rank for mesh in by_mesh for rank in mesh.ranks]
    return list(by_mesh.values()) if len(set(ranks)) == len(ranks) else [held]


def _differ(stages: list[dict[int, Leaf]]) -> bool:
    """Whether records or checksums prove that device meshes hold different tensors."""
    first, *others = map(_by_position, stages)
    return any(
        one.kept_as != other[position].kept_as or one.differs_from(other[position])
        for other in others
        for position, one in first.items()
        if position in other
    )


@dataclass(frozen=True, slots=True)
class _Local:
    """What one rank of a mesh has of a DTensor."""

    share: DTensorShare
    place: Place

    @property
    def kept_as(self) -> tuple[object, ...]:
        share = self.share
        return (share.dtype, share.shape, share.mesh.shape, tuple(map(str, share.placements)))

    def differs_from(self, other: _Local) -> bool:
        one = PlainLeaf(self.place, self.share.local)
        return same_bytes(one, PlainLeaf(other.place, other.share.local)) is False


def _by_position(stage: dict[int, Leaf]) -> dict[int, _Local]:
    """The local tensors of one device mesh by their place in it."""
    return {
        leaf.value.share.mesh.ranks.index(rank): _Local(leaf.value.share, leaf.value.places[0])
        for rank, leaf in stage.items()
        if rank in leaf.value.share.mesh.ranks
    }


def _dtensor_entry(name: str, held: dict[int, Leaf]) -> TensorEntry:
    """The DTensor that ranks hold; Damaged where their records contradict one another."""
    shares = {rank: leaf.value.share for rank, leaf in held.items()}
    first: DTensorShare = next(iter(shares.values()))
    for rank, share in shares.items():
        if (share.dtype, share.shape) != (first.dtype, first.shape):
            message = f"rank {rank} says {share.dtype} {list(share.shape)},"
            message += f" another {first.dtype} {list(first.shape)}"
            raise Damaged(Problem(message, "ranks-disagree"))
        if share.local.dtype != share.dtype:
            raise Damaged(f"rank {rank} holds {share.local.dtype}, its record says {share.dtype}")
        if tuple(map(str, share.placements)) != tuple(map(str, first.placements)):
            raise Damaged(f"rank {rank} has other placements than the rest")
    chunks: list[Chunk] = []
    for mesh in dict.fromkeys(share.mesh for share in shares.values()):
        chunks += _dtensor_chunks(mesh, held)
    return TensorEntry(
        name,
        next(iter(held.values())).path,
        first.dtype,
        first.shape,
        merge_copies(chunks),
        first.placements,
        first.mesh,
    )


def _dtensor_chunks(mesh: Mesh, held: dict[int, Leaf]) -> list[Chunk]:
    members = {
        position: held[rank]
        for position, rank in enumerate(mesh.ranks)
        if rank in held and held[rank].value.share.mesh == mesh
    }
    if not members:
        raise Damaged(f"its device mesh {list(mesh.ranks)} has none of the ranks that hold it")
    share: DTensorShare = next(iter(members.values())).value.share
    found = local_shards(
        share.shape,
        mesh.shape,
        share.placements,
        local_shapes={p: leaf.value.share.local.shape for p, leaf in members.items()},
        shard_order=share.shard_order,
    )
    chunks: list[Chunk] = []
    for position, leaf in members.items():
        chunks += _pieces(found[position], leaf.value.places[0], mesh.ranks[position], share.shape)
    return chunks


def _pieces(shard: LocalShard, at: Place, rank: int, shape: tuple[int, ...]) -> list[Chunk]:
    if not shard.pieces:
        return [Chunk(_empty_box(shape, shard.shape), at, rank)]
    return [Chunk(piece.box, shifted(at, piece.local.lo), rank) for piece in shard.pieces]


def _empty_box(shape: tuple[int, ...], local: tuple[int, ...]) -> Box:
    """A box without elements, at the far edge of the dims a rank holds nothing of."""
    lo = tuple(n if m == 0 else 0 for n, m in zip(shape, local, strict=True))
    return Box(lo, tuple(l + m for l, m in zip(lo, local, strict=True)))


def shifted(at: Place, start: tuple[int, ...]) -> Place:
    """The place of the part of a tensor that begins at index ``start``."""
    if isinstance(at, Extent):
        return replace(at, offset=at.offset + _distance(start, at.strides))
    if isinstance(at, Packed):
        return replace(at, start=at.start + _distance(start, at.strides))
    raise TypeError(f"{at} cannot be shifted")


def _distance(start: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(i * s for i, s in zip(start, strides, strict=True))


# ShardedTensors


def _merge_sharded(name: str, held: dict[int, Leaf], result: Assembled) -> None:
    first: ShardedShare = next(iter(held.values())).value.share
    chunks: list[Chunk] = []
    for rank, leaf in held.items():
        share: ShardedShare = leaf.value.share
        if (share.dtype, share.shape, share.boxes) != (first.dtype, first.shape, first.boxes):
            raise Damaged(f"rank {rank}'s record of all shards differs from the other ranks'")
        for (box, tensor), place in zip(share.local, leaf.value.places, strict=True):
            if tensor.shape != box.shape or tensor.dtype != share.dtype:
                raise Damaged(
                    f"rank {rank} holds {tensor.dtype} {list(tensor.shape)} where its record says"
                    f" {share.dtype} {list(box.shape)}"
                )
            chunks.append(Chunk(box, place, rank))
    missing = {owner for _, owner in first.boxes if owner is not None} - set(held)
    if missing:
        raise Damaged(Problem(f"the shards of rank {_listed(missing)} are missing", "rank-missing"))
    path = next(iter(held.values())).path
    entry = TensorEntry(name, path, first.dtype, first.shape, merge_copies(chunks))
    result.tensors[name] = entry


# Plain tensors


def _merge_plain(name: str, held: dict[int, Leaf], result: Assembled, keep: bool) -> None:
    difference = _difference(held)
    if difference is None:
        first = next(iter(held.values()))
        result.tensors[name] = _plain_entry(name, first.path, held)
    elif keep:
        for rank, leaf in held.items():
            one = f"{name}@rank{rank}"
            result.tensors[one] = _plain_entry(one, _at_rank(leaf.path, rank), {rank: leaf})
    else:
        message = f"{name}: plain tensors that {difference}; nothing says how they fit together"
        code = "replicas-differ" if "content" in difference else "ranks-disagree"
        result.conflicts[name] = Problem(message, code, tensor=name)


def _difference(held: dict[int, Leaf]) -> str | None:
    """How plain tensors of several ranks differ as far as headers show; None where they do not."""
    (first_rank, first), *others = held.items()
    one: StoredTensor = first.value.tensor
    for rank, leaf in others:
        tensor: StoredTensor = leaf.value.tensor
        if (tensor.dtype, tensor.shape) != (one.dtype, one.shape):
            return (
                f"differ in shape or type: {one.dtype} {list(one.shape)} on rank {first_rank},"
                f" {tensor.dtype} {list(tensor.shape)} on rank {rank}"
            )
        if same_bytes(first.value, leaf.value) is False:
            return f"differ in content between rank {first_rank} and rank {rank}"
    return None


def same_bytes(one: PlainLeaf, other: PlainLeaf) -> bool | None:
    """Whether the recorded checksums prove two tensors equal (True) or different (False)."""
    a, b = one.place, other.place
    if not isinstance(a, Extent) or not isinstance(b, Extent) or not a.record or not b.record:
        return None
    if a.record.crc32 == b.record.crc32 and a.record.nbytes == b.record.nbytes:
        same = (a.offset - a.record.offset, a.strides, a.ops)
        return True if same == (b.offset - b.record.offset, b.strides, b.ops) else None
    whole = one.tensor.fills_storage and other.tensor.fills_storage and a.ops == b.ops
    return False if whole else None


def _plain_entry(name: str, path: Path, held: dict[int, Leaf]) -> TensorEntry:
    tensor: StoredTensor = next(iter(held.values())).value.tensor
    box = Box.whole(tensor.shape)
    chunks = [Chunk(box, leaf.value.place, rank) for rank, leaf in held.items()]
    return TensorEntry(name, path, tensor.dtype, tensor.shape, merge_copies(chunks))


# Values


def _merge_object(name: str, held: dict[int, Leaf], result: Assembled) -> None:
    (_, first), *others = held.items()
    if all(same_value(first.value, leaf.value) for _, leaf in others):
        result.objects[name] = ObjectEntry(name, first.path, first.value)
        return
    for rank, leaf in held.items():
        one = f"{name}@rank{rank}"
        result.objects[one] = ObjectEntry(one, _at_rank(leaf.path, rank), leaf.value)


def _at_rank(path: Path, rank: int) -> Path:
    return (*path[:-1], RankStep(path[-1], rank)) if path else (RankStep("value", rank),)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values read from pickles are equal, inert records included."""
    compared: set[tuple[int, int]] = set()
    stack = [(one, other)]
    while stack:
        a, b = stack.pop()
        if a is b or (id(a), id(b)) in compared:
            continue
        if type(a) is not type(b):
            return False
        compared.add((id(a), id(b)))
        inner = _pairs(a, b)
        if inner is None:
            return False
        stack += inner
    return True


def _pairs(one: Any, other: Any) -> list[tuple[Any, Any]] | None:
    """What must be equal inside two values of one type; None where they differ themselves."""
    if isinstance(one, Call):
        parts = ("function", "args", "state", "items", "entries")
        return [(getattr(one, part), getattr(other, part)) for part in parts]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return None
        return [(value, other[key]) for key, value in one.items()]
    if isinstance(one, list | tuple):
        return list(zip(one, other, strict=True)) if len(one) == len(other) else None
    if isinstance(one, float):
        return [] if one == other or (one != one and other != other) else None
    return [] if one == other else None


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
