"""The tensors of a torch.save pickle: plain, quantized and wrapping ones, and their storages.

torch 1.6 to 2.13 pickles a quantized tensor as ``_rebuild_qtensor`` of the storage of its integers
and the parameters of its quantizer. Its parts have the names of torch's functions that return them:
``int_repr``; for one scale ``q_scale`` and ``q_zero_point``; for a scale per channel
``q_per_channel_scales``, ``q_per_channel_zero_points`` (tensors) and ``q_per_channel_axis``.

torch 2.0 to 2.15 pickles a tensor subclass that wraps others, such as torchao's quantized ones, as
``_rebuild_wrapper_subclass`` of its outer shape, and its attributes. The inner tensors are read as
they are, not as the class would present them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckptool.core.box import row_major_strides
from ckptool.core.catalog import EncodedBlob, Extent, Place, Record
from ckptool.core.dtype import BY_NAME, BY_STORAGE, QUANTIZED_STORAGES, DType
from ckptool.errors import Damaged, coded
from ckptool.serialization.pickle.records import TORCH_SIZE, Call, Global, Persistent, PickleValue

if TYPE_CHECKING:
    from ckptool.serialization.archive.read import TorchFile

_LONGEST_KEY = 200
_MOST_DIMS = 64
_MOST_ATTRIBUTES = 256
_LIMIT = 1 << 63
_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_FROM_CPU = "torch._utils._rebuild_device_tensor_from_cpu_tensor"
"""Devices whose tensors have no storage (XLA): a copy on the CPU, its element type, the device."""
_REBUILD = Global("torch._utils", "_rebuild_tensor")
_REBUILD_QUANTIZED = Global("torch._utils", "_rebuild_qtensor")
_REBUILD_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_TENSOR_CLASSES = frozenset(
    ["torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"]
)
_ARGUMENTS = {
    "torch._utils._rebuild_tensor": 4,
    "torch._utils._rebuild_tensor_v2": 6,
    "torch._utils._rebuild_tensor_v3": 7,
}
"""The functions that rebuild a strided tensor, and the number of arguments of each."""


class Storage(Struct, frozen=True):
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


class StoredTensor(Struct, frozen=True):
    """A tensor of a pickle: ``offset`` and ``strides`` in elements of its storage."""

    storage: Storage
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    ops: tuple[str, ...] = ()

    @property
    def fills_storage(self) -> bool:
        """Return whether the tensor is its whole storage, in order."""
        contiguous = row_major_strides(self.shape, 1)
        steps = zip(self.shape, self.strides, contiguous, strict=True)
        return (
            not self.offset
            and math.prod(self.shape) * self.dtype.itemsize == self.storage.nbytes
            and all(size == 1 or step == wanted for size, step, wanted in steps)
        )


def read_storage(item: Persistent) -> Storage:
    """Read the id ``('storage', class, key, location, numel[, view])``; Damaged if invalid."""
    value = item.value
    if not isinstance(value, tuple) or len(value) not in (5, 6) or value[0] != "storage":
        raise Damaged("a persistent id that is not a torch storage")
    cls, key, numel = value[1], value[2], value[4]
    is_short = isinstance(key, int) and abs(key) < _LIMIT
    if not is_short and not (isinstance(key, str) and len(key) < _LONGEST_KEY):
        raise Damaged("a storage whose key is not a short text")
    if not isinstance(cls, Global) or type(numel) is not int or not 0 <= numel < _LIMIT:
        raise Damaged(f"storage {key!r} has no class or no size")
    if len(value) == 6 and value[5] is not None:
        raise Damaged(
            f"storage {key!r} is a view of another; save the tensors again with current torch"
        )
    dtype = BY_STORAGE.get(cls.name)
    if dtype is None and cls.name != "UntypedStorage":
        raise Damaged(f"storage {key!r} has the unknown type {cls}")
    return Storage(str(key), dtype, numel)


def unwrap_parameter(value: PickleValue) -> Any:
    """Return a parameter's tensor, which ``_rebuild_parameter`` wraps; others unchanged."""
    for _ in range(8):
        if not isinstance(value, Call) or value.name not in _PARAMETER or not value.args:
            break
        value = value.args[0]
    return value


def is_tensor_record(value: PickleValue) -> bool:
    """Return whether a value is torch's pickle of a tensor, of whatever kind."""
    return isinstance(value, Call) and value.name.startswith(("torch._utils.", "torch._tensor."))


