"""Put the global tensors together from what each rank's file holds.

Put sharded tensors together from the ranks' shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import (
    Chunk,
    Extent,
    ObjectEntry,
    Path,
    Place,
    RankStep,
    TensorEntry,
    merge_copies,
)
from ckptool.core.mesh import Mesh, Partial
from ckptool.core.sharding.dtensor import LocalShard, local_shards
from ckptool.core.views import shifted
from ckptool.errors import CkptoolError, Damaged, Problem, Refusal, coded
from ckptool.serialization.archive.dtensor import DeclaredShare, DTensorShare, ShardedShare
from ckptool.serialization.archive.tensors import StoredTensor, quantised_notes
from ckptool.serialization.state_dict.leaves import (
    Assembled,
    Leaf,
    PlainLeaf,
    RankLeaves,
    ShareLeaf,
)
from ckptool.serialization.state_dict.values import same_value

_MOST_SHOWN = 12


def assemble(ranks: Mapping[int, RankLeaves], *, per_rank: bool = False) -> Assembled:
    """Merge the ranks' values by name.

    Sharded tensors are placed by their own records. Plain tensors and values that are the same
    on all ranks that hold them become one; values that differ are kept as ``NAME@rankR``; plain
    tensors that differ are a conflict, unless ``per_rank`` asks to keep them likewise.
    """
    result = Assembled()
    names = dict.fromkeys(name for found in ranks.values() for name in found)
    said = (leaf.note for found in ranks.values() for leaf in found.values() if leaf.note)
    result.notes += [*dict.fromkeys(said), *quantised_notes(names), *_attribute_notes(ranks)]
    for name in names:
        held = {rank: found[name] for rank, found in ranks.items() if name in found}
        try:
            _merge(name, held, result, per_rank)
        except CkptoolError as error:
            result.problems.append(error.message.within(name, tensor=name))
    return result


def _merge(name: str, held: dict[int, Leaf], result: Assembled, per_rank: bool) -> None:
    refused = {r: leaf.value for r, leaf in held.items() if isinstance(leaf.value, Refusal)}
    if refused:
        _merge_refused(name, held, refused, result)
        return
    kinds = {_kind(leaf.value) for leaf in held.values()}
    if len(kinds) > 1:
        message = f"is {' on some ranks, '.join(sorted(kinds))} on others"
        raise Damaged(message, "ranks-disagree")
    first = next(iter(held.values()))
    if kinds == {"DTensor"}:
        with coded("dtensor-contradiction"):
            merge_dtensor(name, held, result, per_rank or first.rank_state)
    elif kinds == {"ShardedTensor"}:
        with coded("dtensor-contradiction"):
            merge_sharded(name, held, result)
    elif kinds == {"tensor with shards of its own"}:
        with coded("dtensor-contradiction"):
            merge_declared(name, held, result)
    elif kinds == {"plain tensor"}:
        _merge_plain(name, held, result, per_rank or first.rank_state)
    else:
        _merge_object(name, held, result)


def _merge_refused(
    name: str, held: dict[int, Leaf], refused: dict[int, Refusal], result: Assembled
) -> None:
    """Keep why a value is refused; of values that differ, as ``NAME@rankR`` for each rank."""
    others = (leaf.value for rank, leaf in held.items() if rank not in refused)
    if any(why.may_be_tensor for why in refused.values()) or any(map(_is_tensor, others)):
        result.conflicts[name] = next(iter(refused.values()))
        return
    values = [refused[r].record if r in refused else leaf.value for r, leaf in held.items()]
    if all(same_value(values[0], value) for value in values[1:]):
        result.conflicts[name] = next(iter(refused.values()))
        return
    result.conflicts |= {f"{name}@rank{rank}": why for rank, why in refused.items()}
    for rank, leaf in held.items():
        if rank not in refused:
            _keep_value(name, rank, leaf, result)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, PlainLeaf | ShareLeaf)


def _kind(value: Any) -> str:
    if isinstance(value, PlainLeaf):
        return "plain tensor"
    if isinstance(value, ShareLeaf):
        if isinstance(value.share, DeclaredShare):
            return "tensor with shards of its own"
        return "DTensor" if isinstance(value.share, DTensorShare) else "ShardedTensor"
    return "not a tensor"


def _attribute_notes(ranks: Mapping[int, RankLeaves]) -> list[str]:
    """Return one note for all attributes of tensors that are not carried; none where none are."""
    found: dict[str, set[str]] = {}
    for leaves in ranks.values():
        for name, leaf in leaves.items():
            if isinstance(leaf.value, PlainLeaf | ShareLeaf):
                for attribute in leaf.value.attributes:
                    found.setdefault(attribute, set()).add(name)
    if not found:
        return []
    shown = sorted(found)[:_MOST_SHOWN]
    counts = [f"{attribute} of {_counted(found[attribute])}" for attribute in shown]
    more = [f"{len(found) - len(shown):,} more"] if len(found) > len(shown) else []
    return [f"tensor attributes not carried over: {', '.join([*counts, *more])}"]


def _counted(names: set[str]) -> str:
    return min(names) if len(names) == 1 else f"{len(names):,} tensors"


def _merge_plain(name: str, held: dict[int, Leaf], result: Assembled, keep: bool) -> None:
    difference = _difference(held)
    if difference is None:
        first = next(iter(held.values()))
        result.tensors[name] = _plain_entry(name, first.path, held)
    elif keep:
        for rank, leaf in held.items():
            one = f"{name}@rank{rank}"
            result.tensors[one] = _plain_entry(one, at_rank(leaf.path, rank), {rank: leaf})
    else:
        message = f"{name}: plain tensors that {difference}; cannot determine how to merge them"
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


def _plain_entry(name: str, path: Path, held: dict[int, Leaf]) -> TensorEntry:
    tensor: StoredTensor = next(iter(held.values())).value.tensor
    box = Box.whole(tensor.shape)
    chunks = [Chunk(box, leaf.value.place, rank) for rank, leaf in held.items()]
    return TensorEntry(name, path, tensor.dtype, tensor.shape, merge_copies(chunks))


def _merge_object(name: str, held: dict[int, Leaf], result: Assembled) -> None:
    (_, first), *others = held.items()
    if all(same_value(first.value, leaf.value) for _, leaf in others):
        result.objects[name] = ObjectEntry(name, first.path, first.value)
        return
    for rank, leaf in held.items():
        _keep_value(name, rank, leaf, result)


def _keep_value(name: str, rank: int, leaf: Leaf, result: Assembled) -> None:
    """Keep a value as one rank's own."""
    one = f"{name}@rank{rank}"
    result.objects[one] = ObjectEntry(one, at_rank(leaf.path, rank), leaf.value)


