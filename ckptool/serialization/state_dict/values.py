"""Non-tensor values of a checkpoint: which are plain, what to call them, which are equal.

The classes and functions that real checkpoints name in their pickles.

Seen in files by torch 2.1 to 2.13, torchao 0.18, accelerate, Lightning, torchtitan, verl,
Megatron-core 0.12 to 0.20, nvidia-resiliency-ext, DeepSpeed 0.19 and ByteCheckpoint 0.0.2, or on
torch's own ``weights_only`` list. None is ever imported or called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptool.core.catalog import ObjectEntry
from ckptool.core.dtype import BY_NAME
from ckptool.errors import Problem
from ckptool.serialization.pickle.numpy_records import class_name, holds_objects, is_numpy
from ckptool.serialization.pickle.records import Call, Global, Persistent

_PLAIN_CALLS = frozenset(["torch.Size", "torch.device", "torch.serialization._get_layout"])
_DTYPES = frozenset(BY_NAME) | frozenset(
    ["qint8", "quint8", "qint32", "quint4x2", "quint2x4"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
)
"""Element types that can be a value; those of the second line are of no tensor that is read."""


UNREAD_TENSOR = "torch storage"
"""Stands among the foreign globals of a value that is not read, such as a tensor of some kinds."""


@dataclass(frozen=True, slots=True, repr=False)
class Repeated:
    """Stands for a value that is one of those it lies in: a dict that holds itself."""

    outer: str

    def __repr__(self) -> str:
        return f"<{self.outer} again>"


NUMPY = "numpy data"
"""Stands there for all of numpy's arrays, scalars and generators, which writers carry."""


def _class_name(value: Any) -> str:
    return str(value) if isinstance(value, Global) else "unknown"


class Foreign:
    """Remembers ``foreign_globals`` of the values of one checkpoint, which may share them."""

    def __init__(self) -> None:
        self._known: dict[int, set[str]] = {}

    def of(self, value: Any) -> set[str]:
        """The value's foreign globals; the value must outlive this object."""
        if id(value) not in self._known:
            self._known[id(value)] = foreign_globals(value)
        return self._known[id(value)]


def foreign_globals(value: Any) -> set[str]:
    """Names of the classes and functions in a value that are no plain data.

    Plain is what ``torch.load(weights_only=True)`` rebuilds without further permission.
    """
    return {name for item in _parts(value) if (name := _foreign_name(item)) is not None}


def _foreign_name(item: Any) -> str | None:
    """Return what is foreign in a part of a value, the parts inside it apart."""
    if isinstance(item, Call):
        if holds_objects(item):
            return "numpy elements that are Python objects"
        return None if isinstance(item.function, Global) else item.name
    if isinstance(item, Global):
        if _plain_global(item):
            return None
        return NUMPY if is_numpy(item) else str(item)
    if isinstance(item, Persistent | Repeated):
        return UNREAD_TENSOR
    return "frozenset" if isinstance(item, frozenset) else None


def stray_notes(file: str, keys: Iterable[Any]) -> list[str]:
    """Return a note on what lies in a file under keys that its format does not have, if any."""
    names = ", ".join(repr(key)[:80] for key in keys)
    return [f"not carried: {names} of {file}, unknown to its format"] if names else []


def globals_in(value: Any) -> set[Global]:
    """Return every class and function that a value names, wherever in it."""
    return {item for item in _parts(value, hidden=True) if isinstance(item, Global)}


def _parts(value: Any, *, hidden: bool = False) -> Iterator[Any]:
    """Yield a value and all that lies in it, each once.

    With ``hidden`` also what persistent ids name, and the attributes of dicts.
    """
    stack, seen = [value], set()
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        if isinstance(item, Call):
            stack += [item.args, item.state]
            stack += [item.items, item.entries] if item.is_filled else []
            stack.append(item.function)
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            stack += list(item)
        if hidden and isinstance(item, Persistent):
            stack.append(item.value)
        if hidden and isinstance(item, dict):
            stack.append(getattr(item, "state", None))


def is_dtype(item: Global) -> bool:
    """Whether a global is one of torch's element types."""
    return item.module == "torch" and item.name in _DTYPES


def _plain_global(item: Global) -> bool:
    return str(item) in _PLAIN_CALLS or is_dtype(item)


