"""Assemble the global tensors from each rank's file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ckptool.core.box import Box
from ckptool.core.catalog import (
    Chunk,
    Extent,
    ObjectEntry,
    Place,
    RankStep,
    TensorEntry,
    merge_copies,
)
from ckptool.core.chunks import proved_equal
from ckptool.core.mesh import Mesh, Partial
from ckptool.core.sharding.dtensor import LocalShard, local_shards
from ckptool.core.state_category import is_of_a_rank
from ckptool.core.views import shift_place
from ckptool.errors import CkptoolError, Damaged, Problem, Refusal, coded
from ckptool.serialization.archive.dtensor import DeclaredShare, DTensorShare, ShardedShare
from ckptool.serialization.archive.quantized import describe_quantized
from ckptool.serialization.archive.tensors import StoredTensor
from ckptool.serialization.state_dict.leaves import (
    Assembled,
    Leaf,
    PlainLeaf,
    RankLeaves,
    ShareLeaf,
)
from ckptool.serialization.state_dict.values import refuse_unread, same_value, unread_tensor

_MOST_SHOWN = 12
_REFUSED = "refused"

_Leaves = Mapping[int, Leaf]
"""The values of one name, by rank; at least one."""


def assemble(ranks: Mapping[int, RankLeaves], *, per_rank: bool = False) -> Assembled:
    """Merge the ranks' values by name.

    Sharded tensors are placed by their own records. Plain tensors and values that are equal on all
    ranks that hold them become one; values that differ are kept as ``NAME@rankR``; plain tensors
    that differ are a conflict, unless ``per_rank`` keeps them likewise.
    """
    result = Assembled()
    names = dict.fromkeys(name for by_name in ranks.values() for name in by_name)
    notes = (leaf.note for by_name in ranks.values() for leaf in by_name.values() if leaf.note)
    result.notes += [*dict.fromkeys(notes), *describe_quantized(names), *_attribute_notes(ranks)]
    for name in names:
        leaves = {rank: by_name[name] for rank, by_name in ranks.items() if name in by_name}
        try:
            _merge(name, leaves, result, per_rank)
        except CkptoolError as error:
            result.problems.append(error.message.within(name, tensor=name))
    return result


def _merge(name: str, leaves: _Leaves, result: Assembled, per_rank: bool) -> None:
    """Merge the ranks' entries of one name; Damaged if they contradict one another."""
    kinds = {_kind(leaf.value) for leaf in leaves.values()}
    if _REFUSED in kinds:
        _merge_refused(name, leaves, result)
        return
    is_own = _first(leaves).rank_state or is_of_a_rank(_first(leaves).path)
    if len(kinds) > 1:
        message = f"is {' on some ranks, '.join(sorted(kinds))} on others"
        raise Damaged(message, "ranks-disagree")
    keep = per_rank or is_own
    with coded("dtensor-contradiction"):
        if kinds == {DTensorShare.kind}:
            _merge_dtensor(name, leaves, result, keep)
        elif kinds == {ShardedShare.kind}:
            result.tensors[name] = _entry(name, leaves, _sharded_chunks(leaves))
        elif kinds == {DeclaredShare.kind}:
            result.tensors[name] = _entry(name, leaves, _declared_chunks(leaves))
        elif kinds == {PlainLeaf.kind}:
            _merge_plain(name, leaves, result, keep, is_own=is_own)
        else:
            _merge_object(name, leaves, result)


def _first(leaves: _Leaves) -> Leaf:
    return next(iter(leaves.values()))


def _kind(value: Any) -> str:
    if isinstance(value, PlainLeaf | ShareLeaf):
        return value.kind
    return _REFUSED if isinstance(value, Refusal) else "not a tensor"


def _merge_refused(name: str, leaves: _Leaves, result: Assembled) -> None:
    """Keep the reason why a value is refused; if values differ, as ``NAME@rankR`` for each rank."""
    refused = {r: leaf.value for r, leaf in leaves.items() if isinstance(leaf.value, Refusal)}
    values = {rank: leaf for rank, leaf in leaves.items() if rank not in refused}
    may_be_tensor = any(why.may_be_tensor for why in refused.values())
    is_tensor = any(isinstance(leaf.value, PlainLeaf | ShareLeaf) for leaf in values.values())
    first, *rest = [refused[r].record if r in refused else leaf.value for r, leaf in leaves.items()]
    if may_be_tensor or is_tensor or all(same_value(first, value) for value in rest):
        result.conflicts[name] = next(iter(refused.values()))
        return
    result.conflicts |= {f"{name}@rank{rank}": why for rank, why in refused.items()}
    _keep_values(name, values, result)


