"""The named values of one rank's file, including refused ones."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from ckptool.core.catalog import Catalog, Index, ObjectEntry, Path, Place, TensorEntry, flat_name
from ckptool.core.dtype import DType
from ckptool.core.mesh import Mesh
from ckptool.core.sharding.dtensor import SHARD_ATTRIBUTES
from ckptool.errors import Damaged, Problem, Refusal, Unsupported, coded, naming
from ckptool.serialization.archive.device_mesh import OF_TORCH, MeshRecord
from ckptool.serialization.archive.dtensor import (
    OF_DTENSORS,
    Share,
    read_declared_share,
    read_share,
)
from ckptool.serialization.archive.read import TorchFile, read_torch_file
from ckptool.serialization.archive.tensors import (
    StoredTensor,
    is_tensor_record,
    locate_tensor,
    read_attributes,
    read_tensor,
)
from ckptool.serialization.pickle.load import require_harmless
from ckptool.serialization.pickle.records import Call, Global
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.tree import StateDictWalk, assign_names
from ckptool.serialization.state_dict.values import (
    collect_globals,
    note_repeated,
    refuse_unread,
    require_bounded,
    unread_tensor,
    walk_parts,
)

_DEEPEST = 100
_ATTRIBUTE = "holds tensors, but is an attribute of a dict"
_T = TypeVar("_T")


class PlainLeaf(Struct, frozen=True):
    """A tensor in a rank's file without sharding information.

    ``attributes`` are the names of other attributes that its record sets.
    """

    place: Place
    tensor: StoredTensor
    attributes: tuple[str, ...] = ()

    kind: ClassVar = "plain tensor"

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape


class ShareLeaf(Struct, frozen=True):
    """A rank's part of a sharded tensor, with the place of each local tensor.

    ``attributes`` are the names of other attributes that its record sets.
    """

    share: Share
    places: tuple[Place, ...]
    attributes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """What it is to users."""
        return self.share.kind


class Leaf(Struct, frozen=True):
    """One named value of one rank's file. ``rank_state`` marks state that belongs to a rank.

    ``note`` is a remark for the user on how it was read, or what it was taken from. The value is a
    ``Refusal`` if it cannot or must not be read.
    """

    path: Path
    value: Any
    rank_state: bool = False
    note: str | None = None


RankLeaves = Mapping[str, Leaf]


class Assembled(Struct):
    """The content of all ranks' files together.

    ``conflicts`` are plain tensors that differ between ranks, by name, and refusals; ``problems``
    are other contradictions. None is repaired.
    """

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, ObjectEntry] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    conflicts: dict[str, str] = field(default_factory=dict)
    meshes: list[Mesh] = field(default_factory=list)
    mesh_records: set[MeshRecord] = field(default_factory=set)

    @property
    def info(self) -> dict[str, str]:
        """Return the entry of ``Catalog.info`` for how device meshes are recorded, if all alike."""
        records = [how.value for how in self.mesh_records]
        return {OF_TORCH: records[0]} if len(records) == 1 else {}

    @property
    def refusals(self) -> dict[str, Refusal]:
        """Return the conflicts that are refusals, by name."""
        return {name: why for name, why in self.conflicts.items() if isinstance(why, Refusal)}

    def add(self, other: Assembled) -> None:
        """Add the content of another part of the checkpoint."""
        self.tensors |= other.tensors
        self.objects |= other.objects
        self.notes += other.notes
        self.problems += other.problems
        self.conflicts |= other.conflicts
        self.meshes += other.meshes
        self.mesh_records |= other.mesh_records

    def take_problems(self) -> list[str]:
        """Return and remove the problems, and the conflicts that are not refusals."""
        conflicts, self.conflicts = self.conflicts, dict(self.refusals)
        return [*self.problems, *(why for n, why in conflicts.items() if n not in self.conflicts)]

    def catalog(self, name: str, source: Source, files: Iterable[str], **facts: Any) -> Catalog:
        """Return the content as a catalog of a format, with its ``files`` that are there.

        ``facts`` are other fields of the catalog.
        """
        return Catalog(
            name,
            self.tensors,
            self.objects,
            {file: source.files[file] for file in files if file in source.files},
            notes=tuple(dict.fromkeys([*self.notes, *note_repeated(self.objects)])),
            conflicts=self.conflicts,
            **facts,
        )

    def added_to(self, catalog: Catalog, source: Source, file: str) -> Catalog:
        """Return a catalog with the content of one more file."""
        return replace(
            catalog,
            tensors=catalog.tensors | self.tensors,
            objects=catalog.objects | self.objects,
            conflicts=catalog.conflicts | self.conflicts,
            files=catalog.files | {file: source.files[file]},
        )


def read_file_leaves(
    source: Source, file: str, *, prefix: Path = (), rank_state: bool = False
) -> dict[str, Leaf]:
    """Return the named values of a file that torch.save wrote, as ``read_leaves`` does."""
    return read_leaves(read_torch_file(source, file), source, prefix=prefix, rank_state=rank_state)


def read_leaves(
    file: TorchFile, source: Source, *, prefix: Path = (), rank_state: bool = False
) -> dict[str, Leaf]:
    """Return the named values of one file: tensors as leaves of their kind, all else unchanged.

    A tensor that contradicts itself, or a value that names something that can run code, is a
    ``Refusal``. Raises Hostile for code outside all leaves.
    """
    leaves: dict[str, Leaf] = {}
    unseen = dict(file.hostile)
    if file.inert == {}:
        require_harmless(unseen)
        return leaves
    walk = StateDictWalk(file.what, file.pickled)
    items = assign_names(walk.leaves(file.inert, prefix))
    values = (item for _, item in items.values() if not is_tensor_record(item))
    require_bounded(values, what=file.what)
    for name, (path, item) in items.items():
        leaf = _classify_or_refuse(item, file, source, name, unseen)
        leaves[name] = Leaf(path, leaf, rank_state, _note(walk.notes, name, path))
        if isinstance(leaf, PlainLeaf | ShareLeaf) and leaf.attributes:
            for attribute, why in _refuse_attributes(name, item, leaf.attributes):
                leaves.setdefault(f"{name}.{attribute}", Leaf((*path, attribute), why, rank_state))
    for path, attributes in walk.attributes.items():
        head = f"{flat_name(path)}." if flat_name(path) else ""
        for attribute, item in attributes.items():
            if unread_tensor(head, item) is not None:
                why = refuse_unread(f"{head}{attribute}", _ATTRIBUTE)
                leaves.setdefault(f"{head}{attribute}", Leaf((*path, attribute), why, rank_state))
    require_harmless(unseen)
    return leaves


def _refuse_attributes(
    name: str, item: Any, attributes: Iterable[str]
) -> Iterator[tuple[str, Refusal]]:
    """Yield the attributes of a tensor that hold tensors: nothing of them is read."""
    values = read_attributes(item)
    for attribute in attributes:
        full = f"{name}.{attribute}"
        if unread_tensor(full, values[attribute]) is not None:
            yield attribute, refuse_unread(full, "holds tensors, but is an attribute of one")


def _note(notes: dict[Path, str], name: str, path: Path) -> str | None:
    """Return the note on a leaf; a note on a whole container is returned once."""
    heads = (path[:length] for length in range(len(path) + 1))
    texts = [notes.pop(head) for head in heads if head in notes] if notes else []
    flat = flat_name(path) or "value"
    if name != flat:
        steps = (repr(step.position if isinstance(step, Index) else step) for step in path)
        texts.append(f"{name} is one of several values named {flat!r}, at {' / '.join(steps)}")
    return "; ".join(texts) or None


def _accuse(
    value: Any, hostile: Mapping[Global, Problem], name: str, unseen: dict[Global, Problem]
) -> Refusal | None:
    """Return why a value must not be read, if it names something that can run code."""
    names = collect_globals(value)
    culprits = [item for item in hostile if item in names]
    for item in culprits:
        unseen.pop(item, None)
    if not culprits:
        return None
    refusal = Refusal(f"{name}: {hostile[culprits[0]]}", "hostile-global", tensor=name)
    refusal.may_be_tensor = isinstance(value, Call) and (
        any(item.module.startswith("torch") and item.name.endswith("Storage") for item in names)
        or (value.name.startswith("torch.") and value.function not in hostile)
    )
    refusal.record = value
    return refusal


def _classify_or_refuse(
    value: Any, file: TorchFile, source: Source, name: str, unseen: dict[Global, Problem]
) -> Any:
    """Return a tensor's leaf or any other value unchanged; or why it cannot or must not be read.

    Names in the value that can run code are removed from ``unseen``.
    """
    why = _accuse(value, file.hostile, name, unseen) if file.hostile else None
    if why is not None:
        return why
    if not is_tensor_record(value):
        return value
    try:
        return _classify(value, file, source, name)
    except (Damaged, Unsupported) as error:
        problem = error.message
        return Refusal(problem, problem.code, file=problem.file, tensor=name)


def _classify(value: Any, file: TorchFile, source: Source, name: str) -> Any:
    share: Share | None
    try:
        with coded("tensor-record"), naming(file.what):
            tensor = read_tensor(value)
            attributes = read_attributes(value) if tensor is not None else {}
            share = read_declared_share(attributes, tensor) if tensor is not None else None
            if tensor is not None and share is None:
                return PlainLeaf(locate_tensor(tensor, file), tensor, tuple(attributes))
        with coded("dtensor-contradiction"), naming(file.what):
            share = share or read_share(value, file, source)
    except (Damaged, Unsupported) as error:
        raise error.within(name, tensor=name) from None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        message = f"{name}: {file.what}: a contradictory tensor record"
        raise Damaged(message, "tensor-record", tensor=name) from None
    if share is None:
        return value
    names = (*SHARD_ATTRIBUTES, *OF_DTENSORS)
    extras = tuple(attribute for attribute in read_attributes(value) if attribute not in names)
    return ShareLeaf(share, tuple(locate_tensor(t, file) for t in share.locals), extras)


class Barred(Exception):
    """A value to be read depends on a refused part."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def require_readable(value: _T) -> _T:
    """Return the value; raise Barred if a part of it is refused."""
    why = find_refusal(value)
    if why is not None:
        raise Barred(why)
    return value


