"""Non-tensor values of a checkpoint: their parts, size, plainness and equality."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from ckptool.core.catalog import ObjectEntry
from ckptool.errors import UNREAD, Damaged, Problem, Refusal
from ckptool.serialization.archive.tensors import is_tensor_record
from ckptool.serialization.pickle.globals import is_dtype, is_numpy
from ckptool.serialization.pickle.records import Call, Global, Persistent, state_fields

_PLAIN_CALLS = frozenset(
    ["torch.Size", "torch.device", "torch.serialization._get_layout", "collections.Counter"]
)
"""What ``torch.load(weights_only=True)`` calls by itself: a Counter since 2.4, for MultiStepLR."""
NOT_CARRIED = "value-not-written"
"""The code of a note on something that no writer, or only a pickling one, carries over."""
_STORAGE = "torch storage"
NUMPY = "numpy data"
"""Represents all of numpy's arrays, scalars and generators there, which writers carry."""
_SCALARS = frozenset([str, int, float, bool, complex, bytes, bytearray, type(None)])
_ELEMENT_TYPE = re.compile(r"[<>=|]?[?biufcSUVmM]\d{0,9}")


class Repeated(Struct, frozen=True):
    """Represents a value that contains itself, such as a dict in itself."""

    container: str

    def __repr__(self) -> str:
        return f"<{self.container} again>"


def list_parts(value: object) -> list[Any]:
    """Return what a value refers to."""
    if isinstance(value, Call):
        parts = [value.args, value.state]
        parts += [value.items, value.entries] if value.is_filled else []
        return [*parts, value.function]
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list | tuple | set | frozenset) else []


def walk_parts(value: object, *, hidden: bool = False) -> Iterator[Any]:
    """Yield a value and everything in it but scalars, each once.

    With ``hidden`` also what persistent ids name, and the attributes of dicts.
    """
    stack, ids = [value], set()
    while stack:
        item = stack.pop()
        if type(item) in _SCALARS or id(item) in ids:
            continue
        ids.add(id(item))
        yield item
        stack += list_parts(item)
        if hidden and isinstance(item, Persistent):
            stack.append(item.value)
        if hidden and isinstance(item, dict):
            stack.append(getattr(item, "state", None))


MOST_TIMES = 16
MOST_PARTS = 1_000_000
"""How many parts values may expand to: of each distinct one so many, and so many besides."""
_COUNTED = 10**15
"""The limit of counted sizes: each doubling would make a number one bit longer."""


class Expansion:
    """Measures the expanded size of values of one checkpoint.

    Each part is measured once, however often it is referenced; ``distinct`` counts these. The
    values must outlive this object.
    """

    def __init__(self) -> None:
        self.distinct = 0
        self._sizes: dict[int, int] = {}

    def parts(self, value: object) -> int:
        """Count the parts of an expanded value, at most ``_COUNTED``; itself in it once."""
        stack: list[tuple[Any, list[Any] | None]] = [(value, None)]
        while stack:
            item, inner = stack.pop()
            if inner is not None:
                size = self._sizes[id(item)] + sum(map(self._size, inner))
                self._sizes[id(item)] = min(size, _COUNTED)
            elif type(item) not in _SCALARS and id(item) not in self._sizes:
                inner = list_parts(item)
                self.distinct += 1 + len(inner)
                self._sizes[id(item)] = 1
                if _SCALARS.issuperset(map(type, inner)):
                    self._sizes[id(item)] += len(inner)
                    continue
                stack.append((item, inner))
                stack += [(part, None) for part in inner]
        return self._size(value)

    def is_bounded(self, size: int) -> bool:
        """Return whether a number of parts is in proportion to the distinct ones."""
        return size <= MOST_PARTS + MOST_TIMES * self.distinct

    def _size(self, item: object) -> int:
        return self._sizes.get(id(item), 1)


def require_bounded(values: Iterable[Any], *, what: str) -> None:
    """Raise Damaged if values refer to their parts so often that expanding them has no end."""
    expansion = Expansion()
    size = min(sum(map(expansion.parts, values)), _COUNTED)
    if not expansion.is_bounded(size):
        message = f"{what}: {expansion.distinct:,} values refer to one another so often that they"
        message += f" expand to {'more than ' if size == _COUNTED else ''}{size:,}"
        raise Damaged(message, "pickle-bomb")


class Foreign:
    """Caches ``collect_foreign_globals`` for values of one checkpoint, which may share them."""

    def __init__(self) -> None:
        self._globals: dict[int, set[str]] = {}

    def of(self, value: object) -> set[str]:
        """Return the value's foreign globals; the value must outlive this object."""
        if id(value) not in self._globals:
            self._globals[id(value)] = collect_foreign_globals(value)
        return self._globals[id(value)]


def collect_foreign_globals(value: object) -> set[str]:
    """Return the names of the classes and functions in a value that are not plain data.

    Plain data is what ``torch.load(weights_only=True)`` rebuilds without further permission.
    """
    return {name for item in walk_parts(value) if (name := _foreign_name(item)) is not None}


def _foreign_name(item: object) -> str | None:
    """Return what is foreign in a part of a value, without the parts inside it."""
    if isinstance(item, Call):
        if holds_objects(item):
            return "numpy elements that are Python objects"
        return None if isinstance(item.function, Global) else item.name
    if isinstance(item, Global):
        if _is_plain(item):
            return None
        return NUMPY if is_numpy(item) else str(item)
    if isinstance(item, Persistent | Repeated):
        return _STORAGE
    return "frozenset" if isinstance(item, frozenset) else None


