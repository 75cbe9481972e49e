"""The named values of one rank's file, and what all ranks' files hold together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptool.core.catalog import ObjectEntry, Path, Place, TensorEntry, flat_name
from ckptool.core.mesh import Mesh
from ckptool.errors import Damaged, Problem, coded
from ckptool.formats._dtensor import DTensorShare, ShardedShare, sharded_share
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
