"""The storages and plain tensors of a torch.save pickle.

Tensors that torch quantised, taken apart: the integers, and what makes numbers of them.

torch 1.6 to 2.13 pickles one as ``_rebuild_qtensor`` of the storage of its integers and the
parameters of its quantizer. The parts are called as torch's own functions that return them:
``int_repr``; for one scale ``q_scale`` and ``q_zero_point``; for one scale a channel
``q_per_channel_scales``, ``q_per_channel_zero_points`` (tensors) and ``q_per_channel_axis``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ckptool.core.box import row_major_strides
from ckptool.core.catalog import EncodedBlob, Extent, Place, Record
from ckptool.core.dtype import BY_NAME, BY_STORAGE, QUANTISED_STORAGES, DType
from ckptool.errors import Damaged, coded
from ckptool.serialization.pickle.records import TORCH_SIZE, Call, Global, Persistent

_LONGEST_KEY = 200
_MOST_DIMS = 64
_MOST_ATTRIBUTES = 256
_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage that a pickle refers to. ``numel`` counts elements of ``itemsize`` bytes."""

    key: str
    dtype: DType | None
    numel: int

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize if self.dtype else 1

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a pickle: ``offset`` and ``strides`` in elements of its storage."""

    storage: Storage
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    ops: tuple[str, ...] = ()

    @property
    def fills_storage(self) -> bool:
        """Whether the tensor is its whole storage, in order."""
        whole = row_major_strides(self.shape, 1)
        size = 1
        for n in self.shape:
            size *= n
        return (
            not self.offset
            and size * self.dtype.itemsize == self.storage.nbytes
            and all(
                n == 1 or s == w for n, s, w in zip(self.shape, self.strides, whole, strict=True)
            )
        )


def storage_of(item: Persistent) -> Storage:
    """The storage of a persistent id ``('storage', class, key, location, numel[, view])``."""
    value = item.value
    if not isinstance(value, tuple) or len(value) not in (5, 6) or value[0] != "storage":
        raise Damaged("a persistent id that is not a torch storage")
    cls, key, numel = value[1], value[2], value[4]
    is_short = isinstance(key, int) and abs(key) < _LIMIT
    if not is_short and not (isinstance(key, str) and len(key) < _LONGEST_KEY):
        raise Damaged("a storage whose key is not a short text")
    if not isinstance(cls, Global) or type(numel) is not int or not 0 <= numel < 1 << 63:
        raise Damaged(f"storage {key!r} has no class or no size")
    if len(value) == 6 and value[5] is not None:
        raise Damaged(
            f"storage {key!r} is a view of another; save the tensors again with current torch"
        )
    if cls.name == "UntypedStorage":
        return Storage(str(key), None, numel)
    dtype = BY_STORAGE.get(cls.name)
    if dtype is None:
        raise Damaged(f"storage {key!r} has the unknown type {cls}")
    return Storage(str(key), dtype, numel)


_REBUILD_TENSOR = {
    "_rebuild_tensor": 4,
    "_rebuild_tensor_v2": 6,
    "_rebuild_tensor_v3": 7,
}


def unwrapped(value: Any) -> Any:
    """A parameter's tensor: what ``_rebuild_parameter`` wraps."""
    for _ in range(8):
        if not isinstance(value, Call) or value.name not in _PARAMETER or not value.args:
            break
        value = value.args[0]
    return value


_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")