def holds_objects(call: Call) -> bool:
    """Return whether a call would make a numpy element type of Python objects, or an odd one."""
    if call.name != "numpy.dtype":
        return False
    text = call.args[0] if call.args else None
    return not (isinstance(text, str) and _ELEMENT_TYPE.fullmatch(text))


def _is_plain(item: Global) -> bool:
    return str(item) in _PLAIN_CALLS or is_dtype(item)


def collect_globals(value: object) -> set[Global]:
    """Return every class and function that a value names, wherever in it."""
    return {item for item in walk_parts(value, hidden=True) if isinstance(item, Global)}


_CALL_TYPES = {
    "torch._utils._rebuild_qtensor": "quantized tensor",
    "torch._utils._rebuild_sparse_tensor": "sparse tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "meta tensor, without data",
}
_NUMPY_TYPES = {
    "_frombuffer": "numpy.ndarray",
    "_reconstruct": "numpy.ndarray",
    "scalar": "numpy scalar",
    "__generator_ctor": "numpy.random.Generator",
    "__bit_generator_ctor": "numpy.random.BitGenerator",
    "__randomstate_ctor": "numpy.random.RandomState",
    "__RandomState_ctor": "numpy.random.RandomState",
}


def type_name(value: object) -> str:
    """Return the usual name of the type: ``int``, ``torch.Size``, ``argparse.Namespace``."""
    if isinstance(value, Call):
        return _call_type(value)
    if isinstance(value, Persistent):
        return _STORAGE
    if isinstance(value, Repeated):
        return "reference"
    if isinstance(value, Global):
        return "torch.dtype" if is_dtype(value) else "class or function"
    return "NoneType" if value is None else type(value).__name__.replace("Mapping", "Dict")


def _call_type(call: Call) -> str:
    """Return the usual name of a call's result type."""
    if call.name == "torch._tensor._rebuild_from_type_v2" and len(call.args) > 1:
        return _class_name(call.args[1]) + _of_subclass(call)
    if call.name.endswith("_rebuild_nested_tensor"):
        return "nested tensor"
    if isinstance(call.function, Global) and is_numpy(call.function):
        name, cls = call.function.name, call.args[0] if call.args else None
        if name == "_reconstruct" and isinstance(cls, Global):
            return str(cls)
        return _NUMPY_TYPES.get(name, call.name)
    return _CALL_TYPES.get(call.name, call.name)


def _class_name(value: object) -> str:
    return str(value) if isinstance(value, Global) else "unknown"


def _of_subclass(record: Call) -> str:
    """Return for a DTensor the class of its local tensor if that is a subclass too."""
    local = state_fields(record.args[3]).get("_local_tensor") if len(record.args) == 4 else None
    if isinstance(local, Call) and local.name == record.name and len(local.args) > 1:
        return f" of {_class_name(local.args[1])}"
    return ""


Pairs = list[tuple[Any, Any]]


def pairs_inside(a: Any, b: Any) -> Pairs | None:
    """Return what must be equal inside two values of one type; None if they differ themselves."""
    if isinstance(a, Call):
        filled = [(a.items, b.items), (a.entries, b.entries)] if a.is_filled or b.is_filled else []
        return [(a.function, b.function), (a.args, b.args), (a.state, b.state), *filled]
    if isinstance(a, dict):
        return [(a[key], b[key]) for key in a] if a.keys() == b.keys() else None
    if isinstance(a, list | tuple):
        return list(zip(a, b, strict=True)) if len(a) == len(b) else None
    return [] if a == b else None


def same_value(
    first: object, second: object, inside: Callable[[Any, Any], Pairs | None] = pairs_inside
) -> bool:
    """Return whether two values read from pickles are equal, inert records included; so are NaN.

    ``inside`` returns what must be equal in two parts: objects of the values, known by identity.
    """
    compared: set[tuple[int, int]] = set()
    stack = [(first, second)]
    while stack:
        a, b = stack.pop()
        if a is b or (id(a), id(b)) in compared:
            continue
        if type(a) is not type(b):
            return False
        if type(a) in _SCALARS:
            if a != b and (a == a or b == b):
                return False
            continue
        compared.add((id(a), id(b)))
        pairs = inside(a, b)
        if pairs is None:
            return False
        stack += pairs
    return True


def note_stray_keys(file: str, keys: Iterable[Any]) -> list[str]:
    """Return a note on entries of a file under keys that its format does not have, if any."""
    names = ", ".join(repr(key)[:80] for key in keys)
    return [f"not carried: {names} of {file}, unknown to its format"] if names else []


def unread_tensor(name: str, value: Any) -> Refusal | None:
    """Return why a value is refused that is, or holds, a tensor that was not read; else None."""
    if type(value) in _SCALARS:
        return None
    if is_tensor_record(value):
        return refuse_unread(name, f"not a plain tensor, but {type_name(value)}")
    parts = walk_parts(value, hidden=True)
    if any(isinstance(part, Persistent) or is_tensor_record(part) for part in parts):
        return refuse_unread(name, f"holds tensors that cannot be read ({type_name(value)})")
    return None


def refuse_unread(name: str, reason: str) -> Refusal:
    """Return the refusal of a tensor of an unsupported kind, or of an object with tensors."""
    return Refusal(f"{name}: {reason}", UNREAD, tensor=name)


def note_repeated(objects: Mapping[str, ObjectEntry]) -> list[str]:
    """Return a note for each value that contains itself: no writer can store it."""
    return [
        Problem(
            f"not read: {name} refers back to {entry.value.container}, which contains it",
            NOT_CARRIED,
            tensor=name,
        )
        for name, entry in objects.items()
        if isinstance(entry.value, Repeated)
    ]
