"""Non-tensor values as Python objects: only plain data, and numpy arrays and scalars."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from ckptool.core.catalog import ObjectEntry
from ckptool.core.layout import Literal
from ckptool.errors import Unsupported
from ckptool.serialization.archive.write import lay_out_archive
from ckptool.serialization.pickle.globals import is_generator, is_numpy
from ckptool.serialization.pickle.records import Call, Global, OrderedMapping
from ckptool.serialization.state_dict.values import (
    NUMPY,
    collect_foreign_globals,
    holds_objects,
    type_name,
)

SIMPLE = (bool, int, float, complex, str, bytes, type(None))


def archive(entry: ObjectEntry) -> bytes:
    """Return what torch.save would write of a value; Unsupported if it is not plain data.

    Plain data is what ``torch.load(weights_only=True)`` rebuilds, and numpy data.
    """
    foreign = collect_foreign_globals(entry.value) - {NUMPY}
    if foreign:
        raise Unsupported(
            f"{entry.name}: a {type_name(entry.value)}, made of {', '.join(sorted(foreign))}, which"
            " ckptool does not rebuild",
            hint="remove it from the state dict, or pass drop= when opening the checkpoint",
        )
    parts = lay_out_archive(entry.value)
    return b"".join(part.data for part in parts if isinstance(part, Literal))


def rebuild(entry: ObjectEntry) -> Any:
    """Return the value as a Python object; Unsupported if it is neither plain nor numpy data."""
    if isinstance(entry.value, SIMPLE):
        return entry.value
    if collect_foreign_globals(entry.value) != {NUMPY}:
        return _load(entry)
    try:
        return _ValueBuilder(lambda part: _load(replace(entry, value=part))).build(
            entry.value, _DEEPEST
        )
    except Unsupported as error:
        raise error.within(entry.name) from None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        contradiction = Unsupported("a numpy record that contradicts itself")
        raise contradiction.within(entry.name) from None


def _load(entry: ObjectEntry) -> Any:
    import torch

    return torch.load(io.BytesIO(archive(entry)), weights_only=True)


_DEEPEST = 100


class _ValueBuilder:
    """Builds the parts of a value, each object once; ``plain`` rebuilds torch's.

    Raises Unsupported for a random generator and for a value that is nested too deeply.
    """

    def __init__(self, plain: Callable[[Any], Any]) -> None:
        self._plain = plain
        self._built: dict[int, Any] = {}

    def build(self, value: Any, depth: int) -> Any:
        """Build one part of the value, at most ``depth`` levels deep."""
        if not depth:
            raise Unsupported("a value that is nested too deep to be rebuilt")
        if id(value) not in self._built:
            self._built[id(value)] = self._build(value, depth - 1)
        return self._built[id(value)]

    def _build(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            mapping: Any = OrderedDict() if isinstance(value, OrderedMapping) else {}
            self._built[id(value)] = mapping
            for key, item in value.items():
                mapping[self.build(key, depth)] = self.build(item, depth)
            return mapping
        if isinstance(value, list):
            items = self._built[id(value)] = []
            items += [self.build(item, depth) for item in value]
            return items
        if isinstance(value, tuple | set):
            return type(value)([self.build(item, depth) for item in value])
        if isinstance(value, Global):
            return getattr(np, value.name) if is_numpy(value) else self._plain(value)
        if isinstance(value, Call):
            return self._call(value)
        return value

    def _call(self, call: Call) -> Any:
        if not isinstance(call.function, Global) or not is_numpy(call.function):
            return self._plain(call)
        if is_generator(call.function):
            raise Unsupported("a numpy random generator, which ckptool does not rebuild")
        if call.name == "numpy.dtype":
            return element_type(call)
        if call.function.name == "scalar":
            kind, data = call.args
            return np.frombuffer(data, element_type(kind), 1)[0]
        return array(call)


def array(call: Call) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the array of a record, in this machine's byte order and with its own memory.

    Raises ValueError if its bytes do not fit its shape.
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
    """Return the element type of a record; ValueError if its elements are Python objects."""
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
