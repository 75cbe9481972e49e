"""Similar files of ranks: one is read, the others by how their bytes differ from it.

The pickles of ranks with similar shards (torch 2.10 to 2.13) differ only in a few numbers of their
device mesh: the rank, its coordinates, the names of its groups. If that is proved, a file has the
content of the first one, except for the mesh, the places of its storages and their checksums. The
proof is one more pickle with holes in these places, which cannot be computed with: the contents of
the two must be equal everywhere else. Everything else is read in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckptool.core.catalog import Extent, Record
from ckptool.core.mesh import Mesh
from ckptool.errors import CkptoolError, Refusal, coded
from ckptool.serialization.archive.device_mesh import read_mesh
from ckptool.serialization.archive.dtensor import DTensorShare
from ckptool.serialization.archive.read import (
    OpenArchive,
    StoredBytes,
    TorchFile,
    is_zip,
)
from ckptool.serialization.archive.templates import ArchiveTemplate, Template, Templates, Values
from ckptool.serialization.archive.tensors import StoredTensor
from ckptool.serialization.pickle.load import find_globals, read_pickle, remember_globals
from ckptool.serialization.pickle.records import Call, Global, OrderedMapping, Persistent
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.holes import (
    Literal,
    fill_holes,
    find_literals,
    with_holes,
)
from ckptool.serialization.state_dict.leaves import (
    Leaf,
    PlainLeaf,
    ShareLeaf,
    read_file_leaves,
    read_leaves,
)
from ckptool.serialization.state_dict.values import Pairs, pairs_inside, same_value, walk_parts

_LEAST = 1 << 16
"""Bytes of the smallest file that is worth it."""
_LARGEST = 1 << 24
"""Bytes of the largest pickle that is kept with its content."""
_MOST_FILES = 4
"""Firsts that are kept, as of models and optimizers: the next file is compared with each."""
_MOST_DIFFERING = 1 << 10
"""Differing bytes up to which a pickle is searched for literals: names of groups are some."""
_MOST_PROBES = 4
"""Proofs for one first, of which each reads a pickle: more ranks differ in more numbers."""
_OF_A_RANK = ("_rank", "_coordinate_on_dim", "_dim_group_names", "_dim_group_infos")
"""The attributes of a device mesh that differ between its ranks (torch 2.1 to 2.13)."""
_READ_OF_THEM = _OF_A_RANK[:2]
_CONTRADICTIONS = (
    CkptoolError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
)


class AlikeFiles:
    """Reads the files of ranks, one after another; the first of each kind represents the next."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._firsts: list[_First] = []
        self._templates = Templates()

    def read(self, file: str, *, rank_state: bool) -> dict[str, Leaf]:
        """Return the named values of a file, and raise, as ``read_file_leaves`` does."""
        source = self._source
        if source.files[file] < _LEAST or not is_zip(source.read(file, 0, 4)):
            return read_file_leaves(source, file, rank_state=rank_state)
        with coded("archive-content", file=file):
            archive = OpenArchive.of(source, file, self._templates)
            for first in self._firsts:
                leaves = first.leaves_of(archive, source) if first.is_state == rank_state else None
                if leaves is not None:
                    return leaves
            opened = archive.read()
        leaves = read_leaves(opened, source, rank_state=rank_state)
        if len(self._firsts) < _MOST_FILES and len(archive.pickle) <= _LARGEST:
            tensors = _movable_tensors(opened, leaves)
            if tensors is not None:
                first = _First(archive.pickle, opened, leaves, tensors, rank_state)
                self._firsts.append(first)
        return leaves


class _Movable(Struct, frozen=True):
    """A tensor of a file: its leaf, its storage there, and the number of its mesh, -1 if none."""

    leaf: Leaf
    place: Extent
    key: str
    stored: StoredBytes
    mesh: int


def _movable_tensors(opened: TorchFile, leaves: Mapping[str, Leaf]) -> dict[str, _Movable] | None:
    """Return the tensors of a file by name; None if others must not share its content."""
    meshes = {id(mesh): number for number, (mesh, _) in enumerate(opened.meshes.values())}
    movable: dict[str, _Movable] = {}
    for name, leaf in leaves.items():
        value = leaf.value
        if isinstance(value, PlainLeaf):
            place, tensor, mesh = value.place, value.tensor, -1
        elif isinstance(value, ShareLeaf) and isinstance(value.share, DTensorShare):
            place, tensor = value.places[0], value.share.local
            mesh = meshes.get(id(value.share.mesh), -1)
            if mesh < 0:
                return None
        elif isinstance(value, ShareLeaf | Refusal) or _is_of_a_file(value):
            return None
        else:
            continue
        if not isinstance(place, Extent):
            return None
        key = tensor.storage.key
        movable[name] = _Movable(leaf, place, key, opened.storages[key], mesh)
    return None if opened.hostile else movable


