"""The tensors of a torch.save pickle: plain and wrapping ones, and their storages.

torch 2.0 to 2.15 pickles a tensor subclass that wraps others, such as torchao's quantized ones, as
``_rebuild_wrapper_subclass`` of its outer shape, and its attributes. Where the class's source says
that one of them is its value, the tensor is that one. Otherwise the inner tensors are read as they
are, not as the class would present them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ckptool.core.box import is_countable, row_major_strides
from ckptool.core.catalog import EncodedBlob, Extent, Place, Record
from ckptool.core.dtype import BY_NAME, BY_STORAGE, DType
from ckptool.errors import Damaged, coded
from ckptool.serialization.pickle.records import (
    TORCH_SIZE,
    Call,
    Global,
    Persistent,
    PickleValue,
    state_fields,
)

if TYPE_CHECKING:
    from ckptool.serialization.archive.read import TorchFile

_LONGEST_KEY = 200
_MOST_DIMS = 64
_MOST_ATTRIBUTES = 256
_LIMIT = 1 << 63
_WITH_STATE = "torch._utils._rebuild_parameter_with_state"
_OLD_PARAMETER = "torch.nn.parameter.Parameter"
"""What torch 0.1 to 0.4 called; up to 0.3 it set three flags of it then."""
_PARAMETERS = ("torch._utils._rebuild_parameter", _WITH_STATE, _OLD_PARAMETER)
SUBCLASS = "torch._tensor._rebuild_from_type_v2"
"""What rebuilds an object of any subclass of tensors, plain ones with attributes included."""
_FROM_CPU = "torch._utils._rebuild_device_tensor_from_cpu_tensor"
"""Devices whose tensors have no storage (XLA): a copy on the CPU, its element type, the device."""
_REBUILD_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_TENSOR_CLASSES = frozenset(
    ["torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"]
)
_OF_TENSORS = ("torch._utils.", "torch._tensor.", "torch.nested.", "torch.nn.parameter.")
"""Modules of which each function and class that a pickle calls creates a tensor."""
_MOST_WRAPPED = 8
_SCALE = "_precomputed_scale"
_PLAIN_INSIDE = {
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": ("_tensor", _SCALE),
    "torchao.prototype.quantized_training.bitnet.BitNetTrainingLinearWeight": ("_data", _SCALE),
    "torchao.prototype.quantized_training.int8_mixed_precision"
    ".Int8MixedPrecisionTrainingLinearWeight": ("_data", None),
    "torchao.prototype.moe_training.tensor.ScaledGroupedMMTensor": ("_data", None),
    "torchao.prototype.moe_training.tensor.Float8TrainingWeightWrapperTensor": ("_data", None),
    "torchao.prototype.moe_training.tensor.MXFP8TrainingWeightWrapperTensor": ("_data", None),
}
"""Subclasses whose value is the plain tensor in an attribute, and one that is computed from it.

torchao 0.9 to 0.18 cast it only for a product, or when FSDP gathers it: the first three are in all
of these, ``ScaledGroupedMMTensor`` in 0.12 to 0.16, the last two since 0.17.
"""
_ARGUMENTS = {
    "torch._utils._rebuild_tensor": (4, 4),
    "torch._utils._rebuild_tensor_v2": (6, 7),
    "torch._utils._rebuild_tensor_v3": (7, 8),
}
"""The functions that rebuild a strided tensor, and the least and most arguments of each."""


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
            and all(size == 1 or step == stride for size, step, stride in steps)
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


def list_wrapped(value: PickleValue) -> list[Any]:
    """Return a record and those inside it that are the same tensor, from the outermost to the last.

    A parameter wraps its tensor, and so do subclasses whose value is a plain tensor.
    """
    records: list[Any] = [value]
    while len(records) < _MOST_WRAPPED and isinstance(value, Call):
        value = _wrapped_in(value)
        if value is None:
            break
        records.append(value)
    return records


def _wrapped_in(record: Call) -> PickleValue:
    """Return the record of the same tensor that another one wraps; None if it wraps none."""
    if record.name in _PARAMETERS:
        return record.args[0] if record.args else None
    if record.name != SUBCLASS or len(record.args) != 4:
        return None
    cls = record.args[1]  # text of anything else may be endless
    attribute, computed = (None, None)
    if isinstance(cls, Global):
        attribute, computed = _PLAIN_INSIDE.get(str(cls), (None, None))
    if attribute is None or record.args[0] != _REBUILD_WRAPPER:
        return None
    fields = state_fields(record.args[3])
    tensors = {name for name, part in fields.items() if is_tensor_record(part)} - {computed}
    return fields[attribute] if tensors == {attribute} else None


def unwrap(value: PickleValue) -> Any:
    """Return the innermost record of a tensor: that of a parameter, or of a plain tensor inside."""
    return list_wrapped(value)[-1]


def is_tensor_record(value: PickleValue) -> bool:
    """Return whether a value is torch's pickle of a tensor, of whatever kind."""
    return isinstance(value, Call) and value.name.startswith(_OF_TENSORS)


def read_tensor(value: PickleValue, depth: int = 4) -> StoredTensor | None:
    """Read the tensor that a call would rebuild; None if it is not a plain strided tensor.

    ``depth`` is how many calls may wrap one another. Raises Damaged if the record contradicts
    itself.
    """
    records = list_wrapped(value)
    require_unchanged(records)
    tensor = _read_unwrapped(records[-1], depth)
    if tensor is not None and len(records) > 1:
        require_outer(records, tensor.dtype, tensor.shape)
    return tensor