def _of_subclass(record: Call) -> str:
    """Of a DTensor, the class of its local tensor where that is a subclass too."""
    state = record.args[3] if len(record.args) == 4 else None
    parts = state if isinstance(state, tuple) else (state,)
    found = (
        part["_local_tensor"] for part in parts if isinstance(part, dict) if "_local_tensor" in part
    )
    local = next(found, None)
    is_one = isinstance(local, Call) and local.name == record.name and len(local.args) > 1
    return f" of {_class_name(local.args[1])}" if isinstance(local, Call) and is_one else ""


def type_name(value: Any) -> str:
    """What a person calls the type: ``int``, ``torch.Size``, ``argparse.Namespace``."""
    if isinstance(value, Call):
        if value.name == "torch._utils._rebuild_qtensor":
            return "quantized tensor"
        if value.name == "torch._utils._rebuild_sparse_tensor":
            return "sparse tensor"
        if value.name.endswith("_rebuild_nested_tensor"):
            return "nested tensor"
        if value.name == "torch._tensor._rebuild_from_type_v2" and len(value.args) > 1:
            return _class_name(value.args[1]) + _of_subclass(value)
        numpy_name = class_name(value)
        if numpy_name is not None:
            return numpy_name
        return value.name
    if isinstance(value, Persistent):
        return UNREAD_TENSOR
    if isinstance(value, Repeated):
        return "reference"
    if isinstance(value, Global):
        return "torch.dtype" if _plain_global(value) else "class or function"
    return "NoneType" if value is None else type(value).__name__.replace("Mapping", "Dict")


def same_value(one: Any, other: Any) -> bool:
    """Whether two values read from pickles are equal, inert records included."""
    compared: set[tuple[int, int]] = set()
    stack = [(one, other)]
    while stack:
        a, b = stack.pop()
        if a is b or (id(a), id(b)) in compared:
            continue
        if type(a) is not type(b):
            return False
        compared.add((id(a), id(b)))
        inner = _pairs(a, b)
        if inner is None:
            return False
        stack += inner
    return True


def _pairs(one: Any, other: Any) -> list[tuple[Any, Any]] | None:
    """What must be equal inside two values of one type; None where they differ themselves."""
    if isinstance(one, Call):
        parts = ("function", "args", "state", "items", "entries")
        return [(getattr(one, part), getattr(other, part)) for part in parts]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return None
        return [(value, other[key]) for key, value in one.items()]
    if isinstance(one, list | tuple):
        return list(zip(one, other, strict=True)) if len(one) == len(other) else None
    if isinstance(one, float):
        return [] if one == other or (one != one and other != other) else None
    return [] if one == other else None