def _is_of_a_file(value: Any) -> bool:
    """Return whether a value has a part that differs between similar files."""
    parts = walk_parts(value, hidden=True)
    return any(isinstance(x, Persistent) or (isinstance(x, Call) and _is_mesh(x)) for x in parts)


class _First:
    """A file that was read, and the template of its pickle, in whose holes others may differ."""

    def __init__(
        self,
        pickle: bytes,
        opened: TorchFile,
        leaves: dict[str, Leaf],
        tensors: dict[str, _Movable],
        is_state: bool,
    ) -> None:
        self._pickle, self._opened, self._leaves, self._tensors = pickle, opened, leaves, tensors
        self.is_state = is_state
        self._globals = find_globals(pickle)
        self._literals: tuple[Literal, ...] = ()
        self._template = Template.of(pickle, [(0, len(pickle))], ())
        self._meshes: dict[int, Call] = {}
        self._other_keys = opened.storages.keys() - {tensor.key for tensor in tensors.values()}
        self._places: dict[ArchiveTemplate, list[tuple[Extent, int]]] = {}
        self._probes_left = _MOST_PROBES

    def leaves_of(self, archive: OpenArchive, source: Source) -> dict[str, Leaf] | None:
        """Return the content of another file; None if that must be read in full."""
        pickle, file = archive.pickle, archive.file
        values = self._template.match(pickle)
        if values is None and self._probe(pickle):
            values = self._template.match(pickle)
        if values is None or archive.byteorder() != self._opened.byteorder:
            return None
        storages = archive.storages(self._other_keys)
        opened = replace(self._opened, what=file, storages=storages, meshes={})
        try:
            meshes = self._meshes_of(values, opened, source)
        except _CONTRADICTIONS:
            return None
        places = self._places_in(archive)
        if places is None:
            return None
        leaves = dict(self._leaves)
        for (name, first), at in zip(self._tensors.items(), places, strict=True):
            leaves[name] = _move(first, at, meshes)
        remember_globals(pickle, self._globals)
        return leaves

    def _places_in(self, archive: OpenArchive) -> list[Extent] | None:
        """Return where each tensor is in another file; None if a storage there is different.

        In one that matches the template of an earlier one only checksums differ.
        """
        file, sibling = archive.file, archive.sibling
        has_others = bool(sibling.template.readings) and sibling.has_sums
        pairs = self._places.get(sibling.template) if has_others else None
        if pairs is not None:
            return [_with_sum(at, file, sibling.crcs[number]) for at, number in pairs]
        storages = archive.storages()
        places = [_place(item, storages.get(item.key), file) for item in self._tensors.values()]
        extents = [at for at in places if at is not None]
        if len(extents) < len(places):
            return None
        if has_others:
            numbers = sibling.template.storages
            record_numbers = [numbers[tensor.key] for tensor in self._tensors.values()]
            self._places[sibling.template] = [*zip(extents, record_numbers, strict=True)]
        return extents

    def _unknown_bytes(self, data: bytes) -> list[int]:
        """Return where another pickle differs without proof that it may."""
        import numpy as np

        positions = np.flatnonzero(np.frombuffer(self._pickle, "u1") != np.frombuffer(data, "u1"))
        for literal in self._literals:
            positions = positions[(positions < literal.start) | (positions >= literal.end)]
        return positions.tolist() if len(positions) <= _MOST_DIFFERING else []

    def _probe(self, data: bytes) -> bool:
        """Prove that what differs in another pickle, too, is used only in device meshes."""
        unknown = self._unknown_bytes(data) if len(data) == len(self._pickle) else []
        if not unknown or not self._probes_left:
            return False
        self._probes_left -= 1
        places = [*(literal.start for literal in self._literals), *unknown]
        literals = find_literals(self._pickle, places)
        if literals is None:
            return False
        try:
            other = read_pickle(with_holes(self._pickle, literals), what="", judges=False)
        except CkptoolError:
            return False
        pairs = None if other.hostile else _pair_meshes(self._opened.inert, other.value)
        if pairs is None or not {*self._opened.meshes} <= {record for record, _ in pairs}:
            return False
        self._literals, self._meshes = literals, {id(record): mesh for record, mesh in pairs}
        holes = [literal.hole for literal in literals]
        self._template = Template.of(self._pickle, [(0, len(self._pickle))], holes)
        return True

    def _meshes_of(
        self, values: Values, file: TorchFile, source: Source
    ) -> list[tuple[Mesh, int | None]]:
        """Return the meshes of another file, in order; ValueError if one has another shape.

        Every text is decoded, as whoever reads the pickle alone does.
        """
        meshes = []
        written = [v.decode("utf-8", "surrogatepass") if type(v) is bytes else v for v in values[0]]
        for record, (mesh, _) in self._opened.meshes.items():
            fields = dict(record.fields)
            if id(record) in self._meshes:
                state = self._meshes[id(record)].state
                for name in _READ_OF_THEM:
                    if name in fields:
                        fields[name] = fill_holes(state[name], written)
            own_mesh, rank = read_mesh(fields, file, source)
            if own_mesh.shape != mesh.shape:
                raise ValueError(own_mesh.shape)
            meshes.append((mesh if own_mesh == mesh else own_mesh, rank))
        return meshes