def plain_tensor(value: Any, depth: int = 4) -> StoredTensor | None:
    """The tensor that a call would rebuild, or None where it is no plain strided tensor.

    ``depth`` is how many calls may wrap one another.
    """
    value = unwrapped(value)
    if not depth or not isinstance(value, Call) or not isinstance(value.function, Global):
        return None
    module, name = value.function.module, value.function.name
    if module == "torch._utils" and name in _REBUILD_TENSOR:
        return _strided_tensor(value.args, name)
    if (module, name) == _FROM_CPU and len(value.args) == 4:
        copied = plain_tensor(value.args[0], depth - 1)
        return copied if copied and copied.dtype == dtype_of(value.args[1]) else None
    if module == "torch._tensor" and name == "_rebuild_from_type_v2" and len(value.args) == 4:
        function, cls, args, _ = value.args
        if isinstance(cls, Global) and str(cls) in _TENSOR_CLASSES:
            return plain_tensor(Call(function, args), depth - 1)
    return None


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes that a tensor's record sets on it, a parameter's own among them.

    Raises Damaged where there are more than any tensor has.
    """
    found: dict[str, Any] = {}
    for record in (value, unwrapped(value)):
        if isinstance(record, Call) and record.name in _WITH_STATE and len(record.args) == 4:
            state = record.args[3]
            parts = state[:2] if isinstance(state, tuple) else (state,)
            for part in [part for part in parts if isinstance(part, dict)]:
                if len(part) > _MOST_ATTRIBUTES:
                    raise Damaged(f"a tensor with {len(part):,} attributes")
                found |= part
    return found


_WITH_STATE = (_PARAMETER[1], "torch._tensor._rebuild_from_type_v2")
_FROM_CPU = ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor")
"""Devices whose tensors have no storage (XLA): a copy on the CPU, its element type, the device."""
_TENSOR_CLASSES = frozenset(
    ["torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"]
)


def _strided_tensor(args: tuple[Any, ...], function: str) -> StoredTensor | None:
    count = _REBUILD_TENSOR[function]
    if len(args) < count:
        raise Damaged(f"{function} with {len(args)} of its {count} arguments")
    item, offset, shape, strides = args[:4]
    if len(sizes(shape)) != len(sizes(strides)):
        raise Damaged(f"a tensor of {len(sizes(shape))} dims with {len(sizes(strides))} strides")
    if not isinstance(item, Persistent):
        return None
    storage = storage_of(item)
    dtype = storage.dtype
    if function == "_rebuild_tensor_v3":
        dtype = dtype_of(args[6])
    if dtype is None:
        raise Damaged(f"a tensor in storage {storage.key!r} has no element type")
    metadata = args[count] if len(args) > count else None
    flags = metadata if isinstance(metadata, dict) else {}
    ops = tuple(op for op in ("conj", "neg") if flags.get(op))
    return StoredTensor(storage, dtype, sizes(shape), sizes(strides), natural(offset), ops)


def natural(value: Any) -> int:
    """A non-negative int of a pickle."""
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise Damaged(f"expected a size or offset, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    """A value of a pickle for a message: small plain ones as they are, others by their type."""
    small = isinstance(value, str) or (isinstance(value, int) and abs(value) < 1 << 63)
    return repr(value)[:80] if small or value is None else f"a {type(value).__name__}"


def sizes(value: Any) -> tuple[int, ...]:
    """A shape or strides: a tuple, a list or a ``torch.Size`` of non-negative ints."""
    if isinstance(value, Call) and value.function == TORCH_SIZE and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, tuple | list):
        raise Damaged(f"expected sizes, got {type(value).__name__}")
    if len(value) > _MOST_DIMS:
        raise Damaged(f"{len(value):,} dims; torch supports up to {_MOST_DIMS}")
    for size in value:
        if type(size) is not int or not 0 <= size < _LIMIT:
            natural(size)
    return tuple(value)


def dtype_of(value: Any) -> DType:
    """The element type that a ``torch.<dtype>`` global names."""
    if isinstance(value, Global) and value.module == "torch" and value.name in BY_NAME:
        return BY_NAME[value.name]
    raise Damaged(f"unknown element type {value if isinstance(value, Global) else shown(value)}")


def place_of(tensor: StoredTensor, file: Any) -> Place:
    """Where a tensor of a ``TorchFile`` lies.

    Raises Damaged where its storage is missing, has another size than the pickle says, or ends
    before the tensor does.
    """
    with coded("storage-mismatch"):
        return _place(tensor, file)


def _place(tensor: StoredTensor, file: Any) -> Place:
    storage = tensor.storage
    stored = file.storages.get(storage.key)
    if stored is None:
        raise Damaged(f"{file.what}: storage {storage.key!r} is missing")
    if stored.size != storage.nbytes:
        raise Damaged(
            f"{file.what}: storage {storage.key!r} has {stored.size:,} bytes,"
            f" expected {storage.nbytes:,}"
        )
    itemsize = tensor.dtype.itemsize
    last = tensor.offset + sum(
        (n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True)
    )
    if 0 not in tensor.shape and (last + 1) * itemsize > storage.nbytes:
        raise Damaged(
            f"{file.what}: a tensor of shape {list(tensor.shape)} needs {(last + 1) * itemsize:,}"
            f" bytes of storage {storage.key!r}, which has {storage.nbytes:,}"
        )
    strides = tuple(s * itemsize for s in tensor.strides)
    swap = ("byteswap",) if file.byteorder == "big" and tensor.dtype.swap > 1 else ()
    start, ops = tensor.offset * itemsize, swap + tensor.ops
    crc = stored.crc32
    if stored.codec:
        whole = None if crc is None else Record(stored.file, 0, stored.size, crc)
        return EncodedBlob(
            stored.file,
            stored.offset,
            stored.nbytes,
            stored.codec,
            stored.size,
            start,
            strides,
            ops,
            whole,
        )
    record = None
    if crc is not None and stored.nbytes:
        record = Record(stored.file, stored.offset, stored.nbytes, crc)
    return Extent(stored.file, stored.offset + start, strides, record, ops)


INTEGERS = "int_repr"

_ONE_SCALE = ("q_scale", "q_zero_point")
_CHANNELS = ("q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis")
_BY_SCHEME = {
    "per_tensor_affine": _ONE_SCALE,
    "per_channel_affine": _CHANNELS,
    "per_channel_affine_float_qparams": _CHANNELS,
}
_REBUILD_QUANTISED = Global("torch._utils", "_rebuild_qtensor")
_REBUILD = Global("torch._utils", "_rebuild_tensor")


def quantised_parts(value: Any) -> dict[str, Any] | None:
    """The parts of a quantised tensor by name; None for every other value.

    None too where several numbers share a byte (``quint4x2``), or the quantizer is none of torch's
    affine ones: such tensors are left as they are.
    """
    value = unwrapped(value)
    if not isinstance(value, Call) or value.function != _REBUILD_QUANTISED or len(value.args) < 5:
        return None
    storage, parameters = value.args[0], value.args[4]
    if not _is_of_whole_bytes(storage) or not isinstance(parameters, tuple) or not parameters:
        return None
    scheme, *rest = parameters
    names = _BY_SCHEME.get(scheme.name, ()) if isinstance(scheme, Global) else ()
    if not names or len(names) != len(rest):
        return None
    return {INTEGERS: Call(_REBUILD, value.args[:4]), **dict(zip(names, rest, strict=True))}


def _is_of_whole_bytes(storage: Any) -> bool:
    """Whether a persistent id is that of a storage of integers of whole bytes."""
    value = storage.value if isinstance(storage, Persistent) else None
    kind = value[1] if isinstance(value, tuple) and len(value) > 1 else None
    return isinstance(kind, Global) and kind.name in QUANTISED_STORAGES


def quantised_notes(names: Collection[str]) -> list[str]:
    """What to say of the quantised tensors whose parts are among the names of leaves."""
    return [
        f"{name}: quantized; read as integers {name}.{INTEGERS} with {name}.{parameters[0]} and"
        f" {parameters[1]}"
        for one in names
        if (name := one.removesuffix(f".{INTEGERS}")) != one
        for parameters in (_ONE_SCALE, _CHANNELS)
        if f"{name}.{parameters[0]}" in names
    ]
