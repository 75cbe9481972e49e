"""Put the global tensors together from what each rank's file holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptool.core.box import Box
from ckptool.core.catalog import Chunk, ObjectEntry, Path, TensorEntry, merge_copies
from ckptool.errors import CkptoolError, Damaged, Problem, Refusal, coded
from ckptool.formats._assemble_shares import (
    at_rank,
    merge_declared,
    merge_dtensor,
    merge_sharded,
    same_bytes,
)
from ckptool.formats._dtensor import DeclaredShare, DTensorShare
from ckptool.formats._leaves import Assembled, Leaf, PlainLeaf, RankLeaves, ShareLeaf
from ckptool.formats._quantised import quantised_notes
from ckptool.formats._storage import StoredTensor
from ckptool.formats._values import same_value

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
        raise Damaged(Problem(message, "ranks-disagree"))
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
    return "no tensor"


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
    return [f"attributes of tensors are not carried: {', '.join([*counts, *more])}"]


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