def read_tensor(value: PickleValue, depth: int = 4) -> StoredTensor | None:
    """Read the tensor that a call would rebuild; None if it is not a plain strided tensor.

    ``depth`` is how many calls may wrap one another. Raises Damaged if the record contradicts
    itself.
    """
    value = unwrap_parameter(value)
    if not depth or not isinstance(value, Call):
        return None
    name = value.name
    if name in _ARGUMENTS:
        return _strided_tensor(value.args, name)
    if name == _FROM_CPU and len(value.args) == 4:
        copied = read_tensor(value.args[0], depth - 1)
        return copied if copied and copied.dtype == read_dtype(value.args[1]) else None
    if name == _FROM_TYPE and len(value.args) == 4:
        function, cls, args, _ = value.args
        if isinstance(cls, Global) and str(cls) in _TENSOR_CLASSES:
            return read_tensor(Call(function, args), depth - 1)
    return None


def _strided_tensor(args: tuple[Any, ...], function: str) -> StoredTensor | None:
    count = _ARGUMENTS[function]
    if len(args) < count:
        name = function.rpartition(".")[2]
        raise Damaged(f"{name} with {len(args)} of its {count} arguments")
    item, offset, shape, strides = args[0], args[1], read_sizes(args[2]), read_sizes(args[3])
    if len(shape) != len(strides):
        raise Damaged(f"a tensor of {len(shape)} dims with {len(strides)} strides")
    if not isinstance(item, Persistent):
        return None
    storage = read_storage(item)
    dtype = read_dtype(args[6]) if function.endswith("_v3") else storage.dtype
    if dtype is None:
        raise Damaged(f"a tensor in storage {storage.key!r} has no element type")
    metadata = args[count] if len(args) > count else None
    flags = metadata if isinstance(metadata, dict) else {}
    ops = tuple(op for op in ("conj", "neg") if flags.get(op))
    return StoredTensor(storage, dtype, shape, strides, read_natural(offset), ops)


def read_attributes(value: PickleValue) -> dict[str, Any]:
    """Return the attributes that a tensor's record sets on it, including a parameter's own.

    Raises Damaged if there are more than any tensor has.
    """
    attributes: dict[str, Any] = {}
    for record in (value, unwrap_parameter(value)):
        if not isinstance(record, Call) or record.name not in (_PARAMETER[1], _FROM_TYPE):
            continue
        state = record.args[3] if len(record.args) == 4 else None
        parts = state[:2] if isinstance(state, tuple) else (state,)
        for part in [part for part in parts if isinstance(part, dict)]:
            if len(part) > _MOST_ATTRIBUTES:
                raise Damaged(f"a tensor with {len(part):,} attributes")
            attributes |= part
    return attributes


def read_natural(value: PickleValue) -> int:
    """Return a non-negative int of a pickle; Damaged if it is something else."""
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise Damaged(f"expected a size or offset, got {describe(value)}")
    return value


def describe(value: PickleValue) -> str:
    """Describe a value of a pickle: a small plain one by itself, another by its type."""
    small = isinstance(value, str) or (isinstance(value, int) and abs(value) < _LIMIT)
    return repr(value)[:80] if small or value is None else f"a {type(value).__name__}"


def read_sizes(value: PickleValue) -> tuple[int, ...]:
    """Read a shape or strides: a tuple, a list or a ``torch.Size`` of non-negative ints.

    Raises Damaged if it is something else, or of more dims than torch has.
    """
    if isinstance(value, Call) and value.function == TORCH_SIZE and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, tuple | list):
        raise Damaged(f"expected sizes, got {type(value).__name__}")
    if len(value) > _MOST_DIMS:
        raise Damaged(f"{len(value):,} dims; torch supports up to {_MOST_DIMS}")
    numbers = tuple([size for size in value if type(size) is int and 0 <= size < _LIMIT])
    if len(numbers) < len(value):
        for size in value:
            read_natural(size)
    return numbers


def read_dtype(value: PickleValue) -> DType:
    """Return the element type that a ``torch.<dtype>`` global names; Damaged for all else."""
    if isinstance(value, Global) and value.module == "torch" and value.name in BY_NAME:
        return BY_NAME[value.name]
    raise Damaged(f"unknown element type {value if isinstance(value, Global) else describe(value)}")


