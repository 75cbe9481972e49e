"""The classes and functions that pickles name: those that run code, numpy's, and plain data.

Those of real checkpoints were seen in files by torch 2.1 to 2.13, torchao 0.18, accelerate,
Lightning, torchtitan, verl, Megatron-core 0.12 to 0.20, nvidia-resiliency-ext, DeepSpeed 0.19 and
ByteCheckpoint 0.0.2, or on torch's own ``weights_only`` list. None is ever imported or called.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ckptool.core.dtype import BY_NAME
from ckptool.serialization.pickle.records import Global


def _expand(names_by_module: Mapping[str, str]) -> frozenset[Global]:
    """Return each name of a module, from a table that has them as one text."""
    return frozenset(
        Global(module, name) for module, names in names_by_module.items() for name in names.split()
    )


GETATTR = Global("builtins", "getattr")
"""Sound pickles reach members of classes with it; others can run code with it: ``is_member``."""
SHARDED_MODULE = "torch.distributed._shard.sharded_tensor.api"
_BUILTINS = ("builtins", "__builtin__")
_SAFE_BUILTINS = frozenset(
    "set frozenset complex bytearray range slice int float str bytes list dict tuple bool"
    " object xrange long unicode Ellipsis NotImplemented".split()
)
"""Those of Python 3, and protocol 2's names for ``range``, ``int`` and ``str``."""
_CODE_PACKAGES = frozenset(
    "IPython _ctypes _functools _io _operator _osx_support _pickle _posixsubprocess _socket"
    " _thread aiohttp asyncio atexit bdb cProfile cffi cgitb cloudpickle code codeop commands"
    " compileall concurrent ctypes curses dill distutils doctest ensurepip fabric fileinput"
    " ftplib functools gc getpass glob http idlelib imp importlib inspect lib2to3 linecache"
    " logging mailcap marshal mmap multiprocessing nt nturl2path numba operator os pandas"
    " paramiko pdb pexpect pickle pip pkgutil platform plumbum popen2 posix profile pty"
    " py_compile pydoc readline requests resource rlcompleter runpy sched setuptools sh shutil"
    " signal site smtplib socket sqlite3 ssl subprocess sys tarfile telnetlib tempfile"
    " threading timeit trace turtledemo types unittest urllib uuid venv webbrowser xmlrpc"
    " zipfile zipimport"
    " numpy.f2py numpy.testing torch._classes torch._dynamo.guards torch._inductor torch._ops"
    " torch.classes torch.distributed.checkpoint.format_utils"
    " torch.distributed.checkpoint.state_dict_loader"
    " torch.distributed.checkpoint.state_dict_saver torch.distributed.elastic"
    " torch.distributed.launcher torch.distributed.rpc torch.distributed.run torch.hub torch.jit"
    " torch.multiprocessing torch.ops torch.package torch.testing torch.utils.benchmark"
    " torch.utils.bottleneck torch.utils.collect_env torch.utils.cpp_extension"
    " torch.utils.data._utils torch.utils.data.datapipes torch.utils.model_zoo".split()
)
"""Everything in these packages can run code, or touch the system, except ``_INERT``."""
_CODE_FUNCTIONS = _expand(
    {
        "io": "open FileIO open_code",
        "joblib": "load",
        "numpy": "load",
        "torch": "load",
        "torch.fx.graph_module": "reduce_graph_module",
        "torch.serialization": "load",
        "torch.storage": "_load_from_bytes",
    }
)
_INERT = _expand(
    {
        "_io": "BytesIO",
        "io": "BytesIO",
        "signal": "Signals",
        "types": "SimpleNamespace",
        "functools": "partial",
        "uuid": "UUID SafeUUID",
    }
)
"""Plain data classes in modules that also contain code.

From Megatron-core's safe globals, and from the hyperparameters that Lightning saves. The function
in a partial is a global too, and judged by itself.
"""
_DOTTED = frozenset([Global(SHARDED_MODULE, "ShardedTensor.ProcessGroupState")])
"""Dotted names in real checkpoints; any other could reach hidden attributes of a class."""

_MEMORY_FORMATS = frozenset(
    f"torch.{name}"
    for name in "contiguous_format preserve_format channels_last channels_last_3d".split()
)


def _is_memory_format(item: Global) -> bool:
    """Return whether a global is one of torch's memory formats.

    They have no module of their own: protocol 4 names the first one that has a ``torch``.
    """
    return item.name in _MEMORY_FORMATS and not _is_code(item.module)


def can_run_code(item: Global) -> bool:
    """Return whether calling this global could run code or touch the system."""
    if item.module in (*_BUILTINS, "__builtins__"):
        return item.name not in _SAFE_BUILTINS and item.name != "getattr"
    if is_numpy(item) or _is_memory_format(item):
        return False
    if ("." in item.name and item not in _DOTTED) or item.name.startswith("__"):
        return True
    return item not in _INERT and (item in _CODE_FUNCTIONS or _is_code(item.module))


@lru_cache(maxsize=4096)
def _is_code(module: str) -> bool:
    """Return whether all of a module could run code. Hostile pickles name one a million times."""
    steps = module.split(".")
    return any(".".join(steps[: end + 1]) in _CODE_PACKAGES for end in range(len(steps)))


def is_name(text: str) -> bool:
    """Return whether a text can be the dotted name of a module, class or function."""
    return len(text) < 1000 and all(step.isidentifier() for step in text.split("."))


