"""Values besides tensors, as Python objects: only what is plain data is rebuilt.

Values that hold numpy's arrays and scalars, as Python objects.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ckptool.core.catalog import ObjectEntry
from ckptool.core.layout import Literal
from ckptool.errors import Unsupported
from ckptool.serialization.archive.write import torch_archive
from ckptool.serialization.pickle.globals import is_generator, is_numpy
from ckptool.serialization.pickle.records import Call, Global, OrderedMapping
from ckptool.serialization.state_dict.values import NUMPY, foreign_globals, holds_objects, type_name

_SIMPLE = (bool, int, float, complex, str, bytes, type(None))


def archived(entry: ObjectEntry) -> bytes:
    """What torch.save would write of a value; Unsupported where it is no plain data.

    Plain is what ``torch.load(weights_only=True)`` rebuilds, and what numpy holds.
    """
    foreign = foreign_globals(entry.value) - {NUMPY}
    if foreign:
        raise Unsupported(
            f"{entry.name}: a {type_name(entry.value)}, made of {', '.join(sorted(foreign))}, which"
            " ckptool does not rebuild",
            hint="leave it out of the state dict, or drop it where the checkpoint is opened",
        )
    parts = torch_archive(entry.value)
    return b"".join(part.data for part in parts if isinstance(part, Literal))


def rebuilt(entry: ObjectEntry) -> Any:
    """The value as a Python object; Unsupported where it is no plain data, but numpy's arrays."""
    if isinstance(entry.value, _SIMPLE):
        return entry.value
    if foreign_globals(entry.value) != {NUMPY}:
        return _loaded(entry)

    def plain(part: Any) -> Any:
        return _loaded(replace(entry, value=part))

    try:
        return python_value(entry.value, plain)
    except Unsupported as error:
        raise error.within(entry.name) from None


def _loaded(entry: ObjectEntry) -> Any:
    import torch

    return torch.load(io.BytesIO(archived(entry)), weights_only=True)


Rebuild = Callable[[Any], Any]
_DEEPEST = 100


def python_value(value: Any, plain: Rebuild) -> Any:
    """The value as a Python object; ``plain`` rebuilds what is torch's.

    Raises Unsupported for a random generator, and for a record that contradicts itself.
    """
    try:
        return _Builder(plain).build(value, _DEEPEST)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        raise Unsupported("a numpy record that contradicts itself") from None


class _Builder:
    """Builds what a value holds; what it refers to twice is built once."""

    def __init__(self, plain: Rebuild) -> None:
        self._plain = plain
        self._built: dict[int, Any] = {}

    def build(self, value: Any, depth: int) -> Any:
        """One part of the value, no more than ``depth`` levels deep."""
        if not depth:
            raise Unsupported("a value that is nested too deep to be rebuilt")
        if id(value) not in self._built:
            self._built[id(value)] = self._made(value, depth - 1)
        return self._built[id(value)]

    def _made(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            made: Any = OrderedDict() if isinstance(value, OrderedMapping) else {}
            self._built[id(value)] = made
            for key, item in value.items():
                made[self.build(key, depth)] = self.build(item, depth)
            return made
        if isinstance(value, list):
            made = self._built[id(value)] = []
            made += [self.build(item, depth) for item in value]
            return made
        if isinstance(value, tuple | set):
            return type(value)([self.build(item, depth) for item in value])
        if isinstance(value, Global):
            return getattr(np, value.name) if is_numpy(value) else self._plain(value)
        if isinstance(value, Call):
            return self._called(value)
        return value

    def _called(self, call: Call) -> Any:
        if not isinstance(call.function, Global) or not is_numpy(call.function):
            return self._plain(call)
        if is_generator(call.function):
            raise Unsupported("a random generator of numpy, which ckptool does not rebuild")
        if call.name == "numpy.dtype":
            return element_type(call)
        if call.function.name == "scalar":
            kind, data = call.args
            return np.frombuffer(data, element_type(kind), 1)[0]
        return array(call)


def array(call: Call) -> np.ndarray[Any, np.dtype[Any]]:
    """The array of a record, in this machine's byte order and with memory of its own.

    ValueError where its bytes do not fit its shape.
    """
    if isinstance(call.function, Global) and call.function.name == "_frombuffer":
        data, kind, shape, order = call.args
    else:
        _, shape, kind, is_fortran, data = call.state
        order = "F" if is_fortran else "C"
    dtype = element_type(kind)
    flat = np.frombuffer(bytearray(data), dtype)
    return flat.reshape(shape, order=order).astype(dtype.newbyteorder("="), copy=False)


def element_type(call: Call) -> np.dtype[Any]:
    """The element type of a record. ValueError where its elements are Python objects."""
    if not isinstance(call, Call) or call.name != "numpy.dtype" or holds_objects(call):
        raise ValueError
    text = str(call.args[0])
    if call.state is None:
        return np.dtype(text)
    _, order, inner, names, fields, size, _, *rest = call.state
    if inner is not None:
        return np.dtype((element_type(inner[0]), tuple(inner[1])))
    if names:
        return _structure(names, fields, int(size), text)
    if text[0] in "mM" and len(rest) > 1 and rest[1]:
        unit, number, *_ = rest[1][1]
        text = f"{text[0]}8[{number}{unit.decode()}]"
    return np.dtype(text).newbyteorder(order) if order in "<>" else np.dtype(text)


def _structure(
    names: tuple[str, ...], fields: dict[str, Any], size: int, text: str
) -> np.dtype[Any]:
    parts = [fields[name] for name in names]
    spec = {
        "names": list(names),
        "formats": [element_type(part[0]) for part in parts],
        "offsets": [int(part[1]) for part in parts],
        "itemsize": int(text[1:]) if size < 0 else size,
    }
    titles = [part[2] if len(part) > 2 else None for part in parts]
    if any(title is not None for title in titles):
        spec["titles"] = titles
    return np.dtype(spec)  # type: ignore[call-overload, no-any-return]