def _attribute_notes(ranks: Mapping[int, RankLeaves]) -> list[str]:
    """Return one note for all tensor attributes that are not carried over; none without any."""
    tensors: dict[str, set[str]] = {}
    for leaves in ranks.values():
        for name, leaf in leaves.items():
            if isinstance(leaf.value, PlainLeaf | ShareLeaf):
                for attribute in leaf.value.attributes:
                    tensors.setdefault(attribute, set()).add(name)
    if not tensors:
        return []
    shown = sorted(tensors)[:_MOST_SHOWN]
    counts = [f"{attribute} of {_count_names(tensors[attribute])}" for attribute in shown]
    more = [f"{len(tensors) - len(shown):,} more"] if len(tensors) > len(shown) else []
    return [f"tensor attributes not carried over: {', '.join([*counts, *more])}"]


def _count_names(names: set[str]) -> str:
    return min(names) if len(names) == 1 else f"{len(names):,} tensors"


def _merge_plain(
    name: str, leaves: _Leaves, result: Assembled, keep: bool, *, is_own: bool
) -> None:
    """Add the plain tensor of ranks; state of each rank becomes one if checksums prove it equal."""
    difference = _difference(leaves)
    are_apart = difference is not None or (is_own and not _are_proved_equal(leaves))
    if keep and are_apart:
        for rank in leaves:
            rank_name, leaf = _take_value(name, rank, leaves)
            entry = _plain_entry(rank_name, {rank: leaf})
            is_other = is_of_a_rank(_first(leaves).path)  # whatever it is called
            result.tensors[rank_name] = replace(entry, part="other") if is_other else entry
    elif difference is not None:
        message = f"{name}: plain tensors that {difference}; cannot determine how to merge them"
        code = "replicas-differ" if "content" in difference else "ranks-disagree"
        result.conflicts[name] = Problem(message, code, tensor=name)
    else:
        result.tensors[name] = _plain_entry(name, leaves)