def find_refusal(value: Any) -> Refusal | None:
    """Return the first refusal among the parts of a value, or None."""
    return next((item for item in walk_parts(value) if isinstance(item, Refusal)), None)


def replace_refused(file: TorchFile, source: Source) -> tuple[Any, dict[Path, Refusal]]:
    """Return the content of a file, with a ``Refusal`` in place of each refused part.

    Parts are the items of its dicts and lists. Each refusal is returned by its path as well. Other
    names in the dicts, as keys or attributes, stay as they are.
    """
    walk = _RefusalWalk(file, source)
    return walk.replace(file.inert, ()), walk.refused


class _RefusalWalk:
    """One walk through the dicts and lists of a file; each is visited once."""

    def __init__(self, file: TorchFile, source: Source) -> None:
        self._file, self._source = file, source
        self._results: dict[int, Any] = {}
        self._open: set[int] = set()
        self.refused: dict[Path, Refusal] = {}

    def replace(self, value: Any, path: Path) -> Any:
        """Return the value itself if nothing in it is refused, else a copy with refusals."""
        if isinstance(value, str | int | float | bytes | None):
            return value
        if id(value) not in self._results:
            self._results[id(value)] = self._inspect(value, path)
        return self._results[id(value)]

    def _inspect(self, value: Any, path: Path) -> Any:
        is_entered = isinstance(value, dict | list | tuple) and id(value) not in self._open
        if not is_entered or len(path) > _DEEPEST:
            why = _classify_or_refuse(value, self._file, self._source, flat_name(path), {})
            if not isinstance(why, Refusal):
                return value
            self.refused[path] = why
            return why
        self._open.add(id(value))
        items: Iterable[Any] = value.items() if isinstance(value, dict) else enumerate(value)
        changed = {
            step: part
            for step, item in items
            if (part := self.replace(item, (*path, step))) is not item
        }
        self._open.remove(id(value))
        return _copy_with(value, changed) if changed else value


def _copy_with(value: Any, changed: dict[Any, Any]) -> Any:
    """Return a copy of a dict, list or tuple with some parts replaced."""
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update(changed)
        return copied
    items = (changed.get(position, item) for position, item in enumerate(value))
    return tuple(items) if isinstance(value, tuple) else list(items)
