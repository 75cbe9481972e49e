"""The numpy arrays, scalars, element types and random generators that a pickle holds, as records.

Written by numpy 1.17 to 2.4, which calls its inner modules ``numpy._core`` since 2.0. They are
data: what makes them again is named here, as long as no element is a Python object.
"""

from __future__ import annotations

import re
from typing import Any

from ckptool.serialization.pickle.records import Call, Global

_MAKERS = {
    "numpy": "ndarray dtype",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
}
_SCALARS = (
    "bool_ bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 intc uintc longlong ulonglong"
    " float16 float32 float64 longdouble float128 complex64 complex128 clongdouble complex256"
    " str_ bytes_ void datetime64 timedelta64"
)
"""The classes of numpy's scalars, which settings name as element types."""
_GENERATORS = {
    "numpy.random": "__RandomState_ctor",
    "numpy.random._pickle": "__generator_ctor __bit_generator_ctor __randomstate_ctor",
    "numpy.random._mt19937": "MT19937",
    "numpy.random._pcg64": "PCG64 PCG64DXSM",
    "numpy.random._philox": "Philox",
    "numpy.random._sfc64": "SFC64",
    "numpy.random.bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
    "numpy.random._bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
}


def _named(table: dict[str, str]) -> frozenset[Global]:
    return frozenset(Global(module, name) for module in table for name in table[module].split())


_DATA = _named(_MAKERS) | _named({"numpy": _SCALARS})
_RANDOM = _named(_GENERATORS)
_ELEMENT_TYPE = re.compile(r"[<>=|]?[?biufcSUVmM]\d{0,9}")


def is_numpy(item: Global) -> bool:
    """Whether a global makes, or is the type of, an array, a scalar or a random generator."""
    return item in _DATA or item in _RANDOM


def is_generator(item: Global) -> bool:
    """Whether a global makes a random generator, or is a part of one."""
    return item in _RANDOM


def holds_objects(call: Call) -> bool:
    """Whether a call would make an element type whose elements are Python objects, or odd ones."""
    if call.name != "numpy.dtype":
        return False
    text = call.args[0] if call.args else None
    return not (isinstance(text, str) and _ELEMENT_TYPE.fullmatch(text))


def class_name(call: Call) -> str | None:
    """What a person calls a record of numpy: ``numpy.ndarray``, ``numpy scalar``."""
    if not isinstance(call.function, Global) or not is_numpy(call.function):
        return None
    name = call.function.name
    if name in ("_frombuffer", "_reconstruct"):
        inner: Any = call.args[0] if name == "_reconstruct" and call.args else None
        return str(inner) if isinstance(inner, Global) else "numpy.ndarray"
    kinds = {
        "scalar": "numpy scalar",
        "__generator_ctor": "numpy.random.Generator",
        "__bit_generator_ctor": "numpy.random.BitGenerator",
        "__randomstate_ctor": "numpy.random.RandomState",
        "__RandomState_ctor": "numpy.random.RandomState",
    }
    return kinds.get(name, call.name)