def _place(movable: _Movable, stored: StoredBytes | None, file: str) -> Extent | None:
    """Return where a tensor is in another file; None if its storage there is different."""
    place, original = movable.place, movable.stored
    if stored is None or stored.size != original.size or stored.codec:
        return None
    path, start, nbytes, _, crc, _ = stored
    record = None if crc is None or not nbytes else Record(path, start, nbytes, crc)
    return Extent(file, start + place.offset - original.offset, place.strides, record, place.ops)


def _with_sum(at: Extent, file: str, crc: int) -> Extent:
    """Return a place of another file, with the CRC-32 of its record there."""
    original = at.record
    record = None if original is None else Record(file, original.offset, original.nbytes, crc)
    return Extent(file, at.offset, at.strides, record, at.ops)


def _move(movable: _Movable, at: Extent, meshes: Sequence[tuple[Mesh, int | None]]) -> Leaf:
    """Return a tensor's leaf for another file, where it is at this place."""
    leaf, number = movable.leaf, movable.mesh
    value = leaf.value
    if number < 0:
        tensor: StoredTensor = value.tensor
        return Leaf(leaf.path, PlainLeaf(at, tensor, value.attributes), leaf.rank_state, leaf.note)
    share: DTensorShare = value.share
    dtype, shape, local, placements = share.dtype, share.shape, share.local, share.placements
    mesh, rank = meshes[number]
    order, how = share.shard_order, share.how
    share = DTensorShare(dtype, shape, local, mesh, placements, rank, order, how)
    return Leaf(leaf.path, ShareLeaf(share, (at,), value.attributes), leaf.rank_state, leaf.note)


def _pair_meshes(one: Any, other: Any) -> list[tuple[Call, Call]] | None:
    """Return the meshes of a value, each with that of one with holes; None for holes elsewhere.

    Both are of pickles with the same opcodes, so the same parts of both are shared.
    """
    meshes: list[tuple[Call, Call]] = []

    def inside(a: Any, b: Any) -> Pairs | None:
        if isinstance(a, Call) and _is_mesh(a) and _is_mesh(b):
            meshes.append((a, b))
            checks = [_is_alike(a.state.get(name), b.state.get(name)) for name in _OF_A_RANK]
            parts = _parts_of_mesh(a), _parts_of_mesh(b)
            is_alike = all(checks) and len(parts[0]) == len(parts[1])
            return [*zip(*parts, strict=True)] if is_alike else None
        if isinstance(a, Persistent):
            return [(a.value, b.value)]
        pairs = pairs_inside(a, b)
        attribute = {Call: "is_new", OrderedMapping: "state"}.get(type(a))
        if pairs is not None and attribute is not None:
            pairs.append((getattr(a, attribute, None), getattr(b, attribute, None)))
        return pairs

    return meshes if same_value(one, other, inside) else None


def _is_mesh(record: Call) -> bool:
    function = record.function
    is_class = isinstance(function, Global) and function.name == "DeviceMesh"
    return is_class and type(record.state) is dict and function.module.startswith("torch.")


def _parts_of_mesh(record: Call) -> list[Any]:
    """Return what is equal in a mesh on all of its ranks."""
    fields = record.state.items()
    common = [value for name, value in fields if name not in _OF_A_RANK]
    more = [record.items, record.entries] if record.is_filled else []
    return [record.is_new, record.function, record.args, *record.state, *common, *more]


def _is_alike(one: Any, other: Any) -> bool:
    """Return whether two values are equally long lists or tuples, at last of numbers or texts.

    The second may have holes instead.
    """
    if type(other) is bytearray:
        return type(one) in (int, str)
    if type(one) is not type(other):
        return False
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(_is_alike, one, other))
    return type(one) in (int, str, type(None))