def is_changed(record: PickleValue) -> bool:
    """Return whether a pickle sets the content of a tensor that it made: torch loads what is set.

    ``Tensor.__setstate__`` (torch 0.1 to 2.15) takes another storage, which no version writes.
    """
    if not isinstance(record, Call) or not (record.is_filled or record.state is not None):
        return False
    flags = record.state if record.name == _OLD_PARAMETER and not record.is_filled else None
    return not isinstance(flags, tuple) or len(flags) != 3


def require_unchanged(records: Iterable[PickleValue]) -> None:
    """Raise Damaged if one of the records of a tensor is changed."""
    if any(map(is_changed, records)):
        raise Damaged("a tensor whose content is set after it was made")


def require_outer(records: list[Any], dtype: DType, shape: tuple[int, ...]) -> None:
    """Raise Damaged if one of the records that wrap a tensor says another type or shape."""
    for record in records[:-1]:
        kind = _outer_of(record)
        if kind not in (None, (dtype, shape)):
            says = f"{kind[0]} {list(kind[1])}" if kind else ""
            raise Damaged(f"{record.args[1]} of {says} around a tensor of {dtype} {list(shape)}")


def _read_unwrapped(value: PickleValue, depth: int) -> StoredTensor | None:
    if not depth or not isinstance(value, Call):
        return None
    name = value.name
    if name in _ARGUMENTS:
        return _strided_tensor(value.args, name)
    if name == _FROM_CPU and len(value.args) == 4:
        copied = read_tensor(value.args[0], depth - 1)
        return copied if copied and copied.dtype == read_dtype(value.args[1]) else None
    if name == SUBCLASS and len(value.args) == 4:
        function, cls, args, _ = value.args
        if isinstance(cls, Global) and str(cls) in _TENSOR_CLASSES:
            return read_tensor(Call(function, args), depth - 1)
    return None


def _strided_tensor(args: tuple[Any, ...], function: str) -> StoredTensor | None:
    least, most = _ARGUMENTS[function]
    if not least <= len(args) <= most:
        raise Damaged(f"{function} with {len(args)} of its {least} arguments")
    item, offset, shape, strides = args[0], args[1], read_sizes(args[2]), read_sizes(args[3])
    if len(shape) != len(strides):
        raise Damaged(f"a tensor of {len(shape)} dims with {len(strides)} strides")
    if not isinstance(item, Persistent):
        return None
    storage = read_storage(item)
    dtype = read_dtype(args[6]) if function.endswith("_v3") else storage.dtype
    if dtype is None:
        raise Damaged(f"a tensor in storage {storage.key!r} has no element type")
    if not is_countable(shape, dtype.itemsize):
        raise Damaged(f"a tensor of {list(shape)}, which has too many elements to be counted")
    flags = (args[least] if len(args) > least else None) or {}
    if not isinstance(flags, dict) or (least > 4 and not isinstance(args[4], bool)):
        raise Damaged("a tensor whose requires_grad or metadata is not as torch writes it")
    ops = tuple(op for op in ("conj", "neg") if flags.get(op))
    return StoredTensor(storage, dtype, shape, strides, read_natural(offset), ops)


def read_attributes(value: PickleValue) -> dict[str, Any]:
    """Return the attributes that a tensor's record sets on it, including a parameter's own.

    Not those that are the tensor itself, or computed from it. Raises Damaged if there are more than
    any tensor has.
    """
    attributes: dict[str, Any] = {}
    records = list_wrapped(value)
    for record in records:
        if not isinstance(record, Call) or record.name not in (_WITH_STATE, SUBCLASS):
            continue
        state = record.args[3] if len(record.args) == 4 else None
        parts = state[:2] if isinstance(state, tuple) else (state,)
        is_wrapper = record is not records[-1] and record.name == SUBCLASS
        names = _PLAIN_INSIDE[str(record.args[1])] if is_wrapper else ()
        for part in [part for part in parts if isinstance(part, dict)]:
            if len(part) > _MOST_ATTRIBUTES:
                raise Damaged(f"a tensor with {len(part):,} attributes")
            attributes |= {str(name): item for name, item in part.items() if name not in names}
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


def find_wrapper_class(value: PickleValue) -> Global | None:
    """Return the class of a tensor subclass that wraps others; None for every other value.

    DTensors and ShardedTensors do not count: what they wrap is a part of them. Nor does one whose
    content is set later.
    """
    value = unwrap(value)
    if not isinstance(value, Call) or value.name != SUBCLASS or len(value.args) != 4:
        return None
    function, cls = value.args[:2]
    if is_changed(value) or function != _REBUILD_WRAPPER or not isinstance(cls, Global):
        return None
    is_torchs = cls.module.startswith("torch.distributed.")
    return None if is_torchs and cls.name in ("DTensor", "ShardedTensor") else cls


def split_wrapper(value: PickleValue) -> dict[str, Any] | None:
    """Return the attributes of a tensor subclass that wraps others; None if it wraps none.

    Also None if it wraps one alone and is not torchao's: whether that is its value is unknown.
    """
    cls = find_wrapper_class(value)
    if cls is None:
        return None
    parts = read_attributes(value)
    count = sum(map(is_tensor_record, parts.values()))
    return parts if count > 1 or (count and cls.module.startswith("torchao.")) else None


def read_outer(value: PickleValue) -> tuple[DType, tuple[int, ...]] | None:
    """Return the outer element type and shape of a subclass that wraps others.

    None for every other value; Damaged if the record is invalid.
    """
    return None if find_wrapper_class(value) is None else _outer_of(unwrap(value))


def _outer_of(record: Call) -> tuple[DType, tuple[int, ...]] | None:
    """Return the type and shape that a subclass's record says; None for a parameter's."""
    if record.name != SUBCLASS:
        return None
    arguments = record.args[2]
    if not isinstance(arguments, tuple) or len(arguments) < 3:
        raise Damaged("a tensor subclass without its type and shape")
    return read_dtype(arguments[1]), read_sizes(arguments[2])
