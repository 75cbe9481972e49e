"""The states in DeepSpeed's files, as far as the layout of tensors depends on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckptool.core.catalog import Place
from ckptool.core.dtype import DType
from ckptool.errors import Damaged, Problem
from ckptool.formats._pickle import require_harmless
from ckptool.formats._storage import StoredTensor, natural, place_of, plain_tensor, shown, sizes
from ckptool.formats._torch_file import TorchFile, read_torch_file
from ckptool.formats.base import Source

LAYOUT = frozenset(
    "module optimizer param_shapes frozen_param_shapes frozen_param_fragments buffer_names"
    " shared_params".split()
)
PARTITIONS = frozenset(
    "base_optimizer_state optimizer_state_dict single_partition_of_fp32_groups fp32_flat_groups"
    " fp32_groups fp32_groups_flat group_paddings param_alignment_paddings partition_count"
    " param_slice_mappings state param_groups".split()
)


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
    """A file's dict: what torch.save wrote, with access that raises Damaged and names the file."""

    file: TorchFile
    fields: Mapping[str, Any]

    def mapping(self, key: str) -> Mapping[Any, Any]:
        """A dict, or an empty one where the key is absent or None."""
        value = self.fields.get(key)
        if value is None:
            return {}
        return dict(self._typed(value, dict, key))

    def sequence(self, key: str) -> list[Any]:
        """A list; Damaged where there is none."""
        return list(self._typed(self.fields.get(key), list | tuple, key))

    def count(self, key: str, default: int = 1) -> int:
        """A positive int, or the default where the key is absent."""
        value = self.fields.get(key, default)
        return natural(self._typed(value, int, key)) or default

    def inner(self, key: str) -> State:
        """The state in a dict of this one."""
        return State(self.file, self.mapping(key))

    def names(self, key: str) -> list[str]:
        """A list of texts, empty where the key is absent or None."""
        value = self.fields.get(key) or []
        return [text for text in self._typed(value, list | tuple, key) if isinstance(text, str)]

    def vector(self, value: Any) -> Vector | None:
        """The tensor that a value is, or None."""
        tensor = plain_tensor(value)
        return None if tensor is None else Vector(tensor, place_of(tensor, self.file))

    def _typed(self, value: Any, kind: Any, key: str) -> Any:
        if isinstance(value, kind):
            return value
        raise Damaged(Problem(f"{self.file.what}: {key} is {shown(value)}", "metadata-unreadable"))


@contextmanager
def malformed_is_damaged(what: str) -> Iterator[None]:
    """Damaged where a state is of another make than any DeepSpeed writes, wherever that shows."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise Damaged(
            Problem(
                f"{what}: a state that DeepSpeed does not write: {error}", "metadata-unreadable"
            )
        ) from None


def read_state(source: Source, file: str, *, named: bool = False) -> State:
    """The dict in a file that torch.save wrote; Damaged where it is something else.

    Raises Hostile for what the layout of tensors depends on; of other values, who reads them does,
    and of those in a module, which the whole dict is where it is ``named`` values.
    """
    opened = read_torch_file(source, file)
    if not isinstance(opened.inert, dict):
        raise Damaged(
            Problem(
                f"{file}: holds {shown(opened.inert)}, DeepSpeed writes a dict there",
                "file-unrecognised",
            )
        )
    structure = {} if named else dict(_structure(opened.inert))
    module = opened.inert if named else structure.pop("module", {})
    values = list(module.values()) if isinstance(module, dict) else []
    of_values = opened.narrowed(values).hostile
    beside = {
        item: why for item, why in opened.narrowed(module).hostile.items() if item not in of_values
    }
    require_harmless({**opened.narrowed(structure).hostile, **beside})
    return State(opened, opened.inert)


def _structure(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a file's dict that holds tensors, or says how they lie."""
    inner = fields.get("optimizer_state_dict")
    if isinstance(inner, dict):
        return {key: value for key, value in inner.items() if key in PARTITIONS}
    if "module" in fields:
        return {key: value for key, value in fields.items() if key in LAYOUT}
    return fields


def shape_groups(state: State, key: str = "param_shapes") -> list[dict[str, tuple[int, ...]]]:
    """Parameter shapes by name, one dict a group, in the order of the flat buffers.

    DeepSpeed before 0.5.4 wrote one dict for the only group.
    """
    value = state.fields.get(key) or []
    groups = [value] if isinstance(value, dict) else state.sequence(key) if value else []
    found = []
    for group in groups:
        if not isinstance(group, dict):
            raise Damaged(
                Problem(f"{state.file.what}: {key} holds {shown(group)}", "metadata-unreadable")
            )
        found.append({str(name): sizes(shape) for name, shape in group.items()})
    return found


def named_tensors(state: State, key: str) -> dict[str, Vector]:
    """The tensors of a dict in a state by their names, without what is no plain tensor."""
    return all_tensors(state.inner(key))


def all_tensors(state: State) -> dict[str, Vector]:
    """The tensors of a state by their names, without what is no plain tensor."""
    found = {str(name): state.vector(value) for name, value in state.fields.items()}
    return {name: vector for name, vector in found.items() if vector is not None}
