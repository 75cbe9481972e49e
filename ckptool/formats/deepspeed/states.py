"""The states in DeepSpeed's files, as far as the layout of tensors depends on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckptool.core.catalog import Path, Place
from ckptool.core.dtype import DType
from ckptool.errors import Damaged, Refusal, SourceError, refused
from ckptool.serialization.archive.read import TorchFile, read_torch_file
from ckptool.serialization.archive.tensors import (
    StoredTensor,
    natural,
    place_of,
    plain_tensor,
    shown,
    sizes,
)
from ckptool.serialization.pickle.load import require_harmless
from ckptool.serialization.source import Source
from ckptool.serialization.state_dict.leaves import (
    Barred,
    refusal_in,
    require_readable,
    with_refusals,
)

LAYOUT = frozenset(
    "module optimizer param_shapes frozen_param_shapes frozen_param_fragments buffer_names"
    " shared_params".split()
)
PARTITIONS = frozenset(
    "base_optimizer_state optimizer_state_dict single_partition_of_fp32_groups fp32_flat_groups"
    " fp32_groups fp32_groups_flat group_paddings param_alignment_paddings partition_count"
    " param_slice_mappings state param_groups".split()
)

_OPTIMIZERS = ("optimizer", "optimizer_state_dict")
_NAMING = ("params", "name", "moe")


@dataclass(frozen=True, slots=True)
class Vector:
    """A tensor of a file with where it lies; of a flat partition, its contiguous vector."""

    tensor: StoredTensor
    at: Place

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def is_flat(self) -> bool:
        """Whether it is one contiguous dim, as flat partitions are."""
        return len(self.shape) == 1 and (self.shape[0] < 2 or self.tensor.strides == (1,))


@dataclass(frozen=True, slots=True)
class State:
    """A file's dict: what torch.save wrote, with access that raises Damaged and names the file.

    ``stored`` is the dict as it is, ``readable`` the same with a ``Refusal`` in place of each part
    that cannot be read, or must not be, or one for all of it; ``refused`` are those of the whole
    file by their paths. What needs a part that is refused raises Barred.
    """

    file: TorchFile
    stored: Mapping[Any, Any]
    readable: Mapping[Any, Any] | Refusal
    refused: Mapping[Path, Refusal]

    @property
    def fields(self) -> Mapping[Any, Any]:
        """What the dict holds, with refusals among it; Barred where all of it is refused."""
        if isinstance(self.readable, Refusal):
            raise Barred(self.readable)
        return self.readable

    def get(self, key: str, default: Any = None) -> Any:
        """Return what lies under a key; Barred where a part of it is refused."""
        value = self.fields.get(key, default)
        return require_readable(value) if self.refused else value

    def mapping(self, key: str) -> Mapping[Any, Any]:
        """Return a dict, or an empty one where the key is absent or None."""
        value = self.get(key)
        if value is None:
            return {}
        return dict(self._typed(value, dict, key))

    def sequence(self, key: str) -> list[Any]:
        """Return a list; Damaged where there is none."""
        return list(self._typed(self.get(key), list | tuple, key))

    def count(self, key: str, default: int = 1) -> int:
        """Return a positive int, or the default where the key is absent."""
        value = self.get(key, default)
        return natural(self._typed(value, int, key)) or default

    def inner(self, key: str) -> State:
        """Return the state in a dict of this one, of which parts, or all, may be refused."""
        if isinstance(self.readable, Refusal):
            return self
        value = self.readable.get(key)
        if value is not None and not isinstance(value, Refusal):
            value = self._typed(value, dict, key)
        stored = self.stored.get(key)
        known = stored if isinstance(stored, dict) else {}
        return State(self.file, known, {} if value is None else value, self.refused)

    def names(self, key: str) -> list[str]:
        """Return a list of texts, empty where the key is absent or None."""
        value = self.get(key) or []
        return [text for text in self._typed(value, list | tuple, key) if isinstance(text, str)]

    def groups(self) -> list[dict[str, Any]]:
        """What names and orders parameters in the ``param_groups`` of this state, if it has any.

        Barred where some of that is refused; what else a group holds is not looked at.
        """
        groups = require_shallow(self.fields.get("param_groups")) or []
        kept = [require_shallow(group) for group in groups]
        return [{k: require_readable(v) for k, v in g.items() if k in _NAMING} for g in kept]

    def vector(self, value: Any) -> Vector | None:
        """Return the tensor that a value is, or None."""
        tensor = plain_tensor(value)
        return None if tensor is None else Vector(tensor, place_of(tensor, self.file))

    def _typed(self, value: Any, kind: Any, key: str) -> Any:
        if isinstance(value, kind):
            return value
        raise Damaged(f"{self.file.what}: {key} is {shown(value)}", "metadata-unreadable")


@contextmanager
def malformed_is_damaged(what: str) -> Iterator[None]:
    """Damaged where a state is of another make than any DeepSpeed writes, wherever that shows.

    Where everything depends on a part that is refused, that is raised: Hostile or Damaged.
    """
    try:
        yield
    except Barred as error:
        raise refused([error.refusal], subject=what) from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise Damaged(
            f"{what}: not a state that DeepSpeed writes: {error}", "metadata-unreadable"
        ) from None


def read_state(source: Source, file: str) -> State:
    """The dict in a file that torch.save wrote, with refusals in place of what cannot be read.

    Raises Damaged where it is something else, Hostile where what can run code is no such part.
    """
    opened = read_torch_file(source, file)
    if not isinstance(opened.inert, dict):
        raise Damaged(
            f"{file}: holds {shown(opened.inert)}, DeepSpeed writes a dict there",
            "file-type-mismatch",
        )
    readable, refused = with_refusals(opened, source)
    require_harmless(opened.narrowed(readable).hostile)
    for path, why in refused.items():
        why.part = "optimizer" if path[0] in _OPTIMIZERS else None
    return State(opened, opened.inert, readable, refused)


def read_optimizer(source: Source, file: str) -> State:
    """Return the dict in a file of optimizer states.

    One that cannot be read is refused as a whole.
    """
    try:
        return read_state(source, file)
    except SourceError as error:
        why = refusal_of_error(error, "optimizer")
        why.part = "optimizer"
        opened = TorchFile(file, {}, {}, "little", {}, 0)
        return State(opened, {}, why, {(): why})


def refusal_of_error(error: SourceError, name: str) -> Refusal:
    """Return why what has that name cannot be read."""
    why = error.message
    return Refusal(f"{name}: {why}", why.code, file=why.file, tensor=name)


def require_shallow(value: Any) -> Any:
    """Return the value; raise Barred where it is refused itself, be it that parts of it are."""
    if isinstance(value, Refusal):
        raise Barred(value)
    return value


def shape_groups(state: State, key: str = "param_shapes") -> list[dict[str, tuple[int, ...]]]:
    """Parameter shapes by name, one dict a group, in the order of the flat buffers.

    DeepSpeed before 0.5.4 wrote one dict for the only group.
    """
    value = state.get(key) or []
    groups = [value] if isinstance(value, dict) else state.sequence(key) if value else []
    found = []
    for group in groups:
        if not isinstance(group, dict):
            raise Damaged(f"{state.file.what}: {key} holds {shown(group)}", "metadata-unreadable")
        found.append({str(name): sizes(shape) for name, shape in group.items()})
    return found


def named_tensors(state: State, key: str) -> dict[str, Vector]:
    """The tensors of a dict in a state by their names, without what is refused or no plain one."""
    return all_tensors(state.inner(key))


def all_tensors(state: State) -> dict[str, Vector]:
    """Return the tensors of a state by their names, without what is refused or no plain tensor."""
    found = {str(name): state.vector(value) for name, value in state.fields.items()}
    return {name: vector for name, vector in found.items() if vector is not None}


def values_of(state: State) -> list[Any]:
    """Return the names in a state of what is no plain tensor, but for what is refused."""
    refused = refused_entries(state)
    values = (name for name, value in state.fields.items() if plain_tensor(value) is None)
    return [name for name in values if str(name) not in refused]


def refused_entries(state: State) -> dict[str, Refusal]:
    """Return why entries of a state are refused, by their names."""
    found = {str(k): refusal_in(v) for k, v in state.fields.items()} if state.refused else {}
    return {name: why for name, why in found.items() if why is not None}


def require_all_tensors(*states: State, values: bool = False) -> None:
    """Raise Barred where an entry of the states is refused that may be a tensor.

    With ``values``, also where it is none now: another name could fit in its place.
    """
    for state in states:
        for why in refused_entries(state).values():
            if values or why.may_be_tensor:
                raise Barred(why)