_PLAIN = {
    "argparse": "Namespace",
    "collections": "OrderedDict Counter defaultdict deque",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "functools": "partial",
    "random": "Random",
    "typing": "Any",
    "uuid": "UUID SafeUUID",
    "omegaconf.dictconfig": "DictConfig",
    "omegaconf.listconfig": "ListConfig",
    "omegaconf.base": "ContainerMetadata Metadata",
    "omegaconf.nodes": "AnyNode StringNode IntegerNode FloatNode BooleanNode BytesNode PathNode"
    " EnumNode InterpolationResultNode",
    "lightning.fabric.utilities.data": "AttributeDict",
    "lightning_fabric.utilities.data": "AttributeDict",
    "lightning.pytorch.utilities.parsing": "AttributeDict",
    "pytorch_lightning.utilities.parsing": "AttributeDict",
    "torch.nn.functional": "gelu relu silu softplus sigmoid tanh",
    "torch._C._nn": "gelu silu",
    "torch.nn.init": "normal_ zeros_ ones_ xavier_uniform_ xavier_normal_ kaiming_uniform_",
    "megatron.core.activations": "squared_relu quick_gelu fast_gelu",
    "megatron.core.utils": "init_method_normal scaled_init_method_normal",
    "pathlib": "Path PosixPath PurePosixPath WindowsPath PureWindowsPath",
    "pathlib._local": "PosixPath WindowsPath",
    "datetime": "datetime date timedelta timezone",
    "types": "SimpleNamespace",
    "signal": "Signals",
    "_io": "BytesIO",
    "_codecs": "encode",
    "copyreg": "_reconstructor",
    "numpy.dtypes": "UInt32DType",
    "torch": "Size device Tensor Generator per_tensor_affine per_channel_affine strided",
    "torch._C": "Generator",
    "torch._tensor": "_rebuild_from_type_v2",
    "torch._utils": "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter"
    " _rebuild_parameter_with_state _rebuild_qtensor _rebuild_sparse_tensor"
    " _rebuild_sparse_csr_tensor _rebuild_nested_tensor _rebuild_meta_tensor_no_storage"
    " _rebuild_wrapper_subclass _rebuild_device_tensor_from_numpy"
    " _rebuild_device_tensor_from_cpu_tensor",
    "torch.nested._internal.nested_tensor": "_rebuild_njt NestedTensor",
    "torch.nn.parameter": "Parameter Buffer UninitializedParameter",
    "torch.serialization": "_get_layout",
    "torch.storage": "UntypedStorage TypedStorage",
    "torch.fx.passes.shape_prop": "TensorMetadata",
    "torch.distributed.remote_device": "_remote_device",
    "megatron.core.enums": "ModelType",
    "megatron.core.transformer.enums": "AttnBackend CudaGraphScope CudaGraphModule",
    "megatron.core.rerun_state_machine": "RerunState RerunMode RerunDiagnostic",
    "megatron.core.optimizer.optimizer_config": "OptimizerConfig",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
}
_KNOWN = frozenset(f"{module}.{name}" for module, names in _PLAIN.items() for name in names.split())
_BUILTINS = frozenset(
    "set frozenset complex bytearray range slice int float str bytes list dict tuple bool object"
    " xrange long unicode Ellipsis NotImplemented getattr".split()
)
_KNOWN_PACKAGES = (
    "torch.distributed.tensor",
    "torch.distributed._tensor",
    "torch.distributed.device_mesh",
    "torch.distributed._mesh_layout",
    "torch.distributed._shard",
    "torch.distributed.checkpoint",
    "megatron.core.dist_checkpointing",
    "nvidia_resiliency_ext.checkpointing",
    "bytecheckpoint.checkpointer",
)
_HARMLESS_PACKAGES = frozenset(
    "__torch__ accelerate addict composer datasets deepspeed diffusers easydict enum fairseq"
    " lightning lightning_fabric megatron ml_collections nemo numpy omegaconf peft"
    " pytorch_lightning safetensors timm tokenizers torch torchao torchtitan torchtune"
    " torchvision transformers transformer_engine trl verl yacs".split()
)
"""Packages whose classes are records of settings, modules and tensors, whatever one is called."""


def is_known(item: Global) -> bool:
    """Whether real checkpoints name this global, so that naming it is nothing to report."""
    if item.module in ("builtins", "__builtin__"):
        return item.name in _BUILTINS
    if (
        is_numpy(item)
        or is_dtype(item)
        or (item.module == "torch" and item.name.endswith("Storage"))
    ):
        return True
    within = (item.module == top or item.module.startswith(f"{top}.") for top in _KNOWN_PACKAGES)
    return str(item) in _KNOWN or (_is_class(item) and any(within))


def is_harmless(item: Global) -> bool:
    """Whether a global is by its name a class of a package whose classes hold data."""
    return item.module.partition(".")[0] in _HARMLESS_PACKAGES and _is_class(item)


def _is_class(item: Global) -> bool:
    """Whether a name is spelt as that of a class, not of a function."""
    return item.name.lstrip("_")[:1].isupper()


def unread_notes(objects: Mapping[str, ObjectEntry]) -> list[str]:
    """One note for each value that is not read, such as a sparse tensor or a dict in itself."""
    known = Foreign()
    return [
        Problem(_why_unread(entry), "tensor-unsupported", tensor=entry.name)
        for entry in objects.values()
        if UNREAD_TENSOR in known.of(entry.value)
    ]


def _why_unread(entry: ObjectEntry) -> str:
    if isinstance(entry.value, Repeated):
        return f"not read: {entry.name} refers back to {entry.value.outer}, which contains it"
    return f"not read: {entry.name} ({type_name(entry.value)}) is not a plain tensor"