def _difference(leaves: _Leaves) -> str | None:
    """Return how plain tensors of ranks differ as far as headers show; None if they do not."""
    (first_rank, first), *rest = leaves.items()
    expected: StoredTensor = first.value.tensor
    for rank, leaf in rest:
        tensor: StoredTensor = leaf.value.tensor
        if (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
            return (
                f"differ in shape or type: {expected.dtype} {list(expected.shape)} on rank"
                f" {first_rank}, {tensor.dtype} {list(tensor.shape)} on rank {rank}"
            )
        if _contents_differ(first.value, leaf.value):
            return f"differ in content between rank {first_rank} and rank {rank}"
    return None


def _are_proved_equal(leaves: _Leaves) -> bool:
    first, *rest = (leaf.value.place for leaf in leaves.values())
    return all(proved_equal(first, other) for other in rest)


def _contents_differ(a: PlainLeaf, b: PlainLeaf) -> bool:
    """Return whether the recorded checksums prove two tensors of one type and shape different."""
    x, y = a.place, b.place
    if not isinstance(x, Extent) or not isinstance(y, Extent) or not x.record or not y.record:
        return False
    if x.record.crc32 == y.record.crc32 and x.record.nbytes == y.record.nbytes:
        return False
    return a.tensor.fills_storage and b.tensor.fills_storage and x.ops == y.ops


def _plain_entry(name: str, leaves: _Leaves) -> TensorEntry:
    box = Box.whole(_first(leaves).value.shape)
    return _entry(name, leaves, [Chunk(box, leaf.value.place, at) for at, leaf in leaves.items()])


def _entry(
    name: str, leaves: _Leaves, chunks: Iterable[Chunk], mesh: Mesh | None = None
) -> TensorEntry:
    """Return the tensor that ranks hold these chunks of."""
    first = _first(leaves)
    whole: Any = first.value if isinstance(first.value, PlainLeaf) else first.value.share
    merged = merge_copies(list(chunks))
    placements = whole.placements if mesh is not None else None
    return TensorEntry(name, first.path, whole.dtype, whole.shape, merged, placements, mesh)


def _merge_object(name: str, leaves: _Leaves, result: Assembled) -> None:
    first, *rest = leaves.values()
    unread = (unread_tensor(name, leaf.value) for leaf in leaves.values())
    if why := next(filter(None, unread), None):
        result.conflicts[name] = why
    elif all(same_value(first.value, leaf.value) for leaf in rest):
        result.objects[name] = ObjectEntry(name, first.path, first.value)
    else:
        _keep_values(name, leaves, result)


def _keep_values(name: str, leaves: _Leaves, result: Assembled) -> None:
    """Keep each rank's value as its own."""
    for rank in leaves:
        rank_name, leaf = _take_value(name, rank, leaves)
        result.objects[rank_name] = ObjectEntry(rank_name, leaf.path, leaf.value)


def _take_value(name: str, rank: int, leaves: _Leaves) -> tuple[str, Leaf]:
    """Return one rank's value, at a path and under a name of its own."""
    *parents, last = leaves[rank].path or ("value",)
    return f"{name}@rank{rank}", replace(leaves[rank], path=(*parents, RankStep(last, rank)))


def _merge_dtensor(name: str, leaves: _Leaves, result: Assembled, keep: bool) -> None:
    """Add the DTensor that ranks hold.

    If device meshes hold different ones it is a conflict, or with ``keep`` one tensor per mesh. A
    partial one is refused. Raises Damaged if records contradict one another.
    """
    first: DTensorShare = _first(leaves).value.share
    partial = [p for p in first.placements if isinstance(p, Partial)]
    if partial:
        reason = f"{partial[0]}: ranks hold partial sums, not values"
        result.conflicts[name] = refuse_unread(name, reason)
        return
    meshes = _meshes_of(leaves)
    stages = _stages(leaves, meshes)
    if not _stages_differ(stages):
        result.tensors[name] = _dtensor_entry(name, leaves, meshes)
    elif keep:
        for stage in stages:
            rank = next(iter(stage))
            key, leaf = _take_value(name, rank, stage)
            result.tensors[key] = _dtensor_entry(key, {**stage, rank: leaf}, _meshes_of(stage))
    else:
        ranks = " and ".join(_list_ranks(stage) for stage in stages)
        message = f"{name}: the DTensors of the device meshes of ranks {ranks} differ: pipeline"
        message += " stages with names of their own, or replicas that diverged"
        result.conflicts[name] = Problem(message, "replicas-differ", tensor=name)
    result.meshes += meshes
    if first.how is not None:
        result.mesh_records.add(first.how)


def _meshes_of(leaves: _Leaves) -> list[Mesh]:
    """Return the device meshes of DTensors, each once: most share one object."""
    objects = {id(leaf.value.share.mesh): leaf.value.share.mesh for leaf in leaves.values()}
    return [*dict.fromkeys(objects.values())]


def _stages(leaves: _Leaves, meshes: Sequence[Mesh]) -> list[_Leaves]:
    """Return the ranks by their device mesh, if no rank is in two; else all together."""
    if len(meshes) == 1:
        return [leaves]
    by_mesh: dict[Mesh, dict[int, Leaf]] = {}
    for rank, leaf in leaves.items():
        by_mesh.setdefault(leaf.value.share.mesh, {})[rank] = leaf
    ranks = [rank for mesh in by_mesh for rank in mesh.ranks]
    return list(by_mesh.values()) if len(set(ranks)) == len(ranks) else [leaves]


def _stages_differ(stages: list[_Leaves]) -> bool:
    """Return whether records or checksums prove that device meshes hold different tensors."""
    if len(stages) == 1:
        return False
    first, *rest = map(_by_position, stages)
    return any(
        _locals_differ(first[position], leaf)
        for other in rest
        for position, leaf in other.items()
        if position in first
    )


def _by_position(stage: _Leaves) -> dict[int, Leaf]:
    """Return the leaves of one device mesh by their position in it."""
    return {
        leaf.value.share.mesh.ranks.index(rank): leaf
        for rank, leaf in stage.items()
        if rank in leaf.value.share.mesh.ranks
    }


def _locals_differ(a: Leaf, b: Leaf) -> bool:
    """Return whether two ranks hold different tensors at the same position of two meshes."""
    x: DTensorShare = a.value.share
    y: DTensorShare = b.value.share
    if (x.dtype, x.shape, x.mesh.shape) != (y.dtype, y.shape, y.mesh.shape):
        return True
    contents = PlainLeaf(a.value.places[0], x.local), PlainLeaf(b.value.places[0], y.local)
    return _spelt(x) != _spelt(y) or _contents_differ(*contents)


def _spelt(share: DTensorShare) -> tuple[str, ...]:
    return tuple(map(str, share.placements))


def _dtensor_entry(name: str, leaves: _Leaves, meshes: Sequence[Mesh]) -> TensorEntry:
    """Return the DTensor that ranks hold; Damaged if their records contradict one another."""
    _require_one_whole(leaves)
    shares: dict[int, DTensorShare] = {rank: leaf.value.share for rank, leaf in leaves.items()}
    first = next(iter(shares.values()))
    for rank, share in shares.items():
        if share.local.dtype != share.dtype:
            raise Damaged(f"rank {rank} has {share.local.dtype}, its record {share.dtype}")
        if share.placements != first.placements and _spelt(share) != _spelt(first):
            raise Damaged(f"rank {rank} has different placements from the other ranks")
    chunks = (chunk for mesh in meshes for chunk in _dtensor_chunks(mesh, leaves))
    return _entry(name, leaves, chunks, first.mesh)


def _require_one_whole(leaves: _Leaves) -> None:
    """Raise Damaged if ranks disagree on the element type and shape of the whole tensor."""
    (first_rank, leaf), *rest = leaves.items()
    first = leaf.value.share
    for rank, other in rest:
        share = other.value.share
        if (share.dtype, share.shape) != (first.dtype, first.shape):
            message = f"{first.dtype} {list(first.shape)} on rank {first_rank},"
            message += f" {share.dtype} {list(share.shape)} on rank {rank}"
            raise Damaged(message, "ranks-disagree")


def _dtensor_chunks(mesh: Mesh, leaves: _Leaves) -> list[Chunk]:
    members = {
        position: leaves[rank].value
        for position, rank in enumerate(mesh.ranks)
        if rank in leaves and leaves[rank].value.share.mesh == mesh
    }
    if not members:
        ranks = list(mesh.ranks)
        raise Damaged(f"its device mesh {ranks} contains none of the ranks that store it")
    share: DTensorShare = next(iter(members.values())).share
    shards = local_shards(
        share.shape,
        mesh.shape,
        share.placements,
        local_shapes={position: member.share.local.shape for position, member in members.items()},
        shard_order=share.shard_order,
    )
    chunks: list[Chunk] = []
    for position, member in members.items():
        rank, at = mesh.ranks[position], member.places[0]
        chunks += _shard_chunks(shards[position], at, rank, share.shape)
    return chunks


def _shard_chunks(shard: LocalShard, at: Place, rank: int, shape: tuple[int, ...]) -> list[Chunk]:
    """Return the chunks of a rank's shard; one without elements if it has none.

    That is at the far edge of the dims that the rank has nothing of.
    """
    if shard.pieces:
        return [Chunk(piece.box, shift_place(at, piece.local.lo), rank) for piece in shard.pieces]
    lo = tuple(0 if local else size for size, local in zip(shape, shard.shape, strict=True))
    return [Chunk(Box.at(lo, shard.shape), at, rank)]


def _sharded_chunks(leaves: _Leaves) -> list[Chunk]:
    """Return the chunks of a ShardedTensor; Damaged if a rank's shards are missing."""
    first: ShardedShare = _first(leaves).value.share
    chunks: list[Chunk] = []
    for rank, leaf in leaves.items():
        share: ShardedShare = leaf.value.share
        if (share.dtype, share.shape, share.boxes) != (first.dtype, first.shape, first.boxes):
            raise Damaged(f"rank {rank}'s record of all shards differs from the other ranks'")
        for (box, tensor), place in zip(share.local, leaf.value.places, strict=True):
            if tensor.shape != box.shape or tensor.dtype != share.dtype:
                message = f"rank {rank} has {tensor.dtype} {list(tensor.shape)},"
                raise Damaged(f"{message} its record {share.dtype} {list(box.shape)}")
            chunks.append(Chunk(box, place, rank))
    missing = {owner for _, owner in first.boxes if owner is not None} - set(leaves)
    if missing:
        raise Damaged(f"the shards of rank {_list_ranks(missing)} are missing", "rank-missing")
    return chunks


def _declared_chunks(leaves: _Leaves) -> list[Chunk]:
    """Return the chunks that attributes declare; Damaged if ranks' wholes differ."""
    _require_one_whole(leaves)
    return [
        Chunk(piece.box, shift_place(leaf.value.places[0], piece.local.lo), rank)
        for rank, leaf in leaves.items()
        for piece in leaf.value.share.pieces
    ]


def _list_ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