_SCALARS = (
    "bool_ bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 intc uintc longlong ulonglong"
    " float16 float32 float64 longdouble float128 complex64 complex128 clongdouble complex256"
    " str_ bytes_ void datetime64 timedelta64"
)
"""The classes of numpy's scalars, which settings use as element types."""
_NUMPY_DATA = _expand(
    {
        "numpy": f"ndarray dtype {_SCALARS}",
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy._core.multiarray": "_reconstruct scalar",
        "numpy.core.numeric": "_frombuffer",
        "numpy._core.numeric": "_frombuffer",
    }
)
"""Creators of arrays, in numpy 1.17 to 2.4; inner modules are in ``numpy._core`` since 2.0."""
_NUMPY_RANDOM = _expand(
    {
        "numpy.random": "__RandomState_ctor",
        "numpy.random._pickle": "__generator_ctor __bit_generator_ctor __randomstate_ctor",
        "numpy.random._mt19937": "MT19937",
        "numpy.random._pcg64": "PCG64 PCG64DXSM",
        "numpy.random._philox": "Philox",
        "numpy.random._sfc64": "SFC64",
        "numpy.random.bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
        "numpy.random._bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
    }
)


def is_numpy(item: Global) -> bool:
    """Return whether a global creates, or is the type of, an array, a scalar or a random generator.

    They are data, as long as no element is a Python object.
    """
    return item in _NUMPY_DATA or item in _NUMPY_RANDOM


def is_generator(item: Global) -> bool:
    """Return whether a global creates a random generator, or a part of one."""
    return item in _NUMPY_RANDOM


_DTYPES = frozenset(BY_NAME) | frozenset(
    ["qint8", "quint8", "qint32", "quint4x2", "quint2x4"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)]
)
"""Element types that can be a value; tensors of those on the second line are not supported."""


def is_dtype(item: Global) -> bool:
    """Return whether a global is one of torch's element types."""
    return item.module == "torch" and item.name in _DTYPES


_KNOWN = _expand(
    {
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
        "omegaconf.nodes": "AnyNode StringNode IntegerNode FloatNode BooleanNode BytesNode"
        " PathNode EnumNode InterpolationResultNode",
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
        "torch.torch_version": "TorchVersion",
        "torch.fx.passes.shape_prop": "TensorMetadata",
        "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta"
        " BytesStorageMetadata TensorStorageMetadata ChunkStorageMetadata TensorProperties"
        " _MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
        "torch.distributed.checkpoint.hf_storage": "_HFStorageInfo",
        "torch.distributed.checkpoint._hf_utils": "_HFStorageInfo",
        "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData"
        " BytesIOWriteData",
        "torch.distributed.checkpoint.state_dict": "StateDictOptions",
        "torch.distributed.remote_device": "_remote_device",
        "mmengine.logging.history_buffer": "HistoryBuffer",
        "megatron.core.rerun_state_machine": "RerunState RerunMode RerunDiagnostic",
        "megatron.core.optimizer.optimizer_config": "OptimizerConfig",
        "deepspeed.runtime.fp16.loss_scaler": "LossScaler DynamicLossScaler",
        "deepspeed.runtime.zero.config": "ZeroStageEnum",
        "deepspeed.utils.tensor_fragment": "fragment_address",
    }
)
_KNOWN_PACKAGES = tuple(
    "torch.distributed.tensor. torch.distributed._tensor. torch.distributed.device_mesh."
    " torch.distributed._mesh_layout. torch.distributed._shard."
    " megatron.core.dist_checkpointing. nvidia_resiliency_ext.checkpointing."
    " bytecheckpoint.checkpointer. torchao. megatron.core.enums."
    " megatron.core.transformer.enums.".split()
)
"""Their classes are records of shards and metadata, or settings of a closed set, as Megatron's.

torchao's wrap tensors, and say how to cast.
"""
_HARMLESS_PACKAGES = frozenset(
    "__torch__ accelerate addict bitsandbytes composer datasets deepspeed diffusers"
    " distributed_shampoo easydict enum fairseq lightning lightning_fabric megatron"
    " ml_collections mmcv mmengine nemo numpy olmo_core omegaconf peft pytorch_lightning"
    " pytorch_optimizer safetensors timm tokenizers torch torchtitan torchtune torchvision"
    " transformers transformer_engine trl ultralytics verl yacs".split()
)
"""Packages whose classes are records of settings, modules and tensors, whatever one is called."""


def is_known(item: Global) -> bool:
    """Return whether real checkpoints name this global, so that it need not be reported."""
    if item.module in _BUILTINS:
        return item.name in _SAFE_BUILTINS or item.name == "getattr"
    if is_numpy(item) or is_dtype(item) or item in _KNOWN:
        return True
    if item.module == "torch" and item.name.endswith("Storage"):
        return True
    return is_class(item) and f"{item.module}.".startswith(_KNOWN_PACKAGES)


def is_harmless(item: Global) -> bool:
    """Return whether a global is, by its name, a class of a package whose classes contain data."""
    is_data = is_class(item) or _is_memory_format(item)
    return is_data and item.module.partition(".")[0] in _HARMLESS_PACKAGES


def is_member(owner: Any, name: Any) -> bool:
    """Return whether a name can be that of a member of a class whose package contains data.

    Hidden names are none: they lead from a class to its functions' modules.
    """
    if not isinstance(owner, Global) or "." in owner.name or can_run_code(owner):
        return False
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        return False
    return is_class(owner) and (is_known(owner) or is_harmless(owner))


def is_class(item: Global) -> bool:
    """Return whether a name is written like a class's, not a function's."""
    return item.name.lstrip("_")[:1].isupper()