@coded("storage-mismatch")
def locate_tensor(tensor: StoredTensor, file: TorchFile) -> Place:
    """Return the place of a tensor in a file.

    Raises Damaged if its storage is missing, has another size than in the pickle, or ends before
    the tensor does.
    """
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
    path, at, nbytes, size, crc, codec = stored
    if codec and file.packed is not None:
        raise Damaged(f"{path}: a compressed record inside a compressed item")
    if codec:
        decoded = None if crc is None else Record(path, 0, size, crc)
        return EncodedBlob(path, at, nbytes, codec, size, start, strides, ops, decoded)
    record = None if crc is None or not nbytes else Record(path, at, nbytes, crc)
    if file.packed is not None:
        blob, size = file.packed
        place = (blob.file, blob.offset, blob.nbytes)
        return EncodedBlob(*place, "zstd", size, at + start, strides, ops, record)
    return Extent(path, at + start, strides, record, ops)


INTEGERS = "int_repr"
_ONE_SCALE = ("q_scale", "q_zero_point")
_CHANNELS = ("q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis")
_BY_SCHEME = {
    "per_tensor_affine": _ONE_SCALE,
    "per_channel_affine": _CHANNELS,
    "per_channel_affine_float_qparams": _CHANNELS,
}


def split_quantized(value: PickleValue) -> dict[str, Any] | None:
    """Return the parts of a quantized tensor by name; None for every other value.

    Also None if several numbers share a byte (``quint4x2``), or the quantizer is not one of torch's
    affine ones: such tensors stay as they are.
    """
    value = unwrap_parameter(value)
    if not isinstance(value, Call) or value.function != _REBUILD_QUANTIZED or len(value.args) < 5:
        return None
    storage, parameters = value.args[0], value.args[4]
    if not _has_whole_bytes(storage) or not isinstance(parameters, tuple) or not parameters:
        return None
    scheme, *rest = parameters
    names = _BY_SCHEME.get(scheme.name, ()) if isinstance(scheme, Global) else ()
    if not names or len(names) != len(rest):
        return None
    return {INTEGERS: Call(_REBUILD, value.args[:4]), **dict(zip(names, rest, strict=True))}


def _has_whole_bytes(storage: PickleValue) -> bool:
    """Return whether a persistent id is of a storage of whole-byte integers."""
    value = storage.value if isinstance(storage, Persistent) else None
    cls = value[1] if isinstance(value, tuple) and len(value) > 1 else None
    return isinstance(cls, Global) and cls.name in QUANTIZED_STORAGES


def describe_quantized(names: Collection[str]) -> list[str]:
    """Return a note on each quantized tensor whose parts are among the names of leaves."""
    return [
        f"{name} is quantized: its integers are read as {leaf}, with {name}.{parameters[0]} and"
        f" {parameters[1]}"
        for leaf in names
        if (name := leaf.removesuffix(f".{INTEGERS}")) != leaf
        for parameters in (_ONE_SCALE, _CHANNELS)
        if f"{name}.{parameters[0]}" in names
    ]


def find_wrapper_class(value: PickleValue) -> Global | None:
    """Return the class of a tensor subclass that wraps others; None for every other value.

    DTensors and ShardedTensors do not count: what they wrap is a part of them.
    """
    value = unwrap_parameter(value)
    if not isinstance(value, Call) or value.name != _FROM_TYPE or len(value.args) != 4:
        return None
    function, cls = value.args[:2]
    if function != _REBUILD_WRAPPER or not isinstance(cls, Global):
        return None
    is_torchs = cls.module.startswith("torch.distributed.")
    return None if is_torchs and cls.name in ("DTensor", "ShardedTensor") else cls


def split_wrapper(value: PickleValue) -> dict[str, Any] | None:
    """Return the attributes of a tensor subclass that wraps others; None if it wraps none."""
    if find_wrapper_class(value) is None:
        return None
    parts = {str(name): part for name, part in read_attributes(value).items()}
    return parts if any(map(is_tensor_record, parts.values())) else None


def read_outer(value: PickleValue) -> tuple[DType, tuple[int, ...]] | None:
    """Return the outer element type and shape of a subclass that wraps others.

    None for every other value; Damaged if the record is invalid.
    """
    if find_wrapper_class(value) is None:
        return None
    arguments = unwrap_parameter(value).args[2]
    if not isinstance(arguments, tuple) or len(arguments) < 3:
        raise Damaged("a tensor subclass without its type and shape")
    return read_dtype(arguments[1]), read_sizes(arguments[2])