def merge_dtensor(name: str, held: dict[int, Leaf], result: Assembled, keep: bool) -> None:
    """Take in the DTensor that ranks hold.

    Where device meshes hold different ones it is a conflict, or with ``keep`` one tensor a mesh. A
    partial one is only noted. Raises Damaged where records contradict one another.
    """
    first: DTensorShare = next(iter(held.values())).value.share
    partial = [p for p in first.placements if isinstance(p, Partial)]
    if partial:
        message = f"not read: {name} is {partial[0]}: ranks hold partial sums, not values"
        result.notes.append(Problem(message, "tensor-unsupported", tensor=name))
        return
    stages = _stages(held)
    if not _differ(stages):
        result.tensors[name] = _dtensor_entry(name, held)
    elif keep:
        for stage in stages:
            rank, leaf = next(iter(stage.items()))
            one = f"{name}@rank{rank}"
            entry = _dtensor_entry(one, stage)
            result.tensors[one] = replace(entry, path=at_rank(leaf.path, rank))
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
            message = f"rank {rank} has {share.dtype} {list(share.shape)},"
            message += f" another {first.dtype} {list(first.shape)}"
            raise Damaged(message, "ranks-disagree")
        if share.local.dtype != share.dtype:
            raise Damaged(f"rank {rank} has {share.local.dtype}, its record {share.dtype}")
        if tuple(map(str, share.placements)) != tuple(map(str, first.placements)):
            raise Damaged(f"rank {rank} has different placements from the other ranks")
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
        raise Damaged(
            f"its device mesh {list(mesh.ranks)} contains none of the ranks that store it"
        )
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


def merge_sharded(name: str, held: dict[int, Leaf], result: Assembled) -> None:
    """Take in the ShardedTensor that ranks hold; Damaged where one's shards are not there."""
    first: ShardedShare = next(iter(held.values())).value.share
    chunks: list[Chunk] = []
    for rank, leaf in held.items():
        share: ShardedShare = leaf.value.share
        if (share.dtype, share.shape, share.boxes) != (first.dtype, first.shape, first.boxes):
            raise Damaged(f"rank {rank}'s record of all shards differs from the other ranks'")
        for (box, tensor), place in zip(share.local, leaf.value.places, strict=True):
            if tensor.shape != box.shape or tensor.dtype != share.dtype:
                raise Damaged(
                    f"rank {rank} has {tensor.dtype} {list(tensor.shape)}, its record"
                    f" {share.dtype} {list(box.shape)}"
                )
            chunks.append(Chunk(box, place, rank))
    missing = {owner for _, owner in first.boxes if owner is not None} - set(held)
    if missing:
        raise Damaged(f"the shards of rank {_listed(missing)} are missing", "rank-missing")
    path = next(iter(held.values())).path
    entry = TensorEntry(name, path, first.dtype, first.shape, merge_copies(chunks))
    result.tensors[name] = entry


def merge_declared(name: str, held: dict[int, Leaf], result: Assembled) -> None:
    """Take in the tensor whose shards the ranks' attributes declare.

    Raises Damaged where ranks disagree on what the whole is.
    """
    (first_rank, leaf), *_ = held.items()
    first: DeclaredShare = leaf.value.share
    chunks: list[Chunk] = []
    for rank, one in held.items():
        share: DeclaredShare = one.value.share
        if (share.dtype, share.shape) != (first.dtype, first.shape):
            message = f"{first.dtype} {list(first.shape)} on rank {first_rank},"
            message += f" {share.dtype} {list(share.shape)} on rank {rank}"
            raise Damaged(message, "ranks-disagree")
        at = one.value.places[0]
        chunks += [Chunk(piece.box, shifted(at, piece.local.lo), rank) for piece in share.pieces]
    result.tensors[name] = TensorEntry(
        name, leaf.path, first.dtype, first.shape, merge_copies(chunks)
    )


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


def at_rank(path: Path, rank: int) -> Path:
    """The path of a value as one rank has it."""
    return (*path[:-1], RankStep(path[-1], rank)) if path else (RankStep("value", rank),)


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
