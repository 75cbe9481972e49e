"""The classes and functions that real checkpoints name in their pickles.

Seen in files by torch 2.1 to 2.13, torchao 0.18, accelerate, Lightning, torchtitan, verl,
Megatron-core 0.12 to 0.20, nvidia-resiliency-ext, DeepSpeed 0.19 and ByteCheckpoint 0.0.2, or on
torch's own ``weights_only`` list. None is ever imported or called.
"""

from __future__ import annotations

from ckptool.formats._numpy_records import is_numpy
from ckptool.formats._pickle import Global
from ckptool.formats._values import is_dtype

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
