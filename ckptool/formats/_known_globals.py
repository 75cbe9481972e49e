"""The classes and functions that real checkpoints name in their pickles.

Seen in files by torch 2.1 to 2.13, torchao 0.18, accelerate, Lightning, torchtitan, verl,
Megatron-core 0.12 to 0.20, nvidia-resiliency-ext, DeepSpeed 0.19 and ByteCheckpoint 0.0.2, or on
torch's own ``weights_only`` list. None is ever imported or called.
"""

from __future__ import annotations

from ckptool.formats._pickle import Global
from ckptool.formats._values import is_dtype

_PLAIN = {
    "argparse": "Namespace",
    "collections": "OrderedDict Counter defaultdict",
    "pathlib": "Path PosixPath PurePosixPath WindowsPath PureWindowsPath",
    "pathlib._local": "PosixPath WindowsPath",
    "datetime": "datetime date timedelta timezone",
    "types": "SimpleNamespace",
    "signal": "Signals",
    "_io": "BytesIO",
    "_codecs": "encode",
    "copyreg": "_reconstructor",
    "numpy": "ndarray dtype",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
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


def is_known(item: Global) -> bool:
    """Whether real checkpoints name this global, so that naming it is nothing to report."""
    if item.module in ("builtins", "__builtin__"):
        return item.name in _BUILTINS
    if is_dtype(item) or (item.module == "torch" and item.name.endswith("Storage")):
        return True
    within = (item.module == top or item.module.startswith(f"{top}.") for top in _KNOWN_PACKAGES)
    return str(item) in _KNOWN or any(within)
